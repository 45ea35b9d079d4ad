"""Open the sources of a stored plan for one launch.

The facts of the plan have been checked (sandbox/facts.py), so what is at each path now is what was judged
when the plan was made. It is only opened here. bubblewrap compares again what it mounts with what is open.
"""

from __future__ import annotations

import os

from sandbox.paths.file_identity import FileIdentity
from sandbox.plan.plan import Bind, LaunchPlan, OpenPlan
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.typed import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.speed.typed import Iterator

_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class PlanOutdated(Exception):
    """A source is not what the plan was made for. The plan has to be made again."""


@contextmanager
def reopen_known(plan: LaunchPlan) -> Iterator[OpenPlan]:
    """Open every source but the state directory, which the launch has to prepare first. Raises
    PlanOutdated."""
    state = _state(plan)
    descriptors: dict[str, int] = {}
    with ExitStack() as stack:
        for bind in plan.operations:
            if isinstance(bind, Bind) and bind.dest not in state:
                descriptors[bind.dest], found = _open_real(bind.real, stack)
                if found[:3] != bind.identity[:3]:
                    raise PlanOutdated(bind.real)
        yield OpenPlan(plan, descriptors)


@contextmanager
def with_known_state(opened: OpenPlan) -> Iterator[OpenPlan]:
    """Open the state folders too, which existed when the plan was made. The launch compares them with those
    that it has prepared. Raises PlanOutdated."""
    plan, state = opened.plan, _state(opened.plan)
    descriptors = dict(opened.descriptors)
    with ExitStack() as stack:
        for bind in plan.operations:
            if isinstance(bind, Bind) and bind.dest in state:
                descriptors[bind.dest], found = _open_real(bind.real, stack)
                if found[:3] != bind.identity[:3]:
                    raise PlanOutdated(bind.real)
        yield OpenPlan(plan, descriptors)


def _state(plan: LaunchPlan) -> set[str]:
    return {shown.path for shown in plan.shown if shown.origin == "state"}


def _open_real(path: str, stack: ExitStack) -> tuple[int, FileIdentity]:
    try:
        fd = os.open(path, _OPEN)
        stack.callback(os.close, fd)
        held = os.fstat(fd)
        # Equal only if no link was followed on the way.
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise PlanOutdated(path)
    except OSError:
        raise PlanOutdated(path) from None
    return fd, FileIdentity(held.st_dev, held.st_ino, held.st_mode, held.st_ctime_ns)
