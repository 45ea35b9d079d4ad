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

MIGRATIONS: Sequence[Sequence[str]] = (_FIRST,)
