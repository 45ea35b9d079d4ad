"""Where groups can be made: on invented trees, and on this machine's own."""

from __future__ import annotations

import json
import os
import subprocess
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sandbox.limits.cgroup_survey import CONTROLLERS, DELEGATE, Lack, Survey
from sandbox.limits.site import Site
from tests import elsewhere
from tests.conftest import USER_UID, Caller
from tests.tables import one_case, wait_for

ALL = " ".join(CONTROLLERS)


def surveyed(given: dict[str, Any]) -> dict[str, Any]:
    """The survey of an invented machine, as this process's user. The process is a member of `member`."""
    import builtins
    import os

    from sandbox.limits import cgroup_survey
    from sandbox.paths.mounts import parse_mountinfo

    def opened(path: str, *how: Any, **more: Any) -> Any:
        return builtins.open(given["own"] if path == "/proc/self/cgroup" else path, *how, **more)

    read, write = os.pipe()
    child = os.fork() if given["has_child"] else 0
    if given["has_child"] and child == 0:
        os.close(write)
        os.read(read, 1)  # until this process has ended
        os._exit(0)
    for path in given["member"]:
        with open(f"{path}/cgroup.procs", "a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n{f'{child}' if child else ''}\n")
    mounts = parse_mountinfo(os.fsencode(given["mountinfo"]))
    cgroup_survey.open = opened  # type: ignore[attr-defined]
    try:
        found = cgroup_survey.survey(mounts, move_host=given["move_host"])
        own = cgroup_survey.own_hierarchies(mounts)
    finally:
        del cgroup_survey.open  # type: ignore[attr-defined]
    return {
        "sites": [
            {**site._asdict(), "controllers": sorted(site.controllers), "enable": list(site.enable)}
            for site in found.sites
        ],
        "lacks": {name: list(lack) for name, lack in found.lacks},
        "delegated": found.delegated,
        "own": [[each.version, sorted(each.controllers), each.directory, each.line] for each in own],
    }


class Asker(NamedTuple):
    """Who asks: root, or a user."""

    uid: int


class Machine:
    """Directories with the files of a cgroup file system, and the matching /proc files."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.lines: list[bytes] = []  # of /proc/self/cgroup
        self.mounts: list[str] = []  # of /proc/self/mountinfo
        self.members: list[str] = []
        self.move_host = False
        self.has_child = False  # the process has started another, which is in the same groups

    def mount(self, where: str, fstype: str, options: str = "rw", root: str = "/") -> Path:
        point = self.base / where
        point.mkdir(exist_ok=True)
        number = len(self.mounts) + 20
        text = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in root)
        self.mounts.append(f"{number} 1 0:{number} {text} {point} rw - {fstype} none {options}")
        return point

    def group(
        self,
        path: Path,
        *,
        has: str = "",
        down: str = "",
        others: tuple[int, ...] = (),
        real_root: bool = False,
        delegated: bytes = b"",
        bounds: dict[str, str] | None = None,
    ) -> Path:
        """A v2 group: its controllers, those it hands down, its other members, and its limits."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.controllers").write_text(has + "\n")
        (path / "cgroup.subtree_control").write_text(down + "\n")
        (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in others))
        if not real_root:
            (path / "cgroup.type").write_text("domain\n")
        for file, text in (bounds or {}).items():
            (path / file).write_text(text + "\n")
        if delegated:
            _mark(path, "user.delegate", delegated)
        return path

    def legacy(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.procs").touch()
        return path

    def put_into(self, line: str | bytes, directory: Path | None = None) -> None:
        self.lines.append(line if isinstance(line, bytes) else os.fsencode(line))
        if directory is not None:
            self.members.append(str(directory))

    @property
    def given(self) -> dict[str, Any]:
        own = self.base / "own"
        own.write_bytes(b"".join(line + b"\n" for line in self.lines))
        mountinfo = "".join(line + "\n" for line in self.mounts)
        return {
            "own": str(own),
            "mountinfo": mountinfo,
            "member": self.members,
            "move_host": self.move_host,
            "has_child": self.has_child,
        }

    def survey(self) -> dict[str, Any]:
        """Survey in this process, for results that do not depend on the user."""
        return surveyed(self.given)

    def survey_as(self, asker: Asker, *owned: Path) -> dict[str, Any]:
        """Survey as `asker`, who owns `owned` and its files, and nothing else."""
        given = self.given
        if os.geteuid() == 0:
            for path in owned:
                for each in (path, *(file for file in path.iterdir() if file.is_file())):
                    os.chown(each, asker.uid, asker.uid)
            for member in self.members:  # only to be written by the test itself
                os.chmod(f"{member}/cgroup.procs", 0o666)
            return _surveyed_by(asker, given)
        # Not root: everything here is the caller's own, so the rest is taken away by its mode.
        shut = {Path(name) for name, _, _ in os.walk(self.base)} - {self.base, *owned}
        try:
            for path in shut:
                path.chmod(0o555)
            return _surveyed_by(asker, given)
        finally:
            for path in shut:
                path.chmod(0o755)


def _surveyed_by(asker: Asker, given: dict[str, Any]) -> dict[str, Any]:
    """Survey in a child of this process that has become `asker`."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: this process has threads, and the child takes none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            if asker.uid != os.geteuid():
                os.setgroups([])
                os.setresgid(asker.uid, asker.uid, asker.uid)
                os.setresuid(asker.uid, asker.uid, asker.uid)
            told = json.dumps(surveyed(given))
        except BaseException:  # noqa: BLE001 -- it must not go on as a second pytest
            told = traceback.format_exc()
        with open(write, "w", encoding="utf-8") as answer:
            answer.write(told)
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    assert told.startswith("{"), told
    result: dict[str, Any] = json.loads(told)
    return result


def _mark(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"no extended attributes in {path}: {error.strerror}")


@contextmanager
def a_process_of(asker: Asker) -> Iterator[int]:
    """Another process of the same user."""
    other = {"user": asker.uid, "group": asker.uid, "extra_groups": ()} if asker.uid != os.geteuid() else {}
    with subprocess.Popen(["/bin/sleep", "1000"], **other) as process:  # type: ignore[call-overload]
        try:
            assert wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", 20)
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def as_root() -> Asker:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    return Asker(0)


@pytest.fixture
def as_user() -> Asker:
    return Asker(USER_UID if os.geteuid() == 0 else os.geteuid())


@pytest.fixture(params=["as_root", "as_user"])
def asker(request: pytest.FixtureRequest) -> Asker:
    """Both, always: the survey branches on who asks."""
    found: Asker = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def machine(plugin_dir: Path) -> Machine:
    return Machine(plugin_dir)


@pytest.fixture
def unified(machine: Machine) -> Path:
    """The real root of a v2 tree, which hands everything down."""
    return machine.group(machine.mount("v2", "cgroup2"), has=ALL, down=ALL, real_root=True)


BOUND = {"memory.max": "1000000"}


def site(found: dict[str, Any]) -> dict[str, Any]:
    (only,) = found["sites"]
    assert isinstance(only, dict)
    return only


# --- v2: which group is taken ------------------------------------------------------------------------------


def test_our_own_delegated_group(machine: Machine, unified: Path, asker: Asker) -> None:
    machine.group(unified / "slice", has=ALL, down=ALL)
    own = machine.group(unified / "slice/our.scope", has=ALL, delegated=b"1")
    machine.put_into("0::/slice/our.scope", own)
    found = machine.survey_as(asker, own)
    assert site(found) == {
        "version": 2,
        "controllers": sorted(CONTROLLERS),
        "directory": str(own),
        "line": "0::/slice/our.scope",
        "enable": sorted(CONTROLLERS),  # nothing is handed down yet,
        "leave": True,  # and cannot be while we are in it
        "host": False,
    }
    assert found["lacks"] == {} and found["delegated"] is True


def test_a_leaf_below_what_was_delegated(machine: Machine, unified: Path, asker: Asker) -> None:
    """As after an earlier launch of the same runner, or with DelegateSubgroup=."""
    handed = machine.group(unified / "our.service", has=ALL, down="memory pids", delegated=b"1")
    own = machine.group(handed / "runner-1-2-self", has="memory pids")
    machine.put_into("0::/our.service/runner-1-2-self", own)
    found = site(machine.survey_as(asker, handed, own))
    assert (found["directory"], found["line"]) == (str(handed), "0::/our.service")
    assert found["controllers"] == sorted(CONTROLLERS)
    assert found["enable"] == ["cpu", "io"]  # the others are handed down already
    assert found["leave"] is False


@pytest.mark.parametrize("above", ["our.service", "container"])
def test_a_runners_own_leaf_is_no_place_for_groups(
    machine: Machine, unified: Path, asker: Asker, above: str
) -> None:
    """It has all the controllers, and a runner alone in it could hand them down: to a leaf below it, and at
    the next launch to one below that."""
    handed = machine.group(unified / above, has=ALL, down=ALL, delegated=b"1", bounds=BOUND)
    own = machine.group(handed / "runner-1-2-self", has=ALL)
    machine.put_into(f"0::/{above}/runner-1-2-self", own)
    found = site(machine.survey_as(asker, handed, own))
    assert (found["directory"], found["line"]) == (str(handed), f"0::/{above}")
    assert found["controllers"] == sorted(CONTROLLERS)
    assert (found["enable"], found["leave"]) == ([], False)


@pytest.mark.parametrize("name", ["runner-1-2-0", "runner-ci-self", "runner-1-2-3-self", "xrunner-1-2-self"])
def test_a_group_that_only_looks_like_a_runners_leaf(
    machine: Machine, unified: Path, asker: Asker, name: str
) -> None:
    """The control: another program put us there, so we stay."""
    handed = machine.group(unified / "our.service", has=ALL, down=ALL, delegated=b"1", bounds=BOUND)
    own = machine.group(handed / name, has=ALL)
    machine.put_into(f"0::/our.service/{name}", own)
    found = site(machine.survey_as(asker, handed, own))
    assert (found["directory"], found["leave"]) == (str(own), True)


def test_a_container_whose_root_is_a_runners_leaf(machine: Machine, asker: Asker) -> None:
    """A cgroup namespace was made there: nothing above can be seen."""
    own = machine.group(machine.mount("runner-1-2-self", "cgroup2", root="/runner-1-2-self"), has=ALL)
    machine.put_into("0::/runner-1-2-self", own)
    assert site(machine.survey_as(asker, own))["directory"] == str(own)


def test_the_nearest_of_equals(machine: Machine, unified: Path, asker: Asker) -> None:
    handed = machine.group(unified / "our.service", has="pids", down="pids", delegated=b"1", bounds=BOUND)
    middle = machine.group(handed / "middle", has="pids", down="pids")
    own = machine.group(middle / "own", has="")
    machine.put_into("0::/our.service/middle/own", own)
    found = machine.survey_as(asker, handed, middle, own)
    assert site(found)["directory"] == str(middle)
    assert set(found["lacks"]) == {"memory", "cpu", "io"}
    reason, remedy = found["lacks"]["memory"]
    assert reason == f"{middle} does not hand the memory controller down"
    assert f"echo +memory > {middle}/cgroup.subtree_control" in remedy


@pytest.mark.parametrize("name", ["own", "runner-host"])
@pytest.mark.parametrize("bounds", [{}, BOUND], ids=["unlimited", "limited"])
def test_a_group_of_the_host_with_limits_is_not_left(
    machine: Machine, unified: Path, asker: Asker, name: str, bounds: dict[str, str]
) -> None:
    """Made by the host, below its delegated unit. Beside it a plugin would not have the host's limits."""
    unit = machine.group(unified / "our.service", has=ALL, delegated=b"1")
    with a_process_of(asker) as host:
        own = machine.group(unit / name, has="", others=(host,), bounds=bounds)
        machine.put_into(f"0::/our.service/{name}", own)
        found = machine.survey_as(asker, unit, own)
    assert site(found)["directory"] == str(own if bounds else unit)
    assert bool(site(found)["controllers"]) is not bool(bounds)


@pytest.mark.parametrize(
    ("bounds", "stays"),
    [
        ({}, False),
        ({"memory.max": "1000"}, True),
        ({"memory.high": "1000"}, True),
        ({"cpu.max": "50000 100000"}, True),
        ({"memory.max": "max", "memory.high": "max", "cpu.max": "max 100000"}, False),
        ({"memory.max": "max", "cpu.max": "1000 100000"}, True),
        ({"pids.max": "100"}, False),  # systemd gives every unit one
    ],
    ids=lambda bounds: " ".join(bounds) if isinstance(bounds, dict) else "",
)
def test_bounds_that_were_set_for_us_are_not_left_behind(
    machine: Machine, unified: Path, asker: Asker, bounds: dict[str, str], stays: bool
) -> None:
    """That a group above has more to hand down is no reason."""
    slice_ = machine.group(unified / "slice", has=ALL, down=ALL)
    own = machine.group(slice_ / "our.scope", has="memory pids", delegated=b"1", bounds=bounds)
    machine.put_into("0::/slice/our.scope", own)
    found = machine.survey_as(asker, slice_, own)
    assert site(found)["directory"] == str(own if stays else slice_)
    if stays:
        assert site(found)["controllers"] == ["memory", "pids"]
        assert set(found["lacks"]) == {"cpu", "io"}
    else:
        assert (site(found)["enable"], site(found)["leave"]) == ([], False)


def test_bounds_further_up_are_not_left_behind(machine: Machine, unified: Path, asker: Asker) -> None:
    slice_ = machine.group(unified / "slice", has=ALL, down="pids", bounds=BOUND)
    middle = machine.group(slice_ / "middle", has="pids", down="")
    own = machine.group(middle / "our.scope", has="", delegated=b"1")
    machine.put_into("0::/slice/middle/our.scope", own)
    found = machine.survey_as(asker, unified, slice_, middle, own)
    assert site(found)["directory"] == str(slice_)  # in it its bounds hold, and not above


def test_others_in_our_group(machine: Machine, unified: Path, asker: Asker) -> None:
    """The kernel then hands nothing down, and the remedy names these processes, but none that has ended."""
    own = machine.group(
        unified / "our.scope", has=ALL, others=(os.getpid(), 4194303, 1), delegated=b"1", bounds=BOUND
    )
    machine.put_into("0::/our.scope", own)
    found = machine.survey_as(asker, own)
    assert site(found)["controllers"] == [] and site(found)["enable"] == []
    assert set(found["lacks"]) == set(CONTROLLERS)
    reason, remedy = found["lacks"]["memory"]
    names = [f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({pid})" for pid in (os.getpid(), 1)]
    assert reason == (f"{own} cannot hand its controllers down while processes are in it: {', '.join(names)}")
    assert "DelegateSubgroup=" in remedy and 'host = "move" under [cgroups]' in remedy
    assert found["delegated"] is True  # though nothing can be handed down: limits can be expected to work


@pytest.mark.parametrize("move_host", [False, True], ids=["stay", "move"])
def test_a_host_that_may_be_moved(machine: Machine, unified: Path, asker: Asker, move_host: bool) -> None:
    """The policy decides. What is ours, here a child of the survey's own process, is moved in any case."""
    slice_ = machine.group(unified / "slice", has=ALL, bounds=BOUND)
    own = machine.group(slice_ / "our.service", has=ALL, delegated=b"1", bounds=BOUND)
    machine.put_into("0::/slice/our.service", own)
    machine.move_host, machine.has_child = move_host, True
    alone = site(machine.survey_as(asker, own))
    assert (alone["enable"], alone["leave"], alone["host"]) == (sorted(CONTROLLERS), True, False)
    (own / "cgroup.procs").write_text("")
    with a_process_of(asker) as host:
        (own / "cgroup.procs").write_text(f"{host}\n")
        found = machine.survey_as(asker, own)
    if move_host:
        assert (site(found)["enable"], site(found)["host"]) == (sorted(CONTROLLERS), True)
        assert found["lacks"] == {}
    else:
        assert (site(found)["enable"], site(found)["host"]) == ([], False)
        assert set(found["lacks"]) == set(CONTROLLERS)


def test_a_host_that_nobody_may_move(machine: Machine, unified: Path, as_user: Asker) -> None:
    """Of another user, or in a unit that was not delegated."""
    slice_ = machine.group(unified / "slice", has=ALL, bounds=BOUND)
    own = machine.group(slice_ / "our.service", has=ALL, delegated=b"1", bounds=BOUND, others=(1,))
    machine.put_into("0::/slice/our.service", own)
    machine.move_host = True
    found = machine.survey_as(as_user, slice_, own)
    assert site(found)["enable"] == [] and found["delegated"] is True
    assert "of other users are not moved" in found["lacks"]["memory"][0]
    os.setxattr(own, "user.delegate", b"0")  # and the group above is ours too, as below a user's own systemd
    (own / "cgroup.procs").write_text("")
    with a_process_of(as_user) as host:
        (own / "cgroup.procs").write_text(f"{host}\n")
        found = machine.survey_as(as_user, slice_, own)
        assert site(found)["enable"] == [] and found["delegated"] is False
        assert "[cgroups]" not in found["lacks"]["memory"][1]
        os.setxattr(own, "user.delegate", b"1")  # the control
        assert site(machine.survey_as(as_user, slice_, own))["host"] is True


def test_a_group_of_ours_in_one_of_roots_was_delegated(
    machine: Machine, unified: Path, as_user: Asker
) -> None:
    """Before systemd 251 an ordinary user could not see the mark."""
    own = machine.group(unified / "our.service", has=ALL, others=(1,), bounds=BOUND)
    machine.put_into("0::/our.service", own)
    assert machine.survey_as(as_user, own)["delegated"] is True
    assert machine.survey_as(as_user, unified, own)["delegated"] is False  # the control


def test_beside_a_host_that_was_moved(machine: Machine, unified: Path, asker: Asker) -> None:
    """What the host starts is born in its leaf. That is no place for groups, and nobody has to move again."""
    handed = machine.group(unified / "our.service", has=ALL, down=ALL, delegated=b"1", bounds=BOUND)
    own = machine.group(handed / "runner-host", has=ALL, others=(1,))
    machine.put_into("0::/our.service/runner-host", own)
    found = site(machine.survey_as(asker, handed, own))
    assert (found["directory"], found["controllers"]) == (str(handed), sorted(CONTROLLERS))
    assert (found["enable"], found["leave"], found["host"]) == ([], False, False)


def test_others_in_our_group_and_a_usable_one_above(machine: Machine, unified: Path, asker: Asker) -> None:
    """A service that also holds its host, below a user's own systemd."""
    manager = machine.group(unified / "user@1000.service", has=ALL, down="cpu memory pids")
    slice_ = machine.group(manager / "app.slice", has="cpu memory pids", down="cpu memory pids")
    own = machine.group(slice_ / "host.service", has="cpu memory pids", others=(1,))
    machine.put_into("0::/user@1000.service/app.slice/host.service", own)
    found = machine.survey_as(asker, manager, slice_, own)
    if asker.uid == 0:  # for root the whole tree is; then the root group has even more
        assert site(found)["directory"] == str(unified)
    else:
        assert site(found)["directory"] == str(slice_)
        assert site(found)["line"] == "0::/user@1000.service/app.slice"
        assert site(found)["controllers"] == ["cpu", "memory", "pids"]
    assert (site(found)["enable"], site(found)["leave"]) == ([], False)


def test_no_more_than_three_are_named(machine: Machine, unified: Path, as_user: Asker) -> None:
    with ExitStack() as stack:
        others = tuple(stack.enter_context(a_process_of(as_user)) for _ in range(5))
        own = machine.group(unified / "our.scope", has=ALL, others=others, delegated=b"1", bounds=BOUND)
        machine.put_into("0::/our.scope", own)
        reason, _ = machine.survey_as(as_user, own)["lacks"]["pids"]
    assert reason.endswith(": " + ", ".join(f"sleep ({pid})" for pid in others[:3]))


def test_others_in_a_group_that_hands_down_already(machine: Machine, unified: Path, asker: Asker) -> None:
    """The controllers that are handed down can be used; the others stay as they are."""
    handed = machine.group(
        unified / "our.service", has=ALL, down="pids", others=(1,), delegated=b"1", bounds=BOUND
    )
    own = machine.group(handed / "own", has="pids", others=(1,))
    machine.put_into("0::/our.service/own", own)
    found = machine.survey_as(asker, handed, own)
    assert (site(found)["directory"], site(found)["enable"]) == (str(handed), [])
    assert site(found)["controllers"] == ["pids"]
    assert set(found["lacks"]) == {"memory", "cpu", "io"}


def test_root_goes_up_to_a_slice_that_hands_down(machine: Machine, unified: Path, as_root: Asker) -> None:
    slice_ = machine.group(unified / "system.slice", has=ALL, down=ALL)
    own = machine.group(slice_ / "cron.service", has=ALL, others=(1,))
    machine.put_into("0::/system.slice/cron.service", own)
    found = machine.survey_as(as_root)
    # Not the root group, though it would do as well: the slice may have limits of its own.
    assert site(found) == {
        "version": 2,
        "controllers": sorted(CONTROLLERS),
        "directory": str(slice_),
        "line": "0::/system.slice",
        "enable": [],
        "leave": False,
        "host": False,
    }


def test_root_goes_further_up_for_more(machine: Machine, unified: Path, as_root: Asker) -> None:
    slice_ = machine.group(unified / "system.slice", has=ALL, down="memory pids")
    own = machine.group(slice_ / "cron.service", has="memory pids")
    machine.put_into("0::/system.slice/cron.service", own)
    found = site(machine.survey_as(as_root))
    assert (found["directory"], found["line"], found["enable"]) == (str(unified), "0::", [])


def test_root_does_not_change_what_slices_hand_down(machine: Machine, as_root: Asker) -> None:
    """Slices belong to others, and are without processes only for the moment. Root's own group is the last
    resort."""
    root = machine.group(machine.mount("v2", "cgroup2"), has=ALL, down="pids", real_root=True)
    slice_ = machine.group(root / "system.slice", has=ALL)
    own = machine.group(slice_ / "cron.service", has="cpu memory")
    machine.put_into("0::/system.slice/cron.service", own)
    found = site(machine.survey_as(as_root))
    assert (found["directory"], found["leave"]) == (str(own), True)
    assert found["controllers"] == found["enable"] == ["cpu", "memory"]


@pytest.mark.needs("user", "root")
def test_a_user_who_owns_no_group(machine: Machine, unified: Path, as_user: Asker) -> None:
    slice_ = machine.group(unified / "user.slice", has=ALL, down=ALL)
    own = machine.group(slice_ / "session-1.scope", has=ALL)
    machine.put_into("0::/user.slice/session-1.scope", own)
    found = machine.survey_as(as_user)
    assert found["sites"] == [] and found["delegated"] is False
    assert found["lacks"] == {
        name: [f"{own} is not ours: nothing was delegated", DELEGATE] for name in CONTROLLERS
    }


def test_a_user_who_owns_the_group_without_a_mark(machine: Machine, unified: Path, as_user: Asker) -> None:
    own = machine.group(unified / "ours", has=ALL)
    machine.put_into("0::/ours", own)
    found = machine.survey_as(as_user, own)
    assert (site(found)["directory"], site(found)["enable"]) == (str(own), sorted(CONTROLLERS))
    assert found["delegated"] is True


@pytest.mark.needs("user", "root")
@pytest.mark.parametrize("file", ["cgroup.subtree_control", "cgroup.procs", "."])
def test_a_group_that_was_delegated_in_part(
    machine: Machine, unified: Path, as_user: Asker, file: str
) -> None:
    own = machine.group(unified / "ours", has=ALL, down="", delegated=b"1")
    machine.put_into("0::/ours", own)
    full = machine.survey_as(as_user, own)
    assert site(full)["controllers"] == sorted(CONTROLLERS)  # the control
    machine.members.clear()
    (own / "cgroup.procs").write_text("")
    os.chmod(own / "cgroup.procs", 0o644)
    os.chown(own / file, 0, 0)
    found = machine.survey_as(as_user)
    if file == "cgroup.subtree_control":
        assert site(found)["controllers"] == []
    else:
        assert found["sites"] == []
    assert set(found["lacks"]) == set(CONTROLLERS) and found["delegated"] is False


@pytest.mark.parametrize(("mark", "taken"), [(b"1", True), (b"0", False), (b"", False), (b"11", False)])
def test_which_mark_counts(machine: Machine, unified: Path, as_root: Asker, mark: bytes, taken: bool) -> None:
    slice_ = machine.group(unified / "slice", has=ALL, down=ALL)
    own = machine.group(slice_ / "own", has=ALL, delegated=mark)
    machine.put_into("0::/slice/own", own)
    assert site(machine.survey_as(as_root))["directory"] == str(own if taken else slice_)


def test_a_mark_of_older_systemd(machine: Machine, unified: Path, as_root: Asker) -> None:
    slice_ = machine.group(unified / "slice", has=ALL, down=ALL)
    own = machine.group(slice_ / "own", has=ALL)
    _mark(own, "trusted.delegate", b"1")
    machine.put_into("0::/slice/own", own)
    assert site(machine.survey_as(as_root))["directory"] == str(own)


def test_everybody_may_be_in_the_real_root(machine: Machine, as_root: Asker) -> None:
    root = machine.group(machine.mount("v2", "cgroup2"), has=ALL, down="pids", others=(1, 2), real_root=True)
    machine.put_into("0::/", root)
    found = site(machine.survey_as(as_root))
    assert (found["directory"], found["line"]) == (str(root), "0::")
    assert found["enable"] == ["cpu", "io", "memory"]
    # The control: in any other group it would matter.
    (root / "cgroup.type").write_text("domain\n")
    assert site(machine.survey_as(as_root))["enable"] == []


def test_the_root_of_a_container(machine: Machine, as_root: Asker) -> None:
    """A group like any other, though it is the highest that can be seen."""
    root = machine.group(machine.mount("v2", "cgroup2"), has="cpu memory pids")
    machine.put_into("0::/", root)
    found = machine.survey_as(as_root)
    assert site(found)["enable"] == ["cpu", "memory", "pids"]
    assert site(found)["leave"] is True
    assert list(found["lacks"]) == ["io"]


def test_a_tree_without_controllers(machine: Machine) -> None:
    """Beside v1. It still can freeze, kill and count."""
    root = machine.group(machine.mount("v2", "cgroup2"), real_root=True)
    memory = machine.legacy(machine.mount("memory", "cgroup", "rw,memory"))
    machine.put_into("4:memory:/", memory)
    machine.put_into("0::/", root)
    found = machine.survey()
    assert [each["directory"] for each in found["sites"]] == [str(memory), str(root)]
    assert found["sites"][1]["controllers"] == []
    assert set(found["lacks"]) == {"pids", "cpu", "io"}


def test_a_controller_of_v1_is_not_offered_by_v2(machine: Machine) -> None:
    """A controller is bound to one hierarchy, whatever the files of a container's emulation show."""
    root = machine.group(machine.mount("v2", "cgroup2"), has=ALL, down=ALL, real_root=True)
    memory = machine.legacy(machine.mount("memory", "cgroup", "rw,memory"))
    machine.put_into("4:memory:/", memory)
    machine.put_into("0::/", root)
    found = machine.survey()
    assert found["sites"][0]["controllers"] == ["memory"]
    assert found["sites"][1]["controllers"] == ["cpu", "io", "pids"]


# --- v1 ----------------------------------------------------------------------------------------------------


def test_controllers_that_are_mounted_together(machine: Machine) -> None:
    point = machine.legacy(machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"))
    machine.put_into("3:cpu,cpuacct:/", point)
    found = machine.survey()
    assert site(found) == {
        "version": 1,
        "controllers": ["cpu", "cpuacct"],
        "directory": str(point),
        "line": "3:cpu,cpuacct:",
        "enable": [],
        "leave": False,
        "host": False,
    }


def test_v1_names_are_translated(machine: Machine) -> None:
    point = machine.legacy(machine.mount("blkio", "cgroup", "rw,blkio"))
    machine.put_into("7:blkio:/", point)
    assert site(machine.survey())["controllers"] == ["io"]


def test_hierarchies_without_controllers(machine: Machine) -> None:
    """systemd's named hierarchy and the freezer limit nothing."""
    for number, word in enumerate(("freezer", "devices", "name=systemd")):
        machine.legacy(machine.mount(word, "cgroup", f"rw,xattr,{word}"))
        machine.put_into(f"{number + 1}:{word}:/")
    found = machine.survey()
    assert found["sites"] == []
    assert [each[1] for each in found["own"]] == [["freezer"], ["devices"], ["name=systemd"]]


@pytest.mark.needs("user", "root")
def test_v1_is_for_root(machine: Machine, as_user: Asker) -> None:
    point = machine.legacy(machine.mount("pids", "cgroup", "rw,pids"))
    machine.put_into("8:pids:/")
    found = machine.survey_as(as_user)
    assert found["sites"] == [] and found["delegated"] is False
    reason, remedy = found["lacks"]["pids"]
    assert reason == f"groups of the pids controller (cgroup v1) cannot be made in {point}"
    assert "only root can" in remedy


@pytest.mark.needs("user", "root")
def test_a_v1_group_that_was_delegated(machine: Machine, as_user: Asker) -> None:
    point = machine.mount("pids", "cgroup", "rw,pids")
    own = machine.legacy(point / "ours")
    machine.put_into("8:pids:/ours")
    found = machine.survey_as(as_user, own)
    assert (site(found)["directory"], site(found)["line"]) == (str(own), "8:pids:/ours")
    assert found["delegated"] is True


# --- containers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fstype", ["cgroup", "cgroup2"])
def test_a_part_of_the_tree_is_mounted(machine: Machine, fstype: str) -> None:
    """/proc names our group by the whole tree, the mount shows it by a part."""
    point = machine.mount("part", fstype, "rw,memory" if fstype == "cgroup" else "rw", root="/docker/abc")
    own = machine.group(point / "deep/er", has="memory", down="memory")
    names = "4:memory:" if fstype == "cgroup" else "0::"
    machine.put_into(f"{names}/docker/abc/deep/er", own)
    found = machine.survey()
    assert found["own"][0][2] == str(own)
    directories = [each["directory"] for each in found["sites"]]
    assert directories == [str(own)] or directories == [str(point / "deep")]
    assert site(found)["line"].startswith(f"{names}/docker/abc/deep")


def test_the_root_of_the_part(machine: Machine) -> None:
    point = machine.legacy(machine.mount("part", "cgroup", "rw,memory", root="/docker/abc"))
    machine.put_into("4:memory:/docker/abc", point)
    assert (site(machine.survey())["directory"], site(machine.survey())["line"]) == (
        str(point),
        "4:memory:/docker/abc",
    )


@pytest.mark.parametrize("path", ["/docker/abcd", "/docker", "/", "/docker/ab", "/other/docker/abc"])
@pytest.mark.parametrize("fstype", ["cgroup", "cgroup2"])
def test_our_group_is_not_in_the_part(machine: Machine, fstype: str, path: str) -> None:
    """Then there is no group for us, rather than a wrong one."""
    point = machine.mount("part", fstype, "rw,memory" if fstype == "cgroup" else "rw", root="/docker/abc")
    machine.group(point, has=ALL, down=ALL)
    machine.put_into(f"{'4:memory' if fstype == 'cgroup' else '0:'}:{path}")
    found = machine.survey()
    assert found["own"] == [] and found["sites"] == []
    assert set(found["lacks"]) == set(CONTROLLERS)


def test_a_hierarchy_that_is_mounted_twice(machine: Machine) -> None:
    """The one that shows our group is taken, wherever it stands in the table."""
    other = machine.mount("other", "cgroup", "rw,pids", root="/lxc/other")
    machine.legacy(other)
    point = machine.legacy(machine.mount("pids", "cgroup", "rw,pids"))
    own = machine.legacy(point / "ours")
    machine.put_into("8:pids:/ours", own)
    assert site(machine.survey())["directory"] == str(own)


def test_a_mount_of_other_controllers(machine: Machine) -> None:
    """cpu alone is not cpu,cpuacct; v1 is not v2."""
    machine.legacy(machine.mount("cpu", "cgroup", "rw,cpu"))
    machine.put_into("3:cpu,cpuacct:/")
    machine.put_into("0::/")
    assert machine.survey()["own"] == []


def test_nothing_is_mounted(machine: Machine) -> None:
    machine.put_into("0::/")
    machine.put_into("4:memory:/")
    found = machine.survey()
    assert found["sites"] == [] and found["delegated"] is (os.geteuid() == 0)
    assert found["lacks"]["memory"][0] == "no cgroup v2 file system is mounted"


def test_a_kernel_without_cgroups(machine: Machine) -> None:
    assert machine.survey()["sites"] == []
    assert set(machine.survey()["lacks"]) == set(CONTROLLERS)


# --- names -------------------------------------------------------------------------------------------------

ODD = ["a b", "a:b", ":", "a::b", "tab\tbed", "back\\slash", "\\040", "ünï", "-", "...", "x" * 200]


@pytest.mark.parametrize("name", ODD)
def test_odd_names(machine: Machine, name: str) -> None:
    """The kernel escapes nothing in /proc/PID/cgroup, and refuses newlines in names."""
    point = machine.mount("pids", "cgroup", "rw,pids", root=f"/{name}")
    own = machine.legacy(point / name)
    machine.put_into(f"8:pids:/{name}/{name}", own)
    assert (site(machine.survey())["directory"], site(machine.survey())["line"]) == (
        str(own),
        f"8:pids:/{name}/{name}",
    )


def test_a_name_that_is_no_utf8(machine: Machine) -> None:
    point = machine.legacy(machine.mount("pids", "cgroup", "rw,pids"))
    own = machine.legacy(Path(os.fsdecode(os.fsencode(point) + b"/\xff\xfe")))
    machine.put_into(b"8:pids:/\xff\xfe", own)
    found = site(machine.survey())
    assert os.fsencode(found["line"]) == b"8:pids:/\xff\xfe"
    assert os.path.samefile(found["directory"], own)


def test_a_name_with_a_carriage_return(machine: Machine) -> None:
    point = machine.legacy(machine.mount("pids", "cgroup", "rw,pids"))
    own = machine.legacy(point / "a\rb")
    machine.put_into("8:pids:/a\rb", own)
    assert site(machine.survey())["directory"] == str(own)


# --- a survey as a value -----------------------------------------------------------------------------------

MEMORY = Site(1, frozenset({"memory"}), "/m", "4:memory:")
CPU = Site(1, frozenset({"cpu", "cpuacct"}), "/c", "3:cpu,cpuacct:")
EMPTY = Site(2, frozenset(), "/u", "0::")
FULL = Site(2, frozenset(CONTROLLERS), "/u", "0::", ("cpu", "io"), True)
GONE = Lack("it broke", "mend it")


def test_the_site_or_the_lack_of_each_controller() -> None:
    found = Survey((MEMORY, CPU, EMPTY), (("pids", GONE),), True)
    assert [found.site(name) for name in ("memory", "cpu", "cpuacct", "pids", "io")] == [
        MEMORY,
        CPU,
        CPU,
        None,
        None,
    ]
    assert found.unified is EMPTY and found.counts_cpu is EMPTY
    assert found.lack("pids") == GONE
    assert found.lack("io").remedy == DELEGATE
    assert Survey((MEMORY, CPU), (), True).counts_cpu is CPU
    assert Survey((MEMORY,), (), True).counts_cpu is None


def test_a_site_that_lacks_a_promised_controller() -> None:
    found = Survey((MEMORY, CPU, FULL), (("zzz", GONE),), True)
    less = found.without("/c", frozenset({"cpu"}), GONE)
    assert less.sites == (MEMORY, CPU._replace(controllers=frozenset({"cpuacct"})), FULL)
    assert dict(less.lacks) == {"cpu": GONE, "zzz": GONE}
    none = less.without("/c", frozenset({"cpuacct"}), GONE)
    assert none.sites == (MEMORY, FULL)
    assert none.delegated is True


def test_a_missing_controller_is_not_handed_down() -> None:
    less = Survey((FULL,), (), True).without("/u", frozenset({"io"}), GONE)
    assert less.sites[0].controllers == {"memory", "pids", "cpu"}
    assert less.sites[0].enable == ("cpu",)


# --- this machine ------------------------------------------------------------------------------------------


def members(name: str) -> list[Any]:
    """In a group with an odd name, in each hierarchy where we may make one: whether the survey finds us."""
    import os

    from sandbox.limits.cgroup_survey import own_hierarchies, survey
    from sandbox.paths.mounts import read_mounts

    def mine(path: str) -> bool:
        with open(f"{path}/cgroup.procs", encoding="ascii") as file:
            return os.getpid() in map(int, file.read().split())

    mounts = read_mounts()
    before = own_hierarchies(mounts)
    assert all(mine(each.directory) for each in before)
    made: list[tuple[str, str]] = []
    seen: list[Any] = []
    try:
        for each in before:
            path = f"{each.directory}/{name}-{os.getpid()}"
            try:
                os.mkdir(path)
                made.append((each.directory, path))
                with open(f"{path}/cgroup.procs", "w", encoding="ascii") as file:
                    file.write("0")
            except OSError:
                continue  # not ours, or a group that takes no processes (v2)
            (now,) = (
                hierarchy
                for hierarchy in own_hierarchies(mounts)
                if (hierarchy.version, hierarchy.root) == (each.version, each.root)
            )
            seen.append([now.directory == path, now.line.endswith(f"/{name}-{os.getpid()}"), mine(path)])
        survey(mounts)
    finally:
        for above, path in made:
            try:
                with open(f"{above}/cgroup.procs", "w", encoding="ascii") as file:
                    file.write("0")
            except OSError:
                pass
            os.rmdir(path)
    return seen


@pytest.mark.needs("root")
@one_case("name", ["rt a b", "rt:a::b", "rt\\040x", "rt-ü"])
def test_we_are_found_in_groups_of_odd_names(runner_as_root: Caller, name: str) -> None:
    seen = elsewhere.run(runner_as_root, members, name)
    if not seen:
        pytest.skip("there is no hierarchy in which root may make groups")
    assert all(all(each) for each in seen), seen


def own_survey() -> list[Any]:
    """The survey of this machine, each site tried: a group is made, joined, and found."""
    import os

    from sandbox.limits.cgroup_survey import CONTROLLERS, survey
    from sandbox.paths.mounts import read_mounts

    found = survey(read_mounts())
    tried = []
    for site in found.sites:
        path = f"{site.directory}/rt-{os.getpid()}"
        os.mkdir(path)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    with open(f"{path}/cgroup.procs", "w", encoding="ascii") as file:
                        file.write("0")
                    with open("/proc/self/cgroup", encoding="utf-8") as file:
                        lines = file.read().splitlines()
                    os._exit(0 if f"{site.line}/{os.path.basename(path)}" in lines else 3)
                finally:
                    os._exit(4)
            tried.append([site.directory, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
        finally:
            while True:
                try:
                    os.rmdir(path)
                    break
                except OSError:
                    pass
    covered = {name for site in found.sites for name in site.controllers} | {name for name, _ in found.lacks}
    return [tried, sorted(set(CONTROLLERS) - covered)]


@pytest.mark.both_callers
def test_every_site_of_this_machine_works(runner_as: Caller) -> None:
    tried, forgotten = elsewhere.run(runner_as, own_survey)
    assert all(code == 0 for _, code in tried), tried
    assert forgotten == []  # each controller has a site, or a reason why not
