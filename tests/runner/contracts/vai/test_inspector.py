"""What `exec --inspect` lets through between a plugin and a vai host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.registry import make_inspector
from runner.contracts.vai import CONTRACT
from runner.contracts.vai.inspector import Inspector, make
from runner.contracts.vai.messages import BODY_LIMIT
from runner.protocol.dialect import Setting, Violation
from runner.protocol.frames import Cut
from runner.protocol.rpc_reader import MOST_OPEN, Withheld
from tests.runner.contracts.vai.conversation import (
    DEVKIT,
    HELLO,
    HOST_HELLO,
    WHO,
    event,
    frame,
    refused,
    response,
    succeeded,
)
from tests.tables import check_rows


def body(message: Any) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def request(number: Any = "req_1", operation: Any = "tool.invoke") -> dict[str, Any]:
    return frame("request", id=number, op=operation, body={})


def greeted() -> Inspector:
    inspector = make(Setting(DEVKIT))
    inspector.host_frame(body(HOST_HELLO))
    assert inspector.plugin_frame(body(HELLO)) is None
    return inspector


def asked(*requests: Any) -> Inspector:
    inspector = greeted()
    for each in requests or (request(),):
        inspector.host_frame(body(each))
    return inspector


def faults(inspector: Inspector, *messages: Any) -> list[tuple[str, str]]:
    found = [inspector.plugin_frame(body(message)) for message in messages]
    assert all(not isinstance(each, Violation) or each.call is None for each in found)
    return [(each.code, each.cause) for each in found if isinstance(each, Violation)]


def test_the_limit_of_a_frame_can_be_set() -> None:
    raw = b"Content-Length: 3000\r\n\r\n" + b" " * 3000
    for options, frames in (({"frame_limit": "2K"}, 0), ({}, 1)):
        cutter = make_inspector(CONTRACT, Setting(DEVKIT, options=options)).framing.cutter()
        assert len(list(cutter.cut(raw))) == frames
        assert (cutter.fault is None) == bool(frames)


def test_the_limits_are_the_contracts() -> None:
    inspector = make_inspector(CONTRACT, Setting(DEVKIT))
    assert inspector.handshake_seconds == 10.0
    cutter = inspector.framing.cutter()
    assert [cut.frame for cut in cutter.cut(b"content-length: 2\r\nX: y\r\n\r\n{}")] == [b"{}"]
    assert cutter.cut(b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1)) == []
    assert cutter.fault is not None


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: 2\r\nContent-Length: 2",
        b"X: y\rContent-Length: 9\r\nContent-Length: 2",
        b"Content-Length\v: 9\r\nContent-Length: 2",
        b"Content-Length: 2\r\n\tContent-Type: x",
    ],
)
def test_a_header_that_hosts_could_read_differently(header: bytes) -> None:
    cutter = make(Setting(DEVKIT)).framing.cutter()
    assert cutter.cut(header + b"\r\n\r\n{}") == [] and cutter.fault is not None


def test_zeros_before_a_length() -> None:
    """Some hosts take them for octal digits. The host gets the length that was read."""
    cutter = make(Setting(DEVKIT)).framing.cutter()
    assert cutter.cut(b"Content-Length: 010\r\n\r\n" + b"x" * 10) == [
        Cut(b"x" * 10, b"Content-Length: 10\r\n\r\n")
    ]


# --- hello --------------------------------------------------------------------------------------------------


def test_the_host_says_hello_first() -> None:
    inspector = make(Setting(DEVKIT))
    assert (inspector.awaiting, inspector.handshaken) == (False, False)
    inspector.host_frame(body(HOST_HELLO))
    assert (inspector.awaiting, inspector.handshaken) == (True, False)
    assert faults(inspector, HELLO) == []
    assert (inspector.awaiting, inspector.handshaken) == (False, True)


def test_the_plugin_says_hello_first() -> None:
    inspector = make(Setting(DEVKIT))
    assert faults(inspector, HELLO) == []
    assert (inspector.awaiting, inspector.handshaken) == (False, True)
    inspector.host_frame(body(HOST_HELLO))
    assert (inspector.awaiting, inspector.handshaken) == (False, True)
    inspector.host_frame(body(request()))
    assert faults(inspector, event(message="x"), succeeded()) == []


UNEXPECTED = ("malformed_response", "unexpected_frame")
FORGED = {
    "a response before the hellos": (succeeded(), ("handshake_failed", "unexpected_frame")),
    "an event before the hellos": (event(), ("handshake_failed", "unexpected_frame")),
    "the host's own hello": (HOST_HELLO, ("handshake_failed", "unexpected_frame")),
    "another package": (
        {**HELLO, "plugin": {**WHO, "package_id": "acme/other"}},
        ("handshake_failed", "identity_mismatch"),
    ),
    "another version": (
        {**HELLO, "plugin": {**WHO, "version": "0.2.0"}},
        ("handshake_failed", "identity_mismatch"),
    ),
    "another protocol": (
        {**HELLO, "protocol": "vai.rpc.v0"},
        ("protocol_version_mismatch", "unsupported_version"),
    ),
    "a hello in capital letters": (
        {**HELLO, "plugin": {"Package_ID": "acme/devkit", **WHO}},
        ("malformed_response", "ambiguous"),
    ),
    "two packages": (
        body(HELLO).replace(b'"package_id"', b'"package_id": "acme/other", "package_id"'),
        ("malformed_response", "duplicate_key"),
    ),
}


@pytest.mark.parametrize("host_first", [False, True])
def test_nothing_passes_before_the_hello(host_first: bool) -> None:
    def check(_: str, row: tuple[Any, tuple[str, str]]) -> None:
        inspector = make(Setting(DEVKIT))
        if host_first:
            inspector.host_frame(body(HOST_HELLO))
        assert faults(inspector, row[0]) == [row[1]]
        assert not inspector.handshaken

    check_rows(FORGED, check)


@pytest.mark.parametrize("said", [succeeded(), event(), refused()])
def test_nothing_passes_before_the_host_has_said_hello(said: Any) -> None:
    """The host would take it for the answer to the request that it is about to send."""
    inspector = make(Setting(DEVKIT))
    assert faults(inspector, HELLO, said) == [UNEXPECTED]


# --- afterwards ---------------------------------------------------------------------------------------------

BREACHES = {
    "a second hello": (HELLO, UNEXPECTED),
    "a request": (request("p1"), UNEXPECTED),
    "a cancel": (frame("cancel", request_id="req_1"), UNEXPECTED),
    "a shutdown": (frame("shutdown"), UNEXPECTED),
    "an unknown type": (frame("log"), UNEXPECTED),
    "a response to nothing": (succeeded("req_2"), UNEXPECTED),
    "the id as a number": (succeeded(1), UNEXPECTED),
    "a response without id": (frame("response", ok=True), ("malformed_response", "invalid_frame")),
    "an event for nothing": (event("req_2"), UNEXPECTED),
    "an event without type": (
        frame("event", request_id="req_1", event={}),
        ("malformed_response", "invalid_frame"),
    ),
    "a response without status": (response({}), ("malformed_response", "invalid_response")),
    "an error beside ok": ({**succeeded(), "error": {}}, ("malformed_response", "invalid_response")),
    "not JSON": (b"hello", ("malformed_response", "bad_json")),
    "an array": (b"[]", ("malformed_response", "invalid_frame")),
    "not UTF-8": (b'"\xff"', ("malformed_response", "bad_json")),
    "something behind it": (body(succeeded()) + b"{}", ("malformed_response", "bad_json")),
    "NaN": (b'{"a": NaN}', ("malformed_response", "bad_number")),
    "the id twice": (
        body(succeeded()).replace(b'"id"', b'"id": "req_2", "id"'),
        ("malformed_response", "duplicate_key"),
    ),
    "ok in capital letters": ({**succeeded(), "OK": False}, ("malformed_response", "ambiguous")),
    "a key with a NUL": ({**succeeded(), "ok\0": False}, ("malformed_response", "ambiguous")),
}


def test_a_frame_that_the_host_does_not_get() -> None:
    check_rows(BREACHES, lambda _, row: _check_breach(*row))


def _check_breach(said: Any, fault: tuple[str, str]) -> None:
    inspector = asked()
    assert faults(inspector, event(message="fine"), said) == [fault]


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        ("tool.invoke", {"status": "succeeded", "result": {"content": []}}),
        ("hook.handle", {"status": "ack"}),
        ("compactor.compact", {"status": "succeeded", "result": {"seed_blocks": []}}),
        ("harness.run", {"status": "succeeded", "result": {}}),
        ("tool.invoke", {"status": "retryable_failure"}),
        ("of.tomorrow", {"anything": 1}),
        (None, {"anything": 1}),
    ],
)
def test_a_response_of_each_kind(operation: Any, answer: Any) -> None:
    assert faults(asked(request("a", operation)), response(answer, "a")) == []


def test_two_requests_of_a_host_that_does_not_wait() -> None:
    """One at a time is this runner's own reading: another host may send more."""
    inspector = asked(request("a"), request("b"))
    assert faults(inspector, succeeded("b"), event("a"), succeeded("a"), succeeded("c")) == [UNEXPECTED]


def test_what_a_session_drops_is_withheld() -> None:
    inspector = asked()
    assert inspector.plugin_frame(body(event(message="x"))) is None
    dropped = [event(message="x" * 70_000), event(kind="Bad"), succeeded(), event()]
    found = [inspector.plugin_frame(body(each)) for each in (*dropped[:2], succeeded(), *dropped[2:])]
    assert found.pop(2) is None
    kinds = ["long_event", "bad_event_type", "second_response", "late_event"]
    assert [each.kind for each in found if isinstance(each, Withheld)] == kinds
    assert inspector.strays == dict.fromkeys(kinds, 1)


@pytest.mark.parametrize("said", [None, b"not JSON", request(7), request("x" * 300)])
def test_a_request_that_we_could_not_read_may_be_answered_once(said: Any) -> None:
    inspector = greeted()
    inspector.host_frame(None if said is None else body(said))
    assert faults(inspector, event("?"), succeeded("?"), succeeded("!")) == [UNEXPECTED]
    assert inspector.strays == {"unasked": 2}


def test_a_host_with_many_requests_takes_no_memory() -> None:
    inspector = greeted()
    for number in range(2 * MOST_OPEN):
        inspector.host_frame(body(request(f"r{number}")))
    assert len(inspector._open) == MOST_OPEN
    for number in range(MOST_OPEN, 2 * MOST_OPEN):
        assert faults(inspector, succeeded(f"r{number}")) == []
    assert (len(inspector._open), len(inspector._closed)) == (0, MOST_OPEN)


def test_a_host_without_hello_starts_the_clock_with_its_request() -> None:
    inspector = make(Setting(DEVKIT))
    inspector.host_frame(body(request()))
    assert inspector.awaiting
    assert faults(inspector, HELLO, succeeded()) == []
