"""An HTTP/1.1 answer, read piece by piece, with a limit on everything that a server can make long.

Only what one answer on one connection needs. What can be read in two ways is refused. Content encodings are
not undone: the body is what the server sent, and as large.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import REDIRECTS, Headers
from sandbox.speed.value import NamedTuple

MOST_HEAD_BYTES = 64 << 10  # of status lines, headers and trailers together, also of interim answers
MOST_HEADER_LINES = 100
MOST_CHUNK_LINE_BYTES = 1024  # the size of a chunk, with extensions

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?\Z")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)\Z")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\Z")
_LENGTH = re.compile(r"[0-9]{1,15}\Z", re.ASCII)


_T = TypeVar("_T")
_Steps = Generator[bool, None, _T]


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
    """Where a server wants to be asked instead. Raises FetchFailed."""
    found = [value for name, value in headers if name.lower() == "location"] if status in REDIRECTS else []
    if len(found) > 1:
        raise FetchFailed("protocol", "the server redirects to several places at once")
    return found[0] if found else None


class ResponseReader:
    """Give it bytes until it is complete. It raises FetchFailed for what is no answer, or too large a one.

    The body of a redirect is not read.
    """

    def __init__(self, method: str, most_bytes: int) -> None:
        self.status = 0  # until the head was read
        self.headers: Headers = ()
        self.body = bytearray()
        self.complete = False
        self._method = method
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._ended = False
        self._head_left = MOST_HEAD_BYTES
        self._steps = self._read()

    def feed(self, data: bytes | bytearray) -> None:
        """The next bytes; none at all if the server has ended the connection in order."""
        if data:
            self._buffer += data
        else:
            self._ended = True
        next(self._steps, None)

    @property
    def location(self) -> str | None:
        """Where the server wants to be asked instead."""
        return find_location(self.status, self.headers)

    def answer(self, url: str) -> HttpsResponse:
        headers = tuple(
            (name, value) for name, value in self.headers if name.lower() not in _OF_THE_CONNECTION
        )
        return HttpsResponse(self.status, headers, bytes(self.body), url)

    def _values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    # --- steps: each yields True where it needs more bytes ---

    def _read(self) -> _Steps[None]:
        yield from self._read_answer()
        self.complete = True

    def _read_answer(self) -> _Steps[None]:
        minor = yield from self._read_head()
        coding, lengths = self._values("transfer-encoding"), self._values("content-length")
        if coding and (lengths or minor == 0 or [word.lower() for word in coding] != ["chunked"]):
            raise FetchFailed("protocol", "the server does not say clearly how long its answer is")
        if self._method == "HEAD" or self.status in (204, 304) or self.location is not None:
            return
        if coding:
            yield from self._read_chunks()
        elif lengths:
            yield from self._read_bytes(self._parse_length(lengths))
        else:
            yield from self._read_to_the_end()

    def _read_head(self) -> _Steps[int]:
        while True:
            line = yield from self._read_head_line()
            match = _STATUS.match(line)
            if match is None:
                raise FetchFailed("protocol", "the server's answer does not start as one of HTTP/1.1 does")
            headers = yield from self._read_headers()
            status = int(match[2])
            if status == 101:
                raise FetchFailed("protocol", "the server changes to a protocol that nobody asked for")
            if status >= 200:
                self.status, self.headers = status, headers
                return int(match[1])

    def _read_headers(self) -> _Steps[Headers]:
        headers: list[tuple[str, str]] = []
        while line := (yield from self._read_head_line()):
            match = _HEADER.match(line)
            if match is None:
                raise FetchFailed("protocol", "the server's answer has a line that is not a header")
            if len(headers) == MOST_HEADER_LINES:
                raise FetchFailed("too_large", f"the answer has more than {MOST_HEADER_LINES} headers")
            headers.append((match[1].decode("ascii"), match[2].strip(b" \t").decode("latin-1")))
        return tuple(headers)

    def _parse_length(self, lengths: list[str]) -> int:
        if len(set(lengths)) != 1 or not _LENGTH.match(lengths[0]):
            raise FetchFailed("protocol", "the server does not say clearly how long its answer is")
        return int(lengths[0])

    def _read_chunks(self) -> _Steps[None]:
        between = 0
        while True:
            line = yield from self._read_line(MOST_CHUNK_LINE_BYTES)
            # Without this, chunks of one byte would cost a server nothing, and us a step for each.
            between += len(line) + 4
            if between > len(self.body) + MOST_HEAD_BYTES:
                raise FetchFailed("too_large", "the server sent more bytes between its chunks than in them")
            match = _CHUNK.match(line)
            if match is None:
                raise FetchFailed("protocol", "the server sent a chunk without its size")
            size = int(match[1], 16)
            if size == 0:
                yield from self._read_headers()  # trailers, which nobody asked for
                return
            yield from self._read_bytes(size)
            if (yield from self._read_line(2)):
                raise FetchFailed("protocol", "the server sent a chunk that is longer than its size")

    def _read_bytes(self, number: int) -> _Steps[None]:
        self._check_size(number)
        end = len(self.body) + number
        while True:
            part = self._buffer[: end - len(self.body)]
            self.body += part
            del self._buffer[: len(part)]
            if len(self.body) == end:
                return
            yield self._more(f"after {len(self.body)} of at least {end} bytes of its body")

    def _read_to_the_end(self) -> _Steps[None]:
        while True:
            self._check_size(len(self._buffer))
            self.body += self._buffer
            self._buffer.clear()
            if self._ended:
                return
            yield True

    def _check_size(self, more: int) -> None:
        if len(self.body) + more > self._most_bytes:
            raise FetchFailed("too_large", f"the body of the answer has more than {self._most_bytes} bytes")

    def _read_head_line(self) -> _Steps[bytes]:
        if self._head_left <= 0:
            raise self._head_too_large()
        line = yield from self._read_line(self._head_left)
        self._head_left -= len(line) + 2
        return line

    def _read_line(self, most: int) -> _Steps[bytes]:
        searched = 0
        while (end := self._buffer.find(b"\n", searched, most)) < 0:
            if len(self._buffer) >= most:
                raise self._head_too_large()
            searched = len(self._buffer)
            yield self._more("inside a line")
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        return line

    def _head_too_large(self) -> FetchFailed:
        message = f"a line of the answer is too long, or its headers have more than {MOST_HEAD_BYTES} bytes"
        return FetchFailed("too_large", message)

    def _more(self, where: str) -> bool:
        if self._ended:
            raise FetchFailed("protocol", f"the server ended its answer {where}")
        return True
