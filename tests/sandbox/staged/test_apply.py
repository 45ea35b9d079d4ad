"""From the layer to the folder: what is taken, what stays, and what somebody else does meanwhile."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

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
def test_roots_files_stay_roots(tmp_path: Path) -> None:
    """The owner of the folder puts root's folder in the place of one that is applied."""
    with stage(tmp_path, owner=SPARE_UID) as staged:
        for act in (file("a"), file("new/c"), folder("sub", 0o777)):
            act(staged)
        secret = staged.folder / "secret"
        secret.mkdir(0o700)
        (secret / "key").write_text("root's")
        (secret / "key").chmod(0o600)
        found = list(changes_of(staged.changeset, JUDGE))
        taken = {}
        for each in apply(staged.changeset, found):
            taken[each.change.path] = each.fault
            for drafts in staged.folder.glob(".runner.*"):
                assert (drafts.stat().st_uid, drafts.stat().st_mode & 0o777) == (0, 0o700)
            if each.change.path == "a":
                (staged.folder / "sub").rename(staged.folder / "sub2")
                secret.rename(staged.folder / "sub")
        assert taken["a"] == "" and taken["sub"].startswith("conflict")
        status = (staged.folder / "sub").stat()
        assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)
        assert {path.stat().st_uid for path in (staged.folder / "a", staged.folder / "new/c")} == {SPARE_UID}
