"""`runner ps`: the plugins of a daemon, and how they are."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from runner.cli.serving.socket_option import add_socket, ask
from runner.cli.shared.table import print_table
from sandbox.units import format_duration

if TYPE_CHECKING:
    import argparse

NAME = "ps"
HELP = "list the plugins of a daemon (runner serve) and their states"
EXAMPLE = "runner ps --json"
_TITLES = ("NAME", "STATE", "FOR", "CONTRACT", "CELLS", "PARKED", "CALLS", "RESTARTS", "REASON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(args: argparse.Namespace) -> int:
    found = ask(args, NAME, "GET", "/plugins")
    if isinstance(found, int):
        return found
    if args.json:
        print(json.dumps(found))
        return 0
    print_table(_TITLES, [_row(each) for each in found["plugins"]])
    return 0


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    calls = str(each["in_flight"]) + (f"+{each['queued']}" if each["queued"] else "")
    seconds = max(0, int(time.time() - each["since"]))
    reason = "" if each["state"] == "ready" else each["reason"]
    return (
        *(each["name"], each["state"], format_duration(seconds), each["contract"] or "?"),
        *(str(each["sessions"]), str(each["parked"]), calls, str(each["restarts"]), reason),
    )
