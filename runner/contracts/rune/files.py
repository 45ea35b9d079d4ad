"""The files that a bundle names, for `runner check`."""

from __future__ import annotations

import os

from runner.manifest.program import check_program
from runner.manifest.table import Table
from runner.plugin import Plugin
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document


def check_files(document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
    """The contract's last rule: the bundle's own directory and command exist.

    Programs of the system are not looked for: the bundle may be checked on another machine than it runs on.
    """
    faults = Faults(document)
    root, process = os.path.dirname(document.path), Table(document.data).table("process")
    named = (process.string("dir") or "").strip()
    if named and not look.isdir(directory := os.path.join(root, named)):
        fact = "is not a directory" if look.lexists(directory) else "does not exist"
        hint = "it is relative to the bundle's folder"
        faults.error(process.at("dir"), "process_dir_missing", f"process.dir {quoted(named)} {fact}", hint)
    command = (process.string("command") or "").strip()
    if "/" in command and not command.startswith("/"):  # relative to the bundle, not to process.dir
        check_program(faults, process.at("command"), command, root, "process_command_missing")
    return faults.diagnostics()
