"""The lines in which `runner learn` shows a proposal to people."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from runner.cli.approving.items import item_lines, items_of
from runner.launch.approve import allow_command
from runner.launch.stages import Loaded
from runner.learn.proposal import Proposal, shown
from sandbox.document.diagnostic import cut, printable
from sandbox.paths.homes import homes

_MOST_REFUSED = 15
_LONGEST_REFUSED = 200  # characters of each


def proposal_lines(proposal: Proposal, loaded: Loaded) -> Iterator[str]:
    """What was missed, what stands out first; what is not proposed, and why; the command that allows it."""
    yield ""
    yield f"runner learn: what {shown(loaded.plugin.id)} missed in its cage"
    items = items_of(proposal.approval, homes(os.environ))
    whys = {need.what: need.why for need in proposal.needs}
    yield from map(printable, item_lines(items, {item: whys.get(item.what, "") for item in items}))
    if not items:
        yield "  nothing that this machine has and that could be allowed"
    if proposal.refused:
        yield "It also asked for, and is not proposed:"
    for each in proposal.refused[:_MOST_REFUSED]:
        often = "once" if each.times == 1 else f"{each.times} times"
        yield f"    {shown(cut(each.what, _LONGEST_REFUSED))} ({often}): {printable(each.why)}"
    if (more := len(proposal.refused) - _MOST_REFUSED) > 0:
        yield f"    and {more} more"
    for note in (*proposal.notes, *proposal.incomplete):
        yield f"Note: {printable(note)}"
    if not items:
        return
    yield "The plugin decides what it asks for, also what it does not need: allow what you understand."
    yield _remedy(proposal, loaded)
    yield "Then run runner learn again: what it did next may need more."


def _remedy(proposal: Proposal, loaded: Loaded) -> str:
    command = loaded.invocation.command
    if command is not None and not command.name:
        return f"To allow it, start it with these options of runner run: {shlex.join(proposal.options)}"
    return f"To allow it: {allow_command(loaded, *proposal.options)}"
