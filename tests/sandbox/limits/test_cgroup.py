"""Groups of our own: what is written where, who is in them, and that they go.

Tests make real ones in cgroups of their own, as root and as a user to whom they were delegated.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.limits import cgroup as cgroups
from sandbox.limits.cgroup import (
    Cgroup,
    CgroupDirectory,
    CgroupFault,
    Counters,
    make_cgroup,
    settings,
    sweep,
)
from sandbox.limits.cgroup_survey import CONTROLLERS
from sandbox.limits.site import Site
from sandbox.spec import Limits
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox.limits import own_cgroups
from tests.sandbox.limits.own_cgroups import OwnCgroups, make_own_cgroups
from tests.tables import wait_for

pytestmark = pytest.mark.both_callers

DISKS = ((8, 0), (253, 1))
FULL = Limits(memory=64 << 20, pids=10, cpu=0.5, cpu_time=3.0, io=1 << 20)


def site(version: int, *controllers: str, directory: str = "/nowhere") -> Site:
    assert version in (1, 2)
    return Site(1 if version == 1 else 2, frozenset(controllers), directory, "0::/nowhere")


# --- what is written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "limits", "written"),
    [
        (
            site(1, "memory"),
            FULL,
            [
                # In this order: the second may not be lower than the first at any time.
                ("memory", "memory.limit_in_bytes", "67108864"),
                ("memory", "memory.memsw.limit_in_bytes", "67108864"),
                ("memory", "memory.kmem.tcp.limit_in_bytes", "67108864"),
            ],
        ),
        (site(1, "pids"), FULL, [("pids", "pids.max", "12")]),
        (
            site(1, "cpu", "cpuacct"),
            FULL,
            [("cpu", "cpu.cfs_period_us", "100000"), ("cpu", "cpu.cfs_quota_us", "50000")],
        ),
        (
            site(1, "io"),
            FULL,
            [
                ("io", "blkio.throttle.read_bps_device", "8:0 1048576"),
                ("io", "blkio.throttle.write_bps_device", "8:0 1048576"),
                ("io", "blkio.throttle.read_bps_device", "253:1 1048576"),
                ("io", "blkio.throttle.write_bps_device", "253:1 1048576"),
            ],
        ),
        (site(1, "cpuacct"), FULL, []),
        (
            site(2, *CONTROLLERS),
            FULL,
            [
                ("memory", "memory.max", "67108864"),
                ("memory", "memory.swap.max", "0"),
                ("memory", "memory.oom.group", "1"),
                ("pids", "pids.max", "12"),
                ("cpu", "cpu.max", "50000 100000"),
                ("io", "io.max", "8:0 rbps=1048576 wbps=1048576"),
                ("io", "io.max", "253:1 rbps=1048576 wbps=1048576"),
            ],
        ),
        (site(2), FULL, []),
        (site(2, *CONTROLLERS), Limits(), []),
        (site(2, *CONTROLLERS), Limits(cpu_time=1.0, disk=5, deadline=1.0), []),
        (site(2, *CONTROLLERS), Limits(pids=1), [("pids", "pids.max", "3")]),
        # More cores than one; less than the kernel takes; and a third.
        (site(2, "cpu"), Limits(cpu=2.5), [("cpu", "cpu.max", "250000 100000")]),
        (site(2, "cpu"), Limits(cpu=0.001), [("cpu", "cpu.max", "1000 100000")]),
        (site(2, "cpu"), Limits(cpu=1 / 3), [("cpu", "cpu.max", "33333 100000")]),
        (
            site(1, "cpu"),
            Limits(cpu=0.001),
            [("cpu", "cpu.cfs_period_us", "100000"), ("cpu", "cpu.cfs_quota_us", "1000")],
        ),
    ],
)
def test_values_written_for_each_limit(
    where: Site, limits: Limits, written: list[tuple[str, str, str]]
) -> None:
    assert list(settings(where, limits, DISKS)) == written


def test_without_disks_there_is_no_io_limit() -> None:
    assert list(settings(site(2, "io"), FULL)) == list(settings(site(1, "io"), FULL)) == []


# --- what is read, from files of our own -------------------------------------------------------------------


@pytest.fixture
def group_of(tmp_path: Path) -> Iterator[Callable[..., CgroupDirectory]]:
    """group_of(site, file=text, …): a group whose files say that. A dot in a name is written as two _."""
    opened: list[int] = []

    def make(where: Site, **files: str) -> CgroupDirectory:
        name = f"group-{len(opened)}"
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file.replace("__", ".")).write_text(text)
        opened.append(os.open(tmp_path / name, os.O_RDONLY))
        return CgroupDirectory(where._replace(directory=str(tmp_path)), name, opened[-1])

    yield make
    for fd in opened:
        os.close(fd)


def test_counters_of_v2(group_of: Callable[..., CgroupDirectory]) -> None:
    cgroup = Cgroup(
        [
            group_of(
                site(2, *CONTROLLERS),
                memory__events="low 0\nhigh 0\nmax 57\noom 3\noom_kill 2\noom_group_kill 1\n",
                memory__peak="123456\n",
                pids__events="max 7\n",
                pids__peak="12\n",
                cpu__stat="usage_usec 3000000\nuser_usec 2500000\nsystem_usec 500000\nnr_periods 9\n"
                "nr_throttled 4\nthrottled_usec 100\n",
            )
        ]
    )
    assert cgroup.counters() == Counters(2, 7, 4, 2.5, 0.5, 123456, 10, own_oom=True)
    assert cgroup.cpu() == 3.0


def test_counters_of_v1(group_of: Callable[..., CgroupDirectory]) -> None:
    cgroup = Cgroup(
        [
            group_of(
                site(1, "memory"),
                memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
                memory__max_usage_in_bytes="123456\n",
            ),
            group_of(site(1, "pids"), pids__events="max 7\n", pids__peak="1\n"),
            group_of(
                site(1, "cpu", "cpuacct"),
                cpu__stat="nr_periods 9\nnr_throttled 4\nthrottled_time 100\n",
                cpuacct__usage_user="2500000000\n",
                cpuacct__usage_sys="500000000\n",
            ),
        ]
    )
    # The cage's own are not counted; before they are all there that would be less than none.
    assert cgroup.counters() == Counters(2, 7, 4, 2.5, 0.5, 123456, 0)
    assert cgroup.cpu() == 3.0


def test_counters_without_controllers(group_of: Callable[..., CgroupDirectory]) -> None:
    assert Cgroup([]).counters() == Counters()
    assert Cgroup([]).cpu() is None
    # A kernel that lacks the files, or a group that is gone.
    assert Cgroup([group_of(site(2, *CONTROLLERS))]).counters() == Counters()
    assert Cgroup([group_of(site(1, *CONTROLLERS, "cpuacct"))]).counters() == Counters()


def test_the_v2_tree_counts_processor_time_also_without_a_controller(
    group_of: Callable[..., CgroupDirectory],
) -> None:
    legacy = group_of(site(1, "cpuacct"), cpuacct__usage_user="9000000000", cpuacct__usage_sys="0")
    empty = group_of(site(2), cpu__stat="usage_usec 2\nuser_usec 1500000\nsystem_usec 500000\n")
    assert Cgroup([legacy, empty]).cpu() == 2.0
    assert Cgroup([legacy, group_of(site(2))]).cpu() == 9.0  # before Linux 5.4 an empty one had no such file


def test_processes(group_of: Callable[..., CgroupDirectory]) -> None:
    one = group_of(site(1, "pids"), cgroup__procs="30\n4\n")
    other = group_of(site(2), cgroup__procs="4\n5\n")
    assert Cgroup([one, other]).processes() == [30, 4]
    assert Cgroup([one, other]).left() == (4, 5, 30)
    assert Cgroup([]).processes() == [] and Cgroup([]).left() == ()


def test_the_lines_of_a_member() -> None:
    where = Site(1, frozenset({"pids"}), "/sys/fs/cgroup/pids", "8:pids:")
    assert CgroupDirectory(where, "runner-1-2-3", -1).line == "8:pids:/runner-1-2-3"
    assert CgroupDirectory(where._replace(line="8:pids:/a/b"), "g", -1).line == "8:pids:/a/b/g"


def test_only_v2_freezes(group_of: Callable[..., CgroupDirectory]) -> None:
    legacy = Cgroup([group_of(site(1, "pids"), cgroup__freeze="0\n")])
    legacy.freeze(True)
    assert not legacy.can_freeze and legacy.groups[0].read("cgroup.freeze") == "0\n"
    unified = Cgroup([group_of(site(1, "pids")), group_of(site(2), cgroup__freeze="0\n")])
    assert unified.can_freeze
    unified.freeze(True)
    assert unified.groups[1].read("cgroup.freeze") == "1\n"
    unified.freeze(False)
    assert unified.groups[1].read("cgroup.freeze") == "0\n"
    gone = Cgroup([group_of(site(2))])
    gone.freeze(False)  # nothing to be done, and nothing to complain of
    assert not gone.can_freeze


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize(
    ("version", "file", "lifted"), [(2, "cpu.max", "max"), (1, "cpu.cfs_quota_us", "-1")], ids=["v2", "v1"]
)
def test_a_quota_is_lifted_where_there_is_one(
    group_of: Callable[..., CgroupDirectory], limited: bool, version: int, file: str, lifted: str
) -> None:
    group = group_of(site(version, "cpu"), **{file.replace(".", "__"): "5000"})
    cgroup = Cgroup([group])
    cgroup.effective = {"cpu": 0.05} if limited else {"memory": 1.0}
    cgroup.lift_cpu()
    # The kernel's files take what is written as a whole; of this one the end stays.
    assert group.read(file) == (lifted + "5000"[len(lifted) :] if limited else "5000")


@pytest.mark.parametrize(
    ("file", "code", "swap", "optional"),
    [
        ("memory.swap.max", errno.ENOENT, False, True),
        ("memory.memsw.limit_in_bytes", errno.ENOENT, False, True),
        ("memory.kmem.tcp.limit_in_bytes", errno.ENOENT, True, True),
        ("memory.kmem.tcp.limit_in_bytes", errno.EBUSY, False, False),
        ("memory.memsw.limit_in_bytes", errno.EACCES, False, True),
        ("memory.memsw.limit_in_bytes", errno.EOPNOTSUPP, False, True),
        # With swap it would be a way around the limit.
        ("memory.swap.max", errno.ENOENT, True, False),
        ("memory.memsw.limit_in_bytes", errno.EOPNOTSUPP, True, False),
        # It is there, and does not take it.
        ("memory.memsw.limit_in_bytes", errno.EBUSY, False, False),
        ("memory.swap.max", errno.EINVAL, False, False),
        ("memory.max", errno.ENOENT, False, False),
        ("memory.limit_in_bytes", errno.ENOENT, False, False),
        ("memory.oom.group", errno.ENOENT, False, False),
        ("pids.max", errno.ENOENT, False, False),
        ("cpu.max", errno.ENOENT, False, False),
    ],
)
def test_optional_files_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch, file: str, code: int, swap: bool, optional: bool
) -> None:
    monkeypatch.setattr(cgroups, "has_swap", lambda: swap)
    assert cgroups.is_optional(file, OSError(code, "")) is optional


def test_swap_of_this_machine() -> None:
    lines = Path("/proc/swaps").read_text().splitlines() if os.path.exists("/proc/swaps") else []
    assert cgroups.has_swap() is (len(lines) > 1)


# --- real ones ---------------------------------------------------------------------------------------------


@pytest.fixture
def inside(runner_as: Caller, nothing_left: None) -> Iterator[OwnCgroups]:
    with make_own_cgroups(runner_as) as own:
        yield own


def limited(limits: dict[str, Any]) -> dict[str, Any]:
    """Make groups at every site, with a member that has dropped to nobody's uid if it can."""
    import fcntl
    import os

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    found = survey(read_mounts())
    before = len(os.listdir("/proc/self/fd"))
    with make_cgroup(found.sites, Limits(**limits)) as cgroup:
        ready_r, ready_w = os.pipe()
        with cgroup.open_handles() as handles:
            pid = os.fork()
            if pid == 0:
                try:
                    if os.geteuid() == 0:
                        os.setresuid(65534, 65534, 65534)
                    for handle in handles.files:
                        os.write(handle, b"0")
                    os.write(ready_w, b"!")
                    os.execv("/bin/sleep", ["sleep", "1000"])
                finally:
                    os._exit(1)
        assert os.read(ready_r, 1) == b"!"
        os.close(ready_r)
        os.close(ready_w)
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            own = file.read().splitlines()
        files = {}
        for group in cgroup.groups:
            for name in ("memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"):
                if (text := group.read(name)) is not None and set(group.site.controllers) & {
                    name.split(".")[0]
                }:
                    files[name] = text.split()[0]
        try:
            for group in cgroup.groups:
                fd = os.open(group.outer_path, os.O_RDONLY)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = False
        except BlockingIOError:
            locked = True
            os.close(fd)
        result: dict[str, Any] = {
            "names": [os.path.basename(group.outer_path) for group in cgroup.groups],
            "sites": sorted(name for each in found.sites for name in each.controllers),
            "in all": set(cgroup.lines) <= set(lines) and len(cgroup.lines) == len(found.sites),
            "we are not": not set(cgroup.lines) & set(own),
            "members": [group.processes() == [pid] for group in cgroup.groups],
            "left": list(cgroup.left()) == [pid],
            "effective": cgroup.effective,
            "files": files,
            "locked": locked,
            "paths": [group.outer_path for group in cgroup.groups],
        }
        cgroup.kill()
        result["killed by"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        result["nobody left"] = list(cgroup.left()) == []
    result["gone"] = not any(os.path.exists(path) for path in result["paths"])
    result["descriptors"] = len(os.listdir("/proc/self/fd")) - before
    with open("/proc/self/stat", encoding="ascii") as file:
        result["name"] = f"runner-{os.getpid()}-{file.read().rpartition(') ')[2].split()[19]}-0"
    return result


def test_a_group_at_every_site(inside: OwnCgroups) -> None:
    limits = {"memory": (64 << 20) + 1, "pids": 10, "cpu": 0.25}
    told = elsewhere.run(inside.caller, limited, limits)
    assert set(told["names"]) == {told["name"]}
    assert told["in all"] and told["we are not"] and all(told["members"]) and told["left"]
    assert told["locked"]
    assert told["killed by"] == -signal.SIGKILL and told["nobody left"]
    assert told["gone"] and told["descriptors"] == 0
    assert inside.groups() == []
    # What the kernel has taken is what is said to hold. It counts memory in pages.
    effective, files = told["effective"], told["files"]
    assert set(effective) == {"memory", "pids", "cpu"} & set(told["sites"])
    if "memory" in effective:
        assert effective["memory"] == int(files.get("memory.max") or files["memory.limit_in_bytes"])
        assert 64 << 20 <= effective["memory"] <= (64 << 20) + 1 and effective["memory"] % 4096 == 0
    if "pids" in effective:
        assert (effective["pids"], files["pids.max"]) == (10, "12")
    if "cpu" in effective:
        assert effective["cpu"] == 0.25
        assert files.get("cpu.max") or files["cpu.cfs_quota_us"] == "25000"


def refused(limits: dict[str, Any]) -> Any:
    """Write a setting that the kernel refuses: returns which, and the groups that are left."""
    import os

    from sandbox.limits.cgroup import CgroupFault, make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    found = survey(read_mounts())
    before = len(os.listdir("/proc/self/fd"))
    try:
        with make_cgroup(found.sites, Limits(**limits)):
            return "made"
    except CgroupFault as fault:
        return [
            sorted(fault.controllers),
            fault.site in found.sites,
            str(fault),
            len(os.listdir("/proc/self/fd")) - before,
        ]


def controllers(inside: OwnCgroups) -> set[str]:
    return set(elsewhere.run(inside.caller, limited, {})["sites"])


def test_a_limit_the_kernel_does_not_take(inside: OwnCgroups) -> None:
    if "pids" not in controllers(inside):
        pytest.skip("there is no pids controller here")
    names, known, text, left = elsewhere.run(inside.caller, refused, {"memory": 64 << 20, "pids": -10})
    assert (names, known, left) == (["pids"], True, 0)
    assert text.endswith(f"/pids.max: {os.strerror(errno.EINVAL)}")
    assert inside.groups() == []
    assert elsewhere.run(inside.caller, refused, {"pids": 100}) == "made"  # the control


def test_a_site_that_was_removed() -> None:
    with pytest.raises((CgroupFault, OSError)), make_cgroup([site(1, "pids", directory="/nowhere")], FULL):
        pass


def test_a_site_where_no_group_can_be_made(tmp_path: Path) -> None:
    """No descriptor and no directory is left, and the fault names the missing controllers."""
    (tmp_path / "good").mkdir()
    if os.geteuid() == 0:
        where = site(1, "pids", directory="/proc/self/fd")  # a directory in which nobody makes any
    else:
        (tmp_path / "shut").mkdir(mode=0o500)
        where = site(1, "pids", directory=str(tmp_path / "shut"))
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(CgroupFault) as caught,
        make_cgroup([site(1, directory=str(tmp_path / "good")), where], Limits()),
    ):
        pass
    assert caught.value.site == where and caught.value.controllers == {"pids"}
    assert os.listdir(tmp_path / "good") == []
    assert os.listdir("/proc/self/fd") == before


def nested() -> list[Any]:
    """Several plugins of one runner, at the same time and one after another."""
    import os

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    sites = survey(read_mounts()).sites
    names: list[Any] = []
    with make_cgroup(sites, Limits()) as one, make_cgroup(sites, Limits()) as two:
        names += [os.path.basename(each.groups[0].outer_path) for each in (one, two)]
        try:
            with make_cgroup(sites, Limits()) as three:
                names.append(os.path.basename(three.groups[0].outer_path))
                raise KeyError("ours")
        except KeyError:
            pass
        names.append(os.path.exists(three.groups[0].path))
    with make_cgroup(sites, Limits()) as four:
        names.append(os.path.basename(four.groups[0].outer_path))
    return [name if isinstance(name, bool) else int(name.rpartition("-")[2]) for name in names]


def test_several_at_once(inside: OwnCgroups) -> None:
    assert elsewhere.run(inside.caller, nested) == [0, 1, 2, False, 3]
    assert inside.groups() == []


def counted() -> dict[str, Any]:
    """The kernel's counters for a member that computes, forks and is refused a fork."""
    import os
    import time

    from sandbox.limits.cgroup import CAGE_PROCESSES, make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    with make_cgroup(survey(read_mounts()).sites, Limits(pids=3, memory=64 << 20, cpu=0.1)) as cgroup:
        first = cgroup.counters()
        read, write = os.pipe()
        os.set_blocking(read, False)
        with cgroup.open_handles() as handles:
            pid = os.fork()
            if pid == 0:
                for handle in handles.files:
                    os.write(handle, b"0")
                held = bytearray(16 << 20)
                started, heard = time.process_time(), False
                while not heard or time.process_time() < started + 0.1:
                    held[0] = 1
                    try:
                        heard = heard or bool(os.read(read, 1))
                    except BlockingIOError:
                        pass
                try:
                    for _ in range(3 + CAGE_PROCESSES):  # one of them is this one
                        if os.fork() == 0:
                            time.sleep(1000)
                except OSError:
                    os._exit(7)
                os._exit(8)
        # On a busy machine it may take a while until it gets more than its share.
        wait_for(lambda: cgroup.counters().throttled != 0)
        os.write(write, b"!")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        counters, cpu = cgroup.counters(), cgroup.cpu()
        left = len(cgroup.left())
        cgroup.kill()
        return {
            "first": first._asdict(),
            "code": code,
            "left": left,
            "cpu": cpu,
            "effective": cgroup.effective,
            **counters._asdict(),
        }


def test_counters_of_the_kernel(inside: OwnCgroups) -> None:
    told = elsewhere.run(inside.caller, counted, timeout=250)
    if "pids" in told["effective"]:
        assert told["code"] == 7 and told["left"] == 4
        assert told["pids_refused"] == 1 and told["first"]["pids_refused"] == 0
        assert told["pids_peak"] in (3, None)  # five, without the two of the cage; None before Linux 6.1
    else:
        assert told["code"] == 8 and told["pids_refused"] is None
    if "memory" in told["effective"]:
        assert told["oom_kills"] == 0
        assert told["memory_peak"] is None or told["memory_peak"] >= 16 << 20
    if "cpu" in told["effective"]:
        assert told["throttled"] >= 1 and told["first"]["throttled"] == 0
    if told["cpu"] is not None:
        assert told["first"]["cpu_user"] + told["first"]["cpu_system"] < 0.1
        # Two reads: the kernel may still have added the last milliseconds of a process in between.
        assert told["cpu"] == pytest.approx(told["cpu_user"] + told["cpu_system"], abs=0.05)
        assert 0.1 <= told["cpu"] < 30


def stopped_and_lifted(how: str) -> list[Any]:
    """End a member that is frozen, or throttled to a standstill."""
    import os
    import select
    import signal
    import time

    from sandbox.limits.cgroup import Cgroup, make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    with make_cgroup(survey(read_mounts()).sites, Limits(cpu=0.01)) as cgroup:
        if how == "frozen" and not cgroup.can_freeze:
            return ["cannot"]
        read, write = os.pipe()
        with cgroup.open_handles() as handles:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                for handle in handles.files:
                    os.write(handle, b"0")
                while True:
                    os.write(write, b".")
                    time.sleep(0.002)
        os.read(read, 1)
        if how == "frozen":
            unified = next(group for group in cgroup.groups if group.site.version == 2)
            cgroup.freeze(True)
            assert wait_for(lambda: unified.table("cgroup.events")["frozen"] == 1, step=0.001)
            os.set_blocking(read, False)
            try:
                while os.read(read, 65536):
                    pass
            except BlockingIOError:
                pass
            if select.select([read], [], [], 0.1)[0]:
                return ["it goes on"]
            cgroup.freeze(False)
            select.select([read], [], [])  # now it does
            cgroup.freeze(True)
        elif how == "lifted":
            cgroup.lift_cpu()
            quota = [
                (group.read("cpu.max") or group.read("cpu.cfs_quota_us") or "none").split()[0]
                for group in cgroup.groups
                if "cpu" in group.site.controllers
            ]
        elif how == "one by one":
            # As before cgroup.kill, and as on v1.
            cgroup = Cgroup([group for group in cgroup.groups if group.site.version == 1] or cgroup.groups)
            cgroup._unified = None
        cgroup.kill()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return [status, quota] if how == "lifted" else [status]


def test_a_frozen_member_stands_still_and_can_be_killed(inside: OwnCgroups) -> None:
    told = elsewhere.run(inside.caller, stopped_and_lifted, "frozen")
    if told == ["cannot"]:
        pytest.skip("there is no v2 tree here that can freeze")
    assert told == [-signal.SIGKILL]


def test_members_are_killed_one_by_one_without_cgroup_kill(inside: OwnCgroups) -> None:
    assert elsewhere.run(inside.caller, stopped_and_lifted, "one by one") == [-signal.SIGKILL]


def test_the_quota_is_lifted(inside: OwnCgroups) -> None:
    status, quota = elsewhere.run(inside.caller, stopped_and_lifted, "lifted")
    assert status == -signal.SIGKILL
    assert quota in ([], ["max"], ["-1"])
    assert quota or "cpu" not in controllers(inside)


def test_no_other_user_can_hold_the_lock(tmp_path: Path) -> None:
    """Otherwise any user could keep leftovers of a dead runner from being swept, and a new group from being
    made."""
    with make_cgroup([site(1, directory=str(tmp_path))], Limits()) as cgroup:
        assert os.stat(cgroup.groups[0].path).st_mode & 0o077 == 0


# --- sweeping ----------------------------------------------------------------------------------------------


@pytest.fixture
def place(nothing_left: None) -> Iterator[Path]:
    """An empty cgroup in which the test makes others."""
    with own_cgroups.make_parent_cgroup() as path:
        yield path


@pytest.fixture
def unified_place(nothing_left: None) -> Iterator[Path]:
    with own_cgroups.make_parent_cgroup(2) as path:
        yield path


@pytest.fixture
def sleeper() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """sleeper(group): a process in a group."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(group: Path) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen(["/bin/sleep", "1000"]))
        (group / "cgroup.procs").write_text(str(begun[-1].pid))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()


def survives(process: subprocess.Popen[bytes]) -> bool:
    """Whether it lives on long after a signal would have ended it."""
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        return True
    return False


def leftover(place: Path, name: str = "runner-4000000-77-0") -> Path:
    (place / name).mkdir()
    return place / name


def swept(place: Path, path: Path) -> bool:
    """Sweep until it is removed: a member that was just killed takes a moment to end."""

    def is_gone() -> bool:
        sweep(str(place))
        return not path.exists()

    return wait_for(is_gone)


both = pytest.mark.parametrize("where", ["place", "unified_place"])


@both
def test_groups_of_a_dead_runner_are_removed(where: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue(where)
    names = ("runner-4000000-77-0", "runner-4000000-77-1", "runner-1-2-3", "runner-4000000-77-self")
    for name in names:
        leftover(place, name)
    before = os.listdir("/proc/self/fd")
    sweep(str(place))
    assert [name for name in names if (place / name).exists()] == []
    assert os.listdir("/proc/self/fd") == before


@both
def test_a_group_inside_is_swept_with_it(
    where: str, request: pytest.FixtureRequest, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    place = request.getfixturevalue(where)
    path = leftover(place)
    (path / "plugin").mkdir()
    member = sleeper(path / "plugin")
    assert swept(place, path)
    assert member.wait(20) == -signal.SIGKILL


def test_a_group_of_a_living_runner_is_kept(place: Path) -> None:
    """Only the lock counts, not the pid in the name: pids are reused."""
    mine = leftover(place, f"runner-{os.getpid()}-1-0")  # by its name it is of a dead one
    fd = os.open(mine, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    inherited = subprocess.Popen(["/bin/sleep", "1000"], pass_fds=[fd])
    sweep(str(place))
    assert mine.exists()
    os.close(fd)  # the runner dies; its init, which inherited the lock, does not yet
    sweep(str(place))
    assert mine.exists()
    inherited.kill()
    inherited.wait()
    assert swept(place, mine)


def test_a_dead_runners_group_with_a_reused_pid_is_removed(place: Path) -> None:
    """The same pid with another start time: the pid was reused."""
    assert swept(place, leftover(place, f"runner-{os.getpid()}-1-0"))


def test_a_shared_lock_keeps_the_group(place: Path) -> None:
    """A process that only inspects the group keeps it, too."""
    path = leftover(place)
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    sweep(str(place))
    assert path.exists()
    os.close(fd)
    assert swept(place, path)


def test_directories_of_other_programs_are_left_alone(place: Path) -> None:
    names = ("other", "xrunner-1-2-3", "Runner-1-2-3", "runner", "a runner-1-2-3")
    for name in names:
        leftover(place, name)
    sweep(str(place))
    assert [name for name in names if (place / name).exists()] == list(names)


# Other programs call theirs so, too: the runners of build farms, for example.
FOREIGN = [
    "runner-service",
    "runner-abc123-project-7-concurrent-0",
    "runner-1",
    "runner-1-2",
    "runner-1-2-3-4",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_others_runners_live(
    place: Path, sleeper: Callable[[Path], subprocess.Popen[bytes]], name: str
) -> None:
    process = sleeper(leftover(place, name))
    leftover(place, f"{name}-empty")
    sweep(str(place))
    assert survives(process)
    assert (place / f"{name}-empty").exists()


@both
def test_a_process_in_a_dead_runners_group_is_killed(
    where: str, request: pytest.FixtureRequest, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    place = request.getfixturevalue(where)
    path = leftover(place)
    processes = [sleeper(path) for _ in range(3)]
    sweep(str(place))
    assert [process.wait(20) for process in processes] == [-signal.SIGKILL] * 3
    assert swept(place, path)


def test_a_process_in_a_living_runners_group_lives(
    place: Path, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    path = leftover(place)
    process = sleeper(path)
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    sweep(str(place))
    os.close(fd)
    assert survives(process) and path.exists()


def test_a_process_in_a_runners_own_leaf_is_not_killed(
    place: Path, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """A runner moves there itself, with its earlier children, for example those of a host."""
    leaf = leftover(place, "runner-4000000-77-self")
    process = sleeper(leaf)
    sweep(str(place))
    assert survives(process) and leaf.exists()
    process.kill()
    process.wait()
    assert swept(place, leaf)


def test_a_group_with_groups_in_it(place: Path) -> None:
    """The runner makes no such group. It must not stop the others from being swept."""
    path = leftover(place, "runner-1-1-0")
    (path / "deeper").mkdir()
    other = leftover(place, "runner-2-2-0")
    sweep(str(place))
    assert path.exists() and not other.exists()
    (path / "deeper").rmdir()
    assert swept(place, path)


def test_a_file_with_the_name_of_a_group(tmp_path: Path) -> None:
    (tmp_path / "runner-1-2-3").touch()
    (tmp_path / "runner-1-2-4").symlink_to("/")
    sweep(str(tmp_path))
    assert len(os.listdir(tmp_path)) == 2


def sweeping() -> str:
    from sandbox.limits.cgroup import sweep
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts

    for site in survey(read_mounts()).sites:
        sweep(site.directory)
    return "swept"


@pytest.mark.needs("root", "user")
@pytest.mark.usefixtures("nothing_left")
def test_groups_of_root_in_a_users_directory(
    runner_as_user: Caller, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """Root's runner was started there once. The user cannot kill its processes, and goes on without."""
    with make_own_cgroups(runner_as_user) as own:
        theirs = [leftover(directory) for directory in own.directories]
        shut = [leftover(directory, "runner-4000000-77-1") for directory in own.directories]
        for path in shut:
            path.chmod(0o700)
        process = sleeper(theirs[0])
        assert elsewhere.run(own.caller, sweeping) == "swept"
        assert survives(process) and theirs[0].exists()
        assert all(path.exists() for path in shut)
        process.kill()
        process.wait()
        assert elsewhere.run(own.caller, sweeping) == "swept"
        assert not any(path.exists() for path in theirs)  # the folder they are in is the user's own


# --- two at once -------------------------------------------------------------------------------------------


def following(path: str) -> str:
    """The name with the next number."""
    rest, _, number = path.rpartition("-")
    return f"{rest}-{int(number) + 1}"


def test_no_name_is_used_twice(place: Path) -> None:
    """A sweeper that opened the first group just before it was removed would remove the second."""
    names = []
    for _ in range(3):
        with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
            names.append(cgroup.groups[0].path)
    assert names[1:] == [following(names[0]), following(names[1])]


def test_a_group_that_replaces_the_one_to_be_swept(
    place: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    path = leftover(place)
    real, processes = os.open, list[subprocess.Popen[bytes]]()

    def replaced(opened: str, *how: Any) -> int:
        fd = real(opened, *how)
        if opened == str(path) and not processes:
            path.rmdir()
            path.mkdir()
            processes.append(sleeper(path))
        return fd

    monkeypatch.setattr(os, "open", replaced)
    sweep(str(place))
    assert path.exists() and survives(processes[0])
    sweep(str(place))  # the control: it is swept if it is the one that was opened
    assert processes[0].wait(60) == -signal.SIGKILL


def test_a_sweeper_between_mkdir_and_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper cannot know that the group is new. Then the next name is taken."""
    real, moments = os.open, list[str]()

    def slow(path: str, *how: Any) -> int:
        if path.startswith(f"{place}/runner-") and not moments:
            moments.append(path)
            sweep(str(place))
        return real(path, *how)

    monkeypatch.setattr(os, "open", slow)
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        assert moments and not os.path.exists(moments[0])
        assert cgroup.groups[0].path == following(moments[0])
        assert os.path.samestat(os.fstat(cgroup.groups[0].fd), os.stat(cgroup.groups[0].path))
    assert not list(place.glob("runner-*"))


def test_a_sweeper_between_open_and_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the locked directory has no name any more."""
    real, moments = fcntl.flock, list[str]()

    def slow(fd: int, how: int) -> None:
        if not moments:
            moments.append(os.readlink(f"/proc/self/fd/{fd}"))
            sweep(str(place))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    before = len(os.listdir("/proc/self/fd"))
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        assert not os.path.exists(moments[0])
        assert cgroup.groups[0].path == following(moments[0])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sweeper_that_has_the_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper is about to remove the group. Then the next name is taken."""
    real, held = fcntl.flock, list[int]()

    def late(fd: int, how: int) -> None:
        if not held:
            held.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            real(held[0], fcntl.LOCK_EX)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        assert cgroup.groups[0].path == following(os.readlink(f"/proc/self/fd/{held[0]}"))
        os.close(held[0])
    sweep(str(place))
    assert not list(place.glob("runner-*"))


def test_a_sweeper_comes_too_late(place: Path) -> None:
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        sweep(str(place))
        assert os.path.samestat(os.fstat(cgroup.groups[0].fd), os.stat(cgroup.groups[0].path))


def test_a_sweeper_that_never_stops(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded: it gives up and reports it."""
    real = os.open

    def always(path: str, *how: Any) -> int:
        if path.startswith(f"{place}/runner-"):
            os.rmdir(path)
        return real(path, *how)

    monkeypatch.setattr(os, "open", always)
    with (
        pytest.raises(CgroupFault, match=os.strerror(errno.EEXIST)),
        make_cgroup([site(1, directory=str(place))], FULL),
    ):
        pass
    assert not list(place.glob("runner-*"))


def makes_and_sweeps(directory: str, rounds: int) -> int:
    """Make, check and remove groups while others do the same. Returns how often a group was removed or
    replaced."""
    import os

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.site import Site
    from sandbox.spec import Limits

    lost = 0
    for _ in range(rounds):
        with make_cgroup([Site(1, frozenset(), directory, "")], Limits()) as cgroup:
            group = cgroup.groups[0]
            try:
                lost += not os.path.samestat(os.fstat(group.fd), os.stat(group.path))
                fd = os.open(f"{group.path}/cgroup.procs", os.O_WRONLY)
                os.close(fd)
            except FileNotFoundError:
                lost += 1
    return lost


def test_runners_that_start_at_once(place: Path, runner_as_root: Caller) -> None:
    for number in range(40):
        leftover(place, f"runner-4000000-77-{number}")
    runners = [elsewhere.start(runner_as_root, makes_and_sweeps, str(place), 150) for _ in range(4)]
    told = []
    for runner in runners:
        with runner:
            told.append(runner.communicate(timeout=60)[0])
    assert told == [b"0\n"] * 4
    assert not list(place.glob("runner-*"))


# --- the end of a group ------------------------------------------------------------------------------------


def test_a_member_that_does_not_die_keeps_its_group(
    place: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """Not for ever: its lock is released, and the next runner tries again."""
    monkeypatch.setattr(cgroups, "_REMOVE_SECONDS", 0.05)
    before = len(os.listdir("/proc/self/fd"))
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        path = Path(cgroup.groups[0].path)
        process = sleeper(path)
    assert path.exists() and process.poll() is None
    assert len(os.listdir("/proc/self/fd")) == before
    sweep(str(place))
    assert process.wait(20) == -signal.SIGKILL
    assert swept(place, path)


class Clock:
    """The module `time`, with a clock that only its sleepers move."""

    def __init__(self) -> None:
        self.slept = 0.0

    def monotonic(self) -> float:
        return 1000.0 + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


def test_members_that_do_not_die_are_waited_for_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """Other plugins of the process wait as long: the groups of one plugin share the margin, which is shorter
    than for a group that is only not free yet."""
    monkeypatch.setattr(cgroups, "time", clock := Clock())
    with make_cgroup([site(1, directory=str(place))] * 3, Limits()) as cgroup:
        paths = [Path(group.path) for group in cgroup.groups]
        members = [sleeper(path) for path in paths[:2]]
    assert [path.exists() for path in paths] == [True, True, False]
    assert cgroups._STUCK_SECONDS < clock.slept < cgroups._STUCK_SECONDS + 0.02 < cgroups._REMOVE_SECONDS
    # The control: without members, and busy all the same, a group is waited for longer.
    monkeypatch.setattr(cgroups, "time", clock := Clock())
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        paths.append(path := Path(cgroup.groups[0].path))
        (path / "below").mkdir()
    assert path.exists() and clock.slept == pytest.approx(cgroups._REMOVE_SECONDS, abs=0.01)
    (path / "below").rmdir()
    sweep(str(place))
    assert [member.wait(20) for member in members] == [-signal.SIGKILL] * 2
    assert all(swept(place, path) for path in paths)


def test_a_member_that_ends_a_moment_later(
    place: Path, monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """While the group is waited for, however long that takes on this machine."""

    class Meanwhile(Clock):
        def sleep(self, seconds: float) -> None:
            process.kill()
            process.wait()
            time.sleep(seconds)  # the kernel may count it a little longer
            super().sleep(seconds)

    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        path = Path(cgroup.groups[0].path)
        process = sleeper(path)
        monkeypatch.setattr(cgroups, "time", clock := Meanwhile())
    assert not path.exists() and clock.slept > 0


def test_a_group_that_another_program_has_removed(place: Path) -> None:
    with make_cgroup([site(1, directory=str(place))], Limits()) as cgroup:
        os.rmdir(cgroup.groups[0].path)
        assert cgroup.groups[0].processes() == [] and cgroup.left() == ()
        assert cgroup.counters() == Counters()
        cgroup.kill()
        cgroup.freeze(False)


# --- handing down (v2) -------------------------------------------------------------------------------------


class Kernel:
    """Directories that get the files of a v2 group when they are made, and a record of the writes to
    them."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.written: list[tuple[str, str]] = []
        self.refuses: dict[str, int] = {}
        self.has = ""
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        self._fill(base)
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        monkeypatch.setattr(cgroups, "write_once", self.write)

    def _fill(self, path: str | Path) -> None:
        for name in (
            *("cgroup.procs", "cgroup.subtree_control"),
            *("memory.max", "memory.swap.max", "memory.oom.group", "pids.max"),
        ):
            Path(path, name).touch()
        Path(path, "cgroup.controllers").write_text(self.has)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._mkdir(path, mode)
        self._fill(path)

    def rmdir(self, path: str) -> None:
        for name in os.listdir(path):
            os.unlink(f"{path}/{name}")
        self._rmdir(path)

    def write(self, path: str, text: str) -> None:
        name = os.path.basename(path)
        if name in self.refuses:
            raise OSError(self.refuses[name], "")
        self.written.append((os.path.relpath(path, self.base), text))

    def site(self, *, leave: bool = True) -> Site:
        has = frozenset(("memory", "pids", "io"))
        return Site(2, has, str(self.base), "0::/ours", ("memory", "pids"), leave)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setattr(cgroups, "_leaf_locks", {})
    yield Kernel(tmp_path, monkeypatch)
    for fd in cgroups._leaf_locks.values():
        os.close(fd)


def test_the_runner_leaves_its_group_before_it_hands_controllers_down(kernel: Kernel) -> None:
    with make_cgroup([kernel.site()], Limits(pids=5)) as cgroup:
        own = os.path.basename(cgroup.groups[0].outer_path).removesuffix("-0")
        assert kernel.written == [
            (f"{own}-self/cgroup.procs", "0"),
            ("cgroup.subtree_control", "+memory +pids"),
            (f"{own}-0/cgroup.subtree_control", "+io +memory +pids"),
            (f"{own}-0/plugin/pids.max", "7"),
        ]
        # Our leaf is in use for as long as we live, and others see that.
        sweep(str(kernel.base))
        assert (kernel.base / f"{own}-self").exists()
    assert (kernel.base / f"{own}-self").exists()
    assert not (kernel.base / f"{own}-0").exists()


def test_a_runner_outside_the_group_does_not_move(kernel: Kernel) -> None:
    with make_cgroup([kernel.site(leave=False)], Limits()):
        assert kernel.written[0] == ("cgroup.subtree_control", "+memory +pids")


@pytest.mark.parametrize("file", ["cgroup.procs", "cgroup.subtree_control"])
def test_nothing_can_be_handed_down(kernel: Kernel, file: str) -> None:
    kernel.refuses[file] = errno.EBUSY
    with pytest.raises(CgroupFault) as caught, make_cgroup([kernel.site()], Limits()):
        pass
    assert caught.value.controllers == {"memory", "pids"}
    assert str(caught.value) == f"{kernel.base}: {os.strerror(errno.EBUSY)}"
    assert not list(kernel.base.glob("runner-*-0"))


def test_another_try_after_one_controller_failed(kernel: Kernel) -> None:
    """prepare goes on without the failed controller: the others still work."""
    kernel.refuses["io.max"] = errno.ENODEV
    limits = Limits(pids=5, io=1 << 20)
    with pytest.raises(CgroupFault) as caught, make_cgroup([kernel.site()], limits, [(8, 0)]):
        pass
    assert caught.value.controllers == {"io"}
    less = kernel.site()._replace(controllers=frozenset(("memory", "pids")))
    with make_cgroup([less], limits, [(8, 0)]) as cgroup:
        assert [group.site for group in cgroup.groups] == [less]


def test_a_group_of_ours_hands_the_controllers_down(kernel: Kernel) -> None:
    """Without controllers there is nothing to keep, and there is one group."""
    handing = kernel.site(leave=False)._replace(enable=())
    for controllers, inner in ((handing.controllers, "/plugin"), (frozenset[str](), "")):
        with make_cgroup([handing._replace(controllers=controllers)], Limits()) as cgroup:
            (group,) = cgroup.groups
            assert group.path == f"{group.outer_path}{inner}" and group.line.endswith(
                f"-{group.outer_path[-1]}{inner}"
            )
            assert os.path.samestat(os.fstat(group.fd), os.stat(group.path))
            assert os.path.samestat(os.fstat(group.lock), os.stat(group.outer_path))
            assert cgroup.lock_fds == (group.lock,)
            assert not os.stat(group.path).st_mode & 0o077
        assert not os.path.exists(group.outer_path)
    assert [file.partition("/")[2] for file, _ in kernel.written] == ["cgroup.subtree_control"]


def test_controllers_that_were_taken_back_before_the_group_was_made(kernel: Kernel) -> None:
    """The fault names those that are missing: the others still work."""
    kernel.has = "memory"
    kernel.refuses["cgroup.subtree_control"] = errno.ENOENT
    before = os.listdir("/proc/self/fd")
    handing = kernel.site(leave=False)._replace(enable=())
    with pytest.raises(CgroupFault) as caught, make_cgroup([handing], Limits()):
        pass
    assert caught.value.controllers == {"pids", "io"}
    assert not list(kernel.base.glob("runner-*")) and os.listdir("/proc/self/fd") == before


def test_a_limit_that_is_gone_when_it_is_read_back(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not said to be in force."""
    limits = Limits(pids=5)
    with make_cgroup([kernel.site()], limits):
        pass  # the control
    write = kernel.write

    def then_gone(path: str, text: str) -> None:
        write(path, text)
        if path.endswith("/pids.max"):
            os.unlink(path)

    monkeypatch.setattr(cgroups, "write_once", then_gone)
    with pytest.raises(CgroupFault, match=r"/pids\.max: ") as caught, make_cgroup([kernel.site()], limits):
        pass
    assert caught.value.controllers == {"pids"}


def test_limits_that_were_lifted(kernel: Kernel) -> None:
    with make_cgroup([kernel.site()], Limits(pids=5, memory=1 << 20)) as cgroup:
        path = Path(cgroup.groups[0].path)
        assert cgroup.lifted() == cgroup.counters().lifted == ()
        (path / "memory.max").unlink()
        assert cgroup.lifted() == ("memory",)
        (path / "pids.max").write_text("max\n")
        assert cgroup.counters().lifted == ("memory", "pids")


@pytest.mark.parametrize("from_outside", [True, False])
def test_a_cpu_limit_that_was_lifted_before_the_runner_lifts_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, from_outside: bool
) -> None:
    monkeypatch.setattr(cgroups, "write_once", lambda path, text: Path(path).write_text(f"{text}\n"))
    site = kernel.site(leave=False)._replace(controllers=frozenset({"cpu"}), enable=())
    with make_cgroup([site], Limits(cpu=0.5)) as cgroup:
        assert cgroup.lifted() == () and cgroup.effective == {"cpu": 0.5}
        if from_outside:
            Path(f"{cgroup.groups[0].path}/cpu.max").write_text("max 100000\n")
        cgroup.lift_cpu()
        assert cgroup.lifted() == (("cpu",) if from_outside else ())


def test_a_file_that_has_the_limits_of_several_disks(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(path: str, text: str) -> None:
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{text}\n")

    monkeypatch.setattr(cgroups, "write_once", append)
    handing = kernel.site(leave=False)._replace(enable=())
    with make_cgroup([handing], Limits(io=1 << 20), [(8, 0), (8, 16)]) as cgroup:
        assert cgroup.lifted() == ()
        append(f"{cgroup.groups[0].path}/io.max", "8:0 rbps=max wbps=max")
        assert cgroup.lifted() == ("io",)


def lifted_for_real() -> dict[str, Any]:
    import errno

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    def take_back(directory: str, name: str) -> str:
        try:
            with open(f"{directory}/cgroup.subtree_control", "w", encoding="ascii") as file:
                file.write(f"-{name}")
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return ""

    found = survey(read_mounts())
    pids = found.site("pids")
    if pids is None:
        return {}
    told: dict[str, Any] = {}
    with make_cgroup(found.sites, Limits(memory=64 << 20, pids=10, cpu=0.5)) as cgroup:
        group = next(each for each in cgroup.groups if each.site == pids)
        told["before"] = cgroup.lifted()
        cgroup.lift_cpu()
        told["by us"] = cgroup.lifted()
        if pids.version == 2:
            told["refused"] = take_back(pids.directory, "pids"), cgroup.lifted()
            told["inside"] = take_back(group.outer_path, "pids"), cgroup.lifted()
        else:
            group.write("pids.max", "max")
            told["inside"] = "", cgroup.lifted()
    if pids.version == 2:
        told["control"] = take_back(pids.directory, "pids")
    return told


def test_limits_cannot_be_lifted_from_above(runner_as: Caller, nothing_left: None) -> None:
    with make_own_cgroups(runner_as, alone=True) as own:
        told = elsewhere.run(own.caller, lifted_for_real)
    if not told:
        pytest.skip("no pids controller here")
    assert tuple(told["before"]) == tuple(told["by us"]) == ()
    code, names = told["inside"]
    assert code == "" and tuple(names) == ("pids",)
    if "control" in told:
        code, names = told["refused"]
        assert (code, tuple(names), told["control"]) == ("EBUSY", (), "")


def handed_down() -> Any:
    """For real: alone in a delegated v2 group, which the runner has to leave."""
    import os

    from sandbox.limits.cgroup import make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    site = survey(read_mounts()).unified
    if site is None or not site.enable:
        return None
    with make_cgroup([site], Limits(memory=64 << 20, pids=10)) as cgroup:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            own = next(line for line in file.read().splitlines() if line.startswith("0::"))
        with open(f"{site.directory}/cgroup.subtree_control", encoding="ascii") as file:
            down = file.read().split()
        again = survey(read_mounts()).unified
        assert again is not None
        with make_cgroup([again], Limits(pids=3)) as second:
            return [
                own.startswith(f"{site.line}/runner-{os.getpid()}-") and own.endswith("-self"),
                set(site.enable) <= set(down),
                again.directory == site.directory and again.enable == () and not again.leave,
                cgroup.effective.get("pids"),
                second.effective.get("pids"),
            ]


@pytest.mark.usefixtures("nothing_left")
def test_handing_down_for_real(runner_as: Caller) -> None:
    with make_own_cgroups(runner_as, alone=True) as own:
        told = elsewhere.run(own.caller, handed_down)
        if told is None:
            pytest.skip("no v2 tree here has controllers")
        assert told == [True, True, True, 10, 3]
        assert [path.name.endswith("-self") for path in own.groups()] == [True]


# --- who it is ---------------------------------------------------------------------------------------------


def identities() -> list[str]:
    import os

    from sandbox.limits.cgroup import _identity

    mine = _identity()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, _identity().encode())
        os._exit(0)
    os.close(write)
    os.wait()
    return [mine, _identity(), os.read(read, 100).decode(), str(os.getpid())]


def test_the_name_identifies_the_process(runner_as_user: Caller) -> None:
    first, again, child, pid = elsewhere.run(runner_as_user, identities)
    assert first == again and first.startswith(f"{pid}-")
    assert child.split("-")[0] != pid and all(part.isdecimal() for part in child.split("-"))


def test_a_program_whose_name_looks_like_its_status(runner_as_user: Caller) -> None:
    """/proc/PID/stat holds the command's name unescaped, with brackets and spaces."""

    def named() -> list[str]:
        import ctypes
        import os

        from sandbox.limits.cgroup import _identity

        plain = _identity()
        ctypes.CDLL(None).prctl(15, b"a) Z 1 2 (b) 3", 0, 0, 0)
        with open("/proc/self/comm", encoding="ascii") as file:
            assert file.read().startswith("a) Z")
        return [plain, _identity(), str(os.getpid())]

    plain, named_so, _ = elsewhere.run(runner_as_user, named)
    assert plain == named_so
