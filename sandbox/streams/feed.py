"""Pass the caller's stdin to the plugin, through a pipe that the runner fills.

Used for a terminal, which the plugin does not get itself, and for an inspected plugin. Each piece is passed
on as it arrives. A terminal is read only when the plugin has taken everything before: what the plugin does
not read stays there for the next program.
"""

from __future__ import annotations

import fcntl
import math
import os
import select

from sandbox.speed.typed import Callable, Mapping
from sandbox.streams.endpoints import OwnSink, source_for
from sandbox.streams.pump import BUFFER, Pump

# A background job cannot read its terminal. Seconds until the next attempt.
_BACKGROUND_SECONDS = 0.5


class Feed(Pump):
    """From the caller's stdin to the plugin's.

    `end` is for the plugin. Call `release` when the plugin runs, so that only the plugin holds it. When the
    plugin closes its stdin or ends, `forget` is called once, so that the writer at our stdin notices.
    """

    def __init__(self, stdin: int, forget: Callable[[int], None] = lambda fd: None) -> None:
        self.stream_closed = False  # the plugin has closed its stdin
        self._stdin = stdin
        self._forget = forget
        self._ended = False  # the caller's stdin has ended
        self._terminal = os.isatty(stdin)
        self._pipe_empty = True  # a terminal is read only when the plugin has taken everything
        self._source = source_for(stdin)
        try:
            self.end, write = os.pipe2(os.O_CLOEXEC)  # -1 when closed
        except OSError:
            self._source.close()
            raise
        os.set_blocking(write, False)  # of this end alone: each end has its own file description
        super().__init__(OwnSink(write, final=True, piece=BUFFER))
        self._read = self._source.fd
        if self._terminal:
            # A pipe of one page takes something only when it is empty.
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._sink.fd < 0:
            return None
        self._pipe_empty = self._pipe_empty or bool(ready.get(self._sink.fd, 0) & select.POLLOUT)
        super().look(ready, now)
        if self._ended and not self._buffer:
            self._close_sink()
        return None

    def release(self) -> None:
        """Close our copy of the plugin's end."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def close(self) -> None:
        self.release()
        self._close_sink()
        self._source.close()

    def _see_input(self, data: bytes) -> None:
        """Called with data that is about to be passed on; empty at the end of the caller's stdin."""

    def _may_read(self) -> bool:
        return self._read >= 0 and not self._buffer and self._pipe_empty and self.due == math.inf

    def _wants_room(self) -> bool:
        return self._sink.fd >= 0 and (bool(self._buffer) or not self._pipe_empty)

    def _take(self, now: float) -> bool:
        try:
            data = self._source.read(select.PIPE_BUF if self._terminal else BUFFER)
        except BlockingIOError:
            return False
        except (
            OSError
        ):  # a terminal that hung up, a connection that broke, a stdin that cannot be read at all
            if self._terminal and self._in_background():
                self.due = now + _BACKGROUND_SECONDS
                return False
            data = b""
        self._ended = not data
        if self._ended:
            self._read = -1
        self.bytes += len(data)
        self._buffer += data
        self._see_input(data)
        return bool(data)

    def _in_background(self) -> bool:
        """Whether another job has the terminal. Reading then fails, because the runner ignores SIGTTIN."""
        try:
            return os.tcgetpgrp(self._stdin) != os.getpgrp()
        except OSError:  # not our controlling terminal, or hung up
            return False

    def _note_passed(self, count: int) -> None:
        if count:
            self._pipe_empty = not self._terminal

    def _abandon(self) -> None:
        """The plugin has closed its stdin. Let the writer at our stdin notice, as if it had the plugin's
        pipe."""
        if self._sink.fd < 0:
            return
        if not self._buffer and not self._terminal and self._read >= 0:
            self._take(0.0)  # so that an inspection sees what the plugin did not get
        self.stream_closed = True
        self._close_sink()
        self._source.close()
        self._forget(self._stdin)

    def _close_sink(self) -> None:
        self.due = math.inf
        self._read = -1
        self._buffer.clear()
        self._sink.close()
