"""The ssh agent of one cage: a process of its own, forked and not exec'd, confined as the gate is.

    P --fork--> agent: loads the keys of hosts, receives the listener, confines itself, "g", serves
    cell's init: makes the listener in a folder of the cage, sends it, waits for the "g"

It holds one connection to the person's own agent, which the launching process has opened, and gives it one
request at a time. It can open no other. A client whose request waits is not read.
"""

from __future__ import annotations

import _socket as socket
import gc
import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from sandbox.broker.agent import messages as wire
from sandbox.broker.agent.calls import agent_filter
from sandbox.broker.agent.filter import AgentConversation, AgentRules, HostKey
from sandbox.broker.agent.host_key import load_verifier
from sandbox.broker.agent.outside import GONE, Outside
from sandbox.gate.audit import AuditPipe, ReaderGone, encode_line, report_fault
from sandbox.gate.confine import (
    close_others,
    confine,
    follow_parent,
    forget_environment,
    is_alive,
    leave_terminal,
)
from sandbox.gate.cpu_limiter import CpuLimiter, CpuTimeSpent
from sandbox.gate.loop import BROKEN, READ, WRITE, Loop, accept
from sandbox.network.egress import AuditLine
from sandbox.network.sockets import send_ready
from sandbox.network.ssh import SshHost
from sandbox.seccomp.filter import machine_arch
from sandbox.spec import Limits

_EXIT_FAULT, _EXIT_UNCONFINED = 70, 125  # as the gate's

_MOST_CLIENTS = 32  # others wait to be accepted
_FDS = 24  # without those of clients
_MSG_CMSG_CLOEXEC = 0x40000000
_KIND = "ssh"

_TOO_LONG = "closed a connection with a message that is too long"


class AgentDescriptors(NamedTuple):
    channel: int  # takes the listener from the cell's init, and "g" to it
    outside: int  # the connection to the person's agent
    audit: int
    alive: int  # becomes readable when the agent has to end


class _CageEnded(Exception):
    """The plugin has ended, or the launching process."""


def run_agent(
    keys: Mapping[bytes, str],
    hosts: Sequence[SshHost],
    limits: Limits,
    held: AgentDescriptors,
    identity: tuple[int, int] | None,
) -> NoReturn:
    """Confine this process and serve until the plugin has ended. Call it in a forked child of a process with
    one thread.

    `keys`: the given keys, with their fingerprints. `limits`: the plugin's; those of processor time also
    bound the agent. `identity`: the uid and gid to change to, if root. An agent that cannot be confined never
    writes the "g"; it writes {"kind": "fault", "reason": ...} to the audit pipe.
    """
    code = _EXIT_UNCONFINED
    try:
        gc.freeze()  # the collector would copy the pages of the launching process
        leave_terminal()
        close_others(set(held))
        os.set_blocking(held.audit, False)
        follow_parent(lambda: is_alive(held.alive))
        forget_environment()
        verifiers = {key: HostKey(host.name, load_verifier(key)) for host in hosts for key in host.keys}
        agent = _Agent(AgentRules(keys, verifiers), held)
        limiter = CpuLimiter(limits.cpu, limits.cpu_time, held.alive)
        agent.listen(_receive_listener(held.channel))
        encode_line({"number": 1.5, "text": "\u00e9"})  # loads what it needs: later no file can be opened
        program = agent_filter(machine_arch())
        confine(identity, _MOST_CLIENTS + _FDS, lambda: is_alive(held.alive), program)
        send_ready(held.channel)
        os.close(held.channel)
        code = _EXIT_FAULT
        agent.serve(limiter)
        code = 0
    except BaseException as error:  # noqa: BLE001 -- below us is the stack of the launching process
        report_fault(held.audit, str(error) or repr(error))
    finally:
        os._exit(code)


def _receive_listener(channel: int) -> socket.socket:
    """Wait for the listener, which is non-blocking. Raises ConnectionError if the cell's init has ended."""
    source = socket.socket(fileno=os.dup(channel))
    try:
        _, rights, flags, _ = source.recvmsg(1, socket.CMSG_SPACE(4), _MSG_CMSG_CLOEXEC)
    finally:
        source.close()
    if flags & socket.MSG_CTRUNC or [len(data) for _, _, data in rights] != [4]:
        raise ConnectionError("the cell's init ended before it had made the socket of the ssh agent")
    return socket.socket(fileno=struct.unpack("i", rights[0][2])[0])


class _Agent:
    def __init__(self, rules: AgentRules, held: AgentDescriptors) -> None:
        self.loop = Loop()
        self.outside = Outside(self.loop, socket.socket(fileno=held.outside), self.tell)
        self._rules = rules
        self._audit = AuditPipe(self.loop, held.audit)
        self._listener: socket.socket | None = None
        self._clients: set[_Client] = set()
        self.loop.watch(held.alive, READ, self._on_end)

    def listen(self, listener: socket.socket) -> None:
        self._listener = listener
        self.loop.watch(listener.fileno(), READ, self._on_client)

    def serve(self, limiter: CpuLimiter) -> None:
        try:
            self.loop.run(limiter.throttle)
        except (_CageEnded, CpuTimeSpent):
            try:
                self._audit.wait_for_room()
                self._audit.write_totals()
            except ReaderGone:
                pass
        except ReaderGone:
            pass

    def tell(self, verdict: str, reason: str, host: str = "", key: str = "") -> None:
        """Write a line. All words are ours, so there are few different ones."""
        self._audit.write_repeated(AuditLine(_KIND, host, 0, verdict, key, reason))

    def forget(self, client: _Client) -> None:
        self._clients.discard(client)
        assert self._listener is not None
        self.loop.change(self._listener.fileno(), READ)

    def _on_client(self, _: int) -> None:
        assert self._listener is not None
        try:
            connection = accept(self._listener)
        except OSError:
            return  # it has gone
        self._clients.add(_Client(self, connection, AgentConversation(self._rules)))
        if len(self._clients) >= _MOST_CLIENTS:
            self.loop.change(self._listener.fileno(), 0)

    def _on_end(self, _: int) -> None:
        raise _CageEnded


class _Client:
    """A connection from the cage."""

    def __init__(self, agent: _Agent, connection: socket.socket, conversation: AgentConversation) -> None:
        self._agent = agent
        self._connection = connection
        self._conversation = conversation
        self._received = b""
        self._to_send = b""
        self._waits = False  # for the agent outside
        self.is_open = True
        agent.loop.watch(connection.fileno(), READ, self._on_event)

    def _on_event(self, mask: int) -> None:
        try:
            if mask & WRITE and self._to_send:
                self._send(b"")
            elif mask & READ and not self._waits and not self._to_send:
                room = wire.LENGTH.size + wire.MOST_MESSAGE_BYTES - len(self._received)
                received = self._connection.recv(room)
                if not received:
                    self._close()
                    return
                self._received += received
            elif mask & BROKEN:
                self._close()
                return
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        self._go_on()

    def _go_on(self) -> None:
        """Decide about the messages that are here, one after the other."""
        while self.is_open and not self._waits and not self._to_send:
            if (message := self._next_message()) is None:
                break
            decision = self._conversation.decide(message)
            if decision.reason:
                self._agent.tell("refused", decision.reason, decision.host)
            if decision.request and self._agent.outside.is_open:
                self._waits = True
                self._agent.outside.ask(decision, self.take)
            elif decision.request:
                self._agent.tell("failed", GONE, decision.host, decision.key)
                self._send(wire.message(wire.FAILURE))
            else:
                self._send(decision.answer)
        if self.is_open:
            mask = WRITE if self._to_send else 0 if self._waits else READ
            self._agent.loop.change(self._connection.fileno(), mask)

    def _next_message(self) -> bytes | None:
        if len(self._received) < wire.LENGTH.size:
            return None
        (length,) = wire.LENGTH.unpack_from(self._received)
        if not 0 < length <= wire.MOST_MESSAGE_BYTES:
            self._agent.tell("refused", _TOO_LONG)
            self._close()
            return None
        end = wire.LENGTH.size + length
        if len(self._received) < end:
            return None
        message, self._received = self._received[wire.LENGTH.size : end], self._received[end:]
        return message

    def take(self, answer: bytes) -> None:
        """Take the answer that it waits for."""
        if self.is_open:
            self._waits = False
            self._send(answer)
            self._go_on()

    def _send(self, answer: bytes) -> None:
        self._to_send += answer
        try:
            self._to_send = self._to_send[self._connection.send(self._to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            self._close()

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._agent.loop.retire(self._connection)
            self._agent.outside.withdraw(self.take)
            self._agent.forget(self)
