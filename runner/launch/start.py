"""The start of what was prepared, and everything that is to be looked at while it runs."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from runner.launch.prepare import Prepared
from runner.launch.stdio import Inspect, Plumbing, of_caller, of_session
from runner.launch.wait import Clocks, End
from runner.outcome import EXEC_NO_CAGE, Failure, Outcome
from sandbox.cell.cell import Bounds, Cell
from sandbox.cell.launch import launch
from sandbox.limits.cgroup import Cgroup, OomAround
from sandbox.limits.cgroup_meters import CpuTimeMeter, MemoryMeter
from sandbox.limits.meter import Meter
from sandbox.limits.rlimits import rlimits
from sandbox.plan.plan import OpenPlan
from sandbox.spawn.order import SpawnError
from sandbox.spec import Limits
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.inspection import Inspection
    from sandbox.limits.disk import DiskMeter
    from sandbox.streams.relay import Relay

# The cell's init's clock is the second one: it rings when the runner's own did not bring the end about.
_BACKUP = 0.5
# How long the host of an inspected plugin may take for the next piece of its last words.
_HOST_PATIENCE = 10.0


class Confined(NamedTuple):
    """What runs, and what is to be looked at meanwhile."""

    cell: Cell
    clocks: Clocks
    meters: tuple[Meter, ...]
    plumbing: Plumbing
    disk: DiskMeter | None
    oom_around: OomAround | None = None

    @property
    def relay(self) -> Relay | None:
        """Of its stderr, where output is limited."""
        return self.plumbing.counter

    @property
    def inspection(self) -> Inspection | None:
        return self.plumbing.inspection

    def settle(self, end: End, stop: Collection[int] = ()) -> tuple[End, bool]:
        """A last look, now that nothing runs any more: a plugin may overdraw and end before anybody has
        looked. And whether our own stderr can be written to: its reader may be stuck. One of `stop` can be
        read when nobody is to wait for that any longer: a signal came, or the caller is gone."""
        if not stop or end.reason is not None:
            writable = self.plumbing.finish()
        else:
            deadline = self.clocks.deadline
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            writable = self.plumbing.finish(left, stop)
        late = [self.relay.exceeded] if self.relay is not None and self.relay.exceeded is not None else []
        if self.inspection is not None:
            self.inspection.finish(_HOST_PATIENCE)
            end = self._inspected(self.inspection, end)
            if self.inspection.exceeded is not None:
                late.append(self.inspection.exceeded)
        if self.disk is not None and self.disk.measure():
            late.append("disk")
        end = end._replace(late=tuple(late))
        if late and not end.forced and end.breach is None:
            end = end._replace(reason="limit", limit=late[0])
        if self.disk is not None and end.limit == "disk":
            end = end._replace(detail=self.disk.why or f"in {self.disk.where}")
        return self._with_oom_around(end), writable

    def _with_oom_around(self, end: End) -> End:
        """SIGKILL ended the plugin while the group around the runner killed for memory: that is why."""
        ended = end.exit
        if self.oom_around is None or end.reason is not None or end.forced:
            return end
        if ended.code != 128 + signal.SIGKILL and ended.signal != signal.SIGKILL:
            return end
        kills = self.oom_around.since()
        counters = ended.counters._replace(oom_kills=kills)
        return end._replace(exit=ended._replace(counters=counters)) if kills else end

    @staticmethod
    def _inspected(inspection: Inspection, end: End) -> End:
        """First cause wins: a breach in the last words of a plugin that was ended for another is none."""
        breach = inspection.breach
        if end.reason not in (None, "violation"):
            return end
        if breach is None:
            return end._replace(breach=inspection.unanswered()) if inspection.left_waiting else end
        return end._replace(reason="violation", breach=breach, limit=end.limit or breach.limit)


@contextmanager
def confine(
    prepared: Prepared,
    opened: OpenPlan,
    started: float,
    *,
    session: tuple[int, int, int] | None = None,
    inspected: bool = False,
    tty: bool = False,
) -> Iterator[Confined]:
    """Start what `ready` has made ready. Raises SpawnError, and OSError if the runner lacks something.

    `session`: the plugin's ends of a session's pipes; else it gets what the runner itself was given.
    `inspected`: what it and its host say to each other is read on its way.
    `tty`: a terminal is given to it as it is.
    """
    assert prepared.owner is not None and prepared.policy is not None and prepared.grant is not None
    limits, cgroup = opened.plan.limits, prepared.cgroup
    clocks = _clocks(limits, started)
    live: list[Cell] = []
    with ExitStack() as stack:
        disk = None
        if limits.disk is not None and not prepared.grant.unsandboxed:
            disk = _disk_meter(opened, limits.disk, cgroup, live)
            stack.callback(disk.close)
        if session is None:
            inspect = _inspect(prepared, limits) if inspected else None
            plumbing = stack.enter_context(of_caller(limits, inspect=inspect, tty=tty))
        else:
            plumbing = stack.enter_context(of_session(session))
        bounds = Bounds(
            rlimits(limits, prepared.limits.fallbacks),
            cgroup,
            None if clocks.deadline is None else clocks.deadline + _BACKUP,
            plumbing.ends,
        )
        if prepared.grant.unsandboxed:
            from sandbox.cell.unsandboxed import start_unsandboxed

            cell = stack.enter_context(start_unsandboxed(opened.plan, bounds))
        else:
            cell = stack.enter_context(launch(opened, prepared.owner, prepared.bwrap, bounds))
        live.append(cell)
        plumbing.connected()
        meters: list[Meter] = []
        if cgroup is not None and limits.memory is not None:
            meters.append(MemoryMeter(cgroup))
        if cgroup is not None and limits.cpu_time is not None:
            meters.append(CpuTimeMeter(cgroup, limits.cpu_time))
        for meter in meters:
            stack.callback(meter.close)
        if limits.memory is not None and not prepared.grant.unsandboxed:
            sockets = _socket_meter(stack, opened, limits.memory, prepared, cell)
            meters += [] if sockets is None else [sockets]
        meters += plumbing.meters if disk is None else (*plumbing.meters, disk)
        yield Confined(cell, clocks, tuple(meters), plumbing, disk, prepared.oom_around)


def unlaunched(error: Exception) -> tuple[Outcome, int]:
    """What it means that there is nothing to wait for, and the exit status of `runner exec`."""
    match error:
        case Failure():
            return error.outcome, error.exec_status
        case SpawnError():
            hint = "runner doctor tells what is missing"
            if error.errno == errno.EAGAIN:
                hint = "there is no room for another process: raise the limit of processes (ulimit -u)"
            return Outcome("launch_failed", "launch", str(error), "spawn", hint), EXEC_NO_CAGE
        case OSError():
            # Of ours, not of the plugin's: too few descriptors, a size limit, no memory.
            refused = error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES)
            hint = "look at the limits of the process that starts the runner (ulimit -a)"
            hint = "runner doctor tells what this machine refuses" if refused else hint
            return Outcome("launch_failed", "launch", str(error), "resources", hint), EXEC_NO_CAGE
    text = f"{type(error).__name__}: {error}"
    hint = "RUNNER_DEBUG=1 shows where; please report it"
    return Outcome("internal", "launch", text, "bug", hint), EXEC_NO_CAGE


def diagnosed(outcome: Outcome, prepared: Prepared) -> Outcome:
    """A launch that the machine refused, in the doctor's words.

    What the spawner or bubblewrap said names a step; which layer refused it has to be tried. That takes a
    moment, and only a launch that has failed.
    """
    policy, granted = prepared.policy, prepared.grant
    if outcome.code != "launch_failed" or outcome.cause not in ("spawn", "bubblewrap"):
        return outcome
    if "ulimit" in outcome.hint:
        return outcome  # no layer is in the way
    if policy is None or granted is None or granted.unsandboxed:
        return outcome
    from sandbox.doctor.probes import first_obstacle

    preferred = [name for name, mode in policy.layers if mode == "prefer"]
    found = first_obstacle(os.environ, uid_range=policy.uids, preferred=preferred)
    if found is None:
        return outcome
    said = outcome.message.partition(";")[0]
    hint = " ".join(found.remedy.split())  # the doctor has room for lines
    message = f"{said}: {found.layer.replace('_', ' ')}: {found.summary}"
    return outcome._replace(code="sandbox_unavailable", message=message, cause=found.layer, hint=hint)


def _inspect(prepared: Prepared, limits: Limits) -> Inspect:
    from runner.contracts.registry import find_contract
    from runner.launch.inspection import Inspection
    from runner.protocol.dialect import Setting

    assert prepared.plugin is not None and prepared.policy is not None
    prepared.limits = prepared.limits.inspected()
    declare = prepared.policy.capabilities.declare
    options = dict(prepared.invocation.options)
    setting = Setting(prepared.plugin, limits, os.environ, declare, options=options)
    contract = find_contract(prepared.plugin.contract)
    return lambda relay, forget: Inspection(contract.inspector(setting), limits, relay, forget=forget)


def _socket_meter(
    stack: ExitStack, opened: OpenPlan, limit: int, prepared: Prepared, cell: Cell
) -> Meter | None:
    """For what waits in TCP sockets, if the kernel does not bound it and the filter lets them be made."""
    if opened.plan.seccomp == "strict":
        return None
    from sandbox.limits.socket_meter import SocketMeter, SocketTables

    cgroup = prepared.cgroup
    if cgroup is not None and cgroup.memory_with_sockets() is not None:
        return SocketMeter(limit, cgroup.memory_with_sockets)
    if "memory" not in prepared.limits.fallbacks or opened.plan.share_network:
        return None
    tables = SocketTables(cell.member, limit)
    stack.callback(tables.close)
    return SocketMeter(limit, tables.held)


def _disk_meter(opened: OpenPlan, limit: int, cgroup: Cgroup | None, live: Sequence[Cell]) -> DiskMeter:
    """For the folders the plugin may write."""
    from sandbox.limits.disk import DiskMeter

    return DiskMeter(
        opened.writable,
        limit,
        lambda: live[0].processes() if live else (),
        cgroup.freeze if cgroup is not None and cgroup.can_freeze else None,
    )


def _clocks(limits: Limits, started: float) -> Clocks:
    return Clocks(
        deadline=None if limits.deadline is None else started + limits.deadline,
        launch=None if limits.launch is None else started + limits.launch,
        teardown=limits.teardown,
    )
