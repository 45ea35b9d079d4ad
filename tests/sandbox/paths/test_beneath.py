"""Paths below a directory: with openat2 and without it, no link leads out."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.paths import beneath
from sandbox.paths.beneath import Escapes, open_beneath, walk_beneath

Opener = Callable[..., int]
BOTH = pytest.mark.parametrize("opener", [open_beneath, walk_beneath])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with files and links, and beside it what must not be reached."""
    inside = tmp_path / "inside"
    (inside / "sub" / "deep").mkdir(parents=True)
    (inside / "file").write_text("inside")
    (inside / "sub" / "other").write_text("other")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "inside-evil").mkdir()
    (tmp_path / "inside-evil" / "file").write_text("secret")
    links = {
        "to_file": "file",
        "to_sub": "sub",
        "sub/up": "../file",
        "sub/deep/up_twice": "../../file",
        "around": "sub/../file",
        "absolute": f"{inside}/file",
        "absolute_around": f"{inside}/sub/../file",
        "chain": "to_file",
        "out": "../secret",
        "out_absolute": f"{tmp_path}/secret",
        "out_evil": f"{tmp_path}/inside-evil/file",
        "out_and_back": "../inside/file",
        "out_around": f"{inside}/../secret",
        "out_dir": "..",
        "loop": "loop",
        "magic": "/proc/self/root",
        "dangling": "nothing",
    }
    for name, target in links.items():
        (inside / name).symlink_to(target)
    return inside


@pytest.fixture
def folder(tree: Path) -> Iterator[int]:
    fd = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    before = set(os.listdir("/proc/self/fd"))
    yield fd
    assert set(os.listdir("/proc/self/fd")) == before  # nothing stays open
    os.close(fd)


def content(fd: int) -> str:
    try:
        with open(f"/proc/self/fd/{fd}") as file:
            return file.read()
    finally:
        os.close(fd)


@BOTH
@pytest.mark.parametrize(
    "path",
    [
        *("file", "./file", "sub/../file", "to_file", "sub/up", "to_sub/up", "sub/deep/up_twice", "around"),
        *("chain", "absolute", "absolute_around", "sub//../file"),
    ],
)
def test_paths_that_stay_inside_are_opened(tree: Path, folder: int, opener: Opener, path: str) -> None:
    assert content(opener(folder, path, (str(tree),))) == "inside"


@BOTH
@pytest.mark.parametrize(
    "path",
    [
        *("..", "../secret", "sub/../../secret", "out", "out_absolute", "out_evil", "out_and_back"),
        *("out_around", "out_dir", "out_dir/secret", "to_sub/../../secret", "magic", "magic/etc/passwd"),
    ],
)
def test_paths_that_lead_out_are_refused(tree: Path, folder: int, opener: Opener, path: str) -> None:
    with pytest.raises(Escapes):
        opener(folder, path, (str(tree),))


@BOTH
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nothing", FileNotFoundError),
        ("dangling", FileNotFoundError),
        ("file/x", NotADirectoryError),
        ("loop", OSError),
    ],
)
def test_errors_of_the_system(
    tree: Path, folder: int, opener: Opener, path: str, error: type[OSError]
) -> None:
    with pytest.raises(error):
        opener(folder, path, (str(tree),))


@BOTH
def test_the_directory_itself(tree: Path, folder: int, opener: Opener) -> None:
    fd = opener(folder, "", (str(tree),))
    try:
        assert os.path.samestat(os.fstat(fd), os.fstat(folder))
    finally:
        os.close(fd)


def test_a_folder_of_proc_leads_nowhere(tmp_path: Path) -> None:
    """Magic links do not lead out, even if their text looks like an ordinary path."""
    folder = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    try:
        for opener in (open_beneath, walk_beneath):
            for path in ("root/etc/passwd", "cwd", "exe", f"fd/{folder}"):
                with pytest.raises((Escapes, OSError)):
                    opener(folder, path, ("/proc/self",))
        # The control: the kernel follows them for everybody else.
        assert os.path.exists("/proc/self/root/etc/passwd")
    finally:
        os.close(folder)


def test_a_walk_holds_a_bounded_number_of_descriptors(tree: Path, folder: int) -> None:
    here = os.open(tree, os.O_PATH)
    for _ in range(257):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_PATH, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        walk_beneath(folder, "d/" * 257)
    os.close(walk_beneath(folder, "d/" * 256))  # the control
    os.close(walk_beneath(folder, "sub/../" * 300))


def test_without_the_system_call_the_walk_takes_over(
    tree: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beneath, "_SYS_OPENAT2", 999_999)
    assert content(open_beneath(folder, "to_sub/up", (str(tree),))) == "inside"
    with pytest.raises(Escapes):
        open_beneath(folder, "out", (str(tree),))


@BOTH
def test_a_race_against_changing_links_is_never_lost(tmp_path: Path, opener: Opener) -> None:
    """A thread puts in turns a folder and a link to the outside under the same name."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for each in (inside / "good", outside):
        each.mkdir(parents=True)
    (inside / "good" / "file").write_text("inside")
    (outside / "file").write_text("secret")
    (inside / "evil").symlink_to(outside)
    name = inside / "name"
    os.rename(inside / "good", name)
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            os.rename(name, inside / "aside")
            os.rename(inside / "evil", name)
            os.rename(name, inside / "evil")
            os.rename(inside / "aside", name)

    folder = os.open(inside, os.O_PATH | os.O_DIRECTORY)
    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: dict[str, int] = {}
    naive: set[str] = set()
    try:
        for _ in range(200_000):
            try:
                found = content(opener(folder, "name/file", (str(inside),)))
            except (Escapes, OSError) as error:
                found = type(error).__name__
            seen[found] = seen.get(found, 0) + 1
            assert found != "secret"
            # The control: by name, the race is lost now and then.
            if "secret" not in naive:
                try:
                    naive.add((name / "file").read_text())
                except OSError:
                    pass
            if "secret" in naive and {"inside", "Escapes"} <= seen.keys() and sum(seen.values()) > 2000:
                break
    finally:
        over.set()
        swapper.join()
        os.close(folder)
    assert "secret" in naive and {"inside", "Escapes"} <= seen.keys()
