"""Who has how much of what all submitters share: the ledger, and the stream of dead letters.

A worker counts what it writes for a user, who is in the subject of the call, where the servers' permissions
have checked it. Every few seconds it adds that to the user's entry in a bucket, and it hears what others add.
Counts are by day, and are forgotten when what they count is. A worker that dies loses a few seconds of them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from runner.fleet import names
from runner.fleet.entries import put_if
from runner.fleet.streams import read_bucket
from runner.protocol import wire

# What one user may have of the room that others leave.
SHARE = 0.75
_DAY_SECONDS = 86400
_MOST_DAYS = 40  # of an entry
_TRIES = 10  # against workers that write the same entry
_MESSAGE_BYTES = 200  # of a message's subject and headers


class SharedRoom(NamedTuple):
    name: str
    stream: str
    days: int  # that a message is kept
    part: float  # of the stream's size, for all users


LEDGER: Final = SharedRoom("ledger", f"KV_{names.LEDGER}", 14, names.MOST_FILLED)
DEAD: Final = SharedRoom("dead", names.DEAD, 30, names.MOST_FILLED)
ROOMS: Final = (LEDGER, DEAD)

Days = Mapping[int, int]  # bytes, by day since 1970


def decode_counts(raw: bytes) -> dict[str, Days]:
    """The entry of a user: by room. What cannot be read counts nothing."""
    try:
        found = wire.decode(raw)
    except ValueError:
        return {}
    counts: dict[str, Days] = {}
    for room in ROOMS:
        rows = found.get(room.name) if isinstance(found, dict) else None
        counts[room.name] = {
            int(day): size
            for day, size in (rows.items() if isinstance(rows, dict) else ())
            if day.isascii() and day.isdigit() and len(day) < 8 and isinstance(size, int) and size > 0
        }
    return counts


def added_to(counts: Mapping[str, Days], added: Mapping[str, int], today: int) -> dict[str, Days]:
    """The counts with what was added today, without days that are over."""
    found: dict[str, Days] = {}
    for room in ROOMS:
        days = Counter(counts.get(room.name, {}))
        days[today] += added.get(room.name, 0)
        kept = sorted((day, size) for day, size in days.items() if size and _counts(room, day, today))
        found[room.name] = dict(kept[-_MOST_DAYS:])
    return found


def _counts(room: SharedRoom, day: int, today: int) -> bool:
    return day >= today - room.days


class FleetShares:
    """On asyncio."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js
        self._counts: dict[str, Mapping[str, Days]] = {}  # by user, as the bucket has them
        self._added: Counter[tuple[str, str]] = Counter()  # by user and room; the bucket does not have it yet
        self._sizes: dict[str, int] = {}  # of the rooms

    def measured(self, room: SharedRoom, most_bytes: int) -> None:
        self._sizes[room.name] = most_bytes

    def has_room(self, user: str, room: SharedRoom, size: int = 0) -> bool:
        """Whether so many bytes more of a user are within its share."""
        most = self._sizes.get(room.name, 0) * room.part
        if most <= 0:
            return True  # it has no bound, or was not measured yet
        today = _today()
        users = {*self._counts, *(each for each, _ in self._added)}
        used = Counter({each: self._used(each, room, today) for each in users})
        own = used[user]
        return own + size <= (most - (used.total() - own)) * SHARE

    def used(self) -> dict[str, dict[str, int]]:
        """The bytes of each user, by room."""
        today = _today()
        return {
            user: {room.name: self._used(user, room, today) for room in ROOMS}
            for user in sorted(self._counts)
        }

    def _used(self, user: str, room: SharedRoom, today: int) -> int:
        days = self._counts.get(user, {}).get(room.name, {})
        stored = sum(size for day, size in days.items() if _counts(room, day, today))
        return stored + self._added[user, room.name]

    def add(self, user: str, room: SharedRoom, size: int) -> None:
        """So many bytes were written for a user."""
        self._added[user, room.name] += size + _MESSAGE_BYTES

    async def on_change(self, message: Msg) -> None:
        self._counts[message.subject.rpartition(".")[2]] = decode_counts(message.data)

    async def read(self) -> None:
        """If they cannot be read, what is known counts."""
        try:
            found = await read_bucket(self._js, names.SHARES)
        except (nats.errors.Error, TimeoutError):
            return
        self._counts = {user: decode_counts(raw) for user, raw in found.items()}

    async def tell(self) -> None:
        """Add what was written to the bucket. What cannot be told now is told later."""
        for user in sorted({user for user, _ in self._added}):
            added = {room.name: self._added[user, room.name] for room in ROOMS}
            try:
                done = await self._store(user, added)
            except (nats.errors.Error, TimeoutError):
                done = False
            if done:  # until then it counts as added, and for a moment twice rather than never
                self._added -= Counter({(user, name): size for name, size in added.items()})

    async def _store(self, user: str, added: Mapping[str, int]) -> bool:
        subject = names.entry(names.SHARES, user)
        for _ in range(_TRIES):
            try:
                found = await self._js.get_msg(f"KV_{names.SHARES}", subject=subject)
                counts, last = decode_counts(found.data or b""), found.seq or 0
            except nats.js.errors.NotFoundError:
                counts, last = {}, 0
            new = added_to(counts, added, _today())
            if await put_if(self._js, subject, json.dumps(new).encode(), last) is not None:
                self._counts[user] = new
                return True
        return False


def _today() -> int:
    return int(time.time()) // _DAY_SECONDS
