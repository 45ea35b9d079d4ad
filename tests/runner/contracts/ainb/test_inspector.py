"""What `exec --inspect` lets through between a plugin and an ainb host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.ainb.inspector import Inspector, make
from runner.contracts.ainb.messages import BODY_LIMIT
from runner.protocol.dialect import Setting, Violation
from runner.protocol.frames import Cut
from runner.protocol.rpc_reader import Withheld
from tests.runner.contracts.ainb.conversation import BURNDOWN, WELCOME, answer, ask, error, tell

INIT = ask(1, "plugin/init", {"anything": "at all"})


def body(message: Any) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def asked() -> Inspector:
    inspector = make(Setting(BURNDOWN))
    inspector.host_frame(body(INIT))
    return inspector


def test_the_limits_are_the_contracts() -> None:
    inspector = make(Setting(BURNDOWN))
    assert inspector.handshake_seconds == 10.0
    cutter = inspector.framing.cutter()
    assert [cut.frame for cut in cutter.cut(b"content-length: +2\r\n\r\n{}")] == [b"{}"]
    assert cutter.cut(b"Content-Length: %d\r\n\r\n" % (BODY_LIMIT + 1)) == []
    assert cutter.fault is not None


def test_a_handshake() -> None:
    assert not make(Setting(BURNDOWN)).awaiting
    inspector = asked()
    assert (inspector.awaiting, inspector.handshaken) == (True, False)
    # A plugin may ask and publish before it answers.
    assert inspector.plugin_frame(body(tell("host/snapshot/publish", {}))) is None
    assert inspector.plugin_frame(body(ask(1, "host/snapshot/subscribe", {}))) is None
    assert inspector.awaiting
    assert inspector.plugin_frame(body(answer(1, {**WELCOME, "manifest": {}}))) is None
    assert (inspector.awaiting, inspector.handshaken) == (False, True)


def test_an_error_is_the_hosts_to_see() -> None:
    inspector = asked()
    assert inspector.plugin_frame(body(error(1, -32003))) is None
    assert (inspector.awaiting, inspector.handshaken) == (False, False)


@pytest.mark.parametrize(
    ("result", "code", "cause"),
    [
        ([], "handshake_failed", "malformed"),
        ({"name": "burndown"}, "handshake_failed", "malformed"),
        ({**WELCOME, "name": "other"}, "handshake_failed", "identity_mismatch"),
        ({"Name": "burndown", "version": "2.0.0"}, "malformed_response", "ambiguous"),
    ],
)
def test_an_answer_that_does_not_fit_the_manifest(result: Any, code: str, cause: str) -> None:
    fault = asked().plugin_frame(body(answer(1, result)))
    assert isinstance(fault, Violation)
    assert (fault.code, fault.cause) == (code, cause)


@pytest.mark.parametrize(
    "said",
    [
        b'{"jsonrpc": "2.0", "id": 1, "result": NaN}',
        b'{"jsonrpc": "2.0", "id": 1, "id": 2, "result": 1}',
        b'{"jsonrpc": "2.0", "id": 1, "result": {},}',
        b'{"jsonrpc": "2.0", "id": 1, "result": {}, "Result": {}}',
        *(b"hello", b"7", b"[]"),
    ],
)
def test_a_body_that_is_dropped(said: bytes) -> None:
    """As in a session. Another host could find a message in some of them."""
    inspector = asked()
    assert isinstance(inspector.plugin_frame(said), Withheld)
    assert inspector.strays == {"dropped": 1} and inspector.awaiting
    # The control: the same id, and a body that is read.
    assert inspector.plugin_frame(body(answer(1, WELCOME))) is None and inspector.handshaken


def test_a_result_beside_a_method() -> None:
    """For the contract the method counts. Another host may read the result."""
    inspector = asked()
    assert isinstance(inspector.plugin_frame(body({**answer(1, WELCOME), "method": "host/log"})), Withheld)
    assert inspector.strays == {"ambiguous": 1} and inspector.awaiting


@pytest.mark.parametrize("header", [b"Content-Length: 9\r\nContent-Length: 2", b"Content-Length: 02"])
def test_a_length_that_hosts_could_read_differently(header: bytes) -> None:
    """The last one counts, as for the contract's own host. The host gets that one only."""
    cutter = make(Setting(BURNDOWN)).framing.cutter()
    assert cutter.cut(header + b"\r\n\r\n{}") == [Cut(b"{}", b"Content-Length: 2\r\n\r\n")]
    plain = b"content-length:2\r\n\r\n"
    assert cutter.cut(plain + b"{}") == [Cut(b"{}", plain)]
