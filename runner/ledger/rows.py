"""The values that go into the ledger and come out of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any, Literal

from runner.ledger.sqlite_file import OrderRefusal
from sandbox.speed.value import NamedTuple

# How a call ends if its daemon died while it ran: nobody knows what it did.
UNKNOWN = "unknown"

Effect = Literal["read_only", "idempotent_write", "non_idempotent_write", "unknown"]
# A call with one of these effects may run again with the same key after its outcome was lost.
REPEATABLE: tuple[Effect, ...] = ("read_only", "idempotent_write")

# Outcomes of calls about which the plugin was not asked.
NEVER_RAN = ("overloaded", "quarantined")

DeliveryState = Literal["queued", "running", "acked", "dead"]
Verdict = Literal["acked", "retry", "dead"]


class Digest(NamedTuple):
    """What the ledger keeps of an input or an output."""

    digest: str = ""  # SHA-256 of the canonical JSON, in hexadecimal
    size: int = 0  # of that JSON, in bytes


def digest(value: Any) -> Digest:
    raw = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return Digest(hashlib.sha256(raw).hexdigest(), len(raw))


class Accepted(NamedTuple):
    """A call as it is written before it runs."""

    id: str
    plugin: str
    tool: str
    kind: str
    caller: str
    input: Digest
    effect: Effect = "unknown"
    key: str | None = None  # the caller's idempotency key


class EndOfCall(NamedTuple):
    """How a call ended."""

    code: str  # of its outcome (runner/outcome.py)
    output: Digest = Digest()
    record: str = "{}"  # JSON
    answer: str | None = None  # JSON, for a caller that repeats its key
    started: float | None = None  # when the plugin was asked; None: it was not


class InvocationRow(NamedTuple):
    """A row of the table. The fields are its columns, in their order."""

    id: str
    plugin: str
    tool: str
    kind: str
    caller: str
    key: str | None
    effect: Effect
    delivery: str | None
    attempt: int | None
    accepted: float
    started: float | None = None
    ended: float | None = None
    code: str | None = None
    input_digest: str = ""
    input_bytes: int = 0
    output_digest: str | None = None
    output_bytes: int | None = None
    record: str | None = None
    answer: str | None = None
    repeated_by: str | None = None


class Delivery(NamedTuple):
    """An event for one hook of one plugin."""

    id: str
    plugin: str
    hook: str
    event: str  # JSON
    context: str = "{}"  # JSON


def hook_id(event: str, plugin: str, hook: str, *, named: bool = False) -> str:
    """The id of the delivery to one hook of an event that goes to several. `named`: it goes to hooks of this
    plugin only."""
    key = [plugin, hook, "named"] if named else [plugin, hook]
    return f"{event}~{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}"


BINDING = "binding:"  # begins the name of what an org has bound; it stands in place of a plugin's name
_ORG = "org:"


def owner_of(delivery: Delivery | DeliveryRow) -> str:
    """Who has to share with others: a plugin, or an org with all its bindings, of which it makes many."""
    if not delivery.plugin.startswith(BINDING):
        return delivery.plugin
    return f"{_ORG}{json.loads(delivery.context).get('org_id', '')}"


def has_place(owner: str, running: Counter[str], places: int) -> bool:
    """Whether one more attempt for an owner may begin. It gets half of the places that others leave, so that
    hooks that never answer do not keep those of others waiting."""
    own = running[owner]
    return own < max(1, (places - (running.total() - own)) // 2)


class DeliveryRow(NamedTuple):
    """A row of the table. The fields are its columns, in their order."""

    id: str
    plugin: str
    hook: str
    event: str
    context: str
    state: DeliveryState
    attempt: int  # the number of the last attempt; 0: none was begun
    round: int  # the number of the last attempt before this round
    created: float
    due: float | None
    ended: float | None
    code: str | None
    reason: str | None


class AuditRow(NamedTuple):
    id: int
    at: float
    what: str
    caller: str
    plugin: str
    detail: str  # JSON


class LedgerRefusal(OrderRefusal):
    """The ledger is in order, and does not do what was asked."""


class KeyReused(LedgerRefusal):
    """The idempotency key belongs to another call of the same caller."""


class DeliveriesFull(LedgerRefusal):
    """So much waits for delivery that it would take the room of other rows."""


class DeliveryTooLarge(LedgerRefusal):
    """It takes more room than all deliveries together may have."""


class DeliveryConflict(LedgerRefusal):
    """There is another delivery with this id, or it is not in a state in which this can be done."""
