"""Room: the places for the connections of one listening socket. A stranger is a client who has not shown yet
who it is, by a token, a certificate or the uid of a unix socket.

Strangers have half of the places at most, and each of theirs is given to the next client who needs it: the
oldest place of the address that has most of them. So nobody without a token can keep out those who have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

HEADER_SECONDS = 15.0  # for a request header, and between two requests of a connection
STRANGER_SECONDS = 5.0  # the same, for a stranger


class DoorPlace:
    """The place of one connection. `close`: ends the connection at once, for another one's sake."""

    def __init__(self, room: Room, address: str, close: Callable[[], None]) -> None:
        self.address, self.close = address, close
        self._room = room

    @property
    def idle_seconds(self) -> float:
        return STRANGER_SECONDS if self in self._room.strangers else HEADER_SECONDS

    def admit(self) -> None:
        """Its client is no stranger any more. May be called again."""
        self._room.strangers.pop(self, None)

    def leave(self) -> None:
        """May be called again."""
        self._room.places.discard(self)
        self.admit()


class Room:
    def __init__(self, most: int, on_full: Callable[[], None]) -> None:
        self._most, self._on_full = most, on_full
        self.places: set[DoorPlace] = set()
        self.strangers: dict[DoorPlace, None] = {}  # the oldest first

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
