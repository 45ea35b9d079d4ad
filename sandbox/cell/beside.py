"""Fork a process that runs beside a cell: its gate, its ssh agent or its observer. It is not executed, so it
needs no interpreter of its own."""

from __future__ import annotations

import os
import select
import time

from sandbox.limits.meter import Meter
from sandbox.network.audit import AuditLog
from sandbox.plan.layers import LayerUnavailable
from sandbox.spawn.priority import take_ordinary_priority
from sandbox.speed.libc import open_libc
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Callable, Collection, Iterator, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    import _socket
    from typing import TypeVar

    Process = TypeVar("Process", bound="AuditedProcess")

# How long a process may take to write its last audit lines when it is to end at once, before it is killed.
_LAST_LINES_SECONDS = 1.0
_READ_BYTES = 64 << 10


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


def lease_beside(uid_range: tuple[int, int]) -> tuple[int, int]:
    """A uid for a process beside a cell, and the descriptor that holds the lease. Raises LayerUnavailable."""
    from sandbox.identity.leases import UidsUnavailable, lease_any

    try:
        lease = lease_any(*uid_range)
    except UidsUnavailable as missing:
        hint = "the gate of each plugin with a list of hosts needs a uid of its own; end other plugins"
        raise LayerUnavailable("network", str(missing), hint) from None
    return lease.uid, lease.fd


class AuditedProcess:
    """A process beside a cell that writes audit lines."""

    def __init__(self, pid: int, audit_fd: int, alive: int, channel: _socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.audit_fd = audit_fd
        self.log = AuditLog()
        self._alive = alive
        self._channel = channel
        self._has_ended = False

    def close_channel(self) -> None:
        """Close our copy of the channel: from now on the process notices if the cell's init ends."""
        self._channel.close()

    def read(self) -> bool:
        """Read audit lines. False if the process has ended."""
        try:
            data = os.read(self.audit_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self.log.feed(data)
        self._has_ended = not data
        return bool(data)

    def drain(self, seconds: float, stop: Collection[int] = ()) -> None:
        """Read audit lines until it ends, one of `stop` is readable, or `seconds` have passed."""
        until = time.monotonic() + seconds
        watch = select.poll()
        for fd in (self.audit_fd, *stop):
            watch.register(fd, select.POLLIN)
        while (left := until - time.monotonic()) > 0 and (ready := watch.poll(left * 1000)):
            if any(fd != self.audit_fd for fd, _ in ready) or not self.read():
                return

    def close(self) -> None:
        """End it at once, if it still runs, and reap it."""
        self.close_channel()
        os.close(self._alive)
        self.drain(_LAST_LINES_SECONDS)
        by_itself = self._has_ended
        if not by_itself:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if by_itself and status and not self.log.gate_ended_early:
            self.log.end_early()
        self.drain(_LAST_LINES_SECONDS)  # it has ended: read what is left in the pipe
        os.close(self.pidfd)
        os.close(self.audit_fd)


class BesideEnds(NamedTuple):
    """What such a process holds."""

    channel: int  # to the cell's init
    audit: int  # takes the audit lines
    alive: int  # becomes readable when it has to end
    identity: tuple[int, int] | None  # the uid and gid to change to


@contextmanager
def fork_audited(
    run: Callable[[BesideEnds], None],
    uid_range: tuple[int, int] | None,
    forget: Callable[[], None] | None,
    make: Callable[[int, int, int, _socket.socket], Process],
) -> Iterator[Process]:
    """Fork the process, which ends with the context. `run` and `forget`: see fork_beside(). `uid_range`: for
    its own uid, if the caller is root. `make`: makes it from what an AuditedProcess takes. Raises
    LayerUnavailable, and OSError if processes or descriptors are exhausted."""
    import _socket

    with ExitStack() as stack:
        identity = None
        if uid_range is not None:
            # The process closes its copy of the lease, and dies with this one.
            uid, lease = lease_beside(uid_range)
            identity = uid, uid
            stack.callback(os.close, lease)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
        stack.callback(ours.close)
        audit_r, audit_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        alive_r, alive_w = os.pipe2(os.O_CLOEXEC)
        ends = BesideEnds(theirs.fileno(), audit_w, alive_r, identity)
        try:
            pid = fork_beside(lambda: run(ends), (ours.fileno(), audit_r, alive_w), forget)
        except BaseException:
            for fd in (audit_r, alive_w):
                os.close(fd)
            raise
        finally:
            # While copies of its ends are open here, its end would go unnoticed.
            for fd in (audit_w, alive_r):
                os.close(fd)
            theirs.close()
        try:
            process = make(pid, audit_r, alive_w, ours)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for fd in (audit_r, alive_w):
                os.close(fd)
            raise
        try:
            yield process
        finally:
            process.close()


class AuditMeter(Meter):
    """Reads the audit lines while the plugin runs. Unlike other meters it never ends the plugin."""

    def __init__(self, process: AuditedProcess) -> None:
        self._process = process
        self._open = True

    def interest(self) -> Mapping[int, int]:
        return {self._process.audit_fd: select.POLLIN} if self._open else {}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._open and self._process.audit_fd in ready and not self._process.read():
            self._open = False
            self._process.log.end_early()
        return None
