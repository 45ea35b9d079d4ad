"""Which mechanism enforces which limit on which machine, and the result where there is none."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest

from sandbox.limits import assign as limits
from sandbox.limits.assign import assign
from sandbox.limits.assigned import AssignedLimit, AssignedLimits
from sandbox.limits.cgroup_survey import CONTROLLERS, DELEGATE, Lack, Survey
from sandbox.limits.shares import shares_of
from sandbox.limits.site import Site
from sandbox.plan.layers import LayerUnavailable
from sandbox.policy.policy import LimitMode, LimitRule, Policy
from sandbox.spec import Grant, Limits, Network
from tests.sandbox import cages
from tests.tables import one_case

LACK = Lack("nobody handed us a group", "ask for one")
LACKS = tuple((name, LACK) for name in sorted(CONTROLLERS))

MEMORY, PIDS, CPU, IO = (
    Site(1, frozenset(names), f"/{names[0]}", f"{number}:{','.join(names)}:")
    for number, names in enumerate((("memory",), ("pids",), ("cpu", "cpuacct"), ("io",)), 1)
)
EMPTY = Site(2, frozenset(), "/unified", "0::")
FULL = Site(2, frozenset(CONTROLLERS), "/v2", "0::/v2")

V1 = Survey((MEMORY, PIDS, CPU, IO), (), True)
HYBRID = Survey((MEMORY, PIDS, CPU, IO, EMPTY), (), True)
V2 = Survey((FULL,), (), True)
NONE = Survey((), LACKS, False)
ROOTS_NONE = Survey((), LACKS, True)

EVERYTHING = Limits(
    memory=64 << 20,
    pids=10,
    cpu=0.5,
    cpu_time=3.0,
    io=1 << 20,
    open_files=64,
    file_size=1 << 20,
    locked_memory=4096,
    message_queues=4096,
    disk=2 << 20,
    tmp=1 << 20,
    shm=1 << 20,
    output=1000,
    output_lines=10,
    launch=1.0,
    handshake=2.0,
    call=3.0,
    idle=4.0,
    teardown=5.0,
    deadline=6.0,
)


def policy(mode: LimitMode = "prefer", **modes: LimitMode) -> Policy:
    names = ("memory", "pids", "cpu", "cpu_time", "io")
    return cages.policy(limits=tuple((name, LimitRule(mode=modes.get(name, mode))) for name in names))


def granted(limits: Limits = EVERYTHING, **changes: Any) -> Grant:
    paths = [cages.granted("/srv/data", "write")]
    return cages.grant(paths, limits=limits)._replace(**changes)


def means(found: AssignedLimits) -> dict[str, str]:
    return {limit.name: limit.enforced_by for limit in found.all}


def one(found: AssignedLimits, name: str) -> AssignedLimit:
    (limit,) = (limit for limit in found.all if limit.name == name)
    return limit


# --- where there are cgroups -------------------------------------------------------------------------------

BY_CGROUP = ("memory", "pids", "cpu", "cpu_time", "io")
BY_OTHERS = {
    **dict.fromkeys(("open_files", "file_size", "locked_memory", "message_queues"), "rlimit"),
    "disk": "runner",
    "tmp": "size of the mount",
    "shm": "size of the mount",
    **dict.fromkeys(("output", "output_lines"), "runner"),
    **dict.fromkeys(("handshake", "call", "idle"), "caller"),
    **dict.fromkeys(("launch", "teardown", "deadline"), "clock"),
}


@pytest.mark.parametrize(
    ("survey", "by", "cpu_time"),
    [
        (V1, "cgroup v1", "cgroup v1"),
        (HYBRID, "cgroup v1", "cgroup v2"),  # the empty v2 tree counts, too
        (V2, "cgroup v2", "cgroup v2"),
    ],
    ids=["v1", "hybrid", "v2"],
)
def test_every_limit_can_be_enforced(survey: Survey, by: str, cpu_time: str) -> None:
    found = assign(granted(), policy("require"), survey)
    assert means(found) == {**dict.fromkeys(BY_CGROUP, by), "cpu_time": cpu_time, **BY_OTHERS}
    assert not any(limit.degraded for limit in found.all)
    assert [limit.name for limit in found.all] == list(Limits._fields)
    assert found.fallbacks == frozenset()


def test_only_set_limits_are_assigned() -> None:
    """And open_files, which every process has."""
    found = assign(granted(Limits()), policy("require"), NONE)
    assert (means(found), found.sites, found.fallbacks) == ({"open_files": "rlimit"}, (), frozenset())
    assert means(assign(granted(Limits(pids=3)), policy(), V1)) == {
        "pids": "cgroup v1",
        "open_files": "rlimit",
    }


def test_the_source_of_each_limit() -> None:
    given = granted(Limits(pids=3, memory=1 << 20), decided_by=(("pids", "command line"),))
    found = assign(given, policy(), V1)
    assert (one(found, "pids").decided_by, one(found, "memory").decided_by) == ("command line", "policy")
    assert (one(found, "pids").requested, one(found, "pids").effective) == (3, 3)


def test_details_state_each_weakness() -> None:
    found = {each.name: each.detail for each in assign(granted(), policy(), V1).all}
    assert found["memory"] == found["pids"] == found["cpu"] == ""
    assert "synchronous writes" in found["io"]
    assert "runner" in found["cpu_time"]
    assert "stdout is passed on unread" in found["output"]
    assert one(assign(granted(), policy(), V2), "io").detail == ""


# --- where there are none ----------------------------------------------------------------------------------


def test_rlimits_as_a_fallback() -> None:
    found = assign(granted(), policy("prefer"), NONE)
    assert {name: by for name, by in means(found).items() if name in BY_CGROUP} == {
        "memory": "RLIMIT_DATA",
        "pids": "RLIMIT_NPROC",
        "cpu": "",
        "cpu_time": "RLIMIT_CPU",
        "io": "",
    }
    assert {limit.name for limit in found.all if limit.degraded} == set(BY_CGROUP)
    assert found.fallbacks == {"memory", "pids", "cpu_time"}
    assert found.sites == ()
    # Why, in words; and no number where nothing holds.
    for name in ("memory", "pids", "cpu", "io"):
        assert LACK.reason in one(found, name).detail
    assert one(found, "cpu").effective is None and one(found, "io").effective is None
    assert one(found, "memory").effective == EVERYTHING.memory
    assert one(found, "memory").detail.startswith(
        "for each process separately, and shared memory is not counted"
    )


def test_a_kernel_that_counts_all_processes_of_a_uid_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then RLIMIT_NPROC would hold the whole user to the plugin's limit."""
    for release, by in (((5, 13), ""), ((5, 14), "RLIMIT_NPROC"), ((6, 0), "RLIMIT_NPROC"), ((4, 20), "")):
        monkeypatch.setattr(limits, "_kernel_version", lambda release=release: release)
        found = assign(granted(), policy(), NONE)
        assert one(found, "pids").enforced_by == by
        assert ("pids" in found.fallbacks) is bool(by)
        assert one(found, "pids").effective == (EVERYTHING.pids if by else None)
        assert one(found, "pids").degraded


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("6.1.0-18-amd64", (6, 1)),
        ("5.14", (5, 14)),
        ("6.18.44-fc", (6, 18)),
        ("6.1+", (6, 1)),
        ("6", (6,)),
        pytest.param("5.10-rc7", (5, 10)),
    ],
)
def test_releases_as_kernels_write_them(
    monkeypatch: pytest.MonkeyPatch, release: str, expected: tuple[int, ...]
) -> None:
    name = os.uname_result(("Linux", "host", release, "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: name)
    assert limits._kernel_version() == expected


def test_the_release_of_this_machine() -> None:
    assert limits._kernel_version() >= (5, 10)  # or nothing else here works either


# --- required ----------------------------------------------------------------------------------------------


@one_case("name", BY_CGROUP)
@one_case(
    ("mode", "survey", "refused"),
    [
        ("require", NONE, True),
        ("require", ROOTS_NONE, True),
        ("delegated", NONE, False),
        ("delegated", ROOTS_NONE, True),
        ("prefer", NONE, False),
        ("prefer", ROOTS_NONE, False),
        ("require", V1, False),
        ("delegated", V2, False),
    ],
)
def test_a_required_limit_that_cannot_be_enforced(
    name: str, mode: LimitMode, survey: Survey, refused: bool
) -> None:
    given = granted(Limits(**{name: getattr(EVERYTHING, name)}))
    rules = policy("prefer", **{name: mode})
    if not refused:
        assert [limit.name for limit in assign(given, rules, survey).all] == [name, "open_files"]
        return
    with pytest.raises(LayerUnavailable) as caught:
        assign(given, rules, survey)
    assert caught.value.layer == name
    assert str(caught.value) == f"the {name} limit cannot be enforced: {LACK.reason}"
    assert caught.value.hint == f'{LACK.remedy}; or say mode = "prefer" under [limits.{name}] in the policy'


def test_a_limit_without_a_rule_is_required() -> None:
    with pytest.raises(LayerUnavailable):
        assign(granted(Limits(memory=1 << 20)), cages.policy(), NONE)


def test_each_limit_is_required_on_its_own() -> None:
    rules = policy("prefer", pids="require")
    found = assign(granted(Limits(memory=1 << 20)), rules, NONE)
    assert means(found) == {"memory": "RLIMIT_DATA", "open_files": "rlimit"}


@pytest.mark.parametrize("name", [name for name in Limits._fields if name not in BY_CGROUP])
def test_a_limit_without_a_cgroup_is_never_refused(name: str) -> None:
    found = assign(granted(Limits(**{name: getattr(EVERYTHING, name)})), policy("require"), ROOTS_NONE)
    assert not one(found, name).degraded


# --- what a launch says about it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked_by", "survey", "announced"),
    [
        ("command line", NONE, ("memory", "cpu")),
        ("manifest", NONE, ("memory", "cpu")),
        ("policy", NONE, ()),  # a default that nobody expects to work: explain, report and doctor tell it
        ("policy", ROOTS_NONE, ("memory", "cpu")),  # in a delegated unit it is expected to
        ("manifest", V2, ()),
    ],
)
def test_which_weaker_limits_are_announced(asked_by: str, survey: Survey, announced: tuple[str, ...]) -> None:
    limits = Limits(memory=64 << 20, cpu=0.5, tmp=1 << 20)
    decided = tuple((name, asked_by) for name in ("memory", "cpu", "tmp"))
    rules = policy()._replace(
        limits=tuple((name, LimitRule(getattr(limits, name), None, "prefer")) for name in ("memory", "cpu"))
    )
    found = assign(granted(limits, decided_by=decided), rules, survey)
    assert found.announced == announced
    assert found.shortfall() == ("memory by RLIMIT_DATA, cpu by nothing" if announced else "")


def test_a_ceiling_that_cut_what_was_asked_for_is_no_default() -> None:
    limits = Limits(cpu=8.0)
    rules = policy()._replace(limits=(("cpu", LimitRule(None, 8.0, "prefer")),))
    assert assign(granted(limits, decided_by=(("cpu", "policy"),)), rules, NONE).announced == ("cpu",)


# --- io needs a disk ---------------------------------------------------------------------------------------


def test_files_on_no_disk() -> None:
    limits = Limits(io=1 << 20)
    found = one(assign(granted(limits), policy(), V1, disks=()), "io")
    assert (found.enforced_by, found.effective, found.degraded) == ("", None, True)
    assert "not on a disk" in found.detail
    assert not one(assign(granted(limits), policy(), V1, disks=[(8, 0)]), "io").degraded
    with pytest.raises(LayerUnavailable, match="not on a disk that") as caught:
        assign(granted(limits), policy("require"), V1, disks=())
    assert "ask for no io limit" in caught.value.hint
    with pytest.raises(LayerUnavailable, match=LACK.reason):  # the deeper reason is told first
        assign(granted(limits), policy("require"), ROOTS_NONE, disks=())


def test_disks_may_be_an_iterator() -> None:
    """An iterator works like a list, whichever limit reads it first."""
    found = assign(granted(), policy(), V1, disks=iter([(8, 0)]))
    assert not one(found, "io").degraded


# --- the others --------------------------------------------------------------------------------------------


def test_the_file_size_is_at_most_the_disk_limit() -> None:
    found = assign(granted(Limits(file_size=100, disk=50)), policy(), V1)
    assert (one(found, "file_size").requested, one(found, "file_size").effective) == (100, 50)
    found = assign(granted(Limits(file_size=50, disk=100)), policy(), V1)
    assert one(found, "file_size").effective == 50


def test_a_disk_limit_without_a_folder() -> None:
    given = granted(Limits(disk=100), paths=(cages.granted("/srv/data", "read"),))
    assert one(assign(given, policy(), V1), "disk").enforced_by == "mounts"
    assert one(assign(granted(Limits(disk=100)), policy(), V1), "disk").enforced_by == "runner"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("open_files", resource.RLIMIT_NOFILE),
        ("locked_memory", resource.RLIMIT_MEMLOCK),
        ("message_queues", resource.RLIMIT_MSGQUEUE),
    ],
)
def test_no_plugin_gets_more_than_the_runner_has(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: int
) -> None:
    real = resource.getrlimit
    for ceiling, effective in ((100, 100), (10**9, 20000), (resource.RLIM_INFINITY, 20000)):
        monkeypatch.setattr(
            resource, "getrlimit", lambda each, top=ceiling: (1, top) if each == kind else real(each)
        )
        found = one(assign(granted(Limits(**{name: 20000})), policy(), V1), name)
        assert (found.requested, found.effective) == (20000, effective)


def test_open_files_of_all_processes_fit_into_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "shares_of", lambda part: shares_of(part)._replace(files=20_000))
    for asked, effective in (
        (Limits(pids=10), 2000),  # nobody asks: 4096 of each would be more
        (Limits(pids=10, open_files=1000), 1000),
        (Limits(pids=100, open_files=1000), 200),
        (Limits(pids=1000), 64),  # with fewer no program works: there the meter alone bounds them
        (Limits(open_files=500), 500),
    ):
        found = assign(granted(asked), policy(), V1)
        row = one(found, "open_files")
        assert (row.requested, row.effective) == (asked.open_files or 4096, effective)
        assert found.open_files == effective
        assert row.detail.startswith("lowered, for ") == (effective < row.requested)
        assert "all processes together 20000, with mapped files: 25% of fs.file-max" in row.detail
        assert one(assign(granted(asked, unsandboxed=True), policy(), V1), "open_files").detail == ""
    monkeypatch.setattr(limits, "shares_of", lambda part: shares_of(part)._replace(files=None))
    row = one(assign(granted(Limits(pids=1000)), policy(), V1), "open_files")
    assert (row.effective, row.detail) == (4096, "")


@pytest.mark.parametrize(
    ("changes", "survey", "told"),
    [
        ({}, V1, True),
        ({}, NONE, True),
        ({"seccomp": "strict"}, V1, False),  # it can make no such socket
        ({"network": Network("host")}, V1, True),
        ({"network": Network("host")}, NONE, False),  # nobody can tell whose they are
        ({"limits": Limits(memory=1 << 20)}, V1, False),  # less than the share
    ],
)
def test_memory_in_sockets_is_bounded_by_the_share(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], survey: Survey, told: bool
) -> None:
    monkeypatch.setattr(limits, "shares_of", lambda part: shares_of(part)._replace(socket_bytes=32 << 20))
    row = one(assign(granted(**{"limits": Limits(memory=64 << 20), **changes}), policy(), survey), "memory")
    assert row.detail.endswith("in sockets 32 MiB at most: 25% of net.ipv4.tcp_mem") == told


def test_without_a_cage() -> None:
    found = assign(granted(unsandboxed=True), policy(), V1)
    assert {each.name: each.detail for each in found.all if each.degraded} == dict.fromkeys(
        ("tmp", "shm", "disk"), "the plugin runs without a cage"
    )
    assert all(one(found, name).effective is None for name in ("tmp", "shm", "disk"))
    assert one(found, "memory").enforced_by == "cgroup v1"  # a group needs no cage
    assert one(found, "output").enforced_by == "runner"


@pytest.mark.parametrize("name", ["handshake", "call", "idle"])
def test_exec_leaves_protocol_clocks_to_the_caller(name: str) -> None:
    limits = Limits(**{name: getattr(EVERYTHING, name)})
    found = one(assign(granted(limits), policy("require"), NONE), name)
    assert (found.enforced_by, found.effective, found.degraded) == ("caller", None, False)


def test_a_session_enforces_protocol_clocks() -> None:
    found = assign(granted(EVERYTHING), policy("prefer"), NONE)
    held = found.for_session()
    for name in ("handshake", "call", "idle", "output", "output_lines"):
        limit = one(held, name)
        assert (limit.enforced_by, limit.effective) == ("session", getattr(EVERYTHING, name))
    changed = {old.name for old, new in zip(found.all, held.all, strict=True) if old != new}
    assert changed == {"handshake", "call", "idle", "output", "output_lines"}
    assert held.for_session() == held


# --- which groups are made ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "survey", "sites"),
    [
        (Limits(memory=1), HYBRID, (MEMORY, EMPTY)),
        (Limits(memory=1, pids=1), HYBRID, (MEMORY, PIDS, EMPTY)),
        (Limits(cpu_time=1.0), HYBRID, (EMPTY,)),
        (Limits(disk=1), HYBRID, (EMPTY,)),  # to hold it still while it is measured
        (Limits(memory=1), V1, (MEMORY, CPU)),
        (Limits(cpu=1.0), V1, (CPU,)),
        (Limits(cpu_time=1.0), V1, (CPU,)),
        (Limits(memory=1, pids=1, cpu=1.0, io=1, cpu_time=1.0), V2, (FULL,)),
        (Limits(memory=1), NONE, ()),
        (Limits(memory=1), Survey((MEMORY,), (), True), (MEMORY,)),
        (Limits(memory=1), Survey((EMPTY,), LACKS, False), ()),
        (Limits(cpu_time=1.0), Survey((MEMORY,), LACKS, False), ()),
        (Limits(), HYBRID, ()),
        (Limits(open_files=64, deadline=1.0, output=5), HYBRID, ()),
    ],
)
def test_groups_only_where_they_are_needed(limits: Limits, survey: Survey, sites: tuple[Site, ...]) -> None:
    assert assign(granted(limits), policy(), survey).sites == sites


def test_effective_values_are_the_kernels() -> None:
    found = assign(granted(Limits(memory=5000, pids=3)), policy(), V1)
    confirmed = found.with_effective({"memory": 8192, "cpu": 1.0})
    assert (one(confirmed, "memory").requested, one(confirmed, "memory").effective) == (5000, 8192)
    assert one(confirmed, "pids") == one(found, "pids")
    assert [each.name for each in confirmed.all] == ["memory", "pids", "open_files"]


def test_the_remedy_names_the_way_out() -> None:
    assert "systemd-run --user --scope -p Delegate=yes" in DELEGATE
