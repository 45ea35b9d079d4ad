"""The program that waits in the place of the cell's init, run by itself.

In a pid namespace of its own: it kills every process that it can reach when its work is over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.spawn import reaper
from sandbox.spawn.order import ENDING, read_ending

MACHINES = ("x86_64", "aarch64")
APART = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


def run(machine: str, folder: Path, ending: int) -> int:
    """The exit code of the program with this descriptor for its message. It has no children, so it ends at
    once."""
    file = folder / "reaper"
    file.write_bytes(reaper.image(reaper.ReaperOrder(1, None, ending, -1, ""), machine))
    file.chmod(0o700)
    argv = [*APART, str(file)]
    if machine != os.uname().machine:
        emulator = shutil.which(f"qemu-{machine}") or shutil.which(f"qemu-{machine}-static")
        if emulator is None:
            pytest.skip(f"needs qemu-{machine}, which runs programs of that machine")
        argv = [*APART, emulator, str(file)]
    return subprocess.run(argv, pass_fds=() if ending < 0 else (ending,), timeout=60).returncode


@pytest.mark.launches
@pytest.mark.parametrize("machine", MACHINES)
def test_it_reports_and_ends(machine: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "wb"):
        assert run(machine, tmp_path, write) == 0
        ending = read_ending(reader.fileno())
    assert ending is not None and ENDING.size == 1328
    assert (ending.status, ending.expired, ending.full) == (0, False, False)


@pytest.mark.launches
@pytest.mark.parametrize("machine", MACHINES)
def test_it_does_not_outlive_a_runner_that_died_before(machine: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb"):
        assert run(machine, tmp_path, write) == 125


@pytest.mark.launches
@pytest.mark.parametrize("machine", MACHINES)
def test_a_message_that_nobody_wants(machine: str, tmp_path: Path) -> None:
    assert run(machine, tmp_path, -1) == 0


# Pid 1 of the namespace, its child that stands for the runner and ends, and below that the program with a
# child of its own. No parent-death signal is set before the exec, as after an exec that has cleared it.
ORPHANED = """
import os, signal, sys, time

told, tell = os.pipe()
if not os.fork():
    waiting = os.fork()
    if not waiting:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        child = os.fork()
        if not child:
            time.sleep(600)
        if sys.argv[1] == "control":
            os.execv("/bin/sleep", ["runner-init", "3"])
        from sandbox.spawn import reaper
        file = os.memfd_create("it", 0)
        os.write(file, reaper.image(reaper.ReaperOrder(child, None, -1, -1, "")))
        os.execve(file, ["runner-init"], {})
    os.write(tell, b"%d" % waiting)
    name = "sleep" if sys.argv[1] == "control" else reaper_name
    while open(f"/proc/{waiting}/comm").read().strip() != name:
        time.sleep(0.01)
    os._exit(0)
os.wait()
pid = int(os.read(told, 16))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.launches
@pytest.mark.parametrize(("who", "ended"), [("program", "-9"), ("control", "0")])
def test_it_follows_the_runners_death_again(who: str, ended: str) -> None:
    code = f"reaper_name = {reaper.NAME!r}\n{ORPHANED}"
    argv = [*APART, sys.executable, "-c", code, who]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (ended, "")


# In the namespace: the program with one child, which gets the signal that its program was released.
RELEASED = """
import os, signal, sys

from sandbox.spawn import reaper
from sandbox.spawn.order import read_ending

read, write = os.pipe()
signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
waiting = os.fork()
if not waiting:
    child = os.fork()
    if not child:
        signal.pause()
    os.set_inheritable(write, True)
    seconds = {"parked": 0.01, "python": 0.01, "control": None}[sys.argv[1]]
    order = reaper.ReaperOrder(child, None, write, -1, "", seconds)
    if sys.argv[1] == "python":
        os._exit(reaper.wait(order))
    file = os.memfd_create("it", 0)
    os.write(file, reaper.image(order))
    os.execve(file, ["runner-init"], {})
os.kill(waiting, reaper.RELEASED)  # it finds this one when it waits
if sys.argv[1] == "control":
    while open(f"/proc/{waiting}/comm").read().strip() != reaper.NAME:
        pass
    with open(f"/proc/{waiting}/task/{waiting}/children") as file:
        os.kill(int(file.read()), signal.SIGKILL)
os.waitpid(waiting, 0)
print(read_ending(read).expired)
"""


@pytest.mark.launches
@pytest.mark.parametrize(("who", "expired"), [("parked", "True"), ("python", "True"), ("control", "False")])
def test_the_deadline_of_a_parked_program_runs_from_its_release(who: str, expired: str) -> None:
    argv = [*APART, sys.executable, "-c", RELEASED, who]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (expired, "")
