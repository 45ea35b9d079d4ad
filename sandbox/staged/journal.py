"""The journal of an application: what a killed one leaves in the folder, and what the application itself has
changed there, which is nobody else's change.

Each line is one JSON list, and the file only grows. A line that is not whole, because its writer was killed,
counts for nothing.

    ["drafts", FOLDER, NAME, INODE]      the folder of drafts at the top of a staged folder
    ["draft", FOLDER, PATH, BEFORE]      the file at PATH is made or removed; BEFORE: identity of the old one
    ["folder", FOLDER, PATH]             the same of a new folder
    ["changed", FOLDER, PATH, TIME]      the change time of a folder in which something was done; SOMEBODYS if
                                         somebody else had changed it before
    ["other", INODE, TIME]               and of a file that lost one of its names
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from sandbox.files import write_all
from sandbox.staged.store import Changeset

SOMEBODYS = -1  # no change time
_LONGEST = 64 << 20


class Pending(NamedTuple):
    number: int
    path: str
    before: tuple[int, int, int] | None = None
    is_folder: bool = False


class JournalFacts(NamedTuple):
    """What a journal says. By the number of a folder."""

    drafts: Mapping[int, tuple[str, int]]
    pending: Pending | None  # the last draft that was begun
    changed: Mapping[tuple[int, str], int]
    others: Mapping[int, int]


NONE = JournalFacts({}, None, {}, {})


class Journal:
    def __init__(self, changeset: Changeset) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(changeset.journal, flags, 0o600)
        write_all(self._fd, b"\n")  # behind a line that is not whole

    def close(self) -> None:
        os.close(self._fd)

    def note(self, *entry: object) -> None:
        write_all(self._fd, json.dumps(entry).encode() + b"\n")


def read_journal(changeset: Changeset) -> JournalFacts:
    try:
        with open(changeset.journal, "rb") as file:
            lines = file.read(_LONGEST).split(b"\n")
    except OSError:
        return NONE
    drafts: dict[int, tuple[str, int]] = {}
    pending: Pending | None = None
    changed: dict[tuple[int, str], int] = {}
    others: dict[int, int] = {}
    most = len(changeset.folders)
    for line in lines:
        match _parsed(line):
            case ["drafts", int(number), str(name), int(inode)] if 0 <= number < most and "/" not in name:
                drafts[number] = name, inode
            case ["draft", int(number), str(path), None] if 0 <= number < most:
                pending = Pending(number, path)
            case ["folder", int(number), str(path)] if 0 <= number < most:
                pending = Pending(number, path, is_folder=True)
            case ["draft", int(number), str(path), [int(inode), int(time), int(size)]] if 0 <= number < most:
                pending = Pending(number, path, (inode, time, size))
            case ["changed", int(number), str(path), int(time)]:
                known = changed.get((number, path))
                changed[number, path] = SOMEBODYS if known == SOMEBODYS else time
            case ["other", int(inode), int(time)]:
                others[inode] = time
    return JournalFacts(drafts, pending, changed, others)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
