"""Why a plugin ends: by itself, or because of a signal, a clock or its caller's death.

Each test's process launches a cage and watches it, as `runner exec` does; its stdout is the plugin's too, so
what is read from it to its end was written by nobody who still lives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runner import watch
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages

pytestmark = pytest.mark.usefixtures("nothing_left")

cage = cages.cage
ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


def sh(script: str) -> dict[str, Any]:
    return cages.order(cages.request("/bin/sh", "-c", script))


def watched(given: dict[str, Any], how: dict[str, Any]) -> list[Any]:
    """Launch and watch; how it ended."""
    import signal
    import time
    from contextlib import contextmanager

    from runner import watch

    watch.GRACE = how.get("grace", 1000.0)
    for number in how.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    for number in how.get("blocked", ()):
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    seconds = how.get("deadline")
    deadline = None if seconds is None else time.monotonic() + seconds
    with (
        watch.watched_caller() as caller,
        watch.watched_signals() as signals,
        contextmanager(cage)(given) as cell,
    ):
        if how.get("not there yet"):
            cell.signal_program = lambda _: False
        end = watch.wait(cell, signals, caller, watch.Clocks(deadline))
    return [end.exit.code, end.reason, end.signal, end.forced]


class Watched:
    """A process that watches a cage, driven from here."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdin is not None and process.stdout is not None
        self.stdin = process.stdin

    def says(self, word: str) -> None:
        assert elsewhere.line(self.process).decode() == f"{word}\n"

    def hear(self, word: str) -> None:
        self.stdin.write(f"{word}\n".encode())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> list[Any]:
        """What it says last; everything of it is gone then."""
        out, _ = self.process.communicate(timeout=30)
        (line,) = out.decode().splitlines()
        result: list[Any] = json.loads(line)
        return result


Start = Callable[..., Watched]


@pytest.fixture
def begin(nothing_left: None) -> Iterator[Start]:
    """begin(caller, act, *args): a process of a test, which does not outlive it even if it fails."""
    begun: list[Watched] = []

    def start(caller: Caller, act: elsewhere.Act, *args: object) -> Watched:
        process = elsewhere.start(caller, act, *args, using=(cage,), stdin=subprocess.PIPE)
        begun.append(Watched(process))
        return begun[-1]

    yield start
    for each in begun:
        with each.process:
            each.process.kill()


@pytest.fixture
def start(begin: Start) -> Start:
    """start(caller, order, **how): a process that launches and watches."""
    return lambda caller, given, **how: begin(caller, watched, given, how)


# --- by itself ---------------------------------------------------------------------------------------------


def test_it_ends_by_itself(start: Start, runner_as: Caller) -> None:
    assert start(runner_as, sh("exit 7")).end() == [7, None, None, False]


def test_a_deadline_that_is_not_reached(start: Start, runner_as: Caller) -> None:
    for seconds in (1000.0, 1e9):  # the second is more than poll(2) can count
        assert start(runner_as, sh("exit 7"), deadline=seconds).end() == [7, None, None, False]


# --- signals -----------------------------------------------------------------------------------------------

POLITE = "trap 'echo heard; read word; echo $word; exit 3' TERM INT HUP QUIT; echo ready; sleep 1000 & wait"
DEAF = "trap '' TERM INT HUP QUIT; echo ready; sleep 1000"


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_passed_on_and_time_is_given(start: Start, runner_as: Caller, number: int) -> None:
    running = start(runner_as, sh(POLITE))
    running.says("ready")
    running.signal(number)
    running.says("heard")
    running.hear("goodbye")  # it takes its time, and gets it
    running.says("goodbye")
    assert running.end() == [3, "signal", number, False]


@pytest.mark.parametrize("number", ENDING)
def test_a_deaf_plugin_is_killed_when_its_time_is_up(start: Start, runner_as: Caller, number: int) -> None:
    running = start(runner_as, sh(DEAF), grace=0.2)
    running.says("ready")
    running.signal(number)
    assert running.end() == [137, "signal", number, True]


def test_a_deadline_holds_also_while_time_is_given(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(DEAF), deadline=1.0, grace=1000.0)
    running.says("ready")
    running.signal(signal.SIGTERM)
    assert running.end() == [137, "signal", signal.SIGTERM, True]


def test_a_plugin_that_does_not_handle_it_dies_of_it(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh("echo ready; sleep 1000"))
    running.says("ready")
    running.signal(signal.SIGTERM)
    assert running.end() == [128 + signal.SIGTERM, "signal", signal.SIGTERM, False]


def test_the_second_signal_kills_at_once(start: Start, runner_as: Caller) -> None:
    stubborn = "trap 'echo heard' TERM INT; echo ready; while :; do sleep 1000 & wait; done"
    running = start(runner_as, sh(stubborn))
    running.says("ready")
    running.signal(signal.SIGTERM)
    running.says("heard")
    running.signal(signal.SIGINT)
    assert running.end() == [137, "signal", signal.SIGTERM, True]


def test_a_program_that_is_not_there_yet_is_not_waited_for(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(DEAF), **{"not there yet": True})
    running.says("ready")
    running.signal(signal.SIGTERM)
    assert running.end() == [None, "signal", signal.SIGTERM, True]


def test_a_signal_the_caller_ignores_stays_ignored(start: Start, runner_as: Caller) -> None:
    # As nohup leaves it. The one after it is heard, and is the first that was.
    running = start(
        runner_as, sh("trap 'echo heard; exit 3' TERM; echo ready; sleep 1000 & wait"), ignored=[1]
    )
    running.says("ready")
    with open(f"/proc/{running.process.pid}/status", encoding="ascii") as file:
        (ignored,) = (int(line.split()[1], 16) for line in file if line.startswith("SigIgn"))
    assert [number for number in ENDING if ignored & 1 << (number - 1)] == [signal.SIGHUP]
    running.signal(signal.SIGHUP)
    running.signal(signal.SIGTERM)
    running.says("heard")
    assert running.end() == [3, "signal", signal.SIGTERM, False]


def test_a_signal_the_caller_has_blocked_arrives(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(POLITE), blocked=[signal.SIGTERM])
    running.says("ready")
    running.signal(signal.SIGTERM)
    running.says("heard")
    running.hear("goodbye")
    running.says("goodbye")
    assert running.end() == [3, "signal", signal.SIGTERM, False]


def test_daemons_do_not_outlive_a_polite_plugin(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(f"setsid sleep 1000 & {POLITE}"))
    running.says("ready")
    running.signal(signal.SIGTERM)
    running.says("heard")
    running.hear("goodbye")
    running.says("goodbye")
    assert running.end() == [3, "signal", signal.SIGTERM, False]


def test_handlers_are_put_back() -> None:
    handlers = {number: signal.getsignal(number) for number in ENDING}
    before = os.listdir("/proc/self/fd")
    with watch.watched_signals() as signals:
        assert all(signal.getsignal(number) is not handlers[number] for number in ENDING)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert set(signals.arrived()) == {signal.SIGTERM, signal.SIGHUP}
        assert signals.arrived() == []
    assert {number: signal.getsignal(number) for number in ENDING} == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert os.listdir("/proc/self/fd") == before


# --- the clock ---------------------------------------------------------------------------------------------


def test_the_deadline_kills(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(f"setsid sleep 1000 & {DEAF}"), deadline=0.5)
    running.says("ready")
    assert running.end() == [137, "deadline", None, True]


def test_a_deadline_that_has_passed_already(start: Start, runner_as: Caller) -> None:
    code, *rest = start(runner_as, sh("sleep 1000"), deadline=-5.0).end()
    assert code in (None, 137)  # before or after bwrap had started it
    assert rest == ["deadline", None, True]


# --- the caller --------------------------------------------------------------------------------------------


def runners_own(caller: Caller, given: dict[str, Any]) -> list[str]:
    """What launches and watches, for somebody who is `caller` already."""
    return elsewhere.command(caller, watched, given, {}, using=(cage,))[len(caller.prefix) :]


def starts_and_waits(argv: list[str]) -> None:
    """A host: starts the runner, and lives until it is killed."""
    import subprocess

    subprocess.Popen(argv).wait()


def test_the_callers_death_ends_everything(begin: Start, runner_as: Caller) -> None:
    runner = runners_own(runner_as, sh(f"setsid sleep 1000 & {DEAF}"))
    host = begin(runner_as, starts_and_waits, runner)
    host.says("ready")
    host.process.kill()
    assert host.end() == [137, "caller_died", None, True]


def starts_from_a_thread(argv: list[str]) -> None:
    """A host: starts the runner from a thread that ends, as thread pools do, and lives on."""
    import os
    import subprocess
    import threading
    import time

    started: list[subprocess.Popen[bytes]] = []
    worker = threading.Thread(target=lambda: started.append(subprocess.Popen(argv)))
    worker.start()
    worker.join()
    while len(os.listdir("/proc/self/task")) > 1:  # join() returns before the kernel's thread is gone
        time.sleep(0.001)
    os.write(1, b"alone\n")
    started[0].wait()


def test_the_end_of_the_thread_that_forked_ends_nothing(begin: Start, runner_as: Caller) -> None:
    # Deaf to nothing, and not before it hears from us: whatever would end it has had its chance by then.
    script = "read word; echo $word; exit 5"
    runner = runners_own(runner_as, sh(script))
    host = begin(runner_as, starts_from_a_thread, runner)
    host.says("alone")
    host.hear("alive")
    host.says("alive")
    out, _ = host.process.communicate(timeout=30)
    assert json.loads(out.splitlines()[0]) == [5, None, None, False]


def test_a_caller_outside_of_our_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    with watch.watched_caller() as caller:
        assert caller is None


@pytest.mark.parametrize("gone", [True, False], ids=["reaped", "still a zombie"])
def test_a_caller_that_dies_while_we_look(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    import select

    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    if gone:
        dead.wait()
    parents = iter([dead.pid, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    before = os.listdir("/proc/self/fd")
    with watch.watched_caller() as caller:
        assert caller is not None
        poll = select.poll()
        poll.register(caller, select.POLLIN)
        assert [fd for fd, _ in poll.poll(0)] == [caller]
    assert os.listdir("/proc/self/fd") == before
    dead.wait()
