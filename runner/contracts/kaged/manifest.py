"""kaged manifests: kaged-plugin.yaml, or manifest.yaml as the contract's pages call it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from runner.contracts.kaged.capabilities import read_capabilities
from runner.contracts.kaged.declared import (
    COMPACTOR,
    OBSERVER,
    Declared,
    DeclaredTool,
    details_of,
    exports_of,
)
from runner.contracts.kaged.knobs import Folders, path_requests, read_knobs
from runner.contracts.kaged.terms import API_VERSION, CALL_SECONDS, HANDSHAKE_SECONDS, HEALTH_ANSWER_SECONDS
from runner.manifest import sandbox_request, semver
from runner.manifest.table import Table
from runner.plugin import Entrypoint, Plugin
from sandbox import look
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.spec import STATE_DIR_TOKEN, EnvRequest, PathRequest, Project, SandboxSpec

# --- the models: which keys there are, and their types ------------------------------------------------------

Hook = Literal["on_session_start", "on_session_idle", "pre_compact", "post_compact"]
Role = Literal["observer", "compactor"]
HOOKS: tuple[str, ...] = ("on_session_start", "on_session_idle", "pre_compact", "post_compact")
ROLES: tuple[str, ...] = ("observer", "compactor")


class _Table(BaseModel):
    model_config = model.TABLE


class KnobTable(_Table):
    """A control for one field of the configuration."""

    type: Literal["range", "int_range", "enum", "boolean", "text", "multiline", "model_alias", "path"]
    label: str
    binds_to: str = Field(description="config.FIELD: a property of config_schema.")
    description: str | None = None
    min: int | float | None = None
    max: int | float | None = None
    step: int | float | None = None
    values: list[Any] | None = Field(default=None, description="Of an enum.")
    labels: dict[str, str] | None = None
    max_length: int | None = None
    prefixes: list[str] | None = Field(default=None, description="Of a path: config:/ and project:/.")
    default: Any = None


class ToolTable(_Table):
    """A tool. On the wire its name is PLUGIN.NAME."""

    name: str = Field(description="One segment in lower case.")
    description: str
    parameters_schema: dict[str, Any] = Field(description="JSON Schema of the arguments.")


class Manifest(_Table):
    """kaged-plugin.yaml"""

    name: str = Field(
        description="Lower case letters, digits and hyphens, 64 at most.",
        min_length=1,
        json_schema_extra={"pattern": "^[a-z][a-z0-9-]*$", "maxLength": 64},
    )
    version: str = Field(description="Semantic version.", min_length=1)
    kaged_api: int = Field(description="The version of the plugin interface: 1.", gt=0)
    description: str = Field(min_length=1, max_length=200)
    author: str | None = None
    license: str | None = Field(default=None, description="SPDX identifier.")
    homepage: str | None = Field(default=None, description="URL.")
    command: list[str] = Field(
        description="Program and arguments, run in the manifest's folder.", min_length=1
    )
    env: dict[str, str] | None = Field(default=None, description="Variables to set.")
    capabilities: list[str] | None = Field(default=None, description="What it needs of the host.")
    methods: list[str] | None = Field(default=None, description="Methods: 2 to 4 segments with dots.")
    notifications: list[str] | None = Field(default=None, description="Notifications that it may send.")
    config_schema: dict[str, Any] | None = Field(
        default=None, description="JSON Schema of its configuration."
    )
    system_config_schema: dict[str, Any] | None = Field(
        default=None, description="JSON Schema of the operator's secrets for it."
    )
    hooks: list[Hook] | None = None
    tools: list[ToolTable] | None = None
    roles: list[Role] | None = None
    knobs: dict[str, KnobTable] | None = Field(default=None, description="Controls of the configuration.")
    shutdown_timeout_sec: int = Field(default=5, ge=1, le=30)
    health_interval_sec: int = Field(default=30, ge=5, le=300)
    hook_timeout_sec: int = Field(default=10, ge=1, le=60)


# --- reading ------------------------------------------------------------------------------------------------

# What the plugin finds as its config root. The state directory has more beside it, which the cage does not
# show: the storage broker's database.
CONFIG_ROOT = f"{STATE_DIR_TOKEN}/config"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}\Z", re.ASCII)
_TOOL = re.compile(r"[a-z][a-z0-9_-]{0,63}\Z", re.ASCII)
_METHOD = re.compile(r"[a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_-]*){1,3}\Z", re.ASCII)
_RESERVED = ("kaged.", "system.")
_RESERVED_NAMES = ("kaged", "system")
_HEALTH_CHECK = "health.check"  # the host's own question
_PROJECT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z", re.ASCII)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+\S*\Z", re.ASCII | re.IGNORECASE)
_MOST_METHOD_CHARACTERS = 256

# Seconds and counts for a supervisor. The contract names only the interval and the answer.
_RESTARTS: tuple[tuple[str, float], ...] = (
    ("health_misses", 1.0),
    ("restart_after_first", 1.0),
    ("restart_after_most", 60.0),
    ("crashes_most", 5.0),
    ("crashes_within", 600.0),
)


def read(
    document: Document, *, home: str = "", options: Mapping[str, str] | None = None, config: Any = None
) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin (None if there is an error), and all diagnostics."""
    faults = Faults(document)
    model.check(faults, Manifest, document.data, (), lambda *_: None)
    manifest = Table(document.data)
    _check_identity(faults, manifest)
    declared = _declared(faults, manifest)
    _check_schemas(faults, manifest)
    root = os.path.dirname(document.path)
    project_id, project_root = _project(faults, options or {})
    knobs = read_knobs(faults, manifest)
    declared = declared._replace(project_id=project_id, project_root=project_root, knobs=knobs)
    _check_config(faults, manifest, config, declared.defaults)
    entrypoint = _entrypoint(faults, manifest, root)
    capabilities = read_capabilities(
        faults, manifest.strings("capabilities"), manifest.at("capabilities"), home
    )
    configured = config if isinstance(config, dict) else {}
    written = path_requests(faults, manifest, configured, Folders(project_root, home))
    if faults.failed:
        return None, faults.diagnostics()
    name = manifest.string("name") or ""
    plugin = Plugin(
        id=name,
        version=manifest.string("version") or "",
        contract="kaged",
        name=name,
        description=manifest.string("description") or "",
        manifest=document.path,
        root=root,
        entrypoint=entrypoint,
        spec=SandboxSpec(
            paths=(
                PathRequest(CONFIG_ROOT, "write", where=("name",)),
                *dict.fromkeys((*capabilities.paths, *written)),
            ),
            network=capabilities.network,
            env=_env(faults, manifest, project_id, project_root or root),
        ),
        exports=exports_of(declared),
        details=details_of(declared),
        # Shown read-only if the policy says so. The folders of its configuration are asked for above.
        project=Project(project_root) if project_root else None,
        capabilities=capabilities.strings,
        timeouts=(
            ("handshake", HANDSHAKE_SECONDS),
            ("call", CALL_SECONDS),
            ("hook", _seconds(manifest, "hook_timeout_sec", 10)),
            ("shutdown", _seconds(manifest, "shutdown_timeout_sec", 5)),
        ),
        lifecycle=(
            ("health_interval", _seconds(manifest, "health_interval_sec", 30)),
            ("health_answer", HEALTH_ANSWER_SECONDS),
            *_RESTARTS,
        ),
    )
    return plugin, faults.diagnostics()


def _seconds(manifest: Table, key: str, default: int) -> float:
    given = manifest.integer(key)
    return float(default if given is None else given)


# --- who it is ----------------------------------------------------------------------------------------------


def _check_identity(faults: Faults, manifest: Table) -> None:
    name = manifest.string("name")
    if name and not _NAME.match(name):
        hint = "it begins with a letter and has lower case letters, digits and hyphens, 64 at most"
        faults.error(manifest.at("name"), "plugin_name", f"{quoted(name)} cannot name a plugin", hint)
    elif name in _RESERVED_NAMES:
        message = f"no plugin can be called {quoted(name)}: {name}.* names methods of the host"
        faults.error(manifest.at("name"), "plugin_name", message)
    version = manifest.string("version")
    if version and not semver.is_version(version):
        message = f"the version {quoted(version)} is not a semantic version"
        faults.warn(manifest.at("version"), "plugin_version", message, "it looks like 1.2.3")
    api = manifest.integer("kaged_api")
    if api is not None and api > 0 and api != API_VERSION:
        message = f"the manifest needs version {api} of the plugin interface; the runner speaks {API_VERSION}"
        faults.error(manifest.at("kaged_api"), "api_incompatible", message)
    homepage = manifest.string("homepage")
    if homepage is not None and not _URL.match(homepage):
        faults.error(manifest.at("homepage"), "invalid_value", f"homepage is {quoted(homepage)}, not a URL")


# --- what it declares ---------------------------------------------------------------------------------------


def _declared(faults: Faults, manifest: Table) -> Declared:
    methods = _methods(faults, manifest)
    hooks = tuple(dict.fromkeys(item.text for item in manifest.strings("hooks") if item.text in HOOKS))
    tools = _tools(faults, manifest)
    empty = [key for key in ("methods", "hooks", "tools") if not manifest.data.get(key)]
    if len(empty) == 3:
        message = "the plugin has no methods, no hooks and no tools, so nothing can be asked of it"
        faults.error((), "nothing_exposed", message, "list at least one of them")
    roles = tuple(dict.fromkeys(item.text for item in manifest.strings("roles") if item.text in ROLES))
    if "roles" not in manifest and hooks:
        roles = (OBSERVER,)
    if COMPACTOR in roles and "pre_compact" not in hooks:
        message = f"the role {COMPACTOR} needs the hook pre_compact"
        faults.error(manifest.at("roles"), "role_hook", message, "add pre_compact to hooks")
    for item in manifest.strings("notifications"):
        if not item.text.strip() or not item.text.isprintable():
            message = f"{quoted(item.text)} cannot name a notification"
            faults.error(item.keys, "notification_name", message)
    notifications = tuple(dict.fromkeys(item.text for item in manifest.strings("notifications")))
    return Declared(
        methods,
        hooks,
        tools,
        notifications,
        roles,
        manifest.data.get("config_schema"),
        manifest.data.get("system_config_schema"),
    )


def _methods(faults: Faults, manifest: Table) -> tuple[str, ...]:
    for item in manifest.strings("methods"):
        if item.text.startswith(_RESERVED) or item.text == _HEALTH_CHECK:
            message = f"the method {quoted(item.text)} is reserved for the host"
            reserved = ", ".join((*(f"{prefix}*" for prefix in _RESERVED), _HEALTH_CHECK))
            faults.error(item.keys, "method_reserved", message, f"reserved are {reserved}")
        elif not _METHOD.match(item.text) or len(item.text) > _MOST_METHOD_CHARACTERS:
            message = f"{quoted(item.text)} cannot name a method"
            faults.error(item.keys, "method_name", message, "2 to 4 segments in lower case: notes.add")
    return tuple(dict.fromkeys(item.text for item in manifest.strings("methods")))


def _tools(faults: Faults, manifest: Table) -> dict[str, DeclaredTool]:
    plugin = manifest.string("name") or ""
    found: dict[str, DeclaredTool] = {}
    for tool in manifest.tables("tools"):
        name = tool.string("name")
        if name is None:
            continue
        full = f"{plugin}.{name}"
        if not _TOOL.match(name):
            message = f"{quoted(name)} cannot name a tool"
            hint = "one segment: a letter, then lower case letters, digits, _ and -"
            faults.error(tool.at("name"), "tool_name", message, hint)
        elif full == _HEALTH_CHECK:
            message = f"on the wire the tool would be {full}, which is the host's own question"
            faults.error(tool.at("name"), "tool_name", message, "give the plugin or the tool another name")
        elif full in found:
            faults.error(tool.at("name"), "tool_duplicate", f"the tool {quoted(name)} appears twice")
        found[full] = DeclaredTool(full, tool.string("description") or "", tool.data.get("parameters_schema"))
    return found


def _check_schemas(faults: Faults, manifest: Table) -> None:
    """Check that all schemas can be used, and that no field is both a setting and a secret."""
    places = [(manifest, "config_schema"), (manifest, "system_config_schema")]
    places += [(tool, "parameters_schema") for tool in manifest.tables("tools")]
    for table, key in places:
        schema = table.data.get(key)
        if isinstance(schema, dict) and (fault := _schema_fault(schema)):
            faults.error(table.at(key), "schema_invalid", f"{key} cannot be used: {fault}")
    settings = manifest.table("config_schema").table("properties").data
    secrets = manifest.table("system_config_schema").table("properties")
    for field in secrets.data:
        if field in settings:
            message = f"{quoted(field)} is in config_schema and in system_config_schema"
            faults.error(secrets.at(field), "config_overlap", message, "a field is a setting or a secret")


def _schema_fault(schema: dict[str, Any]) -> str:
    from runner.protocol.schema import Schema
    from runner.protocol.schema_cost import SchemaFault

    try:
        Schema(schema)
    except SchemaFault as fault:
        return str(fault)
    return ""


def _check_config(faults: Faults, manifest: Table, config: Any, defaults: Mapping[str, Any]) -> None:
    if config is None:
        return
    schema = manifest.data.get("config_schema")
    if not isinstance(schema, dict):
        message = "a configuration was given, and the manifest has no config_schema to check it with"
        faults.option("--config", "config_unexpected", message, "leave --config out, or add config_schema")
        return
    hint = "config_schema in the manifest describes it"
    if not isinstance(config, dict):
        faults.option("--config", "config_invalid", "the configuration has to be an object", hint)
        return
    if _schema_fault(schema):
        return  # reported already
    from runner.protocol.schema import Schema

    for fault in Schema(schema).faults({**defaults, **config}):
        faults.option("--config", "config_invalid", f"the configuration does not fit: {fault}", hint)


# --- how it is started --------------------------------------------------------------------------------------


def _entrypoint(faults: Faults, manifest: Table, root: str) -> Entrypoint | None:
    command = manifest.strings("command")
    sandbox_request.check_vector(faults, command[0] if command else None, command[1:], manifest.pairs("env"))
    if not command:
        return None
    if not command[0].text.strip():
        faults.error(command[0].keys, "command_missing", "the first word of command is empty")
    return Entrypoint(command[0].text, tuple(item.text for item in command[1:]), root)


def _env(faults: Faults, manifest: Table, project_id: str, project_root: str) -> tuple[EnvRequest, ...]:
    ours = {
        "KAGED_CONFIG_ROOT": CONFIG_ROOT,
        "KAGED_PROJECT_ROOT": project_root,
        "KAGED_PROJECT_ID": project_id,
    }
    env = {name: EnvRequest(name, value, where=()) for name, value in ours.items()}
    for name, item in manifest.pairs("env"):
        if name in ours:
            message = f"the manifest sets {name}, which its host sets"
            hint = "leave it out: a folder that the cage does not show cannot be written to"
            faults.warn(item.keys, "env_replaced", message, hint)
        env[name] = EnvRequest(name, item.text, where=item.keys)
    return tuple(env.values())


def _project(faults: Faults, options: Mapping[str, str]) -> tuple[str, str]:
    """Id and root of the project that --project names. Without one the plugin works on no project."""
    folder = options.get("project", "")
    try:
        root = look.realpath(folder) if folder else ""
        root.encode()  # it is sent to the plugin as text
    except FileNotFoundError:
        root = ""
    except UnicodeEncodeError:
        message = f"the path {quoted(folder)} is not UTF-8, so no plugin can be told of it"
        faults.option("--project", "project_missing", message, "rename the folder")
        return "unknown", ""
    if folder and not look.isdir(root):
        message = f"{quoted(folder)} is not a folder"
        faults.option("--project", "project_missing", message, "give the folder that the plugin works on")
    name = options.get("project_id") or os.path.basename(root) or "unknown"
    if not _PROJECT_ID.match(name):
        message = f"{quoted(name)} cannot be the id of a project"
        hint = "choose one with --project-id: letters, digits, . _ and -"
        option = "--project-id" if options.get("project_id") else "--project"
        faults.option(option, "project_id", message, hint)
    return name, root


def json_schema() -> dict[str, object]:
    return model.editor_schema(Manifest, "kaged-plugin.yaml", closed=())
