"""Stand-ins: made where a name is missing, shared, and removed by the last user if nobody changed them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.paths import stand_in
from sandbox.paths.stand_in import GuardedPlace, StandInRefused, hold_places
from tests.conftest import SPARE_UID


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def places(root: int) -> list[GuardedPlace]:
    return [GuardedPlace(root, "folder"), GuardedPlace(root, "file", "{}\n")]


def test_made_and_removed(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with hold_places(places):
        assert os.listdir(tmp_path / "folder") == [] and (tmp_path / "file").read_text() == "{}\n"
    assert os.listdir(tmp_path) == []


def test_the_last_user_removes_them(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with hold_places(places):
        before = (tmp_path / "folder").stat().st_ino
        with hold_places(places):
            pass
        assert (tmp_path / "folder").stat().st_ino == before and (tmp_path / "file").exists()
    assert os.listdir(tmp_path) == []


def test_existing_files_stay(tmp_path: Path, places: list[GuardedPlace]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("{}\n")
    with hold_places(places):
        pass
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_changed_stand_ins_stay(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with hold_places(places):
        (tmp_path / "folder/x").touch()
        (tmp_path / "file").write_text("mine")
    assert (tmp_path / "folder/x").exists() and (tmp_path / "file").read_text() == "mine"


def test_replaced_stand_ins_stay(tmp_path: Path, places: list[GuardedPlace]) -> None:
    with hold_places(places):
        (tmp_path / "new").write_text("{}\n")
        os.replace(tmp_path / "new", tmp_path / "file")
        os.rmdir(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_neither_followed_nor_removed(tmp_path: Path, places: list[GuardedPlace]) -> None:
    (tmp_path / "file").symlink_to("elsewhere")
    with hold_places(places):
        pass
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("swapped", ["no", "the first", "the last", "out of it"])
def test_nothing_is_made_through_a_link_on_the_way(tmp_path: Path, swapped: str) -> None:
    """A plugin that runs swaps a folder for a link after the scan and before the names in it are made."""
    granted, victim = tmp_path / "granted", tmp_path / "victim"
    for folder in (granted, victim):
        (folder / "sub/x").mkdir(parents=True)
    places = [("sub/x/config", ""), ("sub/x/commondir", ".\n"), ("sub/x/hooks", None)]
    root = os.open(granted, os.O_PATH | os.O_DIRECTORY)
    try:
        if swapped == "the first":
            (granted / "sub").rename(granted / "old")
            (granted / "sub").symlink_to(victim / "sub")
        elif swapped == "the last":
            (granted / "sub/x").rename(granted / "old")
            (granted / "sub/x").symlink_to(victim / "sub/x")
        elif swapped == "out of it":
            places = [(f"../victim/{path}", content) for path, content in places]
        if swapped == "no":  # the control
            with hold_places([GuardedPlace(root, *place) for place in places]):
                assert sorted(os.listdir(granted / "sub/x")) == ["commondir", "config", "hooks"]
        for place in places if swapped != "no" else ():
            with pytest.raises(StandInRefused), hold_places([GuardedPlace(root, *place)]):
                pytest.fail("it was followed")
    finally:
        os.close(root)
    assert os.listdir(victim / "sub/x") == []


@pytest.mark.needs("root")
def test_a_folder_put_in_the_place_of_a_new_one_keeps_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root gives a folder it made to the owner of the folder above."""
    os.chown(tmp_path, SPARE_UID, SPARE_UID)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "private/key").touch()
    swap = False

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        real(name, mode, dir_fd=dir_fd)
        if swap:
            (tmp_path / name).rename(tmp_path / "old")
            (tmp_path / "private").rename(tmp_path / name)

    real = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir)
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    with hold_places([GuardedPlace(root, "hooks")]):
        assert (tmp_path / "hooks").stat().st_uid == SPARE_UID  # the control
    swap = True
    with hold_places([GuardedPlace(root, "hooks")]):
        pass
    os.close(root)
    assert (tmp_path / "hooks").stat().st_uid == 0 and (tmp_path / "hooks/key").exists()


def test_one_that_is_being_removed_for_ever_is_refused(
    tmp_path: Path, places: list[GuardedPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.paths.stand_in._TRIES", 3)
    (tmp_path / "folder").mkdir()
    os.utime(tmp_path / "folder", ns=(stand_in._MARK, stand_in._MARK))
    fd = os.open(tmp_path / "folder", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StandInRefused, match="folder is locked by another program"), hold_places(places):
        raise AssertionError("held what another one is removing")
    os.close(fd)
    with hold_places(places):
        assert (tmp_path / "file").exists()


def test_a_lock_on_what_was_there_before_stops_nobody(tmp_path: Path, places: list[GuardedPlace]) -> None:
    """A plugin that may read a file can lock it, too."""
    (tmp_path / "file").write_text("of a person")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with hold_places(places):
        assert (tmp_path / "folder").is_dir()
    os.close(fd)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "of a person"


def test_half_of_one_is_not_left(
    tmp_path: Path, places: list[GuardedPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr("sandbox.paths.stand_in.write_all", full)
    with pytest.raises(StandInRefused, match="No space left"), hold_places(places):
        raise AssertionError("held what could not be made")
    assert os.listdir(tmp_path) == []


def test_a_file_of_the_same_second_is_nobodys_stand_in(tmp_path: Path, places: list[GuardedPlace]) -> None:
    (tmp_path / "file").write_text("{}\n")
    second = stand_in._MARK // 10**9 * 10**9
    os.utime(tmp_path / "file", ns=(second, second))
    with hold_places(places):
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

    with hold_places(places):
        monkeypatch.setattr(os, "rename", late)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "of the host" and (tmp_path / "folder/sub").is_dir()
