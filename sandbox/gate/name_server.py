"""The plugin's name server: UDP and TCP on the loopback of its namespace.

It answers without a lookup: an allowed name gets synthetic addresses, every other name is refused. So no
question leaves the gate, and a name cannot carry data out.
"""

from __future__ import annotations

import _socket as socket

from sandbox.gate import dns
from sandbox.gate.audit import AuditPipe
from sandbox.gate.loop import READ, WRITE, Loop, RateLimiter, Timer, accept
from sandbox.gate.names import NameTable
from sandbox.gate.pump import reset_on_close
from sandbox.network.egress import NOT_LISTED, AuditLine
from sandbox.network.hosts import Host, parse_host
from sandbox.network.rules import EVERY_PORT, HostRule, covers
from sandbox.speed.typed import Sequence

ANSWER_SECONDS = 60  # TTL of our answers; names.UNUSED_NAME_SECONDS is longer
MOST_CLIENTS = 16  # TCP connections at once
_CLIENT_SECONDS = 10.0  # until a TCP connection without a question is closed
_QUESTIONS_PER_SECOND = 2000
_MOST_AT_ONCE = 64  # datagrams or connections, before other events have their turn
_MOST_SHOWN_CHARACTERS = 253


class NameRules:
    """The names that may be asked for: those that a rule allows on any port."""

    def __init__(self, rules: Sequence[HostRule]) -> None:
        self._rules = [(rule._replace(ports=EVERY_PORT), str(rule)) for rule in rules]

    def find(self, name: str) -> str | None:
        """The rule that allows the name, as it is written."""
        asked = HostRule("name", name, EVERY_PORT)
        return next((text for rule, text in self._rules if covers(rule, asked)), None)


class Answerer:
    """Turns one DNS question into one reply."""

    def __init__(
        self, loop: Loop, rules: NameRules, table: NameTable, audit: AuditPipe, *, ipv6: bool
    ) -> None:
        """`ipv6`: whether the plugin's namespace has IPv6. If not, no name has an IPv6 address."""
        self._loop = loop
        self._rules = rules
        self._kinds = (dns.A, dns.AAAA) if ipv6 else (dns.A,)
        self._table = table
        self._audit = audit

    def answer(self, message: bytes) -> bytes | None:
        try:
            question = dns.read_question(message)
        except dns.UnansweredMessage:
            return None
        if isinstance(question, dns.RefusedQuestion):
            self._record_refusal(question.shown, question.reason)
            return question.reply
        try:
            host = read_host(question)
        except ValueError as error:
            return self._refuse(question, question.shown, str(error))
        rule = self._rules.find(host.text)
        if rule is None:
            return self._refuse(question, host.text, NOT_LISTED)
        if question.kind not in self._kinds:
            # The name exists, and has no record of this kind: HTTPS and SVCB records could name other
            # addresses, ports or keys. AAAA is no reason for a remark: every lookup asks for A and AAAA.
            reason = "" if question.kind == dns.AAAA else f"was asked for records of type {question.kind}"
            reason += "; only addresses are answered" if reason else ""
            self._audit.write_repeated(AuditLine("dns", host.text, 0, "allowed", rule, reason))
            return dns.write_reply(question, dns.NOERROR)
        synthetic = self._table.assign(host.text, self._loop.now)
        if synthetic is None:
            return self._refuse(
                question, host.text, "is one name too many: all places of the names limit are taken"
            )
        self._audit.write_repeated(AuditLine("dns", host.text, 0, "allowed", rule))
        address = synthetic.ipv4 if question.kind == dns.A else synthetic.ipv6
        return dns.write_reply(question, dns.NOERROR, address, ANSWER_SECONDS)

    def _refuse(self, question: dns.NameQuestion, name: str, reason: str) -> bytes:
        self._record_refusal(name, reason)
        return dns.write_reply(question, dns.REFUSED)

    def _record_refusal(self, name: str, reason: str) -> None:
        shown = name[:_MOST_SHOWN_CHARACTERS]
        self._audit.write_repeated(AuditLine("dns", shown, 0, "refused", reason=reason))


def read_host(question: dns.NameQuestion) -> Host:
    """The host that is asked for. Raises ValueError with the rest of a sentence that begins with the name."""
    name = question.name
    if name is None:
        raise ValueError("has a dot, or a byte outside ASCII, inside a label; no host name has that")
    host = parse_host(name)
    if host.version:
        raise ValueError("is an address and no name")
    return host


class NameService:
    """Serves questions over UDP and TCP. Owns both sockets."""

    def __init__(self, loop: Loop, answerer: Answerer, udp: socket.socket, tcp: socket.socket) -> None:
        self._loop = loop
        self._answerer = answerer
        self._udp = udp
        self._tcp = tcp
        self._clients: dict[int, NameServerStream] = {}
        self._rate_limiter = RateLimiter(loop, _QUESTIONS_PER_SECOND, (udp.fileno(), tcp.fileno()))
        udp.setblocking(False)
        tcp.setblocking(False)
        loop.watch(udp.fileno(), READ, self._on_datagram)
        loop.watch(tcp.fileno(), READ, self._on_connection)

    def count(self) -> bool:
        """Count one question. Returns whether there are too many."""
        return self._rate_limiter.count()

    def _on_datagram(self, _: int) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                message, sender = self._udp.recvfrom(dns.MOST_MESSAGE_BYTES + 1)
                reply = self._answerer.answer(message)
                if reply is not None:
                    self._udp.sendto(reply, sender)
            except BlockingIOError:
                return
            except OSError:
                pass  # the sender is gone, or an error of an earlier reply is reported here
            if self._rate_limiter.count():
                return

    def _on_connection(self, _: int) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                client = accept(self._tcp)
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, or the client is gone
                self._rate_limiter.count()
                return
            if len(self._clients) >= MOST_CLIENTS:
                reset_on_close(client)
                client.close()
            else:
                try:
                    self._clients[client.fileno()] = NameServerStream(
                        self._loop, self._answerer, client, self
                    )
                except OSError:  # epoll refuses it
                    client.close()
            if self._rate_limiter.count():
                return

    def drop(self, client: socket.socket) -> None:
        if self._clients.pop(client.fileno(), None) is not None:
            self._loop.retire(client)


class NameServerStream:
    """AskedFacts over TCP, each with its length in front. The next question is read when the last answer was
    sent, so a client that reads nothing cannot fill the buffer."""

    __slots__ = ("_answerer", "_buffer", "_client", "_loop", "_out", "_service", "_timer")

    def __init__(self, loop: Loop, answerer: Answerer, client: socket.socket, service: NameService) -> None:
        self._loop = loop
        self._answerer = answerer
        self._client = client
        self._service = service
        self._buffer = b""
        self._out = b""
        loop.watch(client.fileno(), READ, self._on_event)  # may fail, so it comes before the timer
        self._timer: Timer = loop.call_later(_CLIENT_SECONDS, self._close)

    def _close(self) -> None:
        self._loop.cancel(self._timer)
        self._service.drop(self._client)

    def _on_event(self, mask: int) -> None:
        try:
            if mask & WRITE:
                self._flush()
            elif not self._receive():
                self._close()
        except BlockingIOError:
            pass
        except OSError:
            self._close()

    def _receive(self) -> bool:
        piece = self._client.recv(2 + dns.MOST_MESSAGE_BYTES - len(self._buffer))
        self._buffer += piece
        if not piece or int.from_bytes(self._buffer[:2], "big") > dns.MOST_MESSAGE_BYTES:
            return False
        return self._answer_next()

    def _answer_next(self) -> bool:
        """Answer all complete questions. Returns False if the connection has to be closed."""
        while not self._out and len(self._buffer) >= 2:
            length = int.from_bytes(self._buffer[:2], "big")
            if length > dns.MOST_MESSAGE_BYTES:
                return False
            if len(self._buffer) < 2 + length:
                break
            message, self._buffer = self._buffer[2 : 2 + length], self._buffer[2 + length :]
            reply = self._answerer.answer(message)
            if reply is None:
                return False
            self._loop.cancel(self._timer)
            self._timer = self._loop.call_later(_CLIENT_SECONDS, self._close)
            if self._service.count():
                return False
            self._out = len(reply).to_bytes(2, "big") + reply
            self._flush_some()
        self._loop.change(self._client.fileno(), WRITE if self._out else READ)
        return True

    def _flush(self) -> None:
        self._flush_some()
        if not self._out and not self._answer_next():
            self._close()

    def _flush_some(self) -> None:
        try:
            self._out = self._out[self._client.send(self._out) :]
        except BlockingIOError:
            pass
