"""Cgroups of a test's own, so that its runners are separate from all other runners of the machine.

A runner sweeps every leftover cgroup beside its own. Without separation, tests and other runners on the
machine would sweep each other's leftovers.
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

from sandbox.limits.cgroup_survey import CONTROLLERS, own_hierarchies, survey
from sandbox.limits.site import Hierarchy
from sandbox.paths.mounts import read_mounts
from tests import elsewhere
from tests.conftest import Caller
from tests.tables import wait_for

_JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 99; shift; done; shift; exec "$@"'
_numbers = itertools.count()


@dataclass(frozen=True)
class OwnCgroups:
    caller: Caller  # its processes start in these cgroups
    directories: tuple[Path, ...]  # where its runners make cgroups, one for each hierarchy
    doors: tuple[Path, ...]  # the cgroup.procs of all cgroups in which it starts
    leaves: bool  # a runner that starts here moves to a leaf of its own (v2)

    @property
    def legacy(self) -> tuple[Path, ...]:
        return tuple(path for path in self.directories if not (path / "cgroup.controllers").exists())

    @property
    def unified(self) -> Path | None:
        return next((path for path in self.directories if path not in self.legacy), None)

    def groups(self) -> list[Path]:
        """Cgroups that runners have made and not removed."""
        return sorted(path for each in self.directories for path in each.glob("runner-*"))


@contextmanager
def make_parent_cgroup(version: int | None = None) -> Iterator[Path]:
    """An empty cgroup in which tests can make others."""
    for hierarchy in own_hierarchies(read_mounts()):
        if hierarchy.version == (version or hierarchy.version) and "cpuset" not in hierarchy.controllers:
            path = Path(_parent_directory(hierarchy), f"rt-{os.getpid()}-{next(_numbers)}")
            try:
                path.mkdir()
            except OSError:
                continue
            try:
                yield path
            finally:
                _remove_tree(path)
            return
    pytest.skip(f"no cgroup{f' of cgroup v{version}' if version else ''} can be made here")


class Freezer:
    """A cgroup of the v1 freezer: SIGKILL does not end a frozen process before it is thawed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def freeze(self, *pids: int) -> None:
        for pid in pids:
            (self.path / "cgroup.procs").write_text(str(pid))
        state = self.path / "freezer.state"
        # A process throttled by its cpu quota does not freeze. The kernel tries again only on a new write.
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
    """A v1 freezer cgroup. If the hierarchy is not mounted, it is mounted in `folder`."""
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
        stack.callback(_remove_tree, path)
        group = Freezer(path)
        stack.callback(group.thaw)
        yield group


@contextmanager
def make_own_cgroups(caller: Caller, *, alone: bool = False) -> Iterator[OwnCgroups]:
    """Make cgroups that are delegated to `caller`. Skips the test if this process cannot make cgroups.

    `alone`: on v2 a runner is the only process in its cgroup and has to leave it to enable controllers.
    """
    made: list[Path] = []
    name = f"rt-{os.getpid()}-{next(_numbers)}"
    sleeper = None
    try:
        doors: list[Path] = []
        for hierarchy in own_hierarchies(read_mounts()):
            if hierarchy.version == 1 and not hierarchy.controllers & {*CONTROLLERS, "cpuacct"}:
                continue
            place = Path(_parent_directory(hierarchy), name)
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
                _enable_controllers(place)
                _mark_delegated(host if alone else place)
            chown_to(place, caller)
            chown_to(host, caller)
            doors.append(host / "cgroup.procs")
        if not doors:
            pytest.skip("no cgroup can be made here")
        if not alone:
            # On v2 a cgroup with another process in it cannot enable controllers: runners use its parent.
            sleeper = _sleeper_in(doors)
        inside = replace(
            caller, name=f"{caller.name} in own cgroups", prefix=join_command(doors, caller.prefix)
        )
        directories, leaves = elsewhere.run(inside, _find_sites)
        yield OwnCgroups(inside, tuple(map(Path, directories)), tuple(doors), leaves)
    finally:
        if sleeper is not None:
            sleeper.kill()
            sleeper.wait()
        for place in reversed(made):
            _remove_tree(place)


@contextmanager
def beside_a_host(own: OwnCgroups, caller: Caller) -> Iterator[Caller]:
    """A caller that can start more runners in cgroups made with `alone`, after the first runner.

    On v2 the first runner has enabled controllers for its cgroup's children, and the kernel lets no process
    join such a cgroup. So this caller starts in a leaf, beside a sleeping process.
    """
    doors = []
    for door in own.doors:
        handing_down = door.parent / "cgroup.subtree_control"
        if handing_down.exists() and handing_down.read_text().split():
            leaf = door.parent / "host"
            leaf.mkdir()
            chown_to(leaf, caller)
            door = leaf / "cgroup.procs"
        doors.append(door)
    sleeper = _sleeper_in(doors)
    try:
        yield replace(own.caller, prefix=join_command(doors, caller.prefix))
    finally:
        sleeper.kill()
        sleeper.wait()


def join_command(doors: Iterable[Path], prefix: Iterable[str]) -> tuple[str, ...]:
    return "/bin/sh", "-c", _JOIN, "join", *map(str, doors), "--", *prefix


def _sleeper_in(doors: Sequence[Path]) -> subprocess.Popen[bytes]:
    sleeper = subprocess.Popen(join_command(doors, ("/bin/sleep", "1000")))
    _wait_until(lambda: str(sleeper.pid) in doors[-1].read_text().split())
    return sleeper


def _find_sites() -> tuple[list[str], bool]:
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    sites = survey(read_mounts()).sites
    return [site.directory for site in sites], any(site.enable and site.leave for site in sites)


def _parent_directory(hierarchy: Hierarchy) -> str:
    """Where to make cgroups. On v2 as root: beside the other units, where controllers are enabled."""
    site = survey(read_mounts()).unified
    if hierarchy.version == 2 and site is not None and not site.enable:
        return site.directory
    return hierarchy.directory


def _mark_delegated(place: Path) -> None:
    """Set the mark that systemd sets on a unit with Delegate=yes."""
    with contextlib.suppress(OSError):
        os.setxattr(place, "user.delegate", b"1")


def _enable_controllers(place: Path) -> None:
    has = set((place / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    for controller in has:
        with contextlib.suppress(OSError):
            (place / "cgroup.subtree_control").write_text(f"+{controller}")


def chown_to(place: Path, caller: Caller) -> None:
    if os.geteuid() == 0 and caller.uid != 0:
        for path in (place, *(place / f"cgroup.{file}" for file in ("procs", "threads", "subtree_control"))):
            if path.exists():
                os.chown(path, caller.uid, caller.uid)


def _remove_tree(place: Path) -> None:
    """Kill all members, then remove the cgroup and everything below it, within a bound."""
    for path, _, _ in os.walk(place, topdown=False):

        def emptied(path: str = path) -> bool:
            with contextlib.suppress(OSError):
                for pid in Path(path, "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.rmdir(path)
            return not os.path.exists(path)

        _wait_until(emptied)


def _wait_until(condition: Callable[[], object]) -> None:
    assert wait_for(condition, 20), "the condition did not come true within 20 s"
