"""Removes a directory whose content a plugin made."""

from __future__ import annotations

import errno
import os
import stat

from sandbox.speed.scopes import suppress

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(name: str, parent: int, owner: int) -> None:
    """Remove directory `name` of `parent`, which must belong to `owner`, with all its content. No link is
    followed. Raises OSError.

    It works at any depth: directories two levels down are moved up before their parent is removed. So it
    needs neither recursion nor one open directory for each level. Several processes may remove the same tree
    at once: what one of them finds gone is what they all want.
    """
    top = _open(name, parent)
    try:
        if os.fstat(top).st_uid != owner:
            raise OSError(errno.ESTALE, "it was replaced meanwhile")
        while entries := os.listdir(top):
            for entry in entries:
                with suppress(FileNotFoundError):
                    _remove(entry, top)
    finally:
        os.close(top)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def _remove(entry: str, top: int) -> None:
    if not stat.S_ISDIR(os.stat(entry, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(entry, dir_fd=top)
        return
    fd = _open(entry, top)
    try:
        for below in os.listdir(fd):
            if stat.S_ISDIR(os.stat(below, dir_fd=fd, follow_symlinks=False).st_mode):
                os.close(_open(below, fd))  # moving a directory needs write permission on it
                os.rename(below, f".removed.{os.urandom(8).hex()}", src_dir_fd=fd, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(entry, dir_fd=top)


def _open(name: str, parent: int) -> int:
    """Open a directory to be emptied. A plugin with the caller's uid may have removed its permissions."""
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        status = os.fstat(held)
        if status.st_uid == os.geteuid() and status.st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{held}", 0o700)
        return os.open(".", _DIRECTORY, dir_fd=held)
    finally:
        os.close(held)


MOST_LOOKED_AT = 200_000


def first_owned_by(uid: int, folder: str) -> str | None:
    """The first file of `uid` at or below `folder`, or None. A directory that cannot be read counts as such a
    file, and so does one with too many entries (MOST_LOOKED_AT)."""
    open_ends, looked_at = [folder], 0
    while open_ends:
        place = open_ends.pop()
        try:
            status = os.lstat(place)
            if status.st_uid == uid:
                return place
            if not stat.S_ISDIR(status.st_mode):
                continue
            with os.scandir(place) as entries:
                for entry in entries:
                    looked_at += 1
                    if looked_at > MOST_LOOKED_AT:
                        return place
                    if entry.is_dir(follow_symlinks=False):
                        open_ends.append(entry.path)
                    elif entry.stat(follow_symlinks=False).st_uid == uid:
                        return entry.path
        except FileNotFoundError:
            continue
        except OSError:
            return place
    return None
