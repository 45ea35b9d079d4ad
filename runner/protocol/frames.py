"""Where one message ends and the next begins: pure, and bounded while reading.

A framer is fed bytes as they come and gives out whole frames. However the stream is cut into pieces, the
frames and the fault are the same. What has no end is found out one byte past the limit: a framer never holds
more than one frame may be long. Each byte is looked at once, so writing byte by byte makes nothing worse.
"""

from __future__ import annotations

from typing import Literal, Protocol

from sandbox.value import NamedTuple

# A header block, blank line and all. Those in use are 30 bytes long, with a Content-Type 80.
HEADER_LIMIT = 8 * 1024

# Of a Content-Length: more is no length of anything, whatever the limit is.
_MOST_DIGITS = 18

_BLANKS = b" \t"


class FrameFault(NamedTuple):
    """Why the stream cannot be read on. `cause` is one of malformed_response's."""

    cause: Literal["frame_too_large", "bad_header", "truncated"]
    message: str


class Framer(Protocol):
    @property
    def fault(self) -> FrameFault | None:
        """Once it is set nothing more comes out. What was whole before it has come out."""
        ...

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        ...

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are whole now, in order."""
        ...

    def finish(self) -> list[bytes]:
        """The stream has ended. Nothing is taken after that."""
        ...


def line(payload: bytes) -> bytes:
    """A frame for a LineFramer. A newline inside would make two of it: ValueError."""
    if b"\n" in payload:
        raise ValueError("a message that is sent as a line cannot contain a newline")
    return payload + b"\n"


def with_header(payload: bytes) -> bytes:
    """A frame for a HeaderFramer."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(payload), payload)


class LineFramer:
    """A frame is a line. Only the newline is taken off: what else is blank is the dialect's to say."""

    def __init__(self, limit: int, spare: int = 0) -> None:
        """`limit`: bytes of a line, without its newline. `spare`: more that is taken, but not told of."""
        self._named = limit
        self._limit = limit + spare
        self._held = bytearray()
        self._ended = False
        self.fault: FrameFault | None = None

    @property
    def pending(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        if self._ended:
            return []
        if b"\n" not in data:  # most of a long line; split() looks ten times as long
            self._hold(data)
            return []
        first, *rest = data.split(b"\n")
        if not self._hold(first):
            return []
        frames = [self._take()]
        last = rest.pop()
        for whole in rest:
            if len(whole) > self._limit:
                self._refuse()
                return frames
            frames.append(whole)
        self._hold(last)
        return frames

    def finish(self) -> list[bytes]:
        self._ended = True
        return [self._take()] if self._held else []

    def _hold(self, part: bytes) -> bool:
        if len(self._held) + len(part) > self._limit:
            self._refuse()
            return False
        self._held += part
        return True

    def _take(self) -> bytes:
        held, self._held = self._held, bytearray()
        return bytes(held)

    def _refuse(self) -> None:
        self.fault = FrameFault("frame_too_large", f"a line is longer than {self._named} bytes")
        self._ended = True
        self._held = bytearray()


class HeaderFramer:
    """A frame is a header block with a Content-Length, a blank line, and so many bytes.

    What two readers could understand differently is refused rather than guessed at: the length twice, a bare
    carriage return or a NUL in a header. Header names are told apart without their case, lines may end in
    CRLF or LF, and headers other than Content-Length say nothing to us.
    """

    def __init__(self, limit: int, header_limit: int = HEADER_LIMIT) -> None:
        self._limit = limit  # bytes of a frame, without its header
        self._header_limit = header_limit
        self._header = 0  # bytes of this header block so far
        self._length: int | None = None  # as the header says
        self._in_body = False
        self._held = bytearray()  # of one header line, or of the body
        self._ended = False
        self.fault: FrameFault | None = None

    @property
    def pending(self) -> int:
        return self._header + len(self._held) if self._in_body else self._header

    def feed(self, data: bytes) -> list[bytes]:
        frames: list[bytes] = []
        at = 0
        while at < len(data) and not self._ended:
            at = self._read_body(data, at) if self._in_body else self._read_header(data, at)
            if self._in_body and len(self._held) == self._length:
                frames.append(bytes(self._held))
                self._begin()
        return frames

    def finish(self) -> list[bytes]:
        if not self._ended and self.pending:
            missing = "body" if self._in_body else "header"
            self._refuse("truncated", f"the stream ended inside the {missing} of a frame")
        self._ended = True
        return []

    def _begin(self) -> None:
        self._header, self._length, self._in_body, self._held = 0, None, False, bytearray()

    def _read_body(self, data: bytes, at: int) -> int:
        assert self._length is not None
        end = at + self._length - len(self._held)
        self._held += data[at:end]
        return min(end, len(data))

    def _read_header(self, data: bytes, at: int) -> int:
        """One line, or what there is of it."""
        room = self._header_limit - self._header
        newline = data.find(b"\n", at, at + room)
        end = newline + 1 or min(at + room, len(data))
        self._held += data[at:end]
        self._header += end - at
        if newline >= 0:
            text, self._held = bytes(self._held), bytearray()
            self._header_line(text[:-2] if text.endswith(b"\r\n") else text[:-1])
        elif end < len(data):  # no newline in all the room there was
            self._refuse("bad_header", f"a header is longer than {self._header_limit} bytes")
        return end

    def _header_line(self, text: bytes) -> None:
        if not text:
            if self._length is None:
                self._refuse("bad_header", "a header without Content-Length")
            self._in_body = True
            return
        name, colon, value = text.partition(b":")
        name = name.strip(_BLANKS)
        if not colon or not name:
            self._refuse("bad_header", f"a header line that is not NAME: VALUE: {_shown(text)}")
        elif b"\r" in text or b"\0" in text:
            self._refuse("bad_header", f"a header line with a control character: {_shown(text)}")
        elif name.lower() == b"content-length":
            self._content_length(value.strip(_BLANKS))

    def _content_length(self, digits: bytes) -> None:
        if self._length is not None:
            self._refuse("bad_header", "a header with more than one Content-Length")
        elif not digits.isdigit() or len(digits) > _MOST_DIGITS:
            self._refuse("bad_header", f"a Content-Length that is no length: {_shown(digits)}")
        elif int(digits) > self._limit:
            self._refuse("frame_too_large", f"a frame of {int(digits)} bytes; {self._limit} are allowed")
        else:
            self._length = int(digits)

    def _refuse(self, cause: Literal["frame_too_large", "bad_header", "truncated"], message: str) -> None:
        self._begin()
        self.fault = FrameFault(cause, message)
        self._ended = True


def _shown(text: bytes) -> str:
    """For people: a plugin's bytes do not draw on their terminal."""
    return ascii(text[:80].decode("utf-8", "replace"))
