"""What a server changes in its stored package: it is kept with its state, and the store stays as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.install.request import npm_request
from runner.install.roots import ROOT_STORE
from sandbox.identity.host_side import host_side
from tests import elsewhere
from tests.conftest import Caller
from tests.root_store import empty_root_store

pytestmark = [pytest.mark.both_callers, pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

# Runs the code that it is given, and prints what that leaves in `told`.
SERVER = """#!/usr/bin/python3 -I
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
def tries(act, *words):
    try:
        act(*words)
        return "done"
    except OSError as error:
        import errno
        return errno.errorcode[error.errno]
def write(path, text="x", mode="w"):
    with open(path, mode) as file:
        file.write(text)
told = {}
exec(sys.argv[1])
print(json.dumps(told))
"""


def _fill(root: str, place: str, server: str, request: list[Any]) -> str:
    import os

    from runner.install.request import Request
    from runner.install.store import Installed, Lock, Locked, Store, copy_tree

    lock = Lock("npm", "node", (Locked("demo", "1.0.0", "sha512-x"),))
    store = Store(root)
    os.umask(0o077)
    with store.changing(print), store.fetching_into(place), store.new_set() as new:
        os.makedirs(f"{place}/tree/data/deep")
        for name, text in (("server.py", server), ("data/kept", "stored"), ("data/gone", "stored")):
            with open(f"{place}/tree/{name}", "w") as file:
                file.write(text)
        os.chmod(f"{place}/tree/server.py", 0o755)
        copy_tree(f"{place}/tree", f"{new}/tree")
        registry, packages, program, python = request
        asked = Request(registry, tuple(packages), program, python)
        store.add(Installed(asked, lock.name, ("tree/server.py",), (("demo", "1.0.0"),)), lock, new)
    return store.tree(lock.name)


class Stored:
    """Two entries of one stored package."""

    def __init__(self, caller: Caller, folder: Path, root: Path, held: Path) -> None:
        """`held`: where the store's files are for this process."""
        self.caller, self.states = caller, folder / "states"
        self.states.mkdir()
        self.file = folder / "mcp.json"
        entry = {"command": "npx", "args": ["-y", "demo"], "x-sandbox": {"write": ["${state_dir}"]}}
        self.file.write_text(json.dumps({"mcpServers": {"one": entry, "two": entry}}))
        caller.give(folder)
        place = str(folder / "states/runner-install-x")
        asked = list(npm_request(("demo",), ""))
        filled = elsewhere.run(caller, _fill, str(root), place, SERVER, asked)
        self.tree = Path(filled)
        self.files = held / self.tree.relative_to(root)

    def options(self, name: str) -> tuple[str, ...]:
        return str(self.file), "--server", name, "--state-dir", str(self.states / name)

    def run(self, name: str, code: str, *options: str, ends: int = 0) -> dict[str, Any]:
        done = self.caller("exec", *options, *self.options(name), "--", code)
        assert done.returncode == ends, done.stderr
        return dict(json.loads(done.stdout)) if done.stdout else {}

    def changes(self, name: str) -> Path:
        [found] = Path(host_side(str(self.states / name)), "overlays").iterdir()
        return found

    def changed(self) -> list[str]:
        """By `runner install --verify`."""
        done = self.caller("install", "--verify")
        return [] if done.returncode == 0 else done.stdout.splitlines()


@pytest.fixture
def stored(runner_as: Caller, plugin_dir: Path) -> Iterator[Stored]:
    folder = plugin_dir / "person"
    folder.mkdir(mode=0o755)
    if runner_as.uid:
        root = runner_as.home / ".local/share/runner/store"
        yield Stored(runner_as, folder, root, root)
        return
    with empty_root_store(runner_as, plugin_dir) as caller:
        yield Stored(caller, folder, Path(ROOT_STORE), plugin_dir / "store")


CHANGE = """
write(here + "/data/kept", " and changed", "a")
write(here + "/new")
os.mkdir(here + "/node_modules"); write(here + "/node_modules/a")
os.unlink(here + "/data/gone")
os.rmdir(here + "/data/deep")
write(here + "/data/kept.new", "replaced"); os.replace(here + "/data/kept.new", here + "/data/replaced")
"""
LOOK = """
told["kept"] = open(here + "/data/kept").read()
told["names"] = sorted(os.listdir(here) + os.listdir(here + "/data"))
"""


def test_a_server_changes_its_package_and_nobody_elses(stored: Stored, runner_as: Caller) -> None:
    fresh = {"kept": "stored", "names": ["data", "deep", "gone", "kept", "server.py"]}
    assert stored.run("one", LOOK) == fresh
    # Nothing was changed, so nothing is kept.
    assert not Path(host_side(str(stored.states / "one"))).exists()
    stored.run("one", CHANGE)
    changed = {
        "kept": "stored and changed",
        "names": ["data", "kept", "new", "node_modules", "replaced", "server.py"],
    }
    # By the stored plan, and by one that is made anew.
    assert [stored.run("one", LOOK), stored.run("one", LOOK + "#")] == [changed, changed]
    assert stored.run("two", LOOK) == fresh
    # The store is as it was, also where its files were removed.
    assert stored.changed() == []
    assert (stored.files / "data/kept").read_text() == "stored" and (stored.files / "data/gone").exists()

    kept = stored.changes("one")
    assert sorted(path.name for path in kept.iterdir()) == ["lock", "upper"]
    owner = (stored.states / "one").stat().st_uid
    assert {path.lstat().st_uid for path in (kept / "upper").rglob("*")} == {owner}
    assert (owner == runner_as.uid) is (runner_as.uid != 0)
    shown = stored.caller("explain", *stored.options("one")).stdout
    [line] = [line for line in shown.splitlines() if str(stored.tree) in line and " overlaid " in line]
    assert "what it changes there is kept with its state" in line
    removed = stored.caller("state", "remove", str(stored.states / "one"))
    assert removed.returncode == (0 if runner_as.uid == 0 else 2), removed.stderr
    if runner_as.uid == 0:  # an ordinary user has no record of a directory that was chosen
        assert not kept.exists() and stored.run("one", LOOK) == fresh


ATTACK = """
import ctypes
upper = {upper!r}
told["mounted"] = [line.split() for line in open("/proc/self/mountinfo") if " - overlay " in line]
told["upper"] = tries(os.listdir, upper)
told["write upper"] = tries(write, upper + "/new")
told["descriptors"] = [fd for fd in range(3, 4096) if tries(os.fstat, fd) == "done"]
tries(write, os.path.dirname(here) + "/beside")  # in the cage alone
for name in ("user.overlay.opaque", "user.overlay.redirect"):
    tries(os.setxattr, here + "/data", name, b"y")
told["whiteout"] = tries(os.mknod, here + "/whiteout", 0o20600, os.makedev(0, 0))
told["device"] = tries(os.mknod, here + "/device", 0o20600, os.makedev(1, 3))
write(here + "/set-id"); told["set-id"] = tries(os.chmod, here + "/set-id", 0o4755)
libc = ctypes.CDLL(None, use_errno=True)
told["unmount"] = libc.umount2(here.encode(), 2)
os.symlink("/etc", here + "/data/link")
os.rename(here + "/server.py", here + "/moved")
write(here + "/server.py", "#!/bin/sh\\necho '{{}}'\\n"); os.chmod(here + "/server.py", 0o755)
"""


def test_it_reaches_nothing_but_what_it_sees(stored: Stored, runner_as: Caller) -> None:
    stored.run("one", "write(here + '/first')")  # control: it can write, and this is where
    upper = stored.changes("one") / "upper"
    assert (upper / "first").exists()
    told = stored.run("one", ATTACK.format(upper=str(upper)))
    [mounted] = told.pop("mounted")
    assert mounted[4] == str(stored.tree) and {"nosuid", "nodev"} <= set(mounted[5].split(","))
    assert not any(str(upper.parents[3]) in word for word in mounted)
    assert told.pop("upper") == told.pop("write upper") == "ENOENT"
    assert told.pop("unmount") == -1 and not (stored.files.parent / "beside").exists()
    assert "done" not in [told.pop(act) for act in ("whiteout", "device", "set-id")]
    assert told == {"descriptors": []}
    assert not (upper / "set-id").stat().st_mode & 0o6000
    # What overlayfs itself obeys is out of its reach.
    assert not {"user.overlay.opaque", "user.overlay.redirect"} & set(os.listxattr(upper / "data"))
    # What it put in place of its program runs in its own cage, and in no other.
    assert stored.changed() == []
    assert stored.run("two", LOOK)["kept"] == "stored"
    told = stored.run("one", LOOK)
    assert told == {}
    # Its own mode does not lock the runner out.
    stored.run("two", "os.chmod(here, 0)")
    assert stored.run("two", LOOK)["kept"] == "stored"


FILL = """
held = []
for number in range(8):
    path = here + f"/data/{{number}}"
    held.append(open(path, "wb")); {}
    held[-1].write(bytes(8 << 20)); held[-1].flush()
"""
FREE = "for name in os.listdir(here + '/data'): tries(os.unlink, here + '/data/' + name)"


def test_what_it_changes_counts_as_its_disk(stored: Stored) -> None:
    stored.run("one", FILL.format(""), "--limit", "disk=100M")  # control
    for gone in ("", "os.unlink(path)"):  # a deleted file takes room as long as it is open
        code = FILL.format(gone) + "import time; time.sleep(60)"
        done = stored.caller("exec", "--limit", "disk=16M", *stored.options("two"), "--", code)
        assert done.returncode == 137 and str(stored.tree) in done.stderr, done.stderr
        stored.run("two", FREE)
    refused = stored.caller("exec", "--limit", "disk=16M", *stored.options("one"), "--", "")
    assert refused.returncode == 126 and "runner state remove" in refused.stderr
    stored.run("one", FREE + "\nos.makedirs(here + '/data' + '/d' * 210)")
    refused = stored.caller("exec", "--limit", "disk=16M", *stored.options("one"), "--", "")
    assert "200 directories deep" in refused.stderr and "runner state remove" in refused.stderr


def test_without_an_overlay_it_is_read_only_and_a_line_says_why(stored: Stored, tmp_path: Path) -> None:
    changes = Path(host_side(str(stored.states / "one")), "overlays")
    stored.run("one", "write(here + '/first')")
    [kept] = changes.iterdir()
    (kept / "upper").rename(kept / "aside")
    (kept / "upper").touch()
    report = stored.caller.home / "report.json"
    told = stored.run("one", "told['new'] = tries(write, here + '/new')", "--report", str(report))
    assert told == {"new": "EROFS"}
    found = json.loads(report.read_text())
    [note] = [each for each in found["notes"] if each["rule"] == "overlay"]
    assert note["message"].startswith(f"{stored.tree} stays read-only: what it would change cannot be kept")
    assert [each["state"] for each in found["grant"]["paths"] if each["path"] == str(stored.tree)] == [
        "bound"
    ]
    # The control, and what is said of another version's changes.
    (kept / "upper").unlink()
    (kept / "aside").rename(kept / "upper")
    (changes / "0123456789abcdef").mkdir()
    code = "told['first'] = os.path.exists(here + '/first')"
    assert stored.run("one", code, "--report", str(report)) == {"first": True}
    [note] = [each for each in json.loads(report.read_text())["notes"] if each["rule"] == "overlay"]
    assert note["message"].endswith(f"is kept, and not shown to it: {changes}/0123456789abcdef")


def test_packages_of_an_earlier_version_stay_read_only(stored: Stored) -> None:
    os.chmod(stored.files, 0o555)
    assert stored.run("one", "told['new'] = tries(write, here + '/new')") == {"new": "EROFS"}
    os.chmod(stored.files, 0o755)
    assert stored.run("one", "told['new'] = tries(write, here + '/new')") == {"new": "done"}
