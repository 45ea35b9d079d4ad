"""Calls that wait for their answers: the waiter of each, its deadline, and the clock that wakes them at it.

A deadline counts from when the call was accepted: its launch is included.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import trio

from runner.outcome import Outcome, Phase
from runner.protocol.calls import OnProgress
from runner.protocol.dialect import Refusal, Reply, Violation
from runner.session.outbox import QueuedFrame
from sandbox.spec import Limits

# KeyboardInterrupt is raised at a checkpoint only. Inside trio.Event.wait it would leave the task registered
# with the event, and setting the event would wake the task from whatever else it waits for by then.
at_checkpoints = trio.lowlevel.enable_ki_protection


class Waiter:
    """One call that waits for its answer."""

    __slots__ = (
        "_on_progress",
        "_on_woken",
        "answer",
        "events",
        "fault",
        "given_up_grace",
        "grace",
        "late",
        "queued",
        "told",
        "woken",
    )

    def __init__(
        self,
        on_progress: OnProgress | None,
        grace: float = 0.0,
        on_woken: Callable[[], None] | None = None,
        given_up_grace: float = 0.0,
    ) -> None:
        """`grace`: seconds that the plugin has to answer after the call was cancelled; `given_up_grace`: by a
        caller that has given it up. `on_woken`: called with `wake`, and must not raise."""
        self.grace = grace
        self.given_up_grace = given_up_grace
        self.queued: list[QueuedFrame] = []  # the frames of the request
        self.told = False  # the plugin was told that the call is cancelled
        self.late: Any = None  # an answer that came after the deadline
        self.events = 0  # number of events about the call
        self.answer: Reply | Refusal | Violation | None = None
        self.fault: Exception | None = None  # raised by the caller's own callback
        self.woken = trio.Event()
        self._on_progress = on_progress
        self._on_woken = on_woken

    def wake(self) -> None:
        """Let the caller go on: there is an answer, or its time is up, or the session has ended."""
        if self._on_woken is not None and not self.woken.is_set():
            self._on_woken()
        self.woken.set()

    def progress(self, value: Mapping[str, Any]) -> None:
        self.events += 1
        if self._on_progress is not None and self.fault is None:
            try:
                self._on_progress(value)
            except Exception as error:  # noqa: BLE001 -- raised to the caller whose callback it is, not in the session
                self.fault = error
                self.wake()


async def first_of(*events: trio.Event) -> None:
    """Wait until one of them is set."""
    try:
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            for event in events:
                nursery.start_soon(wait, event)
    except BaseExceptionGroup as group:
        # The tasks raise nothing, so this is KeyboardInterrupt. It leaves here as itself, not in a group.
        raise group.exceptions[0] from None


# The cause of a timeout by this clock. Other clocks of a launch have other causes.
CAUSE = "deadline_exceeded"

_WHAT = {
    "launch": "the program did not run",
    "handshake": "the plugin was not ready",
    "call": "there was no answer",
}


class Deadline(NamedTuple):
    at: float = math.inf  # on trio's clock
    seconds: float = math.inf  # from the acceptance of the call to `at`, for messages

    def passed(self, phase: Phase, what: str = "") -> Outcome:
        """`what`: what did not happen in time, if the phase does not say it."""
        from sandbox.units import format_limit

        amount = format_limit("deadline", self.seconds)
        if amount == "0s":
            amount = f"{1000 * self.seconds:g}ms"
        what = what or _WHAT.get(phase, "the call was not over")
        hint = "the time counts from when the call was accepted: its launch and its handshake are included"
        return Outcome("timeout", phase, f"{what} within the {amount} that the call has", CAUSE, hint)


_MONITOR_SECONDS = 5.0


def given_up_after(limits: Limits) -> float:
    """How many seconds a session waits for a launch with these limits. Their clocks are the monitor's, which
    tells more, so it has a bit longer. But it may have been stopped."""
    return min(limits.launch or math.inf, limits.deadline or math.inf) + _MONITOR_SECONDS


_SPARE = 64  # entries of ended calls that the heap may hold before it is cleaned


class CallClock:
    """The deadlines of the open calls of a session, with one task for all of them. A cancel scope for each
    call would take a tenth of the call's time."""

    def __init__(self, calls: Mapping[int, Waiter]) -> None:
        """`calls`: the open ones, by token."""
        self._calls = calls
        self._deadlines: list[tuple[float, int]] = []  # a heap; calls that have ended may still be in it
        self._sleep = trio.CancelScope()

    def set(self, token: int, at: float) -> None:
        """Wake an open call at the time `at`."""
        if len(self._deadlines) > 2 * len(self._calls) + _SPARE:
            self._deadlines = [each for each in self._deadlines if each[1] in self._calls]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (at, token))
        if at < self._sleep.deadline:
            self._sleep.deadline = at

    @trio.lowlevel.enable_ki_protection  # KeyboardInterrupt goes to the caller that waits for the plugin
    async def run(self) -> None:
        """Sleep until the earliest deadline, wake the calls that are due, and repeat."""
        while True:
            with self._sleep:
                await trio.sleep_forever()
            self._sleep = trio.CancelScope(deadline=self._wake(trio.current_time()))

    def _wake(self, now: float) -> float:
        """Wake the calls whose time is up. Returns the next deadline of an open call."""
        while self._deadlines:
            at, token = self._deadlines[0]
            waiter = self._calls.get(token)
            if waiter is not None and at > now:
                return at
            heapq.heappop(self._deadlines)
            if waiter is not None:
                waiter.wake()
        return math.inf
