"""What a person can do about denials, found out once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.approvals.record import ApprovalRecord, key_of
from runner.launch import approve
from runner.launch.stages import Invocation, Loaded
from runner.plugin import Entrypoint, Plugin
from sandbox.policy.load import load_policy
from sandbox.spec import APPROVED, POLICY_HOSTS, Approval, Denial, Network, PathRequest, SandboxSpec

READS = tuple(f"/srv/data/{number}" for number in range(300))


def _loaded(folder: Path) -> Loaded:
    file = str(folder / "servers.json")
    entrypoint = Entrypoint("echo", ("one",), str(folder))
    spec = SandboxSpec(paths=tuple(PathRequest(path, "read") for path in READS))
    plugin = Plugin("one", "1", "toy", "One", "", file, None, entrypoint, spec)
    return Loaded(Invocation(file), plugin)


@pytest.mark.parametrize("recorded", [False, True])
def test_300_denials_need_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    made: Counter[str] = Counter()

    def counted(name: str) -> Callable[[Plugin], Any]:
        function = getattr(approve, name)

        def call(plugin: Plugin) -> Any:
            made[name] += 1
            return function(plugin)

        return call

    loaded, policy = _loaded(tmp_path), load_policy("default", {})
    key = key_of(loaded.plugin)
    assert key is not None
    added = Approval(read=("/srv/added",))
    record = ApprovalRecord(key, Approval(), added) if recorded else None
    for name in ("key_of", "asked_of"):
        monkeypatch.setattr(approve, name, counted(name))
    found = approve.approval_of(loaded, policy, {"HOME": str(tmp_path)}, record)
    denials = [Denial("read_ceiling", path, "why", "what to do") for path in (*READS, "/srv/added")]
    told = found.with_remedies(denials, loaded, policy)
    assert made == ({"key_of": 1, "asked_of": 1} if recorded else {"key_of": 1})
    assert all("runner allow" in denial.hint for denial in told)
    assert [denial.asked for denial in told if denial.origin == APPROVED] == ["/srv/added"] * recorded


def test_what_cannot_be_approved_gets_no_remedy(tmp_path: Path) -> None:
    loaded, policy = _loaded(tmp_path), load_policy("default", {})
    nameless = loaded._replace(plugin=loaded.plugin._replace(approvable=False))
    denial = Denial("read_ceiling", "/srv/data/1", "why", "what to do")
    for each, has_remedy in ((loaded, True), (nameless, False)):
        found = approve.approval_of(each, policy, {"HOME": str(tmp_path)})
        (told,) = found.with_remedies([denial], each, policy)
        assert ("runner allow" in told.hint) == has_remedy


def test_the_hosts_of_a_policy_that_lists_none(tmp_path: Path) -> None:
    """A plain yes would give it nothing. The options of one call are not those of `runner allow`."""
    loaded, policy = _loaded(tmp_path), load_policy("default", {})
    spec = SandboxSpec(network=Network("allowlist", POLICY_HOSTS))
    plugin = loaded.plugin._replace(contract="vai", spec=spec)
    call = {"export": "jira", "binding": "{}", "binding_file": "b.json", "invocation_id": "inv_1"}
    call |= {"timeout": "20.0", "output_schema": "{}", "artifact": "", "gateway_url": "https://example.com"}
    loaded = Loaded(loaded.invocation._replace(options=tuple(call.items())), plugin)
    asked = f"{plugin.manifest} --export jira --binding b.json"
    nobody = policy._replace(approvals=policy.approvals._replace(network="none"))
    listed = policy._replace(network=policy.network._replace(hosts=("example.com:443",)))
    for each, told in (
        (policy, f"to allow a host: runner allow --net HOST:443 {asked}; or what to do"),
        (listed, f"to allow it: runner allow {asked}; or what to do"),
        (nobody, "what to do"),
    ):
        found = approve.approval_of(loaded, each, {"HOME": str(tmp_path)})
        denial = Denial("network_ceiling", "network allowlist", "why", "what to do")
        assert found.with_remedies([denial], loaded, each)[0].hint == told
