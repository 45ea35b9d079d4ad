"""Open a path below a directory so that no link leads out of it, even while other programs change the links.

openat2(2) resolves the whole path in one step: RESOLVE_BENEATH refuses every way out, RESOLVE_NO_MAGICLINKS
refuses /proc/PID/root and the like. It also refuses each absolute link, even one that leads back inside. For
those, and where the system call is missing or filtered, the path is walked one component at a time: every
directory on the way stays open, a link is read and never followed by the kernel, and ".." returns to the
directory that is already open. Either way the checked descriptor is the one that is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

from sandbox.paths.walk import LINK_LIMIT, parts
from sandbox.speed.typed import Sequence

_SYS_OPENAT2 = 437  # on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_MOST_OPEN = 256  # directories that a walk has open at once
_O_PATH = os.O_PATH | os.O_CLOEXEC
_STEP = _O_PATH | os.O_NOFOLLOW
# Errors after which the path is walked. ENOSYS, EPERM: the system call is missing, or a filter refuses it.
# EXDEV: the path leaves the directory, or has an absolute link. EAGAIN: a concurrent rename made the result
# uncertain.
_FALL_BACK = frozenset({errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EAGAIN})

_libc = ctypes.CDLL(None, use_errno=True)


class Escapes(Exception):
    """The path leads out of the directory."""


def open_beneath(directory: int, path: str, names: Sequence[str] = ()) -> int:
    """An O_PATH descriptor of `path`, which is relative to the open directory. Links are followed if they
    stay inside.

    `names`: absolute real paths of the directory; an absolute link must begin with one of them. Raises
    Escapes and OSError.
    """
    try:
        return _openat2(directory, path or ".")
    except OSError as error:
        if error.errno not in _FALL_BACK:
            raise
    return walk_beneath(directory, path, names)


def walk_beneath(directory: int, path: str, names: Sequence[str] = ()) -> int:
    """open_beneath() without openat2."""
    held: list[int] = []  # descriptors of the directories on the way, below `directory`
    todo = parts(path)
    links = 0
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if not held:
                    raise Escapes
                os.close(held.pop())
                continue
            if len(held) >= _MOST_OPEN:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            held.append(os.open(name, _STEP, dir_fd=held[-1] if held else directory))
            status = os.fstat(held[-1])
            if not stat.S_ISLNK(status.st_mode):
                continue
            link = held.pop()
            try:
                target = os.readlink("", dir_fd=link)
            finally:
                os.close(link)
            links += 1
            if links > LINK_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if target.startswith("/"):
                target = _inside(target, names)
                while held:
                    os.close(held.pop())
            todo += parts(target)
        return held.pop() if held else os.open(".", _O_PATH, dir_fd=directory)
    finally:
        for fd in held:
            os.close(fd)


def _openat2(directory: int, path: str) -> int:
    how = struct.pack("=QQQ", _O_PATH, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    found = _libc.syscall(_SYS_OPENAT2, directory, os.fsencode(path), how, len(how))
    if found >= 0:
        return int(found)
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def _inside(target: str, names: Sequence[str]) -> str:
    """The rest of an absolute target behind one of the directory's names. Components are compared literally;
    a ".." in the rest is walked later."""
    walked = parts(target)
    for name in names:
        own = parts(name)
        if own and walked[len(walked) - len(own) :] == own:
            return "/".join(reversed(walked[: len(walked) - len(own)]))
    raise Escapes
