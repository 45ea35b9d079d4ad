"""From a path to a Plugin: find the manifest, recognise its contract, read it, or say why not.

Contracts are found by looking into runner/contracts/ and imported by name, one at a time: importing one
contract's models costs a launch more than everything else it does, so an unchanged manifest is answered from
the cache (see cache.py) and imports none.
"""

from __future__ import annotations

import importlib
import os
import stat
from typing import Any

from runner.manifest import cache
from runner.plugin import Plugin
from sandbox import CODE_ROOT
from sandbox.document.diagnostic import Diagnostic, DocumentError, quoted
from sandbox.document.read import Document, Format, parse, read_bounded
from sandbox.spec import KeyPath
from sandbox.value import NamedTuple

# Of a configuration of thousands of wrong servers, so many faults make the point.
FAULTS_SHOWN = 200


class Found(NamedTuple):
    path: str  # absolute
    contract: str | None  # None: the name says nothing, the content has to
    diagnostics: tuple[Diagnostic, ...] = ()  # warnings


class ManifestRead(NamedTuple):
    plugin: Plugin | None  # None: there is an error among the diagnostics
    diagnostics: tuple[Diagnostic, ...] = ()


def contract_names() -> tuple[str, ...]:
    """The contracts there are: the folders of runner/contracts/."""
    folder = os.path.join(CODE_ROOT, "runner", "contracts")
    return tuple(
        sorted(
            name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, "__init__.py"))
        )
    )


def contract(name: str) -> Any:
    """How a contract's manifests are recognised: the package runner.contracts.NAME."""
    return importlib.import_module(f"runner.contracts.{name}")


def contract_manifest(name: str) -> Any:
    """How a contract's manifests are read: runner.contracts.NAME.manifest."""
    return importlib.import_module(f"runner.contracts.{name}.manifest")


# --- finding -----------------------------------------------------------------------------------------


def find(path: str, contract: str | None = None) -> Found:
    """The manifest a path means: itself, or the one in the directory. DocumentError if there is none."""
    if contract is not None and contract not in contract_names():
        known = ", ".join(contract_names())
        raise _refusal(
            path, "contract_unknown", f"there is no contract {quoted(contract)}; known are {known}"
        )
    if not path or "\0" in path:
        raise _refusal(path, "file_missing", "that is not the name of a file")
    # The operator's own path: links to a folder are followed once, here, so that what is derived from it is
    # real. The last component stays as it is named: the name says which contract it is.
    given = os.path.abspath(path)
    absolute = os.path.join(os.path.realpath(os.path.dirname(given)), os.path.basename(given))
    try:
        is_directory = stat.S_ISDIR(os.stat(absolute).st_mode)
    except OSError:
        is_directory = False  # reading the file will say what is wrong with it
    if is_directory:
        return _find_in(os.path.realpath(absolute), contract)
    return Found(absolute, contract or _by_name(os.path.basename(absolute)))


def _by_name(file_name: str) -> str | None:
    owners = [name for name in contract_names() if file_name in contract(name).FILE_NAMES]
    return owners[0] if len(owners) == 1 else None


def _find_in(directory: str, chosen: str | None) -> Found:
    names = contract_names() if chosen is None else (chosen,)
    present = {name: _present(directory, contract(name).FILE_NAMES) for name in names}
    for name in names:
        if (
            not any(present.values())
            and contract(name).IN_SUBDIRECTORY
            and (inner := _only_directory(directory))
        ):
            present[name] = _present(inner, contract(name).FILE_NAMES)
    candidates = {name: files for name, files in present.items() if files}
    if not candidates and not os.access(directory, os.X_OK, effective_ids=True):
        message = "the folder cannot be entered: Permission denied"
        raise _refusal(directory, "file_unreadable", message, f"chmod a+rx {directory}")
    if not candidates:
        looked = ", ".join(file for name in names for file in contract(name).FILE_NAMES)
        hint = "name the manifest itself if it is called otherwise"
        raise _refusal(directory, "manifest_missing", f"there is no manifest here; looked for {looked}", hint)
    if len(candidates) > 1:
        shown = " and ".join(f"{os.path.basename(files[0])} ({name})" for name, files in candidates.items())
        message = f"there are manifests of several contracts here: {shown}"
        raise _refusal(
            directory, "manifest_ambiguous", message, "choose with --contract NAME, or name the file"
        )
    [(name, files)] = candidates.items()
    warnings = tuple(
        Diagnostic(
            other, 0, 0, "manifest_shadowed", f"ignored: {os.path.basename(files[0])} wins", "", "warning"
        )
        for other in files[1:]
    )
    return Found(files[0], name, warnings)


def _present(directory: str, names: tuple[str, ...]) -> list[str]:
    return [path for name in names if os.path.lexists(path := os.path.join(directory, name))]


def _only_directory(directory: str) -> str | None:
    """The one entry of a directory, if it is a directory itself: an unpacked archive looks like that."""
    try:
        with os.scandir(directory) as entries:
            first = next(entries, None)
            if first is None or next(entries, None) is not None or not first.is_dir(follow_symlinks=False):
                return None
            return first.path
    except OSError:
        return None


def _refusal(path: str, rule: str, message: str, hint: str = "") -> DocumentError:
    return DocumentError(Diagnostic(path, 0, 0, rule, message, hint))


# --- loading -----------------------------------------------------------------------------------------


def load(path: str, *, contract: str | None = None, server: str | None = None) -> ManifestRead:
    """The plugin of a manifest, or everything that is wrong with it."""
    try:
        found = find(path, contract)
        raw = read_bounded(found.path)
        home = _home()
        key = cache.key(found.path, raw, found.contract, server, home)
        cached = cache.load(key)
        if cached is not None:
            plugin, diagnostics = cached
            return ManifestRead(plugin, found.diagnostics + diagnostics)
        name, document = _recognise(found, raw)
    except DocumentError as error:
        return ManifestRead(None, error.diagnostics)
    loaded = _read(name, document, server, home)
    if loaded.plugin is not None:
        cache.store(key, loaded.plugin, loaded.diagnostics)
    return ManifestRead(loaded.plugin, found.diagnostics + loaded.diagnostics)


def contract_at(path: str, chosen: str | None = None) -> str | None:
    """The contract of a manifest, without reading more of it than that takes. None: it has none, or is wrong,
    which whoever loads it is told."""
    try:
        found = find(path, chosen)
        return found.contract or _recognise(found, read_bounded(found.path))[0]
    except DocumentError:
        return None


def load_all(
    path: str, *, contract: str | None = None, server: str | None = None
) -> tuple[ManifestRead, ...]:
    """Every plugin of a manifest (or the one server named), each also held against the files around it.

    Those are left to this verdict: a remembered Plugin depends on the manifest's own bytes and nothing else.
    """
    try:
        found = find(path, contract)
        name, document = _recognise(found, read_bounded(found.path))
    except DocumentError as error:
        return (ManifestRead(None, error.diagnostics),)
    reader, home = contract_manifest(name), _home()
    listed: tuple[str, ...] = reader.servers(document) if hasattr(reader, "servers") else ()
    results: list[ManifestRead] = []
    said = 0
    for each in listed if server is None and listed else (server,):
        if said >= FAULTS_SHOWN:
            message = f"the other servers of {len(listed)} were not checked"
            results.append(ManifestRead(None, (Diagnostic(found.path, 0, 0, "too_many_faults", message),)))
            break
        results.append(_with_files(name, document, _read(name, document, each, home)))
        said += len(results[-1].diagnostics)
    first = results[0]
    return (ManifestRead(first.plugin, found.diagnostics + first.diagnostics), *results[1:])


def _read(name: str, document: Document, server: str | None, home: str) -> ManifestRead:
    reader = contract_manifest(name)
    if hasattr(reader, "servers"):
        return ManifestRead(*reader.read(document, server=server, home=home))
    plugin, diagnostics = reader.read(document, home=home)
    if server is None:
        return ManifestRead(plugin, diagnostics)
    message = f"a {name} manifest has no servers to choose from"
    return ManifestRead(
        None, (document.diagnostic((), "server_unknown", message, "leave --server out"), *diagnostics)
    )


def _with_files(name: str, document: Document, loaded: ManifestRead) -> ManifestRead:
    reader = contract_manifest(name)
    if loaded.plugin is None or not hasattr(reader, "on_disk"):
        return loaded
    found: tuple[Diagnostic, ...] = reader.on_disk(document, loaded.plugin)
    failed = any(diagnostic.severity == "error" for diagnostic in found)
    return ManifestRead(None if failed else loaded.plugin, loaded.diagnostics + found)


def position(plugin: Plugin, keys: KeyPath) -> tuple[int, int]:
    """Line and column of a request in the plugin's manifest; (0, 0) if it cannot be read any more.

    Read again on purpose: a plugin from the cache has no document, and only a complaint needs one.
    """
    try:
        found = Found(plugin.manifest, plugin.contract)
        return _recognise(found, read_bounded(plugin.manifest))[1].where(keys)
    except DocumentError:
        return 0, 0


def _home() -> str:
    home = os.path.expanduser("~")
    return home if home.startswith("/") else ""


def _recognise(found: Found, raw: bytes) -> tuple[str, Document]:
    if found.contract is not None:
        return found.contract, parse(found.path, raw, contract(found.contract).FORMAT)
    names = contract_names()
    syntax = _format(found.path, raw)
    try:
        document = parse(found.path, raw, syntax)
    except DocumentError as error:
        if found.path.endswith((".json", ".toml")):
            raise
        # Its name promises neither format: that it is no good TOML is the least one can say of a README.
        raise _unknown(found.path, _afterthought(syntax, error.diagnostics[0])) from None
    matching = [
        n for n in names if document.format == contract(n).FORMAT and contract(n).recognises(document)
    ]
    if len(matching) == 1:
        return matching[0], document
    if matching:
        message = f"this could be a manifest of {' or '.join(matching)}"
        raise _refusal(found.path, "manifest_ambiguous", message, "choose with --contract NAME")
    raise _unknown(found.path, "choose with --contract NAME to see what is missing")


def _unknown(path: str, hint: str) -> DocumentError:
    looked = "; ".join(f"{contract(n).SIGN} ({n})" for n in contract_names())
    message = f"this is not a manifest of a known contract; looked for {looked}"
    return _refusal(path, "manifest_unknown", message, hint)


def _afterthought(syntax: Format, fault: Diagnostic) -> str:
    place = f", line {fault.line}, column {fault.column}" if fault.line else ""
    return f"if it is one, choose with --contract NAME; read as {syntax.upper()}{place}: {fault.message}"


def _format(path: str, raw: bytes) -> Format:
    if path.endswith(".json"):
        return "json"
    if path.endswith(".toml"):
        return "toml"
    return "json" if raw.lstrip()[:1] == b"{" else "toml"
