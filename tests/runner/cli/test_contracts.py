"""runner contracts: what each contract supports, for people and for programs."""

from __future__ import annotations

import json
import os
import pty
import subprocess

from runner.contracts.registry import all_contracts, contract_names
from runner.plugin import Allowance, Plugin
from sandbox.spec import SandboxSpec
from tests.conftest import Caller
from tests.tables import one_case

NOBODY = Plugin("", "", "", "", "", "", None, None, SandboxSpec())
KEYS = {
    "name",
    "about",
    "format",
    "file_names",
    "recognised_by",
    "several_plugins",
    "config_shapes_cage",
    "takes_secrets",
    "secret_files",
    "call_shapes_cage",
    "calls",
    "context",
    "lists",
    "one_call_per_process",
    "host_methods",
    "options",
    "verbs",
}


def test_json_has_every_contract(runner_as_user: Caller) -> None:
    done = runner_as_user("contracts", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == {"schema", "contracts", "broken"}
    assert document["schema"] == "runner.contracts.v1" and document["broken"] == []
    assert [each["name"] for each in document["contracts"]] == list(contract_names())
    for said, contract in zip(document["contracts"], all_contracts(), strict=True):
        assert said.keys() == KEYS
        assert said["file_names"] == list(contract.file_names) and said["calls"] == list(contract.calls)
        assert said["one_call_per_process"] == contract.one_shot and said["lists"]
        assert said["host_methods"] == dict(contract.services(NOBODY, Allowance()).METHODS)


def test_text_has_the_same_values(runner_as_user: Caller) -> None:
    done = runner_as_user("contracts")
    assert (done.returncode, done.stderr) == (0, "")
    parts = done.stdout.rstrip("\n").split("\n\n")
    assert len(parts) == len(contract_names())
    for part, contract in zip(parts, all_contracts(), strict=True):
        first, *rows = part.splitlines()
        assert first == f"{contract.name}: {contract.about}"
        values = {row[2:11].strip(): row[12:] for row in rows}
        assert list(values) == [
            "manifest",
            "known by",
            "calls",
            "context",
            "lists",
            "cage",
            "secrets",
            "process",
            "may ask",
            "options",
            "verbs",
        ]
        assert all(values.values())
        assert values["manifest"].startswith(", ".join(contract.file_names))
        assert (values["secrets"] == "--secrets") == ("secrets" in contract.takes)
        assert ("files in the cage" in values["secrets"]) == ("secret_files" in contract.takes)
        assert ("--config" in values["cage"]) == ("config" in contract.takes)
        assert values["calls"] == ", ".join(contract.calls)
        assert values["may ask"] == (", ".join(contract.services(NOBODY, Allowance()).METHODS) or "none")


@one_case("columns", [60, 200])
def test_it_fits_a_terminal(runner_as_user: Caller, columns: int) -> None:
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", str(columns), "rows", "50"], stdin=theirs, check=True)
    process = runner_as_user.start("contracts", stdin=subprocess.DEVNULL, stdout=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # EIO: the other end is closed
        pass
    finally:
        os.close(ours)
        process.communicate(timeout=30)
    lines = shown.decode().splitlines()
    assert len(lines) > len(contract_names()) * 9 and max(map(len, lines)) <= columns
    if columns == 60:  # the rest of a value stands below its beginning
        assert any(line.startswith(" " * 12) for line in lines)
