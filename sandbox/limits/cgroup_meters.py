"""Limits that a cgroup counts but does not enforce: total processor time, and on v1 killing all processes
when memory has run out."""

from __future__ import annotations

import math
import os
import select
import time

from sandbox.limits.cgroup import Cgroup
from sandbox.limits.meter import Meter
from sandbox.speed.typed import Mapping

_SHORTEST_PAUSE_SECONDS = 0.02
_OOM_KILL_SECONDS = 0.01  # the kernel sends the event before it raises the counter
_OOM_LOOKS = 100


class CpuTimeMeter(Meter):
    """Total processor time. The next look is when all cores together could have used up the rest."""

    def __init__(self, cgroup: Cgroup, limit: float) -> None:
        self._cgroup = cgroup
        self._limit = limit
        self._cores = os.cpu_count() or 1
        self._used = 0.0
        self.due = time.monotonic() + max(_SHORTEST_PAUSE_SECONDS, limit / self._cores)

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        self._used = self._cgroup.cpu() or 0.0
        left = self._limit - self._used
        self.due = now + max(_SHORTEST_PAUSE_SECONDS, left / self._cores)
        return "cpu_time" if left <= 0 else None


class MemoryMeter(Meter):
    """v1 kills one process when memory runs out, and the others run on. The runner then ends them all, as v2
    does by itself: a plugin that lost one of its processes cannot be relied on."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._event = cgroup.oom_event()
        self._looks = 1
        if self._event is not None:
            self.due = 0.0  # memory may have run out before the event was registered

    def interest(self) -> Mapping[int, int]:
        return {} if self._event is None else {self._event: select.POLLIN}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._event is not None and self._event in ready:
            os.read(self._event, 8)
            self._looks = _OOM_LOOKS
        elif now < self.due:
            return None
        self._looks -= 1
        self.due = now + _OOM_KILL_SECONDS if self._looks > 0 else math.inf
        return "memory" if self._cgroup.counters().oom_kills else None

    def close(self) -> None:
        if self._event is not None:
            os.close(self._event)
