"""Many texts, searched for at once.

The work grows with the length of the text that is searched, and not with how many texts are looked for. The
first 8 bytes of each are in one table, and each 8 bytes of the text are looked up in it once. A table of a
thousand needles costs as much as a table of one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import compress

from sandbox.speed.value import NamedTuple

WINDOW = 8  # bytes, of a machine word. No needle is shorter
# Bytes of the beginning of a needle that count at the end of a text that was cut off there.
SHORTEST_BEGINNING = 4
# In one text. Only a text that is made for it has more: from there on, each place where the first bytes of a
# needle stand is taken for the longest needle that begins so.
MOST_COMPARISONS = 1 << 18
# Where one of our messages leaves out the rest of a text. A secret may break off there.
CUT = "…".encode()
# Between texts that are searched together. UTF-8 does not have this byte.
BETWEEN = b"\xff"

# Both alphabets of base64 as one.
_ALPHABET = bytes.maketrans(b"-_", b"+/")
_LETTER = re.compile(rb"[A-Za-z0-9+/]")
_PADDING = re.compile(rb"={0,2}")
_CUT = re.compile(CUT)

Span = tuple[int, int]


class Needle(NamedTuple):
    text: bytes
    is_base64: bool = False  # with + and /; a text may have - and _ instead
    before: bool = False  # the letter before it depends on it in part
    after: bool = False  # the letter after it too
    continues: bool = False  # the rest of a longer text: what stands directly before it belongs to it


class Needles:
    def __init__(self, needles: Iterable[Needle]) -> None:
        self._by_window: dict[int, list[Needle]] = {}
        for needle in sorted(set(needles), key=lambda needle: len(needle.text), reverse=True):
            start = needle.text[:WINDOW].translate(_ALPHABET)
            self._by_window.setdefault(int.from_bytes(start, sys.byteorder), []).append(needle)
        self._heads: set[bytes] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_window.values()))

    def find(self, text: bytes, *, at_end: bool = False) -> list[Span]:
        """Where they stand. Also the beginning of one with which the text breaks off, at each CUT and, with
        `at_end`, at its end."""
        plain = text.translate(_ALPHABET)
        found: list[Span] = []
        for start, end, continues in self._matches(text, plain, at_end):
            if found and (start < found[-1][1] or (continues and start == found[-1][1])):
                found[-1] = found[-1][0], max(end, found[-1][1])
            else:
                found.append((start, end))
        ends = [cut.start() for cut in _CUT.finditer(plain)] if CUT in plain else []
        return found + list(self._begun(plain, [*ends, len(plain)] if at_end else ends))

    def _matches(self, text: bytes, plain: bytes, at_end: bool) -> Iterator[tuple[int, int, bool]]:
        comparisons, size = 0, len(text)
        for at in sorted(self._candidates(plain)):
            same = self._by_window[int.from_bytes(plain[at : at + WINDOW], sys.byteorder)]
            longest = at + len(same[0].text)
            comparisons += len(same)
            if comparisons > MOST_COMPARISONS:
                end = text.find(BETWEEN, at, longest)
                yield at, min(longest, size) if end < 0 else end, False
                continue
            end = text.find(CUT, at, longest + len(CUT))
            if end < 0 and at_end:
                end = size
            for needle in same:
                where = plain if needle.is_base64 else text
                length = len(needle.text)
                if where.startswith(needle.text, at):
                    yield (*_widened(plain, at, at + length, needle), needle.continues)
                    break
                if 0 <= end < at + length and needle.text.startswith(memoryview(where)[at:end]):
                    yield _widened(plain, at, end, needle)[0], end, needle.continues
                    break

    def _candidates(self, plain: bytes) -> Iterator[int]:
        """Where the first bytes of a needle stand. One look at each place, without a step of Python."""
        whole = memoryview(plain)
        for shift in range(min(WINDOW, len(plain))):
            end = shift + (len(plain) - shift) // WINDOW * WINDOW
            windows = whole[shift:end].cast("Q")
            yield from compress(range(shift, end, WINDOW), map(self._by_window.__contains__, windows))

    def _begun(self, plain: bytes, ends: list[int]) -> Iterator[Span]:
        """Less than a window of a needle, at one of these ends."""
        if self._heads is None:
            words = (word.to_bytes(WINDOW, sys.byteorder) for word in self._by_window)
            self._heads = {word[:length] for word in words for length in range(SHORTEST_BEGINNING, WINDOW)}
        for end in ends:
            for length in range(min(WINDOW - 1, end), SHORTEST_BEGINNING - 1, -1):
                if plain[end - length : end] in self._heads:
                    yield end - length, end
                    break


def _widened(plain: bytes, start: int, end: int, needle: Needle) -> Span:
    """With the letters of base64 around it that tell a part of it, and the padding."""
    if needle.is_base64:
        start -= needle.before and start > 0 and _LETTER.match(plain, start - 1) is not None
        end += needle.after and _LETTER.match(plain, end) is not None
        padding = _PADDING.match(plain, end)
        end = end if padding is None else padding.end()
    return start, end
