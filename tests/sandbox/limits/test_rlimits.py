"""Limits that are resource limits: which, how high, and that the kernel accepts them."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from sandbox.limits.rlimits import rlimits
from sandbox.spec import Limits
from tests import elsewhere
from tests.conftest import Caller

pytestmark = pytest.mark.both_callers

HYGIENE = {
    resource.RLIMIT_CORE: (0, 0),
    resource.RLIMIT_RTPRIO: (0, 0),
    resource.RLIMIT_NICE: (0, 0),
    resource.RLIMIT_SIGPENDING: (1024, 1024),
    resource.RLIMIT_MSGQUEUE: (0, 0),
    resource.RLIMIT_MEMLOCK: (64 << 10, 64 << 10),
    resource.RLIMIT_NOFILE: (1024, 4096),
}
# Held by cgroups, by mounts, by the runner or by clocks: none of them is an rlimit.
OTHERS = Limits(
    memory=1 << 30,
    pids=64,
    cpu=0.5,
    io=1 << 20,
    tmp=1 << 20,
    shm=1 << 20,
    output=1 << 20,
    output_lines=100,
    launch=1.0,
    handshake=1.0,
    call=1.0,
    idle=1.0,
    teardown=1.0,
    deadline=1.0,
)


def table(limits: Limits, fallbacks: tuple[str, ...] = ()) -> dict[int, tuple[int, int]]:
    found = rlimits(limits, fallbacks)
    assert len({kind for kind, _, _ in found}) == len(found), "one would undo the other"
    return {kind: (soft, hard) for kind, soft, hard in found}


def test_without_any_limit() -> None:
    assert table(Limits()) == HYGIENE


def test_the_share_of_the_machine_lowers_open_files() -> None:
    def files(limits: Limits, most: int) -> tuple[int, int]:
        return next(each[1:] for each in rlimits(limits, (), most) if each[0] == resource.RLIMIT_NOFILE)

    assert [files(Limits(), most) for most in (500, 2000, 5000)] == [(500, 500), (1024, 2000), (1024, 4096)]
    assert [files(Limits(open_files=300), most) for most in (200, 400)] == [(200, 200), (300, 300)]


def test_limits_enforced_by_other_means() -> None:
    assert table(OTHERS) == HYGIENE


def test_every_limit_is_known_here() -> None:
    """A new limit is an rlimit or not, and this file says which."""
    named = {"open_files", "file_size", "disk", "cpu_time", "locked_memory", "message_queues"}
    assert {name for name, value in OTHERS._asdict().items() if value is None} == named


@pytest.mark.parametrize(
    ("limits", "kind", "value"),
    [
        (Limits(open_files=64), resource.RLIMIT_NOFILE, 64),
        (Limits(open_files=100_000), resource.RLIMIT_NOFILE, 100_000),
        (Limits(file_size=1000), resource.RLIMIT_FSIZE, 1000),
        (Limits(disk=1000), resource.RLIMIT_FSIZE, 1000),
        (Limits(file_size=1000, disk=2000), resource.RLIMIT_FSIZE, 1000),
        (Limits(file_size=2000, disk=1000), resource.RLIMIT_FSIZE, 1000),
        (Limits(locked_memory=4096), resource.RLIMIT_MEMLOCK, 4096),
        (Limits(message_queues=1 << 20), resource.RLIMIT_MSGQUEUE, 1 << 20),
        # One second more than somebody who counts all of them gives: that one comes first.
        (Limits(cpu_time=2.0), resource.RLIMIT_CPU, 3),
        (Limits(cpu_time=2.1), resource.RLIMIT_CPU, 4),
        (Limits(cpu_time=0.001), resource.RLIMIT_CPU, 2),
    ],
)
def test_a_limit_and_nothing_else(limits: Limits, kind: int, value: int) -> None:
    # Of processor time the soft one comes first: its signal says why.
    assert table(limits) == {**HYGIENE, kind: (value, value + (kind == resource.RLIMIT_CPU))}


@pytest.mark.parametrize(
    ("limits", "fallback", "kind", "value"),
    [
        (Limits(memory=1 << 20), "memory", resource.RLIMIT_DATA, 1 << 20),
        # Its own processes, with init, bwrap and init beside them.
        (Limits(pids=10), "pids", resource.RLIMIT_NPROC, 13),
        (Limits(cpu_time=2.0), "cpu_time", resource.RLIMIT_CPU, 2),
        (Limits(cpu_time=1.2), "cpu_time", resource.RLIMIT_CPU, 2),
        (Limits(cpu_time=0.001), "cpu_time", resource.RLIMIT_CPU, 1),
    ],
)
def test_a_fallback(limits: Limits, fallback: str, kind: int, value: int) -> None:
    assert table(limits, (fallback,)) == {**HYGIENE, kind: (value, value + (kind == resource.RLIMIT_CPU))}
    assert table(Limits(), (fallback,)) == HYGIENE  # nothing to fall back from
    other = "pids" if fallback == "memory" else "memory"
    if fallback != "cpu_time":
        assert table(limits, (other,)) == HYGIENE


def taken(wanted: list[list[int]]) -> list[list[int]]:
    """The kernel's values after setting them, in the order of `wanted`."""
    import resource

    from sandbox.spawn.init import set_rlimits

    set_rlimits([(kind, soft, hard) for kind, soft, hard in wanted])
    return [[kind, *resource.getrlimit(kind)] for kind, _, _ in wanted]


def test_the_kernel_takes_them(runner_as: Caller) -> None:
    full: dict[str, Any] = {
        "memory": 64 << 20,
        "pids": 500,  # fewer than a user may have on a small machine: nobody but root asks for more than that
        "cpu_time": 10.0,
        "open_files": 100,
        "file_size": 1 << 20,
        "locked_memory": 4096,
    }
    wanted = [list(each) for each in rlimits(Limits(**full), ("memory", "pids", "cpu_time"))]
    assert elsewhere.run(runner_as, taken, wanted) == wanted
