"""When a runner is killed its plugin ends too, and the next runner removes the cgroups that are left.

The tests run in cgroups of their own, delegated to the caller, apart from all other runners.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Caller, descendants, lacks, vanished
from tests.limits.altered import altered
from tests.limits.cage import PREFER, SH, Box, Running
from tests.sandbox.limits import own_cgroups
from tests.sandbox.limits.own_cgroups import OwnCgroups, make_own_cgroups
from tests.tables import REPEAT, wait_for

LIMITS = ("--memory", "64M", "--pids", "20", "--cpu", "1")
SLEEPS = f"{SH}setsid sleep 1000 & echo ready; sleep 1000\n"
WAITS = f"{SH}echo ready; read word; exit 3\n"


class SeparateBox(Box):
    """A box whose runners are in cgroups of their own."""

    def __init__(self, caller: Caller, folder: Path, own: OwnCgroups) -> None:
        super().__init__(caller, folder)
        self.own = own

    def groups(self) -> list[Path]:
        """All cgroups but the leaf that a runner may have moved to."""
        return [path for path in self.own.groups() if not path.name.endswith("-self")]

    def used_directories(self) -> list[Path]:
        """Where a runner with these limits makes cgroups, and therefore sweeps."""
        with self.running(WAITS, *LIMITS, name="asked") as running:
            own = f"runner-{running.process.pid}-"
            return [path.parent for path in self.groups() if path.name.startswith(own)]

    def next_runner(self) -> None:
        """Start another runner, which does its work and leaves nothing behind."""
        result = self.run(f"{SH}exit 3\n", *LIMITS, name="next")
        assert result.status == 3, result

    def swept(self) -> bool:
        """Whether the next runner removes all leftovers, or the one after: exiting takes a moment."""

        def clean() -> bool:
            self.next_runner()
            return self.groups() == []

        return wait_for(clean)


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Iterator[SeparateBox]:
    """Once as root, once as a user to whom the cgroups were delegated."""
    with make_own_cgroups(runner_as) as own:
        yield SeparateBox(own.caller, plugin_dir, own)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def kill_runner(running: Running) -> None:
    running.process.kill()
    running.process.wait()


# --- names -------------------------------------------------------------------------------------------------


def test_cgroups_are_named_after_their_runner(box: SeparateBox) -> None:
    with box.running(WAITS, *LIMITS) as running:
        pid = running.process.pid
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
        groups = box.groups()
        assert {path.name for path in groups} == {f"runner-{pid}-{started}-0"}
        members = [set((path / "cgroup.procs").read_text().split()) for path in groups]
        assert all(str(running.pid) in each for each in members)
        assert not any(str(running.family["init"]) in each for each in members)
    assert box.groups() == []


# --- runners killed at any moment --------------------------------------------------------------------------

# The runner kills itself before or after the n-th call of a function that does not fail.
KILLS_ITSELF = """
import os, signal
import fcntl
import sandbox.limits.cgroup, sandbox.spawn.spawner, sandbox.cell.cell

def dies(module, name, nth=1, before=False, only=lambda *words: True):
    real, count = getattr(module, name), [0]
    def last(*words, **more):
        count[0] += bool(only(*words))
        if before and count[0] == nth and only(*words): os.kill(os.getpid(), signal.SIGKILL)
        try:
            result = real(*words, **more)
        except OSError:
            count[0] -= bool(only(*words))
            raise
        if count[0] == nth and only(*words): os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, last)

def group(path, *_):
    return "/runner-" in str(path)

{when}
"""
MOMENTS = {
    "made": "dies(os, 'mkdir', only=group)",
    "locked": "dies(fcntl, 'flock', only=lambda fd, _: group(os.readlink(f'/proc/self/fd/{fd}')))",
    "the second made": "dies(os, 'mkdir', nth=2, only=group)",
    "limited": "dies(sandbox.limits.cgroup, 'write_once', only=group)",
    "just before the launch": "dies(sandbox.spawn.spawner, 'spawn', before=True)",
    "just launched": "dies(sandbox.spawn.spawner, 'spawn')",
    "the plugin is gone": "dies(sandbox.cell.cell.Cell, 'wait')",
    "half removed": "dies(os, 'rmdir', nth=1, only=group)",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_runner_that_dies_at_a_certain_moment(
    box: SeparateBox, runner_as: Caller, moment: str, stack: ExitStack
) -> None:
    if moment == "the second made" and len(box.own.directories) == 1:
        # With one hierarchy there is one cgroup for the plugin. Only a runner that is alone in its cgroup
        # makes a second: first the leaf it moves to.
        own = stack.enter_context(make_own_cgroups(runner_as, alone=True))
        if not own.leaves:
            pytest.skip("a runner makes only one cgroup here")
        box = SeparateBox(own.caller, box.folder, own)
    before = descendants()
    sane = box.caller
    box.caller = altered(sane, KILLS_ITSELF.format(when=MOMENTS[moment]))
    folder = box.plugin(f"{SH}exit 0\n" if moment in ("the plugin is gone", "half removed") else SLEEPS)
    with box._started(folder, LIMITS, PREFER, {"stdin": subprocess.DEVNULL}) as running:
        assert running.process.wait(60) == -signal.SIGKILL
        assert vanished(descendants() - before), "something has outlived its runner"
    alone = box.own.leaves
    box.caller = stack.enter_context(own_cgroups.beside_a_host(box.own, runner_as)) if alone else sane
    left = box.groups()
    if moment != "half removed":  # there may have been only one
        assert left, "nothing was left, so the test proves nothing"
    assert box.swept()


def test_a_runner_that_is_killed_at_any_moment(box: SeparateBox) -> None:
    """The kills are spread over a whole launch."""
    folder, before = box.plugin(SLEEPS), descendants()
    box.next_runner()
    seen: Counter[int] = Counter()
    began = time.monotonic()
    with box._started(folder, LIMITS, PREFER, {}) as running:
        assert running.line() == "ready"
        took = time.monotonic() - began
        kill_runner(running)
    kills = 12 * REPEAT
    # Four launches at once take longer than one, and all the more if the machine has become busy meanwhile.
    for spread in (1.2, 5.0, 20.0, 80.0):
        moments = [took * spread * number / kills for number in range(kills)]
        random.Random(5).shuffle(moments)
        for start in range(0, len(moments), 4):
            with ExitStack() as stack:
                running_at = sorted(
                    (
                        (moment, stack.enter_context(box._started(folder, LIMITS, PREFER, {})))
                        for moment in moments[start : start + 4]
                    ),
                    key=lambda pair: pair[0],
                )
                began = time.monotonic()
                for moment, each in running_at:
                    time.sleep(max(0.0, began + moment - time.monotonic()))
                    kill_runner(each)
            assert vanished(descendants() - before), "something has outlived its runner"
            seen[len(box.groups())] += 1
        if any(seen):
            break
    # Each batch of runners has swept the leftovers of the batch before. Those of the last may remain.
    assert any(seen), f"no runner had cgroups when it was killed: {seen}"
    assert box.swept()


# --- which cgroups are swept -------------------------------------------------------------------------------


def test_cgroups_of_a_living_runner_are_not_swept(box: SeparateBox) -> None:
    with box.running(WAITS, *LIMITS) as running:
        theirs = box.groups()
        assert len(theirs) >= 1
        for _ in range(3):
            box.next_runner()
        assert box.groups() == theirs
        assert all(str(running.pid) in (path / "cgroup.procs").read_text().split() for path in theirs)
        running.say("end")
        assert running.end().status == 3
    assert box.groups() == []


def test_an_init_that_outlives_its_runner_keeps_its_cgroups(box: SeparateBox, plugin_dir: Path) -> None:
    """The init ends soon after its runner, but a new runner may start before that. Here it is frozen."""
    if reason := lacks("root"):
        pytest.skip(reason)
    with own_cgroups.freezer(plugin_dir) as freezer:
        with box._started(box.plugin(SLEEPS), LIMITS, PREFER, {}) as running:
            assert running.line() == "ready"
            theirs, family = box.groups(), running.family
            freezer.freeze(family["init"])
            kill_runner(running)
            box.next_runner()
            assert box.groups() == theirs, "cgroups in use were removed"
            assert all(Path(f"/proc/{pid}").exists() for pid in family.values())
            freezer.thaw()
        assert box.swept()


def make_cgroup(box: SeparateBox, path: Path) -> Path:
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, box.caller.uid, box.caller.uid)
        os.chown(path / "cgroup.procs", box.caller.uid, box.caller.uid)
    return path


def leave_cgroups(box: SeparateBox, *names: str) -> list[Path]:
    """Make cgroups as killed runners leave them, in every hierarchy they used."""
    return [make_cgroup(box, directory / name) for directory in box.used_directories() for name in names]


@pytest.fixture
def sleeper(box: SeparateBox) -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """sleeper(group): start a process of the caller in a cgroup."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(group: Path) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([*box.caller.prefix, "/bin/sleep", "1000"]))
        comm = Path(f"/proc/{begun[-1].pid}/comm")
        assert wait_for(lambda: comm.read_text() == "sleep\n")
        (group / "cgroup.procs").write_text(str(begun[-1].pid))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.wait()


def test_cgroups_with_other_names_are_not_swept(
    box: SeparateBox, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    names = ("other", "runner", "runner-service", "runner-7-concurrent-0", "a-runner-1-2-3")
    foreign = leave_cgroups(box, *names)
    ours = leave_cgroups(box, "runner-4000000-77-0", "runner-4000000-77-12")
    process = sleeper(foreign[2])
    box.next_runner()
    assert all(path.exists() for path in foreign) and process.poll() is None
    assert not any(path.exists() for path in ours)


def test_processes_in_a_leftover_cgroup_are_killed(
    box: SeparateBox, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """Without a cage a plugin can outlive its killed runner, until the next runner kills it."""
    processes = [sleeper(path) for path in leave_cgroups(box, "runner-4000000-77-0")]
    box.next_runner()
    assert [process.wait(30) for process in processes] == [-signal.SIGKILL] * len(processes)
    assert box.swept()


def test_the_next_runner_kills_a_daemon_without_a_cage(box: SeparateBox) -> None:
    """Its runner is dead, so the next runner has to kill it."""
    folder = box.plugin(f"{SH}setsid sleep 1000 <&- >&- 2>&- & echo ready; sleep 1000\n")
    manifest = folder / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    policy = PREFER.replace("version = 1\n", 'version = 1\nunsandboxed = "allow"\n')
    before = descendants()
    with box._started(folder, LIMITS, policy, {}) as running:
        assert running.line() == "ready"
        kill_runner(running)
    daemons = descendants() - before
    assert daemons, "the daemon ended by itself, so the test proves nothing"
    box.next_runner()
    assert vanished(daemons)
    assert box.swept()


def test_eight_runners_sweep_at_once(box: SeparateBox) -> None:
    """All of them sweep the same leftovers, and none sweeps the cgroups of another."""
    folder, directories = box.plugin(WAITS), box.used_directories()
    for number in range(12):
        for directory in directories:
            make_cgroup(box, directory / f"runner-4000000-77-{number}")
    with ExitStack() as stack:
        running = [stack.enter_context(box._started(folder, LIMITS, PREFER, {})) for _ in range(8)]
        assert [each.line() for each in running] == ["ready"] * 8
        # By pid, not by name: a cgroup swept before it was locked is made again with the next number.
        owners = Counter(int(path.name.split("-")[1]) for path in box.groups())
        assert set(owners) == {each.process.pid for each in running}  # no leftovers
        assert len(set(owners.values())) == 1  # each has the same number of cgroups
        for each in running:
            each.say("end")
        assert [each.end().status for each in running] == [3] * 8
    assert box.groups() == []


# --- v2: the runner's own leaf -----------------------------------------------------------------------------


def test_the_next_runner_removes_the_leaf_of_a_dead_runner(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    """A runner that is alone in a delegated cgroup moves to a leaf. It cannot remove that leaf: the next
    runner does."""
    with make_own_cgroups(runner_as, alone=True) as own:
        box = SeparateBox(own.caller, plugin_dir, own)
        box.next_runner()
        leaves = [path.name for path in own.groups()]
        assert len(leaves) == own.leaves
        assert all(re.fullmatch(r"runner-\d+-\d+-self", name) for name in leaves)
        with own_cgroups.beside_a_host(own, runner_as) as box.caller:
            box.next_runner()
        assert own.groups() == []
