"""The runner for Python programs: on trio `open_plugin` for several calls and `run` for one; `call` blocks.

    async with runner.open_plugin("./demo") as plugin:
        print(await plugin.call("demo_echo", {"text": "hello"}))

A plugin that returns an error raises PluginError. Everything else that goes wrong raises PluginFailure, with
the outcome that `runner call` would print (runner/exceptions.py draws the tree). A contract of one call per
process starts a process for each `call`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import trio

from runner.contracts.registry import find_contract
from runner.event_loop import require_no_loop, require_trio
from runner.exceptions import InvalidCall, NotOnTrio, PluginError, PluginFailure, WouldBlock
from runner.launch.read import contract_of, read_invocation, secret_contents, with_config
from runner.launch.stages import HeldManifest, Invocation
from runner.manifest.load import ManifestRead, contract_at
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.bus import BusRefused, Snapshot, SnapshotBus
from runner.protocol.calls import CallConfirmation, CallRequest, CallResult, Confirm, OnProgress
from runner.protocol.dialect import NO_CONTEXT, Call, Identity, Kind, Notice, Progress, Refusal
from runner.protocol.host_services import (
    Completion,
    Delegation,
    DelegationRequest,
    DirectoryEntry,
    Fetched,
    Granted,
    HostError,
    Services,
)
from runner.protocol.secrets import Secrets
from runner.session import account
from runner.session.open import bare_report, open_prepared, open_session
from runner.session.parking import Parking, open_parking
from runner.session.pool import Pool, open_pool
from runner.session.prepared import PreparedCall, prepare_call
from runner.session.session import Session
from sandbox import surroundings
from sandbox.cell.contents import Contents
from sandbox.network.credentials import read_hidings
from sandbox.spec import Limits, Overrides, is_variable_name
from sandbox.units import parse_limit

# The public names of the package `runner`.
__all__ = [
    "BusRefused",
    "CallConfirmation",
    "Completion",
    "Delegation",
    "DelegationRequest",
    "DirectoryEntry",
    "Fetched",
    "Granted",
    "HostError",
    "Identity",
    "InvalidCall",
    "NotOnTrio",
    "Notice",
    "OpenPlugin",
    "Outcome",
    "PluginError",
    "PluginFailure",
    "Progress",
    "Result",
    "Services",
    "Snapshot",
    "SnapshotBus",
    "WouldBlock",
    "call",
    "open_plugin",
    "run",
]

Path = str | os.PathLike[str]
Result = CallResult


class OpenArguments(TypedDict, total=False):
    """The arguments of `open_plugin`."""

    policy: Path | None
    services: Services | None
    config: Any
    secrets: Mapping[str, Any] | None
    contract: str | None
    server: str | None
    state_dir: Path | None
    args: Sequence[str]
    env: Mapping[str, str] | None
    limits: Mapping[str, str | float] | None
    options: Mapping[str, str] | None
    environ: Mapping[str, str] | None
    staged: bool
    hide: Sequence[str]
    ssh: Sequence[str]
    confirm: Confirm | None


class RunArguments(OpenArguments, total=False):
    """The arguments of `run`."""

    kind: Kind | None
    seconds: float | None
    context: Mapping[str, Any] | None
    on_progress: OnProgress | None


class OpenPlugin:
    """A running plugin that can be called. Made by `open_plugin`."""

    def __init__(
        self, plugin: Plugin, session: Session | None, settings: _SessionSettings, pool: Pool | None
    ) -> None:
        self._plugin = plugin
        self._session = session  # None: each call has its own, or one of the pool's
        self._pool = pool  # for contracts that prepare their calls
        self._settings = settings
        self._kind = next(iter(find_contract(plugin.contract).calls))
        self._invocation: dict[str, Any] | None = None
        self._identity: Identity | None = None
        self._report: dict[str, Any] | None = None
        self._stderr = ""
        self._send_event, self._events = trio.open_memory_channel[Notice | Progress](0)
        self._over = trio.Event()

    @property
    def plugin(self) -> Plugin:
        """The plugin as its manifest describes it."""
        return self._plugin

    @property
    def substituted(self) -> str:
        """Reason why the last answer was a substitute: a hook failed, and the contract defines an answer for
        that case. Empty if the plugin answered itself. Valid until another task calls the plugin."""
        return self._session.substituted if self._session is not None else ""

    @property
    def identity(self) -> Identity:
        """Id and version from the handshake; before the handshake, from the manifest."""
        known = self._session.identity if self._session is not None else self._identity
        return known or Identity(self._plugin.id, self._plugin.version)

    @property
    def report(self) -> dict[str, Any] | None:
        """The report (`runner.report.v1`), when the plugin has ended. Where each call has a process of its
        own, it is the report of the last call; where calls share processes, of the last one that ended."""
        if self._session is not None:
            return self._session.report
        return self._report or (self._pool.report if self._pool is not None else None)

    @property
    def invocation(self) -> dict[str, Any] | None:
        """The contract's own record of the call that ended last, where the contract has one. Also of a call
        that failed, was refused or was cancelled."""
        return self._invocation

    @property
    def stderr(self) -> str:
        """The end of the plugin's stderr so far. Where each call has a process of its own, that of the last
        call."""
        return self._session.stderr if self._session is not None else self._stderr

    @property
    def over(self) -> trio.Event:
        """Set when the plugin can be called no more. Where each call has a process, it is never set."""
        return self._over if self._session is None else self._session.state.over

    @property
    def parked(self) -> int:
        """Cages that calls can take at once."""
        return 0 if self._settings.parking is None else self._settings.parking.waiting

    @property
    def pid(self) -> int | None:
        """The first process of its cell. None: each call has a process of its own."""
        return None if self._session is None else self._session.state.cell.plugin_pid

    def on_stderr(self, take: Callable[[bytes], None]) -> None:
        """Call `take` with the end of its stderr so far, and with all that follows. Of a plugin with secrets
        nothing follows: a secret may be cut there, and could not be recognised."""
        if self._session is not None:
            self._session.state.record.forward_stderr_to(take)

    async def call(
        self,
        name: str,
        input: Any = None,  # noqa: A002 -- what it is called everywhere else
        *,
        kind: Kind | None = None,
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Call the plugin and return its answer as JSON values. `kind`: None is the first that the contract
        has, mostly "tool". `seconds` replaces the timeout of the contract; the `call` limit still applies. If
        this task is cancelled, the call is cancelled, and the plugin keeps running."""
        request = CallRequest("", name, input, kind, seconds, context, on_progress)
        await self._require_yes(request)
        if self._session is not None:
            return await self._session.call(self._checked(request), seconds=seconds, on_progress=on_progress)
        return (await self._call_in_own_process(request)).value

    async def make(self, request: CallRequest) -> CallResult:
        """`call`, with what is known about this very call: other calls may run at the same time. The report
        is empty if the process lives on."""
        await self._require_yes(request)
        if self._session is None:
            return await self._call_in_own_process(request)
        call = self._checked(request)
        value = await self._session.call(call, seconds=request.seconds, on_progress=request.on_progress)
        return CallResult(value, self.identity, {}, self._session.stderr)

    async def _call_in_own_process(self, request: CallRequest) -> CallResult:
        call = self._checked(request)
        try:
            if self._pool is not None:
                result = await self._call_prepared(self._pool, call, request)
            else:
                result = await self._settings.once(call, request)
        except (PluginError, PluginFailure) as error:
            self._report, self._stderr = error.report, error.stderr
            raise
        self._identity, self._stderr = result.identity, result.stderr
        self._report = result.report or None
        return result

    def begin_call(self, request: CallRequest, on_woken: Callable[[], None]) -> Callable[[], Any] | None:
        """Begin a call that no task waits for. Returns a function that has to be called after `on_woken` was
        called, and returns or raises what `call` does; called before, it gives the call up. None: `call` has
        to make it."""
        if self._settings.confirm is not None:
            return None
        call = self._checked(request)
        opened = None if self._session is None else self._session.begin(call, request.seconds, on_woken)
        return None if opened is None or self._session is None else partial(self._session.finish, opened)

    async def _require_yes(self, request: CallRequest) -> None:
        """Raises PluginFailure if the person who has to be asked does not say yes."""
        confirm = self._settings.confirm
        if confirm is None or request.kind not in (None, self._kind):
            return
        from runner.session.confirming import require_yes  # here: a launch loads nothing of it

        await require_yes(confirm, self._plugin, request, self._settings.environ, self.list)

    def _checked(self, request: CallRequest) -> Call:
        check_seconds(request.seconds)
        context = NO_CONTEXT if request.context is None else _check_context(request.context)
        kind = request.kind or self._kind
        if request.trace:
            taken = find_contract(self._plugin.contract).calls.get(kind, ())
            context = {**context, **{name: text for name, text in request.trace.items() if name in taken}}
        return Call._make((kind, request.tool, request.input, context))

    async def _call_prepared(self, pool: Pool, call: Call, request: CallRequest) -> CallResult:
        def given_up(record: dict[str, Any] | None) -> None:
            self._invocation = record
            account.enter(record)

        try:
            prepared = await self._settings.prepare(call, request.seconds, given_up)
        except (PluginError, PluginFailure) as error:
            self._invocation = error.invocation
            account.enter(error.invocation)
            raise
        try:
            return await pool.call(prepared, request.on_progress)
        finally:
            self._invocation = pool.invocation

    async def list(self, what: str = "tools") -> Sequence[Mapping[str, Any]]:
        """List what the plugin exposes: "tools", and what else its contract can list, such as "prompts". Each
        entry is an object of the contract, with a name (resources: a uri)."""
        if self._pool is not None:  # nothing runs before the first call, and the manifest lists everything
            await trio.lowlevel.checkpoint()
            return [{"name": name} for name in dict(self._plugin.exports).get(what, ())]
        listed: Sequence[Mapping[str, Any]] = await self.call(what, kind="list")
        return listed

    async def notify(self, method: str, params: Any = None) -> None:
        """Send a notification, which has no answer. Raises InvalidCall if the contract has no such method."""
        await trio.lowlevel.checkpoint()
        if self._session is None:
            message = (
                f"the contract {self._plugin.contract} has no notifications: each process gets one request"
            )
            raise InvalidCall(Refusal(0, "not_found", message, "not_found"))
        self._session.notify(method, params)

    def events(self) -> AsyncIterator[Notice | Progress]:
        """The plugin's notifications and progress, until it ends. For one reader. Of unread events, at most
        256 and 32 MiB are held; further ones are dropped."""
        if self._session is not None:
            return self._session.events()
        if self._pool is not None:
            return self._pool.events
        return self._events.__aiter__()


class _SessionSettings(NamedTuple):
    """The arguments that all sessions of one plugin share."""

    invocation: Invocation
    environ: Mapping[str, str]
    services: Services | None
    config: Any
    secrets: Secrets | None
    contents: Contents | None = None  # the secrets that the cage delivers
    parking: Parking | None = None  # for calls that have a process of their own
    confirm: Confirm | None = None

    def session(
        self, call: Call | None = None, seconds: float | None = None
    ) -> AbstractAsyncContextManager[Session]:
        return open_session(
            self.invocation,
            environ=self.environ,
            services=self.services,
            config=self.config,
            secrets=self.secrets,
            contents=self.contents,
            call=call,
            seconds=seconds,
            parking=self.parking,
        )

    async def prepare(
        self, call: Call, seconds: float | None, on_given_up: Callable[[dict[str, Any] | None], None]
    ) -> PreparedCall:
        """Complete a call before its process is started. Raises InvalidCall and PluginFailure, with a
        report."""
        try:
            return await prepare_call(
                self.invocation,
                call,
                seconds=seconds,
                secrets=self.secrets,
                config=self.config,
                services=self.services,
                on_given_up=on_given_up,
            )
        except (PluginError, PluginFailure) as error:
            report = bare_report(error.outcome)
            error.report = report if error.invocation is None else {**report, "invocation": error.invocation}
            raise

    def prepared_session(
        self, prepared: PreparedCall, on_made: Callable[[Session], None]
    ) -> AbstractAsyncContextManager[Session]:
        return open_prepared(
            prepared,
            environ=self.environ,
            services=self.services,
            config=self.config,
            on_made=on_made,
            parking=self.parking,
        )

    async def once(self, call: Call, request: CallRequest) -> CallResult:
        async with self.session(call, request.seconds) as session:
            value = await session.call(call, seconds=request.seconds, on_progress=request.on_progress)
            if session.is_one_shot:
                await session.conclude()
        assert session.identity is not None and session.report is not None
        return CallResult(value, session.identity, session.report, session.stderr)


@asynccontextmanager
async def open_plugin(
    path: Path,
    *,
    policy: Path | None = None,
    services: Services | None = None,
    config: Any = None,
    secrets: Mapping[str, Any] | None = None,
    contract: str | None = None,
    server: str | None = None,
    state_dir: Path | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    limits: Mapping[str, str | float] | None = None,
    options: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    staged: bool = False,
    hide: Sequence[str] = (),
    ssh: Sequence[str] = (),
    confirm: Confirm | None = None,
    parked: int = 0,
) -> AsyncIterator[OpenPlugin]:
    """Launch a plugin in its cage and wait until it is ready. It ends with the context.

    `path`: the manifest, or the folder it is in. `policy`: a name or a file. `services`: what the plugin may
    ask of this program, where the policy allows it. `config`: for plugins that take one. `secrets`: for
    plugins whose contract sends them, or has them as files (text or bytes); they are never shown, logged or
    reported. `server`: which server of a configuration that lists several. `env`: variables for the plugin.
    `limits`: as on the command line, {"memory": "256M"}. `options`: the contract's own, by name without the
    dashes; for an option that names a file, give the text of the file. `environ`: the operator's environment,
    if it is not this process's. `staged`: keep what it writes to folders of the host apart; the report names
    the changes of each session or call, for `runner diff` and `runner apply`. `hide`: variables that it uses
    and does not get, each with its host: "TOKEN@api.example.com". `ssh`: fingerprints of keys in the
    operator's ssh agent, and the hosts at which it logs in with them. `confirm`: is asked, in a thread,
    before each call of a tool that `runner allow --confirm` names; without it nobody is. `parked`: how many
    cages are made ahead of calls, where each call has a process of its own; no effect otherwise.

    Raises PluginFailure; NotOnTrio outside of trio.run; ValueError if one of the arguments is wrong.
    """
    require_trio()
    if parked < 0:
        raise ValueError(f"parked: {parked} is not a number of cages: 0 or more")
    secrets = hide_secrets(secrets)
    given = OpenArguments(
        policy=policy,
        config=config,
        contract=contract,
        server=server,
        state_dir=state_dir,
        args=args,
        env=env,
        limits=limits,
        options=options,
        staged=staged,
        hide=hide,
        ssh=ssh,
    )
    settings = _SessionSettings(
        await trio.to_thread.run_sync(make_invocation, path, given),
        dict(surroundings.variables() if environ is None else environ),
        services,
        config,
        secrets,
        confirm=confirm,
    )
    # Read here only to learn the contract. The monitor reads it again, and launches by its own reading.
    loaded: ManifestRead = await trio.to_thread.run_sync(_load, settings.invocation)
    plugin = loaded.plugin
    known = None if plugin is None else find_contract(plugin.contract)
    if secrets and known is not None:
        if not {"secrets", "secret_files"} & set(known.takes):
            raise ValueError(
                f"secrets: the contract {known.name} sends its plugins none; pass a variable: env"
            )
        settings = settings._replace(contents=secret_contents(known, secrets))
    one_shot = known is not None and known.one_shot
    async with AsyncExitStack() as stack:
        session: Session | None = None
        pool: Pool | None = None
        calls = None if known is None else known.prepared_calls
        if parked and (one_shot or calls is not None):
            own = () if calls is None else calls.OPTIONS_OF_ONE_CALL
            opening = open_parking(parked, options_of_one_call=own)
            settings = settings._replace(parking=await stack.enter_async_context(opening))
        if calls is not None:
            pool = await stack.enter_async_context(open_pool(settings.prepared_session))
        elif one_shot:
            if settings.parking is not None and not settings.contents:
                settings.parking.fill(settings.invocation, settings.environ)
        else:
            session = await stack.enter_async_context(settings.session())
        if session is not None and session.is_one_shot:
            # It was changed since we read it. A one-shot plugin without a call would have no time limit.
            message = "the manifest was changed while the plugin was opened"
            raise PluginFailure(Outcome("manifest_invalid", "manifest", message, "changed", "open it again"))
        plugin = session.terms.plugin if session is not None else plugin
        assert plugin is not None  # else the monitor has raised what is wrong with the manifest
        opened = OpenPlugin(plugin, session, settings, pool)
        with opened._send_event:
            yield opened


def make_invocation(path: Path, given: OpenArguments) -> Invocation:
    """What `open_plugin` launches with these arguments. May read the manifest. Raises ValueError."""
    policy, state_dir = given.get("policy"), given.get("state_dir")
    for name, value in (("policy", policy), ("state_dir", state_dir)):
        if value is not None and not os.fspath(value):
            raise ValueError(f"{name}: its value is empty")
    options = given.get("options")
    invocation = Invocation(
        manifest=os.fspath(path),
        contract=given.get("contract"),
        server=given.get("server"),
        policy=None if policy is None else os.fspath(policy),
        state_dir=None if state_dir is None else os.fspath(state_dir),
        args=tuple(given.get("args", ())),
        overrides=Overrides(
            env=_check_env(given.get("env") or {}),
            limits=_check_limits(given.get("limits") or {}),
            staged=given.get("staged", False),
            hide=_check_hide(given.get("hide", ())),
            ssh=_check_ssh(given.get("ssh", ())),
        ),
        options=_check_options({} if options is None else options),
        text=path.text if isinstance(path, HeldManifest) else None,
    )
    return with_config(invocation, given.get("config"))


def _load(invocation: Invocation) -> ManifestRead:
    """Read the manifest. Where calls are prepared, the options belong to a call, so they are left out
    here."""
    name = contract_of(invocation)
    prepares = name is not None and find_contract(name).prepared_calls is not None
    return read_invocation(invocation, options={} if prepares else None)


async def run(
    path: Path,
    name: str,
    input: Any = None,  # noqa: A002
    *,
    kind: Kind | None = None,
    seconds: float | None = None,
    context: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    **opening: Unpack[OpenArguments],
) -> CallResult:
    """Open a plugin, call it once, and end it. Takes and raises what `open_plugin` and `call` do."""
    if "secrets" in opening:
        opening["secrets"] = hide_secrets(opening["secrets"])
    _require_kind(path, kind, opening.get("contract"))
    async with open_plugin(path, **opening) as plugin:
        value = await plugin.call(
            name, input, kind=kind, seconds=seconds, context=context, on_progress=on_progress
        )
        stderr = plugin.stderr
    stderr = plugin.stderr or stderr
    return CallResult(value, plugin.identity, plugin.report or {}, stderr, plugin.invocation)


def call(path: Path, name: str, input: Any = None, **options: Unpack[RunArguments]) -> Any:  # noqa: A002
    """`run` for programs without an event loop: blocks this thread until the plugin has ended, and returns
    the value. Takes and raises what `run` does, and WouldBlock in a thread that runs an event loop."""
    require_no_loop()
    if "secrets" in options:
        options["secrets"] = hide_secrets(options["secrets"])
    once = partial(run, path, name, input, **options)
    try:
        return trio.run(once).value
    except BaseExceptionGroup as group:
        # Ctrl-C may interrupt any of trio's tasks. A program without trio expects a plain KeyboardInterrupt.
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        raise KeyboardInterrupt from None


def _require_kind(path: Path, kind: Kind | None, chosen: str | None) -> None:
    """Raises InvalidCall if the contract has no such kind, before anything is started."""
    name = None if kind in (None, "tool", "list") else contract_at(os.fspath(path), chosen)
    if name is not None and kind not in find_contract(name).calls:
        message = f"the contract {name} has no kind {kind!r}; it has {', '.join(find_contract(name).calls)}"
        raise InvalidCall(Refusal(0, "unsupported", message, "unsupported"))


def hide_secrets(secrets: Mapping[str, Any] | None) -> Secrets | None:
    """Wrap secrets so that a traceback with local variables does not show them."""
    if secrets is not None and not isinstance(secrets, Mapping):
        raise ValueError("secrets: it has to be a mapping of names to values")
    return None if secrets is None else Secrets(secrets)


# --- arguments: each check raises ValueError ----------------------------------------------------------------


def _check_hide(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError('hide: it has to be a list, as in ["TOKEN@api.example.com"]')
    return read_hidings(list(map(str, given)), "hide:")


def _check_ssh(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError('ssh: it has to be a list, as in ["SHA256:47DEQpj8…", "git.example.com"]')
    if not given:
        return ()
    from sandbox.network.ssh import read_access

    return read_access(list(map(str, given)), "ssh:")


def _check_context(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError("context: it has to be a mapping of names to values")
    return given


def check_seconds(given: Any) -> None:
    """Check the time limit of a call. None: the limit of its contract."""
    if given is None or (isinstance(given, int | float) and not isinstance(given, bool) and given >= 0):
        return
    raise ValueError(f"seconds: {given!r} is not a time limit: a number of seconds, 0 or more")


def _check_options(given: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    if not isinstance(given, Mapping):
        raise ValueError("options: it has to be a mapping of names to texts")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            message = f"options: the value of {name!r} is not a str"
            raise ValueError(f"{message}; of an option that names a file, give what the file says")
    return tuple(given.items())


def _check_env(given: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    for name, value in given.items():
        if not isinstance(name, str) or not is_variable_name(name):
            raise ValueError(f"env: {name!r} is not the name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"env: the value of {name} must be a str without NUL")
    return tuple(given.items())


def _check_limits(given: Mapping[str, str | float]) -> Limits:
    unknown = [name for name in given if name not in Limits._fields]
    if unknown:
        raise ValueError(
            f"limits: there is no limit {unknown[0]!r}; the limits are {', '.join(Limits._fields)}"
        )
    found: dict[str, Any] = {}
    for name, value in given.items():
        try:
            found[name] = parse_limit(name, value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return Limits(**found)
