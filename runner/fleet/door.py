"""The daemon's door in front of a fleet: its plugins, which run elsewhere, and what it knows about them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio

from runner.contracts.registry import contract_names, find_contract
from runner.exceptions import PluginError, PluginFailure
from runner.fleet.client import DURABLE_KINDS, FleetPlugin
from runner.fleet.connection import FleetAddress, NoFleet
from runner.fleet.library import Fleet, open_fleet
from runner.fleet.operate import ask_workers, queues
from runner.ledger.rows import Effect
from runner.library import check_seconds
from runner.lifecycle.exceptions import Unavailable, UnknownPlugin
from runner.lifecycle.feed import FeedSource
from runner.lifecycle.machine import StateName
from runner.lifecycle.spec import LifecycleNews, Status
from runner.lifecycle.supervisor import MOST_NEWS, Supervisor
from runner.outcome import Outcome, Phase
from runner.protocol.calls import CallRequest, CallResult
from runner.serve.plugins import DoorPlugins
from runner.serve.refusal import Refused
from runner.serve.roster import Roster
from runner.serve.sources import SourceFault
from runner.session import account

_LOOK_SECONDS = 2.0
_MOST_STDERR = 20  # quarantines whose stderr is asked for: a worker may show thousands
# Outcomes of calls about which no plugin was asked.
_NEVER_RAN = frozenset(
    "launch_failed sandbox_unavailable overloaded quarantined policy_denied policy_invalid manifest_invalid"
    " invalid_call tool_not_exposed".split()
)
# What ends in one of these, with whatever code, ends before a plugin is asked.
_BEFORE_CALLS: tuple[Phase, ...] = ("manifest", "policy", "plan", "launch", "handshake")


class FleetDoor:
    """The plugins of a fleet. Workers start and end them; here they are called."""

    def __init__(self, nursery: trio.Nursery, fleet: Fleet) -> None:
        self._nursery = nursery
        self._fleet = fleet
        self._news: FeedSource[LifecycleNews] = FeedSource(MOST_NEWS)
        self.subscribe, self.end_feeds = self._news.subscribe, self._news.close
        self._draining = ""
        self._calls = 0
        self._idle = trio.Event()
        self.known: dict[str, FleetPlugin] = {}
        self.since: dict[str, float] = {}
        self.fault = ""
        self.overview: dict[str, Any] = {}  # empty: the servers did not tell it when they were asked last
        self.on_look: Callable[[], None] = lambda: None
        self._stderr: dict[tuple[str, str], str] = {}  # its end, by worker and digest of what was given up

    async def look(self) -> None:
        """Ask who is there."""
        try:
            found = {each.name: each for each in await self._fleet.plugins()}
            self.overview = await self._fleet.thread.run(queues, self._fleet.client)
            self._add_stderr()
            self.fault = ""
        except NoFleet as lost:
            self.fault, self.overview = str(lost), {}
            self.on_look()
            return
        self.on_look()
        for name in found.keys() | self.known.keys():
            if found.get(name) != self.known.get(name):
                self.since[name] = time.time()
                held = found[name].held if name in found else "no worker has it"
                self._news.tell(LifecycleNews(name, _state(found.get(name)), held, time.time()))
        self.known = found

    def _add_stderr(self) -> None:
        """Beside each quarantine. A worker is asked once for it, and tells it to operators only: a door whose
        user the servers do not let ask has none."""
        rows = {
            (worker["worker"], each["digest"]): each
            for worker in self.overview["workers"]
            for each in worker["plugins"]
            if each["hold"] == "quarantined"
        }
        for gone in self._stderr.keys() - rows.keys():
            del self._stderr[gone]
        for key, row in rows.items():
            if key in self._stderr:
                row["stderr"] = self._stderr[key]
            elif len(self._stderr) < _MOST_STDERR:
                self._stderr[key] = ""
                self._nursery.start_soon(self._read_stderr, row["name"], *key)

    async def _read_stderr(self, name: str, worker: str, digest: str) -> None:
        found: list[str] = []

        async def ask() -> None:
            plugin = f"{name}@{digest}"
            await ask_workers(self._fleet.client, "logs", plugin, worker, lambda _, text: found.append(text))

        with suppress(Refused, NoFleet):
            await self._fleet.thread.run(ask)
        if found and (worker, digest) in self._stderr:
            self._stderr[worker, digest] = found[0]

    async def follow_fleet(self) -> None:
        while True:
            await self.look()
            await trio.sleep(_LOOK_SECONDS)

    def plugins(self) -> list[Status]:
        return [
            Status(
                name=each.name,
                contract=each.contract,
                state=_state(each),
                reason=each.held or ("" if each.workers else "no worker takes calls for it"),
                since=self.since.get(each.name, 0.0),
                attempts=0,
                restarts=0,
                sessions=len(each.workers),
                parked=0,
                in_flight=0,
                queued=self.overview.get("waiting", {}).get(each.digest, 0),
                pids=(),
                identity=None,
            )
            for each in self.known.values()
        ]

    async def make(self, request: CallRequest) -> CallResult:
        check_seconds(request.seconds)
        if self._draining:
            raise Unavailable(request.plugin, "draining", self._draining)
        call, context = None, request.context or {}
        if request.kind in DURABLE_KINDS and "delivery_id" in context:
            # The door's own ledger repeats it. The same attempt is made once.
            call = f"{context['delivery_id']}~{context.get('attempt', 1)}"
        self._calls += 1
        await account.ask()
        try:
            return await self._fleet.make(request, call=call, retry=call is None)
        except UnknownPlugin:
            account.withdraw()
            raise
        except (PluginError, PluginFailure) as error:
            # Who cannot reach the fleet does not know whether a durable call was stored.
            known = self.known.get(request.plugin)
            durable = request.kind in DURABLE_KINDS or (known is not None and known.is_durable(request))
            if _never_ran(error.outcome) and not (durable and error.outcome.cause == "no_fleet"):
                account.withdraw()
            raise
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def tools(self, name: str, what: str = "tools") -> Sequence[Mapping[str, Any]]:
        listed: Sequence[Mapping[str, Any]] = (await self.make(CallRequest(name, what, kind="list"))).value
        return listed

    async def drain(self, seconds: float) -> None:
        self._draining = "the door is being drained"
        self._idle = trio.Event()
        with trio.move_on_after(seconds):
            while self._calls:
                await self._idle.wait()


class FleetRoster(Roster):
    """What the fleet's workers offer. Policy, approvals and settings are theirs."""

    actions = ()  # the workers start, end and read them

    def __init__(self, door: FleetDoor, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        super().__init__(None, None, (), None, None, environ, say)
        self._fleet = door
        door.on_look = self._take_fault
        self._take_fault()

    def supervisor_of(self, name: str) -> Supervisor:
        raise _elsewhere(name)

    def _take_fault(self) -> None:
        fault = self._fleet.fault
        self.faults = (SourceFault("the fleet", fault),) if fault else ()

    async def reload(self, name: str | None = None) -> None:
        await self._fleet.look()
        self.on_reload()

    def _found(self, name: str) -> FleetPlugin:
        plugin = self._fleet.known.get(name)
        if plugin is None:
            raise UnknownPlugin(name)
        return plugin

    def knows(self, name: str) -> bool:
        return name in self._fleet.known

    def describe(self, status: Status) -> dict[str, Any]:
        found = {**status._asdict(), "identity": None}
        plugin = self._fleet.known.get(status.name)
        if plugin is not None:
            more = {"version": plugin.version, "digest": plugin.digest, "workers": list(plugin.workers)}
            found |= {"manifest": "", "id": plugin.name, **more}
        return found

    def effect(self, name: str, tool: str) -> Effect:
        """Not known here: a worker asks its own manifest."""
        self._found(name)
        return "unknown"

    def fleet(self) -> dict[str, Any] | None:
        return self._fleet.overview

    def hooks_for(self, event: str, name: str | None = None) -> list[tuple[str, str]]:
        message = "a door in front of a fleet has no manifests, so it does not know which hooks want an event"
        raise Refused(501, "fleet", message, "name plugin and hook")

    def context_keys(self, name: str, kind: str = "hook") -> Sequence[str]:
        plugin = self._fleet.known.get(name)
        # A worker may say anything.
        known = plugin is not None and plugin.contract in contract_names() and plugin.contract
        return find_contract(known).calls.get(kind, ()) if known else ()

    async def explain(self, name: str) -> dict[str, Any]:
        self._found(name)
        raise _elsewhere(name)


def _never_ran(outcome: Outcome) -> bool:
    return outcome.code in _NEVER_RAN or outcome.phase in _BEFORE_CALLS


def _state(plugin: FleetPlugin | None) -> StateName:
    if plugin is None:
        return "stopped"
    if plugin.workers:
        return "ready"
    kinds = {each.kind for each in plugin.holds}
    return "pending" if kinds == {"pending"} else "quarantined" if kinds else "stopped"


def _elsewhere(name: str) -> Refused:
    message = f"the plugin {name} belongs to the workers of a fleet, which start and end it themselves"
    return Refused(
        501, "fleet", message, "an operator of the fleet uses runner logs --fleet and runner ctl --fleet"
    )


class FleetBackend:
    """What `runner serve --fleet` gives to the daemon."""

    def __init__(self, address: FleetAddress) -> None:
        self._address = address

    @asynccontextmanager
    async def open(self, say: Callable[[str], None]) -> AsyncIterator[FleetDoor]:
        """Raises NoFleet."""
        async with open_fleet(self._address, say=say) as fleet, trio.open_nursery() as nursery:
            door = FleetDoor(nursery, fleet)
            await door.look()
            nursery.start_soon(door.follow_fleet)
            try:
                yield door
            finally:
                door.end_feeds()
                nursery.cancel_scope.cancel()

    def roster(self, plugins: DoorPlugins, environ: Mapping[str, str], say: Callable[[str], None]) -> Roster:
        assert isinstance(plugins, FleetDoor)
        return FleetRoster(plugins, environ, say)
