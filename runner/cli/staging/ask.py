"""The end of a run with staged writes: at a terminal the person decides at once, else a line says what
waits."""

from __future__ import annotations

import os
import sys

from runner.cli.shared.text import say
from runner.cli.staging.apply import take
from runner.cli.staging.diff import lines, say_refused, summary
from runner.cli.staging.select import changes, judge_of
from sandbox.document.diagnostic import printable
from sandbox.staged.layer import glance
from sandbox.staged.store import Changeset, StagingRefused, locked, remove_changeset


def tell_or_ask(changeset: Changeset) -> None:
    try:
        found, is_all = glance(changeset, judge_of(changeset, os.environ))
        if is_all and not found:  # what it wrote is as it was
            with locked(changeset):
                remove_changeset(changeset)
            return
        places = ", ".join(printable(each.real) for each in changeset.folders)
        say(f"runner: changes of {places} wait: {'' if is_all else 'at least '}{summary(found)}")
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            say(f"    runner diff {changeset.id}; then runner apply or runner discard {changeset.id}")
            return
        while True:
            sys.stderr.write("apply, look, discard or keep them? [a/l/d/K] ")
            sys.stderr.flush()
            answer = sys.stdin.readline().strip().lower()
            if answer in ("a", "apply"):
                take(changeset)
            elif answer in ("d", "discard"):
                with locked(changeset):
                    remove_changeset(changeset)
            elif answer in ("l", "look"):
                for line in lines(changeset, changes(changeset, (), os.environ), text=True):
                    say(line)
                continue
            else:
                say(f"kept: runner diff {changeset.id}; then runner apply or runner discard {changeset.id}")
            return
    except StagingRefused as refused:
        say_refused("diff", refused)
    except OSError as error:
        say(f"runner: the changes {changeset.id} are kept: {error.strerror}")
