"""The process that stands between a session and its plugin: launches it, watches over it, tells how it ended.

A session lives in a host with threads, and a launch must not (see sandbox/spawn/spawner.py). So each plugin
of a session has a monitor: one process, one thread, that does what `runner exec` does. The plugin's streams
are pipes whose other ends the host has; not a byte of them passes through here. What is left is the control
socket:

    host -> monitor    bytes, each the number of a signal for the program, as `runner exec` would be sent it:
                      the program gets it and has its grace, a second one or 9 ends everything at once. The
                      end of the file: the host is gone, and everything ends at once.
    monitor -> host    JSON documents, one on each line: `born`, then as far as it comes `prepared` and
                      `launched`, and always last `ended`.

Nothing is ever raised or printed from here: whatever goes wrong is in `ended`. Signals from others are not
heeded: a plugin is its session's to end. SIGKILL of a monitor ends its plugin, by the cell's init that
follows it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from runner.launch.prepare import Invocation, Prepared, ready
from runner.launch.report import explained, notes, report
from runner.launch.start import Confined, confine, diagnosed, unlaunched
from runner.launch.verdict import TIMEOUT, judge
from runner.launch.wait import End, wait
from runner.outcome import EXEC_DEADLINE, Failure, Outcome
from sandbox import codec
from sandbox.plan.plan import OpenPlan
from sandbox.policy.grant import Overrides
from sandbox.spec import Limits
from sandbox.value import NamedTuple

# How long a host that does not listen may keep us.
TOLD_SECONDS = 10.0

_HEEDLESS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_NUMBERS = frozenset(signal.valid_signals())


class Order(NamedTuple):
    """What a monitor is to do."""

    invocation: Invocation
    environ: Mapping[str, str]  # the operator's
    cwd: str
    started: float  # on the monotonic clock: when the session asked, from which its deadline runs
    grace: float | None = None  # seconds, for a plugin that was asked to end, where no limit says

    def encode(self) -> bytes:
        """ASCII only, so that names which are no UTF-8 (lone surrogates) arrive as they were."""
        return json.dumps(self, separators=(",", ":")).encode()


def decode(raw: bytes) -> Order:
    invoked, environ, cwd, started, grace = json.loads(raw)
    manifest, contract, server, policy, state_dir, args, overrides, options = invoked
    env, pass_env, limits = overrides
    given = Overrides(tuple((name, value) for name, value in env), tuple(pass_env), Limits(*limits))
    own = tuple((name, value) for name, value in options)
    invocation = Invocation(manifest, contract, server, policy, state_dir, tuple(args), given, own)
    return Order(invocation, environ, cwd, started, grace)


class Gear(NamedTuple):
    """The descriptors a monitor is born with, in the order they are sent."""

    order: int
    stdin: int
    stdout: int
    stderr: int
    control: int
    host: int  # a pidfd: the control socket may have been inherited by who outlives the host


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
        """Whether there is something to be read, or nobody to write it any more."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def tell(self, event: str, **fields: Any) -> bool:
        """Whether the host has taken it, or at least can."""
        left = memoryview(json.dumps({"event": event, **fields}, separators=(",", ":")).encode() + b"\n")
        until = time.monotonic() + TOLD_SECONDS
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


class _Called(BaseException):
    """The host has spoken before anything was launched. Nothing but the end can be meant."""


class _Interruptible:
    """As long as nothing runs, ending at once is right, also if a look at a slow filesystem hangs: as a
    signal ends `runner exec` then."""

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
            raise _Called

    def stop(self) -> None:
        """From now on nothing interrupts; who launches asks `look` once more."""
        self._armed = False
        fcntl.fcntl(self._control.fd, fcntl.F_SETFL, self._flags)
        signal.signal(signal.SIGIO, signal.SIG_IGN)

    def look(self) -> None:
        if self._control.is_called():
            raise _Called


class Lived(NamedTuple):
    """What became of a plugin that was started."""

    end: End
    confined: Confined


def keep(gear: Gear) -> NoReturn:
    """The whole life of a monitor, in a process that was forked for it and has no other purpose."""
    try:
        for number in _HEEDLESS:
            signal.signal(number, lambda *_: None)  # not ignored: that would be inherited
        sys.stdout = sys.stderr = None
        control = Control(gear.control)
        control.tell("born", pid=os.getpid())
        try:
            told = _kept(gear, control)
        except Exception as error:  # noqa: BLE001 -- not even what happened could be told: that can
            told = _told(None, *unlaunched(error), None)
        control.tell("ended", **told)
    finally:
        os._exit(0)


def refuse(control: int, error: Exception) -> None:
    """For who cannot even start a monitor: the last word that one would have had."""
    outcome, status = unlaunched(error)
    Control(os.dup(control)).tell("ended", **_told(None, outcome, status, None))


def _kept(gear: Gear, control: Control) -> dict[str, Any]:
    prepared: Prepared | None = None
    lived: Lived | None = None
    trace: list[str] = []
    streams = Streams(gear.stdin, gear.stdout, gear.stderr)
    before = _Interruptible(control)
    try:
        order = decode(_content(gear.order))
        os.environ.clear()
        os.environ.update(order.environ)
        prepared = Prepared(order.invocation)
        before.start()
        os.chdir(order.cwd)
        lived = _live(prepared, order, control, before, streams, gear.host)
        assert prepared.grant is not None
        outcome, status = judge(lived.end, prepared.grant.limits)
    except _Called:
        outcome, status = _called_off(control)
    except Exception as error:  # noqa: BLE001 -- everything ends in `ended`
        outcome, status = unlaunched(error)
        if outcome.code == "internal" and os.environ.get("RUNNER_DEBUG"):
            import traceback

            trace = "".join(traceback.format_exception(error)).splitlines()
    finally:
        before.stop()
        streams.close()
    if prepared is not None:
        outcome = diagnosed(outcome, prepared)
    told = _told(prepared, outcome, status, lived)
    told["explanation"] += trace
    return told


def _content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _called_off(control: Control) -> tuple[Outcome, int]:
    numbers = control.arrived()
    if not numbers:
        return Outcome(
            "cancelled", "launch", "the process that started the runner is gone", "caller_died"
        ), 128 + signal.SIGKILL
    text = f"ended by signal {numbers[0]} before it was started"
    return Outcome("cancelled", "launch", text, f"signal:{numbers[0]}"), 128 + numbers[0]


def _live(
    prepared: Prepared, order: Order, control: Control, before: _Interruptible, streams: Streams, host: int
) -> Lived:
    """From the manifest to the end of the plugin's last process."""
    with ready(prepared, order.environ) as opened:
        if not control.tell("prepared", **_prepared(prepared)):
            raise _Called
        deadline = opened.plan.limits.deadline
        if deadline is not None and time.monotonic() >= order.started + deadline:
            raise Failure(TIMEOUT, EXEC_DEADLINE)  # used up before anything ran
        before.stop()
        before.look()
        lived = _watch(prepared, opened, order, control, streams, host)
    prepared.timings.mark("teardown")
    return lived


def _watch(
    prepared: Prepared, opened: OpenPlan, order: Order, control: Control, streams: Streams, host: int
) -> Lived:
    with ExitStack() as stack:
        owner = prepared.owner
        with streams.lent(None if owner is None else (owner.uid, owner.gid)) as ends:
            confined = stack.enter_context(confine(prepared, opened, order.started, session=ends))
        prepared.timings.mark("launch")
        control.tell("launched", timings=prepared.timings.phases)
        clocks = confined.clocks
        if clocks.teardown is None:
            clocks = clocks._replace(teardown=order.grace)
        gc.enable()  # the fork server has no use for it; a plugin may live for months
        end = wait(confined.cell, control, host, clocks, confined.meters)
        end, _ = confined.settle(end)
        prepared.timings.mark("run")
        return Lived(end, confined)


class Streams:
    """The plugin's ends of its pipes. As long as a copy is open here, the host sees no end of what the plugin
    said."""

    def __init__(self, *fds: int) -> None:
        self._fds: tuple[int, ...] = fds

    @contextmanager
    def lent(self, owner: tuple[int, int] | None) -> Iterator[tuple[int, int, int]]:
        """For a launch, and for no longer."""
        if owner is not None and os.geteuid() == 0:
            for fd in self._fds:
                with suppress(OSError):
                    os.fchown(fd, *owner)  # /dev/stdout and its like open the pipe anew
        stdin, stdout, stderr = self._fds
        try:
            yield stdin, stdout, stderr
        finally:
            self.close()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


# --- what is told ----------------------------------------------------------------------------------------


def _prepared(prepared: Prepared) -> dict[str, Any]:
    loaded, policy, granted = prepared.loaded, prepared.policy, prepared.grant
    assert loaded is not None and loaded.plugin is not None and policy is not None and granted is not None
    limits = granted.limits
    return {
        "plugin": codec.encode(loaded.plugin).decode(),
        "limits": {name: value for name in limits._fields if (value := getattr(limits, name)) is not None},
        "declare": policy.capabilities.declare,
        "host": policy.capabilities.host,
        "policy": granted.policy,
        "unsandboxed": granted.unsandboxed,
        "notes": notes(prepared),
        "on_hook_failure": policy.on_hook_failure,
    }


def _told(prepared: Prepared | None, outcome: Outcome, status: int, lived: Lived | None) -> dict[str, Any]:
    return {
        "outcome": {
            **outcome._asdict(),
            "denials": [denial._asdict() for denial in outcome.denials],
            "diagnostics": [diagnostic._asdict() for diagnostic in outcome.diagnostics],
        },
        "status": status,
        "explanation": _explanation(prepared, outcome, lived),
        "report": _report(prepared, outcome, status, lived),
    }


def _explanation(prepared: Prepared | None, outcome: Outcome, lived: Lived | None) -> list[str]:
    if outcome.code == "ok":
        lines: Sequence[str] = ()
    elif prepared is None:
        lines = (f"runner: {outcome.code}: {outcome.message}",)
    else:
        lines = explained(prepared, outcome)
    left = () if lived is None else lived.end.exit.left
    warning = (f"runner: kill_incomplete: could not be killed: {', '.join(map(str, left))}",) if left else ()
    return [*lines, *warning]


def _report(
    prepared: Prepared | None, outcome: Outcome, status: int, lived: Lived | None
) -> dict[str, Any] | None:
    if prepared is None:
        return None
    prepared.limits = prepared.limits.in_session()
    end, confined = (None, None) if lived is None else lived
    return report(prepared, outcome, end, status, confined)
