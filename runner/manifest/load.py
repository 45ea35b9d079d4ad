"""From a path to a Plugin: find the manifest, recognise its contract, and read it, or report the faults.

An unchanged manifest comes from the cache (see cache.py). That imports no contract's models, which take
longer to import than everything else a launch does.
"""

from __future__ import annotations

import os
import stat

from runner.contracts.registry import all_contracts, contract_names, find_contract, option_owners
from runner.manifest import cache
from runner.plugin import Plugin
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError, quoted
from sandbox.document.read import (
    SIZE_LIMIT,
    Document,
    Format,
    parse,
    parse_with_comments,
    read_bounded,
)
from sandbox.paths.mounts import contains
from sandbox.spec import KeyPath
from sandbox.speed.typed import TYPE_CHECKING, Mapping
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from runner.contracts.configurations import HostFile
    from runner.contracts.contract import Contract

# `runner check` shows at most this many faults of one manifest.
MOST_FAULTS_SHOWN = 200
_MOST_PLUGINS_SHOWN = 10  # of a root, in a message
# A file with more plugins would push those of other files out of the cache.
_MOST_STORED = 16

# File names whose ending fixes the format.
_ENDINGS: Mapping[str, Format] = {
    ".json": "json",
    ".jsonc": "jsonc",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}


class FoundManifest(NamedTuple):
    path: str  # absolute
    contract: str | None  # as the operator chose it. None: `_recognise` decides
    diagnostics: tuple[Diagnostic, ...] = ()  # warnings
    tar: str = ""  # the tar that it was unpacked from


class ManifestRead(NamedTuple):
    plugin: Plugin | None  # None: there is an error among the diagnostics
    diagnostics: tuple[Diagnostic, ...] = ()
    origin: str = ""  # whose file it is, where the contract can tell; only `load_all` asks


# --- finding -----------------------------------------------------------------------------------------


def find(path: str, contract: str | None = None) -> FoundManifest:
    """The manifest at a path: the file itself, or the one in the directory. Raises DocumentError."""
    if contract is not None and contract not in contract_names():
        known = ", ".join(contract_names())
        message = f"there is no contract {quoted(contract)}; --contract takes {known}"
        raise _refusal(path, "contract_unknown", message)
    if not path or "\0" in path:
        raise _refusal(path, "file_missing", "the path of the manifest is empty or contains a NUL character")
    # The operator chose this path, so links to its folder are followed, once and here: every derived path is
    # then a real one. The file's own name is kept: where the content does not tell the contract, it does.
    try:
        given = os.path.abspath(path)
    except FileNotFoundError:
        message = "the path is relative, and the current folder does not exist any more"
        raise _refusal(path, "file_missing", message, "change to a folder that exists") from None
    absolute = os.path.join(look.realpath(os.path.dirname(given)), os.path.basename(given))
    try:
        is_directory = stat.S_ISDIR(look.stat(absolute).st_mode)
    except OSError:
        is_directory = False  # reading the file reports what is wrong
    if is_directory:
        return _find_in(look.realpath(absolute), contract, any_name=True)
    if absolute.endswith((".tar", ".tar.gz", ".tgz")):
        # Imported here: few plugins come in a tar.
        from runner.manifest.unpack import unpack

        of_tars = [each.name for each in all_contracts() if each.layout == "tar"]
        if contract is not None and contract not in of_tars:
            message = f"plugins of {contract} are not read from a tar"
            raise _refusal(absolute, "package_tar", message, "unpack it, and give the folder")
        folder = unpack(absolute)
        try:
            return _find_in(folder, contract or of_tars[0])._replace(tar=absolute)
        except DocumentError as error:
            raise DocumentError(*_named_by_tar(error.diagnostics, folder, absolute)) from None
    return FoundManifest(absolute, contract)


def _named_by_tar(diagnostics: tuple[Diagnostic, ...], folder: str, tar: str) -> tuple[Diagnostic, ...]:
    """The diagnostics with the tar in place of the folder that it was unpacked to, which nobody knows."""
    return tuple(
        each._replace(
            file=each.file.replace(folder, tar),
            message=each.message.replace(folder, tar),
            hint=each.hint.replace(folder, tar),
        )
        for each in diagnostics
    )


def _as_given(found: FoundManifest, read: ManifestRead) -> ManifestRead:
    if not found.tar:
        return read
    folder = os.path.dirname(found.path)
    return read._replace(diagnostics=_named_by_tar(read.diagnostics, folder, found.tar))


def _find_in(directory: str, chosen: str | None, *, any_name: bool = False) -> FoundManifest:
    """The manifest in a folder. `any_name`: of a chosen contract it may also have the name that another
    contract's have."""
    contracts = all_contracts() if chosen is None else (find_contract(chosen),)
    if any_name and not any(_existing_files(directory, contract.file_names) for contract in contracts):
        contracts = (*contracts, *(each for each in all_contracts() if each not in contracts))
    present = {contract.name: _existing_files(directory, contract.file_names) for contract in contracts}
    for contract in contracts:
        if not any(present.values()) and contract.layout == "archive" and chosen in (None, contract.name):
            inner = _only_directory(directory)
            present[contract.name] = _existing_files(inner, contract.file_names) if inner else []
    candidates = {name: files for name, files in present.items() if files}
    if not candidates and not look.access(directory, os.X_OK, effective_ids=True):
        message = "the folder cannot be entered: Permission denied"
        raise _refusal(directory, "file_unreadable", message, f"chmod a+rx {directory}")
    if not candidates and (folders := plugins_in(directory, chosen)):
        shown = ", ".join(map(os.path.basename, folders[:_MOST_PLUGINS_SHOWN]))
        more = ", …" if len(folders) > _MOST_PLUGINS_SHOWN else ""
        hint = f"give the folder of one of them, such as {folders[0]}"
        raise _refusal(directory, "plugin_root", f"this is a folder of plugins: {shown}{more}", hint)
    if not candidates:
        looked = ", ".join(file for contract in contracts for file in contract.file_names)
        hint = "if the manifest has another name, give the path of the file"
        raise _refusal(directory, "manifest_missing", f"there is no manifest here; looked for {looked}", hint)
    if len(candidates) > 1:
        shown = " and ".join(f"{os.path.basename(files[0])} ({name})" for name, files in candidates.items())
        message = f"there are manifests of several contracts here, by their names: {shown}"
        hint = "choose with --contract NAME, or give the path of the file"
        raise _refusal(directory, "manifest_ambiguous", message, hint)
    [files] = candidates.values()
    real = look.realpath(files[0])
    if look.islink(files[0]) and not contains(os.path.dirname(files[0]), real):
        # The folder may be a stranger's, and messages about a manifest repeat parts of it.
        message = f"the manifest is a link that leads out of its folder, to {real}"
        raise _refusal(files[0], "manifest_link", message, f"give the path of the file itself: {real}")
    kept = os.path.basename(files[0])
    warnings = tuple(
        Diagnostic(other, 0, 0, "manifest_shadowed", f"ignored: {kept} is read instead", "", "warning")
        for other in files[1:]
    )
    return FoundManifest(files[0], chosen, warnings)


def plugins_in(path: str, chosen: str | None = None) -> tuple[str, ...]:
    """The folders of plugins that lie side by side in a folder; empty if it is not such a folder. Links are
    skipped: they may lead anywhere."""
    if chosen is not None and chosen not in contract_names():
        return ()
    contracts = all_contracts() if chosen is None else (find_contract(chosen),)
    names = [name for contract in contracts if contract.layout == "root" for name in contract.file_names]
    own = [name for contract in contracts for name in contract.file_names]
    if not names or _existing_files(path, tuple(own)):
        return ()
    try:
        with look.scandir(path) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return ()
    return tuple(folder for folder in folders if _existing_files(folder, tuple(names)))


def _existing_files(directory: str, names: tuple[str, ...]) -> list[str]:
    return [path for name in names if look.lexists(path := os.path.join(directory, name))]


def _only_directory(directory: str) -> str | None:
    """The only entry of a directory, if it is itself a directory, as in an unpacked archive."""
    try:
        with look.scandir(directory) as entries:
            first = next(entries, None)
            if first is None or next(entries, None) is not None or not first.is_dir(follow_symlinks=False):
                return None
            return first.path
    except OSError:
        return None


def _refusal(path: str, rule: str, message: str, hint: str = "") -> DocumentError:
    return DocumentError(Diagnostic(path, 0, 0, rule, message, hint))


# --- loading -----------------------------------------------------------------------------------------


def load(
    path: str,
    *,
    contract: str | None = None,
    server: str | None = None,
    options: Mapping[str, str] | None = None,
    config: str = "",
    text: bytes | None = None,
) -> ManifestRead:
    """The plugin of a manifest, or all its faults. `options`: the contract's own. `config`: the plugin's
    configuration as JSON, where its contract derives requests from it; empty: there is none. `text`: the
    manifest, as if this were in the file."""
    options = options or {}
    found = FoundManifest(path, contract)
    try:
        found = find(path, contract)
        raw = _bytes_of(found.path) if text is None else text
        home = _home()
        # An option may name a file, and no cache key covers its content. So a plugin that was read with
        # options is not cached, nor is one with a configuration.
        key = "" if config else _key(found, raw, server, home)
        cached = cache.load(key) if key else None
        if cached is not None and (not options or find_contract(cached[0].contract).choice):
            plugin, diagnostics = cached
            read = _shape(ManifestRead(plugin, found.diagnostics + diagnostics), options)
            return _as_given(found, read)
        name, document = _recognise(found, raw)
    except DocumentError as error:
        return _as_given(found, ManifestRead(None, error.diagnostics))
    shapes = find_contract(name).choice is not None
    loaded = _read(name, document, server, home, {} if shapes else options, config)
    if loaded.plugin is not None and key and (shapes or not options):
        cache.store(key, loaded.plugin, loaded.diagnostics)
    read = ManifestRead(loaded.plugin, found.diagnostics + loaded.diagnostics)
    return _as_given(found, _shape(read, options) if shapes else read)


def _shape(read: ManifestRead, options: Mapping[str, str]) -> ManifestRead:
    if read.plugin is None or not options:
        return read
    contract = find_contract(read.plugin.contract)
    if (fault := _foreign_option(contract, options)) is not None:
        refused = Diagnostic(read.plugin.manifest, 1, 1, "option_foreign", *fault)
        return ManifestRead(None, (refused,))
    assert contract.choice is not None  # options of other contracts are read with the manifest
    plugin, diagnostics = contract.choice.shape(read.plugin, options)
    return ManifestRead(plugin, read.diagnostics + diagnostics)


def contract_at(
    path: str, chosen: str | None = None, server: str | None = None, text: bytes | None = None
) -> str | None:
    """The name of a manifest's contract, read with as little work as possible. None: it has none, or the
    manifest has a fault, which `load` reports. `server`, `text`: those that `load` will be asked for."""
    try:
        found = find(path, chosen)
        if found.contract is not None:
            return found.contract
        raw = _bytes_of(found.path) if text is None else text
        cached = cache.load(_key(found, raw, server, _home()))
        return _recognise(found, raw)[0] if cached is None else cached[0].contract
    except DocumentError:
        return None


def text_at(path: str) -> bytes | None:
    """The text of a manifest, for `load`; None if it cannot be read."""
    try:
        return _bytes_of(find(path).path)
    except DocumentError:
        return None


def servers_at(path: str) -> tuple[str, ...]:
    """The names that --server can choose from, for the completion of a shell; none if there is a fault."""
    try:
        found = find(path)
        name, document = _recognise(found, _bytes_of(found.path))
    except DocumentError:
        return ()
    hosts = find_contract(name).configurations
    return () if hosts is None else hosts.servers(document)


def load_all(
    path: str,
    *,
    contract: str | None = None,
    server: str | None = None,
    options: Mapping[str, str] | None = None,
    config: str = "",
) -> tuple[ManifestRead, ...]:
    """Every plugin of a manifest (or the one server named), each also checked against the files around it.

    `load` does not read those files: a cached Plugin depends only on the bytes of its manifest. In a folder
    of plugins, every plugin of every manifest.
    """
    if folders := plugins_in(path, contract):
        return tuple(
            read
            for folder in folders
            for read in load_all(folder, contract=contract, server=server, options=options)
        )
    found = FoundManifest(path, contract)
    try:
        found = find(path, contract)
        raw = _bytes_of(found.path)
        name, document = _recognise(found, raw)
    except DocumentError as error:
        return (_as_given(found, ManifestRead(None, error.diagnostics)),)
    home = _home()
    hosts = find_contract(name).configurations
    listed = () if hosts is None else hosts.servers(document)
    results: list[ManifestRead] = []
    shown = 0
    chosen: tuple[str | None, ...] = listed if server is None else (server,)
    remarks = () if hosts is None or server is not None else hosts.remarks(document)
    if not chosen and not remarks:
        chosen = (None,)
    for each in chosen:
        if shown >= MOST_FAULTS_SHOWN:
            message = f"the other servers of {len(listed)} were not checked"
            results.append(ManifestRead(None, (Diagnostic(found.path, 0, 0, "too_many_faults", message),)))
            break
        key = "" if options or config else _key(found, raw, each, home)
        cached = cache.load(key) if key else None
        if cached is not None:
            loaded = ManifestRead(*cached)
        else:
            loaded = _read(name, document, each, home, options or {}, config)
            if key and loaded.plugin is not None and len(chosen) <= _MOST_STORED:
                cache.store(key, loaded.plugin, loaded.diagnostics)
        checked = _check_files(name, document, loaded, options or {})
        if loaded.plugin is None and hosts is not None:
            found_too = hosts.program_faults(document, each)
            checked = checked._replace(diagnostics=checked.diagnostics + found_too)
        results.append(checked)
        shown += len(results[-1].diagnostics)
    origin = "" if hosts is None else hosts.origin(document)
    first = results[0] if results else ManifestRead(None)
    first = first._replace(diagnostics=found.diagnostics + remarks + first.diagnostics)
    return tuple(_as_given(found, read)._replace(origin=origin) for read in (first, *results[1:]))


def lint(path: str, *, contract: str | None = None) -> tuple[ManifestRead, ...]:
    """`load_all`, with the warnings of the contract's lint rules."""
    reads = load_all(path, contract=contract)
    if any(read.plugin is None for read in reads):
        return reads
    try:
        found = find(path, contract)
        name, document = _recognise(found, _bytes_of(found.path))
    except DocumentError:
        return reads  # they report the same fault, or it is a folder of plugins
    rules = find_contract(name)
    return tuple(
        read._replace(diagnostics=read.diagnostics + rules.lint(document, read.plugin))
        for read in reads
        if read.plugin is not None
    )


def _read(
    name: str, document: Document, server: str | None, home: str, options: Mapping[str, str], config: str
) -> ManifestRead:
    contract = find_contract(name)
    if (fault := _foreign_option(contract, options)) is not None:
        return ManifestRead(None, (document.diagnostic((), "option_foreign", *fault),))
    if config and "config" not in contract.takes:
        message = f"the cage of a {name} plugin does not depend on its configuration"
        hint = "leave --config out here; runner call sends a configuration to plugins that take one"
        return ManifestRead(None, (document.diagnostic((), "config_foreign", message, hint),))
    value = _parse_config(config) if config else None
    if server is not None and contract.configurations is None:
        _, diagnostics = contract.read(document, server=None, home=home, options=options, config=value)
        message = f"a {name} manifest has no servers to choose from"
        refused = document.diagnostic((), "server_unknown", message, "leave --server out")
        return ManifestRead(None, (refused, *diagnostics))
    read = contract.read(document, server=server, home=home, options=options, config=value)
    return ManifestRead(*read)


def _foreign_option(contract: Contract, options: Mapping[str, str]) -> tuple[str, str] | None:
    """Message and hint about an option of another contract."""
    own = {option.name for option in contract.options}
    own |= {f"{option.name}_file" for option in contract.options if option.reads_file}
    for option in options:
        if option not in own:
            flag = "--" + option.replace("_", "-")
            owners = " and ".join(option_owners(option)) or "no contract"
            message = f"{flag} belongs to {owners}, and this is a manifest of {contract.name}"
            return message, f"leave {flag} out"
    return None


def _parse_config(config: str) -> object:
    import json

    return json.loads(config)


def _check_files(
    name: str, document: Document, loaded: ManifestRead, options: Mapping[str, str]
) -> ManifestRead:
    contract = find_contract(name)
    found = contract.check_files(document, loaded.plugin)
    if loaded.plugin is None:
        return loaded._replace(diagnostics=loaded.diagnostics + found)
    if options and contract.choice is not None:
        found += contract.choice.check_options(loaded.plugin, options)
    failed = any(diagnostic.severity == "error" for diagnostic in found)
    return ManifestRead(None if failed else loaded.plugin, loaded.diagnostics + found)


def position(plugin: Plugin, keys: KeyPath) -> tuple[int, int]:
    """Line and column of a key in the plugin's manifest; (0, 0) if the manifest can no longer be read.

    The manifest is read again: a plugin from the cache has no document, and only a denial needs a position.
    There can be many denials, so its text is parsed once.
    """
    global _positioned
    try:
        raw = _bytes_of(plugin.manifest)
        if _positioned is None or (_positioned.path, _positioned.raw) != (plugin.manifest, raw):
            _positioned = _recognise(FoundManifest(plugin.manifest, plugin.contract), raw)[1]
        return _positioned.where(keys)
    except DocumentError:
        return 0, 0


_positioned: Document | None = None  # the last document that `position` parsed


def _home() -> str:
    home = os.path.expanduser("~")
    return home if home.startswith("/") else ""


def _bytes_of(path: str) -> bytes:
    try:
        return read_bounded(path)
    except DocumentError as error:
        host_file = _host_file(path) if error.diagnostics[0].rule == "file_too_large" else None
        if host_file is None or host_file.limits is None:
            raise
        return read_bounded(path, limit=host_file.limits[0])


def _host_file(path: str) -> HostFile | None:
    """How the file is read, if its path is that of a host's configuration."""
    all_hosts = (contract.configurations for contract in all_contracts())
    found = (hosts.file_at(path) for hosts in all_hosts if hosts is not None)
    return next((file for file in found if file is not None), None)


def _recognise(found: FoundManifest, raw: bytes) -> tuple[str, Document]:
    """The contract of a manifest, and its text, parsed. Every verb decides by this: the operator's choice
    counts, then the content, and where that tells nothing the file's name, or the folder that it is in."""
    host_file = _host_file(found.path)
    limit, most_values = (host_file and host_file.limits) or (SIZE_LIMIT, None)
    if found.contract is not None:
        contract = find_contract(found.contract)
        syntax = _format_for(contract, found.path)
        read = parse_with_comments if contract.configurations is not None and syntax == "json" else parse
        return found.contract, read(found.path, raw, syntax, limit=limit, most_values=most_values)
    syntax = _format(found.path, raw) if host_file is None else host_file.format
    try:
        # Only configurations of hosts may have comments: below, nothing else is recognised in one that has.
        read = parse_with_comments if syntax == "json" else parse
        document = read(found.path, raw, syntax, limit=limit, most_values=most_values)
    except DocumentError as error:
        if host_file is not None or found.path.endswith(tuple(_ENDINGS)):
            raise
        # The file name fixes no format, so the syntax error is only part of the hint.
        raise _unknown(found.path, _syntax_hint(syntax, error.diagnostics[0])) from None
    matching = [
        contract.name
        for contract in all_contracts()
        if (document.format == contract.format or contract.configurations is not None)
        and contract.recognises(document)
    ]
    if len(matching) > 1:
        message = f"by its content this could be a manifest of {' or '.join(matching)}"
        hint = f"choose with {' or '.join(f'--contract {name}' for name in matching)}"
        raise _refusal(found.path, "manifest_ambiguous", message, hint)
    named = matching or _by_path(found.path)
    if document.format == "jsonc" and syntax == "json" and not _takes_comments(named):
        parse(found.path, raw, "json", limit=limit)  # says where the first comment is
    if len(named) != 1:
        raise _unknown(found.path, "read it with --contract NAME to see what is missing")
    return named[0], document


def _by_path(path: str) -> list[str]:
    """The contracts by the file's name, or by its folder if no contract has a manifest of this name."""
    name = os.path.basename(path)
    owners = [contract.name for contract in all_contracts() if name in contract.file_names]
    return owners or [
        contract.name
        for contract in all_contracts()
        if (hosts := contract.configurations) is not None and hosts.file_at(path) is not None
    ]


def _key(found: FoundManifest, raw: bytes, server: str | None, home: str) -> str:
    """The name of its entry in the cache. Variables of the environment may say which folders are a host's, so
    that the bytes alone do not decide."""
    chosen = found.contract or f"by path: {' '.join(_by_path(found.path))}"
    return cache.key(found.path, raw, chosen, server, home)


def _takes_comments(names: list[str]) -> bool:
    return any(find_contract(name).configurations is not None for name in names)


def _unknown(path: str, hint: str) -> DocumentError:
    looked = "; ".join(f"{contract.sign} ({contract.name})" for contract in all_contracts())
    message = f"this is not a manifest of a known contract; looked for {looked}"
    return _refusal(path, "manifest_unknown", message, hint)


def _syntax_hint(syntax: Format, fault: Diagnostic) -> str:
    place = f", line {fault.line}, column {fault.column}" if fault.line else ""
    return f"if it is one, choose with --contract NAME; read as {syntax.upper()}{place}: {fault.message}"


def _format_for(contract: Contract, path: str) -> Format:
    """The format of a contract's manifest, whatever is in it."""
    if contract.configurations is None:
        return contract.format
    if (known := contract.configurations.file_at(path)) is not None:
        return known.format
    return next((syntax for ending, syntax in _ENDINGS.items() if path.endswith(ending)), contract.format)


def _format(path: str, raw: bytes) -> Format:
    for ending, syntax in _ENDINGS.items():
        if path.endswith(ending):
            return syntax
    # Nearly any text is YAML, so it is never guessed.
    return "json" if raw.lstrip()[:1] == b"{" else "toml"
