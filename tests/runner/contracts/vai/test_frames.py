"""The bytes of a vai stream: headers, lengths, pieces (§3, A6, A7). No bytes of a plugin raise anything."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.vai.dialect import VaiDialect
from runner.contracts.vai.inspector import make
from runner.contracts.vai.messages import BODY_LIMIT, HEADER_LIMIT, RULES
from runner.protocol.dialect import Event, Notice, Progress, Ready, Reply, Setting, Violation
from runner.protocol.header_frames import HeaderFramer, header_frame
from tests.runner.contracts.vai.conversation import (
    CONTENT,
    DEVKIT,
    HARNESS,
    HELLO,
    HOOK,
    TOKEN,
    TOOL,
    dialect,
    event,
    frame,
    refused,
    response,
    succeeded,
)


def pack(message: Any) -> bytes:
    return header_frame(json.dumps(message, ensure_ascii=False).encode())


STREAM = pack(HELLO) + pack(event(message="größer")) + pack(succeeded(note="日本"))


def listen(conversation: VaiDialect, *pieces: bytes) -> list[Event]:
    """A whole conversation with one call, whose request is sent as soon as the plugin is ready."""
    framer = conversation.framer()
    events: list[Event] = [*conversation.opening()]
    for piece in pieces:
        for raw in framer.feed(piece):
            events += conversation.feed(conversation.read(raw))
            if isinstance(events[-1], Ready):
                conversation.call(TOKEN, TOOL)
    for raw in framer.finish():
        events += conversation.feed(conversation.read(raw))
    return events


def test_a_stream_means_the_same_however_it_is_cut() -> None:
    whole = listen(dialect(), STREAM)
    assert [type(each) for each in whole[1:]] == [Ready, Progress, Reply]
    assert listen(dialect(), *(STREAM[at : at + 1] for at in range(len(STREAM)))) == whole
    for at in range(len(STREAM)):
        assert listen(dialect(), STREAM[:at], STREAM[at:]) == whole, at


BODY = b'{"a":1}'
GOOD_HEADERS = {
    "as the contract writes it": b"Content-Length: 7\r\n\r\n",
    "in small letters": b"content-length: 7\r\n\r\n",
    "without a blank": b"CONTENT-LENGTH:7\r\n\r\n",
    "with blanks": b"Content-Length:\t 7 \t\r\n\r\n",
    "leading zeros": b"Content-Length: 0007\r\n\r\n",
    "another header before it": b"Content-Type: application/json\r\nContent-Length: 7\r\n\r\n",
    "another header behind it": b"Content-Length: 7\r\nX-Trace: 1\r\n\r\n",
    "the longest header": b"X: %b\r\nContent-Length: 7\r\n\r\n" % (b"x" * (HEADER_LIMIT - 26)),
}
BAD_HEADERS = {
    "a newline alone (A7)": (
        b"Content-Length: 7\n\n",
        "bad_header",
        "ends with a newline alone, and not with CRLF",
    ),
    "the second newline alone": (b"Content-Length: 7\r\n\n", "bad_header", "newline alone"),
    "two lengths": (b"Content-Length: 7\r\nContent-Length: 7\r\n\r\n", "bad_header", "twice"),
    "no length": (b"X: 7\r\n\r\n", "bad_header", "no Content-Length"),
    "nothing at all": (b"\r\n", "bad_header", "no Content-Length"),
    "n is 0": (b"Content-Length: 0\r\n\r\n", "bad_header", "the least is 1"),
    "n is negative": (b"Content-Length: -7\r\n\r\n", "bad_header", "not a length"),
    "n has a sign": (b"Content-Length: +7\r\n\r\n", "bad_header", "not a length"),
    "n is hexadecimal": (b"Content-Length: 0x7\r\n\r\n", "bad_header", "not a length"),
    "n is no digit of ASCII": ("Content-Length: ٧\r\n\r\n".encode(), "bad_header", "not a length"),
    "n has a comma": (b"Content-Length: 7,7\r\n\r\n", "bad_header", "not a length"),
    "n is empty": (b"Content-Length:\r\n\r\n", "bad_header", "not a length"),
    "n has 5000 digits": (b"Content-Length: %b\r\n\r\n" % (b"9" * 5000), "bad_header", "not a length"),
    "no colon": (b"Content-Length 7\r\n\r\n", "bad_header", "no colon"),
    "not UTF-8": (b"X: \xff\r\nContent-Length: 7\r\n\r\n", "bad_header", "not UTF-8"),
    "a blank before another header": (b"Content-Length: 7\r\n X: y\r\n\r\n", "bad_header", "no plain header"),
    "a blank in another name": (
        b"My Header: y\r\nContent-Length: 7\r\n\r\n",
        "bad_header",
        "no plain header",
    ),
    "another name that some readers strip": (
        b"Content-Length\v: 9\r\nContent-Length: 7\r\n\r\n",
        "bad_header",
        "no plain header",
    ),
    "a carriage return in another header": (
        b"X: y\rContent-Length: 9\r\nContent-Length: 7\r\n\r\n",
        "bad_header",
        "no plain header",
    ),
    "a line separator in another header": (
        "X: y\u2028Content-Length: 9\r\nContent-Length: 7\r\n\r\n".encode(),
        "bad_header",
        "no plain header",
    ),
    "a print": (b"starting up\n", "bad_header", "print everything else to stderr"),
    "a header too long": (b"X: " + b"x" * HEADER_LIMIT, "frame_too_large", "longer than 8192 bytes"),
    "one byte more than the longest header": (
        b"X: %b\r\nContent-Length: 7\r\n\r\n" % (b"x" * (HEADER_LIMIT - 25)),
        "frame_too_large",
        "longer than 8192 bytes",
    ),
    "16 MiB and a byte (A6)": (
        b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1),
        "frame_too_large",
        "the limit is 16777216 bytes",
    ),
}


@pytest.mark.parametrize("name", GOOD_HEADERS)
def test_a_header(name: str) -> None:
    header = GOOD_HEADERS[name]
    stream = (header + BODY) * 2
    assert HeaderFramer(RULES).feed(stream) == [BODY, BODY]
    framer = HeaderFramer(RULES)
    assert [raw for at in range(len(stream)) for raw in framer.feed(stream[at : at + 1])] == [BODY, BODY]


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_is_refused(name: str) -> None:
    header, cause, text = BAD_HEADERS[name]
    for size in (len(header) + 100, 1):  # in one piece, and byte by byte
        framer = dialect().framer()
        stream = header + BODY
        frames = [raw for at in range(0, len(stream), size) for raw in framer.feed(stream[at : at + size])]
        assert frames == [] and framer.fault is not None
        assert framer.fault.cause == cause and text in framer.fault.message
        assert framer.pending == 0  # nothing of it is kept


def test_the_longest_frame() -> None:
    framer = dialect().framer()
    (raw,) = framer.feed(b"Content-Length: %d\r\n\r\n" % BODY_LIMIT + b" " * BODY_LIMIT)
    assert len(raw) == BODY_LIMIT
    announced = dialect().framer()
    announced.feed(b"Content-Length: %d\r\n\r\n" % BODY_LIMIT)
    assert announced.pending < 100  # an announcement takes no memory


@pytest.mark.parametrize("end", [10, 30])
def test_a_stream_that_ends_inside_a_frame(end: int) -> None:
    framer = dialect().framer()
    assert framer.feed(pack(HELLO)[:end]) == [] and framer.finish() == []
    assert framer.fault is not None and framer.fault.cause == "cut_short"


# --- any bytes ----------------------------------------------------------------------------------------------

MESSAGES = [
    HELLO,
    event(message="working"),
    event(kind="chunk", data=[1, 2.5, None, True]),
    succeeded(structured_output={"a": {"b": [1]}}, is_error=False),
    refused(),
    response({"status": "ack"}),
    response({"status": "failed", "error": {"code": "x", "message": "y"}}),
    frame("response", id="req_1", ok=True, body={"status": "succeeded", "result": {"seed_blocks": []}}),
    frame("cancel", request_id="req_1"),
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1e308,
    "",
    "req_1",
    "x" * 300,
    [],
    {},
    [[]],
    {"type": "text"},
    "\ud800",
]


def mutate(pick: random.Random, value: Any) -> Any:
    """The same value with something in it changed, removed, or added."""
    if isinstance(value, dict) and value and pick.random() < 0.8:
        key = pick.choice(list(value))
        change = pick.random()
        if change < 0.15:
            return {name: each for name, each in value.items() if name != key}
        if change < 0.25:
            return {
                **value,
                pick.choice(["id", "ok", "error", "body", "type", "\0", key.upper()]): pick.choice(VALUES),
            }
        return {**value, key: mutate(pick, value[key])}
    if isinstance(value, list) and value and pick.random() < 0.7:
        at = pick.randrange(len(value))
        return [*value[:at], mutate(pick, value[at]), *value[at + 1 :]]
    return pick.choice(VALUES)


def check_events(events: list[Event]) -> None:
    """At most one violation ends a conversation, and it is the last event."""
    ends = [at for at, each in enumerate(events) if isinstance(each, Violation) and each.call is None]
    assert ends in ([], [len(events) - 1])
    assert sum(isinstance(each, Reply) for each in events) <= 1


def hear_all(bodies: list[bytes], call: Any) -> None:
    conversation = dialect()
    inspector = make(Setting(DEVKIT))
    inspector.host_frame(json.dumps(frame("hello", role="host")).encode())
    events: list[Event] = []
    for raw in bodies:
        came = list(conversation.feed(conversation.read(raw)))
        if not events:
            conversation.opening()
        events += came
        if came and isinstance(came[-1], Ready):
            conversation.call(TOKEN, call)
            inspector.host_frame(json.dumps(frame("request", id="req_1", op="tool.invoke", body={})).encode())
        inspector.plugin_frame(raw)
    check_events(events)


@pytest.mark.parametrize("seed", range(10))
def test_no_message_raises(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(100):
        bodies = [json.dumps(HELLO).encode()]
        for _ in range(6):
            message = pick.choice(MESSAGES)
            for _ in range(pick.randrange(3)):
                message = mutate(pick, message)
            raw = bytearray(json.dumps(message).encode())
            if pick.random() < 0.3 and raw:
                raw[pick.randrange(len(raw))] = pick.randrange(256)
            bodies.append(bytes(raw))
        hear_all(bodies if pick.random() < 0.9 else bodies[1:], pick.choice([TOOL, HOOK, HARNESS]))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans())
def test_no_bytes_raise(pieces: list[bytes], framed: bool) -> None:
    stream = [header_frame(piece) for piece in pieces] if framed else pieces
    check_events(listen(dialect(), pack(HELLO), *stream))
    check_events(listen(dialect(), *stream))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(JSON, st.sampled_from(["body", "error", "ok", "id", "event", "request_id", "type", "protocol"]), JSON)
def test_no_value_raises(value: Any, key: str, body: Any) -> None:
    hello = json.dumps(HELLO).encode()
    for message in (value, {**succeeded(), key: value}, {**event(), key: value}, {**HELLO, key: value}):
        hear_all([hello, json.dumps(message).encode()], TOOL)
        hear_all([json.dumps(message).encode()], TOOL)
    hear_all(
        [hello, json.dumps(response({"status": "succeeded", "result": body, "error": value})).encode()], TOOL
    )


def test_the_control_of_these_tests() -> None:
    events = listen(dialect(), STREAM, pack(event()))
    assert [type(each) for each in events[1:]] == [Ready, Progress, Reply, Notice]
    assert isinstance(events[3], Reply) and events[3].value == {"content": CONTENT, "note": "日本"}
