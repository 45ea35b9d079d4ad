"""Whether a uid can get at a file: asked before a launch, so that what is missing can be named."""

from __future__ import annotations

import os

from sandbox.paths.mounts import ancestry


def unreachable(path: str, uid: int, gid: int, bits: int) -> str | None:
    """The first folder on the way that keeps `uid` out, or `path` itself; None if it can be had.

    bwrap walks to each source as the dropped uid, so every folder on the way must let it pass.
    """
    for folder in reversed(tuple(ancestry(os.path.dirname(path)))):
        if not _may(folder, uid, gid, 0o1):
            return folder
    return None if _may(path, uid, gid, bits) else path


def _may(path: str, uid: int, gid: int, bits: int) -> bool:
    """Whether mode bits let uid/gid, with no other groups, do `bits` (rwx as 4, 2, 1)."""
    if uid == os.geteuid():
        return os.access(path, bits)  # ourselves: the kernel knows, groups and all
    try:
        held = os.stat(path)
    except OSError:
        return True  # gone meanwhile: bwrap will say so
    shift = 6 if held.st_uid == uid else 3 if held.st_gid == gid else 0
    if (held.st_mode >> shift) & bits == bits:
        return True
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError:
        return False
    return True  # an ACL decides, and only the kernel can evaluate it for somebody else
