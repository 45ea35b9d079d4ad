"""What people read on stderr."""

from __future__ import annotations

import sys

from runner.launch.report import explained
from runner.launch.stages import Stage
from runner.outcome import Outcome
from sandbox.document.diagnostic import printable
from sandbox.spec import Note


def warn(text: str) -> None:
    print(f"runner: {printable(text)}", file=sys.stderr)


def note(note: Note) -> None:
    warn("; ".join(text for text in (note.message, note.hint) if text))


def failure(stage: Stage | None, outcome: Outcome) -> None:
    print("\n".join(explained(stage, outcome)), file=sys.stderr)
