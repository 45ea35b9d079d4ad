"""Splits a byte stream into messages: pure, and bounded while reading.

A framer takes bytes as they arrive and returns whole frames. Frames and faults do not depend on how the
stream is cut into pieces. A frame without end is refused one byte past the limit, so a framer never holds
more than the longest frame. Each byte is read once, so writing byte by byte slows nothing down.
"""

from __future__ import annotations

from typing import Literal, Protocol

from sandbox.speed.value import NamedTuple

Cause = Literal["frame_too_large", "bad_header", "cut_short"]


class FrameFault(NamedTuple):
    """Why the rest of the stream is not read. `cause` goes into the outcome, for the code
    malformed_response."""

    cause: Cause
    message: str


class Cut(NamedTuple):
    """A frame with its header or newline. Together they are the bytes of the stream."""

    frame: bytes
    before: bytes = b""  # a header
    after: bytes = b""  # a newline


class Framer(Protocol):
    @property
    def fault(self) -> FrameFault | None:
        """The fault after which no more frames are returned, or None. Frames before it have been returned."""
        ...

    @property
    def pending(self) -> int:
        """Bytes held of an incomplete frame."""
        ...

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now, in order."""
        ...

    def finish(self) -> list[bytes]:
        """The stream has ended. Returns the rest as a frame, if the end of a stream can end a frame, or sets
        a fault; bytes fed after that are ignored."""
        ...


class Cutter(Framer, Protocol):
    """A framer for relaying: `cut` also returns the bytes around each frame. Use either `cut` or `feed`."""

    def cut(self, data: bytes) -> list[Cut]: ...
    def finish_cut(self) -> list[Cut]: ...


_NEWLINE = ord("\n")  # as a number it is found in a sixth of the time, in a short frame


def line(payload: bytes) -> bytes:
    """A frame for a LineFramer. ValueError: a newline inside would make two frames of it."""
    if _NEWLINE in payload:
        raise ValueError("a message that is sent as a line cannot contain a newline")
    return payload + b"\n"


# Bytes from which a piece is stored by itself. Shorter ones are joined, so that the cost of each object does
# not matter.
_LONG_PIECE = 16 << 10


class Pieces:
    """The bytes of an incomplete frame. A long frame is copied once, when it is complete."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes | bytearray] = []

    def add(self, data: bytes) -> None:
        self.size += len(data)
        last = self._pieces[-1] if self._pieces else None
        if len(data) >= _LONG_PIECE:
            self._pieces.append(data)
        elif isinstance(last, bytearray):
            last += data
        elif data:
            self._pieces.append(bytearray(data))

    def take(self) -> bytes:
        pieces, self._pieces, self.size = self._pieces, [], 0
        return b"".join(pieces)


class LineFramer:
    """A frame is a line. Only the newline is removed; the dialect decides about other white space."""

    def __init__(self, limit: int, spare: int = 0) -> None:
        """`limit`: bytes of a line, without its newline. `spare`: further bytes that are accepted, but not
        part of the limit that messages name."""
        self._named_limit = limit
        self._limit = limit + spare
        self._held = Pieces()
        self._ended = False
        self.fault: FrameFault | None = None

    @property
    def pending(self) -> int:
        return self._held.size

    def feed(self, data: bytes) -> list[bytes]:
        if self._ended:
            return []
        end = data.find(b"\n")
        if end < 0:  # most pieces of a long line; split() takes ten times as long
            self._hold(data)
            return []
        if end == len(data) - 1 and not self._held.size and end <= self._limit:
            return [data[:-1]]  # one whole line: most of the time
        first, *rest = data.split(b"\n")
        if not self._hold(first):
            return []
        frames = [self._held.take()]
        last = rest.pop()
        for whole in rest:
            if len(whole) > self._limit:
                self._refuse()
                return frames
            frames.append(whole)
        self._hold(last)
        return frames

    def finish(self) -> list[bytes]:
        self._ended = True
        return [self._held.take()] if self._held.size else []

    def cut(self, data: bytes) -> list[Cut]:
        return [Cut(frame, b"", b"\n") for frame in self.feed(data)]

    def finish_cut(self) -> list[Cut]:
        return [Cut(frame) for frame in self.finish()]

    def _hold(self, part: bytes) -> bool:
        if self._held.size + len(part) > self._limit:
            self._refuse()
            return False
        self._held.add(part)
        return True

    def _refuse(self) -> None:
        self.fault = FrameFault("frame_too_large", f"a line is longer than {self._named_limit} bytes")
        self._ended = True
        self._held = Pieces()
