"""Guards: mounts that keep parts of a writable folder read-only. The cell's init makes them.

Every step goes through descriptors, and none follows a link, because another plugin may be writing to the
folder meanwhile. bwrap binds the folder with everything that is mounted in it. In the plugin's mount
namespace the kernel locks these mounts: none can be removed alone, and no mount point can be renamed,
replaced or unlinked.

Standard library only, like everything that runs between a clone and an exec.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox.spawn.order import GuardOrder
from sandbox.speed.libc import Library, get_errno

_MS_RDONLY = 0x1
_MS_REMOUNT = 0x20
_MS_BIND = 0x1000
_MS_REC = 0x4000
# Flags of a mount that a remount must repeat: as statvfs(2) returns and as mount(2) takes them.
_KEPT_FLAGS = 0x2 | 0x4 | 0x8  # nosuid, nodev, noexec
_KEPT_TIMES = ((1024, 0x400), (2048, 0x800), (4096, 0x200000))  # noatime, nodiratime, relatime

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def bind_source(libc: Library, fd: int, real: str, place: str) -> None:
    """Bind the folder that is open as `fd` to `place`. The descriptor belongs to another mount namespace, so
    the folder is opened again by its name, and has to be the same one."""
    here = os.open(real, _STEP | os.O_DIRECTORY)
    try:
        found, meant = os.fstat(here), os.fstat(fd)
        if (found.st_dev, found.st_ino) != (meant.st_dev, meant.st_ino):
            raise OSError(errno.ESTALE, "")
        _mount(libc, f"/proc/self/fd/{here}", place, _MS_BIND | _MS_REC)
    finally:
        os.close(here)


def make_guard(libc: Library, root: str, guard: GuardOrder) -> None:
    *above, name = guard.path.split("/")
    parent = os.open(root, _STEP | os.O_DIRECTORY)
    try:
        for step in above:
            # Every step is a mount point of an earlier guard: this opens what is mounted there.
            below = os.open(step, _STEP | os.O_DIRECTORY, dir_fd=parent)
            os.close(parent)
            parent = below
        _mount_over(libc, parent, name, guard)
    except (FileNotFoundError, NotADirectoryError):
        if not guard.optional:
            raise
    finally:
        os.close(parent)


def _mount_over(libc: Library, parent: int, name: str, guard: GuardOrder) -> None:
    target = os.open(name, _STEP, dir_fd=parent)
    try:
        mode = os.fstat(target).st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            if guard.optional:
                return
            raise OSError(errno.ELOOP, "")
        source = "/dev/null" if guard.access == "hidden" else f"/proc/self/fd/{target}"
        _mount(libc, source, f"/proc/self/fd/{target}", _MS_BIND | _MS_REC)
    finally:
        os.close(target)
    if guard.access == "write":
        return
    mounted = os.open(name, _STEP, dir_fd=parent)
    try:
        flags = os.fstatvfs(mounted).f_flag
        kept = flags & _KEPT_FLAGS
        for told, taken in _KEPT_TIMES:
            kept |= taken if flags & told else 0
        # Fails if the name was replaced meanwhile: then it is not the root of a mount.
        _mount(libc, None, f"/proc/self/fd/{mounted}", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)
        if not os.fstatvfs(mounted).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, "")
    finally:
        os.close(mounted)


def _mount(libc: Library, source: str | None, target: str, flags: int) -> None:
    given = None if source is None else source.encode()
    if libc.mount(given, target.encode(), None, flags, None) < 0:
        raise OSError(get_errno(), "")
