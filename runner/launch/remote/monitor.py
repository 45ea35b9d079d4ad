"""One plugin of a session: it is launched and watched here, and here is reported how it ended.

A session lives in a host with threads, and a launch must not (see sandbox/spawn/spawner.py). So each launch
has a process with one thread, which does what `runner exec` does. When the plugin is planned, the shared
monitor of the host may go on with it (runner/launch/remote/shared_plan.py). The plugin's streams are pipes
whose other ends the host holds; no byte of them passes through a monitor. Host and monitor share a control
socket:

    host -> monitor    bytes, each the number of a signal for the program, as if `runner exec` had got it. The
                       program gets the signal and has its grace. A second signal, or SIGKILL, ends
                       everything at once. At the end of the file the host has ended, and everything ends.
                       RELEASE starts the program of a parked cell.
    monitor -> host    values of the classes in MESSAGES, one on each line: Born (again when the shared
                       monitor goes on with it), then as far as the launch comes Terms and Launched, and
                       always last MonitorEnd. For a cell that is parked also Parkable, before Terms, and
                       Parked; Launched then comes at its release.

The monitor raises and prints nothing: whatever goes wrong is in MonitorEnd. It ignores signals from others,
because only the session may end its plugin. SIGKILL of a monitor ends its plugins: their cells' inits follow
it.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NoReturn

from runner.launch.acquire import Acquired
from runner.launch.advice.telling import HostTeller
from runner.launch.carry_out import CalledOff, plan_steps
from runner.launch.failures import diagnose, judge_error
from runner.launch.remote.control import Control, Interruptible
from runner.launch.remote.messages import (
    MESSAGES,
    Audited,
    Born,
    LaunchDescriptors,
    Launched,
    LaunchOrder,
    MonitorEnd,
    Parkable,
    Parked,
    Terms,
    decode_order,
    write_scene,
)
from runner.launch.remote.parking import pack_facts, parking_fault
from runner.launch.remote.shared_plan import (
    GivenSources,
    HandedOver,
    SharedMonitor,
    can_be_shared,
    decode_shared,
    hand_over,
)
from runner.launch.report import explain_failure, make_scene, notes, report
from runner.launch.run import run_steps
from runner.launch.sources import Sources
from runner.launch.stages import Decided, Ended, Planned, Stage, Started, Stopwatch, ended_of
from runner.launch.stdio import Plumbing, connect_session
from runner.launch.verdict import judge
from runner.launch.wait import Need, Steps, drive
from runner.outcome import EXEC_NO_CAGE, Failure, Outcome
from runner.plugin import Allowance
from sandbox.cell.contents import Contents, read_contents
from sandbox.files import write_all
from sandbox.look import AskedFacts
from sandbox.speed.codec import decode, encode

# How long a process that watches other plugins too may take to acquire what a launch needs. It takes some
# milliseconds, unless another runner was stopped while it held a lock.
_ACQUIRE_SECONDS = 5.0

# How long it may take to find out what refused a launch.
_DIAGNOSE_SECONDS = 10.0
_REAP_SECONDS = 1.0

_OTHERS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def monitor_launch(descriptors: LaunchDescriptors, shared: SharedMonitor | None) -> NoReturn:
    """The whole life of a process that was forked for one launch and has no other purpose."""
    try:
        obey_host_only()
        drive(serve(descriptors, shared=shared))
    finally:
        os._exit(0)


def obey_host_only() -> None:
    for number in _OTHERS_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: the plugin would inherit that
    sys.stdout = sys.stderr = None


def serve(
    descriptors: LaunchDescriptors,
    sources: tuple[int, ...] | None = None,
    shared: SharedMonitor | None = None,
    receipt: int | None = None,
) -> Steps[None]:
    """The whole life of one launch. The descriptors are closed at the end.

    `sources`: of a plan, which is what `descriptors.order` holds then. None: it holds an order. `shared`: may
    go on with the launch when it is planned. `receipt`: the process that has planned the launch waits until
    this is closed.
    """
    control = Control(descriptors.control)
    try:
        with suppress(OSError):  # no memory: the next message tells that, when all descriptors have an owner
            yield from control.telling(Born(os.getpid()))
        if receipt is not None:
            os.close(receipt)  # not earlier: until now the host has the pid of the process that waits for it
        try:
            ending = yield from _serve(descriptors, sources, control, shared)
        except HandedOver:
            return
        except Exception as error:  # noqa: BLE001 -- the account of the ending failed; this much can be told
            ending = _bare_ending(error)
        yield from control.telling(ending)
    finally:
        for fd in (descriptors.host, *(sources or ())):
            os.close(fd)
        control.close()
        if shared is not None:
            shared.pass_by()  # unless it was told already


def refuse(control: int, error: Exception) -> None:
    """Tell a host that its monitor could not be started, in the monitor's place."""
    with suppress(OSError):  # its socket is closed
        Control(os.dup(control)).tell(_bare_ending(error))


def _serve(
    descriptors: LaunchDescriptors,
    sources: tuple[int, ...] | None,
    control: Control,
    shared: SharedMonitor | None,
) -> Steps[MonitorEnd]:
    stage: Stage | None = None
    order: LaunchOrder | None = None
    trace: list[str] = []
    streams = SessionStreams(descriptors.stdin, descriptors.stdout, descriptors.stderr)
    before = Interruptible(control)
    try:
        content = _content(descriptors.order)
        if sources is None:
            order, contents = decode_order(content), read_contents(descriptors.contents)
            _go_to(order)
            host = _SessionHost(descriptors.host, control, before, streams, order)
            steps = _OrderedLaunch(order, contents, host, descriptors, shared).steps()
        else:
            os.close(descriptors.contents)
            told, planned = decode_shared(content)
            order = told.order
            _go_to(order)
            host = _SessionHost(descriptors.host, control, before, streams, order)
            given = GivenSources(dict(zip(told.sources, sources, strict=True)), told.where)
            steps = _start_planned(planned, order, host, given, told.since)
        stage = ended = yield from steps
        grant = ended.started.planned.grant
        outcome, status = judge(ended.end, grant.limits, grant.decided_by)
    except HandedOver:
        raise
    except CalledOff as called:
        stage = called.stage
        outcome, status = _called_off(control)
    except Exception as error:  # noqa: BLE001 -- the host learns every error from MonitorEnd
        outcome, status = judge_error(error)
        if isinstance(error, Failure):
            stage = error.stage
        if outcome.code == "internal" and order is not None and order.environ.get("RUNNER_DEBUG"):
            import traceback

            trace = "".join(traceback.format_exception(error)).splitlines()
    finally:
        try:
            before.stop()
        finally:  # the alarm may still come in between
            streams.give_away()
            gc.enable()
    _go_to(order)  # others may have had their turn meanwhile
    if outcome.code in ("launch_failed", "sandbox_unavailable"):
        outcome = yield from _diagnose_aside(outcome, stage)
        _go_to(order)
    ending = _ending(stage, outcome, status)
    return ending._replace(explanation=(*ending.explanation, *trace))


def _diagnose_aside(outcome: Outcome, stage: Stage | None) -> Steps[Outcome]:
    """`diagnose` in a process of its own: it tries what the machine refuses, and nobody waits for that."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return outcome
    if pid == 0:
        try:
            os.closerange(3, write)  # sockets, pipes and locks of others
            os.closerange(write + 1, 0x7FFFFFFF)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(_DIAGNOSE_SECONDS))  # if there is nobody any more who ends it
            write_all(write, encode(diagnose(outcome, stage)))
        finally:
            os._exit(0)
    os.close(write)
    try:
        ended = os.pidfd_open(pid)
    except OSError:  # no descriptors; its own alarm ends it
        os.close(read)
        return outcome
    said, until = b"", time.monotonic() + _DIAGNOSE_SECONDS
    try:
        while time.monotonic() < until:
            if (yield Need({read: select.POLLIN}, until)):
                part = os.read(read, 1 << 16)
                said += part
                if not part:
                    break
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        yield Need({ended: select.POLLIN}, time.monotonic() + _REAP_SECONDS)
    finally:
        with suppress(OSError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # a process that cannot be killed stays: others do not wait for it
        os.close(read)
        os.close(ended)
    try:
        found = decode(said, MESSAGES)
    except ValueError:  # it did not come to an end
        return outcome
    assert isinstance(found, Outcome)
    return found


class _OrderedLaunch:
    """A launch by an order, which is planned here. The shared monitor may go on with it then."""

    def __init__(
        self,
        order: LaunchOrder,
        contents: Contents,
        host: _SessionHost,
        descriptors: LaunchDescriptors,
        shared: SharedMonitor | None,
    ) -> None:
        self._order = order
        self._contents = contents
        self._host = host
        self._descriptors = descriptors
        self._shared = shared

    def steps(self) -> Steps[Ended]:
        order = self._order
        self._host.before.start()
        os.chdir(order.cwd)
        if self._shared is not None and self._contents:
            self._shared.pass_by()
            self._shared = None
        return (
            yield from run_steps(
                order.invocation,
                order.environ,
                order.began,
                self._host,
                self._contents,
                see_planned=self._see_planned,
                releases=self._host if order.parks else None,
            )
        )

    def _see_planned(self, planned: Planned, sources: Sources, asked: AskedFacts | None) -> None:
        """Called before anything on the machine is changed."""
        if self._order.parks:
            assert asked is not None
            self._tell_parkable(planned, asked)
        if self._shared is not None:
            self._offer(self._shared, planned, sources)

    def _tell_parkable(self, planned: Planned, asked: AskedFacts) -> None:
        """Tell the host what the parked cell will rest on, before anything of it exists. Raises Failure for a
        plan that must not wait."""
        if self._contents:
            why = "it gets files that exist only in memory"
        else:
            why = parking_fault(planned, asked)
        if why:
            told = Outcome("cancelled", "plan", f"no cell is parked: {why}", "not_parked")
            raise Failure(told, EXEC_NO_CAGE)
        if not self._host.control.tell(Parkable(pack_facts(asked))):
            raise CalledOff

    def _offer(self, shared: SharedMonitor, planned: Planned, sources: Sources) -> None:
        """Raises HandedOver if the shared monitor goes on with it."""
        opened = sources.held_for(planned, self._order.environ).opened
        self._host.before.stop()  # the shared monitor sets up the same socket
        if can_be_shared(planned) and hand_over(
            shared, self._order, planned, opened.descriptors, self._descriptors
        ):
            raise HandedOver
        shared.pass_by()
        self._host.before.start()


def _start_planned(
    planned: Planned, order: LaunchOrder, host: _SessionHost, sources: GivenSources, since: float
) -> Steps[Ended]:
    """The rest of a launch that another process has planned."""
    gc.disable()  # as in the fork server, until the plugin runs
    host.before.start(_ACQUIRE_SECONDS)
    watch = Stopwatch(planned.timings, since)
    releases = host if order.parks else None
    return (
        yield from plan_steps(planned, order.environ, order.began, host, sources, watch, releases=releases)
    )


def _go_to(order: LaunchOrder | None) -> None:
    """The surroundings of this process are those of one launch at a time. None: they are not known."""
    os.environ.clear()
    os.environ.update({} if order is None else order.environ)


def _content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _called_off(control: Control) -> tuple[Outcome, int]:
    numbers = control.read_orders()
    if not numbers:
        return Outcome(
            "cancelled", "launch", "the process that started the runner has ended", "caller_died"
        ), 128 + signal.SIGKILL
    text = f"ended by signal {numbers[0]} before it was started"
    return Outcome("cancelled", "launch", text, f"signal:{numbers[0]}"), 128 + numbers[0]


class _SessionHost:
    """The host of a launch whose caller speaks through the control socket."""

    is_ready = False

    def __init__(
        self,
        caller: int,
        control: Control,
        before: Interruptible,
        streams: SessionStreams,
        order: LaunchOrder,
    ) -> None:
        self.caller = caller
        self.fd = control.fd
        self.control = control
        self.before = before
        self._streams = streams
        self._order = order

    def see_ready(self, planned: Planned) -> None:
        self.is_ready = True
        if not self.control.tell(_terms(planned)):
            raise CalledOff

    def watch_orders(self) -> AbstractContextManager[Control]:
        self.before.stop()
        self.before.look()
        return nullcontext(self.control)

    def connect(self, acquired: Acquired) -> AbstractContextManager[Plumbing]:
        return self._streams.connect(acquired.owner.uid, acquired.owner.gid)

    def see_started(self, started: Started) -> Started:
        self.control.tell(Launched(dict(started.timings), started.cell.pid))
        teller = HostTeller(started)
        started.cell.watch_network(lambda line: self.control.mention(Audited(line, teller.advice(line))))
        gc.enable()  # the fork server does without; a plugin may live for months
        return started

    def see_parked(self) -> None:
        self.control.tell(Parked())
        gc.enable()

    def is_released(self) -> bool:
        _go_to(self._order)  # others have had their turn meanwhile
        return self.control.is_released()


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
        planned.grant.decided_by,
    )


def _allowance(planned: Planned) -> Allowance:
    rule = planned.policy.network
    hosts = {"none": (), "allowlist": rule.hosts}.get(rule.ceiling, ("*:*",))
    writable = [path.path for path in planned.grant.paths if path.access == "write"]
    if planned.state_dir is not None:
        writable.append(planned.state_dir)
    # Those that a link of the caller's own led to have another name in the cage.
    linked = [each.path for each in planned.plan.shown if each.inside and each.origin == "manifest"]
    return Allowance(
        planned.state_dir,
        (*(path.path for path in planned.grant.paths), *linked),
        hosts,
        tuple(dict.fromkeys(writable)),
        planned.policy.deny,
        planned.grant.network.mode,
    )


def _ending(stage: Stage | None, outcome: Outcome, status: int) -> MonitorEnd:
    if isinstance(stage, Decided | Planned):  # a launch that started has counted them so already
        stage = stage._replace(limits=stage.limits.for_session())
    document = json.dumps(report(stage, outcome, status))
    scene = write_scene(make_scene(stage))
    return MonitorEnd(outcome, status, tuple(_explanation(stage, outcome)), document, scene)


def _bare_ending(error: Exception) -> MonitorEnd:
    """Without a report: to make one may be what failed."""
    outcome, status = judge_error(error)
    return MonitorEnd(outcome, status, (f"runner: {outcome.code}: {outcome.message}",))


def _explanation(stage: Stage | None, outcome: Outcome) -> Sequence[str]:
    lines = [] if outcome.code == "ok" else explain_failure(stage, outcome)
    ended: Ended | None = ended_of(stage)
    left = () if ended is None else ended.end.exit.left
    if left:
        pids = ", ".join(map(str, left))
        lines.append(f"runner: kill_incomplete: these processes could not be killed: {pids}")
    return lines
