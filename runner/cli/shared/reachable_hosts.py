"""Which hosts a plugin reaches, and by which rule: `runner explain --network`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.launch.network_report import NETWORK_WARNINGS
from runner.launch.stages import Decided, Stage, decided_of
from sandbox.network.addresses import vet
from sandbox.network.credentials import Credential, hidden_name
from sandbox.network.egress import EgressLimits
from sandbox.network.rules import HostRule, covers, parse_rule
from sandbox.network.ssh import hosts_of, keys_of
from sandbox.policy.policy import NetworkRule, host_matches, is_loopback
from sandbox.spec import LITERAL, SLOT, Denial, names_policy_hosts
from sandbox.units import format_duration, format_size


def network_document(stage: Stage | None) -> dict[str, Any] | None:
    """`network_lines` as a document. None: the policy was not read."""
    decided = decided_of(stage)
    if decided is None:
        return None
    granted = decided.grant.network
    return {
        "mode": granted.mode,
        "private": decided.policy.network.private,
        "loopback": list(decided.policy.network.loopback),
        "limits": {name: getattr(decided.policy.network.limits, name) for name in _LIMITS},
        "hosts": [
            {"rule": host, "asked_by": by, "allowed_by": allowed, "never_dialled": never_dialled(host)}
            for host, by, allowed in _rows(decided)
        ],
        "refused": [
            {"asked": denial.asked, "rule": denial.rule, "reason": denial.reason, "hint": denial.hint}
            for denial in _denials(decided)
        ],
    }


def network_lines(stage: Stage | None) -> Iterator[str]:
    decided = decided_of(stage)
    if decided is None:
        return
    granted, rule = decided.grant.network, decided.policy.network
    if granted.mode == "none":
        yield "no network: loopback only"
    if granted.mode in NETWORK_WARNINGS:
        yield NETWORK_WARNINGS[granted.mode]
    rows = list(_rows(decided))
    width = max((len(host) for host, _, _ in rows), default=0)
    for host, by, allowed in rows:
        fault = never_dialled(host)
        never = f"; NEVER DIALLED: it {fault}" if fault else ""
        yield f"  {host.ljust(width)}  asked by the {by}, allowed by {allowed}{never}"
    yield from _credential_lines(decided)
    yield from _ssh_lines(decided)
    for denial in _denials(decided):
        yield f"  REFUSED {denial.asked}: {denial.reason}; {denial.hint}"
    if granted.mode in ("allowlist", "open"):
        private = "may" if rule.private else "must not"
        yield f"names {private} lead to private addresses (private under [network] in the policy)"
        yield "this machine and link-local addresses are never dialled, by name or by address"
        if own := [host for host, _, _ in rows if is_loopback(host)]:
            yield f"{', '.join(own)} alone: the plugin's own loopback leads to that port of this machine"
        yield "on ports 80 and 443 the name in clear text has to be the same: the Host of the first request"
        yield "of a connection, or the server name of its first TLS ClientHello; later ones are not read"
        yield f"limits (under [network] in the policy): {_egress_limits(rule.limits)}"


def _credential_lines(decided: Decided) -> Iterator[str]:
    """Which credential goes to which host, and by whose word."""
    said = decided.loaded.invocation.overrides.hide
    for each in decided.grant.credentials:
        names = {each.name, *(rule.name for rule in decided.policy.credentials if rule.variable == each.name)}
        by = "manifest"
        if any(hidden_name(text) in names for text in decided.approval.hide):
            by = "your approval" if decided.approved_at else "the command line"
        elif any(hidden_name(text) in names for text in said):
            by = "the command line"
        source = _sources(each)
        yield f"  {each.name} is a placeholder; its value ({source}) goes to {', '.join(each.hosts)}, by {by}"


def _ssh_lines(decided: Decided) -> Iterator[str]:
    """With which keys it logs in at which hosts, and by whose word."""
    ssh, by = decided.grant.ssh, "the command line"
    if set(ssh) <= set(decided.approval.ssh) and decided.approved_at:
        by = "your approval"
    elif not set(ssh) & {*decided.approval.ssh, *decided.loaded.invocation.overrides.ssh}:
        by = "the manifest"
    if ssh:
        yield f"  it logs in at {', '.join(hosts_of(ssh))}, by {by},"
        yield f"    with {', '.join(keys_of(ssh))} of your ssh agent"


def _sources(credential: Credential) -> str:
    kind, *words = credential.source or ("given", credential.name)
    if credential.source == LITERAL:
        return "given with the plugin"
    if credential.source == SLOT:
        return "the secret of that name"
    if kind == "command":
        return f"what {' '.join(words)} prints"
    return f"of the file {words[0]}" if kind == "file" else f"of the variable {words[0]}"


_LIMITS = ("connections", "bytes", "rate", "idle")  # those that a policy can set


def _egress_limits(limits: EgressLimits) -> str:
    size = "any number of bytes" if limits.bytes is None else f"{format_size(limits.bytes)} in all"
    rate = "at any rate" if limits.rate is None else f"{format_size(limits.rate)} per second"
    idle = f"closed after {format_duration(limits.idle)} without a byte"
    return f"{limits.connections} connections at once, {size}, {rate}, {idle}"


def _rows(decided: Decided) -> Iterator[tuple[str, str, str]]:
    """One row for each rule in force: the rule, who asked for it, and what allows it."""
    granted, rule = decided.grant.network, decided.policy.network
    if granted.mode not in ("allowlist", "open"):
        return
    asked = decided.loaded.plugin.spec.network
    asker = "command line" if decided.loaded.invocation.command is not None else "manifest"
    named = asked.hosts if asked is not None else ()
    for host in granted.hosts:
        own = is_loopback(host)
        by = "policy" if names_policy_hosts(asked) and not own else asker if host in named else "approval"
        allowed = _by_approval(decided, host) or _allowing(rule, parse_rule(host, ranges=True))
        yield host, by, f"{allowed}, within loopback = {list(rule.loopback)}" if own else allowed


def _by_approval(decided: Decided, host: str) -> str:
    """What allows a host, if the policy's own list does not."""
    approved, hosts = decided.approval.hosts, decided.policy.network.hosts
    own = hosts[: len(hosts) - len(approved)]  # the rest was added by the approval
    if host not in approved or any(host_matches(each, host) for each in own):
        return ""
    return "your approval" if decided.approved_at else "the command line"


def never_dialled(text: str) -> str:
    """Returns why the gate never dials a host of a rule, as the second half of a sentence, or ''. Other names
    are judged when they are looked up."""
    rule = parse_rule(text, ranges=True)
    if rule.kind in ("name", "below") and f".{rule.host}".endswith(".localhost"):
        return "is this machine (loopback)"  # RFC 6761: this name and all below it
    if rule.kind not in ("address", "range"):
        return ""
    import ipaddress

    # A private address is dialled if it is listed. If both ends of a range are refused for the same reason,
    # so is all of it.
    block = ipaddress.ip_network(rule.host)
    first, last = (vet(str(end), allow_private=True) for end in (block[0], block[-1]))
    return first if first == last else ""


def _allowing(rule: NetworkRule, host: HostRule) -> str:
    found = next((each for each in rule.hosts if covers(parse_rule(each, ranges=True), host)), None)
    return f"hosts: {found}" if found is not None else f'ceiling = "{rule.ceiling}"'


def _denials(decided: Decided) -> list[Denial]:
    kinds = ("network_", "credential", "ssh")
    return [denial for denial in decided.grant.denials if denial.rule.startswith(kinds)]
