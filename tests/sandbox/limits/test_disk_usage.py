"""Counting the bytes in a folder, on real filesystems, also while its owner changes it."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.limits.disk_usage import DEPTH_LIMIT, ENTRY, Size, occupied, size
from tests import elsewhere
from tests.conftest import Caller
from tests.tables import REPEAT, wait_for

MIB = 1 << 20


def measured(place: str, enough: int = 1 << 40) -> tuple[int, list[int], str]:
    """Bytes, devices and fault. Also run in other processes."""
    import os

    from sandbox.limits.disk_usage import size

    fd = os.open(place, os.O_PATH)
    steps = size(fd, enough)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        used, devices, fault = end.value
        return used, list(devices), fault
    finally:
        os.close(fd)


def counted(path: Path, enough: int = 1 << 40) -> Size:
    used, devices, fault = measured(str(path), enough)
    return Size(used, frozenset(devices), fault)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder; afterwards no descriptor may be left open."""
    before = len(os.listdir("/proc/self/fd"))
    folder = tmp_path / "folder"
    folder.mkdir()
    yield folder
    assert len(os.listdir("/proc/self/fd")) == before
    subprocess.run(["rm", "-rf", folder], check=True)  # deeper than shutil can go


def blocks(path: Path) -> int:
    return path.lstat().st_blocks * 512


# --- What counts -------------------------------------------------------------------------------------------


def test_files_count_with_their_blocks_at_every_depth(place: Path) -> None:
    (place / "sub" / "below").mkdir(parents=True)
    (place / "one").write_bytes(b"x" * MIB)
    (place / "sub" / "below" / "two").write_bytes(b"x" * 2 * MIB)
    found = counted(place)
    assert 3 * MIB + 2 * ENTRY <= found.used <= 3 * MIB + 8 * ENTRY
    assert found.devices == {place.stat().st_dev} and not found.fault


def test_a_single_file_counts_like_a_folder_with_it(place: Path) -> None:
    (place / "one").write_bytes(b"x" * MIB)
    assert counted(place / "one").used == blocks(place / "one") == MIB


def test_a_hole_is_free(place: Path) -> None:
    with open(place / "sparse", "wb") as file:
        file.truncate(1 << 33)
        file.seek(1 << 32)
        file.write(b"x")
    assert counted(place).used <= 4 * ENTRY


def test_a_file_counts_once_and_each_of_its_names_a_little(place: Path) -> None:
    (place / "one").write_bytes(b"x" * MIB)
    alone = counted(place).used
    for number in range(9):
        os.link(place / "one", place / f"link{number}")
    assert counted(place).used == alone + 9 * ENTRY


def test_every_name_counts(place: Path) -> None:
    empty = counted(place).used
    (place / "file").touch()
    (place / "directory").mkdir()
    (place / "link").symlink_to("/usr")
    os.mkfifo(place / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place / "socket"))
    os.close(os.open(os.fsencode(place) + b"/no \xff utf-8\n", os.O_CREAT | os.O_WRONLY))
    assert counted(place).used == empty + 6 * ENTRY


def test_links_are_not_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_bytes(b"x" * MIB)
    (place / "directory").symlink_to(tmp_path / "elsewhere")
    (place / "file").symlink_to(tmp_path / "elsewhere" / "big")
    (place / "self").symlink_to(".")
    assert counted(place).used < MIB
    assert counted(tmp_path / "elsewhere").used >= MIB


def test_counting_ends_when_it_is_enough(place: Path) -> None:
    for number in range(2000):
        (place / str(number)).touch()
    assert counted(place).used > 2000 * ENTRY
    found = counted(place, enough=100 * ENTRY)
    assert 100 * ENTRY < found.used <= 101 * ENTRY


def test_exactly_enough_is_not_more(place: Path) -> None:
    (place / "one").write_bytes(b"x" * MIB)
    used = counted(place).used
    assert counted(place, enough=used).used == used
    assert counted(place, enough=used - 1).used > used - 1


def test_counting_goes_in_steps_and_can_be_abandoned(place: Path) -> None:
    for number in range(1000):
        (place / str(number)).touch()
        (place / f"d{number}" / "e").mkdir(parents=True)
    fd = os.open(place, os.O_PATH)
    steps = size(fd, 1 << 40)
    assert len(list(itertools.islice(steps, 500))) == 500
    steps.close()  # the fixture counts the descriptors
    os.close(fd)


@pytest.mark.parametrize(
    ("taken", "length", "counts"),
    [
        (MIB, MIB, MIB),
        (2 * MIB, MIB, MIB),  # as XFS reserves for a file that grows
        (2 * MIB, MIB - 1, MIB),
        (3 * MIB, MIB, 3 * MIB),  # that is no speculation any more
        (64 << 10, 1, ENTRY),
        (MIB, 1 << 33, MIB),  # a hole
        (0, 0, 0),
    ],
)
def test_what_xfs_reserves_ahead_does_not_count(taken: int, length: int, counts: int) -> None:
    assert occupied(taken, length, preallocates=True) == counts
    assert occupied(taken, length, preallocates=False) == taken


# --- Whoever owns the folder does not want to be counted --------------------------------------------------


def test_a_tree_without_end_is_a_fault(place: Path) -> None:
    """Five thousand levels: neither the stack nor the descriptors run out."""
    before = os.getcwd()
    os.chdir(place)
    try:
        for _ in range(DEPTH_LIMIT):
            os.mkdir("d")
            os.chdir("d")
        assert not counted(place).fault
        for _ in range(5000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(before)
    assert counted(place).fault == f"it is nested more than {DEPTH_LIMIT} directories deep"


STORM = """
import os, time
os.chdir(os.sys.argv[1])
print(flush=True)
until = time.monotonic() + 300
while time.monotonic() < until:
    for here, there in (("a", "b"), ("b", "a")):
        os.rename(f"{here}/big", f"{there}/big")
        os.rename(f"{here}/tree", f"{there}/tree")
        os.mkdir("new"); os.rmdir("new")
        open("short", "w").close(); os.unlink("short")
"""


def test_a_file_moved_while_counting_counts_at_most_once(place: Path) -> None:
    for name in ("a", "b"):
        for number in range(100):
            (place / name / str(number)).mkdir(parents=True)
    (place / "a" / "big").write_bytes(b"x" * 8 * MIB)
    (place / "a" / "tree").mkdir()
    for number in range(2000):
        (place / "a" / "tree" / str(number)).touch()
    used = counted(place).used
    with subprocess.Popen([sys.executable, "-c", STORM, place], stdout=subprocess.PIPE) as storm:
        try:
            elsewhere.line(storm)
            seen = [counted(place) for _ in range(60 * REPEAT)]

            def differ() -> bool:
                seen.append(counted(place))
                return len({found.used for found in seen}) > 1

            # The storm is one: some are counted while they are under way, not where they had been.
            assert wait_for(differ)
        finally:
            storm.kill()
    assert not [found.fault for found in seen if found.fault]
    assert max(found.used for found in seen) < used + 4 * MIB


def closed_to_us(place: str) -> list[str]:
    """The result for a folder that a process with our own uid has closed in different ways."""
    import os

    said = []
    os.makedirs(f"{place}/hidden\n/deeper")
    open(f"{place}/hidden\n/file", "w").close()
    for mode in (0o700, 0o000, 0o300, 0o600, 0o500):
        os.chmod(f"{place}/hidden\n", mode)
        said.append(measured(place)[2])
    os.chmod(f"{place}/hidden\n", 0o700)
    return said


@pytest.mark.needs("user")
def test_a_directory_its_owner_has_closed_is_a_fault(runner_as_user: Caller) -> None:
    folder = runner_as_user.home / "tmp" / "folder"
    folder.mkdir()
    runner_as_user.give(folder)
    open_, closed, unlisted, listed, readable = elsewhere.run(
        runner_as_user, closed_to_us, str(folder), using=(measured,)
    )
    assert open_ == readable == ""
    assert closed == unlisted == "'hidden\\n' cannot be listed: Permission denied"
    assert listed == "'hidden\\n' cannot be entered: Permission denied"
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.mark.needs("root")
def test_root_counts_closed_directories(place: Path) -> None:
    (place / "hidden").mkdir()
    (place / "hidden" / "big").write_bytes(b"x" * MIB)
    (place / "hidden").chmod(0o000)
    assert counted(place).used > MIB and not counted(place).fault


@pytest.mark.needs("root", "user")
def test_a_directory_closed_to_the_plugin_counts_nothing(runner_as_user: Caller, plugin_dir: Path) -> None:
    """Another user's directory, such as a database in the user's project."""
    theirs = plugin_dir / "theirs"
    theirs.mkdir()
    theirs.chmod(0o700)
    assert elsewhere.run(runner_as_user, measured, str(plugin_dir))[2] == ""
    theirs.chmod(0o711)  # they can go in, and somewhere below may be a directory they can write
    assert "cannot be listed" in elsewhere.run(runner_as_user, measured, str(plugin_dir))[2]


# --- Mounts ------------------------------------------------------------------------------------------------


def mounted(place: str) -> list[int]:
    """Sizes of a folder with a filesystem mounted in it: before, writable, and read-only."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    below = os.fsencode(f"{place}/below")
    os.mkdir(below)
    assert libc.unshare(0x20000) == 0
    assert libc.mount(None, b"/", None, 0x4000 | 0x40000, None) == 0
    sizes = [measured(place)[0]]
    assert libc.mount(b"t", below, b"tmpfs", 0, None) == 0
    with open(below + b"/file", "wb") as file:
        file.write(b"x" * (1 << 20))
    sizes.append(measured(place)[0])
    assert libc.mount(None, below, None, 0x20 | 1, None) == 0
    sizes.append(measured(place)[0])
    return sizes


@pytest.mark.needs("root")
def test_a_mount_below_counts_if_it_is_writable(runner_as_root: Caller, plugin_dir: Path) -> None:
    without, writable, readonly = elsewhere.run(runner_as_root, mounted, str(plugin_dir), using=(measured,))
    assert without == readonly
    assert writable == without + MIB
