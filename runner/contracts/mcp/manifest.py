"""MCP servers of a host's configuration. `x-sandbox` holds a server's requests for the cage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from runner.contracts.mcp.hosts.choice import choose, comments_remark, remarks_on
from runner.contracts.mcp.hosts.entries import GENERIC, servers_of
from runner.contracts.mcp.hosts.expand import OURS, expand_home, references, with_folders
from runner.contracts.mcp.hosts.fill import argument_files
from runner.contracts.mcp.hosts.find import host_of, place_of
from runner.contracts.mcp.hosts.host import Host, HostServer
from runner.contracts.mcp.hosts.site import Site, directory_of, site_of
from runner.contracts.mcp.hosts.wrapping import plugin_env, plugin_env_file, run_name, split_wrapped
from runner.contracts.mcp.named_paths import missing_program, named_paths
from runner.install.image_reference import normal_reference
from runner.install.request import UnusableSpec
from runner.manifest import sandbox_request
from runner.manifest.table import Item, Table
from runner.plugin import Entrypoint, LaunchFault, Plugin, Template
from sandbox import look, surroundings
from sandbox.cache import fingerprint
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, nearest, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.paths.executable import is_executable
from sandbox.paths.mounts import contains
from sandbox.paths.program import script_of
from sandbox.policy.policy import steers
from sandbox.spec import (
    PLUGIN_DIR_TOKEN,
    STATE_DIR_TOKEN,
    Access,
    EnvRequest,
    ImageRoot,
    KeyPath,
    Network,
    PathRequest,
    Project,
    SandboxSpec,
    is_variable_name,
)
from sandbox.speed.value import NamedTuple

OWN_FILE = "mcp.json"  # the manifest of a server that has a folder of its own
NAME_LIMIT = 128
UNKNOWN = "sandbox_unknown_key"

_VARIABLE = re.compile(r"\$\{[A-Za-z_][^}]*\}")


def servers(document: Document) -> tuple[str, ...]:
    """What --server can choose from."""
    return tuple(server.label for server in _all(document, _home())[1] if not server.skipped)


def remarks(document: Document) -> tuple[Diagnostic, ...]:
    host, found, _ = _all(document, _home())
    return (*comments_remark(document, host), *remarks_on(document, found))


def _home() -> str:
    return os.path.expanduser("~")


def _all(document: Document, home: str) -> tuple[Host | None, tuple[HostServer, ...], bool]:
    """The host, its servers, and whether the file's folder is theirs. A file may have thousands, and each is
    checked: it is read once."""
    global _last
    if _last is None or _last[0] is not document or _last[1] != home:
        # Without the caller's variables: a plugin is cached by the bytes of this file, its path and the home.
        host = host_of(document.path, document, home=home, environ={})
        found = servers_of(document, host)
        is_own = host is None and _is_own_folder(document.path, found, home)
        _last = document, home, host, found, is_own
    return _last[2:]


_last: tuple[Document, str, Host | None, tuple[HostServer, ...], bool] | None = None


def _is_own_folder(path: str, found: Sequence[HostServer], home: str) -> bool:
    """Whether the folder of a manifest is a plugin's own, as `runner new` makes one: mcp.json of no host,
    whose programs all lie beside it. The file itself is never shown."""
    folder, name = os.path.split(path)
    if name != OWN_FILE or os.path.basename(folder).startswith(".") or place_of(path, home) is not None:
        return False
    return all(_lies_in(folder, each, home) for each in found)


def _lies_in(folder: str, server: HostServer, home: str) -> bool:
    words = tuple(
        expand_home(item.text, home).replace(PLUGIN_DIR_TOKEN, folder) for item in _words(server).argv
    )
    program = script_of(words) or (words[0] if words and "/" in words[0] else "")
    directory = os.path.normpath(os.path.join(folder, expand_home(server.cwd, home)))
    place = os.path.normpath(os.path.join(directory, program))
    is_inside = place != folder and contains(folder, place) and contains(folder, directory)
    # What else is filled in may lead anywhere.
    return bool(program) and is_inside and "$" not in program + server.cwd and not server.scope


def read(
    document: Document, *, server: str | None = None, home: str = ""
) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """One server as a plugin (None if there is an error), and all diagnostics."""
    faults = Faults(document)
    host, found, is_own = _all(document, home)
    chosen = choose(faults, host, found, server)
    if chosen is None:
        return None, faults.diagnostics()
    entry = Table(_value(document, chosen.keys), chosen.keys)
    _check_name(faults, entry.keys, chosen.name)
    _check_entry(faults, host or GENERIC, chosen, _value(document, chosen.keys))
    if faults.failed and not chosen.argv:
        return None, faults.diagnostics()
    if chosen.disabled:
        message = f"{quoted(chosen.name)} is disabled in this file"
        faults.warn(entry.keys, "server_disabled", message, "it is started only if --server names it")
    site = site_of(document.path, chosen, host, home)
    words = _words(chosen)
    entrypoint, env = _entrypoint(faults, chosen, words, host, site, home)
    deciding = (*words.argv, *(item for name, item in words.env if steers(name)))
    rules = "" if host is None else host.rules
    files = argument_files(faults, deciding, rules, document.path, home, own=site.own)
    sandbox = entry.table("x-sandbox")
    spec, shared = _spec(faults, sandbox, env, home), sandbox.data.get("shared")
    state = sandbox_request.own_state((*words.argv, *(item for _, item in words.env)))
    if split_wrapped(chosen.argv) is not None:  # as its host's runner gives it, which has a --name
        state = (PathRequest(STATE_DIR_TOKEN, "write"),)
    folder = os.path.dirname(document.path)
    # Anybody else's folder is a path like all others, which a policy or a person has to grant. A home was
    # refused before, as for all.
    others = tuple(each for each in spec.paths if (each.path, each.access) != (folder, "read"))
    is_shown = is_own and others != spec.paths
    paths = others if is_shown else spec.paths
    spec = spec._replace(paths=tuple(dict.fromkeys((*paths, *state))))
    if faults.failed:
        return None, faults.diagnostics()
    plugin = Plugin(
        id=run_name(chosen.name),  # as the entry has it once it is wrapped
        version="",
        contract="mcp",
        name=chosen.name,
        description=entry.string("description") or "",
        manifest=document.path,
        root=None,
        entrypoint=entrypoint,
        spec=spec,
        project=_project(chosen, site, document.path, entrypoint),
        mark=fingerprint(os.fsencode(chosen.scope))[:32] if chosen.scope else "",
        template=_template(chosen, words, host, site, files, home),
        scope=chosen.scope,
        shown_folder=folder if is_shown else "",
        details={} if shared is None else {"shared": shared is True},
    )
    return plugin, faults.diagnostics()


class _Words(NamedTuple):
    """The command line and the variables of an entry, each with its place."""

    argv: tuple[Item, ...]
    env: tuple[tuple[str, Item], ...]


def _words(server: HostServer) -> _Words:
    inner = split_wrapped(server.argv) if server.argv else None
    if inner is not None:
        argv = [Item(server.command_keys, word) for word in inner.argv]
    else:
        argv = [Item(server.command_keys, word) for word in server.argv[:1]]
        args, first = (server.args_keys, 0) if server.shape != "argv" else (server.command_keys, 1)
        argv += [
            Item((*(args or server.keys), first + index), word) for index, word in enumerate(server.argv[1:])
        ]
    table = server.env_keys or server.keys
    env = tuple((name, Item((*table, key), text)) for key, name, text in plugin_env(server))
    return _Words(tuple(argv), env)


def _value(document: Document, keys: KeyPath) -> Any:
    value: Any = document.data
    for key in keys:
        value = value[key]
    return value


def _check_entry(faults: Faults, host: Host, server: HostServer, data: object) -> None:
    """Report what is wrong with an entry, and keys that neither the host nor the runner knows."""
    # Imported here: `check` of a known manifest looks at its files only.
    from runner.contracts.mcp import tables

    depth = len(server.keys)

    def strict(keys: KeyPath, value: object) -> str | None:
        return UNKNOWN if keys[depth : depth + 1] == ("x-sandbox",) else None

    if host.shape == "plain" and not host.named_list and host.syntax != "toml" and isinstance(data, dict):
        known = {key: value for key, value in data.items() if key not in host.keys or host is GENERIC}
        if not server.argv and "command" not in known:
            known.pop(nearest("command", known), None)  # told below, with the missing command
        if host is not GENERIC:
            known.pop("type", None)
            if not server.fault and "env" in known:
                known["env"] = dict(server.env)
        model.check(faults, tables.ServerTable, known, server.keys, strict)
    elif isinstance(data, dict) and "x-sandbox" in data:
        model.check(faults, tables.XSandboxTable, data["x-sandbox"], (*server.keys, "x-sandbox"), strict)
    elif host is GENERIC:
        model.check(faults, tables.ServerTable, data, server.keys, strict)
    entry = data if isinstance(data, dict) else {}
    no_command = server.fault.startswith("has no ") and not server.argv and isinstance(data, dict)
    # The model has reported values that are no text.
    untold = no_command and all(isinstance(entry.get(key, ""), str) for key in ("command", "url"))
    if server.fault and (untold or not faults.failed):
        rule = "command_missing" if no_command else "entry_invalid"
        keys = server.command_keys if no_command else server.keys
        near = nearest("command", entry) if no_command and "command" not in entry else ""
        keys = (*server.keys, near) if near else keys
        hint = f"did you mean 'command' by {quoted(near)}?" if near else ""
        faults.error(keys, rule, f"the server {server.fault}", hint)


def _project(server: HostServer, site: Site, path: str, entrypoint: Entrypoint | None) -> Project | None:
    """The folder that the server works on: its `cwd`, or the project whose file this is. Other configuration
    files are in the folders of clients' settings."""
    if entrypoint is None or not server.cwd:
        return Project(site.project, within=site.within) if site.project else None
    return Project(entrypoint.directory, True, (*server.keys, "cwd"), site.within)


def _template(
    server: HostServer, words: _Words, host: Host | None, site: Site, files: tuple[str, ...], home: str
) -> Template | None:
    """The placeholders that are filled in at the launch, or None."""
    rules = "" if host is None else host.rules
    texts = [item.text for item in (*words.argv, *(item for _, item in words.env))]
    inner = split_wrapped(server.argv)
    env_file = plugin_env_file(server)
    filled = env_file or server.passed or any(next(references(text, rules), None) for text in texts)
    if not filled and inner is None:
        return None
    outer = () if inner is None else inner.options
    decided_by = _decided_by(words, rules, site, home)
    return Template(rules, site.project, env_file, (*server.keys, "envFile"), outer, files, decided_by)


def _decided_by(words: _Words, rules: str, site: Site, home: str) -> str:
    """See Template.decided_by."""
    deciding = (*words.argv, *(item for name, item in words.env if steers(name)))
    texts = [with_folders(item.text, rules, site.project, home) for item in deciding]
    kinds = {each.kind for text in texts for each in references(text, rules)}
    return "folder" if "folder" in kinds else "variables" if kinds else ""


def command_keys(document: Document, plugin: Plugin) -> KeyPath:
    """The keys that lead to a plugin's program."""
    found = (server for server in _all(document, _home())[1] if run_name(server.name) == plugin.id)
    return next((server.command_keys for server in found), ())


def check_files(document: Document, plugin: Plugin, fault: LaunchFault | None) -> tuple[Diagnostic, ...]:
    """A launcher that cannot work in a cage, a program that does not exist, and folders that do not.
    `fault`: of the launcher."""
    keys = command_keys(document, plugin)
    if fault is not None:
        return (document.diagnostic(keys, fault.cause, fault.message, fault.hint, "warning"),)
    entrypoint, template = plugin.entrypoint, plugin.template
    if entrypoint is None or plugin.spec.image is not None:  # its program is in the image
        return ()
    rules, project = ("", "") if template is None else (template.rules, template.folder)
    env = [(each.name, each.value) for each in plugin.spec.env if each.value is not None]
    found = _program_faults(document, keys, entrypoint, env, rules, project)
    where = {each.name: each.where for each in plugin.spec.env}
    for each in named_paths(entrypoint.args, env, rules=rules, project=project, home=_home()):
        if each.missing:
            named = each.variable or "an argument"
            message = f"{named} names {each.path}, and there is no folder {each.missing}"
            if each.missing == each.path:
                message = f"{named} names {each.path}, which does not exist"
            at = where.get(each.variable, keys)
            hint = "make the folder, or correct the path"
            found.append(document.diagnostic(at, "path_missing", message, hint, "warning"))
    return tuple(found)


def program_faults(document: Document, server: str | None) -> tuple[Diagnostic, ...]:
    """`check_files` for an entry with other faults: only what concerns its program."""
    home = _home()
    host, found, _ = _all(document, home)
    ignored = Faults(document)
    chosen = choose(ignored, host, found, server)
    if chosen is None or not chosen.argv:
        return ()
    site, words = site_of(document.path, chosen, host, home), _words(chosen)
    entrypoint, env = _entrypoint(ignored, chosen, words, host, site, home)
    if entrypoint is None:
        return ()
    # Imported here: most files have no fault.
    from runner.contracts.mcp.installed import is_stored
    from runner.contracts.mcp.launchers import launcher_fault

    launched = (entrypoint.command, *entrypoint.args)
    if is_stored(launched, look.environment(surroundings.variables())):
        return ()
    if (fault := launcher_fault(launched, None, (each.name for each in env))) is not None:
        keys = chosen.command_keys
        return (document.diagnostic(keys, fault.cause, fault.message, fault.hint, "warning"),)
    rules = "" if host is None else host.rules
    values = [(each.name, each.value) for each in env if each.value is not None]
    return tuple(_program_faults(document, chosen.command_keys, entrypoint, values, rules, site.project))


def _program_faults(
    document: Document,
    keys: KeyPath,
    entrypoint: Entrypoint,
    env: list[tuple[str, str]],
    rules: str,
    project: str,
) -> list[Diagnostic]:
    directory = entrypoint.directory
    told, hint = missing_program(
        entrypoint.command, env, directory=directory, rules=rules, project=project, home=_home()
    )
    found = [document.diagnostic(keys, "entrypoint_missing", told, hint)] if told else []
    path = os.path.normpath(os.path.join(directory, entrypoint.command))
    if "/" in entrypoint.command and look.isfile(path) and not is_executable(path):
        message = f"the program {quoted(entrypoint.command)} is not executable"
        found.append(document.diagnostic(keys, "program_not_executable", message, f"chmod a+x {path}"))
    return found


def _check_name(faults: Faults, keys: KeyPath, name: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > NAME_LIMIT or name in (".", ".."):
        message = f"{quoted(name)} cannot name a server"
        faults.error(keys, "server_name", message, f"printable characters, {NAME_LIMIT} at most")


def _entrypoint(
    faults: Faults, server: HostServer, words: _Words, host: Host | None, site: Site, home: str
) -> tuple[Entrypoint | None, list[EnvRequest]]:
    rules = "" if host is None else host.rules
    if not rules:
        _warn_unexpanded(faults, (*words.argv[1:], *(item for _, item in words.env)))
    if server.cwd:
        keys = (*server.keys, "cwd")
        cwd = with_folders(server.cwd, rules, site.project, home)
        if next(references(cwd, rules), None) is not None:
            message = f"{quoted(server.cwd)}: only the home and a project's own folder can be filled in here"
            faults.error(keys, "cwd_variable", message, "write the folder's path")
    directory = directory_of(server, site, rules, home)
    if not words.argv:
        return None, []
    command, *args = words.argv
    sandbox_request.check_vector(faults, command, args, words.env)
    env = [EnvRequest(name, item.text, where=item.keys) for name, item in words.env]
    env += [EnvRequest(name, required=False, where=server.keys) for name in server.passed]
    named = {request.name for request in env if request.value is None}
    for item in (*words.argv, *(item for _, item in words.env)):
        for reference in references(item.text, rules):
            name = reference.name
            if reference.kind == "env" and name not in named and name != "HOME" and is_variable_name(name):
                named.add(name)
                env.append(EnvRequest(name, required=False, where=item.keys, fills=True))
    for name in server.passed:
        sandbox_request.check_env_name(faults, server.keys, name)
    texts = [expand_home(item.text, home) if rules == "vscode" else item.text for item in args]
    return Entrypoint(expand_home(command.text, home), tuple(texts), directory), env


def _warn_unexpanded(faults: Faults, items: Iterable[Item]) -> None:
    for item in items:
        if found := next((each for each in _VARIABLE.finditer(item.text) if each[0] not in OURS), None):
            message = f"{quoted(found[0])} is not expanded: only {' and '.join(OURS)} are expanded"
            hint = "to pass a variable on to the server, name it in x-sandbox.env"
            faults.warn(item.keys, "variable_not_expanded", message, hint)


def _spec(faults: Faults, sandbox: Table, env: list[EnvRequest], home: str) -> SandboxSpec:
    named = {request.name for request in env}
    for item in sandbox.strings("env"):
        sandbox_request.check_env_name(faults, item.keys, item.text)
        if item.text not in named:
            named.add(item.text)
            env.append(EnvRequest(item.text, where=item.keys))
    limits, where = sandbox_request.limits(faults, sandbox, "limits")
    seccomp, where = sandbox_request.seccomp(sandbox, where)
    network = _network(faults, sandbox)
    return SandboxSpec(
        enabled=True,
        paths=(
            *_path_requests(faults, sandbox, "read", home),
            *_path_requests(faults, sandbox, "write", home),
        ),
        network=network,
        hide=sandbox_request.hidden(faults, sandbox.strings("hide"), network),
        ssh=sandbox_request.ssh(faults, sandbox.strings("ssh-keys"), sandbox.strings("ssh-hosts")),
        env=tuple(env),
        seccomp=seccomp,
        limits=limits,
        where=where,
        staged=sandbox.data.get("staged") is True,
        image=_image(faults, sandbox),
    )


def _image(faults: Faults, sandbox: Table) -> ImageRoot | None:
    asked = sandbox.string("image")
    if asked is None:
        return None
    try:
        return ImageRoot(normal_reference(asked), sandbox.at("image"))
    except UnusableSpec as fault:
        faults.error(sandbox.at("image"), "image_reference", f"it {fault}")
        return None


def _path_requests(faults: Faults, sandbox: Table, access: Access, home: str) -> list[PathRequest]:
    value = sandbox.data.get(access)
    if value is None:
        return []
    if not isinstance(value, list):
        message = f"'{access}' has to be an array, not {model.type_name(value, faults.document.format)}"
        faults.error(sandbox.at(access), "invalid_type", message)
        return []
    found: dict[PathRequest, None] = {}
    for index, entry in enumerate(value):
        keys: KeyPath = (*sandbox.at(access), index)
        optional = False
        if isinstance(entry, dict):
            entry, optional = _path_object(faults, Table(entry, keys))
            if entry is None:
                continue
        if not isinstance(entry, str):
            got = model.type_name(entry, faults.document.format)
            message = f"item {index} of '{access}' has to be a string or an object, not {got}"
            faults.error(keys, "invalid_type", message)
            continue
        path = expand_home(entry, home)
        if entry == PLUGIN_DIR_TOKEN and access == "read":
            path = os.path.dirname(faults.document.path)
        hint = "write it absolute, or starting with ~/"
        sandbox_request.check_path(faults, Item(keys, entry), path, home, write=access == "write", hint=hint)
        found[PathRequest(path, access, required=not optional, where=keys)] = None
    return list(found)


def _path_object(faults: Faults, entry: Table) -> tuple[str | None, bool]:
    for key in entry.data:
        if key not in ("path", "optional"):
            hint = "known here: path, optional"
            faults.error(entry.at(key), UNKNOWN, f"the key {quoted(key)} is unknown", hint)
    optional = entry.data.get("optional", False)
    if not isinstance(optional, bool):
        message = (
            f"'optional' has to be true or false, not {model.type_name(optional, faults.document.format)}"
        )
        faults.error(entry.at("optional"), "invalid_type", message)
    path = entry.string("path")
    if path is None:
        faults.error(entry.keys, "missing_key", "the entry has no 'path' that is a string")
    return path, optional is True


def _network(faults: Faults, sandbox: Table) -> Network | None:
    value = sandbox.data.get("network")
    keys = sandbox.at("network")
    if value is None:
        return None
    if isinstance(value, list):
        if not all(isinstance(item, str) for item in value):
            faults.error(keys, "invalid_type", "'network' as an array has to hold strings")
        hosts = sandbox_request.hosts(faults, sandbox.strings("network"), keys, '"none"')
        return Network("allowlist" if hosts else "none", hosts, keys)
    if value == "none":
        return Network("none", where=keys)
    if value == "host":
        return Network("host", where=keys)
    given = quoted(value) if isinstance(value, str) else model.type_name(value, faults.document.format)
    message = f"'network' is {given}; possible are 'none', 'host' and a list of \"name:port\""
    faults.error(keys, "invalid_value", message)
    return None


def json_schema() -> dict[str, object]:
    from runner.contracts.mcp import tables

    return model.editor_schema(tables.Manifest, "mcp.json", closed=("XSandboxTable",))
