"""Removing a directory that a plugin has filled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.identity import removal
from sandbox.identity.removal import remove_tree
from tests.conftest import SPARE_UID


def remove(path: Path, owner: int | None = None) -> None:
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        remove_tree(path.name, parent, os.geteuid() if owner is None else owner)
    finally:
        os.close(parent)


def test_deep_closed_and_linked_directories(tmp_path: Path) -> None:
    state, victim = tmp_path / "state", tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    (state / "a/b/c").mkdir(parents=True)
    (state / "a/b/c/file").touch()
    (state / "a/out").symlink_to(victim)
    (state / "to").symlink_to(victim / "file")
    os.mkfifo(state / "a/fifo")
    (state / os.fsdecode(b"\xff")).mkdir()
    here = os.getcwd()
    os.chdir(state)
    for _ in range(2000):  # deeper than Python's stack and than any limit on open files
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    for shut in ("a/b/c", "a/b"):
        (state / shut).chmod(0)
    before = os.listdir("/proc/self/fd")
    remove(state)
    assert os.listdir("/proc/self/fd") == before
    assert not state.exists() and (victim / "file").exists()


def test_two_remove_the_same_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a discard does, and a launch that finds what it has not removed yet."""
    (tmp_path / "state/a/b/c").mkdir(parents=True)
    for place in ("file", "a/file", "a/b/file"):
        (tmp_path / "state" / place).touch()

    def listed(fd: int, listdir: Callable[[int], list[str]] = os.listdir) -> list[str]:
        found = listdir(fd)
        if "b" in found:
            shutil.rmtree(tmp_path / "state")
        return found

    monkeypatch.setattr(os, "listdir", listed)
    remove(tmp_path / "state")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("what", ["a link", "somebody else's"])
def test_a_replaced_directory_stays(tmp_path: Path, what: str) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "file").touch()
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(OSError, match=r"Not a directory|replaced"):
        remove(tmp_path / "link") if what == "a link" else remove(real, os.geteuid() + 1)
    assert (real / "file").exists()


# --- what is left of somebody ------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_files_of_a_uid_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a/b/c"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    assert removal.first_owned_by(SPARE_UID, str(tmp_path)) is None  # the control
    assert removal.first_owned_by(SPARE_UID, str(tmp_path / "gone")) is None
    for place in (deep / "file", deep, tmp_path):
        os.chown(place, SPARE_UID, -1)
        assert removal.first_owned_by(SPARE_UID, str(tmp_path)) == str(place)
        os.chown(place, 0, -1)
    (deep / "link").symlink_to("/")  # not followed, and its own owner counts
    os.chown(deep / "link", SPARE_UID, -1, follow_symlinks=False)
    assert removal.first_owned_by(SPARE_UID, str(tmp_path)) == str(deep / "link")
    # What lies beyond the bound may be theirs.
    (deep / "link").unlink()
    monkeypatch.setattr(removal, "MOST_LOOKED_AT", 3)
    assert removal.first_owned_by(SPARE_UID, str(tmp_path)) == str(deep)
