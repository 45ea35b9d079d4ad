"""Processes of plugins that several clients of one daemon share.

Two clients share a process only if a launch for either would be the same in all that decides what the plugin
is and gets, and the plugin keeps nothing for one client. Each opening asks that anew, by the client's own
files and variables. What is not shared is opened as everywhere else.

As soon as a process has a second client, nobody can say for whom it writes a log or to its stderr. From then
on clients get only their own answers and progress, and that lists or resources have changed.
"""

from __future__ import annotations

import copy
import fnmatch
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from runner.contracts.registry import find_contract
from runner.exceptions import PluginFailure
from runner.launch.rehearse import rehearse
from runner.launch.stages import Planned
from runner.library import OpenPlugin
from runner.lifecycle.feed import BoundedFeed, FeedSource
from runner.lifecycle.spec import Spec
from runner.lifecycle.supervised import open_spec
from runner.outcome import Failure, Outcome, with_outcome
from runner.plugin import Allowance, Plugin
from runner.protocol.calls import CallRequest, CallResult, OnProgress
from runner.protocol.dialect import Kind, Notice, Progress
from runner.protocol.host_services import Services
from sandbox import surroundings
from sandbox.cache import fingerprint
from sandbox.plan.plan import Bind, Operation
from sandbox.policy.policy import Policy

_MOST_TRIES = 3  # while files change
_MOST_EVENTS = 256  # that wait for a client
# Outcomes whose messages have no word of the plugin, or are about this call alone.
_OWN_WORDS = ("timeout", "overloaded", "invalid_call", "tool_not_exposed")
_T = TypeVar("_T")


def sharing_key(spec: Spec) -> str | None:
    """The same for two launches whose process may be shared. None: each client has one of its own."""
    environ = surroundings.variables() if spec.environ is None else spec.environ
    try:
        planned = rehearse(spec.invocation(), environ)
    except (Failure, ValueError, OSError):  # its own start says why
        return None
    decided, plan = planned.decided, planned.plan
    plugin, grant = decided.loaded.plugin, decided.grant
    hosts = find_contract(plugin.contract).configurations
    if hosts is None or not hosts.keeps_nothing(plugin) or plugin.entrypoint is None:
        return None
    # Questions belong to one client, and so do writes that wait for a person.
    if _may_ask(plugin, decided.policy) or grant.staged or grant.unsandboxed:
        return None
    parts = (
        (plugin.contract, plugin.id, plugin.name, plugin.version, plugin.root, plugin.exports),
        (plugin.capabilities, plugin.timeouts, plugin.lifecycle, plugin.details, plugin.entrypoint.words),
        plan._replace(notes=(), shown=(), operations=tuple(map(_lasting, plan.operations))),
        grant.policy,
        (grant.network, grant.seccomp, grant.limits, grant.credentials, grant.authorities, grant.ssh),
        decided.policy.capabilities,
        planned.provision._replace(manifest=""),
        (planned.bwrap, planned.layers, planned.euid, spec.config, spec.options),
        _hidden_values(planned, environ),
    )
    return fingerprint(repr(parts).encode("utf-8", "surrogatepass"))


def _lasting(operation: Operation) -> Operation:
    """A folder as what it is: what is made or removed in it changes its time, and both launches would show
    it."""
    if isinstance(operation, Bind) and stat.S_ISDIR(operation.identity.mode):
        return operation._replace(identity=operation.identity._replace(ctime_ns=0))
    return operation


def _may_ask(plugin: Plugin, policy: Policy) -> bool:
    methods = find_contract(plugin.contract).services(plugin, Allowance()).METHODS
    patterns = policy.capabilities.host
    return any(fnmatch.fnmatchcase(method, pattern) for method in methods for pattern in patterns)


def _hidden_values(planned: Planned, environ: Mapping[str, str]) -> object:
    """What the plugin uses and does not get: the plan has no values."""
    credentials = planned.grant.credentials
    if any(each.source[:1] not in ((), ("env",)) for each in credentials):
        return sorted(environ.items())  # a command or a file may be another one with other variables
    names = [each.source[1] if each.source else each.name for each in credentials]
    names += ["SSH_AUTH_SOCK"] if planned.plan.ssh is not None else []
    return [environ.get(name) for name in names], planned.decided.loaded.plugin.spec.env if names else ()


class _Process:
    """A process that may be shared, from before it is started."""

    def __init__(self) -> None:
        self.users = 0
        self.mixed = False  # it has, or had, two clients
        self.opened: OpenPlugin | None = None
        self.failure: Exception | None = None
        self.is_other = False  # it was launched by other files than the key says
        self.ready = trio.Event()
        self.scope = trio.CancelScope()
        self.leave = trio.Event()
        self.closed = trio.Event()
        self.events: FeedSource[Notice | Progress] = FeedSource(_MOST_EVENTS)

    @property
    def can_be_joined(self) -> bool:
        over = self.opened is not None and self.opened.over.is_set()
        return not (over or self.leave.is_set() or self.is_other or self.failure is not None)

    def hear(self, event: Notice | Progress) -> None:
        if not self.mixed or (isinstance(event, Notice) and event.kind == "changed"):
            self.events.tell(event)


class SharedPlugins:
    """All of one daemon."""

    def __init__(self, nursery: trio.Nursery) -> None:
        """`nursery`: outlives every client."""
        self._nursery = nursery
        self._processes: dict[str, _Process] = {}

    @asynccontextmanager
    async def open(self, spec: Spec, parked: int) -> AsyncIterator[OpenPlugin]:
        """As `open_plugin`."""
        for _ in range(_MOST_TRIES):
            key = await trio.to_thread.run_sync(sharing_key, spec)
            if key is None:
                break
            process = self._find(key, spec)
            try:
                await process.ready.wait()
                if process.is_other:
                    continue
                if process.failure is not None:
                    raise copy.copy(process.failure)
                assert process.opened is not None
                yield _SharedPlugin(process, process.opened)
                return
            finally:
                await self._leave(key, process)
        async with open_spec(spec, parked) as opened:
            yield opened

    def _find(self, key: str, spec: Spec) -> _Process:
        process = self._processes.get(key)
        if process is None or not process.can_be_joined:
            process = self._processes[key] = _Process()
            # What this task's client has decides, also when that client has gone.
            self._nursery.start_soon(self._hold, process, spec, key)
        process.users += 1
        process.mixed = process.mixed or process.users > 1
        return process

    async def _leave(self, key: str, process: _Process) -> None:
        process.users -= 1
        if process.users:
            return
        if self._processes.get(key) is process:
            del self._processes[key]
        process.leave.set()
        if not process.ready.is_set():
            process.scope.cancel()
        with trio.CancelScope(shield=True):
            await process.closed.wait()

    async def _hold(self, process: _Process, spec: Spec, key: str) -> None:
        try:
            # Nobody's questions: a plugin that may ask is not shared.
            opening = open_spec(spec._replace(services=Services()), 0)
            with process.scope:
                async with opening as process.opened, trio.open_nursery() as nursery:
                    nursery.start_soon(self._hear, process, process.opened)
                    # It was launched by what there was then, which may not be what the key was made of.
                    process.is_other = await trio.to_thread.run_sync(sharing_key, spec) != key
                    process.ready.set()
                    await process.leave.wait()
                    nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 -- each of its clients gets it
            process.failure = error
        finally:
            process.ready.set()
            process.events.close()
            process.closed.set()

    async def _hear(self, process: _Process, opened: OpenPlugin) -> None:
        async for event in opened.events():
            process.hear(event)


class _SharedPlugin(OpenPlugin):
    """A process as one of its clients has it."""

    def __init__(self, process: _Process, opened: OpenPlugin) -> None:
        super().__init__(opened.plugin, opened._session, opened._settings, None)
        self._process = process
        self._whole = opened
        self._feed: BoundedFeed[Notice | Progress] = process.events.subscribe()

    @property
    def report(self) -> dict[str, Any] | None:
        found = self._whole.report
        if found is None or not self._process.mixed:
            return found
        told = _general(Outcome(**{**found["outcome"], "diagnostics": (), "denials": ()}))
        session = {**(found.get("session") or {}), "stderr_tail": ""}
        return {**with_outcome(found, told), "session": session, "advice": [], "network": None}

    @property
    def stderr(self) -> str:
        return "" if self._process.mixed else self._whole.stderr

    def on_stderr(self, take: Callable[[bytes], None]) -> None:
        if not self._process.mixed:
            self._whole.on_stderr(lambda data: None if self._process.mixed else take(data))

    async def call(
        self,
        name: str,
        input: Any = None,  # noqa: A002
        *,
        kind: Kind | None = None,
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        request = CallRequest("", name, input, kind, seconds, context, on_progress)
        return (await self.make(request)).value

    async def make(self, request: CallRequest) -> CallResult:
        return await self._own(super().make(request))

    async def list(self, what: str = "tools") -> Sequence[Mapping[str, Any]]:
        listed: Sequence[Mapping[str, Any]] = await self.call(what, kind="list")
        return listed

    def events(self) -> AsyncIterator[Notice | Progress]:
        return self._feed

    async def _own(self, asked: Awaitable[_T]) -> _T:
        """The answer. A failure of a process that is shared may be told with words about another's call."""
        try:
            return await asked
        except PluginFailure as failure:
            if not self._process.mixed:
                raise
            raise PluginFailure(_general(failure.outcome)) from None


def _general(outcome: Outcome) -> Outcome:
    if outcome.code in (*_OWN_WORDS, "ok"):
        return outcome
    message = f"the process, which several clients share, failed: {outcome.code}"
    return Outcome(outcome.code, outcome.phase, message, outcome.cause, "call again: it is started anew")
