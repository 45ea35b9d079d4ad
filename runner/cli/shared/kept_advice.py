"""What the start of a wrapped entry tells people is kept, too: `runner advice` shows it.

Imported only where there is something to keep.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.approvals.tools import identity_in
from runner.cli.shared.command import wrapped_record
from runner.cli.shared.text import note_text
from runner.contracts.registry import command_contract
from runner.launch.advice.file import AdviceFile
from runner.launch.report import advice, explain_failure, notes
from runner.launch.stages import Ended, Planned, Stage, planned_of, started_of
from runner.outcome import has_failed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from runner.outcome import Outcome
    from sandbox.spec import Note


def keep(
    wrapped: argparse.Namespace, lines: Iterable[str], planned: Planned | None = None, stderr: str = ""
) -> None:
    """`wrapped`: the options of the entry."""
    file = _file_of(wrapped)
    if file is None:
        return
    if planned is not None:
        file.conceal(value for _, value in planned.plan.env)
    file.add(lines, stderr)


def keep_notes(wrapped: argparse.Namespace, found: Iterable[Note], planned: Planned) -> None:
    keep(wrapped, map(note_text, found), planned)


def keep_end(wrapped: argparse.Namespace, stage: Stage | None, outcome: Outcome) -> None:
    """What is known once it has ended. Nothing about one that ended well."""
    started, stderr = started_of(stage), ""
    lines: list[str] = []
    if outcome.code not in ("ok", "cancelled"):
        lines += [line.removeprefix("runner: ") for line in explain_failure(stage, outcome)]
        if isinstance(stage, Ended) and started is not None and started.plumbing.stderr is not None:
            stderr = started.plumbing.stderr.text_tail()
    if has_failed(outcome):
        lines += [note_text(each) for each in notes(stage) if not each.urgent]
        lines += [each.text for each in advice(stage, outcome)]
    if started is not None and started.search is not None and started.search.findings is not None:
        lines += started.search.findings.lines()
    keep(wrapped, lines, planned_of(stage), stderr)


def _file_of(wrapped: argparse.Namespace) -> AdviceFile | None:
    """The file of the entry that these options claim to be, made once for a start. None: they are not what
    `runner wrap` writes.

    A claim that is refused is kept under the name that it claims: a host that was not restarted since its
    entry changed is told so."""
    if not hasattr(wrapped, "advice_file"):
        wrapped.advice_file = None
        try:
            file, scope, _ = wrapped_record(wrapped.wrapped)
        except ValueError:
            return None
        if wrapped.command_name:
            identity = identity_in(file, command_contract(), wrapped.command_name, scope)
            wrapped.advice_file = AdviceFile(identity, os.environ)
    found: AdviceFile | None = wrapped.advice_file
    return found
