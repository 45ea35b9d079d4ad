"""runner discard: throw away what runs with staged writes changed."""

from __future__ import annotations

import argparse
import os

from runner.cli.shared.text import say
from runner.cli.staging.diff import say_refused
from runner.cli.staging.select import choose, waiting_changesets
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable
from sandbox.staged.apply import recover
from sandbox.staged.store import (
    ChangesetInUse,
    StagingRefused,
    locked,
    remove_changeset,
)

NAME = "discard"
EXAMPLE = "runner discard 1f2e3d4c"
MIXES_ARGUMENTS = True  # options may stand between the id and the paths
_LEFT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "chosen",
        nargs="*",
        metavar="ID",
        help="the ids that runner changes shows, or their beginnings; none is needed if the changes of one"
        " run wait",
    )
    parser.add_argument("--all", action="store_true", help="all that wait")


def run(args: argparse.Namespace) -> int:
    try:
        if args.all and args.chosen:
            raise StagingRefused("--all: leave the ids out", "or leave --all out")
        if args.all:
            chosen = waiting_changesets(os.environ)
        else:
            chosen = []
            for word in args.chosen or [""]:
                changeset, rest = choose([word] if word else [], os.environ)
                if rest:
                    raise StagingRefused(f"{word}: no such changes wait", "`runner changes` lists them")
                chosen.append(changeset)
    except StagingRefused as refused:
        return say_refused(NAME, refused)
    status = EXIT["ok"]
    for changeset in chosen:
        try:
            with locked(changeset):
                recover(changeset, undo=True)
                remove_changeset(changeset)
        except ChangesetInUse as refused:
            status = say_refused(NAME, refused)
        except StagingRefused as refused:
            status = say_refused(NAME, refused)
        except OSError as error:
            say(f"runner discard: {changeset.id} is not removed: {error.strerror}")
            status = _LEFT
        else:
            print(f"discarded {changeset.id}, of {printable(changeset.title)}")
    return status
