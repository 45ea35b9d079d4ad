"""What the doctor says of limits where this machine cannot show it: the answers of other machines.

The rest is tried for real, through the command line: tests/runner/cli/test_doctor.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.doctor import limits
from sandbox.doctor.finding import Finding
from sandbox.doctor.trial import TrialOutcome
from sandbox.limits import cgroup as cgroups
from sandbox.limits.assigned import Shares
from sandbox.limits.cgroup import Cgroup, CgroupFault
from sandbox.limits.cgroup_survey import DELEGATE, Lack, Survey, survey
from sandbox.limits.site import Hierarchy, Site
from sandbox.paths.mounts import read_mounts
from sandbox.policy.policy import LimitRule

REQUIRED = [(name, LimitRule(default=1, mode="require")) for name in limits.TRIED_LIMITS]
EVERYTHING = frozenset({"memory", "pids", "cpu", "io"})


def told(found: list[Finding]) -> dict[str, Finding]:
    return {finding.layer: finding for finding in found}


def test_every_limit_that_needs_cgroups_is_tried() -> None:
    assert limits.TRIED_LIMITS == ("memory", "pids", "cpu", "cpu_time", "io")


# --- swap ---


def needs_memory_groups() -> None:
    if survey(read_mounts()).site("memory") is None:
        pytest.skip("needs a cgroup with the memory controller")


@pytest.mark.parametrize("swap", [True, False])
def test_counted_swap_gives_no_warning(monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
    needs_memory_groups()
    for module in (cgroups, limits):
        monkeypatch.setattr(module, "has_swap", lambda: swap)
    found = told(limits.limits(REQUIRED))
    assert found["memory_limit"].status == "ok"
    assert found["swap"].status == ("ok" if swap else "info")


@pytest.mark.parametrize("swap", [True, False])
def test_uncounted_swap_gives_a_warning(monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
    """A kernel without swap accounting has no such file."""
    needs_memory_groups()
    real = cgroups.settings

    def settings(*args: object) -> Iterator[tuple[str, str, str]]:
        for controller, file, text in real(*args):  # type: ignore[arg-type]
            yield controller, file.replace("swap.max", "swap.mix").replace("memsw", "mumsw"), text

    lost = ("memory.swap.mix", "memory.mumsw.limit_in_bytes")
    monkeypatch.setattr(cgroups, "settings", settings)
    monkeypatch.setattr(limits, "_SWAP_FILES", lost)
    monkeypatch.setattr(
        cgroups, "is_optional", lambda file, error: file in lost and error.errno == errno.ENOENT and not swap
    )
    monkeypatch.setattr(limits, "has_swap", lambda: swap)
    found = told(limits.limits(REQUIRED))
    memory = found["memory_limit"]
    assert (memory.status, found["pids_limit"].status) == ("missing" if swap else "ok", "ok")
    if swap:
        assert memory.cause == "swap" and "swapoff -a" in memory.remedy and "swap is on" in memory.summary
        assert found["swap"].status == "info"


# --- what cannot be tried here ---


def machine(monkeypatch: pytest.MonkeyPatch, found: Survey) -> None:
    """A survey of another machine. Groups cannot be made there, so that is left out."""
    monkeypatch.setattr(limits, "survey", lambda mounts, move_host: found)
    monkeypatch.setattr(limits, "_try", lambda found, disks, note: note("kills", 1))


def test_controllers_that_a_launch_hands_down_are_not_handed_down_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Site(2, EVERYTHING, "/own", "0::/own", ("cpu", "io", "memory"), True)
    machine(monkeypatch, Survey((own,), (), True))
    seen: list[Survey] = []

    def ready(found: Survey, disks: object, note: object) -> None:
        seen.append(found)

    monkeypatch.setattr(limits, "in_child", lambda act: (act(None), TrialOutcome({}))[1])
    monkeypatch.setattr(limits, "_try", ready)
    found = told(limits.limits(REQUIRED))
    (tried,) = seen[0].sites
    assert (tried.controllers, tried.enable, tried.leave) == (frozenset({"pids"}), (), False)
    assert found["memory_limit"].status == found["pids_limit"].status == "ok"
    assert "enabled the controller" in found["memory_limit"].summary
    assert "handed" not in found["pids_limit"].summary


def test_the_remedy_is_the_surveys(monkeypatch: pytest.MonkeyPatch) -> None:
    lack = Lack("/user.slice is not ours: nothing was delegated", DELEGATE)
    machine(monkeypatch, Survey((), tuple((name, lack) for name in sorted(EVERYTHING)), False))
    monkeypatch.setattr(limits, "own_hierarchies", lambda mounts: ())
    for name, finding in told(limits.limits(REQUIRED)).items():
        if name in limits.LAYERS:
            assert (finding.status, finding.cause) == ("missing", "cgroup")
            assert "systemd-run --user --scope -p Delegate=yes" in finding.remedy
            assert f'mode = "prefer" under [limits.{name.removesuffix("_limit")}]' in finding.remedy
            assert finding.summary.count("nothing was delegated") == 1


def test_a_container_with_cgroup_v2_gets_the_engines_option(monkeypatch: pytest.MonkeyPatch) -> None:
    lack = Lack("/ is not ours: nothing was delegated", DELEGATE)
    machine(monkeypatch, Survey((), tuple((name, lack) for name in sorted(EVERYTHING)), True))
    own = Hierarchy(2, EVERYTHING, "/proc", "/proc", "0::/")
    monkeypatch.setattr(limits, "own_hierarchies", lambda mounts: (own,))
    assert told(limits.limits(REQUIRED))["memory_limit"].cause == "cgroup"  # the control: it can be written

    class ReadOnly:
        f_flag = 1

    monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly)
    found = told(limits.limits(REQUIRED))["memory_limit"]
    assert found.cause == "read_only" and "Delegate=yes" not in found.remedy
    assert "--security-opt\nwritable-cgroups=true" in found.remedy and "unmask=/sys/fs/cgroup" in found.remedy


def test_files_on_no_disk_cannot_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, Survey((Site(1, EVERYTHING, "/own", "1:io:/own"),), (), True))
    monkeypatch.setattr(limits, "own_hierarchies", lambda mounts: ())
    monkeypatch.setattr(limits, "whole_disks", lambda devices: ((8, 0),))
    assert told(limits.limits(REQUIRED))["io_limit"].status == "ok"  # the control
    monkeypatch.setattr(limits, "whole_disks", lambda devices: ())
    found = told(limits.limits(REQUIRED))["io_limit"]
    assert (found.status, "not on a disk that" in found.summary) == ("missing", True)


# --- what goes wrong ---


def test_a_trial_that_does_not_end_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "in_child", lambda act: TrialOutcome({}, late=True))
    with pytest.raises(RuntimeError):
        limits.limits(())


@pytest.mark.needs("root")
def test_a_group_that_cannot_be_joined_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = survey(read_mounts())
    site = found.site("pids")
    if site is None or site.controllers != {"pids"}:
        pytest.skip("needs the pids controller in a hierarchy of its own")
    real = limits._join

    def refused(cgroup: Cgroup) -> None:
        for group in cgroup.groups:
            if group.site == site:
                raise CgroupFault(site, site.controllers, f"{limits._NO_MEMBERS}: {group.path}", errno.EACCES)
        real(cgroup)

    monkeypatch.setattr(limits, "_join", refused)
    told_of = told(limits.limits(REQUIRED))
    assert told_of["pids_limit"].status == "missing"
    assert "no process can be moved into" in told_of["pids_limit"].summary
    assert told_of["memory_limit"].status == "ok"


# --- what the whole machine shares ---


@pytest.mark.parametrize(("memory", "sockets"), [(None, 32), (64 << 20, 32), (16 << 20, 16)])
def test_the_shares_are_told(monkeypatch: pytest.MonkeyPatch, memory: int | None, sockets: int) -> None:
    whole = Shares(1.0, 400_000, 128 << 20, 8000)
    quarter = Shares(0.25, 100_000, 32 << 20, 2000)
    monkeypatch.setattr(limits, "shares_of", {1.0: whole, 0.25: quarter}.__getitem__)
    monkeypatch.setattr(limits, "unseen_machine", lambda: "")
    rules = [("memory", LimitRule(memory)), ("pids", LimitRule(20, 100))]
    found = told(limits.shares(rules, 0.25))
    assert {finding.status for name, finding in found.items() if name != "shared_memory"} == {"info"}
    files = found["shared_files"]
    assert "100000 of 400000 open and mapped files, 25% of fs.file-max" in files.summary
    assert files.summary.endswith(
        "; each of 20 processes may open 4096; each of 100 processes (the ceiling) may open 1000"
    )
    memory_told = found["shared_socket_memory"].summary
    assert f"hold {sockets} of 128 MiB, {100 * sockets / 128:g}% of net.ipv4.tcp_mem" in memory_told
    assert "2000 of 8000 connections" in found["shared_orphans"].summary
    assert "more than its memory limit and 256 MiB" in found["uncounted_memory"].summary
    monkeypatch.setattr(limits, "unseen_machine", lambda: "/proc/meminfo is of lxcfs")
    unseen = told(limits.shares(rules, 0.25))["uncounted_memory"]
    assert (unseen.status, unseen.cause) == ("degraded", "proc")
    assert "not watched: /proc/meminfo is of lxcfs" in unseen.summary


@pytest.mark.parametrize(
    ("limit", "status", "told_of"),
    [
        (None, "info", "on"),
        (1 << 20, "info", "plugins at their limit of 1 MiB"),
        (1 << 60, "degraded", "room for 0 plugins"),
    ],
)
def test_how_many_plugins_fit_is_told(limit: int | None, status: str, told_of: str) -> None:
    finding = told(limits.shares([("memory", LimitRule(limit))], 0.25))["shared_memory"]
    assert finding.status == status
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    assert f" of {total} MiB are available" in finding.summary and told_of in finding.summary
    assert (limit is None) is ("no memory limit" in finding.detail)


def test_a_machine_without_a_bound_on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "shares_of", lambda part: Shares(part, None, 1 << 30, 100))
    assert told(limits.shares((), 0.25))["shared_files"].summary.startswith("fs.file-max sets no bound")


# --- groups that the kernel has, and a login may not make ---


def test_a_login_without_delegation_is_told_so(tmp_path: Path) -> None:
    """Not that its kernel lacks them."""
    for name in ("cgroup.kill", "cgroup.freeze"):
        (tmp_path / name).touch()
    own = Hierarchy(2, frozenset(), str(tmp_path), str(tmp_path), "0::/user.slice/session-1.scope")
    trial = limits.Trial(Survey((), (), False, (own,)), ())
    for found in (limits._killing(trial), limits._freezing(trial, LimitRule())):
        assert f"no group can be made in {tmp_path}, because nothing was delegated" in found.summary
        assert "needs cgroup v2" not in found.summary
    # The control: a kernel that has neither file.
    bare = trial._replace(survey=Survey((), (), False, (own._replace(directory=f"{tmp_path}/none"),)))
    assert "needs cgroup v2 and Linux 5.14" in limits._killing(bare).summary
