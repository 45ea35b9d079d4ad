"""The door: every request passes here before a route sees it. Who calls, and a whole body within bounds.

A refused request is answered at once, and its connection is closed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import trio

from runner.serve.answers import Json
from runner.serve.page.page import Page
from runner.serve.page.sessions import PageSession
from runner.serve.peer import VISITOR, DoorPeer, Rules, identify, is_local
from runner.serve.refusal import Refused

MOST_HEADER_BYTES = 16 << 10
MOST_BODY_BYTES = 16 << 20
BODY_SECONDS = 30.0
_MOST_VISITOR_BYTES = 4 << 10
MOST_HELD_BYTES = 256 << 20  # bodies of all requests; and as much of answers that are being written

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class _Held(Counter[str]):
    """The bytes that are in memory for each caller: of bodies, or of answers."""

    def excess(self, caller: str) -> int:
        """The bytes above a caller's share, which is half of what other callers leave: so there is always
        some room for the next caller."""
        own = self[caller]
        return own - (MOST_HELD_BYTES - (self.total() - own)) // 2

    def drop(self, caller: str, size: int) -> None:
        self[caller] -= size
        if not self[caller]:
            del self[caller]


class _Body:
    def __init__(self, held: _Held, caller: str) -> None:
        self.content = bytearray()  # not a list of parts: a client may send it byte by byte
        self.size = 0
        self._held, self._caller = held, caller

    def add(self, part: bytes) -> bool:
        """Returns False if its caller holds more than its share."""
        self.content += part
        self.size += len(part)
        self._held[self._caller] += len(part)
        return self._held.excess(self._caller) <= 0

    def drop(self) -> None:
        """Give its room back. May be called twice."""
        self._held.drop(self._caller, self.size)
        self.content.clear()
        self.size = 0

    def take(self) -> bytes:
        whole = bytes(self.content)
        self.content.clear()
        return whole


class _Unread:
    """Parts of answers that are being written. A client may take its time to read one, and a caller whose
    clients read nothing would fill the memory. So when a caller has more than its share, its oldest parts
    are given up."""

    def __init__(self) -> None:
        self._held = _Held()
        self._parts: dict[object, tuple[str, int, Callable[[], None]]] = {}  # the oldest first

    async def send(self, message: Message, send: Send, caller: str, give_up: Callable[[], None]) -> None:
        """`give_up`: closes the connection at once."""
        size, part = len(message.get("body", b"")), object()
        self._held[caller] += size
        if self._held.excess(caller) > 0:
            self._give_up(caller)
        self._parts[part] = caller, size, give_up
        try:
            await send(message)
        finally:
            self._drop(part)

    def _give_up(self, caller: str) -> None:
        for part, (other, _, give_up) in [*self._parts.items()]:
            if other == caller and self._held.excess(caller) > 0:
                self._drop(part)
                give_up()

    def _drop(self, part: object) -> None:
        """May be called twice."""
        if part in self._parts:
            caller, size, _ = self._parts.pop(part)
            self._held.drop(caller, size)


class Door:
    """An ASGI application around another one, which finds the caller in scope["state"]["caller"]."""

    def __init__(
        self,
        application: Application,
        rules: Rules,
        *,
        on_refused: Callable[[DoorPeer, Refused], None],
        on_connected: Callable[[DoorPeer, str], None],
        page: Page | None = None,
        most_bytes: int = MOST_BODY_BYTES,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._application = application
        self._rules = rules
        self._on_refused = on_refused
        self._on_connected = on_connected
        self._page = page
        self._held = _Held()
        self._unread = _Unread()
        self._most_bytes = most_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        peer: DoorPeer = scope["state"]["peer"]
        body: _Body | None = None
        try:
            headers = _headers(scope)
            scope["state"]["session"] = None
            by_page = None if self._page is None else partial(self._page.identify, scope, headers)
            scope["state"]["caller"] = caller = identify(peer, headers, self._rules, by_page)
            if caller != VISITOR and not scope["state"]["place"].admit("" if is_local(caller) else caller):
                message = "this caller's share of the connections is in use"
                raise Refused(503, "busy", message, "use fewer connections, or close some", retry_after=1)
            # The list belongs to the connection, which may have several callers: a visitor who then shows a
            # token must not stay unknown. Visitors themselves would fill the audit.
            if caller not in scope["state"]["greeted"]:
                scope["state"]["greeted"].append(caller)
                if caller != VISITOR:
                    self._on_connected(peer, caller)
            body = _Body(self._held, caller)
            # Nobody has been let in yet: only as much as a code takes.
            most = min(self._most_bytes, _MOST_VISITOR_BYTES) if caller == VISITOR else self._most_bytes
            if not await self._read(body, headers, receive, most):
                return  # the caller has gone
            given = [{"type": "http.request", "body": body.take(), "more_body": False}]

            async def replay() -> Message:
                return given.pop() if given else await receive()

            def give_up() -> None:
                message = "this caller's share of the room for answers that are not read is in use"
                self._on_refused(peer, Refused(503, "unread_answer", message))
                scope["state"]["place"].close()

            async def send_counted(message: Message) -> None:
                await self._unread.send(message, send, caller, give_up)

            session: PageSession | None = scope["state"]["session"]
            with nullcontext() if session is None else session.bound(), _until_expiry(peer):
                await self._application(scope, replay, send_counted)
        except Refused as refused:
            if body is not None:
                body.drop()  # before the answer, for which the client may take its time
            self._on_refused(peer, refused)
            answer = Json(refused.document(), refused.status, {"Connection": "close"} | refused.headers())
            await answer(scope, receive, send)
        finally:
            if body is not None:
                body.drop()

    async def _read(self, body: _Body, headers: dict[str, list[str]], receive: Receive, most: int) -> bool:
        """Read a whole body. Returns False if the caller has gone. Raises Refused."""
        told = headers.get("content-length", ["0"])[0]
        if told.isascii() and told.isdigit() and int(told) > most:
            raise _too_large(most)
        with trio.move_on_after(self._body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                has_room = body.add(message.get("body", b""))
                if body.size > most:
                    raise _too_large(most)
                if not has_room:
                    hint = "send smaller bodies, or fewer at once"
                    message_text = "this caller's share of the room for bodies is in use"
                    raise Refused(503, "busy", message_text, hint, retry_after=1)
                if not message.get("more_body"):
                    return True
        message_text = f"the body did not arrive within {self._body_seconds:g} seconds"
        raise Refused(408, "slow_body", message_text, "send it faster, or in smaller calls")


def _too_large(most: int) -> Refused:
    message = f"the body is larger than {most} bytes"
    return Refused(413, "body_too_large", message, "send less, or pass a file to the plugin another way")


def _headers(scope: Message) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


def _until_expiry(peer: DoorPeer) -> AbstractContextManager[object]:
    """Cancel the body when the client's certificate expires: a stream may last for years."""
    return trio.move_on_after(max(0.0, peer.expires - time.time())) if peer.subject else nullcontext()
