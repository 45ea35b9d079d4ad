"""The values that go into the ledger and come out of it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from runner.ledger.sqlite_file import OrderRefusal
from runner.outcome import Outcome, outcome_document
from runner.protocol.calls import CallRequest

# How a call ends if its daemon died after the plugin was asked: nobody knows what it did.
UNKNOWN = "unknown"
# How it ends if the plugin had not been asked: it did nothing, and may be repeated.
NOT_STARTED = "not_started"

Effect = Literal["read_only", "idempotent_write", "non_idempotent_write", "unknown"]
# A call with one of these effects may run again with the same key after its outcome was lost.
REPEATABLE: tuple[Effect, ...] = ("read_only", "idempotent_write")

DeliveryState = Literal["queued", "running", "acked", "dead"]
Verdict = Literal["acked", "retry", "dead"]


class Digest(NamedTuple):
    """What the ledger keeps of what a call was given, which is [input, context] at the door, and of its
    output."""

    digest: str = ""  # SHA-256 of the canonical JSON, in hexadecimal
    size: int = 0  # of that JSON, in bytes


def digest(value: Any) -> Digest:
    raw = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return Digest(hashlib.sha256(raw).hexdigest(), len(raw))


class EndOfCall(NamedTuple):
    """How a call ended."""

    code: str  # of its outcome (runner/outcome.py)
    output: Digest = Digest()
    record: str = "{}"  # JSON
    answer: str | None = None  # JSON, for a caller that repeats its key
    started: float | None = None  # when the plugin was asked; None: it was not, and the call's key is free


MOST_TEXT = 16 << 10  # characters of a text of a plugin's: a message, a hint, a reason
MOST_RECORD = 64 << 10  # bytes of a record
_SHORT_TEXT = 1000  # characters, of which each of five texts may take twelve bytes in JSON


def cut(text: str) -> str:
    """A text as the ledger keeps it. It says so if it was longer."""
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]} … (cut here: it has {len(text)} characters)"


def record_of(outcome: Outcome, invocation: Any, trace: Mapping[str, str] | None = None) -> str:
    """The record of a call, in JSON. `invocation`: that of the contract, which is left out if it is large.
    `trace`: where the call belongs in its caller's."""
    told = {name: cut(text) for name, text in outcome_document(outcome).items()}
    traced = {"trace": dict(trace)} if trace else {}
    record = json.dumps({"outcome": told, "invocation": invocation, **traced})
    if len(record) <= MOST_RECORD:
        return record
    told = {name: text[:_SHORT_TEXT] for name, text in told.items()}
    left_out = f"the rest of a record of {len(record)} bytes"
    return json.dumps({"outcome": told, "invocation": None, "left_out": left_out, **traced})


class InvocationRow(NamedTuple):
    """A row of the table. The fields are its columns, in their order."""

    id: str
    plugin: str
    tool: str
    kind: str
    caller: str
    key: str | None = None
    effect: Effect = "unknown"
    delivery: str | None = None
    attempt: int | None = None
    accepted: float = 0.0
    started: float | None = None  # when the plugin was asked; written before it is
    ended: float | None = None
    code: str | None = None
    input_digest: str = ""
    input_bytes: int = 0
    output_digest: str | None = None
    output_bytes: int | None = None
    record: str | None = None
    answer: str | None = None
    repeated_by: str | None = None  # the call that has its key now; empty: none, because it did nothing


def row_of(call: str, request: CallRequest, given: Digest, effect: Effect = "unknown") -> InvocationRow:
    """The row of a call that has not begun. `given`: of its input."""
    return InvocationRow(
        *(call, request.plugin, request.tool, request.kind or "", request.caller, request.key, effect),
        input_digest=given.digest,
        input_bytes=given.size,
    )


class Delivery(NamedTuple):
    """An event for one hook of one plugin."""

    id: str
    plugin: str
    hook: str
    event: str  # JSON
    context: str = "{}"  # JSON
    poster: str = ""  # the caller whose it is: a caller's name, or org:ID. Empty: of an earlier version


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
    poster: str = ""


def hook_context(
    delivery: Delivery | DeliveryRow, known: Sequence[str], attempt: int, invocation: str
) -> dict[str, Any] | None:
    """The context of an attempt. `known`: the keys that the contract sends along with a hook."""
    context: dict[str, Any] = json.loads(delivery.context)
    own = {"delivery_id": delivery.id, "attempt": attempt, "invocation_id": invocation}
    return {**context, **{key: value for key, value in own.items() if key in known}} or None


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


class KeysFull(LedgerRefusal):
    """The keys of this caller for this plugin have taken their share of the room, and none may be forgotten
    yet."""


class DeliveriesFull(LedgerRefusal):
    """So much of this poster's waits for this plugin that it would take the room of others."""


class DeliveryTooLarge(LedgerRefusal):
    """It takes more room than one poster's deliveries may have, even if nothing else waits."""


class DeliveryConflict(LedgerRefusal):
    """There is another delivery with this id, or it is not in a state in which this can be done."""
