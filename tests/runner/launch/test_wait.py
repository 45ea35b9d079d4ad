"""Why a plugin ends: by itself, or because of a signal, a clock or its caller's death.

Each test's process launches a cage and watches it, as `runner exec` does; its stdout is the plugin's too, so
what is read from it to its end was written by nobody who still lives.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from runner.launch import orders
from runner.launch import wait as watch
from sandbox.cell.cell import Cell, Exit, Usage
from sandbox.limits.meter import Meter
from tests import elsewhere
from tests.conftest import Caller
from tests.sandbox import cages
from tests.tables import one_case, wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")

cage = cages.cage
ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


def sh(script: str) -> dict[str, Any]:
    return cages.order(cages.request("/bin/sh", "-c", script))


def watched(given: dict[str, Any], how: dict[str, Any]) -> list[Any]:
    """Launch and watch; how it ended."""
    import os
    import signal
    import time
    from contextlib import contextmanager

    from runner.launch import orders
    from runner.launch import wait as watch

    watch.GRACE_SECONDS = how.get("grace", 1000.0)
    for number in how.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    for number in how.get("blocked", ()):
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    clocks: dict[str, float] = {}
    with (
        orders.watch_caller() as caller,
        orders.watch_signals() as signals,
        contextmanager(cage)(given) as cell,
    ):
        if how.get("not there yet"):
            cell.signal_program = lambda _: False
        if how.get("launch is over"):
            assert wait_for(cell.runs, step=0.001)
            os.write(1, b"runs\n")
            clocks["launch"] = time.monotonic()
        if "deadline" in how:
            # Counted from the moment when the program runs: a busy machine takes long to start it.
            assert how["deadline"] < 0 or wait_for(cell.runs, step=0.001)
            clocks["deadline"] = time.monotonic() + how["deadline"]
        if "teardown" in how:
            clocks["teardown"] = how["teardown"]
        end = watch.wait(cell, signals, caller, watch.Clocks(**clocks))
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
        out, _ = self.process.communicate(timeout=120)
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


@one_case("number", ENDING)
def test_a_signal_is_passed_on_and_time_is_given(start: Start, runner_as: Caller, number: int) -> None:
    running = start(runner_as, sh(POLITE))
    running.says("ready")
    running.signal(number)
    running.says("heard")
    running.hear("goodbye")  # it takes its time, and gets it
    running.says("goodbye")
    assert running.end() == [3, "signal", number, False]


@one_case("number", ENDING)
def test_a_deaf_plugin_is_killed_when_its_time_is_up(start: Start, runner_as: Caller, number: int) -> None:
    running = start(runner_as, sh(DEAF), grace=0.2)
    running.says("ready")
    running.signal(number)
    assert running.end() == [137, "signal", number, True]


def test_a_deadline_holds_also_while_time_is_given(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(DEAF), deadline=4.0, grace=1000.0)
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
    with orders.watch_signals() as signals:
        assert all(signal.getsignal(number) is not handlers[number] for number in ENDING)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert set(signals.read_orders()) == {signal.SIGTERM, signal.SIGHUP}
        assert signals.read_orders() == []
    assert {number: signal.getsignal(number) for number in ENDING} == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert os.listdir("/proc/self/fd") == before


# --- the clock ---------------------------------------------------------------------------------------------


def test_the_deadline_kills(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(f"setsid sleep 1000 & {DEAF}"), deadline=2.0)
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

    started: list[subprocess.Popen[bytes]] = []
    worker = threading.Thread(target=lambda: started.append(subprocess.Popen(argv)))
    worker.start()
    worker.join()
    # join() returns before the kernel's thread is gone.
    assert wait_for(lambda: len(os.listdir("/proc/self/task")) == 1, step=0.001)
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
    out, _ = host.process.communicate(timeout=120)
    assert json.loads(out.splitlines()[0]) == [5, None, None, False]


def test_a_caller_outside_of_our_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)
    with orders.watch_caller() as caller:
        assert caller is None


@pytest.mark.parametrize("gone", [True, False], ids=["reaped", "still a zombie"])
def test_a_caller_that_dies_while_we_look(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    if gone:
        dead.wait()
    parents = iter([dead.pid, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    before = os.listdir("/proc/self/fd")
    with orders.watch_caller() as caller:
        assert caller is not None
        poll = select.poll()
        poll.register(caller, select.POLLIN)
        assert [fd for fd, _ in poll.poll(0)] == [caller]
    assert os.listdir("/proc/self/fd") == before
    dead.wait()


# --- the time to end ---------------------------------------------------------------------------------------


def test_a_teardown_limit_stands_in_for_our_patience(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(DEAF), grace=1000.0, teardown=0.2)
    running.says("ready")
    running.signal(signal.SIGTERM)
    assert running.end() == [137, "signal", signal.SIGTERM, True]


def test_a_long_teardown_is_waited_for(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(POLITE), grace=0.001, teardown=1000.0)
    running.says("ready")
    running.signal(signal.SIGTERM)
    running.says("heard")
    running.hear("goodbye")
    running.says("goodbye")
    assert running.end() == [3, "signal", signal.SIGTERM, False]


def test_a_deadline_holds_also_during_a_teardown(start: Start, runner_as: Caller) -> None:
    running = start(runner_as, sh(DEAF), deadline=4.0, teardown=1000.0)
    running.says("ready")
    running.signal(signal.SIGTERM)
    assert running.end() == [137, "signal", signal.SIGTERM, True]


# --- the launch --------------------------------------------------------------------------------------------


def test_a_launch_that_was_in_time(start: Start, runner_as: Caller) -> None:
    """When the time comes the program runs, and that is all there is to be seen to."""
    running = start(runner_as, sh("read word; exit 5"), **{"launch is over": True})
    running.says("runs")
    running.hear("go")
    assert running.end() == [5, None, None, False]


# --- one that cannot be killed, and what runs out ----------------------------------------------------------


class Stubborn(Cell):
    """A cell that says what is done to it. It ends when its test says so, or never."""

    def __init__(self, runs: bool = True, hears: bool = True, dies_of: str = "") -> None:
        self.done: list[str] = []
        self.process = subprocess.Popen(["/bin/sleep", "1000"])
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.over_fd = None
        self.dies_of = dies_of
        self._runs = runs
        self._hears = hears

    def _told(self, word: str) -> None:
        self.done.append(word)
        if word == self.dies_of:
            self.process.kill()

    def end(self) -> None:
        self._told("end")

    def kill(self) -> None:
        self._told("kill")

    def runs(self) -> bool:
        self._told("runs?")
        return self._runs

    def signal_program(self, number: int) -> bool:
        self._told(f"signal {number}")
        return self._hears

    def wait(self) -> Exit:
        self._told("wait")
        self.process.wait()
        return Exit(137, True, None, Usage(0.0, 0.0, 0.0, 0))

    def give_up(self) -> Exit:
        self._told("give up")
        return Exit(None, True, None, Usage(0.0, 0.0, 0.0, 0), left=(self.pid,))


class Empty(Meter):
    """A limit that runs out when it is looked at for the `nth` time, or when something is to be read."""

    def __init__(self, name: str, nth: int = 1, fd: int | None = None) -> None:
        self.name, self.nth, self.fd = name, nth, fd
        self.looks = 0
        self.due = math.inf if fd is not None else 0.0

    def interest(self) -> Mapping[int, int]:
        return {} if self.fd is None else {self.fd: select.POLLIN}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        self.looks += 1
        if self.fd is not None:
            return self.name if self.fd in ready else None
        return self.name if self.looks >= self.nth else None


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stubborn]]:
    """With little patience, so that a test need not have any. But a cell has time to die."""
    made: list[Stubborn] = []

    def make(**how: Any) -> Stubborn:
        for step, name in (("end", "BWRAP_KILL_SECONDS"), ("kill", "KILL_SECONDS")):
            monkeypatch.setattr(watch, name, 20.0 if how.get("dies_of") == step else 0.05)
        made.append(Stubborn(**how))
        return made[-1]

    yield make
    for cell in made:
        cell.process.kill()
        cell.process.wait()
        os.close(cell.pidfd)


def ending(cell: Stubborn, *meters: Meter, sent: tuple[int, ...] = (), **clocks: float) -> watch.End:
    """Watch it, with clocks in seconds from now."""
    now = time.monotonic()
    set_to = {name: value if name == "teardown" else now + value for name, value in clocks.items()}
    with orders.watch_signals() as signals:
        for number in sent:
            os.kill(os.getpid(), number)
        return watch.wait(cell, signals, None, watch.Clocks(**set_to), meters)


class Channel:
    """Orders by a pipe, as a session gives them."""

    def __init__(self) -> None:
        self.fd, self.writer = os.pipe2(os.O_NONBLOCK)
        self.over = False

    def read_orders(self) -> list[int]:
        said = os.read(self.fd, 64)
        self.over = not said
        return list(said)


@one_case(
    ("said", "expected", "done"),
    [
        (b"", ("caller_died", None), ["end", "wait"]),
        (b"\x09", ("signal", 9), ["end", "wait"]),
        (b"\x0f\x09", ("signal", 15), ["end", "wait"]),
        (b"\x0f", ("signal", 15), ["signal 15", "end", "wait"]),
    ],
    ids=["gone", "kill", "term and kill", "term, then gone"],
)
def test_orders_by_a_channel(
    stubborn: Callable[..., Stubborn], said: bytes, expected: tuple[Any, ...], done: list[str]
) -> None:
    """Its end is the end of who gives them, looked at once; and 9 is not passed on but done."""
    cell = stubborn(dies_of="end")
    orders = Channel()
    os.write(orders.writer, said)
    if len(said) != 2:
        os.close(orders.writer)
    end = watch.wait(cell, orders, None, watch.Clocks(teardown=1000.0))
    assert (end.reason, end.signal) == expected and end.forced
    assert cell.done == done
    os.close(orders.fd)
    if len(said) == 2:
        os.close(orders.writer)


def test_every_step_is_bounded(stubborn: Callable[..., Stubborn]) -> None:
    """From within, then from outside, then no more; and who is left is named."""
    cell = stubborn()
    end = ending(cell, deadline=0.01)
    assert cell.done == ["end", "kill", "give up"]
    assert (end.reason, end.forced, end.exit.kill_incomplete) == ("deadline", True, True)
    assert end.exit.left == (cell.pid,)


@pytest.mark.parametrize(("dies_of", "done"), [("end", ["end", "wait"]), ("kill", ["end", "kill", "wait"])])
def test_no_step_more_than_needed(stubborn: Callable[..., Stubborn], dies_of: str, done: list[str]) -> None:
    cell = stubborn(dies_of=dies_of)
    end = ending(cell, deadline=0.01)
    assert cell.done == done
    assert (end.reason, end.exit.kill_incomplete) == ("deadline", False)


@one_case(
    ("how", "reason"),
    [
        ({"meters": ["disk"]}, "limit"),
        ({"launch": 0.01}, "launch"),
        ({"sent": (signal.SIGTERM,), "teardown": 0.05}, "signal"),
        ({"sent": (signal.SIGTERM, signal.SIGINT)}, "signal"),
    ],
    ids=["limit", "launch", "signal", "two signals"],
)
def test_whatever_the_reason_it_is_bounded(
    stubborn: Callable[..., Stubborn], how: dict[str, Any], reason: str
) -> None:
    cell = stubborn(runs=False)
    meters = [Empty(name) for name in how.pop("meters", ())]
    end = ending(cell, *meters, **how)
    assert (end.reason, end.exit.left) == (reason, (cell.pid,))
    assert [word for word in cell.done if word in ("end", "kill", "give up")] == ["end", "kill", "give up"]


def test_the_first_reason_stays(stubborn: Callable[..., Stubborn]) -> None:
    """Two limits, a deadline that passes meanwhile and a signal: it was the first limit."""
    first, second = Empty("disk"), Empty("output")
    end = ending(stubborn(), first, second, deadline=0.02, launch=0.02)
    assert (end.reason, end.limit) == ("limit", "disk")
    assert second.looks > 1  # looked at to the end: a relay has to be emptied
    end = ending(stubborn(), Empty("output", nth=5), deadline=-1.0)
    assert (end.reason, end.limit) == ("deadline", "output")
    end = ending(stubborn(), Empty("disk"), sent=(signal.SIGTERM,), teardown=0.05)
    assert (end.reason, end.limit, end.signal) == ("signal", "disk", signal.SIGTERM)


def test_a_signal_after_the_end_was_decided(stubborn: Callable[..., Stubborn]) -> None:
    """Changes nothing, and does not start the steps anew."""
    cell = stubborn()

    class Late(Empty):
        def look(self, ready: Mapping[int, int], now: float) -> str | None:
            if self.looks == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().look(ready, now)

    end = ending(cell, Late("disk"))
    assert (end.reason, end.limit) == ("limit", "disk")
    assert cell.done == ["end", "kill", "give up"]


def test_a_meter_that_always_wants_to_look(stubborn: Callable[..., Stubborn]) -> None:
    """It keeps the loop busy, and nobody else from being heard."""
    cell = stubborn(dies_of="end")
    meter = Empty("disk", nth=10**9)
    end = ending(cell, meter, deadline=1.0)
    assert (end.reason, end.exit.code) == ("deadline", 137)
    assert meter.looks > 10


def test_a_meter_with_a_descriptor(stubborn: Callable[..., Stubborn]) -> None:
    read, write = os.pipe()
    os.write(write, b"!")
    quiet_r, quiet_w = os.pipe()
    quiet, meter = Empty("disk", fd=quiet_r), Empty("output", fd=read)
    cell = stubborn(dies_of="end")
    end = ending(cell, quiet, meter)
    assert (end.reason, end.limit) == ("limit", "output")
    for fd in (read, write, quiet_r, quiet_w):
        os.close(fd)


def test_the_launch_is_looked_at_once(stubborn: Callable[..., Stubborn]) -> None:
    cell = stubborn(runs=True, dies_of="end")
    end = ending(cell, launch=0.01, deadline=1.0)
    assert cell.done == ["runs?", "end", "wait"]
    assert end.reason == "deadline"
    late = stubborn(runs=False, dies_of="end")
    assert ending(late, launch=0.01, deadline=20.0).reason == "launch"
    assert late.done == ["runs?", "end", "wait"]


def test_the_inits_clock_is_a_deadline_too(stubborn: Callable[..., Stubborn]) -> None:
    """It rang while we were stopped. If we had a reason of our own before, that stays."""
    cell = stubborn()
    cell.process.kill()
    expired = Exit(137, True, None, Usage(0.0, 0.0, 0.0, 0), expired=True)
    cell.wait = lambda: expired  # type: ignore[method-assign]
    end = ending(cell, deadline=1000.0)
    assert (end.reason, end.forced) == ("deadline", True)
    cell = stubborn(dies_of="end")
    cell.wait = lambda: expired  # type: ignore[method-assign]
    end = ending(cell, Empty("disk"))
    assert (end.reason, end.limit, end.forced) == ("limit", "disk", True)


def test_a_cell_that_ended_before_anything_ran_after_its_clock(stubborn: Callable[..., Stubborn]) -> None:
    """The cell's init was waited for as long as the clock ran, and ended by itself then."""
    nothing_ran = Exit(None, False, None, Usage(0.0, 0.0, 0.0, 0))
    refused = nothing_ran._replace(complaint="bwrap: it cannot")
    for ended, launch, deadline, reason in (
        (nothing_ran, -1.0, 1000.0, "launch"),
        (nothing_ran, -1.0, -2.0, "launch"),
        (nothing_ran, 1000.0, -1.0, "deadline"),
        (nothing_ran, 1000.0, 1000.0, None),
        (nothing_ran._replace(reached_exec=True), -1.0, -1.0, None),
        (nothing_ran._replace(signal=signal.SIGSYS), -1.0, -1.0, None),
        (nothing_ran._replace(code=3), -1.0, -1.0, None),
        (refused, -1.0, -1.0, None),
    ):
        cell = stubborn()
        cell.process.kill()
        cell.process.wait()
        cell.wait = lambda ended=ended: ended  # type: ignore[method-assign, misc]
        assert ending(cell, launch=launch, deadline=deadline).reason == reason
