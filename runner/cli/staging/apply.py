"""runner apply: take over what a run with staged writes changed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from runner.cli.shared.text import say
from runner.cli.staging.diff import add_choice, say_error, say_refused, summary
from runner.cli.staging.select import absolute, changes, choose, place_of, require_changes
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable
from sandbox.staged.apply import apply, recover
from sandbox.staged.layer import FORCEABLE
from sandbox.staged.store import Changeset, StagingRefused, locked, remove_changeset
from sandbox.staged.text import line_of

NAME = "apply"
EXAMPLE = "runner apply 1f2e3d4c src/"
MIXES_ARGUMENTS = True  # options may stand between the id and the paths
_LEFT = 1  # the exit status if something was not applied


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument(
        "--force",
        metavar="PATH",
        action="append",
        default=[],
        help="take this too, with all below it, although it is refused: as a file that programs outside obey,"
        " set-id, special, or a link that leads out",
    )


def run(args: argparse.Namespace) -> int:
    try:
        changeset, paths = choose(args.chosen, os.environ)
        return take(changeset, paths, args.force)
    except StagingRefused as refused:
        return say_refused(NAME, refused)
    except OSError as error:
        return say_error(NAME, error)


def take(changeset: Changeset, paths: Sequence[str] = (), force: Sequence[str] = ()) -> int:
    """Apply, say what was done, and forget the changeset if nothing of it is left. Returns the exit status.
    Raises StagingRefused."""
    with locked(changeset):
        recover(changeset)
        found = changes(changeset, paths, os.environ)
        require_changes(changeset, force, found)
        forced = [absolute(changeset, word) for word in force]
        results = [*apply(changeset, found, forced)]  # nobody who reads what we print can stop it
        done = [each.change for each in results if not each.fault]
        for change in done:
            if change.act == "D":  # never only a number
                print(line_of(change._replace(rule=""), changeset))
        left = [each for each in results if each.fault]
        for each in left:
            say(f"runner apply: {printable(place_of(changeset, each.change))}: {printable(each.fault)}")
        print(f"applied: {summary([each._replace(rule='') for each in done])}")
        rest = changes(changeset, (), os.environ)
        if not rest:
            remove_changeset(changeset)
            return EXIT["ok"]
    if left:
        if any(each.rule in FORCEABLE for each in rest):
            say("    look at it: runner diff; to take it all the same: runner apply --force PATH")
        say(f"runner apply: {len(rest)} changes are left: runner diff {changeset.id}")
        return _LEFT
    print(f"{len(rest)} changes are left: runner diff {changeset.id}, or runner discard {changeset.id}")
    return EXIT["ok"]
