"""rune bundles: rterm-plugin.json. A process serves one request. It gets exactly the listed environment."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, Field

from runner.contracts.rune.terms import PROTOCOL, TIMEOUTS
from runner.manifest import sandbox_request
from runner.manifest.table import Item, Table
from runner.plugin import Entrypoint, Plugin
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document, parse, read_bounded
from sandbox.spec import EnvRequest, KeyPath, SandboxSpec

TIERS = ("safe", "moderate", "dangerous", "destructive")
TARGETS = ("workspace", "widget", "policy")
ID_LIMIT = 128
ANY_OBJECT = {"type": "object", "additionalProperties": True}  # the schema of a tool that gives none


class _Table(BaseModel):
    model_config = model.TABLE


class ProcessTable(_Table):
    """How the plugin is started."""

    command: str = Field(description="Program: on PATH, absolute, or with a slash, relative to the bundle.")
    args: list[str] | None = Field(default=None, description="Arguments.")
    dir: str | None = Field(
        default=None, description="Working directory inside the bundle; default its root."
    )
    env: list[str] | None = Field(default=None, description='The whole environment, as "NAME=value".')


class ToolTable(_Table):
    """One tool."""

    name: str = Field(description="Unique in the bundle.")
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(default=None, description="JSON Schema of the input.")
    output_schema: dict[str, Any] | None = Field(default=None, description="JSON Schema of the output.")
    capabilities: list[str] | None = Field(default=None, description="Those of the plugin this tool needs.")
    approval_tier: str | None = Field(default=None, json_schema_extra={"enum": [*TIERS, "", None]})
    mutating: bool | None = None
    target_kind: str | None = Field(default=None, json_schema_extra={"enum": [*TARGETS, "", None]})


class Manifest(_Table):
    """rterm-plugin.json"""

    plugin_id: str = Field(description="Identifier; also the name of the folder it is installed in.")
    display_name: str | None = None
    description: str | None = None
    plugin_version: str = Field(description="Any text that is not blank.")
    protocol_version: str = Field(description=PROTOCOL)
    capabilities: list[str] | None = Field(default=None, description="Everything the plugin may declare.")
    process: ProcessTable
    tools: list[ToolTable] = Field(description="At least one.")


def read(document: Document, *, home: str = "") -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin a bundle describes (None if there is an error), and everything to say about it."""
    faults = Faults(document)
    model.check(faults, Manifest, document.data, (), lambda *_: None)
    manifest = Table(document.data)
    _identity(faults, manifest)
    capabilities = _capabilities(manifest)
    tools = _tools(faults, manifest, capabilities)
    root = os.path.dirname(document.path)
    process = manifest.table("process")
    entrypoint, env = _process(faults, process, root)
    if faults.failed:
        return None, faults.diagnostics()
    plugin_id = (manifest.string("plugin_id") or "").strip()
    state = sandbox_request.own_state((*process.strings("args"), *process.strings("env")))
    plugin = Plugin(
        id=plugin_id,
        version=(manifest.string("plugin_version") or "").strip(),
        contract="rune",
        name=(manifest.string("display_name") or "").strip() or plugin_id,
        description=manifest.string("description") or "",
        manifest=document.path,
        root=root,
        entrypoint=entrypoint,
        spec=SandboxSpec(enabled=True, paths=state, env=tuple(env)),
        exports=(("tools", tools),),
        capabilities=capabilities,
        timeouts=tuple(TIMEOUTS.items()),
    )
    return plugin, faults.diagnostics()


def _identity(faults: Faults, manifest: Table) -> None:
    plugin_id = manifest.string("plugin_id")
    if plugin_id is not None:
        trimmed = plugin_id.strip()
        if not trimmed:
            faults.error(manifest.at("plugin_id"), "plugin_id", "the plugin_id is blank")
        elif "/" in trimmed or trimmed in (".", "..") or len(trimmed) > ID_LIMIT or not trimmed.isprintable():
            message = f"the plugin_id {quoted(trimmed)} cannot name a folder"
            hint = f"printable characters without '/', {ID_LIMIT} at most"
            faults.error(manifest.at("plugin_id"), "plugin_id", message, hint)
    version = manifest.string("plugin_version")
    if version is not None and not version.strip():
        faults.error(manifest.at("plugin_version"), "plugin_version", "the plugin_version is blank")
    protocol = manifest.string("protocol_version")
    if protocol is not None and protocol.strip() != PROTOCOL:
        message = f"the protocol_version is {quoted(protocol)}; the runner speaks only {PROTOCOL}"
        faults.error(manifest.at("protocol_version"), "protocol_version", message)


def _capabilities(manifest: Table) -> tuple[str, ...]:
    trimmed = (item.text.strip() for item in manifest.strings("capabilities"))
    return tuple(dict.fromkeys(name for name in trimmed if name))


def _tools(faults: Faults, manifest: Table, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if manifest.data.get("tools") == []:
        faults.error(manifest.at("tools"), "tools_missing", "the bundle has no tools", "list at least one")
    names: dict[str, None] = {}
    for tool in manifest.tables("tools"):
        name = tool.string("name")
        if name is not None:
            name = name.strip()
            if not name:
                faults.error(tool.at("name"), "tool_name", "the tool's name is blank")
            elif name in names:
                faults.error(tool.at("name"), "tool_duplicate", f"the tool {quoted(name)} appears twice")
            names[name] = None
        _choice(faults, tool, "approval_tier", TIERS)
        _choice(faults, tool, "target_kind", TARGETS)
        for item in tool.strings("capabilities"):
            wanted = item.text.strip()
            if wanted and allowed and wanted not in allowed:
                message = f"the capability {quoted(wanted)} is not one of the bundle's"
                faults.error(
                    item.keys, "tool_capability", message, "add it to the capabilities of the bundle"
                )
    return tuple(names)


def _choice(faults: Faults, tool: Table, name: str, choices: tuple[str, ...]) -> None:
    value = (tool.string(name) or "").strip()
    if value and value not in choices:
        message = f"{name} is {quoted(value)}; possible are {', '.join(choices)}"
        faults.error(tool.at(name), "invalid_value", message, did_you_mean(value, choices))


def _process(faults: Faults, process: Table, root: str) -> tuple[Entrypoint | None, list[EnvRequest]]:
    pairs: dict[str, Item] = {}
    for item in process.strings("env"):
        name, equals, value = item.text.partition("=")
        if not equals:
            message = f"the entry {quoted(item.text)} is not of the form NAME=value"
            faults.error(item.keys, "env_entry", message)
            continue
        if name in pairs:
            faults.warn(
                item.keys, "env_duplicate", f"the variable {quoted(name)} is set twice; this value is used"
            )
        pairs[name] = Item(item.keys, value)
    directory = _inside(faults, process, "dir", (process.string("dir") or "").strip(), root)
    args = process.strings("args")
    text = process.string("command")
    if text is None:
        return None, []
    command = text.strip()
    if not command:
        faults.error(process.at("command"), "command_missing", "process.command is blank")
    elif "/" in command and not command.startswith("/"):
        # Relative to the bundle, not to the working directory, as in the reference host.
        command = _inside(faults, process, "command", command, root)
    sandbox_request.check_vector(faults, Item(process.at("command"), command), args, list(pairs.items()))
    env = [EnvRequest(name, item.text, where=item.keys) for name, item in pairs.items()]
    arguments = tuple(item.text for item in args)
    return Entrypoint(command, arguments, directory, bare_environment=True), env


def _inside(faults: Faults, process: Table, name: str, path: str, root: str) -> str:
    """`path` joined to the bundle. One that leads out of it is an error, unlike in the reference host."""
    joined = os.path.normpath(os.path.join(root, path)) if path else root
    if joined != root and not joined.startswith(root.rstrip("/") + "/"):
        keys: KeyPath = process.at(name)
        message = f"process.{name} {quoted(path)} leads out of the bundle"
        hint = "name a program of the system without a slash or by its absolute path"
        faults.error(keys, "path_outside", message, hint if name == "command" else "")
    return joined


def catalogue(plugin: Plugin) -> list[dict[str, Any]]:
    """The tools of a bundle with descriptions and schemas; names alone if it can no longer be read.

    The bundle is read again because a Plugin has the names only. The names are still the Plugin's, which were
    checked, even if the file has changed since.
    """
    names = dict(plugin.exports).get("tools", ())
    try:
        document = parse(plugin.manifest, read_bounded(plugin.manifest), "json")
    except DocumentError:
        return [{"name": name} for name in names]
    said: dict[str, Table] = {}
    for tool in Table(document.data).tables("tools"):
        said.setdefault((tool.string("name") or "").strip(), tool)
    return [_described(name, said[name]) if name in said else {"name": name} for name in names]


def _described(name: str, tool: Table) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name}
    if description := tool.string("description"):
        described["description"] = description
    for key in ("input_schema", "output_schema"):
        schema = tool.data.get(key)
        described[key] = schema if isinstance(schema, dict) else dict(ANY_OBJECT)
    return described


def json_schema() -> dict[str, object]:
    return model.editor_schema(Manifest, "rterm-plugin.json", closed=())
