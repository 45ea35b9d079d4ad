"""Finds the host that a configuration belongs to, by path or content, and the files of all hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase

from runner.contracts.mcp.hosts.host import Host
from runner.contracts.mcp.hosts.table import (
    AMP,
    CLAUDE_CODE,
    CODEX,
    CONTINUE,
    GOOSE,
    HOSTS,
    OPENCODE,
    VIBE,
    VSCODE,
    ZED,
)
from sandbox import look, surroundings
from sandbox.document.read import Document
from sandbox.speed.value import NamedTuple

# ~/.claude.json grows with every project that its owner opens.
MOST_BYTES = 16 << 20
MOST_VALUES = 1_000_000
MOST_FILES = 100  # that one pattern with a * can stand for
# Where `runner wrap --gateway` keeps the entries of a host, in the host's own notation. XDG_CONFIG_HOME does
# not count: a shell's variables do not reach every host, and a manifest is read by the home alone.
GATEWAY_FOLDER = "~/.config/runner/gateway"
_PROGRAM_KEYS = ("command", "url", "serverUrl")


class Place(NamedTuple):
    """What the path of a configuration says about it."""

    host: Host
    # The folder of the project that it belongs to; empty for a user's own file.
    project: str = ""
    # Whether it is the calling user's own, or the system's: no cloned project can have brought it along.
    own: bool = False


class KnownFile(NamedTuple):
    host: Host
    path: str
    own: bool  # as in Place


def place_of(path: str, home: str = "", environ: Mapping[str, str] | None = None) -> Place | None:
    """The host that has its configuration at this absolute path, or at the target of the link.

    For a path below another user's home, or a folder that looks like a home, the host is returned too, but
    `own` is False.
    """
    path = os.path.normpath(path)
    found = _place_at(path, home, environ)
    if found is None and (real := look.realpath(path)) != path:
        found = _place_at(real, home, environ)
    return found


def gateway_file(host: Host, digest: str) -> str:
    """The name of the file for the entries of a host, which says whose they are."""
    return f"{host.name.lower().replace(' ', '-')}-{digest}.json"


def _gateway_place(path: str, home: str) -> Place | None:
    folder, name = os.path.split(path)
    if not folder.endswith(GATEWAY_FOLDER[1:]) or folder not in _absolute(GATEWAY_FOLDER, home, {}):
        return None
    hosts = [host for host in HOSTS if host.syntax in ("json", "jsonc")]
    host = next((each for each in hosts if fnmatchcase(name, gateway_file(each, "*"))), None)
    return None if host is None else Place(host, own=True)


def _place_at(path: str, home: str, environ: Mapping[str, str] | None) -> Place | None:
    if (stored := _gateway_place(path, home)) is not None:
        return stored
    for host in HOSTS:
        for pattern in (*host.files, *host.system_files):
            if any(_is_at(path, each) for each in _absolute(pattern, home, environ or {})):
                return Place(host, own=True)
    best: tuple[int, Place] | None = None
    for host in HOSTS:
        patterns = [(pattern, True) for pattern in host.project_files]
        patterns += [(file[2:], False) for file in host.files if file.startswith("~/")]
        for pattern, in_project in patterns:
            folder = _folder_before(path, pattern)
            # The longest pattern says most. Of two equal ones, that of a project.
            weight = 2 * pattern.count("/") + in_project
            if folder is not None and (best is None or weight > best[0]):
                best = weight, Place(host, folder if in_project else "")
    return None if best is None else best[1]


def host_of(
    path: str,
    document: Document | None = None,
    *,
    home: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Host | None:
    """The host of a configuration, by its path or its content; None if unknown."""
    given = os.path.expanduser("~") if home is None else home
    place = place_of(path, given, surroundings.variables() if environ is None else environ)
    if place is not None and (document is None or _is_written_by(place.host, document)):
        return place.host
    if document is None:
        return None
    name = os.path.basename(path)
    for host in HOSTS:
        # In a folder that a variable names, and the variable is not known here.
        named = any(file.startswith("$") and file.endswith("/" + name) for file in host.files)
        fits = document.format == host.syntax or (document.format, host.syntax) == ("jsonc", "json")
        if named and fits and _is_written_by(host, document):
            return host_by_content(document) or host
    return host_by_content(document)


def host_by_content(document: Document) -> Host | None:
    """The only host that writes such a file; None if several do, or none."""
    data = document.data
    if document.format == "toml":
        servers = data.get("mcp_servers")
        return CODEX if isinstance(servers, dict) else VIBE if _is_named_list(servers) else None
    if document.format == "yaml":
        if _is_named_list(data.get("mcpServers")):
            return CONTINUE
        return GOOSE if _has_entries(data.get("extensions"), ("cmd", "bundled", "type")) else None
    if isinstance(data.get("context_servers"), dict):
        return ZED
    if isinstance(data.get("amp.mcpServers"), dict):
        return AMP
    if isinstance(data.get("mcpServers"), dict):
        return CLAUDE_CODE if isinstance(data.get("projects"), dict) else None
    if _has_entries(data.get("servers"), _PROGRAM_KEYS):
        return VSCODE
    mcp = data.get("mcp")
    if _has_entries(mcp, ("command", "url")) or (
        isinstance(mcp, dict) and isinstance(mcp.get("servers"), dict)
    ):
        return OPENCODE
    return None


def known_files(environ: Mapping[str, str], home: str, cwd: str) -> tuple[KnownFile, ...]:
    """The configurations of all hosts that exist for this user, and in the project at `cwd`."""
    found: dict[str, KnownFile] = {}
    for host in HOSTS:
        patterns = [(each, True) for file in host.files for each in _absolute(file, home, environ)]
        patterns += [(file, True) for file in host.system_files]
        if cwd != home:
            patterns += [(os.path.join(cwd, file), False) for file in host.project_files]
        for pattern, own in patterns:
            for path in _existing(pattern):
                found.setdefault(path, KnownFile(host, path, own))
    return tuple(found.values())


def _absolute(pattern: str, home: str, environ: Mapping[str, str]) -> list[str]:
    """The places that a pattern of a user's file stands for."""
    if pattern.startswith("~/"):
        homes = dict.fromkeys((home, look.realpath(home))) if home.startswith("/") else {}
        return [os.path.join(each, pattern[2:]) for each in homes]
    if pattern.startswith("$"):
        name, _, rest = pattern[1:].partition("/")
        value = environ.get(name, "")
        if not value.startswith("/"):
            return []
        folder, last = (value, rest) if rest else os.path.split(value)
        return [os.path.join(each, last) for each in dict.fromkeys((folder, look.realpath(folder)))]
    return [pattern]


def _is_at(path: str, pattern: str) -> bool:
    mine, wanted = path.split("/"), pattern.split("/")
    return len(mine) == len(wanted) and all(map(_names, mine, wanted))


def _names(name: str, pattern: str) -> bool:
    return name == pattern or ("*" in pattern and fnmatchcase(name, pattern))


def _folder_before(path: str, pattern: str) -> str | None:
    """The folder before the part of a path that matches the pattern; None if its end does not match."""
    mine, wanted = path.split("/"), pattern.split("/")
    at = len(mine) - len(wanted)
    if at < 1 or not all(map(_names, mine[at:], wanted)):
        return None
    return "/".join(mine[:at]) or "/"


def _existing(pattern: str) -> list[str]:
    if "*" not in pattern:
        return [pattern] if look.isfile(pattern) else []
    from glob import escape, iglob
    from itertools import islice

    # Only * means something in a pattern. The names of the folders before it may hold anything.
    wild = "*".join(map(escape, pattern.split("*")))
    look.doubt(f"more files may match {pattern} later")
    return sorted(path for path in islice(iglob(wild), MOST_FILES) if look.isfile(path))


def _is_written_by(host: Host, document: Document) -> bool:
    """Whether the content is this host's: its place alone may be a coincidence."""
    return any(keys[0] in document.data for keys in host.servers)


def _is_named_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value)


def _has_entries(value: object, keys: tuple[str, ...]) -> bool:
    return isinstance(value, dict) and any(
        isinstance(entry, dict) and any(key in entry for key in keys) for entry in value.values()
    )
