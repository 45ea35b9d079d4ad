"""The gate of one plugin, as the process that launches it sees it: started before it, ended after it.

The gate is forked and not executed, and confines itself before it serves. It gets the sockets of the plugin's
network namespace from the process that made it. When the plugin has ended, a byte on a pipe tells the gate to
deliver what the plugin has sent, and then to end. It ends at once when the process that launched it has
ended, or closes its end of that pipe. Whatever keeps it from starting keeps the plugin from starting.
"""

from __future__ import annotations

import _socket
import os
import select
import time

from sandbox.limits.meter import Meter
from sandbox.network.audit import AuditLog
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import find_recipe
from sandbox.plan.layers import LayerUnavailable
from sandbox.spawn.network import outside_network
from sandbox.spawn.order import NetworkOrder
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Callable, Collection, Iterator, Mapping, NoReturn

if TYPE_CHECKING:
    from sandbox.spec import Limits

# How long the gate may take to deliver what a plugin had sent when it ended. Resolving and connecting are
# part of it, and a server may read slowly. The gate ends as soon as it has nothing to deliver.
DELIVERY_SECONDS = 5.0
# How long it may take to write its last lines when it has been told to end at once, before it is killed.
_LAST_LINES_SECONDS = 1.0
_READ_BYTES = 64 << 10


class GateProcess:
    def __init__(
        self, pid: int, audit_fd: int, alive: int, order: NetworkOrder, channel: _socket.socket
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.audit_fd = audit_fd
        self.log = AuditLog()
        self.order = order  # for the spawner
        self._alive = alive
        self._channel = channel
        self._has_ended = False

    def let_go(self) -> None:
        """Close our copy of the channel: from now on the gate notices if the cell's init ends."""
        self._channel.close()

    def read(self) -> bool:
        """Take what it has written. False at the end: it has ended."""
        try:
            data = os.read(self.audit_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self.log.feed(data)
        self._has_ended = not data
        return bool(data)

    def drain(self, seconds: float, stop: Collection[int] = ()) -> None:
        """Take what it writes until it ends, for `seconds` at most, however much it writes, or until one of
        `stop` is readable."""
        until = time.monotonic() + seconds
        watch = select.poll()
        for fd in (self.audit_fd, *stop):
            watch.register(fd, select.POLLIN)
        while (left := until - time.monotonic()) > 0 and (ready := watch.poll(left * 1000)):
            if any(fd != self.audit_fd for fd, _ in ready) or not self.read():
                return

    def dismiss(self) -> None:
        """The plugin has ended. The gate ends when it has delivered what the plugin had sent; drain() waits
        for that."""
        self.let_go()
        with suppress(BrokenPipeError):
            os.write(self._alive, b".")

    def close(self) -> None:
        """End it at once, if it has not ended, and reap it."""
        self.let_go()
        os.close(self._alive)
        self.drain(_LAST_LINES_SECONDS)
        by_itself = self._has_ended
        if not by_itself:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        if by_itself and status and not self.log.gate_ended_early:
            self.log.end_early()
        self.drain(_LAST_LINES_SECONDS)  # it has ended: what is left in the pipe
        os.close(self.pidfd)
        os.close(self.audit_fd)


class GateMeter(Meter):
    """Reads the audit lines while the plugin runs. It never ends the plugin."""

    def __init__(self, gate: GateProcess) -> None:
        self._gate = gate
        self._open = True

    def interest(self) -> Mapping[int, int]:
        return {self._gate.audit_fd: select.POLLIN} if self._open else {}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._open and self._gate.audit_fd in ready and not self._gate.read():
            self._open = False
            self._gate.log.end_early()
        return None


@contextmanager
def open_gate(
    egress: EgressPlan,
    uid_range: tuple[int, int] | None,
    until: float | None = None,
    plugin: Limits | None = None,
    forget: Callable[[], None] | None = None,
) -> Iterator[GateProcess]:
    """Start the gate. Raises LayerUnavailable, and OSError if there are no processes or descriptors left.

    `uid_range`: what root leases the gate's own uid from. `until`: see NetworkOrder. `plugin`: its limits,
    of which those of processor time are the gate's too. `forget`: removes from the gate what it must not
    have. The gate waits for its sockets; whether it serves, the cell's init learns from it.
    """
    recipe = find_recipe(egress)
    if plugin is not None:
        egress = egress._replace(limits=egress.limits._replace(cpu=plugin.cpu, cpu_time=plugin.cpu_time))
    with ExitStack() as stack:
        identity = None
        if uid_range is not None:
            # The gate closes its copy of the lease, and dies with this process.
            uid, lease = _lease(uid_range)
            identity = uid, uid
            stack.callback(os.close, lease)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
        stack.callback(ours.close)
        audit_r, audit_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        alive_r, alive_w = os.pipe2(os.O_CLOEXEC)
        gates = (theirs.fileno(), audit_w, alive_r)
        try:
            pid = _fork_gate(egress, gates, (ours.fileno(), audit_r, alive_w), identity, forget)
        except BaseException:
            for fd in (audit_r, alive_w):
                os.close(fd)
            raise
        finally:
            # While a copy of its ends is open here, nobody would see that it has ended.
            for fd in (audit_w, alive_r):
                os.close(fd)
            theirs.close()
        order = NetworkOrder(recipe, ours.fileno(), outside_network(), until)
        try:
            gate = GateProcess(pid, audit_r, alive_w, order, ours)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for fd in (audit_r, alive_w):
                os.close(fd)
            raise
        try:
            yield gate
        finally:
            gate.close()


def _lease(uid_range: tuple[int, int]) -> tuple[int, int]:
    from sandbox.identity.leases import UidsUnavailable, lease_any

    try:
        lease = lease_any(*uid_range)
    except UidsUnavailable as missing:
        hint = "the gate of each plugin with a list of hosts needs a uid of its own; end other plugins"
        raise LayerUnavailable("network", str(missing), hint) from None
    return lease.uid, lease.fd


def _run_gate(
    channel: int, egress: EgressPlan, audit: int, alive: int, identity: tuple[int, int] | None
) -> NoReturn:
    # Imported by the gate alone, while this process goes on with the launch.
    from sandbox.gate.gate import run_gate

    run_gate(channel, egress, audit, alive, identity)


def _fork_gate(
    egress: EgressPlan,
    gates: tuple[int, int, int],
    ours: tuple[int, ...],
    identity: tuple[int, int] | None,
    forget: Callable[[], None] | None,
) -> int:
    """`gates`: its ends of channel, audit and alive. `ours`: the other ends, which it must not hold."""
    # A signal would run our handlers in the child. The gate unblocks them when it has reset them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                for fd in ours:
                    os.close(fd)
                if forget is not None:
                    forget()
                channel, audit, alive = gates
                _run_gate(channel, egress, audit, alive, identity)
            finally:
                os._exit(1)  # below us is the parent's stack
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid
