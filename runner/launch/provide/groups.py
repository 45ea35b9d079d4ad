"""The plugin's cgroups where they do not work as promised, or no disk is there for its io limit."""

from __future__ import annotations

from runner.launch.stages import failing
from sandbox.limits.assign import assign
from sandbox.limits.assigned import AssignedLimits
from sandbox.limits.cgroup import Cgroup, CgroupFault, make_cgroup
from sandbox.limits.cgroup_survey import Lack, Survey
from sandbox.plan.layers import LayerUnavailable
from sandbox.plan.plan import LaunchPlan
from sandbox.scopes import ExitStack
from sandbox.typed import TYPE_CHECKING, Collection

if TYPE_CHECKING:
    from runner.launch.stages import Planned


def make_groups(
    planned: Planned,
    found: Survey,
    plan: LaunchPlan,
    stack: ExitStack,
    disks: Collection[tuple[int, int]],
    fault: CgroupFault | None = None,
) -> tuple[Cgroup | None, AssignedLimits]:
    """The plugin's cgroups. If one does not work as the survey promised, the next best means is taken, or
    the launch ends: the policy decides which (mode under [limits.NAME]). `disks`: with the plugin's files.
    `fault`: of a first try."""
    while True:
        if fault is not None:
            lack = Lack(f"cgroup {fault}", "run `runner doctor` to see why")
            found = found.without(fault.site.directory, fault.controllers, lack)
        try:
            assigned = assign(planned.grant, planned.policy, found, disks)
        except LayerUnavailable:
            # The plan counted on the group that failed. The report must not.
            there_was = assign(planned.grant, planned.policy, found, disks, refuse=False)
            with failing(planned._replace(limits=there_was)):
                raise
        try:
            cgroup = stack.enter_context(make_cgroup(assigned.sites, plan.limits, disks))
        except CgroupFault as failed:
            fault = failed
            continue
        return cgroup, assigned.confirmed(cgroup.effective)
