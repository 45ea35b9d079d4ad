"""Open a path below a directory so that no link leads out of it, even while others change the links.

openat2(2) resolves the whole path in one step: RESOLVE_BENEATH refuses every way out, RESOLVE_NO_MAGICLINKS
refuses /proc/PID/root and the like. It also refuses each absolute link, even one that leads back inside. For
those, and where the system call is missing or filtered, the path is walked one component at a time: every
directory on the way is held open, a link is read and never followed by the kernel, and ".." goes back to the
directory that was held. Either way the descriptor that was judged is the one that is used.
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
_HELD_MOST = 256  # directories on the way of a walk, each of which is a descriptor
_HELD = os.O_PATH | os.O_CLOEXEC
_STEP = _HELD | os.O_NOFOLLOW
# The system call is missing, or a filter refuses it; EXDEV: the path leaves the directory, or has an absolute
# link; EAGAIN: something was renamed meanwhile, so that the kernel could not be sure.
_WALKED = frozenset({errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EAGAIN})

_libc = ctypes.CDLL(None, use_errno=True)


class Escapes(Exception):
    """The path leads out of the directory."""


def open_beneath(directory: int, path: str, names: Sequence[str] = ()) -> int:
    """An O_PATH descriptor of `path`, which is relative to the open directory. Links are followed as long as
    they stay inside.

    `names`: absolute names of the directory, without links; an absolute link must begin with one of them.
    Raises Escapes and OSError.
    """
    try:
        return _openat2(directory, path or ".")
    except OSError as error:
        if error.errno not in _WALKED:
            raise
    return walk_beneath(directory, path, names)


def walk_beneath(directory: int, path: str, names: Sequence[str] = ()) -> int:
    """The same without openat2."""
    held: list[int] = []  # of the directories on the way, below `directory`
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
            if len(held) >= _HELD_MOST:
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
        return held.pop() if held else os.open(".", _HELD, dir_fd=directory)
    finally:
        for fd in held:
            os.close(fd)


def _openat2(directory: int, path: str) -> int:
    how = struct.pack("=QQQ", _HELD, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    found = _libc.syscall(_SYS_OPENAT2, directory, os.fsencode(path), how, len(how))
    if found >= 0:
        return int(found)
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


def _inside(target: str, names: Sequence[str]) -> str:
    """What is behind the directory's own name. Components are compared as they are: a ".." among them is
    walked later, from where it leads."""
    walked = parts(target)
    for name in names:
        own = parts(name)
        if own and walked[len(walked) - len(own) :] == own:
            return "/".join(reversed(walked[: len(walked) - len(own)]))
    raise Escapes
