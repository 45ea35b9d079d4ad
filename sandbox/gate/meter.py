"""The bytes of all connections of one plugin together: how many, and how many per second."""

from __future__ import annotations

from sandbox.gate.loop import Loop
from sandbox.speed.typed import Callable

# What may be moved at once after a pause, in seconds of the rate. Also how long a connection waits at most
# before it may try again.
_BURST_SECONDS = 0.1


class ByteMeter:
    def __init__(self, loop: Loop, most: int | None, rate: int | None) -> None:
        self._loop = loop
        self._left = most
        self._rate = rate
        self._burst = max(1, int((rate or 0) * _BURST_SECONDS))
        self._tokens = float(self._burst)
        self._filled = loop.now
        self._waiting: list[Callable[[], None]] = []

    @property
    def spent(self) -> bool:
        """Whether the plugin has moved all bytes that it may."""
        return self._left is not None and self._left <= 0

    def allowance(self, wanted: int) -> int:
        """How many bytes may be moved now, at most `wanted`."""
        if self._left is not None:
            wanted = max(0, min(wanted, self._left))
        if self._rate is None:
            return wanted
        now = self._loop.now
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        return min(wanted, int(self._tokens))

    def count(self, moved: int) -> None:
        if self._left is not None:
            self._left -= moved
        if self._rate is not None:
            self._tokens -= moved

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` when there may be an allowance again."""
        assert self._rate is not None
        if not self._waiting:
            # At least one byte, and not more often than the burst is worth.
            seconds = max(_BURST_SECONDS / 4, (1 - self._tokens) / self._rate)
            self._loop.call_later(seconds, self._wake)
        self._waiting.append(resume)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        # The last one that got something stands at the end of the line, so that each gets its turn.
        for resume in waiting:
            resume()
