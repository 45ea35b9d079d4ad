"""Start and end the observer of one cage, from the launching process: for `runner learn`.

The observer is started before the plugin and outlives it. It only watches (sandbox/cell/notifier.py). If it
ends early, the plugin's calls fail, and the plugin is ended.
"""

from __future__ import annotations

import _socket
import json
import os
import select

from sandbox.cell.beside import fork_beside
from sandbox.cell.notifier import USES, NotifierDescriptors, run_notifier
from sandbox.limits.meter import OBSERVER, Meter
from sandbox.seccomp.filter import machine_arch
from sandbox.seccomp.observation import observing_filter
from sandbox.spawn.order import ObserverOrder
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable, Iterator, Mapping
from sandbox.speed.value import NamedTuple

# How long the observer may take to write its notes when the plugin has ended, before it is killed.
_LAST_NOTES_SECONDS = 5.0


class SeenPath(NamedTuple):
    path: str  # absolute, in the cage, as the plugin spelled it
    uses: tuple[str, ...]  # of USES
    times: int


class SeenConnection(NamedTuple):
    host: str  # the name that the address was given for, else the address
    port: int
    times: int


class Observation(NamedTuple):
    """What a plugin asked the kernel for. It chose all of these words."""

    paths: tuple[SeenPath, ...] = ()
    connections: tuple[SeenConnection, ...] = ()
    missed: int = 0  # calls about more than could be noted
    unread: int = 0  # calls whose arguments could not be read
    complete: bool = False  # False: the observer ended early


class CageObserver(Meter):
    """The observer's process. As a meter it ends the plugin if the observer is gone."""

    why = "the process that observes the plugin has ended, and without it the plugin's calls fail"

    def __init__(self, pid: int, alive: int, result: int, channel: _socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.order = ObserverOrder(observing_filter(machine_arch()), channel.fileno())
        self._channel = channel
        self._alive = alive
        self._result = result
        self._observation: Observation | None = None

    def close_channel(self) -> None:
        """Close our copy of the channel: from now on the observer notices if the cage is not built."""
        self._channel.close()

    def interest(self) -> Mapping[int, int]:
        return {self.pidfd: select.POLLIN} if self._observation is None else {}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        return OBSERVER if self._observation is None and self.pidfd in ready else None

    def collect(self, names: Mapping[str, str]) -> Observation:
        """End the observer, if it still runs, and return what it saw. `names`: of addresses."""
        if self._observation is None:
            self._observation = self._read(self._end(), names)
        return self._observation

    def close(self) -> None:
        if self._observation is None:
            self.collect({})

    def _end(self) -> int:
        self.close_channel()
        with suppress(BrokenPipeError):
            os.write(self._alive, b".")
        watch = select.poll()
        watch.register(self.pidfd, select.POLLIN)
        if not watch.poll(_LAST_NOTES_SECONDS * 1000):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return status

    def _read(self, status: int, names: Mapping[str, str]) -> Observation:
        os.lseek(self._result, 0, os.SEEK_SET)
        with open(self._result, "rb", closefd=False) as file:
            raw = file.read()
        if status or not raw:
            return Observation()
        found = json.loads(raw)
        return Observation(
            tuple(
                SeenPath(path, tuple(use for bit, use in enumerate(USES) if uses >> bit & 1), times)
                for path, uses, times in found["paths"]
            ),
            tuple(
                SeenConnection(names.get(address, address), port, times)
                for address, port, times in found["connections"]
            ),
            found["missed"],
            found["unread"],
            True,
        )


@contextmanager
def open_observer(
    identity: tuple[int, int] | None, forget: Callable[[], None] | None
) -> Iterator[CageObserver]:
    """Start the observer. Raises OSError if processes or descriptors are exhausted.

    `identity`: its uid and gid, if the caller is root: the plugin's. `forget`: called in the observer, to
    remove what it must not have.
    """
    with ExitStack() as stack:
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
        stack.callback(ours.close)
        alive_r, alive_w = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, alive_w)
        result = os.memfd_create("runner-observer", os.MFD_CLOEXEC)
        stack.callback(os.close, result)
        try:
            descriptors = NotifierDescriptors(theirs.fileno(), alive_r, result)
            others = (ours.fileno(), alive_w)
            pid = fork_beside(lambda: run_notifier(descriptors, identity), others, forget)
        finally:
            theirs.close()
            os.close(alive_r)
        try:
            observer = CageObserver(pid, alive_w, result, ours)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        stack.callback(observer.close)
        yield observer
