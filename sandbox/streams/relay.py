"""A plugin's stderr on its way through the runner, counted.

Only where output is limited. The plugin writes to a pipe of ours, and what it writes goes on to the sink (the
runner's own stderr) byte for byte, until the limit is used up. A sink that is slow slows the plugin down, a
sink whose reader is gone breaks the plugin's pipe: as if it still wrote there itself.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Collection, Mapping

from sandbox.limits.meter import Meter
from sandbox.streams.endpoints import PIECE, sink_for

# What is held here at most. With what the plugin's pipe holds (as much again) it is what a plugin can have
# written that nobody has read.
_BUFFER = 64 << 10
# Writes for one look: the loop has others to look after.
_PIECES = _BUFFER // PIECE
_TAIL = 8 << 10
# How long to leave a sink alone that says it is ready, and is not.
_PAUSE = 0.05


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
        self.is_terminal = os.isatty(sink)
        self._sink = sink_for(sink)
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

        # Not final: of a character that the limit has cut, nothing is shown.
        return codecs.getincrementaldecoder("utf-8")("replace").decode(tail)

    def finish(self, patience: float, stop: Collection[int] = ()) -> bool:
        """When the plugin's last process is gone: pass on what is still under way.

        Until the sink takes nothing for `patience` seconds, or one of `stop` can be read. False then:
        whatever else is written there would have to wait too.
        """
        self.release()
        until = time.monotonic() + patience
        # Until the pipe is empty, not until it ends: who knows where the plugin has sent its own end.
        while (self._may_read() and self._take()) or self._buffer:
            passed = self.passed
            waits = bool(self._buffer) and not self._pass_on()
            now = time.monotonic()
            if self.passed > passed:
                until = now + patience
            if now >= until:
                break
            if waits:
                poll = select.poll()
                poll.register(self._sink.fd, select.POLLOUT)
                for fd in stop:
                    poll.register(fd, select.POLLIN)
                ready = poll.poll(None if until == math.inf else (until - now) * 1000 + 1)
                if any(fd in stop for fd, _ in ready):
                    break
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
        room = _BUFFER - len(self._buffer) >= PIECE
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
        """How much of `data` is within the limit. Which limit ends it does not depend on how it was read."""
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
                start += self._sink.write(self._buffer[start : start + PIECE])
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
