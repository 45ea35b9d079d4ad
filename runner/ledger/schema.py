"""The tables of the ledger, as steps from each version of the file to the next.

A step that was published never changes: a file of any earlier version becomes one of the current version
by the steps that it lacks, all in one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

# In the header of the file. It tells a ledger from the database of another program.
APPLICATION_ID = 0x706C7267

_FIRST = (
    """CREATE TABLE invocations (
        id TEXT PRIMARY KEY, plugin TEXT NOT NULL, tool TEXT NOT NULL, kind TEXT NOT NULL,
        caller TEXT NOT NULL, key TEXT, effect TEXT NOT NULL,
        delivery TEXT, attempt INTEGER,
        accepted REAL NOT NULL, started REAL, ended REAL, code TEXT,
        input_digest TEXT NOT NULL, input_bytes INTEGER NOT NULL,
        output_digest TEXT, output_bytes INTEGER,
        record TEXT, answer TEXT, repeated_by TEXT
    ) WITHOUT ROWID""",
    """CREATE UNIQUE INDEX invocations_key ON invocations (caller, plugin, key)
        WHERE key IS NOT NULL AND repeated_by IS NULL""",
    "CREATE UNIQUE INDEX invocations_attempt ON invocations (delivery, attempt) WHERE delivery IS NOT NULL",
    "CREATE INDEX invocations_in_flight ON invocations (accepted) WHERE ended IS NULL",
    "CREATE INDEX invocations_accepted ON invocations (accepted)",
    """CREATE TABLE deliveries (
        id TEXT PRIMARY KEY, plugin TEXT NOT NULL, hook TEXT NOT NULL,
        event TEXT NOT NULL, context TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'acked', 'dead')),
        attempt INTEGER NOT NULL, round INTEGER NOT NULL,
        created REAL NOT NULL, due REAL, ended REAL, code TEXT, reason TEXT
    ) WITHOUT ROWID""",
    "CREATE INDEX deliveries_due ON deliveries (due) WHERE state = 'queued'",
    "CREATE INDEX deliveries_state ON deliveries (state, created)",
    """CREATE TABLE audit (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL,
        what TEXT NOT NULL, caller TEXT NOT NULL, plugin TEXT NOT NULL, detail TEXT NOT NULL
    )""",
    "CREATE INDEX audit_at ON audit (at)",
)

# What a row takes in the file: its texts, its entries in indices, what pages leave free, and a page of its
# own for a long one. Measured: rows take 0.5 to 1.1 of this.
_KEPT_KEY = (
    "(550 + 2 * LENGTH(CAST({0}.caller || {0}.plugin || {0}.key AS BLOB)) + LENGTH(CAST({0}.tool AS BLOB))"
    " + IIF(LENGTH(CAST({0}.caller || {0}.plugin || {0}.key || {0}.tool AS BLOB)) > 400, 4096, 0))"
)
_WAITS = (
    "(350 + LENGTH(CAST({0}.id || {0}.plugin || {0}.hook || {0}.event || {0}.context AS BLOB))"
    " + IIF(LENGTH({0}.event || {0}.context) > 400, 4096, 0))"
)
_ENDED_CALL = "(300 + IFNULL(LENGTH({0}.record), 0) + IFNULL(LENGTH({0}.answer), 0))"
_ADD = """INSERT INTO shares VALUES ('{room}', NEW.{owner}, NEW.plugin, {size})
    ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes;"""
_TAKE = """UPDATE shares SET bytes = bytes - {size}
        WHERE room = '{room}' AND owner = OLD.{owner} AND plugin = OLD.plugin;
    DELETE FROM shares
        WHERE room = '{room}' AND owner = OLD.{owner} AND plugin = OLD.plugin AND bytes <= 0;"""


def _counted(table: str, room: str, owner: str, size: str, counts: str, changes: str) -> list[str]:
    """Triggers, so that `shares` is right whatever removes rows, and is undone with them; to add up the
    texts of all rows would take seconds. `counts`: which rows are counted. `changes`: the columns that decide
    it."""
    add = _ADD.format(room=room, owner=owner, size=size.format("NEW"))
    take = _TAKE.format(room=room, owner=owner, size=size.format("OLD"))
    old, new = counts.format("OLD"), counts.format("NEW")
    return [
        f"CREATE TRIGGER {room}_made AFTER INSERT ON {table} WHEN {new} BEGIN {add} END",
        f"CREATE TRIGGER {room}_gone AFTER DELETE ON {table} WHEN {old} BEGIN {take} END",
        f"CREATE TRIGGER {room}_more AFTER UPDATE OF {changes} ON {table} WHEN {new} BEGIN {add} END",
        f"CREATE TRIGGER {room}_less AFTER UPDATE OF {changes} ON {table} WHEN {old} BEGIN {take} END",
        (
            f"INSERT INTO shares SELECT '{room}', {owner}, plugin, SUM({size.format(table)}) FROM {table}"
            f" WHERE {counts.format(table)} GROUP BY {owner}, plugin"
        ),
    ]


# Who posted a delivery, and how much of each room is whose. Records had no bound before.
_SECOND = (
    "ALTER TABLE deliveries ADD COLUMN poster TEXT NOT NULL DEFAULT ''",
    """UPDATE deliveries SET poster = 'org:' || IFNULL(json_extract(context, '$.org_id'), '')
        WHERE plugin LIKE 'binding:%'""",
    """UPDATE invocations SET record = NULL WHERE LENGTH(record) > 65536""",
    "UPDATE deliveries SET reason = SUBSTR(reason, 1, 16384) WHERE LENGTH(reason) > 16384",
    "CREATE INDEX invocations_keys ON invocations (ended) WHERE key IS NOT NULL",
    """CREATE TABLE shares (
        room TEXT NOT NULL, owner TEXT NOT NULL, plugin TEXT NOT NULL, bytes INTEGER NOT NULL,
        PRIMARY KEY (room, owner, plugin)
    ) WITHOUT ROWID""",
    *_counted(
        table="invocations",
        room="keys",
        owner="caller",
        size=_KEPT_KEY,
        counts="({0}.key IS NOT NULL AND {0}.repeated_by IS NULL)",
        changes="repeated_by",
    ),
    *_counted(
        table="invocations",
        room="calls",
        owner="caller",
        size=_ENDED_CALL,
        counts="({0}.ended IS NOT NULL)",
        changes="ended, record, answer",
    ),
    *_counted(
        table="deliveries",
        room="waiting",
        owner="poster",
        size=_WAITS,
        counts="({0}.state IN ('queued', 'running'))",
        changes="state",
    ),
    *_counted("deliveries", "ended", "poster", _WAITS, "({0}.state IN ('acked', 'dead'))", "state"),
)

# `started` is written when the plugin is asked. Before, it was written at the end, also of calls that never
# came so far, and their keys were not free. Of calls that were in flight nobody knows.
# A door that lost its fleet does not know whether a durable call was stored there.
_CAUSE = "IIF(json_valid(record), json_extract(record, '$.outcome.cause'), '')"
_NOT_ASKED = (
    "((code IN ('overloaded', 'quarantined', 'launch_failed', 'policy_denied', 'policy_invalid',"
    f" 'manifest_invalid', 'sandbox_unavailable') AND {_CAUSE} IS NOT 'no_fleet')"
    f" OR (code = 'cancelled' AND {_CAUSE} = 'stopped'))"
)
_THIRD = (
    "UPDATE invocations SET started = accepted WHERE ended IS NULL",
    f"UPDATE invocations SET started = NULL WHERE started IS NOT NULL AND {_NOT_ASKED}",
    f"""UPDATE invocations SET repeated_by = ''
        WHERE key IS NOT NULL AND repeated_by IS NULL AND {_NOT_ASKED}""",
)

MIGRATIONS: Sequence[Sequence[str]] = (_FIRST, _SECOND, _THIRD)
