"""Reading the beginning of a file, or a file of the kernel's, and writing all of one."""

from __future__ import annotations

import os
import select
import stat

_READER_SECONDS = 10
_PIECE_BYTES = 16 << 10


def text_at(path: str, limit: int) -> str:
    """The first `limit` bytes of a regular file as text; empty if there is none, or none that we may read."""
    from sandbox import look  # who only writes does not need it

    try:
        if not stat.S_ISREG(look.stat(path).st_mode):  # before opening: opening a device can have effects
            return ""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # the name may mean something else by now
            return ""
        return os.read(fd, limit).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def kernel_text(path: str) -> str:
    """A whole file of the kernel's (procfs, cgroups), all of which is ASCII. Raises OSError.

    With three system calls, where a file object makes eight, and imports a module to decode text.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(fd, _PIECE_BYTES):
            pieces.append(piece)
        return b"".join(pieces).decode("ascii")
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Every byte, or OSError.

    A single write may be cut short without an error: by RLIMIT_FSIZE, which counts for memory files as well,
    or by a full disk. Half a list of options for bwrap is a cage without its last walls.
    """
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            # A descriptor of the caller's may be non-blocking. That is theirs to say; a slow reader is waited
            # for all the same, one that is stuck is not.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            if not poll.poll(_READER_SECONDS * 1000):
                raise


def write_once(path: str, text: str) -> None:
    """Write to an existing file in a single write(2), as files of the kernel want it (procfs, cgroups)."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)
