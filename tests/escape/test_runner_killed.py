"""SIGKILL of the runner at any moment of a launch leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import Caller, descendants, vanished
from tests.escape.cage import ProbeCage, make_cage, sandbox_table
from tests.tables import REPEAT

# For each of the two callers, spread evenly over a launch. Before a release run RUNNER_TEST_REPEAT=3: then
# the kills are some 5 ms apart.
KILLS = 36 * REPEAT
AT_ONCE = 4
# The last kills come after the plugin has printed "ready", so that some hit a running plugin. If none did,
# the machine has become busier meanwhile: then over a longer time.
STRETCHES = (1.3, 5.0, 20.0)
# Processes of a complete launch: the runner, two of bubblewrap, the plugin and its daemon.
WHOLE_TREE = 5


pytestmark = pytest.mark.machine


@pytest.fixture
def cage_with_state(runner_as: Caller, plugin_dir: Path, machine_as_before: None) -> ProbeCage:
    return make_cage(runner_as, plugin_dir)


def test_a_killed_runner_leaves_nothing_behind(cage_with_state: ProbeCage) -> None:
    cage = cage_with_state
    state = Path(f"{cage.folder}.state")
    cage.manifest(sandbox_table(write=["${state_dir}"]))
    held = str(state / "held")
    command = cage.caller.command(
        "exec", "--state-dir", str(state), cage.folder, "--", "daemon_and_wait", held
    )
    before = descendants()
    own_namespaces = _namespaces(os.getpid())
    seen: set[str] = set()
    sizes: Counter[int] = Counter()
    pids: set[int] = set()
    try:
        duration = max(_time_to_ready(cage, command, pids) for _ in range(3)) * AT_ONCE / 2
        for stretch in STRETCHES:
            moments = [stretch * duration * number / KILLS for number in range(KILLS)]
            random.Random(7).shuffle(moments)
            for start in range(0, KILLS, AT_ONCE):
                _kill_at(cage, command, moments[start : start + AT_ONCE], sizes, seen, pids)
                left = descendants() - before
                assert vanished(left), f"still there: {[_cmdline(pid) for pid in left]}"
            whole_trees = sum(n for size, n in sizes.items() if size >= WHOLE_TREE)
            if whole_trees >= 2:
                break
        seen -= own_namespaces
        assert sizes[1] >= 2, f"no kill met the runner before it had started anything: {sizes}"
        assert whole_trees >= 2, f"no kill met a plugin: {sizes}"
        assert seen, "no namespaces were seen, so their absence says nothing"
        assert not seen & _held_namespaces(before), "a namespace has outlived its processes"
        assert set(os.listdir(state)) <= {"held"}
        with open(held, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process holds it any more
        # The next launch works like the first: neither the uid nor the state directory is locked.
        assert _time_to_ready(cage, command, pids) > 0
        assert vanished(descendants() - before)
        # A killed runner leaves its cgroups. The next runner removes them.
        assert (
            cage.caller(
                "exec", "--state-dir", str(state), cage.folder, "--", "read", "/etc/passwd"
            ).returncode
            == 0
        )
        assert _cgroups(pids) == set()
    finally:
        subprocess.run(["rm", "-rf", str(state)], check=True)


def _time_to_ready(cage: ProbeCage, command: list[str], pids: set[int]) -> float:
    """Seconds until the plugin prints "ready". The runner is then killed."""
    began = time.monotonic()
    with _start(cage, command) as process:
        pids.add(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        taken = time.monotonic() - began
        process.kill()
    return taken


def _start(cage: ProbeCage, command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(cage.caller.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )


def _kill_at(
    cage: ProbeCage,
    command: list[str],
    moments: list[float],
    sizes: Counter[int],
    seen: set[str],
    pids: set[int],
) -> None:
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        runners = [stack.enter_context(_start(cage, command)) for _ in moments]
        pids |= {runner.pid for runner in runners}
        for moment, runner in sorted(zip(moments, runners, strict=True), key=lambda pair: pair[0]):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            tree = _tree(runner.pid)
            for pid in tree:
                seen |= _namespaces(pid)
            runner.send_signal(signal.SIGKILL)
            sizes[len(tree)] += 1


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _namespaces(pid: int | str) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/ns"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
    return found


def _held_namespaces(others: set[int]) -> set[str]:
    """Namespaces kept alive by a descendant, a descriptor or a mount of this process.

    Other processes of the machine are not read: the kernel reuses namespace numbers as soon as they are free.
    """
    found = {name for pid in descendants() - others for name in _namespaces(pid)}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return found | {line.split()[3] for line in mounts if " - nsfs " in line}


def _cgroups(pids: set[int]) -> set[str]:
    """Cgroups that these runners made. Other runners may be running at the same time."""
    marks = tuple(f"runner-{pid}-" for pid in pids)
    return {
        os.path.join(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(marks) and not name.endswith("-self")
    }


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return "?"
