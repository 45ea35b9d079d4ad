"""Adds up the kernel memory that a plugin's sockets hold.

The kernel lists the sockets of a network namespace that have an address. Two kinds are not listed, and still
hold memory: a TCP socket whose connection was reset, and a UDP socket that was disconnected. If enough
sockets are missing from the list to matter, the sockets are queried one by one, through the descriptors of
the processes. A socket that is in no process either (in transit through a unix socket, never accepted, or
closed while a thread waits for it) counts as the most that one socket can hold, unless there are only a few,
or they are gone within half a second.

On the host's network a listed socket may belong to any program: then only the descriptors count.
"""

from __future__ import annotations

import _socket
import errno
import math
import os
from time import monotonic

from sandbox.limits.socket_diag import (
    MEMORY_BYTES,
    TCP,
    UDP4,
    UDP6,
    UNIX,
    DiagFault,
    ListedSocket,
    list_sockets,
    memory_of,
    open_diag_socket,
)
from sandbox.speed.libc import get_errno, open_libc
from sandbox.speed.scopes import suppress
from sandbox.speed.typed import Callable, Container, Generator, Iterable, Iterator
from sandbox.speed.value import NamedTuple

# An empty socket takes this much: the kernel's structures for it, its file and its inode.
EMPTY_SOCKET_BYTES = 4096
# A connection that is closed or not established yet takes this much. It belongs to no process. A program that
# makes many short connections has thousands.
EMPTY_CONNECTION_BYTES = 512
_CONNECTIONS_ONLY = (b"03", b"06", b"0C")  # SYN_RECV, TIME_WAIT, NEW_SYN_RECV
_LISTENING = b"0A"
_TEXTS = ("tcp", "tcp6", "udp", "udp6", "netlink")  # a kernel may have no IPv6
_PIECE_BYTES = 64 << 10  # read from a table at a time: some five hundred sockets
_STEP_DESCRIPTORS = 32
_MOST_SOCKETS = 100_000  # that are read; more count as over the limit
# So many may be missing: the kernel frees a closed netlink socket some milliseconds later, and a program that
# looks up many names often closes some.
_FEW_MISSING = 8
_MISSING_SECONDS = 0.5

_PIDFD_GETFD = 438  # the same number on every architecture
_SO_MEMINFO = 55


class SocketLists(NamedTuple):
    """Descriptors to read the sockets of a namespace. They keep it alive without its processes."""

    texts: tuple[int, ...]  # tables of /proc/net
    kernel: _socket.socket | None  # for sock_diag; None: only the tables can be read

    def close(self) -> None:
        for fd in self.texts:
            os.close(fd)
        if self.kernel is not None:
            self.kernel.close()


def open_network(pid: int) -> SocketLists | None:
    """Open the namespace of this process. None: it has ended, or is in the host's namespace."""
    texts: list[int] = []
    try:
        for name in _TEXTS:
            with suppress(FileNotFoundError):
                texts.append(os.open(f"/proc/{pid}/net/{name}", os.O_RDONLY | os.O_CLOEXEC))
        kernel = None
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError:
            return SocketLists(tuple(texts), None)
        try:
            if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
                raise ProcessLookupError  # its number belongs to another process by now
            with suppress(OSError):
                kernel = open_diag_socket(namespace)
        finally:
            os.close(namespace)
    except OSError:
        for fd in texts:
            os.close(fd)
        return None
    return SocketLists(tuple(texts), kernel)


class SocketTables:
    """`network`: None if the plugin is on the host's network. `most`: the most bytes that one socket can
    hold."""

    def __init__(
        self, network: SocketLists | None, processes: Callable[[], Iterable[int]], most: float
    ) -> None:
        self._network = network
        self._processes = processes
        self._most = most
        self.is_sure = True  # False if missing sockets are not confirmed yet
        self._missing = 0.0  # missing sockets that are confirmed: at every look for half a second
        self._fewest: float | None = None  # missing at each look since `_since`
        self._since = 0.0

    def read(
        self, used: Callable[[], int | None], limit: float, charged: float = 0.0
    ) -> Generator[None, None, float]:
        """The bytes that all sockets hold. `used`: reads how many sockets there are. The count may stop above
        `limit`. `charged`: kernel memory that the caller has counted. A cgroup charges what is written to
        unix sockets, so of these only what is above that counts here. A generator: the caller may do other
        work between steps."""
        before = used()
        listed = _Listed(charged)
        by_diag = self._network is not None and (yield from self._list(self._network, listed, limit))
        if listed.is_over(limit):
            return max(listed.held, limit + 1)
        now = used()
        missing = math.inf if before is None or now is None else max(0, min(before, now) - listed.sockets)
        if by_diag and listed.held + missing * self._most <= limit:
            self._forget()
            return listed.held
        seen = yield from _query_sockets(self._processes(), listed.amounts if by_diag else ())
        missing -= sum(inode not in listed.amounts for inode in seen.found) + _FEW_MISSING
        for inode, one in seen.found.items():
            more = max(0, EMPTY_SOCKET_BYTES + one.held - listed.amounts.get(inode, 0))
            listed.count(more, one.is_unix)
        if self._network is None or seen.blind or not 0 < missing < math.inf:
            self._forget()
            return listed.held
        return listed.held + self._confirm_missing(missing) * self._most

    def _forget(self) -> None:
        self.is_sure, self._missing, self._fewest = True, 0.0, None

    def _confirm_missing(self, missing: float) -> float:
        """How many of the missing sockets count: those missing at every look for half a second. A socket may
        be closed or passed on during one look."""
        now = monotonic()
        if self._fewest is None:
            self._fewest, self._since = missing, now
        self._fewest = min(self._fewest, missing)
        if now >= self._since + _MISSING_SECONDS:
            self._missing, self._fewest, self._since = self._fewest, missing, now
        self.is_sure = missing <= self._missing
        return min(self._missing, missing)

    def _list(self, network: SocketLists, listed: _Listed, limit: float) -> Generator[None, None, bool]:
        """Read the lists into `listed`. Returns whether sock_diag has listed all, with all that they hold."""
        by_diag = network.kernel is not None
        if network.kernel is not None:
            try:
                for wanted in (TCP, UDP4, UDP6, UNIX):
                    for entries in list_sockets(network.kernel, wanted):
                        listed.add(entries, wanted is UNIX)
                        if listed.is_over(limit):
                            return True
                        yield
            except DiagFault:
                by_diag = False
                listed.clear()
        for fd in network.texts[-1:] if by_diag else network.texts:
            for lines in _lines(fd):
                listed.add(parse_table(lines, fd == network.texts[-1]))
                if listed.is_over(limit):
                    return by_diag
                yield
        return by_diag

    def close(self) -> None:
        if self._network is not None:
            self._network.close()


class _Listed:
    """The sockets listed so far. `charged`: bytes of unix sockets that are counted elsewhere."""

    def __init__(self, charged: float) -> None:
        self._charged = charged
        self.clear()

    def clear(self) -> None:
        self.sockets = 0
        self._others = 0
        self._unix = 0
        self.amounts: dict[int, int] = {}  # by inode, of those that a process has

    @property
    def held(self) -> float:
        return self._others + max(0, self._unix - self._charged)

    def is_over(self, limit: float) -> bool:
        return self.held > limit or self.sockets > _MOST_SOCKETS

    def count(self, amount: int, is_unix: bool) -> None:
        if is_unix:
            self._unix += amount
        else:
            self._others += amount

    def add(self, entries: Iterable[ListedSocket], is_unix: bool = False) -> None:
        for inode, held in entries:
            if held is None:
                self.count(EMPTY_CONNECTION_BYTES, is_unix)
                continue
            self.sockets += 1
            amount = EMPTY_SOCKET_BYTES + held
            self.count(amount, is_unix)
            if inode:
                self.amounts[inode] = amount


# --- /proc/net ----------------------------------------------------------------------------------------------


def _lines(fd: int) -> Iterator[list[bytes]]:
    os.lseek(fd, 0, os.SEEK_SET)
    rest = b""
    while piece := os.read(fd, _PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        yield lines


def parse_table(lines: Iterable[bytes], netlink: bool = False) -> Iterator[ListedSocket]:
    """The sockets in lines of /proc/net/tcp, udp or netlink."""
    for line in lines:
        words = line.split()
        if len(words) < 10 or not words[-1 if netlink else 9].isdigit():
            continue  # the header, or an incomplete line
        if netlink:
            if words[2] != b"0":  # the kernel's own ends
                yield ListedSocket(int(words[9]), int(words[4]) + int(words[5]))
        elif words[3] in _CONNECTIONS_ONLY:
            yield ListedSocket(0, None)
        elif words[3] == _LISTENING:  # the column counts connections, not bytes
            yield ListedSocket(int(words[9]), 0)
        else:
            sent, _, received = words[4].partition(b":")
            yield ListedSocket(int(words[9]), int(sent, 16) + int(received, 16))


# --- descriptors --------------------------------------------------------------------------------------------


class _Queried(NamedTuple):
    held: int  # bytes
    is_unix: bool


class _Seen(NamedTuple):
    found: dict[int, _Queried]  # by inode
    blind: bool  # we may inspect none of the processes


def _query_sockets(pids: Iterable[int], known: Container[int]) -> Generator[None, None, _Seen]:
    """Query each socket that is not `known` for its memory. Descriptor tables of single threads are not read:
    a socket that is only there counts as missing."""
    found: dict[int, _Queried] = {}
    looked = closed = 0
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended
        try:
            for at, name in enumerate(os.listdir(f"/proc/{pid}/fd")):
                if at % _STEP_DESCRIPTORS == 0:
                    yield
                inode = _socket_inode(f"/proc/{pid}/fd/{name}")
                if inode and inode not in known and inode not in found:
                    queried = _query_socket(process, int(name))
                    if queried is not None:
                        found[inode] = queried
            looked += 1
        except PermissionError:
            closed += 1
        except OSError:
            pass  # it has ended
        finally:
            os.close(process)
    return _Seen(found, closed > 0 and looked == 0)


def _socket_inode(link: str) -> int:
    """The inode of a socket; 0 if it is no socket, or closed since it was listed. Raises PermissionError."""
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return 0
    return int(target[8:-1]) if target.startswith("socket:[") else 0


def _query_socket(process: int, number: int) -> _Queried | None:
    """What a socket of another process holds. None: it was closed since it was listed. Raises
    PermissionError."""
    fd = open_libc().syscall(_PIDFD_GETFD, process, number, 0)
    if fd < 0:
        if get_errno() in (errno.EPERM, errno.ENOSYS):
            raise PermissionError
        return None
    try:
        one = _socket.socket(fileno=fd)
    except OSError:  # the number belongs to another file by now
        os.close(fd)
        return None
    is_unix = one.family == _socket.AF_UNIX
    try:
        held = memory_of(one.getsockopt(_socket.SOL_SOCKET, _SO_MEMINFO, MEMORY_BYTES))
        return _Queried(held, is_unix)
    except OSError:
        return _Queried(0, is_unix)
    finally:
        one.close()
