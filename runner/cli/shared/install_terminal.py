"""What `runner install` shows and asks on a terminal while it works."""

from __future__ import annotations

import shutil
import sys
import time

from runner.cli.shared.text import say
from runner.outcome import USAGE_ERROR

_FAILED = 1
_BAR = 24  # characters


class ProgressBar:
    """Which of several is under way: a bar on a terminal, a line elsewhere."""

    def __init__(self, number: int, count: int, label: str) -> None:
        self._begin = time.monotonic()
        self._bar = sys.stderr.isatty()
        done = round(_BAR * (number - 1) / count)
        self._text = f"[{'#' * done}{'.' * (_BAR - done)}] {number} of {count}: {label}"
        if not self._bar:
            say(f"[{number}/{count}] {label} …", sys.stdout)
        sys.stdout.flush()
        self.tick()

    def tick(self) -> None:
        if self._bar:
            width = max(shutil.get_terminal_size().columns - 1, 20)
            line = f"{self._text}, {time.monotonic() - self._begin:.0f} s"
            sys.stderr.write(f"\r\033[K{line[:width]}")
            sys.stderr.flush()

    def end(self) -> None:
        """Take the bar away."""
        if self._bar:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str) -> int | None:
    """Ask the person. Returns None for yes, else the exit status."""
    if not has_terminal():
        say("runner install: there is no terminal to ask on; nothing was changed; add --yes")
        return USAGE_ERROR
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return None
    say("Nothing was changed.")
    return _FAILED
