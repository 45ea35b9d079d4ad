"""The program that hosts are to start: `runner`, by the path that people have."""

from __future__ import annotations

import os
import sys
from shutil import which


def runner_path() -> str:
    """A link stays a link: what it leads to changes with every update. Empty: there is none."""
    given = sys.argv[0]
    candidates = (
        given if "/" in given else which(given) or "",
        os.path.join(os.path.dirname(sys.executable), "runner"),
        which("runner") or "",
    )
    for candidate in candidates:
        path = os.path.abspath(candidate) if candidate else ""
        if os.path.basename(path) != "runner" or not os.path.isfile(path) or not os.access(path, os.X_OK):
            continue
        if path.isprintable() and not any(c in path for c in "${}"):  # a host would fill something in
            return path
    return ""


def is_this_runner(command: str, program: str) -> bool:
    """Whether an absolute path is, word for word, the one that `wrap` writes, or the real one of the same
    file. Any other link may lead elsewhere at the next start, and whoever made it chose the folder that it is
    in: `runner` looks for its Python there."""
    if not program:
        return False
    real = os.path.realpath(program)
    found = os.path.abspath(which("runner") or "")  # by the person's own PATH, as pipx makes a link there
    return command in (program, real) or (command == found and os.path.realpath(found) == real)
