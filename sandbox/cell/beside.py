"""Fork a process that runs beside a cell: its gate or its observer. It is not executed, so it needs no
interpreter of its own."""

from __future__ import annotations

import os

from sandbox.spawn.priority import take_ordinary_priority
from sandbox.speed.libc import open_libc
from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable


def fork_beside(run: Callable[[], None], ours: tuple[int, ...], forget: Callable[[], None] | None) -> int:
    """Returns the pid. `run`: called in the process, with all signals blocked. `ours`: descriptors that it
    must not hold, or it would not notice that we close them. `forget`: called first, to remove what it must
    not have."""
    # Otherwise a signal would run our handlers in the child. `run` unblocks signals after resetting them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                for fd in ours:
                    os.close(fd)
                take_ordinary_priority(open_libc())  # what it does, the plugin asks for
                if forget is not None:
                    forget()
                run()
            finally:
                os._exit(1)  # the stack below is a copy of the parent's
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid
