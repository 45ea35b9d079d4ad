"""The rules of ainb's contract v2 that a plugin is tried by: see runner/conformance/rules.py."""

from __future__ import annotations

import binascii
from typing import Any

from runner.conformance import rpc
from runner.conformance.rules import (
    CALL_MISSING,
    ENDS_WITH_STDIN,
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
    in_pieces,
    long_request,
    mismatch,
    not_blank,
    numbered,
)
from runner.contracts.ainb.calls import CLI_DISPATCH, RENDER
from runner.contracts.ainb.declared import declared_by
from runner.contracts.ainb.handshake import INIT
from runner.contracts.ainb.messages import BODY_LIMIT, RULES
from runner.contracts.ainb.terms import ABI_VERSION
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.framing import HeaderFraming
from runner.protocol.header_frames import header_frame

_FLOOD = 64  # keys at once
_DENIED = -32001

_PARAMS = {"manifest_path": "$manifest", "granted_capabilities": "$granted", "abi_version": ABI_VERSION}
_HANDSHAKE = rpc.ask(INIT, _PARAMS, dict, keep=(("about", "result"),))
_NAMED = {"name": not_blank, "version": not_blank}
_UNKNOWN = "plugin/trial_no_such_method"
_ALIVE = rpc.refused(_UNKNOWN, {}, int, "#alive", alone=True)
_EVENT, _KEY = "plugin/handle_event", "plugin/handle_key"
_COLOUR = (None, {"r": int, "g": int, "b": int})
_SCREEN, _COMMAND = {"needs": ("screen",)}, {"needs": ("namespace",)}


def _base64(value: Any) -> str:
    if isinstance(value, list):
        return "writers have to send base64, and this is an array"
    try:
        raw = binascii.a2b_base64(value, strict_mode=True)
    except (ValueError, TypeError, AttributeError):
        return "it is not base64"
    return "" if binascii.b2a_base64(raw, newline=False) == value.encode() else "it is not base64"


def _status(value: Any) -> str:
    return "" if type(value) is int and -(2**31) <= value < 2**31 else "it is not an integer of 32 bits"


_RAN = {"stdout": _base64, "stderr": _base64, "exit_code": _status}


def _cells(value: Any) -> str:
    shape = {"symbol": str, "fg?": _COLOUR, "bg?": _COLOUR, "modifier?": int}
    for number, cell in enumerate(value if isinstance(value, list) else [None]):
        if not isinstance(cell, list) or len(cell) != 2:
            return f"{number}: it has to be a pair of a place and a cell"
        if fault := mismatch({"x": int, "y": int}, cell[0]) or mismatch(shape, cell[1]):
            return f"{number}: {fault}"
    return ""


def _is_inside(buffer: Any) -> str:
    places = [cell[0] for cell in buffer["cells"]]
    width, height = buffer["width"], buffer["height"]
    out = [each for each in places if not (0 <= each["x"] < width and 0 <= each["y"] < height)]
    return f"the cell at {out[0]} is outside of it" if out else ""


def _are_equal(known: Any) -> str:
    first, second = known.values()
    return "" if first == second else "two renders of the same screen differ"


_BUFFER = {"buffer": {"width": int, "height": int, "cells": _cells}}


def _render(width: int, height: int, as_id: str = "#1", **see: Any) -> tuple[Step, ...]:
    params = {"viewport": {"width": width, "height": height}, "generation": 0}
    return rpc.ask(RENDER, params, _BUFFER, as_id, **see)


def _pressed(generation: int) -> dict[str, Any]:
    key = {"code": {"type": "esc"}, "mods": 0, "kind": "press"}
    return {"screen_id": "trial", "key": key, "generation": generation}


def _dispatch(namespace: str, argv: Any) -> dict[str, Any]:
    return {"namespace": namespace, "argv": argv}


def _reply(value: Any) -> Any:
    """A host without grants: a plugin has to live with that."""
    results: dict[str, Any] = {
        "host/snapshot/get": {"payload": None, "version": 0},
        "host/snapshot/subscribe": {},
    }
    answer = rpc.no_such_method(value)
    if value.get("method") in results:
        del answer["error"]
        return {**answer, "result": results[value["method"]]}
    if str(value.get("method")).startswith("host/"):
        answer["error"] = {"code": _DENIED, "message": "capability denied: this is a trial"}
    return answer


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {"manifest": "/dev/null/manifest.toml", "granted": []}
    if plugin is not None:
        declared = declared_by(plugin)
        known |= {"manifest": plugin.manifest, "granted": list(plugin.capabilities)}
        known |= {"id": plugin.id, "own version": plugin.version}
        if declared.screens:
            known["screen"] = declared.screens[0]
        if declared.cli_namespaces:
            known["namespace"] = declared.cli_namespaces[0]
    if call is not None and call.kind == "tool":
        argv = call.input.get("argv", []) if isinstance(call.input, dict) else []
        known |= {"tool": call.name, "namespace": call.name, "argv": argv}
    return known


_RULES = numbered(
    "ainb",
    "plugin contract v2",
    ("plugin/init is answered with a name and a version.", "§4.1", rpc.ask(INIT, _PARAMS, _NAMED), FIRST),
    ("The name is that of manifest.toml.", "§1", Check("about", {"name?": "$id"})),
    ("The version is that of manifest.toml.", "§1", Check("about", {"version?": "$own version"})),
    rpc.unknown_method("§3", _UNKNOWN, {}),
    (
        "Before plugin/init, a method that does not exist is answered with the error -32601.",
        "§10, method dispatch",
        rpc.refused(_UNKNOWN, {}, -32601),
        FIRST,
    ),
    rpc.unanswered("§3", "plugin/trial_notice", {}, _ALIVE),
    rpc.unanswered("§4.1", _EVENT, {"topic": "trial.topic", "payload": ""}, _ALIVE, _EVENT),
    rpc.unanswered("§5.2", _KEY, _pressed(1000), _ALIVE, _KEY),
    (
        "plugin/render is answered with a buffer of cells.",
        "§5.1",
        _render(80, 24, keep=(("buffer", "result.buffer"),)),
        _SCREEN,
    ),
    ("All cells are inside of their buffer.", "§5.1", Check("buffer", _is_inside), _SCREEN),
    (
        "The same screen is rendered the same twice.",
        "§10, render determinism",
        (
            *_render(40, 12, "#1", keep=(("first render", "result.buffer"),)),
            *_render(40, 12, "#2", keep=(("second render", "result.buffer"),)),
            Check(("first render", "second render"), _are_equal),
        ),
        _SCREEN,
    ),
    ("A screen without any cell can be rendered.", "§5.1", _render(0, 0), _SCREEN),
    (
        "plugin/cli_dispatch is answered with stdout and stderr in base64, and an exit_code.",
        "§4.1 and §5.3",
        rpc.ask(CLI_DISPATCH, _dispatch("$namespace", ["--help"]), _RAN),
        _COMMAND,
    ),
    (
        "A command that succeeds has the exit_code 0.",
        "§10, CLI dispatch capture",
        rpc.ask(CLI_DISPATCH, _dispatch("$tool", "$argv"), {**_RAN, "exit_code": 0}),
        {"needs": ("tool",)},
    ),
    (
        "Parameters that cannot be read are answered with an error.",
        "§3",
        rpc.refused(CLI_DISPATCH, {"namespace": 5, "argv": 5}),
        _COMMAND,
    ),
    in_pieces("§2", rpc.request(_UNKNOWN, {}), 25),
    long_request("§2 and §8", rpc.request(_UNKNOWN, {"pad": PAD}), BODY_LIMIT),
    (
        f"After {_FLOOD} keys at once, a request is answered.",
        "§4.1",
        (*(Say(rpc.notice(_KEY, _pressed(number))) for number in range(_FLOOD)), *_ALIVE),
    ),
    rpc.not_json("JSON-RPC 2.0 §5.1", header_frame(b"this is not JSON"), rpc.refused(_UNKNOWN, {})),
    ("plugin/shutdown is answered.", "§4.1", rpc.ask("plugin/shutdown", {}, object), OWN),
    (
        "After plugin/shutdown and the end of stdin, the plugin exits with status 0.",
        "§10, graceful shutdown",
        (Say(rpc.request("plugin/shutdown", {})), See("#1"), CloseInput(), SeeExit()),
        OWN,
    ),
    ("The end of stdin ends the plugin.", "§2, clean EOF", ENDS_WITH_STDIN, OWN),
    *rpc.watched("stdout carries nothing but frames of JSON, of at most 16 MiB.", "§2", "§3"),
)

BOOK = RuleBook(
    framing=HeaderFraming(RULES),
    rules=_RULES,
    handshake=_HANDSHAKE,
    facts=_facts,
    missing={
        "screen": "no manifest declares a screen of it",
        "namespace": "no manifest declares a command of it",
        "buffer": "there was no render",
        "tool": CALL_MISSING,
    },
    **{**rpc.FIELDS, "reply": _reply},
)
