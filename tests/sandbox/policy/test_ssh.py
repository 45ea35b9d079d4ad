"""With which keys a plugin logs in where: who asked for it, and who allowed it."""

from __future__ import annotations

from typing import Any

from sandbox.policy.approval import (
    join_approvals,
    limit_approval,
    raise_ceilings,
    requested_approval,
    subtract_approval,
)
from sandbox.policy.grant import grant
from sandbox.policy.policy import ApprovalRule, NetworkRule, Policy
from sandbox.spec import Approval, Grant, Network, Overrides, SandboxSpec
from tests.tables import one_case

KEY, SECOND = f"SHA256:{'a' * 43}", f"SHA256:{'b' * 43}"
HOST, OTHER = "git.example.com:22", "two.example.com:22"
POLICY = Policy("p", "/p", network=NetworkRule(ceiling="host", hosts=(HOST, OTHER)), unsandboxed=True)
ASKED = Network("allowlist", (HOST,))


def given(
    said: tuple[str, ...] = (), asked: tuple[str, ...] = (), policy: Policy = POLICY, **spec: Any
) -> Grant:
    wanted = SandboxSpec(**{"network": ASKED, "ssh": asked, **spec})
    return grant(wanted, policy, state_dir=None, environ={}, overrides=Overrides(ssh=said))


def rules(granted: Grant) -> list[str]:
    return [denial.rule for denial in granted.denials]


@one_case(
    ("said", "asked"),
    [((KEY, HOST), ()), ((KEY, HOST), (KEY, HOST)), ((KEY, SECOND, HOST), ()), ((HOST, KEY), (HOST,))],
)
def test_what_a_person_says_is_given(said: tuple[str, ...], asked: tuple[str, ...]) -> None:
    granted = given(said, asked)
    assert (granted.ssh, granted.denials) == (said, ())


def test_nothing_is_given_unasked() -> None:
    assert given().ssh == ()


@one_case(
    ("said", "asked", "spec", "rule"),
    [
        # A manifest alone gives nothing, not even one host more than a person said.
        ((), (KEY, HOST), {}, "ssh_ceiling"),
        ((KEY, HOST), (OTHER,), {"network": Network("allowlist", (HOST, OTHER))}, "ssh_ceiling"),
        ((KEY, HOST), (SECOND,), {}, "ssh_ceiling"),
        ((KEY,), (), {}, "ssh"),
        ((HOST,), (), {}, "ssh"),
        ((KEY, OTHER), (), {}, "ssh_network"),
        ((KEY, "git.example.com:2222"), (), {}, "ssh_network"),
        ((KEY, HOST), (), {"network": None}, "ssh_network"),
        ((KEY, HOST), (), {"network": Network("host")}, "ssh_network"),
        ((KEY, HOST), (), {"enabled": False}, "ssh"),
        ((KEY, "*.example.com:22"), (), {}, "ssh"),
        (("SHA256:x", HOST), (), {}, "ssh"),
        ((*(f"SHA256:{number:043}" for number in range(33)), HOST), (), {}, "ssh"),
    ],
)
def test_what_is_refused(
    said: tuple[str, ...], asked: tuple[str, ...], spec: dict[str, Any], rule: str
) -> None:
    granted = given(said, asked, **spec)
    assert granted.ssh == () and rule in rules(granted) and granted.refused


def test_an_approval_gives_what_a_manifest_asks_for() -> None:
    spec = SandboxSpec(network=ASKED, ssh=(KEY, HOST))
    asked = requested_approval(spec)
    assert asked.ssh == (KEY, HOST)
    rule = ApprovalRule(network="allowlist", hosts=(HOST,))
    raised = raise_ceilings(POLICY, limit_approval(asked, rule))
    assert grant(spec, raised, state_dir=None, environ={}).ssh == (KEY, HOST)
    # A policy that lets nobody approve the host lets nobody log in there.
    withheld = raise_ceilings(POLICY, limit_approval(asked, ApprovalRule()))
    assert rules(grant(spec, withheld, state_dir=None, environ={})) == ["ssh_ceiling"]


def test_approvals_together() -> None:
    one, other = Approval(ssh=(KEY, HOST)), Approval(ssh=(KEY, OTHER))
    assert join_approvals(one, other).ssh == (KEY, HOST, OTHER)
    assert subtract_approval(join_approvals(one, other), one).ssh == (OTHER,)
