"""`runner state`, and what reservations and refused launches leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.identity.host_side import host_side
from tests import elsewhere
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import wait_for

pytestmark = pytest.mark.both_callers

Write = Callable[..., Path]

NEXO = nexo("kept", "/bin/sh") + 'args = ["-c", "{script}"]\n[plugin.sandbox]\nenabled = true\n'
WITH_STATE = 'fs_write_paths = ["${state_dir}"]\n'
WRITES = "echo here > $RUNNER_STATE_DIR/file"
WAITS = "echo up; read line"


class Plugins:
    """Plugins of one caller, and what `runner state` says of them. All they leave is removed in the end."""

    def __init__(self, caller: Caller, folder: Path, write_file: Write) -> None:
        self.caller = caller
        self.folder = folder
        self.write_file = write_file

    def write(self, name: str, script: str = WRITES, state: bool = True) -> Path:
        text = NEXO.replace("{script}", script) + (WITH_STATE if state else "")
        return self.write_file(self.folder / name / "nexo-plugin.toml", text)

    def exec(self, manifest: Path, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.caller("exec", *words, manifest, **more)

    def states(self) -> dict[str, dict[str, Any]]:
        """Of these plugins, by the name of their folder."""
        said = self.caller("state", "list", "--json")
        assert (said.returncode, said.stderr) == (0, "")
        document = json.loads(said.stdout)
        assert document["schema"] == "runner.state.v1"
        return {
            Path(each["manifest"]).parent.name: each
            for each in document["states"]
            if each["manifest"] is not None and each["manifest"].startswith(f"{self.folder}/")
        }

    def remove(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.caller("state", "remove", *words)


@pytest.fixture
def plugins(runner_as: Caller, plugin_dir: Path, write_file: Write) -> Iterator[Plugins]:
    made = Plugins(runner_as, plugin_dir, write_file)
    yield made
    for state in made.states().values():
        made.remove(state["path"])


@pytest.fixture
def narrow(plugins: Plugins, write_file: Write) -> Path:
    """A policy with four uids that no other test has: two for plugins with state, two for those without."""
    first = 2000300000 + os.getpid() * 4
    text = f'version = 1\n[write]\nceiling = ["${{state_dir}}"]\n[user]\nuids = [{first}, {first + 3}]\n'
    path = write_file(plugins.folder / "narrow.toml", text)
    plugins.caller.give(path)
    return path


# --- the verb ----------------------------------------------------------------------------------------------


def test_states_are_listed_and_removed(plugins: Plugins) -> None:
    one, two, three = (plugins.write(name) for name in ("one", "two", "three"))
    chosen = plugins.caller.home / "chosen"
    if plugins.caller.uid == 0:
        plugins.caller.home.chmod(0o711)
    for manifest in (one, two):
        assert plugins.exec(manifest).returncode == 0
    assert plugins.exec(three, "--state-dir", chosen).returncode == 0
    found = plugins.states()
    # Where a user chose the directory, the runner does not keep books of it.
    assert set(found) == ({"one", "two", "three"} if plugins.caller.uid == 0 else {"one", "two"})
    for name, manifest in (("one", one), ("two", two)):
        state = found[name]
        assert (state["manifest"], state["orphaned"], state["running"]) == (str(manifest), False, False)
        assert Path(state["path"]).stat().st_uid == state["uid"]
        assert state["name"] == Path(state["path"]).name
    text = plugins.caller("state", "list").stdout
    assert text.startswith("NAME ") and found["one"]["name"] in text and str(two) in text
    # By manifest, by its folder, by name, by path.
    told = plugins.remove(one)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith(f"removed {found['one']['path']}")
    assert not Path(found["one"]["path"]).exists()
    assert plugins.exec(one).returncode == 0
    assert plugins.remove(one.parent).returncode == 0
    told = plugins.caller("state", "remove", "--json", found["two"]["name"])
    assert told.returncode == 0 and [each["path"] for each in json.loads(told.stdout)["removed"]] == [
        found["two"]["path"]
    ]
    assert set(plugins.states()) <= {"three"}
    if plugins.caller.uid == 0:
        assert found["three"]["name"] == found["three"]["path"] == str(chosen)
        assert plugins.remove(chosen).returncode == 0
        assert not chosen.exists() and not plugins.states()
    for words in ((), ("nonesuch",), (one,), ("--orphaned", one)):
        told = plugins.remove(*words)
        assert (told.returncode, told.stdout) == (2, "") and told.stderr.count("\n") == 1


def test_what_a_host_keeps_for_a_plugin_is_removed_with_the_state(plugins: Plugins) -> None:
    one, two, three = (plugins.write(name) for name in ("one", "two", "three"))
    chosen = plugins.caller.home / "chosen"
    if plugins.caller.uid == 0:
        plugins.caller.home.chmod(0o711)
    for manifest in (one, two):
        assert plugins.exec(manifest).returncode == 0
    if plugins.caller.uid == 0:
        assert plugins.exec(three, "--state-dir", chosen).returncode == 0
    before = plugins.states()
    kept = {name: Path(host_side(state["path"])) for name, state in before.items()}
    for path in kept.values():
        elsewhere.run(plugins.caller, _keep, str(path))
    after = plugins.states()
    assert all(after[name].pop("bytes") > state["bytes"] for name, state in before.items())
    assert after == {name: {**state} for name, state in before.items() if state.pop("bytes") is not None}
    for name, path in kept.items():
        assert (path / "file").exists()
        assert plugins.remove(before[name]["path"]).returncode == 0
        assert not path.exists() and not Path(before[name]["path"]).exists()
    # The folder above goes with the last. Other plugins on this machine may have theirs in it.
    for folder in {path.parent for path in kept.values()}:
        assert wait_for(lambda folder=folder: not folder.exists() or any(_names_in(folder)))  # type: ignore[misc]


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # it was removed at this moment
        return []


def _keep(path: str) -> None:
    import os
    from contextlib import suppress

    os.umask(0o077)
    while not os.path.isdir(path):
        with suppress(FileNotFoundError):  # the removal of another state has removed the empty folder
            os.makedirs(path)
    with open(f"{path}/file", "w") as file:
        file.write("kept")


def test_a_link_in_place_of_what_a_host_keeps_is_not_followed(plugins: Plugins, plugin_dir: Path) -> None:
    manifest = plugins.write("one")
    assert plugins.exec(manifest).returncode == 0
    state = Path(plugins.states()["one"]["path"])
    victim = plugin_dir / "victim"
    victim.mkdir()
    (victim / "file").touch()
    kept = Path(host_side(str(state)))
    elsewhere.run(plugins.caller, _keep, str(kept))
    (kept / "file").unlink()
    (kept / "link").symlink_to(victim)
    kept.rename(kept.parent / "aside")
    kept.symlink_to(victim)
    try:
        told = plugins.remove(manifest)
        assert told.returncode == 1 and "cannot be removed" in told.stderr
    finally:
        kept.unlink()
        (kept.parent / "aside").rename(kept)
    assert plugins.remove(manifest).returncode == 0
    assert (victim / "file").exists() and not kept.exists()


def test_a_state_is_not_removed_while_its_plugin_runs(plugins: Plugins) -> None:
    manifest = plugins.write("busy", WAITS)
    with plugins.caller.start("exec", manifest) as running:
        assert elsewhere.line(running) == b"up\n"
        state = plugins.states()["busy"]
        assert state["running"]
        (Path(state["path"]) / "file").touch()
        told = plugins.remove(manifest)
        assert (told.returncode, told.stdout) == (21, "") and "the plugin is running" in told.stderr
        told = plugins.caller("state", "remove", "--json", manifest)
        assert told.returncode == 21 and json.loads(told.stdout)["kept"][0]["path"] == state["path"]
        assert (Path(state["path"]) / "file").exists()
        # Killed, the runner takes its plugin with it; then nothing is in the way.
        running.send_signal(signal.SIGKILL)
    for _ in range(100):  # the kernel takes a moment to end its last process
        if not plugins.states()["busy"]["running"]:
            break
    assert plugins.remove(manifest).returncode == 0
    assert not Path(state["path"]).exists()


def test_whatever_a_plugin_has_made_of_its_state_is_removed(plugins: Plugins, plugin_dir: Path) -> None:
    """Links are not followed; closed and endlessly deep directories go as well."""
    victim = plugin_dir / "victim"
    victim.mkdir()
    (victim / "file").touch()
    deep = "i=0; while [ $i -lt 1500 ]; do mkdir d; cd d; i=$((i+1)); done"
    script = (
        f"cd $RUNNER_STATE_DIR; ln -s {victim} out; ln -s {victim}/file; mkdir shut; mkdir shut/in; mkfifo f;"
        f" chmod 0 shut/in shut; mkdir deep; cd deep; {deep}"
    )
    manifest = plugins.write("messy", script)
    assert plugins.exec(manifest).returncode == 0
    state = Path(plugins.states()["messy"]["path"])
    told = plugins.remove(manifest)
    assert (told.returncode, told.stderr) == (0, "")
    assert not state.exists() and (victim / "file").exists()


@pytest.mark.needs("user")
def test_states_without_manifests(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    """Not as root: those of the machine are not the tests' to remove."""
    plugins = Plugins(runner_as_user, plugin_dir, write_file)
    here, gone = plugins.write("here"), plugins.write("gone")
    for manifest in (here, gone):
        assert plugins.exec(manifest).returncode == 0
    gone.unlink()
    found = plugins.states()
    assert (found["here"]["orphaned"], found["gone"]["orphaned"]) == (False, True)
    listed = runner_as_user("state", "list", "--orphaned").stdout
    assert str(gone) in listed and str(here) not in listed
    assert plugins.remove("--orphaned").returncode == 0
    assert set(plugins.states()) == {"here"}
    assert plugins.remove("--orphaned").stdout == "no state is orphaned\n"
    # One that an older version made: nothing says whose it is, but its name.
    record = Path(found["here"]["path"]).parent / ".manifests" / found["here"]["name"]
    record.unlink()
    assert plugins.states() == {} and "unknown" in runner_as_user("state", "list").stdout
    assert plugins.remove(here).returncode == 0
    assert runner_as_user("state", "list").stdout == "no plugin has state on this machine\n"


# --- reservations ------------------------------------------------------------------------------------------


@pytest.mark.needs("root")
@pytest.mark.parametrize("runner_as", ["root"], indirect=True)
def test_a_range_full_of_states(plugins: Plugins, narrow: Path) -> None:
    """Two of four uids are for states. The third plugin with state is told what to do, and leaves nothing;
    plugins without state start as ever; removing a state makes room."""
    one, two, three = (plugins.write(name) for name in ("one", "two", "three"))
    other = plugins.write("other", "echo ran", state=False)
    policy = ("--policy", narrow)
    for manifest in (one, two):
        done = plugins.exec(manifest, *policy)
        assert done.returncode == 0, done.stderr
    done = plugins.exec(three, *policy)
    assert done.returncode == 125
    assert (
        "for plugins with state are reserved; remove states that nobody needs (runner state list"
        in done.stderr
    )
    left = os.listdir("/var/lib/runner/plugins")
    chosen = plugins.folder / "not/made"
    assert plugins.exec(three, *policy, "--state-dir", chosen).returncode == 125
    assert not chosen.parent.exists()
    assert plugins.exec(other, *policy).stdout == "ran\n"
    said = plugins.caller("doctor", "--policy", narrow, "--format", "json").stdout
    pool = next(each for each in json.loads(said)["findings"] if each["layer"] == "uid_pool")
    assert pool["summary"].startswith(
        "2 of 2 uids for plugins with state are reserved, 0 of 2 uids for plugins without state"
    )
    assert (pool["status"], "runner state remove" in pool["remedy"]) == ("degraded", True)
    # A manifest that is gone keeps its uid for as long as its state has content.
    found = plugins.states()
    one.unlink()
    assert plugins.states()["one"]["orphaned"]
    assert plugins.exec(three, *policy).returncode == 125
    assert plugins.remove(found["one"]["name"]).returncode == 0
    assert plugins.exec(three, *policy).returncode == 0
    # The second keeps its own through all of this; and without content the third is collected by itself.
    third = Path(plugins.states()["three"]["path"])
    assert third.parent == Path("/var/lib/runner/plugins") and third.name not in left
    (third / "file").unlink()
    three.unlink()
    assert plugins.exec(plugins.write("four"), *policy).returncode == 0
    assert not third.exists()
    assert plugins.exec(two, *policy).returncode == 0
    assert plugins.states()["two"]["uid"] == found["two"]["uid"]


def test_a_refused_launch_leaves_nothing_behind(
    plugins: Plugins, plugin_dir: Path, write_file: Write
) -> None:
    """Refused when its state has been made ready already: by the deadline; as root because the place is out
    of the plugin's reach."""
    manifest = plugins.write("asks")
    place = plugin_dir / "place"
    place.mkdir(mode=0o700)
    plugins.caller.give(place)
    if plugins.caller.uid == 0:
        done = plugins.exec(manifest, "--state-dir", place / "a/b/state")
        assert done.returncode == 126 and "cannot be read by the plugin" in done.stderr
        assert os.listdir(place) == []
    place.chmod(0o755)
    assert plugins.exec(manifest, "--deadline", "1ms", "--state-dir", place / "a/b/state").returncode == 124
    assert os.listdir(place) == []
    assert plugins.exec(manifest, "--deadline", "1ms").returncode == 124
    assert plugins.states() == {}
    if plugins.caller.uid != 0:
        assert [*Path(plugins.caller.environ["XDG_STATE_HOME"]).iterdir()] == []
    # The control.
    done = plugins.exec(manifest, "--state-dir", place / "a/b/state")
    assert done.returncode == 0, done.stderr
    assert (place / "a/b/state/file").exists()


def test_a_state_has_a_size_and_a_day(plugins: Plugins) -> None:
    manifest = plugins.write("sized", "head -c 100000 /dev/zero > $RUNNER_STATE_DIR/file")
    assert plugins.exec(manifest).returncode == 0
    found = plugins.states()["sized"]
    assert 100_000 < found["bytes"] < 200_000 and found["complete"]
    os.utime(Path(found["path"]) / "file", (10, 10))
    os.utime(found["path"], (86400 * 366, 86400 * 366))
    assert plugins.states()["sized"]["used"] == 86400 * 366
    rows = [row.split() for row in plugins.caller("state", "list").stdout.splitlines()]
    assert rows[0] == ["NAME", "UID", "PLUGIN", "SIZE", "USED", "MANIFEST"]
    row = next(row for row in rows if row[0] == found["name"])
    assert row[4] == "KiB" and row[5].startswith("1971-01-0")
    assert plugins.exec(manifest).returncode == 0
    assert plugins.states()["sized"]["used"] > 86400 * 367  # a launch sets it


@pytest.mark.needs("root")
def test_state_that_cannot_be_written_is_no_denial(plugins: Plugins) -> None:
    manifest = plugins.write("unwritten")
    script = 'mount -t tmpfs -o ro none "$1" && shift && exec "$@"'
    place = "/var/lib/runner" if plugins.caller.name == "root" else str(plugins.caller.home / ".local/state")
    os.makedirs(place, exist_ok=True)
    words = plugins.caller.command("exec", manifest)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", place, *words],
        env=plugins.caller.environ,
        capture_output=True,
        text=True,
    )
    told = " ".join(done.stderr.split())
    assert done.returncode == 125, told
    assert told.startswith("runner: launch_failed: ") and "Read-only file system" in told
    assert "in a container" in told and "not a link" not in told
