"""Calls by bindings. Each binding has processes of its own, because its secrets are its own.

A binding is looked up in the database when a call begins, so a change counts for the next call. One that is
called gets a Spec of the daemon's supervisor. If it changes, the next call gets another Spec, and calls that
run finish by the old one. If it is disabled, its calls are cancelled: the plugin is told `binding_disabled`,
has its grace, and is killed. Every call leaves a record (records.py), also one that is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from runner.contracts.registry import find_contract
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.ledger.file import Attempt, LedgerFile
from runner.ledger.ledger import Ledger
from runner.ledger.rows import BINDING, NOT_STARTED, UNKNOWN, Effect
from runner.ledger.sqlite_file import DatabaseUnusable
from runner.lifecycle.exceptions import Unavailable, UnknownPlugin
from runner.lifecycle.spec import Spec
from runner.lifecycle.supervisor import Supervisor
from runner.outcome import Outcome
from runner.package.fault import PackageFault
from runner.package.listing import list_package
from runner.plugin import Plugin
from runner.protocol.calls import CallRequest, CallResult, OnProgress
from runner.protocol.dialect import Call, CallEnd, Refusal
from runner.protocol.host_services import Services
from runner.protocol.secrets import Secrets
from runner.serve.control.database import BindingRow, ControlDatabase, ControlFile, PackageRow
from runner.serve.control.delegation import BindingApiGateway
from runner.serve.control.discovery import effective
from runner.serve.control.packages import plugin_at
from runner.serve.control.records import record_row
from runner.serve.control.settings import ControlSettings, OrgApiGateway, OrgSettings
from runner.serve.desk import off_loop_if_large
from runner.serve.refusal import Refused
from runner.session.account import CallAccount, open_account
from runner.session.prepared import GIVEN_UP
from sandbox.network.credentials import hidden_name

PREFIX = BINDING  # of a binding's name in the ledger; a Spec's has a number behind it
INACTIVE = "binding.inactive"
DISABLED = "binding_disabled"  # what a plugin is told about a call that is cancelled
_MOST_LOADED = 256  # bindings that have a Spec
_IDLE_SECONDS = 60.0  # until processes that serve one call after the other end
_MOST_LOST = 1000  # as many calls as a daemon has in flight
_MOST_CHANGES = 10  # of a binding while one call waits for its turn
_RETRY_SECONDS = 1.0


class LiveBinding(NamedTuple):
    """A binding, as database and settings have it now, with all that a call by it needs."""

    row: BindingRow
    package: PackageRow
    plugin: Plugin
    secrets: Secrets  # by slot
    hide: tuple[str, ...]  # SLOT@HOST of those that it uses and does not get
    inactive: str  # reason why nobody may call it, or ''

    @property
    def name(self) -> str:
        return PREFIX + self.row.id

    @property
    def options(self) -> dict[str, str]:
        return {"binding": self.row.record, "binding_file": f"binding {self.row.id}"}

    @property
    def process_key(self) -> tuple[Any, ...]:
        """A binding with another one needs other processes."""
        return self.row.record, self.package.folder, self.package.digest, self.secrets, self.hide


class _Loaded(NamedTuple):
    name: str
    process_key: tuple[Any, ...]


class RunningBindings:
    def __init__(
        self,
        supervisor: Supervisor,
        database: ControlDatabase,
        settings: Callable[[], ControlSettings],
        policy: str | None,
        environ: Mapping[str, str],
        ledger: Ledger,
    ) -> None:
        self.database = database
        self._ledger = ledger
        self._supervisor = supervisor
        self._settings = settings
        self._policy = policy
        self._environ = environ
        self._loaded: dict[str, _Loaded] = {}  # by the id of a binding; the one called last is the last
        self._calls: dict[str, list[BindingCall]] = {}  # that run, by the id of a binding
        self._secrets: dict[str, Secrets] = {}  # by the id of a binding: making them takes long
        # By folder of a package: its digest, and what its files looked like when they had it.
        self._checked: dict[str, tuple[str, str]] = {}
        self._number = 0
        self._news = trio.Event()
        self._retired, self._retiring = trio.open_memory_channel[str](math.inf)

    # --- what there is --------------------------------------------------------------------------------------

    async def find(self, name: str) -> LiveBinding | None:
        """A binding by its id. Raises DatabaseUnusable, and PluginFailure if its package cannot be read."""
        row = await self.database.do(ControlFile.binding, name)
        return None if row is None else await self.bound(row)

    async def bound(self, row: BindingRow) -> LiveBinding:
        package = await self.database.do(ControlFile.package, row.package)
        assert package is not None  # the database holds it as long as it has bindings
        return await self._complete(row, package)

    async def effective(self, org: str, project: str | None, kind: str) -> list[LiveBinding]:
        """The bindings of an org that count in a project, for exports of a kind. None: outside of projects.
        They may be disabled. Raises DatabaseUnusable, and PluginFailure if a package cannot be read."""
        rows = await self.database.do(ControlFile.bindings, org, kind=kind)
        packages = {row.id: row for row in await self.database.do(ControlFile.packages)}
        counting = effective(rows, packages, project or "")
        return [await self._complete(row, packages[row.package]) for row in counting]

    async def target_of(self, attempt: Attempt) -> BindingCall | None:
        """Who gets a delivery, if it is for a binding. Raises UnknownPlugin, PluginFailure and
        DatabaseUnusable."""
        name = attempt.delivery.plugin
        if not name.startswith(PREFIX):
            return None
        bound = await self.find(name.removeprefix(PREFIX))
        if bound is None:
            raise UnknownPlugin(name)
        made = BindingCall(self, bound)
        made.accept(attempt.invocation, len(attempt.delivery.event))
        return made

    async def _complete(self, row: BindingRow, package: PackageRow) -> LiveBinding:
        settings = self._settings()
        try:
            plugin = await trio.to_thread.run_sync(plugin_at, package.folder)
        except Refused as refused:
            raise PluginFailure(_changed(package, refused.message)) from None
        org = settings.orgs.get(row.org)
        inactive = "" if row.active else "the binding is disabled"
        if org is None or not org.tokens:
            inactive = "its org has no token in the settings of the control plane"
        return LiveBinding(
            row,
            package,
            plugin,
            await self._secrets_of(row, settings),
            _hide_of(row, org),
            package.unavailable or inactive,
        )

    async def _secrets_of(self, row: BindingRow, settings: ControlSettings) -> Secrets:
        wanted: Mapping[str, str | None] = json.loads(row.record).get("secrets", {})
        found = {slot: settings.secret(uri) for slot, uri in wanted.items() if uri is not None}
        values = {slot: value for slot, value in found.items() if value is not None}
        known = self._secrets.pop(row.id, None)
        if known is None or known != values:
            known = await trio.to_thread.run_sync(Secrets, values)
        self._secrets[row.id] = known
        if len(self._secrets) > _MOST_LOADED:
            del self._secrets[next(iter(self._secrets))]
        return known

    # --- calls ----------------------------------------------------------------------------------------------

    async def make(self, made: BindingCall, request: CallRequest) -> CallResult:
        """Make a call. From before it looks at the binding it can be cancelled by `run`."""
        calls = self._calls.setdefault(made.binding, [])
        calls.append(made)
        try:
            for _ in range(_MOST_CHANGES):
                bound = await self.find(made.binding)
                if bound is None:
                    raise UnknownPlugin(made.name)
                made.bound = bound
                if bound.inactive:
                    raise _refusal(bound.row.id, bound.inactive)
                await trio.to_thread.run_sync(self._require_unchanged, bound.package)
                loaded = self._load(bound)
                try:
                    asked = request._replace(plugin=loaded.name, tool=bound.row.export, kind=None)
                    return await self._supervisor.make(asked)
                except (Unavailable, UnknownPlugin):  # it has not begun
                    if self._loaded.get(made.binding) is loaded:
                        raise
            raise PluginFailure(_changing(made.binding))
        finally:
            calls.remove(made)
            if not calls:
                self._calls.pop(made.binding, None)

    def _load(self, bound: LiveBinding) -> _Loaded:
        """The Spec for a binding as it is."""
        known = self._loaded.pop(bound.row.id, None)
        if known is None or known.process_key != bound.process_key:
            self._number += 1
            fresh = _Loaded(f"{bound.name}#{self._number}", bound.process_key)
            self._supervisor.add(
                Spec(
                    fresh.name,
                    bound.package.folder,
                    contract=bound.package.contract,
                    policy=self._policy,
                    environ=self._environ,
                    services=Services(gateway=self._api_gateway_of(bound.row)),
                    secrets=bound.secrets,
                    hide=bound.hide,
                    options=bound.options,
                    numbers={"idle": _IDLE_SECONDS},
                )
            )
            if known is not None:
                self._retire(known)
            known = fresh
        self._loaded[bound.row.id] = known
        idle = [each for each in self._loaded if each not in self._calls]
        for each in idle[: max(0, len(self._loaded) - _MOST_LOADED)]:
            self._retire(self._loaded.pop(each))
        return known

    def _api_gateway_of(self, row: BindingRow) -> BindingApiGateway:
        """Makes credentials for calls by a binding, by the settings as they are then."""

        def find() -> OrgApiGateway | None:
            org = self._settings().orgs.get(row.org)
            return None if org is None else org.gateway

        async def hold(call: str, token: str) -> str | None:
            for each in self._calls.get(row.id, ()):
                if each.id == call:
                    await each.hold(token)
                    return each.request.caller
            return None

        return BindingApiGateway(row.id, find, hold, self._ledger)

    def _require_unchanged(self, package: PackageRow) -> None:
        """Raises PluginFailure if the files of a package are not those that were imported. They are read
        again only if they look different than when they were read last."""
        try:
            looks = _looks(package.folder)
            if self._checked.get(package.folder) == (package.digest, looks):
                return
            found = list_package(package.folder).digest
        except (OSError, PackageFault) as fault:
            raise PluginFailure(_changed(package, str(fault))) from None
        if found != package.digest:
            raise PluginFailure(_changed(package, f"its files have the digest {found}"))
        self._checked[package.folder] = package.digest, looks

    async def record_lost(self, ledger: Ledger) -> None:
        """Write records of the calls that ran when the last daemon ended. Raises DatabaseUnusable."""
        lost = [
            row
            for code in (UNKNOWN, NOT_STARTED)
            for row in await ledger.do(LedgerFile.invocations, code=code, most=_MOST_LOST)
        ]
        for row in lost:
            bound = None
            if row.plugin.startswith(PREFIX) and await self.database.do(ControlFile.record, row.id) is None:
                with suppress(PluginFailure):
                    bound = await self.find(row.plugin.removeprefix(PREFIX))
            if bound is not None:
                what = "the call did" if row.started else "it asked the plugin"
                outcome = Outcome("crashed", "call", f"the daemon ended before {what}", "daemon")
                call = BindingCall(self, bound)
                call.accept(row.id, row.input_bytes)
                end = CallEnd(outcome, written=bool(row.started), began=row.accepted, ended=row.ended or 0.0)
                await call.record(end)

    # --- changes --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """The database or the settings may have changed."""
        self._news.set()

    async def run(self) -> None:
        """Keep calls and Specs in step with the database, until this task is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._remove_retired, nursery)
            while True:
                await self._news.wait()
                self._news = trio.Event()
                for name in {*self._calls, *self._loaded}:
                    try:
                        await self._follow(name)
                    except DatabaseUnusable:
                        self.wake()  # new calls are refused meanwhile
                        await trio.sleep(_RETRY_SECONDS)

    async def _follow(self, name: str) -> None:
        try:
            bound = await self.find(name)
        except PluginFailure:
            bound = None
        is_over = bound is None or bool(bound.inactive)
        if is_over:
            for call in self._calls.get(name, ()):
                call.cancel()
        loaded = self._loaded.get(name)
        if loaded is not None and (bound is None or is_over or loaded.process_key != bound.process_key):
            self._retire(self._loaded.pop(name))

    def _retire(self, loaded: _Loaded) -> None:
        self._retired.send_nowait(loaded.name)

    async def _remove_retired(self, nursery: trio.Nursery) -> None:
        async for name in self._retiring:
            nursery.start_soon(self._remove, name)

    async def _remove(self, name: str) -> None:
        with suppress(UnknownPlugin):
            await self._supervisor.stop(name, math.inf)  # each of its calls has a deadline of its own
            await self._supervisor.remove(name)


class BindingCall:
    """One call by a binding: its target at the desk."""

    def __init__(self, running: RunningBindings, bound: LiveBinding) -> None:
        self.bound = bound  # as it was when it was looked at last
        self.binding, self.name = bound.row.id, bound.name
        self.invocation: dict[str, Any] | None = None
        contract = find_contract(bound.plugin.contract)
        assert contract.prepared_calls is not None
        self._contract = contract.prepared_calls
        self.effect: Effect = self._contract.effect(bound.plugin, bound.row.export)
        self.hook_keys: Sequence[str] = contract.calls.get("hook", ())
        self._running = running
        self._scope = trio.CancelScope()
        self._account: CallAccount | None = None
        self.id, self._input_bytes = "", 0
        self.request = CallRequest(bound.name, bound.row.export, kind=bound.row.kind)
        self._with_token: Secrets | None = None  # the binding's, and the token that was made for this call

    def accept(self, call: str, input_bytes: int) -> None:
        self.id, self._input_bytes = call, input_bytes

    async def hold(self, token: str) -> None:
        """Hide this token, too, in all that is told and kept of the call."""
        known = {**self.secrets(), f"token {len(self.secrets())}": token}
        self._with_token = await trio.to_thread.run_sync(Secrets, known)

    def secrets(self) -> Secrets:
        return self._with_token or self.bound.secrets

    def cancel(self) -> None:
        """The binding was disabled."""
        if self._account is not None:
            self._account.reason = DISABLED
        self._scope.cancel()

    async def make(self, request: CallRequest) -> CallResult:
        """Make the call, once. Raises PluginError, PluginFailure and DatabaseUnusable. Its record is in the
        database when this returns or raises."""
        end = CallEnd(GIVEN_UP, began=time.time())
        context = {**(request.context or {}), "invocation_id": self.id}
        self.request = request._replace(context=context, on_progress=self._hiding(request.on_progress))
        result: CallResult | None = None
        try:
            with open_account() as self._account, self._scope:
                result = await self._running.make(self, self.request)
            if result is None and self._account.invocation is None:  # it has not begun
                raise _refusal(self.binding, "it was disabled meanwhile")
            if result is None:
                message = f"the binding {self.binding} was disabled while the call ran"
                raise PluginFailure(Outcome("cancelled", "call", message, DISABLED))
            end = end._replace(outcome=Outcome("ok", "call", "the plugin answered"))
            value = await off_loop_if_large(self.secrets().hide_in, result.value)
            return result._replace(value=value, invocation=self._describe(end))
        except (PluginError, PluginFailure) as error:
            refusal = error.refusal if isinstance(error, PluginError) else None
            end = end._replace(outcome=error.outcome, refusal=refusal)
            error.invocation = self._describe(end)
            raise
        except (DatabaseUnusable, UnknownPlugin) as error:
            end = end._replace(outcome=Outcome("launch_failed", "call", str(error), "binding"))
            raise
        finally:
            await self.record(end)

    def _hiding(self, on_progress: OnProgress | None) -> OnProgress | None:
        if on_progress is None:
            return None
        return lambda value: on_progress(self.secrets().hide_in(value))

    def _describe(self, end: CallEnd) -> dict[str, Any]:
        """The contract's record of the call. Where the call was not prepared, it is made of what is known."""
        if self._account is not None and self._account.invocation is not None:
            return self._account.invocation
        bound = self.bound
        scope = {"org_id": bound.row.org} | ({"project_id": bound.row.project} if bound.row.project else {})
        ids = {**(self.request.context or {}), **scope, "invocation_id": self.id}
        call = Call(bound.row.kind, bound.row.export, None, ids)
        found = self._contract.record(
            bound.plugin, call, end._replace(ended=end.ended or time.time()), bound.options
        )
        return dict(self.secrets().hide_in(found))

    async def record(self, end: CallEnd) -> None:
        """Store the record of the call."""
        with trio.CancelScope(shield=True):
            self.invocation = self._describe(end)
            ended = end._replace(ended=end.ended or time.time())
            row = record_row(
                self.id, self.bound.row, self.invocation, ended, self._account, self._input_bytes
            )
            await self._running.database.finish(lambda file: file.add_record(row))

    async def abandon(self) -> None:
        await self.record(CallEnd(GIVEN_UP, began=time.time()))


def _hide_of(row: BindingRow, org: OrgSettings | None) -> tuple[str, ...]:
    """The org's hidden secrets, by the slots that they are in."""
    wanted: Mapping[str, str | None] = json.loads(row.record).get("secrets", {})
    return tuple(
        slot + hiding.removeprefix(name)
        for hiding in (() if org is None else org.hide)
        for name in (hidden_name(hiding),)
        for slot, uri in wanted.items()
        if uri == f"secret://{row.org}/{name}"
    )


def _looks(folder: str) -> str:
    """A digest of what says whether a file of the folder was changed: nobody can set the time of its last
    change. Raises OSError."""
    found = hashlib.sha256()
    for path, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted((*files, ".")):
            status = os.lstat(os.path.join(path, name))
            looks = (path, name, status.st_ino, status.st_size, status.st_mode, status.st_ctime_ns)
            found.update(repr(looks).encode())
    return found.hexdigest()


def _refusal(binding: str, why: str) -> InvalidCall:
    return InvalidCall(Refusal(0, INACTIVE, f"the binding {binding} takes no calls: {why}", "failed"))


def _changing(binding: str) -> Outcome:
    message = f"the binding {binding} changed again and again before the call could begin"
    return Outcome("overloaded", "call", message, "changing", "call again later")


def _changed(package: PackageRow, what: str) -> Outcome:
    what = what.replace(package.folder, package.id)  # orgs are shown no paths of the operator's
    message = f"the stored package {package.id} is not what was imported: {what}"
    return Outcome("policy_denied", "launch", message, "package_changed", "import it again")
