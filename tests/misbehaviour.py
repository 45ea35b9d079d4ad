"""Manifests for tests/plugins/misbehaving, the plugin that misbehaves in one chosen way."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tests.conftest import ROOT
from tests.manifests import nexo, rune

Contract = Literal["rune", "nexo", "mcp", "kaged", "ainb", "vai"]
Moment = Literal["start", "hello", "call"]

CONTRACTS: tuple[Contract, ...] = ("rune", "nexo", "mcp", "kaged", "ainb", "vai")
# Those whose messages are frames with a header.
WITH_HEADERS: tuple[Contract, ...] = ("ainb", "vai")
PLUGIN = ROOT / "tests/plugins/misbehaving/plugin.py"

_program: Mapping[str, Any] = runpy.run_path(str(PLUGIN))
# Its behaviours, each with its default moment.
BEHAVIOURS: Mapping[str, Moment] = {name: row[1] for name, row in _program["BEHAVIOURS"].items()}
ID: str = _program["ID"]
PACKAGE: str = _program["PACKAGE"]
# The name of its tool in each contract.
TOOL: Mapping[str, str] = _program["TOOL"]
# The number of messages in a burst and in a storm.
REQUESTS: int = _program["REQUESTS"]

_NEXO = (
    nexo("{id}", "./plugin.py")
    + """\
args = {args}

[plugin.extends]
tools = ["{tool}"]

[plugin.capabilities.broker]
publish = ["{id}.>"]
"""
)

_AINB = """\
[plugin]
name = "{id}"
version = "1.0.0"
abi_version = 2
description = "Wrong in one way."

[capabilities]
event_bus = true

[provides]
cli_namespaces = ["{tool}"]
"""
_AINB_PROGRAM = """\
#!/usr/bin/python3 -I
import os, runpy, sys
sys.argv[1:] = {args}
runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "plugin.py"), run_name="__main__")
"""

_VAI = """\
api_version = "vai.plugin.v1"
package_id = "{id}"
version = "1.0.0"
name = "Misbehaving"

[runtime]
protocol = "vai.rpc.v1"
entrypoint = {command}

[[exports]]
id = "{tool}"
kind = "tool"
default_timeout_ms = 60000

[exports.tool]
effect_class = "read_only"
input_schema = "schemas/input.json"
"""


def given_to(contract: Contract, value: Any) -> Any:
    """The input of a call of its tool that makes it echo the value."""
    if contract == "vai":  # the body of the request: a call is prepared before its session is opened
        return {"export_id": TOOL["vai"], "context": {"invocation_id": "inv_1"}, "input": value}
    return {"argv": [json.dumps(value)]} if contract == "ainb" else value


def echoed(contract: Contract, answer: Any) -> Any:
    """The echo in the answer to such a call."""
    if contract == "ainb":
        return json.loads(answer["stdout"])
    if contract == "vai":
        return answer["structured_output"]
    return answer["structuredContent"] if contract == "mcp" else answer


def plugin(folder: Path, behaviour: str, contract: Contract, moment: Moment | None = None) -> Path:
    """Write a plugin with this behaviour to `folder`. Returns the path of its manifest.

    `moment`: at the start, or in place of its answer to the handshake or to a call.
    """
    assert behaviour in BEHAVIOURS, f"{behaviour}: known are {', '.join(BEHAVIOURS)}"
    if contract == "ainb":  # the folder has the plugin's name
        folder = folder / ID
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    place = folder
    if contract == "vai":  # the cage shows only these folders of a package
        place = folder / "bin"
        for each, name in ((place, ""), (folder / "schemas", "input.json")):
            each.mkdir(exist_ok=True)
            each.chmod(0o755)
            if name:
                (each / name).write_text(json.dumps({"type": "object"}))
                (each / name).chmod(0o644)
    shutil.copy(PLUGIN, place)
    (place / PLUGIN.name).chmod(0o755)
    args = [behaviour, contract, *([moment] if moment else [])]
    if contract == "nexo":
        path = folder / "nexo-plugin.toml"
        text = _NEXO.format(id=ID, args=json.dumps(args), tool=TOOL["nexo"])
    elif contract == "rune":
        path = folder / "rterm-plugin.json"
        bundle = rune(ID, TOOL["rune"], "./plugin.py", args=args)
        text = json.dumps(bundle)
    elif contract == "kaged":
        path = folder / "kaged-plugin.yaml"
        schema = {"type": "object"}
        manifest = {
            "name": ID,
            "version": "1.0.0",
            "kaged_api": 1,
            "description": "Wrong in one way.",
            "command": ["./plugin.py", *args],
            "notifications": [f"{ID}.chatter"],
            "tools": [{"name": TOOL["kaged"], "description": "Echo.", "parameters_schema": schema}],
        }
        text = json.dumps(manifest)  # JSON is YAML
    elif contract == "ainb":
        path = folder / "manifest.toml"
        text = _AINB.format(id=ID, tool=TOOL["ainb"])
        program = folder / ID  # it gets no arguments
        program.write_text(_AINB_PROGRAM.format(args=args))
        program.chmod(0o755)
    elif contract == "vai":
        path = folder / "vai-plugin.toml"
        text = _VAI.format(id=PACKAGE, command=json.dumps(["./bin/plugin.py", *args]), tool=TOOL["vai"])
    else:
        path = folder / "mcp.json"
        text = json.dumps({"mcpServers": {ID: {"command": "./plugin.py", "args": args}}})
    path.write_text(text)
    path.chmod(0o644)
    return path
