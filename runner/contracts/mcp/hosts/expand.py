"""Variables in the words of an entry, by the rules of each host.

`references` says which a word has, from the text alone. `expand_text` fills them in at the launch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from sandbox.spec import PLUGIN_DIR_TOKEN, STATE_DIR_TOKEN
from sandbox.speed.value import NamedTuple

# "env": a variable of the host. "file": the content of a file. "ask": the host asks its user, or an
# extension. "folder": the project, or the home.
Kind = Literal["env", "file", "ask", "folder"]
OURS = (STATE_DIR_TOKEN, PLUGIN_DIR_TOKEN)

_FOLDERS = r"(?P<folder>workspaceFolder|workspaceFolderBasename|userHome|pathSeparator|/)"
_PATTERNS = {
    "claude": re.compile(r"\$\{(?P<env>[A-Za-z_][A-Za-z0-9_]*+)(?::-(?P<default>[^}]*+))?\}"),
    "vscode": re.compile(
        r"\$\{(?:env:(?P<env>[^}]*+)|(?P<ask>(?:input|command|config):[^}]*+)|" + _FOLDERS + r")\}"
    ),
    "cursor": re.compile(r"\$\{(?:env:(?P<env>[^}]*+)|" + _FOLDERS + r")\}"),
    "windsurf": re.compile(r"\$\{(?:env:(?P<env>[^}]*+)|file:(?P<file>[^}]*+)|" + _FOLDERS + r")\}"),
    "roo": re.compile(r"\$\{(?:env:(?P<env>[^}]*+)|(?P<folder>workspaceFolder))\}"),
    "gemini": re.compile(r"\$(?:(?P<env>[A-Za-z0-9_]++)|\{(?P<braced>[^}]++)\})"),
    "opencode": re.compile(r"\{(?:env:(?P<env>[^}]++)|file:(?P<file>[^}]++))\}"),
    "continue": re.compile(r"\$\{\{ *+(?:secrets|inputs)\.(?P<env>[A-Za-z0-9_]++) *+\}\}"),
}
# Hosts that leave a variable which is not set as it is written. The others put nothing in its place.
_LITERAL = ("claude", "roo", "gemini", "continue")


class Reference(NamedTuple):
    kind: Kind
    name: str  # of the variable, the file or the folder; of a question, with what kind it is: "input:key"
    default: str | None = None


def references(text: str, rules: str) -> Iterator[Reference]:
    pattern = _PATTERNS.get(rules)
    for found in pattern.finditer(text) if pattern is not None else ():
        if found[0] not in OURS:
            yield _reference(found)


def expand_text(text: str, rules: str, value: Callable[[Reference], str | None]) -> str:
    """Replace each variable once; values are not expanded again. `value` returns None for a variable without
    a value."""
    pattern = _PATTERNS.get(rules)
    if pattern is None:
        return text

    def fill(found: re.Match[str]) -> str:
        if found[0] in OURS:
            return found[0]
        reference = _reference(found)
        given = value(reference)
        if given is not None:
            return given
        if reference.default is not None:
            return reference.default
        return found[0] if rules in _LITERAL or reference.kind == "folder" else ""

    return pattern.sub(fill, text)


def _reference(found: re.Match[str]) -> Reference:
    groups = found.groupdict()
    name = groups.get("env")
    if name is None:
        name = groups.get("braced")
    if name is not None:
        return Reference("env", name, groups.get("default"))
    kinds: tuple[Kind, ...] = ("file", "ask", "folder")
    kind = next(kind for kind in kinds if groups.get(kind) is not None)
    return Reference(kind, groups[kind])


def with_folders(text: str, rules: str, folder: str, home: str) -> str:
    """The text with only the known folders filled in."""

    def value(reference: Reference) -> str | None:
        return folder_of(reference, folder, home)

    pattern = _PATTERNS.get(rules)
    if pattern is None:
        return text
    return pattern.sub(lambda found: value(_reference(found)) or found[0], text)


def expand_as_host(
    text: str,
    rules: str,
    folder: str,
    home: str,
    environ: Mapping[str, str],
    read_file: Callable[[str], str],
) -> str:
    """The text as the host would expand it, as far as the runner can know."""

    def value(reference: Reference) -> str | None:
        known = folder_of(reference, folder, home)
        if known is not None or reference.kind not in ("env", "file"):
            return known
        return environ.get(reference.name) if reference.kind == "env" else read_file(reference.name)

    return expand_text(text, rules, value)


def folder_of(reference: Reference, folder: str, home: str) -> str | None:
    """The folder that a reference names, or None."""
    if reference.kind == "env" and reference.name == "HOME":
        return home or None  # no secret: paths below it look the same in the cage
    if reference.kind != "folder":
        return None
    known = {
        "workspaceFolder": folder,
        "workspaceFolderBasename": os.path.basename(folder),
        "userHome": home,
        "pathSeparator": "/",
        "/": "/",
    }
    return known[reference.name] or None


def expand_home(path: str, home: str) -> str:
    """The path with a leading ~ replaced, if the home is known."""
    if path == "~" or path.startswith("~/"):
        return home.rstrip("/") + path[1:] if home.startswith("/") else path
    return path
