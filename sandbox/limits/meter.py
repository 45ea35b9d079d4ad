"""Limits that the runner checks while a plugin runs: the interface between them and the loop that waits for
its end."""

from __future__ import annotations

import math
from time import monotonic

from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Mapping

if TYPE_CHECKING:
    from typing import TypeVar

    Found = TypeVar("Found")

# Meter.look() returns the name of a limit, or one of these: the plugin broke its contract, it takes more than
# its share of a machine-wide resource, or another program lifted its limits.
VIOLATION = "violation"
MACHINE_SHARE = "machine_share"
LIFTED = "lifted"
# Or this: the observer of `runner learn` has ended, and the plugin's calls fail without it.
OBSERVER = "observer"
# Or this: pages that nobody counts have grown while the plugin worked.
KERNEL_MEMORY = "kernel_memory"
# These say how much that is. They are read together: pages go from one count to another, by the 100 MiB.
MACHINE_FILES = ("/proc/meminfo", "/proc/zoneinfo", "/proc/self/net/sockstat")

SHORTEST_PAUSE_SECONDS = 0.02
# A look should take at most this part of the time between two looks. The plugin decides how long a look
# takes, so this delays the next look at most by the factor.
_LOOKING_SHARE, LATER_FACTOR = 0.05, 4
# Other plugins of this process wait no longer than this, and the time of one step.
_SLICE_SECONDS = 0.01


class Meter:
    """One limit that the runner itself has to check.

    The loop reads `interest` and `due` before it waits. It calls `look` when one of the descriptors is ready
    or the time has come. No method may block.
    """

    due: float = math.inf  # monotonic time of the next look, even if no descriptor is ready
    why: str = ""  # details about the limit that was exceeded

    def interest(self) -> Mapping[int, int]:
        """Descriptors to poll, with the events to poll for."""
        return {}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        """The name of the limit that is exceeded (a field of Limits), VIOLATION, MACHINE_SHARE, LIFTED,
        OBSERVER or KERNEL_MEMORY; else None."""
        return None

    def peaks(self) -> Mapping[str, float]:
        """The highest value seen, by the name of the limit."""
        return {}

    def close(self) -> None:
        """Close the descriptors."""


class LazyMeter(Meter):
    """A meter that is made at its first look, so that a launch does not import its modules."""

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


# --- looks whose duration the plugin decides --------------------------------------------------------------


def run_slice(steps: Generator[None, None, Found], now: float, rush: float = math.inf) -> Found | None:
    """Run the steps of a look for one slice of time, or to its end once it is later than `rush`. Returns None
    if it has not finished."""
    try:
        while True:
            next(steps)
            if now + _SLICE_SECONDS <= monotonic() < rush:
                return None
    except StopIteration as stop:
        found: Found = stop.value
        return found


def pause_after(took: float, pause: float, usual: float | None = None) -> float:
    """Seconds until the next look. `took`: processor time of the last one. `pause`: the longest that the
    limit allows. `usual`: a longer pause, for an idle plugin."""
    return min(LATER_FACTOR * pause, max(took / _LOOKING_SHARE, pause if usual is None else usual))
