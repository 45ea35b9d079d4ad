"""Processes that leave a group so that it can hand its controllers down: real ones, in a v2 tree.

The tree may have no controllers. Who may be moved, and who is, does not depend on them.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandbox.limits.cgroup import sweep
from sandbox.limits.site import HOST_LEAF
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox.limits.own_cgroups import chown_to, join_command, make_parent_cgroup
from tests.tables import wait_for

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.both_callers]

SLEEPS = ("/bin/sleep", "1000")
# A host that starts one process after another, while we look and while we move.
FORKS = ("/bin/sh", "-c", "while :; do /bin/true; done")


@contextmanager
def unit_with(caller: Caller, *hosts: tuple[Caller, tuple[str, ...]]) -> Iterator[tuple[Path, list[int]]]:
    """A v2 group of `caller`, and the pids of the hosts in it."""
    with make_parent_cgroup(2) as parent:
        unit = parent / "our.service"
        unit.mkdir()
        chown_to(unit, caller)
        started = [
            subprocess.Popen(join_command([unit / "cgroup.procs"], who.prefix) + program)
            for who, program in hosts
        ]
        try:
            for process, (_, program) in zip(started, hosts, strict=True):
                assert wait_for(partial(runs, process.pid, program), 20)
            yield unit, [process.pid for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()


def runs(pid: int, program: tuple[str, ...]) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1] == [word.encode() for word in program]


def inside(caller: Caller, unit: Path) -> Caller:
    return replace(caller, prefix=join_command([unit / "cgroup.procs"], caller.prefix))


def group_of(pid: int) -> str:
    """The name of the group that a process is in."""
    (line,) = (x for x in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if x.startswith("0::"))
    return line.rpartition("/")[2]


def vacated(directory: str, host: bool, times: int) -> list[Any]:
    """Vacate it from `times` processes at once. The errors; where we and a child of ours are then; who is
    left."""
    import os

    from sandbox.limits.vacate import vacate

    def group(pid: int) -> str:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            return next(x for x in file.read().splitlines() if x.startswith("0::")).rpartition("/")[2]

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    movers = []
    go, gone = os.pipe()
    for number in range(times - 1):
        movers.append(os.fork())
        if movers[-1] == 0:
            os.close(gone)
            os.read(go, 1)
            os.mkdir(f"{directory}/runner-{number + 2}-2-self")
            try:
                vacate(directory, f"{directory}/runner-{number + 2}-2-self", host=host)
            except OSError as error:
                os._exit(error.errno or 255)
            os._exit(0)
    os.mkdir(f"{directory}/runner-1-2-self")
    os.close(gone)
    errors = [0]
    try:
        vacate(directory, f"{directory}/runner-1-2-self", host=host)
    except OSError as error:
        errors = [error.errno or 255]
    errors += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in movers]
    with open(f"{directory}/cgroup.procs", encoding="ascii") as file:
        left = [int(word) for word in file.read().split()]
    places = [group(os.getpid()), group(child)]
    os.close(write)
    os.waitpid(child, 0)
    return [errors, places, left]


def test_what_is_ours_leaves_without_a_word(runner_as: Caller) -> None:
    with unit_with(runner_as) as (unit, _):
        told = elsewhere.run(inside(runner_as, unit), vacated, str(unit), False, 1)
        assert told == [[0], ["runner-1-2-self", "runner-1-2-self"], []]
        assert not (unit / HOST_LEAF).exists()


def test_a_host_is_moved_only_if_the_policy_says_so(runner_as: Caller) -> None:
    with unit_with(runner_as, (runner_as, SLEEPS)) as (unit, (host,)):
        errors, _, left = elsewhere.run(inside(runner_as, unit), vacated, str(unit), False, 1)
        assert (errors, group_of(host)) == ([errno.EBUSY], unit.name)
        assert host in left
        for place in unit.glob("runner-*"):
            place.rmdir()
        # The control: with the operator's word it is moved, to a group that no plugin has.
        told = elsewhere.run(inside(runner_as, unit), vacated, str(unit), True, 1)
        assert told == [[0], ["runner-1-2-self", "runner-1-2-self"], []]
        assert group_of(host) == HOST_LEAF
        sweep(str(unit))  # as the next runner does
        assert group_of(host) == HOST_LEAF and not (unit / "runner-1-2-self").exists()


def test_two_runners_at_once_and_a_host_that_starts_processes(runner_as: Caller) -> None:
    with unit_with(runner_as, (runner_as, FORKS)) as (unit, (host,)):
        errors, places, left = elsewhere.run(inside(runner_as, unit), vacated, str(unit), True, 3)
        assert (errors, left) == ([0, 0, 0], [])
        assert group_of(host) == HOST_LEAF
        assert unit.name not in places  # one runner may have moved another, as a host
        assert (unit / "cgroup.procs").read_text() == ""  # what it starts now is born below


@pytest.mark.needs("root")
def test_processes_of_other_users_stay(runner_as_root: Caller, runner_as_user: Caller) -> None:
    """v2 itself lets the owner of a group move whoever is in it."""
    hosts = (runner_as_root, SLEEPS), (runner_as_user, SLEEPS)
    with unit_with(runner_as_user, *hosts) as (unit, (roots, own)):
        errors, _, left = elsewhere.run(inside(runner_as_user, unit), vacated, str(unit), True, 1)
        assert errors == [errno.EPERM] and roots in left
        assert group_of(roots) == unit.name
        assert os.stat(f"/proc/{own}").st_uid == runner_as_user.uid  # the control: same group, another user
