"""The program that waits in the place of the cell's init, run by itself, without children."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.spawn import reaper
from sandbox.spawn.order import ENDING, read_ending

MACHINES = ("x86_64", "aarch64")


def run(machine: str, folder: Path, ending: int) -> int:
    """The exit code of the program with this descriptor for its message."""
    file = folder / "reaper"
    file.write_bytes(reaper.image(reaper.Duty(1, None, ending, -1, ""), machine))
    file.chmod(0o700)
    argv = [str(file)]
    if machine != os.uname().machine:
        emulator = shutil.which(f"qemu-{machine}") or shutil.which(f"qemu-{machine}-static")
        if emulator is None:
            pytest.skip(f"there is no emulator of {machine} here")
        argv = [emulator, *argv]
    return subprocess.run(argv, pass_fds=() if ending < 0 else (ending,), timeout=60).returncode


@pytest.mark.launches
@pytest.mark.parametrize("machine", MACHINES)
def test_it_reports_and_ends(machine: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "wb"):
        assert run(machine, tmp_path, write) == 0
        ending = read_ending(reader.fileno())
    assert ending is not None and ENDING.size == 1328
    assert (ending.status, ending.expired, ending.full) == (0, False, False)


@pytest.mark.launches
@pytest.mark.parametrize("machine", MACHINES)
def test_it_does_not_outlive_a_runner_that_died_before(machine: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb"):
        assert run(machine, tmp_path, write) == 125


@pytest.mark.launches
@pytest.mark.parametrize("machine", MACHINES)
def test_a_message_that_nobody_wants(machine: str, tmp_path: Path) -> None:
    assert run(machine, tmp_path, -1) == 0
