"""The caller's own streams, given to the plugin: what it closes is closed, and what it changes is restored.

Two needs conflict. A reader of the plugin's stdout sees the end only when nobody else holds the pipe, and the
runner holds it too. But flags that a plugin changes on an open file (O_NONBLOCK) stay changed for the caller,
unless a process that holds the file restores them. So:

    pipe        the plugin gets a new open file of the same pipe, and the runner gives its own copy away.
                Changes of flags and locks end with the new file. Only the pipe's size is restored.
    socket      given away, if the process that started the runner does not hold it itself. Then nobody is
                left who would notice a change.
    all else    kept, and restored when the plugin has ended: files, terminals, FIFOs with a name, pipes that
                the runner may not open (another user's), sockets that the caller holds too.
"""

from __future__ import annotations

import fcntl
import os
import stat

from sandbox.speed.scopes import contextmanager, suppress
from sandbox.speed.typed import Iterable, Iterator
from sandbox.streams.descriptor_flags import SETTABLE, restore_flags

_MOST_FILES = 4096  # open files of the process that started us. Beyond that the search ends


class Handover:
    """The caller's streams on their way to a plugin. Made by `hand_over`."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # the plugin's ends, where they are not the caller's own
        self._given: set[int] = set()  # to be given away once the plugin runs

    def end(self, fd: int) -> int:
        """What the plugin gets for the caller's `fd`."""
        return self._ends.get(fd, fd)

    def give_away(self) -> None:
        """The plugin runs, and has its own copies."""
        for own in self._ends.values():
            os.close(own)
        self._ends.clear()
        for fd in self._given:
            forget(fd)
        self._given.clear()


def forget(fd: int) -> None:
    """Give up one of our own descriptors 0-2. /dev/null takes its number, or the next open file would."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd)
    os.close(null)


@contextmanager
def hand_over(fds: Iterable[int], *, keep: Iterable[int] = ()) -> Iterator[Handover]:
    """`fds`: 0-2, or some of them. `keep`: those the runner needs itself while the plugin runs."""
    handover = Handover()
    sizes: dict[int, tuple[int, int]] = {}  # of pipes: an O_PATH handle, and size and flags
    kept = []
    try:
        for fd in fds:
            mode = os.fstat(fd).st_mode
            if stat.S_ISFIFO(mode) and (own := _opened_anew(fd)) is not None:
                handover._ends[fd] = own
                handle = os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
                sizes[handle] = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ), fcntl.fcntl(own, fcntl.F_GETFL)
            elif not (stat.S_ISSOCK(mode) and not _caller_has(os.fstat(fd).st_ino)):
                kept.append(fd)
                continue
            if fd not in keep:
                handover._given.add(fd)
        with restore_flags(kept):
            yield handover
    finally:
        handover._given.clear()  # if they are still there, the plugin was never started
        handover.give_away()
        for handle, (size, flags) in sizes.items():
            with suppress(OSError):
                _resize(handle, size, flags & os.O_ACCMODE)
            os.close(handle)


def _opened_anew(fd: int) -> int | None:
    """Another open file of the same pipe, with the same flags."""
    try:
        # A FIFO with a name is not opened anew: the open could wait, and the new file would not know that the
        # FIFO has ended before.
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:["):
            return None
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        return os.open(f"/proc/self/fd/{fd}", flags & (os.O_ACCMODE | SETTABLE) | os.O_CLOEXEC)
    except OSError:
        return None


def _resize(handle: int, size: int, access: int) -> None:
    fd = os.open(f"/proc/self/fd/{handle}", access | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) != size:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
    finally:
        os.close(fd)


def _caller_has(inode: int) -> bool:
    """Whether the process that started us holds this socket too. True also if that cannot be found out."""
    folder = f"/proc/{os.getppid()}/fd"
    name = f"socket:[{inode}]"
    try:
        for number, entry in enumerate(os.scandir(folder)):
            if number == _MOST_FILES:
                return True
            with suppress(FileNotFoundError):  # closed since it was listed
                if os.readlink(entry.path) == name:
                    return True
    except OSError:  # another user's, or outside of our pid namespace
        return True
    return False
