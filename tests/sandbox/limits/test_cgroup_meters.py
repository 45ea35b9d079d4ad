"""Limits that a cgroup counts and the runner has to enforce."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.limits.cgroup import Cgroup, Counters, CpuTimeMeter, LiftedMeter, MemoryMeter
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox.limits.own_cgroups import OwnCgroups, make_own_cgroups

pytestmark = pytest.mark.both_callers

CORES = os.cpu_count() or 1


class Counted(Cgroup):
    """A group with the counters and the event that a test sets."""

    def __init__(self) -> None:
        super().__init__([])
        self.used: float | None = 0.0
        self.kills: int | None = 0
        self.event: int | None = None
        self.gone: tuple[str, ...] = ()

    def lifted(self) -> tuple[str, ...]:
        return self.gone

    def cpu(self) -> float | None:
        return self.used

    def counters(self) -> Counters:
        return Counters(oom_kills=self.kills)

    def oom_event(self) -> int | None:
        if self.event is None:
            self.event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self.event if self.event >= 0 else None


# --- processor time ----------------------------------------------------------------------------------------


def test_the_next_look_is_when_it_could_be_used_up() -> None:
    group = Counted()
    before = time.monotonic()
    meter = CpuTimeMeter(group, 10.0)
    assert before + 10.0 / CORES <= meter.due <= time.monotonic() + 10.0 / CORES
    group.used = 4.0
    now = meter.due
    assert meter.look({}, now) is None
    assert meter.due == pytest.approx(now + 6.0 / CORES)
    group.used = 9.9999
    now = meter.due
    assert meter.look({}, now) is None
    assert meter.due == pytest.approx(now + 0.02)  # not more often than that, however little is left
    group.used = 10.0
    assert meter.look({}, meter.due) == "cpu_time"


def test_no_look_before_it_is_due() -> None:
    """A plugin that wakes the loop by other means cannot cause extra looks."""
    group = Counted()
    meter = CpuTimeMeter(group, 10.0)
    group.used = 1000.0
    assert meter.look({}, meter.due - 0.001) is None
    assert meter.look({}, meter.due) == "cpu_time"


def test_a_used_up_limit_stays_used_up() -> None:
    group = Counted()
    meter = CpuTimeMeter(group, 1.0)
    group.used = 5.0
    assert meter.look({}, meter.due) == meter.look({}, meter.due) == "cpu_time"


def test_a_tiny_limit() -> None:
    before = time.monotonic()
    meter = CpuTimeMeter(Counted(), 0.001)
    assert meter.due >= before + 0.02


def test_a_counter_that_cannot_be_read_is_read_again_soon() -> None:
    """Nothing is assumed about it: this process may just have no free descriptor."""
    group = Counted()
    meter = CpuTimeMeter(group, 1000.0)
    group.used, now = None, meter.due
    assert meter.look({}, now) is None
    assert meter.due == pytest.approx(now + 0.02)
    group.used = 1000.0
    assert meter.look({}, meter.due) == "cpu_time"


def test_a_counter_that_stays_unreadable_ends_the_plugin() -> None:
    """A handful of looks, and then nothing enforces the limit. A counter that came back starts anew."""
    group = Counted()
    meter = CpuTimeMeter(group, 1000.0)
    looks, group.used, began = 0, None, meter.due
    while (found := meter.look({}, meter.due)) is None:
        looks += 1
    assert (found, meter.why) == ("lifted", "cpu_time") and looks < 12
    assert began + 5 <= meter.due <= began + 30
    group.used = 1.0
    assert meter.look({}, meter.due) is None
    group.used = None
    assert meter.look({}, meter.due) is None


def test_it_needs_no_descriptor() -> None:
    meter = CpuTimeMeter(Counted(), 1.0)
    assert meter.interest() == {}
    meter.close()


# --- memory ------------------------------------------------------------------------------------------------


@pytest.fixture
def watched() -> Iterator[tuple[Counted, MemoryMeter]]:
    group = Counted()
    meter = MemoryMeter(group)
    yield group, meter
    meter.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(group.event or 0)


Watched = tuple[Counted, MemoryMeter]


def ready(meter: MemoryMeter) -> dict[int, int]:
    poll = select.poll()
    for fd, events in meter.interest().items():
        poll.register(fd, events)
    return dict(poll.poll(0))


def test_without_an_event_the_counter_is_not_read(watched: Watched) -> None:
    group, meter = watched
    assert meter.look({}, time.monotonic()) is None  # the first, for what came before the event was asked for
    group.kills = 1
    assert meter.due == math.inf
    assert ready(meter) == {}
    assert meter.look({}, time.monotonic()) is None
    assert meter.look({0: select.POLLIN}, time.monotonic()) is None  # somebody else's descriptor


def test_an_oom_kill_before_the_event_was_registered(watched: Watched) -> None:
    group, meter = watched
    group.kills = 1
    assert meter.due == 0.0
    assert meter.look({}, time.monotonic()) == "memory"


def test_an_event_and_the_counter(watched: Watched) -> None:
    group, meter = watched
    assert group.event is not None
    os.eventfd_write(group.event, 1)
    group.kills = 1
    assert meter.look(ready(meter), 5.0) == "memory"
    assert ready(meter) == {}  # taken: it does not wake the loop for ever


def test_the_counter_comes_after_the_event(watched: Watched) -> None:
    group, meter = watched
    assert group.event is not None
    os.eventfd_write(group.event, 3)
    assert meter.look(ready(meter), 5.0) is None
    assert 5.0 < meter.due < 5.1
    assert meter.look({}, meter.due - 0.001) is None
    group.kills = 1
    assert meter.look({}, meter.due - 0.001) is None  # not yet
    assert meter.look({}, meter.due) == "memory"


def test_an_event_without_a_kill(watched: Watched) -> None:
    """The kernel found memory after all. The meter stops looking after a while."""
    group, meter = watched
    assert group.event is not None
    os.eventfd_write(group.event, 1)
    now, looks = 5.0, 0
    assert meter.look(ready(meter), now) is None
    while meter.due < math.inf:
        now, looks = meter.due, looks + 1
        assert meter.look({}, now) is None
        assert looks < 1000
    assert now - 5.0 >= 0.5  # long enough for a kernel that is busy killing
    os.eventfd_write(group.event, 1)  # and the next event begins anew
    assert meter.look(ready(meter), now) is None
    assert meter.due < math.inf


def test_v2_needs_no_event() -> None:
    group = Counted()
    group.event = -1
    meter = MemoryMeter(group)
    assert meter.interest() == {} and meter.due == math.inf
    group.kills = 1
    assert meter.look({}, 5.0) is None  # nothing is left to be ended
    meter.close()


def test_without_a_memory_controller() -> None:
    group = Counted()
    meter = MemoryMeter(group)
    assert group.event is not None
    os.eventfd_write(group.event, 1)
    group.kills = None
    assert meter.look(ready(meter), 5.0) is None
    meter.close()


# --- with a real group -------------------------------------------------------------------------------------


@pytest.fixture
def inside(runner_as: Caller, nothing_left: None) -> Iterator[OwnCgroups]:
    with make_own_cgroups(runner_as) as own:
        yield own


def out_of_memory(size: int) -> Any:
    """A child of a member takes `size` bytes: returns the meter's answer, and the processes that live."""
    import os
    import select
    import time

    from sandbox.limits.cgroup import MemoryMeter, make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    descriptors = len(os.listdir("/proc/self/fd"))
    found = survey(read_mounts())
    site = found.site("memory")
    if site is None:
        return None
    with make_cgroup(found.sites, Limits(memory=24 << 20)) as cgroup:
        meter = MemoryMeter(cgroup)
        with cgroup.open_handles() as handles:
            pid = os.fork()
            if pid == 0:
                for handle in handles.files:
                    os.write(handle, b"0")
                child = os.fork()
                if child == 0:
                    held = bytearray(size)
                    held[0] = 1
                    os._exit(0)
                os.waitpid(child, 0)
                time.sleep(0 if size < 24 << 20 else 1000)
                os._exit(5)
        over = os.pidfd_open(pid)
        verdict = None
        until = time.monotonic() + 30
        while verdict is None and time.monotonic() < until:
            poll = select.poll()
            poll.register(over, select.POLLIN)
            for fd, events in meter.interest().items():
                poll.register(fd, events)
            ready = dict(poll.poll(10))
            verdict = meter.look(ready, time.monotonic())
            if over in ready and verdict is None:
                break
        alive = not select.select([over], [], [], 0)[0]
        cgroup.kill()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(over)
        kills = cgroup.counters().oom_kills
        meter.close()
    return [site.version, verdict, alive, status, kills, len(os.listdir("/proc/self/fd")) - descriptors]


def test_memory_runs_out_for_a_child_only(inside: OwnCgroups) -> None:
    told = elsewhere.run(inside.caller, out_of_memory, 64 << 20)
    if told is None:
        pytest.skip("there is no memory controller here")
    version, verdict, alive, status, kills, left = told
    if version == 1:  # the kernel killed the child alone: we have to end the rest
        assert (verdict, alive, kills) == ("memory", True, 1)
    else:  # it has ended all of them
        assert (verdict, alive) == (None, False)
        assert kills >= 1
    assert (status, left) == (-9, 0)


def test_memory_suffices(inside: OwnCgroups) -> None:
    told = elsewhere.run(inside.caller, out_of_memory, 8 << 20)
    if told is None:
        pytest.skip("there is no memory controller here")
    assert told[1:] == [None, False, 5, 0, 0]


def spinning() -> Any:
    """Two processes that compute, and when the meter ends them."""
    import os
    import time

    from sandbox.limits.cgroup import CpuTimeMeter, make_cgroup
    from sandbox.limits.cgroup_survey import survey
    from sandbox.paths.mounts import read_mounts
    from sandbox.spec import Limits

    found = survey(read_mounts())
    if found.counts_cpu is None:
        return None
    with make_cgroup((found.counts_cpu,), Limits()) as cgroup:
        meter = CpuTimeMeter(cgroup, 0.4)
        with cgroup.open_handles() as handles:
            pid = os.fork()
            if pid == 0:
                for handle in handles.files:
                    os.write(handle, b"0")
                os.fork()
                while True:
                    pass
        looks, until = 0, time.monotonic() + 50
        while time.monotonic() < until:
            time.sleep(max(0.0, meter.due - time.monotonic()))
            looks += 1
            if meter.look({}, time.monotonic()) is not None:
                break
        used = cgroup.cpu()
        cgroup.kill()
        os.waitpid(pid, 0)
        return [used, looks]


def test_processor_time_of_all_of_them(inside: OwnCgroups) -> None:
    told = elsewhere.run(inside.caller, spinning)
    if told is None:
        pytest.skip("nobody counts processor time here")
    used, looks = told
    assert 0.4 <= used < 20
    assert looks < 200


# --- limits that were lifted -------------------------------------------------------------------------------


def test_limits_that_somebody_lifted() -> None:
    group = Counted()
    meter = LiftedMeter(group)
    now = meter.due
    assert meter.look({}, now) is None and now < meter.due
    group.gone = ("memory", "pids")
    assert meter.look({}, now) is None  # it has just looked
    between = (now + meter.due) / 2
    assert (meter.look({}, between), meter.why) == ("lifted", "memory, pids")
    assert meter.due > between + 1
