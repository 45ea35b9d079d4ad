"""Machine-wide resources: how much of each one plugin may take, and the meter for it.

They are open files (fs.file-max), memory of TCP and UDP sockets (net.ipv4.tcp_mem), and connections that were
closed with data still to send (net.ipv4.tcp_max_orphans). When one is used up, every other program fails. The
kernel has no limit of them for one plugin: a mapped file stays open after its descriptor is closed, so a
process can hold vm.max_map_count files, more than RLIMIT_NOFILE. As root 650,000 such files took 256 MiB of
the plugin's memory; without a cgroup nothing counted them.

So the runner measures. The kernel's counters for the whole machine cost microseconds. Only if one of them is
above the plugin's share, the runner counts the plugin's own part.
"""

from __future__ import annotations

import errno
import math
import os
from time import monotonic, thread_time

from sandbox.files import kernel_text
from sandbox.limits.assigned import Shares
from sandbox.limits.meter import MACHINE_SHARE, SHORTEST_PAUSE_SECONDS, Meter, pause_after, run_slice
from sandbox.speed.typed import TYPE_CHECKING, Callable, Generator, Iterable, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.cgroup import Cgroup, CgroupDirectory

FILES = "/proc/sys/fs/file-max"
SOCKET_PAGES = "/proc/sys/net/ipv4/tcp_mem"
ORPHANS = "/proc/sys/net/ipv4/tcp_max_orphans"
_FILES_IN_USE = "/proc/sys/fs/file-nr"
_SOCKETS_IN_USE = "/proc/self/net/sockstat"

# systemd raises fs.file-max to the largest possible number: then only memory bounds the files.
_NO_BOUND = 1 << 40
# The least memory that an open file takes, which the kernel charges to the memory of a cgroup.
_FILE_BYTES = 192
# The kernel's defaults for the other two, which a container with its own network namespace cannot read: 3/32
# of the memory, and one connection for each 256 KiB.
_SOCKET_PARTS_OF_MEMORY = (3, 32)
_BYTES_FOR_EACH_ORPHAN = 256 << 10

# How fast a plugin can open files on each of at most so many processors: 300,000 a second were measured on
# one, in C. Sockets: as in socket_meter.py.
_FASTEST_FILES_PER_SECOND, _PROCESSORS = 500_000, 8
_FASTEST_BYTES_PER_SECOND = 1 << 30
_LONGEST_PAUSE_SECONDS = 2.0
# When another meter has woken the loop in this last part of the pause, this one looks as well. Most idle
# plugins are woken once a second anyway, and so are not woken more often.
_EARLY_SHARE = 0.5
_PIECE_BYTES = 64 << 10
# A plugin may start processes during a look and pass files to them, so the list is read again.
_ROUNDS = 8
# FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING: closed by the program, but not finished by the kernel. A row
# without an inode belongs to no process. Timer 03 marks TIME_WAIT, which is not an orphan.
_ORPHANED = (b"04", b"05", b"09", b"0B")
_TIME_WAIT = b"03:"

_Check = Generator[None, None, str]
ByteCount = Generator[None, None, float]  # other meters have their turn between the steps


# --- how much ---------------------------------------------------------------------------------------------


def shares_of(part: float) -> Shares:
    """The shares of one plugin. `part`: the fraction of each resource, between 0 and 1."""
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
    """The last number in a file; None if this kernel or this namespace does not have it."""
    try:
        return int(kernel_text(path).split()[-1])
    except (ValueError, IndexError):
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
            return None
        raise  # the number is there: without it the plugin would get more than its share


# --- the meter --------------------------------------------------------------------------------------------


class ShareSources(NamedTuple):
    """Where to get the numbers of one plugin. None: that resource is not watched."""

    processes: Callable[[], Iterable[int]] | None  # the processes, for their open files
    socket_bytes: Callable[[], ByteCount] | None  # from the cgroup or from the socket tables
    member: Callable[[], int | None] | None  # for orphans: a process in the plugin's own network namespace


class ShareMeter(Meter):
    """Ends a plugin that takes more than its share of a machine-wide resource."""

    def __init__(self, shares: Shares, watched: ShareSources) -> None:
        self._shares = shares
        self._watched = watched
        self._counting: _Check | None = None
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
        why = run_slice(self._counting, now)
        self._took += thread_time() - began
        if why is None:
            self._early = self.due = now  # continue after the loop's other meters had their turn
            return None
        self._counting, self.why = None, why
        wait = pause_after(self._took, max(SHORTEST_PAUSE_SECONDS, self._pause))
        self.due = monotonic() + wait
        self._early = self.due - _EARLY_SHARE * wait
        return MACHINE_SHARE if self.why else None

    def _count(self) -> _Check:
        """Check each resource. Returns what the plugin has too much of, or ''."""
        shares, watched = self._shares, self._watched
        self._pause = _LONGEST_PAUSE_SECONDS
        if watched.processes is not None and shares.files is not None:
            used, whole = files_in_use(), shares.files / shares.part
            # Look again before half of what the machine has left could be used up.
            left = max(0.0, whole - used)
            self._pause = min(self._pause, left / 2 / (_FASTEST_FILES_PER_SECOND * self._processors))
            if used > shares.files:
                held = yield from count_files(watched.processes, shares.files)
                if held > shares.files:
                    return (
                        f"{held} open and mapped files, of {shares.files} ({shares.describe('fs.file-max')})"
                    )
                if held == 0 and used >= whole:  # counting needs an open file, which only root still gets
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
                most = f"of {shares.socket_bytes >> 10} KiB ({shares.describe('net.ipv4.tcp_mem')})"
                return f"{int(found) >> 10} KiB in sockets, {most}"
        if watched.member is not None and orphans > shares.orphans:
            own = yield from count_orphans(watched.member())
            if own > shares.orphans:
                most = f"of {shares.orphans} ({shares.describe('net.ipv4.tcp_max_orphans')})"
                return f"{own} connections that were closed and still have data to send, {most}"
        return ""


def can_hold_files(shares: Shares, memory: int | None) -> bool:
    """Whether a plugin can open more files than its share. `memory`: the limit of its cgroup, if any."""
    return shares.files is not None and (memory is None or memory // _FILE_BYTES > shares.files)


# --- the machine's counters -------------------------------------------------------------------------------


def files_in_use() -> float:
    try:
        return int(kernel_text(_FILES_IN_USE).split()[0])
    except OSError as error:
        return math.inf if error.errno == errno.ENFILE else 0


def sockets_in_use() -> tuple[int, int]:
    """Pages in TCP and UDP sockets, and orphaned connections, of the whole machine."""
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


def count_files(processes: Callable[[], Iterable[int]], enough: int) -> Generator[None, None, int]:
    """Count the files that these processes hold: descriptors and mappings. A file that several of them share
    counts for each. The count may stop once it is above `enough`."""
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
                        total += _count_descriptors(f"/proc/{pid}/task/{thread}/fd")
                for thread in threads:  # they share the mappings; one that has ended shows none
                    if mapped := (
                        yield from _count_mapped(f"/proc/{pid}/task/{thread}/maps", enough - total)
                    ):
                        total += mapped
                        break
            except OSError:
                continue  # it has ended
            if total > enough:
                return total
    return total


def _count_descriptors(folder: str) -> int:
    """The number of descriptors. Since Linux 6.2 it is the size of the folder."""
    return os.stat(folder).st_size or len(os.listdir(folder))


def _count_mapped(path: str, enough: int) -> Generator[None, None, int]:
    """Count mappings of files, those with an inode: proc_pid_maps(5)."""
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


def count_orphans(member: int | None) -> Generator[None, None, int]:
    """Count the orphaned connections of the network namespace that this process is in."""
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
    """Whether a row of /proc/net/tcp is an orphaned connection."""
    words = row.split(None, 10)
    return (
        len(words) > 9 and words[9] == b"0" and words[3] in _ORPHANED and not words[5].startswith(_TIME_WAIT)
    )


def socket_bytes_of(cgroup: Cgroup) -> Callable[[], ByteCount] | None:
    """A function that reads the socket memory of a cgroup. None: the kernel does not count it."""
    for group in cgroup.groups:
        if "memory" in group.site.controllers:
            return lambda: _read_socket_bytes(group)
    return None


def _read_socket_bytes(group: CgroupDirectory) -> ByteCount:
    yield
    if group.site.version == 1:
        return group.number("memory.kmem.tcp.usage_in_bytes") or 0
    return group.table("memory.stat").get("sock", 0)


def count_listed_bytes(member: int | None, processes: Callable[[], Iterable[int]], enough: int) -> ByteCount:
    """Add up the memory of the sockets that the kernel lists in the network namespace of this process."""
    from sandbox.limits.socket_tables import SocketTables, open_network

    network = None if member is None else open_network(member)
    if network is None:
        return 0.0
    tables = SocketTables(network, processes, 0.0)
    try:
        return (yield from tables.read(lambda: 0, enough, charged=math.inf))  # without unix sockets
    finally:
        tables.close()
