"""Answers to plugin/render, and what is wrong with them."""

from __future__ import annotations

import copy
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts.ainb.buffer import PLAIN, Color, RenderFault, Size, Style, read_rendering

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


def test_what_may_be_left_out() -> None:
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


def test_what_was_clipped_is_counted() -> None:
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
