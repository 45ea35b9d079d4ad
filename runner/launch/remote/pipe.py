"""The end of a pipe that a session reads."""

from __future__ import annotations

import errno
import os

import trio


class PipeReader(trio.abc.ReceiveStream):
    """Like trio's FdStream, for one reading task. For a message it takes a turn of the scheduler and a read()
    less: a read that filled only part of its buffer has emptied the pipe, so another one is not tried."""

    def __init__(self, fd: int) -> None:
        self._stream = trio.lowlevel.FdStream(fd)  # non-blocking from now on, and closed with it
        self._fd = fd  # -1: closed
        self._empty = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        most = 64 << 10 if max_bytes is None else max_bytes
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
