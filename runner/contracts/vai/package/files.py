"""Checks the files of a package against its manifest: links, the program, the schemas."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from runner.contracts.vai.declared import Declared, DeclaredExport, declared_by
from runner.contracts.vai.package.machine import find_in_package, machine_fault, outside_message
from runner.contracts.vai.package.schemas import read_schema
from runner.manifest.program import check_format
from runner.manifest.table import Table
from runner.plugin import Plugin
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document
from sandbox.paths.beneath import Escapes
from sandbox.paths.mounts import contains
from sandbox.spec import KeyPath
from sandbox.speed.value import NamedTuple

MOST_ENTRIES = 10_000  # of a package that are looked at
_MOST_LINKS_SHOWN = 20


class SchemaFile(NamedTuple):
    """A file that an export names as a schema."""

    keys: KeyPath  # in the manifest
    name: str  # in the package


def check_files(document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
    """The program can be executed, the schemas can be used, and no link leads out of the package."""
    root = os.path.dirname(document.path)
    faults = Faults(document)
    fault = None if plugin is None else machine_fault(declared_by(plugin))
    if fault is not None:
        faults.warn(("runtime", fault.key), fault.cause, fault.message, fault.hint)
    for word in Table(document.data).table("runtime").strings("entrypoint")[:1]:
        if plugin is not None or _is_inside(word.text):
            _check_program(faults, root, word.text.removeprefix("./"))
    inside: list[Diagnostic] = []
    seen: set[str] = set()
    for file in _named_schemas(document) if plugin is None else schema_files(declared_by(plugin)):
        known = file.name in seen
        seen.add(file.name)
        inside += _check_schema(faults, root, file, known)
    return (*faults.diagnostics(), *inside, *_outward_links(root))


def schema_files(declared: Declared) -> Iterator[SchemaFile]:
    for number, export in enumerate(declared.exports):
        yield from _schemas_of(export, ("exports", number))


def _named_schemas(document: Document) -> Iterator[SchemaFile]:
    """The schemas that a manifest with faults names. Those outside of the package are among the faults."""
    for table in Table(document.data).tables("exports"):
        tool = table.table("tool")
        for part, key in ((table, "config_schema"), (tool, "input_schema"), (tool, "output_schema")):
            if _is_inside(name := part.string(key) or ""):
                yield SchemaFile(part.at(key), name)


def _is_inside(name: str) -> bool:
    return bool(name) and name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


def _schemas_of(export: DeclaredExport, place: KeyPath) -> Iterator[SchemaFile]:
    if export.config_schema:
        yield SchemaFile((*place, "config_schema"), export.config_schema)
    if export.input_schema:
        yield SchemaFile((*place, "tool", "input_schema"), export.input_schema)
    if export.output_schema:
        yield SchemaFile((*place, "tool", "output_schema"), export.output_schema)


def _check_program(faults: Faults, root: str, name: str) -> None:
    keys: KeyPath = ("runtime", "entrypoint", 0)
    try:
        path = find_in_package(root, name)
        status = look.stat(path)
    except OSError as error:
        message = f"the program {quoted(name)} cannot be found in the package: {error.strerror}"
        hint = "the first word of entrypoint is a file in the package, not a command on PATH"
        faults.error(keys, "program_missing", message, hint)
        return
    except ValueError as error:
        _outside(faults, keys, name, str(error))
        return
    if not stat.S_ISREG(status.st_mode):
        message = f"the program {quoted(name)} is not a regular file"
        faults.error(keys, "program_missing", message, "name the file to execute")
    elif not status.st_mode & 0o111:
        message = f"the program {quoted(name)} is not executable"
        faults.error(keys, "program_not_executable", message, f"chmod +x {name}")
    else:
        check_format(faults, keys, path)


def _check_schema(faults: Faults, root: str, file: SchemaFile, known: bool) -> tuple[Diagnostic, ...]:
    """`known`: another export names the same file, whose faults were reported."""
    try:
        document = read_schema(root, file.name)
    except OSError as error:
        message = f"the schema {quoted(file.name)} cannot be read: {error.strerror}"
        faults.error(file.keys, "schema_missing", message, "write the file, or take the key out")
        return ()
    except Escapes:
        _outside(faults, file.keys, file.name, look.realpath(os.path.join(root, file.name)))
        return ()
    except DocumentError as error:
        return () if known else error.diagnostics
    try:
        schema = Schema(document)
    except SchemaFault as fault:
        message = f"the schema {quoted(file.name)} cannot be used: {fault}"
        faults.error(file.keys, "schema_invalid", message, "references stay inside the file")
        return ()
    if schema.unchecked and not known:
        message = f"the schema {quoted(file.name)} has regular expressions that are not checked"
        hint = "write them without look-around and back references"
        faults.warn(file.keys, "schema_pattern", message, hint)
    return ()


def _outside(faults: Faults, keys: KeyPath, name: str, real: str) -> None:
    faults.error(keys, "link_outside", *outside_message(name, real))


def _outward_links(root: str) -> Iterator[Diagnostic]:
    shown = 0
    for entry in walk_package(root):
        if not entry.is_symlink() or contains(look.realpath(root), look.realpath(entry.path)):
            continue
        shown += 1
        if shown > _MOST_LINKS_SHOWN:
            return
        message = f"the link leads out of the package, to {quoted(look.readlink(entry.path))}"
        hint = "put the file itself into the package: the cage shows nothing else"
        yield Diagnostic(entry.path, 0, 0, "link_outside", message, hint)


def walk_package(root: str) -> Iterator[os.DirEntry[str]]:
    """All files, folders and links of a package, MOST_ENTRIES at most. Links are not followed."""
    pending, left = [root], MOST_ENTRIES
    while pending:
        try:
            with look.scandir(pending.pop()) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue  # a folder that cannot be read; the launch says so
