"""The deadline of one call that counts from when the call was accepted: its launch is included; and the clock
that wakes calls whose time is up."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

import trio

from runner.outcome import Outcome, Phase
from runner.session.waiter import Waiter
from sandbox.value import NamedTuple

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


_SPARE = 64  # deadlines of calls that have ended, before they are looked for and dropped


class CallClock:
    """The deadlines of the open calls of a session, with one task for all of them. A cancel scope for each
    call would take a tenth of the call's time."""

    def __init__(self, calls: Mapping[int, Waiter]) -> None:
        """`calls`: the open ones, by token."""
        self._calls = calls
        self._deadlines: list[tuple[float, int]] = []  # a heap; with those of some calls that have ended
        self._sleep = trio.CancelScope()

    def set(self, token: int, at: float) -> None:
        """An open call is woken at `at`."""
        if len(self._deadlines) > 2 * len(self._calls) + _SPARE:
            self._deadlines = [each for each in self._deadlines if each[1] in self._calls]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (at, token))
        if at < self._sleep.deadline:
            self._sleep.deadline = at

    @trio.lowlevel.enable_ki_protection  # KeyboardInterrupt belongs to the caller that waits for the plugin
    async def run(self) -> None:
        """Sleeps until the earliest deadline that it knows. After the last call it wakes once for nothing."""
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
                waiter.woken.set()
        return math.inf
