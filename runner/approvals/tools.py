"""The tools, prompts and resources of each plugin as a person has seen them.

A model reads the descriptions of tools and follows them. A plugin that was harmless when it was added can
change a description or a schema later. So the first lists of a plugin are recorded, and what differs from
the record is withheld until a person has looked at it (`runner allow --diff`). That holds for every field of
an entry: hosts show titles, icons and `_meta`, and models may read them.

Resources are a plugin's data, and come, go and grow. One that is new, or has other words than a person saw,
is listed without its words: its address, its type and its size.

Records are beside the approvals, by the same rules: only root and their owner may have written them, and no
plugin is given the folder. All text in them is the plugin's own, and is stored as one canonical JSON text for
each entry: its nesting cannot make the record unreadable.
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

_VERSION = 2
_FIRST_VERSION = 1  # it had only tools, without the fields of _UNJUDGED
_FOLDER = "tools"  # in the folder of approvals
_ENDING = ".json"
_WHAT = "the record of tools"
_FOLDER_WHAT = "the folder of the records of tools"
_UNJUDGED = ("_meta", "icons")
# name of a list -> key of an entry's name, what one entry is called, most characters of its name
_LISTS: Mapping[str, tuple[str, str, int]] = {
    "tools": ("name", "tool", 256),
    "prompts": ("name", "prompt", 256),
    "resources": ("uri", "resource", 4096),
    "resource_templates": ("uriTemplate", "resource template", 4096),
}
_DATE = re.compile(r"[0-9]{4}-[0-9T:.Z+-]{1,40}\Z", re.ASCII)
# Of a resource whose words nobody has seen. A sentence is not an address.
_ADDRESS = re.compile(r"[!-~]{1,256}")
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}/[A-Za-z0-9][A-Za-z0-9.+-]{0,60}\Z", re.ASCII)

# A host lists every tool to its model, and the largest servers known have a few hundred.
MOST_TOOLS = 1000  # of one plugin
MOST_TOOL_BYTES = 64 << 10  # of one tool, as JSON
MOST_LISTED_BYTES = 4 << 20  # of all that one plugin lists
MOST_OTHERS = 512  # of each other list: what a gateway shows
_MOST_RECORDED = 2 * MOST_TOOLS  # tools that are gone stay recorded
_MOST_RECORDED_BYTES = 2 * MOST_LISTED_BYTES
_MOST_BYTES = 32 << 20  # of a file: JSON in JSON has up to twice the bytes
# Printable by Unicode's tables, and still nothing to see: text can be hidden in them.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

NEW = "it is new since a person saw the tools of this plugin"
UNSEEN = "no person has seen the tools of this plugin yet"


class WithheldTool(NamedTuple):
    name: str  # of another entry than a tool, with what it is
    reason: str  # a sentence without its end
    acceptable: bool = True  # False: no record can hold it


class Judgement(NamedTuple):
    shown: Mapping[str, list[Mapping[str, Any]]]  # by list, as a person has seen them, in the plugin's order
    withheld: list[WithheldTool]


class _ListedEntry(NamedTuple):
    what: str  # the list
    entry: Mapping[str, Any]
    text: str  # canonical JSON


class ToolChange(NamedTuple):
    """A withheld tool or other entry, with the text that a person has seen before."""

    name: str  # of another entry than a tool: its list, a line end, and its name
    before: str  # canonical JSON; empty: it is new
    after: str


class SeenTools(NamedTuple):
    """What is known about one plugin: its tools, each as canonical JSON by its name; and its other entries,
    by their lists, a line end, and their names. No tool's name has a line end."""

    tools: dict[str, str]  # as a person saw them
    proposed: dict[str, str]  # as the plugin listed them last, where they are withheld
    when: float  # of the first sight, in seconds since 1970
    version: int = _VERSION
    # Names of what the plugin listed last as a person saw it, in its order, and what that list belongs to.
    listed: tuple[str, ...] = ()
    origin: str = ""


def label(name: str) -> str:
    """How people read the name of a ToolChange."""
    what, line, own = name.partition("\n")
    return f"{_LISTS[what][1]} {own}" if line and what in _LISTS else name


def identity_of(plugin: Plugin) -> str:
    """The plugin's name for `judge`: an approval's key without the command line and the program. Another
    program in the same entry has to list the same tools, or a person looks at them."""
    return identity_in(plugin.manifest, plugin.contract, plugin.id, plugin.scope)


def identity_in(manifest: str, contract: str, id: str, scope: str) -> str:  # noqa: A002
    """The same for a plugin that was not read."""
    return _dump((contract, id, look.realpath(manifest), scope))


def parts_of(identity: str) -> tuple[str, str, str, str] | None:
    """Contract, id, manifest and scope of a plugin by its name here. None: it is a server elsewhere."""
    try:
        contract, name, manifest, scope = json.loads(identity)
    except ValueError:
        return None
    return contract, name, manifest, scope


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
        self,
        plugin: str,
        lists: Mapping[str, Sequence[Mapping[str, Any]]],
        *,
        trust_first: bool = True,
        origin: str = "",
    ) -> Judgement:
        """What of a plugin may be shown. Records the first lists that are not empty; `trust_first`: whether
        what is in them counts as seen. `plugin`: from `identity_of`, or any text that names only this
        plugin. `lists`: all of the plugin's. The withheld entries are kept for `runner allow --diff`.
        `origin`: what the lists belong to, for `remembered`."""
        listed, refused = _canonical(lists)
        old = self._read(plugin)
        new = _with_listed(old, listed, trust_first, origin)
        # Two gateways may have two versions of one plugin, and each follows the file. If both wrote what they
        # have whenever the other one did, they would never stop.
        if new is not None and new not in (old, self._written.get(plugin)):
            with locked_folder(self._folder, _FOLDER_WHAT):
                new = _with_listed(self._read(plugin), listed, trust_first, origin) or new
                self._write(plugin, new)
                self._written[plugin] = new
        shown: dict[str, list[Mapping[str, Any]]] = {what: [] for what in lists}
        withheld = list(refused)
        unseen = UNSEEN if new is not None and not new.tools else NEW
        for name, (what, entry, text) in listed.items():
            before = "" if new is None else new.tools.get(name, "")
            if before == text:
                shown[what].append(entry)
                continue
            reason = _difference(before, text) if before else unseen
            is_bare = what == "resources" and _ADDRESS.fullmatch(entry["uri"]) is not None
            if is_bare:
                shown[what].append(_without_words(entry))
                reason += "; until a person has looked it is listed without its words"
            if before or not is_bare:  # new resources come all the time
                withheld.append(WithheldTool(label(name), reason))
        return Judgement(shown, withheld)

    def remembered(self, plugin: str, origin: str) -> dict[str, list[Mapping[str, Any]]] | None:
        """What `judge` showed last of the lists of this origin, without what no person has seen. None: it was
        nothing, or is not known. Raises ValueError if the record is damaged inside."""
        seen = self._read(plugin)
        if seen is None or not seen.listed or not origin or seen.origin != origin:
            return None
        found: dict[str, list[Mapping[str, Any]]] = {what: [] for what in _LISTS}
        for name in seen.listed:
            if (text := seen.tools.get(name)) is not None:
                what, line, _ = name.partition("\n")
                found[what if line else "tools"].append(json.loads(text))
        return found

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
                    message = f"{printable(label(name))} changed since it was shown; nothing is recorded"
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
            listed = (*seen.listed, *(name for name in seen.proposed if name not in rest))
            self._write(plugin, seen._replace(tools=tools, proposed=rest, listed=listed))

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
            version = data["version"]
            if version not in (_FIRST_VERSION, _VERSION) or data["plugin"] != plugin:
                raise ValueError("it is of another version, or about another plugin than its name says")
            seen = SeenTools(_texts(data["tools"]), _texts(data["proposed"]), float(data["when"]), version)
            listed, origin = data.get("listed", []), data.get("origin", "")
            if not isinstance(listed, list) or not all(isinstance(each, str) for each in (*listed, origin)):
                raise ValueError("the names that were listed last are not a list")
            seen = seen._replace(listed=tuple(listed), origin=origin)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{_WHAT} {path} is damaged: {str(error)[:200]}"
            raise ApprovalsUnusable(message, self._remedy(plugin)) from None
        return seen

    def _write(self, plugin: str, seen: SeenTools) -> None:
        document = {"plugin": plugin, **seen._asdict()}
        raw = json.dumps(document, indent=1).encode() + b"\n"
        with open_folder(self._folder) as directory:
            replace_file(directory, os.path.basename(self._path(plugin)), raw, sync=True)


# --- what a plugin lists ------------------------------------------------------------------------------------


def _canonical(
    lists: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, _ListedEntry], list[WithheldTool]]:
    """The entries by name, each with its canonical JSON, and those that no record can hold."""
    count = len(lists.get("tools", ()))
    if count > MOST_TOOLS:
        message = f"the plugin lists {count} tools, and at most {MOST_TOOLS} are shown: so none is"
        raise ApprovalsUnusable(message, "ask its author for a smaller plugin, or for an option")
    listed: dict[str, _ListedEntry] = {}
    refused: list[WithheldTool] = []
    total = 0
    for what, entries in lists.items():
        for entry in entries if what == "tools" else entries[:MOST_OTHERS]:
            name, why = _name(what, entry, listed)
            text = "" if why else _text(_steady(entry) if what == "resources" else entry)
            if not why and not text:
                why = "it is not JSON, or is nested too deeply"
            elif len(text) > MOST_TOOL_BYTES:
                why = (
                    f"its description and schemas have {len(text)} bytes; at most {MOST_TOOL_BYTES} are kept"
                )
            if why:
                refused.append(WithheldTool(label(name), why, acceptable=False))
                continue
            total += len(text)
            if total > MOST_LISTED_BYTES:
                message = (
                    f"what the plugin lists has more than {MOST_LISTED_BYTES >> 20} MiB: so none is shown"
                )
                raise ApprovalsUnusable(message, "ask its author for shorter descriptions and schemas")
            listed[name] = _ListedEntry(what, entry, text)
    return listed, refused


def _name(what: str, entry: Mapping[str, Any], listed: Mapping[str, _ListedEntry]) -> tuple[str, str]:
    """The name of an entry in the record, and why there is none, or ''."""
    key, _, most = _LISTS[what]
    own = entry.get(key)
    before = "" if what == "tools" else f"{what}\n"
    if not isinstance(own, str) or not 0 < len(own) <= most or not own.isprintable():
        shown = printable(cut(own, most)) if isinstance(own, str) else f"(no {key})"
        return before + shown, f"its {key} is not a text of 1 to {most} characters that can be printed"
    return before + own, "the plugin lists it twice; the first one counts" if before + own in listed else ""


def _text(entry: Mapping[str, Any]) -> str:
    """Canonical JSON; empty if there is none."""
    try:
        return _dump(dict(entry))
    except (TypeError, ValueError, RecursionError):
        return ""


def _steady(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    """A resource without what changes with its data: no words can be hidden there."""
    kept = {key: value for key, value in resource.items() if key != "size" or type(value) is not int}
    notes = kept.get("annotations")
    if isinstance(notes, Mapping) and _DATE.match(str(notes.get("lastModified", ""))):
        kept["annotations"] = {key: value for key, value in notes.items() if key != "lastModified"}
    return kept


def _without_words(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    """A resource of which nobody has seen the words. What is left says where it is, and what kind of data."""
    found: dict[str, Any] = {"uri": resource["uri"], "name": resource["uri"]}
    kind, size = resource.get("mimeType"), resource.get("size")
    if isinstance(kind, str) and _TYPE.match(kind):
        found["mimeType"] = kind
    return {**found, "size": size} if type(size) is int else found


def _with_listed(
    seen: SeenTools | None, listed: Mapping[str, _ListedEntry], trust_first: bool, origin: str
) -> SeenTools | None:
    """The record after a list. None: there is still nothing to record."""
    texts = {name: each.text for name, each in listed.items()}
    if seen is None and not texts:
        return None  # a server without a login may list nothing at first
    tools = {} if seen is None else dict(seen.tools)
    for name, (what, entry, text) in listed.items():
        if seen is None or (what != "tools" and seen.version == _FIRST_VERSION):
            if trust_first:
                tools[name] = text
        elif seen.version == _FIRST_VERSION:
            # It had nothing of these fields. They count as seen with the rest, once.
            rest = {key: value for key, value in entry.items() if key not in _UNJUDGED}
            if tools.get(name) == _dump(rest):
                tools[name] = text
    proposed = {name: text for name, text in texts.items() if tools.get(name) != text}
    shown = tuple(name for name in texts if name not in proposed)
    if seen is not None and set(seen.listed) == set(shown):
        shown = seen.listed  # another order is nothing new
    when = time.time() if seen is None else seen.when
    return SeenTools(tools, proposed, when, listed=shown, origin=origin)


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
