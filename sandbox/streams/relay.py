"""Relay: pass on and count a plugin's stderr. Also its stdout, if that is a terminal.

The plugin writes to a pipe of ours, and every byte goes on to the sink (the runner's own stderr) until the
output limit is reached. A slow sink slows the plugin down. If the reader of the sink closes it, the plugin's
pipe is closed. Both are as if the plugin wrote to the sink itself.
"""

from __future__ import annotations

import os

from sandbox.speed.typed import Collection, Mapping, Protocol
from sandbox.streams.endpoints import PIECE
from sandbox.streams.pump import BUFFER, PipePump

_TAIL_BYTES = 8 << 10


class HideInTail(Protocol):
    def __call__(self, data: bytes, *, cut: bool) -> bytes: ...


class Relay(PipePump):
    """A counted stream. Call `finish` when the plugin's last process has ended.

    It holds 64 KiB at most. The plugin's pipe holds as much again, so up to 128 KiB may be waiting for a slow
    reader.
    """

    def __init__(self, sink: int, *, size: int | None, lines: int | None) -> None:
        # The limit that was exceeded. `finish` may set it too: a plugin may end before we have read all.
        self.exceeded: str | None = None
        self.is_terminal = os.isatty(sink)
        self._hide: HideInTail | None = None
        self._kept = _TAIL_BYTES
        self._end = bytearray()  # up to twice the length of the tail, so that not every read moves it
        self._size = size
        self._most_lines = lines
        super().__init__(sink)

    def conceal(self, hide: HideInTail, longest: int) -> None:
        """Have `hide` replace secrets in the tail of a report. `longest`: the longest of them. The stored
        tail is longer by that much, so that none is cut."""
        self._hide = hide
        self._kept = _TAIL_BYTES + longest

    @property
    def tail(self) -> bytes:
        """The last bytes that were passed on."""
        return bytes(self._end[-self._kept :])

    @property
    def dropped(self) -> int:
        """The number of bytes that were read and will not be passed on."""
        return self.bytes - self.passed - len(self._buffer)

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        super().look(ready, now)
        return self.exceeded

    def peaks(self) -> Mapping[str, float]:
        seen = {"output": (self._size, self.bytes), "output_lines": (self._most_lines, self.lines)}
        return {name: count for name, (limit, count) in seen.items() if limit is not None}

    def text_tail(self) -> str:
        """The tail for a report: whole characters, and whole lines unless the first is most of it."""
        tail = self.tail
        cut = self.passed > len(tail)
        if self._hide is not None:
            whole = self._hide(tail, cut=cut)
            tail = whole[-_TAIL_BYTES:]
            cut = cut or len(tail) < len(whole)
        if cut and tail:
            start = tail.find(b"\n", 0, _TAIL_BYTES // 2) + 1
            if not start:
                while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:  # the rest of a character
                    start += 1
            tail = tail[start:]
        import codecs

        # Not final: a character that was cut at the end is left out.
        return codecs.getincrementaldecoder("utf-8")("replace").decode(tail)

    def finish(self, seconds: float, stop: Collection[int] = ()) -> bool:
        """Pass on what is left. False if the sink took nothing for `seconds`, or one of `stop` became
        readable before: then nothing else can be written there either."""
        self.release()
        taken = self.drain(seconds, stop)
        self.close()
        return taken

    def _may_read(self) -> bool:
        # Only with room for a whole piece: a plugin may switch its pipe to packet mode (O_DIRECT), in which a
        # short read loses the rest of the packet.
        return self._read >= 0 and self.exceeded is None and self._room() >= PIECE

    def _room(self) -> int:
        return BUFFER - len(self._buffer)

    def _accept(self, data: bytes) -> None:
        self._buffer += data[: self._cut(data)]

    def _cut(self, data: bytes) -> int:
        """How much of `data` is within the limits. The result does not depend on how the bytes were divided
        into reads."""
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

    def _note_passed(self, count: int) -> None:
        self._end += self._buffer[max(0, count - self._kept) : count]
        if len(self._end) > 2 * self._kept:
            del self._end[: -self._kept]
