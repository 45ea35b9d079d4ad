"""A text as somebody else may have written it, read: its escapes are undone, or separators left out.

A view is a shorter copy of the text. What is found in the copy can be replaced in the text itself, because a
view knows from where each of its bytes is. It finds that out only when asked: mostly nothing is found.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, compress

from runner.protocol.disguise.needles import CUT

# How often escapes are undone: a text may be escaped for JSON inside of a text that is escaped again.
LAYERS = 2

LINE_ENDS = b"\r\n"
HEX_SEPARATORS = b":- \t\r\n"  # aa:bb, AA-BB, aabb ccdd, and lines of them

_LOWER = bytes(range(256)).lower()
# Of JSON, of Python, of Rust's \u{…}, and of URLs.
_WHOLE = (
    rb"%[0-9A-Fa-f]{2}"
    rb"|\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"
    rb"|\\u[0-9A-Fa-f]{4}|\\u\{[0-9A-Fa-f]{1,6}\}|\\U[0-9A-Fa-f]{8}|\\x[0-9A-Fa-f]{2}"
    rb"|\\[\\\"'/nrtbf]"
)
_BEGUN = rb"%[0-9A-Fa-f]?|\\(?:u[0-9A-Fa-f]{0,3}|u\{[0-9A-Fa-f]{0,6}|U[0-9A-Fa-f]{0,7}|x[0-9A-Fa-f]?)?"
_UNFINISHED = re.compile(_BEGUN)
# An escape, or one in which the text breaks off: at a CUT; if it is the end of a longer text, also there.
# One group, so that `split` gives the escapes at odd places.
_ESCAPES = {
    at_end: re.compile(rb"(%b|(?:%b)(?=%b))" % (_WHOLE, _BEGUN, end))
    for at_end, end in ((False, CUT), (True, CUT + rb"|\Z"))
}
_PERCENT = re.compile(rb"%[0-9A-Fa-f]{2}")
_SURROGATES = 12  # bytes of two of them
_SHORT = {b"t": b"\t", b"b": b"\b", b"f": b"\f", b"n": b"", b"r": b""}


class View:
    """The text itself."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Where in the text itself that stands what stands here between `start` and `end`."""
        return start, end


class Squeezed(View):
    """Another view without some bytes."""

    def __init__(self, of: View, left_out: bytes, table: bytes | None = None) -> None:
        super().__init__(of.text.translate(table, left_out))
        self._of = of
        self._left_out = left_out
        self._places: array[int] | None = None

    def place(self, start: int, end: int) -> tuple[int, int]:
        if self._places is None:
            written = self._of.text
            kept = written.translate(bytes(byte not in self._left_out for byte in range(256)))
            self._places = array("I", compress(range(len(written)), kept))
        return self._of.place(self._places[start], self._places[end - 1] + 1)


class Unescaped(View):
    """Another view, one layer of escapes undone. A line end that was escaped is left out, and so is an escape
    in which the text breaks off."""

    def __init__(self, of: View, *, at_end: bool = False) -> None:
        self._of = of
        self._written = _ESCAPES[at_end].split(of.text)  # an escape at each odd place
        escapes = self._written[1::2]
        meanings = {escape: _meant(escape) for escape in set(escapes)}
        self._meant = self._written.copy()
        self._meant[1::2] = map(meanings.__getitem__, escapes)
        super().__init__(b"".join(self._meant))
        self._starts: tuple[list[int], list[int]] | None = None

    def place(self, start: int, end: int) -> tuple[int, int]:
        if self._starts is None:
            written, meant = (
                list(accumulate(map(len, each), initial=0)) for each in (self._written, self._meant)
            )
            self._starts = written, meant
        written, meant = self._starts
        first, last = bisect_right(meant, start) - 1, bisect_right(meant, end - 1) - 1
        begin = written[first] + (0 if first % 2 else start - meant[first])
        stop = written[last + 1] if last % 2 else written[last] + end - meant[last]
        # An escape that breaks off behind it belongs to it.
        for after in range(last + 1, min(bisect_right(meant, end), len(self._written))):
            if after % 2 and _UNFINISHED.fullmatch(self._written[after]):
                stop = written[after + 1]
        return self._of.place(begin, stop)


def views_of(text: bytes, *, at_end: bool = False) -> Iterator[View]:
    """The text, and how else it can be read. `at_end`: it may break off in the middle of an escape."""
    view = View(text)
    yield view
    if b"\n" in text or b"\r" in text:
        view = Squeezed(view, LINE_ENDS)
    if not _has_escapes(view.text, at_end):
        if view.text != text:
            yield view
        return
    for _ in range(LAYERS):
        if not _has_escapes(view.text, at_end):
            return
        view = Unescaped(view, at_end=at_end)
        yield view


def hex_view(of: View) -> View:
    return Squeezed(of, HEX_SEPARATORS, _LOWER)


def readings_of(text: bytes) -> set[bytes]:
    """What `views_of` may have where a text was escaped once, twice or not at all."""
    joined = text.translate(None, LINE_ENDS)
    # A % of its own is not escaped in JSON. So it may be undone where the backslashes are as they were.
    once = _PERCENT.sub(lambda found: _meant(found[0]), joined)
    twice = _PERCENT.sub(lambda found: _meant(found[0]), once)
    return {joined, once, twice, *(view.text for view in views_of(text))}


def _has_escapes(text: bytes, at_end: bool) -> bool:
    if b"%" not in text and b"\\" not in text:
        return False
    return _ESCAPES[at_end].search(text) is not None


def _meant(escape: bytes) -> bytes:
    kind = escape[1:2]
    if _UNFINISHED.fullmatch(escape):
        meant = b""
    elif escape[:1] == b"%":
        meant = bytes((int(escape[1:], 16),))
    elif kind == b"x":
        meant = bytes((int(escape[2:], 16),))  # in a text of Python a character: `forms_of` knows that
    elif kind == b"u" and len(escape) == _SURROGATES:  # two surrogates
        meant = json.loads(b'"%s"' % escape).encode()
    elif kind in b"uU":
        code = int(escape[2:].strip(b"{}"), 16)
        meant = chr(code).encode("utf-8", "surrogatepass") if code < 0x110000 else escape
    else:
        meant = _SHORT.get(kind, kind)
    return b"" if meant in (b"\r", b"\n") else meant
