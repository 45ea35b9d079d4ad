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
    Kill,
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
from runner.contracts.ainb.calls import ACTION_INVOKE, CLI_DISPATCH, RENDER
from runner.contracts.ainb.declared import declared_by
from runner.contracts.ainb.handshake import INIT
from runner.contracts.ainb.host.snapshots import EVENT_BUS, covers
from runner.contracts.ainb.messages import BODY_LIMIT, RULES
from runner.contracts.ainb.payload import encode
from runner.contracts.ainb.plugin_watch import WATCHES, SnapshotChunk, make_chunk
from runner.contracts.ainb.terms import ABI_VERSION
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.framing import HeaderFraming
from runner.protocol.header_frames import header_frame

_FLOOD = 64  # keys at once
_DENIED, _TIMED_OUT = -32001, -32002
_ACTION_MILLISECONDS = 5000

_PARAMS = {"manifest_path": "$manifest", "granted_capabilities": "$granted", "abi_version": ABI_VERSION}
_HANDSHAKE = rpc.ask(INIT, _PARAMS, dict, keep=(("about", "result"),))
_NAMED = {"name": not_blank, "version": not_blank}
_TEXT = {"manifest": {"plugin": _NAMED}, "abi_version": ABI_VERSION}  # as the contract's text has it
_UNKNOWN = "plugin/trial_no_such_method"
_ALIVE = rpc.refused(_UNKNOWN, {}, int, "#alive", alone=True)
_EVENT, _KEY = "plugin/handle_event", "plugin/handle_key"
_COLOUR = (None, {"r": int, "g": int, "b": int})
_SCREEN, _COMMAND = {"needs": ("screen",)}, {"needs": ("namespace",)}
_SUBSCRIBER = {"needs": ("subscription",)}
_ACTION = {"action": "$namespace", "payload": "", "timeout_ms": _ACTION_MILLISECONDS}
_BEFORE_CRASH = "plugin/trial_before_crash"


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


def _about(key: str, value: str) -> Check:
    """What both forms of the answer to plugin/init say."""
    return Check("about", {f"{key}?": value, "manifest?": {"plugin?": {f"{key}?": value}}})


def _event(payload: bytes) -> Say:
    return Say(rpc.notice(_EVENT, {"topic": "$subscription", "payload": encode(payload)}))


def _chunk(index: int, *, is_final: bool = False) -> Say:
    return _event(make_chunk(SnapshotChunk(1, index, is_final)))


def _denies(value: Any) -> Any:
    """A host that grants nothing at all."""
    return {**rpc.no_such_method(value), "error": {"code": _DENIED, "message": "capability denied: all"}}


def _reply(value: Any) -> Any:
    """A host without grants, and with actions that take too long: a plugin has to live with that."""
    results: dict[str, Any] = {
        "host/snapshot/get": {"payload": None, "version": 0},
        "host/snapshot/subscribe": {},
    }
    answer = rpc.no_such_method(value)
    if value.get("method") in results:
        del answer["error"]
        return {**answer, "result": results[value["method"]]}
    if value.get("method") == ACTION_INVOKE:
        answer["error"] = {"code": _TIMED_OUT, "message": "action timed out: this is a trial"}
    elif str(value.get("method")).startswith("host/"):
        answer["error"] = {"code": _DENIED, "message": "capability denied: this is a trial"}
    return answer


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {"manifest": "/dev/null/manifest.toml", "granted": []}
    if plugin is not None:
        declared = declared_by(plugin)
        known |= {"manifest": plugin.manifest, "granted": list(plugin.capabilities)}
        known |= {"id": plugin.id, "own version": plugin.version, "declared": declared}
        bus = declared.lists.get(EVENT_BUS) if declared.allows(EVENT_BUS) else ()
        topics = [topic for topic in declared.subscribes if covers(bus, topic)]
        if topics:
            known["subscription"] = topics[0]
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
    (
        "plugin/init is answered with a name and a version.",
        "§4.1",
        rpc.ask(INIT, _PARAMS, (_NAMED, _TEXT)),
        FIRST,
    ),
    ("The name is that of manifest.toml.", "§1", _about("name", "$id")),
    ("The version is that of manifest.toml.", "§1", _about("version", "$own version")),
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
    (
        "If nothing is granted and each request is denied, plugin/init is answered and the plugin goes on.",
        "§10, capability gating",
        (
            Say(rpc.request(INIT, {**_PARAMS, "granted_capabilities": []})),
            See("#1", ({"result": dict}, {"error": {"code": int}})),
            *_ALIVE,
        ),
        {**FIRST, "reply": _denies},
    ),
    ("It asks its host only for what its manifest has the capability for.", "§9", "capability"),
    ("It asks to read only in folders that its manifest names.", "§10, fs path guard", "path"),
    (
        "What it publishes has a topic that its event_bus covers, and a payload in base64.",
        "§5.3 and §10, snapshot pub/sub",
        "publication",
    ),
    ("The chunks that it publishes follow each other, from 0 on.", "§6", "chunks"),
    ("host/log has one of the five levels, and a message.", "§10, log filtering", "log"),
    (
        "An action is answered with a payload in base64, or with an error.",
        "§10, action timeout",
        (
            Say(rpc.request(ACTION_INVOKE, _ACTION)),
            See("#1", ({"result": {"payload": _base64}}, {"error": {"code": int}})),
        ),
        _COMMAND,
    ),
    (
        "A snapshot in another format does not end a subscriber.",
        "§5.4",
        (_event(b"\xc1 of a trial"), *_ALIVE),
        _SUBSCRIBER,
    ),
    (
        "Chunks do not end a subscriber, with a key among them and without the first one too.",
        "§6 and §10, chunked publish ordering",
        (
            *(_chunk(2), _chunk(0), _chunk(1)),
            Say(rpc.notice(_KEY, _pressed(2000))),
            *(_chunk(2, is_final=True), *_ALIVE),
        ),
        _SUBSCRIBER,
    ),
    (
        "A plugin that was killed can be started again.",
        "§10, crash recovery",
        (*rpc.refused(_BEFORE_CRASH, {}), Kill()),
        {**OWN, "again": _ALIVE},
    ),
)

BOOK = RuleBook(
    framing=HeaderFraming(RULES),
    rules=_RULES,
    handshake=_HANDSHAKE,
    facts=_facts,
    watches=WATCHES,
    missing={
        "screen": "no manifest declares a screen of it",
        "namespace": "no manifest declares a command of it",
        "buffer": "there was no render",
        "subscription": "no manifest declares a topic that it subscribes to and may",
        **dict.fromkeys(("capability", "path"), "it asked for nothing, or has no manifest to compare with"),
        "publication": "it published nothing",
        "chunks": "it published nothing in chunks",
        "log": "it logged nothing",
        "tool": CALL_MISSING,
    },
    **{**rpc.FIELDS, "reply": _reply},
)
