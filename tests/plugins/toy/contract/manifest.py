"""toy.json: {"toy": ID, "run": [COMMAND, ARG…], "tools": [NAME…], "box": [PART…], "secrets": [NAME…]}

With a box, the toy has these parts of its folder in /box/toy, and a scratch folder /box/scratch. Its secrets
are files in /box/secrets. "wild": true asks for no cage at all.
"""

import json
import os

from runner.manifest.table import Table
from runner.plugin import Entrypoint, Plugin
from sandbox.document.faults import Faults
from sandbox.spec import MemoryFile, SandboxSpec, Scratch

STRINGS = {"type": "array", "items": {"type": "string"}}
LISTS = dict.fromkeys(("run", "tools", "box", "secrets"), STRINGS)
SCHEMA = {"type": "object", "properties": {"toy": {"type": "string"}, **LISTS}}


def json_schema():
    return SCHEMA


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
                (), "toy_binding", f"--saying {binding} cannot be used: {error}", 'it holds {"word": …}'
            )
    if faults.failed:
        return None, faults.diagnostics()
    folder = os.path.dirname(document.path)
    entrypoint = Entrypoint(run[0], tuple(run[1:]), folder) if run else None
    tools = tuple(item.text for item in table.strings("tools"))
    exports = (("tools", tools), ("tricks", ("roll",)))
    box = tuple(item.text for item in table.strings("box"))
    secrets = [item.text for item in table.strings("secrets")]
    spec = SandboxSpec(
        enabled=not document.data.get("wild"),
        scratch=Scratch("/box/scratch") if box else None,
        memory_files=tuple(MemoryFile(f"/box/secrets/{name}", secret=name) for name in secrets),
    )
    plugin = Plugin(name, "1", "toy", name, "", document.path, folder, entrypoint, spec, exports)
    if box:
        plugin = plugin._replace(root_inside="/box/toy", root_parts=box)
    return plugin, faults.diagnostics()
