"""Bytes between two sockets, both ways, moved by splice: they never enter this process.

A way takes a pipe while it has bytes in it, and gives it back when the pipe is empty. So a connection at rest
holds two descriptors, and one whose reader is slow two more for each way.

Both sockets are set to be reset when they are closed, until the pump closes them in order. So if this process
dies, the kernel resets both, and neither end takes what it has for everything.
"""

from __future__ import annotations

import _socket as socket
import fcntl
import os
import struct

from sandbox.gate.loop import READ, WRITE, Loop, Timer
from sandbox.gate.meter import ByteMeter
from sandbox.speed.typed import Callable
from sandbox.speed.value import NamedTuple

# What is moved at once. A pipe holds 64 KiB by default; with 256 KiB a gigabyte takes 0.2 instead of 0.35
# seconds of processor time. A connection whose reader is slow keeps its pipe, so only some are that large.
_PIPE_BYTES = 256 * 1024
_MOST_LARGE = 8
_MOST_ROUNDS = 8  # of filling and emptying the pipe, until other connections have their turn
_MOST_SPARE = 8  # empty pipes that are kept
_DISCARDED_BYTES = 64 * 1024  # read at once of what nobody wants any more
# struct linger: close() drops what is unsent and resets the connection; or the kernel sends it after close().
_RESET, _DELIVER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
# struct tcp_info (linux/tcp.h): bytes that the other end has acknowledged. The first one is our SYN.
_BYTES_ACKED, _BYTES_ACKED_OFFSET = struct.Struct("=Q"), 120
# When to look again whether the server has acknowledged everything. Doubled until it is the longest.
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.005, 0.08
_EPOLLERR = 0x8
_EPOLLHUP = 0x10

Pipe = tuple[int, int]  # what is read, what is written


def reset_on_close(connection: socket.socket) -> None:
    """The other end sees an error at once, and never takes what it has for everything."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def deliver_on_close(connection: socket.socket) -> None:
    """The other end gets everything that was written, and then the end. The kernel does it, also when this
    process has ended."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DELIVER)


class PipePool:
    def __init__(self) -> None:
        self._spare: list[Pipe] = []  # large ones at the end, which are taken first
        self._large: set[Pipe] = set()

    def take(self) -> Pipe:
        if self._spare:
            return self._spare.pop()
        pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if len(self._large) < _MOST_LARGE:
            try:
                fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                self._large.add(pipe)
            except OSError:
                pass  # the user has too many large pipes (fs.pipe-user-pages-soft)
        return pipe

    def give_back(self, pipe: Pipe, *, empty: bool) -> None:
        if empty and len(self._spare) < _MOST_SPARE:
            self._spare.insert(len(self._spare) if pipe in self._large else 0, pipe)
            return
        self._large.discard(pipe)
        for fd in pipe:
            os.close(fd)


class PumpEnding(NamedTuple):
    reason: str  # "" if both sides closed it; else the second half of a sentence
    sent: int
    received: int


class Way:
    """One direction."""

    __slots__ = ("ended", "first", "moved", "paused", "pending", "pipe", "shut", "sink", "source", "unwanted")

    def __init__(self, source: socket.socket, sink: socket.socket, first: bytes = b"") -> None:
        self.source = source
        self.sink = sink
        self.first = first  # was read already, and goes before everything else
        self.pipe: Pipe | None = None
        self.pending = 0  # bytes in the pipe
        self.moved = 0
        self.ended = False  # the source has sent everything
        self.shut = False  # and the sink was told so
        self.paused = False  # waits for the rate limit
        self.unwanted = False  # the sink's end is gone: what the source sends is read, and dropped

    @property
    def blocked(self) -> bool:
        return bool(self.pending or self.first)


class SplicePump:
    """Takes both sockets over, and closes them. Calls `done` once."""

    __slots__ = (
        "_done",
        "_down",
        "_idle",
        "_last",
        "_leaving",
        "_look",
        "_look_seconds",
        "_loop",
        "_meter",
        "_pool",
        "_timer",
        "_up",
    )

    def __init__(
        self,
        loop: Loop,
        pool: PipePool,
        meter: ByteMeter,
        client: socket.socket,
        server: socket.socket,
        first: bytes,
        idle: float,
        done: Callable[[PumpEnding], None],
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._meter = meter
        self._idle = idle
        self._done: Callable[[PumpEnding], None] | None = done
        self._up = Way(client, server, first)
        self._down = Way(server, client)
        self._last = loop.now
        self._leaving = ""
        self._look: Timer | None = None
        self._look_seconds = _FIRST_LOOK_SECONDS
        meter.count(len(first))
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reset_on_close(connection)
        loop.watch(client.fileno(), READ, self._on_client)
        loop.watch(server.fileno(), READ, self._on_server)
        self._timer: Timer | None = loop.call_later(idle, self._on_idle)
        if first:
            self._move(self._up)

    @property
    def counted(self) -> tuple[int, int]:
        return self._up.moved, self._down.moved

    def end(self, reason: str) -> None:
        self._finish(reason)

    def deliver(self, reason: str) -> None:
        """The plugin has ended: end, for this reason, when the server has everything that it sent."""
        if self._done is None:
            return
        self._leaving = reason
        down = self._down
        if down.pipe is not None:
            self._pool.give_back(down.pipe, empty=not down.pending)
            down.pipe, down.pending = None, 0
        down.shut = down.unwanted = True
        # A server that cannot get rid of its answers may read nothing more.
        self._move(down)
        if not self._up.paused:
            self._move(self._up)

    # --- events ------------------------------------------------------------------------------------

    def _on_client(self, mask: int) -> None:
        self._on_event(mask, self._up, self._down, "the plugin")

    def _on_server(self, mask: int) -> None:
        self._on_event(mask, self._down, self._up, "the server")

    def _on_event(self, mask: int, out: Way, into: Way, side: str) -> None:
        """`out` has this socket as its source, `into` as its sink."""
        if self._done is None:
            return
        if mask & _EPOLLERR:
            self._finish(f"was reset by {side}")
            return
        if mask & _EPOLLHUP and not self._mask(out, into):
            # Reported again and again, and there is nothing to do yet. _settle() watches it again.
            self._loop.forget(out.source.fileno())
            return
        if mask & WRITE:
            self._move(into)
        if mask & (READ | _EPOLLHUP) and not (out.ended or out.paused or out.blocked):
            self._move(out)

    def _on_idle(self) -> None:
        left = self._last + self._idle - self._loop.now
        if left > 0:
            self._timer = self._loop.call_later(left, self._on_idle)
        else:
            self._finish(f"was closed after {self._idle:g} seconds without a byte (the idle limit)")

    # --- moving ------------------------------------------------------------------------------------

    def _move(self, way: Way) -> None:
        if self._done is None:
            return
        try:
            for _ in range(_MOST_ROUNDS):
                emptied = self._empty(way)
                if not emptied or way.ended or not self._fill(way):
                    break
            else:
                emptied = self._empty(way)
            # Also when the last round has met the end: no event will come for it again.
            if emptied and way.ended and not way.shut:
                way.shut = True
                way.sink.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._finish(f"broke: {os.strerror(error.errno or 0)}")
            return
        if self._done is not None:
            self._settle()

    def _empty(self, way: Way) -> bool:
        """Whether everything was handed to the sink."""
        try:
            while way.first:
                count = way.sink.send(way.first)
                way.first = way.first[count:]
                self._note(way, count)
            while way.pending:
                assert way.pipe is not None
                count = os.splice(
                    way.pipe[0], way.sink.fileno(), way.pending, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
                )
                way.pending -= count
                self._note(way, count)
        except BlockingIOError:
            return False
        if way.pipe is not None:
            self._pool.give_back(way.pipe, empty=True)
            way.pipe = None
        return True

    def _fill(self, way: Way) -> bool:
        """Whether something was read, so that it is worth to go on."""
        if way.unwanted:
            return self._discard(way)
        allowed = self._meter.allowance(_PIPE_BYTES)
        if not allowed:
            if self._meter.spent:
                self._finish("was closed: the plugin has moved all bytes that it may (the bytes limit)")
            else:
                way.paused = True
                self._meter.wait(lambda: self._resume(way))
            return False
        pipe = self._pool.take()
        try:
            count = os.splice(
                way.source.fileno(), pipe[1], allowed, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
            )
        except OSError as error:
            self._pool.give_back(pipe, empty=True)
            if isinstance(error, BlockingIOError):
                return False
            raise
        if not count:
            self._pool.give_back(pipe, empty=True)
            way.ended = True
            return True
        way.pipe, way.pending = pipe, count
        self._meter.count(count)
        return True

    def _discard(self, way: Way) -> bool:
        try:
            way.ended = not way.source.recv(_DISCARDED_BYTES)
        except BlockingIOError:
            return False
        return True

    def _clear_answers(self) -> None:
        """The kernel resets a connection that is closed with something to read in it."""
        try:
            for _ in range(_MOST_ROUNDS):
                if self._down.ended or not self._discard(self._down):
                    break
        except OSError:
            pass  # the server has reset it

    def _note(self, way: Way, count: int) -> None:
        way.moved += count
        self._last = self._loop.now

    def _resume(self, way: Way) -> None:
        way.paused = False
        self._move(way)

    def _mask(self, out: Way, into: Way) -> int:
        wants_read = not (out.ended or out.paused or out.blocked)
        return (READ if wants_read else 0) | (WRITE if into.blocked else 0)

    def _settle(self) -> None:
        """Watch what is needed next, and end when both ways have."""
        if self._up.shut and self._down.shut and not self._must_wait():
            self._finish(self._leaving, in_order=True)
            return
        for out, into, handler in (
            (self._up, self._down, self._on_client),
            (self._down, self._up, self._on_server),
        ):
            mask, fd = self._mask(out, into), out.source.fileno()
            if not mask:
                self._loop.change(fd, 0)
                continue
            try:
                self._loop.resume(fd, mask, handler)
            except OSError as error:  # it was forgotten, and the kernel does not watch it again
                self._finish(f"broke: {os.strerror(error.errno or 0)}")
                return

    def _must_wait(self) -> bool:
        """Whether something of a plugin that has ended is still on its way. An answer of the server would
        then reset a closed connection, and what is on its way would be lost."""
        if not self._leaving or self._down.ended or self._is_acknowledged():
            return False
        if self._look is None:
            self._look = self._loop.call_later(self._look_seconds, self._look_again)
            self._look_seconds = min(2 * self._look_seconds, _LONGEST_LOOK_SECONDS)
        return True

    def _look_again(self) -> None:
        self._look = None
        self._settle()

    def _is_acknowledged(self) -> bool:
        end = _BYTES_ACKED_OFFSET + _BYTES_ACKED.size
        info = self._up.sink.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, end)
        if len(info) < end:
            return True  # this kernel does not tell
        acknowledged: int = _BYTES_ACKED.unpack_from(info, _BYTES_ACKED_OFFSET)[0]
        return acknowledged > self._up.moved

    def _finish(self, reason: str, *, in_order: bool = False) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._loop.cancel(self._timer)
        self._loop.cancel(self._look)
        if in_order and self._leaving:
            self._clear_answers()
        for way in (self._up, self._down):
            if way.pipe is not None:
                self._pool.give_back(way.pipe, empty=not way.pending)
                way.pipe = None
            if in_order:
                deliver_on_close(way.source)
            self._loop.retire(way.source)
        done(PumpEnding(reason, self._up.moved, self._down.moved))
