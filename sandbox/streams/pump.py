"""Pump: one direction of a stream through the runner. It never blocks.

Relay, Feed and the two directions of an inspection are pumps. They differ in what they do with the bytes, and
in what they do when one end closes.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import time

from sandbox.limits.meter import Meter
from sandbox.speed.typed import Collection, Mapping
from sandbox.streams.endpoints import Sink, sink_for

# The most that is read at once, and the most a relay holds.
BUFFER = 64 << 10
# A sink that reports itself ready and then takes nothing is left alone for this long.
_PAUSE_SECONDS = 0.05


class Pump(Meter):
    """From the descriptor `_read` to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self.bytes = 0  # read
        self.passed = 0  # bytes that the sink has taken
        self._buffer = bytearray()
        self._sink = sink
        self._read = -1  # polled for input; -1 when closed

    # --- what each pump decides itself ---

    def _may_read(self) -> bool:
        raise NotImplementedError

    def _take(self, now: float) -> bool:
        """Read once, and put into the buffer what may pass. False if there was nothing to read."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """The reader of the sink has closed its end: nothing more can be passed on."""
        raise NotImplementedError

    def _wants_room(self) -> bool:
        """Whether to poll the sink for room."""
        return bool(self._buffer)

    def _note_passed(self, count: int) -> None:
        """Called with the number of bytes of the buffer that were passed on."""

    def _flush(self) -> None:
        """Called when everything was read: put an unfinished last piece into the buffer."""

    # --- while the plugin runs ---

    def interest(self) -> Mapping[int, int]:
        wanted: dict[int, int] = {}
        if self._read >= 0:
            if self._may_read():
                wanted[self._read] = select.POLLIN
            if self._sink.final:
                wanted[self._sink.fd] = 0  # poll reports errors and hang-ups without being asked
        if self._wants_room() and self.due == math.inf:
            wanted[self._sink.fd] = select.POLLOUT
        return wanted

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        self.notice(ready)
        events = ready.get(self._sink.fd, 0)
        if now >= self.due:
            self.due = math.inf
        first = not self._buffer
        if self._read in ready and self._may_read():
            self._take(now)
        if self._buffer and (first or events) and not self._pass_on() and events:
            self.due = now + _PAUSE_SECONDS
        return None

    def notice(self, ready: Mapping[int, int]) -> None:
        """Check whether the reader of the sink has closed its end."""
        if self._sink.final and ready.get(self._sink.fd, 0) & (select.POLLERR | select.POLLHUP):
            self._abandon()

    def _pass_on(self) -> bool:
        """Write what the sink takes now. False if it took nothing."""
        start, piece = 0, self._sink.piece
        for _ in range(BUFFER // piece):  # bounded: the loop has other descriptors to serve
            if start == len(self._buffer):
                break
            try:
                start += self._sink.write(bytes(self._buffer[start : start + piece]))
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._drop_passed(start)
                self._abandon()
                return True
            except OSError:
                # A full disk, or a terminal that hung up. Most programs ignore this error. We cannot pass it
                # on, and closing the plugin's pipe would kill the plugin.
                self._drop_passed(start)
                self._buffer.clear()
                return True
        self._drop_passed(start)
        return start > 0

    def _drop_passed(self, count: int) -> None:
        self.passed += count
        self._note_passed(count)
        del self._buffer[:count]

    # --- when it has ended ---

    def drain(self, seconds: float, stop: Collection[int] = ()) -> bool:
        """Pass on what is left in the pipe and the buffer. False if the sink took nothing for `seconds`, or
        one of `stop` became readable before that was done.

        The pipe is read until it is empty, not until its end: the plugin may have passed its own end to
        another process. That process may still write, so no more is read than a pipe holds.
        """
        until = time.monotonic() + seconds
        most = self.bytes + (fcntl.fcntl(self._read, fcntl.F_GETPIPE_SZ) if self._read >= 0 else 0)
        while True:
            more = self.bytes < most and self._may_read() and self._take(time.monotonic())
            if not more and not self._buffer:
                self._flush()
            if not self._buffer:
                if more:
                    continue
                return True
            passed = self._pass_on()
            now = time.monotonic()
            if passed:
                until = now + seconds
            elif now >= until or self._waits_for_sink(until - now, stop):
                return False

    def _waits_for_sink(self, seconds: float, stop: Collection[int]) -> bool:
        """Wait until the sink has room. True if one of `stop` became readable."""
        poll = select.poll()
        poll.register(self._sink.fd, select.POLLOUT)
        for fd in stop:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(None if seconds == math.inf else seconds * 1000 + 1)
        return any(fd in stop for fd, _ in ready)


class PipePump(Pump):
    """From a pipe that the plugin writes to. `end` is for the plugin; call `release` when the plugin runs."""

    def __init__(self, sink: int) -> None:
        super().__init__(sink_for(sink))
        self.lines = 0  # newlines that were read
        try:
            self._read, self.end = os.pipe2(os.O_CLOEXEC)  # -1 when closed
        except OSError:
            self._sink.close()
            raise
        os.set_blocking(self._read, False)  # of this end alone: each end has its own file description

    def _accept(self, data: bytes) -> None:
        """Put the part of `data` that may pass into the buffer."""
        raise NotImplementedError

    def _see_closed(self) -> None:
        """Called when every process has closed the plugin's end of the pipe."""

    def _take(self, now: float) -> bool:
        try:
            data = os.read(self._read, self._room())
        except BlockingIOError:
            return False
        if not data:
            self._see_closed()
            self._close_read()
            return False
        self._accept(data)
        self.bytes += len(data)
        self.lines += data.count(b"\n")
        return True

    def _room(self) -> int:
        """How much may be read at once."""
        return BUFFER

    def release(self) -> None:
        """Close our copy of the plugin's end. While we hold it, the pipe does not end."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def close(self) -> None:
        """Close at once. What was not passed on is lost."""
        self.release()
        self._abandon()
        self._sink.close()

    def _abandon(self) -> None:
        """Close the plugin's pipe: its next write fails with SIGPIPE, as if it wrote to the sink itself."""
        self._buffer.clear()
        self.due = math.inf
        self._close_read()

    def _close_read(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1
