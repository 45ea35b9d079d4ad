"""Numbers that the whole machine shares: how much of each one plugin may take, and the meter for it.

Open files (fs.file-max), memory of TCP and UDP sockets (net.ipv4.tcp_mem), and connections that were closed
with data still to send (net.ipv4.tcp_max_orphans). Where they are used up, every other program fails. No
limit of the kernel's for one plugin bounds them: a file that is mapped stays open after its descriptor is
closed, so a process can hold vm.max_map_count files whatever RLIMIT_NOFILE says. As root 650,000 such files
took 256 MiB of the plugin's memory; without a cgroup nothing counted them.

So the runner measures. The kernel's counters for the whole machine cost microseconds. Only if one of them is
above the plugin's share, it is asked how much of that is the plugin's own.
"""

from __future__ import annotations

import errno
import math
import os
from time import monotonic, thread_time

from sandbox.files import kernel_text
from sandbox.limits.assigned import Shares
from sandbox.limits.meter import MACHINE_SHARE, Meter
from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Iterable, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.cgroup import Cgroup, CgroupDirectory

FILES = "/proc/sys/fs/file-max"
SOCKET_PAGES = "/proc/sys/net/ipv4/tcp_mem"
ORPHANS = "/proc/sys/net/ipv4/tcp_max_orphans"
_FILES_IN_USE = "/proc/sys/fs/file-nr"
_SOCKETS_IN_USE = "/proc/self/net/sockstat"

# systemd raises fs.file-max to the largest number there is: then memory bounds the files.
_NO_BOUND = 1 << 40
# The smallest that one open file takes, all of which the kernel charges to the memory of a cgroup.
_FILE_BYTES = 192
# In a network namespace of its own a container does not see the next two. The kernel's own defaults: 3/32 of
# the memory, and one connection for each 256 KiB.
_SOCKET_PARTS_OF_MEMORY = (3, 32)
_BYTES_FOR_EACH_ORPHAN = 256 << 10

# A plugin that opens files as fast as it can, for each of at most so many processors: 300,000 a second were
# measured on one, in C. Sockets: as in socket_meter.py.
_FASTEST_FILES_PER_SECOND, _PROCESSORS = 500_000, 8
_FASTEST_BYTES_PER_SECOND = 1 << 30
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 2.0
# When another meter has woken the loop in the last part of the pause, this one looks as well: then idle
# plugins, most of which are woken once a second anyway, are not woken more often for this.
_EARLY_SHARE = 0.5
# Of the time between two looks, as in socket_meter.py.
_LOOKING_SHARE, _LATER_FACTOR = 0.05, 4
_SLICE_SECONDS = 0.01
_PIECE_BYTES = 64 << 10
# A plugin may start processes while it is looked at, which take over the files of others.
_ROUNDS = 8
# FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING: closed by the program, and the kernel still has something to send
# or to wait for. A row without an inode belongs to no process. Timer 03 marks TIME_WAIT, counted apart.
_ORPHANED = (b"04", b"05", b"09", b"0B")
_TIME_WAIT = b"03:"

Counting = Generator[None, None, str]
Counted = Generator[None, None, float]  # others have their turn between the steps


# --- how much ---------------------------------------------------------------------------------------------


def shares_of(part: float) -> Shares:
    """`part`: of each number, between 0 and 1."""
    from sandbox import look

    for path in (FILES, SOCKET_PAGES, ORPHANS):
        look.note_content(path)
    page = os.sysconf("SC_PAGE_SIZE")
    memory = os.sysconf("SC_PHYS_PAGES") * page
    above, below = _SOCKET_PARTS_OF_MEMORY
    files, pages, orphans = last_number(FILES), last_number(SOCKET_PAGES), last_number(ORPHANS)
    sockets = memory * above // below if pages is None else pages * page
    orphans = memory // _BYTES_FOR_EACH_ORPHAN if orphans is None else orphans
    most = int(part * files) if files is not None and files < _NO_BOUND else None
    return Shares(part, most, int(part * sockets), int(part * orphans))


def last_number(path: str) -> int | None:
    """None: this kernel, or this namespace, does not show it."""
    try:
        return int(kernel_text(path).split()[-1])
    except (OSError, ValueError, IndexError):
        return None


# --- the meter --------------------------------------------------------------------------------------------


class Watched(NamedTuple):
    """What is asked about one plugin. None: that number is not watched."""

    processes: Callable[[], Iterable[int]] | None  # for its files
    socket_bytes: Callable[[], Counted] | None  # as its cgroup or the tables of sockets have it
    member: Callable[[], int | None] | None  # for orphans: a process in its own network namespace


class ShareMeter(Meter):
    """Ends a plugin that takes more than its share of one of the numbers."""

    def __init__(self, shares: Shares, watched: Watched) -> None:
        self._shares = shares
        self._watched = watched
        self._counting: Counting | None = None
        self._took = 0.0
        self._pause = _LONGEST_PAUSE_SECONDS
        self._processors = min(_PROCESSORS, os.cpu_count() or 1)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._early = 0.0
        self.due = 0.0

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self._early:
            return None
        began = thread_time()
        if self._counting is None:
            self._counting, self._took = self._count(), 0.0
        try:
            while True:
                next(self._counting)
                if monotonic() >= now + _SLICE_SECONDS:
                    self._took += thread_time() - began
                    self._early = self.due = now  # the loop's others have their turn, and then it goes on
                    return None
        except StopIteration as stop:
            self._counting = None
            self.why = stop.value
        took = self._took + thread_time() - began
        pause = max(_SHORTEST_PAUSE_SECONDS, self._pause)
        wait = min(_LATER_FACTOR * pause, max(took / _LOOKING_SHARE, pause))
        self.due = monotonic() + wait
        self._early = self.due - _EARLY_SHARE * wait
        return MACHINE_SHARE if self.why else None

    def _count(self) -> Counting:
        """What the plugin has too much of; empty if nothing."""
        shares, watched = self._shares, self._watched
        self._pause = _LONGEST_PAUSE_SECONDS
        if watched.processes is not None and shares.files is not None:
            used, whole = files_in_use(), shares.files / shares.part
            # Until half of what is left on the whole machine could be used up.
            left = max(0.0, whole - used)
            self._pause = min(self._pause, left / 2 / (_FASTEST_FILES_PER_SECOND * self._processors))
            if used > shares.files:
                held = yield from held_files(watched.processes, shares.files)
                if held > shares.files:
                    return f"{held} open and mapped files, of {shares.files} ({shares.told('fs.file-max')})"
                if held == 0 and used >= whole:  # to look takes an open file, which only root still gets
                    return "no file can be opened on this machine any more, so the plugin's are not counted"
        if watched.socket_bytes is None and watched.member is None:
            return ""
        pages, orphans = sockets_in_use()
        memory = pages * self._page
        left = max(0.0, shares.socket_bytes / shares.part - memory)
        self._pause = min(self._pause, left / 2 / _FASTEST_BYTES_PER_SECOND)
        if watched.socket_bytes is not None and memory > shares.socket_bytes:
            found = yield from watched.socket_bytes()
            if found > shares.socket_bytes:
                most = f"of {shares.socket_bytes >> 10} KiB ({shares.told('net.ipv4.tcp_mem')})"
                return f"{int(found) >> 10} KiB in sockets, {most}"
        if watched.member is not None and orphans > shares.orphans:
            own = yield from orphans_of(watched.member())
            if own > shares.orphans:
                most = f"of {shares.orphans} ({shares.told('net.ipv4.tcp_max_orphans')})"
                return f"{own} connections that were closed and still have data to send, {most}"
        return ""


def can_hold_files(shares: Shares, memory: int | None) -> bool:
    """Whether a plugin can open more files than its share. `memory`: of its cgroup, if it has a limit."""
    return shares.files is not None and (memory is None or memory // _FILE_BYTES > shares.files)


# --- the machine's counters -------------------------------------------------------------------------------


def files_in_use() -> float:
    try:
        return int(kernel_text(_FILES_IN_USE).split()[0])
    except OSError as error:
        return math.inf if error.errno == errno.ENFILE else 0


def sockets_in_use() -> tuple[int, int]:
    """Pages in TCP and UDP sockets, and orphaned connections. Every namespace shows those of all."""
    pages = orphans = 0
    try:
        table = kernel_text(_SOCKETS_IN_USE)
    except OSError:  # a kernel without IPv4
        return 0, 0
    for line in table.splitlines():
        name, _, rest = line.partition(":")
        if name in ("TCP", "UDP"):
            words = rest.split()
            found = dict(zip(words[::2], words[1::2], strict=False))
            pages += int(found.get("mem", 0))
            orphans += int(found.get("orphan", 0))
    return pages, orphans


# --- the plugin's own -------------------------------------------------------------------------------------


def held_files(processes: Callable[[], Iterable[int]], enough: int) -> Generator[None, None, int]:
    """The files that these processes hold: descriptors and mappings. A file that several of them share is
    counted for each. Not more than needed is counted above `enough`."""
    from sandbox.limits.deleted_files import TABLES_COMPARED, TableComparison

    comparison = TableComparison()
    seen: set[int] = set()
    total = 0
    for _ in range(_ROUNDS):
        new = [pid for pid in processes() if pid not in seen]
        if not new:
            break
        for pid in new:
            seen.add(pid)
            try:
                tables: list[str] = []
                threads = os.listdir(f"/proc/{pid}/task")
                for thread in threads:
                    yield
                    if not any(comparison.same(thread, other) for other in tables[:TABLES_COMPARED]):
                        tables.append(thread)
                        total += _descriptors(f"/proc/{pid}/task/{thread}/fd")
                for thread in threads:  # they share one memory; one that has ended shows none
                    if mapped := (yield from _mapped(f"/proc/{pid}/task/{thread}/maps", enough - total)):
                        total += mapped
                        break
            except OSError:
                continue  # it has ended
            if total > enough:
                return total
    return total


def _descriptors(folder: str) -> int:
    """Since Linux 6.2 the size of the folder is their number."""
    return os.stat(folder).st_size or len(os.listdir(folder))


def _mapped(path: str, enough: int) -> Generator[None, None, int]:
    """Mappings of files: those with an inode. proc_pid_maps(5)."""
    found, rest = 0, b""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while found <= enough and (piece := os.read(fd, _PIECE_BYTES)):
            *lines, rest = (rest + piece).split(b"\n")
            found += sum(line.split(None, 5)[4] != b"0" for line in lines)
            yield
    finally:
        os.close(fd)
    return found


def orphans_of(member: int | None) -> Generator[None, None, int]:
    """Of the network namespace that this process is in."""
    found = 0
    for name in ("tcp", "tcp6"):
        try:
            fd = os.open(f"/proc/{member}/net/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it has ended; or there is no IPv6
            continue
        try:
            rest = b""
            while piece := os.read(fd, _PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                found += sum(map(is_orphan, lines))
                yield
        finally:
            os.close(fd)
    return found


def is_orphan(row: bytes) -> bool:
    """Of a /proc/net/tcp."""
    words = row.split(None, 10)
    return (
        len(words) > 9 and words[9] == b"0" and words[3] in _ORPHANED and not words[5].startswith(_TIME_WAIT)
    )


def socket_bytes_of(cgroup: Cgroup) -> Callable[[], Counted] | None:
    """What the kernel counts of the sockets of a cgroup. None: it counts none."""
    for group in cgroup.groups:
        if "memory" in group.site.controllers:
            return lambda: _counted_in(group)
    return None


def _counted_in(group: CgroupDirectory) -> Counted:
    yield
    if group.site.version == 1:
        return group.number("memory.kmem.tcp.usage_in_bytes") or 0
    return group.table("memory.stat").get("sock", 0)


def listed_bytes(member: int | None, processes: Callable[[], Iterable[int]], enough: int) -> Counted:
    """What the sockets hold that the kernel lists in the network namespace of this process."""
    from sandbox.limits.socket_tables import SocketTables, open_network

    network = None if member is None else open_network(member)
    if network is None:
        return 0.0
    tables = SocketTables(network, processes, 0.0, unix=False)
    try:
        return (yield from tables.read(lambda: 0, enough))
    finally:
        tables.close()
