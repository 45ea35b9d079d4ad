"""Knobs, and the folders that follow from the configuration.

A knob is a control for one field of the configuration. A `path` knob, and every value of the form `config:/…`
or `project:/…`, names a folder that the plugin writes to, although no capability says so: the host derives
the cage from the configuration. Files outside of such a folder would be lost with the cage.

    config:/P     <config root>/P/<project id>. The config root is the plugin's own, so nothing more is asked
    project:/P    <project root>/P, which has to exist: --project names the root
    /P            this folder, where a path knob allows it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runner.contracts.kaged.declared import DeclaredKnob
from runner.manifest import sandbox_request
from runner.manifest.table import Item, Table
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import cut, did_you_mean, quoted
from sandbox.document.faults import Faults
from sandbox.spec import KeyPath, PathRequest

CONFIG, PROJECT = "config:/", "project:/"

_MOST_VALUES = 10_000  # of a configuration that are searched for paths
_MOST_PATHS = 256  # among them
_MOST_SUGGESTIONS = 100  # fields that are compared with a misspelled one
_MOST_SHOWN, _MOST_CHARACTERS = 10, 100  # of the values of a knob


class Folders(NamedTuple):
    """Where the paths of a configuration lead to."""

    project_root: str  # empty: there is no project
    home: str


def read_knobs(faults: Faults, manifest: Table) -> dict[str, DeclaredKnob]:
    """Each knob has to bind to a property of config_schema. Its type is not compared with the property's:
    real manifests bind a range with fractional steps to an integer. A default that does not fit the property
    is not sent."""
    fields = manifest.table("config_schema").table("properties").data
    knobs = manifest.table("knobs")
    found: dict[str, DeclaredKnob] = {}
    for name in knobs.data:
        knob = knobs.table(name)
        binds_to = knob.string("binds_to")
        if binds_to is None:
            continue
        scope, dot, field = binds_to.partition(".")
        at = knob.at("binds_to")
        if scope == "system_config":
            message = f"the knob {quoted(name)} binds to {quoted(binds_to)}: secrets have no knobs"
            faults.error(at, "knob_binds_to", message, "bind it to a property of config_schema: config.FIELD")
        elif scope != "config" or not dot or not field:
            message = f"the knob {quoted(name)} binds to {quoted(binds_to)}, which is not config.FIELD"
            faults.error(at, "knob_binds_to", message)
        elif field not in fields:
            message = f"the knob {quoted(name)} binds to {quoted(field)}, which config_schema does not have"
            near = "" if faults.full else did_you_mean(field, list(fields)[:_MOST_SUGGESTIONS])
            hint = near or f"add it to config_schema.properties: {field}"
            faults.error(at, "knob_binds_to", message, hint)
        low, high = knob.data.get("min"), knob.data.get("max")
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            faults.error(knob.at("min"), "knob_range", f"the knob {quoted(name)} has its min above its max")
        values = knob.data.get("values")
        if knob.string("type") == "enum" and not (isinstance(values, list) and values):
            faults.error(knob.at("values"), "knob_values", f"the enum {quoted(name)} has no values")
        default = knob.data.get("default")
        if default is not None and field in fields and (why := _misfit(fields[field], default)):
            message = f"the default of the knob {quoted(name)} does not fit {field} in config_schema: {why}"
            faults.warn(knob.at("default"), "knob_default", message, "it is not sent: correct one of the two")
            default = None
        found[name] = DeclaredKnob(knob.string("type") or "", field, _values_shown(knob), default)
    return found


def _misfit(schema: Any, value: Any) -> str:
    """Returns why a value does not fit a property, or ''."""
    try:
        return "; ".join(Schema(schema).faults(value)[:1])
    except SchemaFault:
        return ""  # reported with the whole schema


def _values_shown(knob: Table) -> str:
    """The values that a knob offers, for people."""
    low, high, step, values = (knob.data.get(key) for key in ("min", "max", "step", "values"))
    if isinstance(values, list):
        return cut(", ".join(map(str, values[:_MOST_SHOWN])), _MOST_CHARACTERS)
    if isinstance(low, int | float) and isinstance(high, int | float):
        return f"{low} to {high}" + (f" by {step}" if isinstance(step, int | float) else "")
    prefixes = [item.text for item in knob.strings("prefixes")[:_MOST_SHOWN]]
    return cut(" or ".join(prefixes), _MOST_CHARACTERS)


def path_requests(
    faults: Faults, manifest: Table, config: Mapping[str, Any], folders: Folders
) -> tuple[PathRequest, ...]:
    """The folders that the configuration, with the manifest's defaults, makes the plugin write to."""
    found: dict[PathRequest, None] = {}
    for number, value in enumerate(_path_values(faults, manifest, config)):
        if number == _MOST_PATHS:
            message = f"the configuration has more than {_MOST_PATHS} paths"
            faults.error(value.keys, "config_too_large", message)
            break
        path = _resolve(faults, value, folders)
        if path is None:
            continue
        item = Item(value.keys, value.text)
        sandbox_request.check_path(faults, item, path, folders.home, write=True)
        found[PathRequest(path, "write", where=value.keys)] = None
    return tuple(found)


class _PathValue(NamedTuple):
    field: str
    text: str
    keys: KeyPath  # of the knob or the property, since the configuration is not in the manifest
    prefixes: tuple[str, ...] | None = None  # None: it is no path knob's
    is_given: bool = False  # by --config; otherwise it is a default of the manifest


def _path_values(faults: Faults, manifest: Table, config: Mapping[str, Any]) -> Iterator[_PathValue]:
    properties = manifest.table("config_schema").table("properties")
    knobs = manifest.table("knobs")
    bound: dict[str, Table] = {}
    for name in knobs.data:
        knob = knobs.table(name)
        field = (knob.string("binds_to") or "").removeprefix("config.")
        if knob.string("type") == "path" and field:
            bound[field] = knob
    values = {name: _default(properties.data[name]) for name in properties.data}
    values |= {field: knob.data["default"] for field, knob in bound.items() if "default" in knob.data}
    values |= config
    for field, value in values.items():
        keys = properties.at(field) if field in properties else manifest.at("config_schema")
        if field in bound and isinstance(value, str) and value:
            knob = bound[field]
            prefixes = tuple(item.text for item in knob.strings("prefixes"))
            yield _PathValue(field, value, knob.keys, prefixes, field in config)
            continue
        for text in _texts(faults, keys, value):
            if text.startswith((CONFIG, PROJECT)):
                yield _PathValue(field, text, keys, None, field in config)


def _default(schema: Any) -> Any:
    """The default of a property, or of the properties in it."""
    if not isinstance(schema, dict):
        return None
    if "default" in schema:
        return schema["default"]
    inner = schema.get("properties")
    # As deep as a document can be.
    return {name: _default(each) for name, each in inner.items()} if isinstance(inner, dict) else None


def _texts(faults: Faults, keys: KeyPath, value: Any) -> Iterator[str]:
    pending, seen = [value], 0
    while pending:
        each = pending.pop()
        seen += 1
        if seen > _MOST_VALUES:
            message = f"the configuration has more than {_MOST_VALUES} values in one field"
            faults.error(keys, "config_too_large", message, "some of them could be paths, so it is refused")
            return
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)


def _fault(faults: Faults, value: _PathValue, message: str, hint: str = "") -> None:
    if value.is_given:
        faults.option("--config", "config_path", message, hint)
    else:
        faults.error(value.keys, "config_path", message, hint)


def _resolve(faults: Faults, value: _PathValue, folders: Folders) -> str | None:
    """The folder on the host; None if the plugin has it already, or it was refused."""
    said = f"{value.field} is {quoted(value.text)}"
    if "\0" in value.text or any("\ud800" <= character <= "\udfff" for character in value.text):
        _fault(faults, value, f"{said}, which no path can be")
        return None
    if value.prefixes and not value.text.startswith(value.prefixes):
        hint = f"it begins with {' or '.join(value.prefixes)}"
        _fault(faults, value, f"{said}, which the knob's prefixes do not allow", hint)
        return None
    if value.text.startswith((CONFIG, PROJECT)):
        rest = value.text.removeprefix(CONFIG).removeprefix(PROJECT)
        if any(part in ("", ".", "..") for part in rest.split("/")):
            _fault(faults, value, f"{said}: it has an empty, '.' or '..' segment")
            return None
        if value.text.startswith(CONFIG):
            return None
        if not folders.project_root:
            hint = "name the project with --project DIR"
            _fault(faults, value, f"{said}, and there is no project", hint)
            return None
        return f"{folders.project_root}/{rest}"
    if value.text.startswith("/"):
        return value.text
    hint = "write config:/NAME, project:/NAME or an absolute path"
    _fault(faults, value, f"{said}, which is no path that can be bound", hint)
    return None
