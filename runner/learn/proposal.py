"""Proposal: what a plugin missed in its cage, what of it could be granted, and the forms to write that in.

The plugin chose every path, host and name in it. So a proposal names only what can be shown as it is: text
with other characters is shown escaped and never proposed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sandbox.document.diagnostic import printable
from sandbox.policy.policy import steers
from sandbox.spec import Approval

ItemKind = Literal["read", "write", "host", "variable"]
Form = Literal["x-sandbox", "options", "policy"]
_OPTIONS: dict[ItemKind, str] = {"read": "--read", "write": "--write", "host": "--net", "variable": "--env"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+@~%:=,")


class ProposedItem(NamedTuple):
    """Something that the plugin missed, and that a person can allow."""

    kind: ItemKind
    what: str
    why: str  # how it asked, and how often


class UnproposedItem(NamedTuple):
    """Something that the plugin asked for, and that is not proposed."""

    what: str
    times: int
    why: str


class Proposal(NamedTuple):
    needs: tuple[ProposedItem, ...] = ()
    refused: tuple[UnproposedItem, ...] = ()
    notes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()  # why something may be missing here

    def of(self, kind: ItemKind) -> tuple[str, ...]:
        return tuple(each.what for each in self.needs if each.kind == kind)

    @property
    def approval(self) -> Approval:
        hosts, names = self.of("host"), self.of("variable")
        return Approval(
            read=self.of("read"),
            write=self.of("write"),
            network="allowlist" if hosts else "none",
            hosts=hosts,
            env=names,
            steering=tuple(name for name in names if steers(name)),
        )

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(word for need in self.needs for word in (_OPTIONS[need.kind], need.what))


def can_be_shown(text: str) -> bool:
    """Whether the text is printed as it is. Only then may a proposal contain it."""
    return printable(text) == text


def shown(text: str) -> str:
    """Text that the plugin chose, for people: in quotes if it could be taken for words of ours."""
    return text if text and _PLAIN.issuperset(text) else json.dumps(printable(text), ensure_ascii=False)


def emit(proposal: Proposal, form: Form) -> str:
    """The proposal in a form to copy. Empty if there is nothing to grant."""
    if not proposal.needs:
        return ""
    if form == "options":
        return shlex.join(proposal.options) + "\n"
    if form == "policy":
        return "".join(f"{line}\n" for line in _policy_lines(proposal.approval))
    asked = {
        "read": list(proposal.of("read")),
        "write": list(proposal.of("write")),
        "network": list(proposal.of("host")),
        "env": list(proposal.of("variable")),
    }
    document = {"x-sandbox": {key: value for key, value in asked.items() if value}}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _policy_lines(approval: Approval) -> Iterator[str]:
    """What the operator lets people approve. TOML takes the strings of JSON."""
    yield "[approvals]"
    for key, value in approval._asdict().items():
        if key == "network" and value != "none":
            yield f"network = {json.dumps(value)}"
        elif isinstance(value, tuple) and value:
            yield f"{key} = {json.dumps(list(value), ensure_ascii=False)}"
