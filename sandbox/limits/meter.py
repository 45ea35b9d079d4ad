"""Limits that can run out while a plugin runs, as seen by the loop that waits for its end."""

from __future__ import annotations

import math

from sandbox.typed import Mapping

# `look` returns the name of a limit, or this: the plugin broke its contract.
VIOLATION = "violation"


class Meter:
    """One limit that the runner itself has to check.

    The loop asks `interest` and `due` before it waits and `look` after: when one of the descriptors is ready,
    or the time has come. Nothing here may block: the plugin decides when there is something to look at.
    """

    due: float = math.inf  # on the monotonic clock, when to look again even if no descriptor is ready

    def interest(self) -> Mapping[int, int]:
        """Descriptors to poll, with the events to poll for."""
        return {}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        """The name of the limit that has run out (a field of Limits), or VIOLATION; None if neither."""
        return None

    def peaks(self) -> Mapping[str, float]:
        """The highest value seen of each limit this checks, by its name."""
        return {}

    def close(self) -> None:
        """Close the descriptors."""
