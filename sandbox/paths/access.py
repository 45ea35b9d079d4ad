"""Checks before a launch whether a uid can access the files it needs, so that the message can name the
file."""

from __future__ import annotations

import os

from sandbox import look
from sandbox.paths.mounts import ancestry
from sandbox.speed.typed import Container, Iterable


def unreachable(path: str, uid: int, gid: int, bits: int) -> str | None:
    """The outermost folder above `path` that `uid` cannot enter, or `path` itself if its permissions are
    missing; else None.

    bwrap walks to each source as the dropped uid, so the uid must be able to enter every folder on the way.
    """
    for folder in reversed(tuple(ancestry(os.path.dirname(path)))):
        if not _may(folder, uid, gid, 0o1):
            return folder
    return None if _may(path, uid, gid, bits) else path


def _may(path: str, uid: int, gid: int, bits: int) -> bool:
    """Whether the mode gives `bits` (rwx as 4, 2, 1) to this uid and gid, without other groups."""
    if uid == os.geteuid():
        return look.access(path, bits)  # our own uid: the kernel knows all our groups
    try:
        held = look.stat(path)
    except OSError:
        return True  # removed meanwhile: bwrap reports it
    shift = 6 if held.st_uid == uid else 3 if held.st_gid == gid else 0
    if (held.st_mode >> shift) & bits == bits:
        return True
    try:
        look.getxattr(path, "system.posix_acl_access")
    except OSError:
        return False
    return True  # an ACL decides, and only the kernel can evaluate it for another uid


class Unreadable(Exception):
    """The plugin needs a file that its uid cannot access."""

    def __init__(self, path: str, uid: int, remedy: str, what: str = "read") -> None:
        super().__init__(f"{path} cannot be {what} by the plugin, which runs as uid {uid}")
        self.hint = remedy


def require_access(needed: Iterable[tuple[str, int]], uid: int, gid: int, own: Container[str | None]) -> None:
    """Raise Unreadable for the first path that the uid cannot access.

    `needed`: real paths, each with the permission bits that are needed. `own`: paths that came with the
    plugin: the hint for them is a plain chmod.
    """
    for path, bits in needed:
        blocked = unreachable(path, uid, gid, bits)
        if blocked is None:
            continue
        mode = "o+rx" if bits & 1 else "o+r"
        if blocked != path:
            remedy = f"chmod o+x {blocked}, or move it to a folder that everybody may enter, such as /opt"
            raise Unreadable(blocked, uid, remedy)
        if bits & 0o2:
            remedy = f"chown {uid} {path}, or ask for reading only"
            if look.statvfs(path).f_flag & os.ST_RDONLY:
                remedy = "its filesystem is mounted read-only: choose another folder, or ask for reading only"
            raise Unreadable(path, uid, remedy, "written")
        if path in own:
            raise Unreadable(path, uid, f"chmod {mode} {path}")
        remedy = f"let others read it (chmod {mode} {path}, or an ACL for uid {uid}), or ask for less"
        raise Unreadable(path, uid, remedy)
