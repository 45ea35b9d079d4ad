"""Calls that wait for a cell: fair between callers, and bounded in number and bytes.

Callers take turns, whatever each of them has waiting. If the queue is full, a caller that has few calls in it
takes the place of the newest call of the caller that has most.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class QueueFull(Exception):
    pass


class CallerQueue(Generic[_T]):
    def __init__(self) -> None:
        self._lines: dict[str, deque[tuple[_T, int]]] = {}  # by caller; who is next stands first
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, caller: str, call: _T, size: int, most: int, most_bytes: int) -> _T | None:
        """Returns the call that had to leave for this one, if any. Raises QueueFull."""
        left: _T | None = None
        line = self._lines.get(caller, ())
        if self._count and self._bytes + size > most_bytes:
            raise QueueFull
        if self._count >= most:
            longest = max(self._lines, key=lambda each: len(self._lines[each]), default=caller)
            if len(self._lines.get(longest, ())) <= len(line) + 1:
                raise QueueFull
            left = self._lines[longest][-1][0]
            self.remove(longest, left)
        self._lines.setdefault(caller, deque()).append((call, size))
        self._bytes += size
        self._count += 1
        return left

    def take(self) -> _T:
        """The next call: the first of the caller whose turn it is."""
        caller = next(iter(self._lines))
        line = self._lines.pop(caller)
        call, size = line.popleft()
        if line:
            self._lines[caller] = line  # behind all others
        self._bytes -= size
        self._count -= 1
        return call

    def remove(self, caller: str, call: _T) -> bool:
        """Whether it was there."""
        line = self._lines.get(caller, deque())
        for place, (each, size) in enumerate(line):
            if each is call:
                del line[place]
                if not line:
                    del self._lines[caller]
                self._bytes -= size
                self._count -= 1
                return True
        return False

    def clear(self) -> list[_T]:
        calls = [call for line in self._lines.values() for call, _ in line]
        self._lines, self._bytes, self._count = {}, 0, 0
        return calls
