"""Writing every byte, also to a slow reader; reading the beginning of a file, and of nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from sandbox import files


def test_a_slow_reader_of_a_descriptor_that_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READER_SECONDS", 1000)
    read, write = os.pipe()
    os.set_blocking(write, False)
    data = os.urandom(1 << 20)  # a pipe takes 64 KiB at once
    taken = bytearray()

    def reader() -> None:
        while piece := os.read(read, 50_000):
            taken.extend(piece)

    thread = threading.Thread(target=reader)
    thread.start()
    files.write_all(write, data)
    os.close(write)
    thread.join()
    os.close(read)
    assert taken == data


def test_a_reader_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READER_SECONDS", 0.01)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        files.write_all(write, bytes(1 << 20))
    os.close(read)
    os.close(write)


# --- the beginning of a file -------------------------------------------------------------------------------


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcd\xff")
    assert files.text_at(str(path), 4) == "abcd"
    assert files.text_at(str(path), 5) == "abcd\ufffd"
    assert files.text_at(str(path), 6) == "abcd\ufffd"


def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "open", lambda *args: pytest.fail("it was opened"))
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent", Path("/dev/zero")):
        assert files.text_at(str(path), 10) == ""


def test_a_pipe_that_takes_the_files_place_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at it and the opening."""
    path = tmp_path / "text"
    path.write_text("text")
    assert files.text_at(str(path), 10) == "text"  # the control
    really, held = os.open, list[int]()

    def swapping(*args: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        holder = really(path, os.O_RDWR)
        os.write(holder, b"from the pipe")
        held.append(holder)
        return really(*args)

    monkeypatch.setattr(os, "open", swapping)
    try:
        assert files.text_at(str(path), 10) == ""
    finally:
        for fd in held:
            os.close(fd)


def test_a_file_of_the_kernels_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes in several pieces; its size is 0, whatever is in it."""
    whole = Path("/proc/self/smaps").read_text()
    monkeypatch.setattr(files, "_PIECE_BYTES", 100)
    before = set(os.listdir("/proc/self/fd"))
    read = files.kernel_text("/proc/self/smaps")
    assert read.split()[0] == whole.split()[0] and len(read) > 1000
    assert files.kernel_text("/proc/sys/kernel/ostype") == "Linux\n"
    with pytest.raises(FileNotFoundError):
        files.kernel_text("/proc/self/absent")
    assert set(os.listdir("/proc/self/fd")) <= before  # of others some may have been closed meanwhile


# --- replacing a file ---------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    reader = (tmp_path / "kept").open("rb")
    (tmp_path / "folder").mkdir()
    folder, before = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), os.umask(0o777)
    try:
        files.replace_file(folder, "kept", b"new", 0o640, sync=True)
        with pytest.raises(IsADirectoryError):
            files.replace_file(folder, "folder", b"new")
    finally:
        os.umask(before)
        os.close(folder)
    with reader:
        assert reader.read() == b"old"
    assert (tmp_path / "kept").read_bytes() == b"new"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["folder", "kept"]
