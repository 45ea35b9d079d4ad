"""What people read on stderr."""

from __future__ import annotations

import sys

from runner.account import place
from runner.prepare import Prepared
from runner.report import Outcome
from sandbox.diagnostic import printable


def warn(text: str) -> None:
    print(f"runner: {printable(text)}", file=sys.stderr)


def failure(prepared: Prepared, outcome: Outcome) -> None:
    """One line that says what, then one for each thing that stands in the way, then what to do."""
    faults = [d for d in outcome.diagnostics if d.severity == "error"]
    if len(faults) == 1:
        lines = [f"runner: {outcome.code}: {faults[0].text()}"]
        lines += [f"  {printable(faults[0].hint)}"] if faults[0].hint else []
        faults = []
    else:
        lines = [f"runner: {outcome.code}: {printable(outcome.message)}"]
    for diagnostic in faults:
        lines.append(f"  {diagnostic.text()}")
        if diagnostic.hint:
            lines.append(f"      {printable(diagnostic.hint)}")
    for denial in outcome.denials:
        what = "" if denial.asked in denial.reason else f"{printable(denial.asked)}: "
        lines.append(
            f"  {printable(place(prepared, denial))}: {denial.rule}: {what}{printable(denial.reason)}"
        )
        if denial.hint:
            lines.append(f"      {printable(denial.hint)}")
    if outcome.hint and not outcome.denials and not outcome.diagnostics:
        lines.append(f"  {printable(outcome.hint)}")
    print("\n".join(lines), file=sys.stderr)
