"""JSON Schemas in a package: read from inside its folder only, and compiled offline.

A schema is one file. References stay inside that file: a reference to an address or to another file is
refused. Nothing is ever fetched.
"""

from __future__ import annotations

import copy
import os
import stat
from collections.abc import Mapping
from typing import Any

from runner.contracts.vai.declared import DeclaredExport
from runner.plugin import Plugin
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.read import parse
from sandbox.paths.beneath import Escapes, open_beneath
from sandbox.speed.value import NamedTuple

MOST_SCHEMA_BYTES = 1 << 20

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_schema(root: str, name: str) -> Any:
    """The schema as data. Raises OSError, ValueError for a name that no file can have, Escapes if a link on
    the way leads out of the package, and DocumentError if the file is not one that can be read as JSON."""
    path = os.path.join(root, name)
    return parse(path, _read_inside(root, name), "json", limit=MOST_SCHEMA_BYTES).data


def _read_inside(root: str, name: str) -> bytes:
    look.note_content(os.path.join(root, name))
    folder = os.open(root, _FOLDER)
    try:
        inside = open_beneath(folder, name, (root, look.realpath(root)))
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(inside).st_mode):
            message = "a schema has to be a regular file"
            raise DocumentError(Diagnostic(os.path.join(root, name), 0, 0, "not_a_file", message))
        file = os.open(f"/proc/self/fd/{inside}", _READ)
    finally:
        os.close(inside)
    with open(file, "rb") as stream:
        return stream.read(MOST_SCHEMA_BYTES + 1)


_EXAMPLES: Mapping[str, Any] = {
    "string": "…",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


class PackageSchema(NamedTuple):
    name: str  # of its file in the package
    document: Mapping[str, Any]
    compiled: Schema

    def faults(self, value: Any) -> tuple[str, ...]:
        """One sentence each; empty: the value fits."""
        return self.compiled.faults(value)

    def example(self) -> dict[str, Any]:
        """An object with the required members, for messages. It may not fit the schema."""
        properties = self.document.get("properties")
        required = self.document.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return {}
        names = [name for name in required[:8] if isinstance(name, str)]
        return {name: _example_of(properties.get(name)) for name in names}


def load_schema(root: str, name: str) -> PackageSchema:
    """The schema in the file `name` of the package in `root`. Raises DocumentError."""
    path = os.path.join(root, name)
    document = _read(root, name)
    try:
        return PackageSchema(name, document, Schema(document))
    except SchemaFault as fault:
        hint = "references stay inside the file and nothing is fetched: copy what it refers to into $defs"
        outside = "outside of itself" in str(fault)
        raise _fault(
            path, "schema_unusable", f"it cannot be used: {fault}", hint if outside else ""
        ) from None


def load_of(plugin: Plugin, name: str) -> PackageSchema:
    """The same, for a package that was read. Raises DocumentError."""
    return load_schema(plugin.root or os.path.dirname(plugin.manifest), name)


def complete_config(
    plugin: Plugin, export: DeclaredExport, config: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration with its defaults, and its faults by config_schema: one sentence each."""
    if not export.config_schema:
        return dict(config), ()
    try:
        schema = load_of(plugin, export.config_schema)
    except DocumentError as error:
        return dict(config), (f"config_schema cannot be used: {explained(error.diagnostics[0])}",)
    completed = with_defaults(config, schema.document)
    return completed, schema.faults(completed)


def explained(fault: Diagnostic) -> str:
    """A fault and its hint in one line."""
    return f"{fault.text()}; {fault.hint}" if fault.hint else fault.text()


def with_defaults(value: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The value with the `default` of each property that it lacks.

    It looks at `properties`, and at the `properties` of objects in them that are there. It does not look
    behind $ref, allOf and the like, nor into arrays. An object without a default of its own is not made.
    """
    result = dict(value)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return result
    for name, inner in properties.items():
        if not isinstance(inner, dict):
            continue
        if name not in result and "default" in inner:
            result[name] = copy.deepcopy(inner["default"])
        if isinstance(result.get(name), dict):
            # As deep as a document can be: 64 levels.
            result[name] = with_defaults(result[name], inner)
    return result


def _read(root: str, name: str) -> Any:
    """Raises DocumentError."""
    path = os.path.join(root, name)
    try:
        return read_schema(root, name)
    except Escapes:
        hint = "put the file itself into the package"
        raise _fault(path, "link_outside", "the schema leads out of the package", hint) from None
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise _fault(path, "schema_missing", f"the schema cannot be read: {reason}") from None


def _fault(path: str, rule: str, message: str, hint: str = "") -> DocumentError:
    return DocumentError(Diagnostic(path, 0, 0, rule, message, hint))


def _example_of(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return "…"
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    return _EXAMPLES.get(kind, "…") if isinstance(kind, str) else "…"
