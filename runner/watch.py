"""Waiting for a cell to end, or for a reason to end it.

Signals to the runner, a deadline, and the death of whoever started the runner. No threads and no sleeping:
one poll over descriptors, so that nothing is missed between two looks.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sandbox.cell import Cell, Exit
from sandbox.value import NamedTuple

# How long a plugin may take to end after it was asked to, before all of it is killed.
GRACE = 2.0
# How long bwrap may take to die of SIGKILL with all its children before the keeper is killed too, and with it
# the account of what was used.
PATIENCE = 1.0

_LONGEST_POLL = 86400.0  # poll(2) counts milliseconds in an int: 24 days

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

Reason = Literal["deadline", "signal", "caller_died"]


class End(NamedTuple):
    exit: Exit
    reason: Reason | None  # why we ended it; None: it ended by itself
    signal: int | None  # which signal made us
    forced: bool  # it had to be killed


class Signals:
    """The ending signals as a readable descriptor. One the caller has set to be ignored (nohup) stays so."""

    def __init__(self) -> None:
        # What the caller blocked would never arrive; a SIGCHLD it ignored would leave nobody to wait for.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {
            number: signal.signal(number, lambda *_: None)
            for number in _ENDING
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def arrived(self) -> list[int]:
        try:
            return [number for number in os.read(self.fd, 64) if number in self._old]
        except BlockingIOError:
            return []

    def close(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.fd)
        os.close(self._write)


@contextmanager
def watched_signals() -> Iterator[Signals]:
    """From just before the launch: then a signal must neither be lost nor kill us half-way. Not earlier: as
    long as nothing runs, ending at once is right, also if a look at a slow filesystem hangs."""
    signals = Signals()
    try:
        yield signals
    finally:
        signals.close()


@contextmanager
def watched_caller() -> Iterator[int | None]:
    """A descriptor that becomes readable when the process that started us is gone.

    Not the parent-death signal: that one follows the thread that forked us, and hosts start processes from
    worker threads that end while the host lives on.
    """
    parent = os.getppid()
    fd = None  # started by a process outside of our pid namespace
    if parent:
        try:
            fd = os.pidfd_open(parent)
        except ProcessLookupError:
            pass
        if os.getppid() != parent:
            # It died between the two looks. A pipe nobody writes to says so for ever.
            if fd is not None:
                os.close(fd)
            fd, write = os.pipe2(os.O_CLOEXEC)
            os.close(write)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def wait(cell: Cell, signals: Signals, caller: int | None, deadline: float | None) -> End:
    """Until the whole tree is gone. `deadline` is on the monotonic clock."""
    poll = select.poll()
    poll.register(cell.pidfd, select.POLLIN)
    poll.register(signals.fd, select.POLLIN)
    if caller is not None:
        poll.register(caller, select.POLLIN)
    reason: Reason | None = None
    number: int | None = None
    forced = False
    until = deadline
    while True:
        left = None if until is None else min(max(0.0, until - time.monotonic()), _LONGEST_POLL)
        ready = {fd for fd, _ in poll.poll(None if left is None else left * 1000 + 1)}
        if cell.pidfd in ready:
            return End(cell.wait(), reason, number, forced)
        enough = False
        if caller in ready:
            poll.unregister(caller)
            caller = None
            reason, enough = reason or "caller_died", True  # nobody is left to hear a goodbye
        elif signals.fd in ready and (arrived := signals.arrived()):
            # Asked twice, or the program is not there yet: then there is nothing to wait for.
            twice = reason == "signal" or len(arrived) > 1
            enough = twice or not cell.signal_program(arrived[0])
            reason, number = reason or "signal", number or arrived[0]
            if not enough:
                # A deadline that comes sooner still holds.
                until = min(until or float("inf"), time.monotonic() + GRACE)
        elif until is not None and time.monotonic() >= until:
            if forced:
                cell.kill()
                until = None
                continue
            reason, enough = reason or "deadline", True
        if enough and not forced:
            cell.end()
            forced, until = True, time.monotonic() + PATIENCE
