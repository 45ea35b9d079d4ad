"""`runner gateway`: one server on stdin and stdout for one client, with plugins of its own."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import trio
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPDeprecationWarning

from runner.approvals.added_host import add_host
from runner.approvals.confirmations import ConfirmationRecord
from runner.approvals.record import ApprovalsUnusable
from runner.approvals.tools import ToolRecord, tools_folder
from runner.gateway.audit import AuditedMaker
from runner.gateway.calls import Maker, SupervisedMaker
from runner.gateway.catalogue import Catalogue, KnownSource
from runner.gateway.confirm import Confirmer
from runner.gateway.options import StdioOptions
from runner.gateway.questions import ClientQuestions, Context
from runner.gateway.remote import RemoteSource, remote_source
from runner.gateway.remote_call import ELICIT
from runner.gateway.server import ClientGateway
from runner.gateway.settings import DEFAULT_CLIENT
from runner.gateway.telling import Telling
from runner.gateway.tool_source import SupervisedSource
from runner.gateway.via import MOST_LINE
from runner.launch.command import environ_of_places
from runner.lifecycle.supervised import Opener, open_spec
from runner.lifecycle.supervisor import Supervisor, open_supervisor, supervise
from runner.plugin import Plugin
from runner.protocol.dialect import Notice, Progress
from runner.serve.roster import Roster
from runner.serve.watch import open_watch
from sandbox.policy.load import load_policy

_READ_BYTES = 64 << 10
_NAMES = "names/gateway.json"  # beside the record of tools: who has which name


class ClientLines(AsyncIterator[str]):
    """Lines of a client. One that is too long ends the conversation: what follows cannot be trusted."""

    def __init__(self, stream: trio.abc.ReceiveStream, say: Callable[[str], None]) -> None:
        self._stream = stream
        self._say = say
        self._buffer = bytearray()
        self._seen = 0  # bytes of the buffer without an end of line

    async def __anext__(self) -> str:
        while (end := self._buffer.find(b"\n", self._seen)) < 0:
            self._seen = len(self._buffer)
            if self._seen > MOST_LINE:
                self._say(f"the client sent a line of more than {MOST_LINE} bytes; the gateway ends")
                raise StopAsyncIteration
            more = await self._stream.receive_some(_READ_BYTES)
            if not more:
                raise StopAsyncIteration
            self._buffer += more
        line = self._buffer[:end].decode("utf-8", "replace")
        del self._buffer[: end + 1]
        self._seen = 0
        return line


class ClientWriter:
    def __init__(self, stream: trio.abc.SendStream) -> None:
        self._stream = stream
        self._turn = trio.Lock()

    async def write(self, text: str) -> None:
        async with self._turn:
            await self._stream.send_all(text.encode())

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()


class StdioGateway:
    def __init__(
        self,
        options: StdioOptions,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        *,
        opener: Opener = open_spec,
        idle: float | None = None,
    ) -> None:
        """`opener`: opens plugins. `idle`: seconds without a call, after which a plugin ends until the next
        one; None: the numbers of its contract. Raises DocumentError and ApprovalsUnusable."""
        self._opener = opener
        self._numbers = {} if idle is None else {"idle": idle}
        self._options = options
        self._environ = environ
        self._say = say
        self._questions = ClientQuestions()
        self._settings = options.settings.client(options.client)
        self._record = ToolRecord.at(tools_folder(environ))
        self._remotes = self._make_remotes()
        self._context: Context | None = None  # of the first request: it says what the client can answer
        self._loading = trio.Lock()
        self._gateway: ClientGateway | None = None
        self._catalogue: Catalogue | None = None
        self._telling: Telling | None = None

    async def run(self, reads: Any, writes: Any) -> None:
        try:
            await self._run(reads, writes)
        finally:
            if self._telling is not None:
                # Plugins have ended. In a thread: another client, or another gateway, may be writing.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._telling.close)

    def close(self) -> None:
        self._options.close()

    async def _run(self, reads: Any, writes: Any) -> None:
        async with (
            supervise(self._opener, self._hear) as supervisor,
            trio.open_nursery() as nursery,
        ):
            catalogue = self._prepare(supervisor, nursery)
            maker = self._audited(SupervisedMaker(supervisor))
            for remote in self._remotes:
                remote.maker = self._audited(remote)
            self._gateway = ClientGateway(
                catalogue=catalogue,
                maker=maker,
                questions=self._questions,
                client=self._options.client,
                settings=self._settings,
                nursery=nursery,
                confirmer=self._confirmer(),
            )
            self._gateway.on_first = self._load
            self._telling = telling = Telling(self._environ, self._plugin, self._say, self._gateway.tell)
            catalogue.on_remark.append(telling.remarked)
            supervisor.on_report = telling.ended
            nursery.start_soon(telling.write)
            telling.start(self._options.remarks)
            nursery.start_soon(catalogue.follow, supervisor.subscribe())
            server = self._gateway.server()
            await server.run(reads, writes, server.create_initialization_options())
            nursery.cancel_scope.cancel()

    def ask_all(self) -> list[KnownSource]:
        """Start every plugin once and record what it lists. Empty: a signal ended it."""
        return trio.run(self._ask_all)

    async def _ask_all(self) -> list[KnownSource]:
        found: list[KnownSource] = []
        async with open_supervisor() as supervisor, trio.open_nursery() as nursery:
            catalogue = self._prepare(supervisor, nursery)
            nursery.start_soon(end_by_signal, nursery.cancel_scope)
            await self._roster.reload()
            found = await catalogue.all()
            nursery.cancel_scope.cancel()
        return found

    def _prepare(self, supervisor: Supervisor, nursery: trio.Nursery) -> Catalogue:
        self._nursery = nursery
        self._roster = self._make_roster(supervisor)
        sources, remotes = self._roster.sources, self._remotes
        self._catalogue = Catalogue(
            nursery,
            lambda: [*remotes, *(SupervisedSource(each, supervisor) for each in sources())],
            self._record,
            self._say,
            seconds=self._options.list_seconds,
            trust_first=self._options.settings.trust_first,
        )
        return self._catalogue

    def _confirmer(self) -> Confirmer:
        record = ConfirmationRecord(self._environ)
        return Confirmer(
            self._options.client, self._settings, record, self._note, allow_host=self._allow_host
        )

    async def _note(self, entry: Mapping[str, Any]) -> None:
        """Raises OSError."""
        if self._options.audit is not None:
            line = {"at": time.time(), **entry, "kind": "confirm", "about": entry["kind"]}
            await trio.to_thread.run_sync(self._options.audit.write, line)

    async def _allow_host(self, name: str, host: str) -> None:
        """As the person at this client says. Raises ApprovalsUnusable."""
        plugin = self._plugin(name)
        if plugin is None:
            raise ApprovalsUnusable("the plugin is gone", "")
        places = environ_of_places(plugin, self._environ)
        await trio.to_thread.run_sync(add_host, plugin, host, self._environ, places)
        await self._roster.reload(name)

    def _audited(self, maker: Maker) -> Maker:
        file = self._options.audit
        return maker if file is None else AuditedMaker(maker, file, bodies=self._options.bodies)

    def _make_remotes(self) -> list[RemoteSource]:
        # Also without any: a policy that cannot be used is told before the first request.
        policy = load_policy(self._options.policy or self._settings.policy, self._environ)
        options = ("--client", self._options.client) if self._options.client != DEFAULT_CLIENT else ()
        options = ("--policy", self._options.policy) if self._options.policy else options
        given = (
            each._replace(options=options)
            for each in self._options.settings.remotes
            if self._is_chosen(each.name)
        )
        remotes = [remote_source(each, policy.network, self._environ) for each in given]
        if any(fnmatchcase(ELICIT, pattern) for pattern in policy.capabilities.host):
            for remote in remotes:
                remote.services = partial(self._services, remote.name)
        return remotes

    def _is_chosen(self, name: str) -> bool:
        names = self._options.names
        return (not names or name in names) and self._settings.sees_plugin(name)

    def _make_roster(self, supervisor: Supervisor) -> Roster:
        policy = self._options.policy or self._settings.policy
        return Roster(
            supervisor=supervisor,
            ledger=None,
            paths=self._options.config,
            policy=policy,
            settings=None,
            environ=self._environ,
            say=self._say,
            chosen=self._is_chosen,
            services=self._services,
            names=str(tools_folder(self._environ).parent / _NAMES),
            folders=self._options.settings.folders,
            given=self._options.settings.plugins,
            numbers=self._numbers,
        )

    def _plugin(self, name: str) -> Plugin | None:
        return next((each.plugin for each in self._roster.sources() if each.name == name), None)

    def _services(self, name: str) -> Any:
        return None if self._context is None else self._questions.services(name, self._context)

    async def _load(self, context: Context) -> None:
        """Read the configuration at the first request: then it is known what plugins may ask the client."""
        async with self._loading:
            if self._context is None:
                self._context = context
                await self._roster.reload()
                for name in self._options.names:
                    remotes = {each.name for each in self._options.settings.remotes}
                    if name not in {each.name for each in self._roster.sources()} | remotes:
                        self._say(f"there is no plugin {name} in the configuration")
                self._nursery.start_soon(self._follow)
        if self._gateway is not None:
            self._gateway.on_first = None

    async def _follow(self) -> None:
        """Keep up with changes of the configuration, of approvals and of the record of tools."""
        with open_watch() as watch:
            if watch is None or self._catalogue is None:
                return
            self._roster.follow = watch.set
            if watch.set(self._roster.watched):  # it was read before it was watched
                await self._roster.reload()
                await self._catalogue.reload()
            async for _ in watch.changes():
                await self._roster.reload()
                await self._catalogue.reload()

    def _hear(self, plugin: str, event: Notice | Progress) -> None:
        if self._gateway is None or self._catalogue is None or self._telling is None:
            return
        self._catalogue.hear(plugin, event)
        self._gateway.hear(plugin, event)
        self._telling.hear(plugin, event)


async def end_by_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            scope.cancel()


async def _serve(options: StdioOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    # Nothing else may read the client's messages, or write among ours.
    read, write = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    # A terminal is left as it was: others read from it too.
    reader, writer = trio.lowlevel.FdStream(read), trio.lowlevel.FdStream(write)
    lines: Any = ClientLines(reader, say)
    out: Any = ClientWriter(writer)
    gateway = StdioGateway(options, environ, say)
    try:
        async with stdio_server(lines, out) as (reads, writes):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_by_signal, nursery.cancel_scope)
                await gateway.run(reads, writes)
                nursery.cancel_scope.cancel()
            reader.close()  # after a signal, the client may not have closed it
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the client has gone while it was told something
    finally:
        gateway.close()
        reader.close()
        writer.close()


def run(options: StdioOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    warnings.simplefilter("ignore", MCPDeprecationWarning)  # of what the older protocol has and the newer not
    trio.run(_serve, options, environ, say)
