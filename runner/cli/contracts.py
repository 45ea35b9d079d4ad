"""runner contracts: list the contracts, and what each supports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from runner.cli.shared.text import say
from runner.contracts.contract import Contract
from runner.contracts.registry import ContractBroken, contract_names, find_contract, host_methods
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable

NAME = "contracts"
EXAMPLE = "runner contracts --format json"

SCHEMA = "runner.contracts.v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    described: list[dict[str, Any]] = []
    broken: list[dict[str, str]] = []
    for name in contract_names():
        try:
            described.append(_describe(find_contract(name)))
        except ContractBroken as fault:
            broken.append({"name": name, "reason": str(fault)})
        except Exception as error:  # noqa: BLE001 -- a bug in one contract does not hide the others
            reason = str(ContractBroken(name, f"{type(error).__name__}: {error}"))
            broken.append({"name": name, "reason": reason})
    if args.format == "json":
        print(json.dumps({"schema": SCHEMA, "contracts": described, "broken": broken}, indent=2))
    else:
        say("\n\n".join("\n".join(_lines(each)) for each in described), sys.stdout)
    for each in broken:
        say(f"runner contracts: {printable(each['reason'])}")
    return EXIT["internal" if broken else "ok"]


def _describe(contract: Contract) -> dict[str, Any]:
    return {
        "name": contract.name,
        "about": contract.about,
        "format": contract.format,
        "file_names": list(contract.file_names),
        "recognised_by": contract.sign,
        "several_plugins": contract.configurations is not None,
        "config_shapes_cage": "config" in contract.takes,
        "takes_secrets": "secrets" in contract.takes,
        "secret_files": "secret_files" in contract.takes,
        "call_shapes_cage": contract.prepared_calls is not None,
        "calls": list(contract.calls),
        "context": {kind: list(keys) for kind, keys in contract.calls.items() if keys},
        "lists": [listing.what for listing in contract.lists],
        "one_call_per_process": contract.one_shot,
        "host_methods": dict(host_methods(contract)),
        "options": [
            {"flag": option.flag, "metavar": option.metavar, "help": option.help, "verbs": list(option.verbs)}
            for option in contract.options
            if option.verbs
        ],
        "verbs": [{"name": verb.name, "help": verb.help} for verb in contract.verbs],
    }


def _lines(contract: Mapping[str, Any]) -> list[str]:
    several = "; one may list several plugins" if contract["several_plugins"] else ""
    asking = "manifest and --config ask" if contract["config_shapes_cage"] else "the manifest asks"
    context: dict[str, list[str]] = {}  # keys -> the kinds of calls that send them
    for kind, keys in contract["context"].items():
        context.setdefault(", ".join(keys), []).append(kind)
    rows: Sequence[tuple[str, str]] = (
        ("manifest", f"{', '.join(contract['file_names'])} ({contract['format'].upper()}){several}"),
        ("known by", contract["recognised_by"]),
        ("calls", ", ".join(contract["calls"])),
        ("context", "; ".join(f"{', '.join(kinds)}: {keys}" for keys, kinds in context.items())),
        ("lists", ", ".join(contract["lists"])),
        ("cage", f"as {asking} and the policy allows"),
        ("secrets", _secrets(contract)),
        ("process", _process(contract)),
        ("may ask", ", ".join(contract["host_methods"])),
        ("options", ", ".join(f"{option['flag']} {option['metavar']}" for option in contract["options"])),
        ("verbs", ", ".join(verb["name"] for verb in contract["verbs"])),
    )
    return [
        f"{contract['name']}: {contract['about']}",
        *(f"  {what:<9} {value or 'none'}" for what, value in rows),
    ]


def _secrets(contract: Mapping[str, Any]) -> str:
    if contract["secret_files"]:
        return "--secret, as files in the cage"
    return "--secrets" if contract["takes_secrets"] else ""


def _process(contract: Mapping[str, Any]) -> str:
    if contract["call_shapes_cage"]:
        return "one for each call, or for calls that share a cage"
    return "one for each call" if contract["one_call_per_process"] else "one for many calls"
