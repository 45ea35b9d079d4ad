"""The door's connections: accepted here, so that the kernel's word about each peer reaches its requests, and
spoken with in HTTP/1.1 by h11. HTTP/2 and websockets have rules that this door does not bound.

Every wait is bounded. A connection that sends no whole request header in time is closed, as is one that does
not read its answer. Nothing is read that is not asked for. Beyond a number of connections, strangers are
closed for further ones; if there are none, further ones are told to come back.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any
from urllib.parse import unquote

import h11
import trio

from runner.serve.door import MOST_HEADER_BYTES, Application, Message, Receive, Send
from runner.serve.peer import CERT, Departure, DoorPeer, unix_peer
from runner.serve.refusal import Refused
from runner.serve.room import DoorPlace, Room
from runner.serve.tls import SPEAKS_HTTP, DoorTls, certified_peer, handshake_fault
from sandbox.network.http_connection import HttpConnection

HANDSHAKE_SECONDS = 5.0
_WRITE_SECONDS = 30.0  # for one part of an answer
_PART_BYTES = 64 << 10
_MAY_SEND = (h11.IDLE, h11.SEND_RESPONSE, h11.SEND_BODY)
# The code, the message and the hint for a request that cannot be read, by the status of its answer.
_NOT_READ = {
    400: ("not_http", "this is not a request in HTTP/1.1", "send one that keeps to RFC 9112"),
    431: ("header_too_large", "the request is too large", "send fewer and shorter headers, or larger chunks"),
    501: (
        "transfer_encoding",
        "the request has an unknown Transfer-Encoding",
        "send it chunked, or with its length",
    ),
    505: ("http_version", "the request is not in HTTP/1.1", "use HTTP/1.1"),
}
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
_NOT_TLS = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\nConnection: close\r\n\r\nuse https://\n"


OnRefused = Callable[[DoorPeer, Refused], None]
OnBug = Callable[[str, Exception], None]


class _Conversation:
    """The requests of one connection, and their answers."""

    def __init__(
        self,
        application: Application,
        stream: trio.abc.Stream,
        state: dict[str, Any],
        scheme: str,
        on_refused: OnRefused,
        on_bug: OnBug,
    ) -> None:
        self._application, self._stream, self._scheme = application, stream, scheme
        self._state = state  # what the scope of each request has
        self._departure: Departure = state["departure"]
        self._on_refused, self._on_bug = on_refused, on_bug
        self._http = HttpConnection(h11.SERVER, MOST_HEADER_BYTES)
        self._is_head = False  # the request
        self._head: list[Any] = []  # of the answer, not sent yet
        self._has_body = True  # the answer
        self._is_over = trio.Event()  # the answer is whole, or the client has gone

    async def run(self, descriptor: int) -> None:
        """`descriptor`: of the connection's socket."""
        with select.epoll() as poll:
            poll.register(descriptor, select.EPOLLRDHUP)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, poll)
                while (request := await self._next_request()) is not None:
                    await self._serve(request)
                    states = {self._http.our_state, self._http.their_state}
                    if states != {h11.DONE} or self._departure.has_happened:
                        break  # what was sent ahead is not looked at
                    self._http.start_next_cycle()
                nursery.cancel_scope.cancel()

    async def _watch(self, poll: select.epoll) -> None:
        """Notice that the client has gone, while nothing is read of what it has sent ahead: the kernel tells
        the end of a stream before all of it is read."""
        await trio.lowlevel.wait_readable(poll.fileno())
        self._departure.happen()

    async def _next_request(self) -> h11.Request | None:
        self._is_head = False
        with trio.move_on_after(self._state["place"].idle_seconds):
            event = await self._next_event()
            return event if isinstance(event, h11.Request) else None
        return None

    async def _next_event(self) -> Any:
        """As h11's. None: nothing follows that can be read."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
                if not (data := await self._stream.receive_some(_PART_BYTES)):
                    return None
                self._http.receive_data(bytes(data))
            return event
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            code, what, hint = _NOT_READ.get(status, _NOT_READ[400])
            await self._refuse(Refused(status, code, f"{what}: {self._http.fault}", hint))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        return None

    async def _serve(self, request: h11.Request) -> None:
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": self._scheme,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "state": dict(self._state),
        }
        self._is_head, self._is_over = request.method == b"HEAD", trio.Event()
        try:
            with self._departure.calls(self._is_over.set):
                await self._application(scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 -- a bug ends this request, not the daemon
            self._on_bug(f"{scope['method']} {path.decode()}", error)
            await self._refuse(Refused(500, "internal", "a bug of the daemon; its stderr says which"))

    async def _receive(self) -> Message:
        if self._http.their_state is not h11.SEND_BODY:
            await self._is_over.wait()
            return {"type": "http.disconnect"}
        event = await self._next_event()
        if event is None:
            return {"type": "http.disconnect"}
        is_data = isinstance(event, h11.Data)
        body = bytes(event.data) if is_data else b""
        return {"type": "http.request", "body": body, "more_body": is_data}

    async def _send(self, message: Message) -> None:
        """Head and body of an answer go out together: two writes wake the client twice."""
        if message["type"] == "http.response.start":
            self._head = [h11.Response(status_code=message["status"], headers=message["headers"])]
            self._has_body = not self._is_head and message["status"] not in (204, 304)
            return
        events, self._head = self._head, []
        if self._has_body and message.get("body"):
            events.append(h11.Data(data=message["body"]))
        if is_last := not message.get("more_body"):
            events.append(h11.EndOfMessage())
        if self._http.our_state in _MAY_SEND:  # else its request was refused meanwhile
            parts = [self._http.send_with_data_passthrough(each) or () for each in events]
            await self._write(*chain.from_iterable(parts))
        if is_last:
            self._is_over.set()

    async def _refuse(self, refused: Refused) -> None:
        """Answer in place of the application, if it has not begun to, and close."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        self._on_refused(self._state["peer"], refused)
        raw = json.dumps(refused.document()).encode()
        kind, length = (b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))
        headers = [kind, length, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": refused.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": raw})

    async def _write(self, *parts: bytes) -> None:
        if sum(map(len, parts)) < _PART_BYTES:  # a large body is not copied
            parts = (b"".join(parts),)
        # Also when it is told to end: an answer that has begun is sent whole.
        with trio.move_on_after(_WRITE_SECONDS, shield=True):
            try:
                for part in parts:
                    await self._stream.send_all(part)
                return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await trio.aclose_forcefully(self._stream)
        self._departure.happen()


class Connections:
    """Serves an ASGI application on listening sockets."""

    def __init__(
        self,
        application: Application,
        most: int,
        on_full: Callable[[], None],
        on_bug: OnBug,
        on_refused: OnRefused,
        tls: DoorTls | None = None,
        on_stranger: Callable[[str, str], None] = lambda address, fault: None,
    ) -> None:
        """`most`: connections at once by a unix socket; by TCP, where strangers may hold some, a quarter.
        `tls`: for all connections by TCP. `on_stranger`: gets the address of a client whose handshake failed,
        and why. `on_refused`: gets requests that are not HTTP. `on_bug`: gets what was done meanwhile."""
        self._application = application
        self._most = most
        self._on_full = on_full
        self._on_bug = on_bug
        self._on_refused = on_refused
        self._tls = tls
        self._on_stranger = on_stranger
        self._speaking = 0  # requests that are served
        self._idle = trio.Event()

    async def _serve_request(self, scope: Message, receive: Receive, send: Send) -> None:
        self._speaking += 1
        try:
            await self._application(scope, receive, send)
        finally:
            self._speaking -= 1
            self._idle.set()

    async def until_idle(self) -> None:
        """Wait until no request is served. Further ones may come."""
        while self._speaking:
            self._idle = trio.Event()
            await self._idle.wait()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until this task is cancelled."""
        listener.setblocking(False)
        accepting = trio.socket.from_stdlib_socket(listener)
        is_unix = listener.family == socket.AF_UNIX
        room = Room(self._most if is_unix else max(1, self._most // 4), self._on_full)
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    accepted, address = await accepting.accept()
                except OSError:
                    # The peer has gone, or there is no descriptor left. Connections that end free some.
                    await trio.sleep(0.05)
                    continue
                secured = self._tls is not None and not is_unix
                scope = trio.CancelScope()
                place = room.take("" if is_unix else str(address[0]), partial(_end, accepted, scope))
                if place is None:
                    _refuse(accepted, b"" if secured else _FULL)
                    continue
                if is_unix:
                    place.admit()  # only the owner can connect, and the kernel tells who it is
                nursery.start_soon(self._speak, accepted, secured, place, scope)

    async def _speak(
        self, accepted: trio.socket.SocketType, secured: bool, place: DoorPlace, scope: trio.CancelScope
    ) -> None:
        """`secured`: the client has to speak TLS."""
        try:
            with scope:
                await self._speak_in(place, accepted, secured)
        except* OSError:
            pass  # no descriptor is left to watch it by
        except* Exception as group:  # noqa: BLE001 -- a bug ends this connection, not the daemon
            for error in group.exceptions:
                self._on_bug("a connection", error)
        finally:
            place.leave()

    async def _speak_in(self, place: DoorPlace, accepted: trio.socket.SocketType, secured: bool) -> None:
        async with trio.SocketStream(accepted) as transport:
            stream: trio.abc.Stream | None = transport
            if secured:
                stream, peer = await self._shake_hands(transport, place.address)
            elif accepted.family == socket.AF_UNIX:
                peer = unix_peer(accepted)
            else:
                peer = DoorPeer(None)
            if stream is None:
                return
            if peer.subject and not place.admit(CERT + peer.subject):
                return
            state = {"peer": peer, "place": place, "greeted": [], "departure": Departure()}
            scheme = "https" if secured else "http"
            told = (self._on_refused, self._on_bug)
            await _Conversation(self._serve_request, stream, state, scheme, *told).run(accepted.fileno())

    async def _shake_hands(
        self, transport: trio.SocketStream, address: str
    ) -> tuple[trio.abc.Stream | None, DoorPeer]:
        """The encrypted stream, and who the client is. None: it was refused, and that was told."""
        assert self._tls is not None
        stream = trio.SSLStream(transport, self._tls.context, server_side=True, https_compatible=True)
        fault = f"no handshake within {HANDSHAKE_SECONDS:g} seconds"
        with trio.move_on_after(HANDSHAKE_SECONDS):
            try:
                await stream.do_handshake()
                return stream, certified_peer(stream.getpeercert())
            except trio.BrokenResourceError as error:
                fault = handshake_fault(error.__cause__)
                # trio leaves the alert that tells the client why.
                farewell = _NOT_TLS if fault == SPEAKS_HTTP else stream._outgoing.read()
                with suppress(trio.BrokenResourceError):
                    await transport.send_all(farewell)
            except ValueError as error:
                fault = str(error)
        self._on_stranger(address, fault)
        return None, DoorPeer(None)


def _end(accepted: trio.socket.SocketType, scope: trio.CancelScope) -> None:
    scope.cancel()
    accepted.close()  # an answer that is written is not waited for


def _refuse(accepted: trio.socket.SocketType, word: bytes) -> None:
    with suppress(OSError):
        os.write(accepted.fileno(), word)
    accepted.close()
