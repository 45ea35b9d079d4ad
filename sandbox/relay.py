"""A plugin's stderr on its way through the runner, counted.

Only where output is limited. The plugin writes to a pipe of ours, and what it writes goes on to the sink (the
runner's own stderr) byte for byte, until the budget is used up. A sink that is slow slows the plugin down, a
sink whose reader is gone breaks the plugin's pipe: as if it still wrote there itself.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import stat
import time
from collections.abc import Mapping

from sandbox.meter import Meter

# What is held here at most. With what the plugin's pipe holds (as much again) it is what a plugin can have
# written that nobody has read.
_BUFFER = 64 << 10
# For one write. A pipe takes this much whole or not at all, so its other writers cannot tear it.
_PIECE = select.PIPE_BUF
# Writes for one look: the loop has others to look after.
_PIECES = _BUFFER // _PIECE
_TAIL = 8 << 10
# How long to leave a sink alone that says it is ready, and is not.
_PAUSE = 0.05

_TIOCGDEV = 0x80045432
_PTMX = os.makedev(5, 2)  # to open it is to make a new terminal


class Relay(Meter):
    """`source` is for the plugin; `release` it when the plugin has it."""

    def __init__(self, sink: int, *, size: int | None, lines: int | None) -> None:
        self.bytes = 0  # read from the plugin
        self.lines = 0  # of which newlines
        self.passed = 0  # bytes the sink has taken
        self.tail = b""  # the last of them
        # The limit that ran out. Also set by `finish`: a plugin may end before anybody has looked.
        self.exceeded: str | None = None
        self._size = size
        self._most_lines = lines
        self._buffer = b""
        self._sink = _sink(sink)
        try:
            read, write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self._sink.close()
            raise
        os.set_blocking(read, False)  # of this end alone: each end is a description of its own
        self._read = read  # -1 when closed, and so is `source`
        self.source = write

    @property
    def dropped(self) -> int:
        """Bytes that were read and will not be passed on."""
        return self.bytes - self.passed - len(self._buffer)

    def release(self) -> None:
        """Close our copy of the plugin's end. While we hold it the pipe does not end."""
        if self.source >= 0:
            os.close(self.source)
            self.source = -1

    def interest(self) -> Mapping[int, int]:
        wanted: dict[int, int] = {}
        if self._read >= 0:
            if self._may_read():
                wanted[self._read] = select.POLLIN
            if self._sink.final:
                wanted[self._sink.fd] = 0  # errors and hang-ups are told unasked
        if self._buffer and self.due == math.inf:
            wanted[self._sink.fd] = select.POLLOUT
        return wanted

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        """Reads once and passes on what the sink takes at once. The answer does not wait for the sink."""
        events = ready.get(self._sink.fd, 0)
        if self._sink.final and events & (select.POLLERR | select.POLLHUP):
            self._abandon()
        if now >= self.due:
            self.due = math.inf
        first = not self._buffer
        if self._read in ready and self._may_read():
            self._take()
        if self._buffer and (first or events) and not self._pass_on() and events:
            self.due = now + _PAUSE
        return self.exceeded

    def peaks(self) -> Mapping[str, float]:
        seen = {"output": (self._size, self.bytes), "output_lines": (self._most_lines, self.lines)}
        return {name: count for name, (limit, count) in seen.items() if limit is not None}

    def text_tail(self) -> str:
        """The tail for a report: whole characters, and whole lines unless the first is most of it."""
        tail = self.tail
        if self.passed > len(tail):
            start = tail.find(b"\n", 0, _TAIL // 2) + 1
            if not start:
                while start < 3 and tail[start] & 0xC0 == 0x80:  # the rest of a character
                    start += 1
            tail = tail[start:]
        import codecs

        # Not final: of a character that the budget has cut, nothing is shown.
        return codecs.getincrementaldecoder("utf-8")("replace").decode(tail)

    def finish(self, patience: float) -> bool:
        """When the plugin's last process is gone: pass on what is still under way, for `patience` seconds.

        False if the sink did not take it in time; whatever else is written there would have to wait too.
        """
        self.release()
        until = time.monotonic() + patience
        # Until the pipe is empty, not until it ends: who knows where the plugin has sent its own end.
        while (self._may_read() and self._take()) or self._buffer:
            waits = bool(self._buffer) and not self._pass_on()
            left = until - time.monotonic()
            if left <= 0:
                break
            if waits:
                poll = select.poll()
                poll.register(self._sink.fd, select.POLLOUT)
                poll.poll(left * 1000 + 1)
        taken = not self._buffer
        self.close()
        return taken

    def close(self) -> None:
        """At once. What is under way is lost."""
        self.release()
        self._abandon()
        self._sink.close()

    def _may_read(self) -> bool:
        # Room for a piece, not for a byte: of a pipe in packet mode, which a plugin may choose, a short read
        # loses the rest of the packet.
        room = _BUFFER - len(self._buffer) >= _PIECE
        return self._read >= 0 and self.exceeded is None and room

    def _take(self) -> bool:
        """Read once. False if there was nothing."""
        try:
            data = os.read(self._read, _BUFFER - len(self._buffer))
        except BlockingIOError:
            return False
        if not data:
            self._close_read()
            return False
        self._buffer += data[: self._cut(data)]
        self.bytes += len(data)
        self.lines += data.count(b"\n")
        return True

    def _cut(self, data: bytes) -> int:
        """How much of `data` is within the budget. Which limit ends it does not depend on how it was read."""
        cut = len(data)
        if self._size is not None and self.bytes + cut > self._size:
            cut, self.exceeded = self._size - self.bytes, "output"
        if self._most_lines is not None:
            left = self._most_lines - self.lines
            if data.count(b"\n") >= left:
                end = len(data) - len(data.split(b"\n", left)[-1])
                if end < cut:
                    cut, self.exceeded = end, "output_lines"
        return cut

    def _pass_on(self) -> bool:
        """Write what the sink takes now. False if it takes nothing."""
        start = 0
        for _ in range(_PIECES):
            if start == len(self._buffer):
                break
            try:
                start += self._sink.write(self._buffer[start : start + _PIECE])
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._passed(start)
                self._abandon()
                return True
            except OSError:
                # A full disk, a terminal that hung up. The plugin would have got the error and most likely
                # gone on without a look at it; we cannot hand it over, and to break its pipe would kill it.
                self._passed(start)
                self._buffer = b""
                return True
        self._passed(start)
        return start > 0

    def _passed(self, count: int) -> None:
        self.passed += count
        self.tail = (self.tail + self._buffer[max(0, count - _TAIL) : count])[-_TAIL:]
        self._buffer = self._buffer[count:]

    def _abandon(self) -> None:
        """Nobody reads what the plugin writes: its next write shall say so, and bring it SIGPIPE."""
        self._buffer = b""
        self.due = math.inf
        self._close_read()

    def _close_read(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1


class _Sink:
    """A descriptor of the caller's, written to without ever waiting and without O_NONBLOCK: that flag belongs
    to the open file description, which the caller and others still use.

    This one is for what has no better way: files and devices, a terminal of somebody else's. It asks first.
    A file is always ready, and a disk that hangs would hang the plugin too. Such a terminal can be stopped
    between question and write, and then we wait for whoever stopped it.
    """

    final = False  # a reader that is gone will not come back

    def __init__(self, fd: int) -> None:
        self.fd = fd  # to poll

    def write(self, data: bytes) -> int:
        """How much of at most _PIECE bytes was taken; BlockingIOError if nothing can be now."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self.fd, data)

    def close(self) -> None:
        pass


class _Unwritable(_Sink):
    """Given to us for reading only. It would never be ready; the error comes at once."""

    def write(self, data: bytes) -> int:
        return os.write(self.fd, data)


class _Own(_Sink):
    """The same pipe or terminal by a description of our own, which does not block. Others can fill the pipe
    or stop the terminal after we were told it is ready: whoever presses ^S, or the plugin, whose stdout may
    be the same one."""

    def __init__(self, fd: int, final: bool) -> None:
        super().__init__(fd)
        self.final = final

    def write(self, data: bytes) -> int:
        return os.write(self.fd, data)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # a pipe ends when its last writer closes it
            self.fd = -1


class _ForeignPipe(_Sink):
    """A pipe that another user made: we may write to it, but not open it. Between pipes splice() can be told
    not to wait. Second choice: each call takes a slot of the pipe, however little it puts there, so a pipe
    that is not read holds less."""

    def __init__(self, fd: int, final: bool) -> None:
        super().__init__(fd)
        self.final = final
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def write(self, data: bytes) -> int:
        os.write(self._in, data)
        taken = 0
        try:
            taken = os.splice(self._out, self.fd, len(data), flags=os.SPLICE_F_NONBLOCK)
        finally:
            if taken < len(data):
                os.read(self._out, len(data))
        return taken

    def close(self) -> None:
        if self._in >= 0:
            os.close(self._in)
            os.close(self._out)
            self._in = -1


class _Socket(_Sink):
    """What node gives its children for pipes, and systemd its services."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        import _socket  # `socket` adds its enums and selectors, 8 ms

        self._flags = _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL
        copy = os.dup(fd)
        try:
            self._socket = _socket.socket(-1, -1, -1, copy)
        except OSError:
            os.close(copy)
            raise
        self.final = self._socket.type == _socket.SOCK_STREAM

    def write(self, data: bytes) -> int:
        return self._socket.send(data, self._flags)

    def close(self) -> None:
        self._socket.close()


def _sink(fd: int) -> _Sink:
    status = os.fstat(fd)
    if stat.S_ISSOCK(status.st_mode):
        return _Socket(fd)
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return _Unwritable(fd)  # and not opened anew: then it might be writable
    if stat.S_ISFIFO(status.st_mode):
        # One with a name may find another reader.
        final = _name(fd).startswith("pipe:[")
        own = _opened(f"/proc/self/fd/{fd}")
        return _ForeignPipe(fd, final) if own is None else _Own(own, final)
    if os.isatty(fd) and status.st_rdev != _PTMX:
        own = _opened(f"/proc/self/fd/{fd}")
        if own is None:
            # After su the terminal still belongs to whoever logged in. /dev/tty is for everybody.
            own = _opened("/dev/tty")
            if own is not None and _device(own) != _device(fd):
                os.close(own)
                own = None
        if own is not None:
            return _Own(own, final=False)
    return _Sink(fd)


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def _name(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _device(terminal: int) -> bytes:
    """Which terminal it is, also by the name /dev/tty."""
    return fcntl.ioctl(terminal, _TIOCGDEV, bytes(4))
