"""The process of `runner worker`: a supervisor and the plugins of --config on trio, and a worker on asyncio.

SIGTERM and SIGINT drain: no further calls, those that run finish or are cancelled at the deadline. SIGHUP
reads the configuration again. SIGKILL leaves no process of a plugin; the ledger of the fleet tells which
calls had begun.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import NamedTuple

import trio

from runner import __version__
from runner.fleet.connection import FleetAddress, connect
from runner.fleet.crossing import AsyncioThread, end_tasks, open_asyncio_thread
from runner.fleet.worker import FleetWorker, WorkerOptions
from runner.fleet.worker_plugins import RosterPlugins
from runner.ledger.retry import Schedule
from runner.lifecycle.supervisor import Supervisor, open_supervisor
from runner.outcome import EXIT
from runner.serve.listen import raise_descriptors
from runner.serve.roster import Roster
from runner.serve.service_manager import Notifier, watchdog_seconds
from runner.serve.watch import Watch, open_watch
from sandbox.identity.state import state_root

_NAMES = "worker/names.json"  # beside the state of plugins: who has which name


class NodeOptions(NamedTuple):
    address: FleetAddress
    name: str
    config: tuple[str, ...]
    slots: int
    policy: str | None = None
    settings: str | None = None
    drain_seconds: float = 30.0
    schedule: Schedule = Schedule()


def default_name() -> str:
    """The machine's name and this process."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:60].strip("-") or "worker"
    return f"{host}-{os.getpid()}"


class Node:
    def __init__(
        self,
        options: NodeOptions,
        supervisor: Supervisor,
        thread: AsyncioThread,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._options, self._thread, self._environ, self._say = options, thread, environ, say
        self._roster = Roster(
            supervisor=supervisor,
            ledger=None,
            paths=options.config,
            policy=options.policy,
            settings=options.settings,
            environ=environ,
            say=say,
            names=os.path.join(os.path.dirname(state_root(environ)), _NAMES),
        )
        self._own_plugins = RosterPlugins(supervisor, self._roster, say)
        self._supervisor = supervisor
        self._notifier = Notifier(environ)
        self._end = trio.Event()
        self._worker: FleetWorker | None = None

    async def run(self) -> None:
        """Work until a signal says to end. Raises NoFleet."""
        with open_watch() as watch:
            if watch is not None:
                self._roster.follow = watch.set
            await self._reload()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._signals, nursery)
                nursery.start_soon(self._follow_news)
                if watch is not None:
                    nursery.start_soon(self._follow_changes, watch)
                if (seconds := watchdog_seconds(self._environ)) is not None:
                    nursery.start_soon(self._feed_watchdog, seconds)
                await self._thread.run(self._work, trio.lowlevel.current_trio_token())
                nursery.cancel_scope.cancel()

    async def _work(self, token: trio.lowlevel.TrioToken) -> None:
        """On asyncio, until the end is asked for."""
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def relay() -> None:
            await self._end.wait()
            loop.call_soon_threadsafe(asked.set)

        async def lost(why: str) -> None:
            if not asked.is_set():
                self._say(
                    f"the connection to the fleet is lost: {why}; calls that run go on, and it is sought"
                )

        async def back(how: str) -> None:
            self._say(how)
            worker.refresh()

        def ready() -> None:
            self._notifier.send("READY=1", f"STATUS=plugins: {len(self._own_plugins.offers())}")

        name = f"runner worker {self._options.name}"
        options = WorkerOptions(
            self._options.name, self._options.slots, __version__, self._options.schedule, self._try_machine
        )
        async with connect(
            self._options.address, name, on_lost=lost, on_back=back, say=self._say, stays=True
        ) as bus:
            worker = self._worker = FleetWorker(bus, self._thread, self._own_plugins, options, self._say)
            worker.remark = self._remark()
            end = asyncio.ensure_future(asked.wait())
            relaying = asyncio.ensure_future(self._thread.on_trio(relay))
            working = asyncio.ensure_future(worker.run(ready))
            try:
                await asyncio.wait((working, end), return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    self._notifier.send("STOPPING=1")
                    self._say("draining")
                    await worker.drain(self._options.drain_seconds)
            finally:
                asked.set()  # the connection is closed, and not lost
                await end_tasks(end, relaying, working)
            if not working.cancelled():
                working.result()

    async def _try_machine(self) -> str:
        """What `runner doctor` says is missing here, or ''."""
        words = ["doctor", *(() if self._options.policy is None else ("--policy", self._options.policy))]
        code = f"from runner.cli import main; raise SystemExit(main({words!r}))"
        try:
            done = await trio.run_process(
                [sys.executable, "-I", "-c", code],
                env=dict(self._environ),
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            return f"the machine cannot start a process: {error.strerror}"
        if done.returncode != EXIT["sandbox_unavailable"]:
            return ""
        return "the machine cannot enforce what the policy requires; runner doctor says what is missing"

    async def _reload(self) -> None:
        try:
            await self._roster.reload()
            await self._own_plugins.reload()
        except Exception as error:  # noqa: BLE001 -- a bug; the plugins stay as they are
            self._say(f"internal: the configuration was not read: {type(error).__name__}: {error}")
        self._refresh()

    def _refresh(self) -> None:
        if self._worker is not None:
            self._worker.remark = self._remark()
            self._thread.loop.call_soon_threadsafe(self._worker.refresh)

    def _remark(self) -> str:
        """For the whole fleet, so that it has no paths of this machine."""
        count = len(self._roster.faults)
        return f"faults of its configuration: {count}; its stderr names them" if count else ""

    async def _follow_news(self) -> None:
        with closing(self._supervisor.subscribe()) as news:
            async for _ in news:
                self._own_plugins.look()
                self._refresh()

    async def _follow_changes(self, watch: Watch) -> None:
        async for _ in watch.changes():
            await self._reload()

    async def _signals(self, nursery: trio.Nursery) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    nursery.start_soon(self._reload)
                else:
                    self._end.set()

    async def _feed_watchdog(self, seconds: float) -> None:
        while True:
            self._notifier.send("WATCHDOG=1")
            await trio.sleep(seconds)


async def work(options: NodeOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Raises NoFleet."""
    raise_descriptors()
    async with open_supervisor() as supervisor, open_asyncio_thread() as thread:
        await Node(options, supervisor, thread, environ, say).run()


def run(options: NodeOptions, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    trio.run(work, options, environ, say)
