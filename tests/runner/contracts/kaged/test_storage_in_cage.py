"""Storage as a plugin in its cage has it, as root and as a user: kept between sessions, out of its reach."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sqlite3
import stat
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.kaged.database import FILE, JOURNAL
from sandbox.identity.host_side import FOLDER, host_side
from tests.conftest import ROOT, Caller
from tests.tables import one_case

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
        return Path(host_side(str(self.folder / "state"))) / FILE

    def run(
        self, tool: str, given: Mapping[str, Any], policy: Path | None = None, state: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.caller(
            "call",
            "--policy",
            policy or self.policy,
            "--state-dir",
            state or self.folder / "state",
            self.folder / "bare",
            tool,
            "--input",
            json.dumps(given),
        )

    def call(
        self, tool: str, given: Mapping[str, Any], policy: Path | None = None, state: Path | None = None
    ) -> Any:
        done = self.run(tool, given, policy, state)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def allow(self, write: Write, name: str, *, default: str = "", ceiling: str = "") -> Path:
        """A policy with storage that gives more paths: by default, or as far as the manifest asks."""
        folders = ["${state_dir}", *([ceiling] if ceiling else [])]
        text = f"version = 1\n[read]\nceiling = {json.dumps([ceiling] if ceiling else [])}\n"
        text += f"[write]\nceiling = {json.dumps(folders)}\n"
        if default:
            text += f"default = {json.dumps([default])}\n"
        path = write(self.folder / f"{name}.toml", f'{text}[capabilities]\nhost = ["kaged.storage.*"]\n')
        os.chown(path, self.caller.uid, self.caller.uid)
        return path

    def declare(self, capability: str) -> None:
        """Add it to the plugin's manifest."""
        path = self.folder / "bare/kaged-plugin.yaml"
        path.write_text(path.read_text().replace('"net:[]"', f'"net:[]", "{capability}"'))

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
    bare.database.parent.rename(aside)
    bare.database.parent.symlink_to(aside)
    error = bare.ask(GET, {"key": "a"})["error"]
    assert (error["code"], error["message"]) == (-32004, "storage_unusable")
    assert "state is not a folder" in error["data"]["reason"]


# --- a plugin that wants its host to remove a file ----------------------------------------------------------


class Trap:
    """A database with a journal that names a file of the caller's. Who opens it with SQLite removes that
    file. The cage does not show it."""

    def __init__(self, bare: Bare) -> None:
        self.victim = bare.folder / "precious/thesis.txt"
        self.victim.parent.mkdir()
        self.victim.write_text("precious")
        for path in (self.victim, self.victim.parent):
            os.chown(path, bare.caller.uid, bare.caller.uid)
        made = bare.folder / "trap.sqlite3"
        connection = sqlite3.connect(made)
        connection.execute("CREATE TABLE x (y)")
        connection.close()
        self._database = made.read_bytes()
        made.unlink()
        name, magic = os.fsencode(self.victim), bytes.fromhex("d9d505f920a163d7")
        pages = len(self._database) // 4096
        header = (magic + struct.pack(">IIIII", 0, 0, pages, 512, 4096)).ljust(512, b"\0")
        after = struct.pack(">II", len(name), sum(name)) + magic
        self._journal = header + struct.pack(">I", 0x40000000 // 4096 + 1) + name + after

    def files(self, *folders: Path) -> dict[str, str]:
        """The input of the plugin's tool `plant`."""
        return {
            str(folder / name): base64.b64encode(content).decode()
            for folder in folders
            for name, content in ((FILE, self._database), (JOURNAL, self._journal))
        }

    def springs(self, folder: Path) -> bool:
        """The control: what was planted in this folder does remove the file."""
        connection = sqlite3.connect(folder / FILE)
        connection.execute("SELECT * FROM sqlite_master").fetchall()
        connection.close()
        return not self.victim.exists()


@pytest.fixture
def trap(bare: Bare) -> Trap:
    return Trap(bare)


def places(state: Path) -> tuple[Path, ...]:
    """In the state directory, where a host might look; and where it does look."""
    return state / "storage", state / FOLDER / state.name, Path(host_side(str(state)))


def assert_harmless(bare: Bare, trap: Trap, policy: Path) -> None:
    """It plants the trap, and asks its host, in the same session and in a later one."""
    state = bare.folder / "state"
    question = {"method": GET, "params": {"key": "a"}}
    empty = {"result": {"value": None, "found": False}}
    done = bare.call("plant", {"files": trap.files(*places(state)), "ask": question}, policy)
    written = [path for path, came_of in done["files"].items() if came_of == "written"]
    assert set(written) >= set(trap.files(*places(state)[:2]))
    assert not bare.database.exists()  # what it wrote outside of its directory is gone with its cage
    assert done["answer"] == empty
    assert bare.call("ask", question, policy) == empty
    assert bare.call("ask", {"method": SET, "params": {"key": "a", "value": 1}}, policy) == {"result": {}}
    assert bare.call("touch", {"path": str(bare.database)}, policy)["rb"] == "No such file or directory"
    assert bare.call("ask", question, policy) == {"result": {"value": 1, "found": True}}
    assert trap.victim.read_text() == "precious"
    assert trap.springs(places(state)[0])


def test_a_trap_in_the_whole_state_directory_is_harmless(bare: Bare, trap: Trap, write_file: Write) -> None:
    """A policy shows all of the state directory to each plugin."""
    assert_harmless(bare, trap, bare.allow(write_file, "default", default="${state_dir}"))


def test_a_trap_in_a_state_directory_that_the_manifest_names_is_harmless(
    bare: Bare, trap: Trap, write_file: Write
) -> None:
    bare.call("told", {})  # it exists
    bare.declare(f"write:fs:{bare.folder}/state")
    assert_harmless(bare, trap, bare.allow(write_file, "own", ceiling=str(bare.folder / "state")))


@one_case("stored", [False, True])
@one_case("below", ["", FOLDER, f"{FOLDER}/state"])
def test_what_holds_the_storage_is_never_shown_for_writing(
    plugin_dir: Path, runner_as: Caller, write_file: Write, below: str, stored: bool
) -> None:
    """The folder beside the state directory, and those around it. Also before there is one."""
    bare = Bare(plugin_dir, runner_as, write_file)
    place = bare.folder / "place"
    for folder in (place, bare.folder / "other"):
        folder.mkdir()
        os.chown(folder, bare.caller.uid, bare.caller.uid)
    if stored:
        question = {"method": SET, "params": {"key": "a", "value": 1}}
        assert bare.call("ask", question, state=place / "state") == {"result": {}}
    bare.declare(f"write:fs:{place / below}")
    policy = bare.allow(write_file, "wide", ceiling=str(place))
    done = bare.run("told", {}, policy, place / "state")
    assert done.returncode != 0
    assert f"{place}/{FOLDER}, where hosts keep what plugins store" in done.stderr
    assert (place / FOLDER).exists() is stored
    if not below:  # the control: the same request, with the state in another place
        other = bare.run("told", {}, policy, bare.folder / "other/state")
        assert FOLDER not in other.stderr, other.stderr
        if bare.caller.uid != 0:  # root's plugin has another uid, to which the folder does not belong
            assert other.returncode == 0, other.stderr


@one_case("below", [FOLDER, f"{FOLDER}/state"])
def test_the_storage_is_never_shown_for_reading(
    plugin_dir: Path, runner_as: Caller, write_file: Write, below: str
) -> None:
    bare = Bare(plugin_dir, runner_as, write_file)
    bare.ask(SET, {"key": "a", "value": 1})
    bare.declare(f"read:fs:{bare.folder / below}")
    done = bare.run("told", {}, bare.allow(write_file, "wide", ceiling=str(bare.folder)))
    assert done.returncode != 0
    assert f"{bare.folder}/{FOLDER}, where hosts keep what plugins store" in done.stderr


def test_the_folder_around_the_state_directory_can_be_read(bare: Bare, write_file: Write) -> None:
    """Many plugins read the folder that an operator put their state into."""
    bare.declare(f"read:fs:{bare.folder}")
    policy = bare.allow(write_file, "wide", ceiling=str(bare.folder))
    assert bare.call("told", {}, policy)["storage_available"] is True
    assert bare.call("touch", {"path": f"{bare.folder}/wide.toml"}, policy)["rb"] > 0


def test_a_trap_of_another_plugin_is_refused(bare: Bare, trap: Trap, write_file: Write) -> None:
    """As if the operator had let a plugin whose state is elsewhere write to the folder with this one's."""
    folder = Path(host_side(str(bare.folder / "state")))
    for path, content in trap.files(folder).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(Path(path), base64.b64decode(content), 0o600)
    for each in (folder, folder.parent):
        each.chmod(0o700)
    for each in (folder, folder.parent, *folder.iterdir()):
        os.chown(each, bare.caller.uid, bare.caller.uid)
    error = bare.ask(GET, {"key": "a"})["error"]
    assert (error["code"], error["message"]) == (-32004, "storage_unusable")
    assert f"{JOURNAL} names another file" in error["data"]["reason"]
    assert trap.victim.read_text() == "precious"
    assert trap.springs(folder)


@one_case("place", [f"{FOLDER}/state", FOLDER, f"{FOLDER}/other/state"])
def test_no_state_directory_is_where_storage_is(
    plugin_dir: Path, runner_as: Caller, write_file: Write, place: str
) -> None:
    bare = Bare(plugin_dir, runner_as, write_file)
    done = bare.run("told", {}, state=bare.folder / place)
    assert done.returncode != 0
    assert f"is in a folder {FOLDER}, where hosts keep what plugins store" in done.stderr
    assert not (bare.folder / FOLDER).exists()


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
        assert (Path(host_side(state["path"])) / FILE).exists()
    finally:
        removed = runner_as("state", "remove", bare.folder / "bare")
    assert removed.returncode == 0, removed.stderr
    assert not Path(state["path"]).exists()
    assert not Path(host_side(state["path"])).exists()
