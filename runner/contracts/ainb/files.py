"""The files beside a manifest, for `runner check`."""

from __future__ import annotations

import os

from runner.manifest.program import check_format
from runner.manifest.table import Table
from runner.plugin import Plugin
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, quoted
from sandbox.document.faults import Faults
from sandbox.document.read import Document


def check_files(document: Document, plugin: Plugin | None) -> tuple[Diagnostic, ...]:
    """The folder has the plugin's name, and so has the executable in it."""
    faults = Faults(document)
    name = Table(document.data).table("plugin").string("name") or ""
    if plugin is None and (not name or "/" in name or not name.isprintable()):
        return ()  # what a plugin of another name lacks is not known
    folder = os.path.basename(os.path.dirname(document.path))
    if folder != name:
        message = f"the plugin is called {quoted(name)}, and its folder {quoted(folder)}"
        faults.error(("plugin", "name"), "plugin_folder", message, "hosts need both to have the same name")
    path = os.path.join(os.path.dirname(document.path), name)
    if not look.isfile(path):
        message = f"there is no executable {quoted(name)} beside the manifest"
        faults.error(("plugin", "name"), "executable_missing", message)
    elif not look.access(path, os.X_OK):
        message, hint = "is not executable", f"chmod +x {name}"
        if look.stat(path).st_mode & 0o111 and look.statvfs(path).f_flag & os.ST_NOEXEC:
            message = "is on a filesystem that is mounted noexec"
            hint = "move the plugin to another filesystem, or mount that one with exec"
        message = f"the file {quoted(name)} beside the manifest {message}"
        faults.error(("plugin", "name"), "executable_missing", message, hint)
    else:
        check_format(faults, ("plugin", "name"), path)
    return faults.diagnostics()
