"""A limit on calls per minute."""

from __future__ import annotations

from collections.abc import Callable


class RateLimit:
    """A client may make a minute's calls at once, and then one whenever its time has come."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """`per_minute`: 0 for any number. `clock`: seconds."""
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def take(self) -> float:
        """Take one call. Returns 0, or the seconds after which one is allowed."""
        if not self._per_minute:
            return 0.0
        now, speed = self._clock(), self._per_minute / 60
        self._left = min(float(self._per_minute), self._left + (now - self._at) * speed)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / speed
        self._left -= 1
        return 0.0
