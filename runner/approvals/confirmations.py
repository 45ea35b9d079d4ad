"""Which tools of a plugin a person wants to be asked about, and where that person has said yes for good.

Records are beside the approvals, by the same rules. Each file is about one plugin, by its name in the record
of tools (tools.py).
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from runner.approvals.files import locked_folder, open_folder, read_bytes
from runner.approvals.record import ApprovalsUnusable, approvals_folder
from sandbox.cache import fingerprint
from sandbox.document.diagnostic import quoted
from sandbox.files import replace_file

# Words among the patterns. No public name of a tool is one of them.
DESTRUCTIVE = "destructive"  # tools that do not say that they destroy nothing
HOSTS = "hosts"  # hosts that a plugin tried to reach, and that nobody has allowed
MOST_PATTERNS = 100
MOST_LINES = 20  # of the arguments of a call, as a person is shown them
MOST_LINE = 200  # characters of one of them
_MOST_PATTERN = 200  # characters
_MOST_KEY = 60  # characters of the name of an argument
_WORD = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_MOST_ALWAYS = 1000
_FOLDER = "confirmations"  # in the folder of approvals
_VERSION = 1
_ENDING = ".json"
_MOST_BYTES = 1 << 20
_WHAT, _FOLDER_WHAT = "the record of confirmations", "the folder of confirmations"


class Confirmations(NamedTuple):
    """Of one plugin."""

    patterns: tuple[str, ...] = ()  # of its own names of tools
    always: tuple[tuple[str, str], ...] = ()  # clients and tools that need no question any more


def pattern_fault(pattern: str) -> str:
    """Why this cannot be a pattern, as the second half of a sentence; '' if it can."""
    if not 0 < len(pattern) <= _MOST_PATTERN or not pattern.isprintable():
        return f"is not a text of 1 to {_MOST_PATTERN} characters that can be printed"
    return ""


def needs_confirmation(patterns: Iterable[str], name: str, annotations: object) -> bool:
    """`annotations`: of the tool, which are its plugin's own words. Where they say nothing, the defaults of
    the protocol count: a tool that is not read-only may destroy something."""
    for pattern in patterns:
        if pattern == DESTRUCTIVE and may_destroy(annotations):
            return True
        if fnmatch.fnmatchcase(name, pattern):
            return True
    return False


def may_destroy(annotations: object) -> bool:
    hints = annotations if isinstance(annotations, Mapping) else {}
    return hints.get("readOnlyHint") is not True and hints.get("destructiveHint") is not False


def argument_lines(arguments: Any, schema: object = None) -> tuple[str, ...]:
    """The arguments of a call for people: one line for each, with nothing that acts on a terminal, and with
    the size of what is cut. No long argument pushes another one out of sight, and none that the tool does not
    know one that it knows. `schema`: of the tool's input."""
    given = arguments if isinstance(arguments, Mapping) else {"": arguments}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    known = properties if isinstance(properties, Mapping) else {}
    lines = []
    for name, value in islice(sorted(given.items(), key=lambda each: each[0] not in known), MOST_LINES):
        text = json.dumps(value)
        more = f" … and {len(text) - MOST_LINE} further characters" if len(text) > MOST_LINE else ""
        # Quoted, unless it is a word: a sentence without quotes would be taken for ours.
        key = name if _WORD.fullmatch(name) else json.dumps(name)
        shown = key if len(key) <= _MOST_KEY else f"{key[:_MOST_KEY]}…"
        lines.append(f"{shown}: {text[:MOST_LINE]}{more}")
    if len(given) > MOST_LINES:
        lines.append(f"… and {len(given) - MOST_LINES} further arguments")
    return tuple(lines)


class ConfirmationRecord:
    """Each method reads the file, which other processes may have changed, and raises ApprovalsUnusable. Then
    nothing may be called that a person may want to be asked about."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        folder = approvals_folder(environ)
        if folder is None:
            message = "there is no place for the record of confirmations: HOME is not the path of a folder"
            raise ApprovalsUnusable(message, "set HOME, or XDG_CONFIG_HOME")
        self._folder = os.path.join(folder, _FOLDER)

    def read(self, plugin: str) -> Confirmations:
        path = self._path(plugin)
        if not os.path.lexists(path):
            return Confirmations()
        owner, found = self._read(path)
        if owner != plugin:
            message = f"{_WHAT} {path} is about another plugin than its name says"
            raise ApprovalsUnusable(message, _remedy(path))
        return found

    def _read(self, path: str) -> tuple[str, Confirmations]:
        raw = read_bytes(path, _WHAT, _MOST_BYTES, _remedy(path))
        try:
            data = json.loads(raw)
            if data["version"] != _VERSION:
                raise ValueError("it is of another version")
            always = tuple((_text(client), _text(tool)) for client, tool in data["always"])
            return _text(data["plugin"]), Confirmations(tuple(map(_text, data["patterns"])), always)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{_WHAT} {path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, _remedy(path)) from None

    def all(self) -> Iterator[tuple[str, Confirmations]]:
        """Every plugin of which something is kept."""
        names = sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else []
        for name in names:
            if name.endswith(_ENDING):
                yield self._read(os.path.join(self._folder, name))

    def set_patterns(self, plugin: str, patterns: tuple[str, ...]) -> None:
        """What was said for good before does not count any more."""
        with locked_folder(self._folder, _FOLDER_WHAT):
            self._write(plugin, Confirmations(patterns))

    def add_always(self, plugin: str, client: str, tool: str) -> None:
        with locked_folder(self._folder, _FOLDER_WHAT):
            old = self.read(plugin)
            always = tuple(dict.fromkeys((*old.always, (client, tool))))
            if len(always) > _MOST_ALWAYS:
                message = f"more than {_MOST_ALWAYS} tools of this plugin need no question"
                raise ApprovalsUnusable(message, f"remove {self._path(plugin)}")
            self._write(plugin, old._replace(always=always))

    def _path(self, plugin: str) -> str:
        name = fingerprint(plugin.encode("utf-8", "surrogatepass"))[:40]
        return os.path.join(self._folder, f"{name}{_ENDING}")

    def _write(self, plugin: str, confirmations: Confirmations) -> None:
        document = {"version": _VERSION, "plugin": plugin, **confirmations._asdict()}
        with open_folder(self._folder) as directory:
            raw = json.dumps(document, indent=1).encode() + b"\n"
            replace_file(directory, os.path.basename(self._path(plugin)), raw, sync=True)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quoted(str(value)[:60])} is no text")
    return value


def _remedy(path: str) -> str:
    return f"remove it (rm {path}), and say anew what you want to be asked about"
