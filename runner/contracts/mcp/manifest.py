"""MCP servers of an `mcpServers` configuration. `x-sandbox` holds a server's requests for the cage."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runner.manifest import model, sandbox_request
from runner.manifest.faults import Faults
from runner.manifest.table import Item, Table
from runner.plugin import Entrypoint, Plugin
from sandbox.document.diagnostic import Diagnostic, did_you_mean, quoted
from sandbox.document.read import Document
from sandbox.spec import (
    PLUGIN_DIR_TOKEN,
    STATE_DIR_TOKEN,
    Access,
    EnvRequest,
    KeyPath,
    Network,
    PathRequest,
    Project,
    SandboxSpec,
    SeccompProfile,
)

NAME_LIMIT = 128
PROJECT_FILE = ".mcp.json"
OPERATORS_FILE = "claude_desktop_config.json"  # always among a client's own settings, never in a project
REMOTE = ("http", "sse", "streamable-http", "streamableHttp", "ws")
UNKNOWN = "sandbox_unknown_key"

_VARIABLE = re.compile(r"\$\{[A-Za-z_][^}]*\}")
_PATHS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"path": {"type": "string"}, "optional": {"type": "boolean"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        ]
    },
}


class _Table(BaseModel):
    model_config = model.TABLE


def _paths(description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra=_PATHS_SCHEMA)


class XSandboxTable(_Table):
    """What the server asks of the cage."""

    read: Any = _paths('Host paths to read: absolute or ~/…; {"path": …, "optional": true} may be missing.')
    write: Any = _paths("Host paths to write. ${state_dir} is the server's own folder.")
    network: Any = Field(
        default=None,
        description='"none" (default), "host", or a list of "name:port".',
        json_schema_extra={
            "anyOf": [{"enum": ["none", "host"]}, {"type": "array", "items": {"type": "string"}}]
        },
    )
    env: list[str] | None = Field(default=None, description="Names of variables to pass on from the host.")
    limits: Any = Field(default=None, json_schema_extra=sandbox_request.limits_schema())
    seccomp: SeccompProfile | None = Field(default=None, description="System calls: strict, default, compat.")


class ServerTable(_Table):
    """One server."""

    command: str | None = Field(
        default=None, description="Program: on PATH, absolute, or relative with a slash."
    )
    args: list[str] | None = Field(
        default=None,
        description="Arguments. ${state_dir} is the server's own folder, ${plugin_dir} this file's.",
    )
    env: dict[str, str] | None = Field(
        default=None, description="Variables to set. ${state_dir} and ${plugin_dir} are filled in."
    )
    cwd: str | None = Field(
        default=None, description="Working directory. The launch is refused where it is not shown."
    )
    type: Literal["stdio", "http", "sse", "streamable-http", "streamableHttp", "ws"] | None = Field(
        default=None, description="Only stdio can be hosted."
    )
    url: str | None = Field(default=None, description="Servers with a URL cannot be hosted.")
    x_sandbox: XSandboxTable | None = Field(default=None, alias="x-sandbox")
    # Keys of some clients, which the runner does not use.
    description: Any = None
    disabled: Any = None
    timeout: Any = None
    autoApprove: Any = None  # noqa: N815 (the clients' spelling)
    alwaysAllow: Any = None  # noqa: N815
    headers: Any = None


class Manifest(BaseModel):
    """mcp.json"""

    model_config = ConfigDict(strict=True, defer_build=True)
    mcpServers: dict[str, ServerTable] = Field(description="Servers by name.")  # noqa: N815


def servers(document: Document) -> tuple[str, ...]:
    return tuple(Table(document.data).table("mcpServers").data)


def read(
    document: Document, *, server: str | None = None, home: str = ""
) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """One server as a plugin (None if there is an error), and all diagnostics."""
    faults = Faults(document)
    chosen = _choose(faults, document, server)
    if chosen is None:
        return None, faults.diagnostics()
    name, entry = chosen
    _check_name(faults, entry.keys, name)
    model.check(faults, ServerTable, document.data["mcpServers"][name], entry.keys, _strict)  # type: ignore[index]
    if not isinstance(document.data["mcpServers"][name], dict):  # type: ignore[index]
        return None, faults.diagnostics()
    if entry.string("url") is not None or entry.string("type") in REMOTE:
        key = "url" if "url" in entry else "type"
        message = f"{quoted(name)} is reached over the network; only stdio servers can be hosted"
        faults.error(entry.at(key), "server_not_stdio", message)
        return None, faults.diagnostics()
    entrypoint, env = _entrypoint(faults, entry, os.path.dirname(document.path), home)
    spec = _spec(faults, entry.table("x-sandbox"), env, home)
    words = (*entry.strings("args"), *(item for _, item in entry.pairs("env")))
    state = sandbox_request.own_state(words)
    spec = spec._replace(paths=tuple(dict.fromkeys((*spec.paths, *state))))
    if faults.failed:
        return None, faults.diagnostics()
    plugin = Plugin(
        id=name,
        version="",
        contract="mcp",
        name=name,
        description=entry.string("description") or "",
        manifest=document.path,
        root=None,
        entrypoint=entrypoint,
        spec=spec,
        project=_project(entry, document.path, entrypoint),
    )
    return plugin, faults.diagnostics()


def _project(entry: Table, path: str, entrypoint: Entrypoint | None) -> Project | None:
    """The folder that the server works on: its `cwd`, or the folder of `.mcp.json`. Other configuration files
    are in the folders of clients' settings.

    Most of these files can come with a project. Then the project's author wrote the file, and must not
    choose a folder outside the project.
    """
    folder, name = os.path.split(path)
    within = "" if name == OPERATORS_FILE else folder
    if entrypoint is None or not entry.string("cwd"):
        return Project(folder, within=within) if name == PROJECT_FILE else None
    return Project(entrypoint.directory, True, entry.at("cwd"), within)


def _choose(faults: Faults, document: Document, server: str | None) -> tuple[str, Table] | None:
    entries = document.data.get("mcpServers")
    if not isinstance(entries, dict):
        found = f"is {model.type_name(entries)}" if "mcpServers" in document.data else "is missing"
        faults.error(("mcpServers",), "servers_missing", f"the object mcpServers {found}")
        return None
    names = tuple(entries)
    shown = ", ".join(quoted(name) for name in names[:20]) + (", …" if len(names) > 20 else "")
    if not names:
        faults.error(("mcpServers",), "servers_missing", "mcpServers has no entries")
    elif server is None and len(names) > 1:
        message = f"there are {len(names)} servers: {shown}"
        faults.error(("mcpServers",), "server_needed", message, "choose one with --server NAME")
    elif server is not None and server not in entries:
        message = f"there is no server {quoted(server)}; there are {shown}"
        faults.error(("mcpServers",), "server_unknown", message, did_you_mean(server, names[:100]))
    else:
        name = names[0] if server is None else server
        return name, Table(entries[name], ("mcpServers", name))
    return None


def _check_name(faults: Faults, keys: KeyPath, name: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > NAME_LIMIT or name in (".", ".."):
        message = f"{quoted(name)} cannot name a server"
        faults.error(keys, "server_name", message, f"printable characters, {NAME_LIMIT} at most")
    elif "/" in name or "\\" in name:
        faults.error(keys, "server_name", f"the server name {quoted(name)} contains a path separator")


def _strict(keys: KeyPath) -> str | None:
    return UNKNOWN if keys[2:3] == ("x-sandbox",) else None


def _entrypoint(
    faults: Faults, entry: Table, directory: str, home: str
) -> tuple[Entrypoint | None, list[EnvRequest]]:
    pairs = entry.pairs("env")
    args = entry.strings("args")
    for item in (*args, *(item for _, item in pairs)):
        ours = (STATE_DIR_TOKEN, PLUGIN_DIR_TOKEN)
        if found := next((each for each in _VARIABLE.finditer(item.text) if each[0] not in ours), None):
            message = f"{quoted(found[0])} is not expanded: only {' and '.join(ours)} are expanded"
            hint = "to pass a variable on to the server, name it in x-sandbox.env"
            faults.warn(item.keys, "variable_not_expanded", message, hint)
    cwd = entry.string("cwd")
    if cwd:
        # normpath keeps two slashes at the beginning.
        directory = "/" + os.path.normpath(os.path.join(directory, _expanded(cwd, home))).lstrip("/")
    command = entry.string("command")
    sandbox_request.check_vector(faults, Item(entry.at("command"), command or ""), args, pairs)
    if command is None or not command.strip():
        if "command" not in entry or command is not None:
            faults.error(entry.at("command"), "command_missing", "the server has no command")
        return None, []
    env = [EnvRequest(name, item.text, where=item.keys) for name, item in pairs]
    return Entrypoint(_expanded(command, home), tuple(item.text for item in args), directory), env


def _expanded(path: str, home: str) -> str:
    if path == "~" or path.startswith("~/"):
        return home.rstrip("/") + path[1:] if home.startswith("/") else path
    return path


def _spec(faults: Faults, sandbox: Table, env: list[EnvRequest], home: str) -> SandboxSpec:
    named = {request.name for request in env}
    for item in sandbox.strings("env"):
        sandbox_request.check_env_name(faults, item.keys, item.text)
        if item.text not in named:
            named.add(item.text)
            env.append(EnvRequest(item.text, where=item.keys))
    limits, where = sandbox_request.limits(faults, sandbox, "limits")
    seccomp, where = sandbox_request.seccomp(sandbox, where)
    return SandboxSpec(
        enabled=True,
        paths=(
            *_path_requests(faults, sandbox, "read", home),
            *_path_requests(faults, sandbox, "write", home),
        ),
        network=_network(faults, sandbox),
        env=tuple(env),
        seccomp=seccomp,
        limits=limits,
        where=where,
    )


def _path_requests(faults: Faults, sandbox: Table, access: Access, home: str) -> list[PathRequest]:
    value = sandbox.data.get(access)
    if value is None:
        return []
    if not isinstance(value, list):
        message = f"'{access}' has to be an array, not {model.type_name(value)}"
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
            message = (
                f"item {index} of '{access}' has to be a string or an object, not {model.type_name(entry)}"
            )
            faults.error(keys, "invalid_type", message)
            continue
        path = _expanded(entry, home)
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
        message = f"'optional' has to be true or false, not {model.type_name(optional)}"
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
    given = quoted(value) if isinstance(value, str) else model.type_name(value)
    message = f"'network' is {given}; possible are 'none', 'host' and a list of \"name:port\""
    faults.error(keys, "invalid_value", message)
    return None


def json_schema() -> dict[str, object]:
    return model.editor_schema(Manifest, "mcp.json", closed=("XSandboxTable",))
