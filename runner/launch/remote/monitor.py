"""The process between a session and its plugin: it launches the plugin, watches it, and reports how it ended.

A session lives in a host with threads, and a launch must not (see sandbox/spawn/spawner.py). So each plugin
of a session has a monitor: one process with one thread, which does what `runner exec` does. The plugin's
streams are pipes whose other ends the host holds; no byte of them passes through the monitor. Host and
monitor share a control socket:

    host -> monitor    bytes, each the number of a signal for the program, as if `runner exec` had got it. The
                       program gets the signal and has its grace. A second signal, or SIGKILL, ends
                       everything at once. At the end of the file the host has ended, and everything ends.
    monitor -> host    values of the classes in MESSAGES (messages.py), one on each line: Born, then as far as
                       the launch comes Terms and Launched, and always last MonitorEnd.

The monitor raises and prints nothing: whatever goes wrong is in MonitorEnd. It ignores signals from others,
because only the session may end its plugin. SIGKILL of a monitor ends its plugin: the cell's init follows it.
"""

from __future__ import annotations

import array
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NoReturn

from runner.launch.acquire import Acquired
from runner.launch.carry_out import CalledOff
from runner.launch.remote.messages import (
    Audited,
    Born,
    Gear,
    Launched,
    Message,
    MonitorEnd,
    Terms,
    decode_order,
)
from runner.launch.report import explained, make_scene, notes, report
from runner.launch.run import run
from runner.launch.stages import Decided, Ended, Planned, Stage, Started, ended_of
from runner.launch.stdio import Plumbing, connect_session
from runner.launch.verdict import diagnose, judge, judge_error
from runner.outcome import Failure, Outcome
from runner.plugin import Allowance
from sandbox.cell.contents import read_contents
from sandbox.codec import encode

# How long a host that does not read its control socket may keep us.
TELL_SECONDS = 10.0
# Of what a host has not read yet. With more, it is told only what it has to know.
_MOST_UNREAD_BYTES = 64 << 10

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_NUMBERS = frozenset(signal.valid_signals())


class Control:
    """The socket to the session."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.over = False
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    def arrived(self) -> list[int]:
        try:
            said = self._socket.recv(64)
        except BlockingIOError:
            return []
        except OSError:  # closed with something of ours unread
            said = b""
        self.over = not said
        return [number for number in said if number in _NUMBERS]

    def is_called(self) -> bool:
        """Whether the host has written something, or has ended."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def mention(self, message: Message) -> None:
        """Tell it, if that takes no waiting."""
        unread = array.array("i", [0])
        try:
            fcntl.ioctl(self.fd, termios.TIOCOUTQ, unread)
        except OSError:
            return
        if unread[0] <= _MOST_UNREAD_BYTES:  # a message has a tenth of that at most: the rest has room for it
            self.tell(message)

    def tell(self, message: Message) -> bool:
        """False if the host has ended, or does not read."""
        left = memoryview(encode(message) + b"\n")
        until = time.monotonic() + TELL_SECONDS
        room = select.poll()
        room.register(self.fd, select.POLLOUT)
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not room.poll(max(0.0, until - time.monotonic()) * 1000):
                    return False
            except OSError:
                return False
        return True


class _Interruptible:
    """As long as nothing runs, any word of the host ends the launch at once, even if the monitor hangs on a
    slow filesystem. A signal does the same to `runner exec`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._armed = False
        self._flags = fcntl.fcntl(control.fd, fcntl.F_GETFL)

    def start(self) -> None:
        self._armed = True
        signal.signal(signal.SIGIO, self._interrupt)
        fcntl.fcntl(self._control.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._control.fd, fcntl.F_SETFL, self._flags | os.O_ASYNC)
        self._interrupt()

    def _interrupt(self, *_: object) -> None:
        # The kernel also signals that the host has read what we wrote.
        if self._armed and self._control.is_called():
            self._armed = False
            raise CalledOff

    def stop(self) -> None:
        """From now on nothing interrupts. Before the start, `look` asks once more."""
        self._armed = False
        fcntl.fcntl(self._control.fd, fcntl.F_SETFL, self._flags)
        signal.signal(signal.SIGIO, signal.SIG_IGN)

    def look(self) -> None:
        if self._control.is_called():
            raise CalledOff


def keep(gear: Gear) -> NoReturn:
    """The whole life of a monitor, in a process that was forked for it and has no other purpose."""
    try:
        for number in _IGNORED:
            signal.signal(number, lambda *_: None)  # not SIG_IGN: the plugin would inherit that
        sys.stdout = sys.stderr = None
        control = Control(gear.control)
        control.tell(Born(os.getpid()))
        try:
            ending = _keep(gear, control)
        except Exception as error:  # noqa: BLE001 -- the account of the ending failed; this much can be told
            ending = _bare_ending(error)
        control.tell(ending)
    finally:
        os._exit(0)


def refuse(control: int, error: Exception) -> None:
    """Tell a host that its monitor could not be started, in the monitor's place."""
    Control(os.dup(control)).tell(_bare_ending(error))


def _keep(gear: Gear, control: Control) -> MonitorEnd:
    stage: Stage | None = None
    trace: list[str] = []
    streams = SessionStreams(gear.stdin, gear.stdout, gear.stderr)
    before = _Interruptible(control)
    try:
        order, contents = decode_order(_content(gear.order)), read_contents(gear.contents)
        os.environ.clear()
        os.environ.update(order.environ)
        before.start()
        os.chdir(order.cwd)
        host = _SessionHost(gear.host, control, before, streams, order.grace)
        stage = ended = run(order.invocation, order.environ, order.began, host, contents)
        outcome, status = judge(ended.end, ended.started.planned.grant.limits)
    except CalledOff as called:
        stage = called.stage
        outcome, status = _called_off(control)
    except Exception as error:  # noqa: BLE001 -- the host learns every error from MonitorEnd
        outcome, status = judge_error(error)
        if isinstance(error, Failure):
            stage = error.stage
        if outcome.code == "internal" and os.environ.get("RUNNER_DEBUG"):
            import traceback

            trace = "".join(traceback.format_exception(error)).splitlines()
    finally:
        before.stop()
        streams.give_away()
    ending = _ending(stage, diagnose(outcome, stage), status)
    return ending._replace(explanation=(*ending.explanation, *trace))


def _content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _called_off(control: Control) -> tuple[Outcome, int]:
    numbers = control.arrived()
    if not numbers:
        return Outcome(
            "cancelled", "launch", "the process that started the runner has ended", "caller_died"
        ), 128 + signal.SIGKILL
    text = f"ended by signal {numbers[0]} before it was started"
    return Outcome("cancelled", "launch", text, f"signal:{numbers[0]}"), 128 + numbers[0]


class _SessionHost:
    """The host of a launch whose caller speaks through the control socket."""

    def __init__(
        self,
        caller: int,
        control: Control,
        before: _Interruptible,
        streams: SessionStreams,
        grace: float | None,
    ) -> None:
        self.caller = caller
        self._control = control
        self._before = before
        self._streams = streams
        self._grace = grace

    def see_ready(self, planned: Planned) -> None:
        if not self._control.tell(_terms(planned)):
            raise CalledOff

    def watch_orders(self) -> AbstractContextManager[Control]:
        self._before.stop()
        self._before.look()
        return nullcontext(self._control)

    def connect(self, acquired: Acquired) -> AbstractContextManager[Plumbing]:
        return self._streams.connect(acquired.owner.uid, acquired.owner.gid)

    def see_started(self, started: Started) -> Started:
        self._control.tell(Launched(dict(started.timings)))
        if started.audit is not None:
            started.audit.on_line = lambda line: self._control.mention(Audited(line))
        gc.enable()  # the fork server does without; a plugin may live for months
        if started.clocks.teardown is None:
            return started._replace(clocks=started.clocks._replace(teardown=self._grace))
        return started


class SessionStreams:
    """The plugin's ends of its pipes. While a copy is open here, the host sees no end of its output."""

    def __init__(self, stdin: int, stdout: int, stderr: int) -> None:
        self._fds: tuple[int, ...] = (stdin, stdout, stderr)

    @contextmanager
    def connect(self, uid: int, gid: int) -> Iterator[Plumbing]:
        """For one launch, which gives them away when the plugin has its own."""
        if os.geteuid() == 0:
            for fd in self._fds:
                with suppress(OSError):
                    os.fchown(fd, uid, gid)  # opening /dev/stdout and its like opens the pipe anew
        stdin, stdout, stderr = self._fds
        try:
            with connect_session((stdin, stdout, stderr), self) as plumbing:
                yield plumbing
        finally:
            self.give_away()

    def give_away(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


# --- what is told -------------------------------------------------------------------------------------------


def _terms(planned: Planned) -> Terms:
    policy = planned.policy
    return Terms(
        planned.plugin,
        planned.grant.limits,
        policy.capabilities.declare,
        policy.capabilities.host,
        planned.grant.policy,
        planned.grant.unsandboxed,
        notes(planned),
        policy.on_hook_failure,
        _allowance(planned),
    )


def _allowance(planned: Planned) -> Allowance:
    rule = planned.policy.network
    hosts = {"none": (), "allowlist": rule.hosts}.get(rule.ceiling, ("*:*",))
    writable = [path.path for path in planned.grant.paths if path.access == "write"]
    if planned.state_dir is not None:
        writable.append(planned.state_dir)
    return Allowance(
        planned.state_dir,
        tuple(path.path for path in planned.grant.paths),
        hosts,
        tuple(dict.fromkeys(writable)),
        planned.policy.deny,
    )


def _ending(stage: Stage | None, outcome: Outcome, status: int) -> MonitorEnd:
    if isinstance(stage, Decided | Planned):  # a launch that started has counted them so already
        stage = stage._replace(limits=stage.limits.in_session())
    document = json.dumps(report(stage, outcome, status))
    return MonitorEnd(outcome, status, tuple(_explanation(stage, outcome)), document, make_scene(stage))


def _bare_ending(error: Exception) -> MonitorEnd:
    """Without a report: to make one may be what failed."""
    outcome, status = judge_error(error)
    return MonitorEnd(outcome, status, (f"runner: {outcome.code}: {outcome.message}",))


def _explanation(stage: Stage | None, outcome: Outcome) -> Sequence[str]:
    lines = [] if outcome.code == "ok" else explained(stage, outcome)
    ended: Ended | None = ended_of(stage)
    left = () if ended is None else ended.end.exit.left
    if left:
        pids = ", ".join(map(str, left))
        lines.append(f"runner: kill_incomplete: these processes could not be killed: {pids}")
    return lines
