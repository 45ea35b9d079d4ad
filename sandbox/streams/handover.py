"""Give the caller's own streams to the plugin, and restore what the plugin changes on them.

Two needs conflict. A reader of the plugin's stdout sees the end only when nobody else holds the pipe, and the
runner holds it too. But flags that a plugin changes on an open file (O_NONBLOCK) stay changed for the caller,
unless a process that holds the file restores them. So:

    pipe        the plugin gets a new open file of the same pipe, and the runner closes its own.
                Changes of flags and locks end with the new file. Only the pipe's size is restored.
    socket      the runner closes its own, unless the process that started the runner holds the socket too
    all else    the runner keeps it open and restores it when the plugin has ended: files, terminals, named
                FIFOs, pipes that the runner may not open (another user's), sockets that the caller holds too
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct

from sandbox.speed.scopes import contextmanager, suppress
from sandbox.speed.typed import Iterable, Iterator
from sandbox.speed.value import NamedTuple

_MOST_FILES = 4096  # open files of our parent process that are looked at, at most


class Handover:
    """The caller's streams for one plugin. Made by `hand_over`."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # new open files for the plugin, by the caller's descriptor
        self._to_give_away: set[int] = set()  # descriptors to close once the plugin runs

    def end(self, fd: int) -> int:
        """The descriptor that the plugin gets for the caller's `fd`."""
        return self._ends.get(fd, fd)

    def give_away(self) -> None:
        """Close our copies. Call it when the plugin runs and has its own."""
        for own in self._ends.values():
            os.close(own)
        self._ends.clear()
        for fd in self._to_give_away:
            forget(fd)
        self._to_give_away.clear()


def forget(fd: int) -> None:
    """Close one of our descriptors 0-2. /dev/null takes its number, so that the next open file does not."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd)
    os.close(null)


@contextmanager
def hand_over(fds: Iterable[int], *, keep: Iterable[int] = ()) -> Iterator[Handover]:
    """Prepare the caller's streams for a plugin, and restore them when the context ends.

    `fds`: 0-2, or some of them. `keep`: those the runner needs itself while the plugin runs.
    """
    handover = Handover()
    sizes: dict[int, tuple[int, int]] = {}  # of pipes: an O_PATH handle, and size and flags
    kept = []
    try:
        for fd in fds:
            mode = os.fstat(fd).st_mode
            if stat.S_ISFIFO(mode) and (own := _reopen_pipe(fd)) is not None:
                handover._ends[fd] = own
                handle = os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
                sizes[handle] = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ), fcntl.fcntl(own, fcntl.F_GETFL)
            elif not (stat.S_ISSOCK(mode) and not _caller_has(os.fstat(fd).st_ino)):
                kept.append(fd)
                continue
            if fd not in keep:
                handover._to_give_away.add(fd)
        with restore_flags(kept):
            yield handover
    finally:
        handover._to_give_away.clear()  # any left here: the plugin was never started
        handover.give_away()
        for handle, (size, flags) in sizes.items():
            with suppress(OSError):
                _resize(handle, size, flags & os.O_ACCMODE)
            os.close(handle)


def _reopen_pipe(fd: int) -> int | None:
    """Open the same pipe again, with the same flags. None if that is impossible."""
    try:
        # A named FIFO is not opened again: opening could block, and the new file would not know that the FIFO
        # has ended before.
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
    """Whether our parent process holds this socket too. True also if that cannot be found out."""
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


# --- flags and locks of an open file ------------------------------------------------------------------------


_UNLOCK = struct.pack("hh4xqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)  # a struct flock: the whole file
# The flags that F_SETFL can change. The others are decided when a file is opened.
# With O_ASYNC a terminal's owner is its foreground process group. F_GETOWN tells that as a negative number,
# which Python takes for an error.
_F_SETSIG, _F_GETSIG, _F_SETOWN_EX, _F_GETOWN_EX = 10, 11, 15, 16
SETTABLE = os.O_APPEND | os.O_NONBLOCK | os.O_ASYNC | os.O_DIRECT | os.O_NOATIME


class _Flags(NamedTuple):
    status: int
    owner: bytes  # who gets signals about it: a struct f_owner_ex
    signal: int  # which one; 0: SIGIO
    pipe_size: int | None  # None: not a pipe
    locked: bool


@contextmanager
def restore_flags(fds: Iterable[int]) -> Iterator[None]:
    """Restore flags, locks and pipe sizes of these descriptors' open files at the end of the context."""
    before = {fd: _read(fd) for fd in fds}
    try:
        yield
    finally:
        for fd, flags in before.items():
            _restore(fd, flags)


def _read(fd: int) -> _Flags:
    try:
        size: int | None = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    except OSError:
        size = None
    owner = fcntl.fcntl(fd, _F_GETOWN_EX, bytes(8))
    number = fcntl.fcntl(fd, _F_GETSIG)
    return _Flags(fcntl.fcntl(fd, fcntl.F_GETFL), owner, number, size, _is_locked(fd))


def _is_locked(fd: int) -> bool:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        return b"\nlock:" in file.read()


def _restore(fd: int, before: _Flags) -> None:
    now = _read(fd)
    if (now.status ^ before.status) & SETTABLE:
        _set(fd, fcntl.F_SETFL, before.status)
    if now.owner != before.owner:
        _set(fd, _F_SETOWN_EX, before.owner)
    if now.signal != before.signal:
        _set(fd, _F_SETSIG, before.signal)
    if now.pipe_size != before.pipe_size and before.pipe_size is not None:
        _set(fd, fcntl.F_SETPIPE_SZ, before.pipe_size)
    if now.locked and not before.locked:
        _set(fd, fcntl.F_OFD_SETLK, _UNLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            pass


def _set(fd: int, command: int, value: int | bytes) -> None:
    try:
        fcntl.fcntl(fd, command, value)
    except OSError:
        pass  # an append-only file; a pipe that holds more bytes than its old size
