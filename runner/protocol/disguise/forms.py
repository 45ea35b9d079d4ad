"""The encodings of a secret that are searched for.

A long text is searched for in parts. So it is found even if the output was cut anywhere, and the work stays
small.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from runner.protocol.disguise.needles import WINDOW
from runner.protocol.disguise.views import readings_of

# Characters. A shorter text is not searched for: ordinary words would contain it.
SHORTEST = WINDOW
# Lines of one text that are searched for: the longest ones. The whole text is searched for too.
MOST_LINES = 256
# Bytes of one part of a long text.
LONGEST_PART = 4 << 10
# Bytes of a name in the DNS.
LONGEST_HOST_NAME = 253
# Bytes that one byte takes at most in these encodings: two digits of hex, each of them as \u0041.
WIDEST = 12
# From there on, JavaScript writes a number with an exponent too.
_MOST_WITHOUT_EXPONENT = 1e21

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # how a file in it begins
# How Python may decode bytes that are no UTF-8.
_ERRORS = ("replace", "ignore", "surrogateescape")


class Forms:
    """The texts, base64 and hex of all secrets in a value."""

    def __init__(self, value: Any) -> None:
        self.texts: set[bytes] = set()
        self.base64: set[bytes] = set()
        self.hexes: set[bytes] = set()
        self.longest = 0  # bytes that one of them takes at most, in any encoding
        for each in _collect(value):
            self._add(each)

    def _add(self, given: bytes | str) -> None:
        raw = given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass")
        for form in forms_of(given):
            for reading in readings_of(form):
                self._add_text(reading)
                self._add_text(reading.replace(b" ", b"+"))  # as in a query of a URL
        if isinstance(given, bytes):  # as Python shows bytes without escaping their backslashes
            self._add_text(given.decode("utf-8", "backslashreplace").encode())
        if len(raw) < 2 * SHORTEST:
            for escaped in _escaped_forms(given):
                self._add_text(escaped.encode("utf-8", "surrogatepass"))
        for part in _parts(raw):
            self.base64.update(_base64_of(part))
            self.hexes.add(part.hex().encode())

    def _add_text(self, text: bytes) -> None:
        if len(text) <= LONGEST_HOST_NAME and (lower := text.lower()) != text:
            self._add_text(lower)  # host names are shown in lower case
        if len(text) >= SHORTEST:
            parts = list(_parts(text))
            self.texts.update(parts)
            self.longest = max(self.longest, WIDEST * max(map(len, parts)))


def forms_of(given: bytes | str) -> set[bytes]:
    """A secret in different character encodings. Escapes in them are undone by views (views.py)."""
    raw = given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass")
    if raw.isascii():
        return {raw}
    latin = raw.decode("latin-1")  # a frequent mistake, also with what is UTF-8
    shown = [latin, given] if isinstance(given, str) else [latin]
    decoded = [latin]
    if isinstance(given, bytes):
        decoded += [given.decode("utf-8", errors) for errors in _ERRORS]
    forms = {raw, *(text.encode("utf-8", "surrogatepass") for text in decoded)}
    return forms.union(*map(_python_forms, shown))


def _python_forms(text: str) -> Iterator[bytes]:
    """The bytes of a view of Python's `ascii(text)` and `repr(text)`, which escape a character like a
    byte."""
    characters = set(text)
    for shown in (str.isascii, str.isprintable):
        written = {
            each: bytes((ord(each),))
            if ord(each) < 0x100 and not shown(each)
            else each.encode("utf-8", "surrogatepass")
            for each in characters
        }
        yield b"".join(map(written.__getitem__, text))


def _escaped_forms(given: bytes | str) -> Iterator[str]:
    """Escaped forms of a short text. In a view, without line ends and escapes, it might be too short to
    find."""
    text = given if isinstance(given, str) else given.decode("latin-1")
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]
    yield ascii(text)[1:-1]
    raw = given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass")
    yield repr(raw)[2:-1]
    yield "".join(f"%{byte:02X}" for byte in raw)


def number_texts(value: Any) -> tuple[str, ...]:
    """A number as JSON; and without its fraction, if that is zero: other languages print none."""
    try:
        text = str(value)
    except ValueError:  # an integer of more digits than Python converts: it is not sent
        return ()
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST_WITHOUT_EXPONENT:
        return text, str(int(value))
    return (text,)


def _collect(value: Any) -> Iterator[bytes | str]:
    """The texts of a value that are long enough."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            yield from _texts(value, b"\0")
            with contextlib.suppress(UnicodeDecodeError):
                value = value.decode("utf-16") if value.startswith(_UTF_16) else value
    if isinstance(value, str):
        yield from _texts(value.removeprefix("\ufeff"), "\0")
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _collect(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (text for text in number_texts(value) if len(text) >= SHORTEST)


def _texts(whole: Any, nul: Any) -> list[Any]:
    """The whole text and its longest lines: a key of several lines may be printed line by line."""
    lines = {line.strip().strip(nul) for line in whole.splitlines()}
    longest = sorted(lines, key=len, reverse=True)[:MOST_LINES]
    return [text for text in (whole.strip(), *longest) if len(text) >= SHORTEST]


def _parts(text: bytes) -> Iterator[bytes]:
    """Split a text into parts of about the same length, none of them short."""
    count = -(-len(text) // LONGEST_PART)
    ends = [len(text) * number // count for number in range(count + 1)]
    for start, end in pairwise(ends):
        yield text[start:end]


def _base64_of(part: bytes) -> Iterator[bytes]:
    """The base64 characters that depend on this part alone, for each of the three offsets at which it may
    begin in a group."""
    for offset in range(3):
        first, bits = -(-8 * offset // 6), 8 * (offset + len(part))
        yield base64.b64encode(bytes(offset) + part)[first : bits // 6]
