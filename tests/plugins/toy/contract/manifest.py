"""toy.json: {"toy": ID, "run": [COMMAND, ARG…], "tools": [NAME…]}"""

import json
import os

from runner.manifest.faults import Faults
from runner.manifest.table import Table
from runner.plugin import Entrypoint, Plugin
from sandbox.spec import SandboxSpec

STRINGS = {"type": "array", "items": {"type": "string"}}
SCHEMA = {"type": "object", "properties": {"toy": {"type": "string"}, "run": STRINGS, "tools": STRINGS}}


def read(document, binding):
    faults, table = Faults(document), Table(document.data)
    name = table.string("toy")
    run = [item.text for item in table.strings("run")]
    if not name:
        faults.error(("toy",), "toy_nameless", "the toy has no name", 'write "toy": "NAME"')
    if binding is not None:
        try:
            with open(binding) as file:
                run.append(json.load(file)["word"])
        except (OSError, ValueError, KeyError) as error:
            faults.error(
                (), "toy_binding", f"--binding {binding} cannot be used: {error}", 'it holds {"word": …}'
            )
    if faults.failed:
        return None, faults.diagnostics()
    folder = os.path.dirname(document.path)
    entrypoint = Entrypoint(run[0], tuple(run[1:]), folder) if run else None
    tools = tuple(item.text for item in table.strings("tools"))
    exports = (("tools", tools), ("tricks", ("roll",)))
    plugin = Plugin(
        name, "1", "toy", name, "", document.path, folder, entrypoint, SandboxSpec(enabled=True), exports
    )
    return plugin, faults.diagnostics()
