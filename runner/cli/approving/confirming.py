"""`runner allow --confirm`: before which calls of a plugin's tools a person wants to be asked."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from runner.approvals.confirmations import HOSTS, MOST_PATTERNS, ConfirmationRecord, pattern_fault
from runner.approvals.record import approvals_folder
from runner.approvals.tools import identity_of, parts_of
from runner.cli.approving.subject import AllowSubject
from runner.cli.shared.text import say
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable

_NONE = "none"


def print_confirmations(environ: Mapping[str, str]) -> None:
    """Raises ApprovalsUnusable."""
    if approvals_folder(environ) is None:
        return
    for plugin, kept in ConfirmationRecord(environ).all():
        lines = [f"a gateway asks you before it calls {', '.join(kept.patterns)}"] * bool(kept.patterns)
        lines += [f"you said yes for good to {tool} for the client {client}" for client, tool in kept.always]
        for line in lines:
            say(printable(f"{_name(plugin)}: {line}"), sys.stdout)


def _name(identity: str) -> str:
    """Of a plugin in the record of tools; of a server elsewhere that is its name and URL."""
    if (parts := parts_of(identity)) is None:
        return identity
    contract, name, file, _ = parts
    return f"{name} ({contract})  {file}"


def set_confirmations(subject: AllowSubject, patterns: tuple[str, ...], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ValueError and ApprovalsUnusable."""
    for pattern in patterns:
        if fault := pattern_fault(pattern):
            raise ValueError(f"--confirm: {pattern[:60]!a} {fault}")
    if HOSTS in patterns:
        raise ValueError(
            f'--confirm {HOSTS}: that is for a whole client: write confirm = ["{HOSTS}"] into its table of'
            f" the gateway's settings; a tool of this name is {HOSTS[:-1]}[{HOSTS[-1]}]"
        )
    if len(patterns) > MOST_PATTERNS or (_NONE in patterns and len(patterns) > 1):
        raise ValueError(f"--confirm: at most {MOST_PATTERNS} patterns; {_NONE} stands alone")
    kept = () if patterns == (_NONE,) else tuple(dict.fromkeys(patterns))
    record, plugin = ConfirmationRecord(environ), subject.loaded.plugin
    # Also of the entry as a host has it: a gateway may be given either.
    for each in {identity_of(each.plugin) for each in (subject.loaded, subject.entry) if each is not None}:
        record.set_patterns(each, kept)
    told = f"asks you before it calls {', '.join(kept)}" if kept else "asks only as its settings say"
    say(printable(f"{plugin.id}: a gateway {told}"), sys.stdout)
    return EXIT["ok"]
