"""The manifest as models: which keys there are, and their types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from runner.manifest import model

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
