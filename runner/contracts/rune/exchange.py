"""The two lines that a rune plugin writes: a handshake and a response."""

from __future__ import annotations

from typing import Final

from runner.contracts.rune.messages import BLANKS
from runner.protocol.frames import FrameFault, LineFramer

LINE_LIMIT: Final = 1 << 20  # bytes of what the plugin says; what it is told may be longer
LINES: Final = 2  # a handshake and a response


class ExchangeFramer:
    """The two lines of an exchange. Output after them is counted and dropped, however long it is.

    White space before a line is not held, so it does not count for the limit.
    """

    def __init__(self) -> None:
        self._lines = LineFramer(LINE_LIMIT + 1)  # one for a carriage return
        self._left = LINES
        self.drained = 0

    @property
    def fault(self) -> FrameFault | None:
        return FrameFault("frame_too_large", too_long()) if self._lines.fault else None

    @property
    def pending(self) -> int:
        return self._lines.pending

    def feed(self, data: bytes) -> list[bytes]:
        found: list[bytes] = []
        while data and self._left and not self._lines.fault:
            if not self._lines.pending:
                data = data.lstrip(b"\t\v\f\r ")
            end = data.find(b"\n") + 1 or len(data)
            found += self._taken(self._lines.feed(data[:end]))
            data = data[end:]
        self.drained += len(data)
        return found

    def finish(self) -> list[bytes]:
        # White space without a newline is not a line.
        return self._taken([rest for rest in self._lines.finish() if self._left and trim_line(rest)])

    def _taken(self, lines: list[bytes]) -> list[bytes]:
        self._left -= len(lines)
        return lines


def trim_line(raw: bytes) -> bytes:
    raw = raw.strip()
    if raw[:1] < b"\x80" and raw[-1:] < b"\x80":
        return raw
    # White space beyond ASCII. JSON neither begins nor ends with such a byte, so this is rare.
    text = raw.decode("utf-8", "surrogateescape").strip(BLANKS)
    return text.encode("utf-8", "surrogateescape")


def too_long() -> str:
    return f"a line is longer than {LINE_LIMIT} bytes"
