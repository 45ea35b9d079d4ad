"""Writing all of it."""

from __future__ import annotations

import os


def write_all(fd: int, data: bytes) -> None:
    """Every byte, or OSError.

    A single write may be cut short without an error: by RLIMIT_FSIZE, which counts for memory files as well,
    or by a full disk. Half a list of options for bwrap is a cage without its last walls.
    """
    while data:
        data = data[os.write(fd, data) :]
