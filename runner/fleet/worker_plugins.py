"""What a worker has to offer, and how it makes a call: by its own files and its own policy.

`WorkerPlugins` is all that the worker knows of them. `RosterPlugins` has the plugins of --config; others may
join them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import trio

from runner.exceptions import PluginError, PluginFailure
from runner.fleet.messages import FleetCall
from runner.fleet.names import MOST_BODY_BYTES
from runner.ledger.rows import REPEATABLE, Digest, digest
from runner.lifecycle.exceptions import UnknownPlugin
from runner.lifecycle.supervisor import Supervisor
from runner.outcome import Outcome
from runner.package.fault import PackageFault
from runner.package.listing import list_package
from runner.protocol.calls import OnProgress
from runner.serve.deliveries import verdict_of
from runner.serve.desk import CallAnswer, failed, failed_answer, off_loop_if_large
from runner.serve.roster import Roster
from runner.serve.sources import PluginSource
from runner.session.account import open_account

# Exports of these kinds are called by the stream.
DURABLE_EXPORTS = ("hooks", "compactors", "harnesses")
_MOST_REASON = 300  # characters, of why a plugin does not run
# For the whole fleet, so that it has no paths of this machine.
_PENDING = "policy or approvals of this machine do not let it run; the worker's stderr says why"

OnAsk = Callable[[float], Awaitable[None]]
# What a redelivery may do: "again" is for calls that may run twice.
Repeat = Literal["again", "never"]
# "ended": with this answer. "retry": a hook that may succeed later. "elsewhere": nothing ran, and another
# worker may do better.
Fate = Literal["ended", "retry", "dead", "elsewhere"]


class Offer(NamedTuple):
    """A plugin that may run here."""

    name: str
    digest: str
    contract: str = ""
    version: str = ""
    durable: tuple[str, ...] = ()  # exports that are called by the stream
    hooks: tuple[str, ...] = ()


class Hold(NamedTuple):
    """Why a plugin that is here does not run."""

    kind: Literal["quarantined", "pending"]
    reason: str


class Performed(NamedTuple):
    answer: CallAnswer
    outcome: Outcome
    fate: Fate = "ended"
    output: Digest = Digest()
    asked: bool = True  # the plugin, or nobody knows


def unperformed(call: str, outcome: Outcome, fate: Fate = "ended", **more: Any) -> Performed:
    """A call of this id that failed before or without its plugin's own answer."""
    return Performed(failed(outcome, id=call, **more), outcome, fate)


class WorkerPlugins(Protocol):
    def offers(self) -> tuple[Offer, ...]:
        """The plugins that are here. From any thread, as are `holds` and `effect`."""
        ...

    def holds(self) -> Mapping[str, Hold]:
        """Those that do not run now, by digest."""
        ...

    def effect(self, offer: Offer, tool: str) -> str:
        """The effect class of a tool, by the manifest."""
        ...

    async def perform(
        self,
        offer: Offer,
        call: FleetCall,
        caller: str,
        attempt: int | None,
        on_progress: OnProgress,
        on_ask: OnAsk,
    ) -> Performed:
        """Make a call, on trio. `attempt`: None if it is not durable. `on_ask` is awaited before the plugin
        is asked. Raises nothing but Cancelled."""
        ...

    async def logs(self, offer: Offer) -> str:
        """The end of a plugin's stderr, 64 KiB at most. On trio, as is `reset`. Raises UnknownPlugin."""
        ...

    async def reset(self, offer: Offer) -> str:
        """Forget the failures of a plugin, and end its quarantine. Returns its state. Raises
        UnknownPlugin."""
        ...


def repeat_of(own_plugins: WorkerPlugins, offer: Offer, tool: str) -> Repeat:
    """Whether a call that had begun may run again. What the message says does not count."""
    return "again" if tool in offer.hooks or own_plugins.effect(offer, tool) in REPEATABLE else "never"


class RosterPlugins:
    """The plugins of --config that policy and approvals let run."""

    def __init__(self, supervisor: Supervisor, roster: Roster, say: Callable[[str], None]) -> None:
        self._supervisor, self._roster, self._say = supervisor, roster, say
        self._known: dict[str, Offer] = {}
        self._offers: tuple[Offer, ...] = ()
        self._holds: Mapping[str, Hold] = {}

    async def reload(self) -> None:
        """After the roster was read: find the digests."""
        found = {}
        for source in self._roster.sources():
            try:
                found[source.name] = await trio.to_thread.run_sync(_offer, source)
            except PackageFault as fault:
                self._say(f"{source.name} is not offered to the fleet: {fault}; {fault.hint}")
        self._known = found
        self.look()

    def look(self) -> None:
        """On trio: a plugin may have come into a state in which it does not run, or out of one."""
        states = {each.name: each for each in self._supervisor.plugins()}
        here = {name: offer for name, offer in self._known.items() if name in states}
        holds = {}
        for name, offer in here.items():
            if states[name].state == "quarantined":
                reason = self._roster.secrets(name).hide(states[name].reason)  # no secret travels
                holds[offer.digest] = Hold("quarantined", reason[:_MOST_REASON])
            elif states[name].state == "pending":
                holds[offer.digest] = Hold("pending", _PENDING)
        self._holds = holds
        self._offers = tuple(offer for name, offer in here.items() if states[name].state != "stopped")

    def offers(self) -> tuple[Offer, ...]:
        return self._offers

    def holds(self) -> Mapping[str, Hold]:
        return self._holds

    def effect(self, offer: Offer, tool: str) -> str:
        try:
            return self._roster.effect(offer.name, tool)
        except UnknownPlugin:
            return "unknown"

    async def perform(
        self,
        offer: Offer,
        call: FleetCall,
        caller: str,
        attempt: int | None,
        on_progress: OnProgress,
        on_ask: OnAsk,
    ) -> Performed:
        with open_account(on_ask) as account:
            done = await self._perform(offer, call, caller, attempt, on_progress)
        return done._replace(asked=account.asked is not None)

    async def _perform(
        self, offer: Offer, call: FleetCall, caller: str, attempt: int | None, on_progress: OnProgress
    ) -> Performed:
        hider = self._roster.secrets(offer.name)
        try:
            request = call.request._replace(plugin=self._here(offer), caller=caller, on_progress=on_progress)
            context = self._context(offer, call, attempt)
            result = await self._supervisor.make(request._replace(context=context))
            document = {"id": call.id, "value": result.value, "invocation": result.invocation}
            output = await off_loop_if_large(digest, result.value)
            done = Performed(CallAnswer(200, document), Outcome("ok", "call", ""), output=output)
        except (PluginError, PluginFailure) as error:
            done = Performed(failed_answer(call.id, error), error.outcome, self._fate(offer, call, error))
        except (UnknownPlugin, ValueError) as wrong:
            unknown = isinstance(wrong, UnknownPlugin)
            outcome = Outcome("launch_failed" if unknown else "invalid_call", "call", str(wrong))
            done = unperformed(call.id, outcome, "elsewhere" if unknown else "ended")
        if hider:  # no secret of the operator's travels
            hidden = await off_loop_if_large(hider.hide_in, done.answer.document)
            done = done._replace(answer=done.answer._replace(document=hidden))
        return await off_loop_if_large(lambda _: _bounded(call.id, done), done.answer.document)

    async def logs(self, offer: Offer) -> str:
        text = self._supervisor.logs(self._here(offer))
        return await off_loop_if_large(self._roster.secrets(offer.name).hide, text)

    async def reset(self, offer: Offer) -> str:
        name = self._here(offer)
        await self._supervisor.reset(name)
        self.look()
        return next((each.state for each in self._supervisor.plugins() if each.name == name), "stopped")

    def _here(self, offer: Offer) -> str:
        if self._known.get(offer.name) != offer:
            raise UnknownPlugin(offer.name)  # it was changed since
        return offer.name

    def _context(self, offer: Offer, call: FleetCall, attempt: int | None) -> dict[str, Any] | None:
        """What the contract has for calls that may be repeated. Each attempt has the same keys."""
        if attempt is None:
            return None if call.context is None else dict(call.context)
        kind = call.kind or ("hook" if call.tool in offer.hooks else "tool")
        known = self._roster.context_keys(offer.name, kind)
        usual = {"invocation_id": call.id, "delivery_id": call.id, "tool_execution_id": call.id}
        given = {**{key: value for key, value in usual.items() if key in known}, **(call.context or {})}
        if "attempt" in known and "attempt" not in (call.context or {}):
            given["attempt"] = attempt
        return given or None

    def _fate(self, offer: Offer, call: FleetCall, error: PluginError | PluginFailure) -> Fate:
        code = error.outcome.code
        # Of launch_failed only what failed before the plugin's program ran: the code means nothing else.
        if code in ("launch_failed", "sandbox_unavailable", "overloaded", "quarantined"):
            return "elsewhere"
        if code == "cancelled" and error.outcome.cause in ("draining", "stopped"):
            return "elsewhere"
        if call.tool in offer.hooks:
            return "dead" if verdict_of(error) == "dead" else "retry"
        return "ended"


def _offer(source: PluginSource) -> Offer:
    """Raises PackageFault."""
    plugin = source.plugin
    exports = dict(plugin.exports)
    return Offer(
        source.name,
        fleet_digest(source),
        plugin.contract,
        plugin.version,
        tuple(name for kind in DURABLE_EXPORTS for name in exports.get(kind, ())),
        tuple(exports.get("hooks", ())),
    )


def fleet_digest(source: PluginSource) -> str:
    """The SHA-256 of what the plugin is, on any machine: its name and contract, and every file of its folder.
    An entry of a host's configuration has no folder: then it covers the entry, with the paths in it. Raises
    PackageFault."""
    plugin = source.plugin
    if plugin.root is not None:
        content = list_package(plugin.root).digest
    else:
        content = repr(plugin._replace(manifest=""))
    raw = "\n".join((source.name, plugin.contract, content))
    return hashlib.sha256(raw.encode("utf-8", "replace")).hexdigest()


def _bounded(call: str, done: Performed) -> Performed:
    size = len(json.dumps(done.answer.document))
    if size <= MOST_BODY_BYTES:
        return done
    message = f"the answer has {size} bytes; {MOST_BODY_BYTES} are the most on the bus of a fleet"
    hint = "ask for less, or call the plugin on its own machine"
    outcome = Outcome("malformed_response", "call", message, "answer_too_large", hint)
    ran = "succeeded" if done.outcome.code == "ok" else "failed"
    return unperformed(call, outcome, execution_outcome=ran)._replace(output=done.output)
