"""ainb manifests: ROOT/NAME/manifest.toml, beside the executable NAME.

The flags that let a plugin read logs and sessions become binds, because plugins open those folders by
themselves. They look for them below HOME, so a plugin with such a flag has the caller's HOME, of which the
cage shows these folders and nothing else.
"""

from __future__ import annotations

import os
import re
from typing import Any, Literal

from pydantic import BaseModel, Field

from runner.contracts.ainb.declared import CAPABILITIES, READ_ROOTS, Declared, exports_of
from runner.contracts.ainb.terms import (
    ABI_VERSION,
    ACTION_SECONDS,
    CLI_SECONDS,
    INIT_SECONDS,
    RENDER_SECONDS,
    SHUTDOWN_SECONDS,
)
from runner.manifest import sandbox_request, semver
from runner.manifest.table import Item, Table
from runner.plugin import Entrypoint, Plugin
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.network.rules import HostRule, parse_rule, ports_fault
from sandbox.spec import STATE_DIR_TOKEN, EnvRequest, KeyPath, Network, PathRequest, SandboxSpec

# --- the models: which keys there are, and their types ------------------------------------------------------

_GRANT: dict[str, Any] = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]}


class _Table(BaseModel):
    model_config = model.TABLE


def _grant(description: str) -> Any:
    """True, false, or a list. manifest.py checks it: a union of types has no readable faults."""
    return Field(default=False, description=description, json_schema_extra=_GRANT)


class PluginTable(_Table):
    """Who it is."""

    name: str = Field(description="The name of its folder, and of the executable in it.", min_length=1)
    version: str = Field(description="Semantic version.", min_length=1)
    abi_version: int = Field(description="2", ge=0, le=2**32 - 1)
    description: str = ""


class CapabilitiesTable(_Table):
    """What it asks for. Everything is off unless it is named here."""

    read_sessions: Any = _grant("Read ~/.agents-in-a-box/sessions.")
    write_plugin_data: Any = _grant("Keep files in a directory of its own.")
    event_bus: Any = _grant("Snapshots: all topics, or a list of topics and prefixes (x*).")
    network: Any = _grant("host/network/fetch: all hosts, or a list of host names.")
    spawn_subprocess: Any = _grant("Start programs. The cage does not prevent it.")
    read_claude_logs: Any = _grant("Read ~/.claude/projects.")
    read_codex_logs: Any = _grant("Read ~/.codex/sessions.")
    read_paths: Any = _grant("A list of folders to read.")
    event_stream_subscribe: Any = _grant("Streams of events: all topics, or a list.")
    spawn_managed_subprocess: Any = _grant("A list of programs.")
    unix_socket_dial: Any = _grant("A list of sockets.")
    secrets_read: Any = Field(default=False, alias="secrets:read", json_schema_extra=_GRANT)
    workspace_write: Any = Field(default=False, alias="workspace:write", json_schema_extra=_GRANT)


class ProvidesTable(_Table):
    screens: list[str] | None = None
    commands: list[str] | None = None
    cli_namespaces: list[str] | None = Field(default=None, description="What `runner call` can name.")
    snapshots: list[str] | None = Field(default=None, description="Topics that it publishes.")


class SubscribesTable(_Table):
    snapshots: list[str] | None = Field(default=None, description="Topics that it gets from its start on.")
    latest_state: list[str] | None = Field(
        default=None, description="Those of them that it does not miss while it is away."
    )


class LifecycleTable(_Table):
    spawn: Literal["lazy", "eager"] = "lazy"
    idle_reap_secs: int = Field(default=600, ge=0, le=2**32 - 1, description="0: never.")


class ConfigTable(_Table):
    """A setting that a host may show to people."""

    key: str
    kind: Literal["path", "string", "bool", "enum", "int"]
    label: str
    default: Any = ""
    choices: list[str] | None = None


class Manifest(_Table):
    """manifest.toml"""

    plugin: PluginTable
    capabilities: CapabilitiesTable | None = None
    provides: ProvidesTable | None = None
    subscribes: SubscribesTable | None = None
    lifecycle: LifecycleTable | None = None
    config: list[ConfigTable] | None = None


# --- reading ------------------------------------------------------------------------------------------------

DATA_FOLDER = ".agents-in-a-box/plugins"  # below the plugin's HOME; its own data is in NAME there
HOST = "host"  # the publisher's name of the host itself

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_LIST_ONLY = ("read_paths", "spawn_managed_subprocess", "unix_socket_dial")

# Seconds and counts for a supervisor: the reference host's.
_RESTARTS: tuple[tuple[str, float], ...] = (
    ("backoff_first", 1.0),
    ("backoff_second", 4.0),
    ("backoff_most", 16.0),
    ("quarantine_failures", 3.0),
    ("quarantine_within", 60.0),
    ("screen_keeps_alive", 30.0),
)


def read(document: Document, *, home: str = "") -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin (None if there is an error), and all diagnostics."""
    faults = Faults(document)
    model.check(faults, Manifest, document.data, (), _strict)
    manifest = Table(document.data)
    root = os.path.dirname(document.path)
    about = manifest.table("plugin")
    _check_identity(faults, about)
    declared = _declared(faults, manifest, home)
    paths, env = _own_files(faults, manifest.table("capabilities"), declared, home)
    network = _network(faults, manifest.table("capabilities"), declared)
    if faults.failed:
        return None, faults.diagnostics()
    name = about.string("name") or ""
    plugin = Plugin(
        id=name,
        version=about.string("version") or "",
        contract="ainb",
        name=name,
        description=about.string("description") or "",
        manifest=document.path,
        root=root,
        entrypoint=Entrypoint(f"./{name}", (), root),
        spec=SandboxSpec(
            paths=tuple(dict.fromkeys(paths)),
            network=network,
            env=tuple(env),
            state_link=f"{DATA_FOLDER}/{name}" if declared.allows("write_plugin_data") else "",
        ),
        exports=exports_of(declared),
        details=declared._asdict(),
        capabilities=declared.granted,
        timeouts=(
            ("handshake", INIT_SECONDS),
            ("render", RENDER_SECONDS),
            ("cli", CLI_SECONDS),
            ("action", ACTION_SECONDS),
            ("shutdown", SHUTDOWN_SECONDS),
        ),
        lifecycle=_lifecycle(manifest.table("lifecycle")),
    )
    return plugin, faults.diagnostics()


def _strict(keys: KeyPath, value: object) -> str | None:
    """Only [subscribes] refuses keys that it does not know: a misspelled topic list would deliver nothing."""
    return "unknown_subscription" if keys == ("subscribes",) else None


def _check_identity(faults: Faults, about: Table) -> None:
    name = about.string("name")
    if name == HOST:
        message = f"no plugin can be called {quoted(HOST)}: the host publishes under that name"
        faults.error(about.at("name"), "plugin_name", message)
    elif name and not _NAME.match(name):
        hint = "letters, digits, '.', '_' and '-', 64 at most: it names a folder and a file"
        faults.error(about.at("name"), "plugin_name", f"{quoted(name)} cannot name a plugin", hint)
    version = about.string("version")
    if version and not semver.is_version(version):
        message = f"{quoted(version)} is not a semantic version"
        faults.error(about.at("version"), "plugin_version", message, "it looks like 1.2.3")
    abi = about.integer("abi_version")
    if abi is not None and abi >= 0 and abi != ABI_VERSION:
        message = f"the plugin has ABI version {abi}; the runner speaks {ABI_VERSION}"
        faults.error(about.at("abi_version"), "abi_incompatible", message)


def _declared(faults: Faults, manifest: Table, home: str) -> Declared:
    granted, lists = _grants(faults, manifest.table("capabilities"))
    flag_roots = {name: f"{home}/{folder}" for name, folder in READ_ROOTS.items()} if home else {}
    read_paths = [_expand_home(path, home) for path in lists.get("read_paths", ())]
    provides, subscribes = manifest.table("provides"), manifest.table("subscribes")
    topics = _texts(subscribes, "snapshots")
    latest = _texts(subscribes, "latest_state")
    for item in subscribes.strings("latest_state"):
        if item.text not in topics:
            message = f"{quoted(item.text)} is in latest_state and not in snapshots"
            faults.error(item.keys, "latest_state", message, "add it to snapshots")
    for table, key in ((provides, "cli_namespaces"), (provides, "screens"), (subscribes, "snapshots")):
        for item in table.strings(key):
            if not item.text.strip() or not item.text.isprintable():
                faults.error(item.keys, "name_blank", f"{quoted(item.text)} cannot be a name in {key}")
    if topics and "event_bus" not in granted:
        message = "it subscribes to snapshots without the capability event_bus, so it gets none"
        faults.warn(subscribes.at("snapshots"), "subscription_denied", message, "set event_bus = true")
    return Declared(
        granted,
        lists,
        _texts(provides, "screens"),
        _texts(provides, "commands"),
        _texts(provides, "cli_namespaces"),
        _texts(provides, "snapshots"),
        topics,
        latest,
        (*(root for name, root in flag_roots.items() if name in granted), *read_paths),
        tuple(flag_roots.values()),
    )


def _grants(faults: Faults, table: Table) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    lists: dict[str, tuple[str, ...]] = {}
    granted = []
    for name in CAPABILITIES:
        value = table.data.get(name, False)
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            if value:
                lists[name] = tuple(dict.fromkeys(value))
                granted.append(name)
        elif not isinstance(value, bool):
            got = "an array of mixed types" if isinstance(value, list) else model.type_name(value)
            message = f"the capability {quoted(name)} has to be true, false or an array of strings, not {got}"
            faults.error(table.at(name), "invalid_type", message)
        elif value:
            granted.append(name)
            if name in _LIST_ONLY:
                message = f"{name} = true names nothing, so nothing is allowed"
                faults.warn(table.at(name), "capability_list", message, f'write {name} = ["…"]')
    return tuple(granted), lists


def _own_files(
    faults: Faults, table: Table, declared: Declared, home: str
) -> tuple[list[PathRequest], list[EnvRequest]]:
    """The folders it opens by itself, and the variables by which it finds them."""
    paths: list[PathRequest] = []
    env: list[EnvRequest] = []
    if declared.allows("write_plugin_data"):
        at = table.at("write_plugin_data")
        paths.append(PathRequest(STATE_DIR_TOKEN, "write", where=at))
        env += [EnvRequest(name, STATE_DIR_TOKEN, where=at) for name in ("AINB_HOME", "XDG_DATA_HOME")]
    flags = [name for name in READ_ROOTS if declared.allows(name)]
    if flags and home:
        # These plugins treat a missing folder like an empty one.
        paths += [
            PathRequest(
                f"{home}/{READ_ROOTS[name]}", "read", required=False, where=table.at(name), follow=True
            )
            for name in flags
        ]
        env.append(EnvRequest("HOME", home, where=table.at(flags[0])))
    for item in table.strings("read_paths"):
        path = _expand_home(item.text, home)
        sandbox_request.check_path(faults, Item(item.keys, item.text), path, home, write=False)
        paths.append(PathRequest(path, "read", required=False, where=item.keys, follow=True))
    return paths, env


def _network(faults: Faults, table: Table, declared: Declared) -> Network:
    """`network` lets the plugin ask the host to fetch, and reach the same hosts itself. The request is
    optional: a plugin that only asks its host needs no network of its own."""
    at = table.at("network")
    if not declared.allows("network"):
        return Network("none", where=("plugin",))
    if "network" not in declared.lists:
        return Network("open", where=at, required=False)
    hosts: dict[HostRule, None] = {}
    for item in table.strings("network"):
        try:
            rule = parse_rule(item.text, default_ports=sandbox_request.HTTPS_PORTS)
        except ValueError as error:
            faults.warn(item.keys, "network_host", f"{quoted(item.text)} {error}, so it allows nothing")
            continue
        if rule.kind in ("name", "address", "loopback"):
            hosts[rule] = None
        else:
            message = f"{quoted(item.text)} is a wildcard, and allows nothing"
            faults.warn(item.keys, "network_host", message, "list each host by its name")
    if fault := ports_fault(hosts):
        message = f"the list {fault}, so the plugin has no network of its own; the host fetches for it"
        faults.warn(at, "network_ports", message, "name fewer ports")
    return Network("allowlist" if hosts else "none", tuple(map(str, hosts)), at, required=False)


def _expand_home(path: str, home: str) -> str:
    return home + path[1:] if home and (path == "~" or path.startswith("~/")) else path


def _texts(table: Table, key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.text for item in table.strings(key)))


def _lifecycle(table: Table) -> tuple[tuple[str, float | str], ...]:
    seconds = table.integer("idle_reap_secs")
    reap = 600 if seconds is None else seconds
    return (
        ("spawn", table.string("spawn") or "lazy"),
        ("idle_reap", float(reap) if reap else "never"),
        *_RESTARTS,
    )


def json_schema() -> dict[str, object]:
    return model.editor_schema(Manifest, "manifest.toml", closed=("SubscribesTable",))
