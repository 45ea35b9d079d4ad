"""The ledger of a fleet, in a bucket: one entry for each durable call.

Only who knows its last revision can change an entry. It is made before its call begins and ended once; then
the call is acknowledged.

    waiting   nobody runs it; it was begun `attempt` times, and did nothing that forbids another one
    began     a worker runs it, or died while it ran
    ended     with the answer. If the plugin was not asked, the key is free: a later submission begins it anew
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import nats.errors
import nats.js.errors
from nats.js.api import Header
from nats.js.client import JetStreamContext

from runner.fleet import names
from runner.protocol import wire

_WRONG_REVISION = (10071, 10164)
FULL = (10077, 10054, 10023)  # too many messages or bytes, too large, no resources
_NO_SPACE = "no space left"  # in the words of a server, behind a path of its own
_PAUSE_SECONDS = 0.5

EntryState = Literal["waiting", "began", "ended"]


class LedgerFull(Exception):
    """Nothing was written."""


class LedgerEntry(NamedTuple):
    state: EntryState
    worker: str
    nonce: str  # of the attempt
    attempt: int
    plugin: str
    tool: str
    began: float
    ended: float | None = None
    status: int = 0
    document: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    dead: str | None = None  # why it became a dead letter
    # The message with which it ended without asking the plugin; None: it was asked.
    free_since: int | None = None
    freed_by: str = ""  # the submission of that message


class Held(NamedTuple):
    """An entry and its revision."""

    entry: LedgerEntry
    revision: int
    size: int = 0  # in bytes, if it was written now


_TEXT, _NUMBER, _MAP = (str,), (int, float), (dict, type(None))
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("worker", "nonce", "plugin", "tool", "freed_by"), _TEXT),
    **dict.fromkeys(("attempt", "status"), (int,)),
    **dict.fromkeys(("document", "record"), _MAP),
    "began": _NUMBER,
    "ended": (*_NUMBER, type(None)),
    "dead": (*_TEXT, type(None)),
    "free_since": (int, type(None)),
}


def decode_entry(raw: bytes) -> LedgerEntry:
    """Raises ValueError."""
    found = wire.decode(raw)
    if not isinstance(found, dict) or found.get("state") not in get_args(EntryState):
        raise ValueError("it is not an entry of the ledger")
    try:
        entry = LedgerEntry(**{key: value for key, value in found.items() if key in LedgerEntry._fields})
    except TypeError as error:
        raise ValueError(f"it is not an entry of the ledger: {error}") from None
    for name, types in _TYPES.items():
        if not isinstance(getattr(entry, name), types):
            raise ValueError(f"it is not an entry of the ledger: {name} has the wrong type")
    return entry


# Stands for an entry that cannot be read: somebody may have begun the call, and nobody says that he runs it.
_UNREADABLE = LedgerEntry("began", "", "", 1, "", "", 0.0)


class FleetLedger:
    """On asyncio. Every method goes on trying while the servers do not answer: what was asked for may have
    been done, so that it reads what is there before it tries again."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js

    async def read(self, user: str, key: str) -> Held | None:
        """From the leader: another server might not know the last revision yet."""
        subject = names.entry(names.LEDGER, f"{user}.{key}")
        while True:
            try:
                found = await self._js.get_msg(f"KV_{names.LEDGER}", subject=subject)
                try:
                    entry = decode_entry(found.data or b"{}")
                except ValueError:
                    entry = _UNREADABLE
                return Held(entry, found.seq or 0)
            except nats.js.errors.NotFoundError:
                return None
            except (nats.errors.Error, TimeoutError):
                await asyncio.sleep(_PAUSE_SECONDS)

    async def write(self, user: str, key: str, entry: LedgerEntry, last: int) -> Held | None:
        """Write it if the entry's revision is `last` (0: there is none). Returns None if it is another.
        Raises LedgerFull if the first entry of a call has no room; an end waits until it has."""
        raw = json.dumps({k: v for k, v in entry._asdict().items() if v is not None}).encode()
        while True:
            try:
                revision = await put_if(self._js, names.entry(names.LEDGER, f"{user}.{key}"), raw, last)
                return None if revision is None else Held(entry, revision, len(raw))
            except (nats.errors.Error, TimeoutError) as error:
                if last == 0 and isinstance(error, nats.js.errors.APIError) and error.err_code in FULL:
                    raise LedgerFull(str(error.description)) from None
                await asyncio.sleep(_PAUSE_SECONDS)
                found = await self.read(user, key)
                if found is not None and _same(found.entry, entry):
                    return found  # it was written, and the answer was lost
                if (0 if found is None else found.revision) != last:
                    return None

    async def publish(self, subject: str, raw: bytes, *, once: bool = False) -> None:
        """Publish until a server says that it is stored. `once`: only if the subject has no message yet."""
        while True:
            try:
                await (put_if(self._js, subject, raw, 0) if once else self._js.publish(subject, raw))
                return
            except (nats.errors.Error, TimeoutError):
                await asyncio.sleep(_PAUSE_SECONDS)


def is_disk_full(error: Exception) -> bool:
    """Whether a server says that its disk has no room, whatever the stream may have."""
    return isinstance(error, nats.js.errors.APIError) and _NO_SPACE in (error.description or "")


def _same(one: LedgerEntry, other: LedgerEntry) -> bool:
    return (one.state, one.nonce, one.attempt) == (other.state, other.nonce, other.attempt)


async def put_if(js: JetStreamContext, subject: str, raw: bytes, last: int) -> int | None:
    """Publish if `last` is the sequence of the subject's last message. Returns the new one, or None."""
    try:
        done = await js.publish(subject, raw, headers={Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(last)})
    except nats.js.errors.APIError as error:
        if error.err_code in _WRONG_REVISION:
            return None
        raise
    return done.seq
