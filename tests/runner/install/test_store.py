"""The store of `runner install`, without a registry: who may use it; all of a set is in it, or nothing."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.install.content import BadContent
from runner.install.request import npm_request
from runner.install.store import (
    DEEPEST,
    Installed,
    Lock,
    Locked,
    Store,
    StoreRefused,
    copy_tree,
    remove_tree,
)
from sandbox.identity.accounts import is_private_group
from tests.conftest import ROOT

REQUEST = npm_request(("demo",), "")
NOBODYS_GROUP = 54399  # which counts as one with members
# Of this process alone: a set stays as long as a cage shows one of its name, of whatever store.
LOCK = Lock("npm", "node", (Locked("demo", "1.0.0", f"sha512-{os.getpid()}"),))


def quiet(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def store(plugin_dir: Path) -> Store:
    return Store(str(plugin_dir / "share/runner/store"))


def fill(store: Store, place: Path, request: object = REQUEST) -> Installed:
    installed = Installed(request, LOCK.name, ("node", "tree/index.js"), (("demo", "1.0.0"),))  # type: ignore[arg-type]
    with store.changing(quiet), store.fetching_into(str(place)), store.new_set() as new:
        (place / "a").mkdir()
        (place / "a/index.js").write_text("hello")
        copy_tree(str(place / "a"), f"{new}/tree")
        store.add(installed, LOCK, new)
    return installed


def test_a_set_is_its_owners_and_shared(store: Store, plugin_dir: Path) -> None:
    installed = fill(store, plugin_dir / "runner-install-1")
    other = npm_request(("demo@1",), "")
    fill(store, plugin_dir / "runner-install-2", other)
    assert store.find(REQUEST) == installed and len(store.all()) == 2
    root = Path(store.root)
    assert os.listdir(root / "sets") == [LOCK.name]
    tree = root / "sets" / LOCK.name / "tree"
    # In its cage a server may change what it sees of them, as the owner that it appears to be.
    assert [path.stat().st_mode & 0o222 for path in (tree, tree / "index.js")] == [0o200, 0o200]
    assert store.words(installed) == ("node", f"{tree}/index.js")
    assert store.changed(LOCK.name) == []
    assert sorted(os.listdir(root)) == ["lock", "requests", "sets"]
    with store.changing(quiet):
        store.remove(REQUEST)
        assert store.find(other) is not None
        store.remove(other)
    assert os.listdir(root / "sets") == []


@pytest.mark.parametrize("word", ["tree/../../x", "tree//usr/bin/x", "tree/./index.js", "tree/index.js/.."])
def test_a_record_whose_program_leaves_its_set_is_not_used(store: Store, plugin_dir: Path, word: str) -> None:
    fill(store, plugin_dir / "runner-install-1")
    [record] = (Path(store.root) / "requests").iterdir()
    text = record.read_text()
    assert store.find(REQUEST) is not None  # control
    record.write_text(text.replace("tree/index.js", word))
    assert store.find(REQUEST) is None


def test_a_file_that_was_changed_is_seen(store: Store, plugin_dir: Path) -> None:
    fill(store, plugin_dir / "runner-install-1")
    tree = Path(store.root, "sets", LOCK.name, "tree")
    tree.chmod(0o755)
    (tree / "new.js").write_text("")
    (tree / "index.js").unlink()
    assert store.changed(LOCK.name) == ["index.js", "new.js"]
    (tree.parent / "lock.json").chmod(0o644)
    (tree.parent / "lock.json").write_text("{}")
    assert "lock.json" in store.changed(LOCK.name)


@pytest.mark.parametrize("where", [".", "requests", "sets", "..", "../..", "sets/*/tree", "requests/*.json"])
def test_a_store_that_others_could_write_is_refused(store: Store, plugin_dir: Path, where: str) -> None:
    fill(store, plugin_dir / "runner-install-1")
    [path] = [Path(store.root)] if where == "." else Path(store.root).glob(where)
    mode = path.stat().st_mode
    if is_private_group(path.stat().st_gid):  # as in a home with umask 002
        path.chmod(mode & 0o777 | 0o020)
        assert store.find(REQUEST) is not None
        # With an access control list, the same mode says that somebody else may write.
        rights = ((1, 7, -1), (2, 6, 54321), (4, 5, -1), (0x10, 7, -1), (0x20, 5, -1))
        entries = (struct.pack("<HHi", *entry) for entry in rights)
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(entries))
        with pytest.raises(StoreRefused, match="can be written by"):
            store.find(REQUEST)
        os.removexattr(path, "system.posix_acl_access")
    for added in (0o020, 0o002) if os.geteuid() == 0 else (0o002,):
        if added == 0o020:
            os.chown(path, -1, NOBODYS_GROUP)
        path.chmod(mode & 0o777 | added)
        with pytest.raises(StoreRefused, match="can be written by") as refused:
            store.find(REQUEST)
        assert refused.value.hint.startswith("chmod go-w ")
    path.chmod(mode & 0o777)
    assert store.find(REQUEST) is not None


@pytest.mark.needs("root")
def test_a_store_of_somebody_else_is_refused(store: Store, plugin_dir: Path) -> None:
    fill(store, plugin_dir / "runner-install-1")
    for path in (Path(store.root), Path(store.root, "sets"), Path(store.root).parent):
        os.chown(path, 54321, 54321)
        with pytest.raises(StoreRefused, match="belongs to uid 54321"):
            store.find(REQUEST)
        with pytest.raises(StoreRefused, match="belongs to uid 54321"), store.changing(quiet):
            pass
        os.chown(path, 0, 0)
    moved = Path(store.root).parent / "moved"
    Path(store.root).rename(moved)
    Path(store.root).symlink_to(moved)
    os.chown(store.root, 54321, 54321, follow_symlinks=False)
    with pytest.raises(StoreRefused, match="symbolic link"):
        store.find(REQUEST)


def _link_through_a_link(folder: Path) -> None:
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/b/up").symlink_to("../..")
    (folder / "a/b/out").symlink_to("up/../secret")  # by its text alone it stays inside


BAD: dict[str, Callable[[Path], object]] = {
    "a link out of its folder": lambda folder: (folder / "link").symlink_to("../secret"),
    "link out of its folder: link -> /etc": lambda folder: (folder / "link").symlink_to("/etc"),
    "link out of its folder: a/b/out": _link_through_a_link,
    "no file: pipe": lambda folder: os.mkfifo(folder / "pipe"),
    "unusual name": lambda folder: (folder / "a\nb").write_text(""),
}


@pytest.mark.parametrize("said", BAD)
def test_what_no_package_may_have_is_not_copied(store: Store, plugin_dir: Path, said: str) -> None:
    place = plugin_dir / "runner-install-1"
    with store.changing(quiet):
        with store.fetching_into(str(place)), store.new_set() as new:
            (place / "a").mkdir()
            BAD[said](place / "a")
            with pytest.raises(BadContent, match=said):
                copy_tree(str(place / "a"), f"{new}/tree")
        assert os.listdir(Path(store.root, "sets")) == [] and not place.exists()


def test_links_inside_are_copied(plugin_dir: Path) -> None:
    """The control."""
    (plugin_dir / "a/.bin").mkdir(parents=True)
    (plugin_dir / "a/x.js").write_text("x")
    (plugin_dir / "a/.bin/x").symlink_to("../x.js")
    copy_tree(str(plugin_dir / "a"), str(plugin_dir / "b"))
    assert (plugin_dir / "b/.bin/x").read_text() == "x"


_KILLED = """
import os, signal, sys
from runner.install.store import Store
store = Store(sys.argv[1])
with store.changing(print), store.fetching_into(sys.argv[2]), store.new_set() as new:
    os.makedirs(os.path.join(new, "tree/folder"))
    os.chmod(os.path.join(new, "tree/folder"), 0o555)
    os.mkdir(os.path.join(sys.argv[2], "state"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_installation_left_is_removed_by_the_next(store: Store, plugin_dir: Path) -> None:
    place = plugin_dir / "runner-install-1"
    argv = [sys.executable, "-c", _KILLED, store.root, str(place)]
    assert subprocess.run(argv, cwd=ROOT, timeout=60).returncode == -9
    assert place.exists() and len(os.listdir(Path(store.root, "sets"))) == 1
    assert store.all() == [] and store.find(REQUEST) is None
    fill(store, plugin_dir / "runner-install-2")
    assert not place.exists() and os.listdir(Path(store.root, "sets")) == [LOCK.name]


_HELD = """
import sys
from runner.install.store import Store
with Store(sys.argv[1]).changing(print):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_of_two_at_once_the_second_waits(store: Store) -> None:
    argv = [sys.executable, "-c", _HELD, store.root]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin and first.stdout and first.stdout.readline() == "held\n"
        told: list[str] = []

        def tell(text: str) -> None:
            told.append(text)
            assert first.stdin
            first.stdin.write("\n")
            first.stdin.flush()

        with store.changing(tell):
            assert first.wait(60) == 0
    assert told == ["Another installation is under way; waiting for it to end."]


_FULL = """
import errno, os, sys
from runner.install.content import BadContent
from runner.install.request import npm_request
from runner.install.store import Installed, Lock, Store, copy_tree
LOCK, REQUEST = Lock("npm", "node", ()), npm_request(("demo",), "")
store = Store(sys.argv[1])
try:
    with store.changing(print), store.fetching_into(sys.argv[2]), store.new_set() as new:
        copy_tree(sys.argv[3], new + "/tree")
        store.add(Installed(REQUEST, LOCK.name, ("node",), ()), LOCK, new)
except OSError as error:
    assert error.errno == errno.ENOSPC
    assert os.listdir(sys.argv[1] + "/sets") == os.listdir(sys.argv[1] + "/requests") == []
    print("full")
"""


@pytest.mark.needs("root")
def test_a_full_disk_leaves_nothing(plugin_dir: Path) -> None:
    (plugin_dir / "store").mkdir()
    (plugin_dir / "big").mkdir()
    (plugin_dir / "big/file").write_bytes(b"x" * (1 << 20))
    words = [str(plugin_dir / name) for name in ("store", "runner-install-1", "big")]
    script = f'mount -t tmpfs -o size=$0,mode=755 none {words[0]} && exec "$@"'
    for size, said in (("512k", "full\n"), ("4m", "")):  # the second is the control
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, size]
        argv += [sys.executable, "-c", _FULL, *words]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.parametrize("depth", [DEEPEST, 3000])
def test_deep_folders_are_refused_and_removed(plugin_dir: Path, depth: int) -> None:
    """3000 are more than a function may call itself, and longer than a path may be."""
    made = plugin_dir / "runner-install-1"
    made.mkdir()
    program = f"import os; [(os.mkdir('a'), os.chdir('a')) for _ in range({depth})]"
    subprocess.run([sys.executable, "-c", program], cwd=made, check=True)
    if depth > DEEPEST:
        with pytest.raises(BadContent, match="deep"):
            copy_tree(str(made), str(plugin_dir / "copy"))
    else:
        copy_tree(str(made), str(plugin_dir / "copy"))
    remove_tree(str(made))
    remove_tree(str(plugin_dir / "copy"))
    assert os.listdir(plugin_dir) == []
