"""A stream that the plugin closed: its monitor says whether it ended or goes on, however late that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from runner.outcome import Outcome
from runner.session.record import SessionRecord
from runner.session.state import SessionState
from runner.session.tasks import LINGER_SECONDS, SessionTasks

OOM = Outcome("crashed", "run", "the plugin ran out of memory", "oom")
KILLED = Outcome("cancelled", "teardown", "ended by signal 9", "signal:9")


class Cell:
    """A process whose monitor says after the kill how it has ended, `late` seconds after it."""

    def __init__(self, ended: Outcome | None, late: float) -> None:
        self.has_ended: Any = None
        self.runs = True  # a process that nobody has waited for yet is there
        self._outcome, self._late = ended, late
        self._kill = trio.Event()

    def kill(self) -> None:
        self._kill.set()

    async def ended(self) -> Any:
        await self._kill.wait()
        if self._outcome is None:
            await trio.sleep_forever()
        await trio.sleep(self._late)
        self.has_ended = self.has_ended or SimpleNamespace(outcome=self._outcome)
        return self.has_ended


async def judged(ended: Outcome | None, late: float = 0.0) -> Outcome:
    """The verdict on a plugin whose stdout has ended while a call waits for it."""
    eof = trio.Event()
    eof.set()
    state = SimpleNamespace(
        cell=Cell(ended, late),
        record=SessionRecord(),
        phase="call",
        closing=False,
        refuses_calls=False,
        is_awaited=True,
        verdict=None,
        pending_verdict=None,
        stdout_eof=eof,
        stderr_eof=eof,
        over=trio.Event(),
    )
    state.end_waiting = state.over.set

    def fail(outcome: Outcome) -> None:
        state.verdict = state.verdict or outcome
        state.over.set()

    state.fail = fail
    tasks = SessionTasks(cast("SessionState", state), None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tasks._watch_process)
        nursery.start_soon(tasks._watch_stdout)
        await state.over.wait()
        nursery.cancel_scope.cancel()
    return cast("Outcome", state.verdict)


@pytest.mark.trio
@pytest.mark.parametrize("late", [0.0, LINGER_SECONDS * 2])
async def test_one_that_had_ended_is_judged_by_its_end(
    late: float, autojump_clock: trio.testing.MockClock
) -> None:
    found = await judged(OOM, late)
    assert (found.code, found.phase, found.cause) == ("crashed", "call", "oom")


@pytest.mark.trio
async def test_one_that_goes_on_is_to_blame(autojump_clock: trio.testing.MockClock) -> None:
    assert (await judged(KILLED)).cause == "stdout_closed"


@pytest.mark.trio
async def test_a_monitor_that_says_nothing_is_not_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    assert (await judged(None)).cause == "stdout_closed"
    assert LINGER_SECONDS < trio.current_time() - began < 60
