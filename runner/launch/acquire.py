"""Planned -> Acquired: get what one launch holds while the plugin runs.

That is open sources, a uid, the state directory and cgroups. All of it is released when the context ends, and
a state directory that was made for a launch that failed is removed. Modules that only few launches need are
imported inside of functions.

The result holds the plan completed with the identity of the state directory, the uid that was actually
reserved, and the limits as the kernel accepted them. None of these can be decided earlier: an expected uid
may go to another plugin meanwhile, and a directory may be replaced before it is claimed.
"""

from __future__ import annotations

import os
import stat

from runner.launch.sources import HeldSources, Sources, with_known_state
from runner.outcome import EXEC_REFUSED, Failure, Outcome
from sandbox.identity.owner import Owner, Writing, leased_owner
from sandbox.limits.cgroup import CgroupFault, OuterOomCounter, make_cgroup, sweep, whole_disks
from sandbox.plan.layers import LayerUnavailable, with_owner
from sandbox.plan.plan import Bind, PlanRefused
from sandbox.spec import Denial, Note
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Collection, Iterator, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.launch.stages import Planned, Provision
    from sandbox.cell.contents import Contents
    from sandbox.limits.assigned import AssignedLimits
    from sandbox.limits.cgroup import Cgroup
    from sandbox.limits.cgroup_survey import Survey
    from sandbox.limits.disk import DiskMeter
    from sandbox.paths.end_search import FolderSearch
    from sandbox.paths.guarded import Names
    from sandbox.plan.owners import Decision
    from sandbox.plan.plan import Guard, LaunchPlan, OpenPlan
    from sandbox.staged.store import Changeset, OpenChangeset


class Acquired(NamedTuple):
    planned: Planned  # completed
    opened: OpenPlan
    owner: Owner
    cgroup: Cgroup | None = None
    oom_around: OuterOomCounter | None = None
    disk: DiskMeter | None = None  # of the folders it may write, measured before it starts
    search: FolderSearch | None = None  # of the folders it may write, made after its end
    staged: OpenChangeset | None = None  # what it writes, if that is staged


@contextmanager
def acquire(planned: Planned, environ: Mapping[str, str], sources: Sources) -> Iterator[Acquired]:
    """Acquire everything until the context ends. Raises errors that `failures.failure_of` knows."""
    with ExitStack() as stack:
        yield _acquire(planned, environ, sources, stack)


def _acquire(planned: Planned, environ: Mapping[str, str], sources: Sources, stack: ExitStack) -> Acquired:
    _require_same_user(planned)
    held = sources.held_for(planned, environ)
    provision, owners = planned.provision, planned.plan.owners
    owner = _claim(planned, provision, stack)
    if owners is not None and owners.left:
        owners = _confirm_owners(owners, planned, held.opened, owner.uid)
    opened = _open_state(planned, held, owners, stack)
    _require_same_state(owner, opened.plan)
    staged = None
    if opened.plan.overlays:
        if any(each.is_kept for each in opened.plan.overlays):
            opened = _open_overlays(opened, owner, planned, owners, stack)
        if opened.plan.staged:
            opened, staged = _open_staged(opened, owner, planned, environ, stack)
    if provision.state_dir is not None and (owners is None or not owners.maps_state):
        _require_reachable(provision.state_dir, owner)
    disk = search = None
    if not provision.unsandboxed:
        if held.opened.plan.guards:
            names = {} if held.denylist is None else held.denylist().guarded_names
            search = _hold_guarded(held.opened, names, stack)
        if opened.plan.limits.disk is not None and (writable := opened.writable):
            meter = open_disk_meter(writable, opened.plan.limits.disk, tuple(opened.overlays))
            disk = stack.enter_context(meter)
    cgroup, limits = _make_cgroup(planned, held, opened.plan, stack)
    own_count = cgroup is not None and cgroup.counts_memory
    identity = owners.identity() if owners is not None else ""
    completed = planned._replace(
        plan=opened.plan,
        layers=with_owner(planned.layers, owner.uid, identity, opened.plan.inside[0]),
        limits=limits,
    )
    oom_around = None if own_count else OuterOomCounter(held.own_groups)
    return Acquired(completed, opened, owner, cgroup, oom_around, disk, search, staged)


def _require_same_user(planned: Planned) -> None:
    """Refuse a plan of another user. A plan of an ordinary user drops no uid: root would run the plugin as
    root."""
    if planned.euid != os.geteuid():
        reason = f"the plan was made by uid {planned.euid}, and this is uid {os.geteuid()}"
        hint = "make the plan again: start the plugin from its manifest"
        raise PlanRefused([Denial("plan_outdated", planned.plugin.manifest, reason, hint)])


# --- the plugin's uid --------------------------------------------------------------------------------------


def _claim(planned: Planned, provision: Provision, stack: ExitStack) -> Owner:
    """Lease or reserve the plugin's uid, and prepare its state directory, if it has one."""
    state_dir, uid_range, owners = provision.state_dir, planned.plan.layers.uid_range, planned.plan.owners
    account, writing = owners.account if owners is not None else None, None
    if account is not None and state_dir is None:
        return Owner(account.uid, account.gid, None)
    if owners is not None and owners.left:
        writing = Writing(owners.left, provision.writing_for)
    own = account if owners is not None and not owners.maps_state else None
    parts, manifest = provision.state_parts, provision.manifest
    try:
        if state_dir is None and (writing is None or uid_range is None):
            claimed = leased_owner(uid_range)
        else:
            from sandbox.identity.state import owned_state

            claimed = owned_state(
                state_dir, uid_range, parts, manifest=manifest, writing=writing, account=own
            )
        owner = stack.enter_context(claimed)
        return owner if account is None else owner._replace(uid=account.uid, gid=account.gid)
    except OSError as error:
        if isinstance(error, PermissionError) and uid_range is not None:
            _require_capabilities(uid_range)
        from sandbox.identity.state import StateUnwritable, unwritable
        from sandbox.identity.uid_range import RESERVATIONS

        place, hint = str(error.filename or state_dir), "choose a writable place with --state-dir"
        if uid_range is None or not place.startswith(("/run/", RESERVATIONS)):
            raise unwritable(place, error) or StateUnwritable(f"{place}: {error.strerror}", hint) from None
        hint = "uids of plugins are leased there: make it writable (in a container: --tmpfs /run)"
        if place.startswith(RESERVATIONS):
            hint = (
                "uids of plugins with state are reserved there: make it writable (in a container: a volume)"
            )
        raise StateUnwritable(f"{place}: {error.strerror}", hint) from None


def _require_capabilities(uid_range: tuple[int, int]) -> None:
    """For a root without all rights, in a container or a unit. Raises LayerUnavailable if it cannot drop its
    uid."""
    from sandbox.doctor.probes import obstacles

    for found in obstacles(os.environ, uid_range=uid_range):
        if found.layer == "uid_drop":
            raise LayerUnavailable(found.layer, found.summary, " ".join(found.remedy.split())) from None


def _confirm_owners(owners: Decision, planned: Planned, opened: OpenPlan, uid: int) -> Decision:
    """The owners of what the plugin writes to folders of the host, with the uid it got. Raises PlanRefused if
    that is not the expected uid and may not write there."""
    from sandbox.paths.denied_paths import normal
    from sandbox.paths.source import OpenSource
    from sandbox.plan.owners import WriteRequest

    where = {path.path: path.where for path in planned.grant.paths}
    strangers = {each.path: each.strangers for each in owners.paths}
    asked = [
        WriteRequest(
            OpenSource(
                normal(bind.dest),
                bind.real,
                opened.descriptors[bind.dest],
                bind.identity,
                "dir" if stat.S_ISDIR(bind.identity.mode) else "file",
                "write",
                strangers=strangers[normal(bind.dest)],
            ),
            where.get(bind.dest, ()),
        )
        for bind in planned.plan.operations
        if isinstance(bind, Bind) and bind.writable and normal(bind.dest) in strangers
    ]
    confirmed = owners.with_reserved_uid(asked, uid)
    if confirmed.denials:
        raise PlanRefused(confirmed.denials)
    return confirmed


# --- its state directory ------------------------------------------------------------------------------------


def _open_state(planned: Planned, held: HeldSources, owners: Decision | None, stack: ExitStack) -> OpenPlan:
    """Open the state directory, and return the plan with it. Raises PlanRefused."""
    if planned.provision.state_dir is None:
        if owners is planned.plan.owners:
            return held.opened
        return held.opened._replace(plan=held.opened.plan._replace(owners=owners))
    if held.is_known or held.denylist is None:
        return stack.enter_context(with_known_state(held.opened))
    from sandbox.plan.sources import open_state, with_state

    state = stack.enter_context(open_state(planned.plan, held.denylist(), planned.grant.paths))
    return with_state(held.opened, state, owners)


def _open_overlays(
    opened: OpenPlan, owner: Owner, planned: Planned, owners: Decision | None, stack: ExitStack
) -> OpenPlan:
    """Open the folders that keep what the plugin changes of its package. Without one the package is
    read-only, and a note says why."""
    from sandbox.identity.host_side import HostSideRefused
    from sandbox.identity.overlay import OverlayRefused, open_overlay
    from sandbox.paths.walk import LinkRefused, TooManyLinks

    if owners is not None and owners.maps_state:
        why = "its state belongs to another account than the plugin, whose uid is another one at each start"
        return opened._replace(plan=opened.plan.without_overlays(why))
    assert planned.provision.state_dir is not None
    held = {}
    try:
        for each in opened.plan.overlays:
            if each.is_kept:
                name = os.path.basename(each.changes)
                opening = open_overlay(planned.provision.state_dir, name, owner.uid, owner.gid)
                held[each.dest] = stack.enter_context(opening)
    except (OverlayRefused, HostSideRefused, LinkRefused, TooManyLinks) as refused:
        return opened._replace(plan=opened.plan.without_overlays(str(refused)))
    except OSError as error:
        why = f"what it would change cannot be kept: {error.strerror}"
        return opened._replace(plan=opened.plan.without_overlays(why))
    notes = []
    for dest, folder, _, _ in opened.plan.overlays:
        if dest in held and (others := held[dest].others):
            places = ", ".join(os.path.join(os.path.dirname(folder), each) for each in others)
            message = (
                f"what it changed in another version of its package is kept, and not shown to it: {places}"
            )
            notes.append(Note("overlay", message, "take out of it what you need, and remove it"))
    return opened._replace(plan=opened.plan._replace(notes=(*opened.plan.notes, *notes)), overlays=held)


def _open_staged(
    opened: OpenPlan, owner: Owner, planned: Planned, environ: Mapping[str, str], stack: ExitStack
) -> tuple[OpenPlan, OpenChangeset]:
    """Make the changeset that takes what the plugin writes, and name those that wait. Raises
    LayerUnavailable."""
    from runner.launch.command import environ_of_places
    from sandbox.staged.layer import note_folders
    from sandbox.staged.store import StagedFolder, StagingRefused, list_changesets, open_changeset, store_path

    plan, store = opened.plan, store_path(environ_of_places(planned.plugin, environ))
    reals = {op.dest: op.real for op in plan.operations if isinstance(op, Bind)}
    folders = []
    for each in plan.staged:
        assert each.staged_for is not None
        status = os.fstat(opened.descriptors[each.dest])
        folders.append(StagedFolder(reals[each.dest], status.st_dev, status.st_ino, each.staged_for))
    own = {each.real for each in folders}
    waiting = [each for each in list_changesets(store) if own.intersection(f.real for f in each.folders)]
    try:
        staged = stack.enter_context(
            open_changeset(store, planned.plugin.name or planned.plugin.id, folders, owner.uid, owner.gid)
        )
    except StagingRefused as refused:
        raise LayerUnavailable("staged", str(refused), refused.hint) from None
    stack.callback(note_folders, staged.changeset)
    layers = dict(zip((each.dest for each in plan.staged), staged.layers, strict=True))
    overlays = [
        each._replace(changes=layers[each.dest].path) if each.dest in layers else each
        for each in plan.overlays
    ]
    notes = [*plan.notes, *map(_waiting_note, waiting)]
    plan = plan._replace(overlays=tuple(overlays), notes=tuple(notes))
    return opened._replace(plan=plan, overlays={**opened.overlays, **layers}), staged


def _waiting_note(changeset: Changeset) -> Note:
    places = ", ".join(each.real for each in changeset.folders)
    told = f"changes of an earlier run wait for {places}, and this run does not see them"
    return Note("staged", told, f"runner diff {changeset.id}; then runner apply or runner discard")


def _require_same_state(owner: Owner, plan: LaunchPlan) -> None:
    """Raise StateRefused if the directory to mount is not the one that was prepared."""
    if not owner.state:
        return
    for operation in plan.operations:
        if isinstance(operation, Bind) and operation.dest in owner.state:
            opened = (operation.identity.dev, operation.identity.ino)
            if opened != owner.state[operation.dest]:
                from sandbox.identity.state import StateRefused

                raise StateRefused(
                    f"state directory {operation.dest} was replaced while it was being opened",
                    "choose a place with --state-dir that nobody else can write",
                )


def _require_reachable(state_dir: str, owner: Owner) -> None:
    from sandbox.paths.access import Unreadable, unreachable

    blocked = unreachable(state_dir, owner.uid, owner.gid, 0o7)
    if blocked is not None:
        raise Unreadable(blocked, owner.uid, f"chmod o+x {blocked}, or choose another place with --state-dir")


# --- the folders it may write, and the files in memory -----------------------------------------------------


def _hold_guarded(opened: OpenPlan, names: Names, stack: ExitStack) -> FolderSearch:
    """Make the guarded names that are missing in writable folders, while the plugin runs. Raises PlanRefused.
    Returns the search for what cannot be guarded, which is made when the plugin has ended."""
    from sandbox.paths.end_search import FolderSearch, WatchedFolder
    from sandbox.paths.stand_in import GuardedPlace, StandInRefused, hold_places

    guards: dict[str, list[Guard]] = {}
    for guard in opened.plan.guards:
        if guard.access != "write":
            guards.setdefault(guard.dest, []).append(guard)
    for dest, found in guards.items():
        # Also names that existed when the plan was made: another launch may have made and removed them.
        places = [
            GuardedPlace(opened.descriptors[dest], guard.path, guard.content)
            for guard in found
            if guard.state in ("bound", "made at launch")
        ]
        try:
            stack.enter_context(hold_places(places))
        except StandInRefused as refused:
            reason = f"{dest} cannot be written by a plugin: {refused}"
            raise PlanRefused([Denial("guarded", dest, reason, refused.hint)]) from None
    search = FolderSearch(names)
    reals = {op.dest: op.real for op in opened.plan.operations if isinstance(op, Bind)}
    stack.enter_context(
        search.watching(
            [
                WatchedFolder(
                    reals[dest],
                    opened.descriptors[dest],
                    tuple(guard.path for guard in found),
                    tuple(guard.path for guard in found if guard.state in ("optional", "link")),
                )
                for dest, found in guards.items()
            ]
        )
    )
    return search


@contextmanager
def searched_afterwards(acquired: Acquired) -> Iterator[None]:
    """Search the folders that the plugin may write when the context ends, however it ends."""
    try:
        yield
    finally:
        if acquired.search is not None:
            acquired.search.search()


@contextmanager
def open_disk_meter(
    writable: Mapping[str, int], limit: int, overlaid: Collection[str] = ()
) -> Iterator[DiskMeter]:
    """Measure the plugin's folders. Raises Failure if they already hold more than its disk limit. `overlaid`:
    those of which only what the plugin changed is measured.

    The meter continues from this measurement. So it need not measure again when the plugin starts, and counts
    everything that the plugin writes.
    """
    from sandbox.limits.disk import DiskMeter

    meter = DiskMeter(writable, limit, overlaid=overlaid)
    try:
        if meter.measure():
            from runner.launch.verdict import raise_hint
            from sandbox.units import format_limit

            amount = format_limit("disk", limit)
            message = f"{meter.where} already holds more than the disk limit of {amount}"
            hint = f"delete files there, or {raise_hint('disk')}"
            if meter.why:
                message = f"what {meter.where} holds cannot be measured, for its disk limit: {meter.why}"
                hint = "let the runner read all of it, or choose another folder"
            if meter.where in overlaid:
                why = "cannot be measured, for its disk limit" if meter.why else "takes more than"
                why += f": {meter.why}" if meter.why else f" the disk limit of {amount}"
                message = f"what it changed in {meter.where} {why}"
                hint = "remove that, with its state (runner state remove)"
                hint += "" if meter.why else f", or {raise_hint('disk')}"
            raise Failure(Outcome("policy_denied", "plan", message, "disk", hint), EXEC_REFUSED)
        yield meter
    finally:
        meter.close()


def require_contents(planned: Planned, contents: Contents | None) -> None:
    """Raise Failure if a memory file has no content, or more than fits."""
    from runner.launch.verdict import raise_hint
    from sandbox.cell.contents import Contents
    from sandbox.document.diagnostic import quoted
    from sandbox.paths.mounts import contains
    from sandbox.units import format_limit

    files, given = planned.plan.memory_files, contents or Contents()
    slots = [file.secret for file in files if file.secret]
    listed_slots = ", ".join(slots) or "none"
    if strays := given.strays(files):
        message = (
            f"the plugin asks for no secret or file {quoted(strays[0])}; its secrets are: {listed_slots}"
        )
        raise _contents_refused(message, f"leave out --secret {strays[0]}=…")
    lacking = [file for file in files if given.of(file) is None]
    for file in lacking:
        if file.secret:
            message = f"the plugin needs the secret {quoted(file.secret)}, and it was not given"
            hint = f"--secret {file.secret}=@FILE, or --secret {file.secret}=env:NAME for a variable"
            raise _contents_refused(message, f"{hint}; its secrets are: {listed_slots}")
        message = f"{file.dest} exists only in memory, and this call brings no content for it"
        raise _contents_refused(message, "use `runner call`, which makes it")
    scratch, size = planned.grant.scratch, planned.grant.scratch_bytes
    if scratch is not None and size is not None:
        held = sum(len(given.of(file) or b"") for file in files if contains(scratch.dest, file.dest))
        if held > size:
            message = (
                f"the files for {scratch.dest} take {held} bytes, and it has {format_limit('disk', size)}"
            )
            raise _contents_refused(message, raise_hint("disk", planned.grant.decided_by))


def _contents_refused(message: str, hint: str) -> Failure:
    return Failure(Outcome("policy_denied", "plan", message, "memory_file", hint), EXEC_REFUSED)


# --- its cgroups --------------------------------------------------------------------------------------------


def _make_cgroup(
    planned: Planned, held: HeldSources, plan: LaunchPlan, stack: ExitStack
) -> tuple[Cgroup | None, AssignedLimits]:
    """Make the plugin's cgroups. Returns them and the limits as the kernel accepted them."""
    assigned, fault = held.limits, None
    if not assigned.sites:
        return None, assigned
    for site in held.sites:
        if site not in assigned.sites:  # for these make_cgroup does it
            sweep(site.directory)  # it may be long until another launch makes a group here
    disks = () if plan.limits.io is None else whole_disks(_devices(plan))
    if plan.limits.io is None or disks:  # assumed when means were assigned to limits
        try:
            cgroup = stack.enter_context(make_cgroup(assigned.sites, plan.limits, disks))
            return cgroup, assigned.with_effective(cgroup.effective)
        except CgroupFault as failed:
            fault = failed
    return _make_other_cgroup(planned, held.survey(), plan, stack, disks, fault)


def _make_other_cgroup(
    planned: Planned,
    found: Survey,
    plan: LaunchPlan,
    stack: ExitStack,
    disks: Collection[tuple[int, int]],
    fault: CgroupFault | None,
) -> tuple[Cgroup | None, AssignedLimits]:
    """Make the plugin's cgroups after the first try failed, or if there is no disk for the io limit.

    The next best means is taken, or the launch fails: the policy decides (mode under [limits.NAME]). `disks`:
    those with the plugin's files. `fault`: of the first try.
    """
    from sandbox.limits.assign import assign
    from sandbox.limits.cgroup_survey import Lack

    while True:
        if fault is not None:
            lack = Lack(f"cgroup {fault}", "run `runner doctor` to see why")
            found = found.without(fault.site.directory, fault.controllers, lack)
        try:
            assigned = assign(planned.grant, planned.policy, found, disks)
        except LayerUnavailable:
            # The plan assumed the group that failed. The report must not.
            from runner.launch.failures import as_failure

            there_was = assign(planned.grant, planned.policy, found, disks, refuse=False)
            with as_failure(planned._replace(limits=there_was)):
                raise
        try:
            cgroup = stack.enter_context(make_cgroup(assigned.sites, plan.limits, disks))
        except CgroupFault as failed:
            fault = failed
            continue
        return cgroup, assigned.with_effective(cgroup.effective)


def _devices(plan: LaunchPlan) -> Iterator[int]:
    return iter({operation.identity.dev for operation in plan.operations if isinstance(operation, Bind)})
