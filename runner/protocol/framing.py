"""How `exec --inspect` reads the two directions of a contract's stream.

The plugin's frames are cut out, checked, and then passed on byte for byte. The host's stream is passed on at
once and only skimmed: a frame that cannot be read is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from runner.protocol.frames import Cutter, LineFramer
from runner.protocol.header_frames import HeaderFramer, HeaderRules
from sandbox.speed.value import NamedTuple

# A frame, and where it ends in the stream. None: it is too long, or its end is unknown.
Skimmed = tuple[bytes | None, int]


class Skimmer(Protocol):
    def feed(self, data: bytes) -> Iterator[Skimmed]:
        """The frames that are complete now, in order."""
        ...

    def finish(self) -> Iterator[Skimmed]:
        """The stream has ended. Returns the rest, if it is a frame."""
        ...


class Framing(Protocol):
    """The framing of a contract."""

    def cutter(self) -> Cutter:
        """For the plugin's stream, with the contract's limits."""
        ...

    def skimmer(self, limit: int) -> Skimmer:
        """For the host's stream. A frame of more than `limit` bytes is skipped."""
        ...


class LineFraming(NamedTuple):
    """See LineFramer."""

    limit: int
    spare: int = 0

    def cutter(self) -> Cutter:
        return LineFramer(self.limit, self.spare)

    def skimmer(self, limit: int) -> Skimmer:
        return LineSkimmer(limit)


class HeaderFraming(NamedTuple):
    rules: HeaderRules

    def cutter(self) -> Cutter:
        return HeaderFramer(self.rules, rewrites=True)

    def skimmer(self, limit: int) -> Skimmer:
        return HeaderSkimmer(self.rules, limit)


class LineSkimmer:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._framer = LineFramer(limit)
        self._skips = False  # the rest of a line that is too long
        self._taken = 0

    def feed(self, data: bytes) -> Iterator[Skimmed]:
        *lines, rest = data.split(b"\n")
        for line in lines:
            yield from self._read_piece(line + b"\n")
        yield from self._read_piece(rest)

    def finish(self) -> Iterator[Skimmed]:
        for frame in self._framer.finish():
            yield frame, self._taken

    def _read_piece(self, piece: bytes) -> Iterator[Skimmed]:
        """A line or a part of one."""
        self._taken += len(piece)
        whole = piece.endswith(b"\n")
        if self._skips:
            self._skips = not whole
            return
        for frame in self._framer.feed(piece):
            yield frame, self._taken
        if self._framer.fault is not None:
            self._framer = LineFramer(self._limit)
            self._skips = not whole
            yield None, self._taken


class HeaderSkimmer:
    """A header says where its frame ends, so a long frame is skipped as a whole. After a header that breaks
    the rules nothing more can be read."""

    def __init__(self, rules: HeaderRules, limit: int) -> None:
        self._rules = rules._replace(body_limit=min(limit, rules.body_limit))
        self._framer = HeaderFramer(self._rules)
        self._begin = 0  # where in the stream the framer begins
        self._taken = 0

    def feed(self, data: bytes) -> Iterator[Skimmed]:
        start = self._taken  # of `data`, in the stream
        self._taken += len(data)
        while self._begin < self._taken and self._framer.fault is None:
            framer, end = self._framer, self._begin + self._framer.taken
            for cut in framer.cut(data[max(0, self._begin - start) :]):
                end += len(cut.before) + len(cut.frame)
                yield cut.frame, end
            if framer.fault is None:
                return
            if framer.refused is None:
                yield None, self._taken
                return
            self._begin += framer.taken + framer.refused
            self._framer = HeaderFramer(self._rules)
            yield None, self._begin

    def finish(self) -> Iterator[Skimmed]:
        return iter(())
