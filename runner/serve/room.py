"""Room: the places for the connections of one listening socket. A stranger is a client who has not shown yet
who it is, by a token, a certificate or the uid of a unix socket.

Strangers have half of the places at most, and each of theirs is given to the next client who needs it: the
oldest place of the address that has most of them. So nobody without a token can keep out those who have one.
And nobody who has one keeps out the others: a caller has three quarters of the places that others leave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

HEADER_SECONDS = 15.0  # for a request header, and between two requests of a connection
STRANGER_SECONDS = 5.0  # the same, for a stranger
_SHARE = 0.75  # of the places that other callers leave


class DoorPlace:
    """The place of one connection. `close`: ends the connection at once, for another one's sake."""

    def __init__(self, room: Room, address: str, close: Callable[[], None]) -> None:
        self.address, self.close = address, close
        self.caller = ""  # who it is, if its client has shown that
        self._room = room

    @property
    def idle_seconds(self) -> float:
        return STRANGER_SECONDS if self in self._room.strangers else HEADER_SECONDS

    def admit(self, caller: str = "") -> bool:
        """Its client is no stranger any more. `caller`: who it is, if there are several callers. Returns
        False if that one has its share of the places. May be called again, also with another caller."""
        if caller not in ("", self.caller) and not self._room.has_place(caller):
            return False
        self.caller = caller or self.caller
        self._room.strangers.pop(self, None)
        return True

    def leave(self) -> None:
        """May be called again."""
        self._room.places.discard(self)
        self._room.strangers.pop(self, None)


class Room:
    def __init__(self, most: int, on_full: Callable[[], None]) -> None:
        self._most, self._on_full = most, on_full
        self.places: set[DoorPlace] = set()
        self.strangers: dict[DoorPlace, None] = {}  # the oldest first

    def has_place(self, caller: str) -> bool:
        """Whether a caller may have one more place."""
        held = Counter(each.caller for each in self.places if each.caller)
        left = self._most - (held.total() - held[caller])
        return held[caller] < max(1, int(left * _SHARE))

    def take(self, address: str, close: Callable[[], None]) -> DoorPlace | None:
        """A place for a stranger. None: all are held by clients who are known."""
        if len(self.places) >= self._most or len(self.strangers) >= max(1, self._most // 2):
            self._on_full()
            if not self.strangers:
                return None
            held = Counter(each.address for each in self.strangers)
            oldest = max(self.strangers, key=lambda each: held[each.address])  # of equals, the first
            oldest.leave()
            oldest.close()
        place = DoorPlace(self, address, close)
        self.places.add(place)
        self.strangers[place] = None
        return place
