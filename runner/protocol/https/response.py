"""An HTTP/1.1 answer, read piece by piece by h11, with a limit on everything that a server can make long.

Supports one answer on one connection. Ambiguous answers are refused. Content encodings are not decoded: the
body is what the server sent.

Some patterns of h11 0.16 take the square of a line's length: it needs 23 s to refuse a header of 64 KiB of
blanks and a NUL, and meanwhile no session of this process goes on. So h11 gets a head as a whole, and only
without such bytes and continued lines. The lines of a chunked body, which h11 finds itself, are kept short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import h11

from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import REDIRECTS, Headers
from sandbox.speed.value import NamedTuple

MOST_HEAD_BYTES = 64 << 10  # of status lines and headers together, also of interim answers
MOST_HEADER_LINES = 100
# Of the size of a chunk with extensions, and of all trailers. h11 sees at most twice as much at once.
MOST_CHUNK_LINE_BYTES = 1024

_HEAD_END = re.compile(rb"\n\r?\n")
# Control characters, lone carriage returns, and lines that continue the one before.
_ODD = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|\n[ \t]")
_FRAMING = (b"content-length", b"transfer-encoding")
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

    def __init__(self, connection: h11.Connection, most_bytes: int) -> None:
        self.status = 0  # until the head was read
        self.headers: Headers = ()
        self.body = bytearray()
        self.complete = False
        self._connection = connection
        self._most_bytes = most_bytes
        self._head = bytearray()  # what has come of it
        self._searched = 0  # bytes of it in which it does not end
        self._head_bytes = 0  # of whole heads
        self._received = 0  # bytes behind them

    def feed(self, data: bytes | bytearray) -> None:
        """The next bytes; none at all if the server has ended the connection in order."""
        try:
            if self.status:
                self._feed_body(data)
            else:
                self._feed_head(data)
        except h11.RemoteProtocolError as error:
            message = f"the server's answer is not one of HTTP/1.1: {str(error)[:_SHOWN]}"
            raise FetchFailed("protocol", message) from None

    @property
    def location(self) -> str | None:
        """The target of a redirect, or None."""
        return find_location(self.status, self.headers)

    def answer(self, url: str) -> HttpsResponse:
        headers = tuple(
            (name, value) for name, value in self.headers if name.lower() not in _OF_THE_CONNECTION
        )
        return HttpsResponse(self.status, headers, bytes(self.body), url)

    def _feed_head(self, data: bytes | bytearray) -> None:
        self._head += data
        while not self.status:
            found = _HEAD_END.search(self._head, max(self._searched - 2, 0))
            end = found.end() if found else len(self._head)
            if self._head_bytes + end > MOST_HEAD_BYTES:
                raise FetchFailed("too_large", f"the answer has more than {MOST_HEAD_BYTES} bytes of headers")
            if found:
                self._head_bytes += end
                self._searched = 0
                self._read_head(bytes(self._head[:end]))
                del self._head[:end]
            elif data:
                self._searched = end
                return
            else:
                raise FetchFailed("protocol", "the server ended its answer inside of its headers")
        if self._head and not self.complete:
            self._feed_body(self._head)

    def _read_head(self, head: bytes) -> None:
        """Read the head of the answer, or of an interim answer before it."""
        if _ODD.search(head):
            raise FetchFailed("protocol", "the server's answer has a line that is not a header")
        self._connection.receive_data(head)
        event = self._connection.next_event()
        if not isinstance(event, h11.Response):
            return
        self.status = event.status_code
        self.headers = tuple(
            (name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers.raw_items()
        )
        if len(self.headers) > MOST_HEADER_LINES:
            raise FetchFailed("too_large", f"the answer has more than {MOST_HEADER_LINES} headers")
        framing = {name: value for name, value in event.headers if name in _FRAMING}
        if event.http_version not in (b"1.0", b"1.1"):
            raise FetchFailed("protocol", "the server's answer is of another version than HTTP/1.1")
        if b"transfer-encoding" in framing and (len(framing) > 1 or event.http_version == b"1.0"):
            raise FetchFailed("protocol", "the server does not say clearly how long its answer is")
        self.complete = self.location is not None
        self._read_events()
        if not self.complete:
            self._check_size(int(framing.get(b"content-length", b"0")))

    def _feed_body(self, data: bytes | bytearray) -> None:
        for start in range(0, len(data) or 1, MOST_CHUNK_LINE_BYTES):
            piece = bytes(data[start : start + MOST_CHUNK_LINE_BYTES])
            self._connection.receive_data(piece)
            self._received += len(piece)
            self._read_events()
            # Chunks of one byte would cost the server little, and us a step for each.
            if self._received > 2 * len(self.body) + MOST_HEAD_BYTES:
                raise FetchFailed("too_large", "the server sent more bytes between its chunks than in them")
            if self.complete:
                return
            if len(self._connection.trailing_data[0]) > MOST_CHUNK_LINE_BYTES:
                raise FetchFailed("too_large", "a line between the chunks of the answer is too long")

    def _read_events(self) -> None:
        while not self.complete:
            event = self._connection.next_event()
            if isinstance(event, h11.Data):
                self._check_size(len(event.data))
                self.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.complete = True
            else:
                return

    def _check_size(self, more: int) -> None:
        if len(self.body) + more > self._most_bytes:
            raise FetchFailed("too_large", f"the body of the answer has more than {self._most_bytes} bytes")
