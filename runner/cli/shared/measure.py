"""How large a folder is that a plugin has filled, for people."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator

from sandbox.limits.disk_usage import Size, size

_MOST_COUNTED = 1 << 50  # bytes: nothing is that large
_COUNTING_SECONDS = 1.0


def measured(path: str, until: float | None = None) -> tuple[int, bool] | None:
    """The bytes in a folder, and whether that is all of them; None if it cannot be counted. A plugin may have
    made any number of files, so the count ends after a while."""
    until = until or time.monotonic() + _COUNTING_SECONDS
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    count = _Counting(size(fd, _MOST_COUNTED))
    try:
        for _ in count:
            if time.monotonic() > until:
                break
    finally:
        os.close(fd)
    return None if count.result is None else (count.result.used, not count.result.fault)


class _Counting:
    """Steps of a measurement, and its result if it came to its end."""

    def __init__(self, steps: Generator[None, None, Size]) -> None:
        self._steps = steps
        self.result: Size | None = None

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self._steps
