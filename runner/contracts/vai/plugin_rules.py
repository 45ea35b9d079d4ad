"""The rules of vai.rpc.v1 that a package is tried by: see runner/conformance/rules.py."""

from __future__ import annotations

from typing import Any

from runner.conformance.rules import (
    CALL_MISSING,
    ENDS_WITH_STDIN,
    FIRST,
    OWN,
    PAD,
    UNANSWERED,
    Check,
    CloseInput,
    RuleBook,
    Say,
    See,
    SeeExit,
    Sort,
    in_pieces,
    long_request,
    mismatch,
    not_blank,
    numbered,
)
from runner.contracts.vai.declared import declared_by
from runner.contracts.vai.dialect import OPERATIONS
from runner.contracts.vai.messages import EVENT, HELLO, RESPONSE, RULES
from runner.contracts.vai.package.schemas import load_of
from runner.contracts.vai.terms import PROTOCOL
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.framing import HeaderFraming
from runner.protocol.header_frames import header_frame
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import DocumentError

_FRAMES, _CONTRACTS = "Plugin System, Protocol Frames", "Plugin System, Execution Contracts"
_WIRE = "Plugin System, Runtime Protocol"
_LONG = 1 << 20  # bytes

_STATUSES = ("succeeded", "failed", "cancelled", "retryable_failure")
_DONE = {"ok": True, "body": {"status": (*_STATUSES, "ack")}}
_RESULTS = {
    "tool": {
        "status": "succeeded",
        "result": {
            "content": [{"type": str}],
            "structured_output?": object,
            "is_error?": bool,
            "retryable?": bool,
        },
    },
    "hook": {"status": ("ack", "succeeded")},
    "compactor": {"status": "succeeded", "result": {"seed_blocks": [dict]}},
    "harness": {"status": "succeeded", "result": dict},
}
_ERROR = {"code": not_blank, "message": str}


def _frame(kind: str, **fields: Any) -> dict[str, Any]:
    return {"protocol": PROTOCOL, "type": kind, **fields}


def _request(body: Any = "$body", op: str = "$op", as_id: str = "#1") -> dict[str, Any]:
    return _frame("request", id=as_id, op=op, body=body)


_GREETING = Say(_frame(HELLO, role="host", host={"name": "runner", "version": "trial"}))
_HANDSHAKE = (_GREETING, See(HELLO, keep=(("plugin", "plugin"),)))
_ANSWER = See(HELLO, {"role": "plugin", "plugin": {"package_id": str, "version": str}})
_CALLED = {**OWN, "needs": ("body",)}


def _shape(value: Any) -> str:
    """Returns what is wrong with a frame of a plugin, or ''."""
    if fault := mismatch({"protocol": PROTOCOL, "type": (HELLO, EVENT, RESPONSE)}, value):
        return fault
    if value["type"] == EVENT:
        return mismatch({"request_id": str, "event": {"type": not_blank}}, value)
    if value["type"] == RESPONSE:
        rest = {"body": dict, "error?": None} if value.get("ok") is True else {"ok": False, "error": _ERROR}
        return mismatch({"id": str, **rest}, value)
    return ""


def _sort(value: Any) -> Sort:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == HELLO:
        return "answer", HELLO
    return ("answer", value.get("id")) if kind == RESPONSE else ("other", None)


def _asks(message: Any) -> Any:
    return {HELLO: HELLO, "request": message.get("id")}.get(message["type"])


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if plugin is not None:
        known = {"package": plugin.id, "own version": plugin.version}
    if plugin is not None and call is not None:
        known |= {"body": call.input, "op": OPERATIONS[call.kind], "good": _RESULTS[call.kind]}
        known |= {"long body": {**call.input, "trial": PAD}}
        known |= {"other body": {**call.input, "export_id": "trial_no_such_export"}}
        if (schema := _output_schema(plugin, call.name)) is not None:
            known |= {"fits": lambda value: "; ".join(schema.faults(value)[:3])}
    return known


def _output_schema(plugin: Plugin, export: str) -> Schema | None:
    declared = declared_by(plugin).find(export)
    if declared is None or not declared.output_schema:
        return None
    try:
        return Schema(load_of(plugin, declared.output_schema).document)
    except (DocumentError, SchemaFault):
        return None  # `runner check` is about these


_RULES = numbered(
    "vai",
    "Plugin System",
    (
        "A hello is answered with a hello of the role plugin.",
        f"{_FRAMES}, Hello",
        (_GREETING, _ANSWER),
        FIRST,
    ),
    (
        "package_id is that of vai-plugin.toml.",
        f"{_FRAMES}, Hello",
        Check("plugin", {"package_id?": "$package"}),
    ),
    (
        "version is that of vai-plugin.toml.",
        f"{_FRAMES}, Hello",
        Check("plugin", {"version?": "$own version"}),
    ),
    (
        "A request is answered with ok, and a body with a status.",
        f"{_FRAMES}, Response",
        (Say(_request()), See("#1", _DONE)),
        _CALLED,
    ),
    (
        "The body of an invocation that succeeds has the result of its kind.",
        _CONTRACTS,
        (Say(_request()), See("#1", {"body": "$good"})),
        _CALLED,
    ),
    (
        "structured_output fits the output_schema.",
        f"{_CONTRACTS}, Tool Contract",
        (Say(_request()), See("#1", {"body": {"result": {"structured_output": "$fits"}}})),
        {**OWN, "needs": ("body", "fits")},
    ),
    (
        "A request for an export that does not exist is answered, and does not succeed.",
        f"{_FRAMES}, Response",
        (
            Say(_request("$other body")),
            See("#1", ({"ok": False}, {"ok": True, "body": {"status": _STATUSES[1:]}})),
        ),
        _CALLED,
    ),
    (
        "A request without a body is answered with ok false and an error.",
        f"{_FRAMES}, Response",
        (Say(_frame("request", id="#1", op="tool.invoke")), See("#1", {"ok": False, "error": _ERROR})),
        OWN,
    ),
    (
        "A request with an op that does not exist is answered with ok false and an error.",
        f"{_FRAMES}, Response",
        (Say(_request(op="trial.no_such_op")), See("#1", {"ok": False, "error": _ERROR})),
        _CALLED,
    ),
    (
        "The cancellation of a request that does not exist is ignored.",
        f"{_FRAMES}, Cancel",
        (
            Say(_frame("cancel", request_id="trial_none", reason="user_cancelled")),
            Say(_request()),
            See("#1", alone=True),
        ),
        _CALLED,
    ),
    (
        "A request that is cancelled is still answered.",
        f"{_FRAMES}, Cancel",
        (Say(_request()), Say(_frame("cancel", request_id="#1", reason="user_cancelled")), See("#1")),
        _CALLED,
    ),
    in_pieces(_WIRE, _request(), 40, _CALLED),
    long_request(_WIRE, _request("$long body"), _LONG, _CALLED),
    (
        "A frame of an unknown type is not answered.",
        _FRAMES,
        (Say(_frame("trial")), CloseInput(), UNANSWERED),
        OWN,
    ),
    (
        "After a body that is not JSON, the end of stdin ends the plugin.",
        _WIRE,
        (Say(header_frame(b"this is not JSON")), CloseInput(), SeeExit(())),
        OWN,
    ),
    ("shutdown ends the plugin.", f"{_FRAMES}, Shutdown", (Say(_frame("shutdown")), SeeExit(())), OWN),
    ("The end of stdin ends the plugin.", _WIRE, ENDS_WITH_STDIN, OWN),
    ("Before the hello, the end of stdin ends the plugin.", _WIRE, ENDS_WITH_STDIN, FIRST),
    ("stdout carries nothing but frames of JSON.", _WIRE, "message"),
    ("Each frame is a hello, an event or a response, with the fields of its type.", _FRAMES, "shape"),
    ("Each response is to a request, and there is one.", f"{_FRAMES}, Event", "answer"),
)

BOOK = RuleBook(
    framing=HeaderFraming(RULES),
    rules=_RULES,
    handshake=_HANDSHAKE,
    sort=_sort,
    asks=_asks,
    shape=_shape,
    facts=_facts,
    missing={
        "plugin": "its hello has no plugin",
        "body": CALL_MISSING,
        "fits": "the export has no output_schema",
    },
    make_id=lambda number: f"req_{number}",
)
