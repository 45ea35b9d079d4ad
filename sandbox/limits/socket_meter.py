"""Memory in TCP and UDP sockets, where the kernel does not hold a plugin to its limit.

cgroup v2 charges it like all other memory. v1 counts it separately, and a plugin with many sockets passes
that limit, because each may keep a little more. Without a cgroup only the machine's tcp_mem and udp_mem limit
it, which all programs share. So the runner reads the kernel's socket tables (socket_tables.py).
"""

from __future__ import annotations

from time import monotonic, thread_time

from sandbox.limits.meter import Meter
from sandbox.typed import Callable, Mapping

# A plugin that fills sockets as fast as it can, in bytes a second.
_FASTEST_BYTES_PER_SECOND = 1 << 30
_SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0
# The part of the time between two looks that a look should take. The plugin decides how many sockets there
# are to look at, so this delays the next look at most by the factor below.
_LOOKING_SHARE = 0.05
_LATER_FACTOR = 4


# A look that is not finished yet: the loop's others have their turn, and then it goes on.
UNFINISHED = -1.0


class SocketMeter(Meter):
    """`held`: the bytes that count now; None if not known (yet); UNFINISHED."""

    def __init__(self, limit: int, held: Callable[[], float | None]) -> None:
        self._limit = limit
        self._held = held
        self._took = 0.0  # by the parts of the look that is under way
        self.due = monotonic() + _SHORTEST_PAUSE_SECONDS

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        began = thread_time()  # not the wall clock, which runs on while a busy plugin delays us
        held = self._held() or 0
        self._took += thread_time() - began
        if held == UNFINISHED:
            self.due = now
            return None
        took, self._took = self._took, 0.0
        filled = max(0, self._limit - held) / _FASTEST_BYTES_PER_SECOND
        wait = min(LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, filled))
        self.due = monotonic() + min(_LATER_FACTOR * wait, max(took / _LOOKING_SHARE, wait))
        return "memory" if held > self._limit else None
