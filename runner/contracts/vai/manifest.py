"""vai-plugin.toml -> Plugin: who the package is, how its program is started, what each export declares."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

from runner.contracts.vai.cage import ASSETS, package_parts, shape
from runner.contracts.vai.declared import (
    Declared,
    DeclaredExport,
    ExecutionClass,
    Kind,
    Permissions,
    details_of,
    exports_of,
)
from runner.contracts.vai.terms import HELLO_SECONDS, PACKAGE, SHUTDOWN_SECONDS
from runner.manifest import sandbox_request, semver
from runner.manifest.table import Item, Table
from runner.plugin import Entrypoint, Plugin
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.spec import KeyPath, SandboxSpec

# --- the models: which keys there are, and their types ------------------------------------------------------

# A longer time, in milliseconds, could not be added to a date everywhere: 24 days.
MOST_TIMEOUT_MS = 2**31 - 1
MOST_PROCESSES = 10_000  # that max_concurrency may ask for

PACKAGE_ID = r"^[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*$"
EXPORT_ID = r"^[a-z][a-z0-9_]{0,63}$"
SLOT = r"^[a-z][a-z0-9_]{0,63}$"


class _Table(BaseModel):
    model_config = model.TABLE


def _matching(pattern: str) -> dict[str, Any]:
    """A pattern for editors. `read` checks it too, with a better message."""
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


# --- reading ------------------------------------------------------------------------------------------------

MOST_SLOTS = 64  # of one export: each is a file in memory, which takes a descriptor
_MOST_PACKAGE_ID = 128  # characters
_MOST_WORD = 128  # characters of a scope, an event type, a mode

_PACKAGE_ID = re.compile(PACKAGE_ID.removesuffix("$") + r"\Z", re.ASCII)
_EXPORT_ID = re.compile(EXPORT_ID.removesuffix("$") + r"\Z", re.ASCII)
_SLOT = re.compile(SLOT.removesuffix("$") + r"\Z", re.ASCII)

_CLASSES: Mapping[str, ExecutionClass] = {
    "harness": "isolated",
    "tool": "isolated",
    "hook": "worker",
    "compactor": "worker",
}
_TIMEOUT_SECONDS: Mapping[str, float] = {"harness": 1800.0, "tool": 20.0, "hook": 15.0, "compactor": 120.0}
_KINDS: tuple[Kind, ...] = ("harness", "tool", "hook", "compactor")
_NO_OWN_TABLE = ("compactor",)  # kinds whose table may be left out

_Word = TypeVar("_Word", bound=str)


def read(document: Document, *, options: Mapping[str, str]) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    """The plugin (None if there is an error), and all diagnostics. `options`: the export that the cage is
    for, and its binding."""
    faults = Faults(document)
    model.check(faults, Manifest, document.data, (), lambda *_: None)
    manifest = Table(document.data)
    _check_identity(faults, manifest)
    root = os.path.dirname(document.path)
    runtime = manifest.table("runtime")
    entrypoint = _entrypoint(faults, runtime, root)
    declared = Declared(
        _exports(faults, manifest),
        os=tuple(item.text for item in runtime.strings("os")),
        arch=tuple(item.text for item in runtime.strings("arch")),
    )
    if faults.failed or entrypoint is None:
        return None, faults.diagnostics()
    plugin = Plugin(
        id=manifest.string("package_id") or "",
        version=manifest.string("version") or "",
        contract="vai",
        name=manifest.string("name") or "",
        description=manifest.string("description") or "",
        manifest=document.path,
        root=root,
        entrypoint=entrypoint,
        spec=SandboxSpec(),  # by its cage
        exports=exports_of(declared),
        details=details_of(declared),
        timeouts=(("handshake", HELLO_SECONDS), ("shutdown", SHUTDOWN_SECONDS)),
        root_inside=PACKAGE,
        root_parts=package_parts(entrypoint.command, os.path.basename(document.path)),
    )
    chosen, found = shape(plugin, options)
    return chosen, (*faults.diagnostics(), *found)


def json_schema() -> dict[str, object]:
    return model.editor_schema(Manifest, "vai-plugin.toml", closed=())


# --- who it is, how it is started ---------------------------------------------------------------------------


def _check_identity(faults: Faults, manifest: Table) -> None:
    package = manifest.string("package_id")
    if package is not None and not (_PACKAGE_ID.match(package) and len(package) <= _MOST_PACKAGE_ID):
        hint = f"NAMESPACE/NAME in lower case, {_MOST_PACKAGE_ID} characters at most: acme/devkit"
        message = f"{quoted(package)} cannot be the id of a package"
        faults.error(manifest.at("package_id"), "package_id", message, hint)
    version = manifest.string("version")
    if version is not None and not semver.is_version(version):
        message = f"{quoted(version)} is not a semantic version"
        faults.error(manifest.at("version"), "package_version", message, "it looks like 1.2.3, without a v")


def _entrypoint(faults: Faults, runtime: Table, root: str) -> Entrypoint | None:
    words = runtime.strings("entrypoint")
    sandbox_request.check_vector(faults, words[0] if words else None, words[1:], [])
    if not words:
        return None
    program = _package_path(faults, words[0])
    if program == ASSETS or program.startswith(f"{ASSETS}/"):
        message = f"the program {quoted(words[0].text)} is in assets/, which most cages do not show"
        faults.error(words[0].keys, "entrypoint_assets", message, "move it to bin/")
    return Entrypoint(f"./{program}", tuple(item.text for item in words[1:]), root)


def _package_path(faults: Faults, item: Item) -> str:
    """The path of a file in the package, without detours."""
    reason = ""
    if item.text.startswith("/"):
        reason = "is absolute"
    elif ".." in item.text.split("/"):
        reason = "leads upwards"
    elif os.path.normpath(item.text) == "." or item.text.endswith(("/", "/.")):
        reason = "names no file"
    elif len(os.fsencode(item.text)) > sandbox_request.PATH_LIMIT or any(
        len(os.fsencode(part)) > sandbox_request.NAME_LIMIT for part in item.text.split("/")
    ):
        reason = "is longer than any path can be"
    if reason:
        hint = "write a path below the folder of the manifest: bin/plugin"
        message = f"the path {quoted(item.text)} {reason}, and has to name a file in the package"
        faults.error(item.keys, "path_outside", message, hint)
    return os.path.normpath(item.text)


# --- its exports --------------------------------------------------------------------------------------------


def _exports(faults: Faults, manifest: Table) -> tuple[DeclaredExport, ...]:
    found: dict[str, DeclaredExport] = {}
    for table in manifest.tables("exports"):
        name = table.string("id")
        kind = next((kind for kind in _KINDS if kind == table.string("kind")), None)
        if kind is not None:
            _check_kind_table(faults, table, kind)
        if name is not None and not _EXPORT_ID.match(name):
            message = f"{quoted(name)} cannot be the id of an export"
            hint = "a lower case letter, then lower case letters, digits and _, 64 characters at most"
            faults.error(table.at("id"), "export_id", message, hint)
        elif name in found:
            message = f"two exports have the id {quoted(name)}"
            faults.error(table.at("id"), "export_duplicate", message, "give each export an id of its own")
        export = _export(faults, table, name or "", kind or "tool")
        found[export.id] = export
    return tuple(found.values())


def _check_kind_table(faults: Faults, table: Table, kind: Kind) -> None:
    for other in _KINDS:
        if other != kind and other in table:
            message = f"the export is a {kind}, and has a table [exports.{other}]"
            hint = f"a table belongs to the last [[exports]] above it; a {kind} has [exports.{kind}]"
            faults.error(table.at(other), "kind_table", message, hint)
    if kind not in table and kind not in _NO_OWN_TABLE:
        message = f"the key {quoted(kind)} is missing in {model.shown_table(table.keys)}"
        faults.error(table.at(kind), "missing_key", message, f"a {kind} needs a table [exports.{kind}]")


def _export(faults: Faults, table: Table, name: str, kind: Kind) -> DeclaredExport:
    harness, tool = table.table("harness"), table.table("tool")
    hook, compactor = table.table("hook"), table.table("compactor")
    milliseconds = table.integer("default_timeout_ms")
    return DeclaredExport(
        id=name,
        kind=kind,
        display_name=table.string("display_name") or name,
        description=table.string("description") or "",
        execution_class=_one_of(table, "execution_class", ("inline", "worker", "isolated"), _CLASSES[kind]),
        timeout=_TIMEOUT_SECONDS[kind] if milliseconds is None else milliseconds / 1000,
        max_concurrency=table.integer("max_concurrency") or 0,
        permissions=_permissions(faults, table.table("permissions")),
        config_schema=_schema(faults, table, "config_schema"),
        input_schema=_schema(faults, tool, "input_schema"),
        output_schema=_schema(faults, tool, "output_schema"),
        effect_class=_one_of(
            tool, "effect_class", ("read_only", "idempotent_write", "non_idempotent_write"), "unknown"
        ),
        streaming=tool.flag("streaming", False),
        mode=harness.string("mode") or "",
        fidelity=harness.string("fidelity") or "",
        supports=_words(faults, harness, "supports"),
        subscribes_to=_words(faults, hook, "subscribes_to"),
        target_context=compactor.string("target_context") or "",
        supports_pinned_items=compactor.flag("supports_pinned_items", False),
    )


def _one_of(table: Table, key: str, known: tuple[_Word, ...], default: _Word) -> _Word:
    """The model refuses any other word."""
    asked = table.string(key)
    return next((word for word in known if word == asked), default)


def _permissions(faults: Faults, table: Table) -> Permissions:
    slots = table.strings("secret_slots")
    seen: set[str] = set()
    for item in slots:
        if not _SLOT.match(item.text):
            message = f"{quoted(item.text)} cannot name a secret"
            hint = "a lower case letter, then lower case letters, digits and _, 64 characters at most"
            faults.error(item.keys, "slot_name", message, hint)
        elif item.text in seen:
            message = f"the slot {quoted(item.text)} appears twice"
            faults.error(item.keys, "slot_duplicate", message, "name each slot once")
        seen.add(item.text)
    if len(slots) > MOST_SLOTS:
        message = f"the export has {len(slots)} secret slots; {MOST_SLOTS} are the most"
        faults.error(table.at("secret_slots"), "slots_too_many", message)
    return Permissions(
        network=_one_of(table, "network", ("none", "egress"), "none"),
        filesystem=_one_of(table, "filesystem", ("none", "scratch", "assets_ro"), "none"),
        scopes=_words(faults, table, "gateway_api_scopes"),
        slots=tuple(item.text for item in slots),
    )


def _words(faults: Faults, table: Table, key: str) -> tuple[str, ...]:
    """A list of words, each once."""
    found = table.strings(key)
    for item in found:
        if not item.text.isprintable() or " " in item.text or not 0 < len(item.text) <= _MOST_WORD:
            message = f"{quoted(item.text)} cannot stand in {key}"
            hint = f"a word without spaces, {_MOST_WORD} characters at most"
            faults.error(item.keys, "word_invalid", message, hint)
    return tuple(dict.fromkeys(item.text for item in found))


def _schema(faults: Faults, table: Table, key: str) -> str:
    text = table.string(key)
    keys: KeyPath = table.at(key)
    return "" if text is None else _package_path(faults, Item(keys, text))
