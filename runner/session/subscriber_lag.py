"""How long publishers have waited for one subscriber, and when that is too long.

A plugin that publishes waits while its subscriber has no room. A subscriber that reads a page every other
second would keep its publishers for ever, without ever stalling. So it has to read a least number of bytes in
the time that others wait for it. While a call of its host is open it is told nothing and cannot read, so that
time counts separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LEAST_RATE = 1 << 20  # bytes for each second that publishers wait
MOST_SECONDS = 5.0  # that it may be behind this rate
MOST_CALL_SECONDS = 30.0  # that publishers wait for the end of one call
STEP_SECONDS = 1.0  # after which it is looked at again


class SubscriberLag:
    """How far one subscriber is behind."""

    def __init__(self) -> None:
        self._behind = 0.0  # seconds
        self._in_call = 0.0
        self._at, self._sent = 0.0, 0  # of the last look
        self._waiting = 0  # publishers

    @property
    def fault(self) -> str:
        """Why the subscriber has to end, or ''."""
        if self._behind > MOST_SECONDS:
            return f"publishers waited for the plugin, which read less than {LEAST_RATE >> 20} MiB a second"
        if self._in_call > MOST_CALL_SECONDS:
            seconds = f"{MOST_CALL_SECONDS:g} seconds"
            return f"publishers waited {seconds} for the plugin, which gets no events while a call is open"
        return ""

    @contextmanager
    def counting(self, now: float, sent: int) -> Iterator[None]:
        """While a publisher waits. The time in which several wait counts once."""
        if not self._waiting:
            self._at, self._sent = now, sent
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def add(self, now: float, sent: int, in_call: bool) -> None:
        """`sent`: bytes that the plugin has read in all. `in_call`: it was told nothing in this time."""
        seconds, read = now - self._at, sent - self._sent
        self._at, self._sent = now, sent
        if in_call:
            self._in_call += seconds
        else:
            self._behind = max(0.0, self._behind + seconds - read / LEAST_RATE)

    def end_call(self) -> None:
        self._in_call = 0.0

    def clear(self) -> None:
        """It has caught up."""
        self._behind = self._in_call = 0.0
