"""What hosts of nexo plugins have to keep: the stand-in plugin that they start, and the rules."""

from __future__ import annotations

from typing import Any, Final

from runner.conformance import host_checks as check
from runner.conformance.rules import not_blank

_MANIFEST: Final = """\
manifest_version = 2

[plugin]
id = "stand_in"
version = "0.1.0"
name = "stand_in"
description = "A plugin that watches its host."
min_nexo_version = ">=0.1"

[plugin.entrypoint]
command = "./plugin"
args = ["--stand-in"]
env = { STAND_IN = "1" }

[plugin.extends]
tools = ["stand_in_echo"]
"""
_TOOL: Final = {"name": "stand_in_echo", "description": "Answers.", "input_schema": {"type": "object"}}
_INVOKED: Final = {"plugin_id": "stand_in", "tool_name": "stand_in_echo", "args": object, "agent_id": str}
_INVOKE: Final = {**check.REQUEST, "params": _INVOKED}
_INITIALIZE: Final = {**check.REQUEST, "params": {"nexo_version": not_blank}}
_EVENT: Final = {**check.NOTIFICATION, "params": {"topic": not_blank, "event": dict}}
_SHUTDOWN: Final = {**check.REQUEST, "params": {"reason": str}}


def _initialized(plugin_id: str) -> Any:
    manifest = {"plugin": {"id": plugin_id, "version": "0.1.0", "name": "stand_in"}}
    return check.result_of({"manifest": manifest, "server_version": "stand_in-0.1.0", "tools": [_TOOL]})


_ROWS: Final[tuple[check.Row, ...]] = (
    *check.common_rules(wire="§1", large="§1", unknown="§6", start="§4.1", end="§4.2"),
    ("Each message is one of JSON-RPC 2.0.", "§3", check.fields("*", check.JSON_RPC)),
    ("The first message is initialize.", "§4.1", check.first("initialize")),
    ("initialize has the host's version.", "§4.1", check.fields("initialize", _INITIALIZE)),
    ("No id of a request is used again.", "§3", check.unique_ids()),
    ("tool.invoke has plugin, tool, agent and arguments.", "§5.t", check.fields("tool.invoke", _INVOKE)),
    ("broker.event is a notification with topic and event.", "§5.1", check.fields("broker.event", _EVENT)),
    ("A request that the host cannot serve gets an error.", "§5.2", check.answers(-32601, -32602, -32603)),
    ("A tool's error does not end the plugin.", "§5.t", check.says_goodbye("shutdown", "error")),
    ("A plugin with another id is not used.", "§4.1", check.refuses("tool.invoke")),
    ("The plugin gets the arguments of its manifest.", "§2", check.started("--stand-in")),
    ("The plugin gets the variables of its manifest.", "§2", check.has_variables()),
    ("shutdown is the last request.", "§4.2", check.says_goodbye("shutdown")),
    ("shutdown is a request with a reason.", "§4.2", check.fields("shutdown", _SHUTDOWN)),
    ("After its answer to shutdown a plugin has a second.", "§4.2", check.grace(1)),
    ("A plugin that does not exit is ended.", "§4.2", check.ends_it()),
)

STAND_IN: Final = check.StandIn(
    framing="lines",
    files={"plugin.toml": _MANIFEST},
    program="plugin",
    about="Its id is stand_in, and it has one tool, stand_in_echo, which takes any object.",
    replies={
        "initialize": check.StandInReply(
            _initialized("stand_in"), opening=True, other={"impostor": _initialized("somebody_else")}
        ),
        "tool.invoke": check.StandInReply(
            check.result_of({"content": [{"type": "text", "text": "$large"}], "is_error": False}),
            call=True,
            other={"error": check.error_of(-33403)},
        ),
        "shutdown": check.StandInReply(check.result_of({"ok": True}), exits=True),
        "*": check.StandInReply(check.error_of(-32601)),
    },
    rules=check.number_rules("nexo", "Plugin Contract", _ROWS),
    large=60_000,  # a line may be as long as what a pipe holds, which is 64 KiB
    ask={"jsonrpc": "2.0", "id": 900, "method": "memory.recall", "params": {"agent_id": "a", "query": "q"}},
    extra=({"jsonrpc": "2.0", "method": "broker.publish", "params": {"topic": "not.allowed", "event": {}}},),
)
