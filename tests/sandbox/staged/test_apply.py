"""From the layer to the folder: what is taken, what stays, and what somebody else does meanwhile."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandbox.staged.apply import apply, recover
from sandbox.staged.journal import Journal
from sandbox.staged.layer import Change, changes_of
from sandbox.staged.store import ChangesetInUse, locked
from tests.conftest import SPARE_UID
from tests.layers_by_hand import JUDGE, Staged, file, folder, link, removed, stage


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    with stage(tmp_path) as found:
        yield found


def take(
    staged: Staged, forced: Collection[str] = (), meanwhile: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Apply everything. Returns what was not applied, with the reason. `meanwhile`: after the comparison."""
    recover(staged.changeset)
    found = list(changes_of(staged.changeset, JUDGE))
    meanwhile()
    places = [str(staged.folder / path) for path in forced]
    return {each.change.path: each.fault for each in apply(staged.changeset, found, places) if each.fault}


def tree(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else None
        if path.is_dir()
        else path.read_text()
        for path in sorted(folder.rglob("*"))
    }


def test_everything_once_and_then_nothing(staged: Staged) -> None:
    acts = (
        *(file("a"), file("b", "old b\n", 0o755), file("new/c/d"), folder("closed", 0o555), file("sub")),
        *(link("to_a", "b"), removed("gone")),
    )
    for act in acts:
        act(staged)
    (staged.layer / "closed").chmod(0o755)
    file("closed/e")(staged)
    (staged.layer / "closed").chmod(0o555)
    assert take(staged) == {} and staged.changes() == []
    assert tree(staged.folder) == {
        "a": "new\n",
        "b": "old b\n",
        "closed": None,
        "closed/e": "new\n",
        "new": None,
        "new/c": None,
        "new/c/d": "new\n",
        "sub": "new\n",
        "to_a": "b",
    }
    assert [(staged.folder / name).stat().st_mode & 0o777 for name in ("b", "closed")] == [0o755, 0o555]
    assert take(staged) == {}
    (staged.folder / "closed").chmod(0o755)
    (staged.layer / "closed").chmod(0o755)


def test_what_a_file_has_beside_its_content(tmp_path: Path) -> None:
    """Holes and attributes of users are the new file's."""
    (tmp_path / "folder").mkdir()
    old = tmp_path / "folder/a"
    old.touch()
    os.setxattr(old, "user.old", b"1")
    with stage(tmp_path) as staged:
        file("a")(staged)
        new = staged.layer / "a"
        os.setxattr(new, "user.new", b"2")
        os.setxattr(new, "user.overlay.origin", b"x")
        with new.open("r+b") as sparse:
            sparse.truncate(1 << 30)
            sparse.seek(1 << 29)
            sparse.write(b"in the middle")
        assert take(staged) == {}
    assert os.listxattr(old) == ["user.new"]
    assert old.stat().st_size == 1 << 30 and old.stat().st_blocks < 1000
    with old.open("rb") as found:
        found.seek(1 << 29)
        assert found.read(13) == b"in the middle"


def test_refusals_are_taken_by_name(staged: Staged) -> None:
    acts = (
        *(file(".git/hooks/pre-commit"), file("s", mode=0o4755), link("out", "/etc/passwd"), file(".ssh")),
        *(link("sub/out", "../../x"), file("fine")),
    )
    for act in acts:
        act(staged)
    os.mkfifo(staged.layer / "fifo")
    left = {".git", ".git/hooks", ".git/hooks/pre-commit", "s", "out", ".ssh", "sub/out", "fifo"}
    assert set(take(staged)) == left and (staged.folder / "fine").exists()
    assert not left & {str(path.relative_to(staged.folder)) for path in staged.folder.rglob("*")}
    # Names that only begin alike are others.
    assert set(take(staged, forced=("ou", "su", "su/"))) == left
    assert set(take(staged, forced=("s", "out", ".ssh", ".git/", "fifo", "sub"))) == {".ssh"}
    assert (staged.folder / ".git/hooks/pre-commit").read_text() == "new\n"
    assert (staged.folder / "s").stat().st_mode & 0o7777 == 0o4755
    assert stat.S_ISFIFO((staged.folder / "fifo").stat().st_mode)


def test_what_changes_while_it_is_applied_stays(staged: Staged, tmp_path: Path) -> None:
    for act in (file("a"), removed("b"), file("made"), removed("sub/deep"), file("new/c"), file("sub/y")):
        act(staged)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def meanwhile() -> None:
        for name in ("a", "b", "made", "sub/deep/y"):
            (staged.folder / name).write_text("somebody's\n")
        (staged.folder / "new").symlink_to(elsewhere)  # leads out of the folder

    left = take(staged, meanwhile=meanwhile)
    assert set(left) == {"a", "b", "made", "sub/deep", "new", "new/c"}
    assert {tree(staged.folder)[name] for name in ("a", "b", "made", "sub/deep/y")} == {"somebody's\n"}
    assert os.listdir(elsewhere) == [] and (staged.folder / "sub/y").read_text() == "new\n"
    assert not [name for name in os.listdir(staged.folder) if name.startswith(".runner")]


def test_what_a_killed_application_left_is_found(tmp_path: Path) -> None:
    """After the exchange of names: the draft is the old file. Once as it was, once as somebody had changed it
    in that moment."""
    for somebodys, expected in (("", "new\n"), ("somebody's work\n", "somebody's work\n")):
        with stage(tmp_path / str(bool(somebodys))) as staged:
            file("a")(staged)
            [change] = changes_of(staged.changeset, JUDGE)
            new, drafts = staged.folder / "a", staged.folder / ".runner.0123"
            drafts.mkdir(0o700)
            new.rename(drafts / "draft")
            new.write_text("new\n")
            if somebodys:
                (drafts / "draft").write_text(somebodys)
            journal = Journal(staged.changeset)
            journal.note("drafts", 0, drafts.name, drafts.stat().st_ino)
            journal.note("draft", 0, "a", change.before)
            journal.close()
            with open(staged.changeset.journal, "a") as end:
                end.write('["draft", 7, "a", null]\n[]\n["draft", 0, "b", [1')  # of hands that are not ours
            take(staged)
            assert not drafts.exists() and new.read_text() == expected


def test_only_one_applies_and_nobody_while_it_runs(staged: Staged) -> None:
    with pytest.raises(ChangesetInUse), locked(staged.changeset):
        pass  # its launch holds the lock


def test_a_folder_that_is_not_taken_takes_nothing(staged: Staged) -> None:
    file("new/c")(staged)
    found: list[Change] = [each for each in changes_of(staged.changeset, JUDGE) if each.path == "new/c"]
    assert [each.fault for each in apply(staged.changeset, found)] == ["No such file or directory"]


def test_folders_that_somebody_has_swapped(tmp_path: Path) -> None:
    """Their files have old times: only the folders tell."""
    other = tmp_path / "other"
    for name in ("kept", "y", "deep/x"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("somebody's\n")
    for act in (removed("sub"), file("sub/y")):
        with stage(tmp_path / os.urandom(4).hex()) as staged:
            act(staged)
            (staged.folder / "sub").rename(tmp_path / os.urandom(4).hex())
            shutil.copytree(other, place := tmp_path / os.urandom(4).hex(), copy_function=shutil.copy2)
            began = staged.changeset.began
            place.rename(staged.folder / "sub")
            assert began and set(take(staged)) >= {"sub/y"}
            assert tree(staged.folder / "sub") == tree(other)
            # Nor the second time: what was applied meanwhile is not what counts.
            assert set(take(staged)) >= {"sub/y"} and tree(staged.folder / "sub") == tree(other)


def test_a_conflict_stays_one(staged: Staged) -> None:
    file("lost")(staged)
    file("other")(staged)
    os.setxattr(staged.layer / "lost", "user.overlay.origin", b"")
    (staged.folder / "x").touch()  # somebody changes the folder
    assert set(take(staged)) == {"lost"} and set(take(staged)) == {"lost"}
    assert not (staged.folder / "lost").exists()


def test_several_names_of_one_file(tmp_path: Path) -> None:
    """In the folder, where one is replaced, and in the layer, which they would fill many times."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/b").touch()
    os.link(tmp_path / "folder/b", tmp_path / "folder/b2")
    with stage(tmp_path) as staged:
        for act in (file("b"), file("b2"), file("l1")):
            act(staged)
        for name in ("l2", "l3"):
            os.link(staged.layer / "l1", staged.layer / name)
        found = list(changes_of(staged.changeset, JUDGE))
        first = [each for each in found if each.path == "b"]
        assert [each.fault for each in apply(staged.changeset, first)] == [""]
        assert take(staged) == {} and (staged.folder / "b2").read_text() == "new\n"
        assert (staged.folder / "l3").stat().st_nlink == 3


def test_half_of_another_kind(staged: Staged) -> None:
    """The folder is gone and the file is not there yet."""
    file("sub")(staged)
    found = list(changes_of(staged.changeset, JUDGE))
    assert [each.fault for each in apply(staged.changeset, [each for each in found if each.act == "D"])] == [
        ""
    ] * 4
    assert take(staged) == {} and (staged.folder / "sub").read_text() == "new\n"


@pytest.mark.needs("root")
@pytest.mark.parametrize("name", ["sub", "new"])  # that was there, and that was made
def test_roots_files_stay_roots(tmp_path: Path, name: str) -> None:
    """The owner of the folder puts root's folder in the place of one that is applied."""
    with stage(tmp_path, owner=SPARE_UID, roots=("b",)) as staged:
        for act in (file("a"), file("b"), file("new/c"), folder("sub", 0o777)):
            act(staged)
        secret = staged.folder / "secret"
        secret.mkdir(0o700)
        found = list(changes_of(staged.changeset, JUDGE))
        taken = {}
        for each in apply(staged.changeset, found):
            taken[each.change.path] = each.fault
            [drafts] = staged.folder.glob(".runner.*")
            assert (drafts.stat().st_uid, drafts.stat().st_mode & 0o777) == (0, 0o700)
            if each.change.path == "new/c":  # the modes of folders come last
                (staged.folder / name).rename(staged.folder / "away")
                secret.rename(staged.folder / name)
        assert taken["a"] == "" and taken[name].startswith("conflict")
        status = (staged.folder / name).stat()
        assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)
        # What was root's and is replaced is the owner's: its content is.
        assert {(staged.folder / each).stat().st_uid for each in ("a", "b")} == {SPARE_UID}


# What somebody does just before a name of the folder is taken or given: by number, from 1.
def _during(monkeypatch: pytest.MonkeyPatch, acts: dict[int, Callable[[], object]]) -> None:
    import sandbox.staged.apply as module

    real, numbers = module._rename, itertools.count(1)

    def rename(*words: Any) -> None:
        acts.get(next(numbers), lambda: None)()
        real(*words)

    monkeypatch.setattr(module, "_rename", rename)


def _saves(path: Path, text: str) -> Callable[[], object]:
    """As editors do: a new file is renamed to its place."""

    def act() -> None:
        (path.parent / "saved").write_text(text)
        (path.parent / "saved").rename(path)

    return act


@pytest.mark.parametrize(
    ("removes", "acts", "expected"),
    [
        (False, {1: "in place"}, "one\n"),
        (False, {1: "saved"}, "one\n"),
        (False, {1: "saved", 2: "saved"}, "two\n"),  # the newest stays
        (True, {1: "in place"}, "one\n"),
        (True, {1: "saved"}, "one\n"),
        (True, {1: "in place", 2: "saved"}, "two\n"),  # and the other is beside it
    ],
)
def test_somebody_writes_between_two_steps(
    staged: Staged, monkeypatch: pytest.MonkeyPatch, removes: bool, acts: dict[int, str], expected: str
) -> None:
    (removed("a") if removes else file("a"))(staged)
    path, texts = staged.folder / "a", {1: "one\n", 2: "two\n"}
    found = list(changes_of(staged.changeset, JUDGE))
    _during(
        monkeypatch,
        {
            number: partial(path.write_text, texts[number])
            if how == "in place"
            else _saves(path, texts[number])
            for number, how in acts.items()
        },
    )
    [done] = apply(staged.changeset, found)
    assert done.fault and path.read_text() == expected
    kept = [each.read_text() for each in staged.folder.glob(".runner.*.kept")]
    assert kept == (["one\n"] if removes and len(acts) == 2 else [])
    assert not [each for each in staged.folder.glob(".runner.*") if each.is_dir()]


def test_somebody_elses_folder_in_the_place_of_our_drafts(staged: Staged) -> None:
    """Nothing in it is touched, whatever its name is."""
    other = staged.folder / ".runner.0123"
    other.mkdir()
    (other / "draft").write_text("somebody's")
    journal = Journal(staged.changeset)
    journal.note("drafts", 0, other.name, other.stat().st_ino + 1)
    journal.note("draft", 0, "a", None)
    journal.close()
    recover(staged.changeset)
    assert (other / "draft").read_text() == "somebody's"
