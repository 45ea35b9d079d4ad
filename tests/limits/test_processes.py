"""Processes and threads: exactly as many as granted, and a fork bomb that harms no other plugin.

With a cgroup the report says that a fork was refused. With an rlimit the number is the same, but only the
plugin learns of the refusal.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import descendants
from tests.limits.cage import Box, Result, Running, by_cgroup, enforced_by
from tests.tables import one_case, wait_for

OK = ("ok", "run", "")

# Counts how many processes, threads, or both in turn, it can add to the first process.
COUNT = """
import json, os, sys, threading, time
gate, open_gate = os.pipe()
def wait():
    os.read(gate, 1)
def process():
    if os.fork() == 0:
        os.close(open_gate)
        wait()
        os._exit(0)
def thread():
    threading.Thread(target=wait, daemon=True).start()
kinds = {kinds}
made = 0
try:
    while made < {most}:
        kinds[made % len(kinds)]()
        made += 1
except (BlockingIOError, RuntimeError) as error:
    print(json.dumps([made, str(error)]), flush=True)
else:
    print(json.dumps([made, ""]), flush=True)
os._exit({status})
"""

# Every process forks, starts a new session and forks again. A third of them end after a fork, so that a list
# of pids is soon outdated. The first process prints "ready" when a fork is refused.
BOMB = """#!/usr/bin/python3 -IS
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
first = os.getpid()
told = False
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif os.getpid() != first and os.getpid() % 3 == 0:
            os._exit(0)
    except OSError:
        if os.getpid() == first:
            if not told:
                os.write(1, b'ready\\n')
                told = True
            {then}
        time.sleep({pause})
"""
TASKS = 400


def count(kinds: str = "[process]", status: int = 0, most: int = 100) -> str:
    return COUNT.format(kinds=kinds, status=status, most=most)


def check_limit(result: Result, box: Box, number: int, peak: int | None = None) -> None:
    """Check the report's entry of the limit."""
    limit = result.limit("pids")
    expected = {
        "requested": number,
        "effective": number,
        "decided_by": "manifest",
        "enforced_by": enforced_by(box, "pids"),
        "degraded": not by_cgroup(box, "pids"),
    }
    assert {key: limit[key] for key in expected} == expected
    assert bool(limit["detail"]) == limit["degraded"]
    assert limit["peak"] == result.usage["pids_peak"]
    if not by_cgroup(box, "pids"):
        assert limit["peak"] is None
    elif _counts_peaks():
        assert limit["peak"] == (number if peak is None else peak)
    assert result.exit["status"] == result.status
    assert not result.exit["kill_incomplete"] and result.exit["left"] == []


def _counts_peaks() -> bool:
    """pids.peak exists since Linux 6.1."""
    release = tuple(int(word) for word in os.uname().release.split(".")[:2])
    return release >= (6, 1)


@one_case("kinds", ["[process]", "[thread]", "[process, thread]"])
def test_exactly_as_many_as_granted(box: Box, kinds: str) -> None:
    result = box.run(count(kinds), limits={"pids": 8})
    made, refusal = result.printed
    assert made + 1 == 8
    assert "Resource temporarily unavailable" in refusal or "can't start new thread" in refusal
    assert (result.status, result.outcome) == (0, OK)
    assert result.hits == (["pids"] if by_cgroup(box, "pids") else [])
    check_limit(result, box, 8)


def test_a_plugin_within_its_limit_hits_nothing(box: Box) -> None:
    result = box.run(count(most=6), limits={"pids": 8})
    assert result.printed == [6, ""]
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, 8, peak=7)


def test_a_limit_of_one_is_enough_to_run(box: Box) -> None:
    result = box.run(count(), limits={"pids": 1})
    assert result.printed[0] == 0
    assert result.outcome == OK
    check_limit(result, box, 1)


@one_case("number", [1 << 20, 1 << 22])
def test_the_largest_limits(box: Box, number: int) -> None:
    if not by_cgroup(box, "pids"):
        pytest.skip("an rlimit accepts any number")
    result = box.run("pass", limits={"pids": number})
    assert result.outcome == OK
    check_limit(result, box, number, peak=1)


def test_a_plugin_that_fails_after_a_refused_fork(box: Box) -> None:
    result = box.run(count(status=3), limits={"pids": 4})
    assert result.printed[0] == 3 and result.status == 3
    if by_cgroup(box, "pids"):
        assert (result.outcome, result.hits) == (("crashed", "run", "pids"), ["pids"])
    else:
        assert (result.outcome, result.hits) == (("crashed", "run", "exit:3"), [])
    check_limit(result, box, 4)


def test_ended_processes_do_not_count(box: Box) -> None:
    """The limit counts existing processes, not forks."""
    code = (
        "import os\nfor _ in range(50):\n    child = os.fork()\n    if not child:\n        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    result = box.run(code, limits={"pids": 2})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, 2)


# --- the fork bomb ------------------------------------------------------------------------------------------


def test_the_deadline_ends_a_fork_bomb(box: Box) -> None:
    before = descendants()
    for seconds in (3.0, 15.0, 60.0):  # until it has had time to reach its limit
        limits = {"pids": TASKS, "deadline": seconds}
        result = box.run(BOMB.format(then="pass", pause=0.1), limits=limits, timeout=seconds + 60)
        left = descendants() - before
        if result.out:
            break
    assert result.out == "ready\n"
    assert left == set(), "processes were left when the runner returned"
    assert (result.status, result.outcome) == (124, ("timeout", "invocation", "deadline"))
    assert result.hits == (["pids", "deadline"] if by_cgroup(box, "pids") else ["deadline"])
    check_limit(result, box, TASKS)
    assert result.exit["ended_by"] == "deadline"
    # The guarantee: all of them have ended within 5 seconds of the deadline.
    assert seconds <= result.limit("deadline")["peak"] < seconds + 5


BESIDE = """
import os, sys
print('ready', flush=True)
for line in sys.stdin:
    children = []
    for _ in range(7):
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(child)
    print(sum(os.waitpid(child, 0)[1] == 0 for child in children), flush=True)
"""


def test_a_fork_bomb_does_not_affect_another_plugin(box: Box) -> None:
    """One plugin runs already, and one is started meanwhile. The same holds for two plugins of one user."""
    # The bomb pauses between refused forks: each costs processor time, which this test does not limit.
    code = BOMB.format(then="os.read(0, 1); os._exit(0)", pause=3)
    with box.running(BESIDE, name="beside", limits={"pids": 8}) as beside:
        with box.running(code, limits={"pids": TASKS}) as bomb:
            assert _is_full(bomb), "the bomb never reached its limit"
            beside.say("fork")
            assert beside.line() == "7"
            later = box.run(count(most=7), name="later", limits={"pids": 8})
            assert later.printed == [7, ""] and later.outcome == OK and later.hits == []
            assert _is_full(bomb), "the bomb was no longer at its limit"
        assert bomb.result is not None and bomb.result.outcome == OK
        assert bomb.result.hits == (["pids"] if by_cgroup(box, "pids") else [])
        check_limit(bomb.result, box, TASKS)
        beside.say("fork again")
        assert beside.line() == "7"
    result = beside.result
    assert result is not None and (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, 8)


def _is_full(bomb: Running) -> bool:
    """Whether it reaches 90 % of its tasks. Processes that end make room for a moment."""
    return wait_for(lambda: _tasks_below(bomb.process.pid) >= TASKS * 9 // 10)


def _tasks_below(pid: int) -> int:
    parents = {int(name): _parent(name) for name in os.listdir("/proc") if name.isdecimal()}
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return len(family)


def _parent(name: str) -> int:
    try:
        return int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
