"""The gateway at a daemon's door: streamable HTTP, one server for each caller, and every call in the ledger.

Who may come in is decided by the door. A session belongs to the caller who began it: another one does not
find it. Plugins are shared by all callers, so they cannot ask them anything.
"""

from __future__ import annotations

import json
import math
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import trio
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPDeprecationWarning

from runner.approvals.confirmations import ConfirmationRecord
from runner.approvals.tools import ToolRecord, tools_folder
from runner.gateway.calls import Maker
from runner.gateway.catalogue import Catalogue
from runner.gateway.confirm import Confirmer
from runner.gateway.questions import ClientQuestions
from runner.gateway.remote import RemoteSource, remote_source
from runner.gateway.server import ClientGateway
from runner.gateway.settings import DEFAULT_CLIENT, GatewaySettings
from runner.gateway.tool_source import SupervisedSource
from runner.gateway.webhook import Webhook
from runner.ledger.file import LedgerUnusable
from runner.ledger.ledger import Ledger
from runner.ledger.rows import EndOfCall, digest, row_of
from runner.lifecycle.exceptions import UnknownPlugin
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.protocol.dialect import Notice, Progress
from runner.serve.desk import CallAnswer, Desk, failed, off_loop_if_large, refused_answer
from runner.serve.door import Message, Receive, Send
from runner.serve.mounted import DaemonParts
from runner.serve.peer import is_local
from runner.serve.refusal import Refused
from sandbox.policy.load import load_policy

_MOST_SESSIONS = 256  # of one caller
_IDLE_SECONDS = 1800.0
_FEW_REQUESTS = 2  # after which a session counts as used: clients say that they are ready, and list tools
MOST_CALLERS = 64  # with a server each: certificates may name any number
# Before the server of a caller without a session makes room. By then a minute's calls are allowed anew:
# nobody may make more calls by being forgotten.
FORGET_SECONDS = 60.0


class DeskMaker:
    def __init__(self, desk: Desk, nursery: trio.Nursery) -> None:
        self._desk = desk
        self._nursery = nursery

    async def make(self, call: CallRequest) -> CallAnswer:
        try:
            row = await self._desk.accept(call)
        except Refused as refused:
            return refused_answer(refused)
        except UnknownPlugin as unknown:
            return failed(Outcome("launch_failed", "call", str(unknown), "unknown_plugin"))
        if isinstance(row, CallAnswer):
            return row
        answers: list[CallAnswer] = []
        bugs: list[Exception] = []
        done = trio.Event()

        async def make() -> None:
            try:
                answers.append(await self._desk.make(row, call))
            except Exception as bug:  # noqa: BLE001 -- raised below: the daemon and its other calls go on
                bugs.append(bug)
            done.set()

        # In a task of its own: a client that gives up is another outcome than a daemon that ends.
        self._nursery.start_soon(make)
        try:
            await done.wait()
        except trio.Cancelled:
            self._desk.give_up(row.id)
            raise
        if bugs:
            raise bugs[0]
        return answers[0]


class LedgerMaker:
    """Writes calls that no plugin of the daemon gets to its ledger."""

    def __init__(self, maker: Maker, ledger: Ledger) -> None:
        self._maker = maker
        self._ledger = ledger

    async def make(self, call: CallRequest) -> CallAnswer:
        number, started = f"call_{secrets.token_hex(12)}", time.time()
        input_digest = await off_loop_if_large(digest, call.input)
        try:
            await self._ledger.accept(row_of(number, call, input_digest)._replace(started=started))
        except LedgerUnusable as unusable:
            message = f"the call cannot be recorded, so it is not made: {unusable}"
            return failed(Outcome("internal", "call", message, "ledger", unusable.hint))
        made = failed(Outcome("cancelled", "call", "the client gave the call up", "given_up"))
        try:
            made = await self._maker.make(call)
            return made
        finally:
            code = made.error.get("code", "ok")
            traced = {"trace": dict(call.trace)} if call.trace else {}
            record = json.dumps({"outcome": made.error or None, "invocation": None, **traced})
            with trio.CancelScope(shield=True):
                output = await off_loop_if_large(digest, made.value)
                await self._ledger.end(number, EndOfCall(code, output, record, None, started))


class _Sessions(StreamableHTTPSessionManager):
    """The sessions of one caller. When there are as many as there may be, a new one takes the place of that
    which is idle longest, of those that were hardly used if there are any. The SDK would refuse it until a
    session has been idle for half an hour."""

    def __init__(self, server: Server[Any]) -> None:
        super().__init__(server, max_sessions=_MOST_SESSIONS, session_idle_timeout=_IDLE_SECONDS)
        self._uses: Counter[str] = Counter()  # requests of each session after its first

    async def _handle_stateful_request(self, scope: Any, receive: Any, send: Any) -> None:
        for name, value in scope["headers"]:
            if name == b"mcp-session-id" and (session := value.decode("latin-1")) in self._server_instances:
                self._uses[session] += 1
        await super()._handle_stateful_request(scope, receive, send)

    def _admit_session(self, requestor: Any) -> StreamableHTTPServerTransport | None:
        sessions = self._server_instances
        self._uses = Counter({key: self._uses[key] for key in sessions})  # not those that have ended
        if len(sessions) >= _MOST_SESSIONS:
            # While a request of theirs is served, the SDK sets them no deadline.
            idle = [
                (self._uses[key] > _FEW_REQUESTS, scope.deadline, key)
                for key, each in sessions.items()
                if (scope := each.idle_scope) is not None and scope.deadline < math.inf
            ]
            if idle:
                scope = sessions.pop(min(idle)[2]).idle_scope
                assert scope is not None
                scope.cancel()  # the task of the session ends it
        return super()._admit_session(requestor)


class _Caller:
    """A caller, and what serves it."""

    def __init__(self, gateway: ClientGateway, manager: _Sessions) -> None:
        self.gateway = gateway
        self.manager = manager
        self.scope = trio.CancelScope()
        self.requests = 0  # in work
        self.left_at = trio.current_time()

    def is_forgotten(self) -> bool:
        idle = not self.requests and not self.manager._server_instances
        return idle and trio.current_time() - self.left_at >= FORGET_SECONDS


class HttpGateway:
    """An application for the door's path /mcp."""

    def __init__(
        self,
        parts: DaemonParts,
        nursery: trio.Nursery,
        settings: GatewaySettings,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._nursery = nursery
        self._settings = settings
        self._say = say
        self._questions = ClientQuestions()
        self._maker = DeskMaker(parts.desk, nursery)
        self._callers: dict[str, _Caller] = {}
        self._turn = trio.Lock()
        sources, supervisor = parts.roster.sources, parts.supervisor
        remotes: list[RemoteSource] = []
        self._ledger, self._pending = parts.ledger, parts.pending
        self._confirmations = ConfirmationRecord(environ)
        if settings.remotes or settings.webhook:
            policy = load_policy(parts.policy, environ)
            # Without it, `login` would take a client's, which does not count here.
            is_told = parts.policy is not None or settings.client(DEFAULT_CLIENT).policy is not None
            options = ("--policy", policy.name) if is_told else ()
            remotes = [
                remote_source(each._replace(options=options), policy.network, environ)
                for each in settings.remotes
            ]
            if settings.webhook:
                webhook = Webhook(settings.webhook, policy.network, say)
                parts.pending.on_asked = webhook.tell
                nursery.start_soon(webhook.run)
        for remote in remotes:
            remote.maker = LedgerMaker(remote, parts.ledger)
        self._catalogue = Catalogue(
            nursery,
            lambda: [*remotes, *(SupervisedSource(each, supervisor) for each in sources())],
            ToolRecord.at(tools_folder(environ)),
            say,
            trust_first=settings.trust_first,
        )
        nursery.start_soon(self._catalogue.follow, supervisor.subscribe())
        parts.roster.on_reload = lambda: nursery.start_soon(self._catalogue.reload)

    def hear(self, plugin: str, event: Notice | Progress) -> None:
        """What a plugin says beside its answers."""
        self._catalogue.hear(plugin, event)
        for each in self._callers.values():
            each.gateway.hear(plugin, event)

    def questions(self) -> Iterator[dict[str, Any]]:
        """A row for each withheld tool and each confirmation that waits, as the page shows it."""
        for source, tool in self._catalogue.withheld():
            # A terminal would obey some characters of a name.
            command = source.look if tool.acceptable and source.look.isprintable() else ""
            yield {"plugin": source.name, "tool": tool.name, "change": tool.reason, "command": command}
        for row in self._pending.list():
            asked = f"{row['client']} waits for your yes: " if row["kind"] == "call" else "it was refused"
            change = asked + "; ".join(row["lines"])
            command = f"runner ctl approve {row['id']}"
            yield {"plugin": row["plugin"], "tool": row["subject"], "change": change, "command": command}

    async def _note(self, entry: Mapping[str, Any]) -> None:
        """Raises LedgerUnusable."""
        await self._ledger.note("confirm", entry["client"], entry["plugin"], json.dumps(entry))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        name: str = scope["state"]["caller"]
        async with self._turn:
            if name not in self._callers:
                self._make_room()
                self._callers[name] = await self._nursery.start(self._serve, name)
            caller = self._callers[name]
            caller.requests += 1
        try:
            await caller.manager.handle_request(scope, receive, send)
        finally:
            caller.requests -= 1
            caller.left_at = trio.current_time()

    def _make_room(self) -> None:
        """Raises Refused."""
        if len(self._callers) < MOST_CALLERS:
            return
        forgotten = [name for name, each in self._callers.items() if each.is_forgotten()]
        if not forgotten:
            message = f"{MOST_CALLERS} callers use /mcp, which is the most"
            hint = "come back later: a caller makes room a minute after its last session has ended"
            raise Refused(503, "too_many_callers", message, hint, retry_after=FORGET_SECONDS)
        for name in forgotten:
            self._callers.pop(name).scope.cancel()

    async def _serve(
        self,
        caller: str,
        task_status: trio.TaskStatus[_Caller] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        settings = self._settings.client(caller)
        if settings.policy is not None:
            self._say(
                f"the settings of {caller} name a policy, which does not count: a daemon has one for all"
            )
        async with trio.open_nursery() as nursery:
            parts = (self._confirmations, self._note, self._pending)
            confirmer = Confirmer(caller, settings, *parts, keeps=is_local(caller))
            shared = (self._catalogue, self._maker, self._questions)
            gateway = ClientGateway(*shared, caller, settings, nursery, confirmer)
            manager = _Sessions(gateway.server())
            served = _Caller(gateway, manager)
            try:
                with served.scope:
                    async with manager.run():
                        task_status.started(served)
                        await trio.sleep_forever()
            finally:
                gateway.close()
            nursery.cancel_scope.cancel()


def open_gateway(settings: GatewaySettings, environ: Mapping[str, str]) -> Callable[..., HttpGateway]:
    warnings.simplefilter("ignore", MCPDeprecationWarning)

    def make(parts: DaemonParts, nursery: trio.Nursery, say: Callable[[str], None]) -> HttpGateway:
        return HttpGateway(parts, nursery, settings, environ, say)

    return make
