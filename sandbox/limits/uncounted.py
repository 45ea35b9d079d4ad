"""Kernel pages that no limit counts: a backstop for ways to take them that nobody knows.

The pages of programs, files, slabs and page tables are counted by the kernel one by one. What is left of the
machine's memory has no counter: buffers of sockets and pipes, and what drivers take. A byte of a socket can
keep 32 KiB of it, and no cgroup, rlimit or socket table says so. So the runner looks at what is left.

It is one number for the whole machine, so three things have to come together before a plugin is ended. The
number grew by more than the plugin's memory limit and SPARE_BYTES, while the plugin used processor time
enough to have caused it; a second look says the same; and the plugin has sockets or pipes beside its three
streams. Of several such plugins the one with most sockets and pipes goes first. The others wait for a moment
and look again (`_TURN_SECONDS`).
"""

from __future__ import annotations

import errno
import math
import os
from time import monotonic, thread_time

from sandbox.files import kernel_text
from sandbox.limits.meter import (
    KERNEL_MEMORY,
    LATER_FACTOR,
    MACHINE_FILES,
    SHORTEST_PAUSE_SECONDS,
    Meter,
    pause_after,
    run_slice,
)
from sandbox.limits.socket_meter import LONGEST_PAUSE_SECONDS, ProcessTimes
from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Iterable, Mapping, Sequence

if TYPE_CHECKING:
    from sandbox.limits.cgroup import Cgroup

# Beyond its memory limit. Known ways that nobody counts take about half of it (docs/limits.md).
SPARE_BYTES = 256 << 20
# Each processor keeps up to 125 pages of each of the kernel's counters to itself.
_SPARE_PAGES_PER_PROCESSOR = 256

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MEMORY, _ZONES, _SOCKETS = MACHINE_FILES
_ZFS = "/proc/spl/kstat/zfs/arcstats"
# Lines of meminfo with pages that have a counter of their own. Not every kernel has all of them. Hugetlb is
# what the operator set aside, Balloon what a hypervisor took back, GPUActive and GPUReclaim are of graphics
# drivers. Shmem is in Cached, KReclaimable in Slab; VmallocUsed has KernelStack in it, and hides filters.
_COUNTED = tuple(
    (
        "MemFree Buffers Cached SwapCached AnonPages Slab KernelStack PageTables SecPageTables Percpu Hugetlb"
        " Balloon GPUActive GPUReclaim"
    ).split()
)

# How fast a plugin can take pages: 0.5 GiB a second were measured, and 2 GiB for a second of processor time.
# A way that is faster is noticed later, in proportion.
_FASTEST_BYTES_PER_SECOND = 1 << 30
_FASTEST_BYTES_PER_CPU_SECOND = 4 << 30
_IDLE_CPU_SECONDS = 0.001
# The number is read that often even if the plugin sleeps. What it grew by in the meantime could be blamed on
# a plugin that then wakes up.
_TRUSTED_SECONDS = 8.0
_EARLY_SHARE = 0.5  # as in shares.py: an idle plugin is not woken more often for this
# Cells of one process use a number that is not older than this.
_SHARED_SECONDS = 0.01

_AGREE_SECONDS = 0.05  # between the two looks
# A plugin with fewer sockets and pipes waits so long for each that has more: ending one takes that long.
_TURN_SECONDS, _MOST_TURNS = 0.25, 8
_STREAMS = 3
_RUNNERS_SOCKETS = 1  # in the plugin's namespace: it hears which names the plugin asks for
# Descriptors that are read of one plugin, which takes 2 ms. If there are more, so many count as sockets and
# pipes.
_MOST_LINKS = 1024
_MOST_ASKED = 16  # processes, for their network namespace
_STEP_LINKS = 32
_LONGEST_COUNT_SECONDS = 0.1  # then the rest is counted without a pause: meanwhile it takes more


# --- the number -------------------------------------------------------------------------------------------


def unseen_machine() -> str:
    """Why the number cannot be read here; '' if it can. lxcfs mounts a file of its own over meminfo, with the
    numbers of a container; gVisor has no zoneinfo."""
    try:
        own = os.stat("/proc/self/stat").st_dev
        foreign = [path for path in (_MEMORY, _ZONES) if os.stat(path).st_dev != own]
        uncounted_bytes()
    except OSError as error:
        if error.errno in _SHORTAGES:
            return ""  # of the moment: a later look will tell
        return f"{error.filename or _ZONES}: {error.strerror}"
    except (ValueError, KeyError):
        return f"{_MEMORY} or {_ZONES} has another form"
    return f"{foreign[0]} is not the kernel's own: another file is mounted there" if foreign else ""


def uncounted_bytes(texts: Mapping[str, str] | None = None) -> int:
    """Bytes of the machine's memory that no counter of the kernel names. `texts`: of the kernel's files, if
    they were read before. Raises OSError, ValueError, KeyError if the kernel does not say."""
    page = os.sysconf("SC_PAGE_SIZE")
    texts = texts or {path: kernel_text(path) for path in MACHINE_FILES}
    memory, zones = parse_memory(texts[_MEMORY]), parse_zones(texts[_ZONES])
    counted = sum(memory.get(name, 0) for name in _COUNTED)
    counted += max(zones["nr_zspages"] * page, memory.get("Zswap", 0))  # compressed swap
    counted += zones["count:"] * page + _socket_bytes(texts[_SOCKETS], page) + _zfs_bytes()
    return memory["MemTotal"] - counted


def parse_memory(text: str) -> dict[str, int]:
    """The lines of /proc/meminfo, in bytes. Those of HugePages_… are numbers of pages, and not used here."""
    rows = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in rows if len(words) > 1}


def parse_zones(text: str) -> dict[str, int]:
    """Sums over all zones of /proc/zoneinfo, in pages: those that each processor keeps ready, and those of
    compressed swap."""
    found = {"count:": 0, "nr_zspages": 0}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in found:
            found[words[0]] += int(words[1])
    return found


def _socket_bytes(text: str, page: int) -> int:
    """What TCP and UDP say of themselves, on the whole machine. Of a plugin, socket_meter.py counts it."""
    pages = 0
    try:
        for line in text.splitlines():
            words = line.split()
            if words[0] in ("TCP:", "UDP:") and "mem" in words:
                pages += int(words[words.index("mem") + 1])
    except (ValueError, IndexError):
        pass
    return pages * page


def _zfs_bytes() -> int:
    """The cache of ZFS, which is not in Cached."""
    try:
        rows = (line.split() for line in kernel_text(_ZFS).splitlines())
        return next(int(words[2]) for words in rows if words[:1] == ["size"])
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


_latest: tuple[float, int] = (-math.inf, 0)


def _shared_look() -> int:
    global _latest
    now = monotonic()
    if not _latest[0] <= now < _latest[0] + _SHARED_SECONDS:
        _latest = (now, uncounted_bytes())
    return _latest[1]


# --- the meter --------------------------------------------------------------------------------------------


def most_uncounted(limit: int) -> int:
    """Bytes by which the number may grow while a plugin with this memory limit works."""
    spare = (os.cpu_count() or 1) * _SPARE_PAGES_PER_PROCESSOR * os.sysconf("SC_PAGE_SIZE")
    return limit + SPARE_BYTES + spare


class UncountedMeter(Meter):
    """Ends a plugin that worked while pages that nobody counts became too many."""

    def __init__(
        self,
        limit: int,
        processes: Callable[[], Iterable[int]],
        cgroup: Cgroup | None,
        neighbours: Callable[[], Iterable[tuple[bool, Iterable[int]]]],
        at_launch: Mapping[str, str],
    ) -> None:
        """`limit`: of its memory. `neighbours`: of each other cell that we can see the processes, and whether
        it goes before this one if both have as many sockets and pipes. `at_launch`: what MACHINE_FILES held
        then."""
        self._most = most_uncounted(limit)
        self._processes = processes
        self._cgroup = cgroup
        self._neighbours = neighbours
        self._times = ProcessTimes()
        self._cpu: float | None = 0.0  # at the last look
        self._worked: float | None = None  # at the last wake-up
        self._read_at = -math.inf
        self._grown = 0.0  # bytes that this plugin may have taken
        self._over_since = math.inf
        self._counting: Generator[None, None, tuple[int, int]] | None = None
        self._is_idle = False
        self._at_launch = at_launch
        self._bytes: int | None = None  # at the last look
        self._early = self.due = math.inf if unseen_machine() else 0.0

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self._early:
            return None
        began = thread_time()
        if self._counting is None and not self._is_over(now):
            wait = self._pause(thread_time() - began)
            self.due = monotonic() + wait
            self._early = self.due - _EARLY_SHARE * wait
            return None
        return self._judge(now)

    def _is_over(self, now: float) -> bool:
        """Look at the number. The number grows and falls with all that the machine does: a part of a growth
        counts that the plugin had the processor time for, and every fall."""
        cpu = self._processor_time()
        used = math.inf if cpu is None or self._cpu is None else max(0.0, cpu - self._cpu)
        could = used * _FASTEST_BYTES_PER_CPU_SECOND
        if now < self._read_at + _TRUSTED_SECONDS and self._grown + could <= self._most:
            return False  # it cannot have become too much, so nothing is read
        try:
            if self._bytes is None:
                self._bytes = uncounted_bytes(self._at_launch)
            found = _shared_look()
        except (OSError, ValueError, KeyError):
            return False  # no free descriptor at the moment, or the files are not the kernel's
        self._grown = max(0.0, self._grown + min(found - self._bytes, could))
        self._bytes, self._cpu, self._read_at = found, cpu, now
        if self._grown <= self._most:
            self._over_since = math.inf
            return False
        self._over_since = min(self._over_since, now)
        return True

    def _processor_time(self) -> float | None:
        cpu = None if self._cgroup is None else self._cgroup.cpu()
        cpu = self._times.sum(self._processes()) if cpu is None else cpu
        self._is_idle = (
            cpu is not None and self._worked is not None and cpu - self._worked < _IDLE_CPU_SECONDS
        )
        self._worked = cpu
        return cpu

    def _pause(self, took: float) -> float:
        left = (self._most - self._grown) / _FASTEST_BYTES_PER_SECOND
        pause = min(LONGEST_PAUSE_SECONDS, max(SHORTEST_PAUSE_SECONDS, left))
        usual = min(LONGEST_PAUSE_SECONDS, LATER_FACTOR * pause) if self._is_idle else pause
        return pause_after(took, pause, usual)

    def _judge(self, now: float) -> str | None:
        """End the plugin if it is its turn."""
        if self._counting is None:
            self._counting = self._count()
        counted = run_slice(self._counting, now, self._over_since + _LONGEST_COUNT_SECONDS)
        if counted is None:
            self._early = self.due = now
            return None
        self._counting = None
        held, ahead = counted
        turn = self._over_since + _AGREE_SECONDS + min(ahead, _MOST_TURNS) * _TURN_SECONDS
        agree = self._read_at >= self._over_since + _AGREE_SECONDS
        if not held or now < turn or not agree:
            self._early = self.due = turn if held else now + LONGEST_PAUSE_SECONDS
            return None
        self.why = f"{int(self._grown) >> 20} MiB while it ran, and it has {held} sockets and pipes"
        return KERNEL_MEMORY

    def _count(self) -> Generator[None, None, tuple[int, int]]:
        """The plugin's sockets and pipes, and how many other cells have more."""
        held = yield from count_ends(self._processes())
        ahead = 0
        try:
            for goes_first, others in self._neighbours():
                found = yield from count_ends(others, held)
                ahead += found > held or (found == held and goes_first)
        except OSError:
            pass  # no free descriptor at the moment: then it waits for nobody
        return held, ahead


def count_ends(pids: Iterable[int], enough: int = _MOST_LINKS) -> Generator[None, None, int]:
    """Count the sockets and pipes of a cell, without its three streams, bwrap's and ours. The count may stop
    above `enough`. What we may not see counts nothing.

    The kernel counts the sockets of a network namespace, also those that no process has open: a plugin can
    send all but one through that one. Without a namespace of its own, what its processes have open counts,
    and of its streams only pipes are left out: it could close them and have as many sockets for nothing.
    """
    pids = list(pids)
    of_namespace = _namespace_sockets(pids)
    sockets: set[str] = set()
    pipes: set[str] = set()
    kinds = {"pipe": pipes} if of_namespace is not None else {"pipe": pipes, "socket": sockets}
    extra = max(0, (of_namespace or 0) - _RUNNERS_SOCKETS)
    read, bwraps = 0, _bwraps(pids)
    for pid in pids:
        if pid in bwraps:
            continue
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                read += 1
                held = extra + len(sockets) + max(0, len(pipes) - _STREAMS)
                if read > _MOST_LINKS or held > enough:
                    return max(held, _MOST_LINKS) if read > _MOST_LINKS else held
                if read % _STEP_LINKS == 0:
                    yield
                try:
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                except FileNotFoundError:
                    continue  # closed since it was listed
                kind, _, _ = target.partition(":")
                if kind in kinds:
                    kinds[kind].add(target)
        except OSError:
            continue  # it has ended, or is another user's
    return extra + len(sockets) + max(0, len(pipes) - _STREAMS)


def _bwraps(pids: Sequence[int]) -> set[int]:
    """Which of the first of these processes are bwrap's: the first one of the plugin's pid namespace, and
    what is in the namespace around that. No process of the plugin can be either."""
    numbers: dict[int, list[str]] = {}
    for pid in pids[:_MOST_ASKED]:
        try:
            lines = kernel_text(f"/proc/{pid}/status").splitlines()
            numbers[pid] = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
        except (OSError, ValueError, StopIteration):
            continue
    deepest = max(map(len, numbers.values()), default=0)
    return {pid for pid, each in numbers.items() if len(each) < deepest or each[-1] == "1"}


def _namespace_sockets(pids: Sequence[int]) -> int | None:
    """The sockets of the network namespace of these processes. None: it is ours, or cannot be seen."""
    ours = os.readlink("/proc/self/ns/net")
    for pid in pids[:_MOST_ASKED]:  # bwrap's are the first
        try:
            if os.readlink(f"/proc/{pid}/ns/net") != ours:
                words = kernel_text(f"/proc/{pid}/net/sockstat").split()
                # A raw socket is the runner's: it hears which ports of its loopback refuse the plugin, which
                # may make none itself.
                return int(words[words.index("used") + 1]) - int(words[words.index("RAW:") + 2])
        except (OSError, ValueError):
            continue
    return None
