"""Planned -> Acquired: what only this process can have, for as long as the plugin lives.

Open sources, a uid, the state directory, cgroups. All of it is given back when the context ends, and a state
directory that was made for a launch that failed is removed again.

The plan that comes out is the plan that went in, completed: with the identity of the state directory, the uid
that was really reserved, and the limits as the kernel took them. None of these can be decided earlier without
weakening a check. A uid that was only expected may go to another plugin meanwhile, and a directory that was
looked at before it was claimed may be replaced by another.
"""

from __future__ import annotations

import os
import stat

from runner.launch.plan import Held, Sources, require_room
from runner.launch.prepare import managed_state_dir
from runner.launch.stages import Planned
from runner.launch.verdict import failing
from sandbox.identity.state import Owner, StateRefused, Writing, owned_state
from sandbox.limits.assign import AssignedLimits, assign
from sandbox.limits.cgroup import Cgroup, CgroupFault, OomAround, make_cgroup, sweep
from sandbox.limits.cgroup_settings import whole_disks
from sandbox.limits.cgroup_survey import Lack
from sandbox.paths.access import Unreadable, unreachable
from sandbox.paths.denied_paths import normal
from sandbox.paths.source import OpenSource
from sandbox.plan.layers import LayerUnavailable, listed
from sandbox.plan.plan import Bind, LaunchPlan, OpenPlan, PlanRefused
from sandbox.scopes import ExitStack, contextmanager
from sandbox.spec import Denial
from sandbox.typed import TYPE_CHECKING, Iterator, Mapping
from sandbox.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.plan.owners import Decision


class Acquired(NamedTuple):
    planned: Planned  # completed
    opened: OpenPlan
    owner: Owner
    cgroup: Cgroup | None = None
    oom_around: OomAround | None = None


@contextmanager
def acquire(planned: Planned, environ: Mapping[str, str], sources: Sources) -> Iterator[Acquired]:
    """Raises Failure, with the plan as its stage."""
    with ExitStack() as stack:
        with failing(planned):
            acquired = _acquire(planned, environ, sources, stack)
        yield acquired


def _acquire(planned: Planned, environ: Mapping[str, str], sources: Sources, stack: ExitStack) -> Acquired:
    _require_same_user(planned)
    held = sources.held or sources.hold_again(planned, environ)
    owner = _claim(planned, environ, stack)
    owners = _confirm_owners(planned, held.opened, owner.uid)
    opened = _open_state(planned, held, owners, stack)
    _require_same_state(owner, opened.plan)
    if owners is None or not owners.maps_state:
        _require_reachable(planned.state_dir, owner)
    if held.opened.plan.guards and not planned.grant.unsandboxed:
        _hold_guarded(held.opened, stack)
    if not planned.grant.unsandboxed:
        require_room(opened, planned.grant.limits.disk)
    cgroup, limits = _make_cgroup(planned, held, opened.plan, stack)
    own_count = cgroup is not None and cgroup.counts_memory
    identity = owners.identity() if owners is not None else ""
    completed = planned._replace(
        plan=opened.plan,
        layers=listed(opened.plan.layers, planned.grant, planned.policy, owner.uid, identity),
        limits=limits,
    )
    oom_around = None if own_count else OomAround(held.survey.own)
    return Acquired(completed, opened, owner, cgroup, oom_around)


def _hold_guarded(opened: OpenPlan, stack: ExitStack) -> None:
    """Make the guarded names that are missing in writable folders, for as long as the plugin runs. Raises
    PlanRefused."""
    from sandbox.paths.stand_in import GuardedPlace, StandInRefused, held_places

    for guard in opened.plan.guards:
        if guard.access == "write" or guard.state == "optional":
            continue
        # Also what was there before: it may have been another launch's, and be gone.
        place = GuardedPlace(opened.descriptors[guard.dest], guard.path, guard.content)
        try:
            stack.enter_context(held_places([place]))
        except StandInRefused as refused:
            reason = f"{guard.dest} cannot be written by a plugin: {refused}"
            raise PlanRefused([Denial("guarded", guard.dest, reason, refused.hint)]) from None


def _require_same_user(planned: Planned) -> None:
    """A plan of an ordinary user drops no uid: root would run the plugin as root."""
    if planned.euid != os.geteuid():
        reason = f"the plan was made by uid {planned.euid}, and this is uid {os.geteuid()}"
        hint = "make the plan again: start the plugin from its manifest"
        raise PlanRefused([Denial("plan_outdated", planned.plugin.manifest, reason, hint)])


# --- who the plugin is --------------------------------------------------------------------------------------


def _claim(planned: Planned, environ: Mapping[str, str], stack: ExitStack) -> Owner:
    """The plugin's uid, leased or reserved, and its state directory made ready. A plugin without a state
    directory has a uid all the same."""
    state_dir, plugin, uid_range = planned.state_dir, planned.plugin, planned.plan.layers.uid_range
    owners = planned.plan.owners
    # The runner keeps no record of a directory that an ordinary user chose with --state-dir.
    managed = uid_range is not None or planned.invocation.state_dir is None
    manifest = os.path.realpath(plugin.manifest) if managed else ""
    parts = [
        path.path[len(state_dir) + 1 :]
        for path in planned.grant.paths
        if state_dir is not None and path.origin == "state" and path.path != state_dir
    ]
    account, writing = owners.account if owners is not None else None, None
    if account is not None and state_dir is None:
        return Owner(account.uid, account.gid, None)
    if owners is not None and owners.left:
        writing = Writing(owners.left, managed_state_dir(plugin, environ))
    own = account if owners is not None and not owners.maps_state else None
    try:
        claimed = owned_state(state_dir, uid_range, parts, manifest=manifest, writing=writing, account=own)
        owner = stack.enter_context(claimed)
        return owner if account is None else owner._replace(uid=account.uid, gid=account.gid)
    except OSError as error:
        if isinstance(error, PermissionError) and uid_range is not None:
            _require_capabilities(uid_range)
        place, hint = error.filename or state_dir, "choose a writable place with --state-dir"
        if uid_range is not None and str(place).startswith("/run/"):
            hint = "uids of plugins are leased there: make it writable (in a container: --tmpfs /run)"
        raise StateRefused(f"{place}: {error.strerror}", hint) from None


def _require_capabilities(uid_range: tuple[int, int]) -> None:
    """For a root that may not write everywhere. Raises LayerUnavailable if it may not drop its uid either."""
    from sandbox.doctor.probes import first_obstacle

    found = first_obstacle(os.environ, uid_range=uid_range)
    if found is not None and found.layer == "uid_drop":
        raise LayerUnavailable(found.layer, found.summary, " ".join(found.remedy.split())) from None


def _confirm_owners(planned: Planned, opened: OpenPlan, uid: int) -> Decision | None:
    """The owners of what the plugin writes, with the uid it got. Raises PlanRefused if that one is another
    than was expected, and may not write there."""
    owners = planned.plan.owners
    if owners is None or not owners.left:
        return owners
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
    confirmed = owners.confirmed(asked, uid)
    if confirmed.denials:
        raise PlanRefused(confirmed.denials)
    return confirmed


# --- its state directory ------------------------------------------------------------------------------------


def _open_state(planned: Planned, held: Held, owners: Decision | None, stack: ExitStack) -> OpenPlan:
    """The plan with the state directory opened. Raises PlanRefused."""
    if planned.state_dir is None:
        return held.opened if owners is planned.plan.owners else _with_owners(held.opened, owners)
    from sandbox.plan.sources import open_state, with_state

    state = stack.enter_context(open_state(planned.plan, held.denylist, planned.grant.paths))
    return with_state(held.opened, state, owners)


def _with_owners(opened: OpenPlan, owners: Decision | None) -> OpenPlan:
    return opened._replace(plan=opened.plan._replace(owners=owners))


def _require_same_state(owner: Owner, plan: LaunchPlan) -> None:
    """The directory that will be mounted is the one that was made ready, and not another in its place."""
    for operation in plan.operations:
        if isinstance(operation, Bind) and operation.dest in owner.state:
            opened = (operation.identity.dev, operation.identity.ino)
            if opened != owner.state[operation.dest]:
                raise StateRefused(
                    f"state directory {operation.dest} was replaced while it was being opened",
                    "choose a place with --state-dir that nobody else can write",
                )


def _require_reachable(state_dir: str | None, owner: Owner) -> None:
    if state_dir is None:
        return
    blocked = unreachable(state_dir, owner.uid, owner.gid, 0o7)
    if blocked is not None:
        raise Unreadable(blocked, owner.uid, f"chmod o+x {blocked}, or choose another place with --state-dir")


# --- its cgroups --------------------------------------------------------------------------------------------


def _make_cgroup(
    planned: Planned, held: Held, plan: LaunchPlan, stack: ExitStack
) -> tuple[Cgroup | None, AssignedLimits]:
    """The plugin's cgroups. If one does not work as the survey promised, the next best means is taken, or
    the launch ends: the policy decides which (mode under [limits.NAME])."""
    found, limits = held.survey, planned.grant.limits
    assigned = assign(planned.grant, planned.policy, found)
    if not assigned.sites:
        return None, assigned
    disks = () if limits.io is None else whole_disks(_devices(plan))
    for site in found.sites:
        sweep(site.directory)  # all sites: the next launch that makes a group here may be long in coming
    while True:
        assigned = assign(planned.grant, planned.policy, found, disks)
        try:
            cgroup = stack.enter_context(make_cgroup(assigned.sites, limits, disks))
        except CgroupFault as fault:
            lack = Lack(f"cgroup {fault}", "run `runner doctor` to see why")
            found = found.without(fault.site.directory, fault.controllers, lack)
            continue
        return cgroup, assigned.confirmed(cgroup.effective)


def _devices(plan: LaunchPlan) -> Iterator[int]:
    for operation in plan.operations:
        if isinstance(operation, Bind):
            yield operation.identity.dev
