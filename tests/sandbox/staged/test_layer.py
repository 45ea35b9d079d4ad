"""What a layer changes of its folder, and what of that is refused. The layers are made by hand, because
overlayfs does not make all of them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.staged.layer import glance
from sandbox.staged.store import MOST_KEPT, Changeset, StagingRefused
from tests.conftest import ROOT, SPARE_UID
from tests.layers_by_hand import JUDGE, Staged, file, folder, link, removed, stage
from tests.tables import one_case


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    with stage(tmp_path) as found:
        yield found


def _fifo(staged: Staged) -> None:
    os.mkfifo(staged.layer / "fifo")


def _marked(staged: Staged) -> None:
    file("marked")(staged)
    os.setxattr(staged.layer / "marked", "user.overlay.metacopy", b"")


def _deep(staged: Staged) -> None:
    place = os.open(staged.layer, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)


@one_case(
    ("acts", "expected"),
    [
        ((), []),
        # What is the same again is no change.
        ((file("a", "old a\n"),), []),
        ((file("a"),), [("M", "a", "")]),
        ((file("a", "old a\n", 0o755),), [("M", "a", "")]),
        ((file("new/c"),), [("A", "new", ""), ("A", "new/c", "")]),
        ((removed("a", "sub/y", "gone"),), [("D", "a", ""), ("D", "sub/y", "")]),
        # From the bottom up, and everything by its name.
        (
            (removed("sub"),),
            [("D", "sub/deep/x", ""), ("D", "sub/deep", ""), ("D", "sub/y", ""), ("D", "sub", "")],
        ),
        # A folder that replaced another one.
        (
            (folder("sub", opaque=b"y"), file("sub/y")),
            [("D", "sub/deep/x", ""), ("D", "sub/deep", ""), ("M", "sub/y", "")],
        ),
        # Another kind: the old is removed, then the new is there.
        (
            (file("sub"),),
            [
                *(("D", "sub/deep/x", ""), ("D", "sub/deep", ""), ("D", "sub/y", ""), ("D", "sub", "")),
                ("A", "sub", ""),
            ],
        ),
        ((folder("a"),), [("D", "a", ""), ("A", "a", "")]),
        ((link("a", "b"),), [("D", "a", ""), ("A", "a", "")]),
        ((link("to_a", "a"),), []),
        ((link("to_a", "b"),), [("M", "to_a", "")]),
        # Links that lead out, at once or through another link, of the folder or of the layer.
        ((link("l", "/etc/passwd"),), [("A", "l", "link")]),
        ((link("l", "sub/../../x"),), [("A", "l", "link")]),
        ((link("l", "to_a"),), [("A", "l", "link")]),
        ((link("k", "sub"), link("l", "k/y")), [("A", "k", ""), ("A", "l", "link")]),
        ((link("sub/l", "../a"),), [("A", "sub/l", "")]),
        # What it goes down into may become a link later.
        ((link("sub/l", "later/../../x"),), [("A", "sub/l", "link")]),
        # Folders have no rights of their own, and set-gid comes from above.
        ((folder("g", 0o2755),), [("A", "g", "")]),
        # What programs outside obey, in any spelling, and what is below it.
        (
            (file(".git/hooks/pre-commit"),),
            [
                ("A", ".git", "guarded"),
                ("A", ".git/hooks", "guarded"),
                ("A", ".git/hooks/pre-commit", "guarded"),
            ],
        ),
        ((file("sub/.GIT/config"),), [("A", "sub/.GIT", "guarded"), ("A", "sub/.GIT/config", "guarded")]),
        (
            (file(".vscode/tasks.json"),),
            [("A", ".vscode", "guarded"), ("A", ".vscode/tasks.json", "guarded")],
        ),
        # A repository without a name of its own.
        (
            (file("r/HEAD"), folder("r/refs"), folder("r/objects"), file("r/config")),
            [
                *(("A", "r", ""), ("A", "r/HEAD", "guarded"), ("A", "r/config", "guarded")),
                *(("A", "r/objects", "guarded"), ("A", "r/refs", "guarded")),
            ],
        ),
        ((file("s", mode=0o4755), file("g", mode=0o2755)), [("A", "g", "set-id"), ("A", "s", "set-id")]),
        ((_fifo,), [("A", "fifo", "special")]),
        ((_marked,), [("A", "marked", "unreadable")]),
        ((file(".ssh"),), [("A", ".ssh", "denied")]),
    ],
)
def test_changes(tmp_path: Path, acts: tuple[Callable[[Staged], None], ...], expected: list[object]) -> None:
    with stage(tmp_path / os.urandom(4).hex()) as staged:
        for act in acts:
            act(staged)
        assert staged.changes() == expected


def test_folders_that_are_too_deep_are_refused(staged: Staged) -> None:
    _deep(staged)
    found = staged.changes()
    assert len(found) < 300 and found[-1][2] == "unreadable"


def test_what_somebody_else_changed_is_a_conflict(staged: Staged) -> None:
    for act in (file("a"), file("b", "old b\n", 0o600), removed("sub/y"), file("made"), file("lost")):
        act(staged)
    os.setxattr(staged.layer / "lost", "user.overlay.origin", b"x")  # as the copy of a file has it
    for name in ("a", "sub/y", "made"):
        (staged.folder / name).write_text("somebody's\n")
    assert staged.changes() == [
        ("D", "sub/y", "conflict"),
        ("M", "a", "conflict"),
        ("M", "b", ""),
        ("A", "lost", "conflict"),
        ("M", "made", "conflict"),
    ]


def test_a_bare_repository_that_was_there(staged: Staged) -> None:
    for name in ("HEAD", "refs/x", "objects/x"):
        (staged.folder / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (staged.folder / "r" / name).write_text("x")
    file("r/hooks/post-update")(staged)
    file("r/description")(staged)
    assert staged.changes() == [
        ("A", "r/description", ""),
        ("A", "r/hooks", "guarded"),
        ("A", "r/hooks/post-update", "guarded"),
    ]


def test_half_of_a_bare_repository(staged: Staged) -> None:
    """Somebody may take what makes one, and leave what a whiteout removes."""
    (staged.folder / "objects").mkdir()
    for act in (removed("objects"), file("HEAD"), folder("refs"), file("config")):
        act(staged)
    assert {path: rule for _, path, rule in staged.changes() if path != "objects"} == dict.fromkeys(
        ("HEAD", "refs", "config"), "guarded"
    )


def test_another_folder_in_its_place(staged: Staged, tmp_path: Path) -> None:
    staged.folder.rename(tmp_path / "moved")
    staged.folder.mkdir()
    with pytest.raises(StagingRefused, match="another folder"):
        staged.changes()
    staged.folder.rmdir()
    staged.folder.symlink_to(tmp_path / "moved")
    with pytest.raises(StagingRefused, match="cannot be compared"):
        staged.changes()


def test_the_record_is_all_that_is_needed(staged: Staged) -> None:
    from sandbox.staged.store import list_changesets

    found = list_changesets(os.path.dirname(staged.changeset.path))
    assert found == [Changeset(*staged.changeset)]


@pytest.mark.needs("root")
def test_a_store_that_keeps_no_attributes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code = (
        "import sys; from pathlib import Path; from tests.layers_by_hand import stage\n"
        "with stage(Path(sys.argv[1])): pass"
    )
    script = 'mount -t ramfs none "$0/store" && exec "$1" -c "$2" "$0"'
    (tmp_path / "store").mkdir()
    words = ("unshare", "--mount", "sh", "-c", script, str(tmp_path), sys.executable, code)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "keeps no attributes of users" in done.stderr and os.listdir(tmp_path / "store") == []


@pytest.mark.needs("root")
def test_what_belongs_to_nobody_who_ran_is_refused(staged: Staged) -> None:
    file("a")(staged)
    os.chown(staged.layer / "a", SPARE_UID, SPARE_UID)
    assert staged.changes() == [("M", "a", "unreadable")]


@pytest.mark.needs("root")
def test_another_filesystem_below_the_folder_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from pathlib import Path; from tests.layers_by_hand import *\n"
        "with stage(Path(sys.argv[1])) as staged:\n"
        "    for act in (file('sub/y'), file('sub/new'), file('a')): act(staged)\n"
        "    subprocess.run(['mount', '-t', 'tmpfs', 'none', staged.folder / 'sub'], check=True)\n"
        "    print(staged.changes())\n"
        "with stage(Path(sys.argv[1], 'other')) as staged:\n"
        "    removed('sub')(staged)\n"
        "    subprocess.run(['mount', '-t', 'tmpfs', 'none', staged.folder / 'sub/deep'], check=True)\n"
        "    print({path: rule for _, path, rule in staged.changes()})\n"
    )
    words = ("unshare", "--mount", sys.executable, "-c", code, str(tmp_path))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    one, other = map(ast.literal_eval, done.stdout.splitlines())
    assert {path: rule for _, path, rule in one} == {
        "a": "",
        "sub": "mount",
        "sub/new": "mount",
        "sub/y": "mount",
    }
    assert other["sub/deep"] == "mount" and other["sub/y"] == ""


def test_a_glance_is_bounded(staged: Staged) -> None:
    """What ran has chosen how much there is to look at."""
    for act in (file("new/c"), removed("sub"), file("a", "old a\n")):
        act(staged)
    whole = [(each.act, each.path) for each in glance(staged.changeset, JUDGE)[0]]
    assert len(whole) == 6 and glance(staged.changeset, JUDGE)[1]
    assert [len(glance(staged.changeset, JUDGE, most=most)[0]) for most in (2, 6)] == [2, 6]
    assert [glance(staged.changeset, JUDGE, most=most)[1] for most in (2, 5, 6)] == [False, False, True]
    assert glance(staged.changeset, JUDGE, seconds=0) == ([], False)


def test_only_so_many_wait(tmp_path: Path) -> None:
    for number in range(MOST_KEPT):
        (tmp_path / f"store/{number:08x}").mkdir(parents=True)
    with pytest.raises(StagingRefused, match="at most 100"), stage(tmp_path):
        pass
