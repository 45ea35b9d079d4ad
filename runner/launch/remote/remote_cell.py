"""A confined plugin, as a session sees it: three streams, messages about how far the launch came, and an end.

Its monitor does the work (runner/launch/remote/monitor.py): a process that the fork server
(runner/launch/remote/forkserver.py) forks, and that may watch other plugins of this host too. Here is the
trio side. Nothing blocks, and whatever happens inside `open_cage`, nothing of the plugin is left after it.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import trio

from runner.launch.failures import judge_error
from runner.launch.remote import forkserver
from runner.launch.remote.forkserver import LaunchTicket
from runner.launch.remote.messages import (
    MESSAGES,
    RELEASE,
    Audited,
    Born,
    Launched,
    Message,
    MonitorEnd,
    Parkable,
    Parked,
    Terms,
)
from runner.launch.remote.pipe import PipeReader
from runner.launch.stages import Invocation
from runner.outcome import EXEC_NO_CAGE, Failure, Outcome
from sandbox.cell import KILL_SECONDS
from sandbox.cell.contents import Contents
from sandbox.speed.codec import decode

# For the monitor to see that the processes have ended, to clean up and to tell: beyond the time they may take
# to die.
_MARGIN_SECONDS = 5.0
_SHARED_MARGIN_SECONDS = 20.0
# The longest message of a monitor. The report of the largest manifest that is read is a fraction of that.
_LINE_LIMIT = 64 << 20
_ATTEMPTS = 3  # to find a fork server that lives
# Until a monitor's first message. A fork server takes milliseconds to fork one, but may have been stopped.
_BIRTH_SECONDS = 60.0
# Until we look again whether a fork server has room: its socket may have been closed meanwhile.
_ROOM_SECONDS = 1.0

_KILLED = "if nobody killed it, the machine may be out of memory or of processes: see dmesg"
_OVERDUE = "find out what keeps the machine busy, or who has stopped it"


# Those of this process, in all its threads.
_open: set[RemoteCell] = set()


class RemoteCell:
    """Made by `open_cage`."""

    def __init__(self, ticket: LaunchTicket) -> None:
        self._ticket = ticket
        self.stdin = trio.lowlevel.FdStream(ticket.stdin)
        self.stdout = PipeReader(ticket.stdout)
        self.stderr = PipeReader(ticket.stderr)
        self._control = socket.socket(fileno=ticket.control)
        self._control.setblocking(False)
        self._asked: int | None = None
        self._pid: int | None = None  # of the monitor, or of the one that it has passed the plugin on to
        self._passed: int | None = None  # of the monitor that has
        self._terms: Terms | None = None
        self.facts = b""  # of a parked cell: what it rests on
        self._is_released = False
        self._launched: Mapping[str, float] | None = None
        self.plugin_pid: int | None = None  # of the cell's first process, once it runs
        self._ended: MonitorEnd | None = None
        self.on_audit: Callable[[Audited], None] | None = None  # for each connection, as it ends
        self._is_overdue = False  # no monitor was forked in time
        self._was_heard = trio.Event()
        self._was_prepared = trio.Event()
        self._was_parked = trio.Event()
        self._was_launched = trio.Event()
        self.over = trio.Event()  # the plugin has ended
        self._monitor_ended = trio.Event()
        self._listening = trio.CancelScope(shield=True)
        _open.add(self)

    async def prepared(self) -> Terms:
        """Wait until it is decided what the plugin gets. Raises Failure if the launch ends before."""
        await self._was_prepared.wait()
        if self._terms is None:
            raise self._failure()
        return self._terms

    async def parked(self) -> None:
        """Wait until the cell waits for its release. Raises Failure if the launch ends before."""
        await self._was_parked.wait()
        if self._ended is not None:
            raise self._failure()

    def release(self) -> bool:
        """Let the program of a parked cell start; `launched` tells when it does. False: the cell is not
        parked any more, or not yet, and this call starts nothing."""
        if self._is_released or self._ended is not None or not self._was_parked.is_set():
            return False
        self._is_released = True
        try:
            return self._control.send(RELEASE, socket.MSG_NOSIGNAL) == 1
        except OSError:  # the monitor has ended
            return False

    async def launched(self) -> Mapping[str, float]:
        """Wait until the program runs: seconds by phase. Raises Failure if the launch ends before."""
        await self._was_launched.wait()
        if self._launched is None:
            raise self._failure()
        return self._launched

    async def ended(self) -> MonitorEnd:
        """Wait until the plugin's last process has ended. Any number of tasks may wait."""
        await self.over.wait()
        assert self._ended is not None
        return self._ended

    @property
    def has_ended(self) -> MonitorEnd | None:
        return self._ended

    @property
    def runs(self) -> bool:
        """Whether the plugin is known to run: it was launched, and its process is there. Its monitor may need
        seconds to find out why it has ended."""
        if self._ended is not None or self.plugin_pid is None:
            return False
        try:
            os.kill(self.plugin_pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it has the plugin's uid
        return True

    def signal(self, number: int) -> None:
        """Pass a signal on. The first starts the plugin's grace, a second ends everything."""
        self._asked = self._asked or number
        try:
            self._control.send(bytes((number,)), socket.MSG_NOSIGNAL)
        except BlockingIOError:  # so many signals are unread that the buffer is full: end everything
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the monitor has ended

    def kill(self) -> None:
        """End all of the plugin's processes at once."""
        self.signal(signal.SIGKILL)

    def _failure(self) -> Failure:
        assert self._ended is not None
        return Failure(self._ended.outcome, self._ended.status)

    # --- the monitor's words -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Until the monitor has ended or is given up. Shielded: while a session is torn down, its plugin's
        ending is still to be received."""
        said = bytearray()
        try:
            with self._listening:
                while data := await self._receive():
                    said += data
                    if b"\n" in data:
                        *lines, said = said.split(b"\n")
                        for line in lines:
                            self._take(decode(bytes(line), MESSAGES))
                    if len(said) > _LINE_LIMIT:
                        raise ValueError("a message of the monitor does not end")
        except Exception as error:  # noqa: BLE001 -- a bug of ours; tasks that wait must not wait for ever
            self._end(MonitorEnd(*judge_error(error)))
            self.kill()
        finally:
            self._end(self._ended or self._unannounced_end())
            self._monitor_ended.set()

    async def _receive(self) -> bytes:
        while True:
            try:
                return self._control.recv(1 << 16)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._control)
            except ConnectionError:
                return b""

    async def _see_born(self) -> None:
        """End a fork server that forks no monitor, and the order with it: else every launch waits for it."""
        with trio.move_on_after(_BIRTH_SECONDS) as waiting:
            await self._was_heard.wait()
        if waiting.cancelled_caught and self._ticket.forkserver is not None:
            self._is_overdue = True
            forkserver.close(self._ticket.forkserver)

    def _take(self, message: Message) -> None:
        self._was_heard.set()
        match message:
            case Born():
                self._passed, self._pid = self._pid, message.pid
            case Terms():
                self._terms = message
                self._was_prepared.set()
            case Parkable():
                self.facts = message.facts
            case Parked():
                self._was_parked.set()
            case Launched():
                self._launched, self.plugin_pid = message.timings, message.pid or None
                self._was_launched.set()
            case Audited():
                if self.on_audit is not None:
                    self.on_audit(message)
            case MonitorEnd():
                self._end(message)

    def _end(self, ended: MonitorEnd) -> None:
        self._ended = self._ended or ended
        launch = self._was_prepared, self._was_parked, self._was_launched
        for event in (self._was_heard, *launch, self.over):
            event.set()

    def _unannounced_end(self) -> MonitorEnd:
        """The monitor was killed, or was never forked. Its plugin has ended with it."""
        status = EXEC_NO_CAGE
        if self._asked is not None:
            cause = f"signal:{self._asked}"
            outcome = Outcome("cancelled", "teardown", f"ended by signal {self._asked}", cause)
            status = 128 + self._asked
        elif self._launched is None:
            message = "the process that was to launch the plugin ended and said nothing"
            if self._is_overdue:
                message = f"the process that was to launch the plugin did not begin in {_BIRTH_SECONDS:.0f} s"
            hint = _OVERDUE if self._is_overdue else _KILLED
            outcome = Outcome("launch_failed", "launch", message, "spawn", hint)
        else:
            message = "the plugin's monitor ended and said nothing, and the plugin ended with it"
            outcome = Outcome("internal", "run", message, "monitor", _KILLED)
        lines = [f"runner: {outcome.code}: {outcome.message}"]
        lines += [f"  {outcome.hint}"] if outcome.hint else []
        return MonitorEnd(outcome, status, tuple(lines))

    # --- the end ----------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """End the plugin and its monitor, in bounded time. Shielded."""
        if self._ended is None:
            self.kill()
        # Others end with a monitor that is killed: one that is only busy gets more time.
        shared = any(each._pid == self._pid and each._ended is None for each in _open - {self})
        margin = _SHARED_MARGIN_SECONDS if shared else _MARGIN_SECONDS
        until = trio.current_time() + KILL_SECONDS + margin
        with trio.CancelScope(deadline=until, shield=True):
            await self._monitor_ended.wait()
            await self._reap()
        if not self._monitor_ended.is_set() and self._pid is None and self._ticket.forkserver is not None:
            forkserver.close(self._ticket.forkserver)  # as in _see_born
        elif not self._monitor_ended.is_set() and self._pid is not None:
            # The monitor was stopped, or is stuck. Its socket is open, so the pid is still its own. The
            # cell's init ends with it, and the plugin with the cell's init. So do others that it waits for.
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            with trio.CancelScope(deadline=trio.current_time() + _MARGIN_SECONDS, shield=True):
                await self._monitor_ended.wait()
                await self._reap()

    async def _reap(self) -> None:
        """Reap a monitor whose fork server is dead, if we are pid 1 of a container and inherit orphans."""
        taker = self._ticket.forkserver
        if self._pid is None or taker is None or taker.is_alive():
            return
        for pid in (self._passed, self._pid):
            if pid is None:
                continue
            with suppress(ChildProcessError):
                # It is ending, unless it has other plugins. WNOHANG: the pid may be another process's by now.
                while not os.waitpid(pid, os.WNOHANG)[0]:  # noqa: ASYNC222
                    if any(each._pid == pid for each in _open - {self}):
                        break
                    await trio.sleep(0.01)

    def _close(self) -> None:
        _open.discard(self)
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()
        self._control.close()  # a monitor that still runs sees that its host has ended


@asynccontextmanager
@trio.lowlevel.enable_ki_protection  # not for what is done inside
async def open_cage(
    invocation: Invocation,
    *,
    environ: Mapping[str, str],
    cwd: str | None = None,
    sent: LaunchTicket | None = None,
    contents: Contents | None = None,
    parks: bool = False,
) -> AsyncIterator[RemoteCell]:
    """Start a plugin, and end it.

    Entered as soon as the launch is ordered; the RemoteCell tells how far it came. `environ` and `cwd` are
    the operator's (`cwd` None: this process's own). `contents`: of the cage's memory files. `sent`: a ticket
    that was sent before trio was running; the other arguments are ignored then. `parks`: the plugin's program
    starts when `RemoteCell.release` is called. Raises Failure if no launch can be ordered.
    """
    try:
        ticket = sent or LaunchTicket(invocation, environ=environ, cwd=cwd, contents=contents, parks=parks)
    except OSError as error:
        raise Failure(*judge_error(error)) from None
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
    """Send a ticket to this process's fork server, or to a new one if that is dead. Raises Failure."""
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
                if error.errno != errno.EBADF:  # closed by another thread
                    raise Failure(*judge_error(error)) from None
            else:
                return
    message = f"the fork server, which launches plugins, was killed {_ATTEMPTS} times in a row"
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
    """End this process's fork server, for a host that wants no process of ours while no plugin is open. The
    next plugin starts another one."""
    await trio.lowlevel.checkpoint()
    forkserver.close()
