"""What a plugin answers to plugin/render: a sparse grid of cells, checked and clipped.

A wrong type anywhere is a fault of this render and of nothing else. Cells outside the grid are dropped: of
the plugin's own size and of the viewport that was asked for the smaller counts. So no more cells are kept
than were asked for. Of two cells at one place the later counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.ainb.glyph import Glyph, make_glyph
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

MOST_U8, MOST_U16 = 0xFF, 0xFFFF

_KNOWN = "its answer to plugin/render cannot be drawn"


class RenderFault(ValueError):
    """Why an answer is no picture: a sentence that names the place in the answer."""


class Size(NamedTuple):
    width: int  # columns
    height: int  # rows


class Color(NamedTuple):
    red: int
    green: int
    blue: int


class Style(NamedTuple):
    fg: Color | None = None  # None: the terminal's own
    bg: Color | None = None
    modifier: int = 0  # bits; runner/contracts/ainb/draw.py has their meanings


class Cell(NamedTuple):
    glyph: Glyph
    style: Style


class Buffer(NamedTuple):
    size: Size
    cells: Mapping[tuple[int, int], Cell]  # by row and column


class Rendering(NamedTuple):
    buffer: Buffer
    redraw: bool  # the plugin wants to be asked again soon
    captures_text: bool  # keys are text for the plugin
    claimed: Size  # by the plugin, which may differ from what was asked
    painted: int  # cells in the answer
    clipped: int  # of these, outside


PLAIN = Style()


def read_rendering(value: Any, viewport: Size) -> Rendering:
    """The answer to a render of `viewport`. Raises RenderFault."""
    answer = _table(value, "result")
    buffer = _table(_member(answer, "buffer", "result"), "buffer")
    claimed = Size(
        _number(_member(buffer, "width", "buffer"), MOST_U16, "buffer.width"),
        _number(_member(buffer, "height", "buffer"), MOST_U16, "buffer.height"),
    )
    size = Size(min(claimed.width, viewport.width), min(claimed.height, viewport.height))
    cells = _member(buffer, "cells", "buffer")
    if type(cells) is not list:
        raise _wrong("buffer.cells", "a list", cells)
    kept, clipped = _read_cells(cells, size)
    redraw, captures_text = _flag(answer, "redraw"), _flag(answer, "captures_text")
    return Rendering(Buffer(size, kept), redraw, captures_text, claimed, len(cells), clipped)


def _read_cells(cells: list[Any], size: Size) -> tuple[dict[tuple[int, int], Cell], int]:
    kept: dict[tuple[int, int], tuple[str, Style]] = {}
    styles: dict[tuple[Any, ...], Style] = {(None, None, 0): PLAIN}  # most cells share one
    clipped = 0
    width, height = size
    for number, pair in enumerate(cells):
        # This loop runs up to 200 thousand times. The places in the answer are spelled out only for a fault.
        try:
            coord, look = pair
            x, y, symbol = coord["x"], coord["y"], look["symbol"]
        except (TypeError, ValueError, KeyError):
            raise _misshapen(pair, number) from None
        if (
            type(pair) is not list
            or type(coord) is not dict
            or type(look) is not dict
            or type(x) is not int
            or type(y) is not int
            or type(symbol) is not str
            or not 0 <= x <= MOST_U16
            or not 0 <= y <= MOST_U16
        ):
            raise _misshapen(pair, number)
        style = _read_style(look, number, styles)
        if x < width and y < height:
            kept[y, x] = symbol, style
        else:
            clipped += 1
    # Only now, because a plugin can paint one place any number of times.
    return {place: Cell(make_glyph(symbol), style) for place, (symbol, style) in kept.items()}, clipped


def _read_style(look: dict[str, Any], number: int, styles: dict[tuple[Any, ...], Style]) -> Style:
    modifier = look.get("modifier", 0)
    try:
        key = _channels(look.get("fg")), _channels(look.get("bg")), modifier
        if type(modifier) is not int or not 0 <= modifier <= MOST_U16:
            raise TypeError
    except (TypeError, KeyError):
        raise _miscoloured(look, number) from None
    style = styles.get(key)
    if style is None:
        fg, bg = (None if channels is None else Color(*channels) for channels in key[:2])
        style = styles[key] = Style(fg, bg, modifier)
    return style


def _channels(color: Any) -> tuple[int, int, int] | None:
    if color is None:
        return None
    r, g, b = channels = color["r"], color["g"], color["b"]
    if not type(r) is type(g) is type(b) is int:  # True would be an int, too
        raise TypeError
    if not (0 <= r <= MOST_U8 and 0 <= g <= MOST_U8 and 0 <= b <= MOST_U8):
        raise TypeError
    return channels


def _flag(answer: dict[str, Any], name: str) -> bool:
    value = answer.get(name, False)
    if type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


# --- faults -------------------------------------------------------------------------------------------------


def _misshapen(pair: Any, number: int) -> RenderFault:
    """The first fault of a cell that has one, apart from its style."""
    place = f"buffer.cells[{number}]"
    try:
        if type(pair) is not list or len(pair) != 2:
            return _wrong(place, "a list of a position and a cell", pair)
        coord, look = _table(pair[0], f"{place}[0]"), _table(pair[1], f"{place}[1]")
        for name in "xy":
            _number(_member(coord, name, f"{place}[0]"), MOST_U16, f"{place}[0].{name}")
        return _wrong(f"{place}[1].symbol", "a string", _member(look, "symbol", f"{place}[1]"))
    except RenderFault as fault:
        return fault


def _miscoloured(look: dict[str, Any], number: int) -> RenderFault:
    """The first fault of a style that has one."""
    place = f"buffer.cells[{number}][1]"
    try:
        for name in ("fg", "bg"):
            color = look.get(name)
            if color is not None:
                table = _table(color, f"{place}.{name}")
                for channel in "rgb":
                    shade = _member(table, channel, f"{place}.{name}")
                    _number(shade, MOST_U8, f"{place}.{name}.{channel}")
        return _wrong(f"{place}.modifier", f"an integer from 0 to {MOST_U16}", look.get("modifier"))
    except RenderFault as fault:
        return fault


def _table(value: Any, place: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(place, "an object", value)
    return value


def _member(table: dict[str, Any], name: str, place: str) -> Any:
    if name not in table:
        raise RenderFault(f"{_KNOWN}: {place} has no {name}")
    return table[name]


def _number(value: Any, most: int, place: str) -> int:
    if type(value) is not int or not 0 <= value <= most:  # True is an int, too
        raise _wrong(place, f"an integer from 0 to {most}", value)
    return value


def _wrong(place: str, what: str, value: Any) -> RenderFault:
    return RenderFault(f"{_KNOWN}: {place} is {_shown(value)}, and has to be {what}")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the string {quoted(value, 20)}"
    if isinstance(value, int | float):
        return f"{value:.20g}" if isinstance(value, float) else str(value)
    return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
