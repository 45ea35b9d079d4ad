"""A stub resolver: the addresses of one name, from the operator's hosts file or name servers.

A and AAAA are asked for at the same time. Each question has its own socket, with a port that the kernel
chooses, and a random id. A reply that does not repeat the question is ignored.
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

MOST_QUERIES = 3  # that wait for a reply at once, for one question
_MOST_REPLY_BYTES = 16 * 1024
_MOST_WRONG = 32  # datagrams that do not match the question, after which the query counts as failed
_OTHER_KIND_SECONDS = 0.05  # how long A or AAAA waits for the other (RFC 8305, resolution delay)
_MOST_CACHE_SECONDS = 30
_MOST_CACHED = 256

# Our own codes, above all that DNS has.
_SILENCE, _NO_DESCRIPTOR = dns.SERVFAIL + 100, dns.SERVFAIL + 101

_CODES = {
    dns.NXDOMAIN: "is not known to the DNS (NXDOMAIN)",
    dns.SERVFAIL: "cannot be looked up: the name server failed (SERVFAIL)",
    dns.REFUSED: "cannot be looked up: the name server refuses it (REFUSED)",
    _SILENCE: "cannot be looked up: no name server answers",
    _NO_DESCRIPTOR: "cannot be looked up: the gate may open no more files (the hard limit, ulimit -Hn)",
}


class Addresses(NamedTuple):
    """The addresses of a name, not vetted yet."""

    found: tuple[str, ...]
    reason: str = ""  # if nothing was found: the rest of a sentence that begins with the name


Done = Callable[[Addresses], None]


class Resolver:
    def __init__(self, loop: Loop, upstream: Upstream) -> None:
        self._loop = loop
        self._upstream = upstream
        self._hosts = dict(upstream.hosts)
        self._cache: dict[str, tuple[float, tuple[str, ...]]] = {}

    def look_up(self, name: str, done: Done) -> Search | None:
        """Call `done` exactly once. If the addresses are cached or in the hosts file, it is called before
        this returns None; else later."""
        if name in self._hosts:
            done(Addresses(self._hosts[name]))
            return None
        until, found = self._cache.get(name, (0.0, ()))
        if until > self._loop.now:
            done(Addresses(found))
            return None
        return Search(self._loop, self._upstream, name, done, self._store)

    def drop(self, name: str) -> None:
        """Remove a name from the cache, because none of its addresses could be reached."""
        self._cache.pop(name, None)

    def _store(self, name: str, found: tuple[str, ...], seconds: int) -> None:
        self._cache.pop(name, None)
        if seconds > 0:
            self._cache[name] = self._loop.now + min(seconds, _MOST_CACHE_SECONDS), found
            if len(self._cache) > _MOST_CACHED:
                del self._cache[next(iter(self._cache))]


class Search:
    """A lookup of the IPv4 and IPv6 addresses of one name."""

    __slots__ = ("_asked", "_done", "_loop", "_name", "_replies", "_store", "_timer")

    def __init__(
        self,
        loop: Loop,
        upstream: Upstream,
        name: str,
        done: Done,
        store: Callable[[str, tuple[str, ...], int], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._done: Done | None = done
        self._store = store
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
                self._store(self._name, found, min(reply.seconds for reply in replies if reply.addresses))
            done(Addresses(found))
            return
        codes = [reply.code for reply in replies if reply.code != dns.NOERROR]
        reason = _CODES.get(codes[0], _CODES[_SILENCE]) if codes else ""
        done(Addresses((), reason or "has no address in the DNS"))


def interleave(*kinds: tuple[bytes, ...]) -> tuple[str, ...]:
    """The addresses as text, alternating between the kinds: a family without a route then costs one attempt
    before the other family is tried."""
    found = []
    for place in range(max(map(len, kinds), default=0)):
        for addresses in kinds:
            if place < len(addresses):
                packed = addresses[place]
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                found.append(socket.inet_ntop(family, packed))
    return tuple(found)


class ServerQuery:
    """One question to one server, from a socket of its own."""

    __slots__ = ("buffer", "connection", "number", "over_tcp", "server", "wrong")

    def __init__(self, connection: socket.socket, server: NameServer, *, over_tcp: bool) -> None:
        self.connection = connection
        self.server = server
        self.over_tcp = over_tcp
        # A new id for each retry: an attacker who guesses ids has to begin again.
        self.number = int.from_bytes(os.urandom(2), "big")
        self.buffer = b""
        self.wrong = 0


class Exchange:
    """One question, sent to one server after the other until one replies. A late reply of an earlier server
    is accepted."""

    __slots__ = (
        "_done",
        "_kind",
        "_last",
        "_left",
        "_loop",
        "_name",
        "_queries",
        "_timer",
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
        self._queries: list[ServerQuery] = []  # the last one is the newest
        self._last: ServerQuery | None = None  # the next server is asked when this one has failed
        self._timer: Timer | None = None
        self._worst = _SILENCE

    def start(self) -> None:
        # Not now: the caller does not have the Search yet.
        self._timer = self._loop.call_at(self._loop.now, self._ask_next)

    def close(self) -> None:
        self._loop.cancel(self._timer)
        for query in tuple(self._queries):
            self._drop(query)

    def _drop(self, query: ServerQuery) -> None:
        if query in self._queries:
            self._queries.remove(query)
            self._loop.retire(query.connection)

    def _finish(self, reply: dns.NameReply) -> None:
        self.close()
        self._done(self._kind, reply)

    def _ask_next(self) -> None:
        if self._left:
            self._ask(self._left.pop(0), socket.SOCK_DGRAM)
        else:
            self._finish(dns.NameReply(self._worst, False))

    def _ask(self, server: NameServer, kind: int) -> None:
        while len(self._queries) >= MOST_QUERIES:
            self._drop(self._queries[0])
        self._loop.cancel(self._timer)
        seconds = self._upstream.seconds if self._left else self._upstream.last_seconds
        self._timer = self._loop.call_later(seconds, self._ask_next)
        self._last = None
        try:
            connection = socket.socket(server.family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._worst = _NO_DESCRIPTOR
            self._ask_next_soon()
            return
        query = self._last = ServerQuery(connection, server, over_tcp=kind == socket.SOCK_STREAM)
        self._queries.append(query)
        try:
            try:
                connection.connect(server.address)
            except BlockingIOError:
                pass
            mask = WRITE if query.over_tcp else READ
            self._loop.watch(connection.fileno(), mask, lambda mask: self._on_event(query, mask))
            if not query.over_tcp:
                connection.send(dns.write_question(query.number, self._name, self._kind))
        except OSError:
            self._fail(query)

    def _fail(self, query: ServerQuery) -> None:
        """Drop a query that gets no reply. If it was the newest, ask the next server."""
        self._drop(query)
        if query is self._last or not self._queries:
            self._last = None
            self._ask_next_soon()

    def _ask_next_soon(self) -> None:
        """Ask the next server in the next turn of the loop. If none is left, wait for the earlier queries
        until their time is over."""
        if self._left or not self._queries:
            self._loop.cancel(self._timer)
            self._timer = self._loop.call_at(self._loop.now, self._ask_next)

    def _on_event(self, query: ServerQuery, mask: int) -> None:
        if query not in self._queries:
            return
        try:
            if query.over_tcp:
                self._on_stream(query, mask)
            else:
                self._on_reply(query, query.connection.recv(_MOST_REPLY_BYTES))
        except BlockingIOError:
            pass
        except OSError:
            self._fail(query)

    def _on_stream(self, query: ServerQuery, mask: int) -> None:
        if mask & WRITE:
            question = dns.write_question(query.number, self._name, self._kind)
            # Less than 300 bytes into an empty buffer: no partial send.
            query.connection.send(len(question).to_bytes(2, "big") + question)
            self._loop.change(query.connection.fileno(), READ)
            return
        piece = query.connection.recv(4096)
        query.buffer += piece
        length = int.from_bytes(query.buffer[:2], "big")
        if len(query.buffer) >= 2 and len(query.buffer) >= 2 + length:
            self._on_reply(query, query.buffer[2 : 2 + length])
        elif not piece or length > _MOST_REPLY_BYTES:
            self._fail(query)

    def _on_reply(self, query: ServerQuery, message: bytes) -> None:
        try:
            reply = dns.read_reply(message, query.number, self._name, self._kind)
        except dns.MalformedMessage:
            query.wrong += 1
            if query.over_tcp or query.wrong > _MOST_WRONG:
                self._fail(query)
            return
        if reply.truncated and not query.over_tcp:
            self._drop(query)
            self._ask(query.server, socket.SOCK_STREAM)
        elif reply.truncated or reply.code not in (dns.NOERROR, dns.NXDOMAIN):
            self._worst = reply.code or dns.SERVFAIL
            self._fail(query)
        else:
            self._finish(reply)
