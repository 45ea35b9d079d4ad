"""What people write to hide a credential, and what a broker reads."""

from __future__ import annotations

import pytest

from sandbox.network.credentials import BrokerPlan, Credential, HiddenValue, Hiding, hidden_name, parse_hiding
from tests.tables import one_case


@one_case(
    ("written", "hiding", "normal"),
    [
        ("TOKEN", Hiding("TOKEN"), "TOKEN"),
        ("git.hub-1", Hiding("git.hub-1"), "git.hub-1"),
        ("TOKEN@API.example.com", Hiding("TOKEN", "api.example.com:443"), "TOKEN@api.example.com:443"),
        ("T@*.a.b:8443", Hiding("T", "*.a.b:8443"), "T@*.a.b:8443"),
        ("T@a.b:1,2?query", Hiding("T", "a.b:1-2", True), "T@a.b:1-2?query"),
        ("T?query", Hiding("T", query=True), "T?query"),
        ("T@localhost:1", Hiding("T", "localhost:1"), "T@localhost:1"),
        ("T@[fd00::7]:1", Hiding("T", "[fd00::7]:1"), "T@[fd00::7]:1"),
    ],
)
def test_hidings(written: str, hiding: Hiding, normal: str) -> None:
    assert parse_hiding(written, default_ports=(443,)) == hiding
    assert str(hiding) == normal
    assert parse_hiding(normal) == hiding
    assert hidden_name(normal) == hiding.name


@one_case(
    ("written", "reason"),
    [
        ("", "no name"),
        ("@a.b", "no name"),
        ("A B@a.b", "no name"),
        ("Ä@a.b", "no name"),
        ("T@", "no name"),
        ("T@*:443", "name the hosts"),
        ("T@GET a.b", "rule about requests"),
        ("T@10.0.0.0/8", "slash"),
        ("T@https://a.b", "is a URL"),
    ],
)
def test_wrong_hidings(written: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_hiding(written, default_ports=(443,))


def test_the_broker_reads_the_hosts_of_credentials_and_of_rules() -> None:
    credentials = (Credential("A", ("a.b:443", "c.d:443")), Credential("B", ("a.b:443",)))
    plan = BrokerPlan(credentials, ("GET e.f:443/x",))
    assert plan.hosts == ("a.b:443", "c.d:443", "GET e.f:443/x")


def test_a_value_is_not_shown() -> None:
    hidden = HiddenValue("TOKEN", b"placeholder", b"the value")
    assert "the value" not in f"{hidden} {hidden!r} {[hidden]}"
