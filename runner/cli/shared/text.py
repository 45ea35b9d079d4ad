"""Lines for people: warnings, notes, diagnostics, and how long a line may be on a terminal."""

from __future__ import annotations

import os
import sys
import time

from sandbox.document.diagnostic import Diagnostic, printable
from sandbox.spec import Note
from sandbox.speed.scopes import suppress
from sandbox.speed.typed import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from runner.launch.stages import Stage
    from runner.outcome import Outcome

# A narrower terminal gets lines of this width: below it, wrapping helps nobody.
_NARROWEST = 40


def warn(text: str) -> None:
    say(warning(text))


def warning(text: str) -> str:
    return f"runner: {printable(text)}"


def note(note: Note) -> None:
    warn(note_text(note))


def note_text(note: Note) -> str:
    return "; ".join(text for text in (note.message, note.hint) if text)


def failure(stage: Stage | None, outcome: Outcome) -> None:
    from runner.launch.report import explain_failure

    say("\n".join(explain_failure(stage, outcome)))


def print_diagnostics(diagnostics: Iterable[Diagnostic], stream: TextIO | None = None) -> None:
    """One line for each, with its hint indented below."""
    for each in diagnostics:
        say(f"{each.place}: {each.severity}: {each.rule}: {printable(each.message)}", stream)
        if each.hint:
            say(f"    {printable(each.hint)}", stream)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines, by default to stderr. On a terminal they are wrapped between words."""
    out = stream or sys.stderr
    if out is sys.stderr and sys.stdout is not None:
        # What was printed before comes first, also where both lead into one pipe.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    print(fit(text, out), file=out)


def ask_person(question: str) -> bool:
    """Ask on the terminal. Returns whether the answer was yes."""
    sys.stdout.flush()
    sys.stderr.write(f"\n{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def day(when: float) -> str:
    """The local date of a time in seconds since 1970. A plugin may have set it to anything."""
    try:
        return time.strftime("%Y-%m-%d", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "-"


def fit(text: str, stream: TextIO) -> str:
    """The text for this stream: unchanged where a program reads it, wrapped where a person does."""
    width = terminal_width(stream)
    return text if width is None else wrap(text, width)


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal behind a stream. None: it is no terminal, or has no size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # a pipe, a closed stream, an object of the caller's
        return None


def wrap(text: str, width: int) -> str:
    return "\n".join(part for line in text.split("\n") for part in _wrapped(line, max(width, _NARROWEST)))


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    import textwrap

    own = len(line) - len(line.lstrip(" "))
    indent = _hanging_indent(line, width)
    # A word that is too long, such as a path, stays whole: people copy it.
    parts = textwrap.wrap(
        line[own:],
        width,
        initial_indent=" " * own,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
    return parts or [line]


def _hanging_indent(line: str, width: int) -> int:
    """Where the next lines begin: below the last column of a table, else a little right of the first line."""
    own = len(line) - len(line.lstrip(" "))
    gap = line.rfind("  ", own, width * 2 // 3)
    return gap + 2 if gap > own else own + 4
