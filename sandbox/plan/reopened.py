"""The sources of a plan that was kept, opened for one launch.

The plan was judged with everything it rests on, and the facts hold (sandbox/facts.py): so what stands at each
path now is what was judged, and only that is opened. bubblewrap compares once more what it mounts with what
is open here.
"""

from __future__ import annotations

import os

from sandbox.plan.plan import Bind, LaunchPlan, OpenPlan
from sandbox.scopes import ExitStack, contextmanager
from sandbox.typed import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.typed import Collection, Iterator, Mapping

_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class PlanOutdated(Exception):
    """Something is not what the plan was made for. It is made anew."""


@contextmanager
def reopen_known(plan: LaunchPlan, state: Collection[str]) -> Iterator[OpenPlan]:
    """Open every source but the state, whose folders are made ready by the launch. Raises PlanOutdated."""
    descriptors: dict[str, int] = {}
    with ExitStack() as stack:
        for bind in plan.operations:
            if isinstance(bind, Bind) and bind.dest not in state:
                fd = _opened(bind.real, stack)
                held = os.fstat(fd)
                if (held.st_dev, held.st_ino, held.st_mode) != bind.identity[:3]:
                    raise PlanOutdated(bind.real)
                descriptors[bind.dest] = fd
        yield OpenPlan(plan, descriptors)


@contextmanager
def open_known_state(
    plan: LaunchPlan, made: Mapping[str, tuple[int, int]], state: Collection[str]
) -> Iterator[Mapping[str, int]]:
    """The state folders, which the launch has made ready: `made` has device and inode of each. Raises
    PlanOutdated."""
    found: dict[str, int] = {}
    with ExitStack() as stack:
        for path in state:
            fd = _opened(path, stack)
            held = os.fstat(fd)
            if (held.st_dev, held.st_ino) != made.get(path):
                raise PlanOutdated(path)
            found[path] = fd
        yield found


def _opened(path: str, stack: ExitStack) -> int:
    try:
        fd = os.open(path, _OPEN)
        stack.callback(os.close, fd)
        # No link on the way: the path is a real one.
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise PlanOutdated(path)
    except OSError:
        raise PlanOutdated(path) from None
    return fd
