"""A stub resolver: the addresses of one name, from the operator's hosts file or name servers.

A and AAAA are asked for at the same time, each from a socket of its own with a port that the kernel draws,
under a random id. An answer that does not repeat the question is not heard.
"""

from __future__ import annotations

import _socket as socket
import errno
import os

from sandbox.gate import dns
from sandbox.gate.loop import READ, WRITE, Loop, Timer
from sandbox.gate.upstream import NameServer, Upstream
from sandbox.speed.typed import Callable
from sandbox.speed.value import NamedTuple

MOST_TRIES = 3  # of one question, that may still be answered
_MOST_REPLY_BYTES = 16 * 1024
_MOST_WRONG = 32  # datagrams that do not answer the question, until the server counts as silent
_OTHER_KIND_SECONDS = 0.05  # that one kind of address waits for the other (RFC 8305, resolution delay)
_MOST_KEPT_SECONDS = 30
_MOST_KEPT = 256

# Beyond all codes of the DNS.
_SILENCE, _NO_DESCRIPTOR = dns.SERVFAIL + 100, dns.SERVFAIL + 101

_CODES = {
    dns.NXDOMAIN: "is not known to the DNS (NXDOMAIN)",
    dns.SERVFAIL: "cannot be looked up: the name server failed (SERVFAIL)",
    dns.REFUSED: "cannot be looked up: the name server refuses it (REFUSED)",
    _SILENCE: "cannot be looked up: no name server answers",
    _NO_DESCRIPTOR: "cannot be looked up: the gate may open no more files (the hard limit, ulimit -Hn)",
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
        reason = _CODES.get(codes[0], _CODES[_SILENCE]) if codes else ""
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


class Try:
    """One question to one server, from a socket of its own."""

    __slots__ = ("buffer", "connection", "number", "over_tcp", "server", "wrong")

    def __init__(self, connection: socket.socket, server: NameServer, *, over_tcp: bool) -> None:
        self.connection = connection
        self.server = server
        self.over_tcp = over_tcp
        # A retry is another question: who has guessed at the first one has to begin again.
        self.number = int.from_bytes(os.urandom(2), "big")
        self.buffer = b""
        self.wrong = 0


class Exchange:
    """One question, to one server after the other until one answers. Those asked before may still answer."""

    __slots__ = (
        "_done",
        "_kind",
        "_last",
        "_left",
        "_loop",
        "_name",
        "_timer",
        "_tries",
        "_upstream",
        "_worst",
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
        self._tries: list[Try] = []  # the last one is the newest
        self._last: Try | None = None  # the next server is asked when this one has failed
        self._timer: Timer | None = None
        self._worst = _SILENCE

    def start(self) -> None:
        # Not now: who asks does not have the search yet.
        self._timer = self._loop.call_at(self._loop.now, self._ask_next)

    def close(self) -> None:
        self._loop.cancel(self._timer)
        for each in tuple(self._tries):
            self._drop(each)

    def _drop(self, each: Try) -> None:
        if each in self._tries:
            self._tries.remove(each)
            self._loop.retire(each.connection)

    def _finish(self, reply: dns.NameReply) -> None:
        self.close()
        self._done(self._kind, reply)

    def _ask_next(self) -> None:
        if self._left:
            self._ask(self._left.pop(0), socket.SOCK_DGRAM)
        else:
            self._finish(dns.NameReply(self._worst, False))

    def _ask(self, server: NameServer, kind: int) -> None:
        while len(self._tries) >= MOST_TRIES:
            self._drop(self._tries[0])
        self._loop.cancel(self._timer)
        seconds = self._upstream.seconds if self._left else self._upstream.last_seconds
        self._timer = self._loop.call_later(seconds, self._ask_next)
        self._last = None
        try:
            connection = socket.socket(server.family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._worst = _NO_DESCRIPTOR
            self._go_on()
            return
        each = self._last = Try(connection, server, over_tcp=kind == socket.SOCK_STREAM)
        self._tries.append(each)
        try:
            try:
                connection.connect(server.address)
            except BlockingIOError:
                pass
            mask = WRITE if each.over_tcp else READ
            self._loop.watch(connection.fileno(), mask, lambda mask: self._on_event(each, mask))
            if not each.over_tcp:
                connection.send(dns.write_question(each.number, self._name, self._kind))
        except OSError:
            self._fail(each)

    def _fail(self, each: Try) -> None:
        """This one brings no answer. If it was the newest, ask the next server."""
        self._drop(each)
        if each is self._last or not self._tries:
            self._last = None
            self._go_on()

    def _go_on(self) -> None:
        """Ask the next server, but not within the call that failed. If there is none, those asked before have
        their time."""
        if self._left or not self._tries:
            self._loop.cancel(self._timer)
            self._timer = self._loop.call_at(self._loop.now, self._ask_next)

    def _on_event(self, each: Try, mask: int) -> None:
        if each not in self._tries:
            return
        try:
            if each.over_tcp:
                self._on_stream(each, mask)
            else:
                self._on_reply(each, each.connection.recv(_MOST_REPLY_BYTES))
        except BlockingIOError:
            pass
        except OSError:
            self._fail(each)

    def _on_stream(self, each: Try, mask: int) -> None:
        if mask & WRITE:
            question = dns.write_question(each.number, self._name, self._kind)
            # Less than 300 bytes into an empty buffer: it is sent whole.
            each.connection.send(len(question).to_bytes(2, "big") + question)
            self._loop.change(each.connection.fileno(), READ)
            return
        piece = each.connection.recv(4096)
        each.buffer += piece
        length = int.from_bytes(each.buffer[:2], "big")
        if len(each.buffer) >= 2 and len(each.buffer) >= 2 + length:
            self._on_reply(each, each.buffer[2 : 2 + length])
        elif not piece or length > _MOST_REPLY_BYTES:
            self._fail(each)

    def _on_reply(self, each: Try, message: bytes) -> None:
        try:
            reply = dns.read_reply(message, each.number, self._name, self._kind)
        except dns.MalformedMessage:
            each.wrong += 1
            if each.over_tcp or each.wrong > _MOST_WRONG:
                self._fail(each)
            return
        if reply.truncated and not each.over_tcp:
            self._drop(each)
            self._ask(each.server, socket.SOCK_STREAM)
        elif reply.truncated or reply.code not in (dns.NOERROR, dns.NXDOMAIN):
            self._worst = reply.code or dns.SERVFAIL
            self._fail(each)
        else:
            self._finish(reply)
