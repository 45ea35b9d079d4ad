"""How much of its host's memory a plugin can fill: one bound for a session, in fixed shares.

A plugin decides how long its messages are, what is in them, and whether it waits for an answer. JSON takes up
to fifty times as much memory as it takes on the wire. So what is held is counted as it is in memory
(runner/protocol/wire.py weighs each frame) and not by its length.

    MOST_HELD        everything below, at any time; no two sessions share it
      QUESTIONS      what the plugin asked or published and the host has not dealt with yet; more is answered
                     with the contract's "busy"
      EVENTS         what it told and nobody has read; more is dropped and counted
      STANDING       its handshake, its list of tools, lists and inputs of calls on their way; more is a fault
                     of the call, or of the handshake
      COMPILED       schemas of its tools, ready for use; the oldest is forgotten, and made again when needed
      FRAME          the frame being read, its bytes and its values (wire.MOST_MEMORY); more is a fault
      REPLIES        what waits to be written to it; until that is read, nothing more is (session/outbox.py)
      IDS            of its open questions, a second time, as bytes (jsonrpc.py); more is a fault

The shares are fixed: events nobody reads never stand in the way of a question or an answer.
"""

from __future__ import annotations

import sys
from typing import Any, Generic, TypeVar

from runner.protocol import wire

_MEBI = 1 << 20

MOST_HELD = 384 * _MEBI

QUESTIONS = 48 * _MEBI
EVENTS = 32 * _MEBI
STANDING = 32 * _MEBI
COMPILED = 54 * _MEBI  # at least what the largest schema takes (runner/protocol/schema.py)
# The longest frame of any contract has 16 MiB: as it grows, as one piece, and what an allocator keeps of it.
FRAME = wire.MOST_MEMORY + 3 * 16 * _MEBI
REPLIES = 5 * _MEBI  # and one more, begun before it was full
IDS = 4 * _MEBI

# Each question is a task, besides what was asked. One frame can have many.
QUESTION = 16 << 10

_FEW = 64

_T = TypeVar("_T")


class Share:
    """Bytes of one kind that one session holds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def take(self, size: int) -> bool:
        """Whether there was room."""
        if self.held + size > self.most:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        self.held -= size


class Charge:
    """What one frame takes of a share, as long as any part of it is held.

    An array of messages is one frame. Each of them is held for a time of its own, and all together take no
    more than the frame, and `each` for every one that is held.
    """

    def __init__(self, share: Share, weight: int, each: int = 0) -> None:
        self.weight = weight
        self._each = each
        self._share = share
        self._holders = 0

    def hold(self) -> bool:
        """Whether there was room. If so, `release` is to follow."""
        if not self._share.take(self._each if self._holders else self.weight + self._each):
            return False
        self._holders += 1
        return True

    def release(self) -> None:
        self._holders -= 1
        self._share.give_back(self._each if self._holders else self.weight + self._each)


class Shelf(Generic[_T]):
    """Things that can be made again: the oldest go when there is no room for a new one."""

    def __init__(self, most: int) -> None:
        self._share = Share(most)
        self._things: dict[str, tuple[_T, int]] = {}

    def get(self, name: str) -> _T | None:
        found = self._things.get(name)
        return None if found is None else found[0]

    def put(self, name: str, thing: _T, size: int) -> None:
        while not self._share.take(size) and self._things:
            _, oldest = self._things.pop(next(iter(self._things)))
            self._share.give_back(oldest)
        self._things[name] = thing, size

    def clear(self) -> None:
        self._things.clear()
        self._share.held = 0


def size_of(value: Any) -> int | None:
    """Bytes that a small JSON value takes in memory. None: it has too many parts to look at each."""
    size, left = 0, _FEW
    parts = [value]
    while parts:
        part = parts.pop()
        size += sys.getsizeof(part) + 16  # and its header, and what an allocator rounds up
        if isinstance(part, dict):
            members = [*part, *part.values()] if len(part) <= left else None
        elif isinstance(part, list | tuple):
            members = list(part) if len(part) <= left else None
        else:
            continue
        if members is None or (left := left - len(members)) < 0:
            return None
        parts += members
    return size
