"""The tools of each plugin as a person has seen them.

A model reads the descriptions of tools and follows them. A plugin that was harmless when it was added can
change a description or a schema later. So the first list of a plugin is recorded, and a tool that differs
from the record is withheld until a person has looked at it (`runner allow --diff`).

Records are beside the approvals, by the same rules: only root and their owner may have written them, and no
plugin is given the folder. All text in them is the plugin's own, and is stored as one canonical JSON text for
each tool: its nesting cannot make the record unreadable.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.approvals.files import locked_folder, open_folder, read_bytes
from runner.approvals.record import ApprovalsUnusable, approvals_folder
from runner.plugin import Plugin
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.document.diagnostic import cut, printable
from sandbox.files import replace_file
from sandbox.speed.value import NamedTuple

_VERSION = 1
_FOLDER = "tools"  # in the folder of approvals
_ENDING = ".json"
_WHAT = "the record of tools"
_FOLDER_WHAT = "the folder of the records of tools"
_UNJUDGED = ("_meta", "icons")  # no model reads them

# A host lists every tool to its model, and the largest servers known have a few hundred.
MOST_TOOLS = 1000  # of one plugin
MOST_TOOL_BYTES = 64 << 10  # of one tool, as JSON
MOST_LISTED_BYTES = 4 << 20  # of all tools of one plugin
_MOST_RECORDED = 2 * MOST_TOOLS  # tools that are gone stay recorded
_MOST_RECORDED_BYTES = 2 * MOST_LISTED_BYTES
_MOST_BYTES = 32 << 20  # of a file: JSON in JSON has up to twice the bytes
_LONGEST_NAME = 256
# Printable by Unicode's tables, and still nothing to see: text can be hidden in them.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

NEW = "it is new since a person saw the tools of this plugin"
UNSEEN = "no person has seen the tools of this plugin yet"


class WithheldTool(NamedTuple):
    name: str
    reason: str  # a sentence without its end
    acceptable: bool = True  # False: no record can hold it


class Judgement(NamedTuple):
    shown: list[Mapping[str, Any]]  # as a person has seen them, in the order of the plugin
    withheld: list[WithheldTool]


class ToolChange(NamedTuple):
    """A withheld tool, with the text that a person has seen before."""

    name: str
    before: str  # canonical JSON; empty: it is new
    after: str


class SeenTools(NamedTuple):
    """What is known about one plugin: its tools, each as canonical JSON by its name."""

    tools: dict[str, str]  # as a person saw them
    proposed: dict[str, str]  # as the plugin listed them last, where they are withheld
    when: float  # of the first sight, in seconds since 1970


def identity_of(plugin: Plugin) -> str:
    """The plugin's name for `judge`: an approval's key without the command line and the program. Another
    program in the same entry has to list the same tools, or a person looks at them."""
    return _dump((plugin.contract, plugin.id, look.realpath(plugin.manifest), plugin.scope))


def remote_identity(name: str, url: str) -> str:
    """The same for a server elsewhere. It is no JSON, so it is no plugin's."""
    return f"remote {name} {url}"


def tools_folder(environ: Mapping[str, str]) -> Path:
    """The folder of records. Raises ApprovalsUnusable without a home."""
    folder = approvals_folder(environ)
    if folder is None:
        message = "there is no place for the record of tools: HOME is not the path of a folder"
        raise ApprovalsUnusable(message, "set HOME, or XDG_CONFIG_HOME")
    return Path(folder, _FOLDER)


class ToolRecord:
    """The records of all plugins, in one folder. Each method reads the file, which other processes may have
    changed, and may wait for one of them to write. Each raises ApprovalsUnusable, and then no tool of the
    plugin may be shown."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._written: dict[str, SeenTools] = {}  # by plugin: what this process wrote last

    @classmethod
    def at(cls, folder: Path) -> ToolRecord:
        return cls(folder)

    def judge(
        self, plugin: str, tools: Sequence[Mapping[str, Any]], *, trust_first: bool = True
    ) -> Judgement:
        """Which tools of a plugin may be shown. Records the first list that is not empty; `trust_first`:
        whether its tools count as seen. `plugin`: from `identity_of`, or any text that names only this
        plugin. `tools`: the plugin's whole list. The withheld ones are kept for `runner allow --diff`."""
        listed, refused = _canonical(tools)
        old = self._read(plugin)
        new = _with_listed(old, listed, trust_first)
        # Two gateways may have two versions of one plugin, and each follows the file. If both wrote what they
        # have whenever the other one did, they would never stop.
        if new is not None and new not in (old, self._written.get(plugin)):
            with locked_folder(self._folder, _FOLDER_WHAT):
                new = _with_listed(self._read(plugin), listed, trust_first) or new
                self._write(plugin, new)
                self._written[plugin] = new
        shown, withheld = [], list(refused)
        for name, (tool, text) in listed.items():
            before = "" if new is None else new.tools.get(name, "")
            if before == text:
                shown.append(tool)
            else:
                withheld.append(WithheldTool(name, _difference(before, text) if before else NEW))
        if new is not None and not new.tools:
            withheld = [each._replace(reason=UNSEEN) if each.reason == NEW else each for each in withheld]
        return Judgement(shown, withheld)

    def proposed(self, plugin: str) -> tuple[ToolChange, ...] | None:
        """The withheld tools, as the plugin listed them last. None: no list of this plugin was ever seen."""
        seen = self._read(plugin)
        if seen is None:
            return None
        return tuple(ToolChange(name, seen.tools.get(name, ""), text) for name, text in seen.proposed.items())

    def urls_of(self, remote: str) -> list[str]:
        """Where servers elsewhere of this name were, when their tools were listed."""
        if not look.lexists(self._folder):
            return []
        with open_folder(self._folder) as directory:
            names = sorted(name for name in os.listdir(directory) if name.endswith(_ENDING))
        found = []
        for name in names:
            path = os.path.join(self._folder, name)
            try:
                plugin = json.loads(read_bytes(path, _WHAT, _MOST_BYTES, f"remove {path}"))["plugin"]
                label, _, url = plugin.rpartition(" ")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # it is damaged, which the gateway tells; the others count
            if remote_identity(remote, url) == plugin and label:
                found.append(url)
        return found

    def accept(self, plugin: str, changes: Sequence[ToolChange]) -> None:
        """A person has seen these changes, and wants the tools to be shown."""
        with locked_folder(self._folder, _FOLDER_WHAT):
            seen = self._read(plugin)
            for name, before, after in changes:
                if seen is None or (seen.tools.get(name, ""), seen.proposed.get(name)) != (before, after):
                    message = f"the tool {printable(name)} changed since it was shown; nothing is recorded"
                    raise ApprovalsUnusable(message, "look at it again: run the command once more")
            if seen is None:
                return
            tools = {**seen.tools, **{each.name: each.after for each in changes}}
            if len(tools) > _MOST_RECORDED or sum(map(len, tools.values())) > _MOST_RECORDED_BYTES:
                message = (
                    f"more than {_MOST_RECORDED} tools, or {_MOST_RECORDED_BYTES >> 20} MiB, are recorded"
                )
                raise ApprovalsUnusable(f"{message} for this plugin", self._remedy(plugin))
            rest = {name: text for name, text in seen.proposed.items() if tools.get(name) != text}
            self._write(plugin, seen._replace(tools=tools, proposed=rest))

    # --- the file ------------------------------------------------------------------------------------------

    def _path(self, plugin: str) -> str:
        name = fingerprint(plugin.encode("utf-8", "surrogatepass"))[:40]
        return os.path.join(self._folder, name + _ENDING)

    def _remedy(self, plugin: str) -> str:
        return f"remove {self._path(plugin)}: the next list of this plugin is then recorded as its first one"

    def _read(self, plugin: str) -> SeenTools | None:
        path = self._path(plugin)
        if not look.lexists(path):
            return None
        raw = read_bytes(path, _WHAT, _MOST_BYTES, self._remedy(plugin))
        try:
            data = json.loads(raw)
            if data["version"] != _VERSION or data["plugin"] != plugin:
                raise ValueError("it is of another version, or about another plugin than its name says")
            seen = SeenTools(_texts(data["tools"]), _texts(data["proposed"]), float(data["when"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{_WHAT} {path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, self._remedy(plugin)) from None
        return seen

    def _write(self, plugin: str, seen: SeenTools) -> None:
        document = {"version": _VERSION, "plugin": plugin, **seen._asdict()}
        raw = json.dumps(document, indent=1).encode() + b"\n"
        with open_folder(self._folder) as directory:
            replace_file(directory, os.path.basename(self._path(plugin)), raw, sync=True)


# --- what a plugin lists ------------------------------------------------------------------------------------


def _canonical(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, tuple[Mapping[str, Any], str]], list[WithheldTool]]:
    """The tools by name, each with its canonical JSON, and those that no record can hold."""
    if len(tools) > MOST_TOOLS:
        message = f"the plugin lists {len(tools)} tools, and at most {MOST_TOOLS} are shown: so none is"
        raise ApprovalsUnusable(message, "ask its author for a smaller plugin, or for an option")
    listed: dict[str, tuple[Mapping[str, Any], str]] = {}
    refused: list[WithheldTool] = []
    total = 0
    for tool in tools:
        name = tool.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            shown = printable(cut(name, _LONGEST_NAME)) if isinstance(name, str) else "(no name)"
            told = f"its name is not a text of 1 to {_LONGEST_NAME} characters that can be printed"
            refused.append(WithheldTool(shown, told, acceptable=False))
            continue
        if name in listed:
            refused.append(
                WithheldTool(name, "the plugin lists it twice; the first one counts", acceptable=False)
            )
            continue
        try:
            text = _dump({key: value for key, value in tool.items() if key not in _UNJUDGED})
        except (TypeError, ValueError, RecursionError):
            refused.append(WithheldTool(name, "it is not JSON, or is nested too deeply", acceptable=False))
            continue
        if len(text) > MOST_TOOL_BYTES:
            told = f"its description and schemas have {len(text)} bytes; at most {MOST_TOOL_BYTES} are kept"
            refused.append(WithheldTool(name, told, acceptable=False))
            continue
        total += len(text)
        if total > MOST_LISTED_BYTES:
            message = (
                f"the tools of the plugin have more than {MOST_LISTED_BYTES >> 20} MiB: so none is shown"
            )
            raise ApprovalsUnusable(message, "ask its author for shorter descriptions and schemas")
        listed[name] = tool, text
    return listed, refused


def _with_listed(
    seen: SeenTools | None, listed: Mapping[str, tuple[Mapping[str, Any], str]], trust_first: bool
) -> SeenTools | None:
    """The record after a list. None: there is still nothing to record."""
    texts = {name: text for name, (_, text) in listed.items()}
    if seen is None:
        if not texts:
            return None  # a server without a login may list nothing at first
        return SeenTools(texts, {}, time.time()) if trust_first else SeenTools({}, texts, time.time())
    return seen._replace(
        proposed={name: text for name, text in texts.items() if seen.tools.get(name) != text}
    )


def _difference(before: str, after: str) -> str:
    try:
        old, new = json.loads(before), json.loads(after)
        fields = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        told = ", ".join(printable(cut(key, 40)) for key in fields[:8])
    except (ValueError, RecursionError):
        told = ""
    return f"it differs from what a person saw: {told}" if told else "it differs from what a person saw"


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError("its tools are not texts")
    return value
