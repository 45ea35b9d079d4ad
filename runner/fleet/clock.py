"""Whether this machine's clock agrees with the servers' of a fleet.

A deadline is a time of day: a submitter writes it by its own clock, and a worker reads it by another. A
worker two hours ahead would end every call as late. The servers note when they store a message, so who stores
one and reads it back knows their time, give or take as long as that took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

MOST_SECONDS = 2.0  # that a clock may be off

Now = Callable[[], float]  # seconds since 1970


class ClockReading(NamedTuple):
    """How many seconds a clock is ahead of the servers': at least and at most. Behind is negative."""

    least: float
    most: float

    @property
    def sure(self) -> float:
        """What no delay on the way explains, or 0."""
        return self.least if self.least > 0 else min(self.most, 0.0)

    @property
    def likely(self) -> float:
        """With delays that were as long there as back."""
        return (self.least + self.most) / 2


def read_clock(here: float, stored: float, took: float) -> ClockReading:
    """`here`: this clock now. `stored`: when the servers stored a message, sent `took` seconds ago."""
    return ClockReading(here - stored - took, here - stored)


def clock_words(ahead: float) -> str:
    """As in "the clock is …"."""
    return f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the servers' of the fleet"


class FleetClock:
    """What a worker knows about its clock. `now` is that clock."""

    def __init__(self, now: Now) -> None:
        self.now = now
        self.fault = ""
        self._offset: float | None = None  # from the monotonic clock, when it was compared last

    @property
    def was_set(self) -> bool:
        """Whether somebody has set it since it was compared, or the machine has slept. Costs no message."""
        return self._offset is not None and abs(self._drift()) > MOST_SECONDS

    @property
    def is_right(self) -> bool:
        return not self.fault and not self.was_set

    def _drift(self) -> float:
        return self.now() - time.monotonic() - (self._offset or 0.0)

    def compare(self, stored: float, sent: float) -> None:
        """A message that was sent at `sent` (monotonic) was stored at `stored` by the servers' clock."""
        here, since = self.now(), time.monotonic()
        reading = read_clock(here, stored, since - sent)
        self._offset = here - since
        # A slow answer is no proof of a wrong clock, nor of one that is right again.
        off = reading.likely if self.fault else reading.sure
        self.fault = ""
        if abs(off) > MOST_SECONDS:
            self.fault = (
                f"the clock of its machine is {clock_words(reading.likely)}, so that it takes no calls"
            )
