"""Acquired -> Started: start the plugin's processes, and everything that watches them."""

from __future__ import annotations

import os

from runner.launch.acquire import Acquired
from runner.launch.stages import Planned, Started
from runner.launch.stdio import MakeInspection, Plumbing
from runner.launch.wait import Clocks
from sandbox.cell.cell import Bounds, Cell
from sandbox.cell.launch import launch
from sandbox.files import kernel_text
from sandbox.limits.cgroup import CpuTimeMeter, LiftedMeter, MemoryMeter
from sandbox.limits.meter import MACHINE_FILES, LazyMeter, Meter
from sandbox.limits.rlimits import rlimits
from sandbox.spec import Limits
from sandbox.speed.scopes import AbstractContextManager, ExitStack, contextmanager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Callable, Iterator

if TYPE_CHECKING:
    from sandbox.cell.contents import Contents

# The cell's init has a deadline of its own, this much after the runner's. It ends the plugin if the runner
# did not.
_BACKUP_SECONDS = 0.5
# Before that, a plugin cannot use up what the whole machine shares (sandbox/limits/shares.py), nor take many
# pages that nobody counts (sandbox/limits/uncounted.py).
_SHARES_AFTER_SECONDS = 0.25

ConnectStreams = Callable[[Acquired], AbstractContextManager[Plumbing]]


@contextmanager
def start(
    acquired: Acquired,
    began: float,
    connect: ConnectStreams,
    contents: Contents | None = None,
    *,
    parks: bool = False,
) -> Iterator[Started]:
    """Start what was acquired. Raises SpawnError, and OSError if the runner itself lacks something.

    `began`: time of the request, on the monotonic clock; clocks run from then. `connect`: makes the plugin's
    standard streams. `contents`: of the cage's memory files. `parks`: the cell is parked, and no clock runs
    before its release (runner/launch/parked.py).
    """
    planned, opened, cgroup = acquired.planned, acquired.opened, acquired.cgroup
    limits, unsandboxed = opened.plan.limits, planned.provision.unsandboxed
    clocks = Clocks(teardown=limits.teardown) if parks else clocks_of(limits, began)
    with ExitStack() as stack:
        plumbing = stack.enter_context(connect(acquired))
        bounds = Bounds(
            rlimits(limits, planned.limits.fallbacks, planned.limits.open_files),
            cgroup,
            None if clocks.deadline is None else clocks.deadline + _BACKUP_SECONDS,
            plumbing.ends,
            clocks_of(limits, began).launch,  # the cage of a parked cell is built now
            parks,
            limits.deadline + _BACKUP_SECONDS if parks and limits.deadline is not None else None,
        )
        if acquired.search is not None:
            acquired.search.started = True
        if unsandboxed:
            from sandbox.cell.unsandboxed import start_unsandboxed

            cell = stack.enter_context(start_unsandboxed(opened.plan, bounds))
        else:
            observe = planned.provision.observed
            cell = stack.enter_context(
                launch(opened, acquired.owner, planned.bwrap, bounds, contents, observe=observe)
            )
        plumbing.give_away()
        if not unsandboxed and cell.overlay_fault:
            planned = planned._replace(plan=planned.plan.without_overlays(cell.overlay_fault))
        disk = acquired.disk
        if disk is not None:
            disk.watch_processes(
                cell.processes, cgroup.freeze if cgroup is not None and cgroup.can_freeze else None
            )
        meters: list[Meter] = []
        if served := [each for each in (cell.gate, cell.agent) if each is not None]:
            from sandbox.cell.beside import AuditMeter

            meters += [AuditMeter(each) for each in served]
        if cell.lookups is not None:
            meters.append(cell.lookups)
        if cell.observer is not None:
            meters.append(cell.observer)
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
            meters.append(LazyMeter(_SHARES_AFTER_SECONDS, lambda: _share_meter(acquired, cell)))
        memory = limits.memory
        if memory is not None and not unsandboxed:
            at_launch: dict[str, str] = {}
            with suppress(OSError):  # the meter finds out why
                at_launch = {path: kernel_text(path) for path in MACHINE_FILES}  # 50 µs, and parsed later
            meters.append(LazyMeter(_SHARES_AFTER_SECONDS, lambda: _uncounted_meter(memory, cell, at_launch)))
        meters += plumbing.meters if disk is None else (*plumbing.meters, disk)
        yield Started(
            _as_watched(planned, plumbing),
            cell,
            clocks,
            tuple(meters),
            plumbing,
            disk,
            acquired.oom_around,
            search=acquired.search,
            staged=acquired.staged,
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
    from runner.contracts.registry import find_contract, make_inspector
    from runner.launch.inspect.inspection import Inspection
    from runner.protocol.dialect import Setting

    limits = planned.plan.limits
    declare, options = planned.policy.capabilities.declare, dict(planned.invocation.options)
    setting = Setting(planned.plugin, limits, os.environ, declare, options=options)
    contract = find_contract(planned.plugin.contract)
    return lambda relay, forget: Inspection(make_inspector(contract, setting), limits, relay, forget=forget)


def _socket_meter(acquired: Acquired, limit: int, cell: Cell) -> Meter | None:
    """The meter of socket buffers in the kernel. The strict filter allows only pairs of unix sockets, which a
    cgroup charges."""
    plan, cgroup = acquired.opened.plan, acquired.cgroup
    if plan.seccomp == "strict" and cgroup is not None and cgroup.counts_memory:
        return None
    from sandbox.limits.socket_meter import SocketMeter

    return SocketMeter(limit, cell.member, cell.processes, cgroup, plan.share_network)


def _share_meter(acquired: Acquired, cell: Cell) -> Meter:
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


def _uncounted_meter(limit: int, cell: Cell, at_launch: dict[str, str]) -> Meter:
    """The meter of kernel pages that nobody counts."""
    from sandbox.cell.neighbours import other_cells
    from sandbox.limits.uncounted import UncountedMeter

    return UncountedMeter(limit, cell.processes, cell.cgroup, lambda: other_cells(cell.pid), at_launch)


def clocks_of(limits: Limits, began: float) -> Clocks:
    return Clocks(
        deadline=None if limits.deadline is None else began + limits.deadline,
        launch=None if limits.launch is None else began + limits.launch,
        teardown=limits.teardown,
    )
