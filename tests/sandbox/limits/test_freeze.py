"""Freezing processes by signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.limits.freeze import SignalFreezer
from tests import elsewhere
from tests.tables import wait_for

# Stands for the cell's init; below it a family of processes that do nothing, and one that has stopped itself.
FAMILY = """
import os, signal, time
if not os.fork():
    for _ in range(3):
        if not os.fork():
            break
    else:
        if not os.fork():
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""
BREEDER = """
import os, signal, time
print(os.getpid(), flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if not os.fork():
    until = time.monotonic() + 600
    while time.monotonic() < until:
        if not os.fork():
            time.sleep(0.005)
            os._exit(0)
time.sleep(600)
"""


def below(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        try:
            text = Path(f"/proc/{(at := todo.pop())}/task/{at}/children").read_text()
        except OSError:
            continue
        children = [int(word) for word in text.split()]
        found += children
        todo += children
    return found


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "gone"


def become(condition: Callable[[], bool]) -> bool:
    return wait_for(condition, 60, step=0.005)


@contextlib.contextmanager
def family(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/usr/bin/python3", "-c", program], stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            elsewhere.line(process)
            yield process
        finally:
            while pids := [pid for pid in below(process.pid) if state(pid) not in ("Z", "X", "gone")]:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.kill()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_all_are_stopped_and_continued_except_those_stopped_before() -> None:
    before = descriptors()
    with family(FAMILY) as init:
        assert become(lambda: sorted(map(state, below(init.pid))) == ["S"] * 4 + ["T"])
        [own] = [pid for pid in below(init.pid) if state(pid) == "T"]
        halt = SignalFreezer(lambda: [init.pid, *below(init.pid)])
        halt(True)
        assert become(lambda: {state(pid) for pid in below(init.pid)} == {"T"})
        assert state(init.pid) == "S"  # our own child
        halt(False)
        assert become(lambda: sorted(map(state, below(init.pid))) == ["S"] * 4 + ["T"])
        assert state(own) == "T"
    assert descriptors() == before


def test_children_forked_meanwhile_are_stopped_as_well() -> None:
    with family(BREEDER) as init:
        assert become(lambda: len(below(init.pid)) > 2)
        halt = SignalFreezer(lambda: below(init.pid))

        def are_still() -> bool:
            halt(True)  # again, as a meter does: a fork that was under way may have added one
            found = below(init.pid)
            # Who is stopped has no fork under way, so the second look misses nobody.
            return bool(found) and set(map(state, found)) == {"T"} and below(init.pid) == found

        assert become(are_still)
        halted = below(init.pid)
        time.sleep(0.1)  # nobody is there who could fork
        assert below(init.pid) == halted
        halt(False)
        assert become(lambda: below(init.pid) != halted)


def test_repeated_calls_and_ended_processes_are_harmless() -> None:
    before = descriptors()
    with family(FAMILY) as init:
        assert become(lambda: len(below(init.pid)) == 5)
        halt = SignalFreezer(lambda: below(init.pid))
        halt(False)
        halt(True)
        halt(True)
        for pid in below(init.pid):
            os.kill(pid, signal.SIGKILL)
        halt(False)
        halt(False)
    assert descriptors() == before


def test_a_reused_pid_is_left_alone() -> None:
    """Listed the first time and not the second: the process with that pid is not ours."""
    with family(FAMILY) as init:
        assert become(lambda: sorted(map(state, below(init.pid))) == ["S"] * 4 + ["T"])
        listings = iter([below(init.pid), [], below(init.pid), []])
        halt = SignalFreezer(lambda: next(listings, []))
        halt(True)
        time.sleep(0.1)  # a signal would have arrived
        assert sorted(map(state, below(init.pid))) == ["S"] * 4 + ["T"]
        halt(False)


def test_a_process_born_after_the_first_pass_is_stopped_in_the_next() -> None:
    with family(FAMILY) as init:
        assert become(lambda: sorted(map(state, below(init.pid))) == ["S"] * 4 + ["T"])
        first, *others = [pid for pid in below(init.pid) if state(pid) == "S"]
        listings = iter([[first], [first, *others]])
        halt = SignalFreezer(lambda: next(listings, [first, *others]))
        halt(True)
        assert become(lambda: {state(pid) for pid in (first, *others)} == {"T"})
        halt(False)
        assert become(lambda: {state(pid) for pid in (first, *others)} == {"S"})
