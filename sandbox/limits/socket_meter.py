"""Memory that sockets hold in the kernel, which no cgroup limits in full.

cgroup v2 charges what arrives by TCP and UDP, v1 counts TCP separately, and without a cgroup only numbers
limit it that the whole machine shares. Nobody charges answers of netlink, error queues, or datagrams that are
held back. So the runner adds up what the plugin's sockets hold (socket_tables.py) and the memory that a
cgroup charges for its processes, and ends a plugin that has more than its limit.

That costs a millisecond even if there is one socket, because the kernel walks through the table of all its
namespaces. So first it is seen whether it could be too much: there are few sockets, or too little processor
time was used since the last look to fill the rest.
"""

from __future__ import annotations

import math
import os
from time import monotonic, thread_time

from sandbox.limits.meter import Meter
from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Iterable, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.cgroup import Cgroup
    from sandbox.limits.socket_tables import SocketTables

# A plugin that fills sockets as fast as it can: in bytes a second, and for each second of processor time.
_FASTEST_BYTES_PER_SECOND = 1 << 30
_FASTEST_BYTES_PER_CPU_SECOND = 4 << 30
_SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0
# The part of the time between two looks that a look should take. The plugin decides how many sockets there
# are to look at, so this delays the next look at most by the factor below. A plugin that does nothing is
# looked at as much later.
_LOOKING_SHARE = 0.05
_LATER_FACTOR = 4
_IDLE_CPU_SECONDS = 0.001
# A hundred thousand sockets take half a second to look at. Whoever waits for other plugins in this process
# waits no longer than this, and the time of one step. Then the rest is read without a pause: between the
# steps, data can be moved to sockets that were read.
_SLICE_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 0.5
# After this time a look is due although no processor time was used: what others send to the plugin is not in
# its time.
_TRUSTED_SECONDS = 30.0
# Without a cgroup the processes are asked for their time, unless they are more than this. Then a look is due
# once a second, or when there are so many more sockets, or when the queues of the whole machine hold this
# part of the limit more.
_MOST_ASKED = 32
_MORE_SOCKETS = 4
_MORE_SHARE = 1 / 8
# The time of a process that has ended is nowhere, so each change counts as this much.
_CHANGE_CPU_SECONDS = 1.0

_CONNECTION_BYTES = 512  # of a closed one
_LARGEST_PACKET_BYTES = 128 << 10  # a queue takes one more when it is nearly full
_MOST_UNESTABLISHED = 4096  # connections to one socket; a new namespace has its own somaxconn


class _Judged(NamedTuple):
    """The last look that found out how much is held at most."""

    at: float = -math.inf
    held: float = 0.0  # bytes, as far as they are known
    most: float = 0.0  # bytes, with what few sockets could hold
    cpu: float | None = None
    shown: Shown | None = None


class _ProcessTimes:
    """The processor time of some processes, of which the kernel keeps no sum."""

    def __init__(self) -> None:
        self._pids: list[int] | None = None
        self._ticks = 0
        self._sum = 0.0

    def sum(self, pids: Iterable[int]) -> float | None:
        """Seconds, or more. None: they are too many to ask."""
        now = list(pids)
        if len(now) > _MOST_ASKED:
            self._pids = None
            return None
        ticks = sum(map(_ticks_of, now))
        if now == self._pids:
            self._sum += max(0, ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
        else:
            self._sum += _CHANGE_CPU_SECONDS
        self._pids, self._ticks = now, ticks
        return self._sum


def _ticks_of(pid: int) -> int:
    """proc_pid_stat(5): its own time, and that of children it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return sum(map(int, file.read().rpartition(b") ")[2].split()[11:15]))
    except OSError:
        return 0  # it has ended


class SocketMeter(Meter):
    """`member`: a process in the plugin's own network namespace, or None (yet); `shares_network`: it has the
    host's. `processes`: all of the plugin's. `cgroup`: where they are counted, if they are."""

    def __init__(
        self,
        limit: int,
        member: Callable[[], int | None],
        processes: Callable[[], Iterable[int]],
        cgroup: Cgroup | None = None,
        shares_network: bool = False,
    ) -> None:
        self._limit = limit
        self._member = member
        self._processes = processes
        self._cgroup = cgroup
        self._charges = cgroup is not None and cgroup.counts_memory
        self._shares_network = shares_network
        self._each = math.inf  # bytes that one socket can hold at most
        self._counters: int | None = None
        self._tables: SocketTables | None = None
        self._reading: Generator[None, None, float] | None = None
        self._began = 0.0  # the look that is under way
        self._took = 0.0  # by its parts
        self._judged = _Judged()
        self._times = _ProcessTimes()
        self._before: float | Shown | None = None  # at the last look: processor time, or the counters
        self._is_idle = False
        self._most = 0.0
        self.due = monotonic() + _SHORTEST_PAUSE_SECONDS

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        began = thread_time()  # not the wall clock, which runs on while a busy plugin delays us
        held = self._held(now)
        self._took += thread_time() - began
        if held is None:
            self.due = now
            return None
        took, self._took = self._took, 0.0
        self._most = max(self._most, held)
        filled = max(0, self._limit - held) / _FASTEST_BYTES_PER_SECOND
        wait = min(LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, filled))
        later = _LATER_FACTOR * wait
        if self._is_idle:
            wait = min(LONGEST_PAUSE_SECONDS, later)
        self.due = monotonic() + min(later, max(took / _LOOKING_SHARE, wait))
        return "memory" if held > self._limit else None

    def peaks(self) -> Mapping[str, float]:
        """Without a cgroup it is not the plugin's memory, unless it is more than the plugin may have."""
        known = self._charges or self._most > self._limit
        return {"memory": self._most} if known and self._most else {}

    def close(self) -> None:
        if self._counters is not None:
            os.close(self._counters)
        if self._tables is not None:
            self._tables.close()
        self._counters = self._tables = self._reading = None

    def _held(self, now: float) -> float | None:
        """Bytes, or as many as are more than the limit. None: the look is not finished."""
        if self._reading is None:
            shown = None
            if not self._shares_network:
                if self._counters is None and not self._open():
                    return 0.0
                shown = self._shown()
                if shown is not None and not shown.sockets:
                    self._is_idle = True
                    return shown.closed
            most = math.inf if shown is None else shown.closed + shown.sockets * self._each
            if not self._charges and most <= self._limit:
                self._see_idle(None, shown)
                self._judged = _Judged(now, 0.0, most, None, shown)
                return 0.0
            cpu = None if self._cgroup is None else self._cgroup.cpu()
            if cpu is None:
                cpu = self._times.sum(self._processes())
            self._see_idle(cpu, shown)
            if self._is_quiet(now, cpu, shown):
                return self._judged.held
            charged = self._charged()
            if charged + most <= self._limit:
                self._judged = _Judged(now, charged, charged + most, cpu, shown)
                return charged
            if not self._open_tables():
                return charged
            self._began, self._judged = now, _Judged(now, 0.0, 0.0, cpu, shown)
            self._reading = self._read(charged, 0 if shown is None else shown.closed)
        return self._go_on(self._reading, now)

    def _see_idle(self, cpu: float | None, shown: Shown | None) -> None:
        if cpu is not None and isinstance(self._before, float):
            self._is_idle = cpu - self._before < _IDLE_CPU_SECONDS
        else:
            self._is_idle = cpu is None and shown is not None and shown == self._before
        self._before = shown if cpu is None else cpu

    def _is_quiet(self, now: float, cpu: float | None, shown: Shown | None) -> bool:
        """Whether too little has happened since the last look for more than the limit."""
        last = self._judged
        if now >= last.at + _TRUSTED_SECONDS or last.most > self._limit:
            return False
        if cpu is not None and last.cpu is not None:
            return last.most + (cpu - last.cpu) * _FASTEST_BYTES_PER_CPU_SECOND <= self._limit
        if now >= last.at + LONGEST_PAUSE_SECONDS:
            return False
        if shown is None or last.shown is None:
            return shown is last.shown
        return (
            shown.sockets <= last.shown.sockets + _MORE_SOCKETS
            and shown.queued <= last.shown.queued + self._limit * _MORE_SHARE
        )

    def _charged(self) -> float:
        return (self._cgroup.memory_of_processes() or 0) if self._cgroup is not None else 0

    def _read(self, charged: float, closed: int) -> Generator[None, None, float]:
        assert self._tables is not None
        found = yield from self._tables.read(self._sockets, self._limit - charged - closed)
        return charged + closed + found

    def _go_on(self, reading: Generator[None, None, float], now: float) -> float | None:
        try:
            while True:
                next(reading)
                if now + _SLICE_SECONDS <= monotonic() < self._began + _LONGEST_LOOK_SECONDS:
                    return None
        except StopIteration as stop:
            self._reading = None
            found: float = stop.value
            is_sure = self._tables is None or self._tables.is_sure
            self._judged = self._judged._replace(held=found, most=found if is_sure else math.inf)
            return found
        except BaseException:
            self._reading = None
            raise

    # --- the kernel's counters --------------------------------------------------------------------------

    def _open(self) -> bool:
        pid = self._member()
        if pid is None:
            return False
        try:
            self._counters = os.open(f"/proc/{pid}/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return os.path.exists(
                f"/proc/{pid}/net/netlink"
            )  # a kernel without it: every look is at all sockets
        self._each = most_of_one()
        return True

    def _open_tables(self) -> bool:
        if self._tables is None:
            from sandbox.limits.socket_tables import SocketTables, open_network

            network = None
            if not self._shares_network:
                pid = self._member()
                network = None if pid is None else open_network(pid)
                if network is None:
                    return False
            self._tables = SocketTables(network, self._processes, self._each, not self._charges)
        return True

    def _shown(self) -> Shown | None:
        if self._counters is None:
            return None
        return shown_by(os.pread(self._counters, 1 << 12, 0).decode("ascii", "replace"))

    def _sockets(self) -> int | None:
        shown = self._shown()
        return None if shown is None else shown.sockets


class Shown(NamedTuple):
    """What the kernel's counters tell about a namespace."""

    sockets: int  # of all kinds; also those that no process has any more, or has not accepted yet
    closed: int  # bytes, of closed connections
    queued: int  # bytes in the queues of TCP and UDP, on the whole machine


def shown_by(counters: str) -> Shown | None:
    """`counters`: a /proc/net/sockstat. It lists the sockets of one namespace, but the memory in queues (in
    pages) of the whole machine. None: it does not tell what we need."""
    found: dict[tuple[str, str], int] = {}
    for line in counters.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        found |= {(name, key): int(value) for key, value in zip(words[::2], words[1::2], strict=False)}
    try:
        pages = found["TCP", "mem"] + found["UDP", "mem"]
        closed = found["TCP", "tw"] * _CONNECTION_BYTES
        return Shown(found["sockets", "used"], closed, pages * os.sysconf("SC_PAGE_SIZE"))
    except KeyError:
        return None


def most_of_one() -> float:
    """What one socket can hold at most, in bytes: each queue as much as the kernel lets anybody ask for."""
    import _socket

    try:
        buffers = 0
        with_any = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
        try:
            for option, name in ((_socket.SO_RCVBUF, "tcp_rmem"), (_socket.SO_SNDBUF, "tcp_wmem")):
                with_any.setsockopt(_socket.SOL_SOCKET, option, 1 << 30)
                with open(f"/proc/sys/net/ipv4/{name}", "rb") as file:
                    by_itself = int(file.read().split()[-1])  # TCP makes its buffers larger
                buffers += max(with_any.getsockopt(_socket.SOL_SOCKET, option), by_itself)
        finally:
            with_any.close()
    except (OSError, ValueError, IndexError):
        return math.inf
    return buffers + 2 * _LARGEST_PACKET_BYTES + _MOST_UNESTABLISHED * _CONNECTION_BYTES
