"""The servers of a configuration, whatever the host: each entry as a HostServer, from the text alone."""

from __future__ import annotations

from collections.abc import Iterator

from runner.contracts.mcp.hosts.host import Host, HostServer, Shape
from runner.manifest.table import Table
from sandbox.document.diagnostic import quoted
from sandbox.document.read import Document
from sandbox.spec import KeyPath

# A file whose host is not known: the notation that nearly all of them have.
GENERIC = Host("", "json", (("mcpServers",),), keys=("description", "disabled", "timeout", "headers"))

REMOTE = ("http", "sse", "streamable-http", "streamableHttp", "streamable_http", "ws", "remote")
URLS = ("url", "serverUrl", "httpUrl", "uri")
OVER_NETWORK = "is reached over the network; only stdio servers can be hosted"
# Where each shape has its program, its arguments and its variables.
_WORDS: dict[Shape, tuple[str, str, str]] = {
    "plain": ("command", "args", "env"),
    "nested": ("path", "args", "env"),
    "argv": ("command", "", "environment"),
    "cmd": ("cmd", "args", "envs"),
}


def servers_of(document: Document, host: Host | None) -> tuple[HostServer, ...]:
    """All its servers in the order of the text; a user's own before those of projects."""
    host = host or GENERIC
    found: list[HostServer] = []
    for keys, scope in _tables(document, host):
        table = _at(document.data, keys)
        if host.named_list and isinstance(table, list):
            for index, entry in enumerate(table):
                name = entry.get("name") if isinstance(entry, dict) else None
                shown = name if isinstance(name, str) and name else f"item {index + 1}"
                found.append(_server(shown, entry, (*keys, index), host, scope))
        elif isinstance(table, dict):
            entries = [(name, entry) for name, entry in table.items() if not _is_hosts_own(entry, host)]
            found += [_server(name, entry, (*keys, name), host, scope) for name, entry in entries]
    return tuple(found)


def _tables(document: Document, host: Host) -> Iterator[tuple[KeyPath, str]]:
    """The keys of each table of servers, and the project that it is for."""
    if host.shape == "argv" and _is_second_version(document.data.get("mcp")):
        yield ("mcp", "servers"), ""
        return
    for keys in host.servers:
        if host.shape == "argv" and len(keys) > 1:
            continue
        if "*" not in keys:
            yield keys, ""
            continue
        star = keys.index("*")
        parents = _at(document.data, keys[:star])
        for name in parents if isinstance(parents, dict) else ():
            yield (*keys[:star], name, *keys[star + 1 :]), name


def _is_second_version(mcp: object) -> bool:
    """Whether the servers are one level deeper: `servers` is not itself a server of this name."""
    inner = mcp.get("servers") if isinstance(mcp, dict) else None
    return isinstance(inner, dict) and not any(
        isinstance(inner.get(key), str | list) for key in ("command", "type", "url")
    )


def _is_hosts_own(entry: object, host: Host) -> bool:
    """Extensions that are part of the host, and of which there is no program."""
    if host.shape != "cmd" or not isinstance(entry, dict):
        return False
    return entry.get("type") not in ("stdio", None, *REMOTE)


def _at(data: object, keys: KeyPath) -> object:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _server(name: str, data: object, keys: KeyPath, host: Host, scope: str) -> HostServer:
    shape = host.shape
    entry = Table(data, keys)
    if shape == "cmd" and isinstance(entry.data.get("config"), dict):  # as older versions wrote it
        entry = Table(
            {**entry.table("config").data, "enabled": entry.data.get("enabled")}, entry.at("config")
        )
    if shape == "nested" and not isinstance(entry.data.get("command"), dict):
        shape = "plain"
    program = entry.table("command") if shape == "nested" else entry
    command, args, env = _WORDS[shape]
    empty = HostServer(name, keys, shape, program.at(command), None, (), scope=scope, disabled=_is_off(entry))
    if not isinstance(data, dict):
        return empty._replace(fault="is not an object with a command")
    if _is_remote(entry):
        return empty._replace(remote=True, skipped=OVER_NETWORK)
    if "settings" in entry and command not in program and shape == "plain" and host.shape == "nested":
        return empty._replace(skipped=f"belongs to an extension, whose program only {host.name} knows")
    argv, fault = _argv(program, command, args)
    pairs, env_fault = _env(program, env, host)
    return empty._replace(
        args_keys=program.at(args) if args and args in program else None,
        argv=argv,
        env=pairs,
        env_keys=program.at(env) if env in program else None,
        passed=_passed(entry),
        env_file=(entry.string("envFile") or "") if "envFile" in host.keys else "",
        cwd=entry.string("cwd") or "",
        fault=fault or env_fault,
    )


def _is_off(entry: Table) -> bool:
    return entry.data.get("disabled") is True or entry.data.get("enabled") is False


def _is_remote(entry: Table) -> bool:
    kind = entry.string("type") or entry.string("transport") or entry.string("transportType")
    return kind in REMOTE or any(entry.string(url) is not None for url in URLS)


def _argv(program: Table, command: str, args: str) -> tuple[tuple[str, ...], str]:
    """The words of the command line, and what is wrong with them."""
    value = program.data.get(command)
    if not args:
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            return (), f"has no {quoted(command)} that is a list of strings"
        return tuple(value), "" if value and value[0].strip() else "has no command"
    if not isinstance(value, str) or not value.strip():
        return (), "has no command" if command not in program else f"has no {quoted(command)} to start"
    words = program.data.get(args)
    if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        return (value,), f"has {quoted(args)} that is not a list of strings"
    return (value, *(words or ())), ""


def _env(program: Table, key: str, host: Host) -> tuple[tuple[tuple[str, str], ...], str]:
    value = program.data.get(key)
    if value is None:
        return (), ""
    if not isinstance(value, dict):
        return (), f"has {quoted(key)} that is not an object"
    found: dict[str, str] = {}
    for name, text in value.items():
        if host.rules == "vscode" and text is None:
            continue  # "unset it", and no cage has it set
        if isinstance(text, int | float) and not isinstance(text, bool) and host.syntax in ("jsonc", "yaml"):
            text = str(text)
        if not isinstance(text, str):
            return tuple(found.items()), f"has a variable {quoted(str(name))} whose value is not a string"
        found[name] = text
    return tuple(found.items()), ""


def _passed(entry: Table) -> tuple[str, ...]:
    """Names of variables, as strings or as objects with a name."""
    found: list[str] = []
    for key in ("env_vars", "env_keys"):
        value = entry.data.get(key)
        for item in value if isinstance(value, list) else ():
            name = item.get("name") if isinstance(item, dict) else item
            if isinstance(name, str):
                found.append(name)
    return tuple(dict.fromkeys(found))
