"""Parse a policy. All faults are reported at once, each with its position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from sandbox.document.faults import Faults
from sandbox.document.operator_table import read_table
from sandbox.document.read import parse
from sandbox.network.egress import EgressLimits
from sandbox.network.rules import parse_rule
from sandbox.paths.denied_paths import normal
from sandbox.policy.policy import (
    ALWAYS_SIZED,
    ApprovalRule,
    CapabilityRule,
    CredentialRule,
    EnvRule,
    LimitRule,
    NetworkRule,
    PackageRule,
    PathRule,
    Policy,
    SeccompRule,
)
from sandbox.policy.tables import WORDING, PolicyFile
from sandbox.spec import STATE_DIR_TOKEN, Place


def parse_policy(path: str, raw: bytes, *, name: str) -> Policy:
    """Read a policy, or raise DocumentError with every fault in it."""
    document = parse(path, raw, "toml")
    file: PolicyFile = read_table(document, Faults(document), PolicyFile, WORDING, "policy_unknown_key")
    network, seccomp, approvals = file.network, file.seccomp, dict(file.approvals)
    return Policy(
        name=name,
        file=path,
        description=file.description,
        unsandboxed=file.unsandboxed == "allow",
        deny=tuple(normal(denied) for denied in file.deny),
        scan_limit=file.scan_limit,
        read=PathRule(file.read.default, file.read.ceiling or ()),
        write=PathRule(
            file.write.default, (STATE_DIR_TOKEN,) if file.write.ceiling is None else file.write.ceiling
        ),
        network=NetworkRule(
            network.default,
            network.ceiling or network.default,
            _rules(network.hosts),
            network.environment == "may_raise",
            network.private == "allow",
            EgressLimits()._replace(
                connections=network.connections, idle=network.idle, bytes=network.bytes, rate=network.rate
            ),
            network.loopback,
        ),
        project=file.project.access,
        env=EnvRule(**dict(file.env)),
        seccomp=SeccompRule(seccomp.default, seccomp.ceiling or seccomp.default),
        limits=tuple(_limit_rules(file.limits)),
        uids=file.user.uids,
        layers=tuple((layer, "prefer") for layer, mode in file.layers if mode == "prefer"),
        capabilities=CapabilityRule(**dict(file.capabilities)),
        on_hook_failure=file.hooks.on_failure,
        images=file.images.allow,
        run_as=file.user.run_as,
        packages=PackageRule(**dict(file.packages)),
        approvals=ApprovalRule(**{**approvals, "hosts": _rules(file.approvals.hosts)}),
        credentials=tuple(
            CredentialRule(
                name,
                each.variable or name,
                _rules(each.hosts),
                each.source,
                tuple(place for place in get_args(Place) if place in each.where),
                each.authorities,
                each.keep,
            )
            for name, each in file.credentials.items()
        ),
        move_host=file.cgroups.host == "move",
        machine_share=file.machine_share,
    )


def _rules(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(parse_rule(host, ranges=True)) for host in hosts))


def _limit_rules(limits: Any) -> Iterator[tuple[str, LimitRule]]:
    for name, table in limits:
        if table is None and name not in ALWAYS_SIZED:
            continue
        rule = LimitRule() if table is None else LimitRule(**dict(table))
        if rule.default is None and name in ALWAYS_SIZED:
            most = ALWAYS_SIZED[name]
            rule = rule._replace(default=min(most, rule.ceiling or most))
        yield name, rule
