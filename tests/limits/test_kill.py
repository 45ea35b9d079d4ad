"""The end is bounded, and what could not be ended is said.

Who hangs in the kernel cannot be killed by anybody. A process in a frozen v1 freezer is as good: SIGKILL
takes effect when it is thawed, and not before.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import lacks
from tests.limits.altered import altered
from tests.limits.cage import PREFER, SH, Box, Result, by_cgroup, group_of
from tests.sandbox.limits import own_cgroups
from tests.sandbox.limits.own_cgroups import Freezer
from tests.tables import wait_for

TIMEOUT = ("timeout", "invocation", "deadline")

# What would take ten seconds, and two for each group, takes one here.
BRISK = """
import runner.launch.wait, sandbox.cell.cell, sandbox.limits.cgroup
runner.launch.wait.KILL_SECONDS = sandbox.cell.cell.KILL_SECONDS = 0.5
runner.launch.wait.BWRAP_KILL_SECONDS = 0.2
sandbox.limits.cgroup._REMOVE_SECONDS = 0.1
"""
# How long a runner may take then, on a machine that is slow. A runner that waits for ever takes longer.
RETURNS = 30.0


@pytest.fixture
def freezer(nothing_left: None, plugin_dir: Path) -> Iterator[Freezer]:
    if reason := lacks("root"):
        pytest.skip(reason)
    with own_cgroups.freezer(plugin_dir) as group:
        yield group


@pytest.fixture
def brisk(freezer: Freezer, box: Box) -> Box:
    """The freezer first: it is thawed when the box is looked at."""
    box.caller = altered(box.caller, BRISK)
    return box


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def is_gone(pid: int) -> bool:
    return not lives(pid)


def sweep(box: Box) -> None:
    """What was left is swept by the next runner, or by the one after: the dead take a moment."""

    def swept() -> bool:
        assert box.run(f"{SH}exit 0\n", "--memory", "64M", "--pids", "20", "--cpu", "1").status == 0
        return box.groups_left() == []

    assert wait_for(swept)


def is_incomplete(result: Result) -> list[int]:
    """Says who is left. Fails if the report and stderr do not say the same."""
    left = list(result.exit["left"])
    assert result.exit["kill_incomplete"] and left, result
    assert f"kill_incomplete: could not be killed: {', '.join(map(str, left))}" in result.err
    return left


SLEEPS = f"{SH}echo ready; sleep 1000\n"
LIMITS = ("--memory", "64M", "--pids", "20", "--cpu", "0.05")


# --- one that cannot be killed -----------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["program", "everybody"])
@pytest.mark.parametrize("limits", [LIMITS, ()], ids=["in groups", "in none"])
def test_the_runner_returns_and_says_who_is_left(
    brisk: Box, freezer: Freezer, who: str, limits: tuple[str, ...]
) -> None:
    with brisk.running(SLEEPS, *limits, "--deadline", "1h") as running:
        family = running.family
        frozen = {family["program"]} if who == "program" else set(family.values())
        groups = [running.group(name) for name in ("memory", "cpu")] if limits else []
        freezer.freeze(*frozen)
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)  # at once, then
        assert running.process.wait(RETURNS) == 143
        assert all(lives(pid) for pid in frozen), "they could be killed, so nothing was shown"
        quota = _quota(groups[1]) if groups else ""
        freezer.thaw()
        assert wait_for(lambda: not any(lives(pid) for pid in family.values()))
        result = running.end()  # not before: who lives holds our pipes open
    assert result.outcome == ("cancelled", "teardown", "signal:15")
    left = is_incomplete(result)
    assert result.exit["code"] is None
    if limits and by_cgroup(brisk, "memory"):
        init = family.pop("init")
        assert frozen - {init} <= set(left) <= set(family.values())
        assert quota in ("max", "-1") or not by_cgroup(brisk, "cpu")  # dying takes time, once it can
    else:
        assert left == [family["init"]]  # whoever waits for it waits for all
    sweep(brisk)


def _quota(group: Path) -> str:
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(FileNotFoundError):
            return (group / name).read_text().split()[0]
    return ""


def test_the_deadline_too(brisk: Box, freezer: Freezer) -> None:
    folder = brisk.plugin(SLEEPS)
    for seconds in (2, 4, 8, 16, 32):
        began = time.monotonic()
        with brisk._started(folder, ("--deadline", f"{seconds}s", *LIMITS), PREFER, {}) as running:
            if running.line() != "ready" or time.monotonic() > began + seconds / 2:
                running.process.kill()  # too busy a machine to tell
                continue
            pid = running.pid
            freezer.freeze(pid)
            assert running.process.wait(seconds + RETURNS) == 124
            assert lives(pid)
            freezer.thaw()
            assert wait_for(partial(is_gone, pid))
            result = running.end()
            assert (result.outcome, result.hits[-1:]) == (TIMEOUT, ["deadline"])
            is_incomplete(result)
            break
    sweep(brisk)


def test_a_quota_is_lifted_from_the_dying(brisk: Box, freezer: Freezer) -> None:
    """The control of the above: until then it is there."""
    if not by_cgroup(brisk, "cpu"):
        pytest.skip("there is no quota here")
    with brisk.running(SLEEPS, "--cpu", "0.05") as running:
        assert _quota(running.group("cpu")) == "5000"
        running.process.send_signal(signal.SIGTERM)


def test_a_daemon_that_cannot_be_killed(brisk: Box, freezer: Freezer) -> None:
    """The program itself ends, in order. That is bounded as well."""
    code = f"{SH}setsid sleep 1000 & echo ready; read word; exit 7\n"
    folder = brisk.plugin(code)
    with brisk._started(folder, LIMITS, PREFER, {}) as running:
        assert running.line() == "ready"
        assert wait_for(lambda: _children(running.pid))
        (daemon,), init = _children(running.pid), running.family["init"]
        freezer.freeze(daemon)
        running.say("end")
        assert running.process.wait(RETURNS) == 7
        assert lives(daemon)
        freezer.thaw()
        assert wait_for(lambda: not lives(daemon))
        result = running.end()
    left = is_incomplete(result)
    assert daemon in left if by_cgroup(brisk, "memory") else left == [init]
    assert (result.exit["code"], result.exit["ended_by"]) == (7, None)
    sweep(brisk)


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# --- without a cage ----------------------------------------------------------------------------------------


def unsandboxed(box: Box, code: str) -> tuple[Path, str]:
    """A plugin that asks for no cage, and a policy that gives it none."""
    folder = box.plugin(code)
    manifest = folder / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    return folder, PREFER.replace("version = 1\n", 'version = 1\nunsandboxed = "allow"\n')


def test_without_a_cage_it_is_said_too(brisk: Box, freezer: Freezer) -> None:
    folder, policy = unsandboxed(brisk, SLEEPS)
    with brisk._started(folder, LIMITS, policy, {}) as running:
        assert running.line() == "ready"
        (program,) = _children(running.process.pid)
        freezer.freeze(program)
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(RETURNS) == 143
        assert lives(program)
        freezer.thaw()
        assert wait_for(lambda: not lives(program))
        assert program in is_incomplete(running.end())
    sweep(brisk)


def test_without_a_cage_a_daemon_that_cannot_be_killed(brisk: Box, freezer: Freezer) -> None:
    folder, policy = unsandboxed(brisk, f"{SH}setsid sleep 1000 & echo ready; read word; exit 7\n")
    with brisk._started(folder, LIMITS, policy, {}) as running:
        assert running.line() == "ready"
        (program,) = _children(running.process.pid)
        assert wait_for(lambda: _children(program))
        (daemon,) = _children(program)
        freezer.freeze(daemon)
        running.say("end")
        assert running.process.wait(RETURNS) == 7
        assert lives(daemon)
        freezer.thaw()
        assert wait_for(lambda: not lives(daemon))
        assert daemon in is_incomplete(running.end())
    sweep(brisk)


# --- held still, as the runner itself does it --------------------------------------------------------------


def test_what_is_frozen_by_v2_dies(box: Box) -> None:
    """As the disk meter may have left it at that very moment."""
    with box.running(f"{SH}trap '' TERM; echo ready; sleep 1000\n", *LIMITS) as running:
        group = group_of(running.pid, "")
        if not group.name.startswith("runner-") or not (group / "cgroup.freeze").exists():
            running.process.kill()
            pytest.skip("there is no v2 group here that can freeze")
        pids = set(running.family.values())
        (group / "cgroup.freeze").write_text("1")
        assert wait_for(lambda: "frozen 1" in (group / "cgroup.events").read_text())
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        result = running.end()
    assert result.status == 143
    assert not result.exit["kill_incomplete"]
    assert not any(lives(pid) for pid in pids)


# --- the order ---------------------------------------------------------------------------------------------

# More than a single look can list, all of them deaf, in sessions of their own and busy under a small quota.
CROWD = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
for _ in range(15):
    if os.fork() == 0:
        os.setsid()
        while True: pass
print('ready', flush=True)
time.sleep(1000)
"""


def test_a_crowd_under_a_small_quota(box: Box) -> None:
    """Dying takes processor time. Without it being lifted, a hundredth of a core for sixteen takes long."""
    with box.running(CROWD, "--cpu", "0.05", "--pids", "30") as running:
        pids = set(running.family.values())
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        result = running.end()
    assert result.status == 143 and not result.exit["kill_incomplete"]
    assert not any(lives(pid) for pid in pids)


def test_the_init_lives_to_tell_what_was_used(box: Box) -> None:
    """It is ended from within first: whoever kills the cell's init kills the account."""
    busy = "import sys, time\nsys.stdout.write('ready\\n'); sys.stdout.flush()\n"
    busy += "while time.process_time() < 0.3: pass\nprint('done', flush=True)\ntime.sleep(1000)\n"
    with box.running(busy) as running:
        assert running.line() == "done"
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        result = running.end()
    assert result.exit["code"] in (137, 143)
    assert result.cpu >= 0.3
    assert result.usage["read"] > 0
