"""A runner is killed: its plugin is gone with it, and the next runner removes the groups it has left.

All of it in a pen, delegated to the caller: what is left here nobody else sweeps, and nobody else's is swept.
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
from tests.sandbox.limits.own_cgroups import Pen, pen
from tests.tables import REPEAT, wait_for

LIMITS = ("--memory", "64M", "--pids", "20", "--cpu", "1")
SLEEPS = f"{SH}setsid sleep 1000 & echo ready; sleep 1000\n"
WAITS = f"{SH}echo ready; read word; exit 3\n"


class Penned(Box):
    """A box whose runners are in a pen."""

    def __init__(self, caller: Caller, folder: Path, place: Pen) -> None:
        super().__init__(caller, folder)
        self.pen = place

    def groups(self) -> list[Path]:
        """All but the leaf a runner may have moved to itself."""
        return [path for path in self.pen.groups() if not path.name.endswith("-self")]

    def used(self) -> list[Path]:
        """Where a runner with these limits makes groups, and so sweeps."""
        with self.running(WAITS, *LIMITS, name="asked") as running:
            own = f"runner-{running.process.pid}-"
            return [path.parent for path in self.groups() if path.name.startswith(own)]

    def next_runner(self) -> None:
        """Starts, does its work and leaves nothing behind."""
        result = self.run(f"{SH}exit 3\n", *LIMITS, name="next")
        assert result.status == 3, result

    def swept(self) -> bool:
        """Whether the next runner removes all that is left; or the one after: the dead take a moment."""

        def clean() -> bool:
            self.next_runner()
            return self.groups() == []

        return wait_for(clean)


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Iterator[Penned]:
    """Once as root, once as a user to whom the pen was delegated."""
    with pen(runner_as) as place:
        yield Penned(place.caller, plugin_dir, place)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def killed(running: Running) -> None:
    running.process.kill()
    running.process.wait()


# --- names -------------------------------------------------------------------------------------------------


def test_groups_are_named_after_their_runner(box: Penned) -> None:
    with box.running(WAITS, *LIMITS) as running:
        pid = running.process.pid
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
        groups = box.groups()
        assert {path.name for path in groups} == {f"runner-{pid}-{started}-0"}
        members = [set((path / "cgroup.procs").read_text().split()) for path in groups]
        assert all(str(running.pid) in each for each in members)
        assert not any(str(running.family["init"]) in each for each in members)
    assert box.groups() == []


# --- killed at any moment ----------------------------------------------------------------------------------

# The runner ends its own life at a certain point. The n-th time, for some.
SUICIDE = """
import os, signal
import fcntl
import sandbox.limits.cgroup, sandbox.spawn.spawner, sandbox.cell.cell

def dies(module, name, nth=1, before=False, only=lambda *words: True):
    real, count = getattr(module, name), [0]
    def last(*words, **more):
        count[0] += bool(only(*words))
        if before and count[0] == nth and only(*words): os.kill(os.getpid(), signal.SIGKILL)
        result = real(*words, **more)
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
    box: Penned, runner_as: Caller, moment: str, stack: ExitStack
) -> None:
    if moment == "the second made" and len(box.pen.directories) == 1:
        # One hierarchy, one group for the plugin. A second one is made only by a runner that is alone in its
        # own: first the leaf it moves to.
        place = stack.enter_context(pen(runner_as, alone=True))
        if not place.leaves:
            pytest.skip("a runner makes one group here, and no second one")
        box = Penned(place.caller, box.folder, place)
    before = descendants()
    sane = box.caller
    box.caller = altered(sane, SUICIDE.format(when=MOMENTS[moment]))
    folder = box.plugin(f"{SH}exit 0\n" if moment in ("the plugin is gone", "half removed") else SLEEPS)
    with box._started(folder, LIMITS, PREFER, {"stdin": subprocess.DEVNULL}) as running:
        assert running.process.wait(60) == -signal.SIGKILL
        assert vanished(descendants() - before), "something has outlived its runner"
    alone = box.pen.leaves
    box.caller = stack.enter_context(own_cgroups.beside_a_host(box.pen, runner_as)) if alone else sane
    left = box.groups()
    if moment != "half removed":  # there may have been one only
        assert left, "nothing was left, so nothing can be shown"
    assert box.swept()


def test_a_runner_that_is_killed_at_any_moment(box: Penned) -> None:
    """Not only where we think it matters."""
    folder, before = box.plugin(SLEEPS), descendants()
    box.next_runner()
    seen: Counter[int] = Counter()
    began = time.monotonic()
    with box._started(folder, LIMITS, PREFER, {}) as running:
        assert running.line() == "ready"
        took = time.monotonic() - began
        killed(running)
    kills = 12 * REPEAT
    moments = [took * 1.2 * number / kills for number in range(kills)]
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
                killed(each)
        assert vanished(descendants() - before), "something has outlived its runner"
        seen[len(box.groups())] += 1
    # The runners that came after have swept up after those before; of the last ones something may be left.
    assert any(seen), f"no kill met a runner with groups: {seen}"
    assert box.swept()


# --- who is swept, and who is not --------------------------------------------------------------------------


def test_a_living_runners_groups_stay(box: Penned) -> None:
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


def test_a_init_that_outlives_its_runner_keeps_its_groups(box: Penned, plugin_dir: Path) -> None:
    """For a moment only, but a new runner may start in it. Here it is long: the cell's init is frozen."""
    if reason := lacks("root"):
        pytest.skip(reason)
    with own_cgroups.freezer(plugin_dir) as freezer:
        with box._started(box.plugin(SLEEPS), LIMITS, PREFER, {}) as running:
            assert running.line() == "ready"
            theirs, family = box.groups(), running.family
            freezer.freeze(family["init"])
            killed(running)
            box.next_runner()
            assert box.groups() == theirs, "they were in use"
            assert all(Path(f"/proc/{pid}").exists() for pid in family.values())
            freezer.thaw()
        assert box.swept()


def make(box: Penned, path: Path) -> Path:
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, box.caller.uid, box.caller.uid)
        os.chown(path / "cgroup.procs", box.caller.uid, box.caller.uid)
    return path


def leave(box: Penned, *names: str) -> list[Path]:
    """As dead runners left them, in every hierarchy they used."""
    return [make(box, directory / name) for directory in box.used() for name in names]


@pytest.fixture
def sleeper(box: Penned) -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """sleeper(group): a process of the caller's in a group."""
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


def test_what_others_have_made_stays(box: Penned, sleeper: Callable[[Path], subprocess.Popen[bytes]]) -> None:
    names = ("other", "runner", "runner-service", "runner-7-concurrent-0", "a-runner-1-2-3")
    foreign = leave(box, *names)
    ours = leave(box, "runner-4000000-77-0", "runner-4000000-77-12")
    process = sleeper(foreign[2])
    box.next_runner()
    assert all(path.exists() for path in foreign) and process.poll() is None
    assert not any(path.exists() for path in ours)


def test_what_still_runs_in_a_leftover_is_killed(
    box: Penned, sleeper: Callable[[Path], subprocess.Popen[bytes]]
) -> None:
    """A plugin without a cage, whose runner was killed: it has no right to run."""
    processes = [sleeper(path) for path in leave(box, "runner-4000000-77-0")]
    box.next_runner()
    assert [process.wait(30) for process in processes] == [-signal.SIGKILL] * len(processes)
    assert box.swept()


def test_a_daemon_without_a_cage_whose_runner_was_killed(box: Penned) -> None:
    """Nobody is left to end it, until the next runner comes."""
    folder = box.plugin(f"{SH}setsid sleep 1000 <&- >&- 2>&- & echo ready; sleep 1000\n")
    manifest = folder / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    policy = PREFER.replace("version = 1\n", 'version = 1\nunsandboxed = "allow"\n')
    before = descendants()
    with box._started(folder, LIMITS, policy, {}) as running:
        assert running.line() == "ready"
        killed(running)
    daemons = descendants() - before
    assert daemons, "it was ended by itself, so nothing can be shown"
    box.next_runner()
    assert vanished(daemons)
    assert box.swept()


def test_eight_at_once(box: Penned) -> None:
    """All of them sweep the same, and none of them the others'."""
    folder, directories = box.plugin(WAITS), box.used()
    for number in range(12):
        for directory in directories:
            make(box, directory / f"runner-4000000-77-{number}")
    with ExitStack() as stack:
        running = [stack.enter_context(box._started(folder, LIMITS, PREFER, {})) for _ in range(8)]
        assert [each.line() for each in running] == ["ready"] * 8
        # By pid, not by name: one swept between its making and its locking is made again by the next number.
        owners = Counter(int(path.name.split("-")[1]) for path in box.groups())
        assert set(owners) == {each.process.pid for each in running}  # nothing of the dead ones
        assert len(set(owners.values())) == 1  # as many groups for each
        for each in running:
            each.say("end")
        assert [each.end().status for each in running] == [3] * 8
    assert box.groups() == []


# --- v2: the runner's own leaf -----------------------------------------------------------------------------


def test_leaves_of_dead_runners_go(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> None:
    """Alone in a delegated group a runner moves out of the way. It cannot remove the leaf it is in: the next
    runner does."""
    with pen(runner_as, alone=True) as place:
        box = Penned(place.caller, plugin_dir, place)
        box.next_runner()
        leaves = [path.name for path in place.groups()]
        assert len(leaves) == place.leaves
        assert all(re.fullmatch(r"runner-\d+-\d+-self", name) for name in leaves)
        with own_cgroups.beside_a_host(place, runner_as) as box.caller:
            box.next_runner()
        assert place.groups() == []
