"""Moves bytes between two sockets in both directions, by splice(2): they never enter this process.

A direction holds a pipe only while there are bytes in it. So an idle connection has two descriptors, and two
more for each direction whose reader is slow.

Both sockets are set to be reset on close, until the pump closes them in order. So if this process dies, the
kernel resets both, and neither end takes a part of the data for all of it.
"""

from __future__ import annotations

import _socket as socket
import fcntl
import os
import struct

from sandbox.gate.loop import READ, WRITE, Loop, Timer
from sandbox.speed.typed import Callable
from sandbox.speed.value import NamedTuple

# Bytes moved by one splice. A pipe holds 64 KiB by default; with 256 KiB a gigabyte takes 0.2 instead of 0.35
# seconds of processor time. A connection whose reader is slow keeps its pipe, so only some are that large.
_PIPE_BYTES = 256 * 1024
_MOST_LARGE = 8
_MOST_ROUNDS = 8  # of filling and emptying the pipe, before other connections have their turn
_FEW_BYTES = 16 * 1024  # who sends no more at once waits for an answer
_MOST_SPARE = 8  # empty pipes in the pool
_DISCARDED_BYTES = 64 * 1024  # per read of data that is thrown away
# struct linger: close() resets the connection and drops unsent data; or the kernel sends it after close().
_RESET, _DELIVER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
# struct tcp_info (linux/tcp.h): bytes that the other end has acknowledged. The count includes our SYN.
_BYTES_ACKED, _BYTES_ACKED_OFFSET = struct.Struct("=Q"), 120
# Pause before checking again whether the server has acknowledged everything. Doubled up to the longest.
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.005, 0.08
# Bytes that may be moved at once after a pause, in seconds of the rate. Also the longest that a connection
# waits before it tries again.
_BURST_SECONDS = 0.1
_EPOLLERR = 0x8
_EPOLLHUP = 0x10

Pipe = tuple[int, int]  # read end, write end


def reset_on_close(connection: socket.socket) -> None:
    """Make close() send a reset: the other end sees an error, and does not take a part for the whole."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def deliver_on_close(connection: socket.socket) -> None:
    """Make close() deliver all written bytes, and then the end of the stream. The kernel does that even after
    this process has ended."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DELIVER)


class PipePool:
    """Pipes to splice through, reused."""

    def __init__(self) -> None:
        self._spare: list[Pipe] = []  # large ones at the end: they are taken first
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


class ByteMeter:
    """Limits the bytes of all connections of one plugin together: their total, and their rate per second."""

    def __init__(self, loop: Loop, most: int | None, rate: int | None) -> None:
        self._loop = loop
        self._left = most
        self._rate = rate
        self._burst = max(1, int((rate or 0) * _BURST_SECONDS))
        self._tokens = float(self._burst)
        self._filled = loop.now
        self._waiting: list[Callable[[], None]] = []

    @property
    def spent(self) -> bool:
        """Whether the total is used up."""
        return self._left is not None and self._left <= 0

    def allowance(self, wanted: int) -> int:
        """How many bytes may be moved now, at most `wanted`."""
        if self._left is not None:
            wanted = max(0, min(wanted, self._left))
        if self._rate is None:
            return wanted
        now = self._loop.now
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        return min(wanted, int(self._tokens))

    def count(self, moved: int) -> None:
        if self._left is not None:
            self._left -= moved
        if self._rate is not None:
            self._tokens -= moved

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the rate may allow more."""
        assert self._rate is not None
        if not self._waiting:
            # Until one byte is allowed, and at least a quarter of a burst.
            seconds = max(_BURST_SECONDS / 4, (1 - self._tokens) / self._rate)
            self._loop.call_later(seconds, self._wake)
        self._waiting.append(resume)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        # Each waits again at the end of the list, so that all get their turn.
        for resume in waiting:
            resume()


class PumpEnding(NamedTuple):
    reason: str  # "" if both sides closed it; else the rest of a sentence, as in "was reset by the server"
    sent: int
    received: int


class Direction:
    """The bytes from one socket to the other."""

    __slots__ = ("ended", "first", "moved", "paused", "pending", "pipe", "shut", "sink", "source", "unwanted")

    def __init__(self, source: socket.socket, sink: socket.socket, first: bytes = b"") -> None:
        self.source = source
        self.sink = sink
        self.first = first  # bytes that were already read: they are sent before all others
        self.pipe: Pipe | None = None
        self.pending = 0  # bytes in the pipe
        self.moved = 0
        self.ended = False  # the source has sent everything
        self.shut = False  # the sink has been shut down for writing
        self.paused = False  # waits for the rate limit
        self.unwanted = False  # the reader is gone: bytes of the source are read and dropped

    @property
    def blocked(self) -> bool:
        return bool(self.pending or self.first)


class SplicePump:
    """Connects a plugin's socket with a server's. Owns both and closes them. Calls `done` once."""

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
        self._up = Direction(client, server, first)
        self._down = Direction(server, client)
        self._last = loop.now
        self._leaving = ""
        self._look: Timer | None = None
        self._look_seconds = _FIRST_LOOK_SECONDS
        meter.count(len(first))
        for connection in (client, server):
            if connection.family != socket.AF_UNIX:
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
        """For a plugin that has ended: finish with this reason when the server has all that the plugin
        sent."""
        if self._done is None:
            return
        self._leaving = reason
        down = self._down
        if down.pipe is not None:
            self._pool.give_back(down.pipe, empty=not down.pending)
            down.pipe, down.pending = None, 0
        down.shut = down.unwanted = True
        # A server that cannot send its answers may stop reading, so they are read and dropped.
        self._move(down)
        if not self._up.paused:
            self._move(self._up)

    # --- events ------------------------------------------------------------------------------------

    def _on_client(self, mask: int) -> None:
        self._on_event(mask, self._up, self._down, "the plugin")

    def _on_server(self, mask: int) -> None:
        self._on_event(mask, self._down, self._up, "the server")

    def _on_event(self, mask: int, out: Direction, into: Direction, side: str) -> None:
        """Handle an event of a socket that is the source of `out` and the sink of `into`."""
        if self._done is None:
            return
        if mask & _EPOLLERR:
            self._finish(f"was reset by {side}")
            return
        if mask & _EPOLLHUP and not self._mask(out, into):
            # epoll would report it again and again, with nothing to do yet. _settle() watches it again.
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

    def _move(self, direction: Direction) -> None:
        if self._done is None:
            return
        try:
            emptied = self._empty(direction)
            for _ in range(_MOST_ROUNDS):
                if not emptied or direction.ended or not self._fill(direction):
                    break
                was_last = 0 < direction.pending < _FEW_BYTES
                emptied = self._empty(direction)
                if was_last:
                    break  # most likely: then asking again would only be refused, and epoll tells of more
            # Also if the last round met the end of the source: there is no further event for it.
            if emptied and direction.ended and not direction.shut:
                direction.shut = True
                direction.sink.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._finish(f"broke: {os.strerror(error.errno or 0)}")
            return
        if self._done is not None:
            self._settle()

    def _empty(self, direction: Direction) -> bool:
        """Send what is pending to the sink. Returns whether all of it was taken."""
        try:
            while direction.first:
                count = direction.sink.send(direction.first)
                direction.first = direction.first[count:]
                self._note(direction, count)
            while direction.pending:
                assert direction.pipe is not None
                count = os.splice(
                    direction.pipe[0],
                    direction.sink.fileno(),
                    direction.pending,
                    flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE,
                )
                direction.pending -= count
                self._note(direction, count)
        except BlockingIOError:
            return False
        if direction.pipe is not None:
            self._pool.give_back(direction.pipe, empty=True)
            direction.pipe = None
        return True

    def _fill(self, direction: Direction) -> bool:
        """Read from the source into a pipe. Returns whether there was something to read, or the end."""
        if direction.unwanted:
            return self._discard(direction)
        allowed = self._meter.allowance(_PIPE_BYTES)
        if not allowed:
            if self._meter.spent:
                self._finish("was closed: the plugin has moved all bytes that it may (the bytes limit)")
            else:
                direction.paused = True
                self._meter.wait(lambda: self._resume(direction))
            return False
        pipe = self._pool.take()
        try:
            count = os.splice(
                direction.source.fileno(), pipe[1], allowed, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
            )
        except OSError as error:
            self._pool.give_back(pipe, empty=True)
            if isinstance(error, BlockingIOError):
                return False
            raise
        if not count:
            self._pool.give_back(pipe, empty=True)
            direction.ended = True
            return True
        direction.pipe, direction.pending = pipe, count
        self._meter.count(count)
        return True

    def _discard(self, direction: Direction) -> bool:
        try:
            direction.ended = not direction.source.recv(_DISCARDED_BYTES)
        except BlockingIOError:
            return False
        return True

    def _clear_answers(self) -> None:
        """Read what the server has sent: close() of a connection with unread bytes resets it."""
        try:
            for _ in range(_MOST_ROUNDS):
                if self._down.ended or not self._discard(self._down):
                    break
        except OSError:
            pass  # the server has reset it

    def _note(self, direction: Direction, count: int) -> None:
        direction.moved += count
        self._last = self._loop.now

    def _resume(self, direction: Direction) -> None:
        direction.paused = False
        self._move(direction)

    def _mask(self, out: Direction, into: Direction) -> int:
        wants_read = not (out.ended or out.paused or out.blocked)
        return (READ if wants_read else 0) | (WRITE if into.blocked else 0)

    def _settle(self) -> None:
        """Watch for what each socket needs next, or finish if both directions have ended."""
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
            except OSError as error:  # the kernel refuses to watch it again
                self._finish(f"broke: {os.strerror(error.errno or 0)}")
                return

    def _must_wait(self) -> bool:
        """Whether bytes of a plugin that has ended are not acknowledged yet. If the connection were closed
        now, an answer of the server would reset it, and these bytes would be lost."""
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
        if self._up.sink.family == socket.AF_UNIX:
            return False  # the broker closes its end when the server has everything
        end = _BYTES_ACKED_OFFSET + _BYTES_ACKED.size
        info = self._up.sink.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, end)
        if len(info) < end:
            return True  # an older kernel, without this field
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
        for direction in (self._up, self._down):
            if direction.pipe is not None:
                self._pool.give_back(direction.pipe, empty=not direction.pending)
                direction.pipe = None
            if in_order:
                deliver_on_close(direction.source)
            self._loop.retire(direction.source)
        done(PumpEnding(reason, self._up.moved, self._down.moved))
