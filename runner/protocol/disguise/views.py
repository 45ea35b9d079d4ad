"""A text as somebody else may have written it, read: its escapes are undone, or separators left out.

A view is a shorter copy of the text. What is found in the copy can be replaced in the text itself, because a
view knows from where each of its bytes is. It finds that out only when asked: mostly nothing is found.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate

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
# What a view replaces, at odd places, and what stands between: as it is written, and as it is meant.
Pieces = Callable[[], tuple[list[bytes], list[bytes]]]
_SHORT = {b"t": b"\t", b"b": b"\b", b"f": b"\f", b"n": b"", b"r": b""}


class View:
    """The text itself, or another view with some pieces of it replaced."""

    def __init__(self, text: bytes, of: View | None = None, pieces: Pieces | None = None) -> None:
        self.text = text
        self._of = of
        self._pieces = pieces
        self._starts: tuple[list[bytes], list[int], list[int]] | None = None

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Map a span of this view back to the text itself."""
        if self._of is None or self._pieces is None:
            return start, end
        if self._starts is None:
            pieces = self._pieces()
            written, meant = (list(accumulate(map(len, each), initial=0)) for each in pieces)
            self._starts = pieces[0], written, meant
        pieces_written, written, meant = self._starts
        first, last = bisect_right(meant, start) - 1, bisect_right(meant, end - 1) - 1
        begin = written[first] + (0 if first % 2 else start - meant[first])
        stop = written[last + 1] if last % 2 else written[last] + end - meant[last]
        # An escape that breaks off behind it belongs to it.
        for after in range(last + 1, min(bisect_right(meant, end), len(pieces_written))):
            if after % 2 and _UNFINISHED.fullmatch(pieces_written[after]):
                stop = written[after + 1]
        return self._of.place(begin, stop)


def squeezed(of: View, left_out: bytes, table: bytes | None = None) -> View:
    """The view without some bytes."""

    def pieces() -> tuple[list[bytes], list[bytes]]:
        written = re.split(rb"([%b]+)" % re.escape(left_out), of.text)
        return written, [b"" if number % 2 else piece for number, piece in enumerate(written)]

    return View(of.text.translate(table, left_out), of, pieces)


def unescaped(of: View, *, at_end: bool = False) -> View:
    """The view, one layer of escapes undone. A line end that was escaped is left out, and so is an escape in
    which the text breaks off."""
    written = _ESCAPES[at_end].split(of.text)  # an escape at each odd place
    meanings = {escape: _meant(escape) for escape in set(written[1::2])}
    meant = written.copy()
    meant[1::2] = map(meanings.__getitem__, written[1::2])
    return View(b"".join(meant), of, lambda: (written, meant))


def views_of(text: bytes, *, at_end: bool = False) -> Iterator[View]:
    """The text, and how else it can be read. `at_end`: it may break off in the middle of an escape."""
    view = View(text)
    yield view
    if b"\n" in text or b"\r" in text:
        view = squeezed(view, LINE_ENDS)
        yield view
    for _ in range(LAYERS):
        if not _has_escapes(view.text, at_end):
            return
        view = unescaped(view, at_end=at_end)
        yield view


def hex_view(of: View) -> View:
    return squeezed(of, HEX_SEPARATORS, _LOWER)


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
    elif escape[:1] == b"%" or kind == b"x":  # \x is a character in a text of Python: `forms_of` knows that
        meant = bytes((int(escape[-2:], 16),))
    elif kind == b"u" and len(escape) == _SURROGATES:  # two surrogates
        meant = json.loads(b'"%s"' % escape).encode()
    elif kind in b"uU":
        code = int(escape[2:].strip(b"{}"), 16)
        meant = chr(code).encode("utf-8", "surrogatepass") if code < 0x110000 else escape
    else:
        meant = _SHORT.get(kind, kind)
    return b"" if meant in (b"\r", b"\n") else meant
