"""The daemon: opens ledger and supervisor, keeps the plugins in step with the configuration, serves the door.

SIGTERM and SIGINT drain: no further calls, those in flight finish or are cancelled at the deadline, then all
plugins end. SIGHUP reads the configuration again. SIGKILL leaves no process of a plugin; the ledger tells the
next daemon which calls were in flight.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import trio

from runner.approvals.record import ApprovalsUnusable
from runner.ledger.file import LedgerBounds, LedgerUnusable
from runner.ledger.ledger import Ledger, open_ledger
from runner.lifecycle.machine import Hold
from runner.lifecycle.supervisor import Supervisor, open_supervisor
from runner.protocol.dialect import Notice, Progress
from runner.serve.alerts import Alerts
from runner.serve.connections import Connections
from runner.serve.deliveries import Deliveries, dead_letter
from runner.serve.desk import Desk
from runner.serve.door import Door
from runner.serve.holds import HoldRecord
from runner.serve.listen import raise_descriptors
from runner.serve.metrics import Metrics
from runner.serve.mounted import DaemonParts, DoorMount, Mounted
from runner.serve.page.board import Board
from runner.serve.page.page import Page
from runner.serve.page.sessions import Sessions
from runner.serve.peer import LOCAL_NAMES, PAGE, DoorPeer, Rules
from runner.serve.pending import PendingConfirmations
from runner.serve.plugins import DoorPlugins
from runner.serve.refusal import Refused
from runner.serve.roster import Roster
from runner.serve.routes import Routes
from runner.serve.service_manager import Notifier, watchdog_seconds
from runner.serve.tls import DoorTls
from runner.serve.watch import Watch, open_watch

if TYPE_CHECKING:
    from runner.serve.control.control import ControlPlane
    from runner.serve.control.running import RunningBindings

MOST_CONNECTIONS = 512
DRAIN_SECONDS = 30.0
_ANSWER_SECONDS = 5.0  # for answers to be sent after the last call has ended
_EXPIRY_SECONDS = 30.0  # between looks for sessions of the page whose time is over
_SESSIONS = "page-sessions.json"  # beside the ledger
_NAMES = "names.json"  # beside the ledger, too: who has which name
_HOLDS = ".holds"  # behind the ledger's name: what is stopped or in quarantine
_OWED_SECONDS = 1.0  # between attempts to write outcomes that the ledger owes
_MOST_TOLD = 300  # characters of a message in the audit: parts of it may be a stranger's
_NOTES_PER_SECOND = 20  # of the audit; more are counted in the metrics only
_STRANGER_SECONDS = 60.0  # between lines about clients whose TLS handshake failed


class ServeOptions(NamedTuple):
    config: tuple[str, ...]
    ledger: str
    listeners: tuple[socket.socket, ...]
    rules: Rules
    tls: DoorTls | None = None  # for TCP
    policy: str | None = None
    settings: str | None = None
    drain_seconds: float = DRAIN_SECONDS
    bounds: LedgerBounds = LedgerBounds()
    most_connections: int = MOST_CONNECTIONS
    body_seconds: float = 30.0
    most_body_bytes: int = 16 << 20
    mount: DoorMount | None = None
    control: str | None = None  # the settings of a control plane
    backend: DoorBackend | None = None  # None: the plugins of `config` run in this process


class DoorBackend(Protocol):
    """Who runs the plugins that a door offers, if not the daemon itself."""

    def open(self, say: Callable[[str], None]) -> AbstractAsyncContextManager[DoorPlugins]: ...
    def roster(self, plugins: DoorPlugins, environ: Mapping[str, str], say: Callable[[str], None]) -> Roster:
        """Of the plugins that `open` gave."""
        ...


class Daemon:
    def __init__(
        self,
        options: ServeOptions,
        supervisor: DoorPlugins,
        ledger: Ledger,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        mounted: Mounted | None = None,
        control: ControlPlane | None = None,
        holds: HoldRecord | None = None,
    ) -> None:
        self._options = options
        self._control = control
        self._watched: dict[str, tuple[str, ...]] = {}  # folders, by who follows them
        self._mounted = mounted
        self._supervisor = supervisor
        self._ledger = ledger
        self._environ = environ
        self._say = say
        self._notifier = Notifier(environ)
        self._end = trio.Event()
        self._drain_seconds = options.drain_seconds
        self._noted: Counter[str] = Counter()  # in this second, by kind
        self._noted_at = 0.0
        self._strangers = 0  # that no line has told
        self._stranger_told = -math.inf
        self._metrics = Metrics()
        self._alerts = Alerts(say)
        self._pending = PendingConfirmations()
        ledger.on_fault = self._ledger_fault
        folder = os.path.dirname(os.path.abspath(options.ledger))
        if options.backend is not None:
            self._roster = options.backend.roster(supervisor, environ, say)
        else:
            assert isinstance(supervisor, Supervisor)
            self._roster = Roster(
                supervisor=supervisor,
                ledger=ledger,
                paths=options.config,
                policy=options.policy,
                settings=options.settings,
                environ=environ,
                say=say,
                names=os.path.join(folder, _NAMES),
                holds=holds,
            )
            supervisor.on_hold = self._held
        self._desk = Desk(supervisor, ledger, self._roster, self._metrics, self._alerts)
        self.board = Board(supervisor, ledger, self._desk, self._roster, self._metrics)
        if mounted is not None:
            self.board.questions = mounted.questions
        self._sessions = Sessions(os.path.join(folder, _SESSIONS))
        self._running = None if control is None else self._run_bindings(control)
        target_of = None if self._running is None else self._running.target_of
        self._deliveries = Deliveries(
            supervisor=supervisor,
            ledger=ledger,
            metrics=self._metrics,
            context_keys=self._roster.context_keys,
            target_of=target_of,
            alerts=self._alerts,
        )
        if control is not None and self._running is not None:
            from runner.serve.control.invoking import RunningRoutes

            parts = (self._running, control.bindings, self._desk, ledger, self._deliveries)
            control.parts.append(RunningRoutes(*parts))

    def _run_bindings(self, control: ControlPlane) -> RunningBindings:
        from runner.serve.control.running import RunningBindings

        running = RunningBindings(
            supervisor=self._roster.supervisor_of(""),
            database=control.database,
            settings=lambda: control.settings,
            policy=self._options.policy,
            environ=self._environ,
            ledger=self._ledger,
        )
        control.listeners.append(lambda subject, name: running.wake())
        return running

    async def run(self) -> None:
        """Serve until a signal or a request says to end."""
        page = Page(self._sessions, self.board, tuple(self._urls()), self._began_session)
        routes = Routes(
            supervisor=self._supervisor,
            ledger=self._ledger,
            desk=self._desk,
            deliveries=self._deliveries,
            roster=self._roster,
            metrics=self._metrics,
            page=page,
            drain=self._drain,
            reload=self._reload,
            alerts=self._alerts,
            mounted=self._mounted,
            pending=self._pending,
            parts=() if self._control is None else self._control.parts,
            more_faults=lambda: () if self._control is None else self._control.faults,
        )
        rules = self._options.rules
        if self._control is not None:
            rules = rules._replace(orgs=self._control.org_of)
        door = Door(
            routes.application(),
            rules,
            on_refused=self._refused,
            on_connected=self._connected,
            page=page,
            most_bytes=self._options.most_body_bytes,
            body_seconds=self._options.body_seconds,
        )
        connections = Connections(
            door,
            self._options.most_connections,
            lambda: self._metrics.refusal("too_many_connections"),
            lambda during, error: self._say(f"internal: {during}: {type(error).__name__}: {error}"),
            self._refused,
            self._options.tls,
            self._met_stranger,
        )
        async with AsyncExitStack() as stack:
            watch = stack.enter_context(open_watch())
            nursery = await stack.enter_async_context(trio.open_nursery())
            self._nursery = nursery
            if self._mounted is not None:
                self._mounted.parts = DaemonParts(
                    self._supervisor,
                    self._desk,
                    self._roster,
                    self._ledger,
                    self._pending,
                    self._options.policy,
                )
                self._mounted.nursery = nursery
            nursery.start_soon(self._signals, nursery)
            if watch is not None:
                self._roster.follow = partial(self._follow, watch, "roster")
            if self._control is not None:
                if watch is not None:
                    self._control.follow = partial(self._follow, watch, "control")
                await self._control.reload()
            self._tell_recovered()
            if self._running is not None:
                await self._running.record_lost(self._ledger)
            await self._roster.reload()
            for listener in self._options.listeners:
                nursery.start_soon(connections.serve, listener)
            delivering = trio.CancelScope()
            nursery.start_soon(self._deliver, delivering)
            nursery.start_soon(self._pay_what_is_owed)
            if self._running is not None:
                nursery.start_soon(self._running.run)
            if any(self._urls()):
                nursery.start_soon(self.board.run)
                nursery.start_soon(self._end_sessions)
            if watch is None:
                self._say(
                    "the kernel gives no inotify instance: send SIGHUP after changes of the configuration"
                )
            else:
                nursery.start_soon(self._follow_changes, watch)
            if (seconds := watchdog_seconds(self._environ)) is not None:
                nursery.start_soon(self._feed_watchdog, seconds)
            count = len(self._supervisor.plugins())
            self._notifier.send("READY=1", f"STATUS=plugins: {count}")
            plugins = f"{count} plugin{'s' * (count != 1)}"
            self._say(f"ready at {' and '.join(self._places())}, with {plugins}; version {routes.version}")
            await self._end.wait()
            self._notifier.send("STOPPING=1")
            await self._finish(delivering, connections)
            nursery.cancel_scope.cancel()

    async def _finish(self, delivering: trio.CancelScope, connections: Connections) -> None:
        self._desk.draining = True
        delivering.cancel()
        self._say("draining")
        await self._supervisor.drain(self._drain_seconds)
        self._supervisor.end_feeds()  # streams of news and logs end with it
        with trio.move_on_after(_ANSWER_SECONDS):
            await connections.until_idle()  # the answers of the last calls are sent

    def _drain(self, seconds: float | None) -> None:
        if seconds is not None:
            self._drain_seconds = min(seconds, self._options.drain_seconds)
        self._end.set()

    # --- tasks ----------------------------------------------------------------------------------------------

    async def _signals(self, nursery: trio.Nursery) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    nursery.start_soon(self._reload)  # it may take as long as calls in flight do
                else:
                    self._drain(None)

    async def _deliver(self, scope: trio.CancelScope) -> None:
        with scope:
            await self._deliveries.run()

    async def _pay_what_is_owed(self) -> None:
        while True:
            await trio.sleep(_OWED_SECONDS)
            self._alerts.flush()
            await self._ledger.flush()
            if fault := self._ledger.fault:
                # Nobody calls a daemon that is not ready. So this finds out whether it is again.
                with suppress(LedgerUnusable):
                    detail = json.dumps({"message": fault[:_MOST_TOLD]})
                    await self._ledger.note("ledger", "daemon", "", detail)
            if self._control is not None:
                await self._control.database.flush()

    def _follow(self, watch: Watch, owner: str, folders: tuple[str, ...]) -> bool:
        """Watch these folders, and those of others. Returns whether one was not watched before."""
        self._watched[owner] = folders
        return watch.set(folder for each in self._watched.values() for folder in each)

    async def _follow_changes(self, watch: Watch) -> None:
        async with aclosing(watch.changes()) as changes:
            async for _ in changes:
                await self._reload()

    async def _reload(self) -> None:
        self._notifier.send("RELOADING=1")
        try:
            if self._control is not None:
                await self._control.reload()
            await self._roster.reload()
        except Exception as error:  # noqa: BLE001 -- a bug; the plugins stay as they are
            self._say(f"internal: the configuration was not read: {type(error).__name__}: {error}")
        if self._options.tls is not None:
            try:
                self._options.tls.reload()
            except ValueError as error:
                self._say(f"{error}. New connections get the certificate that was read before")
        self._deliveries.wake()
        self._notifier.send("READY=1", f"STATUS=plugins: {len(self._supervisor.plugins())}")

    async def _end_sessions(self) -> None:
        while True:
            await trio.sleep(_EXPIRY_SECONDS)
            self._sessions.end_expired()

    async def _feed_watchdog(self, seconds: float) -> None:
        while True:
            self._notifier.send("WATCHDOG=1")
            await trio.sleep(seconds)

    def _places(self) -> Iterator[str]:
        """Where it listens."""
        scheme = "http" if self._options.tls is None else "https"
        for each in self._options.listeners:
            name = each.getsockname()
            if each.family == socket.AF_UNIX:
                yield os.fsdecode(name)
            else:
                yield (
                    f"{scheme}://[{name[0]}]:{name[1]}"
                    if ":" in name[0]
                    else f"{scheme}://{name[0]}:{name[1]}"
                )

    def _urls(self) -> Iterator[str]:
        """Where browsers on this machine find the page."""
        scheme = "http" if self._options.tls is None else "https"
        for each in self._options.listeners:
            if each.family != socket.AF_UNIX:
                host, port = each.getsockname()[:2]
                host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
                host = f"[{host}]" if ":" in host else host
                # By TLS, the name that was added: the certificate will have it, and hardly the address.
                names = self._options.rules.names
                added = [name for name in names if name[-1:].isalpha() and name not in LOCAL_NAMES]
                yield f"{scheme}://{added[0] if added and scheme == 'https' else host}:{port}/"

    # --- audit and metrics ----------------------------------------------------------------------------------

    def _held(self, name: str, hold: Hold, reason: str) -> None:
        if self._roster.note_hold(name, hold, reason) and hold == "quarantined":
            why = f"{reason[:_MOST_TOLD]}; runner ctl reset {name} ends that"
            self._alerts.tell("quarantine", f"{name} is quarantined: {why}")

    def _ledger_fault(self, fault: str) -> None:
        text = f"no calls are taken: {fault}" if fault else "the ledger can be written again: calls are taken"
        self._alerts.tell("ledger", text)

    def _tell_recovered(self) -> None:
        found = self._ledger.recovered
        if found.not_started or found.unknown:
            message = f"calls in flight when the last daemon ended: {found.not_started} had not come to"
            message += f" their plugins and may be repeated; of {found.unknown} nobody knows what they did"
            self._say(f"{message} (GET /calls?code=unknown)")
        for row in found.dead:
            self._alerts.tell("dead letter", dead_letter(row, "the daemon ended before the call did"))

    def _refused(self, peer: DoorPeer, refused: Refused) -> None:
        self._metrics.refusal(refused.code)
        caller = "tcp" if peer.uid is None else f"uid:{peer.uid}"
        self._note("refusal", caller, {"code": refused.code, "message": refused.message[:_MOST_TOLD]})

    def _met_stranger(self, address: str, fault: str) -> None:
        self._refused(DoorPeer(None), Refused(400, "tls", f"{address}: {fault}"))
        self._strangers += 1
        if trio.current_time() - self._stranger_told >= _STRANGER_SECONDS:
            others = f" ({self._strangers} clients since the last such line)" * (self._strangers > 1)
            self._say(f"a client at {address} was refused: {fault}{others}")
            self._strangers, self._stranger_told = 0, trio.current_time()

    def _connected(self, peer: DoorPeer, caller: str) -> None:
        self._note("connection", caller, {"pid": peer.pid})

    def _began_session(self, text: str) -> None:
        self._note("connection", PAGE, {"message": text})

    def _note(self, what: str, caller: str, detail: Mapping[str, object]) -> None:
        """A row of the audit, for which nobody waits. Strangers must not fill the ledger, so that there is a
        most per second, of each kind: requests that are refused must not hide who was let in."""
        if trio.current_time() - self._noted_at >= 1.0:
            self._noted_at, self._noted = trio.current_time(), Counter()
        self._noted[what] += 1
        if self._noted[what] <= _NOTES_PER_SECOND:
            self._nursery.start_soon(self._write_note, what, caller, json.dumps(detail))

    async def _write_note(self, what: str, caller: str, detail: str) -> None:
        with suppress(LedgerUnusable):
            await self._ledger.note(what, caller, "", detail)


async def serve(options: ServeOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Run a daemon until it is told to end. Raises DatabaseUnusable if the ledger cannot be opened, or the
    database of the control plane, and ControlUnusable."""
    raise_descriptors()
    async with open_ledger(options.ledger, bounds=options.bounds) as ledger, AsyncExitStack() as stack:
        try:
            holds = HoldRecord(ledger.path + _HOLDS)
        except ApprovalsUnusable as unusable:
            raise LedgerUnusable(str(unusable), unusable.hint) from None
        control = None
        if options.control is not None:  # before there is a nursery, which would wrap its exceptions
            from runner.serve.control.control import open_control

            control = await stack.enter_async_context(open_control(options.control, ledger, environ, say))
        mounted = None if options.mount is None else Mounted(options.mount, say)

        def hear(plugin: str, event: Notice | Progress) -> None:
            daemon.board.hear(plugin, event)
            if mounted is not None:
                mounted.hear(plugin, event)

        backend = options.backend
        opening = open_supervisor(on_event=hear) if backend is None else backend.open(say)
        async with opening as supervisor:
            daemon = Daemon(options, supervisor, ledger, environ, say, mounted, control, holds)
            await daemon.run()
        if not await ledger.flush():
            count = f"{ledger.owed} outcome{'s' * (ledger.owed > 1)}"
            say(f"{count} could not be written: {ledger.fault}. In the ledger they will be unknown")


def run(options: ServeOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """`serve`, for a process that does nothing else."""
    trio.run(serve, options, environ, say)
