"""From what was prepared to what runs: which clocks and meters there are, and that nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.launch.start import clocks_of
from runner.launch.wait import Clocks
from sandbox.spec import Limits
from tests import elsewhere
from tests.conftest import Caller
from tests.limits.cage import PREFER, Box, by_cgroup
from tests.tables import one_case


def test_clocks_count_from_the_start_of_the_invocation() -> None:
    assert clocks_of(Limits(), 100.0) == Clocks()
    limits = Limits(deadline=5.0, launch=2.0, teardown=3.0, handshake=1.0, call=1.0, idle=1.0)
    # How long it may take to end is counted from when it is asked to.
    assert clocks_of(limits, 100.0) == Clocks(deadline=105.0, launch=102.0, teardown=3.0)


def confined(given: dict[str, Any]) -> dict[str, Any]:
    """Prepare and start, as `runner exec` does, and look at what there is."""
    import os
    import resource
    import time
    from contextlib import contextmanager, suppress

    from runner.launch import start
    from runner.launch.acquire import acquire
    from runner.launch.plan import plan
    from runner.launch.prepare import decide
    from runner.launch.read import load
    from runner.launch.rehearse import rehearse
    from runner.launch.sources import Sources
    from runner.launch.stages import Invocation, Stopwatch
    from runner.launch.stdio import connect_caller
    from runner.outcome import Failure
    from sandbox.limits.cgroup import Cgroup
    from sandbox.spawn.order import CgroupHandles, SpawnError
    from sandbox.spec import Limits, Overrides

    handles = Cgroup.open_handles

    errors, saved = os.pipe(), [os.dup(fd) for fd in (0, 1, 2)]  # `runner exec` gives 0 and 1 away
    os.set_blocking(errors[0], False)
    bounds: list[Any] = []
    real: Any = getattr(start, "launch")  # noqa: B009 -- imported there, not exported

    @contextmanager
    def nowhere(self: Cgroup) -> Iterator[CgroupHandles]:
        with handles(self) as opened:
            null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, opened.files[-1], inheritable=False)
            os.close(null)
            yield opened._replace(unified=-1)  # not born there: it has to go through the file

    def noted(*words: Any, **options: Any) -> Any:
        bounds.append(words[3])
        return real(*words, **options)

    setattr(start, "launch", noted)  # noqa: B010
    invocation = Invocation(
        given["folder"],
        policy=given["policy"],
        state_dir=given["state"],
        overrides=Overrides(limits=Limits(**given["limits"])),
    )
    if given["how"] == "a file to nowhere":
        Cgroup.open_handles = nowhere  # type: ignore[method-assign]
    with suppress(Failure):  # what is opened once stays open, and is no leak
        rehearse(invocation, os.environ)
    before = len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    result: dict[str, Any] = {}
    watch = Stopwatch()
    os.dup2(errors[1], 2)
    try:
        decided = decide(load(invocation, watch), os.environ, watch)
        with (
            Sources() as sources,
            acquire(plan(decided, os.environ, watch, sources), os.environ, sources) as acquired,
            start.start(
                acquired, started, lambda acquired: connect_caller(acquired.planned.plan.limits)
            ) as found,
        ):
            result |= {
                "meters": [type(meter).__name__ for meter in found.meters],
                "relay": found.plumbing.counter is not None,
                "clock": found.clocks.deadline and found.clocks.deadline - started,
                "init's": bounds[0].deadline and bounds[0].deadline - started,
                "own stderr": found.plumbing.ways[2] == "direct",
                "cpu": [soft for kind, soft, _ in bounds[0].rlimits if kind == resource.RLIMIT_CPU],
                "grouped": bounds[0].cgroup is not None,
                "groups": [group.path for group in acquired.cgroup.groups] if acquired.cgroup else [],
                "source": None if found.plumbing.counter is None else found.plumbing.counter.end,
            }
            if given["how"] == "accident":
                raise KeyError("ours")
            if given["how"] == "ends":
                result["code"] = found.cell.wait().code  # and nobody has looked at any meter
            result["there"] = all(os.path.exists(path) for path in result["groups"])
    except Failure as failure:
        outcome = failure.outcome
        result["failure"] = [outcome.code, outcome.phase, outcome.cause, outcome.message]
    except SpawnError as error:
        result["not started"] = error.stage
    except KeyError:
        result["accident"] = True
    finally:
        for fd, copy in enumerate(saved):
            os.dup2(copy, fd)
    result["left"] = [path for path in result.get("groups", []) if os.path.exists(path)]
    result["descriptors"] = len(os.listdir("/proc/self/fd")) - before
    try:
        result["stderr"] = os.read(errors[0], 65536).decode()
    except BlockingIOError:
        result["stderr"] = ""
    return result


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Box:
    runner_as.give(plugin_dir)
    return Box(runner_as, plugin_dir)


SLEEPS = "#!/bin/sh\nexec sleep 1000\n"
WRITES = "#!/bin/sh\necho one >&2; echo two >&2; exit 3\n"


def look(box: Box, code: str = SLEEPS, how: str = "", write: bool = False, **limits: Any) -> dict[str, Any]:
    folder = box.plugin(code, write=("${state_dir}",) if write else ())
    given = {
        "folder": str(folder),
        "policy": box.policy_options(PREFER)[1],
        "state": str(box.folder / "state"),
        "limits": limits,
        "how": how,
    }
    told: dict[str, Any] = elsewhere.run(box.caller, confined, given)
    assert told["left"] == [] and told["descriptors"] == 0, told
    return told


def test_without_limits(box: Box) -> None:
    told = look(box)
    assert (told["meters"], told["relay"], told["grouped"]) == (["NameLookups", "LazyMeter"], False, False)
    assert told["clock"] is None and told["init's"] is None
    assert told["own stderr"] and told["cpu"] == []


def test_a_meter_for_each_limit_that_has_to_be_looked_at(box: Box) -> None:
    told = look(
        box,
        memory=256 << 20,
        pids=50,
        cpu=1.0,
        cpu_time=9.0,
        output=1000,
        disk=1 << 20,
        open_files=64,
        write=True,
    )
    expected = {"NameLookups", "Relay", "DiskMeter"}
    expected |= {"MemoryMeter", "LiftedMeter"} if by_cgroup(box, "memory") else set()
    expected |= {"CpuTimeMeter"} if by_cgroup(box, "cpu_time") else set()
    expected.add("SocketMeter")
    # Two are for what the machine shares, and for pages that nobody counts.
    assert sorted(told["meters"]) == sorted([*expected, "LazyMeter", "LazyMeter"])
    assert told["grouped"] is by_cgroup(box, "memory")
    assert told["there"]
    # The kernel's own limit of processor time is the second clock where there is a first.
    assert told["cpu"] == [10 if by_cgroup(box, "cpu_time") else 9]


@one_case("limit", ["output", "output_lines"])
def test_stderr_passes_through_us_only_where_it_is_limited(box: Box, limit: str) -> None:
    limits: dict[str, Any] = {limit: 1000}
    told = look(box, **limits)
    assert told["relay"] and not told["own stderr"]
    assert told["source"] == -1  # our copy of the plugin's end is closed, or the pipe would never end


def test_the_inits_clock_is_the_second(box: Box) -> None:
    told = look(box, deadline=1000.0)
    assert told["clock"] == pytest.approx(1000.0)
    assert told["clock"] < told["init's"] < told["clock"] + 2  # and still holds what was promised


def test_an_accident_of_ours_leaves_nothing(box: Box) -> None:
    told = look(box, how="accident", memory=256 << 20, output=1000, disk=1 << 20, deadline=1000.0, write=True)
    assert told["accident"]


def test_a_folder_that_is_full_already(box: Box) -> None:
    state = box.folder / "state"
    fills = "import os\nopen(os.environ['RUNNER_STATE_DIR'] + '/much', 'wb').write(b'x' * (64 << 10))\n"
    filled = box.run(fills, "--state-dir", str(state), write=("${state_dir}",))
    assert filled.status == 0, filled
    told = look(box, disk=16 << 10, write=True)
    code, phase, cause, message = told["failure"]
    assert (code, phase, cause) == ("policy_denied", "plan", "disk")
    assert "16 KiB" in message and str(state) in message
    assert "meters" not in told  # nothing was started
    assert "failure" not in look(box, disk=1 << 20, write=True)  # the control


def test_what_nobody_has_looked_at_is_passed_on(box: Box) -> None:
    """The plugin may end before anybody has looked: what it said then is not lost."""
    told = look(box, WRITES, how="ends", output=1000)
    assert told["code"] == 3
    assert told["stderr"] == "one\ntwo\n"


def test_without_a_relay_it_is_the_same(box: Box) -> None:
    assert look(box, WRITES, how="ends")["stderr"] == "one\ntwo\n"


def test_who_is_not_in_its_groups_is_not_started(box: Box) -> None:
    """Whatever went wrong on the way there: what the kernel says counts."""
    if not by_cgroup(box, "memory"):
        pytest.skip("there are no groups here")
    told = look(box, how="a file to nowhere", memory=256 << 20)
    assert told.get("not started") == "be found in its cgroups", told
    assert "meters" not in told
