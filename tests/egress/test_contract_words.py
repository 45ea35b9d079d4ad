"""Each contract has words of its own for the network: one plugin for each of them, in its own manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.egress.conftest import Plugin
from tests.internet import API, OTHER
from tests.manifests import SANDBOX, nexo
from tests.tables import one_case

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

# Prints what came of each name and port. A file of its own, because some contracts know no arguments.
PROGRAM = """\
#!/usr/bin/python3 -I
import json, socket
found = {}
for name in ("ipv4.example.com", "other.example.org"):
    for port in (2525, 7):
        try:
            with socket.create_connection((name, port), 20) as line:
                line.sendall(b"hello\\n")
                found[f"{name}:{port}"] = line.makefile().readline().strip()
        except OSError:
            found[f"{name}:{port}"] = "refused"
print(json.dumps(found))
"""

NEXO = (
    nexo("words", "./words")
    + SANDBOX
    + """\
network = "allowlist"
network_allowlist = ["ipv4.example.com:2525"]
"""
)
KAGED = """\
name: words
version: 1.0.0
kaged_api: 1
description: Connects.
command: ["./words"]
capabilities: ["net:WORD"]
tools: [{name: none, description: None., parameters_schema: {type: object}}]
"""
AINB = """\
[plugin]
name = "words"
version = "1.0.0"
abi_version = 2
description = "Connects."
[capabilities]
network = WORD
[provides]
cli_namespaces = ["words"]
"""
VAI = """\
api_version = "vai.plugin.v1"
package_id = "example/words"
version = "1.0.0"
name = "Words"
[runtime]
protocol = "vai.rpc.v1"
entrypoint = ["./words"]
[[exports]]
id = "connect"
kind = "hook"
[exports.permissions]
network = "egress"
[exports.hook]
subscribes_to = ["run.completed"]
"""
BINDING = {
    "binding_id": "b",
    "package_id": "example/words",
    "package_version": "1.0.0",
    "export_id": "connect",
    "scope": {"org_id": "o"},
    "config": {},
    "secrets": {},
    "status": "active",
}
MCP = json.dumps({"mcpServers": {"words": {"command": "./words", "x-sandbox": {"network": ["WORD"]}}}})

ONE_PORT = {"ipv4.example.com:2525": f"220 {API}"}
ONE_HOST = {**ONE_PORT, "ipv4.example.com:7": "hello"}
EVERYTHING = {**ONE_HOST, "other.example.org:2525": f"220 {OTHER}"}

CASES = {
    "nexo, network_allowlist": ("plugin.toml", NEXO, ONE_PORT),
    "kaged, net:HOST:PORT": (
        "kaged-plugin.yaml",
        KAGED.replace("WORD", "ipv4.example.com:2525"),
        ONE_PORT,
    ),
    "kaged, net:HOST:*": ("kaged-plugin.yaml", KAGED.replace("WORD", "ipv4.example.com:*"), ONE_HOST),
    "kaged, net:*": ("kaged-plugin.yaml", KAGED.replace("WORD", "*"), EVERYTHING),
    "ainb, a list": ("manifest.toml", AINB.replace("WORD", '["ipv4.example.com:2525"]'), ONE_PORT),
    "ainb, true": ("manifest.toml", AINB.replace("WORD", "true"), EVERYTHING),
    "mcp, x-sandbox": ("mcp.json", MCP.replace("WORD", "ipv4.example.com:2525"), ONE_PORT),
}


@one_case("case", CASES)
def test_the_word_of_the_contract(plugin: Plugin, case: str) -> None:
    name, text, reached = CASES[case]
    folder = plugin.folder / case
    plugin.write(folder / "words", PROGRAM, mode=0o755)
    manifest = plugin.write(folder / name, text)
    policy = plugin.policy('ceiling = "open"\nhosts = ["*:*"]')
    done = plugin.caller("exec", "--policy", policy, manifest)
    found = json.loads(done.stdout)
    assert len(found) == 4, done.stderr
    assert {name: said for name, said in found.items() if said != "refused"} == reached, done.stderr
    assert done.stderr.count("THIS PLUGIN REACHES EVERY HOST BY NAME") == (reached is EVERYTHING)
    # The same plugin under a policy without a network. ainb's starts all the same, as its contract says.
    refused = plugin.caller("exec", manifest)
    if case.startswith("ainb"):
        assert set(json.loads(refused.stdout).values()) == {"refused"}
    else:
        assert refused.returncode == 126 and "network" in refused.stderr


def test_hosts_of_the_policy_and_of_a_binding(plugin: Plugin) -> None:
    """A vai package lists no hosts. It gets those of the policy, or those of them that its binding lists."""
    folder = plugin.folder / "words"
    plugin.write(folder / "words", PROGRAM, mode=0o755)
    manifest = plugin.write(folder / "vai-plugin.toml", VAI)
    hosts = '["ipv4.example.com:7,2525", "other.example.org:2525"]'
    policy = plugin.policy(f'ceiling = "allowlist"\nhosts = {hosts}')
    for more, reached in (
        ((), EVERYTHING),
        (("--binding", _binding(plugin, "ipv4.example.com:2525")), ONE_PORT),
    ):
        done = plugin.caller("exec", "--policy", policy, *more, manifest)
        found = json.loads(done.stdout or "{}")
        assert {name: said for name, said in found.items() if said != "refused"} == reached, done.stderr
    beyond = plugin.caller(
        "exec", "--policy", policy, "--binding", _binding(plugin, "elsewhere.example.com:2525"), manifest
    )
    assert beyond.returncode == 126 and "elsewhere.example.com" in beyond.stderr


def _binding(plugin: Plugin, host: str) -> Path:
    record = {**BINDING, "policy": {"egress": [host]}}
    return plugin.write(plugin.folder / "operator" / "binding.json", json.dumps(record))
