"""The manifest as models: which keys there are, and their types."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from runner.manifest import model

# A longer time, in milliseconds, could not be added to a date everywhere: 24 days.
MOST_TIMEOUT_MS = 2**31 - 1
MOST_PROCESSES = 10_000  # that max_concurrency may ask for

PACKAGE_ID = r"^[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*$"
EXPORT_ID = r"^[a-z][a-z0-9_]{0,63}$"
SLOT = r"^[a-z][a-z0-9_]{0,63}$"


class _Table(BaseModel):
    model_config = model.TABLE


def _matching(pattern: str) -> dict[str, Any]:
    """For editors. manifest.py checks it: its message says what is possible."""
    return {"pattern": pattern}


class PermissionsTable(_Table):
    """What the export may have at most. The operator's policy and the binding can give less."""

    network: Literal["none", "egress"] = Field(
        default="none", description="egress: the hosts that policy and binding list."
    )
    filesystem: Literal["none", "scratch", "assets_ro"] = Field(
        default="none",
        description="scratch: a folder of its own for the time of one invocation. assets_ro: assets/.",
    )
    gateway_api_scopes: list[str] | None = Field(
        default=None, description="Scopes of the token for the gateway: chains:read."
    )
    secret_slots: list[str] | None = Field(
        default=None,
        description="Names of secrets, which a binding fills.",
        json_schema_extra={"items": {"type": "string", "pattern": SLOT}, "uniqueItems": True},
    )


class HarnessTable(_Table):
    mode: str = Field(description="composite", min_length=1)
    fidelity: Literal["lossless", "checkpoint", "prompt_replay", "summary_reseed"]
    supports: list[str] = Field(description="Modes beside start: continue, branch_session, compact, tool.")


class ToolTable(_Table):
    effect_class: Literal["read_only", "idempotent_write", "non_idempotent_write", "unknown"] = Field(
        default="unknown", description="What a call changes. It decides whether a call may be repeated."
    )
    streaming: bool = Field(default=False, description="Whether events with content are passed on.")
    input_schema: str = Field(description="A JSON Schema file in the package.")
    output_schema: str | None = Field(default=None, description="A JSON Schema file in the package.")


class HookTable(_Table):
    subscribes_to: list[str] = Field(description="Types of events: run.completed.", min_length=1)


class CompactorTable(_Table):
    target_context: str = Field(default="", description="coding")
    supports_pinned_items: bool = False


def _kind_tables() -> dict[str, Any]:
    """The table of an export's kind is there, and no other is."""
    kinds = ("harness", "tool", "hook", "compactor")
    rules = []
    for kind in kinds:
        then: dict[str, Any] = {
            "not": {"anyOf": [{"required": [other]} for other in kinds if other != kind]},
        }
        if kind != "compactor":
            then["required"] = [kind]
        rules.append({"if": {"properties": {"kind": {"const": kind}}}, "then": then})
    return {"allOf": rules}


class ExportTable(_Table):
    """One thing that can be called."""

    model_config = {**model.TABLE, "json_schema_extra": _kind_tables()}

    id: str = Field(json_schema_extra=_matching(EXPORT_ID))
    kind: Literal["harness", "tool", "hook", "compactor"]
    display_name: str | None = Field(default=None, description="Default: the id.")
    description: str | None = None
    execution_class: Literal["inline", "worker", "isolated"] | None = Field(
        default=None, description="Default: isolated for a harness and a tool, worker for the others."
    )
    default_timeout_ms: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TIMEOUT_MS,
        description="Default: harness 1800000, tool 20000, hook 15000, compactor 120000.",
    )
    max_concurrency: int | None = Field(
        default=None, ge=1, le=MOST_PROCESSES, description="Processes at once."
    )
    config_schema: str | None = Field(default=None, description="A JSON Schema file in the package.")
    permissions: PermissionsTable | None = None
    harness: HarnessTable | None = None
    tool: ToolTable | None = None
    hook: HookTable | None = None
    compactor: CompactorTable | None = None


class RuntimeTable(_Table):
    protocol: Literal["vai.rpc.v1"]
    transport: Literal["stdio"] = "stdio"
    entrypoint: list[str] = Field(
        description="Program and arguments. The program is a file in the package.", min_length=1
    )
    os: list[str] | None = Field(default=None, description="linux, darwin. Default: any.", min_length=1)
    arch: list[str] | None = Field(default=None, description="amd64, arm64. Default: any.", min_length=1)


class Manifest(_Table):
    """vai-plugin.toml"""

    api_version: Literal["vai.plugin.v1"]
    package_id: str = Field(
        description="NAMESPACE/NAME in lower case.",
        json_schema_extra={**_matching(PACKAGE_ID), "maxLength": 128},
    )
    version: str = Field(description="Semantic version.")
    name: str = Field(description="For people.", min_length=1)
    description: str | None = None
    license: str | None = Field(default=None, description="SPDX identifier.")
    source: str | None = Field(default=None, description="Where it is published: oci://…")
    runtime: RuntimeTable
    exports: list[ExportTable] = Field(min_length=1)
