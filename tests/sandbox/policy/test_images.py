"""Images that a policy allows, and that a person may allow beyond that."""

from __future__ import annotations

import pytest

from sandbox.document.diagnostic import DocumentError
from sandbox.policy.approval import limit_approval, raise_ceilings, requested_approval
from sandbox.policy.grant import grant
from sandbox.policy.parse import parse_policy
from sandbox.policy.policy import ApprovalRule, Policy, admits_image
from sandbox.spec import Approval, ImageRoot, SandboxSpec
from tests.tables import check_rows

_DIGEST = "sha256:" + "0" * 64


def test_what_a_pattern_covers() -> None:
    rows = {
        ("*", "docker.io/x/y:1"): True,
        ("docker.io/x/*", "docker.io/x/y:1"): True,
        ("docker.io/x/y", "docker.io/x/y:1"): True,
        ("docker.io/x/y", f"docker.io/x/y@{_DIGEST}"): True,
        ("docker.io/x/y:1", "docker.io/x/y:1"): True,
        ("docker.io/x/y:1", "docker.io/x/y:12"): False,
        ("docker.io/x/y:1", f"docker.io/x/y@{_DIGEST}"): False,
        (f"docker.io/x/y@{_DIGEST}", f"docker.io/x/y@{_DIGEST}"): True,
        ("docker.io/x/y", "docker.io/x/yz:1"): False,
        ("docker.io/x", "docker.io/x/y:1"): False,
        ("x/y", "docker.io/x/y:1"): False,
        ("localhost:5000/y", "localhost:5000/y:1"): True,
        ("localhost", "localhost:5000/y:1"): False,
    }

    def covers(row: tuple[str, str], wanted: bool) -> None:
        assert admits_image((row[0],), row[1]) is wanted

    check_rows(rows.items(), covers)


def test_a_manifest_gets_no_image_that_nobody_allows() -> None:
    spec = SandboxSpec(image=ImageRoot("docker.io/x/y:1", ("x-sandbox", "image")))

    def refused(policy: Policy) -> list[str]:
        given = grant(spec, policy, state_dir=None, environ={})
        return [f"{each.rule} {each.asked} {each.where}" for each in given.refused]

    bare = Policy("test", "/x")
    assert refused(bare) == ["image_ceiling docker.io/x/y:1 ('x-sandbox', 'image')"]
    assert refused(bare._replace(images=("docker.io/x/*",))) == []
    asked = requested_approval(spec)
    assert asked == Approval(images=("docker.io/x/y:1",))
    for images, left in (((), 1), (("docker.io/z/*",), 1), (("docker.io/x/*",), 0)):
        counted = limit_approval(asked, ApprovalRule(images=images))
        assert len(refused(raise_ceilings(bare, counted))) == left


def test_how_a_policy_says_it() -> None:
    text = b'version = 1\n[images]\nallow = ["docker.io/x/*"]\n[approvals]\nimages = ["*"]\n'
    policy = parse_policy("/x.toml", text, name="x")
    assert policy.images == ("docker.io/x/*",) and policy.approvals.images == ("*",)
    assert parse_policy("/x.toml", b"version = 1\n", name="x").approvals.images == ()
    for wrong in ("python", "docker.io/x y", "docker.io/ä"):
        with pytest.raises(DocumentError, match="must be a reference in full"):
            parse_policy("/x.toml", f'version = 1\n[images]\nallow = ["{wrong}"]\n'.encode(), name="x")
