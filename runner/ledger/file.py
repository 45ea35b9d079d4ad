"""The ledger's file: a SQLite database with one writer. What is in it survives the daemon.

Everything here blocks; runner/ledger/ledger.py is the same for trio. Rules:

- A call is written before it runs, when the plugin is asked, and its outcome once.
- Who opens the file knows that the last daemon is dead. Calls without an outcome get `unknown` then if the
  plugin was asked, else `not_started`. Deliveries that were running are due again, with the next attempt.
- A call about which the plugin was not asked leaves its key free: the next call may have it.

How it is opened and written stands in runner/ledger/sqlite_file.py.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from runner.ledger.retry import Schedule, longest_pause, next_try
from runner.ledger.rows import (
    BINDING,
    NOT_STARTED,
    REPEATABLE,
    UNKNOWN,
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
    KeysFull,
    Verdict,
    cut,
    digest,
    has_place,
    hook_id,
    owner_of,
    row_of,
)
from runner.ledger.schema import APPLICATION_ID, MIGRATIONS
from runner.ledger.sqlite_file import (
    DatabaseKind,
    DatabaseUnusable,
    OpenDatabase,
    SqliteFile,
    open_sqlite,
)
from runner.protocol.calls import CallRequest

MOST_ROWS = 1000  # of one list
MOST_LIST_BYTES = 4 << 20  # of its texts, and one row more
_DAY_SECONDS = 86400.0
_MOST_USED = 0.9  # of the size, before rows are removed
_LOWERED_TO = 0.88  # then: little at once, because calls wait meanwhile
_PRUNED_AT_ONCE = 500
_MOST_ANSWER_BYTES = 256 << 10
_MOST_AUDITED = 100_000  # rows of one kind: strangers who are refused, and orgs, must not push out others'
_MOST_LOOKED_THROUGH = 2000  # rows that are not wanted
MOST_DEAD = 100  # letters that are looked through
_MOST_DEAD_TEXT = 2000  # characters of a reason
_ROW_BYTES = 300  # of a row, without what follows
_AUDITED = "what || IIF(caller LIKE 'org:%', caller, '')"  # rows of the audit that share a bound
# A key that must not be forgotten yet. What it stands for is not called again, so that its row stays; its
# answer and record may go.
_KEPT = "(key IS NOT NULL AND repeated_by IS NULL AND ended >= :kept)"
_FREED = "IIF(key IS NOT NULL AND repeated_by IS NULL AND {0} IS NULL, '', repeated_by)"  # {0}: when asked


class _Removable(NamedTuple):
    """Rows that may be removed, by their owners."""

    table: str
    at: str
    condition: str
    of: str  # the condition that a row is an owner's, who is a room, a name and a plugin
    size: str
    kept: str = "FALSE"  # rows that only lose their texts


_AUDIT = _Removable(
    "audit", "at", "TRUE", f"{_AUDITED} = :owner", f"LENGTH(caller) + LENGTH(detail) + {_ROW_BYTES}"
)
_CALLS = _Removable(
    "invocations",
    "accepted",
    f"ended IS NOT NULL AND (NOT {_KEPT} OR IFNULL(record, answer) IS NOT NULL)",
    "caller = :owner AND plugin = :plugin",
    f"IFNULL(LENGTH(record), 0) + IFNULL(LENGTH(answer), 0) + {_ROW_BYTES}",
    _KEPT,
)
_DELIVERIES = _Removable(
    "deliveries",
    "created",
    "state IN ('acked', 'dead')",
    "poster = :owner AND plugin = :plugin",
    f"LENGTH(event) + LENGTH(context) + {_ROW_BYTES}",
)
_ROOMS = {"audit": _AUDIT, "calls": _CALLS, "ended": _DELIVERIES}
_SAME = 5  # fields of a delivery that are the same if it is the same one
_LOST = "the daemon ended before the call did"
_UNASKED = "the daemon ended before it asked the plugin, so the call did nothing"


class LedgerUnusable(DatabaseUnusable):
    """The ledger cannot be opened, read or written."""


class LedgerBounds(NamedTuple):
    """How large the ledger may become. Only what has ended is removed, and keys only after their time."""

    days: float = 30.0
    size: int = 1 << 30  # bytes of the database, without its log
    key_hours: float = 24.0  # after the end of its call, that a key is surely known
    keys: float = 0.5  # of the size, for the keys that must not be forgotten yet
    waiting: float = 0.0625  # of the size, for deliveries that have not ended
    # What one caller may have of the room that other callers leave it; and what its calls of, or deliveries
    # to, one plugin may have of what its others leave.
    share: float = 0.75


class Acceptance(NamedTuple):
    """What became of a call that was offered to the ledger."""

    row: InvocationRow
    fresh: bool  # True: it was written now and has to run. False: its key is known, and this is that call


class DeadHook(NamedTuple):
    """The dead letters of one hook."""

    plugin: str
    hook: str
    letters: int
    at: float  # when the last one died, and why
    reason: str


class Attempt(NamedTuple):
    """One attempt of a delivery, which has to run now."""

    invocation: str
    delivery: DeliveryRow

    @property
    def number(self) -> int:
        return self.delivery.attempt


class Recovered(NamedTuple):
    """What the last daemon left."""

    not_started: int = 0  # calls
    unknown: int = 0  # calls
    dead: tuple[DeliveryRow, ...] = ()  # deliveries whose last attempt was cut off


class LedgerFile(SqliteFile):
    """The open file. Made by `open_file`. One thread at a time may use it."""

    def __init__(
        self,
        opened: OpenDatabase,
        *,
        schedule: Schedule,
        bounds: LedgerBounds,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        super().__init__(opened)
        self._schedule = schedule
        self._bounds = bounds
        self.clock = clock
        self._chance = chance
        self.recovered = Recovered()

    # --- calls ----------------------------------------------------------------------------------------------

    def accept(self, call: InvocationRow) -> Acceptance:
        """Write a call before it runs. Raises KeyReused if its key belongs to another call, and KeysFull.

        The same call with the same key is not run again, unless its outcome was lost and its effect class
        says that it may be repeated. A call that never came to the plugin has no key any more."""
        known = None if call.key is None else self._by_key(call)
        if known is not None:
            if (known.tool, known.kind, known.input_digest) != (call.tool, call.kind, call.input_digest):
                raise KeyReused(f"the idempotency key {call.key!a} was used for another call")
            if known.code != UNKNOWN or call.effect not in REPEATABLE:
                return Acceptance(known, False)
            self._connection.execute(
                "UPDATE invocations SET repeated_by = ? WHERE id = ?", (call.id, known.id)
            )
        row = self._insert(call)
        if call.key is not None:
            self._require_room_for_key(call)
        return Acceptance(row, True)

    def _require_room_for_key(self, call: InvocationRow) -> None:
        """Raises KeysFull."""
        if (taken := self._over_share("keys", call.caller, call.plugin)) is not None:
            raise KeysFull(
                f"the idempotency keys of {call.caller} for the plugin {call.plugin} have taken their share"
                f" of the ledger ({taken} bytes), and none may be forgotten yet"
            )

    def forget_keys(self) -> int:
        """Remove some keys whose time is over, the oldest first: they are kept as long as nobody needs their
        room. Returns how many."""
        return self._connection.execute(
            "DELETE FROM invocations WHERE id IN (SELECT id FROM invocations"
            " WHERE key IS NOT NULL AND ended < ? ORDER BY ended LIMIT ?)",
            (self._kept_since(), _PRUNED_AT_ONCE),
        ).rowcount

    def _kept_since(self) -> float:
        return self.clock() - self._bounds.key_hours * 3600

    def _over_share(self, room: str, owner: str, plugin: str) -> int | None:
        """How many bytes of a room an owner has for a plugin, if they are more than its share. None: they are
        not. With the last row, which is undone if they are."""
        query = (
            "SELECT SUM(bytes), SUM(IIF(owner = ?2, bytes, 0)),"
            " SUM(IIF(owner = ?2 AND plugin = ?3, bytes, 0)) FROM shares WHERE room = ?1"
        )
        total, own, here = self._connection.execute(query, (room, owner, plugin)).fetchone()
        most = (self._room(room) - (total - own)) * self._bounds.share
        return None if here <= (most - (own - here)) * self._bounds.share else int(here)

    def _room(self, room: str) -> int:
        return int(self._bounds.size * (self._bounds.keys if room == "keys" else self._bounds.waiting))

    def _by_key(self, call: InvocationRow) -> InvocationRow | None:
        found = self._connection.execute(
            "SELECT * FROM invocations WHERE caller = ? AND plugin = ? AND key = ? AND repeated_by IS NULL",
            (call.caller, call.plugin, call.key),
        ).fetchone()
        return None if found is None else InvocationRow(*found)

    def _insert(self, call: InvocationRow) -> InvocationRow:
        row = call._replace(accepted=self.clock())
        marks = ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO invocations VALUES ({marks})", row)
        return row

    def ask(self, invocation: str, now: float) -> None:
        """Write that the plugin is asked now."""
        self._connection.execute(
            "UPDATE invocations SET started = ? WHERE id = ? AND ended IS NULL", (now, invocation)
        )

    def end(self, invocation: str, ended: EndOfCall) -> bool:
        """Write the outcome of a call. Returns False if it has one, which stays."""
        answer = ended.answer
        if answer is not None and len(answer) > _MOST_ANSWER_BYTES:
            answer = None
        changed = self._connection.execute(
            "UPDATE invocations SET started = ?1, ended = ?2, code = ?3, output_digest = ?4,"
            " output_bytes = ?5, record = ?6, answer = IIF(key IS NULL OR ?1 IS NULL, NULL, ?7),"
            f" repeated_by = {_FREED.format('?1')} WHERE id = ?8 AND ended IS NULL",
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
        self,
        plugin: str | None = None,
        code: str | None = None,
        caller: str | None = None,
        most: int = 100,
        after: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[InvocationRow]:
        """The newest calls first, without their answers. `after`: those that follow the call of this id.
        `since`, `until`: those that were accepted then or later, and before. The list ends early if it
        `is_long`."""
        columns = ", ".join(name if name != "answer" else "NULL" for name in InvocationRow._fields)
        rows = self._connection.execute(
            f"SELECT {columns} FROM invocations WHERE (?1 IS NULL OR plugin = ?1)"
            " AND (?2 IS NULL OR code = ?2) AND (?3 IS NULL OR caller = ?3)"
            " AND (?5 IS NULL OR (accepted, id) < (SELECT accepted, id FROM invocations WHERE id = ?5))"
            # Not "OR": then SQLite would read the rows of all times.
            " AND accepted >= IFNULL(?6, -9e99) AND accepted < IFNULL(?7, 9e99)"
            " ORDER BY accepted DESC, id DESC LIMIT ?4",
            (plugin, code, caller, min(most, MOST_ROWS), after, since, until),
        )
        return _bounded(map(InvocationRow._make, rows))

    def invocations_of_no_org(self, most: int) -> list[InvocationRow]:
        """The newest calls first, without those of orgs and of their bindings, of which a bounded number is
        looked through."""
        rows = self._connection.execute(
            "SELECT * FROM invocations WHERE id IN (SELECT id FROM (SELECT id, plugin, caller, accepted"
            " FROM invocations ORDER BY accepted DESC, id LIMIT ?3) WHERE substr(plugin, 1, ?4) <> ?2"
            " AND caller NOT LIKE 'org:%' ORDER BY accepted DESC, id LIMIT ?1) ORDER BY accepted DESC, id",
            (most, BINDING, _MOST_LOOKED_THROUGH, len(BINDING)),
        )
        return [InvocationRow(*row) for row in rows]

    # --- deliveries -----------------------------------------------------------------------------------------

    def enqueue(self, delivery: Delivery) -> DeliveryRow:
        """Store a delivery, due at once. The same delivery again changes nothing. Raises DeliveryConflict if
        another one has its id, DeliveryTooLarge and DeliveriesFull."""
        known = self.delivery(delivery.id)
        if known is not None:
            if tuple(known[:_SAME]) != tuple(delivery[:_SAME]):
                raise DeliveryConflict(f"the delivery {delivery.id!a} exists with another event or hook")
            return known
        now = self.clock()
        # A delivery of this id may have been removed, and its attempts are still there.
        (made,) = self._connection.execute(
            "SELECT IFNULL(MAX(attempt), 0) FROM invocations WHERE delivery = ?", (delivery.id,)
        ).fetchone()
        row = DeliveryRow(
            id=delivery.id,
            plugin=delivery.plugin,
            hook=delivery.hook,
            event=delivery.event,
            context=delivery.context,
            state="queued",
            attempt=made,
            round=made,
            created=now,
            due=now,
            ended=None,
            code=None,
            reason=None,
            poster=delivery.poster,
        )
        self._connection.execute(f"INSERT INTO deliveries VALUES ({', '.join('?' * len(row))})", row)
        self._require_room_to_wait(row)
        return row

    def enqueue_all(self, event: Delivery, hooks: Sequence[tuple[str, str]]) -> list[DeliveryRow]:
        """Store a delivery of an event to each of these plugins' hooks, or none. `event`: a delivery without
        hook, and without plugin unless all hooks are of that one. The same event again changes nothing, also
        if other hooks want it by now: it returns the rows that there are. One plugin after the other may get
        it. Raises DeliveryConflict if another event has its id, DeliveryTooLarge and DeliveriesFull."""
        to_all: list[DeliveryRow] = []
        to_named: list[DeliveryRow] = []
        differs = False
        for row in self.deliveries_of(event.id):
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
                    plugin=plugin,
                    hook=hook,
                    event=event.event,
                    context=event.context,
                    poster=event.poster,
                )
            )
            for plugin, hook in hooks
        ]

    def deliveries_of(self, event: str) -> list[DeliveryRow]:
        """The deliveries of an event that goes to several hooks. Others may have ids like theirs."""
        query = "SELECT * FROM deliveries WHERE id > ?1 || '~' AND id < ?1 || char(127)"
        return [DeliveryRow(*row) for row in self._connection.execute(query, (event,))]

    def _require_possible(self, size: int) -> None:
        most = int(self._room("waiting") * self._bounds.share**2)
        if size > most:
            message = f"it takes {size} bytes for all its hooks, and one caller may let {most} wait"
            raise DeliveryTooLarge(message)

    def _require_room_to_wait(self, row: DeliveryRow) -> None:
        """Raises DeliveryTooLarge and DeliveriesFull."""
        if (taken := self._over_share("waiting", row.poster, row.plugin)) is not None:
            self._require_possible(len(row.event) + len(row.context))
            raise DeliveriesFull(
                f"deliveries of {row.poster} to the plugin {row.plugin} would take {taken} bytes, which is"
                " more than their share of the room for what waits"
            )

    def claim(
        self,
        most: int,
        name: Callable[[], str],
        busy: Sequence[str] = (),
        running: Counter[str] | None = None,
    ) -> list[Attempt]:
        """Begin the next attempt of deliveries that are due, at most `most`; also of those that are due later
        than the schedule ever says, because the clock was set back. Each attempt is also a call,
        which is written with it. `name` makes the id of a call. `busy`: plugins that get none now. `running`:
        how many attempts of each owner run, if they are to share the places (`has_place`)."""
        begun: list[Attempt] = []
        counts, places = Counter(running), most + (0 if running is None else running.total())
        full, now = {*busy}, self.clock()
        while (left := most - len(begun)) > 0:
            marks = ", ".join("?" * len(full))
            rows = self._connection.execute(
                f"SELECT * FROM deliveries WHERE state = 'queued' AND (due <= ? OR due > ?)"
                f" AND plugin NOT IN ({marks}) ORDER BY due, id LIMIT ?",
                (now, now + longest_pause(self._schedule), *full, left),
            ).fetchall()
            for row in map(DeliveryRow._make, rows):
                if running is None or has_place(owner_of(row), counts, places):
                    counts[owner_of(row)] += 1
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
        asked = CallRequest(row.plugin, row.hook, kind="hook", caller="deliveries")
        call = row_of(invocation, asked, digest(json.loads(row.event)))
        self._insert(call._replace(delivery=row.id, attempt=begun.attempt))
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
        self._connection.execute(
            "UPDATE deliveries SET state = ?, due = ?, ended = ?, code = ?, reason = ? WHERE id = ?",
            (state, due, None if due is not None else now, code, cut(reason), row.id),
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
        changed = row._replace(state="queued", round=row.attempt, due=self.clock(), ended=None)
        self._connection.execute(
            "UPDATE deliveries SET state = 'queued', round = ?, due = ?, ended = NULL WHERE id = ?",
            (changed.round, changed.due, delivery),
        )
        self._require_room_to_wait(changed)
        return changed

    def remove(self, delivery: str, caller: str, state: DeliveryState | None = None) -> DeliveryRow:
        """Remove a delivery that does not run, and note who did. `state`: only if it has this one. Raises
        DeliveryConflict."""
        row = self.delivery(delivery)
        if row is None:
            raise DeliveryConflict(f"there is no delivery {delivery!a}")
        if row.state == "running":
            raise DeliveryConflict(f"an attempt of the delivery {delivery!a} runs now")
        if state not in (None, row.state):
            raise DeliveryConflict(f"the delivery {delivery!a} is {row.state}, and not {state}")
        self._connection.execute("DELETE FROM deliveries WHERE id = ?", (delivery,))
        self.note(
            "removal",
            caller,
            row.plugin,
            json.dumps({"delivery": row.id, "hook": row.hook, "state": row.state}),
        )
        return row

    def delivery(self, name: str) -> DeliveryRow | None:
        found = self._connection.execute("SELECT * FROM deliveries WHERE id = ?", (name,)).fetchone()
        return None if found is None else DeliveryRow(*found)

    def deliveries(
        self, state: DeliveryState | None = None, most: int = 100, after: str | None = None
    ) -> list[DeliveryRow]:
        """The oldest deliveries first. `after`: those that follow the delivery of this id. The list ends
        early if it `is_long`."""
        rows = self._connection.execute(
            "SELECT * FROM deliveries WHERE (?1 IS NULL OR state = ?1) AND (?3 IS NULL OR (created, id) >"
            " (SELECT created, id FROM deliveries WHERE id = ?3)) ORDER BY created, id LIMIT ?2",
            (state, min(most, MOST_ROWS), after),
        )
        return _bounded(map(DeliveryRow._make, rows))

    def open_deliveries(self) -> dict[DeliveryState, int]:
        """How many deliveries there are, by state, of those that somebody may have to look at."""
        states: tuple[DeliveryState, ...] = ("queued", "running", "dead")
        query = "SELECT COUNT(*) FROM deliveries WHERE state = ?"
        return {state: self._connection.execute(query, (state,)).fetchone()[0] for state in states}

    def next_due(self, busy: Sequence[str] = (), after: float = 0.0) -> float | None:
        """When the next delivery is due, after a time, but for those of the plugins that are `busy`."""
        marks = ", ".join("?" * len(busy))
        query = (
            f"SELECT MIN(due) FROM deliveries WHERE state = 'queued' AND due > ? AND plugin NOT IN ({marks})"
        )
        (due,) = self._connection.execute(query, (after, *busy)).fetchone()
        return None if due is None else float(due)

    def dead_hooks(self) -> list[DeadHook]:
        """The hooks of the last dead letters, the newest first. Those of orgs are one row without a name.
        Few letters are looked through: one with a large event takes up to half a millisecond."""
        rows = self._connection.execute(
            "SELECT IIF(org, '', plugin) AS name, IIF(org, '', hook) AS of, COUNT(*), MAX(ended),"
            " IIF(org, '', substr(reason, 1, ?2)) FROM (SELECT plugin, hook, ended, reason,"
            " substr(plugin, 1, ?4) = ?3 OR poster LIKE 'org:%' AS org FROM deliveries WHERE state = 'dead'"
            " ORDER BY created DESC LIMIT ?1) GROUP BY name, of ORDER BY MAX(ended) DESC",
            (MOST_DEAD, _MOST_DEAD_TEXT, BINDING, len(BINDING)),
        )
        return [DeadHook(*row) for row in rows]

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
            (what, min(most, MOST_ROWS)),
        )
        return [AuditRow(*row) for row in rows]

    def audit_of_no_org(self, what: str, most: int) -> list[AuditRow]:
        """The same without rows of orgs, which are looked through to a bounded number."""
        rows = self._connection.execute(
            "SELECT * FROM (SELECT * FROM audit ORDER BY id DESC LIMIT ?3)"
            " WHERE what = ?1 AND caller NOT LIKE 'org:%' ORDER BY id DESC LIMIT ?2",
            (what, most, _MOST_LOOKED_THROUGH),
        )
        return [AuditRow(*row) for row in rows]

    # --- upkeep ---------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Give every call that was in flight its outcome, and make its delivery due again. `recovered` tells
        what there was."""
        codes: Counter[str] = Counter()
        dead: list[DeliveryRow] = []
        attempts = self._connection.execute(
            "SELECT deliveries.*, started FROM deliveries LEFT JOIN invocations ON invocations.delivery ="
            " deliveries.id AND invocations.attempt = deliveries.attempt WHERE state = 'running'"
        ).fetchall()
        for *row, started in attempts:
            code, why = (NOT_STARTED, _UNASKED) if started is None else (UNKNOWN, _LOST)
            if self._settle(DeliveryRow(*row), "retry", code, why) == "dead":
                dead.append(DeliveryRow(*row))
        for code, why, asked in ((UNKNOWN, _LOST, "NOT NULL"), (NOT_STARTED, _UNASKED, "NULL")):
            codes[code] = self._connection.execute(
                f"UPDATE invocations SET ended = ?, code = ?, record = ?,"
                f" repeated_by = {_FREED.format('started')} WHERE ended IS NULL AND started IS {asked}",
                (self.clock(), code, json.dumps({"message": why})),
            ).rowcount
        self.recovered = Recovered(codes[NOT_STARTED], codes[UNKNOWN], tuple(dead))

    def prune(self) -> None:
        """Remove what has ended and is too old, and more of it if the file is too large."""
        self._remove_before(self.clock() - self._bounds.days * _DAY_SECONDS)
        for (kind,) in self._connection.execute(f"SELECT DISTINCT {_AUDITED} FROM audit").fetchall():
            self._connection.execute(
                f"DELETE FROM audit WHERE {_AUDITED} = ?1 AND id <="
                f" (SELECT id FROM audit WHERE {_AUDITED} = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (kind, _MOST_AUDITED),
            )
        if self.used_bytes() <= self._bounds.size * _MOST_USED:
            return
        target = self._bounds.size * _LOWERED_TO
        shares = self._removable_bytes()
        while shares and (excess := self.used_bytes() - target) > 0:
            # Of the owner that has most, and half of that at most, so that none pushes out others.
            largest = max(shares, key=lambda each: shares[each])
            removed = self._remove_oldest(*largest, min(excess, shares[largest] / 2))
            shares[largest] -= removed
            if removed <= 0 or shares[largest] <= 0:
                del shares[largest]

    def _remove_before(self, when: float) -> None:
        for each in _ROOMS.values():
            # The clock may have been set forward, or the machine was off, since it was accepted.
            since = "" if each is _AUDIT else " AND ended < :when"
            self._connection.execute(
                f"DELETE FROM {each.table} WHERE {each.at} < :when AND {each.condition} AND NOT {each.kept}"
                + since,
                {"when": when, "kept": self._kept_since()},
            )

    def _removable_bytes(self) -> Counter[tuple[str, str, str]]:
        """How much there is, by room, owner and plugin."""
        found = self._connection.execute(
            f"SELECT 'audit', {_AUDITED}, '', SUM({_AUDIT.size}) FROM audit GROUP BY 2"
            " UNION ALL SELECT room, owner, plugin, bytes FROM shares WHERE room IN ('calls', 'ended')"
        )
        return Counter({(room, owner, plugin): size for room, owner, plugin, size in found})

    def _remove_oldest(self, room: str, owner: str, plugin: str, bytes_wanted: float) -> int:
        """Returns how many bytes the removed rows had."""
        rows = _ROOMS[room]
        gone: list[tuple[str | int]] = []
        stripped: list[tuple[str | int]] = []
        removed = 0
        for name, size, is_kept in self._connection.execute(
            f"SELECT id, {rows.size}, {rows.kept} FROM {rows.table}"
            f" WHERE {rows.of} AND {rows.condition} ORDER BY {rows.at}",
            {"kept": self._kept_since(), "owner": owner, "plugin": plugin},
        ):
            (stripped if is_kept else gone).append((name,))
            removed += size
            if removed >= bytes_wanted:
                break
        self._connection.executemany(f"DELETE FROM {rows.table} WHERE id = ?", gone)
        if stripped:
            query = "UPDATE invocations SET record = NULL, answer = NULL WHERE id = ?"
            self._connection.executemany(query, stripped)
        return removed


_Row = TypeVar("_Row", InvocationRow, DeliveryRow)


def _bounded(rows: Iterable[_Row]) -> list[_Row]:
    found: list[_Row] = []
    size = 0
    for row in rows:
        found.append(row)
        size += _text_bytes(row)
        if size >= MOST_LIST_BYTES:
            break
    return found


def is_long(rows: Sequence[InvocationRow] | Sequence[DeliveryRow]) -> bool:
    """Whether a list ended early, though there may be more."""
    return sum(map(_text_bytes, rows)) >= MOST_LIST_BYTES


def _text_bytes(row: InvocationRow | DeliveryRow) -> int:
    return sum(len(each) for each in row if isinstance(each, str))


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
    kind = DatabaseKind("ledger", APPLICATION_ID, migrations, LedgerUnusable)

    def make(opened: OpenDatabase) -> LedgerFile:
        return LedgerFile(opened, schedule=schedule, bounds=bounds, clock=clock, chance=chance)

    return open_sqlite(
        path, kind, make, bounds.size, (LedgerFile.recover, LedgerFile.prune), busy_seconds=busy_seconds
    )
