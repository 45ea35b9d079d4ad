"""Memory in the sockets of a cage's own network namespace, as the kernel's tables have it."""

from __future__ import annotations

import math
import os
from time import monotonic

from sandbox.limits.socket_meter import LONGEST_PAUSE_SECONDS, UNFINISHED
from sandbox.scopes import suppress
from sandbox.typed import Callable, Generator, Iterable
from sandbox.value import NamedTuple

# An empty socket takes this much: the kernel's structures for it, its file and its inode.
_EMPTY_SOCKET_BYTES = 4096
# A closed connection, or one not yet established, takes this much. These belong to no process: a program that
# makes many short connections has thousands of them.
_EMPTY_CONNECTION_BYTES = 512
_CONNECTIONS_ONLY = (b"03", b"06", b"0C")  # SYN_RECV, TIME_WAIT, NEW_SYN_RECV
_LISTENING = b"0A"
_HEAD = b"sl"  # the first word of a table
# If the machine's counters show that the sockets hold no more than this part of the limit, the tables are
# read once in LONGEST_PAUSE_SECONDS. Reading them costs milliseconds even if they are empty, because the
# kernel walks through the table of all its namespaces. Its counters cost microseconds.
_SPARE_SHARE = 0.5
# How long the counters are believed if there are so few sockets that all they could hold unseen by the
# counters fits as well. Five hundred idle plugins would otherwise keep two processors busy.
_TRUSTED_SECONDS = 30.0
# Since 6.0 the kernel may count so much late, for each processor: 1 MiB of TCP and 1 MiB of UDP.
_LATE_BYTES = 2 << 20
# What the counters do not show of one socket: what it is sending (UDP counts only what arrives), its error
# queue, and the connections to it that are not established. Each has its limit, in bytes or in connections:
# the kernel gives a socket twice the buffer that is asked for, and a new namespace has its own somaxconn.
_BUFFER_LIMITS = ("wmem_max", "wmem_default", "rmem_max", "rmem_default")
_MOST_UNESTABLISHED = 4096
# For one table: a hundred thousand sockets. A larger table counts as over the limit.
_TABLE_BYTES = 16 << 20
# A hundred thousand sockets take a quarter of a second to look at. Whoever waits for other plugins in this
# process waits no longer than this, and the time of one piece: some five hundred sockets.
_SLICE_SECONDS = 0.01
_PIECE_BYTES = 64 << 10
# Then the rest is read without a pause: between the parts, data can be moved to sockets that were read.
_LONGEST_LOOK_SECONDS = 0.5


class SocketTables:
    """The sockets of a cage's own network namespace, as the kernel lists them for a process in it.

    `limit`: the meter's limit. 0: the tables are read at every look, and to their end.
    """

    def __init__(self, member: Callable[[], int | None], limit: int = 0) -> None:
        self._member = member
        self._limit = limit or math.inf
        self._spare = limit * _SPARE_SHARE
        self._late = os.sysconf("SC_NPROCESSORS_CONF") * _LATE_BYTES
        self._unseen = unseen_bytes()
        self._reading: Generator[None, None, float] | None = None
        self._fds: tuple[int, ...] = ()  # they keep the namespace open: its processes may come and go
        self._counters: int | None = None
        self._read_at = -math.inf

    def held(self) -> float | None:
        """None: there is no process in it yet. UNFINISHED: ask again."""
        if not self._fds and not self._open():
            return None
        now = monotonic()
        if self._reading is not None:
            return self._go_on(self._reading, now)
        if now < self._read_at + _TRUSTED_SECONDS:
            shown = self._shown()
            if shown is not None and shown.held <= self._spare:
                unseen = shown.sockets * self._unseen + self._late
                if shown.held + unseen <= self._spare or now < self._read_at + LONGEST_PAUSE_SECONDS:
                    return shown.held
        self._read_at = now
        self._reading = self._read()
        return self._go_on(self._reading, now)

    def _go_on(self, reading: Generator[None, None, float], now: float) -> float:
        try:
            while True:
                next(reading)
                if now + _SLICE_SECONDS <= monotonic() < self._read_at + _LONGEST_LOOK_SECONDS:
                    return UNFINISHED
        except StopIteration as stop:
            self._reading = None
            found: float = stop.value
            return found
        except BaseException:
            self._reading = None
            raise

    def _read(self) -> Generator[None, None, float]:
        """Bytes in all tables, or as many as are more than the limit."""
        total = 0
        for fd in self._fds:
            os.lseek(fd, 0, os.SEEK_SET)
            size, rest = 0, b""
            while piece := os.read(fd, _PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                total += held_in(lines)
                size += len(piece)
                if size > _TABLE_BYTES:
                    return math.inf
                if total > self._limit:
                    return total
                yield
        return total

    def _shown(self) -> Shown | None:
        """None: the kernel does not show it."""
        if self._counters is None:
            return None
        return shown_by(os.pread(self._counters, 1 << 12, 0).decode("ascii", "replace"))

    def _open(self) -> bool:
        pid = self._member()
        if pid is None:
            return False
        fds = []
        for name in ("tcp", "tcp6", "udp", "udp6"):  # a kernel may have no IPv6
            try:
                fds.append(os.open(f"/proc/{pid}/net/{name}", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                continue
        self._fds = tuple(fds)
        with suppress(OSError):
            self._counters = os.open(f"/proc/{pid}/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
        return bool(fds)

    def close(self) -> None:
        for fd in (*self._fds, *(() if self._counters is None else (self._counters,))):
            os.close(fd)
        self._fds, self._counters, self._reading = (), None, None


def held_in(lines: Iterable[bytes]) -> int:
    """Bytes that the sockets of a /proc/net/tcp or udp take: the queued bytes, and the socket itself."""
    total = 0
    for line in lines:
        words = line.split(None, 5)
        if len(words) < 5 or words[0] == _HEAD:
            continue  # cut short
        total += _EMPTY_CONNECTION_BYTES if words[3] in _CONNECTIONS_ONLY else _EMPTY_SOCKET_BYTES
        if words[3] != _LISTENING:  # for a listening socket the column counts connections, not bytes
            sent, _, received = words[4].partition(b":")
            total += int(sent, 16) + int(received, 16)
    return total


class Shown(NamedTuple):
    """What the kernel's counters tell about a namespace."""

    sockets: int  # of all kinds; also those that no process has any more, or has not accepted yet
    held: int  # bytes: by its sockets themselves, and by the data in queues on the whole machine


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
        closed = found["TCP", "tw"] * _EMPTY_CONNECTION_BYTES
        sockets = found["sockets", "used"]
    except KeyError:
        return None
    return Shown(sockets, sockets * _EMPTY_SOCKET_BYTES + closed + pages * os.sysconf("SC_PAGE_SIZE"))


def unseen_bytes() -> float:
    """What one socket can hold at most that the counters do not show."""
    try:
        buffers = sum(2 * _setting(name) for name in _BUFFER_LIMITS)
        return buffers + max(_MOST_UNESTABLISHED, _setting("somaxconn")) * _EMPTY_CONNECTION_BYTES
    except (OSError, ValueError):
        return math.inf


def _setting(name: str) -> int:
    with open(f"/proc/sys/net/core/{name}", "rb") as file:
        return int(file.read())
