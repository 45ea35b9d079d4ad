"""What stands for the manifest of a command without one: where its program is found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from runner.launch.command import Command, command_approval
from runner.launch.read import plugin_of
from sandbox.spec import EnvRequest, Network, SandboxSpec
from tests.conftest import Caller


def test_what_a_command_line_allows() -> None:
    """What a person typed counts as allowed. A configuration gives no variable of the host's, nor the use of
    one."""
    spec = SandboxSpec(
        network=Network("allowlist", ("a.b:443",)), env=(EnvRequest("A"),), hide=("TOKEN@a.b:443", "github")
    )
    typed = Command(("program",), "/", spec=spec)
    assert command_approval(typed).hide == spec.hide and command_approval(typed).env == ("A",)
    found = command_approval(typed._replace(host_environ={}))
    assert (found.hide, found.env, found.hosts) == ((), (), ("a.b:443",))


def _place(program: str, directory: Path) -> str:
    return plugin_of(Command((program,), str(directory)), "toy").manifest


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`one` has a folder and a text by the names of the programs, `two` and the current folder have both."""
    (tmp_path / "one" / "prog").mkdir(parents=True)
    (tmp_path / "one" / "text").write_text("not executable")
    for folder in ("two", "here", "here/sub"):
        for name in ("prog", "text"):
            path = tmp_path / folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


SEARCHES: dict[str, tuple[str | None, str]] = {
    "the first that has it": ("{}/two:{}/here", "two/prog"),
    "a folder is not a program": ("{}/one:{}/two", "two/prog"),
    "an absent folder is passed over": ("{}/absent:{}/two", "two/prog"),
    "an empty entry is the current folder": ("{}/one::{}/two", "here/prog"),
    "an empty entry at the end": ("{}/one:", "here/prog"),
    "two empty entries": (":", "here/prog"),
    "a relative entry": ("sub", "here/sub/prog"),
    "nowhere": ("{}/one", ""),
    "an empty PATH has no entries": ("", ""),
    "no PATH": (None, ""),
}


@pytest.mark.parametrize("case", SEARCHES)
@pytest.mark.parametrize("name", ["prog", "text"])
def test_a_name_is_searched_as_by_the_standard_library(
    folders: Path, monkeypatch: pytest.MonkeyPatch, case: str, name: str
) -> None:
    search_path, expected = SEARCHES[case]
    if search_path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", search_path.replace("{}", str(folders)))
    place = str(folders / expected).replace("prog", name) if expected else f"/usr/bin/{name}"
    assert _place(name, folders) == place
    assert os.path.realpath(shutil.which(name) or f"/usr/bin/{name}") == place


def test_without_path_the_systems_is_searched(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    found = shutil.which("sh")
    assert found is not None and _place("sh", folders) == os.path.realpath(found)


def test_a_name_with_a_slash_is_not_searched(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folders}/here")
    assert _place("sub/prog", folders / "two") == f"{folders}/two/sub/prog"
    assert _place("/srv/absent/prog", folders) == "/srv/absent/prog"


@pytest.mark.usefixtures("nothing_left")
def test_the_search_loads_nothing_for_it(runner_as_user: Caller, plugin_dir: Path) -> None:
    done = runner_as_user("run", "--", "true", cwd=plugin_dir, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "runner.launch.command" in loaded  # or nothing was measured
    assert "shutil" not in loaded
