"""Views of a text: copies with escapes undone, or with separators removed.

A span that is found in a view can be mapped back to the original text. The mapping is computed only when it
is needed, because mostly nothing is found.
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
# Escapes of JSON, of Python, of Rust (\u{…}), and of URLs.
_WHOLE = (
    rb"%[0-9A-Fa-f]{2}"
    rb"|\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}"
    rb"|\\u[0-9A-Fa-f]{4}|\\u\{[0-9A-Fa-f]{1,6}\}|\\U[0-9A-Fa-f]{8}|\\x[0-9A-Fa-f]{2}"
    rb"|\\[\\\"'/nrtbf]"
)
_BEGUN = rb"%[0-9A-Fa-f]?|\\(?:u[0-9A-Fa-f]{0,3}|u\{[0-9A-Fa-f]{0,6}|U[0-9A-Fa-f]{0,7}|x[0-9A-Fa-f]?)?"
_UNFINISHED = re.compile(_BEGUN)
# An escape, or an unfinished one before a CUT or, with `at_end`, at the end of the text. One group, so that
# `split` returns the escapes at odd indices.
_ESCAPES = {
    at_end: re.compile(rb"(%b|(?:%b)(?=%b))" % (_WHOLE, _BEGUN, end))
    for at_end, end in ((False, CUT), (True, CUT + rb"|\Z"))
}
_PERCENT = re.compile(rb"%[0-9A-Fa-f]{2}")
_SURROGATES = 12  # bytes of two of them
# The pieces of a text as written, and as decoded. Those at odd indices differ.
Pieces = Callable[[], tuple[list[bytes], list[bytes]]]
_SHORT = {b"t": b"\t", b"b": b"\b", b"f": b"\f", b"n": b"", b"r": b""}


class View:
    """The original text, or another view with some pieces replaced."""

    def __init__(self, text: bytes, of: View | None = None, pieces: Pieces | None = None) -> None:
        self.text = text
        self._of = of
        self._pieces = pieces
        self._starts: tuple[list[bytes], list[int], list[int]] | None = None

    def map_back(self, start: int, end: int) -> tuple[int, int]:
        """Map a span of this view back to the original text."""
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
        # An unfinished escape right after the span belongs to it.
        for after in range(last + 1, min(bisect_right(meant, end), len(pieces_written))):
            if after % 2 and _UNFINISHED.fullmatch(pieces_written[after]):
                stop = written[after + 1]
        return self._of.map_back(begin, stop)


def without_bytes(of: View, left_out: bytes, table: bytes | None = None) -> View:
    """The view with the bytes of `left_out` removed."""

    def pieces() -> tuple[list[bytes], list[bytes]]:
        written = re.split(rb"([%b]+)" % re.escape(left_out), of.text)
        return written, [b"" if number % 2 else piece for number, piece in enumerate(written)]

    return View(of.text.translate(table, left_out), of, pieces)


def undo_escapes(of: View, *, at_end: bool) -> View:
    """The view with one layer of escapes undone. Escaped line ends and unfinished escapes are removed."""
    written = _ESCAPES[at_end].split(of.text)  # an escape at each odd place
    meanings = {escape: _decode_escape(escape) for escape in set(written[1::2])}
    meant = written.copy()
    meant[1::2] = map(meanings.__getitem__, written[1::2])
    return View(b"".join(meant), of, lambda: (written, meant))


def views_of(text: bytes, *, at_end: bool = False) -> Iterator[View]:
    """The text, without line ends, and with one and two layers of escapes undone. `at_end`: it may break off
    inside of an escape."""
    view = View(text)
    yield view
    if b"\n" in text or b"\r" in text:
        view = without_bytes(view, LINE_ENDS)
        yield view
    for _ in range(LAYERS):
        if not _has_escapes(view.text, at_end):
            return
        view = undo_escapes(view, at_end=at_end)
        yield view


def hex_view(of: View) -> View:
    return without_bytes(of, HEX_SEPARATORS, _LOWER)


def readings_of(text: bytes) -> set[bytes]:
    """The texts in which `views_of` shows a text that was escaped once, twice or not at all."""
    joined = text.translate(None, LINE_ENDS)
    # JSON does not escape %. So percent signs of the text itself may be decoded while its backslashes are
    # not.
    once = _PERCENT.sub(lambda found: _decode_escape(found[0]), joined)
    twice = _PERCENT.sub(lambda found: _decode_escape(found[0]), once)
    return {joined, once, twice, *(view.text for view in views_of(text))}


def _has_escapes(text: bytes, at_end: bool) -> bool:
    if b"%" not in text and b"\\" not in text:
        return False
    return _ESCAPES[at_end].search(text) is not None


def _decode_escape(escape: bytes) -> bytes:
    kind = escape[1:2]
    if _UNFINISHED.fullmatch(escape):
        meant = b""
    elif escape[:1] == b"%" or kind == b"x":  # in a str of Python, \x is a character: `forms_of` covers that
        meant = bytes((int(escape[-2:], 16),))
    elif kind == b"u" and len(escape) == _SURROGATES:  # two surrogates
        meant = json.loads(b'"%s"' % escape).encode()
    elif kind in b"uU":
        code = int(escape[2:].strip(b"{}"), 16)
        meant = chr(code).encode("utf-8", "surrogatepass") if code < 0x110000 else escape
    else:
        meant = _SHORT.get(kind, kind)
    return b"" if meant in (b"\r", b"\n") else meant
