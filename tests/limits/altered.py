"""A runner that executes test code first: to shorten its waits, or to fail at a chosen point."""

from __future__ import annotations

from dataclasses import replace

from tests.conftest import Caller

_PROGRAM = """\
import sys
sys.argv = ["runner", *sys.argv[3:]]  # as `python -m runner` would have it
{change}
from runner.cli import entry
entry()
"""


def altered(caller: Caller, change: str) -> Caller:
    """`caller`, whose runner first executes `change`."""
    program = _PROGRAM.format(change=change)
    return replace(caller, name=f"{caller.name}, altered", python=(*caller.python, "-c", program))
