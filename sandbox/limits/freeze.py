"""Freezes a plugin without a cgroup freezer: by SIGSTOP to each of its processes."""

from __future__ import annotations

import os

from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable, Iterable

# A plugin that forks faster than we stop it keeps running; it is measured all the same.
_STOP_ROUNDS = 8
_MOST_PROCESSES = 256  # one descriptor is held for each


class SignalFreezer:
    """Stops the processes when called with True, and continues those that it has stopped when called with
    False.

    A process that was already stopped stays stopped. Our own child is never stopped: it is the cell's init,
    whose deadline must run even if we ourselves are stopped.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._held: dict[int, int] = {}  # pid to pidfd

    def __call__(self, on: bool) -> None:
        if on:
            for _ in range(_STOP_ROUNDS):
                if not self._stop():
                    break
        else:
            while self._held:
                _, fd = self._held.popitem()
                _send(fd, signal.SIGCONT)
                os.close(fd)

    def _stop(self) -> bool:
        """Stop all processes once. Returns whether there were new ones."""
        opened: dict[int, int] = {}
        try:
            for pid in self._processes():
                if (
                    pid not in self._held
                    and len(self._held) + len(opened) < _MOST_PROCESSES
                    and _is_running(pid)
                ):
                    try:
                        opened[pid] = os.pidfd_open(pid)
                    except OSError:
                        continue
            # List again, with the pidfds open: a pid may have been reused before.
            new = opened.keys() & set(self._processes()) if opened else set()
            for pid in new:
                self._held[pid] = opened.pop(pid)
        finally:
            for fd in opened.values():
                os.close(fd)
        # Those stopped before as well: a process that was still running may have continued them.
        for fd in self._held.values():
            _send(fd, signal.SIGSTOP)
        return bool(new)


def _send(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass  # it has ended


def _is_running(pid: int) -> bool:
    """Whether a process has to be stopped: it is alive, not stopped, and not our child."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b") ")[2].split()[:2]
    except OSError:
        return False
    return state not in (b"T", b"t", b"Z", b"X") and int(parent) != os.getpid()
