"""Approvals: what a person allows one plugin beyond the policy's ceilings, within the policy's [approvals].

An approval is not a grant. It raises the ceilings for one launch (`raise_ceilings`), and the manifest is
checked against those. The denylist, the limits and the layers stay as they are.
"""

from __future__ import annotations

from sandbox.network.credentials import hidden_name
from sandbox.network.ssh import is_key
from sandbox.paths.denied_paths import lexical_fault, normal
from sandbox.policy.policy import (
    ApprovalRule,
    Policy,
    admits,
    admits_image,
    host_matches,
    is_loopback,
    matches,
    steers,
)
from sandbox.spec import (
    NETWORK_ORDER,
    POLICY_HOSTS,
    SECCOMP_ORDER,
    Approval,
    NetworkMode,
    SandboxSpec,
)


def requested_approval(spec: SandboxSpec, *, project: bool = False) -> Approval:
    """The approval that covers everything a manifest asks for. What needs none, such as ${state_dir}, is left
    out."""
    # A path that cannot be judged by its name cannot be approved.
    paths = [path._replace(path=normal(path.path)) for path in spec.paths if lexical_fault(path.path) is None]
    network = spec.network
    listed = network is not None and network.mode == "allowlist"
    return Approval(
        read=tuple(dict.fromkeys(path.path for path in paths if path.access == "read")),
        write=tuple(dict.fromkeys(path.path for path in paths if path.access == "write")),
        network="none" if network is None else network.mode,
        # The entry that stands for the policy's own hosts is not a host that could be approved.
        hosts=tuple(host for host in network.hosts if host not in POLICY_HOSTS) if network and listed else (),
        env=tuple(dict.fromkeys(each.name for each in spec.env if each.value is None)),
        steering=tuple(dict.fromkeys(each.name for each in spec.env if steers(each.name))),
        seccomp=spec.seccomp or "strict",
        project="read" if project else "none",
        staged=spec.staged,
        hide=spec.hide,
        ssh=spec.ssh,
        images=() if spec.image is None else (spec.image.reference,),
    )


def join_approvals(one: Approval, other: Approval) -> Approval:
    """Everything that one of the two allows."""
    return Approval(
        read=tuple(dict.fromkeys((*one.read, *other.read))),
        write=tuple(dict.fromkeys((*one.write, *other.write))),
        network=max(one.network, other.network, key=NETWORK_ORDER.index),
        hosts=tuple(dict.fromkeys((*one.hosts, *other.hosts))),
        env=tuple(dict.fromkeys((*one.env, *other.env))),
        steering=tuple(dict.fromkeys((*one.steering, *other.steering))),
        seccomp=max(one.seccomp, other.seccomp, key=SECCOMP_ORDER.index),
        project="read" if "read" in (one.project, other.project) else "none",
        staged=one.staged or other.staged,
        hide=tuple(dict.fromkeys((*one.hide, *other.hide))),
        ssh=tuple(dict.fromkeys((*one.ssh, *other.ssh))),
        images=tuple(dict.fromkeys((*one.images, *other.images))),
    )


def subtract_approval(approval: Approval, other: Approval) -> Approval:
    """What `approval` allows and `other` does not."""
    return Approval(
        read=tuple(path for path in approval.read if path not in other.read),
        write=tuple(path for path in approval.write if path not in other.write),
        network="none" if approval.network == other.network else approval.network,
        hosts=tuple(host for host in approval.hosts if host not in other.hosts),
        env=tuple(name for name in approval.env if name not in other.env),
        steering=tuple(name for name in approval.steering if name not in other.steering),
        seccomp="strict" if approval.seccomp == other.seccomp else approval.seccomp,
        project="none" if approval.project == other.project else approval.project,
        hide=tuple(each for each in approval.hide if each not in other.hide),
        ssh=tuple(each for each in approval.ssh if each not in other.ssh),
        images=tuple(each for each in approval.images if each not in other.images),
    )


def limit_approval(approval: Approval, rule: ApprovalRule) -> Approval:
    """The part of an approval that a policy's [approvals] admits."""
    network: NetworkMode = min(approval.network, rule.network, key=NETWORK_ORDER.index)
    return Approval(
        read=tuple(path for path in approval.read if admits((*rule.read, *rule.write), path)),
        write=tuple(path for path in approval.write if admits(rule.write, path)),
        network=network,
        hosts=tuple(host for host in approval.hosts if _may_approve(host, rule)),
        env=tuple(name for name in approval.env if matches(rule.env, name)),
        steering=tuple(name for name in approval.steering if matches(rule.steering, name)),
        seccomp=min(approval.seccomp, rule.seccomp, key=SECCOMP_ORDER.index),
        project=approval.project if rule.project == "read" else "none",
        staged=approval.staged,
        hide=tuple(each for each in approval.hide if matches(rule.env, hidden_name(each))),
        ssh=tuple(each for each in approval.ssh if is_key(each) or _may_approve(each, rule)),
        images=tuple(each for each in approval.images if admits_image(rule.images, each)),
    )


def _may_approve(host: str, rule: ApprovalRule) -> bool:
    if rule.network == "host" or (rule.network == "open" and not is_loopback(host)):
        return True
    return rule.network != "none" and any(host_matches(pattern, host) for pattern in rule.hosts)


def raise_ceilings(policy: Policy, approval: Approval) -> Policy:
    """The policy with its ceilings raised by an approval that `limit_approval` has returned."""
    if approval.is_empty:
        return policy
    network = policy.network
    # Approving hosts makes an allowlist: it does not approve any other host.
    ceiling = max(network.ceiling, approval.network, key=NETWORK_ORDER.index)
    return policy._replace(
        read=policy.read._replace(ceiling=(*policy.read.ceiling, *approval.read)),
        write=policy.write._replace(ceiling=(*policy.write.ceiling, *approval.write)),
        network=network._replace(ceiling=ceiling, hosts=(*network.hosts, *approval.hosts)),
        env=policy.env._replace(
            ceiling=(*policy.env.ceiling, *approval.env),
            steering=(*policy.env.steering, *approval.steering),
        ),
        seccomp=policy.seccomp._replace(
            ceiling=max(policy.seccomp.ceiling, approval.seccomp, key=SECCOMP_ORDER.index)
        ),
        project="read" if "read" in (policy.project, approval.project) else "none",
        hide=(*policy.hide, *approval.hide),
        ssh=(*policy.ssh, *approval.ssh),
        images=(*policy.images, *approval.images),
    )
