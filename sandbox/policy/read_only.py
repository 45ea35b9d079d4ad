"""Files that nobody but root can change, no matter whose they are: those on read-only mounts.

A container gets its configuration in this way: a ConfigMap is a folder that everybody may write, on a mount
that nobody can write. But a mount that is read-only here proves little alone. The same files may be mounted a
second time. A unit with ProtectSystem=strict, or a sandbox that shows the host's root, sees the whole machine
read-only while every user goes on writing. So it counts only where the filesystem itself is read-only, or in
a container, and only if no writable mount shows the same files. Those of process 1 count too: it is the
container's own first process, or the host's init, which sees what users can write.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.identity.uid_range import id_is_mapped
from sandbox.paths.mounts import (
    KEEP_TIMES,
    Inside,
    Mount,
    Mounts,
    contains,
    inside,
    parse_mountinfo,
    read_mounts,
)

_FIRST = "/proc/1/mountinfo"
_LAST_USER = 65534  # of a container that has ids of its own


def is_unchangeable(path: str) -> bool:
    """Whether only root can change what is at `path` itself (a link is not followed), because it is on a
    read-only mount, as described above. False in doubt."""
    look.doubt(f"{_FIRST} is of another process")
    try:
        held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mounts = read_mounts()
            found = inside(held, mounts)
        finally:
            os.close(held)
        if found is None:
            return False
        with open(_FIRST, "rb") as file:
            first = parse_mountinfo(file.read())
    except (OSError, ValueError):
        return False
    return is_fixed(*found, (mounts, first), contained=is_in_container(mounts))


def is_fixed(mount: Mount, place: Inside, tables: tuple[Mounts, Mounts], *, contained: bool) -> bool:
    """Whether a place of this mount can be written nowhere, by the mount tables of both processes."""
    # What a server, a program (FUSE) or a file (a loop device) shows, somebody may change behind the mount.
    # So may who owns a layer of an overlay. Those of a container's own root are with its engine.
    if mount.fstype not in KEEP_TIMES or mount.source.startswith("/dev/loop"):
        return False
    if mount.fstype == "overlay" and not (contained and _is_root(mount, tables[0])):
        return False
    if not contained and not _is_read_only(mount.options):
        return False
    return not any(
        other.writable and not _is_read_only(other.options) and contains(other.root, place.path)
        for table in tables
        for other in (mount, *table.of_device(place.device))
    )


def is_in_container(mounts: Mounts) -> bool:
    """Whether the root directory is that of a container: an overlay, with users of its own. A sandbox that
    somebody made without root maps only one."""
    roots = [mount.fstype for mount in mounts.all if mount.point == "/"]
    return bool(roots) and set(roots) == {"overlay"} and id_is_mapped(0, _LAST_USER)


def _is_root(mount: Mount, table: Mounts) -> bool:
    return any(other.point == "/" and other.device == mount.device for other in table.all)


def _is_read_only(options: str) -> bool:
    return "ro" in options.split(",")
