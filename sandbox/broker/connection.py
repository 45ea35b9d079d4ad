"""Connection: one of the plugin's connections to a server, with its requests, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import h11

from sandbox.broker.exchange import BothEnds, HttpExchange, Record, read_event
from sandbox.broker.stream import Stream, StreamBroken, TimeSpent, TlsRefused
from sandbox.broker.tasks import Tasks
from sandbox.broker.terms import BrokerTerms, HostTerms, RequestRefused
from sandbox.broker.tls import AskedName, Context
from sandbox.network.http_connection import HttpConnection

MOST_HEAD_BYTES = 64 << 10  # of a request, and of an answer with all interim ones
HANDSHAKE_SECONDS = HEAD_SECONDS = 30.0
IDLE_SECONDS = 600.0
LINGER_SECONDS = 5.0  # until the plugin has read an answer to a request that it still sends
_LINGER_BYTES = 1 << 20
_HTTPS_PORT = 443
_OTHER_VERSION = 505
_TLS_HANDSHAKE = 0x16  # the first byte of a ClientHello
_ALPN_HTTP1, _ALPN_HTTP2 = b"\x08http/1.1", b"\x02h2"

_UNTRUSTED = (
    "was not asked: the program does not trust the certificate of this launch ({}). Let it read the"
    " authorities in the file of SSL_CERT_FILE; a program with a list of its own can use no hidden credential"
)
_UNCERTIFIED = (
    "was not asked: the certificate of this launch is for one label below a wildcard ({}). Name the host"
    " itself beside the wildcard"
)
_NO_REASON = "it ended the TLS handshake"
_HTTP2 = "is asked with HTTP/2, and a host with a hidden credential or a rule about requests needs HTTP/1.1"
_HTTP2_ADVICE = "Let the program speak HTTP/1.1."
_UNANSWERED = "got the whole request, and the plugin ended before the answer"


class BrokerParts(NamedTuple):
    """What all connections share."""

    tasks: Tasks
    terms: BrokerTerms
    report: Callable[[dict[str, str | float]], None]
    plugin_tls: Context
    server_tls: Mapping[tuple[str, ...], Context]  # by the files of the roots that count for a server


class Failed(Exception):
    """The connection is not what it should be. The text is the rest of a sentence that begins with the
    host."""


class _IdleTooLong(Exception):
    pass


class Connection:
    def __init__(
        self,
        around: BrokerParts,
        host: str,
        port: int,
        plugin: Stream,
        server: Stream,
        done: Callable[[Connection], None],
    ) -> None:
        self._around = around
        self._tasks = around.tasks
        self._host, self._port = host, port
        up, down = (HttpConnection(role, MOST_HEAD_BYTES) for role in (h11.SERVER, h11.CLIENT))
        self._ends = BothEnds(plugin, server, up, down)
        self._done = done
        self._terms: HostTerms | None = None
        self._record: Record | None = None  # of the request that has no line yet
        self._exchange: HttpExchange | None = None
        self._server_fault = ""
        self._leaving = False
        self._task = self._tasks.start(self._run(), self._on_end)
        self._idle = self._tasks.loop.call_later(IDLE_SECONDS, self._on_idle)

    @property
    def _is_cut(self) -> bool:
        return self._exchange is not None and self._exchange.is_cut

    def leave(self) -> None:
        """The plugin has ended: end when what it sent is delivered."""
        self._leaving = True
        if self._exchange is not None:
            self._exchange.leaving = True
        self._task.wake()

    # --- its life ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        ends, in_order = self._ends, False
        try:
            in_order = await self._serve()
        except Failed as failed:
            self._report("failed", str(failed))
            await self._linger(self._tasks.loop.now + LINGER_SECONDS)
        except StreamBroken as broken:
            if broken.side == "server" or self._record is not None:
                self._report("failed" if broken.side == "server" else "allowed", str(broken))
        except _IdleTooLong:
            if self._record is not None:
                self._report("failed", f"was closed after {IDLE_SECONDS:g} seconds without a byte")
        except h11.RemoteProtocolError as error:
            http, does = (ends.up, "is asked") if ends.up.fault else (ends.down, "answers")
            self._report(
                "failed", f"{does} in another way than HTTP/1.1 has it: {http.fault or 'it was cut'}"
            )
            del error
        finally:
            ends.server.close(in_order=in_order and not self._is_cut)
            ends.plugin.close(in_order=in_order)

    def _on_end(self, failure: BaseException | None) -> None:
        self._tasks.loop.cancel(self._idle)
        if failure is not None:  # a fault of ours: this connection ends, the others go on
            self._report("failed", f"broke: the broker has a fault ({type(failure).__name__})")
        self._done(self)

    def _on_idle(self) -> None:
        until = max(self._ends.plugin.moved_at, self._ends.server.moved_at) + IDLE_SECONDS
        if self._tasks.loop.now < until:
            self._idle = self._tasks.loop.call_at(until, self._on_idle)
        else:
            self._task.throw(_IdleTooLong())

    def _report(self, verdict: str, reason: str = "") -> None:
        """Write the line of the request, or one about the connection."""
        record, self._record = self._record or Record(self._tasks.loop.now), None
        self._around.report(
            {
                "kind": "request",
                "name": self._host,
                "port": self._port,
                "verdict": verdict,
                "rule": record.rule,
                "reason": reason,
                "sent": record.sent,
                "received": record.received,
                "seconds": round(self._tasks.loop.now - record.began, 6),
                "method": record.method,
                "path": record.path,
                "status": record.status,
                "credential": ",".join(record.credentials),
            }
        )

    # --- its beginning -----------------------------------------------------------------------------

    async def _serve(self) -> bool:
        """Returns whether everything came to its end in order."""
        first = await self._ends.plugin.look_ahead(None)
        if not first:
            return True  # nothing was asked
        secure = first[0] == _TLS_HANDSHAKE
        self._terms = HostTerms(self._around.terms, self._host, self._port, secure=secure)
        if secure:
            await self._accept_tls(self._terms)
            if await self._plugin_is_mute(first):
                raise Failed(f"{_HTTP2}. {_HTTP2_ADVICE}")
            await self._connect_tls(self._terms)
        try:
            if not secure and self._port == _HTTPS_PORT:
                self._record = Record(self._tasks.loop.now)
                raise RequestRefused(f"is asked without TLS on port {_HTTPS_PORT}")
            while await self._serve_request(self._terms):
                pass
        except RequestRefused as refused:
            await self._turn_away(refused)
        until = self._tasks.loop.now + LINGER_SECONDS
        if not self._is_cut:
            await self._ends.server.finish(until)
        await self._linger(until)
        return True

    async def _accept_tls(self, terms: HostTerms) -> None:
        asked = AskedName(terms.is_named)
        self._ends.plugin.wrap(self._around.plugin_tls, asked=asked)
        try:
            await self._ends.plugin.shake_hands(self._tasks.loop.now + HANDSHAKE_SECONDS)
        except TlsRefused as refused:
            if asked.is_other:
                raise Failed("is asked for by another name in TLS (SNI)") from None
            if not asked.is_heard:
                raise Failed(f"was not asked: no TLS handshake could be read ({refused})") from None
            raise Failed(self._describe_distrust(terms, str(refused))) from None
        except StreamBroken:
            raise Failed(self._describe_distrust(terms, _NO_REASON)) from None
        except TimeSpent:
            raise Failed(f"was not asked: no TLS handshake within {HANDSHAKE_SECONDS:g} seconds") from None

    def _describe_distrust(self, terms: HostTerms, reason: str) -> str:
        return (_UNTRUSTED if terms.is_certified else _UNCERTIFIED).format(reason)

    async def _plugin_is_mute(self, first: bytes) -> bool:
        """Whether a program that only speaks HTTP/2 has gone after the handshake."""
        if _ALPN_HTTP2 not in first or _ALPN_HTTP1 in first or self._ends.plugin.has_read:
            return False
        try:
            return not await self._ends.plugin.look_ahead(self._tasks.loop.now + HEAD_SECONDS)
        except (StreamBroken, TimeSpent):
            return True

    async def _connect_tls(self, terms: HostTerms) -> None:
        """A fault is told to the first request."""
        server = self._ends.server
        server.wrap(self._around.server_tls[terms.authorities], self._host)
        try:
            await server.shake_hands(self._tasks.loop.now + HANDSHAKE_SECONDS)
        except TlsRefused as refused:
            self._server_fault = f"is not reached: its TLS is not to be trusted ({refused})"
        except StreamBroken as broken:
            self._server_fault = str(broken)
        except TimeSpent:
            self._server_fault = f"did not finish the TLS handshake within {HANDSHAKE_SECONDS:g} seconds"

    # --- its requests ------------------------------------------------------------------------------

    async def _serve_request(self, terms: HostTerms) -> bool:
        """Serve the next request. Returns whether another one may follow."""
        if not await self._wait_for_request():
            return False
        record = self._record = Record(self._tasks.loop.now)
        try:
            event = await read_event(self._ends.up, self._ends.plugin, record.began + HEAD_SECONDS)
        except h11.RemoteProtocolError as error:
            raise self._describe(error) from None
        except TimeSpent:
            raise RequestRefused(
                f"got no whole request within {HEAD_SECONDS:g} seconds", status=408
            ) from None
        except StreamBroken:
            if self._ends.up.trailing_data[0]:
                raise
            event = None  # it was closed between requests
        if not isinstance(event, h11.Request):
            self._record = None
            return False
        record.method = event.method.decode("ascii")[:32]
        record.path = terms.show_path(event.target)
        outgoing = terms.judge(event)
        record.rule = outgoing.rule
        if self._server_fault:
            raise RequestRefused(self._server_fault, status=502, verdict="failed")
        record.credentials = outgoing.credentials
        exchange = HttpExchange(self._tasks, self._task, self._ends, terms, outgoing, record)
        exchange.leaving = self._leaving
        self._exchange = exchange
        goes_on = await exchange.run()
        self._report("allowed", _UNANSWERED if exchange.delivered and exchange.leaving else "")
        return goes_on

    async def _wait_for_request(self) -> bool:
        """False if the server ends the connection, or says something unasked."""
        plugin, server = self._ends.plugin, self._ends.server
        if plugin.has_read or self._ends.up.trailing_data[0]:
            return True
        wanted = [plugin.readable]
        if not self._server_fault:
            wanted.append(server.readable)
            if server.has_read and server.try_read() is not None:
                return False
        while (ready := await self._tasks.wait(wanted)) != plugin.readable:
            if ready == server.readable and server.try_read() is not None:
                return False
        return True

    def _describe(self, error: h11.RemoteProtocolError) -> RequestRefused:
        if error.error_status_hint == _OTHER_VERSION:
            return RequestRefused(_HTTP2, _HTTP2_ADVICE, _OTHER_VERSION)
        reason = f"is asked in another way than HTTP/1.1 has it: {self._ends.up.fault}"
        return RequestRefused(reason, status=error.error_status_hint)

    async def _turn_away(self, refused: RequestRefused) -> None:
        """Answer in the server's place."""
        if self._record is not None:
            self._record.status = refused.status
        self._report(refused.verdict, str(refused))
        up = self._ends.up
        if up.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        text = f"{self._host} {refused}.\n{refused.advice}".strip().encode("ascii", "replace") + b"\n"
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(text))),
            ("Connection", "close"),
        ]
        answer = up.send(
            h11.Response(status_code=refused.status, headers=headers, reason=b"Refused by the runner")
        )
        if up._request_method != b"HEAD":
            answer += up.send(h11.Data(data=text))
        try:
            await self._ends.plugin.write(answer, self._tasks.loop.now + LINGER_SECONDS)
        except (StreamBroken, TimeSpent):
            pass

    async def _linger(self, until: float) -> None:
        """Let the plugin read an answer while it still sends: with unread bytes it would be lost."""
        try:
            await self._ends.plugin.finish(until)
            await self._ends.plugin.discard(until, _LINGER_BYTES)
        except (StreamBroken, TimeSpent):
            pass
