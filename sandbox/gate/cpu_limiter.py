"""Holds a process beside a cell, its gate or its broker, to the plugin's limits of processor time."""

from __future__ import annotations

import select
import time

from sandbox.speed.typed import Callable

# Processor time that may be used at once after a rest, however low the limit is.
_BURST_SECONDS = 0.1


class CpuTimeSpent(Exception):
    """The process has used as much processor time as the plugin may."""


class CpuLimiter:
    """Measures the processor time of this process, after each turn of its loop."""

    def __init__(
        self,
        cores: float | None,
        seconds: float | None,
        alive: int,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        """`cores`: the plugin's cpu limit. `seconds`: its cpu_time limit. `alive`: a descriptor that becomes
        readable when the process has to end; a rest ends then, too."""
        self._cores = cores
        self._seconds = seconds
        self._clock = clock
        self._used = used
        self._credit = _BURST_SECONDS
        self._last_time, self._last_used = clock(), used()
        self._first_used = self._last_used

        self._alive = select.epoll()
        self._alive.register(alive, select.EPOLLIN)

    def throttle(self) -> None:
        """Sleep until the cpu limit allows more. Raises CpuTimeSpent if the cpu_time limit is used up."""
        if self._cores is None and self._seconds is None:
            return
        now, used = self._clock(), self._used()
        if self._seconds is not None and used - self._first_used > self._seconds:
            raise CpuTimeSpent
        if self._cores is not None:
            earned = (now - self._last_time) * self._cores - (used - self._last_used)
            self._credit = min(_BURST_SECONDS, self._credit + earned)
            self._last_time, self._last_used = now, used
            if self._credit < 0:
                self._sleep(-self._credit / self._cores)

    def _sleep(self, seconds: float) -> None:
        self._alive.poll(seconds)
