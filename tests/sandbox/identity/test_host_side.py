"""The folder in which a host keeps things for a plugin: where it is, made for us alone, through no link."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.identity.host_side import (
    FOLDER,
    HostSideRefused,
    host_side,
    host_sides,
    is_host_side,
    open_host_side,
    remove_host_side,
)
from sandbox.paths.walk import LinkRefused


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "place/plugin.0123"
    path.mkdir(parents=True)
    return path


@pytest.fixture(autouse=True)
def _no_open_files_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def test_it_lies_beside_the_state_directory(state: Path) -> None:
    assert host_sides(str(state)) == f"{state.parent}/{FOLDER}"
    assert host_side(str(state)) == f"{state.parent}/{FOLDER}/{state.name}"
    assert is_host_side(host_side(str(state))) and not is_host_side(str(state))


def test_it_is_made_on_request_for_us_alone(state: Path) -> None:
    with open_host_side(str(state)) as folder:
        assert folder is None
    assert os.listdir(state.parent) == [state.name]
    before = os.umask(0)
    try:
        for _ in range(2):
            with open_host_side(str(state), make=True) as folder:
                assert folder is not None
                found = os.fstat(folder)
    finally:
        os.umask(before)
    made = Path(host_side(str(state)))
    assert (made.stat().st_dev, made.stat().st_ino) == (found.st_dev, found.st_ino)
    for each in (made, made.parent):
        assert (each.stat().st_mode & 0o7777, each.stat().st_uid) == (0o700, os.geteuid())


def test_no_folder_is_made_around_it(tmp_path: Path) -> None:
    with open_host_side(str(tmp_path / "none/state")) as folder:
        assert folder is None
    with pytest.raises(FileNotFoundError), open_host_side(str(tmp_path / "none/state"), make=True):
        pytest.fail("it was made")
    remove_host_side(str(tmp_path / "none/state"))
    assert os.listdir(tmp_path) == []


def put_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


@pytest.mark.parametrize("which", [host_side, host_sides])
@pytest.mark.parametrize(
    ("change", "message"),
    [(put_link, "is not a folder"), (lambda path: path.chmod(0o750), "is open to other users (mode 750)")],
    ids=["link", "open"],
)
@pytest.mark.parametrize("make", [False, True])
def test_what_is_not_ours_alone_is_refused(
    state: Path, which: Callable[[str], str], change: Callable[[Path], None], message: str, make: bool
) -> None:
    with open_host_side(str(state), make=True):
        pass
    change(Path(which(str(state))))
    with pytest.raises(HostSideRefused) as caught, open_host_side(str(state), make=make):
        pytest.fail("it was opened")
    assert message in str(caught.value)


@pytest.mark.needs("root")
@pytest.mark.parametrize("which", [host_side, host_sides])
def test_what_belongs_to_somebody_else_is_refused(state: Path, which: Callable[[str], str]) -> None:
    with open_host_side(str(state), make=True):
        pass
    os.chown(which(str(state)), 1234, 1234)
    with pytest.raises(HostSideRefused, match="belongs to uid 1234"), open_host_side(str(state)):
        pytest.fail("it was opened")


def test_a_link_on_the_way_is_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(state.parent)
    with pytest.raises(LinkRefused), open_host_side(str(tmp_path / "link" / state.name), make=True):
        pytest.fail("it was opened")
    assert os.listdir(state.parent) == [state.name]


def test_it_is_removed_and_those_of_others_stay(state: Path) -> None:
    other = state.with_name("other")
    for each in (state, other):
        with open_host_side(str(each), make=True):
            pass
        Path(host_side(str(each)), "file").touch()
    remove_host_side(str(state))
    assert os.listdir(host_sides(str(state))) == ["other"]
    remove_host_side(str(state))  # there is none
    remove_host_side(str(other))
    assert os.listdir(state.parent) == [state.name]


def test_a_folder_that_is_not_ours_loses_nothing(state: Path) -> None:
    """Somebody else's folder may have the same name."""
    folder = Path(host_side(str(state)))
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    (folder / "file").touch()
    remove_host_side(str(state))
    assert (folder / "file").exists()
