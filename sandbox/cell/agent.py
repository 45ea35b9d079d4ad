"""Start and end the ssh agent of one plugin, from the launching process. It is started before the plugin.

This process connects to the person's agent, and asks once which keys it has. The agent of the cage is forked
with that connection (sandbox/broker/agent).
"""

from __future__ import annotations

import _socket
import os
import select
import time

from sandbox.cell.beside import AuditedProcess, BesideEnds, fork_audited
from sandbox.network.audit import AuditLog
from sandbox.network.egress import AuditLine
from sandbox.network.ssh import SOCKET, SshPlan
from sandbox.plan.layers import LayerUnavailable
from sandbox.spawn.order import AgentOrder, SpawnError
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Callable, Iterator

if TYPE_CHECKING:
    from sandbox.spec import Limits

LAYER = KIND = "ssh"  # in messages, and of audit lines
_ANSWER_SECONDS = 10.0  # for the list of keys, which no agent asks the person about
_FAULT_SECONDS = 0.5  # for the message of an agent that could not start
_MOST_LIST_BYTES = 256 << 10  # as OpenSSH's


class AgentProcess(AuditedProcess):
    def __init__(
        self, pid: int, audit_fd: int, alive: int, order: AgentOrder, channel: _socket.socket
    ) -> None:
        super().__init__(pid, audit_fd, alive, channel)
        self.order = order  # for the spawner
        self._told: AuditLog | None = None

    def tell(self, log: AuditLog) -> None:
        """Write what it does into the log of the plugin's gate."""
        self._told = log
        self.log.on_line = self._store

    def _store(self, line: AuditLine) -> None:
        assert self._told is not None
        if line.kind != KIND:  # it has ended early
            line = AuditLine(KIND, "", 0, "failed", reason=line.reason)
        self._told.store(line)

    def close(self) -> None:
        super().close()
        if self._told is not None:
            self._told.dropped += self.log.dropped
            for key, count in self.log.totals.items():
                self._told.totals[key] = max(count, self._told.totals[key])


@contextmanager
def open_agent(
    plan: SshPlan,
    uid_range: tuple[int, int] | None,
    until: float | None,
    limits: Limits,
    forget: Callable[[], None] | None,
) -> Iterator[AgentProcess]:
    """Start the agent. Raises LayerUnavailable, and OSError if processes or descriptors are exhausted. The
    arguments are those of open_gate()."""
    outside = _connect(os.environ.get("SSH_AUTH_SOCK", ""))
    with ExitStack() as stack:
        stack.callback(outside.close)
        keys = _given_keys(plan, outside)

        def run(ends: BesideEnds) -> None:
            # Imported only there, while this process goes on with the launch.
            from sandbox.broker.agent.service import AgentDescriptors, run_agent

            held = AgentDescriptors(ends.channel, outside.fileno(), ends.audit, ends.alive)
            run_agent(keys, plan.hosts, limits, held, ends.identity)

        def make(pid: int, audit: int, alive: int, channel: _socket.socket) -> AgentProcess:
            order = AgentOrder(SOCKET, channel.fileno(), until)
            return AgentProcess(pid, audit, alive, order, channel)

        agent = stack.enter_context(fork_audited(run, uid_range, forget, make))
        outside.close()  # the agent alone has it
        yield agent


def agent_fault(agent: AgentProcess, error: SpawnError) -> LayerUnavailable:
    """Why a plugin that should have an ssh agent was not started."""
    agent.close_channel()
    agent.drain(_FAULT_SECONDS)
    why = f" (the agent says: {agent.log.fault})" if agent.log.fault else ""
    return LayerUnavailable(LAYER, f"{error}{why}", "leave out --ssh-key to start it without")


def _connect(path: str) -> _socket.socket:
    if not path:
        hint = "start one with `eval $(ssh-agent)`, add the key with `ssh-add`, and start this again"
        raise LayerUnavailable(LAYER, "you have no ssh agent: SSH_AUTH_SOCK is not set", hint)
    kind = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
    outside = _socket.socket(_socket.AF_UNIX, kind, 0)
    try:
        outside.connect(path)
    except OSError as error:
        outside.close()
        message = f"your ssh agent does not answer at {path}: {error.strerror or error}"
        raise LayerUnavailable(LAYER, message, "see with `ssh-add -l` whether it runs") from None
    return outside


def _given_keys(plan: SshPlan, outside: _socket.socket) -> dict[bytes, str]:
    """The keys with their fingerprints. Raises LayerUnavailable if the person's agent does not have all."""
    from sandbox.broker.agent.filter import can_sign, fingerprint
    from sandbox.broker.agent.messages import Malformed, read_identities

    try:
        held = {fingerprint(key): key for key in read_identities(_ask_for_keys(outside))}
    except (Malformed, OSError):
        message = "your ssh agent gave no list of its keys"
        raise LayerUnavailable(LAYER, message, "see with `ssh-add -l` what it says") from None
    for name in plan.keys:
        if name not in held:
            hint = "`ssh-add -l` lists the keys it has; `ssh-add FILE` adds one"
            raise LayerUnavailable(LAYER, f"your ssh agent has no key {name}", hint)
        if not can_sign(held[name]):
            message = f"the key {name} is of a kind that is not supported"
            raise LayerUnavailable(LAYER, message, "use a key of Ed25519, ECDSA or RSA")
    return {held[name]: name for name in plan.keys}


def _ask_for_keys(outside: _socket.socket) -> bytes:
    """The agent's answer, without its length. Raises OSError if there is none in time, or too much."""
    from sandbox.broker.agent import messages

    outside.send(messages.message(messages.REQUEST_IDENTITIES))
    until = time.monotonic() + _ANSWER_SECONDS
    watch = select.poll()
    watch.register(outside.fileno(), select.POLLIN)
    received, end = b"", messages.LENGTH.size
    while len(received) < end:
        if not watch.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError
        piece = outside.recv(end - len(received))
        if not piece:
            raise ConnectionError
        received += piece
        if len(received) == end == messages.LENGTH.size:
            end += min(int.from_bytes(received), _MOST_LIST_BYTES + 1)
    if end > messages.LENGTH.size + _MOST_LIST_BYTES:
        raise ConnectionError
    return received[messages.LENGTH.size :]
