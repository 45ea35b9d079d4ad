"""Searches a text for many needles at once.

The work grows with the length of the text, not with the number of needles. The first 8 bytes of each needle
are in one table, and each 8 bytes of the text are looked up in it once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import compress

WINDOW = 8  # bytes, of a machine word. No needle is shorter
# Bytes from which the beginning of a needle is recognised where a text was cut off.
SHORTEST_BEGINNING = 4
# Comparisons for one text. Only a text made on purpose needs more. From there on, each place with the first
# bytes of a needle is taken for the longest needle that begins so.
MOST_COMPARISONS = 1 << 18
# Marks where one of our messages leaves out the rest of a text. A secret may break off there.
CUT = "…".encode()
# Between texts that are searched together. UTF-8 does not have this byte.
BETWEEN = b"\xff"

# Both alphabets of base64 as one.
_ALPHABET = bytes.maketrans(b"-_", b"+/")
_LETTER = re.compile(rb"[A-Za-z0-9+/]")
_LETTER_AND_PADDING = re.compile(rb"[A-Za-z0-9+/]?={0,2}")
_CUT = re.compile(CUT)

Span = tuple[int, int]


class Needles:
    """`texts`: searched for byte by byte. `base64`: with + and /, found in either alphabet; the span then
    includes the padding and one character on each side, which may hold bits of the secret."""

    def __init__(self, texts: Iterable[bytes], base64: Iterable[bytes] = ()) -> None:
        self._by_window: dict[int, list[tuple[bytes, bool]]] = {}
        needles = {*((text, False) for text in texts), *((letters, True) for letters in base64)}
        for needle in sorted(needles, key=lambda needle: len(needle[0]), reverse=True):
            self._by_window.setdefault(_window(needle[0].translate(_ALPHABET)), []).append(needle)
        self._heads: set[bytes] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_window.values()))

    def find(self, text: bytes, *, at_end: bool = False) -> list[Span]:
        """Spans of all needles; needles that touch are one span. Includes the beginning of a needle before
        each CUT and, with `at_end`, at the end of the text."""
        plain = text.translate(_ALPHABET)
        found: list[Span] = []
        for start, end in self._matches(text, plain, at_end):
            if found and start <= found[-1][1]:
                found[-1] = min(start, found[-1][0]), max(end, found[-1][1])
            else:
                found.append((start, end))
        ends = [cut.start() for cut in _CUT.finditer(plain)] if CUT in plain else []
        return found + list(self._cut_needles(plain, [*ends, len(plain)] if at_end else ends))

    def _matches(self, text: bytes, plain: bytes, at_end: bool) -> Iterator[Span]:
        comparisons, size, has_cuts = 0, len(text), CUT in text
        for at in sorted(self._candidates(plain)):
            same = self._by_window[_window(plain, at)]
            longest = at + len(same[0][0])
            comparisons += len(same)
            if comparisons > MOST_COMPARISONS:
                end = text.find(BETWEEN, at, longest)
                yield at, min(longest, size) if end < 0 else end
                continue
            cut = text.find(CUT, at, longest + len(CUT)) if has_cuts else -1
            if cut < 0 and at_end:
                cut = size
            for needle, is_base64 in same:
                where, end = plain if is_base64 else text, at + len(needle)
                if not where.startswith(needle, at):
                    if not (0 <= cut < end and needle.startswith(memoryview(where)[at:cut])):
                        continue
                    end = cut
                yield _widen_span(plain, at, end) if is_base64 else (at, end)

    def _candidates(self, plain: bytes) -> Iterator[int]:
        """Positions of the first bytes of a needle. Each position is looked up once, in C code."""
        whole = memoryview(plain)
        for shift in range(min(WINDOW, len(plain))):
            end = shift + (len(plain) - shift) // WINDOW * WINDOW
            windows = whole[shift:end].cast("Q")
            yield from compress(range(shift, end, WINDOW), map(self._by_window.__contains__, windows))

    def _cut_needles(self, plain: bytes, ends: list[int]) -> Iterator[Span]:
        """Beginnings of needles, shorter than a window, before one of these ends."""
        if self._heads is None:
            words = (word.to_bytes(WINDOW, sys.byteorder) for word in self._by_window)
            self._heads = {word[:length] for word in words for length in range(SHORTEST_BEGINNING, WINDOW)}
        for end in ends:
            for length in range(min(WINDOW - 1, end), SHORTEST_BEGINNING - 1, -1):
                if plain[end - length : end] in self._heads:
                    yield end - length, end
                    break


def _window(plain: bytes, at: int = 0) -> int:
    return int.from_bytes(plain[at : at + WINDOW], sys.byteorder)


def _widen_span(plain: bytes, start: int, end: int) -> Span:
    after = _LETTER_AND_PADDING.match(plain, end)
    return start - (_LETTER.match(plain, max(start - 1, 0), start) is not None), after.end() if after else end
