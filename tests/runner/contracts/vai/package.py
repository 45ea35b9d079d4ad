"""A package with one export of each kind, as its manifest declares them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.contracts.prepared_calls import Prepared
from runner.contracts.vai.call.prepare import prepare
from runner.contracts.vai.declared import Declared, DeclaredExport, Permissions, details_of, exports_of
from runner.plugin import Entrypoint, Plugin
from runner.protocol.dialect import Call, CallRefused
from sandbox.spec import SandboxSpec

NOW = 1_773_342_000.25  # 2026-03-12T19:00:00.250Z

TOOL = DeclaredExport(
    "jira_search",
    "tool",
    "Jira Search",
    timeout=20.0,
    permissions=Permissions("egress", "none", (), ("jira_token",)),
    config_schema="schemas/config.json",
    input_schema="schemas/input.json",
    output_schema="schemas/output.json",
)
HOOK = DeclaredExport(
    "slack_notify",
    "hook",
    "Slack",
    timeout=15.0,
    permissions=Permissions("egress", "none", ("runs:read",)),
    subscribes_to=("run.completed", "chain.compacted"),
)
COMPACTOR = DeclaredExport(
    "window",
    "compactor",
    "Window",
    timeout=120.0,
    permissions=Permissions("none", "scratch"),
    supports_pinned_items=True,
)
FORGETFUL = COMPACTOR._replace(id="forgetful", permissions=Permissions(), supports_pinned_items=False)
HARNESS = DeclaredExport(
    "triage",
    "harness",
    "Triage",
    timeout=1800.0,
    max_concurrency=4,
    permissions=Permissions("egress", "scratch", ("chains:read", "chains:write", "runs:write")),
    supports=("continue", "compact"),
)
PLAIN = DeclaredExport("plain", "tool", "Plain", timeout=1.0)
EXPORTS = (TOOL, HOOK, COMPACTOR, FORGETFUL, HARNESS, PLAIN)

SCHEMAS = {
    "config.json": {
        "type": "object",
        "properties": {
            "base_url": {"type": "string"},
            "max_results": {"type": "integer", "default": 10},
            "retry": {"type": "object", "properties": {"times": {"type": "integer", "default": 3}}},
        },
        "required": ["base_url"],
        "additionalProperties": False,
    },
    "input.json": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
    "output.json": {"type": "object", "properties": {"issues": {"type": "array"}}},
}

BINDING: Mapping[str, Any] = {
    "binding_id": "bind_123",
    "package_id": "acme/devkit",
    "package_version": "0.1.0",
    "export_id": "jira_search",
    "scope": {"org_id": "org_123", "project_id": "proj_123"},
    "config": {"base_url": "https://acme.example"},
    "secrets": {"jira_token": "secret://org_123/jira_token"},
    "status": "active",
    "rollout": {"traffic_percent": 100},
}
SECRET = "the-secret-of-jira"
SECRETS = {"jira_token": SECRET}
CONFIG = {"base_url": "https://acme.example"}


def make_package(root: Path, exports: tuple[DeclaredExport, ...] = EXPORTS) -> Plugin:
    (root / "schemas").mkdir()
    for name, schema in SCHEMAS.items():
        (root / "schemas" / name).write_text(json.dumps(schema))
    return Plugin(
        "acme/devkit",
        "0.1.0",
        "vai",
        "Acme Dev Kit",
        "",
        str(root / "vai-plugin.toml"),
        str(root),
        Entrypoint("./bin/plugin", (), str(root)),
        SandboxSpec(),
        exports=exports_of(Declared(exports)),
        details=details_of(Declared(exports)),
    )


def bound(**changes: Any) -> dict[str, str]:
    """Options with the binding, some of its keys changed; None takes a key out."""
    record = {key: value for key, value in {**BINDING, **changes}.items() if value is not None}
    return {"binding": json.dumps(record, indent=1), "binding_file": "binding.json"}


def prepare_call(
    plugin: Plugin,
    name: str,
    given: Any = None,
    *,
    kind: str = "export",
    context: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    options: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    config: Any = None,
) -> Prepared:
    return prepare(
        plugin,
        Call(kind, name, given, context or {}),
        seconds=seconds,
        options=options or {},
        secrets=secrets or {},
        config=config,
        now=NOW,
    )


def refusal(plugin: Plugin, name: str, given: Any = None, **rest: Any) -> tuple[str, str]:
    """The code and the message of a call that is not made."""
    try:
        prepared = prepare_call(plugin, name, given, **rest)
    except CallRefused as error:
        return error.event.code, error.event.message
    raise AssertionError(f"it was not refused: {prepared.call.input}")
