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
        self._empty = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        fd, most = self._stream.fileno(), 64 << 10 if max_bytes is None else max_bytes
        if fd < 0:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError("the pipe was closed")
        if self._empty:
            await trio.lowlevel.wait_readable(fd)
        else:
            await trio.lowlevel.checkpoint()
        while True:
            try:
                data = os.read(self._stream.fileno(), most)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(fd)
            except OSError as error:
                if error.errno == errno.EBADF:  # closed meanwhile, by this process
                    raise trio.ClosedResourceError("the pipe was closed") from None
                raise trio.BrokenResourceError from error
            else:
                self._empty = len(data) < most
                return data

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def fileno(self) -> int:
        return self._stream.fileno()
