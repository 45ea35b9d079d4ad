"""What the runner has to look at although there is a cgroup: total processor time, which it counts but does
not limit; on v1 the other processes when memory has run out; and whether its limits are still there."""

from __future__ import annotations

import math
import os
import select
import time

from sandbox.limits.cgroup import Cgroup
from sandbox.limits.meter import LIFTED, Meter
from sandbox.typed import Mapping

_SHORTEST_PAUSE_SECONDS = 0.02
_OOM_KILL_SECONDS = 0.01  # the kernel sends the event before it raises the counter
_OOM_LOOKS = 100
_LIFTED_SECONDS = 2.0


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


class LiftedMeter(Meter):
    """Whether the limits of the cgroup are as they were set. The kernel keeps systemd from lifting them
    (cgroup.py). Others with the rights of the runner's user can, and no event tells: the runner looks, which
    takes 50 µs, and the cell looks once more when all has ended. When another meter has woken the loop, this
    one looks early, so that an idle plugin is not woken for this."""

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self.due = time.monotonic() + _LIFTED_SECONDS

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due - _LIFTED_SECONDS / 2:
            return None
        self.due = now + _LIFTED_SECONDS
        self.why = ", ".join(self._cgroup.lifted())
        return LIFTED if self.why else None
