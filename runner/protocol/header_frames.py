"""Frames with a header: `Content-Length: N`, an empty line, and N bytes.

Contracts agree on the shape and not on the details, so the details are HeaderRules. All of them end a header
line with CRLF: a newline alone is refused. A header is checked line by line as it arrives, and a body that is
too long is refused before its first byte. An announced length takes no memory; only bytes that arrived do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from runner.protocol.frames import Cause, Cut, FrameFault, Pieces
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

# The characters with the property White_Space. Python's str.strip() also removes U+001C to U+001F.
WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)

_MOST_LENGTH = 2**64 - 1
_MOST_DIGITS = 20  # of _MOST_LENGTH
_NAME = "content-length"
_HEADER = b"Content-Length: %d\r\n\r\n"
_USUAL = re.compile(rb"content-length: ?[1-9][0-9]*\r\n", re.IGNORECASE)
# A header that is ignored has to be one for every reader: a name as in HTTP, and a value without control
# characters and ends of lines. Otherwise some reader could find a second Content-Length in it.
_PLAIN_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029]*")
_STRAY = "stdout carries only frames: print everything else to stderr"


def read_digits(text: str) -> int | None:
    """A length of 64 bits in ASCII digits; leading zeros are allowed. None: it is something else."""
    if not text.isascii() or not text.isdigit():
        return None
    digits = text.lstrip("0") or "0"  # int() refuses 4300 digits, even if they are zeros
    if len(digits) > _MOST_DIGITS:
        return None
    length = int(digits)
    return length if length <= _MOST_LENGTH else None


def read_signed_digits(text: str) -> int | None:
    """Like read_digits, with one plus sign allowed before the digits."""
    return read_digits(text.removeprefix("+"))


class HeaderRules(NamedTuple):
    """The details of a contract. Names of headers are compared without regard to ASCII case."""

    header_limit: int  # bytes of all header lines of a frame, with their line ends and the empty line
    body_limit: int  # bytes
    least_body: int = 0  # bytes
    read_length: Callable[[str], int | None] = read_digits
    blanks: str = WHITE_SPACE  # removed around the name and the value of a header
    ignores_others: bool = False  # other headers than Content-Length; otherwise they are refused
    last_counts: bool = False  # of several Content-Length; otherwise the second one is refused


def header_frame(body: bytes) -> bytes:
    """A frame for a HeaderFramer."""
    return _HEADER % len(body) + body


class HeaderFramer:
    """A frame is the body. At the end of the stream an unfinished frame is a fault."""

    def __init__(self, rules: HeaderRules, *, rewrites: bool = False) -> None:
        """`rewrites`: `cut` returns a plain header in place of one in which readers could find another length
        (several lengths, zeros or a sign before the digits)."""
        self._rules = rules
        self._rewrites = rewrites
        self._is_plain = True
        self._header = bytearray()  # of the frame that is being read: the lines so far
        self._line = 0  # where in it the last line begins
        self._announced: int | None = None
        self._body: Pieces | None = None  # None: the header is being read
        self._ended = False
        self.taken = 0  # bytes of the stream up to the last frame's end, or to a refused body
        self.refused: int | None = None  # bytes of a body that is too long
        self.fault: FrameFault | None = None

    @property
    def pending(self) -> int:
        return len(self._header) + (0 if self._body is None else self._body.size)

    def feed(self, data: bytes) -> list[bytes]:
        return [cut.frame for cut in self.cut(data)]

    def finish(self) -> list[bytes]:
        if self.pending and not self._ended:
            part = "header" if self._body is None else "body"
            message = (
                f"the stream ended inside the {part} of a frame, after {self.pending} bytes of the frame"
            )
            self._refuse("cut_short", message)
        self._ended = True
        return []

    def cut(self, data: bytes) -> list[Cut]:
        cuts: list[Cut] = []
        start = 0
        while start < len(data) and not self._ended:
            if self._body is None:
                start = self._read_header(data, start)
            if self._body is not None:
                start = self._read_body(data, start, cuts)
        return cuts

    def finish_cut(self) -> list[Cut]:
        self.finish()
        return []

    # --- the body -------------------------------------------------------------------------------------------

    def _read_body(self, data: bytes, start: int, cuts: list[Cut]) -> int:
        assert self._body is not None and self._announced is not None
        end = start + self._announced - self._body.size
        if end > len(data):
            self._body.add(data[start:] if start else data)
            return len(data)
        body = data[start:end]
        if self._body.size:  # most bodies arrive in one piece, and need no second copy
            self._body.add(body)
            body = self._body.take()
        rewritten = self._rewrites and not self._is_plain
        cuts.append(Cut(body, _HEADER % len(body) if rewritten else bytes(self._header)))
        self.taken += len(self._header) + len(body)
        self._forget()
        return end

    def _forget(self) -> None:
        self._header, self._line, self._announced, self._body = bytearray(), 0, None, None
        self._is_plain = True

    # --- the header -----------------------------------------------------------------------------------------

    def _read_header(self, data: bytes, start: int) -> int:
        """Read one line, or the part of it that is there. Returns where it ends."""
        end = data.find(b"\n", start) + 1
        whole = bool(end)
        end = end or len(data)
        if len(self._header) + end - start > self._rules.header_limit:
            limit = self._rules.header_limit
            self._refuse("frame_too_large", f"the header of a frame is longer than {limit} bytes; {_STRAY}")
            return end
        self._header += data[start:end]
        if whole:
            line = bytes(self._header[self._line :])
            self._line = len(self._header)
            self._take_line(line)
        return end

    def _take_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            self._refuse_line("ends with a newline alone, and not with CRLF", line)
            return
        try:
            text = line[:-2].decode()
        except UnicodeDecodeError:
            self._refuse_line("is not UTF-8", line)
            return
        if not text:
            self._end_header()
            return
        name, colon, value = text.partition(":")
        name, value = name.strip(self._rules.blanks), value.strip(self._rules.blanks)
        if not colon:
            self._refuse_line("has no colon", line)
        elif not name.isascii() or name.lower() != _NAME:
            if not self._rules.ignores_others:
                self._refuse_line("is not Content-Length, which is the only header there is", line)
            elif _PLAIN_HEADER.fullmatch(text) is None:
                self._refuse_line("is no plain header", line)
        elif self._announced is not None and not self._rules.last_counts:
            self._refuse("bad_header", "the header of a frame has Content-Length twice")
        else:
            # Hosts may read any other spelling differently: blanks of Unicode, a folded line, zeros, a sign.
            self._is_plain = self._announced is None and _USUAL.fullmatch(line) is not None
            self._announced = self._rules.read_length(value)
            if self._announced is None:
                self._refuse(
                    "bad_header", f"Content-Length is {quoted(value)}, which is not a length in bytes"
                )

    def _end_header(self) -> None:
        rules, length = self._rules, self._announced
        if length is None:
            self._refuse("bad_header", "the header of a frame has no Content-Length")
        elif length > rules.body_limit:
            message = f"a frame announces {length} bytes, and the limit is {rules.body_limit} bytes"
            self.taken += len(self._header)
            self.refused = length
            self._refuse("frame_too_large", message)
        elif length < rules.least_body:
            message = f"a frame announces {length} bytes, and the least is {rules.least_body}"
            self._refuse("bad_header", message)
        else:
            self._body = Pieces()

    # --- faults ---------------------------------------------------------------------------------------------

    def _refuse_line(self, why: str, line: bytes) -> None:
        said = quoted(line.decode("utf-8", "replace").rstrip("\r\n"))
        self._refuse("bad_header", f"a header line {why}: {said}; {_STRAY}")

    def _refuse(self, cause: Cause, message: str) -> None:
        self.fault = FrameFault(cause, message)
        self._ended = True
        self._forget()
