"""The servers of a configuration, whatever the host: each entry as a HostServer, from the text alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.contracts.mcp.hosts.host import Host, HostServer, Shape
from runner.manifest.table import Table
from sandbox.document.diagnostic import quoted
from sandbox.document.read import Document
from sandbox.spec import KeyPath

# A file whose host is not known: the notation that nearly all of them have.
GENERIC = Host("", "json", (("mcpServers",),), keys=("description", "disabled", "timeout", "headers"))

REMOTE = ("http", "sse", "streamable-http", "streamableHttp", "streamable_http", "ws", "remote")
URLS = ("url", "serverUrl", "httpUrl", "uri")
_LOCAL = ("stdio", "local")  # what hosts call a server that they start
_TYPES = ("type", "transport", "transportType")
# Goose's own, of which there is no program.
_GOOSE_TYPES = ("builtin", "platform", "frontend")
# Keys beside a URL whose value is a command, which the host starts outside of every cage.
_HELPERS = ("headersHelper",)
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
            for name, entry in table.items():
                if not _is_hosts_own(entry, host) and _is_entry(entry, keys, table, host):
                    found.append(_server(name, entry, (*keys, name), host, scope))
    return tuple(found)


def _tables(document: Document, host: Host) -> Iterator[tuple[KeyPath, str]]:
    """The keys of each table of servers, and the project that it is for."""
    for keys in host.servers:
        if "*" not in keys:
            yield keys, ""
            continue
        star = keys.index("*")
        parents = _at(document.data, keys[:star])
        for name in parents if isinstance(parents, dict) else ():
            yield (*keys[:star], name, *keys[star + 1 :]), name


def _is_entry(entry: object, keys: KeyPath, table: dict[str, Any], host: Host) -> bool:
    """Versions of opencode differ in whether `servers` is a server of this name, or the table of all: what
    may be a server on either level counts."""
    if host.shape != "argv":
        return True
    looks_so = isinstance(entry, dict) and any(
        isinstance(entry.get(key), str | list) for key in ("command", "type", "url")
    )
    return looks_so or (
        isinstance(entry, dict) if len(keys) > 1 else not isinstance(table.get("servers"), dict)
    )


def _is_hosts_own(entry: object, host: Host) -> bool:
    """Extensions that are part of the host, and of which there is no program."""
    if host.shape != "cmd" or not isinstance(entry, dict):
        return False
    return entry.get("type") in _GOOSE_TYPES and not entry.get("cmd") and not entry.get("config")


def _at(data: object, keys: KeyPath) -> object:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _server(name: str, data: object, keys: KeyPath, host: Host, scope: str) -> HostServer:
    shape = host.shape
    entry = Table(data, keys)
    twice = ""
    if shape == "cmd" and isinstance(entry.data.get("config"), dict):  # as older versions wrote it
        own = {key: entry.data[key] for key in ("enabled", "type") if key in entry}
        if strays := [key for key in ("cmd", "args", "envs", "env_keys", *URLS) if key in entry]:
            twice = f"has {quoted(strays[0])} and a 'config', and versions of Goose differ in which they take"
        else:
            entry = Table({**entry.table("config").data, **own}, entry.at("config"))
    if shape == "nested" and not isinstance(entry.data.get("command"), dict):
        shape = "plain"
    program = entry.table("command") if shape == "nested" else entry
    command, args, env = _WORDS[shape]
    empty = HostServer(name, keys, shape, program.at(command), None, (), scope=scope, disabled=_is_off(entry))
    if not isinstance(data, dict):
        return empty._replace(fault="is not an object with a command")
    odd = twice or _type_fault(entry, host)
    if not odd and _is_remote(entry):
        return empty._replace(remote=True, skipped=OVER_NETWORK)
    if (
        not odd
        and shape == "cmd"
        and command not in program
        and entry.data.get("type") not in (None, *_LOCAL)
    ):
        return empty._replace(skipped=f"has a type of which only {host.name} knows what it starts")
    if "settings" in entry and command not in program and shape == "plain" and host.shape == "nested":
        return empty._replace(skipped=f"belongs to an extension, whose program only {host.name} knows")
    argv, fault = _argv(program, command, args)
    pairs, env_fault = _env(program, env, host)
    return empty._replace(
        args_keys=program.at(args) if args and args in program else None,
        argv=argv,
        env=pairs,
        env_keys=program.at(env) if env in program else None,
        passed=_passed_names(entry),
        env_file=(entry.string("envFile") or "") if "envFile" in host.keys else "",
        cwd=entry.string("cwd") or "",
        fault=odd or fault or env_fault,
    )


def _is_off(entry: Table) -> bool:
    return entry.data.get("disabled") is True or entry.data.get("enabled") is False


def _type_fault(entry: Table, host: Host) -> str:
    """Returns why it is unclear what a host starts for an entry, or ''. Such an entry must not pass for
    remote."""
    name = host.name or "the host"
    if helper := next((key for key in _HELPERS if entry.data.get(key)), ""):
        return f"has {quoted(helper)}, a command that {name} runs outside of every cage; remove it"
    key = _program_key(entry)
    if not key:
        return ""
    if url := next((each for each in URLS if entry.string(each)), ""):
        return f"has {quoted(key)} and {quoted(url)}, and hosts differ in which they take; remove one of them"
    for each in _TYPES:
        kind = entry.data.get(each)
        if kind in REMOTE:
            return (
                f"has {quoted(key)} and the {each} {quoted(kind)} of a server without one; remove one of them"
            )
        if kind is not None and kind not in _LOCAL:
            return (
                f"has {quoted(key)} and the unknown {each} {quoted(str(kind))}; write 'stdio', or remove it"
            )
    return ""


def _program_key(entry: Table) -> str:
    return next((key for key in ("command", "cmd") if entry.data.get(key)), "")


def _is_remote(entry: Table) -> bool:
    """Whether an entry is reached over the network. One with a program is not: see _type_fault."""
    if _program_key(entry):
        return False
    kinds = [entry.data.get(each) for each in _TYPES]
    return any(kind in REMOTE for kind in kinds) or any(entry.string(url) is not None for url in URLS)


def _argv(program: Table, command: str, args: str) -> tuple[tuple[str, ...], str]:
    """The command line, and its fault or ''."""
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
    fault = ""
    for name, text in value.items():
        if host.rules == "vscode" and text is None:
            continue  # "unset it", and no cage has it set
        if isinstance(text, int | float) and not isinstance(text, bool) and host.syntax in ("jsonc", "yaml"):
            text = str(text)
        if not isinstance(text, str):
            fault = fault or f"has a variable {quoted(str(name))} whose value is not a string"
            continue
        found[name] = text
    return tuple(found.items()), fault


def _passed_names(entry: Table) -> tuple[str, ...]:
    """Names of variables, as strings or as objects with a name."""
    found: list[str] = []
    for key in ("env_vars", "env_keys"):
        value = entry.data.get(key)
        for item in value if isinstance(value, list) else ():
            name = item.get("name") if isinstance(item, dict) else item
            if isinstance(name, str):
                found.append(name)
    return tuple(dict.fromkeys(found))
