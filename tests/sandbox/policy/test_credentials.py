"""Which credentials a plugin uses without getting them."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.document.diagnostic import DocumentError
from sandbox.network.credentials import (
    BrokerPlan,
    CertifiedHosts,
    Credential,
    HostAuthorities,
    written_values,
)
from sandbox.plan.brokered import split_requests
from sandbox.policy import load
from sandbox.policy.approval import (
    join_approvals,
    limit_approval,
    raise_ceilings,
    requested_approval,
    subtract_approval,
)
from sandbox.policy.grant import grant
from sandbox.policy.parse import parse_policy
from sandbox.policy.policy import ApprovalRule, CredentialRule, EnvRule, NetworkRule, Policy
from sandbox.spec import LITERAL, Approval, EnvRequest, Grant, Network, Overrides, SandboxSpec
from sandbox.speed import codec
from tests.tables import one_case

HOSTS = ("api.a.example:443", "b.example:443", "*.c.example:443")
GITHUB = CredentialRule("github", "GH", HOSTS[:1], ("env", "OUT"), ("header", "query"), ("/ca.pem",))
POLICY = Policy(
    "p",
    "/p",
    network=NetworkRule(ceiling="allowlist", hosts=(*HOSTS, "localhost:1"), loopback=(1,)),
    env=EnvRule(ceiling=("MAY",)),
    credentials=(GITHUB,),
)
ITS = Credential("GH", HOSTS[:1], ("header", "query"), ("env", "OUT"))
ASKED = Network("allowlist", HOSTS)


def given(hide: str = "", policy: Policy = POLICY, spec: SandboxSpec | None = None, **options: Any) -> Grant:
    spec = spec or SandboxSpec(network=ASKED)
    said = Overrides(hide=(hide,) if hide else ())
    return grant(spec, policy, **{"state_dir": None, "environ": {}, "overrides": said, **options})


@one_case(
    ("hide", "credential"),
    [
        ("T@b.example:443", Credential("T", HOSTS[1:2])),
        ("T", Credential("T", HOSTS)),
        ("T@x.c.example:443?query", Credential("T", ("x.c.example:443",), ("header", "query"))),
        ("github", ITS),
        ("github@api.a.example:443", ITS),
    ],
)
def test_what_is_hidden(hide: str, credential: Credential) -> None:
    granted = given(hide, environ={"T": "value", "GH": "value"})
    assert (granted.credentials, granted.denials) == ((credential,), ())
    own = (HostAuthorities(HOSTS[:1], ("/ca.pem",)),)
    assert granted.authorities == (own if credential.name == "GH" else ())
    assert dict(granted.env) == {credential.name: ""}


@one_case(
    ("hide", "rule", "words"),
    [
        ("T@other.example:443", "credential_network", "may not reach other.example:443"),
        ("github@b.example:443", "credential_hosts", "for other hosts than b.example:443"),
        ("AWS_SECRET_ACCESS_KEY", "credential_signs", "signatures"),
        ("APP_PRIVATE_KEY", "credential_signs", "signatures"),
        ("LD_PRELOAD", "credential", "decides which code runs"),
        ("no-variable", "credential", "neither of the two"),
        ("T@b.example", "credential", "has no port"),
    ],
)
def test_what_cannot_be_hidden(hide: str, rule: str, words: str) -> None:
    [denial] = given(hide).denials
    assert denial.rule == rule and denial.required and words in denial.reason


@one_case(
    ("network", "words"),
    [
        (None, "no host is named"),
        (Network("allowlist", ("localhost:1",)), "no host is named"),
        (Network("host"), "whole network"),
    ],
)
def test_without_hosts_nothing_is_hidden(network: Network | None, words: str) -> None:
    wide = POLICY._replace(network=POLICY.network._replace(ceiling="host"))
    [denial] = given("T", wide, SandboxSpec(network=network)).denials
    assert denial.rule == "credential_network" and words in denial.reason


def test_nothing_is_hidden_without_a_cage() -> None:
    free = POLICY._replace(unsandboxed=True)
    granted = given("T@b.example:443", free, SandboxSpec(enabled=False))
    assert granted.unsandboxed and [denial.rule for denial in granted.denials] == ["credential"]


def test_however_it_is_asked_for_the_value_is_not_passed_on() -> None:
    policy = POLICY._replace(env=EnvRule(set=(("A", "1"),), passed=("B",), ceiling=("*",)))
    requests = (EnvRequest("C", "3"), EnvRequest("D"), EnvRequest("E", fills=True))
    hide = tuple(f"{name}@{HOSTS[0] if name in 'CF' else HOSTS[1]}" for name in "ABCDEF")
    said = Overrides(env=(("F", "6"),), pass_env=("D",), hide=hide)
    environ = dict.fromkeys("ABCDEF", "value")
    granted = given(
        policy=policy, spec=SandboxSpec(network=ASKED, env=requests), environ=environ, overrides=said
    )
    assert granted.denials == () and dict(granted.env) == dict.fromkeys("ABCDEF", "")
    literal = {each.name for each in granted.credentials if each.source == LITERAL}
    assert literal == {"C", "F"}


def test_who_may_use_a_value_need_not_be_allowed_to_have_it() -> None:
    """Not even where the manifest asks for the variable. To fill it in elsewhere is another matter."""
    requests = (EnvRequest("T"), EnvRequest("T", fills=True, where=("args",)))
    for request, rules in zip(requests, ([], ["env_ceiling"]), strict=True):
        spec = SandboxSpec(network=ASKED, env=(request,))
        hidden = given("T@b.example:443", spec=spec, environ={"T": "value"})
        assert [each.rule for each in hidden.denials] == rules and dict(hidden.env) == {"T": ""}
        assert [each.rule for each in given(spec=spec, environ={"T": "value"}).denials] == ["env_ceiling"]


@one_case(
    ("hide", "approved", "refused"),
    [
        ("MAY@b.example:443", False, False),
        ("OTHER@b.example:443", False, True),
        ("OTHER@b.example:443", True, False),
        ("OWN@b.example:443", False, False),
        ("github", False, True),
        ("github", True, False),
    ],
)
def test_a_manifest_uses_what_it_could_have_or_a_person_allows(
    hide: str, approved: bool, refused: bool
) -> None:
    spec = SandboxSpec(network=ASKED, hide=(hide,), env=(EnvRequest("OWN", "of the manifest"),))
    policy = POLICY._replace(approvals=ApprovalRule(env=("*",), network="open"))
    if approved:
        asked = requested_approval(spec)
        assert asked.hide == (hide,)
        policy = raise_ceilings(policy, limit_approval(asked, policy.approvals))
    granted = given(policy=policy, spec=spec)
    assert [denial.rule for denial in granted.denials] == ["credential_ceiling"] * refused
    assert len(granted.credentials) == 1


def test_approvals_of_credentials() -> None:
    one, other = Approval(hide=("A@a.b:1",)), Approval(hide=("B@a.b:1", "A@a.b:1"))
    assert join_approvals(one, other).hide == ("A@a.b:1", "B@a.b:1")
    assert subtract_approval(other, one).hide == ("B@a.b:1",)
    assert limit_approval(other, ApprovalRule(env=("B",))).hide == ("B@a.b:1",)
    assert not one.is_empty


def test_nobody_adds_a_host_to_a_credential_of_the_policy() -> None:
    """By its variable: the value would go where the plugin's author wants it."""
    policy = POLICY._replace(env=EnvRule(ceiling=("*",)))
    for hide, env in (
        ("GH@b.example:443", ()),
        ("GH", ()),
        ("GH@b.example:443", (EnvRequest("GH", "a decoy of the author's"),)),
    ):
        spec = SandboxSpec(network=ASKED, hide=(hide,), env=env)
        for said in (Overrides(hide=("github",)), Overrides()):
            found = given(policy=policy, spec=spec, overrides=said)
            assert found.refused and {each.rule for each in found.refused} == {"credential_hosts"}
    # The control.
    assert given("github", policy).denials == ()


def test_a_value_of_the_manifest_and_one_of_outside_share_no_host() -> None:
    spec = SandboxSpec(
        network=ASKED, hide=("OWN@b.example:443",), env=(EnvRequest("OWN", "of the manifest"),)
    )
    for hide, refused in (("T@b.example:443", True), ("T@api.a.example:443", False), ("github", False)):
        found = given(hide, spec=spec)
        assert [each.rule for each in found.refused] == ["credential_hosts"] * refused


def test_one_host_has_one_list_of_authorities() -> None:
    for host, authorities, refused in (
        (HOSTS[0], ("/other.pem",), True),
        ("*.example:443", ("/other.pem",), True),
        (HOSTS[0], ("/ca.pem",), False),
        (HOSTS[0], (), False),
        (HOSTS[1], ("/other.pem",), False),
    ):
        other = CredentialRule("other", "O", (host,), ("env", "OUT"), authorities=authorities)
        policy = POLICY._replace(
            credentials=(GITHUB, other), network=NetworkRule(ceiling="allowlist", hosts=("*:443",))
        )
        network = Network("allowlist", (*HOSTS, "*.example:443"))
        said = Overrides(hide=("github", "other"))
        found = given(policy=policy, spec=SandboxSpec(network=network), overrides=said)
        assert [each.rule for each in found.denials] == ["credential_hosts"] * refused, (host, authorities)


def test_so_many_are_read_and_no_more() -> None:
    hide = tuple(f"T{number}@b.example:443" for number in range(70))
    found = given(overrides=Overrides(hide=hide))
    assert len(found.credentials) == 64 and [each.rule for each in found.denials] == ["credential"]


@one_case(
    ("hosts", "meant"),
    [
        (("a.b:80",), None),
        (("a.b:80,443",), ("a.b:443",)),
        (("a.b:79-81",), ("a.b:79,81",)),
        (("a.b:*",), ("a.b:443",)),
        (("GET a.b:443/x", "localhost:1"), ("a.b:443",)),
    ],
)
def test_a_name_alone_means_no_clear_text(hosts: tuple[str, ...], meant: tuple[str, ...] | None) -> None:
    wide = POLICY._replace(
        network=NetworkRule(ceiling="allowlist", hosts=("*:*", "localhost:1"), loopback=(1,))
    )
    found = given("T", wide, SandboxSpec(network=Network("allowlist", hosts)))
    assert (found.credentials[0].hosts if meant else bool(found.refused)) == (meant or True)


@one_case(
    ("value", "counts"),
    [
        ("ghp_x", True),
        ("${T}", False),
        ("$T", False),
        ("${env:T}", False),
        ("${OTHER}", True),
        ("a${T}", True),
    ],
)
def test_what_stands_for_the_hosts_variable_is_no_value(value: str, counts: bool) -> None:
    assert bool(written_values((EnvRequest("T", value),))) is counts
    assert written_values((EnvRequest("(", value),))  # a name that a manifest has, and no variable can have


def test_two_hosts_of_one_variable() -> None:
    said = Overrides(hide=("T@b.example:443", "T@api.a.example:443?query"))
    [credential] = given(overrides=said).credentials
    assert credential == Credential("T", ("b.example:443", "api.a.example:443"), ("header", "query"))


@one_case(
    ("rules", "hosts", "requests"),
    [
        (("a.b:1", "GET c.d:1/x"), ("a.b:1", "c.d:1"), ("GET c.d:1/x",)),
        (("GET c.d:1", "POST c.d:1/x"), ("c.d:1",), ("GET c.d:1", "POST c.d:1/x")),
        (("c.d:1", "GET c.d:1"), ("c.d:1",), None),
        (("*.d:1", "GET c.d:1"), ("*.d:1", "c.d:1"), None),
        (("c.d:1", "GET c.d:2"), ("c.d:1", "c.d:2"), ("GET c.d:2",)),
    ],
)
def test_the_gate_has_hosts_and_the_broker_requests(
    rules: tuple[str, ...], hosts: tuple[str, ...], requests: tuple[str, ...] | None
) -> None:
    broker = None if requests is None else BrokerPlan(requests=requests, certified=CertifiedHosts(("c.d",)))
    assert split_requests(rules, given()) == (hosts, broker)


def policy_of(text: str) -> Policy:
    return parse_policy("/p.toml", f"version = 1\n[credentials.github]\n{text}".encode(), name="p")


@one_case(
    ("text", "rule"),
    [
        (
            'hosts = ["A.b:443"]\nfrom = "env:GH"\nvariable = "V"',
            CredentialRule("github", "V", ("a.b:443",), ("env", "GH")),
        ),
        (
            'hosts = ["a.b:443"]\nfrom = ["gh", "auth", "token"]\nwhere = ["query", "header"]',
            CredentialRule(
                "github",
                "github",
                ("a.b:443",),
                ("command", "gh", "auth", "token"),
                ("header", "query"),
            ),
        ),
        (
            'hosts = ["a.b:443"]\nfrom = "file:/a/../b"\nauthorities = ["/c"]',
            None,
        ),
        (
            'hosts = ["a.b:443"]\nfrom = "file:/a/b"\nauthorities = ["/c"]',
            CredentialRule("github", "github", ("a.b:443",), ("file", "/a/b"), authorities=("/c",)),
        ),
        (
            'hosts = ["a.b:443"]\nfrom = ["gh"]\nkeep = "10m"',
            CredentialRule("github", "github", ("a.b:443",), ("command", "gh"), keep=600.0),
        ),
        ('hosts = ["a.b:443"]\nfrom = ["gh"]\nkeep = "25h"', None),
        ('hosts = ["a.b:443"]\nfrom = ["gh"]\nkeep = "0s"', None),
        ('hosts = ["a.b:443"]\nfrom = "env:A"\nkeep = "10m"', None),
        ('hosts = ["*:443"]\nfrom = "env:A"', None),
        ('hosts = ["GET a.b:443"]\nfrom = "env:A"', None),
        ('hosts = ["10.0.0.0/8:443"]\nfrom = "env:A"', None),
        ('hosts = ["a.b:443"]\nfrom = "A"', None),
        ('hosts = ["a.b:443"]\nfrom = []', None),
        ('hosts = ["a.b:443"]\nfrom = ["./gh"]', None),
        ('hosts = ["a.b:443"]\nfrom = ["bin/gh", "auth"]', None),
        ('hosts = ["a.b:443"]\nfrom = "env:A"\nwhere = ["body"]', None),
        ('hosts = ["a.b:443"]\nfrom = "env:A"\nvariable = "a b"', None),
        ('hosts = ["a.b:443"]\nfrom = "env:A"\nwhere = []', None),
        (
            (
                'hosts = ["a.b:443"]\nfrom = "env:A"\n'
                '[credentials.x]\nhosts = ["a.b:1"]\nfrom = "env:A"\nvariable = "github"'
            ),
            None,
        ),
        ('hosts = ["a.b:443"]\nfrom = "env:A"\n[credentials.a-b]\nhosts = ["a.b:1"]\nfrom = "env:A"', None),
        ('hosts = ["a.b:443"]', None),
        ('from = "env:A"', None),
    ],
)
def test_credentials_of_a_policy(text: str, rule: CredentialRule | None) -> None:
    if rule is not None:
        assert policy_of(text).credentials == (rule,)
        return
    with pytest.raises(DocumentError, match=r"/p.toml:\d+:\d+: .*(github|a-b)"):
        policy_of(text)


def test_a_policy_with_credentials_is_cached() -> None:
    """Else each launch would parse it anew."""
    policy = policy_of('hosts = ["a.b:443"]\nfrom = "env:GH"\nauthorities = ["/c"]')
    assert codec.unpack(codec.pack((policy, ())), load._CLASSES) == (policy, ())
