"""What the broker of a plugin reads: the hosts of its credentials, and of rules about requests."""

from __future__ import annotations

from sandbox.network.credentials import BrokerPlan, CertifiedHosts
from sandbox.network.rules import LOCAL_ADDRESSES, LOCALHOST, HostRule, covers, parse_rule, parse_rules
from sandbox.spec import Grant
from sandbox.speed.typed import Sequence


def split_requests(written: tuple[str, ...], grant: Grant) -> tuple[tuple[str, ...], BrokerPlan | None]:
    """The rules of the gate, which knows hosts only, and the plan of the broker; None if it reads nothing. A
    host that is also allowed without a rule about requests needs none."""
    rules = parse_rules(written, ranges=True)
    plain = [rule for rule in rules if rule.methods is None]
    requests = [
        rule
        for rule in rules
        if rule.methods is not None and not any(covers(one, rule.without_requests()) for one in plain)
    ]
    hosts = tuple(dict.fromkeys(str(rule.without_requests()) for rule in rules))
    if not grant.credentials and not requests:
        return hosts, None
    plan = BrokerPlan(grant.credentials, tuple(map(str, requests)), grant.authorities)
    return hosts, plan._replace(certified=hosts_of([parse_rule(rule) for rule in plan.hosts]))


def hosts_of(rules: Sequence[HostRule]) -> CertifiedHosts:
    names = {rule.host: None for rule in rules if rule.kind in ("name", "loopback")}
    names |= {f"*.{rule.host}": None for rule in rules if rule.kind == "below"}
    addresses = {rule.host: None for rule in rules if rule.kind == "address"}
    if LOCALHOST in names:
        addresses |= dict.fromkeys(LOCAL_ADDRESSES)
    return CertifiedHosts(tuple(names), tuple(addresses))
