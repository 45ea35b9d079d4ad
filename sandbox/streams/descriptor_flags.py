"""Flags and locks that belong to an open file, not to one process: a plugin can change them for its caller.

A shell whose terminal is left with O_NONBLOCK ends at its next read. A log that stays locked cannot be
rotated. So the flags of the caller's descriptors are restored after the plugin.
"""

from __future__ import annotations

import fcntl
import os
import struct

from sandbox.speed.scopes import contextmanager
from sandbox.speed.typed import Iterable, Iterator
from sandbox.speed.value import NamedTuple

_UNLOCK = struct.pack("hh4xqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)  # a struct flock: the whole file
# The flags that F_SETFL can change. The others are decided when a file is opened.
SETTABLE = os.O_APPEND | os.O_NONBLOCK | os.O_ASYNC | os.O_DIRECT | os.O_NOATIME


class _Flags(NamedTuple):
    status: int
    owner: int  # the process that gets signals about it
    pipe_size: int | None  # None: not a pipe
    locked: bool


@contextmanager
def restore_flags(fds: Iterable[int]) -> Iterator[None]:
    """Restore flags, locks and pipe sizes of these descriptors' open files at the end of the context."""
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
        pass  # an append-only file; a pipe that holds more bytes than its old size
