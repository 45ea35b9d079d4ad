"""Time limits: they hold whatever the plugin does, and whatever the runner is doing at the time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Caller, descendants
from tests.limits.altered import altered
from tests.limits.cage import PREFER, PYTHON, SH, Box, Result, Running
from tests.tables import wait_for

TIMEOUT = ("timeout", "invocation", "deadline")
# In seconds. The deadline starts with the runner. If half of it has passed before all plugins are ready, the
# machine is too busy for this deadline, and the next one is tried.
DEADLINES = (2.5, 5.0, 10.0, 20.0, 40.0)

IGNORE_SIGNALS = "trap '' TERM INT HUP QUIT USR1 USR2 PIPE ALRM; "
# Everything a daemon does to detach: a new session, a second fork, chdir, closed descriptors.
DAEMON = """
import os, signal, sys, time
def daemon():
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    os.chdir('/')
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 64)
    time.sleep(1000)
"""
# Plugins that stay alive and ignore SIGTERM. Those that would slow down the start of others wait for a line
# on stdin first.
UNENDING = {
    "deaf": f"{IGNORE_SIGNALS}echo ready; while :; do sleep 1000; done",
    "daemon": f"{DAEMON}\ndaemon()\nprint('ready', flush=True)\ntime.sleep(1000)",
    "stopped": f"{IGNORE_SIGNALS}echo ready; kill -STOP $$",
    "busy": f"{IGNORE_SIGNALS}echo ready; read word; while :; do :; done",
    "bomb": "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "input()\n"
    "while True:\n"
    "    try:\n"
    "        if os.fork() == 0: os.setsid()\n"
    "    except OSError: time.sleep(0.01)",
}
# One plugin runs all of these programs, so that its manifest is read once.
ANY = f'{SH}exec $PROGRAM "$CODE"\n'


def options_of(name: str) -> tuple[str, ...]:
    code = UNENDING[name]
    program = "/usr/bin/python3 -I -c" if code.lstrip().startswith("import") else "/bin/sh -c"
    return ("--env", f"PROGRAM={program}", "--env", f"CODE={code}", "--pids", "40")


@contextmanager
def started(box: Box, *names: str) -> Iterator[tuple[float, dict[str, Running]]]:
    """Start all of these programs at once, with the same deadline. Yields the deadline and the plugins."""
    folder = box.plugin(ANY)
    assert box.run(ANY, "--env", "PROGRAM=true").status == 0  # its manifest is in the cache now
    for seconds in DEADLINES:
        began = time.monotonic()
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(
                    box._started(folder, (*options_of(name), "--deadline", f"{seconds}s"), PREFER, {})
                )
                for name in names
            }
            lines = {each.line() for each in running.values()}
            if lines == {"ready"} and time.monotonic() < began + seconds / 2:
                for each in running.values():
                    each.say("go")
                yield seconds, running
                return
            for each in running.values():
                each.process.kill()
    pytest.fail(f"the plugins did not start within {DEADLINES[-1]} s")


def is_timeout(result: Result, seconds: float) -> bool:
    assert (result.status, result.outcome, result.hits[-1:]) == (124, TIMEOUT, ["deadline"]), result
    assert set(result.hits) <= {"pids", "deadline"}  # the fork bomb reaches pids too
    assert result.exit["ended_by"] == "deadline" and result.exit["forced"]
    assert not result.exit["kill_incomplete"]
    assert "the deadline passed" in result.err
    limit = result.limit("deadline")
    assert (limit["enforced_by"], limit["effective"]) == ("clock", seconds)
    assert limit["peak"] > 0
    return True


def state(pid: int) -> str:
    """The state letter in /proc/PID/stat; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def family(runner: int) -> set[int]:
    """All living descendants of a runner."""
    parents = {pid: _parent(pid) for pid in descendants()}
    found = {runner}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid for pid in found - {runner} if state(pid) not in ("", "Z", "X")}


def is_stopped(pid: int) -> bool:
    return state(pid) == "T"


def is_alone(runner: int) -> bool:
    return not family(runner)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return -1


# --- the deadline ------------------------------------------------------------------------------------------


def test_the_deadline_ends_every_kind_of_plugin(box: Box) -> None:
    with started(box, *UNENDING) as (seconds, running):
        for each in running.values():
            assert is_timeout(each.end(), seconds)


def test_a_plugin_that_ends_in_time_hits_no_limit(box: Box) -> None:
    result = box.run("#!/bin/sh\nexit 7\n", "--deadline", "1h")
    assert (result.status, result.hits) == (7, [])
    assert result.exit["ended_by"] is None


def test_the_end_of_the_first_process_ends_the_plugin(box: Box) -> None:
    """The daemons are killed when the first process ends. Its status is the plugin's status."""
    code = f"{PYTHON}{DAEMON}\nfor _ in range(3): daemon()\ntime.sleep(0.1)\nos._exit(6)\n"
    result = box.run(code, "--deadline", "1h")
    assert (result.status, result.outcome) == (6, ("crashed", "run", "exit:6"))
    assert result.hits == []


def test_without_a_cage_a_daemon_stays_alive(plugin_dir: Path, nothing_left: None) -> None:
    """The control."""
    program = plugin_dir / "plugin"
    program.write_text(f"{PYTHON}{DAEMON}\ndaemon()\n")
    program.chmod(0o755)
    before = descendants()
    subprocess.run([program], check=True, timeout=120)
    assert wait_for(lambda: [pid for pid in descendants() - before if state(pid) == "S"])
    for pid in descendants() - before:
        os.kill(pid, signal.SIGTERM)  # it ignores this
        os.kill(pid, signal.SIGKILL)


def test_a_deadline_that_passes_before_the_launch(box: Box) -> None:
    """The outcome is a timeout, like any other."""
    result = box.run("#!/bin/sh\nsleep 1000\n", "--deadline", "1ms")
    assert (result.status, result.outcome, result.hits) == (124, TIMEOUT, ["deadline"])


# --- the deadline while the runner is stopped or busy ------------------------------------------------------


def test_the_deadline_holds_while_the_runner_is_stopped(box: Box) -> None:
    with started(box, "deaf", "stopped", "bomb") as (seconds, running):
        runners = [each.process.pid for each in running.values()]
        for pid in runners:
            os.kill(pid, signal.SIGSTOP)
        for pid in runners:
            assert wait_for(partial(is_stopped, pid)), "it was not stopped"
        for pid in runners:
            assert wait_for(partial(is_alone, pid), seconds + 60), f"still alive: {family(pid)}"
            assert state(pid) == "T", "the runner was not stopped all the time"
        for pid in runners:
            os.kill(pid, signal.SIGCONT)
        for each in running.values():
            assert is_timeout(each.end(), seconds)


def test_a_plugin_lives_while_its_runner_is_stopped(box: Box) -> None:
    """The control: stopping the runner does not end the plugin."""
    with box.running(f"{SH}echo ready; read word; exit 3\n", "--deadline", "1h") as running:
        pid = running.process.pid
        os.kill(pid, signal.SIGSTOP)
        assert wait_for(partial(is_stopped, pid))
        assert len(family(pid)) >= 4  # init, bwrap, its init and the plugin
        os.kill(pid, signal.SIGCONT)
        assert running.end().status == 3


# A runner that hangs while it relays the plugin's stderr, until a file appears.
HANGING_RELAY = """
import os
from sandbox.streams.relay import Relay
look = Relay.look
def lost(self, ready, now):
    os.write(self._sink.fd, b"lost\\n")
    while not os.path.exists({path!r}): pass
    return look(self, ready, now)
Relay.look = lost
"""


def test_the_deadline_holds_while_the_runner_is_busy(box: Box) -> None:
    path = box.folder / "go on"
    box.caller = altered(box.caller, HANGING_RELAY.format(path=str(path)))
    folder = box.plugin(f"{SH}{IGNORE_SIGNALS}echo ready; echo >&2; sleep 1000\n")
    for seconds in DEADLINES:
        options = ("--deadline", f"{seconds}s", "--limit", "output=1M")
        began = time.monotonic()
        with box._started(folder, options, PREFER, {}) as running:
            runner, errors = running.process.pid, running.process.stderr
            assert errors is not None
            if running.line() != "ready" or time.monotonic() > began + seconds / 2:
                running.process.kill()
                continue
            assert errors.readline() == b"lost\n"
            assert wait_for(partial(is_alone, runner))
            assert state(runner) in "RS"
            path.touch()
            assert is_timeout(running.end(), seconds)
            return
    pytest.fail("the plugin did not start in time")


def test_without_a_cage_the_deadline_holds_too(box: Box) -> None:
    """The manifest switches the cage off, and the policy allows that."""
    folder = box.plugin(SH + UNENDING["deaf"])
    manifest = folder / "nexo-plugin.toml"
    manifest.write_text(manifest.read_text().replace("enabled = true", "enabled = false"))
    policy = PREFER.replace("version = 1\n", 'version = 1\nunsandboxed = "allow"\n')
    for seconds in DEADLINES:
        with box._started(folder, ("--deadline", f"{seconds}s"), policy, {}) as running:
            if running.line() != "ready":
                continue
            running.process.send_signal(signal.SIGSTOP)
            try:
                assert wait_for(partial(is_alone, running.process.pid))
            finally:
                running.process.send_signal(signal.SIGCONT)
                result = running.end()
            assert result.outcome == TIMEOUT
            return
    pytest.fail("the plugin did not start in time")


# --- the launch --------------------------------------------------------------------------------------------

# A bwrap that sleeps before it does anything.
SLOW = """
from sandbox.plan.find_bwrap import Bwrap
import runner.launch.plan
runner.launch.plan.find_bwrap = lambda environ: Bwrap({path!r})
"""


def use_slow_bwrap(box: Box, delay: str) -> None:
    path = box.folder / "slow-bwrap"
    path.write_text(f'#!/bin/sh\nsleep {delay}\nexec /usr/bin/bwrap "$@"\n')
    path.chmod(0o755)
    box.caller = altered(box.caller, SLOW.format(path=str(path)))


RAN = f"{SH}echo ran; exit 3\n"


def test_a_launch_over_its_limit_is_ended(box: Box) -> None:
    use_slow_bwrap(box, "1000")
    result = box.run(RAN, "--limit", "launch=500ms", "--deadline", "1h")
    assert (result.status, result.outcome) == (124, ("launch_failed", "launch", "deadline"))
    assert result.hits == ["launch"]
    assert result.out == ""  # the plugin never ran
    assert (result.exit["ended_by"], result.exit["forced"]) == ("launch", True)
    assert (result.exit["code"], result.exit["reached_exec"]) == (None, False)
    assert "did not run after 500ms" in result.err


def test_a_slow_launch_within_its_limit(box: Box) -> None:
    use_slow_bwrap(box, "0.3")
    result = box.run(RAN, "--limit", "launch=50s")
    assert (result.status, result.out, result.hits) == (3, "ran\n", [])
    limit = result.limit("launch")
    assert (limit["enforced_by"], limit["effective"], limit["degraded"]) == ("clock", 50.0, False)


# The launch limit has passed at once, but the runner does not check it before the program runs.
CHECK_LAUNCH_LATE = """
import time
from sandbox.cell.cell import Cell
runs = Cell.runs
def patient(self):
    until = time.monotonic() + {seconds}
    while not runs(self) and time.monotonic() < until: time.sleep(0.001)
    return runs(self)
Cell.runs = patient
"""
WAITS = f"{SH}echo ready; read word; echo $word; exit 3\n"


def test_a_launch_limit_does_not_end_a_running_plugin(box: Box) -> None:
    """The launch limit does not apply once the program runs."""
    box.caller = altered(box.caller, CHECK_LAUNCH_LATE.format(seconds=100))
    with box.running(WAITS, "--limit", "launch=1ms") as running:
        running.say("still here")
        result = running.end()
    assert (result.status, result.out, result.hits) == (3, "still here\n", [])


@pytest.mark.needs("root")
def test_a_launch_limit_for_root_without_cap_sys_ptrace(
    runner_as_root: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    """Root without CAP_SYS_PTRACE, as in containers, may not read /proc files of other users' processes."""
    lesser = ("/usr/bin/setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", "--")
    caller = altered(replace(runner_as_root, prefix=lesser), CHECK_LAUNCH_LATE.format(seconds=100))
    with Box(caller, plugin_dir).running(WAITS, "--limit", "launch=1ms") as running:
        running.say("still here")
        result = running.end()
    assert (result.status, result.out, result.hits) == (3, "still here\n", []), result


# --- the teardown limit ------------------------------------------------------------------------------------

SET_GRACE = "from runner.launch import wait as watch\nwatch.GRACE_SECONDS = {seconds}\n"


def test_a_plugin_that_ignores_sigterm_is_killed_after_the_teardown_limit(box: Box) -> None:
    """The limit replaces the default, which is a quarter of an hour here."""
    box.caller = altered(box.caller, SET_GRACE.format(seconds=900.0))
    with box.running(SH + UNENDING["deaf"], "--limit", "teardown=200ms") as running:
        running.process.send_signal(signal.SIGTERM)
        result = running.end()
    assert (result.status, result.outcome) == (143, ("cancelled", "teardown", "signal:15"))
    assert result.hits == ["teardown"]
    assert result.exit["forced"] and result.exit["signal"] == signal.SIGTERM


POLITE = f"{SH}trap 'echo heard; read word; echo $word; exit 5' TERM; echo ready; sleep 1000 & wait\n"


def test_a_plugin_that_handles_sigterm_has_its_teardown_limit(box: Box) -> None:
    """The limit replaces the default, which is a millisecond here."""
    box.caller = altered(box.caller, SET_GRACE.format(seconds=0.001))
    with box.running(POLITE, "--limit", "teardown=50s") as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.line() == "heard"
        running.say("bye")
        result = running.end()
    assert (result.status, result.out, result.hits) == (5, "bye\n", [])
    assert (result.exit["ended_by"], result.exit["forced"]) == ("signal", False)


# --- clocks that exec does not run -------------------------------------------------------------------------


def test_clocks_of_the_protocol_are_passed_on(box: Box) -> None:
    """Only a caller that speaks the protocol sees handshakes, calls and pauses. exec reports these limits."""
    limits: Mapping[str, object] = {"handshake": "1ms", "call": "2s", "idle": "3m"}
    result = box.run(f"{SH}sleep 0.2; exit 0\n", limits=limits)
    assert (result.status, result.hits) == (0, [])
    for name, seconds in {"handshake": 0.001, "call": 2.0, "idle": 180.0}.items():
        limit = result.limit(name)
        assert (limit["requested"], limit["effective"]) == (seconds, None)
        assert (limit["enforced_by"], limit["degraded"]) == ("caller", False)
        assert "exec" in limit["detail"]
