"""`runner ps`: the plugins of a daemon, and how they are."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from runner.cli.serving.fleet_option import HELP as HELP_FLEET
from runner.cli.serving.fleet_option import fleet_verb, with_fleet
from runner.cli.serving.socket_option import add_socket, ask
from runner.cli.shared.table import print_table
from sandbox.document.diagnostic import printable
from sandbox.units import format_duration

NAME = "ps"
EXAMPLE = "runner ps --json"
_TITLES = ("NAME", "STATE", "FOR", "CONTRACT", "CELLS", "PARKED", "CALLS", "RESTARTS", "REASON")


_WORKERS = ("WORKER", "STATE", "FOR", "RUNNING", "PLUGINS", "DONE", "REASON")
_QUEUES = ("PLUGIN", "DIGEST", "WORKERS", "WAITING", "BEGUN", "AGAIN", "HELD")
_SHARES = (("bytes", "most_bytes"), ("messages", "most_messages"))
_STREAMS = ("STREAM", "MESSAGES", "SIZE", "FULL")
_SUBMITTERS = ("SUBMITTER", "LEDGER", "DEAD LETTERS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket(parser)
    parser.add_argument("--fleet", metavar="URL|FILE", help=f"workers and queues instead: {HELP_FLEET}")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(args: argparse.Namespace) -> int:
    if args.fleet is not None:
        return fleet_verb(NAME, lambda: _show_fleet(args))
    found = ask(args, NAME, "GET", "/plugins")
    if isinstance(found, int):
        return found
    if args.json:
        print(json.dumps(found))
        return 0
    print_table(_TITLES, [_row(each) for each in found["plugins"]])
    for fault in found.get("configuration", ()):  # what is not served, and why; earlier daemons do not say
        print(printable(f"{fault['path']}: {fault['message']}"))
    return 0


def _show_fleet(args: argparse.Namespace) -> int:
    from runner.fleet.operate import overview

    found = with_fleet(args.fleet, overview)
    if args.json:
        print(json.dumps(found))
        return 0
    workers = [
        (
            *(each["worker"], each["state"]),
            format_duration(max(0, int(found["at"] - each["since"]))),
            *(f"{each['running']}/{each['slots']}", str(len(each["plugins"]))),
            *(str(each["done"]), each["reason"]),
        )
        for each in found["workers"]
    ]
    queues = [
        (
            *(each["plugin"] or "?", each["digest"][:12], str(len(each["workers"]))),
            *(str(each["waiting"]), str(each["begun"]), str(each["again"]), each["held"]),
        )
        for each in found["queues"]
    ]
    streams = []
    for name, each in found["streams"].items():
        shares = [each[what] / each[most] for what, most in _SHARES if (each[most] or 0) > 0]
        size = f"{each['bytes'] / (1 << 20):.1f} MB"
        streams.append((name, str(each["messages"]), size, f"{100 * max(shares, default=0):.0f}%"))
    submitters = [
        (user, *(f"{used[room] / (1 << 20):.1f} MB" for room in ("ledger", "dead")))
        for user, used in found["submitters"].items()
    ]
    for titles, rows in (
        *((_WORKERS, workers), (_QUEUES, queues), (_STREAMS, streams)),
        (_SUBMITTERS, submitters),
    ):
        print_table(titles, rows)
        print()
    for fault in found["faults"]:
        print(printable(fault))
    return 0


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    calls = str(each["in_flight"]) + (f"+{each['queued']}" if each["queued"] else "")
    seconds = max(0, int(time.time() - each["since"]))
    reason = "" if each["state"] == "ready" else each["reason"]
    return (
        *(each["name"], each["state"], format_duration(seconds), each["contract"] or "?"),
        *(str(each["sessions"]), str(each["parked"]), calls, str(each["restarts"]), reason),
    )
