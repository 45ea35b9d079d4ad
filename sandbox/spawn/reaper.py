"""The cell's init after setup: a program that waits for all processes, kills leftovers and reports the usage.

The init is a clone of the runner or of a monitor. As such it has some 4 MB of private memory, because CPython
writes to almost every page it reads. But from now on it only waits for its children. So it executes a program
of some 100 instructions that takes 12 kB (assembly/reaper.*). An exec keeps all that matters: pid,
namespaces, ids, no_new_privs, open files and blocked signals. The parent-death signal is set again: it is
cleared by an exec on which a security module changes the label.

Where no nameless file may be executed (vm.memfd_noexec=2), the init remains a Python process and does the
same (`wait` in this module).
"""

from __future__ import annotations

import os
import resource
import struct
import time

from sandbox.spawn.machine_code import program
from sandbox.spawn.order import ENDING, IO_BYTES
from sandbox.speed.signals import signal
from sandbox.speed.value import NamedTuple

# Its name in ps(1), at most 15 bytes.
NAME = "runner-init"

# The table of assembly/reaper.inc, up to the scratch folder.
_TABLE = struct.Struct("<iii4xQ16s16xqq")
_CHILD, _ALARM = 1 << (signal.SIGCHLD - 1), 1 << (signal.SIGALRM - 1)

# Tells the cell's init that its parked program was released. Only processes outside of the cell can send it.
RELEASED = signal.SIGUSR1


class ReaperOrder(NamedTuple):
    """What the reaper waits for, and what it reports."""

    program: int  # the pid: when it ends, everything is ended
    deadline: float | None  # on the monotonic clock: then everything is ended
    ending: int  # descriptor for the message; -1: nobody reads it
    account: int  # of /proc/self/io; -1: the kernel has none
    scratch: str  # the folder that Ending.full is about; empty: none
    seconds: float | None = None  # of a parked program: its deadline, from RELEASED on


def image(order: ReaperOrder, machine: str = "") -> bytes:
    # Without a deadline there is no timer: a SIGALRM from elsewhere stays blocked.
    signals = _CHILD if order.deadline is None else _CHILD | _ALARM
    timer = 0, 0
    if order.seconds is not None:
        signals |= _ALARM | 1 << (RELEASED - 1)
        timer = int(order.seconds), max(1, int(order.seconds % 1 * 1e6))  # a timer of 0 would never expire
    table = _TABLE.pack(order.program, order.account, order.ending, signals, NAME.encode(), *timer)
    return program("reaper", table + os.fsencode(order.scratch) + b"\0", machine)


def execute(file: int, order: ReaperOrder, held: tuple[int, ...]) -> None:
    """Execute the program, with `held` and the order's descriptors open. Returns only if that fails.

    `file` is an empty memfd that may be executed. All signals have to be blocked.
    """
    written = image(order)
    try:
        if os.write(file, written) != len(written):
            return
        for fd in (order.ending, order.account, *held):
            if fd >= 0:
                os.set_inheritable(fd, True)
        # A timer survives an exec. Its signal stays blocked: the program waits for it and SIGCHLD.
        if order.deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, order.deadline - time.monotonic()))
        os.execve(file, [NAME], {})
    except OSError:  # most likely a security module that forbids executing nameless files
        signal.setitimer(signal.ITIMER_REAL, 0)


def wait(order: ReaperOrder) -> int:
    """The same in Python. Returns the status to exit with."""
    before = _read_account(order.account)
    status, expired, deadline = 0, False, order.deadline
    awaited = {signal.SIGCHLD} if order.seconds is None else {signal.SIGCHLD, RELEASED}
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == order.program:
            status = ended
            # bwrap's own namespace ends with bwrap, but bwrap may have ended before it made one.
            _kill_all()
        if pid:
            continue
        # All signals are blocked here, so a SIGCHLD that arrives between two calls is not lost.
        if deadline is None or expired:
            if signal.sigwait(awaited) == RELEASED and order.seconds is not None and not expired:
                deadline = time.monotonic() + order.seconds
        elif not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic())):
            expired = True
            _kill_all()
    if order.ending >= 0:
        os.write(order.ending, _message(order, status, expired, before))
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _message(order: ReaperOrder, status: int, expired: bool, before: bytes) -> bytes:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    after = _read_account(order.account)
    times = (int(part) for each in (used.ru_utime, used.ru_stime) for part in (each, each % 1 * 1e6))
    try:
        found = os.statvfs(order.scratch)
    except OSError:
        room = -1, 0, 0, 0, 0, 0, 0, 0
    else:
        room = 0, 0, 0, found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
    return ENDING.pack(
        *(status, expired, room[0], *times, used.ru_maxrss, *room[1:]),
        *(len(before), len(after), before, after),
    )


def _kill_all() -> None:
    """Kill every process below us in one pass. No fork escapes: the kernel holds the lock that fork needs."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read_account(fd: int) -> bytes:
    return b"" if fd < 0 else os.pread(fd, IO_BYTES, 0)
