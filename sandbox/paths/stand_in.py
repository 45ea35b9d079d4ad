"""Files and folders that stand where a name must not be taken, for as long as plugins run.

A mount needs something to be mounted on. So where a guarded name does not exist, an empty folder or a file
that means nothing is made on the host. Whoever uses such a name holds a shared lock on it, also on one that
was there before. A stand-in is removed by the last user, who gets the exclusive lock: to remove a file is to
remove the mounts on it, in every cage.

A stand-in is known by its time of change to the nanosecond, which every change to it ends. So what a
killed runner left is taken over and removed by the next launch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from contextlib import ExitStack, contextmanager

from sandbox.files import write_all
from sandbox.paths.walk import close, walk_below
from sandbox.speed.typed import Iterator, Sequence
from sandbox.speed.value import NamedTuple

_MARK = 1_003_715_428_918_273_700  # nanoseconds; in 2001
_GRAINS = (1, 100, 10**3, 10**6, 10**7, 10**9, 2 * 10**9)  # of the times that filesystems keep
_TRIES, _PAUSE_SECONDS = 400, 0.005  # while another launch removes it
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class GuardedPlace(NamedTuple):
    """A name that is held for a launch, and made where it does not exist."""

    root: int  # the open folder it is below
    path: str  # relative
    content: str | None = None  # of a file that is made; None: a folder is made


class StandInRefused(Exception):
    """A missing name could not be taken."""

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
def held_places(places: Sequence[GuardedPlace]) -> Iterator[None]:
    """Make what is missing, and hold all of it. Raises StandInRefused. Afterwards nothing of ours is left,
    but what another launch uses."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(_held(place))
        yield


@contextmanager
def _held(place: GuardedPlace) -> Iterator[None]:
    above, _, name = place.path.rpartition("/")
    try:
        steps = walk_below(place.root, above)
    except OSError as error:
        raise StandInRefused(place.path, error.errno or errno.EIO) from None
    parent = steps.pop().fd
    close(steps)
    try:
        fd = _take(place, parent, name)
        if fd is None:
            yield
            return
        try:
            yield
        finally:
            try:
                _let_go(fd, parent, name, place.content)
            finally:
                os.close(fd)
    finally:
        os.close(parent)


def _take(place: GuardedPlace, parent: int, name: str) -> int | None:
    """Its descriptor, locked; None if it cannot be locked, and then it is not ours either."""
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
            return None  # not ours to read: nobody's stand-in
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_there(fd, parent, name):
                return fd
        except BlockingIOError:
            if not _is_stand_in(fd, place.content):  # a plugin that may read it can lock it too
                return fd
            time.sleep(_PAUSE_SECONDS)
        except OSError:  # a filesystem without locks
            return fd
        os.close(fd)
    raise StandInRefused(place.path, errno.EBUSY)


def _is_closed(parent: int, code: int | None) -> bool:
    """Whether the folder is closed to us, and so to the plugin: it belongs to another, and root would not
    have been refused."""
    return code == errno.EACCES and os.fstat(parent).st_uid != os.geteuid() != 0


def _make(parent: int, name: str, content: str | None) -> None:
    """All at once, as far as it can be: with its content and its owner, the folder's."""
    if content is None:
        os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=parent)
    else:
        fd = os.open(name, _NEW, 0o644, dir_fd=parent)
    try:
        if content is not None:
            write_all(fd, content.encode())
        if os.geteuid() == 0:
            if content is None and os.listdir(fd):  # not the one that was made: its owner would change
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            owner = os.fstat(parent)
            os.fchown(fd, owner.st_uid, owner.st_gid)
        os.utime(fd, ns=(_MARK, _MARK))
    except FileExistsError:
        raise
    except OSError:  # a full disk: half of it would mean something, and stay
        _remove(fd, parent, name)
        raise
    finally:
        os.close(fd)


def _is_there(fd: int, parent: int, name: str) -> bool:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    held = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _let_go(fd: int, parent: int, name: str, content: str | None) -> None:
    """Remove a stand-in that nobody else uses and nobody has changed."""
    if not _is_stand_in(fd, content):
        return
    try:
        # Our shared lock is given up first. Of several that let go at the same time one gets this lock.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_stand_in(fd, content):
            _remove(fd, parent, name)
    except OSError:  # used by another launch, or not empty, or the folder is closed by now
        pass


def _remove(fd: int, parent: int, name: str) -> None:
    """Remove what is open as `fd`, and nothing that a host puts in its place meanwhile: it is looked at under
    a name that nobody else knows."""
    if not _is_there(fd, parent, name):
        return
    private = f".{name}.{secrets.token_hex(8)}"
    os.rename(name, private, src_dir_fd=parent, dst_dir_fd=parent)
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    try:
        if _is_there(fd, parent, private):
            (os.rmdir if is_folder else os.unlink)(private, dir_fd=parent)
            return
    except OSError:  # a folder that is not empty
        pass
    _put_back(parent, private, name)


def _put_back(parent: int, private: str, name: str) -> None:
    """Never over what has the name by now: then it stays where it is."""
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
