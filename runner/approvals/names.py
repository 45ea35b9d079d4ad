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
from collections.abc import Mapping, Sequence

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


_Row = tuple[str, NamePlace]


def place_at(path: str, server: str | None = None) -> NamePlace:
    """A link to the newest version of a plugin is one place, wherever it leads."""
    folder, name = os.path.split(os.path.abspath(path))
    return NamePlace(os.path.join(os.path.realpath(folder), name), server or "")


class NameRecord:
    def __init__(self, path: str | None) -> None:
        """`path`: a file in a folder of the caller's own, which is made. None: names are remembered as long
        as this object lives."""
        self.path = path
        self._given: dict[str, NamePlace] = {}  # by this object: they count also if the file cannot be used

    def holders(self, configured: Sequence[str]) -> dict[str, NamePlace]:
        """The place of each name, of those at or below the configured paths. Raises ApprovalsUnusable."""
        found: dict[str, set[NamePlace]] = {}
        for name, place in self._below(configured):
            found.setdefault(name, set()).add(place)
        # Two: they were recorded for two configurations, which are one by now.
        held = {name: next(iter(places)) for name, places in found.items() if len(places) == 1}
        return {**held, **self.given}

    @property
    def given(self) -> Mapping[str, NamePlace]:
        """What this object remembers without its file."""
        return self._given

    def keep(self, names: Mapping[str, NamePlace], configured: Sequence[str]) -> None:
        """From now on these places have these names. Raises ApprovalsUnusable if that cannot be written; as
        long as this object lives it counts all the same."""
        self._given.update(names)
        if self.path is None or self._with(names, configured) == self._read():
            return
        with locked_folder(os.path.dirname(self.path), "the folder of the record of names"):
            rows = self._with(names, configured)  # another process may have written meanwhile
            document = {"version": _VERSION, "names": [[name, *place] for name, place in rows]}
            raw = json.dumps(document, indent=0).encode() + b"\n"
            if len(rows) > _MOST_NAMES or len(raw) > _MOST_BYTES:
                message = f"more than {_MOST_NAMES} names, or {_MOST_BYTES >> 20} MiB, are in {self.path}"
                raise ApprovalsUnusable(message, self._remedy())
            with open_folder(os.path.dirname(self.path)) as directory:
                replace_file(directory, os.path.basename(self.path), raw, sync=True)

    def _with(self, names: Mapping[str, NamePlace], configured: Sequence[str]) -> list[_Row]:
        """The rows of the file, with these."""
        rows = self._read()
        own = set(self._below(configured))
        # Of others, not those whose whole folder is gone: nothing is being replaced there.
        others = (row for row in rows if row not in own and os.path.lexists(os.path.dirname(row[1].path)))
        return sorted({*others, *(row for row in own if row[0] not in names), *names.items()})

    def _below(self, configured: Sequence[str]) -> list[_Row]:
        paths = {place_at(path).path for path in configured} | {os.path.realpath(path) for path in configured}
        folders = tuple(os.path.join(path, "") for path in paths)
        return [row for row in self._read() if row[1].path in paths or row[1].path.startswith(folders)]

    def _remedy(self) -> str:
        return f"look at it, and remove it (rm {self.path}): each plugin then has its name anew"

    def _read(self) -> list[_Row]:
        if self.path is None or not look.lexists(self.path):
            return []
        raw = read_bytes(self.path, _WHAT, _MOST_BYTES, self._remedy())
        try:
            data = json.loads(raw)
            if data["version"] != _VERSION:
                raise ValueError("it is of another version")
            rows = [tuple(row) for row in data["names"]]
            if not all(len(row) == 3 and all(isinstance(each, str) for each in row) for row in rows):
                raise ValueError("a row of it is not a name, a path and a server")
            return [(name, NamePlace(path, server)) for name, path, server in rows]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{_WHAT} {self.path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, self._remedy()) from None
