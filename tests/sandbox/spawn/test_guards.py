"""The mounts of a guard, with a kernel that only writes down what is asked of it.

tests/escape/test_host_files.py has the real ones.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.spawn.guards import make_guard
from sandbox.spawn.order import GuardOrder

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _NOATIME = 0x1, 0x2, 0x4, 0x8, 0x20, 0x1000, 0x400


class Kernel:
    """Says yes to every mount, and makes none."""

    def __init__(self) -> None:
        self.flags: list[int] = []

    def mount(self, source: bytes | None, target: bytes, kind: None, flags: int, data: None) -> int:
        self.flags.append(flags)
        return 0


def _make(folder: Path, access: str, kernel: Kernel) -> None:
    libc: Any = kernel
    (folder / "kept").mkdir(exist_ok=True)
    make_guard(libc, str(folder), GuardOrder(0, "kept", access, False))


def _pretend(monkeypatch: pytest.MonkeyPatch, flags: int) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_flag=flags))


def test_a_guard_that_did_not_become_read_only_stops_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    _pretend(monkeypatch, 0)
    with pytest.raises(OSError, match=f"Errno {errno.EROFS}"):
        _make(tmp_path, "read", kernel)
    _make(tmp_path, "write", kernel)  # the control: this one need not be
    _pretend(monkeypatch, os.ST_RDONLY)
    _make(tmp_path, "read", kernel)


def test_the_remount_drops_no_flag_of_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace the kernel refuses a remount without them."""
    kernel = Kernel()
    _pretend(monkeypatch, os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME)
    _make(tmp_path, "read", kernel)
    assert kernel.flags[-1] == _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC | _NOATIME
