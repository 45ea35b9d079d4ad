"""What the broker of a plugin reads: the hosts of its credentials, and of rules about requests."""

from __future__ import annotations

from sandbox.network.credentials import BrokerPlan
from sandbox.network.rules import covers, parse_rules
from sandbox.spec import Grant


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
    return hosts, BrokerPlan(grant.credentials, tuple(map(str, requests)), grant.authorities)
