"""The plugin's connections. Each is judged by the rules; its name is resolved once, and the addresses are
vetted and dialled. Then its bytes are pumped. A connection that fails a step is reset."""

from __future__ import annotations

import _socket as socket
import errno
import ipaddress
import struct

from sandbox.gate.audit import AuditPipe
from sandbox.gate.broker_channel import BrokerChannel, Ungiven
from sandbox.gate.closed_ports import ClosedPorts
from sandbox.gate.dial import Dial
from sandbox.gate.loop import BROKEN, READ, Handler, Loop, RateLimiter, Timer, accept
from sandbox.gate.names import NameTable, is_synthetic
from sandbox.gate.peek import MOST_FIRST_BYTES, read_clear_name
from sandbox.gate.pump import ByteMeter, PipePool, PumpEnding, SplicePump, reset_on_close
from sandbox.gate.resolver import Addresses, Resolver, Search
from sandbox.network.addresses import vet
from sandbox.network.egress import LOOPBACK, NOT_LISTED, OWN_LOOPBACK, AuditLine, EgressPlan
from sandbox.network.hosts import Host, read_address
from sandbox.network.rules import LOCALHOST, HostRule, judge, judge_loopback
from sandbox.speed.typed import Callable, Iterator, Sequence
from sandbox.speed.value import NamedTuple

# New connections, and attempts to dial. The host may track each for two minutes (SYN_SENT, TIME_WAIT), in a
# table that all of its programs share: mostly 262,144 entries. So one plugin takes 13,000 at most.
_NEW_AT_ONCE, _NEW_PER_SECOND = 1000, 100
_MOST_AT_ONCE = 64  # connections, before other events have their turn
_MOST_WAITING = 4096  # connections accepted from one listener after the plugin has ended
_READ_BYTES = 4096
# linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h: both options have the same number.
_SO_ORIGINAL_DST, _SOL_IPV6 = 80, 41
_SOCKADDR_IN, _SOCKADDR_IN6 = struct.Struct("!2xH4s8x"), struct.Struct("!2xHI16sI")
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class FlowTarget(NamedTuple):
    """The destination of a connection, and the rule that allows it."""

    host: Host
    port: int
    rule: HostRule | None
    reason: str = ""  # if no rule allows it


class Flows:
    """All connections of one plugin. Owns the listeners."""

    def __init__(
        self,
        loop: Loop,
        plan: EgressPlan,
        rules: Sequence[HostRule],
        table: NameTable,
        resolver: Resolver,
        audit: AuditPipe,
        broker: BrokerChannel | None = None,
    ) -> None:
        self.loop = loop
        self.broker = broker
        self.plan = plan
        self.resolver = resolver
        self.audit = audit
        self.pool = PipePool()
        self.meter = ByteMeter(loop, plan.limits.bytes, plan.limits.rate)
        self._rules = rules
        self._texts: dict[HostRule, str] = {}
        self._table = table
        self.leaving = ""  # once the plugin has ended: the reason to finish connections that are delivered
        self._delivered: Callable[[], None] | None = None
        self._open: set[Flow] = set()
        self._listeners: list[tuple[socket.socket, bool]] = []
        self._rate_limiter: RateLimiter | None = None
        self._closed_ports: ClosedPorts | None = None

    def listen(self, listeners: Sequence[socket.socket], redirected: Sequence[socket.socket]) -> None:
        sockets = [(listener, False) for listener in listeners]
        sockets += [(listener, True) for listener in redirected]
        self._listeners = sockets
        fds = tuple(listener.fileno() for listener, _ in sockets)
        self._rate_limiter = RateLimiter(self.loop, _NEW_PER_SECOND, fds, _NEW_AT_ONCE)
        for listener, is_redirected in sockets:
            listener.setblocking(False)
            self.loop.watch(listener.fileno(), READ, self._acceptor(listener, is_redirected))

    def watch_closed_ports(self, raw: socket.socket) -> None:
        """Called after `listen`: connections to the ports of listeners are seen when they are accepted."""
        served = {listener.getsockname()[1] for listener, _ in self._listeners}
        self._closed_ports = ClosedPorts(self.loop, raw, served, self._note_refusal)

    def _note_refusal(self, address: str, port: int) -> None:
        """The kernel has refused a connection to a port that no rule has."""
        target = self._judge(address, port)
        if target.reason in (NOT_LISTED, OWN_LOOPBACK):
            self.audit.write_repeated(
                AuditLine("connect", target.host.text, port, "refused", "", target.reason)
            )

    def _acceptor(self, listener: socket.socket, redirected: bool) -> Handler:
        return lambda _: self._accept(listener, redirected)

    def text_of(self, rule: HostRule) -> str:
        """The rule as it is written, for the audit line of each connection."""
        if rule not in self._texts:
            self._texts[rule] = str(rule)
        return self._texts[rule]

    def end_all(self, reason: str) -> None:
        for flow in tuple(self._open):
            flow.end(reason)

    def deliver_all(self, reason: str, delivered: Callable[[], None]) -> None:
        """For a plugin that has ended: deliver what it has sent, also in connections that are not accepted or
        not dialled yet, and drop what comes back. Calls `delivered` when all connections have finished."""
        self.leaving, self._delivered = reason, delivered
        if self._closed_ports is not None:
            self._closed_ports.read()
        for listener, redirected in self._listeners:
            self.loop.forget(listener.fileno())
            self._accept_rest(listener, redirected)
        for flow in tuple(self._open):
            flow.deliver()
        self._check_delivered()

    def forget(self, flow: Flow) -> None:
        self._open.discard(flow)
        self._check_delivered()

    def _check_delivered(self) -> None:
        if self._delivered is not None and not self._open:
            # Not now: the last flow has yet to write its audit line.
            self.loop.call_at(self.loop.now, self._delivered)
            self._delivered = None

    def _accept_rest(self, listener: socket.socket, redirected: bool) -> None:
        for client in _waiting_clients(listener, _MOST_WAITING):
            if client is None:
                return
            self._take(client, redirected)

    def count_attempt(self) -> None:
        """Count an attempt to dial beside the first of a connection."""
        assert self._rate_limiter is not None
        self._rate_limiter.count()

    def may_be_private(self, address: str, port: int) -> bool:
        """Whether a private address may be dialled: the policy allows it for names, or a rule names the
        address."""
        found = read_address(address)
        if self.plan.private or found is None:
            return self.plan.private
        return judge(self._rules, Host(str(found), found.version), port) is not None

    def _accept(self, listener: socket.socket, redirected: bool) -> None:
        assert self._rate_limiter is not None
        for client in _waiting_clients(listener, _MOST_AT_ONCE):
            if client is None:
                self._rate_limiter.pause()
                return
            self._take(client, redirected)
            if self._rate_limiter.count():
                return

    def _take(self, client: socket.socket, redirected: bool) -> None:
        reset_on_close(client)  # if this process dies, the plugin must not take that for a normal end
        try:
            address, port = read_destination(client, redirected)
        except OSError:
            client.close()  # the client has reset it
            return
        target = self._judge(address, port)
        limits = self.plan.limits
        if target.rule is None:
            reason = target.reason
        elif len(self._open) >= limits.connections:
            reason = f"is one connection too many: {limits.connections} may be open (the connections limit)"
        elif self.meter.spent:
            reason = "is refused: the plugin has moved all bytes that it may (the bytes limit)"
        else:
            try:
                self._open.add(Flow(self, client, target, target.rule))
                return
            except OSError as error:
                # The kernel has no memory for it, or the user no more watches (epoll/max_user_watches).
                reason = f"is refused: the gate cannot watch it ({error.strerror})"
        client.close()
        rule = str(target.rule) if target.rule is not None else ""
        self.audit.write_repeated(AuditLine("connect", target.host.text, port, "refused", rule, reason))

    def _judge(self, address: str, port: int) -> FlowTarget:
        if is_synthetic(address):
            name = self._table.find(address, self.loop.now)
            if name is None:
                return FlowTarget(Host(address), port, None, "is an address that was given to no name")
            host = Host(name)
        else:
            found = ipaddress.ip_address(address)
            host = Host(address, found.version)
            if address in LOOPBACK and (opened := judge_loopback(self._rules, port)) is not None:
                return FlowTarget(Host(LOCALHOST), port, opened)
            if found.is_loopback:
                return FlowTarget(host, port, None, OWN_LOOPBACK)
        rule = judge(self._rules, host, port)
        return FlowTarget(host, port, rule, "" if rule else NOT_LISTED)


def _waiting_clients(listener: socket.socket, most: int) -> Iterator[socket.socket | None]:
    """Accept connections that wait. None: there is no room for another descriptor."""
    for _ in range(most):
        try:
            yield accept(listener)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _NO_ROOM:
                yield None
                return
            # else the client has closed it already


def read_destination(client: socket.socket, redirected: bool) -> tuple[str, int]:
    """The address and the port to which the plugin connected."""
    version6 = client.family == socket.AF_INET6
    if redirected:
        try:
            if version6:
                raw = client.getsockopt(_SOL_IPV6, _SO_ORIGINAL_DST, _SOCKADDR_IN6.size)
                port, _, packed, _ = _SOCKADDR_IN6.unpack(raw)
                return _plain(socket.inet_ntop(socket.AF_INET6, packed)), port
            raw = client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, _SOCKADDR_IN.size)
            port, packed = _SOCKADDR_IN.unpack(raw)
            return socket.inet_ntop(socket.AF_INET, packed), port
        except OSError:
            pass  # not redirected: the plugin connected to this socket itself
    address, port = client.getsockname()[:2]
    return _plain(address) if version6 else address, port


def _plain(address: str) -> str:
    return str(read_address(address.partition("%")[0]) or address)


def _has_bytes(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


class Flow:
    """One connection that a rule allows, from accept to its audit line. The constructor raises OSError if the
    client cannot be watched; the caller then closes it."""

    __slots__ = (
        "_address",
        "_began",
        "_client",
        "_dial",
        "_first",
        "_flows",
        "_judged",
        "_needed",
        "_note",
        "_over",
        "_pump",
        "_rule",
        "_search",
        "_server",
        "_target",
        "_timers",
    )

    def __init__(self, flows: Flows, client: socket.socket, target: FlowTarget, rule: HostRule) -> None:
        self._flows = flows
        self._client = client
        self._target = target
        self._rule = rule
        self._began = flows.loop.now
        self._address = ""
        self._note = ""
        self._first = b""
        self._needed = 1
        self._search: Search | None = None
        self._dial: Dial | None = None
        self._server: socket.socket | None = None
        self._pump: SplicePump | None = None
        self._over = False
        limits = flows.plan.limits
        # A connection to an address has no name to compare with the first bytes. At this machine there is one
        # server on the port, whatever it is called.
        self._judged = (
            bool(target.host.version) or rule.kind == "loopback" or target.port not in flows.plan.judged_ports
        )
        # May fail, so it comes before the timers.
        flows.loop.watch(client.fileno(), 0 if self._judged else READ, self._on_client)
        self._timers: list[Timer] = [flows.loop.call_later(limits.dial, self._on_dial_limit)]
        if not self._judged:
            self._timers.append(flows.loop.call_later(limits.first_bytes, self._on_first_bytes_limit))
        # Not now: with a cached answer the flow could finish before Flows has added it.
        self._timers.append(flows.loop.call_at(flows.loop.now, self._resolve))

    def end(self, reason: str) -> None:
        if self._pump is not None:
            self._pump.end(reason)
        else:
            self._finish("failed", reason)

    def deliver(self) -> None:
        if self._pump is not None:
            self._pump.deliver(self._flows.leaving)
        elif not self._first and not _has_bytes(self._client):
            self.end(self._flows.leaving)

    # --- the server --------------------------------------------------------------------------------

    def _resolve(self) -> None:
        if self._rule.kind == "loopback":
            self._start_dial(LOOPBACK)  # by the rule, and by no name: there is nothing to look up or to vet
        elif self._target.host.version:
            self._on_addresses(Addresses((self._target.host.text,)))
        else:
            self._search = self._flows.resolver.look_up(self._target.host.text, self._on_addresses)

    def _on_addresses(self, addresses: Addresses) -> None:
        if self._over:
            return
        if not addresses.found:
            self._finish("failed", addresses.reason)
            return
        vetted, refused = [], []
        for address in addresses.found:
            reason = vet(address)
            if reason and self._flows.may_be_private(address, self._target.port):
                reason = vet(address, allow_private=True)
            if reason:
                refused.append(f"leads to {address}, which {reason}")
            else:
                vetted.append(address)
        if refused:
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            self._note = refused[0] + more
        if vetted:
            self._start_dial(vetted)
        else:
            self._finish("refused", self._note)

    def _start_dial(self, addresses: Sequence[str]) -> None:
        self._dial = Dial(
            self._flows.loop, addresses, self._target.port, self._on_dialled, self._flows.count_attempt
        )

    def _on_dialled(self, server: socket.socket | None, text: str) -> None:
        if server is None:
            self._flows.resolver.drop(self._target.host.text)
            self._finish("failed", text)
            return
        self._flows.loop.cancel(self._timers[0])
        self._server, self._address = server, text
        self._start_pump()

    def _on_dial_limit(self) -> None:
        seconds = self._flows.plan.limits.dial
        step = "was not connected" if self._dial is not None else "was not resolved"
        self._finish("failed", f"{step} within {seconds:g} seconds (the dial limit)")

    # --- the name in clear text --------------------------------------------------------------------

    def _on_client(self, mask: int) -> None:
        if mask & READ and not self._judged:
            try:
                piece = self._client.recv(min(_READ_BYTES, MOST_FIRST_BYTES - len(self._first)))
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                self._finish("allowed", "was closed before it sent a name in clear text")
                return
            self._first += piece
            if len(self._first) >= self._needed:
                self._judge_first_bytes()
        elif mask & BROKEN:
            self._finish("allowed", "was closed by the plugin before the server was reached")

    def _judge_first_bytes(self) -> None:
        clear = read_clear_name(self._first)
        if clear.needed:
            self._needed = clear.needed
        elif clear.refused:
            self._finish("refused", clear.refused)
        elif clear.host != self._target.host:
            self._finish("refused", f"was asked for {clear.host} in clear text, and that is another name")
        else:
            self._judged = True
            self._flows.loop.cancel(self._timers[1])
            self._flows.loop.change(self._client.fileno(), 0)
            self._start_pump()

    def _on_first_bytes_limit(self) -> None:
        seconds = self._flows.plan.limits.first_bytes
        self._finish(
            "refused",
            f"sent no TLS server name and no HTTP Host within {seconds:g} seconds (the first bytes limit)",
        )

    # --- the bytes ---------------------------------------------------------------------------------

    def _start_pump(self) -> None:
        if self._server is None or not self._judged:
            return
        flows, server, first = self._flows, self._server, self._first
        self._server, self._first = None, b""
        target, broker = self._target, flows.broker
        try:
            if broker is not None and broker.reads(
                target.host, target.port, loopback=self._rule.kind == "loopback"
            ):
                server = broker.give(server, target.host, target.port)
            self._pump = SplicePump(
                flows.loop,
                flows.pool,
                flows.meter,
                self._client,
                server,
                first,
                flows.plan.limits.idle,
                self._on_ending,
            )
        except Ungiven as error:
            self._server = server
            self._finish("refused", str(error))
            return
        except OSError as error:
            self._server = server
            self._finish("failed", f"broke: {error.strerror}")
            return
        if flows.leaving:
            self._pump.deliver(flows.leaving)

    def _on_ending(self, ending: PumpEnding) -> None:
        self._finish("allowed", ending.reason, ending)

    def _finish(self, verdict: str, reason: str, ending: PumpEnding | None = None) -> None:
        if self._over:
            return
        self._over = True
        loop = self._flows.loop
        for timer in self._timers:
            loop.cancel(timer)
        if self._search is not None:
            self._search.cancel()
        if self._dial is not None:
            self._dial.cancel()
        if ending is None:
            for connection in (self._client, self._server):
                if connection is not None:
                    reset_on_close(connection)
                    loop.retire(connection)
        self._flows.forget(self)
        self._flows.audit.write(
            AuditLine(
                "connect",
                self._target.host.text,
                self._target.port,
                verdict,
                self._flows.text_of(self._rule),
                reason or self._note,
                self._address,
                ending.sent if ending is not None else 0,
                ending.received if ending is not None else 0,
                loop.now - self._began,
            )
        )
