"""runner changes: which runs with staged writes have changes that wait."""

from __future__ import annotations

import argparse
import json
import os
import time

from runner.cli.shared.measure import measured
from runner.cli.shared.table import print_table
from runner.cli.staging.select import waiting_changesets
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable
from sandbox.staged.store import Changeset, in_use
from sandbox.units import format_size

NAME = "changes"
EXAMPLE = "runner changes"
SCHEMA = "runner.changesets.v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    found = waiting_changesets(os.environ)
    if args.json:
        print(json.dumps({"schema": SCHEMA, "changesets": [*map(_entry, found)]}, indent=2))
        return EXIT["ok"]
    if not found:
        print("no changes wait")
        return EXIT["ok"]
    rows = []
    for each in found:
        size, complete = measured(each.path) or (0, False)
        shown = format_size(size) if complete else f">{format_size(size)}"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.began / 1e9))
        state = "running" if in_use(each) else "waits"
        rows.append([each.id, when, state, shown, each.title, ", ".join(f.real for f in each.folders)])
    print_table(["ID", "BEGAN", "STATE", "SIZE", "WHAT RAN", "FOLDERS"], rows)
    print("runner diff ID shows one; runner apply ID takes it over; runner discard ID throws it away")
    return EXIT["ok"]


def _entry(changeset: Changeset) -> dict[str, object]:
    size, complete = measured(changeset.path) or (None, False)
    return {
        "id": changeset.id,
        "title": printable(changeset.title),
        "began": changeset.began / 1e9,
        "running": in_use(changeset),
        "bytes": size,
        "complete": complete,
        "folders": [printable(each.real) for each in changeset.folders],
    }
