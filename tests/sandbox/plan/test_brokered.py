from __future__ import annotations

from sandbox.network.credentials import CertifiedHosts
from sandbox.network.rules import parse_rule
from sandbox.plan.brokered import hosts_of


def test_hosts_of_rules() -> None:
    texts = ("GET a.example:443/x", "*.b.example:443", "192.0.2.7:443", "[2001:db8::7]:443", "localhost:8443")
    rules = [parse_rule(text) for text in (*texts, "a.example:444")]
    names, addresses = (
        ("a.example", "localhost", "*.b.example"),
        ("192.0.2.7", "2001:db8::7", "127.0.0.1", "::1"),
    )
    assert hosts_of(rules) == CertifiedHosts(names, addresses)
