"""The loopback address to which the browser of a person who signs in is sent back.

Everybody on this machine, and every page in the browser, can send requests here. So only one with the state
of this very sign-in counts, and all others change nothing.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl

import trio

_PATH = "/callback"
_REQUEST = re.compile(rb"GET /callback\?([!-~]{1,8000}) HTTP/1\.[01]\r\n")
_MOST_BYTES = 16 << 10
_MOST_CONNECTIONS = 16  # at once: browsers open some that they do not use
_SECONDS = 10.0  # for one request
_HEAD = (
    "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n"
    "Connection: close\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'none'\r\nX-Content-Type-Options: nosniff\r\n\r\n{text}"
)


class Callback:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}{_PATH}"
        self.state = ""  # that counts; empty: none does yet
        self._found: Mapping[str, str] = {}
        self._done = trio.Event()
        self._places = trio.Semaphore(_MOST_CONNECTIONS)

    async def parameters(self) -> Mapping[str, str]:
        """What the authorization server sent with the browser."""
        await self._done.wait()
        return self._found

    async def serve(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(_SECONDS):
            async with stream, self._places:
                try:
                    status, text = self._take(await _read(stream))
                    answer = _HEAD.format(status=status, length=len(text), text=text)
                    await stream.send_all(answer.encode())
                except trio.BrokenResourceError:
                    pass  # the browser has gone

    def _take(self, request: bytes) -> tuple[str, str]:
        asked = _REQUEST.match(request)
        pairs = parse_qsl(asked[1].decode(), keep_blank_values=True) if asked is not None else []
        found = dict(pairs)
        ours = bool(self.state) and hmac.compare_digest(found.get("state", "").encode(), self.state.encode())
        if not ours or len(found) != len(pairs) or self._done.is_set():
            return "404 Not Found", "This is for the sign-in that runs, and nothing else.\n"
        self._found = found
        self._done.set()
        said = "You are signed in" if "code" in found else "The sign-in was refused"
        return "200 OK", f"{said}, as far as this page knows. Go back to the terminal.\n"


@asynccontextmanager
async def open_callback(port: int = 0) -> AsyncIterator[Callback]:
    """Listen on 127.0.0.1. `port`: 0 for any that is free. Raises OSError."""
    listener = trio.socket.socket()
    try:
        # A port that the settings name may have been used a moment ago.
        listener.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, True)
        await listener.bind(("127.0.0.1", port))
        listener.listen(_MOST_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    callback = Callback(listener.getsockname()[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, callback.serve, [trio.SocketListener(listener)])
        yield callback
        nursery.cancel_scope.cancel()


async def _read(stream: trio.SocketStream) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found and len(found) < _MOST_BYTES:
        more = await stream.receive_some(_MOST_BYTES)
        if not more:
            break
        found += more
    return found
