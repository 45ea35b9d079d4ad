"""Copies of packages: made of what was hashed, readable, not writable, and gone afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from runner.package import snapshot
from runner.package.fault import PackageFault
from runner.package.listing import SIGNATURE_NAME, list_package
from runner.package.snapshot import packages_folder, take_snapshot
from tests.conftest import SPARE_UID


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made in these tests, as root too."""
    place = tmp_path / "state/packages"
    monkeypatch.setattr(snapshot, "packages_folder", lambda environ: str(place))
    return place


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "package"
    for name, mode in {
        "manifest": 0o644,
        "bin/tool": 0o755,
        "bin/data": 0o600,
        SIGNATURE_NAME: 0o644,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
    (root / "empty").mkdir()
    (root / "bin").chmod(0o775)
    return root


def test_the_copy_has_the_same_files_and_cannot_be_written(folder: Path, package: Path) -> None:
    with take_snapshot(str(package), {}) as taken:
        copy = Path(taken.path)
        assert taken.listing == list_package(str(package)) == list_package(taken.path)
        assert (copy / SIGNATURE_NAME).read_text() == SIGNATURE_NAME
        assert not (copy / "empty").exists()
        modes = {
            name: (copy / name).stat().st_mode & 0o7777
            for name in ("manifest", "bin/tool", "bin/data", "bin")
        }
        assert modes == {"manifest": 0o444, "bin/tool": 0o555, "bin/data": 0o400, "bin": 0o555}
        assert copy.is_relative_to(folder)
        open_to_all = 0o711 if os.geteuid() == 0 else 0o700
        assert [path.stat().st_mode & 0o777 for path in (folder, copy.parent)] == [open_to_all] * 2
    assert os.listdir(folder) == []


def test_set_id_bits_are_not_copied(folder: Path, package: Path) -> None:
    (package / "bin/tool").chmod(0o6755)
    with take_snapshot(str(package), {}) as taken:
        assert (Path(taken.path) / "bin/tool").stat().st_mode & 0o7777 == 0o555


def test_what_changes_afterwards_is_not_in_the_copy(folder: Path, package: Path) -> None:
    with take_snapshot(str(package), {}) as taken:
        (package / "bin/tool").write_text("changed")
        assert (Path(taken.path) / "bin/tool").read_text() == "bin/tool"


def test_a_hard_link_becomes_a_file_of_its_own(folder: Path, package: Path) -> None:
    os.link(package / "bin/tool", package / "bin/same")
    with take_snapshot(str(package), {}) as taken:
        assert (Path(taken.path) / "bin/same").stat().st_nlink == 1


def test_a_package_that_cannot_be_signed_leaves_no_copy(folder: Path, package: Path) -> None:
    (package / "bin/link").symlink_to("tool")
    with pytest.raises(PackageFault, match="a symbolic link"), take_snapshot(str(package), {}):
        pass
    assert os.listdir(folder) == []


def test_an_error_later_leaves_no_copy(folder: Path, package: Path) -> None:
    with pytest.raises(KeyError), take_snapshot(str(package), {}):
        raise KeyError
    assert os.listdir(folder) == []


def test_copies_of_living_runners_stay_and_those_of_dead_ones_go(folder: Path, package: Path) -> None:
    with take_snapshot(str(package), {}) as first:
        dead = folder / f"copy.{'0123' * 8}" / "package"
        dead.mkdir(parents=True)
        (dead / "file").write_text("left by a runner that was killed")
        dead.chmod(0o500)
        with take_snapshot(str(package), {}) as second:
            assert not dead.parent.exists()
            assert first.path != second.path
            assert Path(first.path, "manifest").exists()
        assert Path(first.path, "manifest").exists()


def test_only_copies_are_swept(folder: Path, package: Path) -> None:
    others = ["my-project", "0123", "0" * 32, f"copy.{'0' * 31}", f"copy.{'0' * 32}x", f"copy.{'A' * 32}"]
    for name in others:
        (folder / name / "package").mkdir(parents=True)
    swept = folder / f"copy.{'0' * 32}"
    swept.mkdir()
    folder.chmod(0o700)
    with take_snapshot(str(package), {}) as taken:
        assert Path(taken.path).parent.name.startswith("copy.") and not swept.exists()
    assert sorted(os.listdir(folder)) == sorted(others)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, package: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    kept = target / f"copy.{'0' * 32}"
    kept.mkdir(parents=True)
    folder.parent.mkdir()
    folder.symlink_to(target)
    with pytest.raises(PackageFault, match="is a symbolic link") as refused, take_snapshot(str(package), {}):
        pass
    assert "remove the link" in refused.value.hint
    assert kept.exists()
    folder.unlink()
    target.rename(folder)
    with take_snapshot(str(package), {}):  # the control: without the link it would have been removed
        assert not (folder / kept.name).exists()


def test_a_look_can_end_the_copy(folder: Path, package: Path) -> None:
    looks = []

    def look() -> None:
        looks.append(os.listdir(folder))
        if len(looks) == 2:
            raise KeyError

    with pytest.raises(KeyError), take_snapshot(str(package), {}, look):
        pass
    assert len(looks) == 2 and looks[0] != []
    assert os.listdir(folder) == []


def test_a_file_that_is_too_large_is_not_copied_first(
    folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(snapshot, "write_all", lambda fd, data: written.append(len(data)))
    for name in ("manifest", "bin/tool", "bin/data", SIGNATURE_NAME):
        (package / name).unlink()
    with open(package / "sparse", "wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(PackageFault, match="1024 MiB together"), take_snapshot(str(package), {}):
        pass
    assert written == []


def test_the_lock_ends_with_its_process(folder: Path, package: Path) -> None:
    """As after kill -9: no code of the runner runs any more."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with take_snapshot(str(package), {}):
            os.write(write, b"x")
            os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.waitpid(child, 0)
    assert len(os.listdir(folder)) == 1
    with take_snapshot(str(package), {}):
        assert len(os.listdir(folder)) == 1
    assert os.listdir(folder) == []


def test_a_sweep_that_takes_the_new_folder_away_is_survived(
    folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            [name] = os.listdir(folder)
            os.rmdir(folder / name)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with take_snapshot(str(package), {}) as taken:
        assert Path(taken.path, "manifest").exists()
    assert len(calls) == 2


def test_a_folder_that_others_can_change_is_refused(folder: Path, package: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with (
        pytest.raises(PackageFault, match="can be changed by others") as refused,
        take_snapshot(str(package), {}),
    ):
        pass
    assert "chmod" in refused.value.hint


def test_a_place_below_a_folder_that_others_can_change_is_refused(folder: Path, package: Path) -> None:
    """They could put another tree in its place, and the copy is mounted by its path."""
    folder.mkdir(parents=True)
    with take_snapshot(str(package), {}):
        pass  # the control
    folder.parent.chmod(0o777)
    with pytest.raises(PackageFault) as refused, take_snapshot(str(package), {}):
        pass
    assert f"its directory {folder.parent} can be written by" in str(refused.value)
    assert refused.value.hint == f"chmod go-w {folder.parent}"
    folder.parent.chmod(0o1777)  # as /tmp: nobody can replace what is another's
    with take_snapshot(str(package), {}):
        pass


@pytest.mark.needs("root")
def test_a_folder_of_somebody_else_is_refused(folder: Path, package: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, SPARE_UID, SPARE_UID)
    with pytest.raises(PackageFault, match="can be changed by others"), take_snapshot(str(package), {}):
        pass


def test_a_place_that_cannot_be_made_is_named(folder: Path, package: Path) -> None:
    folder.parent.write_text("a file")
    with pytest.raises(PackageFault, match="cannot be made") as refused, take_snapshot(str(package), {}):
        pass
    assert str(folder) in str(refused.value) and refused.value.hint


def test_a_full_disk_is_named_and_leaves_nothing(
    folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_all(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot, "write_all", write_all)
    with pytest.raises(PackageFault, match="No space left") as refused, take_snapshot(str(package), {}):
        pass
    assert "make room" in refused.value.hint
    assert os.listdir(folder) == []


def test_copies_are_beside_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert packages_folder({}) == "/var/lib/runner/packages"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert packages_folder({"HOME": "/home/me"}) == "/home/me/.local/state/runner/packages"
    assert packages_folder({"XDG_STATE_HOME": "/state"}) == "/state/runner/packages"
    assert packages_folder({"XDG_STATE_HOME": "state", "HOME": "/me"}) == "/me/.local/state/runner/packages"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # there is no such user
    for environ in ({}, {"HOME": "me"}):
        with pytest.raises(PackageFault, match="HOME is not the path of a folder") as refused:
            packages_folder(environ)
        assert "XDG_STATE_HOME" in refused.value.hint
