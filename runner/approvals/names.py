"""Which place has which name: what a daemon, a worker or a gateway has once given out.

A plugin chooses its name itself, in its manifest, and calls, deliveries, secrets, tools and what people allow
for them go by that name. So a name stays with the place that had it first, also while nothing is at that
place, and after a restart. Only the operator's settings give it to another one.

One file may serve several processes with different configurations. For each only what lies below its own
configuration counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence

from runner.approvals.files import locked_folder, open_folder, read_bytes
from runner.approvals.record import ApprovalsUnusable
from sandbox import look
from sandbox.files import replace_file
from sandbox.speed.value import NamedTuple

_VERSION = 1
_WHAT = "the record of names"
_MOST_NAMES = 20_000
_MOST_BYTES = 16 << 20


class NamePlace(NamedTuple):
    """Where a plugin is."""

    path: str  # of its folder or file. The folder above is a real path; the last part may be a link
    server: str = ""  # of a configuration that lists several

    def __str__(self) -> str:
        return f"{self.path} ({self.server})" if self.server else self.path


class _NameRow(NamedTuple):
    name: str
    place: NamePlace
    moved: bool = False  # the name was another place's before, or the place had another name


def place_at(path: str, server: str | None = None) -> NamePlace:
    """A link to the newest version of a plugin is one place, wherever it leads."""
    folder, name = os.path.split(os.path.abspath(path))
    return NamePlace(os.path.join(os.path.realpath(folder), name), server or "")


class NameRecord:
    def __init__(self, path: str | None, configured: Sequence[str]) -> None:
        """`path`: a file in a folder of the caller's own, which is made. None: names are remembered as long
        as this object lives. `configured`: what is not at or below one of these paths does not count."""
        self.path = path
        self._configured = configured
        self._given: dict[str, _NameRow] = {}  # by this object: they count also if the file cannot be used

    def holders(self) -> dict[str, set[NamePlace]]:
        """The places that each name belongs to: several, if it was given away in two configurations that are
        one by now. Raises ApprovalsUnusable."""
        found: dict[str, set[NamePlace]] = {}
        for row in self._own(self._read()):
            found.setdefault(row.name, set()).add(row.place)
        return {**found, **self.given()}

    def given(self) -> dict[str, set[NamePlace]]:
        """Those that this object gave, which it remembers without its file."""
        return {name: {row.place} for name, row in self._given.items()}

    def moved(self, name: str) -> bool:
        """Whether a name that this object gave was another place's before, or its place had another name."""
        return name in self._given and self._given[name].moved

    def keep(self, names: Mapping[str, NamePlace], decided: Container[str]) -> None:
        """From now on these places have these names. `decided`: names that settings give also to others than
        their holders. Raises ApprovalsUnusable if that cannot be written; as long as this object lives it
        counts all the same."""
        before = self._read()
        rows = self._with(before, names, decided)
        self._given |= {row.name: row for row in rows if names.get(row.name) == row.place}
        if self.path is None or rows == before:
            return
        with locked_folder(os.path.dirname(self.path), "the folder of the record of names"):
            rows = self._with(self._read(), names, decided)  # another process may have written meanwhile
            listed = [[row.name, *row.place, row.moved] for row in rows]
            raw = json.dumps({"version": _VERSION, "names": listed}, indent=0).encode() + b"\n"
            if len(rows) > _MOST_NAMES or len(raw) > _MOST_BYTES:
                message = f"more than {_MOST_NAMES} names, or {_MOST_BYTES >> 20} MiB, are in {self.path}"
                raise ApprovalsUnusable(message, self._remedy())
            with open_folder(os.path.dirname(self.path)) as directory:
                replace_file(directory, os.path.basename(self.path), raw, sync=True)

    def _with(
        self, rows: Sequence[_NameRow], names: Mapping[str, NamePlace], decided: Container[str]
    ) -> list[_NameRow]:
        """The rows of the file, with these names."""
        own = set(self._own(rows))
        # Of others, not those whose whole folder is gone: nothing is being replaced there.
        others = {row for row in rows if os.path.lexists(os.path.dirname(row.place.path))} - own
        known = own | {*self._given.values()}
        kept = {row for row in own if names.get(row.name, row.place) == row.place or row.name not in decided}
        held = {row.name for row in kept}
        for name, place in names.items():
            if name not in held:
                moved = any((row.name == name) != (row.place == place) for row in known)
                same = self._given.get(name)
                kept.add(same if same is not None and same.place == place else _NameRow(name, place, moved))
        return sorted(others | kept)

    def _own(self, rows: Sequence[_NameRow]) -> list[_NameRow]:
        paths = {place_at(path).path for path in self._configured}
        paths |= {os.path.realpath(path) for path in self._configured}
        folders = tuple(os.path.join(path, "") for path in paths)
        return [row for row in rows if row.place.path in paths or row.place.path.startswith(folders)]

    def _remedy(self) -> str:
        return f"look at it, and remove it (rm {self.path}): each plugin then has its name anew"

    def _read(self) -> list[_NameRow]:
        if self.path is None or not look.lexists(self.path):
            return []
        raw = read_bytes(self.path, _WHAT, _MOST_BYTES, self._remedy())
        try:
            data = json.loads(raw)
            if data["version"] != _VERSION:
                raise ValueError("it is of another version")
            rows = data["names"]
            if not all([type(each) for each in row] == [str, str, str, bool] for row in rows):
                raise ValueError("a row of it is not a name, a path, a server, and whether it was moved")
            return [_NameRow(name, NamePlace(path, server), moved) for name, path, server, moved in rows]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{_WHAT} {self.path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, self._remedy()) from None
