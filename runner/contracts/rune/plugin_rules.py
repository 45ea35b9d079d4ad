"""The rules of rterm.plugin.v1 that a plugin is tried by: see runner/conformance/rules.py."""

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
    called,
    contains,
    in_pieces,
    long_request,
    mismatch,
    not_blank,
    numbered,
    within,
)
from runner.contracts.rune.exchange import LINE_LIMIT
from runner.contracts.rune.terms import PROTOCOL
from runner.plugin import Plugin
from runner.protocol.dialect import Call
from runner.protocol.framing import LineFraming

_TRANSPORT, _MODELS = "plugin protocol, Transport", "plugin protocol, Message models"
_CHECKS = "plugin protocol, Failure taxonomy"
_GO = "core/plugins/runtime.go"

_GREETING = Say({"type": "handshake", "protocol_version": PROTOCOL})
_MANIFEST = (("manifest", "manifest"),)
_HANDSHAKE = (_GREETING, See("handshake", {"manifest": dict}, keep=_MANIFEST))
_CALLED = {**OWN, "needs": ("tool",)}
_REFUSED = {"status": "error", "error": {"message": not_blank}}
_LONG = 1 << 19  # bytes: an answer that repeats it is not too long


def _request(tool: str, given: Any) -> dict[str, Any]:
    asked = {"tool_name": tool, "context": {"workspace_id": "trial"}, "input": given}
    return {"type": "request", "request_id": "#1", **asked}


def _capabilities(value: Any) -> str:
    if value is None:
        return ""
    if mismatch([not_blank], value) or any(each != each.strip() for each in value):
        return "it has to be an array of texts without blanks around them"
    return "one of them is there twice" if len(set(value)) < len(value) else ""


def _shape(value: Any) -> str:
    """Returns what is wrong with a line of the plugin, or ''."""
    if fault := mismatch({"type": ("handshake", "response")}, value):
        return fault
    if value["type"] == "handshake":
        return mismatch({"manifest": dict}, value)
    if fault := mismatch({"request_id": str, "status": ("ok", "error"), "metadata?": (dict, None)}, value):
        return fault
    if value["status"] == "ok":
        return mismatch({"error?": None}, value)
    return mismatch({"error": {"message": not_blank, "code?": str}}, value)


def _sort(value: Any) -> Sort:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "handshake":
        return "answer", kind
    return ("answer", value.get("request_id")) if kind == "response" else ("other", None)


def _asks(message: Any) -> Any:
    return message.get("request_id", message["type"])


def _facts(plugin: Plugin | None, call: Call | None) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if plugin is not None:
        known["id"] = plugin.id
        known["tools of the manifest"] = contains(dict(plugin.exports).get("tools", ()))
        known["allowed"] = within(plugin.capabilities)
    return known | called(call)


_RULES = numbered(
    "rune",
    "plugin protocol",
    ("A handshake is answered with a handshake that has a manifest.", _MODELS, _HANDSHAKE, FIRST),
    (
        "The protocol_version of the handshake is the one that was asked for.",
        _CHECKS,
        Check("manifest", {"protocol_version": PROTOCOL}),
    ),
    (
        "The plugin_id of the handshake is that of rterm-plugin.json.",
        _GO,
        Check("manifest", {"plugin_id": "$id"}),
    ),
    (
        "The plugin_version of the handshake is not blank.",
        _MODELS,
        Check("manifest", {"plugin_version": not_blank}),
    ),
    ("exposed_tools is an array of names.", _MODELS, Check("manifest", {"exposed_tools": [not_blank]})),
    (
        "exposed_tools has every tool of rterm-plugin.json.",
        _CHECKS,
        Check("manifest", {"exposed_tools": "$tools of the manifest"}),
    ),
    (
        "capabilities is an array of distinct texts without blanks around them, if it is there.",
        _MODELS,
        Check("manifest", {"capabilities?": _capabilities}),
    ),
    (
        "capabilities has nothing that rterm-plugin.json does not list.",
        _CHECKS,
        Check("manifest", {"capabilities?": "$allowed"}),
    ),
    (
        "A request for a tool is answered with status ok.",
        _MODELS,
        (Say(_request("$tool", "$input")), See("#1", {"status": "ok"})),
        _CALLED,
    ),
    (
        "After the response, and the end of stdin, the plugin exits with status 0.",
        f"{_GO}, teardown",
        (Say(_request("$tool", "$input")), See("#1"), CloseInput(), SeeExit()),
        _CALLED,
    ),
    in_pieces(_TRANSPORT, _request("$tool", "$input"), 20, _CALLED),
    long_request(_TRANSPORT, _request("$tool", {"pad": PAD}), _LONG, _CALLED),
    (
        "An input of the wrong type is answered, with ok or an error.",
        _MODELS,
        (Say(_request("$tool", 5)), See("#1")),
        _CALLED,
    ),
    (
        "A request for a tool that is not exposed is answered with an error and its message.",
        "core/toolruntime/plugin_execution.go, not_found",
        (Say(_request("no_such_tool", {})), See("#1", _REFUSED)),
        OWN,
    ),
    (
        "Asked for a version that does not exist, the plugin names its own or exits.",
        _CHECKS,
        (
            Say({"type": "handshake", "protocol_version": "rterm.plugin.v0"}),
            See("handshake", {"manifest": {"protocol_version": PROTOCOL}}, or_exit=True),
        ),
        FIRST,
    ),
    (
        "A line that is not JSON is not answered with a handshake.",
        _TRANSPORT,
        (Say(b"this is not JSON\n"), CloseInput(), UNANSWERED),
        FIRST,
    ),
    ("Before the handshake, the end of stdin ends the plugin.", _GO, ENDS_WITH_STDIN, FIRST),
    ("After the handshake, the end of stdin ends the plugin.", _GO, ENDS_WITH_STDIN, OWN),
    ("stdout carries nothing but lines of JSON, of at most 1 MiB.", _TRANSPORT, "message"),
    ("Each line is a handshake or a response, with the fields of its type.", _MODELS, "shape"),
    ("Each line answers the one that was sent, and there is one answer.", _TRANSPORT, "answer"),
)

BOOK = RuleBook(
    framing=LineFraming(LINE_LIMIT, spare=1),  # for a carriage return
    rules=_RULES,
    handshake=_HANDSHAKE,
    sort=_sort,
    asks=_asks,
    shape=_shape,
    facts=_facts,
    missing={"tool": CALL_MISSING},
    make_id=lambda number: f"plugin_req_{number:016x}",
)
