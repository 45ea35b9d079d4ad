"""A confined plugin, as a session sees it: three streams, a few words about how far it has come, and an end.

The work is done by its monitor (runner/launch/monitor.py), a process of its own that the fork server
(runner/launch/forkserver.py) forks for us. Here is the trio side: nothing blocks, and whatever happens
inside `open_cage`, nothing of the plugin is left after it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import trio

from runner.launch import forkserver
from runner.launch.forkserver import LaunchTicket
from runner.launch.prepare import Invocation
from runner.launch.start import unlaunched
from runner.manifest.cache import PLUGIN_CLASSES
from runner.outcome import EXEC_NO_CAGE, Failure, Outcome
from runner.plugin import Plugin
from sandbox import codec
from sandbox.cell.cell import KILL_SECONDS
from sandbox.document.diagnostic import Diagnostic
from sandbox.spec import Denial, Limits, Note
from sandbox.value import NamedTuple

# Beyond the time a tree may take to die: for the monitor to see that it has, to clean up and to tell.
_MARGIN_SECONDS = 5.0
# What a monitor may say in one breath: the report of the largest manifest we read is a fraction of that.
_LINE_LIMIT = 64 << 20
_ATTEMPTS = 3  # to find a fork server that lives
# Until a monitor's first word. A fork server takes milliseconds to fork one; who stopped it may never let
# it go on.
_BIRTH_SECONDS = 60.0
# Until we look again whether a fork server has room: somebody else may have closed its socket meanwhile.
_ROOM_SECONDS = 1.0


class Prepared(NamedTuple):
    """Nothing runs yet, but all is decided."""

    plugin: Plugin
    limits: Limits  # as granted
    declare: tuple[str, ...]  # by the policy: patterns of capabilities the plugin may declare
    host: tuple[str, ...]  # and of what it may ask of its host
    policy: str
    unsandboxed: bool
    notes: tuple[Note, ...] = ()
    on_hook_failure: Literal["continue", "abort"] = "continue"  # by the policy


class Ended(NamedTuple):
    outcome: Outcome
    status: int  # of `runner exec`, had it been that
    explanation: tuple[str, ...]  # lines for people
    report: dict[str, Any] | None  # None: nobody was left to write one


class RemoteCell:
    """Made by `open_cage`."""

    def __init__(self, ticket: LaunchTicket) -> None:
        self._ticket = ticket
        self.stdin = trio.lowlevel.FdStream(ticket.stdin)
        self.stdout: trio.abc.ReceiveStream = trio.lowlevel.FdStream(ticket.stdout)
        self.stderr: trio.abc.ReceiveStream = trio.lowlevel.FdStream(ticket.stderr)
        self._control = socket.socket(fileno=ticket.control)
        self._control.setblocking(False)
        self._asked: int | None = None
        self._pid: int | None = None  # of the monitor
        self._prepared: Prepared | None = None
        self._launched: Mapping[str, float] | None = None
        self._ended: Ended | None = None
        self._was_heard = trio.Event()
        self._was_prepared = trio.Event()
        self._was_launched = trio.Event()
        self._has_ended = trio.Event()
        self._is_gone = trio.Event()  # the monitor
        self._listening = trio.CancelScope(shield=True)

    async def prepared(self) -> Prepared:
        """When it is decided what the plugin gets. Raises Failure if it ends before."""
        await self._was_prepared.wait()
        if self._prepared is None:
            raise self._failure()
        return self._prepared

    async def launched(self) -> Mapping[str, float]:
        """When the program runs: how long each step took, in seconds. Raises Failure if it ends before."""
        await self._was_launched.wait()
        if self._launched is None:
            raise self._failure()
        return self._launched

    async def ended(self) -> Ended:
        """When the last of its processes is gone. Any number of tasks may wait."""
        await self._has_ended.wait()
        assert self._ended is not None
        return self._ended

    @property
    def has_ended(self) -> Ended | None:
        return self._ended

    def signal(self, number: int) -> None:
        """Pass a signal on. The first one starts the plugin's grace, a second one ends everything."""
        self._asked = self._asked or number
        try:
            self._control.send(bytes((number,)), socket.MSG_NOSIGNAL)
        except BlockingIOError:  # who has said so much and was not heard means it
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is over

    def kill(self) -> None:
        """End all of it at once."""
        self.signal(signal.SIGKILL)

    def _failure(self) -> Failure:
        assert self._ended is not None
        return Failure(self._ended.outcome, self._ended.status)

    # --- the monitor's words -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Until the monitor is gone or given up. Not to be cancelled by others: while a session is
        torn down it is still to be heard how its plugin ended."""
        said = bytearray()
        try:
            with self._listening:
                while data := await self._receive():
                    said += data
                    if b"\n" in data:
                        *lines, said = said.split(b"\n")
                        for line in lines:
                            self._take(json.loads(line))
                    if len(said) > _LINE_LIMIT:
                        raise ValueError("the monitor does not come to an end")
        except Exception as error:  # noqa: BLE001 -- a fault of ours; who waits must not wait for ever
            self._end(Ended(*unlaunched(error), (), None))
            self.kill()
        finally:
            self._end(self._ended or self._without_a_word())
            self._is_gone.set()

    async def _receive(self) -> bytes:
        while True:
            try:
                return self._control.recv(1 << 16)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._control)
            except ConnectionError:
                return b""

    async def _see_born(self) -> None:
        """A fork server that does not get on is ended, and with it the order: else every launch waits for
        it.
        """
        with trio.move_on_after(_BIRTH_SECONDS) as waiting:
            await self._was_heard.wait()
        if waiting.cancelled_caught and self._ticket.forkserver is not None:
            forkserver.close(self._ticket.forkserver)

    def _take(self, said: Mapping[str, Any]) -> None:
        self._was_heard.set()
        match said["event"]:
            case "born":
                self._pid = said["pid"]
            case "prepared":
                self._prepared = Prepared(
                    codec.decode(said["plugin"].encode(), PLUGIN_CLASSES),
                    Limits(**said["limits"]),
                    tuple(said["declare"]),
                    tuple(said["host"]),
                    said["policy"],
                    said["unsandboxed"],
                    tuple(Note(*note) for note in said["notes"]),
                    said["on_hook_failure"],
                )
                self._was_prepared.set()
            case "launched":
                self._launched = said["timings"]
                self._was_launched.set()
            case "ended":
                outcome = _outcome(said["outcome"])
                self._end(Ended(outcome, said["status"], tuple(said["explanation"]), said["report"]))

    def _end(self, ended: Ended) -> None:
        self._ended = self._ended or ended
        for event in (self._was_heard, self._was_prepared, self._was_launched, self._has_ended):
            event.set()

    def _without_a_word(self) -> Ended:
        """The monitor was killed, or never came to be. Its plugin has ended with it."""
        status = EXEC_NO_CAGE
        if self._asked is not None:
            cause = f"signal:{self._asked}"
            outcome = Outcome("cancelled", "teardown", f"ended by signal {self._asked}", cause)
            status = 128 + self._asked
        elif self._launched is None:
            message = "the process that was to launch the plugin ended without a word"
            outcome = Outcome("launch_failed", "launch", message, "spawn", _KILLED)
        else:
            message = "the process that watched over the plugin ended without a word, and the plugin with it"
            outcome = Outcome("internal", "run", message, "monitor", _KILLED)
        lines = [f"runner: {outcome.code}: {outcome.message}"]
        lines += [f"  {outcome.hint}"] if outcome.hint else []
        return Ended(outcome, status, tuple(lines), None)

    # --- the end ----------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """All of it, in bounded time, and not to be cancelled."""
        if self._ended is None:
            self.kill()
        until = trio.current_time() + KILL_SECONDS + _MARGIN_SECONDS
        with trio.CancelScope(deadline=until, shield=True):
            await self._is_gone.wait()
            await self._reap()
        if not self._is_gone.is_set() and self._pid is not None:
            # Stopped by somebody, or stuck. Its socket is open, so the number is still its own; the cell's
            # init follows it, and the plugin the cell's init.
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            with trio.CancelScope(deadline=trio.current_time() + _MARGIN_SECONDS, shield=True):
                await self._is_gone.wait()
                await self._reap()

    async def _reap(self) -> None:
        """A monitor whose fork server is dead may have been left to us: pid 1 of a container inherits
        orphans.
        """
        taker = self._ticket.forkserver
        if self._pid is None or taker is None or taker.is_alive():
            return
        with suppress(ChildProcessError):
            # It is ending. Nothing is blocked on, should the number be somebody else's by now.
            while not os.waitpid(self._pid, os.WNOHANG)[0]:  # noqa: ASYNC110, ASYNC222
                await trio.sleep(0.01)

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            assert isinstance(stream, trio.lowlevel.FdStream)
            stream.close()
        self._control.close()  # a monitor that is still there learns that it has no host any more


_KILLED = "if nobody killed it, the machine may be out of memory or of processes: look at its log"


@asynccontextmanager
@trio.lowlevel.enable_ki_protection  # not for what is done inside
async def open_cage(
    invocation: Invocation,
    *,
    environ: Mapping[str, str],
    cwd: str | None = None,
    grace: float | None = None,
    sent: LaunchTicket | None = None,
) -> AsyncIterator[RemoteCell]:
    """Start a plugin, and end it.

    Entered as soon as the launch is ordered: how far it has come is asked of the Cage. `environ` and `cwd`
    are the operator's (`cwd`: this process's own if it is not said). `grace`: seconds for a plugin that was
    asked to end, where no `teardown` limit says. `sent`: what was ordered already, before trio was there; the
    rest is ignored then. Raises Failure if no launch can be ordered.
    """
    try:
        ticket = sent or LaunchTicket(invocation, environ=environ, cwd=cwd, grace=grace)
    except OSError as error:
        raise Failure(*unlaunched(error)) from None
    cage = RemoteCell(ticket)
    failure: BaseException | None = None
    try:
        if ticket.forkserver is None:
            await _send(ticket)
        # What the body raises is taken past the nursery, which would put it into a group.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cage._listen)
            nursery.start_soon(cage._see_born)
            try:
                yield cage
            except BaseException as error:  # noqa: BLE001 -- raised again below
                failure = error
            try:
                await cage._finish()
            except BaseException as error:  # noqa: BLE001 -- ^C again: what is left sees us close its socket
                failure = error
            cage._listening.cancel()
    finally:
        ticket.give_away()
        cage._close()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # and its traceback, in which we are


_turn: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("turn")


async def _send(ticket: LaunchTicket) -> None:
    """To this process's fork server; to a new one if that is dead. Raises Failure."""
    try:
        turn = _turn.get()
    except LookupError:
        turn = trio.Lock()
        _turn.set(turn)
    async with turn:  # two tasks cannot wait for the same socket
        for _ in range(_ATTEMPTS):
            try:
                taker = forkserver.current()
                await _send_to(taker, ticket)
            except (ConnectionError, trio.ClosedResourceError):
                forkserver.close(taker)
            except OSError as error:
                if error.errno != errno.EBADF:  # closed by somebody in another thread
                    raise Failure(*unlaunched(error)) from None
            else:
                return
    message = "the process that launches plugins is killed each time it is started"
    raise Failure(Outcome("launch_failed", "launch", message, "spawn", _KILLED), EXEC_NO_CAGE)


async def _send_to(taker: forkserver.ForkServer, ticket: LaunchTicket) -> None:
    while True:
        try:
            ticket.send(taker)
            return
        except BlockingIOError:
            with trio.move_on_after(_ROOM_SECONDS):
                await trio.lowlevel.wait_writable(taker.orders)


async def aclose_forkserver() -> None:
    """For who wants no process of ours while no plugin is open. The next plugin starts another one."""
    await trio.lowlevel.checkpoint()
    forkserver.close()


def _outcome(said: Mapping[str, Any]) -> Outcome:
    denials = [Denial(**{**denial, "where": tuple(denial["where"])}) for denial in said["denials"]]
    diagnostics = [Diagnostic(**diagnostic) for diagnostic in said["diagnostics"]]
    return Outcome(**{**said, "denials": tuple(denials), "diagnostics": tuple(diagnostics)})
