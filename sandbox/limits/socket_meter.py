"""The memory limit for kernel memory of sockets, which no cgroup limits in full.

cgroup v2 charges received TCP and UDP data, and v1 counts TCP separately. Without a cgroup only machine-wide
numbers limit it. Replies of netlink, error queues, corked datagrams and pages that were moved into unix
sockets are charged nowhere. So the runner adds up what the plugin's sockets hold (socket_tables.py) and the
memory that a cgroup charges for its processes, and ends a plugin that has more than its limit.

Adding up costs a millisecond even for one socket, because the kernel walks through the table of all
namespaces. So the runner first rules out that it could be too much: if there are few sockets, or if the
plugin has used too little processor time since the last look to fill the rest.
"""

from __future__ import annotations

import math
import os
from time import monotonic, thread_time

from sandbox.limits.meter import LATER_FACTOR, SHORTEST_PAUSE_SECONDS, Meter, pause_after, run_slice
from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Iterable, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.cgroup import Cgroup
    from sandbox.limits.socket_tables import SocketTables

# How fast a plugin can fill sockets: in bytes per second, and per second of processor time.
_FASTEST_BYTES_PER_SECOND = 1 << 30
_FASTEST_BYTES_PER_CPU_SECOND = 4 << 30
LONGEST_PAUSE_SECONDS = 1.0
_IDLE_CPU_SECONDS = 0.001  # a plugin that used less since the last look is idle, and looked at less often
# A look at a hundred thousand sockets takes half a second. After that time the rest is read without a pause:
# between steps, a plugin could move data to sockets that were already read.
_LONGEST_LOOK_SECONDS = 0.5
# After this time a look is due even if the plugin used no processor time: other programs may send data to it.
_TRUSTED_SECONDS = 30.0
# Without a cgroup the time of each process is read, if there are at most so many. Else a look is due once a
# second, or when there are so many more sockets, or when the queues of the whole machine have grown by this
# part of the limit.
_MOST_ASKED = 32
_MORE_SOCKETS = 4
_MORE_SHARE = 1 / 8
# The time of a process that has ended is lost, so each change of the processes counts as this much.
_CHANGE_CPU_SECONDS = 1.0

_CONNECTION_BYTES = 512  # of a closed connection
_LARGEST_PACKET_BYTES = 128 << 10  # a nearly full queue takes one more
_MOST_UNESTABLISHED = 4096  # connections that wait on one socket: somaxconn of a new namespace


class _LastLook(NamedTuple):
    """The result of the last look."""

    at: float = -math.inf
    held: float = 0.0  # bytes that are known
    most: float = 0.0  # an upper bound, in bytes
    cpu: float | None = None
    shown: SocketCounters | None = None


class ProcessTimes:
    """Adds up the processor time of processes that are in no cgroup."""

    def __init__(self) -> None:
        self._pids: list[int] | None = None
        self._ticks = 0
        self._sum = 0.0

    def sum(self, pids: Iterable[int]) -> float | None:
        """Seconds, an upper bound. None: there are too many processes."""
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
    """The time of a process and of children it has waited for, from proc_pid_stat(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return sum(map(int, file.read().rpartition(b") ")[2].split()[11:15]))
    except OSError:
        return 0  # it has ended


class SocketMeter(Meter):
    """Ends a plugin whose sockets and processes hold more memory than its limit."""

    def __init__(
        self,
        limit: int,
        member: Callable[[], int | None],
        processes: Callable[[], Iterable[int]],
        cgroup: Cgroup | None = None,
        shares_network: bool = False,
    ) -> None:
        """`member`: a process in the plugin's own network namespace, or None if there is none yet.
        `processes`: all of the plugin's processes. `cgroup`: the cgroup they are in, if any.
        `shares_network`: the plugin is in the host's network namespace."""
        self._limit = limit
        self._member = member
        self._processes = processes
        self._cgroup = cgroup
        self._charges = cgroup is not None and cgroup.counts_memory
        self._shares_network = shares_network
        self._each = math.inf  # the most bytes that one socket can hold
        self._counters: int | None = None
        self._tables: SocketTables | None = None
        self._reading: Generator[None, None, float] | None = None
        self._began = 0.0  # when the current look began
        self._took = 0.0  # processor time of the current look
        self._last_look = _LastLook()
        self._times = ProcessTimes()
        # Processor time, or the counters, at the last look.
        self._before: float | SocketCounters | None = None
        self._is_idle = False
        self._most = 0.0
        self.due = monotonic() + SHORTEST_PAUSE_SECONDS

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        began = thread_time()  # not the wall clock, because a busy plugin may delay us
        held = self._held(now)
        self._took += thread_time() - began
        if held is None:
            self.due = now
            return None
        took, self._took = self._took, 0.0
        self._most = max(self._most, held)
        filled = max(0, self._limit - held) / _FASTEST_BYTES_PER_SECOND
        pause = min(LONGEST_PAUSE_SECONDS, max(SHORTEST_PAUSE_SECONDS, filled))
        usual = min(LONGEST_PAUSE_SECONDS, LATER_FACTOR * pause) if self._is_idle else pause
        self.due = monotonic() + pause_after(took, pause, usual)
        return "memory" if held > self._limit else None

    def peaks(self) -> Mapping[str, float]:
        """The memory, if a cgroup charges it. Else only part of it is known, which counts if above the
        limit."""
        known = self._charges or self._most > self._limit
        return {"memory": self._most} if known and self._most else {}

    def close(self) -> None:
        if self._counters is not None:
            os.close(self._counters)
        if self._tables is not None:
            self._tables.close()
        self._counters = self._tables = self._reading = None

    def _held(self, now: float) -> float | None:
        """The bytes that are held; if above the limit, a lower bound. None: the look is not finished."""
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
                self._update_idle(None, shown)
                self._last_look = _LastLook(now, 0.0, most, None, shown)
                return 0.0
            cpu = None if self._cgroup is None else self._cgroup.cpu()
            if cpu is None:
                cpu = self._times.sum(self._processes())
            self._update_idle(cpu, shown)
            if self._is_quiet(now, cpu, shown):
                return self._last_look.held
            pages, kernel = self._charged()
            charged = float(pages + kernel)
            if charged + most <= self._limit:
                self._last_look = _LastLook(now, charged, charged + most, cpu, shown)
                return charged
            if not self._open_tables():
                return charged
            self._began, self._last_look = now, _LastLook(now, 0.0, 0.0, cpu, shown)
            self._reading = self._read(charged, 0 if shown is None else shown.closed, kernel)
        return self._continue_look(self._reading, now)

    def _update_idle(self, cpu: float | None, shown: SocketCounters | None) -> None:
        if cpu is not None and isinstance(self._before, float):
            self._is_idle = cpu - self._before < _IDLE_CPU_SECONDS
        else:
            self._is_idle = cpu is None and shown is not None and shown == self._before
        self._before = shown if cpu is None else cpu

    def _is_quiet(self, now: float, cpu: float | None, shown: SocketCounters | None) -> bool:
        """Whether the plugin cannot have exceeded the limit since the last look."""
        last = self._last_look
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

    def _charged(self) -> tuple[int, int]:
        """Bytes that the cgroup charges: of the processes, and of the kernel."""
        return (self._cgroup.charged() if self._cgroup is not None else None) or (0, 0)

    def _read(self, charged: float, closed: int, kernel: int) -> Generator[None, None, float]:
        """`kernel`: the part of `charged` in which unix sockets may be counted."""
        assert self._tables is not None
        found = yield from self._tables.read(self._sockets, self._limit - charged - closed, kernel)
        return charged + closed + found

    def _continue_look(self, reading: Generator[None, None, float], now: float) -> float | None:
        try:
            found = run_slice(reading, now, self._began + _LONGEST_LOOK_SECONDS)
        except BaseException:
            self._reading = None
            raise
        if found is not None:
            self._reading = None
            is_sure = self._tables is None or self._tables.is_sure
            self._last_look = self._last_look._replace(held=found, most=found if is_sure else math.inf)
        return found

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
            )  # this kernel has no sockstat: every look reads all sockets
        self._each = largest_socket_bytes()
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
            self._tables = SocketTables(network, self._processes, self._each)
        return True

    def _shown(self) -> SocketCounters | None:
        if self._counters is None:
            return None
        return parse_sockstat(os.pread(self._counters, 1 << 12, 0).decode("ascii", "replace"))

    def _sockets(self) -> int | None:
        shown = self._shown()
        return None if shown is None else shown.sockets


class SocketCounters(NamedTuple):
    """The kernel's socket counters of a network namespace."""

    sockets: int  # of all kinds, also those that are in no process any more or not accepted yet
    closed: int  # bytes of closed connections
    queued: int  # bytes in TCP and UDP queues of the whole machine


def parse_sockstat(counters: str) -> SocketCounters | None:
    """Parse a /proc/net/sockstat. It counts the sockets of one namespace, but the memory in queues (in pages)
    of the whole machine. None: a number is missing."""
    found: dict[tuple[str, str], int] = {}
    for line in counters.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        found |= {(name, key): int(value) for key, value in zip(words[::2], words[1::2], strict=False)}
    try:
        pages = found["TCP", "mem"] + found["UDP", "mem"]
        closed = found["TCP", "tw"] * _CONNECTION_BYTES
        return SocketCounters(found["sockets", "used"], closed, pages * os.sysconf("SC_PAGE_SIZE"))
    except KeyError:
        return None


def largest_socket_bytes() -> float:
    """The most bytes that one socket can hold: both queues as large as the kernel allows."""
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
