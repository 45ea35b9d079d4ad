"""Processor time: a share (cpu), which slows a plugin down, and a total (cpu_time), which ends it.

The tests compare ratios, because absolute durations depend on the machine.
"""

from __future__ import annotations

import signal

import pytest

from tests.limits.cage import Box, Result, by_cgroup, enforced_by
from tests.tables import one_case

OK = ("ok", "run", "")
USED_UP = ("crashed", "run", "cpu_time")
KILLED = 128 + signal.SIGKILL

SPIN = """
import time
def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
"""
FOR_EVER = "while True:\n    pass\n"

# The program and one child.
TWO = "import os\nos.fork()\n" + FOR_EVER

# Each process stays far below the limit. Together they exceed it.
MANY = (
    SPIN
    + """
import os
for _ in range({times}):
    child = os.fork()
    if child == 0:
        spin(0.05)
        os._exit(0)
    os.waitpid(child, 0)
"""
)

# A daemon with its own session and parent. The program learns of its end by the end of a pipe.
DAEMON = """
import os
heard, held = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(heard)
        while True:
            pass
    os._exit(0)
os.wait()
os.close(held)
os.read(heard, 1)
"""


def ended_by(box: Box) -> int:
    """The runner uses SIGKILL; RLIMIT_CPU sends SIGXCPU."""
    return KILLED if by_cgroup(box, "cpu_time") else 128 + signal.SIGXCPU


def check_limit(result: Result, box: Box, name: str, value: float) -> None:
    """Check the report's entry of the limit."""
    limit = result.limit(name)
    expected = {
        "requested": value,
        "decided_by": "manifest",
        "enforced_by": enforced_by(box, name),
        "degraded": not by_cgroup(box, name),
    }
    assert {key: limit[key] for key in expected} == expected
    assert limit["peak"] == (result.cpu if name == "cpu_time" else None)
    assert result.exit["status"] == result.status
    assert not result.exit["kill_incomplete"] and result.exit["left"] == []


# --- a share ------------------------------------------------------------------------------------------------


@one_case("processes", [1, 2])
def test_a_share_of_one_core(box: Box, processes: int) -> None:
    # So small a share that the plugin exceeds it on a busy machine too, where it gets little anyway.
    share, whole = 0.02, 0.06
    alone = SPIN + f"spin({whole})\n"
    both = SPIN + f"import os\nchild = os.fork()\nspin({whole / 2})\nif child:\n    os.wait()\n"
    code = alone if processes == 1 else both
    free = box.run(code)
    assert (free.status, free.outcome, free.hits) == (0, OK, [])
    result = box.run(code, limits={"cpu": share})
    assert (result.status, result.outcome) == (0, OK)
    check_limit(result, box, "cpu", share)
    assert result.cpu >= whole
    if by_cgroup(box, "cpu"):
        assert result.hits == ["cpu"]
        assert result.limit("cpu")["effective"] == share
        # All processes together had this share of the time, with a margin for the first and last period.
        assert result.cpu / result.usage["wall"] < share * 1.5
    else:
        assert result.hits == []
        assert result.limit("cpu")["effective"] is None
        assert result.limit("cpu")["detail"]


def test_a_throttled_plugin_that_fails_has_its_own_exit_status(box: Box) -> None:
    result = box.run(SPIN + "spin(0.02)\nraise SystemExit(3)", limits={"cpu": 0.02})
    assert (result.status, result.outcome) == (3, ("crashed", "run", "exit:3"))
    assert result.hits == (["cpu"] if by_cgroup(box, "cpu") else [])


def test_a_plugin_below_its_share_is_not_slowed_down(box: Box) -> None:
    # One process cannot use more than one core, so a share of two never throttles it.
    result = box.run(SPIN + "spin(0.3)", limits={"cpu": 2})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, "cpu", 2)


def test_killing_does_not_wait_for_the_cpu_quota(box: Box) -> None:
    """Exiting needs processor time too: 32 processes with a twentieth of a core would take long."""
    code = "import os\nfor _ in range(5):\n    os.fork()\nos.write(1, b'.')\n" + FOR_EVER
    for seconds in (2, 10, 50):  # until it has had time to start
        result = box.run(code, limits={"cpu": 0.05, "deadline": seconds})
        if result.out:
            break
    assert result.out
    assert (result.status, result.outcome) == (124, ("timeout", "invocation", "deadline"))
    assert result.hits == (["cpu", "deadline"] if by_cgroup(box, "cpu") else ["deadline"])
    assert not result.exit["kill_incomplete"]


# --- a total ------------------------------------------------------------------------------------------------


def test_a_busy_program_is_ended(box: Box) -> None:
    result = box.run(FOR_EVER, limits={"cpu_time": "500ms"})
    assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
    check_limit(result, box, "cpu_time", 0.5)
    assert "cpu_time limit of 500ms" in result.message or not by_cgroup(box, "cpu_time")
    assert result.exit["ended_by"] == ("limit" if by_cgroup(box, "cpu_time") else None)
    # An rlimit counts whole seconds. The runner measures more often, but may itself wait for a core.
    assert 0.5 <= result.cpu < 20.0


def test_three_busy_processes_are_ended(box: Box) -> None:
    """RLIMIT_CPU counts ticks and the cgroup counts nanoseconds: on a busy core they differ."""
    result = box.run("import os\nos.fork() and os.fork()\n" + FOR_EVER, limits={"cpu_time": "1s"})
    assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])


def test_rlimit_cpu_rounds_up_to_whole_seconds(box: Box) -> None:
    if by_cgroup(box, "cpu_time"):
        pytest.skip("the cgroup counts fractions of a second")
    result = box.run("pass", limits={"cpu_time": "500ms"})
    assert result.limit("cpu_time")["effective"] == 1
    assert result.limit("cpu_time")["requested"] == 0.5


def test_two_processes_share_the_total(box: Box) -> None:
    result = box.run(TWO, limits={"cpu_time": "500ms"})
    assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
    check_limit(result, box, "cpu_time", 0.5)
    if by_cgroup(box, "cpu_time"):
        assert 0.5 <= result.cpu < 20


def test_many_short_processes_share_the_total(box: Box) -> None:
    times = 10_000 if by_cgroup(box, "cpu_time") else 12
    result = box.run(MANY.format(times=times), limits={"cpu_time": "300ms"})
    check_limit(result, box, "cpu_time", 0.3)
    if by_cgroup(box, "cpu_time"):
        assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
        assert 0.3 <= result.cpu < 20
    else:  # nothing adds them up; the report says so, and how much they used
        assert (result.status, result.outcome, result.hits) == (0, OK, [])
        assert "for each process separately" in result.limit("cpu_time")["detail"]
        assert result.cpu >= 0.6


def test_a_daemon_counts_while_the_program_sleeps(box: Box) -> None:
    result = box.run(DAEMON, limits={"cpu_time": "500ms"})
    check_limit(result, box, "cpu_time", 0.5)
    if by_cgroup(box, "cpu_time"):
        assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
        assert 0.5 <= result.cpu < 20
    else:  # the rlimit has ended the daemon, and the program ended normally
        assert (result.status, result.outcome, result.hits) == (0, OK, [])


def test_a_child_does_not_outlive_the_program(box: Box) -> None:
    """The program ends with status 0, and the busy child is killed with it."""
    result = box.run(
        "import os\nif os.fork() == 0:\n    while True:\n        pass", limits={"cpu_time": "1s"}
    )
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, "cpu_time", 1)


def test_sleep_does_not_count(box: Box) -> None:
    result = box.run("import time\ntime.sleep(0.5)", limits={"cpu_time": "400ms"})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    check_limit(result, box, "cpu_time", 0.4)
    assert 0 < result.cpu < 0.4 < 0.5 <= result.usage["wall"]


def test_the_plugins_own_signals_are_not_reported_as_the_limit(box: Box) -> None:
    """The plugin sends itself the signals that the limit uses."""
    for number in (signal.SIGKILL, signal.SIGXCPU):
        result = box.run(f"import os\nos.kill(os.getpid(), {int(number)})", limits={"cpu_time": "5s"})
        expected = ("crashed", "run", f"signal:{int(number)}")
        assert (result.status, result.outcome, result.hits) == (128 + number, expected, [])


def test_ignoring_sigxcpu_does_not_help(box: Box) -> None:
    """SIGXCPU can be ignored. The SIGKILL that follows cannot."""
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" + FOR_EVER
    result = box.run(code, limits={"cpu_time": "500ms"})
    assert (result.status, result.outcome, result.hits) == (KILLED, USED_UP, ["cpu_time"])


def test_the_total_applies_during_teardown(box: Box) -> None:
    """The plugin starts to spin when it gets SIGTERM."""
    if not by_cgroup(box, "cpu_time"):
        pytest.skip("RLIMIT_CPU counts each process on its own")
    code = (
        "import os, signal, time\n"
        "def spin(*_):\n"
        "    os.fork()\n"
        "    while True: pass\n"
        "signal.signal(signal.SIGTERM, spin)\n"
        "print('ready', flush=True)\ntime.sleep(1000)\n"
    )
    with box.running(code, "--limit", "teardown=60s", limits={"cpu_time": "1s"}) as running:
        running.process.send_signal(signal.SIGTERM)
        result = running.end()
    assert result.outcome[0] == "cancelled" and result.exit["forced"]
    assert result.hits == ["cpu_time"]
    assert result.cpu < 20
