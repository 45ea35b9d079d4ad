"""The library for programs on asyncio. It has the names of runner/library.py, and they mean the same.

    async with runner.aio.open_plugin("./demo") as plugin:
        print(await plugin.call("demo_echo", {"text": "hello"}))

Plugins live on trio, in a thread that all event loops of the process share (runner/trio_thread.py). Services
and callbacks run on the loop of the task that gave them. They may be coroutine functions, and see the context
variables of that task. In a task of trio the same functions need no thread: an anyio program uses this module
on either backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import trio

from runner import library
from runner.exceptions import InvalidCall, NotOnTrio, PluginError, PluginFailure, WouldBlock
from runner.library import (
    BusRefused,
    CallConfirmation,
    Completion,
    Delegation,
    DelegationRequest,
    DirectoryEntry,
    Fetched,
    Granted,
    HostError,
    Identity,
    Notice,
    Outcome,
    Path,
    Progress,
    Result,
    Snapshot,
    hide_secrets,
)
from runner.plugin import Plugin
from runner.protocol.bus import Member, check_topic
from runner.protocol.bus import Subscription as TrioSubscription
from runner.protocol.calls import CallRequest, Confirm
from runner.protocol.calls import OnProgress as OnProgressOnTrio
from runner.protocol.dialect import Kind
from runner.protocol.host_services import (
    Broker,
    Elicitation,
    Fetcher,
    FileReader,
    Gateway,
    KeyValueStore,
    LanguageModel,
    MemoryService,
    Roots,
    Sampling,
)
from runner.protocol.memory import EVENTS, Share
from runner.session.backlog import Backlog
from runner.trio_thread import TrioSide, trio_side

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

_T = TypeVar("_T")
# A plain function or a coroutine function. Each is awaited before the next, and before the call returns.
OnProgress = Callable[[Mapping[str, Any]], Awaitable[None] | None]


class OpenPlugin:
    """A running plugin that can be called, from any event loop. Made by `open_plugin`."""

    def __init__(self, opened: library.OpenPlugin, side: TrioSide) -> None:
        self._opened = opened
        self._side = side
        self._waiting = Share(EVENTS)  # progress of all calls that waits for callbacks

    @property
    def plugin(self) -> Plugin:
        """The plugin as its manifest describes it."""
        return self._opened.plugin

    @property
    def substituted(self) -> str:
        """Reason why the last answer was a substitute: a hook failed, and the contract defines an answer for
        that case. Empty if the plugin answered itself. Valid until another task calls the plugin."""
        return self._opened.substituted

    @property
    def identity(self) -> Identity:
        """Id and version from the handshake; before the handshake, from the manifest."""
        return self._opened.identity

    @property
    def report(self) -> dict[str, Any] | None:
        """The report (`runner.report.v1`), when the plugin has ended. Where each call has a process of its
        own, it is the report of the last call; where calls share processes, of the last one that ended."""
        return self._opened.report

    @property
    def invocation(self) -> dict[str, Any] | None:
        """The contract's own record of the call that ended last, where the contract has one. Also of a call
        that failed, was refused or was cancelled."""
        return self._opened.invocation

    @property
    def stderr(self) -> str:
        """The end of the plugin's stderr so far. Where each call has a process of its own, that of the last
        call."""
        return self._opened.stderr

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
        call = partial(self._opened.call, name, input, kind=kind, seconds=seconds, context=context)
        if on_progress is None:
            request = CallRequest("", name, input, kind, seconds, context)
            begin = partial(self._opened.begin_call, request)
            return await self._side.call(begin, call)
        tell = self._side.callbacks()(on_progress)
        return await self._side.run(call_with_progress, call, tell, self._waiting)

    async def list(self, what: str = "tools") -> Sequence[Mapping[str, Any]]:
        """List what the plugin exposes: "tools", and what else its contract can list, such as "prompts". Each
        entry is an object of the contract, with a name (resources: a uri)."""
        return await self._side.run(self._opened.list, what)

    async def notify(self, method: str, params: Any = None) -> None:
        """Send a notification, which has no answer. Raises InvalidCall if the contract has no such method."""
        await self._side.run(self._opened.notify, method, params)

    def events(self) -> AsyncIterator[Notice | Progress]:
        """The plugin's notifications and progress, until it ends. For one reader. Of unread events, at most
        256 and 32 MiB are held; further ones are dropped."""
        return Reader(self._opened.events().__anext__, self._side)


class Reader(AsyncIterator[_T]):
    """Reads an iterator of trio, one value at a time: what waits is bounded on trio's side."""

    def __init__(self, read: Callable[[], Awaitable[_T]], side: TrioSide) -> None:
        self._read = read
        self._side = side
        self._unread: deque[_T] = deque()  # a value that came when its reader was cancelled

    async def __anext__(self) -> _T:
        if not self._unread:
            await self._side.run(self._read_one)
        return self._unread.popleft()

    async def _read_one(self) -> None:
        self._unread.append(await self._read())


async def call_with_progress(
    call: Callable[..., Awaitable[_T]], tell: Callable[[Mapping[str, Any]], Awaitable[Any]], share: Share
) -> _T:
    """Make a call on trio. `tell` gets its progress piece by piece, all of it before this returns. What
    waits for `tell` is bounded like events, so that the plugin and its other callers do not wait for it."""
    waiting = Backlog()
    waiting.share = share
    scope = trio.CancelScope()
    fault: Exception | None = None
    failure: BaseException | None = None

    async def tell_all() -> None:
        nonlocal fault
        try:
            async for each in waiting:
                await tell(each.value)
        except Exception as error:  # noqa: BLE001 -- raised to the caller whose callback it is
            fault = error
            scope.cancel()

    on_progress: OnProgressOnTrio = lambda value: waiting.tell(Progress(None, value), None)  # noqa: E731
    # What the call raises is kept until after the nursery, which would put it into a group.
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_all)
            try:
                with scope:
                    value = await call(on_progress=on_progress)
            except BaseException as error:  # noqa: BLE001 -- raised again below
                failure = error
            waiting.close()
    finally:
        waiting.discard()
    if fault is not None or failure is not None:
        try:
            raise fault or failure or AssertionError
        finally:
            del fault, failure
    return value


# --- services -----------------------------------------------------------------------------------------------


class Subscription(Reader[Snapshot]):
    """A topic: `with bus.subscribe(TOPIC) as news: async for each in news: …`.

    It begins when it is made. If more than 64 MiB wait for its reader, it ends: the reader gets what was
    published until then, and after that BusRefused is raised.
    """

    def __init__(self, bus: library.SnapshotBus, topic: str) -> None:
        check_topic(topic)
        super().__init__(lambda: anext(self._made[0]), trio_side())
        self._made: list[TrioSubscription] = []
        # Before everything that this task does with plugins afterwards.
        self._side.post(lambda: self._made.append(bus.subscribe(topic)))

    def close(self) -> None:
        """Stop the subscription. Publications that are waiting can still be read."""
        self._side.post(lambda: self._made[0].close())

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SnapshotBus:
    """A bus for plugins that are opened by this module. `publish` and `forget` are awaited: the topics live
    on trio."""

    def __init__(self) -> None:
        self.on_trio = library.SnapshotBus()

    @property
    def version(self) -> int:
        """Of the last publication on any topic."""
        return self.on_trio.version

    @property
    def held(self) -> int:
        """Bytes of all values."""
        return self.on_trio.held

    @property
    def focused_screen(self) -> str:
        """The screen that the host shows in front. Only its owner may ask the host to close it."""
        return self.on_trio.focused_screen

    @focused_screen.setter
    def focused_screen(self, name: str) -> None:
        self.on_trio.focused_screen = name

    async def publish(self, topic: str, payload: bytes) -> int:
        """Publish as the host, and return the publication's version. Raises BusRefused."""
        return await trio_side().run(awaited(self.on_trio.publish), topic, payload)

    async def room(self, topic: str, publisher: Member | None = None) -> None:
        """Wait until the topic's subscribers have room for more, for 5 seconds at most. Code of the host that
        publishes much should: a subscriber for which too much waits is ended."""
        await trio_side().run(self.on_trio.room, topic, publisher)

    def get(self, topic: str) -> Snapshot | None:
        """The last publication on the topic, or None."""
        return self.on_trio.get(topic)

    def subscribe(self, topic: str) -> Subscription:
        """What plugins publish on the topic from now on. The host's own publications are not echoed."""
        return Subscription(self.on_trio, topic)

    async def forget(self, topic: str) -> None:
        """Drop the topic's value. Subscribers are not told."""
        await trio_side().run(awaited(self.on_trio.forget), topic)

    def register_action(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Let plugins invoke `name` (host/action/invoke): the handler gets the payload and returns one. It
        goes before a plugin's action of the same name. Raises ValueError if the name is taken."""
        self.on_trio.register_action(name, trio_side().callbacks()(handler))


def awaited(function: Callable[..., _T]) -> Callable[..., Awaitable[_T]]:
    async def call(*args: Any) -> _T:
        return function(*args)

    return call


class Services(NamedTuple):
    """The services of a host. None: it has no such service, and the plugin gets the contract's answer for
    that."""

    memory: MemoryService | None = None
    llm: LanguageModel | None = None
    broker: Broker | None = None
    roots: Roots | None = None
    sampling: Sampling | None = None
    elicitation: Elicitation | None = None
    storage: KeyValueStore | None = None
    bus: SnapshotBus | None = None  # plugins with the same one share their topics and actions
    log_level: str | None = None  # the lowest level of a plugin's log messages that become events
    files: FileReader | None = None
    fetcher: Fetcher | None = None
    gateway: Gateway | None = None


class _Service:
    """A service for callers on trio."""

    def __init__(self, service: object, side: TrioSide) -> None:
        self._service = service
        self._callback = side.callbacks()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return self._callback(getattr(self._service, name))


def services_on_trio(given: Services | None, side: TrioSide) -> library.Services | None:
    if given is None:
        return None
    if not isinstance(given, Services):
        raise ValueError("services: it has to be a runner.aio.Services")
    found: dict[str, Any] = {
        name: _Service(each, side) for name, each in given._asdict().items() if each is not None
    }
    if given.bus is not None:
        found["bus"] = given.bus.on_trio
    if given.log_level is not None:
        found["log_level"] = given.log_level
    return library.Services(**found)


# --- the functions ------------------------------------------------------------------------------------------


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
    """Launch a plugin in its cage and wait until it is ready. It ends with the context. Takes and raises what
    `runner.open_plugin` does; `services` run on the event loop of this task."""
    secrets = hide_secrets(secrets)
    here = trio_side()
    opening = library.open_plugin(
        path,
        policy=policy,
        services=services_on_trio(services, here),
        config=config,
        secrets=secrets,
        contract=contract,
        server=server,
        state_dir=state_dir,
        args=args,
        env=env,
        limits=limits,
        options=options,
        environ=environ,
        staged=staged,
        hide=hide,
        ssh=ssh,
        confirm=confirm,
        parked=parked,
    )
    async with here.enter(opening) as opened:
        yield OpenPlugin(opened, here)


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
) -> Result:
    """Open a plugin, call it once, and end it. Takes and raises what `open_plugin` and `call` do."""
    if "secrets" in opening:
        opening["secrets"] = hide_secrets(opening["secrets"])
    here = trio_side()
    given: Any = {**opening, "services": services_on_trio(opening.get("services"), here)}
    run = partial(library.run, path, name, input, kind=kind, seconds=seconds, context=context, **given)
    if on_progress is None:
        return await here.run(run)
    return await here.run(call_with_progress, run, here.callbacks()(on_progress), Share(EVENTS))


async def call(path: Path, name: str, input: Any = None, **options: Unpack[RunArguments]) -> Any:  # noqa: A002
    """`run`, and return the value only."""
    if "secrets" in options:
        options["secrets"] = hide_secrets(options["secrets"])
    return (await run(path, name, input, **options)).value
