"""Stand-ins: made where a name is missing, shared, and removed by the last user if nobody changed them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.paths import stand_in
from sandbox.paths.stand_in import GuardedPlace, StandInRefused, held_places


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def places(root: int) -> list[GuardedPlace]:
    return [GuardedPlace(root, "folder"), GuardedPlace(root, "file", "{}\n")]


def test_made_and_removed(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with held_places(places):
        assert os.listdir(tmp_path / "folder") == [] and (tmp_path / "file").read_text() == "{}\n"
    assert os.listdir(tmp_path) == []


def test_the_last_user_removes_them(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with held_places(places):
        before = (tmp_path / "folder").stat().st_ino
        with held_places(places):
            pass
        assert (tmp_path / "folder").stat().st_ino == before and (tmp_path / "file").exists()
    assert os.listdir(tmp_path) == []


def test_what_is_there_stays(tmp_path: Path, places: list[GuardedPlace]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("{}\n")
    with held_places(places):
        pass
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_what_was_changed_stays(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with held_places(places):
        (tmp_path / "folder/x").touch()
        (tmp_path / "file").write_text("mine")
    assert (tmp_path / "folder/x").exists() and (tmp_path / "file").read_text() == "mine"


def test_what_was_replaced_stays(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with held_places(places):
        (tmp_path / "new").write_text("{}\n")
        os.replace(tmp_path / "new", tmp_path / "file")
        os.rmdir(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_neither_followed_nor_removed(tmp_path: Path, places: list[GuardedPlace]) -> None:
    (tmp_path / "file").symlink_to("elsewhere")
    with held_places(places):
        pass
    assert os.listdir(tmp_path) == ["file"]


def test_one_that_is_being_removed_for_ever_is_refused(
    tmp_path: Path, places: list[GuardedPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.paths.stand_in._TRIES", 3)
    (tmp_path / "folder").mkdir()
    os.utime(tmp_path / "folder", ns=(stand_in._MARK, stand_in._MARK))
    fd = os.open(tmp_path / "folder", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StandInRefused, match="folder is locked by another program"), held_places(places):
        raise AssertionError("held what another one is removing")
    os.close(fd)
    with held_places(places):
        assert (tmp_path / "file").exists()


def test_a_lock_on_what_was_there_before_stops_nobody(tmp_path: Path, places: list[GuardedPlace]) -> None:
    """A plugin that may read a file can lock it, too."""
    (tmp_path / "file").write_text("of a person")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with held_places(places):
        assert (tmp_path / "folder").is_dir()
    os.close(fd)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "of a person"


def test_half_of_one_is_not_left(
    tmp_path: Path, places: list[GuardedPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr("sandbox.paths.stand_in.write_all", full)
    with pytest.raises(StandInRefused, match="No space left"), held_places(places):
        raise AssertionError("held what could not be made")
    assert os.listdir(tmp_path) == []


def test_a_file_of_the_same_second_is_nobodys_stand_in(tmp_path: Path, places: list[GuardedPlace]) -> None:
    (tmp_path / "file").write_text("{}\n")
    second = stand_in._MARK // 10**9 * 10**9
    os.utime(tmp_path / "file", ns=(second, second))
    with held_places(places):
        pass
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_host_renames_over_it_at_the_last_moment_stays(
    tmp_path: Path, places: list[GuardedPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def late(source: str, target: str, **places: int) -> None:
        if source == "file":
            (tmp_path / "new").write_text("of the host")
            os.replace(tmp_path / "new", tmp_path / "file")
        if source == "folder":
            os.rmdir(tmp_path / "folder")
            (tmp_path / "folder/sub").mkdir(parents=True)
        real(source, target, **places)

    with held_places(places):
        monkeypatch.setattr(os, "rename", late)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "of the host" and (tmp_path / "folder/sub").is_dir()
