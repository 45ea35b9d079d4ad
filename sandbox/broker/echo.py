"""Puts the placeholder back where an answer repeats the value: verbatim, in base64, or with percent signs for
any of its characters.

What replaces has the length of what it replaces, so no length in the answer changes. A value may come in two
pieces. So the end of a piece is held back while it could be the beginning of a value. Whether it could is
decided by public facts alone: the lengths, and which characters a value cannot have. If it were decided by
the value, a plugin that lets a server repeat one character after the other would see by the delay which one
is right.
"""

from __future__ import annotations

import base64
import re
import string
from bisect import bisect_left
from collections.abc import Iterable

from sandbox.broker.placeholder import find_all, overwrite

_BITS_OF_A_CHARACTER = 6  # of base64
_UNRESERVED = (string.ascii_letters + string.digits + "-._~").encode()
_PERCENT_SAFE = (b"", b"/", b"!'()*", b"!$&'()*+,;=:@/")  # what encoders leave as it is, beside these
# What encodings have; of the others a pattern has only those of the placeholder, which the plugin knows.
_OF_ENCODINGS = (string.ascii_letters + string.digits + "%+/=-_\\").encode()
_ESCAPES = re.compile(rb"%[0-9A-Fa-f]{2}(?:%[0-9A-Fa-f]{2})*")  # begins with a character: searched fast
_ESCAPE_BYTES = 3


def spellings(text: bytes) -> list[bytes]:
    """A text as it is found in answers. Two texts of one shape have the same number of them, and each has the
    length of its partner."""
    found = [text, text.replace(b"/", b"\\/")]  # JSON has slashes in two ways
    found.append(text.replace(b" ", b"+"))  # forms have blanks so
    escaped = [escape(text, safe) for safe in _PERCENT_SAFE]
    escaped.append(b"".join(b"%%%02X" % byte for byte in text))
    found += [each for upper in escaped for each in (upper, _lower_escapes(upper))]
    for shift in range(3):
        padded = bytes(shift) + text
        first = -(-shift * 8 // _BITS_OF_A_CHARACTER)  # without the characters that have bits of neighbours
        last = len(padded) * 8 // _BITS_OF_A_CHARACTER
        found += [encode(padded)[first:last] for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    return found


def escape(text: bytes, safe: bytes = b"") -> bytes:
    """A text as it is written in a query."""
    return b"".join(
        bytes((byte,)) if byte in _UNRESERVED or byte in safe else b"%%%02X" % byte for byte in text
    )


def _lower_escapes(text: bytes) -> bytes:
    first, *rest = text.split(b"%")
    return b"%".join((first, *(each[:2].lower() + each[2:] for each in rest)))


class Replacements:
    """What is replaced by what, of equal length."""

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        found: dict[bytes, bytes] = {}
        for old, new in pairs:
            for one, other in zip(spellings(old), spellings(new), strict=True):
                if len(one) != len(other):
                    raise ValueError("a placeholder has another shape than its value")
                found.setdefault(one, other)
        self._pairs = sorted(found.items(), key=lambda pair: len(pair[0]))  # as cover() has them
        self.longest = _ESCAPE_BYTES * max(map(len, found), default=0)
        self.alphabet = bytes({*_OF_ENCODINGS, *b"".join(found.values())})

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def replace(self, data: bytes) -> bytes:
        covered = bytearray(data)
        self.cover(covered, data)
        return bytes(covered)

    def cover(self, covered: bytearray, data: bytes, known: int = 0) -> None:
        """Overwrite in `covered` what is found in `data`. `known`: how many of the bytes were searched
        before."""
        for old, new in self._pairs:
            overwrite(covered, data, old, new, max(0, known - len(old) + 1))
        if b"%" in data:
            plain = _Unescaped(data)
            for old, new in self._pairs:
                plain.overwrite(covered, old, new)

    def replace_in(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [(self.replace(name), self.replace(value)) for name, value in headers]


class _Unescaped:
    """Data without its escapes, to find a text of which any character may be one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._escapes: list[int] = []  # their places in the text without escapes
        parts: list[bytes] = []
        at = length = 0
        for found in _ESCAPES.finditer(data):
            characters = bytes.fromhex(found[0].replace(b"%", b"").decode())
            parts += data[at : found.start()], characters
            first = length + found.start() - at
            length = first + len(characters)
            self._escapes += range(first, length)
            at = found.end()
        self._text = b"".join((*parts, data[at:])) if self._escapes else b""

    def overwrite(self, covered: bytearray, old: bytes, new: bytes) -> None:
        """Each escape by the escape of the other character."""
        end = 0
        for place in find_all(self._text, old):
            begin, end = max(place, end), place + len(old)
            first, last = (bisect_left(self._escapes, each) for each in (begin, end))
            if first == last and begin == place:
                continue  # it has no escapes, and is found without this class
            written = bytearray(new[begin - place :])
            for each in range(last - 1, first - 1, -1):
                at = self._escapes[each]
                written[at - begin : at - begin + 1] = self._escape(new[at - place], at + 2 * each)
            start = begin + 2 * first
            covered[start : start + len(written)] = written

    def _escape(self, byte: int, place: int) -> bytes:
        """`place`: in the data, of the escape that is overwritten."""
        digits = self._data[place + 1 : place + _ESCAPE_BYTES]
        return b"%%%02X" % byte if digits == digits.upper() else b"%%%02x" % byte


NOTHING = Replacements(())


def blanked(texts: Iterable[bytes]) -> Replacements:
    """Replaces every letter and digit of the texts, in what people read."""
    return Replacements((text, _blank(text)) for text in texts)


def _blank(text: bytes) -> bytes:
    """A text of the same shape."""
    return bytes(ord("x") if chr(byte).isalnum() and byte < 128 else byte for byte in text)


class EchoFilter:
    """A stream in which the values are replaced."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._held = b""  # as it came: what follows may make a value of it
        self._covered = b""  # the same, with what is found by now replaced

    def feed(self, data: bytes) -> bytes:
        """What may be passed on. At most the length of the longest spelling is held back."""
        if not self._replacements:
            return data
        known, data = len(self._held), self._held + data
        covered = bytearray(self._covered + data[known:])
        self._replacements.cover(covered, data, known)
        tail = data[-(self._replacements.longest - 1) :]
        end = len(data) - len(tail) + len(tail.rstrip(self._replacements.alphabet))
        self._held, self._covered = data[end:], bytes(covered[end:])
        return bytes(covered[:end])

    def flush(self) -> bytes:
        """The rest, at an end."""
        rest, self._held, self._covered = self._covered, b"", b""
        return rest
