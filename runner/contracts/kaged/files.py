"""The programs that a manifest names, for `runner check`."""

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
    """The programs that the manifest names, where they are files of this machine."""
    faults = Faults(document)
    for word in Table(document.data).strings("command")[:1]:
        check_program(faults, word.keys, word.text, os.path.dirname(document.path), "command_missing")
    for item in Table(document.data).strings("capabilities"):
        path = item.text.removeprefix("exec:").partition(":")[2]
        if item.text.startswith("exec:") and not look.lexists(path):
            message = f"{quoted(path)} does not exist here, so the plugin cannot be launched"
            faults.warn(item.keys, "program_missing", message)
    return faults.diagnostics()
