"""A stub resolver: the addresses of one name, from the operator's hosts file or name servers.

A and AAAA are asked for at the same time, each from a socket of its own with a port that the kernel draws,
under a random id. An answer that does not repeat the question is not heard.
"""

from __future__ import annotations

import _socket as socket
import os
from collections.abc import Callable

from sandbox.gate import dns
from sandbox.gate.loop import READ, WRITE, Loop, Timer
from sandbox.gate.upstream import NameServer, Upstream
from sandbox.value import NamedTuple

_MOST_REPLY_BYTES = 16 * 1024
_MOST_WRONG = 32  # datagrams that do not answer the question, until the server counts as silent
_OTHER_KIND_SECONDS = 0.05  # that one kind of address waits for the other (RFC 8305, resolution delay)
_MOST_KEPT_SECONDS = 30
_MOST_KEPT = 256

_CODES = {
    dns.NXDOMAIN: "is not known to the DNS (NXDOMAIN)",
    dns.SERVFAIL: "cannot be looked up: the name server failed (SERVFAIL)",
    dns.REFUSED: "cannot be looked up: the name server refuses it (REFUSED)",
}


class Addresses(NamedTuple):
    """What a name leads to. Nobody has vetted it yet."""

    found: tuple[str, ...]
    reason: str = ""  # if nothing was found, the second half of a sentence


Done = Callable[[Addresses], None]


class Resolver:
    def __init__(self, loop: Loop, upstream: Upstream) -> None:
        self._loop = loop
        self._upstream = upstream
        self._hosts = dict(upstream.hosts)
        self._kept: dict[str, tuple[float, tuple[str, ...]]] = {}

    def look_up(self, name: str, done: Done) -> Search | None:
        """Calls `done` once: at once, and returns None, if the answer is known; else later."""
        if name in self._hosts:
            done(Addresses(self._hosts[name]))
            return None
        until, found = self._kept.get(name, (0.0, ()))
        if until > self._loop.now:
            done(Addresses(found))
            return None
        return Search(self._loop, self._upstream, name, done, self._keep)

    def drop(self, name: str) -> None:
        """Ask again next time: none of the addresses could be reached."""
        self._kept.pop(name, None)

    def _keep(self, name: str, found: tuple[str, ...], seconds: int) -> None:
        self._kept.pop(name, None)
        if seconds > 0:
            self._kept[name] = self._loop.now + min(seconds, _MOST_KEPT_SECONDS), found
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]


class Search:
    """Both kinds of addresses of one name."""

    __slots__ = ("_asked", "_done", "_keep", "_loop", "_name", "_replies", "_timer")

    def __init__(
        self,
        loop: Loop,
        upstream: Upstream,
        name: str,
        done: Done,
        keep: Callable[[str, tuple[str, ...], int], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._done: Done | None = done
        self._keep = keep
        self._timer: Timer | None = None
        self._replies: dict[int, dns.NameReply] = {}
        self._asked = [Exchange(loop, upstream, name, kind, self._on_reply) for kind in (dns.A, dns.AAAA)]
        for exchange in self._asked:
            exchange.start()

    def cancel(self) -> None:
        self._done = None
        self._loop.cancel(self._timer)
        for exchange in self._asked:
            exchange.close()

    def _on_reply(self, kind: int, reply: dns.NameReply) -> None:
        self._replies[kind] = reply
        if len(self._replies) == 2 or reply.code == dns.NXDOMAIN:
            self._finish()
        elif reply.addresses:
            self._timer = self._loop.call_later(_OTHER_KIND_SECONDS, self._finish)

    def _finish(self) -> None:
        done = self._done
        self.cancel()
        if done is None:
            return
        replies = [self._replies[kind] for kind in (dns.AAAA, dns.A) if kind in self._replies]
        found = interleave(*(reply.addresses for reply in replies))
        if found:
            if len(replies) == 2:
                self._keep(self._name, found, min(reply.seconds for reply in replies if reply.addresses))
            done(Addresses(found))
            return
        codes = [reply.code for reply in replies if reply.code != dns.NOERROR]
        reason = _CODES.get(codes[0], "cannot be looked up: no name server answers") if codes else ""
        done(Addresses((), reason or "has no address in the DNS"))


def interleave(*kinds: tuple[bytes, ...]) -> tuple[str, ...]:
    """One of each kind in turn, so that a family without a route costs one attempt and not all."""
    found = []
    for place in range(max(map(len, kinds), default=0)):
        for addresses in kinds:
            if place < len(addresses):
                packed = addresses[place]
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                found.append(socket.inet_ntop(family, packed))
    return tuple(found)


class Exchange:
    """One question, to one server after the other until one answers."""

    __slots__ = (
        "_buffer",
        "_done",
        "_kind",
        "_left",
        "_loop",
        "_name",
        "_number",
        "_over_tcp",
        "_server",
        "_socket",
        "_timer",
        "_upstream",
        "_worst",
        "_wrong",
    )

    def __init__(
        self,
        loop: Loop,
        upstream: Upstream,
        name: str,
        kind: int,
        done: Callable[[int, dns.NameReply], None],
    ) -> None:
        self._loop = loop
        self._upstream = upstream
        self._name = name
        self._kind = kind
        self._done = done
        self._left = list(upstream.servers) * upstream.attempts
        self._server: NameServer | None = None
        self._socket: socket.socket | None = None
        self._timer: Timer | None = None
        self._number = 0
        self._over_tcp = False
        self._buffer = b""
        self._wrong = 0
        self._worst = dns.SERVFAIL + 100  # no answer at all

    def start(self) -> None:
        # Not now: who asks does not have the search yet.
        self._timer = self._loop.call_at(self._loop.now, self._ask_next)

    def close(self) -> None:
        self._loop.cancel(self._timer)
        if self._socket is not None:
            self._loop.retire(self._socket)
            self._socket = None

    def _finish(self, reply: dns.NameReply) -> None:
        self.close()
        self._done(self._kind, reply)

    def _ask_next(self) -> None:
        if not self._left:
            self._finish(dns.NameReply(self._worst, False))
            return
        self._server = self._left.pop(0)
        self._ask(self._server, socket.SOCK_DGRAM)

    def _ask(self, server: NameServer, kind: int) -> None:
        self.close()
        self._buffer, self._wrong = b"", 0
        self._over_tcp = kind == socket.SOCK_STREAM
        # A retry is another question: an answer to the first one might be forged by now.
        self._number = int.from_bytes(os.urandom(2), "big")
        self._timer = self._loop.call_later(self._upstream.seconds, self._ask_next)
        try:
            connection = socket.socket(server.family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            self._socket = connection
            try:
                connection.connect(server.address)
            except BlockingIOError:
                pass
            self._loop.watch(connection.fileno(), WRITE if self._over_tcp else READ, self._on_event)
            if not self._over_tcp:
                connection.send(dns.write_question(self._number, self._name, self._kind))
        except OSError:
            self._fail()

    def _fail(self) -> None:
        """This server is of no use: ask the next one, but not within the call that failed."""
        self.close()
        self._timer = self._loop.call_at(self._loop.now, self._ask_next)

    def _on_event(self, mask: int) -> None:
        connection = self._socket
        if connection is None:
            return
        try:
            if self._over_tcp:
                self._on_stream(connection, mask)
            else:
                self._on_reply(connection.recv(_MOST_REPLY_BYTES))
        except BlockingIOError:
            pass
        except OSError:
            self._fail()

    def _on_stream(self, connection: socket.socket, mask: int) -> None:
        if mask & WRITE:
            question = dns.write_question(self._number, self._name, self._kind)
            # Less than 300 bytes into an empty buffer: it is sent whole.
            connection.send(len(question).to_bytes(2, "big") + question)
            self._loop.change(connection.fileno(), READ)
            return
        piece = connection.recv(4096)
        self._buffer += piece
        length = int.from_bytes(self._buffer[:2], "big")
        if len(self._buffer) >= 2 and len(self._buffer) >= 2 + length:
            self._on_reply(self._buffer[2 : 2 + length])
        elif not piece or length > _MOST_REPLY_BYTES:
            self._fail()

    def _on_reply(self, message: bytes) -> None:
        try:
            reply = dns.read_reply(message, self._number, self._name, self._kind)
        except dns.MalformedMessage:
            self._wrong += 1
            if self._over_tcp or self._wrong > _MOST_WRONG:
                self._fail()
            return
        if reply.truncated and not self._over_tcp and self._server is not None:
            self._ask(self._server, socket.SOCK_STREAM)
        elif reply.truncated or reply.code not in (dns.NOERROR, dns.NXDOMAIN):
            self._worst = reply.code or dns.SERVFAIL
            self._fail()
        else:
            self._finish(reply)
