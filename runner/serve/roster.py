"""The daemon's plugins, kept in step with the configuration.

A file with a fault keeps the plugins that it had; settings with a fault keep what they gave to each of them.
A plugin keeps its name: another one that asks for it is a fault (claims.py).
A plugin that asks for more than policy and approvals give is pending: it is known, and does not start. So is
one that is new while the settings have a fault. Only local files decide that; no request to the door does.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import trio

from runner.approvals.names import NameRecord
from runner.approvals.record import ApprovalsUnusable, approvals_folder
from runner.approvals.tools import tools_folder
from runner.contracts.registry import check_hook, find_contract
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.launch.prepare import decide
from runner.launch.read import load
from runner.launch.rehearse import rehearse
from runner.launch.report import report
from runner.launch.stages import HeldManifest, Stage, Stopwatch
from runner.ledger.file import LedgerUnusable
from runner.ledger.ledger import Ledger
from runner.ledger.rows import Delivery, Effect, hook_context
from runner.lifecycle.exceptions import UnknownPlugin
from runner.lifecycle.machine import Hold
from runner.lifecycle.spec import Spec, Status
from runner.lifecycle.supervisor import Supervisor
from runner.outcome import EXIT, Failure, Outcome
from runner.protocol.bus import SnapshotBus
from runner.protocol.dialect import Call, CallRefused, Refusal
from runner.protocol.host_services import HostError, Services
from runner.protocol.jsonrpc import INTERNAL_ERROR
from runner.protocol.secrets import Secrets
from runner.serve.claims import place_of, settle
from runner.serve.holds import HoldRecord
from runner.serve.settings import PluginSettings, ServedPlugin, Settings
from runner.serve.sources import PluginSource, SourceFault, SourceScan, fault_of, scan
from runner.session.prepared import complete_call
from runner.session.session import told_to_others
from sandbox.identity.state import state_root
from sandbox.policy.load import policy_folders
from sandbox.spec import Denial, Limits

_PLUGINS = "the plugins"  # the caller of what they invoke of each other
_MOST_DENIALS = 5  # that a reason names
_MOST_READS = 5  # of one reload, while new folders turn up
_TRIED = f"call_{'0' * 24}"  # the id of a call that is only tried


class _Entry(NamedTuple):
    source: PluginSource
    # Fields of its Spec. None: the plugin was found while the settings had a fault.
    settings: Mapping[str, Any] | None
    pending: str = ""


class PolicyJudgement(NamedTuple):
    """What policy and approvals give a plugin and refuse it, as of the last reload."""

    limits: Limits = Limits()
    denials: tuple[Denial, ...] = ()


class Roster:
    # What the page may ask of a plugin, by the words of its routes.
    actions: Sequence[str] = ("start", "stop", "reset", "reload", "logs")

    def __init__(
        self,
        supervisor: Supervisor | None,
        ledger: Ledger | None,
        paths: tuple[str, ...],
        policy: str | None,
        settings: str | None,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        *,
        chosen: Callable[[str], bool] = lambda name: True,
        services: Callable[[str], Services | None] = lambda name: None,
        names: str | None = None,
        folders: Mapping[str, str] | None = None,
        holds: HoldRecord | None = None,
        given: Mapping[str, Mapping[str, Any]] | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """`supervisor`: None if the plugins run elsewhere. `ledger`: None if no changes are recorded.
        `chosen`: whether a plugin of the configuration is wanted, by its name. `services`: what a plugin may
        ask for. `names`: the file that remembers who has which name. `folders`, `given`: who has it, and what
        each gets, by settings of the caller's own, in tables [plugins.NAME]. `holds`: what was stopped or in
        quarantine before; None: nothing is remembered. `numbers`: of supervision, where the settings have
        none."""
        self._supervisor = supervisor
        self._chosen = chosen
        self._services = services
        self._names = NameRecord(names, paths)
        self._holds = HoldRecord() if holds is None else holds
        self._folders: Mapping[str, str] = folders or {}
        self._given = Settings(given or {})
        self._numbers: Mapping[str, float] = numbers or {}
        self._table = "[{}]" if folders is None else "[plugins.{}]"
        # One for all plugins: they are the operator's own choice. What is bound to orgs is not in a roster.
        self._bus = SnapshotBus()
        self._ledger = ledger
        self._paths = paths
        self._policy = policy
        self._settings = settings
        self._environ = environ
        self._say = say
        self._turn = trio.Lock()
        self._entries: dict[str, _Entry] = {}
        self._judgements: dict[str, PolicyJudgement] = {}
        self.faults: tuple[SourceFault, ...] = ()
        self.watched: tuple[str, ...] = ()
        self.on_reload: Callable[[], None] = lambda: None
        # Begins to watch these folders. Returns whether one of them was not watched before.
        self.follow: Callable[[tuple[str, ...]], bool] = lambda folders: False

    async def reload(self, name: str | None = None) -> None:
        """Read the configuration again, and add, replace and remove what has changed. `name`: a plugin that
        is replaced even if nothing has. Raises UnknownPlugin."""
        async with self._turn:
            if name is not None and name not in self._entries:
                raise UnknownPlugin(name)
            # Where approvals come to be: the folder itself may not exist yet.
            approvals = approvals_folder(self._environ) or ""
            tools = str(tools_folder(self._environ)) if approvals else ""
            policies = policy_folders(self._policy, self._environ)
            for _ in range(_MOST_READS):
                found, sources, given, refused = await trio.to_thread.run_sync(self._read)
                self.watched = (*found.watched, *given.watched, approvals, os.path.dirname(approvals), tools)
                self.watched += policies
                if not self.follow(self.watched):
                    break  # else files may have changed after they were read, and before they were watched
            wanted = await trio.to_thread.run_sync(self._judge, sources, given)
            faults = (*found.faults, *refused, *(fault_of(each) for each in given.diagnostics))
            for fault in faults:
                if fault not in self.faults:
                    self._say(f"{fault.path}: {fault.message}")
            # What is no fault any more is told until its plugins are as the files say.
            self.faults = (*faults, *(fault for fault in self.faults if fault not in faults))
            for gone in [name for name, entry in self._entries.items() if not _same(wanted.get(name), entry)]:
                await self._remove(gone)
            for entry in wanted.values():
                self._offer(entry)
            async with trio.open_nursery() as nursery:
                for each, entry in wanted.items():
                    if self._entries.get(each) != entry or each == name:
                        nursery.start_soon(self._put, entry)
            self.faults = faults
        self.on_reload()

    def _kept(self, found: SourceScan) -> list[PluginSource]:
        """What there is now, and the plugins of files that have a fault now, as they were."""
        faulty = {fault.path for fault in found.faults if fault.keeps}
        present = {(source.path, source.server) for source in found.sources}
        old = [entry.source for entry in self._entries.values()]
        hidden = tuple(os.path.join(fault.path, "") for fault in found.faults if fault.hides)
        kept = (source for source in old if source.path in faulty or source.path.startswith(hidden))
        return [*found.sources, *(each for each in kept if (each.path, each.server) not in present)]

    def _read(self) -> tuple[SourceScan, list[PluginSource], Settings, tuple[SourceFault, ...]]:
        """What the files say now. The last part: who does not get the name it asks for."""
        found = scan(self._paths)
        settings = None if self._settings is None else PluginSettings(self._settings, self._environ)
        folders = self._folders if settings is None else settings.folders()
        self._folders = self._folders if folders is None else folders
        claims = [source for source in self._kept(found) if self._chosen(source.name)]
        sources, faults = self._settle(claims, known=folders is not None)
        given = self._given
        if settings is not None:
            served = {each.name: ServedPlugin(each.plugin.contract, each.path) for each in sources}
            given = settings.read(served)
        return found, sources, given, faults

    def _settle(
        self, claims: list[PluginSource], *, known: bool
    ) -> tuple[list[PluginSource], tuple[SourceFault, ...]]:
        """`known`: False if the settings cannot be read. Then nobody gets a name for good: they may say whose
        it is."""
        faults: tuple[SourceFault, ...] = ()
        try:
            held = self._names.holders()
        except ApprovalsUnusable as unusable:
            # Nobody knows whose the other names are.
            held = self._names.given()
            limits = "until that is mended, only plugins that have their names are served"
            message = f"{unusable}; {limits}; {unusable.hint}"
            faults = (SourceFault(self._names.path or "", message),)
            claims = [each for each in claims if each.name in held or each.name in self._folders]
        settled = settle(claims, self._folders, held, self._table)
        if known and not faults:
            try:
                self._names.keep({each.name: place_of(each) for each in settled.sources}, self._folders)
            except ApprovalsUnusable as unusable:
                message = f"names are kept only until the end of this process: {unusable}; {unusable.hint}"
                faults = (SourceFault(self._names.path or "", message),)
        sources = [each._replace(moved=self._names.moved(each.name)) for each in settled.sources]
        return sources, (*settled.faults, *faults)

    def _judge(self, sources: list[PluginSource], given: Settings) -> dict[str, _Entry]:
        wanted = {}
        for source in sources:
            known = self._entries.get(source.name)
            if known is not None and known.source.digest == source.digest:
                # Only its comments are others.
                source = source._replace(text=known.source.text, file=known.source.file)
            fields: Mapping[str, Any] | None = given.plugins.get(source.name, {})
            if given.faulty:
                fields = known.settings if known is not None and _same(known, _Entry(source, None)) else None
            entry = _Entry(source, fields)
            wanted[source.name] = entry._replace(pending=self._pending(entry))
        return wanted

    def _pending(self, entry: _Entry) -> str:
        """Why nothing of the plugin may start, or ''."""
        source = entry.source
        if entry.settings is None:
            return f"the settings {self._settings} have a fault"
        if find_contract(source.plugin.contract).prepared_calls is not None:
            return ""  # its cage depends on the call, so each call is judged
        watch = Stopwatch()
        self._judgements.pop(source.name, None)
        try:
            granted = decide(load(self._spec(entry).invocation(), watch), self._environ, watch).grant
            self._judgements[source.name] = PolicyJudgement(granted.limits, granted.denials)
        except Failure as failure:
            self._judgements[source.name] = PolicyJudgement(denials=failure.outcome.denials)
            if failure.outcome.code != "policy_denied":
                return ""  # its start reports it
            denials = [f"{each.asked}: {each.reason}" for each in failure.outcome.denials if each.required]
            return "; ".join([failure.outcome.message, *denials[:_MOST_DENIALS]])
        return ""

    def _spec(self, entry: _Entry) -> Spec:
        source = entry.source
        return Spec(
            source.name,
            HeldManifest(source.file, source.text) if source.text else source.path,
            server=source.server,
            policy=self._policy,
            environ=self._environ,
            services=(self._services(source.name) or Services())._replace(bus=self._bus),
            pending=entry.pending,
            held=self._holds.find(source.name, place_of(source)),
            **{"numbers": self._numbers, **(entry.settings or {})},
        )

    async def _put(self, entry: _Entry) -> None:
        source = entry.source
        word = "replaced" if source.name in self._entries else "added"
        self._entries[source.name] = entry
        await self._note(source.name, {"change": word, "digest": source.digest, "pending": entry.pending})
        if entry.pending:
            self._say(f"{source.name} is pending: {entry.pending}")
        spec = self._spec(entry)
        hold, reason = spec.held
        if hold and word == "added":
            verb = "start" if hold == "stopped" else "reset"
            how = f"runner ctl {verb} {source.name} ends that"
            self._say(f"{source.name} is {hold}, as before: {reason}; {how}")
        await self.supervisor_of(spec.name).replace(spec)

    async def _remove(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._judgements.pop(name, None)
        await self._note(name, {"change": "removed"})
        await self.supervisor_of(name).remove(name)
        self._bus.retract(entry.source.plugin.id)

    def _offer(self, entry: _Entry) -> None:
        """Let other plugins invoke its actions. A plugin that does not run is started for one. One that may
        not start has none: a name that it takes would be in doubt for the plugin that has it."""
        source = entry.source

        async def ask(call: Call) -> Any:
            try:
                called = self.supervisor_of(source.name).call(
                    source.name, call.name, call.input, kind=call.kind, caller=_PLUGINS
                )
                return (await called).value
            except (PluginError, PluginFailure) as error:
                raise told_to_others(error) from None
            except UnknownPlugin as error:  # it was removed after it was found
                raise HostError(INTERNAL_ERROR, str(error)) from None

        plugin = source.plugin
        actions = {} if entry.pending else find_contract(plugin.contract).actions(plugin, ask)
        self._bus.offer(plugin.id, actions)

    def note_hold(self, name: str, hold: Hold, reason: str) -> bool:
        """A plugin is stopped, in quarantine, or neither. Returns whether that is new."""
        entry = self._entries.get(name)
        if entry is None:
            return True  # a binding's: it has no name that stays
        try:
            return self._holds.note(name, place_of(entry.source), hold, reason)
        except ApprovalsUnusable as unusable:
            what = f"the next daemon will not know that {name} is {hold or 'free'}"
            self._say(f"{what}: {unusable}; {unusable.hint}")
            return True

    async def _note(self, name: str, detail: dict[str, Any]) -> None:
        if self._ledger is None:
            return
        try:
            what = "refusal" if detail.get("pending") else "grant"
            await self._ledger.note(what, "configuration", name, json.dumps(detail))
        except LedgerUnusable as unusable:
            self._say(f"{unusable}; {unusable.hint}")

    # --- what is told ---------------------------------------------------------------------------------------

    def sources(self) -> list[PluginSource]:
        return [entry.source for entry in self._entries.values()]

    def supervisor_of(self, name: str) -> Supervisor:
        """Who starts, ends and reads a plugin. Raises Refused if nobody does so here."""
        assert self._supervisor is not None  # else this is overridden
        return self._supervisor

    def knows(self, name: str) -> bool:
        return name in self._entries

    def describe(self, status: Status) -> dict[str, Any]:
        found = {**status._asdict(), "identity": status.identity and status.identity._asdict()}
        entry = self._entries.get(status.name)
        if entry is not None:
            plugin = entry.source.plugin
            found |= {"manifest": entry.source.path, "id": plugin.id, "version": plugin.version}
        return found

    def judgement(self, name: str) -> PolicyJudgement:
        return self._judgements.get(name, PolicyJudgement())

    def allow(self, name: str) -> str:
        """The command by which a person allows what the plugin asks for. Empty: a name in it has characters
        that a terminal would obey."""
        entry = self._entries.get(name)
        if entry is None or not (entry.source.path + (entry.source.server or "")).isprintable():
            return ""
        server = () if entry.source.server is None else ("--server", entry.source.server)
        policy = () if self._policy is None else ("--policy", from_anywhere(self._policy))
        return shlex.join(("runner", "allow", entry.source.path, *server, *policy))

    def effect(self, name: str, tool: str) -> Effect:
        """The effect class of a tool, by the manifest. Where the contract has none, it is unknown."""
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownPlugin(name)
        calls = find_contract(entry.source.plugin.contract).prepared_calls
        return "unknown" if calls is None else calls.effect(entry.source.plugin, tool)

    def secrets(self, name: str) -> Secrets:
        """The operator's, of a plugin."""
        entry = self._entries.get(name)
        found = None if entry is None else (entry.settings or {}).get("secrets")
        return Secrets() if found is None else found

    def fleet(self) -> dict[str, Any] | None:
        """The workers and queues of a fleet; {}: they are not known now. None: the plugins run here."""
        return None

    def hooks_for(self, event: str, name: str | None = None) -> list[tuple[str, str]]:
        """Plugins and their hooks that subscribe to an event, by their manifests: all, or those of one."""
        plugins = {each: entry.source.plugin for each, entry in self._entries.items() if name in (None, each)}
        return [
            (each, hook)
            for each, plugin in plugins.items()
            for hook in find_contract(plugin.contract).hooks_for(plugin, event)
        ]

    async def try_hook(self, delivery: Delivery) -> None:
        """Check a delivery as its first attempt would, and start nothing. Raises PluginError and
        PluginFailure."""
        entry = self._entries.get(delivery.plugin)
        if entry is not None:
            await trio.to_thread.run_sync(self._try_hook, entry, delivery)

    def _try_hook(self, entry: _Entry, delivery: Delivery) -> None:
        plugin, known = entry.source.plugin, self.context_keys(delivery.plugin)
        contract, context = find_contract(plugin.contract), hook_context(delivery, known, 1, _TRIED)
        call = Call("hook", delivery.hook, json.loads(delivery.event), context or {})
        if "hook" not in contract.calls:
            message = f"the contract {contract.name} has no hooks"
            raise InvalidCall(Refusal(0, "unsupported", message, "unsupported"))
        if contract.prepared_calls is not None:
            spec = self._spec(entry)
            complete_call(spec.invocation(), call, secrets=spec.secrets, config=spec.config)
            return
        try:
            check_hook(contract, plugin, call)
        except CallRefused as refused:
            event = refused.event
            if isinstance(event, Refusal):
                raise InvalidCall(event) from None
            raise PluginFailure(Outcome(event.code, "call", event.message, event.cause, event.hint)) from None

    def context_keys(self, name: str, kind: str = "hook") -> Sequence[str]:
        """The keys of the context of a call of this kind, by the plugin's contract."""
        entry = self._entries.get(name)
        return () if entry is None else find_contract(entry.source.plugin.contract).calls.get(kind, ())

    async def explain(self, name: str) -> dict[str, Any]:
        """What the plugin would get now, and what it is refused: parts of the report of a launch."""
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownPlugin(name)
        return await trio.to_thread.run_sync(self._explain, entry)

    def _explain(self, entry: _Entry) -> dict[str, Any]:
        outcome = Outcome("ok", "plan", "the plugin may be launched")
        stage: Stage | None
        try:
            stage = rehearse(self._spec(entry).invocation(), self._environ)
        except Failure as failure:
            stage, outcome = failure.stage, failure.outcome
        full = report(stage, outcome, EXIT[outcome.code])
        kept = ("plugin", "outcome", "grant", "layers", "limits", "degraded", "notes", "diagnostics")
        return {key: full[key] for key in kept if key in full}


def _same(one: _Entry | None, other: _Entry) -> bool:
    """Whether both are of one plugin, and not of another one with its name."""
    return one is not None and place_of(one.source) == place_of(other.source)


def from_anywhere(policy: str) -> str:
    """The same policy in another working directory: a word is the name of one that comes with the runner."""
    return os.path.abspath(policy) if "/" in policy or "." in policy else policy


def default_ledger(environ: Mapping[str, str]) -> str:
    """Where the ledger of this user is: beside the state of plugins."""
    return os.path.join(os.path.dirname(state_root(environ)), "serve/ledger.db")
