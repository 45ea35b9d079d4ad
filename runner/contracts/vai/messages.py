"""Frames of vai.rpc.v1: a header with Content-Length, and one JSON object with `protocol` and `type`.

An event of more than EVENT_LIMIT bytes is known by its length, which only the reader of the frame sees. It is
replaced by a LongEvent at once, so nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.vai.terms import PROTOCOL
from runner.outcome import Code
from runner.protocol import wire
from runner.protocol.ambiguity import odd_key
from runner.protocol.dialect import Message, Violation
from runner.protocol.header_frames import HeaderRules, header_frame
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple
from sandbox.units import format_size, parse_size

HEADER_LIMIT = 8 * 1024  # bytes of all header lines of a frame
BODY_LIMIT = 16 * 1024 * 1024  # bytes, both ways
EVENT_LIMIT = 64 * 1024  # bytes of the body of a frame with an event
RULES = HeaderRules(HEADER_LIMIT, BODY_LIMIT, least_body=1, blanks=" \t", ignores_others=True)

_LEAST_LIMIT = 1024  # that can be chosen: room for a hello


def frame_limit(options: Mapping[str, str]) -> int:
    """Bytes of a frame's body, by the option --frame-limit. Raises ValueError: its message follows the
    option's name."""
    text = options.get("frame_limit")
    if not text:
        return BODY_LIMIT
    limit = parse_size(text)
    if not _LEAST_LIMIT <= limit <= BODY_LIMIT:
        least, most = format_size(_LEAST_LIMIT), format_size(BODY_LIMIT)
        raise ValueError(f"{text} is not between {least} and {most}")
    return limit


def rules_of(options: Mapping[str, str]) -> HeaderRules:
    """How frames are cut from the stream. An option that cannot be read was refused before the launch."""
    try:
        return RULES._replace(body_limit=frame_limit(options))
    except ValueError:
        return RULES


# What a plugin may send.
HELLO, EVENT, RESPONSE = "hello", "event", "response"
# What only a host sends, beside its own hello.
HOST_TYPES = ("request", "cancel", "shutdown")

# Causes of a Violation: the last words of the contract's codes "protocol.…". A frame that cannot be read has
# the cause of its fault instead (bad_json, too_deep, …; bad_header, cut_short and frame_too_large come from
# the framer). Those mean invalid_frame too, but for frame_too_large, which is a code of its own.
INVALID_FRAME = "invalid_frame"
UNSUPPORTED_VERSION = "unsupported_version"
UNEXPECTED_FRAME = "unexpected_frame"
IDENTITY_MISMATCH = "identity_mismatch"

# Keys that decide what a frame means: each may be in a frame only once.
KEYS = frozenset(
    ("protocol", "type", "role", "plugin", "id", "request_id", "ok", "body", "error", "event", "op")
)
_SHOWN_BYTES = 200  # of a faulty frame


class LongEvent(NamedTuple):
    """Stands for a frame with an event that is too long."""

    protocol: Any
    request_id: Any
    type: str  # of the event; empty: it has none
    size: int  # bytes


def encode_frame(kind: str, **fields: Any) -> bytes:
    """The body of a frame to the plugin. Raises ValueError if the fields are not JSON."""
    return wire.encode({"protocol": PROTOCOL, "type": kind, **fields})


def make_frame(kind: str, **fields: Any) -> bytes:
    """A whole frame. For short frames only: its length is not checked."""
    return header_frame(encode_frame(kind, **fields))


def read_json(raw: bytes, *, unique: bool = False) -> wire.Reading:
    """The value of a frame's body, or its fault. `unique`: no object in it may have a key twice."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return wire.Reading(None, "bad_json", f"byte {error.start} is not UTF-8")
    return wire.message(raw, identity=KEYS, unique=unique)


def read_message(raw: bytes, *, unique: bool) -> Message:
    value, cause, detail, weight = read_json(raw, unique=unique)
    if cause is not None:
        return Message(fault=cause, detail=detail, raw=raw[:_SHOWN_BYTES])
    if len(raw) > EVENT_LIMIT and isinstance(value, dict) and value.get("type") == EVENT:
        event = value.get("event")
        kind = event.get("type") if isinstance(event, dict) else None
        known = kind if isinstance(kind, str) else ""
        # A request_id that is as long as the frame is none of ours.
        number = value.get("request_id")
        number = number[:_SHOWN_BYTES] if isinstance(number, str) else None
        protocol = value.get("protocol")
        protocol = protocol[:_SHOWN_BYTES] if isinstance(protocol, str) else None
        return Message(LongEvent(protocol, number, known[:_SHOWN_BYTES], len(raw)))
    return Message(value, weight=weight)


def unreadable(message: Message) -> Violation:
    """The violation of a frame whose body is not JSON."""
    text = f"the body of a frame breaks the rules of JSON: {message.detail}"
    hint = "stdout carries only frames: print everything else to stderr"
    return Violation("malformed_response", text, message.fault, hint)


def fault_of(value: Any, *, in_handshake: bool) -> Violation | None:
    """Returns the fault of a frame that does not depend on its type, or None."""
    kind: Any
    if isinstance(value, LongEvent):
        protocol, kind = value.protocol, EVENT
    elif isinstance(value, dict):
        protocol, kind = value.get("protocol"), value.get("type")
    else:
        return invalid("the body of a frame is not an object")
    if not isinstance(protocol, str):
        return invalid(f'a frame lacks "protocol": "{PROTOCOL}"')
    if protocol != PROTOCOL:
        code: Code = "protocol_version_mismatch" if in_handshake else "malformed_response"
        text = f"a frame has the protocol {quoted(protocol)}, and the contract has {PROTOCOL}"
        return Violation(code, text, UNSUPPORTED_VERSION, f'send "protocol": "{PROTOCOL}" in each frame')
    if not isinstance(kind, str):
        return invalid("a frame has no type, or a type that is not a string")
    if odd := odd_key(value, KEYS):
        return Violation("malformed_response", f"a frame has {odd}", "ambiguous")
    return None


def invalid(text: str) -> Violation:
    return Violation("malformed_response", text, INVALID_FRAME)


def unexpected(text: str, hint: str = "") -> Violation:
    return Violation("malformed_response", text, UNEXPECTED_FRAME, hint)
