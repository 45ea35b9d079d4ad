"""Writing all of it."""

from __future__ import annotations

import os
import select


def write_all(fd: int, data: bytes) -> None:
    """Every byte, or OSError.

    A single write may be cut short without an error: by RLIMIT_FSIZE, which counts for memory files as well,
    or by a full disk. Half a list of options for bwrap is a cage without its last walls.
    """
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            # A descriptor of the caller's may be non-blocking. That is theirs to say; we wait all the same.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
