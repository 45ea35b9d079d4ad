"""runner schema: a contract's manifest, or a policy, as JSON Schema, for editors."""

from __future__ import annotations

import argparse
import json

from runner.cli.shared.text import say
from runner.contracts.registry import contract_names, find_contract, manifest_schema
from sandbox.document.diagnostic import printable

NAME = "schema"
EXAMPLE = "runner schema CONTRACT > manifest.schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "contract", metavar="CONTRACT|policy", help=f"{', '.join(contract_names())}; or policy"
    )


def run(args: argparse.Namespace) -> int:
    if args.contract == "policy":
        from sandbox.policy.tables import policy_schema

        print(json.dumps(policy_schema(), indent=2))
        return 0
    known = contract_names()
    if args.contract not in known:
        name = printable(args.contract)
        say(f"runner schema: there is no contract '{name}'; there are {', '.join((*known, 'policy'))}")
        return 2
    print(json.dumps(manifest_schema(find_contract(args.contract)), indent=2))
    return 0
