from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.launch import kept_answers
from runner.launch.hidden import with_hidden
from runner.launch.kept_answers import _name, find_kept, keep
from sandbox.network.credentials import BrokerPlan, Credential
from tests.conftest import ROOT

VALUE = b"ghp_Zq7eVh2KfLw0RtXyBn4MdJs8GcPa1UoT3iQv"
ENVIRON = {"HOME": "/home/ada"}
KEPT = 3600.0
OF_ANOTHER = """
import sys
from runner.launch.kept_answers import find_kept
print(find_kept([sys.argv[1]], {"HOME": "/home/ada"}, 3600.0))
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Another one for each test: what is kept is kept for all processes of the user."""
    found = [os.urandom(16).hex()]
    monkeypatch.chdir(ROOT)
    keep(found, ENVIRON, VALUE, KEPT)
    if find_kept(found, ENVIRON, KEPT) is None:
        pytest.skip("this kernel has no keyrings, or a filter hides them")
    yield found
    # Under its own name, so that it is not left for an hour.
    name = _name(found, ENVIRON, KEPT)
    monkeypatch.setattr(kept_answers, "_name", lambda *_: name)
    keep(found, ENVIRON, b"forgotten", 1)


def test_an_answer_is_kept_for_this_command_and_these_variables(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_kept(command, ENVIRON, KEPT) == VALUE
    for other, environ in ((["x", *command], ENVIRON), (command, {}), (command, {**ENVIRON, "GH_HOST": "a"})):
        assert find_kept(other, environ, KEPT) is None
    # Another policy, or this one by now, lets it count for less.
    assert find_kept(command, ENVIRON, 10.0) is None
    # In another folder: there git or a relative path may mean another account.
    monkeypatch.chdir(tmp_path)
    assert find_kept(command, ENVIRON, KEPT) is None
    tmp_path.rmdir()
    keep(command, ENVIRON, VALUE[::-1], KEPT)
    assert find_kept(command, ENVIRON, KEPT) is None
    monkeypatch.chdir(ROOT)
    assert find_kept(command, ENVIRON, KEPT) == VALUE
    keep(command, ENVIRON, VALUE[::-1], KEPT)  # again: the last one counts
    assert find_kept(command, ENVIRON, KEPT) == VALUE[::-1]
    argv = [sys.executable, "-c", OF_ANOTHER, *command]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == repr(VALUE[::-1])


def test_the_kernel_forgets_it(command: list[str]) -> None:
    with open("/proc/keys") as file:
        [line] = [each for each in file if _name_of(command) in each]
    assert line.split()[3].endswith(("m", "h")), line  # a time, not "perm"


def test_what_is_too_long_is_not_kept(command: list[str]) -> None:
    other = [*command, "long"]
    keep(other, ENVIRON, b"x" * (16 << 10) + b"y", KEPT)
    keep([*command, "empty"], ENVIRON, b"", KEPT)
    assert find_kept(other, ENVIRON, KEPT) is None and find_kept([*command, "empty"], ENVIRON, KEPT) is None


@pytest.mark.usefixtures("command")
def test_a_command_is_asked_again_only_if_its_answer_is_not_kept(tmp_path: Path) -> None:
    script, log = tmp_path / "token", tmp_path / "log"
    script.write_text(f"#!/bin/sh\necho asked >> {log}\necho {VALUE.decode()}\n")
    script.chmod(0o755)
    for kept, asked in ((0.0, 2), (60.0, 3)):
        credential = Credential("TOKEN", ("a.b:443",), source=("command", str(script)), keep=kept)
        for _ in range(2):
            found = with_hidden(None, BrokerPlan((credential,)), {"PATH": "/usr/bin:/bin"})
            assert found.hidden == {"TOKEN": VALUE}
        assert len(log.read_text().split()) == asked


def _name_of(command: list[str]) -> str:
    name = _name(command, ENVIRON, KEPT)
    assert name is not None
    return name.decode()[:40]
