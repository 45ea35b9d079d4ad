"""Stand-ins: files and folders that are made for guarded names that do not exist, while plugins run.

A mount needs a mount point. So where a guarded name does not exist, an empty folder, or a file without
effect, is made on the host. Every launch holds a shared lock on the names that it guards, also on those that
existed before. The last launch gets the exclusive lock and removes the stand-in: removing a file removes the
mounts on it in every cage.

A stand-in is recognised by its modification time, to the nanosecond, which any change to it replaces. So the
next launch takes over and removes what a killed runner left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from sandbox.files import write_all
from sandbox.paths.walk import close, walk_below
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.typed import Iterator, Sequence
from sandbox.speed.value import NamedTuple

_MARK = 1_003_715_428_918_273_700  # nanoseconds; in 2001
_GRAINS = (1, 100, 10**3, 10**6, 10**7, 10**9, 2 * 10**9)  # granularities of filesystem times, in nanoseconds
_TRIES, _PAUSE_SECONDS = 400, 0.005  # while another launch removes it
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class GuardedPlace(NamedTuple):
    """A guarded name that a launch holds. A stand-in is made if it does not exist."""

    root: int  # the open folder it is below
    path: str  # relative
    content: str | None = None  # of a file that is made; None: a folder is made


class StandInRefused(Exception):
    """A stand-in could not be made or locked."""

    def __init__(self, path: str, code: int) -> None:
        locked = code == errno.EBUSY
        why = f"could not be made: {os.strerror(code)}"
        super().__init__(f"{path} {'is locked by another program' if locked else why}")
        self.errno = code
        self.hint = "let the runner write to the folder, or give the plugin a narrower one"
        if code == errno.ENOTDIR:
            self.hint = "a plugin or a program is changing the folder: try again when it has ended"
        if locked:
            self.hint = f"end the program that holds a lock on {path} (lslocks lists them), and try again"


@contextmanager
def hold_places(places: Sequence[GuardedPlace]) -> Iterator[None]:
    """Make the missing stand-ins, and hold all places. Raises StandInRefused. Afterwards the stand-ins are
    removed, except those that another launch uses."""
    parents: dict[tuple[int, str], int] = {}
    with ExitStack() as stack:
        for place in places:
            above, _, name = place.path.rpartition("/")
            parent = parents.get((place.root, above))
            if parent is None:
                parent = parents[place.root, above] = _open_parent(place, above)
                stack.callback(os.close, parent)
            fd = _take(place, parent, name)
            if fd is not None:
                stack.callback(os.close, fd)
                stack.callback(_release, fd, parent, name, place.content)
        yield


def _open_parent(place: GuardedPlace, above: str) -> int:
    try:
        steps = walk_below(place.root, above)
    except OSError as error:
        raise StandInRefused(place.path, error.errno or errno.EIO) from None
    parent = steps.pop().fd
    close(steps)
    return parent


def _take(place: GuardedPlace, parent: int, name: str) -> int | None:
    """The locked descriptor of a place, with a stand-in if it was missing. None: it cannot be opened or made,
    so it is no stand-in of ours."""
    for _ in range(_TRIES):
        try:
            fd = os.open(name, _LOOK, dir_fd=parent)
        except FileNotFoundError:
            try:
                _make(parent, name, place.content)
            except FileExistsError:
                pass
            except OSError as error:
                if _is_closed(parent, error.errno):
                    return None
                raise StandInRefused(place.path, error.errno or errno.EIO) from None
            continue
        except OSError:
            return None  # unreadable, so it is no stand-in
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_same_file(os.fstat(fd), parent, name):
                return fd
        except BlockingIOError:
            if not _is_stand_in(fd, place.content):  # any program that may read it can lock it
                return fd
            time.sleep(_PAUSE_SECONDS)
        except OSError:  # a filesystem without locks
            return fd
        os.close(fd)
    raise StandInRefused(place.path, errno.EBUSY)


def _is_closed(parent: int, code: int | None) -> bool:
    """Whether the folder belongs to another user and is closed to us. Then it is closed to the plugin too."""
    return code == errno.EACCES and os.fstat(parent).st_uid != os.geteuid() != 0


def _make(parent: int, name: str, content: str | None) -> None:
    """Make a stand-in with its content. For root it gets the owner of its folder."""
    if content is None:
        os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=parent)
    else:
        fd = os.open(name, _NEW, 0o644, dir_fd=parent)
    try:
        if content is not None:
            write_all(fd, content.encode())
        if os.geteuid() == 0:
            if content is None and os.listdir(fd):  # another folder: its owner must not be changed
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            owner = os.fstat(parent)
            os.fchown(fd, owner.st_uid, owner.st_gid)
        os.utime(fd, ns=(_MARK, _MARK))
    except FileExistsError:
        raise
    except OSError:  # such as a full disk: an incomplete stand-in must not stay
        _remove(fd, parent, name)
        raise
    finally:
        os.close(fd)


def _is_same_file(held: os.stat_result, parent: int, name: str) -> bool:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _release(fd: int, parent: int, name: str, content: str | None) -> None:
    """Remove a stand-in that no other launch uses and that was not changed."""
    if not _is_stand_in(fd, content):
        return
    try:
        # flock gives up our shared lock first. If several launches release it at once, one gets this lock.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_stand_in(fd, content):
            _remove(fd, parent, name)
    except OSError:  # used by another launch, or not empty, or the folder is closed now
        pass


def _remove(fd: int, parent: int, name: str) -> None:
    """Remove the file that is open as `fd`, but nothing that a host has put in its place: it is first renamed
    to a random name and checked there."""
    held = os.fstat(fd)
    if not _is_same_file(held, parent, name):
        return
    private = f".{name}.{os.urandom(8).hex()}"
    os.rename(name, private, src_dir_fd=parent, dst_dir_fd=parent)
    try:
        if _is_same_file(held, parent, private):
            (os.rmdir if stat.S_ISDIR(held.st_mode) else os.unlink)(private, dir_fd=parent)
            return
    except OSError:  # a folder that is not empty
        pass
    _put_back(parent, private, name)


def _put_back(parent: int, private: str, name: str) -> None:
    """Rename it back, unless the name is taken by now: then it stays."""
    is_folder = stat.S_ISDIR(os.stat(private, dir_fd=parent, follow_symlinks=False).st_mode)
    if not is_folder:
        try:
            os.link(private, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError:  # a filesystem without hard links
            pass
        else:
            os.unlink(private, dir_fd=parent)
            return
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(private, name, src_dir_fd=parent, dst_dir_fd=parent)


def is_harmless(parent: int, name: str, content: str | None) -> bool:
    """Whether this is an unchanged stand-in of any launch. A plugin can forge the time of one, but not what
    it means: it is empty, or has the content of one."""
    try:
        fd = os.open(name, _LOOK, dir_fd=parent)
    except OSError:
        return False
    try:
        if content is not None or not _is_stand_in(fd, content):
            return _is_stand_in(fd, content)
        with os.scandir(fd) as items:  # one entry is enough: a plugin could have made millions
            return next(items, None) is None
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_stand_in(fd: int, content: str | None) -> bool:
    status = os.fstat(fd)
    if not any(
        status.st_mtime_ns == _MARK - _MARK % grain and status.st_ctime_ns % grain == 0 for grain in _GRAINS
    ):
        return False
    if content is None:
        return stat.S_ISDIR(status.st_mode)
    expected = content.encode()
    alone = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return alone and os.pread(fd, len(expected) + 1, 0) == expected
