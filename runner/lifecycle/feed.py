"""What a supervisor tells those who watch: bounded, and the oldest is dropped for a reader that is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import trio

_T = TypeVar("_T")
LOG_BYTES = 64 << 10


class Feed(AsyncIterator[_T], Generic[_T]):
    """For one reader. Ends when it is closed and empty."""

    def __init__(self, most: int, forget: Callable[[Feed[_T]], None]) -> None:
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
        self._feeds: list[Feed[_T]] = []

    def subscribe(self) -> Feed[_T]:
        feed: Feed[_T] = Feed(self._most, self._forget)
        self._feeds.append(feed)
        return feed

    def tell(self, item: _T) -> None:
        for feed in self._feeds:
            feed.tell(item)

    def close(self) -> None:
        for feed in list(self._feeds):
            feed.close()

    def _forget(self, feed: Feed[_T]) -> None:
        if feed in self._feeds:
            self._feeds.remove(feed)


class StderrLog:
    """The end of what a plugin wrote to its stderr, in all its cells."""

    def __init__(self) -> None:
        self._tail = bytearray()
        self._source: FeedSource[str] = FeedSource(256)

    @property
    def text(self) -> str:
        return self._tail[-LOG_BYTES:].decode("utf-8", "replace")

    def add(self, data: bytes) -> None:
        if not data:
            return
        self._tail += data
        if len(self._tail) > 2 * LOG_BYTES:  # it is not moved at each write
            del self._tail[:-LOG_BYTES]
        self._source.tell(data.decode("utf-8", "replace"))

    def follow(self) -> Feed[str]:
        return self._source.subscribe()

    def close(self) -> None:
        self._source.close()
