"""The sources of one plan, held open until the plugin has ended."""

from __future__ import annotations

from sandbox.speed.scopes import ExitStack
from sandbox.speed.typed import TYPE_CHECKING, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from types import TracebackType

    from runner.launch.stages import Planned
    from sandbox.limits.assigned import AssignedLimits
    from sandbox.limits.cgroup_survey import Survey
    from sandbox.limits.site import Hierarchy, Site
    from sandbox.paths.denylist import Denylist
    from sandbox.plan.plan import OpenPlan
    from sandbox.speed.scopes import AbstractContextManager
    from sandbox.speed.typed import Callable


class HeldSources(NamedTuple):
    """Open sources, and what else a launch needs that holds only in this process and at this time."""

    opened: OpenPlan  # the sources, but for the state directory
    limits: AssignedLimits  # with the means that this machine has now
    sites: tuple[Site, ...]  # where cgroups of dead runners may be
    own_groups: tuple[Hierarchy, ...]  # of this process
    survey: Callable[[], Survey]  # of cgroups: made only if one of them fails
    denylist: Callable[[], Denylist] | None  # for what is opened later; None: a stored plan has judged it


class Sources:
    """The sources of one plan, held open: what was checked is what will be mounted.

    `plan` fills it. A launch from a stored plan starts with an empty one, and `acquire` opens the sources
    again.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._held: HeldSources | None = None

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def held(self) -> HeldSources | None:
        return self._held

    def hold(
        self,
        opening: AbstractContextManager[OpenPlan],
        limits: AssignedLimits,
        found: Survey,
        denylist: Denylist,
    ) -> HeldSources:
        """Open the sources, and hold them with what else was found at that time."""
        opened = self._stack.enter_context(opening)
        self._held = HeldSources(opened, limits, found.sites, found.own, lambda: found, lambda: denylist)
        return self._held

    def hold_again(self, planned: Planned, environ: Mapping[str, str]) -> HeldSources:
        """Open the sources of a plan that was made earlier, and check each again. Raises PlanRefused, and
        BwrapUnusable if its bubblewrap is no longer trusted."""
        from runner.launch.denylist import make_denylist
        from sandbox.limits.assign import assign
        from sandbox.limits.cgroup_survey import survey
        from sandbox.paths.mounts import read_mounts
        from sandbox.plan.find_bwrap import trusted_program
        from sandbox.plan.sources import reopen

        if planned.bwrap:
            trusted_program(planned.bwrap)
        mounts = read_mounts()
        denylist = make_denylist(planned.decided, planned.bwrap, mounts, environ)
        opening = reopen(planned.plan, denylist, scan_limit=planned.policy.scan_limit)
        found = survey(mounts, move_host=planned.policy.move_host)
        return self.hold(opening, assign(planned.grant, planned.policy, found), found, denylist)

    def hold_known(self, planned: Planned) -> None:
        """Open the sources of a stored plan whose facts have not changed. Raises PlanOutdated."""
        from sandbox.cell.reopened import reopen_known

        provision = planned.provision
        opened = self._stack.enter_context(reopen_known(planned.plan))
        self._held = HeldSources(
            opened,
            planned.limits,
            provision.sites,
            provision.own_groups,
            survey_again(planned),
            denylist=None,
        )


def survey_again(planned: Planned) -> Callable[[], Survey]:
    def again() -> Survey:
        from sandbox.limits.cgroup_survey import survey
        from sandbox.paths.mounts import read_mounts

        return survey(read_mounts(), move_host=planned.policy.move_host)

    return again
