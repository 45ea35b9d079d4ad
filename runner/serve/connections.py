"""The door's connections: accepted here, so that the kernel's word about each peer reaches its requests, and
then spoken with by Hypercorn.

Every wait is bounded. A connection that sends no whole request header in time is closed, as is one that does
not read its answer. Beyond a number of connections, strangers are closed for further ones; if there are none,
further ones are told to come back.
"""

from __future__ import annotations

import json
import math
import select
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState

from runner.protocol.http_connection import HttpConnection
from runner.serve.door import MOST_HEADER_BYTES
from runner.serve.peer import CERT, Departure, DoorPeer, unix_peer
from runner.serve.refusal import Refused
from runner.serve.room import DoorPlace, Room
from runner.serve.tls import SPEAKS_HTTP, DoorTls, certified_peer, handshake_fault

HANDSHAKE_SECONDS = 5.0
_WRITE_SECONDS = 30.0  # for one part of an answer
_PART_BYTES = 64 << 10
_MOST_REQUESTS = 1_000_000  # of one connection
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


class _Gone(Exception):
    """The client has closed the connection while the answer to its request is made."""


class _Pause:
    """What Hypercorn waits for before it looks at the next request of a connection. Alone it would not notice
    that the client has gone if that has sent a byte too much."""

    def __init__(self) -> None:
        self._has_gone = False
        self._is_over = False
        self._change = trio.Event()

    def leave(self) -> None:
        self._has_gone = True
        self._change.set()

    async def clear(self) -> None:
        self._is_over = False
        if not self._has_gone:
            self._change = trio.Event()

    async def set(self) -> None:
        self._is_over = True
        self._change.set()

    def is_set(self) -> bool:
        return self._is_over

    async def wait(self) -> None:
        await self._change.wait()
        if not self._is_over:
            raise _Gone


class _IdleTimer:
    """In place of Hypercorn's, which starts a task for each request."""

    def __init__(self, place: DoorPlace) -> None:
        self._place = place
        self._scope = trio.CancelScope()
        self._is_needed = True

    async def run(self, expired: Callable[[], Awaitable[None]]) -> None:
        with self._scope:
            await trio.sleep_forever()
        if self._is_needed:
            await expired()

    async def restart(self, *_: object) -> None:
        self._scope.deadline = trio.current_time() + self._place.idle_seconds

    async def stop(self) -> None:
        self._scope.deadline = math.inf

    def end(self) -> None:
        self._is_needed = False
        self._scope.cancel()


class _Protocol(H11Protocol):
    """HTTP/1.1 only: HTTP/2 and websockets have rules that this door does not bound."""

    def __init__(self, on_refused: Callable[[DoorPeer, Refused], None], *given: Any) -> None:
        super().__init__(*given)
        self.connection = HttpConnection(h11.SERVER, MOST_HEADER_BYTES)
        self._on_refused = on_refused

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            self.connection_state["departure"].happen()
        await super().handle(event)

    async def _check_protocol(self, event: h11.Request) -> None:
        pass  # Hypercorn would answer that it takes up HTTP/2

    async def _create_stream(self, request: h11.Request) -> None:
        """A client who would rather speak something else gets an answer in HTTP/1.1, as HTTP allows."""
        if any(name == b"upgrade" for name, _ in request.headers):
            headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=headers,
                http_version=request.http_version,
            )
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        """Hypercorn's has no body."""
        assert isinstance(self.connection, HttpConnection)
        code, what, hint = _NOT_READ.get(status_code, _NOT_READ[400])
        refused = Refused(status_code, code, f"{what}: {self.connection.fault}", hint)
        self._on_refused(self.connection_state["peer"], refused)
        raw = json.dumps(refused.document()).encode()
        length, kind = str(len(raw)).encode(), b"application/json"
        headers = [(b"content-type", kind), (b"content-length", length), (b"connection", b"close")]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=raw))
        await self._send_h11_event(h11.EndOfMessage())


class _Connection(TCPServer):
    _head = b""  # of an answer, not sent yet

    def __init__(self, on_refused: Callable[[DoorPeer, Refused], None], *given: Any) -> None:
        super().__init__(*given)
        self._on_refused = on_refused

    async def run(self) -> None:
        self._pause = _Pause()
        try:
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = _Protocol(  # type: ignore[assignment]  # the part of the wrapper that is used
                    *(
                        self._on_refused,
                        self.app,
                        self.config,
                        self.context,
                        task_group,
                        ConnectionState(self.state),
                    ),
                    *(False, None, None, self.protocol_send),
                )
                self.protocol.can_read = self._pause  # type: ignore[attr-defined]
                timer = _IdleTimer(self.state["place"])
                self.idle_task = timer  # type: ignore[assignment]  # the part of it that is used
                await timer.restart()
                task_group.spawn(timer.run, self._initiate_server_close)
                await self._read_data()
                timer.end()  # else a closed connection counts until it would have been idle
        except* OSError:
            pass
        finally:
            with trio.CancelScope(shield=True):
                await self._close()

    async def _read_data(self) -> None:
        """Read one part ahead of what is handled, so that the end is noticed while a call runs."""
        give, take = trio.open_memory_channel[bytes](1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, give)
            with suppress(_Gone):
                async for data in take:
                    await self.protocol.handle(RawData(data))
            nursery.cancel_scope.cancel()
        await self.protocol.handle(Closed())

    async def _receive(self, give: trio.MemorySendChannel[bytes]) -> None:
        with give, suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            while data := await self.stream.receive_some(_PART_BYTES):
                try:
                    give.send_nowait(bytes(data))
                except trio.WouldBlock:
                    await self._hold(give, bytes(data))
        self._pause.leave()

    async def _hold(self, give: trio.MemorySendChannel[bytes], data: bytes) -> None:
        """Read no further until what was sent ahead is looked at, and notice all the same that the client has
        gone: the kernel tells the end of a stream before all of it is read."""
        fd = getattr(self.stream, "transport_stream", self.stream).socket.fileno()
        if fd < 0:
            return  # another task has closed it meanwhile
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLRDHUP)

            async def notice() -> None:
                await trio.lowlevel.wait_readable(poll.fileno())
                self._pause.leave()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(notice)
                await give.send(data)
                nursery.cancel_scope.cancel()

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        # Head and body of an answer go out together: two writes wake the client twice. The head of an answer
        # is always followed by more, if only by the empty end of its body. "100 Continue" is not: the client
        # waits for it before it sends more.
        parts, self._head = [self._head, event.data], b""
        if len(event.data) < _PART_BYTES:  # a large body is not copied
            parts = [b"".join(parts)]
            if event.data.startswith(b"HTTP/1.1 ") and not event.data.startswith(b"HTTP/1.1 1"):
                self._head = parts[0]
                return
        async with self.send_lock:
            # Hypercorn waits without a bound, also when it is told to end.
            with trio.move_on_after(_WRITE_SECONDS, shield=True):
                try:
                    for part in filter(None, parts):
                        await self.stream.send_all(part)
                    return
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
        await self._close()
        await self.protocol.handle(Closed())

    async def _close(self) -> None:
        self._pause.leave()  # else requests that were sent ahead keep the place of a closed connection
        await super()._close()


class Connections:
    """Serves an ASGI application on listening sockets."""

    def __init__(
        self,
        application: ASGIFramework,
        most: int,
        on_full: Callable[[], None],
        on_bug: Callable[[Exception], None],
        on_refused: Callable[[DoorPeer, Refused], None],
        tls: DoorTls | None = None,
        on_stranger: Callable[[str, str], None] = lambda address, fault: None,
    ) -> None:
        """`most`: connections at once by a unix socket; by TCP, where strangers may hold some, a quarter.
        `tls`: for all connections by TCP. `on_stranger`: gets the address of a client whose handshake failed,
        and why. `on_refused`: gets requests that are not HTTP."""
        config = Config()
        config.keep_alive_max_requests = _MOST_REQUESTS
        config.include_server_header = config.include_date_header = False
        config.accesslog = config.errorlog = None
        self._config = config
        self._door = application
        self._application = ASGIWrapper(self._serve_request)
        self._context = WorkerContext(None)
        self._most = most
        self._on_full = on_full
        self._on_bug = on_bug
        self._on_refused = on_refused
        self._tls = tls
        self._on_stranger = on_stranger
        self._speaking = 0  # requests that are served
        self._idle = trio.Event()

    async def _serve_request(self, scope: Any, receive: Any, send: Any) -> None:
        self._speaking += 1
        try:
            await self._door(scope, receive, send)
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
        except* Exception as group:  # noqa: BLE001 -- a bug ends this connection, not the daemon
            for error in group.exceptions:
                self._on_bug(error)
        finally:
            place.leave()

    async def _speak_in(self, place: DoorPlace, accepted: trio.socket.SocketType, secured: bool) -> None:
        async with trio.SocketStream(accepted) as transport:
            stream: trio.abc.Stream | None = transport
            if secured:
                stream, peer = await self._shake_hands(transport, place.address)
            elif accepted.family == socket.AF_UNIX:
                peer = unix_peer(accepted._sock)  # type: ignore[attr-defined]
            else:
                peer = DoorPeer(None)
            if stream is None:
                return
            if peer.subject and not place.admit(CERT + peer.subject):
                return
            given = {"peer": peer, "place": place, "greeted": [], "departure": Departure()}
            parts = (self._application, self._config, self._context, ConnectionState(given), stream)
            await _Connection(self._on_refused, *parts).run()

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
    raw: socket.socket = accepted._sock  # type: ignore[attr-defined]
    try:
        raw.send(word)
    except OSError:
        pass
    accepted.close()
