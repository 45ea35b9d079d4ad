"""Give this process the priority of an ordinary program.

A caller may run with real-time scheduling, a negative nice value or real-time I/O, and every child inherits
that. A plugin that loops would then keep the host's own programs from running. A lower priority stays, and so
does the choice of processors.
"""

from __future__ import annotations

import os

from sandbox.speed.libc import Library, get_errno
from sandbox.speed.value import NamedTuple

_SCHED_OTHER, _SCHED_FIFO, _SCHED_RR, _SCHED_DEADLINE = 0, 1, 2, 6
_SCHED_RESET_ON_FORK = 0x40000000
_NO_PRIORITY = bytes(4)  # struct sched_param
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_SHIFT, _IOPRIO_CLASS_RT = 13, 1
_IOPRIO_NONE = 0  # it follows the nice value


class _Numbers(NamedTuple):
    """Not by the C library: musl's functions for scheduling do nothing, and no library has those for I/O."""

    sched_getscheduler: int
    sched_setscheduler: int
    ioprio_get: int
    ioprio_set: int


SYSCALLS = {"x86_64": _Numbers(145, 144, 252, 251), "aarch64": _Numbers(120, 119, 31, 30)}


def take_ordinary_priority(libc: Library) -> None:
    """Raises OSError if a higher priority cannot be given up."""
    numbers = SYSCALLS.get(os.uname().machine)
    if numbers is not None:
        policy = libc.syscall(numbers.sched_getscheduler, 0) & ~_SCHED_RESET_ON_FORK
        if policy in (_SCHED_FIFO, _SCHED_RR, _SCHED_DEADLINE):
            _require(libc.syscall(numbers.sched_setscheduler, 0, _SCHED_OTHER, _NO_PRIORITY))
        if (
            libc.syscall(numbers.ioprio_get, _IOPRIO_WHO_PROCESS, 0) >> _IOPRIO_CLASS_SHIFT
            == _IOPRIO_CLASS_RT
        ):
            _require(libc.syscall(numbers.ioprio_set, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_NONE))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _require(result: int) -> None:
    if result < 0:
        raise OSError(get_errno(), "")
