"""A change as text for people: one line, and what is different in it."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterator

from sandbox.document.diagnostic import printable
from sandbox.paths.walk import close, walk_below
from sandbox.staged.layer import Change, open_folder, open_own
from sandbox.staged.store import Changeset
from sandbox.units import format_size

_MOST_BYTES = 1 << 20  # of a file that is compared line by line
_MOST_LINES = 2000  # that are shown of one file
# That are compared: lines of both, and pairs of equal ones. The time grows with their product.
_MOST_COMPARED, _MOST_PAIRS = 20_000, 100_000
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def line_of(change: Change, changeset: Changeset) -> str:
    """A, M or D, the path, sizes and modes, and why it is not applied."""
    path = f"{changeset.folders[change.folder].real.rstrip('/')}/{change.path}"
    path += "/" if change.kind == "folder" else ""
    told = [_sizes(change), _modes(change), change.kind if change.kind in ("link", "other") else ""]
    rest = ", ".join(filter(None, told))
    line = f"{change.act} {printable(path)}" + (f"  ({rest})" if rest else "")
    return f"{line}  {change.rule}: {printable(change.reason)}" if change.rule else line


def _sizes(change: Change) -> str:
    if change.kind != "file":
        return ""
    if change.act == "M" and change.size != change.size_before:
        return f"{format_size(change.size_before)} -> {format_size(change.size)}"
    return format_size(change.size)


def _modes(change: Change) -> str:
    if change.act == "M" and change.mode != change.mode_before and change.kind != "link":
        return f"mode {change.mode_before:o} -> {change.mode:o}"
    return (
        f"mode {change.mode:o}"
        if change.act == "A" and change.mode & 0o7111 and change.kind == "file"
        else ""
    )


def difference(change: Change, changeset: Changeset) -> Iterator[str]:
    """Unified lines. A file that is no text, or too long, is one line."""
    if change.kind not in ("file", "link") or change.rule == "unreadable":
        return
    with open_folder(changeset, change.folder) as (layer, folder):
        new = b"" if change.act == "D" else _content(layer, change)
        old = b"" if change.act == "A" else _content(folder, change)
    if new is None or old is None:
        yield "(too long to be shown)"
        return
    if b"\0" in new or b"\0" in old:
        yield "(not text)"
        return
    path, before, after = printable(change.path), _lines(old), _lines(new)
    counts = Counter(after)
    pairs = sum(counts[line] for line in before)
    if len(before) + len(after) > _MOST_COMPARED or pairs > _MOST_PAIRS:
        yield "(too many lines to be compared)"
        return
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")
    for number, line in enumerate(lines):
        if number == _MOST_LINES:
            yield f"(only the first {_MOST_LINES} lines are shown)"
            return
        yield printable(line.replace("\t", "    "))


def _lines(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    return lines[:-1] if not lines[-1] else [*lines[:-1], f"{lines[-1]} (no end of line)"]


def _content(root: int, change: Change) -> bytes | None:
    """None: it is too long. What is gone by now is empty."""
    above, _, name = change.path.rpartition("/")
    steps = []
    try:
        steps = walk_below(root, above)
        if change.kind == "link":
            return os.fsencode(os.readlink(name, dir_fd=steps[-1].fd))
        with open(open_own(name, _READ, steps[-1].fd), "rb") as file:
            found = file.read(_MOST_BYTES + 1)
    except OSError:
        return b""
    finally:
        close(steps)
    return found if len(found) <= _MOST_BYTES else None
