"""The sources of one plan, held open until the plugin has ended."""

from __future__ import annotations

import os

from sandbox.plan.plan import Bind, OpenPlan, PlanOutdated
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from types import TracebackType

    from runner.launch.stages import Planned
    from sandbox.limits.assigned import AssignedLimits
    from sandbox.limits.cgroup_survey import Survey
    from sandbox.limits.site import Hierarchy, Site
    from sandbox.paths.denylist import Denylist
    from sandbox.plan.plan import LaunchPlan
    from sandbox.speed.scopes import AbstractContextManager
    from sandbox.speed.typed import Callable, Iterator

_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class HeldSources(NamedTuple):
    """Open sources, and what else a launch needs that holds only in this process and at this time."""

    opened: OpenPlan  # the sources, but for the state directory
    limits: AssignedLimits  # with the means that this machine has now
    sites: tuple[Site, ...]  # where cgroups of dead runners may be
    own_groups: tuple[Hierarchy, ...]  # of this process
    survey: Callable[[], Survey]  # of cgroups: made only if one of them fails
    denylist: Callable[[], Denylist] | None  # None: a stored plan has judged all of it
    is_known: bool = False  # it is a stored plan, whose facts hold


class Sources:
    """The sources of one plan, held open: what was checked is what will be mounted.

    `plan` fills it, or `hold_known` for a stored plan.
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

    def held_for(self, planned: Planned, environ: Mapping[str, str]) -> HeldSources:
        """What the launch of this plan is carried out with."""
        assert self._held is not None, planned.plugin.id
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

    def hold_known(self, planned: Planned) -> None:
        """Open the sources of a stored plan whose facts have not changed. What the plugin may write is judged
        again: its content is no fact. Raises PlanOutdated, and what refuses a source."""
        provision, denylist = planned.provision, None
        opened = self._stack.enter_context(_reopen(OpenPlan(planned.plan, {}), state=False))
        if (judged := provision.judged) is not None:
            from sandbox.paths.denied_places import LaterDenylist
            from sandbox.paths.mounts import read_mounts
            from sandbox.plan.sources import judge_written

            denylist = LaterDenylist(read_mounts(), judged.denied)
            judge_written(opened, denylist, scan_limit=judged.scan_limit)
        self._held = HeldSources(
            opened,
            planned.limits,
            provision.sites,
            provision.own_groups,
            survey_again(planned),
            denylist=None if denylist is None else lambda: denylist,
            is_known=True,
        )


def writes_files(plan: LaunchPlan) -> bool:
    """Whether the plugin may write a file or folder of the host that is not its own state."""
    own = {shown.path for shown in plan.shown if shown.origin == "state"}
    return any(isinstance(op, Bind) and op.writable and op.dest not in own for op in plan.operations)


def survey_again(planned: Planned) -> Callable[[], Survey]:
    def again() -> Survey:
        from sandbox.limits.cgroup_survey import survey
        from sandbox.paths.mounts import read_mounts

        return survey(read_mounts(), move_host=planned.policy.move_host)

    return again


# --- the sources of a stored plan ---------------------------------------------------------------------------
# The facts of the plan have been checked (sandbox/facts.py), so what is at each path now is what was judged
# when the plan was made. It is only opened here. bubblewrap compares again what it mounts with what is open.


def with_known_state(opened: OpenPlan) -> AbstractContextManager[OpenPlan]:
    """Open the state folders too, which existed when the plan was made. The launch compares them with those
    that it has prepared. Raises PlanOutdated."""
    return _reopen(opened, state=True)


@contextmanager
def _reopen(opened: OpenPlan, *, state: bool) -> Iterator[OpenPlan]:
    """Open the sources in the state directory, or all others. Raises PlanOutdated."""
    plan: LaunchPlan = opened.plan
    own = {shown.path for shown in plan.shown if shown.origin == "state"}
    descriptors = dict(opened.descriptors)
    with ExitStack() as stack:
        for bind in plan.operations:
            if isinstance(bind, Bind) and (bind.dest in own) is state:
                descriptors[bind.dest] = _open_real(bind, stack)
        yield OpenPlan(plan, descriptors)


def _open_real(bind: Bind, stack: ExitStack) -> int:
    try:
        fd = os.open(bind.real, _OPEN)
        stack.callback(os.close, fd)
        held = os.fstat(fd)
        # Equal only if no link was followed on the way.
        known = os.readlink(f"/proc/self/fd/{fd}") == bind.real
    except OSError:
        raise PlanOutdated(bind.real) from None
    if not known or (held.st_dev, held.st_ino, held.st_mode) != bind.identity[:3]:
        raise PlanOutdated(bind.real)
    return fd
