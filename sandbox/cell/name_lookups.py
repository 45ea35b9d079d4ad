"""The names that a plugin without a network looks up, and the ports of its own loopback that refuse it, so
that people learn which host it wanted.

The cell's init makes the plugin's network namespace, and sends us a socket that is bound to the address of
the cage's name server. We answer every question at once: the name does not exist. No question leaves this
process. There is no other process, and nothing is read or imported before a plugin asks.
"""

from __future__ import annotations

import _socket
import select
import struct

from sandbox.limits.meter import Meter
from sandbox.spawn import spawner
from sandbox.spawn.network import HEADER, outside_network
from sandbox.spawn.order import (
    NetlinkRequest,
    NetworkOrder,
    NetworkRecipe,
    SocketRequest,
    SpawnOrder,
)
from sandbox.spec import NAME_SERVER
from sandbox.speed.scopes import contextmanager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Callable, Iterator, Mapping

if TYPE_CHECKING:
    from sandbox.network.audit import AuditLog
    from sandbox.network.egress import AuditLine

# After so many the socket is closed: the kernel refuses the rest at once, and a plugin that asks without
# pause takes no more of our time.
MOST_LOOKUPS = 2048
_AT_ONCE = 16  # others wait for this process meanwhile

# RTM_NEWLINK with REQUEST and ACK for interface 1, loopback: set IFF_UP. pyroute2 encodes the same bytes in
# sandbox/network/recipe.py.
_INTERFACE = struct.Struct("=BxHiII")
LOOPBACK_UP = HEADER.pack(HEADER.size + _INTERFACE.size, 16, 5, 1, 0) + _INTERFACE.pack(0, 0, 1, 1, 1)

_RECIPE = NetworkRecipe(
    (NetlinkRequest("switch on loopback", 0, LOOPBACK_UP),),
    (SocketRequest("dns_udp", 4, *NAME_SERVER), SocketRequest("closed_ports", 4, "0.0.0.0", 0)),
)
_RIGHTS = struct.Struct("=i")
_FLAGS = _socket.MSG_DONTWAIT | _socket.MSG_CMSG_CLOEXEC


class NameLookups(Meter):
    """Answers the questions. Unlike other meters it never ends the plugin."""

    def __init__(self, ours: _socket.socket, theirs: _socket.socket) -> None:
        self.log: AuditLog | None = None  # None: it has asked for nothing
        self.on_line: Callable[[AuditLine], None] | None = None  # see AuditLog
        self._ours = ours
        self._order = NetworkOrder(_RECIPE, theirs.fileno(), outside_network(), gate=False)
        self._socket: _socket.socket | None = None
        self._theirs = theirs
        # For `runner learn`: names have an address that leads nowhere, by which a connection to it is known.
        self.gives_addresses = False
        self.addresses: dict[str, str] = {}  # the name of each
        self._left = MOST_LOOKUPS
        # Sees TCP between addresses of the plugin's own loopback, see sandbox/gate/closed_ports.py.
        self._raw: _socket.socket | None = None
        self._packets_left = MOST_LOOKUPS
        self._ports: set[int] = set()
        self._names: set[str] = set()

    def spawn(self, order: SpawnOrder) -> int:
        """Spawn, and take the socket. Without one the plugin's questions are refused by the kernel."""
        try:
            pid = spawner.spawn(order._replace(network=self._order))
        finally:
            self._theirs.close()
        with suppress(OSError):  # nothing was sent
            _, rights, _, _ = self._ours.recvmsg(64, _socket.CMSG_SPACE(2 * _RIGHTS.size), _FLAGS)
            for _, _, data in rights:
                made = [_socket.socket(fileno=fd) for (fd,) in _RIGHTS.iter_unpack(data)]
                self._socket, self._raw = made[0], made[1] if len(made) > 1 else None
        return pid

    def interest(self) -> Mapping[int, int]:
        return {each.fileno(): select.POLLIN for each in (self._socket, self._raw) if each is not None}

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        if self._socket is not None and self._socket.fileno() in ready:
            self._answer(_AT_ONCE)
        if self._raw is not None and self._raw.fileno() in ready:
            self._read_refusals(_AT_ONCE)
        return None

    def close(self) -> None:
        self._answer(MOST_LOOKUPS)  # of a plugin that did not wait for the answer
        self._read_refusals(MOST_LOOKUPS)
        self._stop()
        self._stop_reading()

    def _read_refusals(self, most: int) -> None:
        for _ in range(most):
            if self._raw is None:
                return
            try:
                packet = self._raw.recv(_HEADER_BYTES, _socket.MSG_DONTWAIT)
            except OSError:
                return
            self._take_packet(self._raw, packet)

    def _take_packet(self, raw: _socket.socket, packet: bytes) -> None:
        """Record a port that refused the plugin. Only a plugin that uses its loopback comes here."""
        from sandbox.gate.closed_ports import attach_filter, read_refused
        from sandbox.network.egress import LOOPBACK, OWN_LOOPBACK, AuditLine

        if self._packets_left == MOST_LOOKUPS:
            attach_filter(raw)  # from here on nothing else arrives
        found = read_refused(packet)
        if found is not None and found[0] in LOOPBACK and found[1] not in self._ports:
            self._ports.add(found[1])
            self._store(AuditLine("connect", *found, "refused", reason=OWN_LOOPBACK))
        self._packets_left -= 1
        if not self._packets_left:
            self._stop_reading()

    def _store(self, line: AuditLine) -> None:
        if self.log is None:
            from sandbox.network.audit import AuditLog

            self.log = AuditLog()
            self.log.on_line = self.on_line
        self.log.store(line)

    def _stop_reading(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def _answer(self, most: int) -> None:
        for _ in range(most):
            if self._socket is None:
                return
            try:
                message, sender = self._socket.recvfrom(_MESSAGE_BYTES)
                if reply := self._reply(message):
                    self._socket.sendto(reply, sender)
            except BlockingIOError:
                return
            except OSError:
                pass  # the sender is gone, or an error of an earlier reply is reported here
            self._left -= 1
            if not self._left:
                self._stop()

    def _reply(self, message: bytes) -> bytes:
        from sandbox.gate import dns
        from sandbox.gate.name_server import read_host
        from sandbox.network.egress import NO_NETWORK, AuditLine

        try:
            question = dns.read_question(message)
        except dns.UnansweredMessage:
            return b""
        if isinstance(question, dns.RefusedQuestion):
            return question.reply
        if question.kind in (dns.A, dns.AAAA):
            try:
                name, reason = read_host(question).text, NO_NETWORK
            except ValueError as error:
                name, reason = question.shown, str(error)
            if name not in self._names:
                self._names.add(name)
                self._store(AuditLine("dns", name, 0, "refused", reason=reason))
            if self.gives_addresses and reason is NO_NETWORK:
                return dns.write_reply(question, dns.NOERROR, self._address(name, question.kind == dns.A))
        return dns.write_reply(question, dns.NXDOMAIN)

    def _address(self, name: str, is_ipv4: bool) -> bytes:
        """The address of a name: nothing is routed there. Of IPv6 there is none."""
        if not is_ipv4:
            return b""
        import ipaddress

        from sandbox.network.egress import SYNTHETIC_IPV4

        place = next((at for at, known in enumerate(self.addresses.values()) if known == name), None)
        place = len(self.addresses) if place is None else place
        address = ipaddress.IPv4Network(SYNTHETIC_IPV4)[place + 1]
        self.addresses[str(address)] = name
        return address.packed

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_HEADER_BYTES = 128  # of a packet
_MESSAGE_BYTES = 1233  # one more than sandbox/gate/dns.py reads


@contextmanager
def open_lookups(*, gives_addresses: bool) -> Iterator[NameLookups]:
    """`gives_addresses`: for `runner learn`, see NameLookups."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
    try:
        lookups = NameLookups(ours, theirs)
        lookups.gives_addresses = gives_addresses
        try:
            yield lookups
        finally:
            lookups.close()
    finally:
        ours.close()
        theirs.close()
