"""Write to and read from the caller's own streams without blocking.

O_NONBLOCK is not set on them: that flag belongs to the open file description, which the caller and others
still use.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat

# Bytes of one write. A pipe takes this many at once or none, so other writers cannot come in between.
PIECE = select.PIPE_BUF

_TIOCGDEV = 0x80045432
_PTMX = os.makedev(5, 2)  # opening it makes a new terminal


def _require_ready(fd: int, event: int) -> None:
    """Raise BlockingIOError if a read or write of `fd` would block now."""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(0):
        raise BlockingIOError


class Sink:
    """A descriptor of the caller's to write to.

    This class is for files, devices, and a terminal that we may not open. It polls before each write. A file
    is always ready. Such a terminal can be stopped (^S) between poll and write; then the write blocks until
    it goes on.
    """

    final = False  # True: when the reader has closed its end, no other reader can come
    piece = PIECE  # the most that one write takes

    def __init__(self, fd: int) -> None:
        self.fd = fd  # to poll

    def write(self, data: bytes) -> int:
        """Write at most PIECE bytes and return how many were taken. Raises BlockingIOError if none can be."""
        _require_ready(self.fd, select.POLLOUT)
        return os.write(self.fd, data)

    def close(self) -> None:
        pass


class _Unwritable(Sink):
    """A descriptor open for reading only. Not polled, since it would never be ready: the write fails at
    once."""

    def write(self, data: bytes) -> int:
        return os.write(self.fd, data)


class OwnSink(Sink):
    """A pipe or terminal through a file description of our own, which does not block.

    Polling alone is not enough: after it, others may fill the pipe or stop the terminal.
    """

    def __init__(self, fd: int, *, final: bool, piece: int = PIECE) -> None:
        super().__init__(fd)
        self.final = final
        self.piece = piece

    def write(self, data: bytes) -> int:
        return os.write(self.fd, data)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)  # a pipe ends when its last writer closes it
            self.fd = -1


class _ForeignPipe(Sink):
    """A pipe of another user: we may write to it, but not open it again. splice(2) has a flag not to block.

    Used only there: each call takes a whole slot of the pipe, however few bytes it writes, so the pipe holds
    less.
    """

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


class _Socket(Sink):
    """A socket. Node gives its children sockets instead of pipes, and systemd its services."""

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


def sink_for(fd: int) -> Sink:
    status = os.fstat(fd)
    if stat.S_ISSOCK(status.st_mode):
        return _Socket(fd)
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return _Unwritable(fd)  # not opened again: the new description could be writable
    if stat.S_ISFIFO(status.st_mode):
        # A named FIFO may get another reader.
        final = _name(fd).startswith("pipe:[")
        own = _open_or_none(f"/proc/self/fd/{fd}", os.O_WRONLY)
        return _ForeignPipe(fd, final) if own is None else OwnSink(own, final=final)
    if os.isatty(fd) and status.st_rdev != _PTMX:
        own = _open_or_none(f"/proc/self/fd/{fd}", os.O_WRONLY)
        if own is None:
            # After su(1) the terminal still belongs to the user who logged in. Everybody may open /dev/tty.
            own = _open_or_none("/dev/tty", os.O_WRONLY)
            if own is not None and _device(own) != _device(fd):
                os.close(own)
                own = None
        if own is not None:
            return OwnSink(own, final=False)
    return Sink(fd)


# --- reading -----------------------------------------------------------------------------------------------


class StreamSource:
    """A descriptor of the caller's to read from. This class is for files and devices; see Sink."""

    def __init__(self, fd: int) -> None:
        # To poll. Always the caller's own: on a newly opened description, a FIFO that ended before seems
        # open.
        self.fd = fd

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; b"" at the end. Raises BlockingIOError if there are none now."""
        _require_ready(self.fd, select.POLLIN)
        return os.read(self.fd, size)

    def close(self) -> None:
        pass


class _OwnSource(StreamSource):
    """A pipe or terminal through a description of our own, because another reader may be faster after a
    poll."""

    def __init__(self, fd: int, own: int) -> None:
        super().__init__(fd)
        self._own = own

    def read(self, size: int) -> bytes:
        return os.read(self._own, size)

    def close(self) -> None:
        if self._own >= 0:
            os.close(self._own)
            self._own = -1


class _ForeignPipeSource(StreamSource):
    """See _ForeignPipe."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self, size: int) -> bytes:
        taken = os.splice(self.fd, self._in, size, flags=os.SPLICE_F_NONBLOCK)
        return os.read(self._out, taken) if taken else b""

    def close(self) -> None:
        if self._in >= 0:
            os.close(self._in)
            os.close(self._out)
            self._in = -1


class _SocketSource(StreamSource):
    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        import _socket

        self._flags = _socket.MSG_DONTWAIT
        copy = os.dup(fd)
        try:
            self._socket = _socket.socket(-1, -1, -1, copy)
        except OSError:
            os.close(copy)
            raise

    def read(self, size: int) -> bytes:
        return self._socket.recv(size, self._flags)

    def close(self) -> None:
        self._socket.close()


def source_for(fd: int) -> StreamSource:
    status = os.fstat(fd)
    if stat.S_ISSOCK(status.st_mode):
        return _SocketSource(fd)
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        # Open for writing only: a poll would never report it ready. Not opened again: the new description
        # could be readable.
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return _OwnSource(null, null)
    pipe = stat.S_ISFIFO(status.st_mode)
    if pipe or (os.isatty(fd) and status.st_rdev != _PTMX):
        own = _open_or_none(f"/proc/self/fd/{fd}", os.O_RDONLY)
        if own is not None:
            return _OwnSource(fd, own)
        if pipe:
            return _ForeignPipeSource(fd)
    return StreamSource(fd)


# -----------------------------------------------------------------------------------------------------------


def _open_or_none(path: str, access: int) -> int | None:
    try:
        return os.open(path, access | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def _name(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _device(terminal: int) -> bytes:
    """The device number of a terminal, also if it was opened as /dev/tty."""
    return fcntl.ioctl(terminal, _TIOCGDEV, bytes(4))
