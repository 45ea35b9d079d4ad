"""The caller's stdin on its way to the plugin: a pipe that the runner fills.

For a terminal, which the plugin is not to get itself, and where somebody reads along. Each piece is passed on
as it arrives. Of a terminal no more is read than the plugin has taken before: what nobody reads stays there
for the next program.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
from collections.abc import Callable, Mapping

from sandbox.limits.meter import Meter
from sandbox.streams.endpoints import source_for

_BUFFER = 64 << 10
# When to try again, if there is something to read and we are in the background.
_BACKGROUND_SECONDS = 0.5


class Feed(Meter):
    """`end` is for the plugin; `release` it when the plugin has it. Then only the plugin holds it: when it
    closes its stdin, or ends, `forget` is called once, so that whoever writes to us learns it too."""

    def __init__(self, stdin: int, forget: Callable[[int], None] = lambda fd: None) -> None:
        self.passed = 0  # bytes the plugin's pipe has taken
        self.is_deaf = False  # the plugin has closed its stdin
        self._stdin = stdin
        self._forget = forget
        self._buffer = b""
        self._ended = False
        self._terminal = os.isatty(stdin)
        self._room = True  # in the plugin's pipe
        self._source = source_for(stdin)
        try:
            self.end, self._write = os.pipe2(os.O_CLOEXEC)  # -1 when closed
        except OSError:
            self._source.close()
            raise
        os.set_blocking(self._write, False)  # of this end alone: each end is a description of its own
        if self._terminal:
            # A pipe of one page takes something only when it is empty.
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)

    def interest(self) -> Mapping[int, int]:
        if self._write < 0:
            return {}
        if self._buffer or not self._room:
            return {self._write: select.POLLOUT}
        if self.due != math.inf:
            return {self._write: 0}
        return {self._write: 0, self._source.fd: select.POLLIN}  # that nobody reads is told unasked

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._write < 0:
            return None
        events = ready.get(self._write, 0)
        if events & select.POLLERR:
            if not self._buffer and not self._terminal:
                self._take(now)  # who reads along is to know what it was not told
            self._drop()
            return None
        self._room = self._room or bool(events & select.POLLOUT)
        if now >= self.due:
            self.due = math.inf
        if not self._buffer and self._room and self._source.fd in ready:
            self._take(now)
        if self._buffer:
            self._pass_on()
        if self._ended and not self._buffer:
            self._close_write()
        return None

    def release(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def close(self) -> None:
        self.release()
        self._close_write()
        self._source.close()

    def _heard(self, data: bytes) -> None:
        """What is about to be passed on. Nothing: it has ended."""

    def _take(self, now: float) -> None:
        try:
            data = self._source.read(select.PIPE_BUF if self._terminal else _BUFFER)
        except BlockingIOError:
            return
        except OSError:  # a terminal that hung up, a connection that broke, nothing to read from at all
            if self._terminal and self._in_background():
                self.due = now + _BACKGROUND_SECONDS
                return
            data = b""
        self._ended = not data
        self._buffer = data
        self._heard(data)

    def _in_background(self) -> bool:
        """Another job has the terminal. SIGTTIN is ignored (by the runner), so reading is an error."""
        try:
            return os.tcgetpgrp(self._stdin) != os.getpgrp()
        except OSError:  # not our controlling terminal, or gone
            return False

    def _pass_on(self) -> None:
        try:
            count = os.write(self._write, self._buffer)
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._drop()
            return
        self.passed += count
        self._buffer = self._buffer[count:]
        self._room = not self._terminal

    def _drop(self) -> None:
        """Nobody is left to read. Whoever writes to us is to find that out as if we were not here."""
        self.is_deaf = True
        self._buffer = b""
        self._close_write()
        self._source.close()
        self._forget(self._stdin)

    def _close_write(self) -> None:
        self.due = math.inf
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
