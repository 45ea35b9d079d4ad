"""Events a plugin sent unasked, until they are read: bounded in number and bytes. The newest are dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio

from runner.protocol.dialect import Notice, Progress
from runner.protocol.memory import EVENTS, Charge, Share, size_of

MOST_EVENTS = 256

_SMALL_BYTES = 4 << 10  # of a frame. 256 of these fit, so their content need not be measured


class Backlog(AsyncIterator[Notice | Progress]):
    """For one reader, which may stop at any time. Ends when it is closed and empty."""

    def __init__(self, whole: Backlog | None = None) -> None:
        """`whole`: the backlog that is read instead, if this is one process of several. Bytes are still
        counted per process, here."""
        self.share = Share(EVENTS)
        self.dropped = 0
        self._last: Notice | None = None
        self._whole = whole
        self._send, self._receive = trio.open_memory_channel[tuple[Notice | Progress, Charge]](MOST_EVENTS)
        if whole is not None:
            self._send.close()
            self.share, self._send = whole.share, whole._send.clone()

    def charge(self, weight: int) -> Charge:
        """A charge for the events of one frame."""
        return Charge(self.share, weight)

    def tell(self, event: Notice | Progress, frame: Charge | None) -> None:
        """`frame`: the charge of the frame the event came in. None: the event is our own."""
        charge = self._charge_of(event, frame)
        if self._send.statistics().tasks_waiting_receive:
            # A reader is waiting, so nothing else is held, and the size does not matter.
            charge = self.charge(0)
        if not charge.hold():
            self.dropped += 1
            return
        try:
            self._send.send_nowait((event, charge))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            charge.release()
            self.dropped += 1

    def _charge_of(self, event: Notice | Progress, frame: Charge | None) -> Charge:
        if frame is not None and frame.weight <= _SMALL_BYTES:
            return frame
        # Often an event holds only a little of a long frame: the start of a line, or why it was dropped.
        size = size_of(event)
        if size is not None:
            return self.charge(size)
        return frame if frame is not None else self.charge(_SMALL_BYTES)

    def close(self, last: Notice | None = None) -> None:
        """Take no more events. What is there can still be read. `last`: read after all others, and never
        dropped; only the first call with one has an effect. With `whole`, it is an ordinary event."""
        if self._whole is not None and self._last is None and last is not None:
            self.tell(last, None)
        self._last = self._last or last
        self._send.close()

    def discard(self) -> None:
        """Drop what nobody has read."""
        try:
            while True:
                self._receive.receive_nowait()[1].release()
        except (trio.WouldBlock, trio.EndOfChannel):
            pass

    async def __anext__(self) -> Notice | Progress:
        try:
            event, charge = await self._receive.receive()
        except trio.EndOfChannel:
            if self._last is None:
                raise StopAsyncIteration from None
            last, self._last = self._last, None
            return last
        charge.release()
        return event
