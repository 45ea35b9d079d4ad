"""The rules of nexo's contract that a plugin is tried by: see runner/conformance/rules.py."""

from __future__ import annotations

from typing import Any

from runner.conformance.rules import (
    CALL_MISSING,
    FIRST,
    OWN,
    PAD,
    Check,
    CloseInput,
    RuleBook,
    Say,
    See,
    SeeExit,
    Step,
    ask,
    no_such_method,
    not_blank,
    notice,
    numbered,
    refused,
    request,
    rpc_asks,
    rpc_shape,
    sort_rpc,
    within,
)
from runner.contracts.nexo.dialect import FRAME_LIMIT
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.frames import line
from runner.protocol.framing import LineFraming

_DOC = "Plugin Contract"
_FLOOD = 64  # the depth of the host's queue
_LONG = 4096  # bytes of a line, by the contract's text

_KEPT = (("plugin", "result.manifest.plugin"), ("advertised", "result.tools"))
_INITIALIZE = {"nexo_version": "0.1.5"}
_HANDSHAKE: tuple[Step, ...] = ask("initialize", _INITIALIZE, dict, keep=_KEPT)
_ECHOED = {"manifest": {"plugin": {"id": not_blank}}}
_TOOL = {"name": not_blank, "description": str, "input_schema": dict}
_CALLED, _DECLARED = {"needs": ("tool",)}, {"needs": ("declared tools",)}
_ALIVE = refused("trial.no_such_method", {}, int, "#alive", alone=True)
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
    return "" if isinstance(value, list) and value else "it has to be an array that is not empty"


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {"plugin id": "trial" if plugin is None else plugin.id}
    if plugin is not None:
        known |= {"id": plugin.id, "own names": _namespaced((f"{plugin.id}_", f"ext_{plugin.id}_"))}
        if tools := dict(plugin.exports).get("tools", ()):
            known |= {"declared tools": _declared(tools)}
        if hooks := dict(plugin.exports).get("hooks", ()):
            known |= {"hook": hooks[0]}
    if call is not None:
        known |= {"tool": call.name, "input": {} if call.input is None else call.input}
    return known


_NO_MANIFEST = "a command has no manifest to compare with"

_RULES = numbered(
    "nexo",
    (
        "initialize is answered with a manifest that has a plugin.id.",
        f"{_DOC} §4.1",
        ask("initialize", _INITIALIZE, _ECHOED),
        FIRST,
    ),
    ("plugin.id is that of the manifest.", f"{_DOC} §4.1", (Check("plugin", {"id?": "$id"}),)),
    (
        "tools is there and not empty, if the manifest declares tools.",
        f"{_DOC} §4.1.1",
        (Check("advertised", _not_empty),),
        _DECLARED,
    ),
    (
        "Each tool has a name, a description and an input_schema.",
        f"{_DOC} §4.1.1",
        (Check("advertised", [_TOOL]),),
    ),
    (
        "Every tool is one that the manifest declares.",
        f"{_DOC} §4.1.1",
        (Check("advertised", "$declared tools"),),
        _DECLARED,
    ),
    ("Names of tools begin with the plugin's id.", f"{_DOC} §4.1.1", (Check("advertised", "$own names"),)),
    (
        "A request for a method that does not exist is answered with the error -32601.",
        f"{_DOC} §7",
        refused("trial.no_such_method", {}, -32601),
    ),
    (
        "An id that is a string comes back as it was.",
        f"{_DOC} §3",
        refused("trial.no_such_method", {}, int, "trial-1"),
    ),
    (
        "A notification that does not exist is not answered.",
        f"{_DOC} §3",
        (Say(notice("trial.notice", {})), *_ALIVE),
    ),
    (
        "broker.event is not answered.",
        f"{_DOC} §5.1",
        (Say(notice("broker.event", {"topic": "trial.topic", "event": _EVENT})), *_ALIVE),
    ),
    (
        "tool.invoke of a tool that does not exist is answered with the error -33401.",
        f"{_DOC} §5.t",
        refused("tool.invoke", _invoke("trial_no_such_tool", {}), -33401),
        _DECLARED,
    ),
    (
        "tool.invoke is answered with a result.",
        f"{_DOC} §5.t",
        ask("tool.invoke", _invoke("$tool", "$input"), object),
        _CALLED,
    ),
    (
        "Arguments of the wrong type are answered, with a result or an error.",
        f"{_DOC} §5.t",
        (Say(request("tool.invoke", _invoke("$tool", 5))), See("#1")),
        _CALLED,
    ),
    (
        "hook.on_hook is answered with an object.",
        f"{_DOC} §5.z",
        ask("hook.on_hook", {"plugin_id": "$plugin id", "hook_name": "$hook", "event": {}}, dict),
        {"needs": ("hook",)},
    ),
    (
        "A request that arrives in pieces is answered.",
        f"{_DOC} §1",
        (Say(request("trial.no_such_method", {}), pieces=7), See("#1")),
    ),
    (
        f"A request of {_LONG} bytes is answered.",
        f"{_DOC} §1",
        (Say(request("trial.no_such_method", {"pad": PAD}), size=_LONG), See("#1")),
    ),
    (
        f"{_FLOOD} requests at once are all answered.",
        f"{_DOC} §8",
        (
            *(Say(request("trial.no_such_method", {}, f"#{number}")) for number in range(_FLOOD)),
            *(See(f"#{number}") for number in range(_FLOOD)),
        ),
    ),
    (
        "A line that is not JSON does not end the plugin.",
        f"{_DOC} §7",
        (Say(b"this is not JSON\n"), *refused("trial.no_such_method", {})),
    ),
    (
        "A line of JSON that is no message does not end the plugin.",
        f"{_DOC} §7",
        (Say(b"[]\n"), *refused("trial.no_such_method", {})),
    ),
    (
        "shutdown is answered with ok.",
        f"{_DOC} §4.2",
        ask("shutdown", {"reason": "trial"}, {"ok": True}),
        OWN,
    ),
    (
        "After the answer to shutdown, the plugin exits with status 0.",
        f"{_DOC} §4.2",
        (Say(request("shutdown", {"reason": "trial"})), See("#1"), SeeExit()),
        OWN,
    ),
    ("The end of stdin ends the plugin.", f"{_DOC} §1", (CloseInput(), SeeExit(())), OWN),
    ("Each line on stdout is one JSON value, of at most 1 MiB.", f"{_DOC} §1", "message"),
    ("Each message is one of JSON-RPC 2.0.", f"{_DOC} §3", "shape"),
    ("Each answer is to a request, and there is one.", f"{_DOC} §3", "answer"),
)

BOOK = RuleBook(
    framing=LineFraming(FRAME_LIMIT),
    encode=line,
    rules=_RULES,
    handshake=_HANDSHAKE,
    sort=sort_rpc,
    asks=rpc_asks,
    shape=rpc_shape,
    reply=no_such_method,
    facts=_facts,
    missing={
        "id": _NO_MANIFEST,
        "own names": _NO_MANIFEST,
        "declared tools": "no manifest declares tools of it",
        "advertised": "its answer to initialize has no tools",
        "plugin": "its answer to initialize has no manifest",
        "hook": "no manifest declares a hook of it",
        "tool": CALL_MISSING,
    },
)
