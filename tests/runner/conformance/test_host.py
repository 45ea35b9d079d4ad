"""Hosts on trial: a small host of each contract keeps its rules, and each of its faults breaks just one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.conformance.host import HostCommandFault, load_stand_in, run_host
from runner.conformance.report import ConformanceReport
from runner.contracts.registry import contract_names

SMALL_HOST = Path(__file__).parent / "small_host.py"

# fault -> the run that shows it, and for each contract the rule that it breaks.
FAULTS: dict[str, tuple[str, str]] = {
    "framing": ("", "rune-H01 nexo-H01 vai-H01 kaged-H01 ainb-H01 mcp-H01"),
    "pieces": ("pieces", "rune-H02 nexo-H02 vai-H02 kaged-H02 ainb-H02 mcp-H02"),
    "large": ("large", "rune-H03 nexo-H03 vai-H03 kaged-H03 ainb-H03 mcp-H03"),
    "extra": ("extra", "rune-H04 nexo-H04 vai-H04 kaged-H04 ainb-H04 mcp-H04"),
    "stderr": ("stderr", "rune-H05 nexo-H05 vai-H05 kaged-H05 ainb-H05 mcp-H05"),
    "descriptors": ("", "rune-H06 nexo-H06 vai-H06 kaged-H06 ainb-H06 mcp-H06"),
    "leaves": ("stubborn", "rune-H07+H19 nexo-H07+H23 vai-H07+H22 kaged-H07+H26 ainb-H07+H25 mcp-H07+H24"),
    "early": ("pieces", "rune-H08 nexo-H08 vai-H08 kaged-H08 ainb-H08 mcp-H08"),
    "version": ("", "nexo-H09 vai-H09 kaged-H09 ainb-H09 mcp-H09"),
    "order": ("", "rune-H09 nexo-H10 vai-H11+H16 kaged-H10+H12 ainb-H10 mcp-H10+H12"),
    "opening": ("", "rune-H10 nexo-H11 vai-H12 kaged-H11 ainb-H11+H12 mcp-H11"),
    "call": ("", "rune-H13 nexo-H13 vai-H14+H15 kaged-H16 ainb-H16 mcp-H16"),
    "same_id": ("", "nexo-H12 kaged-H15 ainb-H14 mcp-H15"),
    "twice": ("stubborn", "rune-H12 vai-H16"),
    "unknown": ("", "rune-H11 vai-H10 kaged-H14 ainb-H13"),
    "no_initialized": ("", "kaged-H12 mcp-H12"),
    "mute": ("asks", "nexo-H15 kaged-H18 ainb-H19 mcp-H17"),
    "credulous": ("impostor", "rune-H14 nexo-H17 vai-H13 kaged-H19 mcp-H14"),
    "cancel": ("silent", "vai-H17 mcp-H18"),
    "arguments": ("", "rune-H15 nexo-H18 vai-H20 kaged-H21 mcp-H21"),
    "folder": ("", "rune-H15 vai-H20 kaged-H21"),
    "variables": ("", "rune-H16 nexo-H19 kaged-H22 mcp-H22"),
    "inherits": ("", "rune-H16"),
    "no_goodbye": ("", "nexo-H20 vai-H21 kaged-H23 ainb-H22"),
    "goodbye": ("", "nexo-H21 kaged-H24 ainb-H23"),
    "kills": ("stubborn", "rune-H18 nexo-H22 kaged-H25 ainb-H24"),
    "stdin": ("stubborn", "rune-H17 mcp-H23"),
    "no_term": ("stubborn", "mcp-H24"),
}
CASES = [
    (contract, fault, run, rules.split("+"))
    for fault, (run, cases) in FAULTS.items()
    for contract, _, rules in (case.partition("-") for case in cases.split())
]


def try_small_host(contract: str, fault: str, *runs: str) -> ConformanceReport:
    command = [sys.executable, str(SMALL_HOST), contract, fault, "{folder}", "{command}"]
    return run_host(contract, command, runs=runs)


def broken(report: ConformanceReport) -> list[str]:
    return [each.rule.id.partition("-")[2] for each in report.verdicts if each.result == "fail"]


@pytest.mark.broad
@pytest.mark.parametrize(("contract", "fault", "run", "rules"), CASES, ids=lambda value: str(value))
def test_a_fault_is_told_by_its_rule(contract: str, fault: str, run: str, rules: list[str]) -> None:
    report = try_small_host(contract, fault, run)
    assert broken(report) == rules, [each for each in report.verdicts if each.result == "fail"]
