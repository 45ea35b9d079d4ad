"""The plugin's cgroups where they do not work as promised, or have an io limit: that depends on disks."""

from __future__ import annotations

from sandbox.limits.assign import assign
from sandbox.limits.assigned import AssignedLimits
from sandbox.limits.cgroup import Cgroup, CgroupFault, make_cgroup
from sandbox.limits.cgroup_settings import whole_disks
from sandbox.limits.cgroup_survey import Lack, Survey
from sandbox.plan.plan import Bind, LaunchPlan
from sandbox.scopes import ExitStack
from sandbox.typed import TYPE_CHECKING, Iterator

if TYPE_CHECKING:
    from runner.launch.stages import Planned


def make_groups(
    planned: Planned, found: Survey, plan: LaunchPlan, stack: ExitStack, fault: CgroupFault | None = None
) -> tuple[Cgroup | None, AssignedLimits]:
    """The plugin's cgroups. If one does not work as the survey promised, the next best means is taken, or
    the launch ends: the policy decides which (mode under [limits.NAME]). `fault`: of a first try."""
    limits = plan.limits
    disks = () if limits.io is None else whole_disks(_devices(plan))
    while True:
        if fault is not None:
            lack = Lack(f"cgroup {fault}", "run `runner doctor` to see why")
            found = found.without(fault.site.directory, fault.controllers, lack)
        assigned = assign(planned.grant, planned.policy, found, disks)
        try:
            cgroup = stack.enter_context(make_cgroup(assigned.sites, limits, disks))
        except CgroupFault as failed:
            fault = failed
            continue
        return cgroup, assigned.confirmed(cgroup.effective)


def _devices(plan: LaunchPlan) -> Iterator[int]:
    for operation in plan.operations:
        if isinstance(operation, Bind):
            yield operation.identity.dev
