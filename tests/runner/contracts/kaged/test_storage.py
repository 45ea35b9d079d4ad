"""What a plugin stores: kept, limited, shared between sessions, and safe from files that others put there."""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.kaged import database, storage
from runner.contracts.kaged.database import APPLICATION_ID, FILE, JOURNAL, open_database
from runner.contracts.kaged.storage import ENTRIES_MOST_BYTES, SqliteStore
from runner.protocol.host_services import HostError
from sandbox.identity.host_side import FOLDER, host_side
from tests.conftest import ROOT

pytestmark = pytest.mark.trio


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "place/state"
    path.mkdir(mode=0o700, parents=True)
    return path


def folder_of(state: Path) -> Path:
    return Path(host_side(str(state)))


def database_of(state: Path) -> Path:
    return folder_of(state) / FILE


async def filled(state: Path) -> SqliteStore:
    store = SqliteStore(str(state), busy_seconds=0.0)
    await store.set("a", 1)
    return store


async def fault_of(operation: Callable[[], Any]) -> HostError:
    with pytest.raises(HostError) as caught:
        await operation()
    return caught.value


async def refusals(store: SqliteStore) -> set[tuple[int, str]]:
    """What every operation answers: code and reason."""
    operations: tuple[Callable[[], Any], ...] = (
        lambda: store.get("a"),
        lambda: store.set("a", 2),
        lambda: store.delete("a"),
        lambda: store.list("", "", 10),
    )
    faults = [await fault_of(operation) for operation in operations]
    assert {str(fault) for fault in faults} == {"storage_unusable"}
    return {(fault.code, fault.data["reason"]) for fault in faults}


# --- it is kept ---------------------------------------------------------------------------------------------


async def test_it_outlives_its_session(state: Path) -> None:
    await SqliteStore(str(state)).set("a", {"text": "é", "n": [1, None]})
    assert await SqliteStore(str(state)).get("a") == {"text": "é", "n": [1, None]}


async def test_nothing_is_made_before_the_first_value(state: Path) -> None:
    store = SqliteStore(str(state))
    with pytest.raises(KeyError):
        await store.get("a")
    assert await store.delete("a") is False
    assert await store.list("", "", 10) == []
    assert os.listdir(state) == []
    assert os.listdir(state.parent) == [state.name]


async def test_only_its_owner_can_open_it(state: Path) -> None:
    before = os.umask(0)
    try:
        await filled(state)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder_of(state).stat().st_mode) == 0o700
    assert stat.S_IMODE(database_of(state).stat().st_mode) == 0o600
    assert [path.name for path in folder_of(state).iterdir()] == [FILE]


async def test_a_later_runner_can_read_it(state: Path) -> None:
    """The format on disk, which must not change without a new version."""
    await SqliteStore(str(state)).set("a", {"text": "é"})
    with sqlite3.connect(database_of(state)) as connection:
        assert connection.execute("SELECT * FROM entries").fetchall() == [("a", '{"text":"é"}')]
        assert connection.execute("SELECT * FROM totals").fetchall() == [(1, 2 + 13 + 64)]
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    connection.close()


async def test_no_file_stays_open(state: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = await filled(state)
    for _ in range(3):
        await store.get("a")
    database_of(state).write_bytes(b"junk" * 1000)
    await refusals(store)
    assert len(os.listdir("/proc/self/fd")) == before


INTERRUPTED = """
import os, sys
from runner.contracts.kaged.database import open_database
with open_database(sys.argv[1]) as connection:
    connection.execute("PRAGMA cache_size = 1")  # so that changed pages are written before the commit
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE entries SET value = 2")
    connection.executemany("INSERT INTO entries VALUES (?, ?)", [(str(n), "x" * 9000) for n in range(50)])
    os._exit(0)
"""


async def test_a_host_that_dies_in_the_middle_leaves_the_old_values(state: Path) -> None:
    store = await filled(state)
    before = database_of(state).stat().st_size
    await trio.run_process([sys.executable, "-c", INTERRUPTED, str(state)], cwd=ROOT)
    assert database_of(state).stat().st_size > before  # it did write
    assert os.listdir(folder_of(state)).count(JOURNAL) == 1
    assert await store.list("", "", 10) == ["a"]
    assert await store.get("a") == 1
    assert os.listdir(folder_of(state)) == [FILE]


# --- limits -------------------------------------------------------------------------------------------------


async def test_a_full_store_says_so_and_takes_what_is_replaced(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ENTRIES_MOST_BYTES", 3 * (2 + 1002 + 64))
    store = SqliteStore(str(state))
    for key in "abc":
        await store.set(key, "x" * 1000)
    fault = await fault_of(lambda: store.set("d", 1))
    assert (fault.code, str(fault)) == (-32002, "storage_full")
    assert fault.data["limit_bytes"] == 3 * 1068
    assert fault.data["reason"] == "the entries would count 3271 bytes, and the most is 3204: delete some"
    assert (await fault_of(lambda: store.set("a", "x" * 1001))).code == -32002
    await store.set("a", "y" * 1000)
    assert await store.delete("b")
    await store.set("d", "z" * 1000)
    assert await store.list("", "", 10) == ["a", "c", "d"]
    assert await store.get("a") == "y" * 1000


async def test_the_number_of_keys_is_limited(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "KEYS_MOST", 2)
    store = SqliteStore(str(state))
    await store.set("a", 1)
    await store.set("b", 1)
    fault = await fault_of(lambda: store.set("c", 1))
    assert (fault.code, fault.data["limit_keys"]) == (-32002, 2)
    assert fault.data["reason"] == "there would be more than 2 keys: delete some"
    await store.set("b", 2)
    assert await store.delete("a")
    await store.set("c", 1)


def fill(state: Path, entries: dict[str, str]) -> None:
    """Faster than one transaction for each."""
    with open_database(str(state), make=True) as connection:
        assert connection is not None
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?)", entries.items())
        counted = sum(2 * len(key) + len(value) + 64 for key, value in entries.items())
        connection.execute("UPDATE totals SET keys = ?, bytes = ?", (len(entries), counted))
        connection.execute("COMMIT")


@pytest.mark.parametrize("size", [2100, 4070, 200_000])
async def test_whatever_fits_by_count_fits_into_the_file(state: Path, size: int) -> None:
    """Also entries of which each wastes half a page."""
    store = SqliteStore(str(state))
    each = 2 * 5 + size + 64
    number = ENTRIES_MOST_BYTES // each
    fill(state, {f"{n:05}": '"' + "x" * (size - 2) + '"' for n in range(number)})
    assert (await fault_of(lambda: store.set("zzzzz", "x" * (size - 2)))).code == -32002
    assert await store.delete("00000")
    await store.set("zzzzz", "x" * (size - 2))
    assert database_of(state).stat().st_size <= database.FILE_MOST_BYTES


async def test_room_between_the_entries_is_used_when_the_file_is_full(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "FILE_MOST_BYTES", 1 << 20)
    store = SqliteStore(str(state))
    fill(state, {f"{n:05}": '"' + "x" * 448 + '"' for n in range(1800)})
    size = database_of(state).stat().st_size
    assert size > 900_000
    with open_database(str(state)) as connection:
        assert connection is not None
        # Every second entry: half of each page is free, and no page is.
        connection.execute("DELETE FROM entries WHERE rowid % 2")
        pages = connection.execute("PRAGMA freelist_count").fetchone()[0]
    assert pages * 4096 < 200_000
    await store.set("big", "x" * 250_000)
    assert await store.get("big") == "x" * 250_000
    assert database_of(state).stat().st_size <= 1 << 20


async def test_a_file_that_cannot_grow_is_full_and_stays_usable(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(state)
    monkeypatch.setattr(database, "FILE_MOST_BYTES", 16 << 12)
    fault = await fault_of(lambda: store.set("b", "x" * 100_000))
    assert (fault.code, str(fault)) == (-32002, "storage_full")
    assert fault.data["reason"].startswith("the file cannot grow any more")
    assert await store.list("", "", 10) == ["a"]
    await store.set("b", "x" * 10_000)
    assert await store.delete("a")


# --- several at once ----------------------------------------------------------------------------------------


async def test_two_sessions_share_it(state: Path) -> None:
    stores = SqliteStore(str(state)), SqliteStore(str(state))

    async def write(store: SqliteStore, name: str) -> None:
        for number in range(10):
            await store.set(f"{name}{number}", number)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for store, name in zip(stores, "ab", strict=True):
                for task in range(2):
                    nursery.start_soon(write, store, f"{name}{task}")
    assert len(await stores[0].list("", "", 100)) == 40
    with open_database(str(state)) as connection:
        assert connection is not None
        assert connection.execute("SELECT keys FROM totals").fetchone() == (40,)


async def test_another_process_that_holds_it_is_waited_for(state: Path) -> None:
    await filled(state)
    other = sqlite3.connect(database_of(state), isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        fault = await fault_of(lambda: SqliteStore(str(state), busy_seconds=0.0).set("a", 2))
        assert (fault.code, str(fault)) == (-32003, "busy")
        done = trio.Event()

        async def write() -> None:
            await SqliteStore(str(state), busy_seconds=60.0).set("a", 3)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            with trio.move_on_after(0.3):
                await done.wait()
            assert not done.is_set()
            other.execute("ROLLBACK")
    finally:
        other.close()
    assert await SqliteStore(str(state)).get("a") == 3


async def test_a_cancelled_operation_leaves_nothing_half_done(state: Path) -> None:
    store = SqliteStore(str(state), busy_seconds=60.0)
    await store.set("a", 1)
    other = sqlite3.connect(database_of(state), isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        with trio.fail_after(30), trio.move_on_after(0.2) as scope:
            await store.set("a", 2)
        assert scope.cancelled_caught
    finally:
        other.close()
    assert await store.get("a") == 1
    await store.set("a", 3)
    assert await store.get("a") == 3


# --- files that others put there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"junk" * 4096),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 12288),
    ],
    ids=["no database", "cut off", "overwritten"],
)
async def test_a_damaged_file_is_refused_in_words(state: Path, damage: Callable[[Path], None]) -> None:
    store = await filled(state)
    damage(database_of(state))
    [(code, reason)] = {(code, reason.partition(" (")[0]) for code, reason in await refusals(store)}
    assert code == -32004
    assert reason == (
        f"the storage cannot be used: it is damaged; remove the plugin's folder in {FOLDER} beside its state "
        "directory, or the whole state with runner state remove"
    )


async def test_a_value_that_is_not_json_is_refused(state: Path) -> None:
    store = await filled(state)
    with sqlite3.connect(database_of(state)) as connection:
        connection.execute("UPDATE entries SET value = '{'")
    connection.close()
    fault = await fault_of(lambda: store.get("a"))
    assert (fault.code, fault.data) == (
        -32004,
        {"reason": "the value in the database is not JSON: set it again"},
    )
    await store.set("a", 2)
    assert await store.get("a") == 2


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END",
        "CREATE TABLE more (x)",
        "CREATE VIEW v AS SELECT * FROM entries",
        "DROP TABLE totals",
        "PRAGMA user_version = 0",
        "PRAGMA journal_mode = WAL",
        "PRAGMA application_id = 1",
    ],
)
async def test_a_foreign_database_is_refused(state: Path, change: str) -> None:
    store = await filled(state)
    connection = sqlite3.connect(database_of(state), isolation_level=None)
    connection.execute(change)
    connection.close()
    [(code, reason)] = await refusals(store)
    assert code == -32004
    assert "that the runner made; remove the plugin's folder in .storage" in reason


async def test_a_database_of_a_newer_runner_is_refused(state: Path) -> None:
    store = await filled(state)
    with sqlite3.connect(database_of(state)) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    [(code, reason)] = await refusals(store)
    assert code == -32004
    assert reason == (
        "the storage has version 2, and this runner knows version 1: a newer runner made it; use that one"
    )


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A database of somebody else, in a folder of theirs."""
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    path = folder / FILE
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE precious (x)")
    connection.close()
    path.chmod(0o600)
    return path


def content(victim: Path) -> tuple[bytes, list[str]]:
    return victim.read_bytes(), sorted(os.listdir(victim.parent))


def link_folder(state: Path, victim: Path) -> None:
    database_of(state).unlink()
    folder_of(state).rmdir()
    folder_of(state).symlink_to(victim.parent)


def replace(make: Callable[[Path, Path], None], name: str = FILE) -> Callable[[Path, Path], None]:
    def attack(state: Path, victim: Path) -> None:
        path = folder_of(state) / name
        path.unlink(missing_ok=True)
        make(path, victim)

    return attack


def make_folder_a_file(state: Path, victim: Path) -> None:
    database_of(state).unlink()
    folder_of(state).rmdir()
    folder_of(state).write_text("")


def link_all_folders(state: Path, victim: Path) -> None:
    folder_of(state).parent.rename(state.parent / "aside")
    folder_of(state).parent.symlink_to(state.parent / "aside")


ATTACKS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "folder of folders is a link": (link_all_folders, f"{FOLDER} is not a folder"),
    "folder of folders is open": (
        lambda state, _: folder_of(state).parent.chmod(0o701),
        f"the folder {FOLDER} is open to other users (mode 701)",
    ),
    "folder is a link": (link_folder, "state is not a folder"),
    "folder is a file": (make_folder_a_file, "state is not a folder"),
    "folder is open": (lambda state, _: folder_of(state).chmod(0o750), "is open to other users (mode 750)"),
    "file is a link": (
        replace(lambda path, victim: path.symlink_to(victim)),
        f"{FILE} is not a regular file",
    ),
    "file has two names": (replace(lambda path, victim: os.link(victim, path)), f"{FILE} has 2 names"),
    "file is a FIFO": (
        replace(lambda path, _: os.mkfifo(path, 0o600)),
        f"{FILE} is not a regular file",
    ),
    "file is a folder": (replace(lambda path, _: path.mkdir(0o700)), f"{FILE} is not a regular file"),
    "file is open": (lambda state, _: database_of(state).chmod(0o644), "is open to other users (mode 644)"),
    "journal is a link": (
        replace(lambda path, victim: path.symlink_to(victim), JOURNAL),
        f"{JOURNAL} is not a regular file",
    ),
    "journal is a FIFO": (
        replace(lambda path, _: os.mkfifo(path, 0o600), JOURNAL),
        f"{JOURNAL} is not a regular file",
    ),
    "journal has two names": (
        replace(lambda path, victim: os.link(victim, path), JOURNAL),
        f"{JOURNAL} has 2 names",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_file_that_is_not_ours_is_never_opened(state: Path, victim: Path, name: str) -> None:
    attack, reason = ATTACKS[name]
    store = await filled(state)
    assert await store.get("a") == 1  # the control
    before = content(victim)
    attack(state, victim)
    with trio.fail_after(60):
        [(code, said)] = await refusals(store)
    assert code == -32004
    assert reason in said
    assert content(victim) == before


async def test_a_link_on_the_way_is_not_followed(state: Path, tmp_path: Path) -> None:
    await filled(state)
    (tmp_path / "link").symlink_to(state.parent)
    [(code, reason)] = await refusals(SqliteStore(str(tmp_path / "link/state")))
    assert code == -32004
    assert "is a symbolic link" in reason


def hot_journal(names: Path | None, pages: int = 4, page: int = 4096) -> bytes:
    """What SQLite takes for the trace of a host that died in the middle. `names`: a file that SQLite removes
    then. It is rolled back without changing a page, because it has no records."""
    magic = bytes.fromhex("d9d505f920a163d7")
    journal = (magic + struct.pack(">IIIII", 0, 0, pages, 512, page)).ljust(512, b"\0")
    if names is None:
        return journal
    name = os.fsencode(names)
    number = 0x40000000 // 4096 + 1
    return journal + struct.pack(">I", number) + name + struct.pack(">II", len(name), sum(name)) + magic


def plant(state: Path, content: bytes, name: str = JOURNAL) -> None:
    path = folder_of(state) / name
    path.write_bytes(content)
    path.chmod(0o600)


async def test_a_journal_that_names_another_file_is_refused(state: Path, victim: Path) -> None:
    """SQLite would remove the file that it names, as the user of the host."""
    store = await filled(state)
    pages = database_of(state).stat().st_size // 4096
    before = content(victim)
    plant(state, hot_journal(victim, pages))
    [(code, reason)] = await refusals(store)
    assert code == -32004
    assert f"{JOURNAL} names another file" in reason
    assert content(victim) == before
    # The control: without the check the file is gone.
    connection = sqlite3.connect(database_of(state))
    assert connection.execute("SELECT count(*) FROM entries").fetchone() == (1,)
    connection.close()
    assert FILE not in os.listdir(victim.parent)


@pytest.mark.parametrize(
    "planted",
    [
        hot_journal(None, pages=1 << 30),
        hot_journal(None, page=512),
        b"\x01" * 600,
        hot_journal(None)[:20],
    ],
    ids=["grows the file", "other pages", "no journal", "cut off"],
)
async def test_a_journal_that_is_not_ours_is_refused(state: Path, planted: bytes) -> None:
    store = await filled(state)
    before = database_of(state).read_bytes()
    plant(state, planted)
    [(code, reason)] = await refusals(store)
    assert code == -32004
    assert f"{JOURNAL} is not one that the runner made" in reason
    assert database_of(state).read_bytes() == before


async def test_a_journal_that_is_too_large_is_refused(state: Path) -> None:
    store = await filled(state)
    plant(state, hot_journal(None))
    os.truncate(folder_of(state) / JOURNAL, 1 << 30)
    [(_, reason)] = await refusals(store)
    assert f"{JOURNAL} is larger than one that the runner makes" in reason


@pytest.mark.parametrize("planted", [b"", b"\0" * 600], ids=["empty", "not yet flushed"])
async def test_a_journal_that_means_nothing_does_no_harm(state: Path, planted: bytes) -> None:
    store = await filled(state)
    plant(state, planted)
    assert await store.get("a") == 1
    await store.set("a", 2)
    assert await store.get("a") == 2


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_files_of_another_journal_mode_are_refused(state: Path, suffix: str) -> None:
    store = await filled(state)
    plant(state, b"", FILE + suffix)
    [(code, reason)] = await refusals(store)
    assert code == -32004
    assert f"there is {FILE}{suffix}, which the runner never makes" in reason


@pytest.mark.needs("root")
async def test_a_file_of_another_user_is_refused(state: Path) -> None:
    store = await filled(state)
    os.chown(database_of(state), 1234, 1234)
    [(_, reason)] = await refusals(store)
    assert f"{FILE} belongs to uid 1234, not to uid 0" in reason
    os.chown(database_of(state), 0, 0)
    os.chown(folder_of(state), 1234, 1234)
    [(_, reason)] = await refusals(store)
    assert "the folder state belongs to uid 1234, not to uid 0" in reason


async def test_a_folder_that_is_swapped_while_it_is_opened_is_noticed(
    state: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite turns the path of a descriptor into a path of names, so a swap between check and open counts."""
    store = await filled(state)
    connect = sqlite3.connect
    before = content(victim)

    def swap_and_connect(*args: Any, **options: Any) -> sqlite3.Connection:
        folder = folder_of(state)
        if not folder.is_symlink():
            folder.rename(state / "aside")
            folder.symlink_to(victim.parent)
            # As if SQLite had resolved the names just before.
            args = (args[0].replace(args[0][: args[0].rindex("/")], f"file:{folder}"), *args[1:])
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", swap_and_connect)
    fault = await fault_of(lambda: store.set("a", 2))
    assert fault.data == {"reason": f"{FILE} was replaced while it was opened"}
    assert content(victim) == before
