"""The text of one cell as a terminal may show it: without control characters, and as wide as we think.

A plugin chooses the text. It must not steer the terminal, and it must not shift the rest of its line. So
characters that steer become U+FFFD, and what terminals draw with different widths is reduced: of an emoji
sequence the first emoji stays.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from sandbox.speed.value import NamedTuple

# Characters of one symbol that are read, and combining marks of one character that are kept. The longest
# emoji sequence has ten characters. Further ones are dropped.
SYMBOL_CHARACTERS = 16
_MOST_MARKS = 4

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_JOINER = "\N{ZERO WIDTH JOINER}"


class Glyph(NamedTuple):
    text: str
    columns: int  # at least 1


BLANK = Glyph(" ", 1)


def make_glyph(symbol: str) -> Glyph:
    """An empty symbol is a blank."""
    return _make_glyph(symbol[:SYMBOL_CHARACTERS])  # else the cache would hold what a plugin makes long


@lru_cache(maxsize=4096)
def _make_glyph(symbol: str) -> Glyph:
    text, columns, marks, joined = "", 0, 0, False
    for character in symbol:
        if character == _JOINER and columns:
            joined = True
            continue
        if _is_variant(character) and columns:
            continue
        width = _width(character)
        if width == 0:
            # A mark without a character would change the cell before.
            text, columns = text or " ", columns or 1
            if marks < _MOST_MARKS:
                text += character
            marks += 1
        elif not joined:
            text += character if _is_harmless(character) else REPLACEMENT
            columns += width
            marks = 0
        joined = False
    return Glyph(text, columns) if columns else BLANK


def fit_glyph(glyph: Glyph, room: int) -> Glyph:
    """The glyph in at most `room` columns. One that is too wide is cut after a whole character."""
    if glyph.columns <= room:
        return glyph
    text, columns = "", 0
    for character in glyph.text:
        width = _width(character)
        if columns + width > room:
            break
        text, columns = text + character, columns + width
    return Glyph(text, columns) if columns else BLANK


def _is_variant(character: str) -> bool:
    """Chooses among the looks of the character before: variation selectors, skin tones, tags of a flag."""
    return (
        "\ufe00" <= character <= "\ufe0f"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e01ef"
    )


def _is_harmless(character: str) -> bool:
    category = unicodedata.category(character)
    if category == "Cn":  # a younger emoji than this Python knows, or no character at all
        return _is_pictograph(character)
    return category not in ("Cc", "Cf", "Cs", "Zl", "Zp")  # icon fonts use private characters (Co)


def _is_pictograph(character: str) -> bool:
    return "\U0001f300" <= character <= "\U0001faff"


@lru_cache(maxsize=4096)
def _width(character: str) -> int:
    """Columns of a character. Of one that is replaced: of the replacement."""
    category = unicodedata.category(character)
    if category in ("Mn", "Me") or "\u1160" <= character <= "\u11ff" or "\ud7b0" <= character <= "\ud7ff":
        return 0  # the ranges are the second and third part of a Korean syllable
    if not _is_harmless(character):
        return 1
    if category == "Cn" or unicodedata.east_asian_width(character) in "WF":
        return 2
    return 1
