"""A buffer as text: in colour for a terminal, plain for a pipe, or as a JSON value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.contracts.ainb.buffer import PLAIN, Buffer, Cell, Color, Rendering, Style
from runner.contracts.ainb.glyph import Glyph, fit_glyph

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
    """As JSON: cells as on the wire, but clipped, in the order of reading, and each place once."""
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
    """Its length is the number of painted cells, however far apart they are: a gap is one cell of blanks."""
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
            codes += [kind, "2", *_channels(color)]
    return f"\x1b[{';'.join(codes)}m"


def _channels(color: Color) -> list[str]:
    return [str(channel) for channel in color]
