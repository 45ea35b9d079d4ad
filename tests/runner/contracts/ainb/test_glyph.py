"""What a plugin writes into a cell neither steers the terminal nor shifts its line."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.contracts.ainb.glyph import SYMBOL_CHARACTERS, Glyph, fit_glyph, make_glyph

MARK = "\u0301"  # an acute accent
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.mark.parametrize(
    ("symbol", "text", "columns"),
    [
        ("a", "a", 1),
        ("", " ", 1),
        (" ", " ", 1),
        ("ab", "ab", 2),
        ("é", "é", 1),
        ("e" + MARK, "e" + MARK, 1),
        ("e" + MARK * 9, "e" + MARK * 4, 1),
        (MARK, " " + MARK, 1),
        ("─", "─", 1),
        ("▁", "▁", 1),
        ("漢", "漢", 2),
        ("Ａ", "Ａ", 2),
        ("\u3000", "\u3000", 2),
        ("ｱ", "ｱ", 1),
        ("한", "한", 2),
        ("\u1112\u1161\u11ab", "\u1112\u1161\u11ab", 2),  # the same syllable in three parts
        ("\ue0b0", "\ue0b0", 1),  # an icon font
        # Emoji: terminals disagree about the width of everything but the first character.
        ("\U0001f600", "\U0001f600", 2),
        (FAMILY, "\U0001f468", 2),
        ("\U0001f44d\U0001f3fd", "\U0001f44d", 2),
        ("\u26a0\ufe0f", "\u26a0", 1),
        ("\U0001f1e9\U0001f1ea", "\U0001f1e9\U0001f1ea", 2),
        ("\U0001f3f4\U000e0067\U000e0062\U000e007f", "\U0001f3f4", 2),
        ("\U0001fae8", "\U0001fae8", 2),  # Unicode 15
        # What steers a terminal.
        ("\x1b", "\ufffd", 1),
        ("\x1b[31m", "\ufffd[31m", 5),
        ("\x1b]0;t\x07", "\ufffd]0;t\ufffd", 6),
        ("\x9b31m", "\ufffd31m", 4),
        ("\n", "\ufffd", 1),
        ("\r", "\ufffd", 1),
        ("\t", "\ufffd", 1),
        ("\x00", "\ufffd", 1),
        ("\x7f", "\ufffd", 1),
        ("\u202e", "\ufffd", 1),  # right to left override
        ("\u2066", "\ufffd", 1),
        ("\u2028", "\ufffd", 1),
        ("\u200b", "\ufffd", 1),
        ("\u200d", "\ufffd", 1),
        ("\ufeff", "\ufffd", 1),
        ("\ud800", "\ufffd", 1),
        ("\ufdd0", "\ufffd", 1),
        ("\U0010ffff", "\ufffd", 1),
        ("x" * 40, "x" * SYMBOL_CHARACTERS, SYMBOL_CHARACTERS),
    ],
)
def test_glyphs(symbol: str, text: str, columns: int) -> None:
    assert make_glyph(symbol) == Glyph(text, columns)


@given(st.text(alphabet=st.characters(), max_size=20))
def test_no_symbol_steers_a_terminal(symbol: str) -> None:
    text, columns = make_glyph(symbol)
    assert columns >= 1
    assert not {unicodedata.category(character) for character in text} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(text) <= SYMBOL_CHARACTERS + 1


@given(st.text(alphabet=st.characters(), max_size=20), st.integers(1, 20))
def test_a_glyph_fits_into_the_room_there_is(symbol: str, room: int) -> None:
    whole = make_glyph(symbol)
    fitting = fit_glyph(whole, room)
    assert 1 <= fitting.columns <= room
    assert fitting is whole or whole.columns > room


@pytest.mark.parametrize(
    ("symbol", "room", "text"),
    [("漢", 2, "漢"), ("漢", 1, " "), ("a漢", 2, "a"), ("e" + MARK + "x", 1, "e" + MARK), ("abc", 2, "ab")],
)
def test_what_does_not_fit_is_cut_after_a_whole_character(symbol: str, room: int, text: str) -> None:
    assert fit_glyph(make_glyph(symbol), room).text == text
