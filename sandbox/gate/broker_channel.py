"""Hands connections over to the broker (sandbox/broker), and passes on what it says about requests.

The gate judges and dials a connection as every other. Then it gives the broker the server's socket and one
end of a pair, and pumps the plugin's bytes into the other end: so all limits of the gate count here too.
"""

from __future__ import annotations

import _socket as socket
import struct

from sandbox.gate.audit import AuditPipe
from sandbox.gate.loop import BROKEN, READ, Loop
from sandbox.network.hosts import Host
from sandbox.network.rules import HostRule, judge, judge_loopback
from sandbox.speed.typed import Sequence

_MOST_MESSAGE_BYTES = 4096
_MOST_AT_ONCE = 64  # messages, before other events have their turn
_DESCRIPTORS = struct.Struct("ii")
_GONE = "is refused: the process that has its credentials has ended"
_BUSY = "is refused: the process that has its credentials does not take it"


class Ungiven(Exception):
    """The broker did not get a connection. The text is the rest of a sentence that begins with the host."""


class BrokerChannel:
    """The gate's end of the socket to the broker."""

    def __init__(self, loop: Loop, channel: int, rules: Sequence[HostRule], audit: AuditPipe) -> None:
        """`rules`: of the connections that the broker reads."""
        self._loop = loop
        self._channel: socket.socket | None = socket.socket(fileno=channel)
        self._channel.setblocking(False)
        self._rules = tuple(rule.without_requests() for rule in rules)
        self._audit = audit
        loop.watch(channel, READ, self._on_event)

    def reads(self, host: Host, port: int, *, loopback: bool) -> bool:
        """Whether the broker reads the connections to this host."""
        return (judge_loopback(self._rules, port) if loopback else judge(self._rules, host, port)) is not None

    def give(self, server: socket.socket, host: Host, port: int) -> socket.socket:
        """Give the broker a connection. Returns the socket that stands for the server from now on. Raises
        Ungiven; the server's socket is then still the caller's."""
        if self._channel is None:
            raise Ungiven(_GONE)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM, 0)
        try:
            ours.setblocking(False)
            rights = _DESCRIPTORS.pack(theirs.fileno(), server.fileno())
            told = f"{port} {host.text}".encode()
            self._channel.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:
            ours.close()
            raise Ungiven(_BUSY) from None
        finally:
            theirs.close()
        self._loop.retire(server)
        return ours

    def _on_event(self, mask: int) -> None:
        if not self.read() and mask & BROKEN:
            self._lose()

    def read(self) -> bool:
        """Pass on what the broker has said. Returns whether there may be more."""
        for _ in range(_MOST_AT_ONCE):
            if self._channel is None:
                return False
            try:
                message = self._channel.recv(_MOST_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return False
            except OSError:
                message = b""
            if not message:
                self._lose()
                return False
            self._audit.pass_on(message)
        return True

    def _lose(self) -> None:
        """The broker has ended."""
        if self._channel is not None:
            self._loop.retire(self._channel)
            self._channel = None
