"""The changes of an overlay: what a plugin changes in a read-only folder is kept beside its state directory.

    HOST_SIDE/overlays/NAME/upper     the changes, as overlayfs keeps them; it belongs to the plugin
    HOST_SIDE/overlays/NAME/work-XX   of one launch, which overlayfs needs; removed at its end
    HOST_SIDE/overlays/NAME/lock      held, shared, as long as a process of any of its cages lives

HOST_SIDE is the folder that the plugin itself cannot reach (sandbox/identity/host_side.py), so it cannot
change them under the mount, which the cell's init makes. Removing a state removes its overlays. One in which
nothing was changed is removed when its last cage ends.
"""

from __future__ import annotations

import fcntl
import os
import stat

from sandbox.identity.host_side import open_host_side, remove_host_side
from sandbox.identity.removal import remove_tree
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.typed import Iterator
from sandbox.speed.value import NamedTuple

UPPER = "upper"
_LOCK = "lock"
_WORK = "work-"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 3


class OverlayRefused(Exception):
    """The changes cannot be kept; the message says why."""


class OpenOverlay(NamedTuple):
    """Descriptors of one launch, and the name of its folder for overlayfs."""

    folder: int  # has the two below
    upper: int
    work: str
    lock: int
    others: tuple[str, ...]  # names of changes of other folders, which are kept too


@contextmanager
def open_overlay(state_dir: str, name: str, uid: int, gid: int) -> Iterator[OpenOverlay]:
    """Make what is missing, for a plugin with this uid. Raises OverlayRefused, HostSideRefused, OSError,
    LinkRefused and TooManyLinks."""
    with ExitStack() as stack:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):  # the end of another launch has just removed the empty folder
                side = stack.enter_context(open_host_side(state_dir, make=True))
                assert side is not None
                overlays = _make(side, "overlays", 0o700, stack)
                folder = _make(
                    overlays, name, 0o711, stack
                )  # in the cell's init the plugin's uid goes through
                lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
                stack.callback(os.close, lock)
                if _is_alone(lock):
                    _remove_work(folder)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if os.fstat(lock).st_nlink:
                    break
        else:
            raise OverlayRefused("it is being removed")
        stack.callback(_prune, state_dir, overlays, name, folder, lock)
        upper = _make(folder, UPPER, 0o755, stack, (uid, gid))
        work = _WORK + os.urandom(8).hex()
        stack.callback(_remove, folder, work, uid)
        _make(folder, work, 0o700, stack, (uid, gid))
        others = sorted(each for each in os.listdir(f"/proc/self/fd/{overlays}") if each != name)
        yield OpenOverlay(folder, upper, work, lock, tuple(others))


def _make(above: int, name: str, mode: int, stack: ExitStack, owner: tuple[int, int] | None = None) -> int:
    """Open a folder, which is made if it is missing. `owner`: the plugin; it may have changed the mode.

    Another launch may be making it at this moment, or was killed when it had made half of it."""
    is_new = False
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)
        is_new = True
    fd = os.open(name, _FOLDER, dir_fd=above)
    stack.callback(os.close, fd)
    status, here = os.fstat(fd), f"/proc/self/fd/{fd}"
    if owner is None:
        if stat.S_IMODE(status.st_mode) != mode:
            os.chmod(here, mode)
        return fd
    if owner[0] != status.st_uid:
        if status.st_uid != os.geteuid() or os.listdir(here):
            was = f"what it changed there belongs to uid {status.st_uid}, and it has uid {owner[0]} now"
            raise OverlayRefused(f"{was}; `runner state remove` removes that with its state")
        os.chown(here, *owner)
        is_new = True
    if is_new:
        os.chmod(here, mode)
    elif status.st_mode & 0o700 != 0o700:
        os.chmod(here, stat.S_IMODE(status.st_mode) | 0o700)
    return fd


def _is_alone(lock: int) -> bool:
    """Whether no other cage has it. It is locked exclusively then."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_work(folder: int) -> None:
    """Remove what launches have left that were killed."""
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        for name in os.listdir(here):
            if name.startswith(_WORK):
                with suppress(OSError):
                    _remove(folder, name, os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid)
    finally:
        os.close(here)


def _remove(folder: int, name: str, owner: int) -> None:
    with suppress(OSError):
        remove_tree(name, folder, owner)


def _prune(state_dir: str, overlays: int, name: str, folder: int, lock: int) -> None:
    """Remove all of it if nothing was changed and no other cage has it."""
    with suppress(OSError):
        if _is_alone(lock):
            os.rmdir(UPPER, dir_fd=folder)
            os.unlink(_LOCK, dir_fd=folder)
            os.rmdir(name, dir_fd=overlays)
            os.rmdir("../overlays", dir_fd=overlays)
            remove_host_side(state_dir, only_empty=True)
