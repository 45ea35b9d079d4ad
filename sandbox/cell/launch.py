"""Start a cell from an open plan: descriptors, bwrap's arguments and the spawner's order."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import time

from sandbox.cell.cell import Bounds, Cell
from sandbox.cell.name_lookups import NameLookups, open_lookups
from sandbox.files import write_all
from sandbox.identity.owner import Owner
from sandbox.limits.rlimits import rlimits
from sandbox.plan import bwrap
from sandbox.plan.plan import Bind, LaunchPlan, OpenPlan, Text
from sandbox.spawn import launcher, spawner
from sandbox.spawn.machine_code import executable
from sandbox.spawn.order import (
    AGENT,
    OBSERVE,
    OVERLAY,
    CgroupHandles,
    GuardOrder,
    SpawnError,
    SpawnOrder,
    folder_path,
)
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Iterator, Mapping, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.cell.agent import AgentProcess
    from sandbox.cell.contents import Contents
    from sandbox.cell.egress import GateProcess
    from sandbox.cell.observer import CageObserver
    from sandbox.cell.overlay import OverlaidFolder
    from sandbox.plan.layers import LayerUnavailable
    from sandbox.spec import MemoryFile

_GATE_FAULT_SECONDS = 0.5  # for the message of a gate that could not start


@contextmanager
def launch(
    open_plan: OpenPlan,
    owner: Owner,
    bwrap_path: str,
    bounds: Bounds | None = None,
    contents: Contents | None = None,
    *,
    observe: bool = False,
) -> Iterator[Cell]:
    """Start the plan. Nothing of it is left when the context ends.

    `contents`: of each memory file in the plan. Raises ValueError if one is missing. `observe`: note what the
    plugin asks the kernel for; the cage is the same. Where the machine does not make its overlays it is
    started without, and `Cell.overlay_fault` says why: they give a plugin more, and protect nothing.
    """
    bounds = bounds or Bounds(rlimits(open_plan.plan.limits))
    if open_plan.plan.overlays:
        with ExitStack() as stack:
            others = owner, bwrap_path, bounds, contents, observe
            try:
                cell = stack.enter_context(_launch_all(open_plan, *others))
            except SpawnError as error:
                if error.stage != OVERLAY:
                    raise
                why = f"this machine mounts no overlay there: {os.strerror(error.errno)}"
                if any(each.memory for each in open_plan.plan.overlays):
                    raise _no_layer(open_plan.plan, why) from None
                if open_plan.plan.staged:
                    raise _not_staged(open_plan.plan, why) from None
                bare = open_plan._replace(plan=open_plan.plan.without_overlays(why))
                cell = stack.enter_context(_launch_all(bare, *others))
                cell.overlay_fault = why
            yield cell
        return
    with _launch_all(open_plan, owner, bwrap_path, bounds, contents, observe) as cell:
        yield cell


@contextmanager
def _launch_all(
    open_plan: OpenPlan,
    owner: Owner,
    bwrap_path: str,
    bounds: Bounds,
    contents: Contents | None,
    observe: bool,
) -> Iterator[Cell]:
    if not observe:
        with _launch_with_agent(open_plan, owner, bwrap_path, bounds, contents, None) as cell:
            yield cell
        return
    from sandbox.cell.observer import open_observer

    # It reads the memory of the plugin's processes, which root may do in all containers by their uid alone.
    identity = (owner.uid, owner.gid) if open_plan.plan.layers.uid_range is not None else None
    with ExitStack() as stack:
        observer = stack.enter_context(open_observer(identity, None if contents is None else contents.wipe))
        try:
            cell = stack.enter_context(
                _launch_with_agent(open_plan, owner, bwrap_path, bounds, contents, observer)
            )
        except SpawnError as error:
            if error.stage != OBSERVE:
                raise
            from sandbox.plan.layers import LayerUnavailable

            hint = "a supervisor around the runner, as some containers have, may observe it: learn elsewhere"
            raise LayerUnavailable("seccomp", str(error), hint) from None
        yield cell


@contextmanager
def _launch_with_agent(
    open_plan: OpenPlan,
    owner: Owner,
    bwrap_path: str,
    bounds: Bounds,
    contents: Contents | None,
    observer: CageObserver | None,
) -> Iterator[Cell]:
    plan = open_plan.plan
    others = open_plan, owner, bwrap_path, bounds, contents, observer
    if plan.ssh is None:
        with _launch_in_network(*others, None) as cell:
            yield cell
        return
    from sandbox.cell.agent import agent_fault, open_agent

    # The agent starts before the plugin and ends after it.
    forget = contents.wipe if contents is not None else None
    with ExitStack() as stack:
        agent = stack.enter_context(
            open_agent(plan.ssh, plan.layers.uid_range, bounds.launch, plan.limits, forget)
        )
        try:
            cell = stack.enter_context(_launch_in_network(*others, agent))
        except SpawnError as error:
            if error.stage != AGENT:
                raise
            raise agent_fault(agent, error) from None
        yield cell


@contextmanager
def _launch_in_network(
    open_plan: OpenPlan,
    owner: Owner,
    bwrap_path: str,
    bounds: Bounds,
    contents: Contents | None,
    observer: CageObserver | None,
    agent: AgentProcess | None,
) -> Iterator[Cell]:
    plan = open_plan.plan
    if plan.share_network:
        with _launch(open_plan, owner, bwrap_path, bounds, contents, None, observer, agent) as cell:
            yield cell
        return
    if plan.egress is None:
        with (
            open_lookups(gives_addresses=observer is not None) as lookups,
            _launch(open_plan, owner, bwrap_path, bounds, contents, lookups, observer, agent) as cell,
        ):
            yield cell
        return
    from sandbox.cell.egress import open_gate

    # The gate starts before the plugin and ends after it. So does the broker, around it.
    forget = contents.wipe if contents is not None else None
    uids, limits = plan.layers.uid_range, plan.limits
    with ExitStack() as stack:
        broker = None
        if plan.egress.broker is not None:
            from sandbox.cell.broker import open_broker

            broker = stack.enter_context(open_broker(plan.egress.broker, contents, uids, limits))
        door = -1 if broker is None else broker.channel.fileno()
        gate = stack.enter_context(open_gate(plan.egress, uids, bounds.launch, limits, forget, door))
        if broker is not None:  # now: until here its first act and the gate's had time
            open_plan = open_plan._replace(plan=broker.dress(plan))
            contents = broker.dress_files(contents) if contents is not None else None
            gate.broker = broker
        yield stack.enter_context(
            _launch(open_plan, owner, bwrap_path, bounds, contents, gate, observer, agent)
        )


@contextmanager
def _launch(
    open_plan: OpenPlan,
    owner: Owner,
    bwrap_path: str,
    bounds: Bounds,
    contents: Contents | None,
    network: GateProcess | NameLookups | None,
    observer: CageObserver | None,
    agent: AgentProcess | None,
) -> Iterator[Cell]:
    """`network`: None for the host's own."""
    plan = open_plan.plan
    with ExitStack() as stack:
        status_r, status_w = _pipe(stack)
        ending_r, ending_w = _pipe(stack)
        launch_r, launch_w = _pipe(stack)
        complaint_r, complaint_w = _pipe(stack)
        release_r, release_w = _pipe(stack) if bounds.is_parked else (-1, -1)
        for read in (launch_r, complaint_r):
            os.set_blocking(read, False)  # affects this end only
        # Under a low limit of open files, inherited descriptors could leave bwrap no free number below the
        # limit. So they get numbers above it: descriptors above the limit stay open.
        lowest = _high_numbers() if plan.limits.open_files is not None else 0
        sources, texts = open_plan.descriptors, [op for op in plan.operations if isinstance(op, Text)]
        report_fd = _move_above(stack, launch_w, lowest)
        release_fd = _move_above(stack, release_r, lowest) if bounds.is_parked else -1
        helper = _launcher(stack, bounds.streams, report_fd, lowest, release_fd)
        folders = {op.dest: folder_path(number) for number, op in enumerate(plan.folders)}
        mounts = _idmapped_mounts(stack, open_plan, owner) if plan.idmapped else {}
        binds = _guarded_binds(open_plan, mounts) if plan.guards else {}
        overlaid = [each.dest for each in plan.overlays]
        if overlaid:
            from sandbox.cell.overlay import add_parts, overlay_orders

            overlaid_folders = _overlaid_folders(open_plan)
            plugin = None if plan.layers.uid_range is None else (owner.uid, owner.gid)
            add_parts(stack, overlaid_folders, plugin, mounts, binds)
        if made := (*mounts, *binds, *overlaid):
            sources = {dest: fd for dest, fd in sources.items() if dest not in made}
            folders |= {dest: folder_path(number) for number, dest in enumerate(made, len(folders))}
        slots = bwrap.Slots(
            sources={dest: _move_above(stack, fd, lowest) for dest, fd in sources.items()}
            if lowest
            else sources,
            texts={
                **{text.dest: _data_file(stack, text.content, lowest) for text in texts},
                **(_memory_files(stack, files, contents, lowest) if (files := plan.memory_files) else {}),
            },
            folders=folders,
            filters=tuple(_data_file(stack, bpf, lowest) for bpf in _filters(plan, bounds.streams)),
            status=status_w,
            launcher=helper.file,
            own_network=network is not None,
            overlays=tuple(overlaid),
        )
        arguments = _data_file(stack, _nul_separated(bwrap.options(plan, slots)), lowest)
        handles = stack.enter_context(bounds.cgroup.open_handles()) if bounds.cgroup else CgroupHandles()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, null)
        order = _order(plan, slots, arguments, owner, bwrap_path, ending_w)
        order = order._replace(
            argv=(*order.argv[:4], helper.path, *order.argv[4:]),
            keep=(*order.keep, *helper.keep),
            stdio=(null, null, complaint_w),  # for bwrap itself: both of its processes keep these
        )
        order = _with_bounds(order, bounds, handles)._replace(
            mounts=tuple(mounts.values()),
            binds=tuple(binds.values()),
            guards=tuple(_guard_orders(plan, list(folders))) if plan.guards else (),
        )
        if overlaid:
            # Another launch must not remove what overlayfs works with before the last process ends.
            locks = (each.lock for each in open_plan.overlays.values())
            order = order._replace(
                overlays=overlay_orders(overlaid_folders, list(folders)), hold=(*order.hold, *locks)
            )
        started = time.monotonic()
        if observer is not None:
            stack.callback(observer.close_channel)
            order = order._replace(observer=observer.order)
        if agent is not None:
            stack.callback(agent.close_channel)
            order = order._replace(agent=agent.order)
        if isinstance(network, NameLookups):
            pid = network.spawn(order)
        else:
            pid = spawner.spawn(order) if network is None else _spawn_with_gate(network, order)
        try:
            cell = Cell(
                pid=pid,
                status_fd=os.dup(status_r),
                ending_fd=os.dup(ending_r),
                started=started,
                cgroup=bounds.cgroup,
                launch_fd=os.dup(launch_r),
                complaint_fd=os.dup(complaint_r),
                release_fd=os.dup(release_w) if bounds.is_parked else -1,
            )
            if isinstance(network, NameLookups):
                cell.lookups = network
            else:
                cell.gate = network
            cell.observer = observer
            cell.agent = agent
            if agent is not None and cell.gate is not None:
                agent.tell(cell.gate.log)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    try:
        yield cell
    finally:
        cell.close()


def _filters(plan: LaunchPlan, streams: Sequence[int]) -> tuple[bytes, ...]:
    """The filters of the plan, and one more for a plugin that has a terminal."""
    filters = plan.filters
    if not filters or not any(os.isatty(fd) for fd in streams):
        return filters
    from sandbox.seccomp.filter import machine_arch
    from sandbox.seccomp.terminal_signals import no_terminal_signals

    return *filters, no_terminal_signals(machine_arch())


def _spawn_with_gate(gate: GateProcess, order: SpawnOrder) -> int:
    """Spawn. Raises LayerUnavailable if the plugin's network cannot be made, or the gate does not serve
    it."""
    from sandbox.plan.layers import LayerUnavailable
    from sandbox.spawn.network import STEPS

    try:
        return spawner.spawn(order._replace(network=gate.order))
    except SpawnError as error:
        own = {request.step for request in gate.order.recipe.requests} | STEPS
        if error.stage not in own:
            raise
        gate.close_channel()
        gate.drain(_GATE_FAULT_SECONDS)
        why = f" (the gate says: {gate.log.fault})" if gate.log.fault else ""
        hint = "run `runner doctor`: it says whether this machine can give a plugin a list of hosts"
        raise LayerUnavailable("network", f"{error}{why}", hint) from None
    finally:
        gate.close_channel()
        if gate.broker is not None:
            gate.broker.begin()


def _order(
    plan: LaunchPlan, slots: bwrap.Slots, arguments: int, owner: Owner, bwrap_path: str, ending: int
) -> SpawnOrder:
    given = (*slots.sources.values(), *slots.texts.values(), *slots.filters, slots.status, arguments)
    return SpawnOrder(
        program=bwrap_path,
        # The plugin can read this in /proc/1/cmdline.
        argv=("bwrap", "--args", str(arguments), "--", *plan.argv),
        uid=owner.uid,
        gid=owner.gid,
        drop=plan.layers.uid_range is not None,
        keep=given,
        rlimits=(),
        keyring=plan.layers.session_keyring,
        ending=ending,
        folders=tuple(f"size={op.size},nr_inodes={op.inodes},mode={op.mode:o}" for op in plan.folders),
        scratch=next((number for number, op in enumerate(plan.folders) if op.is_scratch), -1),
        # The uid stays leased until the last process with it ends, even if the runner ends before.
        hold=() if owner.lease_fd is None else (owner.lease_fd,),
    )


def _idmapped_mounts(stack: ExitStack, open_plan: OpenPlan, owner: Owner) -> dict[str, tuple[int, bool]]:
    """Idmapped mounts by destination, and whether each is of a directory."""
    from sandbox.identity.idmap import FileOwner, IdmapUnavailable, idmapped_mount

    found = {}
    for dest, uid, gid in open_plan.plan.idmapped:
        source = open_plan.descriptors[dest]
        try:
            fd = idmapped_mount(source, FileOwner(uid, gid), FileOwner(owner.uid, owner.gid))
        except IdmapUnavailable as refused:
            raise SpawnError(f"map the owner of {dest}", refused.errno) from None
        stack.callback(os.close, fd)
        found[dest] = fd, stat.S_ISDIR(os.fstat(source).st_mode)
    return found


def _guarded_binds(open_plan: OpenPlan, mounts: Mapping[str, object]) -> dict[str, tuple[int, str]]:
    """Writable folders that have guards and no idmapped mount, by destination, with their names."""
    guarded = {guard.dest for guard in open_plan.plan.guards}
    return {
        op.dest: (open_plan.descriptors[op.dest], op.real)
        for op in open_plan.plan.operations
        if isinstance(op, Bind) and op.dest in guarded and op.dest not in mounts
    }


def _overlaid_folders(open_plan: OpenPlan) -> list[OverlaidFolder]:
    from sandbox.cell.overlay import OverlaidFolder

    plan, held = open_plan.plan, open_plan.overlays
    reals = {op.dest: op.real for op in plan.operations if isinstance(op, Bind)}
    return [
        OverlaidFolder(
            dest,
            (open_plan.descriptors[dest], reals[dest]),
            (held[dest].folder, path) if dest in held else None,
            held[dest].work if dest in held else "",
            owner,
        )
        for dest, path, owner, _ in plan.overlays
    ]


def _no_layer(plan: LaunchPlan, why: str) -> LayerUnavailable:
    from sandbox.plan.layers import LayerUnavailable

    hint = "runner doctor says what this machine can do; docker run --read-only needs no layer"
    return LayerUnavailable("image", f"{plan.image} gets no layer for what it changes: {why}", hint)


def _not_staged(plan: LaunchPlan, why: str) -> LayerUnavailable:
    from sandbox.plan.layers import LayerUnavailable

    places = ", ".join(each.dest for each in plan.staged)
    hint = (
        "use a folder on ext4, xfs, btrfs or tmpfs, and Linux 5.11 (as root 5.19); without --staged it "
        "writes to the folder itself"
    )
    return LayerUnavailable("staged", f"writes to {places} cannot be staged: {why}", hint)


def _guard_orders(plan: LaunchPlan, folders: Sequence[str]) -> Iterator[GuardOrder]:
    """`folders`: the destinations of all folders, by number."""
    for guard in plan.guards:
        if guard.state == "link":
            continue
        yield GuardOrder(folders.index(guard.dest), guard.path, guard.access, guard.state == "optional")


def _with_bounds(order: SpawnOrder, bounds: Bounds, handles: CgroupHandles) -> SpawnOrder:
    cgroup = bounds.cgroup
    return order._replace(
        until=min(filter(None, (bounds.launch, bounds.deadline)), default=None),
        rlimits=bounds.rlimits,
        cgroups=handles,
        membership=() if cgroup is None else tuple(os.fsencode(line) for line in cgroup.lines),
        # The groups, like the uid, are in use until the last process ends.
        hold=order.hold if cgroup is None else (*order.hold, *cgroup.lock_fds),
        deadline=bounds.deadline,
        released_seconds=bounds.released_seconds,
    )


class _Launcher(NamedTuple):
    path: str  # in the cage
    keep: tuple[int, ...]  # the descriptors it is started with
    file: int | None = None  # the file that bwrap places there


def _launcher(
    stack: ExitStack, streams: Sequence[int], report_fd: int, lowest: int, release_fd: int
) -> _Launcher:
    lowest = max(lowest, 3)
    stdin, stdout, stderr = (_move_above(stack, fd, lowest) for fd in streams)
    ends = stdin, stdout, stderr
    keep = (*ends, report_fd) if release_fd < 0 else (*ends, report_fd, release_fd)
    try:
        file = executable("runner-launcher")
    except PermissionError:  # vm.memfd_noexec=2: the launcher needs a name
        content = _data_file(stack, launcher.image(ends, -1, report_fd, release=release_fd), lowest)
        return _Launcher(bwrap.LAUNCHER, (*keep, content), content)
    try:
        own = _move_above(stack, file, lowest)
        write_all(file, launcher.image(ends, own, report_fd, release=release_fd))
        os.fchmod(file, 0o555)
    finally:
        os.close(file)
    return _Launcher(launcher.PATH.format(own), (*keep, own))


def _data_file(stack: ExitStack, content: bytes, lowest: int) -> int:
    """A descriptor with this content. bwrap reads it to the end, so each serves one launch."""
    fd = os.memfd_create("runner", os.MFD_CLOEXEC)
    try:
        write_all(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return _move_above(stack, fd, lowest)
    finally:
        os.close(fd)


def _memory_files(
    stack: ExitStack, files: Sequence[MemoryFile], contents: Contents | None, lowest: int
) -> dict[str, int]:
    from sandbox.cell.contents import sealed_file

    found = {}
    for file in files:
        content = None if contents is None else contents.of(file)
        if content is None:
            raise ValueError(f"there is no content for {file.dest}")
        fd = sealed_file(content)
        try:
            found[file.dest] = _move_above(stack, fd, lowest)
        finally:
            os.close(fd)
    return found


def _pipe(stack: ExitStack) -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    stack.callback(os.close, write)
    stack.callback(os.close, read)
    return read, write


def _high_numbers() -> int:
    """The lowest descriptor number for inherited files: high enough for bwrap, and within our own limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(200, soft // 2) if soft > 0 else 200


def _move_above(stack: ExitStack, fd: int, lowest: int) -> int:
    """Duplicate a descriptor to a number of at least `lowest`."""
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    stack.callback(os.close, lifted)
    return lifted


def _nul_separated(words: Sequence[str]) -> bytes:
    if any("\0" in word for word in words):
        raise ValueError("a NUL in an argument would start another option")
    return b"".join(os.fsencode(word) + b"\0" for word in words)
