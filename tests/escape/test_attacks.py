"""The project's list of attacks, by `runner doctor --attack`: each is held, and its control shows by what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandbox.attacks.attacks import ATTACKS
from tests.conftest import Caller

pytestmark = pytest.mark.launches

POLICIES = Path(__file__).parents[2] / "policies"
# Attacks whose control depends on the kernel, on what is installed, or on how the caller was started.
BY_MACHINE = {
    *(f"proc-{name}" for name in ("timer_list", "kcore", "kmsg", "sched_debug")),
    *(f"call-{name}" for name in ("init_module", "kexec_load", "syslog", "fsopen", "io_uring_setup")),
    *("call-userfaultfd", "call-bpf", "call-perf_event_open", "call-mount_setattr", "32-bit", "reach-tcp6"),
    *(each.id for each in ATTACKS if each.id.startswith(("see-", "socket-AF_", "keep-huge"))),
    *(
        "socket-NETLINK_XFRM",
        "ulp-espintcp",
        "keep-md5-key",
        "keep-tls",
        "keep-packet-options",
        "keep-short-options",
        "keep-group6",
    ),
    *("reach-route", "reach-metadata", "use-open", "use-core", "use-locked"),
}
# Attacks that an ordinary user cannot make outside either, and limits that need a cgroup.
BY_USER = {"replace-bwrap", "sysctl", "device", "process-root", "process-other-user"}
BY_CGROUP = {"use-processes", "use-memory"}


def attack(caller: Caller, *options: str | Path) -> dict[str, Any]:
    done = caller("doctor", "--attack", "--format", "json", *options, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    uncounted = {row["id"] for row in found["rows"] if row["verdict"] == "not_counted"}
    spared = BY_MACHINE if caller.uid == 0 else BY_MACHINE | BY_USER | BY_CGROUP
    assert uncounted <= spared
    assert found["count"]["not_held"] == 0 and found["ok"] is True
    return found


def test_every_attack_is_held(runner_as: Caller, nothing_left: None) -> None:
    found = attack(runner_as)
    expected = {each.id: each.held for each in ATTACKS}
    # Also where nothing counts: what the cage answers is the same on every machine.
    wrong = {
        row["id"]: row["observed"]
        for row in found["rows"]
        if row["observed"] not in (expected[row["id"]][0], "-") and row["id"] not in BY_MACHINE | BY_CGROUP
    }
    assert wrong == {}
    assert found["policy"]["name"] == "default" and found["machine"]["uid"] == runner_as.uid


@pytest.mark.broad
def test_every_attack_is_held_under_the_strict_policy(runner_as: Caller, nothing_left: None) -> None:
    """An ordinary user who has no cgroup gets a copy of the policy that prefers these limits."""
    policy = runner_as.home / "strict.toml"
    text = (POLICIES / "strict.toml").read_text()
    policy.write_text(text if runner_as.uid == 0 else text.replace('mode = "require"', 'mode = "prefer"'))
    runner_as.give(policy)
    attack(runner_as, "--policy", policy)
