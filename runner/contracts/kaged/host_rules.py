"""What hosts of kaged plugins have to keep: the stand-in plugin that they start, and the rules."""

from __future__ import annotations

from typing import Any, Final

from runner.conformance import host_checks as check
from runner.conformance.rules import not_blank

_SHUTDOWN_SECONDS: Final = 2
_MANIFEST: Final = f"""\
name: stand-in
version: 0.1.0
kaged_api: 1
description: A plugin that watches its host.
command: ["./plugin", "--stand-in"]
env: {{STAND_IN: "1"}}
capabilities: ["net:[]"]
tools:
  - name: echo
    description: Answers.
    parameters_schema: {{type: object}}
hooks: [on_session_start]
shutdown_timeout_sec: {_SHUTDOWN_SECONDS}
"""
_TOOL: Final = "stand-in.echo"
_HOOK: Final = "kaged.hook.on_session_start"
_KINDS: Final = ("initialize", "initialized", _TOOL, _HOOK, "health.check", "shutdown", "answer")
_INITIALIZE: Final = {
    "daemon_version": not_blank,
    "api_version": 1,
    "plugin_name": "stand-in",
    "storage_available": bool,
    "projects": [str],
}
_CONTEXT: Final = ("operator_id", "project_id", "agent_path", "session_id", "request_id")
_CALLED: Final = {"id": int, "params": {"_context": dict.fromkeys(_CONTEXT, str)}}


def _initialized(name: str) -> Any:
    about = {"name": name, "version": "0.1.0", "api_version": 1, "methods": [_TOOL]}
    return check.result_of({**about, "notifications": [], "capabilities_used": ["net:[]"]})


_ROWS: Final[tuple[check.Row, ...]] = (
    *check.common_rules(
        wire="JSON-RPC Protocol",
        large="Max message size",
        unknown="JSON-RPC Protocol",
        start="initialize",
        end="shutdown",
    ),
    ("Each message is one of JSON-RPC 2.0.", "JSON-RPC Protocol", check.fields("*", check.JSON_RPC)),
    ("The first message is initialize.", "initialize", check.first("initialize")),
    (
        "initialize has all of its parameters.",
        "initialize",
        check.fields("initialize", {"id": int, "params": _INITIALIZE}),
    ),
    (
        "initialized follows before anything is asked.",
        "initialized",
        check.precedes("initialized", _TOOL, _HOOK, "health.check", given="initialize"),
    ),
    ("initialized is a notification.", "initialized", check.fields("initialized", check.NOTIFICATION)),
    ("Only what the manifest declares is asked.", "Plugin Manifest", check.only(*_KINDS)),
    ("No id of a request is used again.", "JSON-RPC Protocol", check.unique_ids()),
    ("A tool gets the context of the call.", "tools", check.fields(_TOOL, _CALLED)),
    ("A hook gets the context of the session.", "hooks", check.fields(_HOOK, _CALLED)),
    ("A request that no host serves gets -32601.", "JSON-RPC Protocol", check.answers(-32601)),
    ("A plugin with another name is not used.", "initialize", check.refuses(_TOOL, _HOOK)),
    ("A tool's error does not end the plugin.", "JSON-RPC Protocol", check.says_goodbye("shutdown", "error")),
    ("The plugin starts in its folder, with its own words.", "command", check.started("--stand-in", up=0)),
    ("The plugin gets the variables of its manifest.", "env", check.has_variables()),
    ("shutdown is the last request.", "shutdown", check.says_goodbye("shutdown")),
    ("shutdown is a request.", "shutdown", check.fields("shutdown", {"id": int})),
    ("A plugin has shutdown_timeout_sec to exit.", "shutdown", check.grace(_SHUTDOWN_SECONDS, "shutdown")),
    ("A plugin that does not exit is ended.", "shutdown", check.ends_it()),
)

_CALL: Final = check.StandInReply(
    check.result_of({"text": "$large"}), call=True, other={"error": check.error_of(-32000)}
)

STAND_IN: Final = check.StandIn(
    framing="lines",
    files={"kaged-plugin.yaml": _MANIFEST},
    program="plugin",
    about="It is the plugin stand-in with the tool echo, for any object, and the hook on_session_start.",
    replies={
        "initialize": check.StandInReply(
            _initialized("stand-in"), opening=True, other={"impostor": _initialized("somebody-else")}
        ),
        _TOOL: _CALL,
        _HOOK: check.StandInReply(check.result_of({}), call=True, other={"error": check.error_of(-32000)}),
        "health.check": check.StandInReply(check.result_of({"status": "ok"})),
        "shutdown": check.StandInReply(check.result_of({"status": "ok"}), exits=True),
        "*": check.StandInReply(check.error_of(-32601)),
    },
    rules=check.number_rules("kaged", "Plugin Interface Reference", _ROWS),
    ask={"jsonrpc": "2.0", "id": 900, "method": "stand_in.unheard_of", "params": {}},
    extra=({"jsonrpc": "2.0", "method": "stand-in.unheard_of", "params": {}},),
)
