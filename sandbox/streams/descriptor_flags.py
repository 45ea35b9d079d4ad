"""Flags and locks that belong to an open file and not to one process: a plugin changes them for its caller.

A shell whose terminal is left with O_NONBLOCK ends at its next read, and a log that stays locked cannot be
rotated. So what the caller handed over is put back as it was.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sandbox.value import NamedTuple

# What F_SETFL can change. The rest is decided when a file is opened.
_UNLOCK = struct.pack("hh4xqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)  # of everything
SETTABLE = os.O_APPEND | os.O_NONBLOCK | os.O_ASYNC | os.O_DIRECT | os.O_NOATIME


class _Flags(NamedTuple):
    status: int
    owner: int  # who gets signals about it
    pipe_size: int | None  # None: it is no pipe
    locked: bool


@contextmanager
def restored(fds: Iterable[int]) -> Iterator[None]:
    """Whatever is done to these descriptors' open files meanwhile, their flags and pipe sizes come back."""
    before = {fd: _read(fd) for fd in fds}
    try:
        yield
    finally:
        for fd, flags in before.items():
            _restore(fd, flags)


def _read(fd: int) -> _Flags:
    try:
        size: int | None = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    except OSError:
        size = None
    return _Flags(fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETOWN), size, _is_locked(fd))


def _is_locked(fd: int) -> bool:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        return b"\nlock:" in file.read()


def _restore(fd: int, before: _Flags) -> None:
    now = _read(fd)
    if (now.status ^ before.status) & SETTABLE:
        _set(fd, fcntl.F_SETFL, before.status)
    if now.owner != before.owner:
        _set(fd, fcntl.F_SETOWN, before.owner)
    if now.pipe_size != before.pipe_size and before.pipe_size is not None:
        _set(fd, fcntl.F_SETPIPE_SZ, before.pipe_size)
    if now.locked and not before.locked:
        _set(fd, fcntl.F_OFD_SETLK, _UNLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            pass


def _set(fd: int, command: int, value: int | bytes) -> None:
    try:
        fcntl.fcntl(fd, command, value)
    except OSError:
        pass  # a file that may only be appended to; a pipe with more in it than it would hold then
