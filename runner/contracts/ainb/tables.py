"""The manifest as models: which keys there are, and their types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from runner.manifest import model

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
