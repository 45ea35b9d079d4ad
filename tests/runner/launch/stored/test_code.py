"""The code that a process has imported names the plans it keeps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from runner.launch.stored import code
from runner.launch.stored.code import own_code, own_files, process_began


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files that stand for our code, written long ago."""
    found = [tmp_path / "one.py", tmp_path / "two.py"]
    for file in found:
        file.write_text("")
    monkeypatch.setattr(code, "own_files", lambda: iter(map(str, found)))
    return found


LATER = 3600.0  # seconds: as if the files were that old


def test_it_is_the_code_of_this_process() -> None:
    found = set(own_files())
    assert code.__file__ in found and __file__ not in found and os.__file__ not in found
    known = own_code(time.time() + LATER)
    assert known is not None and known.files == found


def test_a_changed_file_is_other_code(files: list[Path]) -> None:
    since = time.time() + LATER
    first = own_code(since)
    assert first is not None and first == own_code(since)
    files[0].write_text("more")
    second = own_code(since)
    assert second is not None and second.mark != first.mark
    copy = files[1].with_name("copy")
    copy.write_text("")
    held = files[1].stat()
    os.utime(copy, ns=(held.st_atime_ns, held.st_mtime_ns))
    copy.rename(files[1])
    third = own_code(since)
    assert third is not None and third.mark != second.mark


def test_the_target_of_a_link_is_the_code(files: list[Path]) -> None:
    """Some installers make links to files that change in place."""
    target = files[0].with_name("target")
    files[0].rename(target)
    files[0].symlink_to(target)
    since = time.time() + LATER
    first = own_code(since)
    target.write_text("more")
    second = own_code(since)
    assert first is not None and second is not None and first.mark != second.mark
    assert own_code(target.stat().st_ctime + 1) is None


def test_a_file_that_changed_a_moment_before_is_no_known_code(files: list[Path]) -> None:
    changed = max(file.stat().st_ctime for file in files)
    assert own_code(changed + 3) is not None
    assert own_code(changed + 1) is None
    assert own_code(changed - 100) is None  # after it was imported
    assert own_code(0.0) is None  # it is not known when


def test_a_file_that_is_gone_is_no_known_code(files: list[Path]) -> None:
    files[0].unlink()
    assert own_code(time.time() + LATER) is None


def test_when_a_process_began() -> None:
    assert abs(process_began() - psutil.Process().create_time()) < 2
