"""What `exec --inspect` lets through between a plugin and a kaged daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.contracts.kaged.inspector import Inspector, make
from runner.contracts.kaged.notifications import PER_SECOND
from runner.protocol.dialect import Setting, Violation
from runner.protocol.framing import LineFraming
from runner.protocol.rpc_reader import Withheld
from tests.runner.contracts.kaged.conversation import NOTES, WELCOME, answer, error, tell

INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"anything": "at all"}}


def line(message: Any) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def asked() -> Inspector:
    inspector = make(Setting(NOTES))
    inspector.host_frame(line(INITIALIZE))
    return inspector


def test_the_limits_are_the_contracts() -> None:
    inspector = make(Setting(NOTES))
    assert (inspector.framing, inspector.handshake_seconds) == (LineFraming(4_194_304), 10.0)


def test_a_handshake() -> None:
    assert not make(Setting(NOTES)).awaiting
    inspector = asked()
    assert (inspector.awaiting, inspector.handshaken) == (True, False)
    assert inspector.plugin_frame(line(answer(1, WELCOME))) is None
    assert (inspector.awaiting, inspector.handshaken) == (False, True)


def test_an_error_is_the_hosts_to_see() -> None:
    inspector = asked()
    assert inspector.plugin_frame(line(error(1, -32000))) is None
    assert (inspector.awaiting, inspector.handshaken) == (False, False)


@pytest.mark.parametrize(
    ("result", "code", "cause"),
    [
        ([], "handshake_failed", "malformed"),
        ({**WELCOME, "name": "other"}, "handshake_failed", "identity_mismatch"),
        ({**WELCOME, "api_version": 2}, "protocol_version_mismatch", "api_version"),
        ({**WELCOME, "methods": []}, "tool_not_exposed", "method_missing"),
        ({**WELCOME, "notifications": ["x"]}, "handshake_failed", "notification_undeclared"),
        ({**WELCOME, "capabilities_used": ["net:*"]}, "capability_not_declared", "capability_violation"),
        ({**WELCOME, "Capabilities_Used": ["net:*"]}, "malformed_response", "ambiguous"),
    ],
)
def test_an_answer_that_does_not_fit_the_manifest(result: Any, code: str, cause: str) -> None:
    fault = asked().plugin_frame(line(answer(1, result)))
    assert isinstance(fault, Violation)
    assert (fault.code, fault.cause) == (code, cause)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (b"hello", "bad_json"),
        (b"[]", "not_object"),
        (b"7", "not_object"),
        (b'{"id": 1, "result": {}}', "jsonrpc_version"),
        (b'{"jsonrpc": "2.0"}', "not_rpc"),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {}, "error": {"code": 1, "message": "no"}}', "ambiguous"),
        (b'{"jsonrpc": "2.0", "id": 1, "result": NaN}', "bad_number"),
        (b'{"jsonrpc": "2.0", "id": 1, "id": 2, "result": 1}', "duplicate_key"),
    ],
)
def test_a_line_that_is_no_message(said: bytes, cause: str) -> None:
    fault = asked().plugin_frame(said)
    assert isinstance(fault, Violation)
    assert (fault.code, fault.cause) == ("malformed_response", cause)


def test_no_answer_comes_before_its_question() -> None:
    """The daemon would take it as the answer to the initialize that it is about to send."""
    inspector = make(Setting(NOTES))
    forged = line(answer(1, {**WELCOME, "capabilities_used": ["net:*"]}))
    withheld = inspector.plugin_frame(forged)
    assert isinstance(withheld, Withheld) and inspector.strays == {"unasked": 1}
    # The control: after its question the same line is judged.
    fault = asked().plugin_frame(forged)
    assert isinstance(fault, Violation) and fault.cause == "capability_violation"


@pytest.mark.parametrize("number", [[1], {"v": 1}, True])
def test_an_id_that_only_some_hosts_take_for_theirs(number: Any) -> None:
    inspector = asked()
    assert isinstance(inspector.plugin_frame(line(answer(number, WELCOME))), Withheld)
    assert inspector.awaiting and inspector.plugin_frame(line(answer(1, WELCOME))) is None


def test_a_hundred_notifications_in_a_second() -> None:
    now = 5.0
    inspector = Inspector(Setting(NOTES), clock=lambda: now)
    inspector.host_frame(line(INITIALIZE))
    told = line(tell("notes.changed", {}))
    assert [inspector.plugin_frame(told) for _ in range(PER_SECOND)] == [None] * PER_SECOND
    assert isinstance(inspector.plugin_frame(told), Withheld)
    assert inspector.plugin_frame(line(answer(1, WELCOME))) is None  # an answer is none
    now = 6.0
    assert inspector.plugin_frame(told) is None
    assert inspector.strays == {"rate": 1}


@pytest.mark.parametrize(
    ("said", "withheld"),
    [
        (b"", ""),
        (tell("notes.changed", {}), ""),
        (tell("notes.gone", {}), "undeclared"),
        (answer(77, 1), "unasked"),
        ({"jsonrpc": "2.0", "id": 5, "method": "kaged.storage.get", "params": {}}, ""),
    ],
)
def test_answers_after_the_handshake_pass_or_are_withheld(said: Any, withheld: str) -> None:
    inspector = asked()
    assert inspector.plugin_frame(line(answer(1, WELCOME))) is None
    verdict = inspector.plugin_frame(line(said))
    assert (verdict.kind if isinstance(verdict, Withheld) else verdict or "") == withheld
    assert inspector.strays == ({withheld: 1} if withheld else {})
