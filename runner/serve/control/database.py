"""The control plane's database: packages, bindings, the history of both, and the records of invocations.

A SQLite file with one writer (runner/ledger/sqlite_file.py). Methods of ControlFile are orders: a caller on
trio uses `await database.do(ControlFile.binding, "bind_1")`. Rules:

- A package has the id NAMESPACE~NAME@VERSION. Its bytes never change. A binding's id is unique in all orgs.
- Every change of a package or a binding is one revision, from 1 on, and one row of the history with the whole
  document, the time and the caller. A change names the revision that it changes, or None for any.
- Only history and records are ever removed: the oldest, when there are too many.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import trio

from runner.ledger.database_thread import DatabaseThread
from runner.ledger.sqlite_file import (
    DatabaseKind,
    OpenDatabase,
    OrderRefusal,
    SqliteFile,
    open_sqlite,
)

MOST_PACKAGES = 1000
MOST_BINDINGS = 200  # of one org
MOST_ROWS = 1000  # of one list
MOST_REVISIONS = 200  # of one package or binding that the history keeps
MOST_HISTORY_BYTES = 8 << 20  # of one org, so that none pushes out others
MOST_BYTES = 1 << 30  # of the file
MOST_LIST_BYTES = 4 << 20  # of the records in one list: an org may ask for many at once
MOST_RECORDS = 100_000  # of one org, so that none pushes out others
_RECORD_DAYS = 30.0
_RECORDS_SHARE = 0.7  # of the file, before the oldest records are removed
_RECORDS_AT_ONCE = 1000

State = Literal["contract-ready", "imported", "available", "installed", "withdrawn"]
STATES: tuple[State, ...] = ("contract-ready", "imported", "available", "installed", "withdrawn")
Subject = Literal["package", "binding"]
TRUSTED = "trusted"

_FIRST = (
    """CREATE TABLE packages (
        id TEXT PRIMARY KEY, package_id TEXT NOT NULL, version TEXT NOT NULL, contract TEXT NOT NULL,
        name TEXT NOT NULL, description TEXT NOT NULL,
        digest TEXT NOT NULL, folder TEXT NOT NULL, source TEXT NOT NULL, publisher TEXT NOT NULL,
        signature TEXT NOT NULL, key_id TEXT NOT NULL, review TEXT NOT NULL, install_policy TEXT NOT NULL,
        withdrawn INTEGER NOT NULL, trust TEXT NOT NULL, fault TEXT NOT NULL,
        revision INTEGER NOT NULL, created REAL NOT NULL, changed REAL NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE bindings (
        id TEXT PRIMARY KEY, org TEXT NOT NULL, project TEXT NOT NULL,
        package TEXT NOT NULL REFERENCES packages (id), export TEXT NOT NULL, kind TEXT NOT NULL,
        active INTEGER NOT NULL, traffic_percent INTEGER NOT NULL, record TEXT NOT NULL,
        revision INTEGER NOT NULL, created REAL NOT NULL, changed REAL NOT NULL
    ) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX bindings_scope ON bindings (org, project, package, export)",
    "CREATE INDEX bindings_package ON bindings (package)",
    """CREATE TABLE history (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        subject TEXT NOT NULL, id TEXT NOT NULL, revision INTEGER NOT NULL, org TEXT NOT NULL,
        at REAL NOT NULL, caller TEXT NOT NULL, change TEXT NOT NULL, document TEXT NOT NULL
    )""",
    "CREATE UNIQUE INDEX history_revision ON history (subject, id, revision)",
    "CREATE INDEX history_org ON history (org, number)",
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY AUTOINCREMENT, invocation TEXT NOT NULL UNIQUE,
        started REAL NOT NULL, ended REAL NOT NULL, status TEXT NOT NULL,
        binding TEXT NOT NULL, org TEXT NOT NULL, project TEXT NOT NULL, kind TEXT NOT NULL,
        export TEXT NOT NULL, package TEXT NOT NULL, document TEXT NOT NULL
    )""",
    "CREATE INDEX records_started ON records (started)",
    "CREATE INDEX records_binding ON records (binding, number)",
    "CREATE INDEX records_org ON records (org, number)",
)
MIGRATIONS = (_FIRST,)
KIND = DatabaseKind("control plane's database", 0x706C6374, MIGRATIONS)


class PackageRow(NamedTuple):
    id: str
    package_id: str
    version: str
    contract: str = ""  # whose rules its bindings follow; empty: contract-ready, there are no bytes yet
    name: str = ""
    description: str = ""
    digest: str = ""  # of its files, without the signature (runner/package/listing.py)
    folder: str = ""  # where its files are
    source: str = ""  # where it was imported from, with the digest of a registry
    publisher: str = ""
    signature: str = ""  # the document; empty: it has none
    key_id: str = ""  # of the signature
    review: str = "none"  # approved, rejected
    install_policy: str = '["*"]'  # JSON: the orgs that may install it; "*": all; none: the operator alone
    withdrawn: int = 0
    trust: str = ""  # of the signature: "trusted", or the rule that it breaks
    fault: str = ""  # why it is not available; empty: it is, unless it was withdrawn
    revision: int = 0
    created: float = 0.0
    changed: float = 0.0

    @property
    def unavailable(self) -> str:
        """Reason why nothing may be bound to it or called by its bindings, or ''."""
        if not self.digest:
            return "the entry is contract-ready: there is no package yet"
        return "the package was withdrawn" if self.withdrawn else self.fault

    def state(self, is_used: bool) -> State:
        """`is_used`: whether a binding of the caller's scope is for it."""
        if self.withdrawn:
            return "withdrawn"
        if not self.digest:
            return "contract-ready"
        return "imported" if self.fault else "installed" if is_used else "available"

    def is_for(self, org: str) -> bool:
        """Whether an org may see and install it by its install policy."""
        allowed = json.loads(self.install_policy)
        return "*" in allowed or org in allowed


class BindingRow(NamedTuple):
    id: str
    org: str
    project: str  # empty: the whole org
    package: str  # the id of a PackageRow
    export: str
    kind: str  # of the export: "tools", "hooks", …
    active: int
    traffic_percent: int
    record: str  # the whole binding record, JSON with sorted keys
    revision: int = 0
    created: float = 0.0
    changed: float = 0.0

    @property
    def inactive(self) -> str:
        """Reason why nobody is served by it, or ''. Its package may be unavailable besides."""
        if not self.active:
            return "the binding is disabled"
        return "" if self.traffic_percent else "the binding has the traffic_percent 0"


class HistoryRow(NamedTuple):
    number: int
    subject: Subject
    id: str
    revision: int
    org: str  # of a binding; empty: of a package
    at: float
    caller: str
    change: str  # one word: imported, created, changed, withdrawn, …
    document: str  # JSON: the binding record, or the package's card


class RecordRow(NamedTuple):
    """One invocation, as observability sees it. Its columns are what queries filter by."""

    invocation: str
    started: float
    ended: float
    status: str
    binding: str
    org: str
    project: str
    kind: str
    export: str
    package: str  # the id of a PackageRow
    document: str  # JSON: the whole record
    number: int = 0  # grows with time: the cursor of lists


class ControlRefusal(OrderRefusal):
    """The status, code and hint of the answer."""

    status, code, hint = 409, "conflict", ""


class StaleRevision(ControlRefusal):
    """It was changed by somebody else since the caller read it."""

    status, code, hint = 412, "stale_revision", "read it again, and send its ETag as If-Match"


class RecordConflict(ControlRefusal):
    """Another package or binding stands where this one should."""


class PackageUnavailable(ControlRefusal):
    """Nothing may be bound to the package."""

    code = "package_unavailable"


class ControlFull(ControlRefusal):
    """There are as many as there may be."""

    status, code, hint = 409, "full", "the operator has to make room"


class ControlFile(SqliteFile):
    """The open file. Made by `open_control_file`. One thread at a time may use it."""

    def __init__(self, opened: OpenDatabase, clock: Callable[[], float] = time.time) -> None:
        super().__init__(opened)
        self.clock = clock

    # --- packages -------------------------------------------------------------------------------------------

    def package(self, name: str) -> PackageRow | None:
        found = self._connection.execute("SELECT * FROM packages WHERE id = ?", (name,)).fetchone()
        return None if found is None else PackageRow(*found)

    def packages(self) -> list[PackageRow]:
        """All of them, by their ids."""
        return [PackageRow(*row) for row in self._connection.execute("SELECT * FROM packages ORDER BY id")]

    def import_package(self, row: PackageRow, caller: str) -> tuple[PackageRow, bool]:
        """Store a package, or a contract-ready entry. Returns the row, and whether it is new. The same bytes
        again are the same row; a better signature replaces the one that it has. Raises RecordConflict for
        other bytes, and ControlFull."""
        known = self.package(row.id)
        if known is None:
            (count,) = self._connection.execute("SELECT count(*) FROM packages").fetchone()
            if count >= MOST_PACKAGES:
                raise ControlFull(f"there are {MOST_PACKAGES} packages, which is the most")
            return self._put_package(row._replace(created=self.clock()), caller, "imported"), True
        if known.digest and row.digest and known.digest != row.digest:
            raise RecordConflict(f"{row.package_id} {row.version} is known with other bytes: {known.digest}")
        if not known.digest and row.digest:
            row = row._replace(revision=known.revision, created=known.created, withdrawn=known.withdrawn)
            return self._put_package(row, caller, "imported"), True
        if row.signature not in ("", known.signature) and (row.trust == TRUSTED or known.trust != TRUSTED):
            changed = known._replace(
                signature=row.signature,
                key_id=row.key_id,
                folder=row.folder,
                trust=row.trust,
                fault=row.fault,
            )
            return self._put_package(changed, caller, "signed"), False
        return known, False

    def change_package(
        self, name: str, revision: int | None, caller: str, change: str, **fields: Any
    ) -> PackageRow | None:
        """Change fields of a package. Returns it; None: there is none. Nothing changes if it has these
        values. Raises StaleRevision."""
        known = self.package(name)
        if known is None:
            return None
        require_revision(known.revision, revision)
        changed = known._replace(**fields)
        return known if changed == known else self._put_package(changed, caller, change)

    def _put_package(self, row: PackageRow, caller: str, change: str) -> PackageRow:
        row = row._replace(revision=row.revision + 1, changed=self.clock())
        self._put("packages", row)
        card = {name: value for name, value in row._asdict().items() if name != "signature"}
        self._remember("package", row.id, row.revision, "", caller, change, json.dumps(card))
        return row

    # --- bindings -------------------------------------------------------------------------------------------

    def binding(self, name: str) -> BindingRow | None:
        found = self._connection.execute("SELECT * FROM bindings WHERE id = ?", (name,)).fetchone()
        return None if found is None else BindingRow(*found)

    def bindings(
        self,
        org: str | None = None,
        project: str | None = None,
        package: str | None = None,
        kind: str | None = None,
        *,
        after: str = "",
        most: int = MOST_ROWS,
    ) -> list[BindingRow]:
        """By their ids. None: any. `project`: "" is the whole org. `after`: the last id of a list before."""
        where, values = _where(
            {
                "id > ?": after,
                "org = ?": org,
                "project = ?": project,
                "package = ?": package,
                "kind = ?": kind,
            }
        )
        rows = self._connection.execute(
            f"SELECT * FROM bindings WHERE {where} ORDER BY id LIMIT ?", (*values, most)
        )
        return [BindingRow(*row) for row in rows]

    def used_packages(self, org: str | None = None) -> frozenset[str]:
        """Ids of the packages that bindings are for: of all orgs, or of one."""
        query = "SELECT DISTINCT package FROM bindings WHERE ?1 IS NULL OR org = ?1"
        return frozenset(package for (package,) in self._connection.execute(query, (org,)))

    def put_binding(self, row: BindingRow, revision: int | None, caller: str, change: str) -> BindingRow:
        """Store a new binding (revision 0), or change one. Raises StaleRevision, RecordConflict and
        ControlFull."""
        known = self.binding(row.id)
        if known is None:
            query = "SELECT count(*) FROM bindings WHERE org = ?"
            if self._connection.execute(query, (row.org,)).fetchone()[0] >= MOST_BINDINGS:
                raise ControlFull(f"the org has {MOST_BINDINGS} bindings, which is the most")
            row = row._replace(revision=0, created=self.clock())
        elif revision == 0:
            raise RecordConflict(f"there is a binding {row.id!a}")
        else:
            require_revision(known.revision, revision)
            row = row._replace(revision=known.revision, created=known.created)
        other = self._connection.execute(
            "SELECT id FROM bindings WHERE org = ? AND project = ? AND package = ? AND export = ?"
            " AND id != ?",
            (row.org, row.project, row.package, row.export, row.id),
        ).fetchone()
        if other is not None:
            raise RecordConflict(f"the binding {other[0]!a} is for the same export, version and scope")
        row = row._replace(revision=row.revision + 1, changed=self.clock())
        self._put("bindings", row)
        self._remember("binding", row.id, row.revision, row.org, caller, change, row.record)
        return row

    def _put(self, table: str, row: PackageRow | BindingRow) -> None:
        changes = ", ".join(f"{name} = excluded.{name}" for name in row._fields if name != "id")
        self._connection.execute(
            f"INSERT INTO {table} ({', '.join(row._fields)}) VALUES ({', '.join('?' * len(row))})"
            f" ON CONFLICT (id) DO UPDATE SET {changes}",
            row,
        )

    # --- history --------------------------------------------------------------------------------------------

    def _remember(
        self, subject: Subject, name: str, revision: int, org: str, caller: str, change: str, document: str
    ) -> None:
        self._connection.execute(
            "INSERT INTO history (subject, id, revision, org, at, caller, change, document)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (subject, name, revision, org, self.clock(), caller, change, document),
        )
        self._connection.execute(
            "DELETE FROM history WHERE subject = ? AND id = ? AND revision <= ?",
            (subject, name, revision - MOST_REVISIONS),
        )
        if org:
            self._connection.execute(
                "DELETE FROM history WHERE org = ?1 AND number IN (SELECT number FROM (SELECT number,"
                " SUM(LENGTH(CAST(document AS BLOB))) OVER (ORDER BY number DESC) AS newer FROM history"
                " WHERE org = ?1) WHERE newer > ?2)",
                (org, MOST_HISTORY_BYTES),
            )

    def history(
        self, subject: Subject, name: str, *, before: int | None = None, most: int = MOST_ROWS
    ) -> list[HistoryRow]:
        """The newest first. `before`: a revision; only earlier ones."""
        rows = self._connection.execute(
            "SELECT * FROM history WHERE subject = ?1 AND id = ?2 AND (?3 IS NULL OR revision < ?3)"
            " ORDER BY revision DESC LIMIT ?4",
            (subject, name, before, most),
        )
        return [HistoryRow(*row) for row in rows]

    def at_revision(self, subject: Subject, name: str, revision: int) -> HistoryRow | None:
        found = self.history(subject, name, before=revision + 1, most=1)
        return found[0] if found and found[0].revision == revision else None

    # --- records of invocations -----------------------------------------------------------------------------

    def add_record(self, row: RecordRow) -> None:
        """Store the record of an invocation. One with the same invocation is replaced."""
        names = [name for name in row._fields if name != "number"]
        self._connection.execute(
            f"INSERT OR REPLACE INTO records ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            [getattr(row, name) for name in names],
        )

    def record(self, invocation: str) -> RecordRow | None:
        query = f"SELECT {', '.join(RecordRow._fields)} FROM records WHERE invocation = ?"
        found = self._connection.execute(query, (invocation,)).fetchone()
        return None if found is None else RecordRow(*found)

    def records(
        self,
        org: str | None = None,
        binding: str | None = None,
        status: str | None = None,
        since: float | None = None,
        until: float | None = None,
        *,
        before: int | None = None,
        most: int = MOST_ROWS,
    ) -> list[RecordRow]:
        """The newest first. None: any. `since`, `until`: when they started, in seconds since 1970. `before`:
        the last number of the list before. It ends early with the record that makes it too long."""
        where, values = _where(
            {
                "org = ?": org,
                "binding = ?": binding,
                "status = ?": status,
                "started >= ?": since,
                "started < ?": until,
                "number < ?": before,
            }
        )
        rows = self._connection.execute(
            f"SELECT {', '.join(RecordRow._fields)} FROM records WHERE {where} ORDER BY number DESC LIMIT ?",
            (*values, most),
        )
        found: list[RecordRow] = []
        size = 0
        for row in map(RecordRow._make, rows):
            found.append(row)
            size += len(row.document)
            if size >= MOST_LIST_BYTES:
                break
        return found

    # --- upkeep ---------------------------------------------------------------------------------------------

    def prune(self) -> None:
        """Remove old records, and if the file is too large the oldest ones of the org that has most."""
        oldest = self.clock() - _RECORD_DAYS * 86400
        self._connection.execute("DELETE FROM records WHERE started < ?", (oldest,))
        for (org,) in self._connection.execute("SELECT DISTINCT org FROM records").fetchall():
            self._connection.execute(
                "DELETE FROM records WHERE org = ?1 AND number <="
                " (SELECT number FROM records WHERE org = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)",
                (org, MOST_RECORDS),
            )
        while self.used_bytes() > MOST_BYTES * _RECORDS_SHARE:
            removed = self._connection.execute(
                "DELETE FROM records WHERE number IN (SELECT number FROM records WHERE org ="
                " (SELECT org FROM records GROUP BY org ORDER BY SUM(LENGTH(document)) DESC LIMIT 1)"
                " ORDER BY number LIMIT ?)",
                (_RECORDS_AT_ONCE,),
            )
            if not removed.rowcount:
                return


class ControlDatabase(DatabaseThread[ControlFile]):
    """ControlFile for trio. Made by `open_control_database`. `do` raises DatabaseUnusable."""


def _where(given: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The conditions whose value is not None. The others must not be there: with `? IS NULL OR …` SQLite uses
    no index, and a question of one org takes as long as all orgs have rows."""
    used = {condition: value for condition, value in given.items() if value is not None}
    return " AND ".join(["TRUE", *used]), list(used.values())


def is_long(records: Sequence[RecordRow]) -> bool:
    """Whether a list has to end here, though there may be more."""
    return sum(len(row.document) for row in records) >= MOST_LIST_BYTES


def require_revision(known: int, wanted: int | None) -> None:
    if wanted is not None and known != wanted:
        raise StaleRevision(f"it has revision {known} by now, and the change is for {wanted}")


def canonical(record: Mapping[str, Any]) -> str:
    """A record as it is stored: the same content is the same text."""
    return json.dumps(record, sort_keys=True, indent=2)


def open_control_file(path: str, *, clock: Callable[[], float] = time.time) -> ControlFile:
    """Raises DatabaseUnusable."""
    return open_sqlite(
        path, KIND, lambda opened: ControlFile(opened, clock), MOST_BYTES, (ControlFile.prune,)
    )


@asynccontextmanager
async def open_control_database(path: str, **settings: Any) -> AsyncIterator[ControlDatabase]:
    """Raises DatabaseUnusable."""
    file = await trio.to_thread.run_sync(partial(open_control_file, path, **settings))
    database = ControlDatabase(file)
    try:
        yield database
    finally:
        await database.close()
