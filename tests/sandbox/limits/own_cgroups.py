"""A pen: groups of a test's own, in which a runner and all it makes stand apart from the machine's others.

Sweeping looks at every group beside the runner's own. On a machine where several things run at once, what is
left there by one test would be swept away by another, or by a runner that is no test at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sandbox.limits.cgroup_survey import CONTROLLERS, Hierarchy, own_hierarchies, survey
from sandbox.paths.mounts import read_mounts
from tests import elsewhere
from tests.conftest import Caller
from tests.tables import wait_for

_JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 99; shift; done; shift; exec "$@"'
_numbers = itertools.count()


@dataclass(frozen=True)
class Pen:
    caller: Caller  # whatever it starts is in the pen
    directories: tuple[Path, ...]  # where its groups are made, one for each hierarchy
    doors: tuple[Path, ...]  # the cgroup.procs of all groups in which it starts
    leaves: bool  # a runner that starts in it moves to a leaf of its own (v2)

    @property
    def legacy(self) -> tuple[Path, ...]:
        return tuple(path for path in self.directories if not (path / "cgroup.controllers").exists())

    @property
    def unified(self) -> Path | None:
        return next((path for path in self.directories if path not in self.legacy), None)

    def groups(self) -> list[Path]:
        """What runners have made, and have not removed."""
        return sorted(path for each in self.directories for path in each.glob("runner-*"))


@contextmanager
def place(version: int | None = None) -> Iterator[Path]:
    """One group of this process's own, empty and of no use but to make groups in."""
    for hierarchy in own_hierarchies(read_mounts()):
        if hierarchy.version == (version or hierarchy.version) and "cpuset" not in hierarchy.controllers:
            path = Path(_parent(hierarchy), f"rt-{os.getpid()}-{next(_numbers)}")
            try:
                path.mkdir()
            except OSError:
                continue
            try:
                yield path
            finally:
                _demolish(path)
            return
    pytest.skip(f"no group{f' of cgroup v{version}' if version else ''} can be made here")


class Freezer:
    """A v1 freezer's group: who is in it when it is frozen does not die of SIGKILL before it is thawed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def freeze(self, *pids: int) -> None:
        for pid in pids:
            (self.path / "cgroup.procs").write_text(str(pid))
        state = self.path / "freezer.state"
        # A process that its cpu quota keeps from running does not freeze; the kernel tries only when told.
        for _ in range(5):
            state.write_text("FROZEN")
            if wait_for(lambda: state.read_text().strip() == "FROZEN", 8):
                return
            state.write_text("THAWED")
        raise AssertionError("it did not freeze")

    def thaw(self) -> None:
        (self.path / "freezer.state").write_text("THAWED")


@contextmanager
def freezer(folder: Path) -> Iterator[Freezer]:
    """One of our own. Where nobody has mounted that hierarchy, it is mounted in `folder`."""
    found = [each for each in own_hierarchies(read_mounts()) if each.controllers == {"freezer"}]
    with contextlib.ExitStack() as stack:
        if found:
            above = Path(found[0].directory)
        else:
            above = folder / "freezer"
            above.mkdir()
            stack.callback(above.rmdir)
            mount = ["mount", "-t", "cgroup", "-o", "freezer", "none", str(above)]
            if subprocess.run(mount, capture_output=True).returncode != 0:
                pytest.skip("there is no v1 freezer here, and none can be mounted")
            stack.callback(subprocess.run, ["umount", str(above)], check=True)
        path = above / f"rt-{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir()
        except OSError as error:
            pytest.skip(f"no v1 freezer of our own: {error.strerror}")
        stack.callback(_demolish, path)
        group = Freezer(path)
        stack.callback(group.thaw)
        yield group


@contextmanager
def pen(caller: Caller, *, alone: bool = False) -> Iterator[Pen]:
    """Delegated to `caller`, as far as this process may make groups at all; skips the test if it may not.

    `alone`: on v2 whoever starts is the only one in the group, and has to leave it to hand controllers down.
    """
    made: list[Path] = []
    name = f"rt-{os.getpid()}-{next(_numbers)}"
    sleeper = None
    try:
        doors: list[Path] = []
        for hierarchy in own_hierarchies(read_mounts()):
            if hierarchy.version == 1 and not hierarchy.controllers & {*CONTROLLERS, "cpuacct"}:
                continue
            place = Path(_parent(hierarchy), name)
            try:
                place.mkdir()
            except OSError:
                continue
            made.append(place)
            host = place
            if hierarchy.version == 2:
                host = place / "host.scope"
                host.mkdir()
                made.append(host)
                _hand_down(place)
                _mark(host if alone else place)
            _hand_over(place, caller)
            _hand_over(host, caller)
            doors.append(host / "cgroup.procs")
        if not doors:
            pytest.skip("no group can be made here")
        if not alone:
            # With somebody else in it, the nearest group on v2 hands nothing down: so the one above is taken.
            sleeper = _sleeper_in(doors)
        inside = replace(caller, name=f"{caller.name} in a pen", prefix=_join(doors, caller.prefix))
        directories, leaves = elsewhere.run(inside, _sites)
        yield Pen(inside, tuple(map(Path, directories)), tuple(doors), leaves)
    finally:
        if sleeper is not None:
            sleeper.kill()
            sleeper.wait()
        for place in reversed(made):
            _demolish(place)


@contextmanager
def beside_a_host(pen: Pen, caller: Caller) -> Iterator[Caller]:
    """A caller for those who come after the first runner of a pen that is `alone`.

    On v2 that one has made its group hand down, and the kernel lets nobody join such a group any more. A host
    that has more to start there sits in a leaf, and starts it from there.
    """
    doors = []
    for door in pen.doors:
        handing_down = door.parent / "cgroup.subtree_control"
        if handing_down.exists() and handing_down.read_text().split():
            leaf = door.parent / "host"
            leaf.mkdir()
            _hand_over(leaf, caller)
            door = leaf / "cgroup.procs"
        doors.append(door)
    sleeper = _sleeper_in(doors)
    try:
        yield replace(pen.caller, prefix=_join(doors, caller.prefix))
    finally:
        sleeper.kill()
        sleeper.wait()


def _join(doors: Iterable[Path], prefix: Iterable[str]) -> tuple[str, ...]:
    return "/bin/sh", "-c", _JOIN, "join", *map(str, doors), "--", *prefix


def _sleeper_in(doors: Sequence[Path]) -> subprocess.Popen[bytes]:
    sleeper = subprocess.Popen(_join(doors, ("/bin/sleep", "1000")))
    _until(lambda: str(sleeper.pid) in doors[-1].read_text().split())
    return sleeper


def _sites() -> tuple[list[str], bool]:
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    sites = survey(read_mounts()).sites
    return [site.directory for site in sites], any(site.enable and site.leave for site in sites)


def _parent(hierarchy: Hierarchy) -> str:
    """On v2 as root: beside what other units have, so that there are controllers."""
    site = survey(read_mounts()).unified
    if hierarchy.version == 2 and site is not None and not site.enable:
        return site.directory
    return hierarchy.directory


def _mark(place: Path) -> None:
    """As systemd does for a unit with Delegate=yes."""
    with contextlib.suppress(OSError):
        os.setxattr(place, "user.delegate", b"1")


def _hand_down(place: Path) -> None:
    has = set((place / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    for controller in has:
        with contextlib.suppress(OSError):
            (place / "cgroup.subtree_control").write_text(f"+{controller}")


def _hand_over(place: Path, caller: Caller) -> None:
    if os.geteuid() == 0 and caller.uid != 0:
        for path in (place, *(place / f"cgroup.{file}" for file in ("procs", "threads", "subtree_control"))):
            if path.exists():
                os.chown(path, caller.uid, caller.uid)


def _demolish(place: Path) -> None:
    """With all that is left in it, bounded."""
    for path, _, _ in os.walk(place, topdown=False):

        def emptied(path: str = path) -> bool:
            with contextlib.suppress(OSError):
                for pid in Path(path, "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.rmdir(path)
            return not os.path.exists(path)

        _until(emptied)


def _until(condition: Callable[[], object]) -> None:
    assert wait_for(condition, 20), "it did not come true"
