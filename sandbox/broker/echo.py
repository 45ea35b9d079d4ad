"""Puts the placeholder back where an answer repeats the value: verbatim, in base64 or with percent signs.

What replaces has the length of what it replaces, so no length in the answer changes. A value may come in two
pieces. So the end of a piece is held back while it could be the beginning of a value. Whether it could is
decided by public facts alone: the lengths, and which characters a value cannot have. If it were decided by
the value, a plugin that lets a server repeat one character after the other would see by the delay which one
is right.
"""

from __future__ import annotations

import base64
import string
from collections.abc import Iterable

_BITS_OF_A_CHARACTER = 6  # of base64
_UNRESERVED = (string.ascii_letters + string.digits + "-._~").encode()
_PERCENT_SAFE = (b"", b"/", b"!'()*", b"!$&'()*+,;=:@/")  # what encoders leave as it is, beside these
# What encodings have; of the others a pattern has only those of the placeholder, which the plugin knows.
_OF_ENCODINGS = (string.ascii_letters + string.digits + "%+/=-_\\").encode()


def spellings(text: bytes) -> list[bytes]:
    """A text as it is found in answers. Two texts of one shape have the same number of them, and each has the
    length of its partner."""
    found = [text, text.replace(b"/", b"\\/")]  # JSON has slashes in two ways
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
        # The longest first: a value may be a part of another one.
        self._pairs = tuple(sorted(found.items(), key=lambda pair: -len(pair[0])))
        self.longest = max(map(len, found), default=0)
        self.alphabet = bytes({*_OF_ENCODINGS, *b"".join(found.values())})

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def replace(self, data: bytes) -> bytes:
        for old, new in self._pairs:
            if old in data:
                data = data.replace(old, new)
        return data

    def replace_in(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [(self.replace(name), self.replace(value)) for name, value in headers]


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
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be passed on. At most the length of the longest spelling is held back."""
        if not self._replacements:
            return data
        data = self._replacements.replace(self._held + data)
        most = self._replacements.longest - 1
        tail = data[-most:]
        held = len(tail) - len(tail.rstrip(self._replacements.alphabet))
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def flush(self) -> bytes:
        """The rest, at an end."""
        held, self._held = self._held, b""
        return held
