"""What all conversations in JSON-RPC have in common, as tables with rows for each contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from runner.contracts.ainb.messages import BODY_LIMIT
from runner.contracts.contract import Contract
from runner.contracts.kaged import CONTRACT as KAGED_CONTRACT
from runner.contracts.mcp import dialect as mcp_dialect
from runner.contracts.nexo import CONTRACT as NEXO_CONTRACT
from runner.contracts.registry import check_hook
from runner.plugin import Plugin
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Event,
    HostCall,
    LateAnswer,
    Refusal,
    Reply,
    Send,
    ShutdownAnswered,
    ShutdownSteps,
    Violation,
)
from runner.protocol.jsonrpc import MOST_TICKETS
from sandbox.speed.value import NamedTuple
from tests.runner.contracts.ainb import conversation as ainb
from tests.runner.contracts.kaged import conversation as kaged
from tests.runner.contracts.mcp import test_dialect as mcp
from tests.runner.contracts.mcp.pump import setting
from tests.runner.contracts.nexo import test_dialect as nexo
from tests.tables import one_case

MIB = 1 << 20


class Row(NamedTuple):
    name: str
    new: Callable[[], Dialect]
    ready: Callable[[], Dialect]
    asks: str  # a method that the plugin may ask for
    call: Callable[[str], Call]  # with a text of any length in its params
    limit: int  # bytes of a message of ours; 0: none
    result: Callable[[int], Any] = lambda number: number  # of that call
    value: Callable[[int], Any] = lambda number: number  # what its caller gets
    first: int = 2  # the id of our first request after the handshake
    early: str = "not_ready"  # the cause of a refused call
    flood: str = "too_many_requests"
    given_up: tuple[Event, ...] = ()  # what comes of the answer to a call that was given up


def _mcp(name: str, ready: Callable[[], Dialect], first: int) -> Row:
    def result(number: int) -> Any:
        return {**mcp.TEXT, "n": number}

    def call(text: str) -> Call:
        return Call("tool", "t", {"text": text})

    def new() -> Dialect:
        return mcp_dialect.make(setting())

    return Row(name, new, ready, "roots/list", call, 0, result, result, first, "", "flood")


NEXO = Row("nexo", nexo.dialect, nexo.ready, "memory.recall", lambda text: Call("method", "x", text), MIB - 1)
KAGED = Row(
    "kaged",
    kaged.dialect,
    kaged.ready,
    "kaged.storage.get",
    lambda text: Call("tool", "add", {"text": text}),
    4 * MIB,
    given_up=(LateAnswer(1),),
)
AINB = Row(
    "ainb",
    ainb.dialect,
    ainb.ready,
    "host/x",
    lambda text: Call("tool", "burn", {"argv": [text]}),
    BODY_LIMIT,
    lambda number: {"stdout": ainb.b64("out"), "stderr": "", "exit_code": number},
    lambda number: {"stdout": "out", "stderr": "", "exit_code": number},
)
LEGACY, MODERN = _mcp("mcp, legacy", mcp.legacy, 3), _mcp("mcp, modern", mcp.modern, 2)
ALL = (NEXO, KAGED, AINB, LEGACY)
ASKING = (NEXO, KAGED, AINB, LEGACY)  # a modern server sends no requests

each = pytest.mark.parametrize("row", ALL, ids=[row.name for row in ALL])


def hear(conversation: Dialect, *messages: Any) -> list[Event]:
    """What comes of frames of the plugin's: bytes as they are, anything else as JSON."""
    events: list[Event] = []
    for message in messages:
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        events += conversation.feed(conversation.read(raw))
    return events


def body(frame: bytes) -> bytes:
    """A message of ours, without its newline or its header."""
    header, _, rest = frame.partition(b"\r\n\r\n")
    return rest if header.startswith(b"Content-Length") else frame.removesuffix(b"\n")


def frames(events: Sequence[Event]) -> list[Any]:
    return [json.loads(body(event.frame)) for event in events if isinstance(event, Send)]


def answer(number: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


def ask(number: Any, method: str, params: Any = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def refused(conversation: Dialect, token: int, call: Call) -> Refusal | Violation:
    with pytest.raises(CallRefused) as caught:
        conversation.call(token, call)
    return caught.value.event


# --- frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "limit"), [(NEXO, MIB), (KAGED, 4 * MIB), (LEGACY, 16 * MIB)])
def test_a_line_may_be_as_long_as_the_contract_says_and_no_longer(row: Row, limit: int) -> None:
    framer = row.new().framer()
    assert framer.feed(b"x" * limit + b"\n") == [b"x" * limit] and framer.fault is None
    for used, rest in ((framer, b""), (row.new().framer(), b"\n")):
        assert used.feed(b"x" * (limit + 1) + rest) == []
        assert (fault := used.fault) is not None and fault.cause == "frame_too_large"


@pytest.mark.parametrize("blank", [b"", b" ", b"  ", b"\r", b"\t", b"\t ", b"\t \r"])
@pytest.mark.parametrize(
    ("row", "counter", "count"), [(NEXO, "", 0), (KAGED, "", 0), (LEGACY, "unreadable", 1)]
)
def test_blank_lines_are_nothing(row: Row, counter: str, count: int, blank: bytes) -> None:
    conversation = row.ready()
    assert hear(conversation, blank) == []
    assert {name: number for name, number in conversation.counters.items() if number} == (
        {counter: count} if count else {}
    )


# --- calls --------------------------------------------------------------------------------------------------


@each
def test_answers_find_their_calls_in_any_order(row: Row) -> None:
    conversation = row.ready()
    numbers = {token: frames(conversation.call(token, row.call("x")))[0]["id"] for token in (9, 4, 7)}
    assert sorted(numbers.values()) == [row.first, row.first + 1, row.first + 2]
    for token in (4, 9, 7):
        assert hear(conversation, answer(numbers[token], row.result(token))) == [
            Reply(token, row.value(token))
        ]


@each
def test_a_call_is_made_once_and_not_before_the_plugin_is_ready(row: Row) -> None:
    early = row.new()
    for _ in range(2):
        event = refused(early, 5, row.call("x"))
        assert isinstance(event, Violation) and (event.code, event.cause) == ("internal", row.early)
        assert event.message in ("the plugin is not ready for calls", "called before the handshake")
        early.opening()
    conversation = row.ready()
    conversation.call(5, row.call("x"))
    event = refused(conversation, 5, row.call("y"))
    assert isinstance(event, Violation) and (event.code, event.cause) == ("internal", row.early)
    assert event.message in ("this call has been sent already", "call 5 is on its way already")
    assert hear(conversation, answer(row.first, row.result(1))) == [Reply(5, row.value(1))]


@pytest.mark.parametrize("row", [NEXO, KAGED, AINB], ids=lambda row: row.name)
def test_the_answer_to_a_call_that_was_given_up_is_late(row: Row) -> None:
    conversation = row.ready()
    conversation.call(1, row.call("x"))
    assert not conversation.expired(1, "no answer within 60s")
    assert not conversation.cancel(1, "no answer in time")
    assert tuple(hear(conversation, answer(row.first, row.result(1)))) == row.given_up
    assert hear(conversation, answer(row.first, row.result(1))) == []
    assert conversation.counters["late"] == 2
    assert not conversation.cancel(1, "again") and not conversation.cancel(99, "never was")
    assert frames(conversation.call(2, row.call("x")))[0]["id"] == row.first + 1


@one_case("wrong", [99, 0, -1, 7, "1", "2", "x", 1.0, 2.0, True, None, [1], [2], {}])
@one_case("row", [NEXO, KAGED, LEGACY, MODERN])
def test_an_answer_needs_the_id_of_its_question(row: Row, wrong: Any) -> None:
    conversation = row.ready()
    conversation.call(7, row.call("x"))
    assert hear(conversation, answer(wrong, 1), answer(str(row.first), 1)) == []
    assert conversation.counters["unknown"] == 2
    assert hear(conversation, answer(row.first, row.result(1))) == [Reply(7, row.value(1))]


@pytest.mark.parametrize("row", [NEXO, KAGED, AINB], ids=lambda row: row.name)
def test_a_call_fills_a_frame_to_the_last_byte(row: Row) -> None:
    """Where a newline counts as well, the limit is one byte less: nexo's SDKs read a mebibyte with it."""
    empty = len(body(row.ready().call(5, row.call(""))[0].frame))  # type: ignore[union-attr]
    full = row.call("x" * (row.limit - empty))
    (event,) = row.ready().call(5, full)
    assert isinstance(event, Send) and len(body(event.frame)) == row.limit
    conversation = row.ready()
    over = refused(conversation, 5, row.call("x" * (row.limit - empty + 1)))
    assert isinstance(over, Refusal) and over.kind == "too_large"
    # Nothing is open.
    assert frames(conversation.call(5, row.call("x")))


HOOKS = (
    (NEXO_CONTRACT, nexo.DEMO, NEXO, Call("hook", "gree", {"body": "x"})),
    (NEXO_CONTRACT, nexo.DEMO, NEXO, Call("hook", "greet", {"body": "x"}, {"colour": "red"})),
    (KAGED_CONTRACT, kaged.NOTES, KAGED, Call("hook", "pre_compac")),
    (KAGED_CONTRACT, kaged.NOTES, KAGED, Call("hook", "pre_compact", [1])),
    (KAGED_CONTRACT, kaged.NOTES, KAGED, Call("hook", "on_session_start", {"colour": "red"})),
    (KAGED_CONTRACT, kaged.NOTES, KAGED, Call("hook", "on_session_start", {}, {"colour": "red"})),
    (KAGED_CONTRACT, kaged.NOTES, KAGED, Call("hook", "on_session_start", {}, {"agent_path": "elsewhere"})),
)


@pytest.mark.parametrize(("contract", "plugin", "row", "call"), HOOKS)
def test_an_event_is_refused_before_it_waits_as_its_call_would_be(
    contract: Contract, plugin: Plugin, row: Row, call: Call
) -> None:
    check_hook(NEXO_CONTRACT, nexo.DEMO, nexo.GREET)
    with pytest.raises(CallRefused) as caught:
        check_hook(contract, plugin, call)
    assert caught.value.event == refused(row.ready(), 0, call)


# --- what the plugin asks -----------------------------------------------------------------------------------

ANSWERS: tuple[tuple[Answer, dict[str, Any]], ...] = (
    (Answer({"entries": []}), {"result": {"entries": []}}),
    (Answer({}), {"result": {}}),
    (Answer(None), {"result": None}),
    (
        Answer(error=(-32601, "method not found: m", None)),
        {"error": {"code": -32601, "message": "method not found: m"}},
    ),
    (Answer(error=(-32602, "no", None)), {"error": {"code": -32602, "message": "no"}}),
    (Answer(error=(-32602, "no", [1])), {"error": {"code": -32602, "message": "no", "data": [1]}}),
    (
        Answer(error=(-32001, "no", {"topic": "t"})),
        {"error": {"code": -32001, "message": "no", "data": {"topic": "t"}}},
    ),
)
IDS: dict[str, list[Any]] = {
    "nexo": [1, 2, 0, -1, "a", None, 1.5, [], {"x": 1}],
    "kaged": [1, 2, 0, -5, "a", None, 1.5],
    "ainb": [0, 1, 2, 3],
    "mcp, legacy": [1, 2, 3, 0, -1, "a"],
}


@one_case(("given", "expected"), ANSWERS)
@one_case(("row", "number"), [(row, number) for row in ASKING for number in IDS[row.name]])
def test_questions_are_answered_under_their_own_number(
    row: Row, number: Any, given: Answer, expected: Any
) -> None:
    """Also under one that is ours as well. The data of an error is left out when there is none, and there is
    no "error": null beside a result."""
    conversation = row.ready()
    conversation.call(5, row.call("x"))
    (asked,) = hear(conversation, ask(number, row.asks, {"q": 1}))
    assert asked == HostCall(1, row.asks, {"q": 1})
    (sent,) = conversation.answer(1, given)
    assert isinstance(sent, Send) and sent.lane == "reply"
    whole = {"jsonrpc": "2.0", "id": number, **expected}
    assert body(sent.frame) == json.dumps(whole, separators=(",", ":")).encode()
    assert not conversation.answer(1, given) and not list(conversation.emit(1, "late"))
    assert hear(conversation, answer(row.first, row.result(1))) == [Reply(5, row.value(1))]


@pytest.mark.parametrize(
    ("row", "result", "words"),
    [
        (NEXO, {1}, "the answer is not JSON"),
        (NEXO, float("inf"), "the answer is not JSON"),
        (NEXO, "x" * MIB, "and nexo plugins read no line above 1 MiB"),
        (KAGED, "x" * 4 * MIB, "bytes, and a message has at most 4194304"),
        (AINB, float("nan"), "the answer is not JSON"),
        (AINB, "x" * BODY_LIMIT, f"bytes, and a frame has at most {BODY_LIMIT}"),
        (LEGACY, {"roots": object()}, "the host has no answer that could be sent"),
    ],
)
def test_an_answer_that_cannot_be_sent_is_an_error(row: Row, result: Any, words: str) -> None:
    conversation = row.ready()
    assert isinstance(hear(conversation, ask(5, row.asks))[0], HostCall)
    (frame,) = frames(conversation.answer(1, Answer(result)))
    assert (frame["id"], frame["error"]["code"]) == (5, -32603)
    assert frame["error"]["message"].endswith(words)


@pytest.mark.parametrize("row", ASKING, ids=lambda row: row.name)
def test_a_plugin_that_only_asks_is_stopped(row: Row) -> None:
    conversation = row.ready()
    events = hear(conversation, *(ask(number, row.asks) for number in range(MOST_TICKETS)))
    assert len(events) == MOST_TICKETS and all(isinstance(event, HostCall) for event in events)
    (violation,) = hear(conversation, ask(MOST_TICKETS, row.asks))
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause, violation.call) == ("malformed_response", row.flood, None)


@each
def test_a_program_that_sends_everything_back(row: Row) -> None:
    conversation = row.new()
    (request,) = frames(conversation.opening())
    (violation,) = hear(conversation, request)
    assert isinstance(violation, Violation)
    assert (violation.code, violation.cause) == ("handshake_failed", "echo")


# --- the end ------------------------------------------------------------------------------------------------

STEPS: tuple[tuple[Row, str, dict[str, Any], ShutdownSteps], ...] = (
    (NEXO, "shutdown", {"reason": "host requested"}, ShutdownSteps(answer=5, exit=1)),
    # Half of 4 s for the answer, the rest for the exit, then SIGTERM and a second.
    (KAGED, "shutdown", {}, ShutdownSteps(answer=2.0, exit=2.0, terminate=1.0, whole=4.0)),
    (AINB, "plugin/shutdown", {}, ShutdownSteps(answer=2.5, exit=2.5, terminate=2.0, whole=5.0)),
)
REPLIES: tuple[tuple[dict[str, Any], str], ...] = (
    (answer(3, {"ok": True}), ""),
    (answer(3, None), ""),
    (error(3, -32000, "could not save"), "could not save (-32000)"),
    (error(3, -32601, "\x1b"), "\\x1b (-32601)"),
)


@one_case(("reply", "said"), REPLIES)
@one_case(("row", "method", "params", "steps"), STEPS)
def test_shutdown(
    row: Row, method: str, params: Any, steps: ShutdownSteps, reply: dict[str, Any], said: str
) -> None:
    conversation = row.ready()
    conversation.call(5, row.call("x"))  # its id is not used twice
    asked = conversation.shutdown_steps()
    assert frames(asked.frames) == [ask(3, method, params)]
    assert asked._replace(frames=()) == steps
    # Asked for once, however often the steps are.
    assert conversation.shutdown_steps().frames == ()
    assert hear(conversation, answer(2, row.result(1))) == [Reply(5, row.value(1))]
    assert hear(conversation, reply) == [ShutdownAnswered(said)]
    refused(conversation, 6, row.call("x"))


@pytest.mark.parametrize("row", [NEXO, KAGED, AINB], ids=lambda row: row.name)
def test_a_plugin_that_is_not_ready_is_not_asked_to_shut_down(row: Row) -> None:
    conversation = row.new()
    assert conversation.shutdown_steps() == (steps := conversation.shutdown_steps())
    assert steps.frames == () and steps.answer == 0
    conversation.opening()
    assert conversation.shutdown_steps().frames == ()
