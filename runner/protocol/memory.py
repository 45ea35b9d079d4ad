"""Limits on the host memory that a plugin can fill: one limit for each session, in fixed shares.

A plugin decides how long its messages are, what they hold, and whether it waits for an answer. JSON takes up
to fifty times as much memory as bytes on the wire. So values are counted not by their length but by their
size in memory, which runner/protocol/wire.py estimates for each frame.

    MOST_HELD        everything below together, for each session
      QUESTIONS      requests and publications that the host has not handled yet; further ones are
                     answered with the contract's "busy"
      EVENTS         notices that nobody has read; further ones are dropped and counted
      STANDING       the handshake, the list of tools, and lists and inputs of open calls; more is a
                     fault of the call, or of the handshake
      COMPILED       compiled schemas of tools; the oldest is dropped and compiled again when needed
      FRAME          the frame being read, its bytes and its values (wire.MOST_MEMORY); more is a fault
      REPLIES        what waits to be written to the plugin; until it is read, no frame is read
                     (session/outbox.py)
      IDS            the ids of open requests, a second time, as bytes (jsonrpc.py); more is a fault

A session also holds messages of others to its plugin:

    DELIVERIES       notifications that wait until the plugin may be told, and until it reads; at half of it
                     publishers wait, and with more the plugin is ended
    ANSWERS          long answers of the host to the plugin's requests (files, topics), until there is room
                     for them among REPLIES; further requests wait (LongMethods in host_services.py)

The shares are fixed, so events that nobody reads never block a request or an answer.
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
COMPILED = 54 * _MEBI  # at least the size of the largest schema (runner/protocol/schema.py)
# The longest frame of any contract has 16 MiB. It is held three times: growing, whole, and in the allocator.
FRAME = wire.MOST_MEMORY + 3 * 16 * _MEBI
REPLIES = 5 * _MEBI  # including the reply that was begun before the queue was full
IDS = 4 * _MEBI

DELIVERIES = 64 * _MEBI
ANSWERS = 4 * 16 * _MEBI  # at most four are made at a time, each of at most one frame

# Bytes that a waiting notification takes beside its frame.
_DELIVERY = 512

# Bytes of the task that serves one request. One frame can hold many requests.
QUESTION = 16 << 10

_MOST_PARTS = 64  # of a value whose size is measured

_T = TypeVar("_T")


def delivery_cost(frame: bytes) -> int:
    """Bytes that a frame takes of DELIVERIES."""
    return len(frame) + _DELIVERY


class Share:
    """Bytes of one kind that one session holds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def take(self, size: int) -> bool:
        """Take `size` bytes, and return whether there was room."""
        if self.held + size > self.most:
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        self.held -= size


class Charge:
    """The part of a share that one frame takes while any part of the frame is held.

    An array of messages is one frame. Its messages are released one by one. Together they take what the frame
    takes, plus `each` for every message that is still held.
    """

    def __init__(self, share: Share, weight: int, each: int = 0) -> None:
        self.weight = weight
        self._each = each
        self._share = share
        self._holders = 0

    def hold(self) -> bool:
        """Returns whether there was room. If so, the caller has to call `release`."""
        if not self._share.take(self._each if self._holders else self.weight + self._each):
            return False
        self._holders += 1
        return True

    def release(self) -> None:
        self._holders -= 1
        self._share.give_back(self._each if self._holders else self.weight + self._each)


class BoundedCache(Generic[_T]):
    """A cache of values that can be made again, bounded in bytes. The oldest are dropped first."""

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


def size_of(value: Any, most_parts: int = _MOST_PARTS) -> int | None:
    """Bytes that a small JSON value takes in memory. None: it has more parts than these."""
    size, left = 0, most_parts
    parts = [value]
    while parts:
        part = parts.pop()
        size += sys.getsizeof(part) + 16  # its header, and the allocator's rounding
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
