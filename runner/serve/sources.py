"""Which plugins the daemon has: those of the manifests and host configurations that --config names.

A folder counts with its own manifest, or with those of the folders and files right below it. A configuration
that lists several servers is one plugin each.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

from runner.contracts.registry import all_contracts
from runner.manifest.load import find, load, servers_at, text_at
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable
from sandbox.document.read import SIZE_LIMIT
from sandbox.policy.load import trust_fault

_ENDINGS = (".toml", ".json", ".jsonc", ".yaml", ".yml", ".tar", ".tgz", ".tar.gz")
_MOST_ENTRIES = 1000  # of one folder


class PluginSource(NamedTuple):
    """One plugin of the configuration."""

    name: str  # what the door and the ledger call it, by its own manifest: runner/serve/claims.py
    path: str  # of the manifest
    server: str | None  # of a configuration that lists several
    plugin: Plugin
    digest: str  # another one: it has to be reloaded
    moved: bool = False  # its name was another one's before, or it had another name
    # Of its manifest: what it is started by, until the file is read again without a fault. Empty: it is the
    # large file of a host, which is read at each start.
    text: bytes = b""
    file: str = ""  # that has this text. Of a folder that is gone nobody could find it any more


class SourceFault(NamedTuple):
    path: str
    message: str
    hides: bool = False  # what is below the path could not be looked at
    keeps: bool = True  # plugins of the path stay as they were


def fault_of(found: Diagnostic) -> SourceFault:
    return SourceFault(found.place, f"{found.message}; {found.hint}" if found.hint else found.message)


class SourceScan(NamedTuple):
    sources: tuple[PluginSource, ...]  # several may ask for one name
    faults: tuple[SourceFault, ...] = ()
    watched: tuple[str, ...] = ()  # folders in which a change may mean another result


def scan(paths: tuple[str, ...]) -> SourceScan:
    """Read every manifest. Never raises for what is in a file: such a file is a fault."""
    faults: list[SourceFault] = []
    watched: dict[str, None] = {}
    found = [each for path in paths for each in _manifests(os.path.abspath(path), faults, watched)]
    sources = tuple(source for manifest in found for source in _read(manifest, faults))
    return SourceScan(sources, tuple(faults), tuple(watched))


def _manifests(path: str, faults: list[SourceFault], watched: dict[str, None]) -> list[str]:
    """The paths of manifests, or of folders that have one."""
    if not os.path.isdir(path):
        watched[os.path.dirname(path)] = None
        if not os.path.exists(path):
            faults.append(SourceFault(path, "there is no such file or folder", hides=True))
            return []
        return [path]
    watched[path] = None
    if _has_manifest(path):
        return [path]
    found = []
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        faults.append(SourceFault(path, f"it cannot be read: {error.strerror}", hides=True))
        return []
    if len(entries) > _MOST_ENTRIES:
        faults.append(SourceFault(path, f"only the first {_MOST_ENTRIES} entries are looked at"))
    for entry in entries[:_MOST_ENTRIES]:
        if entry.name.startswith("."):
            continue
        if os.path.isdir(entry.path):  # False for a link in a circle, where is_dir() raises
            watched[entry.path] = None
            if _has_manifest(entry.path):
                found.append(entry.path)
        elif entry.name.endswith(_ENDINGS):
            found.append(entry.path)
    return found


def _has_manifest(folder: str) -> bool:
    names = [name for contract in all_contracts() for name in contract.file_names]
    return any(os.path.lexists(os.path.join(folder, name)) for name in names)


def _read(path: str, faults: list[SourceFault]) -> list[PluginSource]:
    # Before anything of it is read: a tar is unpacked to find the manifest.
    fault = trust_fault(path, "the configuration", private_groups=True)
    file = path
    if fault is None:
        try:
            at = find(path)
            manifest, file = at.path, at.tar or at.path
        except DocumentError:
            manifest = path  # `load` reports it
        # In a folder that nobody else can write there may be a file that everybody can.
        fault = trust_fault(manifest, "the manifest", private_groups=True)
    if fault is not None:
        # What it was is no answer: the next start would read it again.
        faults.append(SourceFault(path, f"it is not used: {fault[0]}; {fault[1]}", keeps=False))
        return []
    servers: tuple[str | None, ...] = servers_at(path) or (None,)
    found = []
    text = text_at(path)
    held = text if text is not None and len(text) <= SIZE_LIMIT else b""
    for server in servers:
        read = load(path, server=server, text=text)
        if read.plugin is None:
            errors = [each for each in read.diagnostics if each.severity == "error"] or read.diagnostics
            where = f"line {errors[0].line}: " if errors and errors[0].line else ""
            message = f"{where}{errors[0].message}" if errors else "it has a fault"
            faults.append(SourceFault(path, printable(f"{server}: {message}" if server else message)))
            continue
        if any(each.rule == "server_disabled" for each in read.diagnostics):
            message = printable(f"{server}: it is disabled in this file: left out")
            faults.append(SourceFault(path, message, keeps=False))
            continue
        name = _name(server or read.plugin.id)
        digest = hashlib.sha256(repr(read.plugin).encode("utf-8", "replace")).hexdigest()
        found.append(PluginSource(name, path, server, read.plugin, digest, text=held, file=file))
    return found


def _name(word: str) -> str:
    """A plugin's name, as it can stand between two slashes of an address."""
    kept = "".join(char if char.isalnum() or char in "._-@" else "." for char in word)
    return kept.strip(".") or "plugin"
