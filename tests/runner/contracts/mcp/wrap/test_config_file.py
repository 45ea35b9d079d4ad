"""A configuration has the old content or the new one, whatever happens in between."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from runner.contracts.mcp.wrap.config_file import FileRefused, backups_folder, open_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "mcp.json"
    path.parent.mkdir()
    path.write_bytes(b"old")
    return path


@pytest.fixture
def backups(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "backups")


def replace(path: Path, backups: str, new: bytes = b"new") -> str:
    with open_config(str(path)) as config:
        backup, written = config.replace(lambda raw: raw + new, backups)
    assert written == path.read_bytes()
    return backup


def test_the_new_file_has_the_mode_and_the_owner_of_the_old(file: Path, backups: str) -> None:
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 12345, 54321)
    before = file.stat()
    replace(file, backups)
    after = file.stat()
    assert file.read_bytes() == b"oldnew"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino
    assert os.listdir(file.parent) == ["mcp.json"]


def test_nobody_else_can_read_a_backup(file: Path, backups: str) -> None:
    file.chmod(0o666)
    first, second = replace(file, backups), replace(file, backups)
    assert first != second
    assert Path(first).read_bytes() == b"old"
    assert Path(second).read_bytes() == b"oldnew"
    assert stat.S_IMODE(os.stat(first).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(backups).st_mode) == 0o700


def test_a_folder_that_becomes_a_link_is_not_followed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that can write to the folder above swaps it after the path was resolved."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mcp.json").write_bytes(b"of another")

    def realpath(path: str) -> str:
        found = real(path)
        if not file.parent.is_symlink():
            file.parent.rename(tmp_path / "moved")
            file.parent.symlink_to(victim)
        return found

    with open_config(str(file)) as config:
        assert config.read()[0] == b"old"  # the control
    real = os.path.realpath
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", realpath)
        with pytest.raises(FileRefused, match="was replaced"), open_config(str(file)):
            pytest.fail("it was followed")


def test_where_backups_are() -> None:
    assert backups_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == "/s/runner/backups"
    assert backups_folder({"XDG_STATE_HOME": "s", "HOME": "/h"}) == "/h/.local/state/runner/backups"


def test_a_link_stays_and_its_file_is_changed(file: Path, backups: str, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(file)
    replace(link, backups)
    assert link.is_symlink()
    assert file.read_bytes() == b"oldnew"


@pytest.mark.needs("root")
def test_a_link_to_the_file_of_another_is_refused(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(file)
    os.chown(file, 12345, 12345)
    with pytest.raises(FileRefused, match=r"a link to .*belongs to uid 12345"), open_config(str(link)):
        pass


def test_hard_links_are_refused(file: Path, backups: str) -> None:
    os.link(file, file.parent / "other")
    with pytest.raises(FileRefused, match="2 hard links"):
        replace(file, backups)
    assert file.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["", "a\0b", "missing.json", "."])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileRefused), open_config(name):
        pass


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileRefused, match="regular"), open_config(str(tmp_path / "fifo")) as config:
        config.read()


@pytest.mark.parametrize("event", ["os.rename", "shutil.never"])
def test_a_crash_before_the_rename_leaves_the_old_file(file: Path, backups: str, event: str) -> None:
    """The process ends where it would call rename(2). The second event never comes: then the file is new."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(lambda name, _: os._exit(9) if name == event else None)
        with open_config(str(file)) as config:
            config.replace(lambda raw: raw + b"new", backups)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    crashed = event == "os.rename"
    assert os.waitstatus_to_exitcode(status) == (9 if crashed else 0)
    assert file.read_bytes() == (b"old" if crashed else b"oldnew")


def test_a_failed_change_leaves_the_old_file(file: Path, backups: str) -> None:
    def change(raw: bytes) -> bytes:
        raise ValueError("no")

    with open_config(str(file)) as config, pytest.raises(ValueError, match="no"):
        config.replace(change, backups)
    assert file.read_bytes() == b"old"
    assert os.listdir(file.parent) == ["mcp.json"]


def test_no_room_for_a_backup_changes_nothing(file: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("not a folder")
    with pytest.raises(FileRefused, match="no backup can be written"):
        replace(file, str(tmp_path / "state" / "backups"))
    assert file.read_bytes() == b"old"
    assert os.listdir(file.parent) == ["mcp.json"]


@pytest.mark.parametrize("by_rename", [True, False])
def test_what_a_host_writes_meanwhile_is_kept(file: Path, backups: str, by_rename: bool) -> None:
    seen: list[bytes] = []

    def change(raw: bytes) -> bytes:
        seen.append(raw)
        if len(seen) == 1:  # the host saves its state
            target = file.with_name("new") if by_rename else file
            target.write_bytes(b"host")
            target.rename(file)
        return raw + b"+ours"

    with open_config(str(file)) as config:
        backup, _ = config.replace(change, backups)
    assert seen == [b"old", b"host"]
    assert file.read_bytes() == b"host+ours"
    assert Path(backup).read_bytes() == b"host"
    assert os.listdir(backups) == [os.path.basename(backup)]


def test_a_file_that_never_rests_is_given_up(file: Path, backups: str) -> None:
    def change(raw: bytes) -> bytes:
        file.write_bytes(raw + b".")
        return raw + b"+ours"

    with open_config(str(file)) as config, pytest.raises(FileRefused, match="keeps writing it"):
        config.replace(change, backups)
    assert file.read_bytes() == b"old....."
    assert os.listdir(file.parent) == ["mcp.json"]


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_backup(
    file: Path, backups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is mounted into a container."""

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "mcp.json")

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(FileRefused, match="cannot take its place: Device or resource busy"):
        replace(file, backups)
    assert (file.read_bytes(), os.listdir(file.parent), os.listdir(backups)) == (b"old", ["mcp.json"], [])


def test_a_full_disk_leaves_no_backup(file: Path, backups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(file, backups)
    before = os.listdir(backups)

    def full(fd: int, content: bytes) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(backups):
            os.write(fd, content[:1])
            raise OSError(errno.ENOSPC, "No space left on device")
        os.write(fd, content)

    monkeypatch.setattr("runner.contracts.mcp.wrap.config_file.write_all", full)
    with pytest.raises(FileRefused, match="No space left"):
        replace(file, backups)
    assert os.listdir(backups) == before
    assert os.listdir(file.parent) == ["mcp.json"]
    assert file.read_bytes() == b"oldnew"
