"""Which plugins somebody has stopped, and which are in quarantine: the daemon's next life keeps them so.

A hold belongs to the place that had the name, as the name itself does (runner/approvals/names.py): another
plugin that gets the name later is not held. It ends by `start` or `reset`, or by what else ends it in a
daemon that runs. The file stands beside the ledger, whose lock lets one daemon write it.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, get_args

from runner.approvals.files import open_folder, read_bytes, require_own
from runner.approvals.names import NamePlace
from runner.approvals.record import ApprovalsUnusable
from runner.lifecycle.machine import Hold
from sandbox.files import replace_file

_VERSION = 1
_WHAT = "the record of stopped plugins"
_MOST_BYTES = 16 << 20
_MOST_HOLDS = 10_000
_MOST_REASON = 500  # characters: a plugin may have written them
KEPT: tuple[Hold, ...] = ("stopped", "quarantined")


class PluginHold(NamedTuple):
    place: NamePlace
    hold: Hold
    reason: str


class HoldRecord:
    def __init__(self, path: str | None = None) -> None:
        """`path`: a file in a folder of the caller's own. None: in memory. Raises ApprovalsUnusable: without
        the file nobody knows what must not start."""
        self._path = path = None if path is None else os.path.abspath(path)
        self._holds: dict[str, PluginHold] = {}
        if path is not None and os.path.lexists(path):
            self._holds = self._read(path)

    def find(self, name: str, place: NamePlace) -> tuple[Hold, str]:
        """How the plugin of this name, at this place, is held, and why."""
        found = self._holds.get(name)
        return (found.hold, found.reason) if found is not None and found.place == place else ("", "")

    def note(self, name: str, place: NamePlace, hold: Hold, reason: str) -> bool:
        """From now on a plugin is held so. Returns whether that is new. When this returns, it survives this
        process. Raises ApprovalsUnusable if it cannot be written; in this process it counts all the same."""
        new = PluginHold(place, hold, reason[:_MOST_REASON]) if hold in KEPT else None
        if self._holds.get(name) == new:
            return False
        if new is None:
            del self._holds[name]
        else:
            self._holds[name] = new
        if self._path is not None:
            self._write(self._path)
        return True

    def _write(self, path: str) -> None:
        rows = [[name, *each.place, each.hold, each.reason] for name, each in self._holds.items()]
        raw = json.dumps({"version": _VERSION, "holds": rows}, indent=0).encode() + b"\n"
        if len(rows) > _MOST_HOLDS or len(raw) > _MOST_BYTES:
            message = f"more than {_MOST_HOLDS} plugins, or {_MOST_BYTES >> 20} MiB, are in {path}"
            raise ApprovalsUnusable(message, self._remedy())
        folder = os.path.dirname(path)
        # The next daemon would not read it there, nor start: nobody else may say what must not.
        require_own(folder, f"the folder {folder}")
        with open_folder(folder) as directory:
            replace_file(directory, os.path.basename(path), raw, sync=True)

    def _remedy(self) -> str:
        return f"look at it, and remove it (rm {self._path}): all plugins may start then"

    def _read(self, path: str) -> dict[str, PluginHold]:
        raw = read_bytes(path, _WHAT, _MOST_BYTES, self._remedy())
        try:
            data: Any = json.loads(raw)
            if data["version"] != _VERSION:
                raise ValueError("it is of another version")
            rows = data["holds"]
            if not all([type(each) for each in row] == [str] * 5 and row[3] in KEPT for row in rows):
                raise ValueError("a row of it is not a name, a path, a server, a state and why")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{_WHAT} {path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, self._remedy()) from None
        known: dict[str, Hold] = {word: word for word in get_args(Hold)}
        return {
            name: PluginHold(NamePlace(where, server), known[hold], reason)
            for name, where, server, hold, reason in rows
        }
