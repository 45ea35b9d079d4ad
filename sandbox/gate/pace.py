"""The gate's own processor time, held to the limits of the plugin that causes it.

The gate is in none of the plugin's cgroups: it has to write its last lines when the plugin is killed or
frozen, and the plugin's memory limit must not end it. So it measures itself, after each turn of the loop.
"""

from __future__ import annotations

import select
import time

from sandbox.speed.typed import Callable

# Processor time that may be used at once after a rest, however low the limit is.
_BURST_SECONDS = 0.1


class TimeSpent(Exception):
    """The gate has used as much processor time as the plugin may."""


class Pace:
    """`cores`: processor time per second, the plugin's cpu limit. `seconds`: in all, its cpu_time limit."""

    def __init__(
        self,
        cores: float | None,
        seconds: float | None,
        alive: int,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._cores = cores
        self._seconds = seconds
        self._clock = clock
        self._used = used
        self._credit = _BURST_SECONDS
        self._last_time, self._last_used = clock(), used()
        self._first_used = self._last_used
        # A rest ends when the gate has to end.
        self._alive = select.epoll()
        self._alive.register(alive, select.EPOLLIN)

    def keep(self) -> None:
        """Rest until the limit allows more. Raises TimeSpent."""
        if self._cores is None and self._seconds is None:
            return
        now, used = self._clock(), self._used()
        if self._seconds is not None and used - self._first_used > self._seconds:
            raise TimeSpent
        if self._cores is not None:
            earned = (now - self._last_time) * self._cores - (used - self._last_used)
            self._credit = min(_BURST_SECONDS, self._credit + earned)
            self._last_time, self._last_used = now, used
            if self._credit < 0:
                self._rest(-self._credit / self._cores)

    def _rest(self, seconds: float) -> None:
        self._alive.poll(seconds)
