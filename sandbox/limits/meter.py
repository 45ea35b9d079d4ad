"""Limits that can run out while a plugin runs, as seen by the loop that waits for its end."""

from __future__ import annotations

import math
from time import monotonic

from sandbox.speed.typed import Callable, Mapping

# `look` returns the name of a limit, or one of these: the plugin broke its contract, or it takes more than
# its share of a number that the whole machine shares.
VIOLATION = "violation"
MACHINE_SHARE = "machine_share"


class Meter:
    """One limit that the runner itself has to check.

    The loop asks `interest` and `due` before it waits and `look` after: when one of the descriptors is ready,
    or the time has come. Nothing here may block: the plugin decides when there is something to look at.
    """

    due: float = math.inf  # on the monotonic clock, when to look again even if no descriptor is ready
    why: str = ""  # more about what has run out

    def interest(self) -> Mapping[int, int]:
        """Descriptors to poll, with the events to poll for."""
        return {}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        """The name of the limit that has run out (a field of Limits), VIOLATION or MACHINE_SHARE; None if
        none of them."""
        return None

    def peaks(self) -> Mapping[str, float]:
        """The highest value seen of each limit this checks, by its name."""
        return {}

    def close(self) -> None:
        """Close the descriptors."""


class LaterMeter(Meter):
    """A meter that is made at its first look: a launch does not load what it takes."""

    def __init__(self, seconds: float, make: Callable[[], Meter]) -> None:
        self._make = make
        self._meter: Meter | None = None
        self.due = monotonic() + seconds

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._meter is None:
            if now < self.due:
                return None
            self._meter = self._make()
        found = self._meter.look(ready, now)
        self.due, self.why = self._meter.due, self._meter.why
        return found
