"""What a manifest declares about the conversation, stored in the exports of the Plugin. Only this module
writes and reads them.

An export is a kind and a tuple of strings, so the cache of manifests needs no code of this contract.
"""

from __future__ import annotations

import json
from typing import Any

from runner.plugin import Plugin
from sandbox.speed.typed import TYPE_CHECKING, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


COMPACTOR, OBSERVER = "compactor", "observer"
STORAGE_READ, STORAGE_WRITE = "kaged:storage:read", "kaged:storage:write"

_TOOL = "tool."
_KNOB = "knob."
_PROJECT = "project"
_CONFIG, _SYSTEM_CONFIG = "config_schema", "system_config_schema"

_EXEC_MEANS = "its file is shown, read-only; the plugin can start every program that its cage shows"

Export = tuple[str, tuple[str, ...]]


class DeclaredTool(NamedTuple):
    name: str  # as on the wire: PLUGIN.TOOL
    description: str
    schema: Any  # JSON Schema, parsed


class DeclaredKnob(NamedTuple):
    type: str
    field: str  # of the configuration
    detail: str  # which values there are, for people
    default: Any = None  # None: there is none that fits


class Declared(NamedTuple):
    methods: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    tools: Mapping[str, DeclaredTool] = {}  # by the name on the wire
    notifications: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    config_schema: Any = None  # None: there is none
    system_config_schema: Any = None
    knobs: Mapping[str, DeclaredKnob] = {}
    project_id: str = "unknown"
    project_root: str = ""  # empty: it works on no project

    @property
    def defaults(self) -> dict[str, Any]:
        """The configuration where nobody sets anything."""
        return {knob.field: knob.default for knob in self.knobs.values() if knob.default is not None}


def exports_of(declared: Declared) -> tuple[Export, ...]:
    schemas = ((_CONFIG, declared.config_schema), (_SYSTEM_CONFIG, declared.system_config_schema))
    return (
        ("tools", tuple(declared.tools)),
        ("methods", declared.methods),
        ("hooks", declared.hooks),
        ("notifications", declared.notifications),
        ("roles", declared.roles),
        *(
            (_TOOL + tool.name, (tool.description, json.dumps(tool.schema)))
            for tool in declared.tools.values()
        ),
        *(
            (_KNOB + name, (knob.type, knob.field, knob.detail, json.dumps(knob.default)))
            for name, knob in declared.knobs.items()
        ),
        *((kind, (json.dumps(schema),)) for kind, schema in schemas if schema is not None),
        (_PROJECT, (declared.project_id, declared.project_root)),
    )


def declared_by(plugin: Plugin) -> Declared:
    found: dict[str, Sequence[str]] = dict(plugin.exports)
    tools = {
        kind.removeprefix(_TOOL): DeclaredTool(kind.removeprefix(_TOOL), row[0], json.loads(row[1]))
        for kind, row in found.items()
        if kind.startswith(_TOOL)
    }
    knobs = {
        kind.removeprefix(_KNOB): DeclaredKnob(row[0], row[1], row[2], json.loads(row[3]))
        for kind, row in found.items()
        if kind.startswith(_KNOB)
    }
    project_id, project_root = found.get(_PROJECT, ("unknown", ""))
    return Declared(
        methods=tuple(found.get("methods", ())),
        hooks=tuple(found.get("hooks", ())),
        tools=tools,
        notifications=tuple(found.get("notifications", ())),
        roles=tuple(found.get("roles", ())),
        config_schema=_parse_row(found.get(_CONFIG)),
        system_config_schema=_parse_row(found.get(_SYSTEM_CONFIG)),
        knobs=knobs,
        project_id=project_id,
        project_root=project_root,
    )


def _parse_row(row: Sequence[str] | None) -> Any:
    return None if row is None else json.loads(row[0])


def declarations(plugin: Plugin) -> tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]:
    """Roles, knobs, and what exec: means, for `explain`."""
    declared = declared_by(plugin)
    knobs = [
        (name, f"config.{knob.field}", f"{knob.type} {knob.detail}".rstrip(), _shown_default(knob.default))
        for name, knob in declared.knobs.items()
    ]
    roles = [(role,) for role in declared.roles]
    programs = [(each, _EXEC_MEANS) for each in plugin.capabilities if each.startswith("exec:")]
    found = (("roles", roles), ("knobs", knobs), ("programs", programs))
    return tuple((title, tuple(rows)) for title, rows in found if rows)


def _shown_default(value: Any) -> str:
    return "no default" if value is None else f"default {json.dumps(value, ensure_ascii=False)}"
