"""What a manifest declares about the conversation: the details of the Plugin."""

from __future__ import annotations

import json
from typing import Any

from runner.plugin import Plugin
from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


COMPACTOR, OBSERVER = "compactor", "observer"
STORAGE_READ, STORAGE_WRITE = "kaged:storage:read", "kaged:storage:write"

_EXEC_MEANS = "its file is shown, read-only; the plugin can start every program that its cage shows"


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


def exports_of(declared: Declared) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What `runner tools` lists."""
    return ("tools", tuple(declared.tools)), ("methods", declared.methods), ("hooks", declared.hooks)


def details_of(declared: Declared) -> Mapping[str, Any]:
    tools = {name: tool._asdict() for name, tool in declared.tools.items()}
    knobs = {name: knob._asdict() for name, knob in declared.knobs.items()}
    return {**declared._asdict(), "tools": tools, "knobs": knobs}


def declared_by(plugin: Plugin) -> Declared:
    found = Declared(**plugin.details)
    tools: Mapping[str, Any] = found.tools
    knobs: Mapping[str, Any] = found.knobs
    return found._replace(
        tools={name: DeclaredTool(**tool) for name, tool in tools.items()},
        knobs={name: DeclaredKnob(**knob) for name, knob in knobs.items()},
    )


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
