"""What a supervisor tells those who watch: bounded, and the oldest is dropped for a reader that is slow."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import trio

_T = TypeVar("_T")
LOG_BYTES = 64 << 10  # of a plugin's stderr
_MOST_PIECES = 256  # of a plugin's stderr, that wait for a reader
_MOST_MARKS = 1024  # times that a log knows. Beyond them, older ones are told less exactly


class BoundedFeed(AsyncIterator[_T], Generic[_T]):
    """For one reader. Ends when it is closed and empty."""

    def __init__(self, most: int, forget: Callable[[BoundedFeed[_T]], None]) -> None:
        """`most`: items that wait for the reader. `forget`: called when it is closed."""
        self.dropped = 0  # items that the reader has missed
        self._items: deque[_T] = deque()
        self._most = most
        self._forget = forget
        self._news = trio.Event()
        self._closed = False

    def tell(self, item: _T) -> None:
        if len(self._items) >= self._most:
            self._items.popleft()
            self.dropped += 1
        self._items.append(item)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._forget(self)

    async def __anext__(self) -> _T:
        await trio.lowlevel.checkpoint()
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._news = trio.Event()
            await self._news.wait()
        return self._items.popleft()


class FeedSource(Generic[_T]):
    """All feeds of one thing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._feeds: list[BoundedFeed[_T]] = []

    def subscribe(self) -> BoundedFeed[_T]:
        feed: BoundedFeed[_T] = BoundedFeed(self._most, self._forget)
        self._feeds.append(feed)
        return feed

    def tell(self, item: _T) -> None:
        for feed in self._feeds:
            feed.tell(item)

    def close(self) -> None:
        for feed in list(self._feeds):
            feed.close()

    def _forget(self, feed: BoundedFeed[_T]) -> None:
        if feed in self._feeds:
            self._feeds.remove(feed)


class LogPiece(str):
    """Text of a plugin's stderr."""

    at: float  # when it was read: seconds since 1970

    def __new__(cls, text: str, at: float) -> LogPiece:
        made = super().__new__(cls, text)
        made.at = at
        return made


class LineTimes:
    """Writes a time in front of each line of a text that comes in pieces."""

    def __init__(self) -> None:
        self._in_line = False

    def write(self, piece: LogPiece) -> str:
        if not piece:
            return ""
        seconds, milliseconds = divmod(int(piece.at * 1000), 1000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03}Z "
        *whole, last = piece.split("\n")
        lines = [f"{stamp}{line}\n" for line in whole] + ([f"{stamp}{last}"] if last else [])
        if self._in_line:
            lines[0] = lines[0].removeprefix(stamp)
        self._in_line = bool(last)
        return "".join(lines)


class StderrLog:
    """The end of what a plugin wrote to its stderr, in all its cells."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.written = 0  # bytes so far
        self._clock = clock
        self._tail = bytearray()
        # How many bytes there were, and when: what came after the mark before was read by then.
        self._marks: list[tuple[int, float]] = []
        self._source: FeedSource[LogPiece] = FeedSource(_MOST_PIECES)

    @property
    def text(self) -> str:
        return self.since(0)

    def since(self, written: int) -> str:
        """The end of what was added since there were so many bytes."""
        new = min(self.written - written, LOG_BYTES)
        return self._tail[len(self._tail) - new :].decode("utf-8", "replace")

    def lines(self) -> list[LogPiece]:
        """`text` line by line, each with the time when its beginning was read."""
        tail, found = bytes(self._tail[-LOG_BYTES:]), []
        at = self.written - len(tail)
        for line in re.findall(rb"[^\n]*\n|[^\n]+", tail):
            mark = bisect_right(self._marks, at, key=lambda mark: mark[0])
            found.append(LogPiece(line.decode("utf-8", "replace"), self._marks[mark][1]))
            at += len(line)
        return found

    def add(self, data: bytes) -> None:
        if not data:
            return
        self.written += len(data)
        self._tail += data
        if len(self._tail) > 2 * LOG_BYTES:  # it is not moved at each write
            del self._tail[:-LOG_BYTES]
        at = self._clock()
        self._marks.append((self.written, at))
        if len(self._marks) > _MOST_MARKS:
            # Of the older half every second one stays, however often the plugin writes.
            del self._marks[: _MOST_MARKS // 2 : 2]
        self._source.tell(LogPiece(data.decode("utf-8", "replace"), at))

    def follow(self) -> BoundedFeed[LogPiece]:
        return self._source.subscribe()

    def close(self) -> None:
        self._source.close()
