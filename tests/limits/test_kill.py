"""Killing a plugin takes a bounded time, and the report names processes that could not be killed.

A process that hangs in the kernel cannot be killed. A process in a frozen v1 freezer stands in for it:
SIGKILL takes effect only when it is thawed.
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
from tests.limits.cage import PREFER, SH, Box, Result, Running, by_cgroup, group_of, whole_group
from tests.sandbox.limits import own_cgroups
from tests.sandbox.limits.own_cgroups import Freezer
from tests.tables import one_case, wait_for

TIMEOUT = ("timeout", "invocation", "deadline")

# Shorter waits: one second in place of ten, and of two for each cgroup.
SHORT_WAITS = """
import runner.launch.wait, sandbox.cell.cell, sandbox.limits.cgroup
runner.launch.wait.KILL_SECONDS = sandbox.cell.cell.KILL_SECONDS = 0.5
runner.launch.wait.BWRAP_KILL_SECONDS = 0.2
sandbox.limits.cgroup._REMOVE_SECONDS = 0.1
"""
# How long the runner may take to return, on a slow machine. A runner that hangs takes longer.
RETURN_SECONDS = 30.0


@pytest.fixture
def freezer(nothing_left: None, plugin_dir: Path) -> Iterator[Freezer]:
    if reason := lacks("root"):
        pytest.skip(reason)
    with own_cgroups.freezer(plugin_dir) as group:
        yield group


@pytest.fixture
def fast_box(freezer: Freezer, box: Box) -> Box:
    """A box with short waits. `freezer` comes first, so that it is thawed before the box's leak check."""
    box.caller = altered(box.caller, SHORT_WAITS)
    return box


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def has_ended(pid: int) -> bool:
    return not lives(pid)


def sweep(box: Box) -> None:
    """The next runner removes the cgroups that were left, or the one after: exiting takes a moment."""

    def swept() -> bool:
        assert box.run(f"{SH}exit 0\n", "--memory", "64M", "--pids", "20", "--cpu", "1").status == 0
        return box.groups_left() == []

    assert wait_for(swept)


def is_incomplete(result: Result) -> list[int]:
    """The pids that are left. Fails if the report and stderr differ."""
    left = list(result.exit["left"])
    assert result.exit["kill_incomplete"] and left, result
    assert f"kill_incomplete: these processes could not be killed: {', '.join(map(str, left))}" in result.err
    return left


# One process: a child of it may need a moment to die, and would be among those that are left.
SLEEPS = f"{SH}echo ready; exec sleep 1000\n"
LIMITS = ("--memory", "64M", "--pids", "20", "--cpu", "0.05")


def interrupt_twice(running: Running) -> None:
    """Send SIGTERM twice. The second kills at once; it is sent when the first was taken. Not SIGINT: of two
    signals that came before Python looks, it handles the lower number first."""
    process = running.process
    process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: not waits(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)


def waits(pid: int, number: int) -> bool:
    """Whether a signal has been sent to the process and not been delivered. Not to one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


# --- one that cannot be killed -----------------------------------------------------------------------------


@one_case("who", ["program", "everybody"])
@one_case("limits", [LIMITS, ()], ids=["in groups", "in none"])
def test_the_runner_returns_and_reports_living_processes(
    fast_box: Box, freezer: Freezer, who: str, limits: tuple[str, ...]
) -> None:
    with fast_box.running(SLEEPS, *limits, "--deadline", "1h") as running:
        family = running.family
        frozen = {family["program"]} if who == "program" else set(family.values())
        groups = [running.group(name) for name in ("memory", "cpu")] if limits else []
        freezer.freeze(*frozen)
        interrupt_twice(running)
        assert running.process.wait(RETURN_SECONDS) == 143
        assert all(lives(pid) for pid in frozen), "frozen processes died, so the test proves nothing"
        quota = _quota(groups[1]) if groups else ""
        freezer.thaw()
        assert wait_for(lambda: not any(lives(pid) for pid in family.values()))
        result = running.end()  # only now: living processes keep the pipes open
    assert result.outcome == ("cancelled", "teardown", "signal:15")
    left = is_incomplete(result)
    assert result.exit["code"] is None
    if limits and by_cgroup(fast_box, "memory"):
        init = family.pop("init")
        assert frozen - {init} <= set(left) <= set(family.values())
        assert quota in ("max", "-1") or not by_cgroup(fast_box, "cpu")  # lifted, because exiting needs cpu
    else:
        assert left == [family["init"]]  # it ends after all the others
    sweep(fast_box)


def _quota(group: Path) -> str:
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(FileNotFoundError):
            return (group / name).read_text().split()[0]
    return ""


def test_a_deadline_with_a_process_that_cannot_be_killed(fast_box: Box, freezer: Freezer) -> None:
    folder = fast_box.plugin(SLEEPS)
    for seconds in (2, 4, 8, 16, 32):
        began = time.monotonic()
        with fast_box._started(folder, ("--deadline", f"{seconds}s", *LIMITS), PREFER, {}) as running:
            if running.line() != "ready" or time.monotonic() > began + seconds / 2:
                running.process.kill()  # the machine is too busy for this deadline
                continue
            pid = running.pid
            freezer.freeze(pid)
            assert running.process.wait(seconds + RETURN_SECONDS) == 124
            assert lives(pid)
            freezer.thaw()
            assert wait_for(partial(has_ended, pid))
            result = running.end()
            assert (result.outcome, result.hits[-1:]) == (TIMEOUT, ["deadline"])
            is_incomplete(result)
            break
    sweep(fast_box)


def test_a_running_plugin_has_its_quota(fast_box: Box, freezer: Freezer) -> None:
    """The control of the tests above: the quota is there until the runner kills."""
    if not by_cgroup(fast_box, "cpu"):
        pytest.skip("no cgroup enforces cpu here")
    with fast_box.running(SLEEPS, "--cpu", "0.05") as running:
        assert _quota(running.group("cpu")) == "5000"
        running.process.send_signal(signal.SIGTERM)


def test_a_daemon_that_cannot_be_killed(fast_box: Box, freezer: Freezer) -> None:
    """The program itself ends normally. The wait for its daemon is bounded too."""
    code = f"{SH}setsid sleep 1000 & echo ready; read word; exit 7\n"
    folder = fast_box.plugin(code)
    with fast_box._started(folder, LIMITS, PREFER, {}) as running:
        assert running.line() == "ready"
        assert wait_for(lambda: _children(running.pid))
        (daemon,), init = _children(running.pid), running.family["init"]
        freezer.freeze(daemon)
        running.say("end")
        assert running.process.wait(RETURN_SECONDS) == 7
        assert lives(daemon)
        freezer.thaw()
        assert wait_for(lambda: not lives(daemon))
        result = running.end()
    left = is_incomplete(result)
    assert daemon in left if by_cgroup(fast_box, "memory") else left == [init]
    assert (result.exit["code"], result.exit["ended_by"]) == (7, None)
    sweep(fast_box)


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# --- without a cage ----------------------------------------------------------------------------------------


def unsandboxed(box: Box, code: str) -> tuple[Path, str]:
    """A plugin that switches the cage off, and a policy that allows it."""
    folder = box.plugin(code)
    manifest = folder / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    return folder, PREFER.replace("version = 1\n", 'version = 1\nunsandboxed = "allow"\n')


def test_without_a_cage_a_program_that_cannot_be_killed(fast_box: Box, freezer: Freezer) -> None:
    folder, policy = unsandboxed(fast_box, SLEEPS)
    with fast_box._started(folder, LIMITS, policy, {}) as running:
        assert running.line() == "ready"
        (program,) = _children(running.process.pid)
        freezer.freeze(program)
        interrupt_twice(running)
        assert running.process.wait(RETURN_SECONDS) == 143
        assert lives(program)
        freezer.thaw()
        assert wait_for(lambda: not lives(program))
        assert program in is_incomplete(running.end())
    sweep(fast_box)


def test_without_a_cage_a_daemon_that_cannot_be_killed(fast_box: Box, freezer: Freezer) -> None:
    folder, policy = unsandboxed(fast_box, f"{SH}setsid sleep 1000 & echo ready; read word; exit 7\n")
    with fast_box._started(folder, LIMITS, policy, {}) as running:
        assert running.line() == "ready"
        (program,) = _children(running.process.pid)
        assert wait_for(lambda: _children(program))
        (daemon,) = _children(program)
        freezer.freeze(daemon)
        running.say("end")
        assert running.process.wait(RETURN_SECONDS) == 7
        assert lives(daemon)
        freezer.thaw()
        assert wait_for(lambda: not lives(daemon))
        assert daemon in is_incomplete(running.end())
    sweep(fast_box)


# --- frozen by the runner itself ---------------------------------------------------------------------------


def test_a_plugin_frozen_by_v2_is_killed(box: Box) -> None:
    """The disk meter may have frozen the cgroup at that moment."""
    with box.running(f"{SH}trap '' TERM; echo ready; sleep 1000\n", *LIMITS) as running:
        group = group_of(running.pid, "")
        if not whole_group(group).name.startswith("runner-") or not (group / "cgroup.freeze").exists():
            running.process.kill()
            pytest.skip("there is no v2 cgroup here that can freeze")
        pids = set(running.family.values())
        (group / "cgroup.freeze").write_text("1")
        assert wait_for(lambda: "frozen 1" in (group / "cgroup.events").read_text())
        interrupt_twice(running)
        result = running.end()
    assert result.status == 143
    assert not result.exit["kill_incomplete"]
    assert not any(lives(pid) for pid in pids)


# --- the order of killing ----------------------------------------------------------------------------------

# 16 processes that ignore SIGTERM, in sessions of their own, all busy under a small quota.
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


def test_many_busy_processes_under_a_small_quota_are_killed(box: Box) -> None:
    """Exiting needs processor time. With the quota still set, 16 processes would take long."""
    with box.running(CROWD, "--cpu", "0.05", "--pids", "30") as running:
        pids = set(running.family.values())
        interrupt_twice(running)
        result = running.end()
    assert result.status == 143 and not result.exit["kill_incomplete"]
    assert not any(lives(pid) for pid in pids)


def test_usage_is_reported_after_a_kill(box: Box) -> None:
    """The cell's init reports the usage, so the runner kills the processes below it first."""
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
