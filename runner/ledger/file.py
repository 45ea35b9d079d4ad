"""The ledger's file: a SQLite database with one writer. What is in it survives the daemon.

Everything here blocks; runner/ledger/ledger.py is the same for trio. Rules:

- A call is written before it runs, and its outcome is written once.
- Who opens the file knows that the last daemon is dead, because each holds a lock while it lives. Calls
  without an outcome get `unknown` then. Deliveries that were running are due again, with the next attempt.
- An error of the disk or of a lock undoes the whole transaction, and is told.
- SQLite goes on writing to a file that was removed, so each transaction first looks whether it is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from runner.ledger.retry import Schedule, next_try
from runner.ledger.rows import (
    NEVER_RAN,
    REPEATABLE,
    UNKNOWN,
    Accepted,
    AuditRow,
    DeliveriesFull,
    Delivery,
    DeliveryConflict,
    DeliveryRow,
    DeliveryState,
    DeliveryTooLarge,
    EndOfCall,
    InvocationRow,
    KeyReused,
    LedgerRefusal,
    Verdict,
    digest,
    has_place,
    hook_id,
)
from runner.ledger.schema import APPLICATION_ID, MIGRATIONS, migrate
from sandbox.policy.load import trust_fault
from sandbox.speed.value import NamedTuple

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
Order = Callable[["LedgerFile"], Any]

_MOST_ROWS = 1000  # of one list
_DAY_SECONDS = 86400.0
_ORDERS_BETWEEN_PRUNINGS = 1000
_LOWERED_TO = 0.9  # of the size at which rows are removed
_PRUNED_AT_ONCE = 500
_MOST_ANSWER_BYTES = 256 << 10
_MOST_WAITING = 0.25  # of the size, for deliveries that have not ended: only what has ended is removed
_MOST_AUDITED = 100_000  # rows of one kind: strangers who are refused must not push out calls and grants
_LOST = "the daemon ended before the call did"


class LedgerUnusable(Exception):
    """The file cannot be opened, read or written. Nothing of the transaction was written."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class LedgerBounds(NamedTuple):
    """How large the ledger may become. Only what has ended is removed."""

    days: float = 30.0
    size: int = 256 << 20  # bytes of the database, without its log


class Acceptance(NamedTuple):
    """What became of a call that was offered to the ledger."""

    row: InvocationRow
    fresh: bool  # True: it was written now and has to run. False: its key is known, and this is that call


class Attempt(NamedTuple):
    """One attempt of a delivery, which has to run now."""

    invocation: str
    delivery: DeliveryRow

    @property
    def number(self) -> int:
        return self.delivery.attempt


class LedgerFile:
    """The open file. Made by `open_file`. One thread at a time may use it."""

    def __init__(
        self,
        path: str,
        connection: sqlite3.Connection,
        lock: int,
        *,
        schedule: Schedule,
        bounds: LedgerBounds,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        self._schedule = schedule
        self._bounds = bounds
        self.clock = clock
        self._chance = chance
        self._until_pruning = _ORDERS_BETWEEN_PRUNINGS
        self._inodes = _inodes(path)
        self._waiting_bytes: int | None = None  # of deliveries that have not ended; None: not counted yet

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    # --- transactions ---------------------------------------------------------------------------------------

    def write(self, orders: Sequence[Order], *, durable: bool = False) -> list[Any]:
        """Carry out all orders in one transaction. Returns the result of each, or its LedgerRefusal. Raises
        LedgerUnusable; then nothing was written. `durable`: it also survives the end of the machine."""
        if _inodes(self.path) != self._inodes:
            message = f"the ledger {self.path} was removed or replaced while it was in use"
            raise LedgerUnusable(message, "put it back as it was; or end the daemon and start it again")
        with explain_errors(self.path):
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
        self._transact([LedgerFile.prune])
        self._connection.execute("PRAGMA incremental_vacuum").fetchall()

    def do(
        self,
        order: Callable[Concatenate[LedgerFile, Arguments], Value],
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Value:
        """Carry out one order: a method of this class. Raises its LedgerRefusal, and LedgerUnusable."""
        (result,) = self.write([lambda file: order(file, *args, **named)])
        if isinstance(result, LedgerRefusal):
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
                except LedgerRefusal as refusal:
                    connection.execute("ROLLBACK TO one")
                    self._waiting_bytes = None
                    results.append(refusal)
                connection.execute("RELEASE one")
            connection.execute("COMMIT")
        except BaseException:
            self._waiting_bytes = None
            if connection.in_transaction:  # after some errors SQLite has undone it already
                connection.execute("ROLLBACK")
            raise
        return results

    # --- calls ----------------------------------------------------------------------------------------------

    def accept(self, call: Accepted) -> Acceptance:
        """Write a call before it runs. Raises KeyReused if its key belongs to another call.

        The same call with the same key is not run again, unless it never ran, or its outcome was lost and its
        effect class says that it may be repeated."""
        known = None if call.key is None else self._by_key(call)
        if known is not None:
            if (known.tool, known.kind, known.input_digest) != (call.tool, call.kind, call.input.digest):
                raise KeyReused(f"the idempotency key {call.key!a} was used for another call")
            lost = known.code == UNKNOWN and call.effect in REPEATABLE
            if not lost and known.code not in NEVER_RAN:
                return Acceptance(known, False)
            self._connection.execute(
                "UPDATE invocations SET repeated_by = ? WHERE id = ?", (call.id, known.id)
            )
        return Acceptance(self._insert(call), True)

    def _by_key(self, call: Accepted) -> InvocationRow | None:
        found = self._connection.execute(
            "SELECT * FROM invocations WHERE caller = ? AND plugin = ? AND key = ? AND repeated_by IS NULL",
            (call.caller, call.plugin, call.key),
        ).fetchone()
        return None if found is None else InvocationRow(*found)

    def _insert(
        self, call: Accepted, delivery: str | None = None, attempt: int | None = None
    ) -> InvocationRow:
        row = InvocationRow(
            id=call.id,
            plugin=call.plugin,
            tool=call.tool,
            kind=call.kind,
            caller=call.caller,
            key=call.key,
            effect=call.effect,
            delivery=delivery,
            attempt=attempt,
            accepted=self.clock(),
            input_digest=call.input.digest,
            input_bytes=call.input.size,
        )
        marks = ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO invocations VALUES ({marks})", row)
        return row

    def end(self, invocation: str, ended: EndOfCall) -> bool:
        """Write the outcome of a call. Returns False if it has one, which stays."""
        answer = ended.answer
        if answer is not None and len(answer) > _MOST_ANSWER_BYTES:
            answer = None
        changed = self._connection.execute(
            "UPDATE invocations SET started = ?, ended = ?, code = ?, output_digest = ?, output_bytes = ?,"
            " record = ?, answer = CASE WHEN key IS NULL THEN NULL ELSE ? END WHERE id = ? AND ended IS NULL",
            (
                ended.started,
                self.clock(),
                ended.code,
                ended.output.digest,
                ended.output.size,
                ended.record,
                answer,
                invocation,
            ),
        )
        return changed.rowcount == 1

    def invocation(self, name: str) -> InvocationRow | None:
        found = self._connection.execute("SELECT * FROM invocations WHERE id = ?", (name,)).fetchone()
        return None if found is None else InvocationRow(*found)

    def invocations(
        self, plugin: str | None = None, code: str | None = None, caller: str | None = None, most: int = 100
    ) -> list[InvocationRow]:
        """The newest calls first."""
        rows = self._connection.execute(
            "SELECT * FROM invocations WHERE (?1 IS NULL OR plugin = ?1) AND (?2 IS NULL OR code = ?2)"
            " AND (?3 IS NULL OR caller = ?3) ORDER BY accepted DESC, id LIMIT ?4",
            (plugin, code, caller, min(most, _MOST_ROWS)),
        )
        return [InvocationRow(*row) for row in rows]

    # --- deliveries -----------------------------------------------------------------------------------------

    def enqueue(self, delivery: Delivery) -> DeliveryRow:
        """Store a delivery, due at once. The same delivery again changes nothing. Raises DeliveryConflict if
        another one has its id, DeliveryTooLarge and DeliveriesFull."""
        known = self.delivery(delivery.id)
        if known is not None:
            if tuple(known[: len(delivery)]) != tuple(delivery):
                raise DeliveryConflict(f"the delivery {delivery.id!a} exists with another event or hook")
            return known
        self._make_room(delivery)
        now = self.clock()
        row = DeliveryRow(*delivery, "queued", 0, 0, now, now, None, None, None)
        self._connection.execute(f"INSERT INTO deliveries VALUES ({', '.join('?' * len(row))})", row)
        return row

    def enqueue_all(self, event: Delivery, hooks: Sequence[tuple[str, str]]) -> list[DeliveryRow]:
        """Store a delivery of an event to each of these plugins' hooks, or none. `event`: a delivery without
        hook, and without plugin unless all hooks are of that one. The same event again changes nothing, also
        if other hooks want it by now: it returns the rows that there are. One plugin after the other may get
        it. Raises DeliveryConflict if another event has its id, DeliveryTooLarge and DeliveriesFull."""
        found = self._connection.execute(
            "SELECT * FROM deliveries WHERE id > ?1 || '~' AND id < ?1 || char(127)", (event.id,)
        )
        to_all: list[DeliveryRow] = []
        to_named: list[DeliveryRow] = []
        differs = False
        for row in map(DeliveryRow._make, found):
            for rows, named in ((to_all, False), (to_named, True)):
                if row.id == hook_id(event.id, row.plugin, row.hook, named=named):
                    differs |= (row.event, row.context) != (event.event, event.context)
                    rows.append(row._replace(event=event.event, context=event.context))  # in memory once
        if differs:
            raise DeliveryConflict(f"there is another event with the id {event.id!a}")
        known = to_all
        if event.plugin:
            known = [row for row in (*to_all, *to_named) if row.plugin == event.plugin]
        elif to_named and not to_all:
            raise DeliveryConflict(f"the event {event.id!a} was delivered to plugins by their names")
        if not known:
            self._require_possible(len(hooks) * (len(event.event) + len(event.context)))
        return known or [
            self.enqueue(
                Delivery(
                    hook_id(event.id, plugin, hook, named=bool(event.plugin)),
                    *(plugin, hook, event.event, event.context),
                )
            )
            for plugin, hook in hooks
        ]

    def _require_possible(self, size: int) -> None:
        most = int(self._bounds.size * _MOST_WAITING)
        if size > most:
            message = f"it takes {size} bytes for all its hooks, and all deliveries that wait have {most}"
            raise DeliveryTooLarge(message)

    def _make_room(self, delivery: Delivery | DeliveryRow) -> None:
        """Count a delivery among those that wait. Raises DeliveryTooLarge and DeliveriesFull."""
        if self._waiting_bytes is None:
            (self._waiting_bytes,) = self._connection.execute(
                "SELECT COALESCE(SUM(LENGTH(event) + LENGTH(context)), 0) FROM deliveries"
                " WHERE state IN ('queued', 'running')"
            ).fetchone()
        waiting, size = self._waiting_bytes or 0, len(delivery.event) + len(delivery.context)
        self._require_possible(size)
        if waiting + size > self._bounds.size * _MOST_WAITING:
            raise DeliveriesFull(f"deliveries of {waiting} bytes wait, and there is no room for {size} more")
        self._waiting_bytes = waiting + size

    def claim(
        self,
        most: int,
        name: Callable[[], str],
        busy: Sequence[str] = (),
        running: Counter[str] | None = None,
    ) -> list[Attempt]:
        """Begin the next attempt of deliveries that are due, at most `most`. Each attempt is also a call,
        which is written with it. `name` makes the id of a call. `busy`: plugins that get none now. `running`:
        how many attempts of each plugin run, if they are to share the places (`has_place`)."""
        begun: list[Attempt] = []
        counts, places = Counter(running), most + (0 if running is None else running.total())
        full = {*busy}
        while (left := most - len(begun)) > 0:
            marks = ", ".join("?" * len(full))
            rows = self._connection.execute(
                f"SELECT * FROM deliveries WHERE state = 'queued' AND due <= ? AND plugin NOT IN ({marks})"
                " ORDER BY due, id LIMIT ?",
                (self.clock(), *full, left),
            ).fetchall()
            for row in map(DeliveryRow._make, rows):
                if running is None or has_place(row.plugin, counts, places):
                    counts[row.plugin] += 1
                    begun.append(self._begin(row, name()))
                else:
                    full.add(row.plugin)
            if len(rows) < left:
                break
        return begun

    def _begin(self, row: DeliveryRow, invocation: str) -> Attempt:
        begun = row._replace(state="running", attempt=row.attempt + 1, due=None)
        self._connection.execute(
            "UPDATE deliveries SET state = 'running', attempt = ?, due = NULL WHERE id = ?",
            (begun.attempt, row.id),
        )
        call = Accepted(
            invocation, row.plugin, row.hook, "hook", "deliveries", digest(json.loads(row.event)), "unknown"
        )
        self._insert(call, row.id, begun.attempt)
        return Attempt(invocation, begun)

    def settle(self, attempt: Attempt, verdict: Verdict, ended: EndOfCall, reason: str = "") -> DeliveryState:
        """End an attempt. A delivery that has to be retried is dead after its last attempt. Returns the state
        of the delivery."""
        self.end(attempt.invocation, ended)
        row = self.delivery(attempt.delivery.id)
        if row is None or (row.state, row.attempt) != ("running", attempt.number):
            return "dead" if row is None else row.state  # settled before
        return self._settle(row, verdict, ended.code, reason)

    def _settle(self, row: DeliveryRow, verdict: Verdict, code: str, reason: str) -> DeliveryState:
        now = self.clock()
        due = None
        if verdict == "retry":
            due = next_try(self._schedule, row.attempt - row.round, now, self._chance())
        state: DeliveryState = "queued" if due is not None else "acked" if verdict == "acked" else "dead"
        if state != "queued" and self._waiting_bytes is not None:
            self._waiting_bytes -= len(row.event) + len(row.context)
        self._connection.execute(
            "UPDATE deliveries SET state = ?, due = ?, ended = ?, code = ?, reason = ? WHERE id = ?",
            (state, due, None if due is not None else now, code, reason, row.id),
        )
        return state

    def repeat(self, delivery: str) -> DeliveryRow:
        """Begin another round for a dead delivery: it is due now, with the next attempt. Raises
        DeliveryConflict if it is not dead, and DeliveriesFull."""
        row = self.delivery(delivery)
        if row is None:
            raise DeliveryConflict(f"there is no delivery {delivery!a}")
        if row.state != "dead":
            raise DeliveryConflict(
                f"the delivery {delivery!a} is {row.state}; only a dead one can be repeated"
            )
        self._make_room(row)
        changed = row._replace(state="queued", round=row.attempt, due=self.clock(), ended=None)
        self._connection.execute(
            "UPDATE deliveries SET state = 'queued', round = ?, due = ?, ended = NULL WHERE id = ?",
            (changed.round, changed.due, delivery),
        )
        return changed

    def delivery(self, name: str) -> DeliveryRow | None:
        found = self._connection.execute("SELECT * FROM deliveries WHERE id = ?", (name,)).fetchone()
        return None if found is None else DeliveryRow(*found)

    def deliveries(self, state: DeliveryState | None = None, most: int = 100) -> list[DeliveryRow]:
        """The oldest deliveries first."""
        rows = self._connection.execute(
            "SELECT * FROM deliveries WHERE ?1 IS NULL OR state = ?1 ORDER BY created, id LIMIT ?2",
            (state, min(most, _MOST_ROWS)),
        )
        return [DeliveryRow(*row) for row in rows]

    def next_due(self, busy: Sequence[str] = ()) -> float | None:
        """When the next delivery is due, but for those of the plugins that are `busy`."""
        marks = ", ".join("?" * len(busy))
        query = f"SELECT MIN(due) FROM deliveries WHERE state = 'queued' AND plugin NOT IN ({marks})"
        (due,) = self._connection.execute(query, tuple(busy)).fetchone()
        return None if due is None else float(due)

    # --- audit ----------------------------------------------------------------------------------------------

    def note(self, what: str, caller: str, plugin: str = "", detail: str = "{}") -> None:
        """Write a row of the audit: a grant, a refusal, a connection. `detail` is JSON."""
        self._connection.execute(
            "INSERT INTO audit (at, what, caller, plugin, detail) VALUES (?, ?, ?, ?, ?)",
            (self.clock(), what, caller, plugin, detail),
        )

    def audit(self, what: str | None = None, most: int = 100) -> list[AuditRow]:
        """The newest rows first."""
        rows = self._connection.execute(
            "SELECT * FROM audit WHERE ?1 IS NULL OR what = ?1 ORDER BY id DESC LIMIT ?2",
            (what, min(most, _MOST_ROWS)),
        )
        return [AuditRow(*row) for row in rows]

    # --- upkeep ---------------------------------------------------------------------------------------------

    def recover(self) -> int:
        """Give every call that was in flight its outcome, and make its delivery due again. Returns how many
        calls there were."""
        lost = self._connection.execute(
            "UPDATE invocations SET ended = ?, code = ?, record = ? WHERE ended IS NULL",
            (self.clock(), UNKNOWN, json.dumps({"message": _LOST})),
        ).rowcount
        for row in self._connection.execute("SELECT * FROM deliveries WHERE state = 'running'").fetchall():
            self._settle(DeliveryRow(*row), "retry", UNKNOWN, _LOST)
        return lost

    def prune(self) -> None:
        """Remove what has ended and is too old, and the oldest of it if the file is too large."""
        self._remove_before(self.clock() - self._bounds.days * _DAY_SECONDS, -1)
        for (what,) in self._connection.execute("SELECT DISTINCT what FROM audit").fetchall():
            self._connection.execute(
                "DELETE FROM audit WHERE what = ?1 AND id <="
                " (SELECT id FROM audit WHERE what = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (what, _MOST_AUDITED),
            )
        if self._used_bytes() <= self._bounds.size * _LOWERED_TO:
            return
        while self._used_bytes() > self._bounds.size * _LOWERED_TO**2:
            if not self._remove_before(float("inf"), _PRUNED_AT_ONCE):
                return  # only what has not ended is left

    def _remove_before(self, when: float, most: int) -> int:
        removed = 0
        for table, time_column, ended in (
            ("audit", "at", "TRUE"),
            ("invocations", "accepted", "ended IS NOT NULL"),
            ("deliveries", "created", "state IN ('acked', 'dead')"),
        ):
            removed += self._connection.execute(
                f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table}"
                f" WHERE {time_column} < ? AND {ended} ORDER BY {time_column} LIMIT ?)",
                (when, most),
            ).rowcount
        return removed

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


# --- opening ------------------------------------------------------------------------------------------------


_SCHEDULE, _BOUNDS = Schedule(), LedgerBounds()


def open_file(
    path: str,
    *,
    schedule: Schedule = _SCHEDULE,
    bounds: LedgerBounds = _BOUNDS,
    clock: Callable[[], float] = time.time,
    chance: Callable[[], float] = random.random,
    busy_seconds: float = 5.0,
    migrations: Sequence[Sequence[str]] = MIGRATIONS,
) -> LedgerFile:
    """Open the ledger, or make a new one, and recover from the end of the last daemon. Raises LedgerUnusable.

    `busy_seconds`: how long a transaction waits for another program that has locked the file."""
    _make_private(path)
    lock = _take_lock(path)
    try:
        with explain_errors(path):
            connection = sqlite3.connect(
                path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
            )
            try:
                _prepare(path, connection, bounds, migrations)
                file = LedgerFile(
                    *(path, connection, lock),
                    schedule=schedule,
                    bounds=bounds,
                    clock=clock,
                    chance=chance,
                )
                file._transact([LedgerFile.recover, LedgerFile.prune])
            except BaseException:
                connection.close()
                raise
    except BaseException:
        os.close(lock)
        raise
    return file


def _prepare(
    path: str, connection: sqlite3.Connection, bounds: LedgerBounds, migrations: Sequence[Sequence[str]]
) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if (application or version or tables) and application != APPLICATION_ID:
        hint = "name another file; a new ledger is made where there is none"
        raise LedgerUnusable(f"{path} is the database of another program", hint)
    if version > len(migrations):
        message = f"the ledger {path} has version {version}, and this runner knows up to {len(migrations)}"
        raise LedgerUnusable(message, "use the runner that wrote it, or a newer one; or name another file")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise _damaged(path, str(found))
    if not tables:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    # The log survives the end of this process without a sync. Who calls from this machine does not survive
    # the end of the machine either.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA journal_size_limit = 16777216")
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {max(64, bounds.size // page)}")
    migrate(connection, migrations)


def _make_private(path: str) -> None:
    """Make the folder and the file, and refuse those that others can write. SQLite gives its log the mode of
    the file."""
    if path == ":memory:":  # for SQLite this is not the name of a file
        raise LedgerUnusable("a ledger in memory would not survive the daemon", "name a file")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fault = trust_fault(folder, "the folder", private_groups=True)
        mode = os.stat(folder).st_mode
        if fault is None and mode & stat.S_ISVTX and mode & 0o022:
            # Others could still put a log of theirs beside the file.
            fault = f"everybody can write to the folder {folder}", "name a file in a folder of your own"
        if fault is not None:
            raise LedgerUnusable(f"the ledger {path} is not used: {fault[0]}", fault[1])
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(path, flags, 0o600)
        try:
            status = os.fstat(opened)
        finally:
            os.close(opened)  # before SQLite locks it: closing any descriptor of a file drops its locks
    except OSError as error:
        message = f"the ledger {path} cannot be opened: {error.strerror}"
        raise LedgerUnusable(message, "name a file in a folder of your own") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        message = f"the ledger {path} is not used: it is not a regular file of this user"
        raise LedgerUnusable(message, "name another file")
    if status.st_mode & 0o077:
        message = f"the ledger {path} is not used: others than its owner can read or write it"
        raise LedgerUnusable(message, f"chmod 600 {path}")


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


def _take_lock(path: str) -> int:
    """Hold the lock of the one writer. It ends with the process, however that ends."""
    name = path + ".lock"
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"the ledger's lock {name} cannot be opened: {error.strerror}"
        raise LedgerUnusable(message, "name a ledger in a folder of your own") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        message = f"another process uses the ledger {path}"
        raise LedgerUnusable(message, "stop that daemon, or name another file") from None
    return lock


def _damaged(path: str, why: str) -> LedgerUnusable:
    hint = (
        f"move it away (mv {path} {path}.damaged) and start again; sqlite3 {path}.damaged .recover saves rows"
    )
    return LedgerUnusable(f"the ledger {path} is damaged: {why}", hint)


@contextmanager
def explain_errors(path: str) -> Iterator[None]:
    """Errors of SQLite as LedgerUnusable."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            message = f"the ledger {path} is locked by another program"
            raise LedgerUnusable(message, "end the program that reads or copies it") from None
        if name == "SQLITE_FULL":
            message = f"the ledger {path} is full: the disk has no room, or it has reached its size"
            raise LedgerUnusable(message, "make room on its disk, or allow it more size") from None
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise _damaged(path, str(error)) from None
        if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
            message = f"the ledger {path} cannot be read or written: {error}"
            raise LedgerUnusable(
                message, "look at its disk, and at the owner and mode of its folder"
            ) from None
        raise
