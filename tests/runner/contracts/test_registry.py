"""The contracts there are, and what each of them has to offer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.cli import GROUPS, VERBS
from runner.contracts.contract import Contract, ContractOption
from runner.contracts.registry import (
    all_contracts,
    all_kinds,
    contract_names,
    find_contract,
    host_methods,
    manifest_schema,
    option_owners,
)
from runner.plugin import Allowance, Plugin
from sandbox.spec import SandboxSpec
from tests.conftest import ROOT


def test_contracts_are_the_folders() -> None:
    folders = {path.parent.name for path in (ROOT / "runner/contracts").glob("*/__init__.py")}
    assert set(contract_names()) == folders >= {"mcp", "nexo", "rune"}


@pytest.mark.parametrize("name", contract_names())
def test_each_contract_is_complete(name: str) -> None:
    contract = find_contract(name)
    assert contract.name == name
    assert contract.format in ("toml", "json", "yaml") and contract.file_names and contract.sign
    assert contract.about and "\n" not in contract.about and len(contract.about) < 100
    assert contract.no_command_hint and "tool" in contract.calls
    assert manifest_schema(contract)
    assert "list" not in contract.calls, "a word of the runner's own"
    assert contract.lists[0].what == "tools"
    assert {listing.kind for listing in contract.lists} <= {"", *contract.calls}
    plugin = Plugin("a", "1", name, "a", "", "/a/manifest", None, None, SandboxSpec())
    assert host_methods(contract) == contract.services(plugin, Allowance()).METHODS


# What few contracts have: the last section of Contract. Who has none of it never reads about it.
FEW = {"one_shot", "switches", "declarations", "configurations", "choice", "prepared_calls"}
FEW |= {"lint", "commands", "command_output", "lifecycle_notice", "plain_entries", "hooks_for", "bindings"}
FEW |= {"actions"}


def test_the_core_of_the_seam_is_what_contracts_share() -> None:
    members = {name for name in {**vars(Contract), **Contract.__annotations__} if not name.startswith("_")}
    answered = [set(vars(type(contract))) & members for contract in all_contracts()]
    shared = {name for name in members if sum(name in each for each in answered) > 1}
    assert members - shared == FEW, "one contract's own matter is a protocol of its own, or no member"
    assert len(shared) <= 23


def test_verbs_and_options_of_contracts_hide_no_other() -> None:
    verbs = [verb.name for contract in all_contracts() for verb in contract.verbs]
    assert len({*verbs, *VERBS}) == len(verbs) + len(VERBS)
    for contract in all_contracts():
        assert {verb.group for verb in contract.verbs} <= set(GROUPS)
        for option in contract.options:
            assert option.flag.startswith("--") and set(option.verbs) <= set(VERBS)


def test_every_kind_is_known_once() -> None:
    assert len(set(all_kinds())) == len(all_kinds()) and "tool" in all_kinds()


def test_an_option_knows_its_name() -> None:
    assert ContractOption("--two-words", "X", "").name == "two_words"
    assert option_owners("nobodys") == ()


# What no module outside of runner/contracts/ may know: a contract's name, files, variables and tables.
WORDS = ("rterm", "mcpServers", "NEXO_", "[plugin.")
# But for MCP here: the gateway speaks it, whatever its plugins speak, and the table of verbs says so.
SPEAKS_MCP = ("runner/gateway/", "runner/cli/serving/gateway.py", "runner/cli/__init__.py")


def _speaks_mcp(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(SPEAKS_MCP)


def test_no_module_outside_of_its_folder_names_a_contract() -> None:
    files = {file for contract in all_contracts() for file in contract.file_names}
    names = "|".join(rf"\b{name}" for name in contract_names())
    words = re.compile("|".join((names, *map(re.escape, (*WORDS, *files)))), re.IGNORECASE)
    folders = [ROOT / "runner" / "contracts" / name for name in contract_names()]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "runner").rglob("*.py"))
        if not any(map(path.is_relative_to, folders))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(re.sub("(?i)mcp", "", line) if _speaks_mcp(path) else line)
    ]
    assert found == []
