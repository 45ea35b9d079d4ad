"""The identity of a file, independent of its names."""

from __future__ import annotations

from sandbox.speed.value import NamedTuple


class FileIdentity(NamedTuple):
    dev: int
    ino: int
    mode: int
    ctime_ns: int
