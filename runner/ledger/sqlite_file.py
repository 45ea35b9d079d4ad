"""A SQLite database with one writer, in a file that only its owner can read: how it is opened and written.

Everything here blocks; `DatabaseThread` (runner/ledger/database_thread.py) is the same for trio. Rules:

- Who opens the file knows that the last daemon is dead, because each holds a lock while it lives.
- An error of the disk or of a lock undoes the whole transaction, and is told.
- SQLite goes on writing to a file that was removed, so each transaction first looks whether it is there.
- A file of an earlier version becomes one of the current version by the steps that it lacks.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from sandbox.policy.load import trust_fault

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
File = TypeVar("File", bound="SqliteFile")
Order = Callable[[Any], Any]  # called with the file

_ORDERS_BETWEEN_PRUNINGS = 1000
_VACUUMED_PAGES = 2000  # at once


class DatabaseUnusable(Exception):
    """The file cannot be opened, read or written. Nothing of the transaction was written."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class OrderRefusal(Exception):
    """An order that is not carried out, by its own rules. It undoes this order and no other one."""


class DatabaseKind(NamedTuple):
    """Which database it is."""

    word: str  # in messages: "ledger"
    application_id: int  # in the header of the file: tells it from the database of another program
    migrations: Sequence[Sequence[str]]  # statements, from each version to the next; published ones stay
    unusable: type[DatabaseUnusable] = DatabaseUnusable

    def named(self, path: str) -> str:
        return f"the {self.word} {path}"


class OpenDatabase(NamedTuple):
    """What `open_sqlite` hands to a SqliteFile."""

    path: str
    connection: sqlite3.Connection
    lock: int
    kind: DatabaseKind


class SqliteFile:
    """The open file. Made by `open_sqlite`. One thread at a time may use it. Its methods are the orders."""

    def __init__(self, opened: OpenDatabase) -> None:
        self.path, self._connection, self._lock, self._kind = opened
        self._until_pruning = _ORDERS_BETWEEN_PRUNINGS
        self._inodes = _inodes(opened.path)

    @property
    def changes(self) -> int:
        """How many rows were written or removed since it was opened."""
        return self._connection.total_changes

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    def prune(self) -> None:
        """Remove what is too old or too much. Called now and then, and when the file is full."""

    # --- transactions ---------------------------------------------------------------------------------------

    def write(self, orders: Sequence[Order], *, durable: bool = False) -> list[Any]:
        """Carry out all orders in one transaction. Returns the result of each, or its OrderRefusal. Raises
        DatabaseUnusable; then nothing was written. `durable`: it also survives the end of the machine."""
        if _inodes(self.path) != self._inodes:
            message = f"{self._kind.named(self.path)} was removed or replaced while it was in use"
            hint = "put it back as it was; or end the daemon and start it again"
            raise self._kind.unusable(message, hint)
        with _explain_errors(self.path, self._kind):
            if durable:
                self._connection.execute("PRAGMA synchronous = FULL")
            try:
                results = self._transact(orders)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                self._shrink()
                results = self._transact(orders)
            finally:
                if durable:
                    self._connection.execute("PRAGMA synchronous = NORMAL")
            self._until_pruning -= len(orders)
            if self._until_pruning <= 0:
                self._shrink()
        return results

    def _shrink(self) -> None:
        self._until_pruning = _ORDERS_BETWEEN_PRUNINGS
        self._transact([type(self).prune])
        # Some, because it takes long: pages that are free are used again.
        self._connection.execute(f"PRAGMA incremental_vacuum({_VACUUMED_PAGES})").fetchall()

    def do(
        self,
        order: Callable[Concatenate[Self, Arguments], Value],
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Value:
        """Carry out one order: a method of this class. Raises its OrderRefusal, and DatabaseUnusable."""
        (result,) = self.write([lambda file: order(file, *args, **named)])
        if isinstance(result, OrderRefusal):
            raise result
        value: Value = result
        return value

    def _transact(self, orders: Sequence[Order]) -> list[Any]:
        connection, results = self._connection, []
        connection.execute("BEGIN IMMEDIATE")
        try:
            for order in orders:
                connection.execute("SAVEPOINT one")
                try:
                    results.append(order(self))
                except OrderRefusal as refusal:
                    connection.execute("ROLLBACK TO one")
                    results.append(refusal)
                connection.execute("RELEASE one")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # after some errors SQLite has undone it already
                connection.execute("ROLLBACK")
            raise
        return results

    def used_bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


# --- opening ------------------------------------------------------------------------------------------------


def open_sqlite(
    path: str,
    kind: DatabaseKind,
    make: Callable[[OpenDatabase], File],
    most_bytes: int,
    first: Sequence[Order],
    *,
    busy_seconds: float = 5.0,
) -> File:
    """Open the file, or make a new one, and carry out the orders `first`. Raises kind.unusable.

    `busy_seconds`: how long a transaction waits for another program that has locked the file."""
    _make_private(path, kind)
    lock = _take_lock(path, kind)
    try:
        with _explain_errors(path, kind):
            connection = sqlite3.connect(
                path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
            )
            try:
                _prepare(path, connection, most_bytes, kind)
                file = make(OpenDatabase(path, connection, lock, kind))
                file._transact(first)
            except BaseException:
                connection.close()
                raise
    except BaseException:
        os.close(lock)
        raise
    return file


def _prepare(path: str, connection: sqlite3.Connection, most_bytes: int, kind: DatabaseKind) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if (application or version or tables) and application != kind.application_id:
        hint = f"name another file; a new {kind.word} is made where there is none"
        raise kind.unusable(f"{path} is the database of another program", hint)
    known = len(kind.migrations)
    if version > known:
        message = f"{kind.named(path)} has version {version}, and this runner knows up to {known}"
        raise kind.unusable(message, "use the runner that wrote it, or a newer one; or name another file")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise _damaged(path, str(found), kind)
    if not tables:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    # The log survives the end of this process without a sync. Who calls from this machine does not survive
    # the end of the machine either.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA journal_size_limit = 16777216")
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {max(64, most_bytes // page)}")
    if version < known:
        _migrate(connection, version, kind)


def _migrate(connection: sqlite3.Connection, version: int, kind: DatabaseKind) -> None:
    """Bring the file from an earlier version to the current one, by all steps that it lacks or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in kind.migrations[version:]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {kind.application_id}")
        connection.execute(f"PRAGMA user_version = {len(kind.migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _make_private(path: str, kind: DatabaseKind) -> None:
    """Make the folder and the file, and refuse those that others can write. SQLite gives its log the mode of
    the file."""
    if path == ":memory:":  # for SQLite this is not the name of a file
        raise kind.unusable(f"a {kind.word} in memory would not survive the daemon", "name a file")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fault = trust_fault(folder, "the folder", private_groups=True)
        mode = os.stat(folder).st_mode
        if fault is None and mode & stat.S_ISVTX and mode & 0o022:
            # Others could still put a log of theirs beside the file.
            fault = f"everybody can write to the folder {folder}", "name a file in a folder of your own"
        if fault is not None:
            raise kind.unusable(f"{kind.named(path)} is not used: {fault[0]}", fault[1])
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(path, flags, 0o600)
        try:
            status = os.fstat(opened)
        finally:
            os.close(opened)  # before SQLite locks it: closing any descriptor of a file drops its locks
    except OSError as error:
        message = f"{kind.named(path)} cannot be opened: {error.strerror}"
        raise kind.unusable(message, "name a file in a folder of your own") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        message = f"{kind.named(path)} is not used: it is not a regular file of this user"
        raise kind.unusable(message, "name another file")
    if status.st_mode & 0o077:
        message = f"{kind.named(path)} is not used: others than its owner can read or write it"
        raise kind.unusable(message, f"chmod 600 {path}")


def _inodes(path: str) -> list[tuple[int, int] | None]:
    """Which files there are: the database and its log."""
    found: list[tuple[int, int] | None] = []
    for name in (path, path + "-wal"):
        try:
            status = os.stat(name)
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found


def _take_lock(path: str, kind: DatabaseKind) -> int:
    """Hold the lock of the one writer. It ends with the process, however that ends."""
    name = path + ".lock"
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"the lock {name} of the {kind.word} cannot be opened: {error.strerror}"
        raise kind.unusable(message, "name a file in a folder of your own") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        message = f"another process uses {kind.named(path)}"
        raise kind.unusable(message, "stop that daemon, or name another file") from None
    return lock


def _damaged(path: str, why: str, kind: DatabaseKind) -> DatabaseUnusable:
    hint = (
        f"move it away (mv {path} {path}.damaged) and start again; sqlite3 {path}.damaged .recover saves rows"
    )
    return kind.unusable(f"{kind.named(path)} is damaged: {why}", hint)


@contextmanager
def _explain_errors(path: str, kind: DatabaseKind) -> Iterator[None]:
    """Errors of SQLite as kind.unusable."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            message = f"{kind.named(path)} is locked by another program"
            raise kind.unusable(message, "end the program that reads or copies it") from None
        if name == "SQLITE_FULL":
            message = f"{kind.named(path)} is full: the disk has no room, or it has reached its size"
            raise kind.unusable(message, "make room on its disk, or allow it more size") from None
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise _damaged(path, str(error), kind) from None
        # PROTOCOL: the file cannot be locked.
        if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL")):
            message = f"{kind.named(path)} cannot be read or written: {error}"
            hint = "look at its disk, and at the owner and mode of its folder"
            raise kind.unusable(message, hint) from None
        raise
