"""Memory that waits in TCP and UDP sockets, where the kernel does not hold a plugin to its limit.

cgroup v2 charges it like all other memory. v1 counts it on its own, and a plugin with many sockets passes
that limit: each of them may keep a little more. Without a cgroup nothing counts it but the machine's own
tcp_mem and udp_mem, which all programs share. So the runner looks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from time import monotonic, thread_time

from sandbox.meter import Meter

# A plugin that fills sockets as fast as it can, in bytes a second.
_FILL_RATE = 1 << 30
_SHORTEST_LOOK, _LONGEST_LOOK = 0.02, 1.0
# Of the time between two looks, the part that looking should take. How many sockets there are to look at is
# the plugin's choice, so the next look is at most this many times later for it.
_SHARE = 0.05
_LATEST = 4

# What a socket takes with nothing in it: the kernel's structures for it, its file and its inode.
_EMPTY_SOCKET = 4096
# What is left of a connection that was closed, and what there is of one that is not made yet. They belong to
# no process: a program that makes many short connections has thousands of them.
_EMPTY_CONNECTION = 512
_CONNECTIONS_ONLY = ("03", "06", "0C")  # SYN_RECV, TIME_WAIT, NEW_SYN_RECV
_LISTENING = "0A"
# Of one table, a hundred thousand sockets. What does not fit is not looked at, so more is too much.
_TABLE_LIMIT = 16 << 20


class SocketMeter(Meter):
    """`held`: the bytes that count now; None if that cannot be told (yet)."""

    def __init__(self, limit: int, held: Callable[[], float | None]) -> None:
        self._limit = limit
        self._held = held
        self.due = monotonic() + _SHORTEST_LOOK

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if now < self.due:
            return None
        began = thread_time()  # not on the wall's clock, which a plugin can slow down by being busy
        held = self._held() or 0
        took = thread_time() - began
        filled = max(0, self._limit - held) / _FILL_RATE
        wait = min(_LONGEST_LOOK, max(_SHORTEST_LOOK, filled))
        self.due = monotonic() + min(_LATEST * wait, max(took / _SHARE, wait))
        return "memory" if held > self._limit else None


class SocketTables:
    """The sockets of a cage's own network namespace, as the kernel lists them for a process in it."""

    def __init__(self, member: Callable[[], int | None]) -> None:
        self._member = member
        self._fds: tuple[int, ...] = ()  # they name the namespace: its processes may come and go

    def held(self) -> float | None:
        if not self._fds and not self._open():
            return None
        return sum(_held(fd) for fd in self._fds)

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
        return bool(fds)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


def _held(fd: int) -> float:
    os.lseek(fd, 0, os.SEEK_SET)
    pieces, size = [], 0
    while piece := os.read(fd, 1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > _TABLE_LIMIT:
            return math.inf
    return held_in(b"".join(pieces).decode("ascii", "replace"))


def held_in(table: str) -> int:
    """Bytes that the sockets of a /proc/net/tcp or udp take: what is queued in each, and the socket."""
    total = 0
    for line in table.splitlines()[1:]:
        words = line.split(None, 5)
        if len(words) < 5:
            continue  # cut short
        total += _EMPTY_CONNECTION if words[3] in _CONNECTIONS_ONLY else _EMPTY_SOCKET
        if words[3] != _LISTENING:  # which counts connections there, not bytes
            sent, _, received = words[4].partition(":")
            total += int(sent, 16) + int(received, 16)
    return total
