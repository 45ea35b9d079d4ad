"""What people read on stderr."""

from __future__ import annotations

import sys

from runner.launch.prepare import Prepared
from runner.launch.report import explained
from runner.outcome import Outcome
from sandbox.document.diagnostic import printable
from sandbox.spec import Note


def warn(text: str) -> None:
    print(f"runner: {printable(text)}", file=sys.stderr)


def note(note: Note) -> None:
    warn("; ".join(text for text in (note.message, note.hint) if text))


def failure(prepared: Prepared, outcome: Outcome) -> None:
    print("\n".join(explained(prepared, outcome)), file=sys.stderr)
