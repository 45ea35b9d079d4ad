"""The command line of an entry that `runner wrap` has wrapped: `runner run --wrapped JSON … -- OLD ARGV`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sandbox.value import NamedTuple

_PROGRAM = "runner"
_VERB = "run"
_MARK = "--wrapped"
_END = "--"


class Unwrapped(NamedTuple):
    program: str  # the path of the runner, as written
    options: tuple[str, ...]  # of `runner run`, as written
    argv: tuple[str, ...]  # what stood there before: the command, then its arguments


def unwrapped(argv: Sequence[str]) -> Unwrapped | None:
    """The parts of a wrapped command line. None: it is none, or nothing stands behind its `--`."""
    words = tuple(argv)
    if words[1:2] != (_VERB,) or os.path.basename(words[0]) != _PROGRAM or _END not in words:
        return None
    end = words.index(_END)
    options, old = words[2:end], words[end + 1 :]
    marked = any(word == _MARK or word.startswith(_MARK + "=") for word in options)
    return Unwrapped(words[0], options, old) if marked and old else None
