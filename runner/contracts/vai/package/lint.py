"""Lint rules for a package. All findings are warnings."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator

from runner.contracts.vai.cage import ASSETS
from runner.contracts.vai.declared import Declared, DeclaredExport, declared_by
from runner.contracts.vai.package.files import schema_files, walk_package
from runner.plugin import Plugin
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.spec import KeyPath

SIGNATURE = "marketplace.signature.json"

_SCOPE = re.compile(r"[a-z][a-z0-9_]*:[a-z][a-z0-9_]*\Z", re.ASCII)
_READING = ("read", "list", "get")  # verbs of scopes that change nothing
_MOST_SHOWN = 20  # files of one rule

# Names of files that usually hold a secret. A package never contains one: bindings fill its slots.
_SECRET_FILES = tuple(
    (
        "*.pem *.key *.p12 *.pfx id_rsa id_ed25519 .env .env.* .netrc .npmrc .pypirc credentials"
        " credentials.json"
    ).split()
)

# Beside what the cage shows: files that are for people and registries.
_NOT_FOR_THE_CAGE = ("readme*", "license*", "licence*", "copying*", "notice*", "changelog*", SIGNATURE, ".*")


def lint(document: Document, plugin: Plugin) -> tuple[Diagnostic, ...]:
    faults = Faults(document)
    declared = declared_by(plugin)
    for number, export in enumerate(declared.exports):
        place: KeyPath = ("exports", number)
        _check_scopes(faults, export, place)
        _check_permissions(faults, export, place)
        _check_schemas(faults, export, place)
        _check_process(faults, export, place)
    root = os.path.dirname(document.path)
    _check_about(faults, document, root)
    _check_program(faults, plugin)
    _check_assets(faults, declared, root)
    found = (*_unused_schemas(declared, root), *_hidden_parts(plugin, root), *_secret_files(root))
    return (*faults.diagnostics(), *found)


# --- each export --------------------------------------------------------------------------------------------


def _check_scopes(faults: Faults, export: DeclaredExport, place: KeyPath) -> None:
    scopes = export.permissions.scopes
    key: KeyPath = (*place, "permissions", "gateway_api_scopes")
    if scopes and export.permissions.network == "none":
        message = f"{export.id} has scopes of the gateway and network = {quoted('none')}"
        hint = 'the gateway is then the only host it can reach; write network = "egress" to say so'
        faults.warn(key, "scopes_offline", message, hint)
    if not scopes and export.kind == "harness":
        message = f"the harness {export.id} has no scopes, so it cannot act through the gateway"
        faults.warn((*place, "permissions"), "scopes_missing", message, "list them in gateway_api_scopes")
    for scope in scopes:
        resource, _, verb = scope.partition(":")
        if "*" in scope:
            message = f"{export.id} asks for {quoted(scope)}, which covers more than it can name"
            faults.warn(key, "scope_wildcard", message, "list each scope: chains:read")
        elif not _SCOPE.match(scope):
            message = f"the scope {quoted(scope)} does not look like one"
            faults.warn(key, "scope_form", message, "scopes are RESOURCE:VERB in lower case: chains:read")
        elif export.effect_class == "read_only" and export.kind == "tool" and verb not in _READING:
            message = f"{export.id} is read_only, and asks for {quoted(scope)}"
            hint = f"ask for {resource}:read, or change effect_class: a read_only tool is retried"
            faults.warn(key, "scope_write", message, hint)


def _check_permissions(faults: Faults, export: DeclaredExport, place: KeyPath) -> None:
    permissions = export.permissions
    if permissions.slots and permissions.network == "none":
        message = f"{export.id} gets secrets and has no network to use them on"
        hint = "take secret_slots out if the secrets are for a service"
        faults.warn((*place, "permissions", "secret_slots"), "slots_offline", message, hint)
    if permissions.filesystem == "scratch" and export.execution_class != "isolated":
        message = f"{export.id} has scratch, so each invocation has a process of its own here"
        hint = 'write execution_class = "isolated", or do without scratch to have processes reused'
        faults.warn((*place, "permissions", "filesystem"), "scratch_reuse", message, hint)


def _check_schemas(faults: Faults, export: DeclaredExport, place: KeyPath) -> None:
    if not export.config_schema:
        message = f"{export.id} has no config_schema, so a binding's configuration is not checked"
        hint = 'for an export without configuration: {"type": "object", "additionalProperties": false}'
        faults.warn(place, "config_schema_missing", message, hint)
    if export.kind == "tool" and not export.output_schema:
        message = f"{export.id} has no output_schema, so what it returns is not checked"
        faults.warn((*place, "tool"), "output_schema_missing", message, "describe structured_output")


def _check_process(faults: Faults, export: DeclaredExport, place: KeyPath) -> None:
    if export.execution_class == "inline":
        message = f"{export.id} is inline, and runs as a worker here: in a process of its own"
        faults.warn((*place, "execution_class"), "class_inline", message, 'write execution_class = "worker"')
    if export.kind == "tool" and export.effect_class == "unknown":
        message = f"the effect_class of {export.id} is unknown, so a failed call is never repeated"
        hint = "say read_only, idempotent_write or non_idempotent_write"
        faults.warn((*place, "tool", "effect_class"), "effect_unknown", message, hint)
    if not export.description:
        message = f"{export.id} has no description, by which people and models choose it"
        faults.warn(place, "description_missing", message, "add a sentence")


# --- the package --------------------------------------------------------------------------------------------


def _check_about(faults: Faults, document: Document, root: str) -> None:
    if not any(name.lower().startswith("readme") for name in _names(root)):
        faults.warn((), "readme_missing", "the package has no README.md", "say what it does and needs")
    for key in ("description", "license"):
        if not document.data.get(key):
            faults.warn((), f"{key}_missing", f"the manifest has no {key}", f'add {key} = "…"')


def _check_program(faults: Faults, plugin: Plugin) -> None:
    if plugin.entrypoint is not None and not plugin.entrypoint.command.startswith("./bin/"):
        message = f"the program {quoted(plugin.entrypoint.command)} is not in bin/"
        hint = "its folder is shown in the cage; bin/ is where packages have programs"
        faults.warn(("runtime", "entrypoint", 0), "program_place", message, hint)


def _check_assets(faults: Faults, declared: Declared, root: str) -> None:
    exists = look.isdir(os.path.join(root, ASSETS))
    asking = [
        number
        for number, export in enumerate(declared.exports)
        if export.permissions.filesystem == "assets_ro"
    ]
    if exists and not asking:
        message = "the package has assets/, and no export can read it"
        hint = 'ask with filesystem = "assets_ro", or leave the folder out'
        faults.warn((), "assets_unused", message, hint)
    for number in () if exists else asking:
        message = f"{declared.exports[number].id} asks for assets_ro, and the package has no assets/"
        keys: KeyPath = ("exports", number, "permissions", "filesystem")
        faults.warn(keys, "assets_missing", message, 'write filesystem = "none"')


def _unused_schemas(declared: Declared, root: str) -> Iterator[Diagnostic]:
    used = {file.name for file in schema_files(declared)}
    # Schemas may refer to each other only within a file, so what no export names has no use.
    names = [name for name in _names(os.path.join(root, "schemas")) if name.endswith(".json")]
    for name in [name for name in names if f"schemas/{name}" not in used][:_MOST_SHOWN]:
        path = os.path.join(root, "schemas", name)
        yield _about_file(path, "schema_unused", "no export names this schema", "name it or remove it")
    for name in sorted(name for name in used if not name.startswith("schemas/")):
        path = os.path.join(root, name)
        yield _about_file(path, "schema_place", "the schema is not in schemas/", "move it there")


def _hidden_parts(plugin: Plugin, root: str) -> Iterator[Diagnostic]:
    shown = {*plugin.root_parts, ASSETS}
    hidden = [name for name in _names(root) if name not in shown and not _is_for_people(name)]
    for name in hidden[:_MOST_SHOWN]:
        message = "the cage does not show this part of the package"
        hint = f"move what the program needs to {ASSETS}/ or bin/"
        yield _about_file(os.path.join(root, name), "part_hidden", message, hint)


def _secret_files(root: str) -> Iterator[Diagnostic]:
    found = sorted(
        entry.path
        for entry in walk_package(root)
        if any(fnmatch.fnmatchcase(entry.name.lower(), pattern) for pattern in _SECRET_FILES)
    )
    for path in found[:_MOST_SHOWN]:
        message = "a file of this name usually holds a secret, and packages are public"
        yield _about_file(path, "secret_file", message, "remove it, and declare a slot in secret_slots")


def _is_for_people(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _NOT_FOR_THE_CAGE)


def _names(folder: str) -> list[str]:
    try:
        return sorted(look.listdir(folder))
    except OSError:
        return []


def _about_file(path: str, rule: str, message: str, hint: str) -> Diagnostic:
    return Diagnostic(path, 0, 0, rule, message, hint, "warning")
