"""The guard: each request of a plugin to its host is answered, refused or cut off, within fixed limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio

from runner.protocol.dialect import Answer, HostCall
from runner.protocol.host_services import Emit, HostError, NoHostMethods, Services, Why
from runner.protocol.service_guard import CONCURRENT, WAITING, ServiceGuard


class Everything:
    """A service of each kind. The contract below defines what each does."""

    async def recall(self, agent_id: str, query: str, limit: int) -> list[dict[str, Any]]:
        return []

    async def roots(self) -> list[dict[str, Any]]:
        return []


class Words:
    """A contract of three methods."""

    METHODS: Mapping[str, str] = {"memory.recall": "memory", "memory.forget": "memory", "roots/list": "roots"}

    def __init__(self, act: Any = None) -> None:
        self._act = act
        self.serving = self.most = 0

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        self.serving += 1
        self.most = max(self.most, self.serving)
        try:
            if self._act is not None:
                return await self._act(params, emit)
            return {"asked": params}
        finally:
            self.serving -= 1

    def refused(self, method: str, why: Why) -> Answer:
        return Answer(error=(-1, why, None))


async def emit(value: Any) -> None:
    raise AssertionError("nobody emits here")


def guard(
    act: Any = None, *, allowed: tuple[str, ...] = ("*",), services: Services | None = None
) -> ServiceGuard:
    offered = Services(memory=Everything()) if services is None else services
    return ServiceGuard(Words(act), offered, allowed)


def question(method: str = "memory.recall", params: Any = None) -> HostCall:
    return HostCall(1, method, params)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("method", "allowed", "why"),
    [
        ("memory.recall", ("*",), None),
        ("memory.recall", ("memory.*",), None),
        ("memory.recall", ("memory.recal?",), None),
        ("memory.recall", (), "denied"),
        ("memory.recall", ("memory.forget", "MEMORY.*"), "denied"),
        ("memory.recall", ("memory",), "denied"),
        ("roots/list", ("*",), "absent"),
        ("roots/list", (), "absent"),
        ("made.up", ("*",), "unknown"),
        ("", ("*",), "unknown"),
    ],
)
async def test_policy_and_services_decide_which_requests_are_served(
    autojump_clock: trio.testing.MockClock, method: str, allowed: tuple[str, ...], why: str | None
) -> None:
    found = await guard(allowed=allowed).answer(question(method, 7), emit)
    assert found == (Answer({"asked": 7}) if why is None else Answer(error=(-1, why, None)))


@pytest.mark.trio
@pytest.mark.parametrize(("allowed", "why"), [((), "denied"), (("*",), "absent")])
async def test_notifications_are_checked_against_the_policy_first(
    autojump_clock: trio.testing.MockClock, allowed: tuple[str, ...], why: str
) -> None:
    """Without a service a notification is not always refused: readers of the session's events may take
    it."""
    told = HostCall(1, "roots/list", None, expects_answer=False)
    assert await guard(allowed=allowed).answer(told, emit) == Answer(error=(-1, why, None))


@pytest.mark.trio
async def test_invented_method_names_are_counted_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one = guard(allowed=("memory.recall",))
    for n in range(1000):
        await one.answer(question(f"made.up.{n}"), emit)
    for method in ("memory.recall", "memory.recall", "memory.forget", "roots/list"):
        await one.answer(question(method), emit)
    assert one.refused == {"unknown": 1000, "memory.forget": 1, "roots/list": 1}
    assert one.served == {"memory.recall": 2}


def test_offered_services_exist_and_are_allowed() -> None:
    both = Services(memory=Everything(), roots=Everything())
    assert guard(services=both).offered == {"memory", "roots"}
    assert guard(services=both, allowed=("memory.forget",)).offered == {"memory"}
    assert guard(services=Services(), allowed=("*",)).offered == frozenset()


async def says_no(params: Any, emit: Emit) -> Any:
    raise HostError(-32602, "query is missing", {"place": 1})


async def falls_over(params: Any, emit: Emit) -> Any:
    raise ZeroDivisionError("the password is 1234")


@pytest.mark.trio
async def test_errors_become_answers(autojump_clock: trio.testing.MockClock) -> None:
    assert await guard(says_no).answer(question(), emit) == Answer(
        error=(-32602, "query is missing", {"place": 1})
    )
    found = await guard(falls_over).answer(question(), emit)
    assert found.error is not None and found.error[0] == -32603
    assert "ZeroDivisionError" in found.error[1] and "1234" not in found.error[1]


@pytest.mark.trio
async def test_a_cancellation_passes_through(autojump_clock: trio.testing.MockClock) -> None:
    async def hangs(params: Any, emit: Emit) -> Any:
        await trio.sleep_forever()

    one = guard(hangs)
    found: list[Answer] = []
    with trio.move_on_after(10) as scope:
        found.append(await one.answer(question(), emit))
    assert scope.cancelled_caught and not found
    assert one._open == 0  # its place is free again


@pytest.mark.trio
async def test_pieces_are_emitted_only_on_request(autojump_clock: trio.testing.MockClock) -> None:
    async def streams(params: Any, emit: Emit) -> Any:
        for piece in "abc":
            await emit(piece)
        return "done"

    told: list[Any] = []

    async def keep(value: Any) -> None:
        told.append(value)

    assert await guard(streams).answer(question(), keep) == Answer("done")
    assert told == ["a", "b", "c"]


def test_a_refused_request_gets_the_reason() -> None:
    one = guard(allowed=("memory.recall",))
    for method, why in (("memory.recall", "busy"), ("memory.forget", "denied"), ("made.up", "unknown")):
        assert one.turn_away(question(method)) == Answer(error=(-1, why, None))
    assert one.refused == {"memory.recall": 1, "memory.forget": 1, "unknown": 1}
    assert one.busy == {"memory.recall": 1} and one.served == {}


@pytest.mark.trio
async def test_requests_served_and_waiting_are_limited(autojump_clock: trio.testing.MockClock) -> None:
    async def takes_its_time(params: Any, emit: Emit) -> Any:
        await trio.sleep(10)
        return params

    words = Words(takes_its_time)
    one = ServiceGuard(words, Services(memory=Everything()), ("*",))
    answers: list[Answer] = []

    async def ask(n: int) -> None:
        answers.append(await one.answer(question(params=n), emit))

    async with trio.open_nursery() as nursery:
        for n in range(2000):
            nursery.start_soon(ask, n)
        await trio.testing.wait_all_tasks_blocked()
        busy = Answer(error=(-1, "busy", None))
        assert answers == [busy] * (2000 - CONCURRENT - WAITING)  # told at once
        assert words.serving == CONCURRENT
    assert words.most == CONCURRENT
    assert len([answer for answer in answers if answer.error is None]) == CONCURRENT + WAITING
    # And now there is room again.
    assert (await one.answer(question(params=1), emit)).error is None


class Telling(Words):
    """A contract whose services tell the plugin something unasked."""

    def __init__(self) -> None:
        super().__init__()
        self.story: list[Any] = []

    def attach(self, tell: Any, room: Any) -> None:
        self.story.append(tell)

    async def published(self) -> None:
        await trio.lowlevel.checkpoint()

    def detach(self) -> None:
        self.story.append("detached")


def test_services_that_tell_something_are_attached_and_detached_once() -> None:
    methods = Telling()
    live = ServiceGuard(methods, Services(), ())
    live.detach()  # before it was attached: nothing
    told: list[tuple[str, Any]] = []
    live.attach(lambda method, params: told.append((method, params)), trio.lowlevel.checkpoint)
    methods.story[0]("news", {"a": 1})
    live.detach()
    live.detach()
    assert told == [("news", {"a": 1})]
    assert methods.story[1:] == ["detached"]


def test_services_without_these_hooks_are_served_as_before() -> None:
    plain = guard()
    plain.attach(lambda method, params: None, trio.lowlevel.checkpoint)
    plain.detach()


# --- long answers -------------------------------------------------------------------------------------------


class LongAnswers(NoHostMethods):
    METHODS: Mapping[str, str] = {"long": "", "short": ""}
    LONG: Mapping[str, tuple[str, int]] = {"long": ("bytes", 2)}

    async def serve(self, method: str, params: Any, services: Services, emit: Emit) -> Any:
        return method


@pytest.mark.trio
async def test_only_a_few_long_answers_are_made_before_they_are_posted(
    autojump_clock: trio.abc.Clock,
) -> None:
    guard = ServiceGuard(LongAnswers(), Services(), ("*",))
    held = {"long": 0, "short": 0}
    most = dict(held)

    async def ask(method: str) -> None:
        async with guard.answered(HostCall(1, method, None), emit) as answer:
            assert answer == Answer(method)
            held[method] += 1
            most[method] = max(most[method], held[method])
            await trio.sleep(1)  # until the plugin has read what was posted before
            held[method] -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask, "long")
            nursery.start_soon(ask, "short")
    assert most == {"long": 2, "short": 10}
    assert guard.served == {"long": 10, "short": 10}


@pytest.mark.trio
async def test_long_answers_that_wait_count_as_open(autojump_clock: trio.abc.Clock) -> None:
    guard = ServiceGuard(LongAnswers(), Services(), ("*",))
    refused = 0

    async def ask() -> None:
        nonlocal refused
        async with guard.answered(HostCall(1, "long", None), emit) as answer:
            refused += answer.error is not None
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENT + WAITING + 5):
            nursery.start_soon(ask)
    assert refused > 0 and guard.busy == {"long": refused}
    async with guard.answered(HostCall(1, "long", None), emit) as answer:
        assert answer.error is None  # nothing is left behind


@pytest.mark.trio
async def test_a_long_answer_that_is_cancelled_gives_its_turn_back() -> None:
    guard = ServiceGuard(LongAnswers(), Services(), ("*",))
    for _ in range(5):
        with trio.CancelScope() as scope:
            async with guard.answered(HostCall(1, "long", None), emit):
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught


@pytest.mark.trio
async def test_long_answers_are_not_made_for_a_plugin_that_is_told_nothing_more() -> None:
    guard = ServiceGuard(LongAnswers(), Services(), ("*",))
    for _ in range(5):
        async with guard.answered(HostCall(1, "long", None), emit, lambda: False) as answer:
            assert answer.error is not None
    assert guard.served == {} and guard.busy == {"long": 5}
