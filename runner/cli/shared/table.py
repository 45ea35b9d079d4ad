"""Rows for people, in columns."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.document.diagnostic import printable


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = [[printable(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
