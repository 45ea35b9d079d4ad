"""Grant -> EgressPlan: what the gate of a plugin lets through."""

from __future__ import annotations

from sandbox.network.egress import EgressPlan
from sandbox.plan.layers import LayerUnavailable
from sandbox.policy.policy import Policy
from sandbox.spec import Grant

_EVERY_HOST = "*:*"


def plan_egress(grant: Grant, policy: Policy) -> EgressPlan | None:
    """None: no gate is needed. Raises LayerUnavailable if this machine cannot enforce what is granted."""
    network = grant.network
    if grant.unsandboxed or network.mode not in ("allowlist", "open"):
        return None
    rules = (_EVERY_HOST,) if network.mode == "open" else network.hosts
    if not rules:
        return None  # an empty list is no network
    rule = policy.network
    egress = EgressPlan(rules, rule.private, rule.limits, every_port=_has_every_port(rules))
    if egress.every_port:
        _require_redirect(egress)
    return egress


def _has_every_port(rules: tuple[str, ...]) -> bool:
    from sandbox.network.rules import EVERY_PORT, parse_rules

    return any(rule.ports == EVERY_PORT for rule in parse_rules(rules, ranges=True))


def _require_redirect(egress: EgressPlan) -> None:
    """Every port needs nftables in the plugin's namespace. Not every kernel has it, so it is tried."""
    from sandbox.network.recipe import find_recipe
    from sandbox.network.trial import RecipeRefusal, try_recipe

    try:
        try_recipe(find_recipe(egress))
    except RecipeRefusal as refused:
        named = next((rule for rule in egress.rules if rule.endswith(":*")), egress.rules[0])
        raise LayerUnavailable(
            "network",
            f"{named} allows every port, and this machine cannot redirect every port to the gate: {refused}",
            "list the ports, as in example.com:443,8000-8010; or use a kernel built with CONFIG_NF_TABLES, "
            "CONFIG_NFT_NAT and CONFIG_NFT_REDIR",
        ) from None
