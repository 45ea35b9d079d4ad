"""What a plugin answers to plugin/render: a sparse grid of cells, checked, clipped and drawn.

A wrong type anywhere is a fault of this render and of nothing else. Cells outside the grid are dropped: of
the plugin's own size and of the viewport that was asked for the smaller counts. So no more cells are kept
than were asked for. Of two cells at one place the later counts.

A plugin chooses the text of a cell. It must not steer the terminal, and it must not shift the rest of its
line. So characters that steer become U+FFFD, and what terminals draw with different widths is reduced: of an
emoji sequence the first emoji stays.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from sandbox.document.diagnostic import quoted

# --- the text of one cell -----------------------------------------------------------------------------------

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


# --- the grid -----------------------------------------------------------------------------------------------

MOST_U8, MOST_U16 = 0xFF, 0xFFFF

_KNOWN = "its answer to plugin/render cannot be drawn"


class RenderFault(ValueError):
    """Why an answer cannot be drawn: a sentence that names the place in the answer."""


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
    modifier: int = 0  # bits: BOLD, DIM, …


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


# --- drawing ------------------------------------------------------------------------------------------------

# Bits of a cell's modifier, and the parameter of SGR (ECMA-48) for each. Other bits mean nothing.
BOLD, DIM, ITALIC, UNDERLINED, SLOW_BLINK, RAPID_BLINK, REVERSED, HIDDEN, CROSSED_OUT = (
    1 << bit for bit in range(9)
)
_SGR: Mapping[int, str] = {1 << bit: str(bit + 1) for bit in range(9)}
_RESET = "\x1b[0m"


def wants_colour(environ: Mapping[str, str], is_terminal: bool) -> bool:
    """See https://no-color.org: the variable counts if it is not empty."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def draw(buffer: Buffer, *, colour: bool, columns: int | None = None) -> str:
    """One line for each row, each with its newline. Blanks at the end of a line are left out.

    `columns`: of the terminal. What is further right is cut off, because a wrapped line is no row.
    """
    line = _draw_colour if colour else _draw_plain
    return "".join(line(row) + "\n" for row in _rows(buffer, columns))


def draw_lines(buffer: Buffer) -> list[str]:
    return [_draw_plain(row) for row in _rows(buffer, None)]


def describe_rendering(rendering: Rendering) -> dict[str, Any]:
    """The rendering as JSON: cells as on the wire, clipped, row by row, without duplicates."""
    buffer = rendering.buffer
    cells = [
        [{"x": x, "y": y}, _describe_cell(cell)] for (y, x), cell in sorted(buffer.cells.items(), key=_place)
    ]
    return {
        "width": buffer.size.width,
        "height": buffer.size.height,
        "lines": draw_lines(buffer),
        "cells": cells,
        "clipped": rendering.clipped,
        "redraw": rendering.redraw,
        "captures_text": rendering.captures_text,
    }


def _place(item: tuple[tuple[int, int], Cell]) -> tuple[int, int]:
    return item[0]


def _describe_cell(cell: Cell) -> dict[str, Any]:
    style = cell.style
    described: dict[str, Any] = {"symbol": cell.glyph.text}
    for name, color in (("fg", style.fg), ("bg", style.bg)):
        if color is not None:
            described[name] = {"r": color.red, "g": color.green, "b": color.blue}
    return {**described, "modifier": style.modifier}


# --- rows ---------------------------------------------------------------------------------------------------


def _rows(buffer: Buffer, columns: int | None) -> Iterator[list[Cell]]:
    """The cells of each row from left to right, up to the last one that was painted. A wide glyph hides the
    cells that it covers."""
    width = buffer.size.width if columns is None else min(columns, buffer.size.width)
    painted: dict[int, dict[int, Cell]] = {}
    for (y, x), cell in buffer.cells.items():
        if x < width:
            painted.setdefault(y, {})[x] = cell
    for y in range(buffer.size.height):
        yield _row(painted.get(y, {}), width)


def _row(painted: Mapping[int, Cell], width: int) -> list[Cell]:
    """The cells of one row. A gap is one cell of blanks, so the length depends only on the painted cells."""
    cells: list[Cell] = []
    end = 0
    for x in sorted(painted):
        if x < end:
            continue  # covered by a wide glyph
        if x > end:
            cells.append(Cell(Glyph(" " * (x - end), x - end), PLAIN))
        cell = painted[x]
        glyph = fit_glyph(cell.glyph, width - x)
        cells.append(cell if glyph is cell.glyph else Cell(glyph, cell.style))
        end = x + glyph.columns
    return cells


def _draw_plain(row: list[Cell]) -> str:
    return "".join(_visible(cell) for cell in row).rstrip(" ")


def _visible(cell: Cell) -> str:
    return " " * cell.glyph.columns if cell.style.modifier & HIDDEN else cell.glyph.text


def _draw_colour(row: list[Cell]) -> str:
    while row and row[-1].style == PLAIN and row[-1].glyph.text.isspace():
        row.pop()
    drawn: list[str] = []
    style = PLAIN
    for cell in row:
        if cell.style != style:
            style = cell.style
            drawn.append(_sgr(style))
        drawn.append(cell.glyph.text)
    # Each line stands for itself: a pager may show it alone, and a broken pipe may end after it.
    return "".join(drawn) + (_RESET if style != PLAIN else "")


def _sgr(style: Style) -> str:
    """Sets the style, whatever was set before."""
    codes = ["0", *(code for bit, code in _SGR.items() if style.modifier & bit)]
    for kind, color in (("38", style.fg), ("48", style.bg)):
        if color is not None:
            codes += [kind, "2", *map(str, color)]
    return f"\x1b[{';'.join(codes)}m"
