"""Why a network that the policy allows is still not granted: it could not be used, or not be made."""

from __future__ import annotations

from sandbox.network.rules import parse_rules
from sandbox.policy.policy import Policy
from sandbox.spec import (
    SECCOMP_WITHOUT_INTERNET,
    Denial,
    Network,
    SandboxSpec,
    SeccompProfile,
    names_policy_hosts,
)


def network_denial(
    network: Network, seccomp: SeccompProfile, spec: SandboxSpec, policy: Policy
) -> Denial | None:
    """`network` and `seccomp`: as far as the policy allows what `spec` asks for."""
    required = spec.network is not None and spec.network.required
    if seccomp in SECCOMP_WITHOUT_INTERNET:
        return Denial(
            "network_seccomp",
            f"network {network.mode}",
            f"the seccomp profile {seccomp} lets no program make a socket of the internet",
            _another_profile(seccomp, spec, policy),
            required,
            where=network.where,
            origin="" if spec.network is not None else "policy",
        )
    if network.mode != "allowlist":
        return None
    try:
        parse_rules(network.hosts, ranges=True)
    except ValueError as error:
        asked = spec.network
        named = asked is not None and asked.mode == "allowlist" and not names_policy_hosts(asked)
        place = "the plugin's own list" if named else "hosts under [network] in the policy"
        hint = f"name fewer ports in {place}, or * for every port of a host"
        return Denial("network_ports", "network allowlist", str(error), hint, required, where=network.where)
    return None


def _another_profile(seccomp: SeccompProfile, spec: SandboxSpec, policy: Policy) -> str:
    if spec.seccomp == seccomp:
        return 'let the manifest ask for seccomp = "default", or for no network'
    ceiling = " and ceiling" if policy.seccomp.ceiling in SECCOMP_WITHOUT_INTERNET else ""
    return f'the operator can set default{ceiling} = "default" under [seccomp] in the policy'
