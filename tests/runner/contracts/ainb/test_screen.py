"""Answers to plugin/render: the text of a cell, the grid, and both as text and as JSON."""

from __future__ import annotations

import copy
import json
import re
import tracemalloc
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.ainb.screen import (
    PLAIN,
    SYMBOL_CHARACTERS,
    Color,
    Glyph,
    RenderFault,
    Rendering,
    Size,
    Style,
    _rows,
    describe_rendering,
    draw,
    draw_lines,
    fit_glyph,
    make_glyph,
    read_rendering,
    wants_colour,
)

# --- the text of one cell -----------------------------------------------------------------------------------

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


# --- the grid -----------------------------------------------------------------------------------------------

VIEWPORT = Size(4, 2)


def cell(x: int = 0, y: int = 0, symbol: Any = "A", **more: Any) -> list[Any]:
    return [{"x": x, "y": y}, {"symbol": symbol, "modifier": 0, **more}]


def answer(*cells: Any, width: Any = 4, height: Any = 2, **more: Any) -> dict[str, Any]:
    return {"buffer": {"width": width, "height": height, "cells": list(cells)}, **more}


def texts(value: Any, viewport: Size = VIEWPORT) -> dict[tuple[int, int], str]:
    return {place: cell.glyph.text for place, cell in read_rendering(value, viewport).buffer.cells.items()}


def test_an_answer() -> None:
    red = {"r": 255, "g": 0, "b": 1}
    cells = cell(), cell(3, 1, "B", fg=red, bg=None, modifier=5)
    read = read_rendering(answer(*cells, redraw=True, captures_text=True), VIEWPORT)
    assert read.buffer.size == VIEWPORT == read.claimed
    assert (read.redraw, read.captures_text, read.painted, read.clipped) == (True, True, 2, 0)
    first, second = read.buffer.cells[0, 0], read.buffer.cells[1, 3]
    assert (first.glyph.text, first.style) == ("A", PLAIN)
    assert (second.glyph.text, second.style) == ("B", Style(Color(255, 0, 1), None, 5))


def test_cells_and_flags_may_leave_fields_out() -> None:
    read = read_rendering(answer([{"x": 0, "y": 0}, {"symbol": "A"}]), VIEWPORT)
    assert (read.redraw, read.captures_text) == (False, False)
    assert read.buffer.cells[0, 0].style == PLAIN


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (answer(), {}),
        (answer(width=0, height=0), {}),
        (answer(cell(), width=0, height=0), {}),  # a headless plugin
        (answer(cell(symbol="A"), cell(symbol="B")), {(0, 0): "B"}),
        (answer(cell(3, 1)), {(1, 3): "A"}),
        (answer(cell(4, 0), cell(0, 2), cell(65535, 65535)), {}),
        (answer(cell(3, 1), width=3), {}),  # outside of its own size
        (answer(cell(5, 0), cell(1, 0, "B"), width=65535, height=65535), {(0, 1): "B"}),  # and of ours
        ({**answer(cell()), "more": 1}, {(0, 0): "A"}),
        (answer([{"x": 0, "y": 0, "z": 1}, {"symbol": "A", "more": []}]), {(0, 0): "A"}),
    ],
)
def test_later_cells_count_and_those_outside_are_dropped(
    value: Any, expected: dict[tuple[int, int], str]
) -> None:
    assert texts(value) == expected


def test_clipped_cells_are_counted() -> None:
    read = read_rendering(answer(cell(), cell(9, 0), cell(0, 9), width=100, height=100), VIEWPORT)
    assert (read.painted, read.clipped, read.claimed) == (3, 2, Size(100, 100))


BROKEN: dict[str, tuple[Any, str]] = {
    "nothing": (None, "result is null, and has to be an object"),
    "a list": ([], "result is a list of 0, and has to be an object"),
    "no buffer": ({}, "result has no buffer"),
    "null as buffer": ({"buffer": None}, "buffer is null"),
    "no width": ({"buffer": {"height": 1, "cells": []}}, "buffer has no width"),
    "a negative width": (answer(width=-1), "buffer.width is -1, and has to be an integer from 0 to 65535"),
    "a width of 17 bits": (answer(width=65536), "buffer.width is 65536"),
    "a fraction": (answer(height=2.0), "buffer.height is 2, and has to be an integer"),
    "true as height": (answer(height=True), "buffer.height is true"),
    "no cells": ({"buffer": {"width": 1, "height": 1}}, "buffer has no cells"),
    "cells as object": ({"buffer": {"width": 1, "height": 1, "cells": {}}}, "buffer.cells is an object"),
    "a cell that is null": (answer(cell(), None), "buffer.cells[1] is null"),
    "a cell that is an object": (answer({"x": 0, "y": 0}), "buffer.cells[0] is an object"),
    "a cell that is a string": (answer("xy"), "buffer.cells[0] is the string 'xy'"),
    "a cell of one": (answer([{"x": 0, "y": 0}]), "buffer.cells[0] is a list of 1"),
    "a cell of three": (answer([*cell(), 1]), "buffer.cells[0] is a list of 3"),
    "a position that is a list": (answer([[0, 0], {"symbol": "A"}]), "buffer.cells[0][0] is a list of 2"),
    "no x": (answer([{"y": 0}, {"symbol": "A"}]), "buffer.cells[0][0] has no x"),
    "a negative y": (answer(cell(0, -1)), "buffer.cells[0][0].y is -1"),
    "an x of 17 bits": (answer(cell(65536)), "buffer.cells[0][0].x is 65536"),
    "x as text": (answer([{"x": "0", "y": 0}, {"symbol": "A"}]), "buffer.cells[0][0].x is the string '0'"),
    "x as bool": (answer([{"x": False, "y": 0}, {"symbol": "A"}]), "buffer.cells[0][0].x is false"),
    "a look that is a string": (answer([{"x": 0, "y": 0}, "A"]), "buffer.cells[0][1] is the string 'A'"),
    "no symbol": (answer([{"x": 0, "y": 0}, {}]), "buffer.cells[0][1] has no symbol"),
    "a symbol that is null": (answer(cell(symbol=None)), "buffer.cells[0][1].symbol is null"),
    "a symbol that is a number": (answer(cell(symbol=1)), "buffer.cells[0][1].symbol is 1"),
    "a colour that is a string": (answer(cell(fg="red")), "buffer.cells[0][1].fg is the string 'red'"),
    "a colour that is a list": (answer(cell(bg=[1, 2, 3])), "buffer.cells[0][1].bg is a list of 3"),
    "a colour without blue": (answer(cell(bg={"r": 1, "g": 2})), "buffer.cells[0][1].bg has no b"),
    "a colour of 9 bits": (answer(cell(fg={"r": 256, "g": 2, "b": 3})), "buffer.cells[0][1].fg.r is 256"),
    "a colour that is true": (answer(cell(fg={"r": 1, "g": True, "b": 3})), "[1].fg.g is true"),
    "a modifier of 17 bits": (answer(cell(modifier=65536)), "buffer.cells[0][1].modifier is 65536"),
    "a modifier that is null": (answer(cell(modifier=None)), "buffer.cells[0][1].modifier is null"),
    "a modifier that is false": (answer(cell(modifier=False)), "buffer.cells[0][1].modifier is false"),
    "a cell outside is checked too": (answer(cell(99, 99, symbol=1)), "[1].symbol is 1"),
    "redraw that is null": (answer(redraw=None), "redraw is null, and has to be true or false"),
    "redraw that is a number": (answer(redraw=1), "redraw is 1"),
    "captures_text that is text": (answer(captures_text="no"), "captures_text is the string 'no'"),
    "an escape in a message": (answer(cell(fg="\x1b[31m")), "fg is the string '\\x1b[31m'"),
}


@pytest.mark.parametrize(("value", "fault"), BROKEN.values(), ids=BROKEN.keys())
def test_a_wrong_type_is_named(value: Any, fault: str) -> None:
    with pytest.raises(RenderFault) as raised:
        read_rendering(value, VIEWPORT)
    assert fault in str(raised.value)
    assert str(raised.value).startswith("its answer to plugin/render cannot be drawn: ")
    assert len(str(raised.value)) < 200


def test_a_true_beside_a_one_is_still_no_number() -> None:
    """They are equal, so the second must not be found in a cache of the first."""
    good = cell(fg={"r": 1, "g": 1, "b": 1}, modifier=1)
    for bad in (cell(fg={"r": True, "g": 1, "b": 1}, modifier=1), cell(fg=good[1]["fg"], modifier=True)):
        with pytest.raises(RenderFault, match="is true"):
            read_rendering(answer(good, bad), VIEWPORT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in items:
        found += places(member, (*path, key))
    return found


@settings(max_examples=300)
@given(data=st.data(), put=JSON)
def test_anything_anywhere_is_read_or_refused(data: st.DataObject, put: Any) -> None:
    """Of a good answer one part is replaced by something else."""
    whole = {"root": answer(cell(fg={"r": 1, "g": 2, "b": 3}), cell(1, 1, bg=None), redraw=True)}
    *way, last = data.draw(st.sampled_from([place for place in places(whole) if place]))
    value = copy.deepcopy(whole)
    at: Any = value
    for key in way:
        at = at[key]
    at[last] = put
    said = ""
    try:
        read = read_rendering(value["root"], VIEWPORT)
    except RenderFault as fault:
        said = str(fault)
    else:
        assert all(y < read.buffer.size.height and x < read.buffer.size.width for y, x in read.buffer.cells)
    assert said.isprintable()


numbers = st.integers(0, 7)


@given(st.lists(st.tuples(numbers, numbers, st.text(min_size=1, max_size=2))), numbers, numbers)
def test_no_more_cells_than_were_asked_for(
    painted: list[tuple[int, int, str]], width: int, height: int
) -> None:
    value = answer(*(cell(x, y, symbol) for x, y, symbol in painted), width=6, height=6)
    viewport = Size(width, height)
    read = read_rendering(value, viewport)
    assert len(read.buffer.cells) <= min(6, width) * min(6, height)
    inside = [(y, x) for x, y, _ in painted if x < min(6, width) and y < min(6, height)]
    assert set(read.buffer.cells) == set(inside)
    assert read.clipped == len(painted) - len(inside)


def test_a_large_answer_for_a_small_viewport_takes_little_memory() -> None:
    """The cells that are dropped leave nothing behind."""
    cells = [cell(number % 500, number // 500, "x" * 100) for number in range(100_000)]
    value = json.loads(json.dumps(answer(*cells, width=500, height=200)))
    tracemalloc.start()
    try:
        read = read_rendering(value, Size(80, 24))
        assert len(read.buffer.cells) == 80 * 24 and read.clipped == 100_000 - 80 * 24
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


# --- drawing ------------------------------------------------------------------------------------------------

RED, BLUE = {"r": 255, "g": 0, "b": 0}, {"r": 0, "g": 0, "b": 255}
RESET = "\x1b[0m"


def rendered(width: int, height: int, *cells: tuple[int, int, str] | tuple[int, int, str, Any]) -> Rendering:
    """Each cell: x, y, symbol, and perhaps its look."""
    look: Mapping[str, Any]
    wire = []
    for x, y, symbol, *rest in cells:
        look = rest[0] if rest else {}
        wire.append([{"x": x, "y": y}, {"symbol": symbol, **look}])
    answer = {"buffer": {"width": width, "height": height, "cells": wire}}
    return read_rendering(answer, Size(width, height))


def plain(*cells: Any, width: int = 6, height: int = 1, columns: int | None = None) -> str:
    return draw(rendered(width, height, *cells).buffer, colour=False, columns=columns)


def coloured(*cells: Any, width: int = 6, height: int = 1) -> str:
    return draw(rendered(width, height, *cells).buffer, colour=True)


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ([], "\n"),
        ([(0, 0, "a")], "a\n"),
        ([(2, 0, "a")], "  a\n"),
        ([(0, 0, "a"), (3, 0, " ")], "a\n"),
        ([(0, 0, "漢"), (2, 0, "a")], "漢a\n"),
        ([(0, 0, "漢"), (1, 0, "x"), (2, 0, "a")], "漢a\n"),  # a wide character covers the next cell
        ([(0, 0, "漢"), (1, 0, ""), (2, 0, "a")], "漢a\n"),
        ([(5, 0, "漢")], "\n"),  # no room for it
        ([(4, 0, "漢")], "    漢\n"),
        ([(4, 0, "abc")], "    ab\n"),
        ([(0, 0, "e\u0301"), (1, 0, "x")], "e\u0301x\n"),
        ([(0, 0, "\x1b[2J"), (4, 0, "x")], "\ufffd[2Jx\n"),
        ([(0, 0, "\n"), (1, 0, "x")], "\ufffdx\n"),
        ([(0, 0, "\u26a0\ufe0f"), (2, 0, "x")], "\u26a0 x\n"),
        ([(0, 0, "s", {"modifier": 128}), (1, 0, "x")], " x\n"),  # hidden
    ],
)
def test_plain_text(cells: list[Any], text: str) -> None:
    assert plain(*cells) == text


def test_each_row_is_a_line() -> None:
    assert plain((0, 2, "a"), height=4) == "\n\na\n\n"
    assert plain(width=0, height=0) == ""


def test_a_narrow_terminal_cuts_lines() -> None:
    row = [(x, 0, str(x)) for x in range(6)]
    assert plain(*row, columns=3) == "012\n"
    assert plain((2, 0, "漢"), columns=3) == "\n"
    assert plain(*row, columns=100) == "012345\n"


@pytest.mark.parametrize(
    ("look", "sgr"),
    [
        ({"modifier": 1}, "0;1"),
        ({"modifier": 2}, "0;2"),
        ({"modifier": 4}, "0;3"),
        ({"modifier": 8}, "0;4"),
        ({"modifier": 16}, "0;5"),
        ({"modifier": 32}, "0;6"),
        ({"modifier": 64}, "0;7"),
        ({"modifier": 128}, "0;8"),
        ({"modifier": 256}, "0;9"),
        ({"modifier": 1 | 8 | 256}, "0;1;4;9"),
        ({"fg": RED}, "0;38;2;255;0;0"),
        ({"bg": BLUE}, "0;48;2;0;0;255"),
        ({"fg": RED, "bg": BLUE, "modifier": 4}, "0;3;38;2;255;0;0;48;2;0;0;255"),
        ({"modifier": 0xFE00}, "0"),  # bits without a meaning
    ],
)
def test_styles(look: Mapping[str, Any], sgr: str) -> None:
    assert coloured((0, 0, "a", look)) == f"\x1b[{sgr}ma{RESET}\n"


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ([(0, 0, "a")], "a\n"),
        ([(0, 0, "a"), (3, 0, " ")], "a\n"),
        ([(0, 0, "a"), (1, 0, " ", {"bg": BLUE})], f"a\x1b[0;48;2;0;0;255m {RESET}\n"),
        (
            [(0, 0, "a", {"fg": RED}), (1, 0, "b", {"fg": RED}), (2, 0, "c")],
            f"\x1b[0;38;2;255;0;0mab{RESET}c\n",
        ),
        ([(0, 0, "a", {"fg": RED}), (2, 0, "c", {"fg": RED})], None),
    ],
)
def test_a_style_is_set_where_it_changes(cells: list[Any], text: str | None) -> None:
    red = "\x1b[0;38;2;255;0;0m"
    assert coloured(*cells) == (text or f"{red}a{RESET} {red}c{RESET}\n")


def test_a_style_ends_with_its_line() -> None:
    bold = {"modifier": 1}
    assert coloured((0, 0, "a", bold), (0, 1, "b"), height=2) == f"\x1b[0;1ma{RESET}\nb\n"


@pytest.mark.parametrize(
    ("environ", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "0"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm"}, True, True),
    ],
)
def test_when_colours_are_wanted(environ: Mapping[str, str], terminal: bool, expected: bool) -> None:
    assert wants_colour(environ, terminal) is expected


def test_json() -> None:
    read = rendered(3, 2, (1, 1, "b", {"fg": RED, "modifier": 1}), (0, 0, "a"), (9, 9, "x"))
    assert describe_rendering(read) == {
        "width": 3,
        "height": 2,
        "lines": ["a", " b"],
        "cells": [
            [{"x": 0, "y": 0}, {"symbol": "a", "modifier": 0}],
            [{"x": 1, "y": 1}, {"symbol": "b", "fg": RED, "modifier": 1}],
        ],
        "clipped": 1,
        "redraw": False,
        "captures_text": False,
    }


# Without characters that this Python does not know: it cannot tell how wide they are.
SYMBOLS = st.text(alphabet=st.characters(exclude_categories=["Cn"]), max_size=3)
LOOKS = st.fixed_dictionaries(
    {"modifier": st.integers(0, 0xFFFF)}, optional={"fg": st.just(RED), "bg": st.just(BLUE)}
)
CELLS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), SYMBOLS, LOOKS), max_size=30)


def columns(text: str) -> int:
    """Counted in another way than by the module under test."""
    text = re.sub("[\u1160-\u11ff\ud7b0-\ud7ff]", "", text)
    spacing = [character for character in text if unicodedata.category(character) not in ("Mn", "Me")]
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in spacing)


@given(CELLS)
def test_nothing_but_styles_and_lines_reaches_a_terminal(cells: list[Any]) -> None:
    buffer = rendered(8, 4, *cells).buffer
    drawn = draw(buffer, colour=True)
    assert drawn.count("\n") == 4
    for line in drawn.split("\n"):
        bare = re.sub(r"\x1b\[[0-9;]*m", "", line)
        assert not {unicodedata.category(character) for character in bare} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
        assert "\x1b" not in line or line.endswith(RESET) or line.rfind(RESET) > line.rfind("\x1b[0;")
        assert columns(bare) <= 8


@given(CELLS)
def test_the_last_of_a_line_stands_in_its_own_column(cells: list[Any]) -> None:
    """Whatever stands before it in the line."""
    ours = [cell for cell in cells if cell[0] < 7]
    marks = ((9, y, "#") for y in range(5))
    lines = draw_lines(rendered(10, 5, *((x, y, symbol[:1]) for x, y, symbol, _ in ours), *marks).buffer)
    assert all(line.endswith("#") and columns(line) == 10 for line in lines)


@given(CELLS)
def test_the_same_picture_is_the_same_json_in_any_order(cells: list[Any]) -> None:
    once = {(x, y): (x, y, symbol, look) for x, y, symbol, look in cells}.values()
    first, second = rendered(10, 5, *once), rendered(10, 5, *reversed(list(once)))
    assert json.dumps(describe_rendering(first)) == json.dumps(describe_rendering(second))


def test_the_work_follows_the_painted_cells_and_not_the_screen() -> None:
    """A cell in the last column of each row: the gaps between cells are not walked through."""
    made: list[int] = []
    for width in (100, 60_000):
        cells = [[{"x": width - 1, "y": y}, {"symbol": "x"}] for y in range(10)]
        value = {"width": width, "height": 10, "cells": cells}
        buffer = read_rendering({"buffer": value}, Size(width, 10)).buffer
        made.append(sum(map(len, _rows(buffer, None))))
        assert draw_lines(buffer)[9] == " " * (width - 1) + "x"
    assert made == [20, 20]
