"""A plugin's keys and values, stored beside its state directory. Our extension of the contract:
docs/kaged.md.

Every operation opens the database in a thread and closes it again. Waiting for another process is done
between the tries, on trio's clock, so it holds no thread and ends when it is cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from runner.contracts.kaged.database import Busy, Full, Unusable, error_code, limit_pages, open_database
from runner.protocol import wire
from runner.protocol.host_services import HostError
from runner.protocol.jsonrpc import INVALID_PARAMS

if TYPE_CHECKING:
    import sqlite3

# Error codes of the extension.
DENIED, FULL, BUSY, UNUSABLE = -32001, -32002, -32003, -32004

KEY_MOST_BYTES = 256
VALUE_MOST_BYTES = 256 << 10  # as compact JSON in UTF-8, which is how it is kept
# Of all entries together. A key counts twice, because there is an index of the keys.
ENTRIES_MOST_BYTES = 16 << 20
ENTRY_EXTRA_BYTES = 64
KEYS_MOST = 65_536

BUSY_SECONDS = 2.0  # that an operation waits for another session of the same plugin
_AGAIN_AFTER_SECONDS = 0.02

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")

T = TypeVar("T")


def key_fault(key: Any, name: str, *, may_be_empty: bool) -> str:
    """Returns the fault of a key or of a prefix, or ''."""
    if not isinstance(key, str):
        return f"{name} must be a string"
    if not key and not may_be_empty:
        return f"{name} must not be empty"
    if "\ufffd" in key:  # half of a surrogate pair arrives as this, so two keys would become one
        return f"{name} must not contain U+FFFD, which stands for text that is not Unicode"
    if _CONTROL.search(key):
        return f"{name} must not contain control characters"
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return f"{name} must be Unicode text: it has half of a surrogate pair"
    if size > KEY_MOST_BYTES:
        return f"{name} has {size} bytes in UTF-8, and the most is {KEY_MOST_BYTES}"
    return ""


class SqliteStore:
    """A KeyValueStore beside `state_dir` (database.py). Nothing is made before the first `set`."""

    def __init__(self, state_dir: str, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self._state_dir = state_dir
        self._busy_seconds = busy_seconds
        # Operations on one file wait for each other anyway. So they hold one thread of the host, not many.
        self._turn = trio.CapacityLimiter(1)

    async def get(self, key: str) -> Any:
        def read(database: sqlite3.Connection) -> str | None:
            row = database.execute("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

        found = await self._do(read, None)
        if found is None:
            raise KeyError(key)
        try:
            return wire.decode(str(found).encode())
        except ValueError:
            raise _unusable("the value in the database is not JSON: set it again") from None

    async def set(self, key: str, value: Any) -> None:
        def write(database: sqlite3.Connection) -> None:
            _write(database, key, text)

        text = await trio.to_thread.run_sync(_encode, value, limiter=self._turn)
        await self._do(write, None, make=True)

    async def delete(self, key: str) -> bool:
        return await self._do(lambda database: _delete(database, key), False)

    async def list(self, prefix: str, after: str, limit: int) -> Sequence[str]:
        def read(database: sqlite3.Connection) -> Sequence[str]:
            order = "SELECT key FROM entries WHERE key >= ? AND key > ? ORDER BY key LIMIT ?"
            return [str(row[0]) for row in database.execute(order, (prefix, after, limit))]

        found: Sequence[str] = await self._do(read, ())
        return [key for key in found if key.startswith(prefix)]  # those with the prefix come first

    async def _do(self, operation: Callable[[sqlite3.Connection], T], without: T, *, make: bool = False) -> T:
        """Run it in a thread, again and again while the database is busy. `without`: the result if there is
        no database. A cancellation passes between two tries; a try is done entirely or not at all."""

        def attempt() -> T:
            with open_database(self._state_dir, make=make) as database:
                return without if database is None else operation(database)

        deadline = trio.current_time() + self._busy_seconds
        while True:
            try:
                return await trio.to_thread.run_sync(attempt, limiter=self._turn)
            except Busy:
                if trio.current_time() >= deadline:
                    reason = (
                        f"another session of this plugin has held the storage for {self._busy_seconds:g} s"
                    )
                    raise HostError(BUSY, "busy", {"reason": reason}) from None
            except Full:
                reason = "the file cannot grow any more: the disk is full, or the file has its largest size"
                raise _full(reason) from None
            except Unusable as fault:
                raise _unusable(str(fault)) from None
            except OSError as error:
                raise _unusable(f"the storage cannot be used: {error.strerror}") from None
            await trio.sleep(_AGAIN_AFTER_SECONDS)


def _encode(value: Any) -> str:
    try:
        text = wire.encode(value)
    except ValueError as error:
        raise HostError(INVALID_PARAMS, f"invalid params: value is {error}") from None
    if len(text) > VALUE_MOST_BYTES:
        raise HostError(
            INVALID_PARAMS,
            f"invalid params: value has {len(text)} bytes as JSON, and the most is {VALUE_MOST_BYTES}",
        )
    return text.decode()


def _write(database: sqlite3.Connection, key: str, text: str) -> None:
    import sqlite3

    try:
        _replace(database, key, text)
    except sqlite3.OperationalError as error:
        if error_code(error) != sqlite3.SQLITE_FULL:
            raise
        # The entries are within their limit, so the file has unused space. VACUUM rewrites the file without
        # it. It is needed again only after as many changes as fill the difference.
        if database.in_transaction:
            database.execute("ROLLBACK")
        database.execute("VACUUM")
        _replace(database, key, text)


def _replace(database: sqlite3.Connection, key: str, text: str) -> None:
    database.execute("BEGIN IMMEDIATE")
    keys, size = _totals(database)
    before = _entry_bytes(database, key)
    keys += before == 0
    size += 2 * len(key.encode()) + len(text.encode()) + ENTRY_EXTRA_BYTES - before
    if keys > KEYS_MOST:
        raise _full(f"there would be more than {KEYS_MOST} keys: delete some")
    if size > ENTRIES_MOST_BYTES:
        raise _full(
            f"the entries would count {size} bytes, and the most is {ENTRIES_MOST_BYTES}: delete some"
        )
    database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", (key, text))
    database.execute("UPDATE totals SET keys = ?, bytes = ?", (keys, size))
    database.execute("COMMIT")


def _delete(database: sqlite3.Connection, key: str) -> bool:
    limit_pages(database, deleting=True)
    database.execute("BEGIN IMMEDIATE")
    keys, size = _totals(database)
    before = _entry_bytes(database, key)
    if before:
        database.execute("DELETE FROM entries WHERE key = ?", (key,))
        database.execute("UPDATE totals SET keys = ?, bytes = ?", (keys - 1, size - before))
    database.execute("COMMIT")
    return before > 0


def _totals(database: sqlite3.Connection) -> tuple[int, int]:
    row = database.execute("SELECT keys, bytes FROM totals").fetchone()
    if row is None or not all(isinstance(number, int) for number in row):
        raise Unusable("the totals are missing: remove the state with runner state remove")
    return row[0], row[1]


def _entry_bytes(database: sqlite3.Connection, key: str) -> int:
    """The bytes that an entry counts; 0 if there is none."""
    order = "SELECT 2 * length(CAST(key AS BLOB)) + length(CAST(value AS BLOB)) FROM entries WHERE key = ?"
    row = database.execute(order, (key,)).fetchone()
    return 0 if row is None else int(row[0]) + ENTRY_EXTRA_BYTES


def _full(reason: str) -> HostError:
    data = {"limit_bytes": ENTRIES_MOST_BYTES, "limit_keys": KEYS_MOST, "reason": reason}
    return HostError(FULL, "storage_full", data)


def _unusable(reason: str) -> HostError:
    return HostError(UNUSABLE, "storage_unusable", {"reason": reason})
