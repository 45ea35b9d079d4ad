"""The rules of kaged's interface that a plugin is tried by: see runner/conformance/rules.py."""

from __future__ import annotations

from typing import Any

import runner
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
    contains,
    in_pieces,
    long_request,
    not_blank,
    numbered,
    within,
)
from runner.contracts.kaged.calls import KEY
from runner.contracts.kaged.declared import declared_by
from runner.contracts.kaged.dialect import FRAME_LIMIT
from runner.contracts.kaged.handshake import make_params
from runner.contracts.kaged.hooks import PREFIX
from runner.contracts.kaged.terms import API_VERSION
from runner.plugin import Plugin
from runner.protocol.dialect import Call, Setting
from runner.protocol.framing import LineFraming

_DOC = "Plugin Interface Reference"
_RPC, _MANIFEST = f"{_DOC}, JSON-RPC Protocol", f"{_DOC}, Plugin Manifest"
_FLOOD = 100  # requests at once

_PROJECTS = {"projects": ["trial"]}
_INITIALIZE = {  # of a command, which has no manifest
    "daemon_version": runner.__version__,
    "api_version": API_VERSION,
    "plugin_name": "trial",
    "storage_available": False,
    "config": {},
    **_PROJECTS,
}
_ANSWER = {
    "name": str,
    "version": not_blank,
    "api_version": int,
    "methods": [str],
    "notifications": [str],
    "capabilities_used": [str],
}
_HANDSHAKE = (
    *rpc.ask("initialize", "$params of initialize", dict, keep=(("about", "result"),)),
    Say(rpc.notice("initialized", {})),
)
_CONTEXT = {
    "operator_id": "trial",
    "project_id": "trial",
    "agent_path": "primary",
    "session_id": "trial",
    "request_id": "trial",
}
_UNKNOWN = "trial.no_such_method"
_ALIVE = rpc.refused(_UNKNOWN, {}, int, "#alive", alone=True)
_CALLED = {"needs": ("method",)}


def _unreserved(methods: Any) -> str:
    listed = methods if isinstance(methods, list) else ()
    odd = [each for each in listed if str(each).startswith(("kaged.", "system."))]
    return f"{odd[0]!r:.80} begins with a reserved prefix" if odd else ""


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {"params of initialize": _INITIALIZE}
    if plugin is not None:
        declared = declared_by(plugin)
        known |= {"id": plugin.id, "own version": plugin.version}
        known |= {"declared methods": contains(declared.methods)}
        known |= {"declared notifications": within(declared.notifications)}
        known |= {"declared capabilities": within(plugin.capabilities)}
        if "on_session_start" in declared.hooks:
            known["hook"] = f"{PREFIX}on_session_start"
    if call is not None:
        known["method"] = call.name
        if call.kind == "tool" and plugin is not None and not call.name.startswith(f"{plugin.id}."):
            known["method"] = f"{plugin.id}.{call.name}"
        elif call.kind == "hook":
            known["method"] = PREFIX + call.name
        known["params"] = {**(call.input if isinstance(call.input, dict) else {}), KEY: _CONTEXT}
    return known


def _given(setting: Setting) -> dict[str, Any]:
    return {"params of initialize": {**make_params(setting, declared_by(setting.plugin)), **_PROJECTS}}


_RULES = numbered(
    "kaged",
    _DOC,
    (
        "initialize is answered with name, version, api_version and three arrays of names.",
        _RPC,
        rpc.ask("initialize", "$params of initialize", _ANSWER),
        FIRST,
    ),
    ("name is that of the manifest.", _MANIFEST, Check("about", {"name?": "$id"})),
    ("version is that of the manifest.", _MANIFEST, Check("about", {"version?": "$own version"})),
    (f"api_version is {API_VERSION}, as asked.", _RPC, Check("about", {"api_version?": API_VERSION})),
    (
        "methods has every method of the manifest.",
        _MANIFEST,
        Check("about", {"methods?": "$declared methods"}),
    ),
    ("No method begins with kaged. or system.", _RPC, Check("about", {"methods?": _unreserved})),
    (
        "notifications has nothing that the manifest does not list.",
        _MANIFEST,
        Check("about", {"notifications?": "$declared notifications"}),
    ),
    (
        "capabilities_used has nothing that the manifest does not list.",
        f"{_DOC}, Capabilities",
        Check("about", {"capabilities_used?": "$declared capabilities"}),
    ),
    ("initialized is not answered.", _RPC, _ALIVE, OWN),
    ("health.check is answered with a result.", _RPC, rpc.ask("health.check", {}, object)),
    rpc.unknown_method("JSON-RPC 2.0 §5.1", _UNKNOWN, {}),
    rpc.unanswered("JSON-RPC 2.0 §4.1", "trial.notice", {}, _ALIVE),
    ("A call is answered with a result.", _RPC, rpc.ask("$method", "$params", object), _CALLED),
    (
        "Parameters of the wrong type are answered, with a result or an error.",
        _RPC,
        (Say(rpc.request("$method", {"": [], KEY: _CONTEXT})), See("#1")),
        _CALLED,
    ),
    (
        "The hook on_session_start is answered with null, or an object whose inject is a text.",
        _MANIFEST,
        rpc.ask("$hook", {KEY: _CONTEXT}, (None, {"inject?": str})),
        {"needs": ("hook",)},
    ),
    in_pieces(_RPC, rpc.request("health.check", {}), 7),
    long_request(_RPC, rpc.request(_UNKNOWN, {"pad": PAD}), FRAME_LIMIT),
    rpc.flood(_RPC, _FLOOD, _UNKNOWN, {}),
    rpc.not_json("JSON-RPC 2.0 §5.1", b"this is not JSON\n", rpc.refused(_UNKNOWN, {})),
    ("shutdown is answered with a result.", _RPC, rpc.ask("shutdown", {}, object), OWN),
    (
        "After shutdown, the plugin exits with status 0.",
        f"{_MANIFEST}, shutdown_timeout_sec",
        (Say(rpc.request("shutdown", {})), See("#1"), SeeExit()),
        OWN,
    ),
    ("The end of stdin ends the plugin.", _RPC, ENDS_WITH_STDIN, OWN),
    *rpc.watched("stdout carries nothing but lines of JSON, of at most 4 MiB.", _RPC, _RPC),
)

BOOK = RuleBook(
    framing=LineFraming(FRAME_LIMIT),
    rules=_RULES,
    handshake=_HANDSHAKE,
    facts=_facts,
    given=_given,
    missing={"hook": "no manifest declares this hook of it", "method": CALL_MISSING},
    **rpc.FIELDS,
)
