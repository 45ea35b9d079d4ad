"""The path of `runner` that is written into configurations."""

from __future__ import annotations

import os
import sys
from shutil import which


def runner_path() -> str:
    """The path of the runner, or ''. Links are not resolved: their targets change with every update."""
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
    """Whether an absolute path is exactly the one that `wrap` writes, or its real path. Any other link may
    lead elsewhere at the next start, and its author chose the folder in which `runner` looks for its
    Python."""
    if not program:
        return False
    real = os.path.realpath(program)
    found = os.path.abspath(which("runner") or "")  # by the person's own PATH, as pipx makes a link there
    return command in (program, real) or (command == found and os.path.realpath(found) == real)
