"""Acquired -> Started: start the plugin's processes, and everything that watches them."""

from __future__ import annotations

import math
import os
import time

from runner.launch.acquire import Acquired
from runner.launch.stages import Planned, Started
from runner.launch.stdio import MakeInspection, Plumbing
from runner.launch.wait import GRACE_SECONDS, Clocks, End
from sandbox.cell.cell import Bounds, Cell
from sandbox.cell.launch import launch
from sandbox.limits.cgroup import CpuTimeMeter, LiftedMeter, MemoryMeter
from sandbox.limits.meter import LazyMeter, Meter
from sandbox.limits.rlimits import rlimits
from sandbox.spec import Limits
from sandbox.speed.scopes import AbstractContextManager, ExitStack, contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Callable, Collection, Iterator

if TYPE_CHECKING:
    from runner.launch.inspect.inspection import Inspection
    from sandbox.cell.contents import Contents
    from sandbox.cell.egress import GateProcess

# The cell's init has a deadline of its own, this much after the runner's. It ends the plugin if the runner
# did not.
_BACKUP_SECONDS = 0.5
# The host of an inspected plugin may take this long to read the next piece of what the plugin wrote last.
_HOST_READ_SECONDS = 10.0

# Before that, a plugin cannot use up what the whole machine shares: sandbox/limits/shares.py.
_SHARES_AFTER_SECONDS = 0.25

ConnectStreams = Callable[[Acquired], AbstractContextManager[Plumbing]]


@contextmanager
def start(
    acquired: Acquired, began: float, connect: ConnectStreams, contents: Contents | None = None
) -> Iterator[Started]:
    """Start what was acquired. Raises SpawnError, and OSError if the runner itself lacks something.

    `began`: time of the request, on the monotonic clock; clocks run from then. `connect`: makes the plugin's
    standard streams. `contents`: of the cage's memory files.
    """
    planned, opened, cgroup = acquired.planned, acquired.opened, acquired.cgroup
    limits, unsandboxed = opened.plan.limits, planned.provision.unsandboxed
    clocks = _clocks(limits, began)
    with ExitStack() as stack:
        plumbing = stack.enter_context(connect(acquired))
        bounds = Bounds(
            rlimits(limits, planned.limits.fallbacks, planned.limits.open_files),
            cgroup,
            None if clocks.deadline is None else clocks.deadline + _BACKUP_SECONDS,
            plumbing.ends,
            clocks.launch,
        )
        if unsandboxed:
            from sandbox.cell.unsandboxed import start_unsandboxed

            cell = stack.enter_context(start_unsandboxed(opened.plan, bounds))
        else:
            cell = stack.enter_context(launch(opened, acquired.owner, planned.bwrap, bounds, contents))
        plumbing.give_away()
        disk = acquired.disk
        if disk is not None:
            disk.watch_processes(
                cell.processes, cgroup.freeze if cgroup is not None and cgroup.can_freeze else None
            )
        meters: list[Meter] = []
        if cell.gate is not None:
            from sandbox.cell.egress import GateMeter

            meters.append(GateMeter(cell.gate))
        if cell.questions is not None:
            meters.append(cell.questions)
        if cgroup is not None and limits.memory is not None:
            meters.append(MemoryMeter(cgroup))
        if cgroup is not None and cgroup.effective:
            meters.append(LiftedMeter(cgroup))
        if cgroup is not None and limits.cpu_time is not None:
            meters.append(CpuTimeMeter(cgroup, limits.cpu_time))
        if limits.memory is not None and not unsandboxed:
            sockets = _socket_meter(acquired, limits.memory, cell)
            meters += [] if sockets is None else [sockets]
        for meter in meters:
            stack.callback(meter.close)
        shares = planned.limits.shares
        if shares is not None and shares.part < 1 and not unsandboxed:
            meters.append(LazyMeter(_SHARES_AFTER_SECONDS, lambda: _share_meter(stack, acquired, cell)))
        meters += plumbing.meters if disk is None else (*plumbing.meters, disk)
        yield Started(
            _as_watched(planned, plumbing),
            cell,
            clocks,
            tuple(meters),
            plumbing,
            disk,
            acquired.oom_around,
        )


def _as_watched(planned: Planned, plumbing: Plumbing) -> Planned:
    """The plan, with a mark on limits that the session or the inspection enforces."""
    if plumbing.inspection is not None:
        return planned._replace(limits=planned.limits.for_inspection())
    if plumbing.ways[0] == "session":
        return planned._replace(limits=planned.limits.for_session())
    return planned


def make_inspection(planned: Planned) -> MakeInspection:
    """A function that makes the inspection between this plugin and its host, from the relay of stderr."""
    from runner.contracts.registry import find_contract
    from runner.launch.inspect.inspection import Inspection
    from runner.protocol.dialect import Setting

    limits = planned.plan.limits
    declare, options = planned.policy.capabilities.declare, dict(planned.invocation.options)
    setting = Setting(planned.plugin, limits, os.environ, declare, options=options)
    contract = find_contract(planned.plugin.contract)
    return lambda relay, forget: Inspection(contract.inspector(setting), limits, relay, forget=forget)


def final_checks(started: Started, end: End, stop: Collection[int] = ()) -> tuple[End, bool]:
    """Check all meters again after the end: a plugin may exceed a limit and end before a meter has looked.

    The second value: whether the runner's own stderr can be written to. Its reader may be stuck. A stopped
    terminal is waited for until one of `stop` is readable: a signal arrived, or the caller has ended.
    """
    plumbing, relay, inspection, disk = started.plumbing, started.relay, started.inspection, started.disk
    delivering = _begin_delivery(started, end)
    if not stop or end.reason is not None:
        writable = plumbing.finish()
    else:
        deadline = started.clocks.deadline
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        writable = plumbing.finish(left, stop)
    if delivering is not None:
        gate, until = delivering
        gate.drain(until - time.monotonic(), stop)
    late = [relay.exceeded] if relay is not None and relay.exceeded is not None else []
    if inspection is not None:
        inspection.finish(_HOST_READ_SECONDS)
        end = _with_breach(inspection, end)
        if inspection.exceeded is not None:
            late.append(inspection.exceeded)
    if disk is not None and disk.measure():
        late.append("disk")
    end = _with_sockets(started, end._replace(late=tuple(late)))
    if late and not end.forced and end.breach is None:
        end = end._replace(reason="limit", limit=late[0])
    if disk is not None and end.limit == "disk":
        end = end._replace(detail=disk.why or f"in {disk.where}")
    return _with_oom_around(started, end), writable


def _begin_delivery(started: Started, end: End) -> tuple[GateProcess, float] | None:
    """Let the gate deliver what the plugin had sent. Returns the gate and the deadline for that. None for a
    plugin that was killed: then the gate ends at once."""
    gate = started.cell.gate
    if gate is None or end.forced or end.reason not in (None, "signal"):
        return None
    from sandbox.cell.egress import DELIVERY_SECONDS

    clocks = started.clocks
    seconds = DELIVERY_SECONDS
    if end.reason == "signal":  # the sender expects an end within the grace
        seconds = min(seconds, GRACE_SECONDS if clocks.teardown is None else clocks.teardown)
    until = time.monotonic() + seconds
    gate.dismiss()
    return gate, until if clocks.deadline is None else min(until, clocks.deadline)


def _with_sockets(started: Started, end: End) -> End:
    """The end, with a detail if the memory limit was exceeded by socket buffers, which a cgroup does not
    count."""
    held = max((meter.peaks().get("memory", 0) for meter in started.meters), default=0)
    usage = end.exit.usage
    if held <= (usage.memory_peak or 0):
        return end
    detail = "with what its sockets held in the kernel" if end.limit == "memory" else end.detail
    return end._replace(exit=end.exit._replace(usage=usage._replace(memory_peak=int(held))), detail=detail)


def _with_oom_around(started: Started, end: End) -> End:
    """The end, with an out-of-memory kill in a group around the runner as its cause: SIGKILL ended the plugin
    while the kernel killed there."""
    ended = end.exit
    if started.oom_around is None or end.reason is not None or end.forced:
        return end
    if ended.code != 128 + signal.SIGKILL and ended.signal != signal.SIGKILL:
        return end
    kills = started.oom_around.since()
    counters = ended.counters._replace(oom_kills=kills)
    return end._replace(exit=ended._replace(counters=counters)) if kills else end


def _with_breach(inspection: Inspection, end: End) -> End:
    """The end, with a breach of the contract as its cause. Not if there was another cause before: a plugin
    that is ended may stop in the middle of a message."""
    breach = inspection.breach
    if end.reason not in (None, "violation"):
        return end
    if breach is None:
        return end._replace(breach=inspection.unanswered()) if inspection.left_waiting else end
    return end._replace(reason="violation", breach=breach, limit=end.limit or breach.limit)


def _socket_meter(acquired: Acquired, limit: int, cell: Cell) -> Meter | None:
    """The meter of socket buffers in the kernel, if the seccomp filter allows such sockets."""
    plan = acquired.opened.plan
    if plan.seccomp == "strict":
        return None
    from sandbox.limits.socket_meter import SocketMeter

    return SocketMeter(limit, cell.member, cell.processes, acquired.cgroup, plan.share_network)


def _share_meter(stack: ExitStack, acquired: Acquired, cell: Cell) -> Meter:
    """The meter of what the whole machine shares, as far as no other limit bounds it."""
    from sandbox.limits.shares import (
        ByteCount,
        ShareMeter,
        ShareSources,
        can_hold_files,
        count_listed_bytes,
        socket_bytes_of,
    )

    planned, plan, cgroup = acquired.planned, acquired.opened.plan, acquired.cgroup
    shares, memory = planned.limits.shares, plan.limits.memory
    assert shares is not None
    charged = None if cgroup is None or not cgroup.counts_memory else memory
    files = cell.processes if can_hold_files(shares, charged) else None
    if plan.seccomp == "strict":
        return ShareMeter(shares, ShareSources(files, None, None))
    sockets: Callable[[], ByteCount] | None = None
    if memory is None or memory > shares.socket_bytes:
        sockets = None if cgroup is None else socket_bytes_of(cgroup)
        if sockets is None and not plan.share_network:
            sockets = lambda: count_listed_bytes(cell.member(), cell.processes, shares.socket_bytes)  # noqa: E731
    return ShareMeter(shares, ShareSources(files, sockets, None if plan.share_network else cell.member))


def _clocks(limits: Limits, began: float) -> Clocks:
    return Clocks(
        deadline=None if limits.deadline is None else began + limits.deadline,
        launch=None if limits.launch is None else began + limits.launch,
        teardown=limits.teardown,
    )
