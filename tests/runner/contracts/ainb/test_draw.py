"""Buffers as text and as JSON."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.contracts.ainb.buffer import Rendering, Size, read_rendering
from runner.contracts.ainb.draw import _rows, describe_rendering, draw, draw_lines, wants_colour

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
