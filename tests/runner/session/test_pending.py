"""The clock of the calls of a session: each call is woken when its time is up, and not before."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from runner.session.pending import CallClock, Waiter, given_up_after
from sandbox.spec import Limits

pytestmark = pytest.mark.trio


class Rig:
    def __init__(self) -> None:
        self.calls: dict[int, Waiter] = {}
        self.clock = CallClock(self.calls)
        self.woken: list[tuple[int, float]] = []  # with the time of each

    def open(self, token: int, seconds: float) -> None:
        self.calls[token] = Waiter(None)
        self.clock.set(token, trio.current_time() + seconds)

    async def watch(self, token: int) -> None:
        await self.calls[token].woken.wait()
        self.woken.append((token, trio.current_time()))
        del self.calls[token]


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Rig, trio.Nursery]]:
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.clock.run)
        await trio.testing.wait_all_tasks_blocked()
        yield rig, nursery
        nursery.cancel_scope.cancel()


async def test_each_call_is_woken_when_its_time_is_up(autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with running() as (rig, nursery):
        for token, seconds in ((1, 60.0), (2, 5.0), (3, 0.0), (4, 5.0), (5, 1e9)):
            rig.open(token, seconds)
            nursery.start_soon(rig.watch, token)
        await trio.sleep(61.0)
        assert {token: when - began for token, when in rig.woken} == pytest.approx(
            {3: 0.0, 2: 5.0, 4: 5.0, 1: 60.0}
        )
        assert list(rig.calls) == [5]


async def test_a_call_that_has_ended_is_not_woken_and_delays_none(autojump_clock: trio.abc.Clock) -> None:
    async with running() as (rig, nursery):
        rig.open(1, 5.0)
        ended = rig.calls.pop(1)
        await trio.sleep(3.0)
        rig.open(2, 4.0)
        nursery.start_soon(rig.watch, 2)
        await trio.sleep(5.0)
        assert dict(rig.woken) == pytest.approx({2: trio.current_time() - 1.0})
        assert not ended.woken.is_set()


async def test_deadlines_of_ended_calls_do_not_pile_up(autojump_clock: trio.abc.Clock) -> None:
    async with running() as (rig, nursery):
        rig.open(0, 60.0)
        nursery.start_soon(rig.watch, 0)
        for token in range(1, 10_000):
            rig.open(token, 60.0 + token)
            del rig.calls[token]
            assert len(rig.clock._deadlines) < 100
        await trio.sleep(61.0)
        assert [token for token, _ in rig.woken] == [0]


async def test_a_launch_is_given_up_after_its_own_clocks() -> None:
    """Of which the first that is set counts. Without any, somebody else has to cancel it."""
    assert given_up_after(Limits()) == math.inf
    assert (
        10 < given_up_after(Limits(launch=10.0, deadline=60.0)) == given_up_after(Limits(deadline=10.0)) < 20
    )
