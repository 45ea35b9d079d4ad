"""What a package exposes, read from its manifest without starting anything."""

from __future__ import annotations

import os
from typing import Any

from runner.contracts.vai.declared import DeclaredExport, declared_by
from runner.contracts.vai.package.schemas import read_schema
from runner.plugin import Plugin
from sandbox.document.diagnostic import DocumentError
from sandbox.paths.beneath import Escapes

_KINDS = {"tools": "tool", "hooks": "hook", "compactors": "compactor", "harnesses": "harness"}


def catalogue(plugin: Plugin) -> dict[str, list[dict[str, Any]]]:
    root = os.path.dirname(plugin.manifest)
    declared = declared_by(plugin)
    # An export whose binding is inactive is not listed.
    exports = [each for each in declared.exports if not (declared.inactive and each.id == declared.chosen)]
    return {
        what: [_entry(root, export) for export in exports if export.kind == kind]
        for what, kind in _KINDS.items()
    }


def _entry(root: str, export: DeclaredExport) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if export.kind == "tool":
        own = {"effect_class": export.effect_class, "streaming": export.streaming}
    elif export.kind == "hook":
        own = {"subscribes_to": list(export.subscribes_to)}
    elif export.kind == "harness":
        own = {"mode": export.mode, "fidelity": export.fidelity, "supports": list(export.supports)}
    else:
        own = {
            "target_context": export.target_context,
            "supports_pinned_items": export.supports_pinned_items,
        }
    schemas = {
        key: schema
        for key in ("input_schema", "output_schema", "config_schema")
        if (schema := _schema(root, getattr(export, key))) is not None
    }
    return {
        "name": export.id,
        "description": export.description or export.display_name,
        "execution_class": export.execution_class,
        "timeout_ms": round(export.timeout * 1000),
        **own,
        **schemas,
    }


def _schema(root: str, name: str) -> Any:
    """None if there is none that can be read: `runner check` says why."""
    if not name:
        return None
    try:
        return read_schema(root, name)
    except (OSError, ValueError, Escapes, DocumentError):
        return None
