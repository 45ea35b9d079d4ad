"""An HTTP/1.1 answer, read piece by piece, with a limit on everything that a server can make long.

Supports one answer on one connection. Ambiguous answers are refused. Content encodings are not decoded: the
body is what the server sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import h11

from runner.protocol.https.failure import FetchFailed, Kind
from runner.protocol.https.request import REDIRECTS, Headers
from sandbox.network.http_connection import TOO_LARGE, HttpConnection

_SHOWN = 200  # characters of what h11 says

# About the connection, which has ended, and about how the body was cut in pieces.
_OF_THE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "trailer", "transfer-encoding", "upgrade")
)


class HttpsResponse(NamedTuple):
    status: int
    headers: Headers  # as the server sent them, without those about the connection
    body: bytes
    url: str  # of the last request, after redirects


def find_location(status: int, headers: Sequence[tuple[str, str]]) -> str | None:
    """The target of a redirect, or None. Raises FetchFailed."""
    found = [value for name, value in headers if name.lower() == "location"] if status in REDIRECTS else []
    if len(found) > 1:
        raise FetchFailed("protocol", "the server redirects to several places at once")
    return found[0] if found else None


class ResponseReader:
    """Feed it bytes until it is complete. Raises FetchFailed for an invalid or too large answer.

    The body of a redirect is not read. `connection`: the request was sent with it.
    """

    def __init__(self, connection: HttpConnection, most_bytes: int) -> None:
        self.status = 0  # until the head was read
        self.headers: Headers = ()
        self.body = bytearray()
        self.complete = False
        self._connection = connection
        self._most_bytes = most_bytes
        self._told_bytes = 0  # of the body, by its header

    def feed(self, data: bytes | bytearray) -> None:
        """The next bytes; none at all if the server has ended the connection in order."""
        self._connection.receive_data(bytes(data))
        try:
            while not self.complete and isinstance(event := self._connection.next_event(), h11.Event):
                self._take(event)
        except h11.RemoteProtocolError as error:
            kind: Kind = "too_large" if error.error_status_hint == TOO_LARGE else "protocol"
            message = f"the server's answer is not one of HTTP/1.1: {str(error)[:_SHOWN]}"
            if kind == "too_large":
                message = f"the server's answer is too large: {error}"
            raise FetchFailed(kind, message) from None
        if not self.complete:
            self._check_size(self._told_bytes - len(self.body))

    @property
    def location(self) -> str | None:
        """The target of a redirect, or None."""
        return find_location(self.status, self.headers)

    def answer(self, url: str) -> HttpsResponse:
        headers = tuple(
            (name, value) for name, value in self.headers if name.lower() not in _OF_THE_CONNECTION
        )
        return HttpsResponse(self.status, headers, bytes(self.body), url)

    def _take(self, event: h11.Event) -> None:
        if isinstance(event, h11.Response):
            self.status = event.status_code
            self.headers = tuple(
                (name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers.raw_items()
            )
            self._told_bytes = int(dict(event.headers).get(b"content-length", b"0"))
            self.complete = self.location is not None
        elif isinstance(event, h11.Data):
            self._check_size(len(event.data))
            self.body += event.data
        elif isinstance(event, h11.EndOfMessage):
            self.complete = True

    def _check_size(self, more: int) -> None:
        if len(self.body) + more > self._most_bytes:
            raise FetchFailed("too_large", f"the body of the answer has more than {self._most_bytes} bytes")
