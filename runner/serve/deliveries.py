"""Delivers events to hooks: at least once, retried by the schedule, and never one delivery twice at once."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.ledger.file import Attempt, LedgerUnusable
from runner.ledger.ledger import Ledger
from runner.ledger.rows import Delivery, DeliveryRow, EndOfCall, Verdict, hook_context, owner_of, record_of
from runner.lifecycle.exceptions import UnknownPlugin
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest, CallResult
from runner.serve.alerts import Alerts
from runner.serve.desk import CallTarget
from runner.serve.metrics import Metrics
from runner.serve.plugins import DoorPlugins
from runner.session.account import CallAccount, open_account

_MOST_AT_ONCE = 16
_MOST_SLEEP_SECONDS = 60.0  # the clock of the machine may be set meanwhile
_LEDGER_SECONDS = 1.0
_MOST_ID = 256
_MOST_WHY = 300  # characters, in a line about a dead letter
_MOST_EVENT_ID = 200  # the ids of deliveries to several hooks are longer
_CALLER = "deliveries"
_HELD = ("pending", "stopped")  # by a person, who will start it again: its deliveries wait


class HookTarget(CallTarget, Protocol):
    """What gets a delivery in place of a plugin of the roster."""

    hook_keys: Sequence[str]  # that its contract sends along


class Deliveries:
    def __init__(
        self,
        supervisor: DoorPlugins,
        ledger: Ledger,
        metrics: Metrics,
        context_keys: Callable[[str], Sequence[str]],
        target_of: Callable[[Attempt], Awaitable[HookTarget | None]] | None = None,
        alerts: Alerts | None = None,
    ) -> None:
        """`context_keys`: what the contract of a plugin, by its name, sends along with a hook. `target_of`:
        who gets a delivery; None: the plugin of that name."""
        self._supervisor = supervisor
        self._ledger = ledger
        self._metrics = metrics
        self._context_keys = context_keys
        self._target_of = target_of
        self._alerts = alerts or Alerts()
        self._running: Counter[str] = Counter()  # attempts, by owner
        self._news = trio.Event()

    def wake(self) -> None:
        """A delivery may be due."""
        self._news.set()

    async def run(self) -> None:
        """Deliver until this task is cancelled. Attempts that run then are retried after the next start."""
        async with trio.open_nursery() as nursery:
            while True:
                self._news = trio.Event()
                try:
                    seconds = await self._begin(nursery)
                except LedgerUnusable:
                    seconds = _LEDGER_SECONDS  # /health tells it
                with trio.move_on_after(seconds):
                    await self._news.wait()

    async def _begin(self, nursery: trio.Nursery) -> float:
        """Begin what is due. Returns how long nothing else is."""
        held = tuple(each.name for each in self._supervisor.plugins() if each.state in _HELD)
        free = _MOST_AT_ONCE - self._running.total()
        if free <= 0:
            return _MOST_SLEEP_SECONDS  # the end of an attempt wakes it
        before = time.time()
        begun = await self._ledger.claim(free, _call_id, held, Counter(self._running))
        for attempt in begun:
            self._running[owner_of(attempt.delivery)] += 1
            nursery.start_soon(self._attempt, attempt)
        if len(begun) == free:
            return _MOST_SLEEP_SECONDS
        # What was due before has begun, or has to wait for its owner's other attempts, whose end wakes this.
        due = await self._ledger.next_due(held, before)
        return _MOST_SLEEP_SECONDS if due is None else max(0.0, min(due - time.time(), _MOST_SLEEP_SECONDS))

    async def _attempt(self, attempt: Attempt) -> None:
        verdict: Verdict = "retry"
        outcome = Outcome("cancelled", "call", "the daemon ends", "draining")
        invocation: dict[str, Any] | None = None
        began, row = time.monotonic(), attempt.delivery
        account = CallAccount()
        try:
            with open_account(partial(self._ledger.ask, attempt.invocation)) as account:
                result = await self._call(attempt)
            verdict, outcome, invocation = "acked", Outcome("ok", "call", ""), result.invocation
        except (PluginError, PluginFailure) as error:
            outcome, invocation = error.outcome, error.invocation
            verdict = verdict_of(error)
        except UnknownPlugin as unknown:
            outcome = Outcome("launch_failed", "call", str(unknown), "unknown_plugin")
        except Exception as error:  # noqa: BLE001 -- a bug, of this delivery only: the record has it
            outcome = Outcome("internal", "call", f"{type(error).__name__}: {error}")
        finally:
            self._running -= Counter([owner_of(row)])
            record = record_of(outcome, invocation)
            with trio.CancelScope(shield=True):
                ended = EndOfCall(outcome.code, record=record, started=account.asked)
                state = await self._ledger.settle(attempt, verdict, ended, outcome.message)
            if state == "dead" or (state is None and verdict == "dead"):
                self._alerts.tell("dead letter", dead_letter(row, outcome.message))
            self._metrics.delivery(verdict)
            self._metrics.call(row.plugin, outcome.code, outcome.cause, time.monotonic() - began)
            self.wake()

    async def _call(self, attempt: Attempt) -> CallResult:
        row = attempt.delivery
        target = None if self._target_of is None else await self._target_of(attempt)
        known = self._context_keys(row.plugin) if target is None else target.hook_keys
        context, event = hook_context(row, known, attempt.number, attempt.invocation), json.loads(row.event)
        call = CallRequest(row.plugin, row.hook, event, "hook", context=context, caller=_CALLER)
        return await (target or self._supervisor).make(call)


def dead_letter(row: DeliveryRow, why: str) -> str:
    """The line about a delivery that is not tried again."""
    message = (
        f"the delivery {row.id} to the hook {row.hook} of {row.plugin} is dead after attempt {row.attempt}"
    )
    return f"{message}: {why[:_MOST_WHY]}; POST /deliveries/ID/repeat repeats it"


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def verdict_of(error: PluginError | PluginFailure) -> Verdict:
    """By the contract's own record, if it has one: a failure that repeating does not heal is dead at once."""
    status = (error.invocation or {}).get("status")
    if status is not None:
        return "dead" if status == "failed" else "retry"
    return "dead" if isinstance(error, PluginError) else "retry"


def delivery_of(document: dict[str, Any]) -> Delivery:
    """The delivery in the body of a request. Without a hook it is for all that want such events. Raises
    ValueError."""
    known = {"id", "plugin", "event", "context", "hook" if "hook" in document else "type"}
    if strays := sorted(document.keys() - known):
        raise ValueError(f"the body has the unknown key {strays[0][:60]!a}")
    given = {"id": f"del_{secrets.token_hex(12)}", **document}
    names = [key for key in ("id", "plugin", "hook", "type") if key in given]
    if "hook" in given and "plugin" not in given:
        raise ValueError("plugin: it has to say whose hook it is; or leave hook out")
    for key in names:
        value, most = given[key], _MOST_ID if "hook" in given else _MOST_EVENT_ID
        if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
            raise ValueError(f"{key}: it has to be a text of 1 to {most} printable characters")
    if "/" in given["id"] or given["id"] in (".", ".."):
        raise ValueError("id: it is a part of addresses, such as /deliveries/ID/repeat, so it has no slash")
    event, context = document.get("event"), document.get("context", {})
    if not isinstance(event, dict) or not isinstance(context, dict):
        raise ValueError("event, and context if there is one, have to be objects")
    texts = (json.dumps(each, sort_keys=True) for each in (event, context))
    return Delivery(given["id"], given.get("plugin", ""), given.get("hook", ""), *texts)


def posted_id(poster: str, given: str) -> str:
    """The id in the ledger of what somebody by the network has given an id. Nobody else can take it first,
    and plugins that remember ids do not take it for another's."""
    return f"del_{hashlib.sha256(json.dumps([poster, given]).encode()).hexdigest()[:32]}"


def type_of(document: dict[str, Any]) -> str:
    """The type of an event that goes to all hooks that want it. Raises ValueError."""
    inside = document["event"].get("type")
    found = document.get("type", inside)
    if not isinstance(found, str) or inside not in (None, found):
        raise ValueError("type: write the event's type, or say in hook which one it is for")
    return found
