"""nexo's host calls, through the guard: order of checks, codes, defaults, shapes, deltas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import trio.testing

from runner.contracts.nexo import services
from runner.protocol.dialect import Answer, HostCall
from runner.protocol.host_services import Completion, HostError, Services
from runner.protocol.service_guard import CONCURRENT, WAITING, ServiceGuard

pytestmark = pytest.mark.trio


class Memory:
    """Keeps what it was asked; has more entries than anybody wants."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        self.asked.append((agent_id, query, limit))
        return [{"id": str(number), "agent_id": agent_id, "content": query} for number in range(1200)]


class Model:
    """Says what it is told to."""

    def __init__(self, completion: Completion, pieces: Sequence[str] = ()) -> None:
        self.completion = completion
        self.pieces = pieces
        self.asked: list[Mapping[str, Any]] = []

    async def complete(
        self, request: Mapping[str, Any], delta: Callable[[str], Awaitable[None]] | None
    ) -> Completion:
        self.asked.append(request)
        if delta is not None:
            for piece in self.pieces:
                await delta(piece)
        return self.completion


class Broken:
    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        raise OSError("the disk with all the secrets is gone")

    async def publish(self, event: Mapping[str, Any]) -> None:
        raise HostError(-32603, "the broker is away")


class Board:
    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    async def publish(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)


async def ask(
    method: str, params: Any, offered: Services, allowed: Sequence[str] = ("*",)
) -> tuple[Answer, list[Any]]:
    deltas: list[Any] = []

    async def emit(value: Any) -> None:
        deltas.append(value)

    guard = ServiceGuard(services, offered, allowed)
    return await guard.answer(HostCall(1, method, params), emit), deltas


SAID = Completion("Hello.", "stop", 3, 2)
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"provider": "p", "model": "m", "messages": MESSAGES}
ALL = Services(memory=Memory(), llm=Model(SAID), broker=Board())


@pytest.mark.parametrize(
    ("method", "params", "offered", "allowed", "code", "message"),
    [
        # Who is not there answers before the params are looked at.
        ("memory.recall", {}, Services(), ("*",), -32603, "memory not configured"),
        ("llm.complete", {}, Services(), ("*",), -32603, "llm not configured"),
        ("memory.recall", {}, ALL, (), -32603, "memory not configured"),
        ("llm.complete", CHAT, ALL, ("memory.*",), -32603, "llm not configured"),
        ("tool.dispatch", {}, ALL, ("*",), -32601, "method not found: 'tool.dispatch'"),
        ("memory", {}, ALL, ("*",), -32601, "method not found: 'memory'"),
        ("\x1b[2J" * 100, {}, ALL, ("*",), -32601, "method not found"),
        ("memory.recall", None, ALL, ("*",), -32602, "agent_id is missing"),
        ("memory.recall", [], ALL, ("*",), -32602, "agent_id is missing"),
        ("memory.recall", {"query": "q"}, ALL, ("*",), -32602, "agent_id is missing"),
        ("memory.recall", {"agent_id": 1, "query": "q"}, ALL, ("*",), -32602, "agent_id is missing"),
        ("memory.recall", {"agent_id": "a", "query": None}, ALL, ("*",), -32602, "query is missing"),
        ("llm.complete", {}, ALL, ("*",), -32602, "provider is missing"),
        ("llm.complete", {"provider": "p"}, ALL, ("*",), -32602, "model is missing"),
        ("llm.complete", {"provider": "p", "model": "m"}, ALL, ("*",), -32602, "messages is missing"),
        ("llm.complete", {**CHAT, "messages": {}}, ALL, ("*",), -32602, "messages is missing"),
        ("llm.complete", {**CHAT, "messages": ["hi"]}, ALL, ("*",), -32602, "messages[0] needs a role"),
        ("llm.complete", {**CHAT, "messages": [{"role": "god", "content": ""}]}, ALL, ("*",), -32602, "role"),
        ("llm.complete", {**CHAT, "messages": [{"role": [], "content": ""}]}, ALL, ("*",), -32602, "role"),
        ("llm.complete", {**CHAT, "messages": [*MESSAGES, {"role": "user"}]}, ALL, ("*",), -32602, "[1]"),
        ("llm.complete", {**CHAT, "messages": []}, ALL, ("*",), -32602, "messages is empty"),
    ],
)
async def test_refused(
    method: str, params: Any, offered: Services, allowed: Sequence[str], code: int, message: str
) -> None:
    answer, deltas = await ask(method, params, offered, allowed)
    assert answer.error is not None
    assert answer.error[0] == code and message in answer.error[1]
    assert answer.error[1].isprintable() and len(answer.error[1]) < 200
    assert not deltas


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (None, 10),
        (0, 0),
        (5, 5),
        (1000, 1000),
        (1001, 1000),
        (2**64, 1000),
        (-1, 10),
        (True, 10),
        (5.0, 10),
        ("5", 10),
        ([], 10),
    ],
)
async def test_recall(given: Any, limit: int) -> None:
    memory = Memory()
    params = {"agent_id": "a", "query": "q", "limit": given}
    answer, _ = await ask("memory.recall", params, Services(memory=memory))
    assert answer.error is None
    assert memory.asked == [("a", "q", limit)]
    # However much a service gives, the plugin gets what it asked for.
    assert len(answer.result["entries"]) == limit
    assert all(set(entry) == {"id", "agent_id", "content"} for entry in answer.result["entries"])


async def test_a_service_that_fails_does_not_tell_the_plugin_why() -> None:
    answer, _ = await ask("memory.recall", {"agent_id": "a", "query": "q"}, Services(memory=Broken()))
    assert answer.error is not None and answer.error[0] == -32603 and "secrets" not in answer.error[1]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({}, "max_tokens", 4096),
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": -7}, "max_tokens", 4096),
        ({"max_tokens": 2**63}, "max_tokens", 2**32 - 1),
        ({}, "temperature", 0.7),
        ({"temperature": 0}, "temperature", 0),
        ({"temperature": "hot"}, "temperature", 0.7),
        ({"temperature": True}, "temperature", 0.7),
        ({"system_prompt": "be brief"}, "system_prompt", "be brief"),
        ({"system_prompt": 5}, "system_prompt", None),
        ({}, "stream", False),
        ({"stream": "yes"}, "stream", False),
        ({"stream": True}, "stream", True),
        ({"top_k": 3}, "top_k", 3),
    ],
)
async def test_a_model_gets_the_chat_and_its_bounds(given: dict[str, Any], key: str, value: Any) -> None:
    model = Model(SAID)
    answer, _ = await ask("llm.complete", {**CHAT, **given}, Services(llm=model))
    assert answer.error is None
    asked = model.asked[0]
    assert asked[key] == value and type(asked[key]) is type(value)
    assert (asked["provider"], asked["model"], asked["messages"]) == ("p", "m", MESSAGES)


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("stream", "model", "result", "deltas"),
    [
        (False, Model(SAID), {"content": "Hello.", "finish_reason": "stop", "usage": USAGE}, []),
        (True, Model(SAID, ["Hel", "", "lo."]), {"finish_reason": "stop", "usage": USAGE}, ["Hel", "lo."]),
        # A model that knows no pieces: the text is not lost.
        (True, Model(SAID), {"finish_reason": "stop", "usage": USAGE}, ["Hello."]),
        (
            False,
            Model(Completion("x", "odd", 3, 2)),
            {"content": "x", "finish_reason": "other:odd", "usage": USAGE},
            [],
        ),
        (
            False,
            Model(Completion("x", "other:odd", 3, 2)),
            {"content": "x", "finish_reason": "other:odd", "usage": USAGE},
            [],
        ),
        (
            False,
            Model(Completion("", "stop", 3, 2)),
            {"content": "", "finish_reason": "stop", "usage": USAGE},
            [],
        ),
        # Tool calls beside text are left out, in their place they are an error.
        (
            True,
            Model(Completion("", "tool_use", 3, 2), ["a"]),
            {"finish_reason": "tool_use", "usage": USAGE},
            ["a"],
        ),
        (False, Model(Completion("", "tool_use")), None, []),
        (True, Model(Completion("", "tool_use")), None, []),
    ],
)
async def test_completion(stream: bool, model: Model, result: Any, deltas: list[str]) -> None:
    answer, told = await ask("llm.complete", {**CHAT, "stream": stream}, Services(llm=model))
    assert answer.result == result and told == deltas
    assert (answer.error is not None and answer.error[0] == -32601) is (result is None)


async def test_an_event_is_passed_on_as_it_is() -> None:
    board = Board()
    event = {"id": "1", "topic": "t", "payload": [1]}
    answer, _ = await ask("broker.publish", event, Services(broker=board))
    assert answer == Answer(None) and board.events == [event]
    answer, _ = await ask("broker.publish", event, Services(broker=Broken()))
    assert answer.error == (-32603, "the broker is away", None)


async def test_too_many_at_once_are_told_so(autojump_clock: trio.testing.MockClock) -> None:
    class Slow(Memory):
        async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
            await trio.sleep(1)
            return await super().recall(agent_id, query, limit)

    guard = ServiceGuard(services, Services(memory=Slow()), ("*",))
    answers: list[Answer] = []

    async def emit(value: Any) -> None: ...

    async def one() -> None:
        call = HostCall(1, "memory.recall", {"agent_id": "a", "query": "q", "limit": 1})
        answers.append(await guard.answer(call, emit))

    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENT + WAITING + 8):
            nursery.start_soon(one)
    refused = [answer.error for answer in answers if answer.error]
    assert len(refused) == 8 and {error[0] for error in refused} == {-32603}
