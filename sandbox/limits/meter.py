"""Limits that can run out while a plugin runs, as seen by the loop that waits for its end."""

from __future__ import annotations

import math
from time import monotonic

from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Mapping

if TYPE_CHECKING:
    from typing import TypeVar

    Found = TypeVar("Found")

# `look` returns the name of a limit, or one of these: the plugin broke its contract, it takes more than its
# share of a number that the whole machine shares, or somebody lifted its limits.
VIOLATION = "violation"
MACHINE_SHARE = "machine_share"
LIFTED = "lifted"

SHORTEST_PAUSE_SECONDS = 0.02
# The part of the time between two looks that a look should take. The plugin decides how much there is to look
# at, so this delays the next look at most by the factor.
_LOOKING_SHARE, LATER_FACTOR = 0.05, 4
# Whoever waits for other plugins in this process waits no longer than this, and the time of one step.
_SLICE_SECONDS = 0.01


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
        """The name of the limit that has run out (a field of Limits), VIOLATION, MACHINE_SHARE or LIFTED;
        None if none of them."""
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


# --- looks that take as long as the plugin makes them -----------------------------------------------------


def go_on(steps: Generator[None, None, Found], now: float, rush: float = math.inf) -> Found | None:
    """Take steps of a look for one slice of time; from `rush` on to its end. None: it is not finished."""
    try:
        while True:
            next(steps)
            if now + _SLICE_SECONDS <= monotonic() < rush:
                return None
    except StopIteration as stop:
        found: Found = stop.value
        return found


def pause_after(took: float, pause: float, usual: float | None = None) -> float:
    """Seconds until the next look. `took`: processor time of the last. `pause`: what is short enough.
    `usual`: another one to begin with, for a plugin that does nothing."""
    return min(LATER_FACTOR * pause, max(took / _LOOKING_SHARE, pause if usual is None else usual))
