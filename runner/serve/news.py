"""NewsQueue: what a plugin says during a call, until the client reads it. Bounded in number and bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import trio

from runner.protocol.memory import Share, size_of

_MOST_NEWS = 256
_MOST_BYTES = 1 << 20  # in memory

_T = TypeVar("_T")


class NewsQueue(AsyncIterator[_T], Generic[_T]):
    """For one reader. Ends when it is closed and empty."""

    def __init__(self) -> None:
        self.dropped = 0  # because the client does not read
        self._share = Share(_MOST_BYTES)
        self._send, self._receive = trio.open_memory_channel[tuple[_T, int]](_MOST_NEWS)

    def put(self, news: _T, told: Any) -> None:
        """`told`: the part of it that a plugin has made, as a JSON value."""
        size = size_of(told)
        if size is None:
            size = _MOST_BYTES  # too many parts to measure: it waits alone
        if self._send.statistics().tasks_waiting_receive:
            size = 0  # a reader waits, so nothing else does
        if not self._share.take(size):
            self.dropped += 1
            return
        try:
            self._send.send_nowait((news, size))
        except trio.WouldBlock:
            self._share.give_back(size)
            self.dropped += 1

    def close(self) -> None:
        """Nothing more will be put."""
        self._send.close()

    async def __anext__(self) -> _T:
        try:
            news, size = await self._receive.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        self._share.give_back(size)
        return news
