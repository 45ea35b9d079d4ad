"""The file of a plugin's storage: one SQLite database in a folder that no cage shows.

The folder lies beside the plugin's state directory (sandbox/identity/host_side.py). Plugins of an ordinary
user have the user's own uid, so the content of the folder is still untrusted. No link is followed. Each file
must be a regular one of ours with one name. SQLite obeys the files that it finds beside the database, so a
journal that this module cannot have left is refused. A database is opened for one operation, and nothing
stays open in between.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from sandbox.identity.host_side import FOLDER, HostSideRefused, open_host_side
from sandbox.paths.walk import LinkRefused, TooManyLinks

if TYPE_CHECKING:
    import sqlite3

FILE = "storage.sqlite3"
JOURNAL = FILE + "-journal"
# SQLite obeys these wherever it finds them. It makes them for another journal mode than ours.
_NEVER_OURS = (FILE + "-wal", FILE + "-shm")

# Of the file. What its entries may take is counted apart (storage.py), and a third of this: pages are never
# quite full. Measured with the worst entries, a dense file takes twice what its entries count.
FILE_MOST_BYTES = 48 << 20
_PAGE_BYTES = 4096
# Deleting may split a page before it frees one.
_PAGES_FOR_DELETING = 64

# A journal with this at its beginning is rolled back. One with this at its end names another file, and SQLite
# removes that file. Only transactions over several databases have that, and ours are never such.
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# After the magic: records, a random number, pages of the database before, bytes of a sector and of a page.
_JOURNAL_HEADER = ">8sIIIII"
_SECTOR_BYTES = (512, 65536)
# Every page once, with 8 more bytes, and a header of a sector each time that SQLite flushes its cache.
_JOURNAL_MOST_BYTES = 2 * FILE_MOST_BYTES

_STRING_MOST_BYTES = 1 << 20  # no string of ours is longer, so a longer one is damage
_BUSY_SECONDS = 0.1  # that a thread waits for another process. A longer wait is the caller's
_OPERATION_SECONDS = 10.0  # of one operation, also on a file that was damaged on purpose
_STEPS_BETWEEN_LOOKS = 10_000  # of SQLite's machine, between two looks at the clock

VERSION = 1
APPLICATION_ID = 0x6B616731
_TABLES = (
    "CREATE TABLE entries (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE totals (keys INTEGER NOT NULL, bytes INTEGER NOT NULL)",
)
_SCHEMA = {
    ("table", "entries", _TABLES[0]),
    ("table", "totals", _TABLES[1]),
    ("index", "sqlite_autoindex_entries_1", None),
}


class Unusable(Exception):
    """The database cannot be used; the message says why, and what to do."""


class Busy(Exception):
    """Another session uses it at this moment."""


class Full(Exception):
    """The file cannot grow any more."""


@contextmanager
def open_database(state_dir: str, *, make: bool = False) -> Iterator[sqlite3.Connection | None]:
    """A checked connection, in no transaction. None: there is no database yet, and `make` is not set.
    Raises Unusable, Busy and Full; so does the body, for errors of SQLite."""
    with ExitStack() as stack:
        folder = _open_folder(state_dir, make, stack)
        if folder is None:
            yield None
            return
        identity = _check_files(folder, make, stack)
        if identity is None:
            yield None
            return
        stack.enter_context(_alone(identity))
        with _translated_errors():
            connection = _connect(folder, identity, stack)
            yield connection if _is_made(connection, make) else None


@contextmanager
def _translated_errors() -> Iterator[None]:
    import sqlite3

    try:
        yield
    except sqlite3.Error as error:
        code = error_code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT):
            raise Busy from None
        if code == sqlite3.SQLITE_FULL:
            raise Full from None
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG):
            raise Unusable(f"{_remedy('it is damaged')} ({error})") from None
        raise Unusable(f"the storage cannot be used: {error}") from None


def error_code(error: sqlite3.Error) -> int:
    """The primary result code; 0 if SQLite gave none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _remedy(fault: str) -> str:
    return (
        f"the storage cannot be used: {fault}; remove the plugin's folder in {FOLDER} beside its state "
        "directory, or the whole state with runner state remove"
    )


# --- the folder and its files -------------------------------------------------------------------------------


def _open_folder(state_dir: str, make: bool, stack: ExitStack) -> int | None:
    """The folder as an O_PATH descriptor. The plugin reads the messages: they have no path of the host."""
    try:
        return stack.enter_context(open_host_side(state_dir, make=make))
    except HostSideRefused as refused:
        raise Unusable(_remedy(str(refused))) from None
    except (LinkRefused, TooManyLinks):
        raise Unusable("the storage cannot be used: a part of its path is a symbolic link") from None
    except OSError as error:
        raise Unusable(f"the folder of the storage cannot be used: {error.strerror}") from None


def _check_files(folder: int, make: bool, stack: ExitStack) -> tuple[int, int] | None:
    """Device and inode of the database. Only O_PATH descriptors are opened and closed here: closing any other
    would drop the locks that SQLite has on the file in this process."""
    if make:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(FILE, flags, 0o600, dir_fd=folder))
        except FileExistsError:
            pass
        except OSError as error:
            raise Unusable(f"{FILE} cannot be made: {error.strerror}") from None
    for name in _NEVER_OURS:
        if _check_file(name, folder, stack) is not None:
            raise Unusable(_remedy(f"there is {name}, which the runner never makes"))
    if _check_file(JOURNAL, folder, stack) is not None:
        _check_journal(folder)
    status = _check_file(FILE, folder, stack)
    return None if status is None else (status.st_dev, status.st_ino)


def _check_journal(folder: int) -> None:
    """Raise Unusable unless SQLite may roll it back. Another process may write to it at this moment."""
    try:
        fd = os.open(JOURNAL, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return  # that process has finished
    except OSError as error:
        raise Unusable(f"{JOURNAL} cannot be opened: {error.strerror}") from None
    try:
        size = os.fstat(fd).st_size
        header = os.pread(fd, struct.calcsize(_JOURNAL_HEADER), 0)
        tail = os.pread(fd, len(_JOURNAL_MAGIC), max(0, size - len(_JOURNAL_MAGIC)))
    finally:
        os.close(fd)
    if size > len(_JOURNAL_MAGIC) and tail == _JOURNAL_MAGIC:
        raise Unusable(_remedy(f"{JOURNAL} names another file"))
    if size > _JOURNAL_MOST_BYTES:
        raise Unusable(_remedy(f"{JOURNAL} is larger than one that the runner makes"))
    if not header or header[0] == 0:
        return  # SQLite does not roll it back
    if len(header) == struct.calcsize(_JOURNAL_HEADER):
        magic, _records, _random, pages, sector, page = struct.unpack(_JOURNAL_HEADER, header)
        smallest, largest = _SECTOR_BYTES
        most_pages = FILE_MOST_BYTES // _PAGE_BYTES + _PAGES_FOR_DELETING
        in_range = pages <= most_pages and smallest <= sector <= largest
        if magic == _JOURNAL_MAGIC and page == _PAGE_BYTES and in_range and not sector & (sector - 1):
            return
    raise Unusable(_remedy(f"{JOURNAL} is not one that the runner made"))


def _check_file(name: str, folder: int, stack: ExitStack) -> os.stat_result | None:
    try:
        # Kept open, so that the inode cannot become another file's.
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"{name} cannot be opened: {error.strerror}") from None
    stack.callback(os.close, fd)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise Unusable(_remedy(f"{name} is not a regular file"))
    if status.st_nlink > 1:
        raise Unusable(_remedy(f"{name} has {status.st_nlink} names"))
    _check_owner(name, status)
    return status


def _check_owner(name: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise Unusable(_remedy(f"{name} belongs to uid {status.st_uid}, not to uid {os.geteuid()}"))
    if status.st_mode & 0o077:
        raise Unusable(_remedy(f"{name} is open to other users (mode {stat.S_IMODE(status.st_mode):o})"))


# --- the connection -----------------------------------------------------------------------------------------

_opened: set[tuple[int, int]] = set()  # device and inode of each database that is open in this process
_opened_lock = threading.Lock()


@contextmanager
def _alone(identity: tuple[int, int]) -> Iterator[None]:
    """Hold the only open handle of this process on the file. Raises Busy."""
    with _opened_lock:
        if identity in _opened:
            raise Busy
        _opened.add(identity)
    try:
        yield
    finally:
        with _opened_lock:
            _opened.remove(identity)


def _connect(folder: int, identity: tuple[int, int], stack: ExitStack) -> sqlite3.Connection:
    import sqlite3

    connection = sqlite3.connect(
        f"file:/proc/self/fd/{folder}/{FILE}?mode=rw", uri=True, timeout=_BUSY_SECONDS, isolation_level=None
    )
    stack.callback(connection.close)
    # SQLite turns the path into one without links before it opens it, and so may get another file than the
    # one that was checked. It has not read more than the header by now.
    if not _has_open(identity):
        raise Unusable(f"{FILE} was replaced while it was opened")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _STRING_MOST_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 1)  # VACUUM needs one
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    deadline = time.monotonic() + _OPERATION_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_LOOKS)
    for setting in (
        "trusted_schema = OFF",
        "cell_size_check = ON",
        "mmap_size = 0",
        "temp_store = MEMORY",
        "synchronous = FULL",
    ):
        connection.execute(f"PRAGMA {setting}")
    return connection


def _has_open(identity: tuple[int, int]) -> bool:
    """Whether this process has the file open, other than with O_PATH."""
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            if (status.st_dev, status.st_ino) == identity and not _is_path_only(name):
                return True
        except OSError:
            continue  # another thread closed it
    return False


def _is_path_only(name: str) -> bool:
    import fcntl

    return bool(fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_PATH)


def _is_made(connection: sqlite3.Connection, make: bool) -> bool:
    """Whether the database has its tables; they are made on request. Raises Unusable if it is not ours."""
    if _number(connection, "application_id") == 0 and not _schema(connection):
        if not make:
            return False
        _make_tables(connection)
    if _number(connection, "application_id") != APPLICATION_ID:
        raise Unusable(_remedy("it is not one that the runner made"))
    if (version := _number(connection, "user_version")) > VERSION:
        raise Unusable(
            f"the storage has version {version}, and this runner knows version "
            f"{VERSION}: a newer runner made it; use that one"
        )
    journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if version != VERSION or _schema(connection) != _SCHEMA or journal != "delete":
        raise Unusable(_remedy("its tables are not those that the runner made"))
    limit_pages(connection)
    return True


def limit_pages(connection: sqlite3.Connection, *, deleting: bool = False) -> None:
    pages = FILE_MOST_BYTES // _PAGE_BYTES + (_PAGES_FOR_DELETING if deleting else 0)
    connection.execute(f"PRAGMA max_page_count = {pages}")


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("BEGIN IMMEDIATE")
    if not _schema(connection):  # else another process was faster
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute("INSERT INTO totals VALUES (0, 0)")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str | None]]:
    # One more than we have: a foreign database may have any number.
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master LIMIT ?", (len(_SCHEMA) + 1,))
    return set(rows.fetchall())
