"""The folder in which a host stores things for a plugin that the plugin itself must not reach.

It is beside the state directory and not in it: a policy may show the whole state directory to the plugin.
For the state directory PLACE/NAME it is PLACE/.storage/NAME. PLACE/.storage is on the denylist of each
launch that has a state directory in PLACE. Both folders belong to the user of the runner alone.
"""

from __future__ import annotations

import os
import stat

from sandbox.identity.removal import remove_tree
from sandbox.paths.walk import close, walk
from sandbox.speed.scopes import ExitStack, contextmanager, suppress
from sandbox.speed.typed import Iterator

FOLDER = ".storage"

_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class HostSideRefused(Exception):
    """Something else is in its place; the message says what."""


def host_sides(state_dir: str) -> str:
    """The folder with the host sides of this state directory and its neighbours."""
    return os.path.join(os.path.dirname(state_dir), FOLDER)


def host_side(state_dir: str) -> str:
    return os.path.join(host_sides(state_dir), os.path.basename(state_dir))


def is_host_side(path: str) -> bool:
    """Whether a path is in a folder for host sides. Such a path cannot be a state directory."""
    return FOLDER in path.split("/")


@contextmanager
def open_host_side(state_dir: str, *, make: bool = False) -> Iterator[int | None]:
    """An O_PATH descriptor of the host side. None if it does not exist and `make` is not set. No link is
    followed. Raises HostSideRefused, OSError, LinkRefused and TooManyLinks."""
    with ExitStack() as stack:
        try:
            steps = walk(os.path.dirname(state_dir), follow="none")
        except FileNotFoundError:
            if make:
                raise
            yield None
            return
        stack.callback(close, steps)
        name = os.path.basename(state_dir)
        try:
            found = _open_below(steps[-1].fd, name, make, stack)
        except FileNotFoundError:  # the removal of another state has removed the empty folder
            found = _open_below(steps[-1].fd, name, make, stack)
        yield found


def remove_host_side(state_dir: str, *, only_empty: bool = False) -> None:
    """Remove the host side with its content, if it exists. `only_empty`: raise OSError if it has any. Raises
    OSError, LinkRefused and TooManyLinks."""
    try:
        steps = walk(os.path.dirname(state_dir), follow="none")
    except FileNotFoundError:
        return
    try:
        with ExitStack() as stack:
            try:
                above = _open_own(FOLDER, steps[-1].fd, False, stack)
            except HostSideRefused:
                return  # not our folder, so nothing in it is ours
            if above is None:
                return
            with suppress(FileNotFoundError):
                if only_empty:
                    os.rmdir(os.path.basename(state_dir), dir_fd=above)
                else:
                    remove_tree(os.path.basename(state_dir), above, os.geteuid())
        with suppress(OSError):  # there are other host sides
            os.rmdir(FOLDER, dir_fd=steps[-1].fd)
    finally:
        close(steps)


def _open_below(above: int, name: str, make: bool, stack: ExitStack) -> int | None:
    folder = _open_own(FOLDER, above, make, stack)
    return None if folder is None else _open_own(name, folder, make, stack)


def _open_own(name: str, above: int, make: bool, stack: ExitStack) -> int | None:
    """Open a folder that must belong to this user alone."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
    try:
        fd = os.open(name, _OPEN, dir_fd=above)
    except FileNotFoundError:
        if make:
            raise
        return None
    stack.callback(os.close, fd)
    status = os.fstat(fd)
    if not stat.S_ISDIR(status.st_mode):
        raise HostSideRefused(f"{name} is not a folder")
    if status.st_uid != os.geteuid():
        raise HostSideRefused(f"the folder {name} belongs to uid {status.st_uid}, not to uid {os.geteuid()}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise HostSideRefused(f"the folder {name} is open to other users (mode {mode:o})")
    return fd
