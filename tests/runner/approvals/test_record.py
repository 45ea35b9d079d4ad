"""Whom an approval is for, and how little is looked at to find that out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.approvals.marks import starts_below
from runner.approvals.record import ApprovalKey, key_of
from runner.plugin import Entrypoint, Plugin
from sandbox.spec import SandboxSpec


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path whose existence is asked for."""
    found: list[str] = []
    really = os.path.lexists

    def lexists(path: str) -> bool:
        found.append(path)
        return really(path)

    monkeypatch.setattr(os.path, "lexists", lexists)
    return found


def _absent(count: int) -> tuple[str, ...]:
    return ("echo", *(f"--word{number}=value{number}" for number in range(count)))


def test_up_to_1000_arguments_are_looked_for(tmp_path: Path, looks: list[str]) -> None:
    assert not starts_below(_absent(1000), str(tmp_path))
    assert 1000 <= len(looks) <= 6000


def test_the_last_of_1000_arguments_counts(tmp_path: Path) -> None:
    (tmp_path / "server.py").touch()
    assert starts_below((*_absent(999), "server.py"), str(tmp_path))


def test_more_than_1000_arguments_depend_on_the_folder_unseen(tmp_path: Path, looks: list[str]) -> None:
    assert starts_below(_absent(1001), str(tmp_path))
    assert starts_below(("echo", *["/srv/absolute"] * 1001), str(tmp_path))
    assert looks == []


def _key(folder: Path, count: int) -> ApprovalKey:
    entrypoint = Entrypoint("echo", _absent(count)[1:], str(folder))
    file = str(folder / "servers.json")
    key = key_of(Plugin("one", "1", "toy", "One", "", file, None, entrypoint, SandboxSpec()))
    assert key is not None
    return key


def test_a_long_command_has_the_yes_of_its_folder_only(tmp_path: Path) -> None:
    assert _key(tmp_path, 1001).folder == os.path.realpath(tmp_path)
    assert _key(tmp_path, 1000).folder == ""
