"""What a person has approved for a plugin, and how far the policy lets it count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.approvals.record import ApprovalRecord, asked_of, key_of
from runner.approvals.store import find_approval
from runner.launch.stages import Loaded
from sandbox.policy.approval import Approval, joined, within
from sandbox.policy.policy import Policy
from sandbox.spec import Denial, SandboxSpec
from sandbox.value import NamedTuple


class Approved(NamedTuple):
    counted: Approval = Approval()  # what of it counts under the policy
    record: ApprovalRecord | None = None  # the stored one, if there is one
    policy_cut: bool = False  # whether the policy lets the person approve less than they did


def approval_of(loaded: Loaded, policy: Policy, environ: Mapping[str, str]) -> Approved:
    """The stored approval of this plugin, and the caller's own words where it is a command. Raises
    ApprovalsUnusable."""
    plugin = loaded.plugin
    key = key_of(plugin)
    record = None if key is None else find_approval(key, environ)
    said = Approval() if record is None else record.whole
    if loaded.invocation.command is not None:
        said = joined(said, asked_of(plugin))
    counted = within(said, policy.approvals)
    return Approved(counted, record, counted != said)


def with_added(spec: SandboxSpec, approved: Approved) -> SandboxSpec:
    """The requests of the manifest, with what the person gave the plugin besides."""
    return spec


def with_remedies(
    denials: Sequence[Denial], loaded: Loaded, policy: Policy, approved: Approved
) -> tuple[Denial, ...]:
    """The denials, each with the command by which a person can allow it, where the policy lets them."""
    return tuple(denials)
