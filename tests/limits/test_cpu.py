"""Processor time: a share of it, which slows down, and a total, which ends.

Only ratios are looked at: how long something takes on this machine says nothing.
"""

from __future__ import annotations

import signal

import pytest

from tests.limits.cage import Box, Result, by_cgroup, held

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

# As a program and as a child, together.
TWO = "import os\nos.fork()\n" + FOR_EVER

# Each stays far below, in a process of its own; together they do not.
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

# Its own session, its own parent: nothing but the limit ties it to the program, which hears of its end by a
# pipe that nobody holds any more.
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
    """Who counts all of them kills; the kernel's limit for each says why."""
    return KILLED if by_cgroup(box, "cpu_time") else 128 + signal.SIGXCPU


def as_asked(result: Result, box: Box, name: str, value: float) -> None:
    """What every report says of the limit, however it ended."""
    limit = result.limit(name)
    expected = {
        "requested": value,
        "decided_by": "manifest",
        "enforced_by": held(box, name),
        "degraded": not by_cgroup(box, name),
    }
    assert {key: limit[key] for key in expected} == expected
    assert limit["peak"] == (result.cpu if name == "cpu_time" else None)
    assert result.exit["status"] == result.status
    assert not result.exit["kill_incomplete"] and result.exit["left"] == []


# --- a share ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_share_of_one_core(box: Box, processes: int) -> None:
    alone = SPIN + "spin(0.2)\n"
    both = SPIN + "import os\nchild = os.fork()\nspin(0.1)\nif child:\n    os.wait()\n"
    code = alone if processes == 1 else both
    free = box.run(code)
    assert (free.status, free.outcome, free.hits) == (0, OK, [])
    result = box.run(code, limits={"cpu": 0.2})
    assert (result.status, result.outcome) == (0, OK)
    as_asked(result, box, "cpu", 0.2)
    assert result.cpu >= 0.2
    if by_cgroup(box, "cpu"):
        assert result.hits == ["cpu"]
        assert result.limit("cpu")["effective"] == 0.2
        # Whoever it is that spins: together they had a fifth of the time, and a little at the edges.
        assert result.cpu / result.usage["wall"] < 0.2 * 1.5
    else:
        assert result.hits == []
        assert result.limit("cpu")["effective"] is None
        assert result.limit("cpu")["detail"]


def test_who_is_slowed_down_and_fails_has_failed_by_itself(box: Box) -> None:
    result = box.run(SPIN + "spin(0.1)\nraise SystemExit(3)", limits={"cpu": 0.2})
    assert (result.status, result.outcome) == (3, ("crashed", "run", "exit:3"))
    assert result.hits == (["cpu"] if by_cgroup(box, "cpu") else [])


def test_who_stays_below_its_share_is_not_slowed_down(box: Box) -> None:
    # One process cannot use more than one core, so that two are never missed.
    result = box.run(SPIN + "spin(0.3)", limits={"cpu": 2})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    as_asked(result, box, "cpu", 2)


def test_an_end_does_not_wait_for_its_share(box: Box) -> None:
    """Dying takes processor time too: with a twentieth of a core for all of them it would take long."""
    code = "import os\nfor _ in range(5):\n    os.fork()\nos.write(1, b'.')\n" + FOR_EVER
    for seconds in (2, 10, 50):  # until it had the time to start
        result = box.run(code, limits={"cpu": 0.05, "deadline": seconds})
        if result.out:
            break
    assert result.out
    assert (result.status, result.outcome) == (124, ("timeout", "invocation", "deadline"))
    assert result.hits == (["cpu", "deadline"] if by_cgroup(box, "cpu") else ["deadline"])
    assert not result.exit["kill_incomplete"]


# --- a total ------------------------------------------------------------------------------------------------


def test_a_spinner(box: Box) -> None:
    result = box.run(FOR_EVER, limits={"cpu_time": "500ms"})
    assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
    as_asked(result, box, "cpu_time", 0.5)
    assert "cpu_time limit of 500ms" in result.message or not by_cgroup(box, "cpu_time")
    assert result.exit["ended_by"] == ("limit" if by_cgroup(box, "cpu_time") else None)
    # An rlimit counts whole seconds; the runner looks in time, and may be kept waiting for a core itself.
    assert 0.5 <= result.cpu < 20.0


def test_a_whole_second_among_many(box: Box) -> None:
    """The rlimit counts in ticks, the account does not: where many want a core, one of them is behind."""
    result = box.run("import os\nos.fork() and os.fork()\n" + FOR_EVER, limits={"cpu_time": "1s"})
    assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])


def test_what_is_in_effect_where_only_seconds_count(box: Box) -> None:
    if by_cgroup(box, "cpu_time"):
        pytest.skip("here fractions count")
    result = box.run("pass", limits={"cpu_time": "500ms"})
    assert result.limit("cpu_time")["effective"] == 1
    assert result.limit("cpu_time")["requested"] == 0.5


def test_two_together(box: Box) -> None:
    result = box.run(TWO, limits={"cpu_time": "500ms"})
    assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
    as_asked(result, box, "cpu_time", 0.5)
    if by_cgroup(box, "cpu_time"):
        assert 0.5 <= result.cpu < 2


def test_many_short_lives(box: Box) -> None:
    times = 10_000 if by_cgroup(box, "cpu_time") else 12
    result = box.run(MANY.format(times=times), limits={"cpu_time": "300ms"})
    as_asked(result, box, "cpu_time", 0.3)
    if by_cgroup(box, "cpu_time"):
        assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
        assert 0.3 <= result.cpu < 2
    else:  # nobody adds them up; the report says so, and what they used
        assert (result.status, result.outcome, result.hits) == (0, OK, [])
        assert "for each process separately" in result.limit("cpu_time")["detail"]
        assert result.cpu >= 0.6


def test_a_daemon_while_the_program_sleeps(box: Box) -> None:
    result = box.run(DAEMON, limits={"cpu_time": "500ms"})
    as_asked(result, box, "cpu_time", 0.5)
    if by_cgroup(box, "cpu_time"):
        assert (result.status, result.outcome, result.hits) == (ended_by(box), USED_UP, ["cpu_time"])
        assert 0.5 <= result.cpu < 2
    else:  # the rlimit has ended the daemon, and the program outlived it
        assert (result.status, result.outcome, result.hits) == (0, OK, [])


def test_a_child_does_not_outlive_the_program(box: Box) -> None:
    """The program ends well, and so does the plugin: what it left running ended with it."""
    result = box.run(
        "import os\nif os.fork() == 0:\n    while True:\n        pass", limits={"cpu_time": "1s"}
    )
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    as_asked(result, box, "cpu_time", 1)


def test_sleep_costs_nothing(box: Box) -> None:
    result = box.run("import time\ntime.sleep(0.5)", limits={"cpu_time": "400ms"})
    assert (result.status, result.outcome, result.hits) == (0, OK, [])
    as_asked(result, box, "cpu_time", 0.4)
    assert 0 < result.cpu < 0.4 < 0.5 <= result.usage["wall"]


def test_signals_of_the_plugins_own_are_not_the_limits(box: Box) -> None:
    """It kills itself in the way the kernel would."""
    for number in (signal.SIGKILL, signal.SIGXCPU):
        result = box.run(f"import os\nos.kill(os.getpid(), {int(number)})", limits={"cpu_time": "5s"})
        expected = ("crashed", "run", f"signal:{int(number)}")
        assert (result.status, result.outcome, result.hits) == (128 + number, expected, [])


def test_who_catches_the_warning_is_ended_all_the_same(box: Box) -> None:
    """SIGXCPU can be ignored; what comes with it, or after it, cannot."""
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" + FOR_EVER
    result = box.run(code, limits={"cpu_time": "500ms"})
    assert (result.status, result.outcome, result.hits) == (KILLED, USED_UP, ["cpu_time"])


def test_the_time_to_end_is_no_time_without_limits(box: Box) -> None:
    """Asked to end, it starts to spin."""
    if not by_cgroup(box, "cpu_time"):
        pytest.skip("for each process separately")
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
