"""A person's yes to one plugin, as it is kept."""

from __future__ import annotations

import os

from runner.plugin import Plugin
from sandbox.cache import fingerprint
from sandbox.policy.approval import Approval, asked_by, joined
from sandbox.value import NamedTuple


class ApprovalKey(NamedTuple):
    """Whom a yes is for. A plugin that differs in one of these is another one, and gets nothing of it."""

    contract: str
    id: str
    file: str  # the real path of the manifest or configuration; of the program, if it came from neither
    arguments: str  # digest of the command and its arguments

    @property
    def name(self) -> str:
        """The name of its file among the approvals."""
        return fingerprint(*(os.fsencode(part) for part in self))[:32]


class ApprovalRecord(NamedTuple):
    key: ApprovalKey
    asked: Approval  # what the plugin asked for, all of which was allowed
    added: Approval = Approval()  # what the person gave it besides
    digest: str = ""  # of what was asked, as it was shown
    when: float = 0.0  # seconds since 1970

    @property
    def whole(self) -> Approval:
        return joined(self.asked, self.added)


def key_of(plugin: Plugin) -> ApprovalKey | None:
    """None: nothing can be approved for it, because it starts nothing or has no name of its own."""
    entrypoint = plugin.entrypoint
    if entrypoint is None or not plugin.approvable:
        return None
    words = (entrypoint.command, *entrypoint.args)
    arguments = fingerprint(*(os.fsencode(word) for word in words))[:32]
    return ApprovalKey(plugin.contract, plugin.id, os.path.realpath(plugin.manifest), arguments)


def asked_of(plugin: Plugin) -> Approval:
    """All that the plugin asks, as the approval that would give it."""
    return asked_by(plugin.spec, project=plugin.project is not None)


def digest_of(plugin: Plugin) -> str:
    """Of what it asks, limits included, whatever the order."""
    asked = asked_of(plugin)
    parts = [
        f"{field}={sorted(value) if isinstance(value, tuple) else value}"
        for field, value in asked._asdict().items()
    ]
    parts += [f"{name}={value}" for name, value in plugin.spec.limits._asdict().items() if value is not None]
    return fingerprint(*(os.fsencode(part) for part in parts))[:32]
