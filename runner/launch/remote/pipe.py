"""The end of a pipe that a session reads."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

import trio

_NEW_PIPE_BYTES = 64 << 10  # that a pipe holds, unless it is told otherwise


class PipeReader(trio.abc.ReceiveStream):
    """Like trio's FdStream, for one reading task. For a message it takes a turn of the scheduler and a read()
    less: a read that filled only part of its buffer has emptied the pipe, so another one is not tried."""

    def __init__(self, fd: int) -> None:
        self._stream = trio.lowlevel.FdStream(fd)  # non-blocking from now on, and closed with it
        self._fd = fd  # -1: closed
        self._empty = True
        self._holds = _NEW_PIPE_BYTES

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """For more bytes than the pipe holds, the pipe is made larger. Then its writer stops less often."""
        most = _NEW_PIPE_BYTES if max_bytes is None else max_bytes
        if most > self._holds and self._fd >= 0:
            self._holds = most  # not tried again: the kernel refuses it to a user whose pipes hold a lot
            with suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, most)
        if self._empty and self._fd >= 0:
            await trio.lowlevel.wait_readable(self._fd)
        else:
            await trio.lowlevel.checkpoint()
        while True:
            try:
                data = os.read(self._fd, most)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._fd)
            except OSError as error:
                if error.errno == errno.EBADF:  # closed meanwhile, by this process
                    raise trio.ClosedResourceError("the pipe was closed") from None
                raise trio.BrokenResourceError from error
            else:
                self._empty = len(data) < most
                return data

    def close(self) -> None:
        self._fd = -1
        self._stream.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()
