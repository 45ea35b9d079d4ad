"""Storage as a plugin in its cage has it, as root and as a user: kept between sessions, out of its reach."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.kaged.database import FILE, FOLDER
from tests.conftest import ROOT, Caller

pytestmark = pytest.mark.usefixtures("nothing_left")

Write = Callable[..., Path]

SET, GET = "kaged.storage.set", "kaged.storage.get"


class Bare:
    """tests/plugins/kaged_bare, called with `runner call`."""

    def __init__(self, folder: Path, caller: Caller, write: Write) -> None:
        self.folder, self.caller = folder, caller
        shutil.copytree(ROOT / "tests/plugins/kaged_bare", folder / "bare")
        for path in (folder / "bare").rglob("*"):
            path.chmod(0o755)
        text = 'version = 1\n[write]\nceiling = ["${state_dir}"]\n'
        self.closed = write(folder / "closed.toml", text)
        self.policy = write(folder / "policy.toml", f'{text}[capabilities]\nhost = ["kaged.storage.*"]\n')
        for path in (folder, *folder.rglob("*")):
            os.chown(path, caller.uid, caller.uid)

    @property
    def database(self) -> Path:
        return self.folder / "state" / FOLDER / FILE

    def call(self, tool: str, given: Mapping[str, Any], policy: Path | None = None) -> Any:
        done = self.caller(
            "call",
            "--policy",
            policy or self.policy,
            "--state-dir",
            self.folder / "state",
            self.folder / "bare",
            tool,
            "--input",
            json.dumps(given),
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ask(self, method: str, params: Mapping[str, Any], policy: Path | None = None) -> Any:
        return self.call("ask", {"method": method, "params": params}, policy)


@pytest.fixture
def bare(plugin_dir: Path, runner_as: Caller, write_file: Write) -> Bare:
    return Bare(plugin_dir, runner_as, write_file)


def test_a_value_outlives_the_session(bare: Bare) -> None:
    assert bare.call("told", {})["storage_available"] is True
    assert bare.ask(SET, {"key": "a", "value": {"n": 1}}) == {"result": {}}
    assert bare.ask(GET, {"key": "a"}) == {"result": {"value": {"n": 1}, "found": True}}
    status = bare.database.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (bare.caller.uid, 0o600)


def test_the_policy_of_strangers_gives_none(bare: Bare) -> None:
    assert bare.call("told", {}, bare.closed)["storage_available"] is False
    error = bare.ask(SET, {"key": "a", "value": 1}, bare.closed)["error"]
    assert (error["code"], error["message"]) == (-32001, "capability_denied")
    assert error["data"]["policy"] == "capabilities.host"
    assert not bare.database.exists()


def test_the_plugin_cannot_reach_the_file(bare: Bare) -> None:
    bare.ask(SET, {"key": "a", "value": "precious"})
    before = bare.database.read_bytes()
    tried = bare.call("touch", {"path": str(bare.database)})
    absent = "No such file or directory"
    assert {**tried, "wb": absent} == {"rb": absent, "r+b": absent, "wb": absent, "list": absent}
    assert tried["wb"] in (absent, "Read-only file system")
    assert bare.database.read_bytes() == before
    # The control: the same act in the folder beside it, which is the plugin's own.
    own = bare.call("touch", {"path": str(bare.folder / "state/config/x")})
    assert own == {"rb": absent, "r+b": absent, "wb": "opened", "list": ["x"]}


def test_a_link_in_place_of_the_folder_is_refused_in_words(bare: Bare) -> None:
    bare.ask(SET, {"key": "a", "value": 1})
    aside = bare.folder / "state/config/aside"
    (bare.folder / "state" / FOLDER).rename(aside)
    (bare.folder / "state" / FOLDER).symlink_to(aside)
    error = bare.ask(GET, {"key": "a"})["error"]
    assert (error["code"], error["message"]) == (-32004, "storage_unusable")
    assert "storage is not a folder" in error["data"]["reason"]


def test_the_state_is_listed_and_removed_with_its_storage(
    plugin_dir: Path, runner_as: Caller, write_file: Write
) -> None:
    """In the runner's own folder, where `runner state` finds it."""
    bare = Bare(plugin_dir, runner_as, write_file)
    question = json.dumps({"method": SET, "params": {"key": "a", "value": 1}})
    for _ in range(2):  # the second launch finds the folder of the first
        done = runner_as("call", "--policy", bare.policy, bare.folder / "bare", "ask", "--input", question)
        assert (done.returncode, json.loads(done.stdout)) == (0, {"result": {}}), done.stderr
    try:
        listed = json.loads(runner_as("state", "list", "--json").stdout)["states"]
        [state] = [each for each in listed if each["manifest"] == str(bare.folder / "bare/kaged-plugin.yaml")]
        assert (Path(state["path"]) / FOLDER / FILE).exists()
    finally:
        removed = runner_as("state", "remove", bare.folder / "bare")
    assert removed.returncode == 0, removed.stderr
    assert not Path(state["path"]).exists()
