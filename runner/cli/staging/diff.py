"""runner diff: what a run with staged writes changed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from runner.cli.shared.text import say
from runner.cli.staging.select import changes, choose, place_of
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import printable
from sandbox.staged.layer import Change
from sandbox.staged.store import Changeset, StagingRefused, in_use
from sandbox.staged.text import difference, line_of

NAME = "diff"
EXAMPLE = "runner diff --stat"
MIXES_ARGUMENTS = True  # options may stand between the id and the paths
SCHEMA = "runner.changes.v1"
_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--stat", action="store_true", help="only the names, with sizes and modes")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "chosen",
        nargs="*",
        metavar="ID|PATH",
        help="the id that runner changes shows, or its beginning; then paths, if you mean only some."
        " No id is needed if the changes of one run wait",
    )


def run(args: argparse.Namespace) -> int:
    try:
        changeset, paths = choose(args.chosen, os.environ)
        found = changes(changeset, paths, os.environ)
        if args.json:
            print(json.dumps(document(changeset, found), indent=2))
        else:
            for line in lines(changeset, found, text=not args.stat):
                print(line)
            print(summary(found))
            if in_use(changeset):
                say(f"runner diff: {changeset.id} is still being written: this is what there is so far")
    except StagingRefused as refused:
        return say_refused(NAME, refused)
    except OSError as error:
        return say_error(NAME, error)
    return EXIT["ok"]


def say_refused(verb: str, refused: StagingRefused) -> int:
    say(f"runner {verb}: {printable(str(refused))}")
    say(f"    {printable(refused.hint)}")
    return USAGE_ERROR


def say_error(verb: str, error: OSError) -> int:
    place = f": {printable(str(error.filename))}" if error.filename else ""
    say(f"runner {verb}: {error.strerror}{place}")
    return _FAILED


def lines(changeset: Changeset, found: Sequence[Change], *, text: bool) -> Iterator[str]:
    for change in found:
        yield line_of(change, changeset)
        if text:
            for line in difference(change, changeset):
                yield f"    {line}"


def summary(found: Sequence[Change]) -> str:
    """How many names are added, modified and removed, and how many of them are not applied."""
    words = {"A": "added", "M": "modified", "D": "removed"}
    counts = [f"{sum(each.act == act for each in found)} {word}" for act, word in words.items()]
    refused = sum(bool(each.rule) for each in found)
    return ", ".join(counts) + (f"; {refused} of them cannot simply be applied" if refused else "")


def document(changeset: Changeset, found: Sequence[Change]) -> dict[str, Any]:
    def entry(change: Change) -> dict[str, Any]:
        return {
            "path": printable(place_of(changeset, change)),
            "change": change.act,
            "kind": change.kind,
            "size": change.size,
            "mode": f"{change.mode:04o}",
            "size_before": change.size_before,
            "mode_before": f"{change.mode_before:04o}",
            "rule": change.rule or None,
            "reason": printable(change.reason) or None,
        }

    folders = [printable(each.real) for each in changeset.folders]
    return {"schema": SCHEMA, "id": changeset.id, "folders": folders, "changes": [*map(entry, found)]}
