"""HttpConnection: h11's connection, whose bytes are judged before h11 reads them. Every peer may be hostile:
who asks at the daemon's door, and the servers that are asked for a plugin or for a package.

Some patterns of h11 0.16 take the square of a line's length. One header of 60,000 blanks and a NUL takes
20 s, and nothing else of the process goes on meanwhile. A bound on the size is no mend: 16 KiB take 1.3 s. So
h11 gets a head only as a whole, and only without the bytes at which those patterns fail: control characters,
and lines that continue the one before. The same holds for the lines between chunks. Every byte is searched
once, however the bytes arrive, and no more of them are kept than the limits and one reading have.
"""

from __future__ import annotations

import math
import re
from typing import Any

import h11

MOST_HEADER_LINES = 100
MOST_CHUNK_LINE_BYTES = 1024  # of the size of a chunk with extensions, and of all trailers
# Chunks of one byte would cost the peer little, and us a step for each: beyond so many bytes, no more may be
# between the chunks than in them.
MOST_CHUNK_EXCESS = 64 << 10

# What ends a head (the group), or must not be in one. Some servers of old end their lines without a carriage
# return. A request with such a line would be read in two ways by two programs.
_REFUSED = rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|\n[ \t]|\A[ \t\r\n]"
_STOP_IN_REQUEST = re.compile(rb"(\r\n\r\n)|(?<!\r)\n|" + _REFUSED)
_STOP_IN_ANSWER = re.compile(rb"(\n\r?\n)|" + _REFUSED)
_OVERLAP = 3  # bytes at the end of what was searched that may begin what stops a head
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t -~\x80-\xff]*)?\r\n")
_FRAMING = (b"content-length", b"transfer-encoding")
# h11 takes two equal lengths for one. Of a request nobody else gets the chance to take them otherwise.
_TWO_LENGTHS = re.compile(rb"\ncontent-length:[^\n,]*(?:,|\n(?:[^\n]*\n)*?content-length:)", re.IGNORECASE)
_HEAD_STATES = (h11.IDLE, h11.SEND_RESPONSE)
_PAUSED_STATES = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL, h11.SWITCHED_PROTOCOL)  # type: ignore[attr-defined]
_NOT_A_HEADER = "it has a control character in a header, or a line that does not end as HTTP's lines do"
# Where h11 quotes what the peer has sent. A few of its messages have a colon of their own.
_QUOTE = re.compile(r": (?!headers?\Z|chunked is supported\Z)")
TOO_LARGE = 431  # the status for a peer who sends too much
_OTHER_VERSION = 505


class HttpConnection(h11.Connection):
    def __init__(self, our_role: Any, most_head_bytes: int) -> None:
        """`our_role`: h11.SERVER or h11.CLIENT. `most_head_bytes`: of a request, or of an answer and all
        interim answers before it."""
        super().__init__(our_role, max_incomplete_event_size=MOST_CHUNK_LINE_BYTES)
        self.fault = ""  # of the peer, without its words, which may be secret
        self._stop = _STOP_IN_REQUEST if our_role is h11.SERVER else _STOP_IN_ANSWER
        self._most_head_bytes = most_head_bytes
        self._interim_bytes = 0  # of the heads of interim answers
        self._held = bytearray()  # what h11 has not got
        self._searched = 0  # bytes of it in which no head or line ends
        self._has_ended = False
        self._is_chunked = self._is_last_chunk = False
        self._left: float = 0  # bytes of the body, or of its chunk, that h11 may get
        self._excess = 0  # bytes between chunks, less those in them

    def receive_data(self, data: bytes) -> None:
        self._held += data
        self._has_ended |= not data

    @property
    def trailing_data(self) -> tuple[bytes, bool]:
        return super().trailing_data[0] + self._held, self._has_ended

    def next_event(self) -> Any:
        """As h11's. Raises h11.RemoteProtocolError, with the status 431 for what is too large."""
        try:
            return self._next_event()
        except h11.RemoteProtocolError as error:
            self.fault = self.fault or _QUOTE.split(str(error))[0]
            if self.their_state is not h11.ERROR:
                self._process_error(self.their_role)  # nothing is read after a fault
            raise

    def _next_event(self) -> Any:
        while True:
            if self.their_state in _PAUSED_STATES and self._held:
                return h11.PAUSED
            is_head = self.their_state in _HEAD_STATES
            if not is_head and (event := super().next_event()) is not h11.NEED_DATA:
                return event
            passed = self._cut_head() if is_head else self._cut_body()
            if passed:
                super().receive_data(passed)
                if is_head and self.our_role is h11.SERVER and _TWO_LENGTHS.search(passed):
                    raise h11.RemoteProtocolError("it says twice how long it is")
                if is_head:
                    return self._judge(super().next_event(), len(passed))
            elif not self._has_ended:
                return h11.NEED_DATA
            elif self._held or (is_head and self.our_role is h11.CLIENT):
                message = f"it ends inside of its {'headers' if is_head else 'chunks'}"
                raise h11.RemoteProtocolError(message)
            else:
                super().receive_data(b"")
                return super().next_event()

    def _judge(self, event: Any, head_bytes: int) -> Any:
        """Learn from a head where its body ends."""
        if event.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("it is of another version than HTTP/1.1", _OTHER_VERSION)
        if isinstance(event, h11.InformationalResponse):
            self._interim_bytes += head_bytes
            return event
        framing = {name: value for name, value in event.headers if name in _FRAMING}
        self._is_chunked, self._is_last_chunk = b"transfer-encoding" in framing, False
        if self._is_chunked and (len(framing) > 1 or event.http_version == b"1.0"):
            raise h11.RemoteProtocolError("it does not say clearly how long it is")
        self._interim_bytes = self._excess = 0
        until_the_end = isinstance(event, h11.Response) and not framing
        self._left = math.inf if until_the_end else int(framing.get(b"content-length", b"0"))
        return event

    def _cut_head(self) -> bytes:
        """A whole head, or nothing if it is not whole yet."""
        return self._cut_lines(self._most_head_bytes - self._interim_bytes, "its headers have")

    def _cut_body(self) -> bytes:
        """Some of the body, or a whole line between two chunks, or all lines after the last one."""
        if not self._held:
            return b""
        if self._left:
            taken = min(len(self._held), self._left)
            self._left -= taken
            return self._cut(int(taken))
        if self.their_state is not h11.SEND_BODY or not self._is_chunked:
            raise h11.RemoteProtocolError("more comes after its end")
        if not self._is_last_chunk:
            end = self._held.find(b"\n", self._searched, MOST_CHUNK_LINE_BYTES) + 1
            if not end:
                return self._wait(MOST_CHUNK_LINE_BYTES, "a line between its chunks has")
            found = _CHUNK_LINE.fullmatch(self._held, 0, end)
            if found is None:
                raise h11.RemoteProtocolError("a line between its chunks is not the size of one")
            size = int(found[1], 16)
            self._excess += end + 2 - size
            if self._excess > MOST_CHUNK_EXCESS:
                raise h11.RemoteProtocolError("it has more bytes between its chunks than in them", TOO_LARGE)
            if size:
                self._left = size + 2  # the line feed after it too
                return self._cut(end)
            self._is_last_chunk = True
        return self._cut_lines(MOST_CHUNK_LINE_BYTES, "the lines after its last chunk have")

    def _cut_lines(self, most: int, what: str) -> bytes:
        """Everything up to the first empty line, or nothing if that has not come yet."""
        found = self._stop.search(self._held, max(self._searched - _OVERLAP, 0), most)
        if found is None:
            return self._wait(most, what)
        if found[1] is None:
            raise h11.RemoteProtocolError(_NOT_A_HEADER)
        if self._held.count(b"\n", 0, found.end()) > MOST_HEADER_LINES + 2:
            raise h11.RemoteProtocolError(f"it has more than {MOST_HEADER_LINES} headers", TOO_LARGE)
        return self._cut(found.end())

    def _wait(self, most: int, what: str) -> bytes:
        if len(self._held) >= most:
            raise h11.RemoteProtocolError(f"{what} more than {most} bytes", TOO_LARGE)
        self._searched = len(self._held)
        return b""

    def _cut(self, size: int) -> bytes:
        self._searched = 0
        cut = bytes(self._held[:size])
        del self._held[:size]
        return cut
