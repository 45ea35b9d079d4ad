"""Keeps plugins alive: starts them when they are needed, restarts them when they fail, shares them fairly.

    async with runner.lifecycle.open_supervisor() as supervisor:
        supervisor.add(Spec("notes", "./notes"))
        print(await supervisor.call("notes", "notes_add", {"text": "milk"}))

All plugins end with the context. They also end if this process is killed.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio

from runner.contracts.registry import find_contract
from runner.event_loop import require_trio
from runner.exceptions import PluginError, PluginFailure
from runner.library import OpenPlugin, check_seconds
from runner.lifecycle.exceptions import Unavailable, UnknownPlugin
from runner.lifecycle.feed import BoundedFeed, FeedSource, LogPiece
from runner.lifecycle.machine import Hold, ReloadAsked, ResetAsked, StartAsked, StopAsked
from runner.lifecycle.spec import LifecycleNews, Spec, Status
from runner.lifecycle.supervised import OnEvent, Opener, SupervisedPlugin, open_spec
from runner.protocol.calls import CallRequest, CallResult, OnProgress
from runner.protocol.dialect import Kind
from runner.session.nursery import open_plain_nursery

MOST_NEWS = 1024  # that wait for a subscriber


class Supervisor:
    """Made by `open_supervisor`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        jitter: Callable[[], float],
        clock: Callable[[], float],
        on_event: OnEvent | None = None,
        opener: Opener = open_spec,
    ) -> None:
        self._nursery = nursery
        self._jitter, self._clock, self._on_event, self._open = jitter, clock, on_event, opener
        self._plugins: dict[str, SupervisedPlugin] = {}
        self._timers: dict[str, trio.CancelScope] = {}
        self._news: FeedSource[LifecycleNews] = FeedSource(MOST_NEWS)
        self._notices: FeedSource[tuple[OpenPlugin, str, Mapping[str, Any]]] = FeedSource(MOST_NEWS)
        self._delivery = self._notices.subscribe()
        self._draining = ""
        # Called when a plugin is stopped, put into quarantine, pending, or none of them any more: its name,
        # which, and why. Not for plugins that end with the supervisor or are removed. It must not raise.
        self.on_hold: Callable[[str, Hold, str], None] = lambda name, hold, reason: None
        # Called when a process of a plugin has ended: its name, and the report. It must not raise.
        self.on_report: Callable[[str, Mapping[str, Any]], None] = lambda name, report: None

    # --- which plugins there are ----------------------------------------------------------------------------

    def add(self, spec: Spec) -> None:
        """Supervise a plugin. Its manifest is read in the background; then an eager one is started. Raises
        ValueError if there is one of this name, or the Spec is wrong."""
        spec = spec.checked()
        if self._draining:
            raise Unavailable(spec.name, "draining", self._draining)
        if spec.name in self._plugins:
            raise ValueError(f"name: there is a plugin {spec.name!r} already; use `replace`")
        added = SupervisedPlugin(
            spec=spec,
            nursery=self._nursery,
            jitter=self._jitter,
            clock=self._clock,
            tell=self._tell,
            on_hold=self._note_hold,
            on_report=lambda report: self.on_report(spec.name, report),
            on_event=self._on_event,
            opener=self._open,
        )
        self._plugins[spec.name] = added
        self._timers[spec.name] = trio.CancelScope()
        self._nursery.start_soon(self._run, added, self._timers[spec.name])

    async def replace(self, spec: Spec) -> None:
        """Take another Spec for the plugin of this name, or add it. Cells of the old one finish their calls
        and end first; a plugin that ran is started again. Calls that wait are served by the new one."""
        spec = spec.checked()
        if spec.name not in self._plugins:
            self.add(spec)
            await self._plugins[spec.name].loaded.wait()
            return
        plugin = self._plugins[spec.name]
        await plugin.loaded.wait()
        plugin.spec = spec
        await self._reload(plugin)

    async def remove(self, name: str) -> None:
        """End the plugin and forget it."""
        plugin = await self._found(name)
        plugin.removed = True
        plugin.step(StopAsked("it was removed"))
        await plugin.until(lambda state: not state.cells)
        if self._plugins.get(name) is plugin:
            del self._plugins[name]
            self._timers.pop(name).cancel()
            plugin.log.close()

    def plugins(self) -> list[Status]:
        return [each.status() for each in self._plugins.values()]

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        tool: str,
        input: Any = None,  # noqa: A002 -- what it is called everywhere else
        *,
        kind: Kind | None = None,
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        caller: str = "",
    ) -> CallResult:
        """Call a plugin, which is started if it does not run. `seconds` counts from now. `caller`: callers
        take turns where calls have to wait. Raises what `OpenPlugin.call` does, Overloaded, Unavailable and
        UnknownPlugin; ValueError if an argument is wrong. A call is made once: it is not repeated if the
        plugin fails."""
        return await self.make(CallRequest(name, tool, input, kind, seconds, context, on_progress, caller))

    async def make(self, request: CallRequest) -> CallResult:
        """`call`, with its arguments in one value."""
        check_seconds(request.seconds)
        return await self._plugin(request.plugin).call(request)

    async def tools(self, name: str, what: str = "tools") -> Sequence[Mapping[str, Any]]:
        """List what a plugin exposes, as `OpenPlugin.list` does."""
        listed: Sequence[Mapping[str, Any]] = (await self.call(name, what, kind="list")).value
        return listed

    # --- what people ask ------------------------------------------------------------------------------------

    async def start(self, name: str) -> None:
        """Start a plugin and wait until it is ready. Raises Unavailable if it is held, and PluginFailure if
        it fails."""
        plugin = await self._found(name)
        if self._draining:
            raise Unavailable(name, "draining", self._draining)
        plugin.step(StartAsked())
        await plugin.until(lambda state: state.name not in ("starting", "draining"))
        if plugin.state.name != "ready":
            failure = plugin.last_failure
            raise plugin.unavailable(plugin.state.reason) if failure is None else copy.copy(failure)

    async def stop(self, name: str, seconds: float | None = None) -> None:
        """End a plugin until it is started again. Calls in flight have `seconds` to finish; None: its own
        number."""
        plugin = await self._found(name)
        plugin.step(StopAsked("it was stopped", seconds))
        await plugin.until(lambda state: not state.cells)

    async def reset(self, name: str) -> None:
        """Forget the failures of a plugin, and end its quarantine."""
        (await self._found(name)).step(ResetAsked())

    async def reload(self, name: str) -> None:
        """Read the manifest again, and restart the plugin if it runs."""
        await self._reload(await self._found(name))

    async def drain(self, seconds: float) -> None:
        """Stop all plugins, and wait for them. Calls in flight have `seconds` to finish."""
        self._draining = "the supervisor is being drained"
        plugins = list(self._plugins.values())
        for plugin in plugins:
            plugin.step(StopAsked(self._draining, seconds))
        for plugin in plugins:
            await plugin.until(lambda state: not state.cells)

    # --- what is told ---------------------------------------------------------------------------------------

    def subscribe(self) -> BoundedFeed[LifecycleNews]:
        """What happens to all plugins, from now on. Close it when it is no longer read."""
        return self._news.subscribe()

    def log_lines(self, name: str) -> list[LogPiece]:
        """What `logs` returns, line by line, each with the time when it was read."""
        return self._plugin(name).log.lines()

    def logs(self, name: str) -> str:
        """The end of the plugin's stderr, in all its cells so far: 64 KiB at most."""
        return self._plugin(name).log.text

    def follow(self, name: str) -> BoundedFeed[LogPiece]:
        """What the plugin writes to its stderr, from now on. Close it when it is no longer read."""
        return self._plugin(name).log.follow()

    def close(self) -> None:
        """End all plugins, without waiting for their calls."""
        self._draining = "the supervisor is closed"
        for name, plugin in self._plugins.items():
            plugin.step(StopAsked(self._draining, 0.0))
            plugin.step_if_due()
            self._timers[name].cancel()
        self._notices.close()

    def end_feeds(self) -> None:
        self._news.close()
        for plugin in self._plugins.values():
            plugin.log.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _plugin(self, name: str) -> SupervisedPlugin:
        try:
            return self._plugins[name]
        except KeyError:
            raise UnknownPlugin(name) from None

    async def _found(self, name: str) -> SupervisedPlugin:
        plugin = self._plugin(name)
        await plugin.loaded.wait()
        return plugin

    async def _run(self, plugin: SupervisedPlugin, scope: trio.CancelScope) -> None:
        with scope:
            numbers = await plugin.read_manifest()
            plugin.step(ReloadAsked(numbers, plugin.spec.pending or plugin.fault, *plugin.spec.held))
            plugin.loaded.set()
            await plugin.run_timer()
        plugin.loaded.set()

    async def _reload(self, plugin: SupervisedPlugin) -> None:
        ran, uptime = plugin.state.name == "ready", plugin.uptime
        numbers = await plugin.read_manifest()
        plugin.step(ReloadAsked(numbers, plugin.spec.pending or plugin.fault))
        await plugin.until(lambda state: state.name not in ("draining", "starting"))
        if ran and plugin.state.name == "ready":
            plugin.tell_restarted(uptime)

    def _note_hold(self, plugin: SupervisedPlugin) -> None:
        if not self._draining and not plugin.removed:
            self.on_hold(plugin.spec.name, plugin.state.hold, plugin.state.reason)

    def _tell(self, plugin: SupervisedPlugin, news: LifecycleNews) -> None:
        self._news.tell(news)
        if plugin.plugin is None or news.what == "state":
            return
        contract = find_contract(plugin.plugin.contract)
        notice = contract.lifecycle_notice(plugin.plugin, news.what, news.facts)
        if notice is not None:
            hearers = [each for each in self._plugins.values() if each is not plugin]
            sessions = [session for each in hearers for session in each.sessions]
            sessions = [each for each in sessions if each.plugin.contract == contract.name]
            for session in sessions:
                self._notices.tell((session, *notice))

    async def deliver_notices(self) -> None:
        async for session, method, params in self._delivery:
            with suppress(PluginError, PluginFailure):  # it has not subscribed, or has ended
                await session.notify(method, params)


@asynccontextmanager
async def open_supervisor(
    *,
    jitter: Callable[[], float] = random.random,
    clock: Callable[[], float] = time.time,
    on_event: OnEvent | None = None,
) -> AsyncIterator[Supervisor]:
    """`jitter`: a number from 0 to 1 for each pause before a restart. `clock`: seconds since 1970, for what
    is shown. Time itself passes by trio's clock. `on_event`: gets what plugins say beside their
    answers, and must not raise. Raises NotOnTrio."""
    async with supervise(open_spec, on_event, jitter=jitter, clock=clock) as supervisor:
        yield supervisor


@asynccontextmanager
async def supervise(
    opener: Opener,
    on_event: OnEvent | None,
    *,
    jitter: Callable[[], float] = random.random,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Supervisor]:
    """`open_supervisor`, with plugins that `opener` opens."""
    require_trio()
    try:
        async with open_plain_nursery() as nursery:
            supervisor = Supervisor(nursery, jitter, clock, on_event, opener)
            nursery.start_soon(supervisor.deliver_notices)
            try:
                yield supervisor
            finally:
                supervisor.close()
    finally:
        supervisor.end_feeds()
