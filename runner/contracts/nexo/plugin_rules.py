"""The rules of nexo's contract that a plugin is tried by: see runner/conformance/rules.py."""

from __future__ import annotations

from typing import Any

from runner.conformance import rpc
from runner.conformance.rules import (
    CALL_MISSING,
    ENDS_WITH_STDIN,
    FIRST,
    OWN,
    PAD,
    Check,
    RuleBook,
    Say,
    See,
    SeeExit,
    called,
    in_pieces,
    long_request,
    not_blank,
    numbered,
    within,
)
from runner.contracts.nexo import exports
from runner.contracts.nexo.dialect import FRAME_LIMIT
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.framing import LineFraming

_FLOOD = 64  # the depth of the host's queue
_LONG = 4096  # bytes of a line, by the contract's text

_KEPT = (
    ("initialized", "result"),
    ("plugin", "result.manifest.plugin"),
    ("advertised", "result.tools"),
)
_INITIALIZE = {"nexo_version": "0.1.5"}
_HANDSHAKE = rpc.ask("initialize", _INITIALIZE, dict, keep=_KEPT)
_ECHOED = {"manifest": {"plugin": {"id": not_blank}}}
_TOOL = {"name": not_blank, "description": str, "input_schema": dict}
_CALLED, _DECLARED = {"needs": ("tool",)}, {"needs": ("declared tools",)}
_UNKNOWN = "trial.no_such_method"
_ALIVE = rpc.refused(_UNKNOWN, {}, int, "#alive", alone=True)
_EVENT = {"topic": "trial.topic", "source": "trial", "payload": {}}


def _invoke(tool: str, args: Any) -> dict[str, Any]:
    return {"plugin_id": "$plugin id", "tool_name": tool, "args": args, "agent_id": "trial"}


def _names(tools: Any) -> list[Any]:
    listed = tools if isinstance(tools, list) else ()
    return [each.get("name") for each in listed if isinstance(each, dict)]


def _namespaced(prefixes: tuple[str, ...]) -> Any:
    def check(tools: Any) -> str:
        odd = [each for each in _names(tools) if not str(each).startswith(prefixes)]
        return f"{odd[0]!r:.80} does not begin with {' or '.join(prefixes)}" if odd else ""

    return check


def _declared(names: tuple[str, ...]) -> Any:
    check = within(names)
    return lambda tools: check(_names(tools))


def _not_empty(value: Any) -> str:
    return "" if isinstance(value, list) and value else "it is no array with tools"


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {"plugin id": "trial" if plugin is None else plugin.id}
    if plugin is not None:
        known |= {"id": plugin.id, "own names": _namespaced((f"{plugin.id}_", f"ext_{plugin.id}_"))}
        if tools := dict(plugin.exports).get(exports.ADVERTISABLE, ()):
            known |= {"declared tools": _declared(tools)}
        if hooks := dict(plugin.exports).get("hooks", ()):
            known |= {"hook": hooks[0]}
    return known | called(call)


_RULES = numbered(
    "nexo",
    "Plugin Contract",
    (
        "initialize is answered with a manifest that has a plugin.id.",
        "§4.1",
        rpc.ask("initialize", _INITIALIZE, _ECHOED),
        FIRST,
    ),
    ("plugin.id is that of the manifest.", "§4.1", Check("plugin", {"id?": "$id"})),
    (
        "tools is there and not empty, if the manifest declares tools.",
        "§4.1.1",
        Check("initialized", {"tools": _not_empty}),
        _DECLARED,
    ),
    ("Each tool has a name, a description and an input_schema.", "§4.1.1", Check("advertised", [_TOOL])),
    (
        "Every tool is one that the manifest declares.",
        "§4.1.1",
        Check("advertised", "$declared tools"),
        _DECLARED,
    ),
    ("Names of tools begin with the plugin's id.", "§4.1.1", Check("advertised", "$own names")),
    rpc.unknown_method("§7", _UNKNOWN, {}),
    ("An id that is a string comes back as it was.", "§3", rpc.refused(_UNKNOWN, {}, int, "trial-1")),
    rpc.unanswered("§3", "trial.notice", {}, _ALIVE),
    rpc.unanswered("§5.1", "broker.event", {"topic": "trial.topic", "event": _EVENT}, _ALIVE, "broker.event"),
    (
        "tool.invoke of a tool that does not exist is answered with the error -33401.",
        "§5.t",
        rpc.refused("tool.invoke", _invoke("trial_no_such_tool", {}), -33401),
        _DECLARED,
    ),
    (
        "tool.invoke is answered with a result.",
        "§5.t",
        rpc.ask("tool.invoke", _invoke("$tool", "$input"), object),
        _CALLED,
    ),
    (
        "Arguments of the wrong type are answered, with a result or an error.",
        "§5.t",
        (Say(rpc.request("tool.invoke", _invoke("$tool", 5))), See("#1")),
        _CALLED,
    ),
    (
        "hook.on_hook is answered with an object.",
        "§5.z",
        rpc.ask("hook.on_hook", {"plugin_id": "$plugin id", "hook_name": "$hook", "event": {}}, dict),
        {"needs": ("hook",)},
    ),
    in_pieces("§1", rpc.request(_UNKNOWN, {}), 7),
    long_request("§1", rpc.request(_UNKNOWN, {"pad": PAD}), _LONG),
    rpc.flood("§8", _FLOOD, _UNKNOWN, {}),
    rpc.not_json("§7", b"this is not JSON\n", rpc.refused(_UNKNOWN, {})),
    (
        "A line of JSON that is no message does not end the plugin.",
        "§7",
        (Say(b"[]\n"), *rpc.refused(_UNKNOWN, {})),
    ),
    ("shutdown is answered with ok.", "§4.2", rpc.ask("shutdown", {"reason": "trial"}, {"ok": True}), OWN),
    (
        "After the answer to shutdown, the plugin exits with status 0.",
        "§4.2",
        (Say(rpc.request("shutdown", {"reason": "trial"})), See("#1"), SeeExit()),
        OWN,
    ),
    ("The end of stdin ends the plugin.", "§1", ENDS_WITH_STDIN, OWN),
    *rpc.watched("Each line on stdout is one JSON value, of at most 1 MiB.", "§1", "§3"),
)

BOOK = RuleBook(
    framing=LineFraming(FRAME_LIMIT),
    rules=_RULES,
    handshake=_HANDSHAKE,
    facts=_facts,
    **rpc.FIELDS,
    missing={
        "declared tools": "no manifest declares tools of it",
        "advertised": "its answer to initialize has no tools",
        "plugin": "its answer to initialize has no manifest",
        "hook": "no manifest declares a hook of it",
        "tool": CALL_MISSING,
    },
)
