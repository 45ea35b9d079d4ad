"""Diagnostics as lines for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from sandbox.document.diagnostic import Diagnostic, printable


def print_diagnostics(diagnostics: Iterable[Diagnostic], stream: TextIO | None = None) -> None:
    """One line each, the hint indented below."""
    out = stream or sys.stderr
    for diagnostic in diagnostics:
        print(
            f"{diagnostic.place}: {diagnostic.severity}: {diagnostic.rule}: {printable(diagnostic.message)}",
            file=out,
        )
        if diagnostic.hint:
            print(f"    {printable(diagnostic.hint)}", file=out)
