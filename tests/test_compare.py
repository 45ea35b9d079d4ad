"""scripts/compare: what it does to the machine, and what it says of a sandbox that cannot be tried."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sandbox.attacks.attacks import ATTACKS
from scripts import compare
from scripts.benches.caller import USER_UID
from scripts.benches.caller import Caller as BenchCaller
from scripts.benches.peers import PEERS, FoundPeers
from tests import elsewhere
from tests.conftest import Caller


def test_the_page_has_the_holes_of_the_list() -> None:
    page = compare.DOCS.read_text()
    assert compare.cve_table() in page
    assert compare.cve_table().count("| CVE-") == sum(len(each.cves) for each in ATTACKS) > 20


def given_account(folder: str, uid: int) -> list[Any]:
    import os

    from scripts.benches.caller import Caller
    from scripts.compare import give_account

    give_account(Caller("ordinary user", uid, folder, "/home"))
    with open("/etc/passwd") as file:
        return [os.readlink("/proc/self/ns/mnt"), f"runner-compare:x:{uid}:" in file.read()]


@pytest.mark.needs("root")
def test_only_the_script_sees_the_account(runner_as_root: Caller, tmp_path: Path) -> None:
    namespace, has_it = elsewhere.run(runner_as_root, given_account, str(tmp_path), USER_UID)
    assert has_it and namespace != os.readlink("/proc/self/ns/mnt")
    assert "runner-compare" not in Path("/etc/passwd").read_text()
    assert "/etc/passwd" not in Path("/proc/self/mountinfo").read_text()


def test_a_sandbox_that_a_user_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "cells", lambda caller, words: ["tried"])
    firejail = tuple(each for each in PEERS if each.name == "firejail")
    caller = BenchCaller("ordinary user", USER_UID, str(tmp_path), str(tmp_path))
    rows = compare.rows_of(caller, FoundPeers(firejail, (), ()))
    assert rows["firejail"] == [f"not tried: it needs a user that has an account, and {USER_UID} has none"]
    assert [row for row in rows.values() if row != ["tried"]] == [rows["firejail"]]
