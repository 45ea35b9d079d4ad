"""The desk: every call goes through the ledger and then to the supervisor, and each has one outcome."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.ledger.file import Acceptance, LedgerUnusable
from runner.ledger.ledger import Ledger
from runner.ledger.rows import (
    UNKNOWN,
    Digest,
    Effect,
    EndOfCall,
    InvocationRow,
    KeyReused,
    KeysFull,
    digest,
    record_of,
    row_of,
)
from runner.lifecycle.exceptions import UnknownPlugin
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest, CallResult
from runner.protocol.memory import size_of
from runner.protocol.secrets import Secrets
from runner.serve.alerts import Alerts
from runner.serve.metrics import Metrics
from runner.serve.plugins import DoorPlugins
from runner.serve.refusal import STATUS, Refused, error_document, outcome_error
from runner.serve.roster import Roster
from runner.session.account import CallAccount, open_account

MOST_CALLS = 1024
_LARGE_BYTES = 256 << 10  # in memory
_KEYS_SECONDS = 600.0  # until a caller whose keys have no room comes back
_UNRECORDED = "the call cannot be recorded, so it is not made"
_GIVEN_UP = Outcome("cancelled", "call", "the caller gave the call up", "given_up")
_CANCELLED = Outcome("cancelled", "call", "the call was cancelled by DELETE", "deleted")
_ENDING = Outcome("cancelled", "call", "the daemon ends", "draining")
_BUG = Outcome("internal", "call", "a bug of the daemon; its stderr says which")

Value = TypeVar("Value")


class CallTarget(Protocol):
    """What is called in place of a plugin of the roster."""

    effect: Effect
    invocation: dict[str, Any] | None  # the contract's record of the call, when it is over, however it ended

    def accept(self, call: str, input_bytes: int) -> None:
        """The call is in the ledger, with this id. `make` or `abandon` follows."""

    async def make(self, request: CallRequest) -> CallResult: ...
    async def abandon(self) -> None: ...
    def secrets(self) -> Secrets: ...


class CallAnswer(NamedTuple):
    """What the caller gets, whatever its call came to: the status and the document, with the headers."""

    status: int
    document: dict[str, Any]
    headers: Mapping[str, str] = {}

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def value(self) -> Any:
        return self.document.get("value")

    @property
    def error(self) -> Mapping[str, Any]:
        """With code, phase, cause, message and hint; empty: it is ok."""
        return {} if self.is_ok else self.document.get("error", {})

    @property
    def data(self) -> Any:
        """Of the plugin's own error."""
        return self.document.get("data")


class _InFlight(NamedTuple):
    scope: trio.CancelScope
    caller: str
    deleted: list[bool]
    target: CallTarget | None


class Desk:
    def __init__(
        self,
        supervisor: DoorPlugins,
        ledger: Ledger,
        roster: Roster,
        metrics: Metrics,
        alerts: Alerts | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._roster = roster
        self._ledger = ledger
        self._metrics = metrics
        self._alerts = alerts or Alerts()
        self._in_flight: dict[str, _InFlight] = {}
        self.draining = False

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def calls_of(self, caller: str) -> int:
        """How many calls of a caller are in flight."""
        return sum(each.caller == caller for each in self._in_flight.values())

    async def accept(
        self, request: CallRequest, target: CallTarget | None = None
    ) -> InvocationRow | CallAnswer:
        """Write the call to the ledger: then it has to be made with `make`. Or the answer of an earlier call
        with its key. `target`: who gets it; None: the plugin of that name. Raises Refused; then nothing was
        accepted."""
        if self.draining:
            raise Refused(503, "draining", "the daemon ends and takes no calls", retry_after=5)
        if len(self._in_flight) >= MOST_CALLS:
            message = f"{MOST_CALLS} calls are in flight, which is the most"
            raise Refused(429, "overloaded", message, "come back later", retry_after=1)
        own_id = f"call_{secrets.token_hex(12)}"
        # From now on it counts: requests that come at once must not be more than there may be.
        self._in_flight[own_id] = _InFlight(trio.CancelScope(), request.caller, [], target)
        accepted = None
        try:
            accepted = await self._accept(own_id, request, target)
        finally:
            if accepted is None or not accepted.fresh:
                del self._in_flight[own_id]
        if not accepted.fresh:
            return _earlier(accepted.row)
        if target is not None:
            target.accept(own_id, accepted.row.input_bytes)
        return accepted.row

    async def _accept(self, own_id: str, request: CallRequest, target: CallTarget | None) -> Acceptance:
        """Raises Refused."""
        given = await off_loop_if_large(digest, [request.input, dict(request.context or {})])
        effect = self._roster.effect(request.plugin, request.tool) if target is None else target.effect
        try:
            return await self._ledger.accept(row_of(own_id, request, given, effect))
        except KeyReused as reused:
            raise Refused(409, "key_reused", str(reused), "use a new key for each call") from None
        except KeysFull as full:
            hint = "come back later, or call without a key; runner serve --ledger-size has room for more keys"
            self._alerts.tell("full share", f"{full}; {hint}")
            raise Refused(429, "overloaded", str(full), hint, retry_after=_KEYS_SECONDS) from None
        except LedgerUnusable as unusable:
            message = f"{_UNRECORDED}: {unusable}"
            raise Refused(503, "ledger", message, unusable.hint, retry_after=5) from None

    async def make(self, row: InvocationRow, request: CallRequest) -> CallAnswer:
        """Make an accepted call. Its outcome is in the ledger when this returns or raises."""
        began = time.monotonic()
        held = self._in_flight[row.id]
        target = held.target
        hiders = [self._secrets(row.plugin, target)]
        answer: CallAnswer | None = None
        outcome = _BUG  # until something else is known
        invocation: dict[str, Any] | None = None
        value: Any = None
        account = CallAccount()
        try:
            with open_account(partial(self._ledger.ask, row.id)) as account, held.scope:
                result = await (target or self._supervisor).make(request)
                outcome, value, invocation = Outcome("ok", "call", ""), result.value, result.invocation
                answer = CallAnswer(200, {"id": row.id, "value": value, "invocation": invocation})
            if answer is None:
                outcome = _CANCELLED if held.deleted else _GIVEN_UP
                answer = failed(outcome, id=row.id)
        except (PluginError, PluginFailure) as error:
            outcome, invocation = error.outcome, error.invocation
            answer = failed_answer(row.id, error)
        except UnknownPlugin as unknown:  # it was removed meanwhile
            outcome = Outcome("launch_failed", "call", str(unknown), "unknown_plugin")
            answer = failed(outcome, id=row.id)._replace(status=404)
        except LedgerUnusable as unusable:
            outcome, answer = _not_asked(row.id, unusable)
        except trio.Cancelled:
            outcome = _ENDING if self.draining else _GIVEN_UP  # a session or a certificate has ended
            raise
        finally:
            del self._in_flight[row.id]
            if target is not None:
                invocation = target.invocation
            body: str | None = None
            with trio.CancelScope(shield=True):
                output = await off_loop_if_large(digest, value) if outcome.code == "ok" else Digest()
                hiders.append(self._secrets(row.plugin, target))  # they may have changed meanwhile
                keeps = row.key is not None and account.asked is not None
                if keeps and answer is not None and not await _tells(answer, hiders):
                    body = await off_loop_if_large(json.dumps, [answer.status, answer.document])
                record = record_of(outcome, invocation, request.trace)
                await self._ledger.end(row.id, EndOfCall(outcome.code, output, record, body, account.asked))
            self._metrics.call(row.plugin, outcome.code, outcome.cause, time.monotonic() - began)
        return answer

    def _secrets(self, plugin: str, target: CallTarget | None) -> Secrets:
        return self._roster.secrets(plugin) if target is None else target.secrets()

    async def abandon(self, row: InvocationRow) -> None:
        """End a call that was accepted, if it was not made."""
        if (found := self._in_flight.pop(row.id, None)) is not None:
            if found.target is not None:
                await found.target.abandon()
            outcome = _ENDING if self.draining else _GIVEN_UP
            record = record_of(outcome, None)
            await self._ledger.end(row.id, EndOfCall(outcome.code, Digest(), record, None, None))
            self._metrics.call(row.plugin, outcome.code, outcome.cause, 0.0)

    def give_up(self, call: str) -> None:
        """The caller of a call has gone."""
        if (found := self._in_flight.get(call)) is not None:
            found.scope.cancel()

    def cancel(self, call: str, caller: str | None) -> bool:
        """Cancel a call in flight, of this caller or (None) of anybody. Returns False if there is none."""
        found = self._in_flight.get(call)
        if found is None or caller not in (None, found.caller):
            return False
        found.deleted.append(True)
        found.scope.cancel()
        return True


def _not_asked(call: str, unusable: LedgerUnusable) -> tuple[Outcome, CallAnswer]:
    """The ledger cannot be written any more, so the plugin is not asked."""
    message = f"{_UNRECORDED}: {unusable}"
    refused = Refused(503, "ledger", message, unusable.hint, retry_after=5, more={"id": call})
    outcome = Outcome("internal", "call", message, "ledger", unusable.hint)
    return outcome, refused_answer(refused)


async def off_loop_if_large(function: Callable[[Any], Value], value: Any) -> Value:
    """Call a function that takes as long as the JSON value is large. A large one must not hold up others."""
    size = size_of(value)
    if size is not None and size < _LARGE_BYTES:
        return function(value)
    return await trio.to_thread.run_sync(function, value)


async def _tells(answer: CallAnswer, hiders: list[Secrets]) -> bool:
    """Whether the answer has a secret in it. Its caller gets it all the same; the ledger does not."""

    def differs(value: Any) -> bool:
        return any(hider.hide_in(value) is not value for hider in hiders)

    return any(hiders) and await off_loop_if_large(differs, answer.document)


def _earlier(row: InvocationRow) -> CallAnswer:
    """The answer to a call whose key is known."""
    if row.ended is None:
        hint = "wait for its answer; then the same key gets it too"
        refused = error_document(
            "in_flight", f"the call {row.id} with this key is in flight", hint, id=row.id
        )
        return CallAnswer(409, refused, {"Retry-After": "1"})
    replayed = {"Idempotency-Replayed": "true"}
    if row.code == UNKNOWN:
        message = f"the daemon ended while the call {row.id} with this key ran, and nobody knows what it did"
        hint = f"its effect class is {row.effect}, so it is not repeated; find out, and call with a new key"
        return CallAnswer(409, error_document(UNKNOWN, message, hint, id=row.id), replayed)
    if row.answer is None:
        message = f"the call {row.id} with this key ended with {row.code}, and its answer was not kept"
        message += ": it is too large, has a secret in it, or made room for others"
        return CallAnswer(410, error_document("answer_not_kept", message, id=row.id), replayed)
    status, document = json.loads(row.answer)
    return CallAnswer(status, document, replayed)


def failed(outcome: Outcome, **more: Any) -> CallAnswer:
    """`more`: further keys of the document."""
    return CallAnswer(STATUS[outcome.code], outcome_error(outcome, **more))


def refused_answer(refused: Refused) -> CallAnswer:
    return CallAnswer(refused.status, refused.document(), refused.headers())


def failed_answer(call: str, error: PluginError | PluginFailure) -> CallAnswer:
    more: dict[str, Any] = {"id": call, "invocation": error.invocation}
    if isinstance(error, PluginError):
        more["data"] = error.data
    more |= getattr(error, "also", {})
    after = getattr(error, "retry_after", None)
    headers = {} if after is None else {"Retry-After": str(max(1, round(after)))}
    return failed(error.outcome, **more)._replace(headers=headers)
