"""A checked copy of a package in a folder of the runner. The copy is mounted, not the original.

The copy is made of the bytes that were hashed, for one launch, and removed at its end. Nobody but root (or
the user who runs the runner) can write to it, and no plugin is shown the folder of the copies. The holder of
a copy has a lock on its folder as long as it lives. A runner that was killed leaves its copy behind, and the
next one that makes a copy removes it.

    PACKAGES/copy.RANDOM/           held by a lock
    PACKAGES/copy.RANDOM/package/   the copy

Only folders with such a name are removed.
Folders and files keep the permissions that reading and executing need, and lose those for writing and
the set-id bits. The list that is signed has no permissions, so these are the ones of the original.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from runner.package.fault import PackageFault
from runner.package.listing import FileList, list_package
from sandbox.files import write_all
from sandbox.identity.removal import remove_tree
from sandbox.identity.state import PACKAGES, state_root
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, resolve, walk
from sandbox.policy.load import trust_fault

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PACKAGE = "package"  # the name of a copy in its folder
_PREFIX = "copy."
_NAME = re.compile(r"copy\.[0-9a-f]{32}\Z")
_MOST_TRIES = 8  # a sweep of another runner may take a new folder away before it is locked


class PackageCopy(NamedTuple):
    path: str
    listing: FileList


def packages_folder(environ: Mapping[str, str]) -> str:
    """Where copies are made: beside the state directories of plugins. Raises PackageFault."""
    folder = os.path.join(os.path.dirname(state_root(environ)), PACKAGES)
    if not folder.startswith("/"):
        message = "there is no place for a checked copy of the package: HOME is not the path of a folder"
        hint = "set HOME, or name the place with XDG_STATE_HOME=/absolute/path"
        raise PackageFault("package_copy", message, hint)
    return folder


def _go_on() -> None:
    """The default for `look`: never stops the copy."""


@contextmanager
def take_snapshot(
    root: str, environ: Mapping[str, str], look: Callable[[], None] = _go_on
) -> Iterator[PackageCopy]:
    """Copy the package in the folder `root`. Raises PackageFault. `look` is called before each piece is
    copied, and may raise to stop."""
    folder = packages_folder(environ)
    try:
        place, parent = open_copies(folder)
    except (OSError, LinkRefused, TooManyLinks) as error:
        raise _no_place(folder, error) from None
    try:
        try:
            sweep_snapshots(parent)
            name, held = _make_holder(parent)
        except OSError as error:
            raise _no_place(folder, error) from None
        try:
            try:
                with PackageCopier(held, look) as sink:
                    listing = list_package(root, sink)
                    sink.finish()
            except OSError as error:
                raise _no_place(folder, error) from None
            yield PackageCopy(os.path.join(place, name, PACKAGE), listing)
        finally:
            _remove(name, parent)
            os.close(held)
    finally:
        os.close(parent)


def _no_place(folder: str, error: Exception) -> PackageFault:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    message = f"a checked copy of the package cannot be made in {folder}: {why}"
    hint = "make room there and let the runner write to it"
    if os.geteuid() != 0:
        hint += ", or name another place with XDG_STATE_HOME"
    return PackageFault("package_copy", message, hint)


def open_copies(folder: str) -> tuple[str, int]:
    """The folder of all copies, made where it is missing: its path without links, and a descriptor. Raises
    PackageFault, OSError, LinkRefused and TooManyLinks."""
    # The folder itself must not be a link: folders in it are removed, and a link may lead anywhere.
    above, name = os.path.split(folder)
    real = os.path.join(resolve(above, follow="own"), name)
    if os.path.islink(real):
        hint = "remove the link" + (
            "" if os.geteuid() == 0 else ", or name another place with XDG_STATE_HOME"
        )
        message = f"{real}, where checked copies of packages are made, is a symbolic link"
        raise PackageFault("package_copy", message, hint)
    # The plugin's uid has to pass through root's folders. Folders of other users stay closed.
    mode = 0o711 if os.geteuid() == 0 else 0o700
    steps = walk(real, follow="none", make=mode)
    try:
        fd = os.open(".", _FOLDER, dir_fd=steps[-1].fd)
    finally:
        close(steps)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(fd)
        raise PackageFault(
            "package_copy",
            f"{real}, where checked copies of packages are made, can be changed by others",
            f"chown {os.geteuid()} {real} && chmod {mode:o} {real}",
        )
    # The copy is mounted by its path, so no other user may be able to replace it.
    fault = trust_fault(real, f"{real}, where checked copies of packages are made,")
    if fault is not None:
        os.close(fd)
        raise PackageFault("package_copy", f"no checked copy can be made in {real}: {fault[0]}", fault[1])
    if stat.S_IMODE(status.st_mode) != mode:
        os.fchmod(fd, mode)
    return real, fd


def _make_holder(parent: int) -> tuple[str, int]:
    """A new folder with a lock on it. Raises OSError."""
    for _ in range(_MOST_TRIES):
        name = _PREFIX + os.urandom(16).hex()
        os.mkdir(name, 0o700, dir_fd=parent)
        try:
            held = os.open(name, _FOLDER, dir_fd=parent)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if there.st_ino == os.fstat(held).st_ino:
                os.fchmod(held, 0o711 if os.geteuid() == 0 else 0o700)
                return name, held
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(held)
            raise
        os.close(held)
    raise OSError(f"another runner removed {_MOST_TRIES} new folders")


def sweep_snapshots(parent: int) -> None:
    """Remove the copies of runners that were killed."""
    for name in filter(_NAME.match, os.listdir(parent)):
        try:
            held = os.open(name, _FOLDER, dir_fd=parent)
        except OSError:
            continue  # removed since it was listed, or nothing of ours
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(name, parent)
        except OSError:
            pass  # its runner lives
        finally:
            os.close(held)


def _remove(name: str, parent: int) -> None:
    try:
        remove_tree(name, parent, os.geteuid())
    except OSError:
        pass  # the next sweep tries again


class PackageCopier:
    """Writes a package into the folder `package` of a holder, while it is listed. A FileSink."""

    def __init__(self, holder: int, look: Callable[[], None] = _go_on) -> None:
        self._look = look
        os.mkdir(PACKAGE, 0o700, dir_fd=holder)
        self._root = os.open(PACKAGE, _FOLDER, dir_fd=holder)
        self._file = -1
        self._modes: dict[str, int] = {}  # of the folders, which can be written until all is there

    def __enter__(self) -> PackageCopier:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def open_file(self, path: str, mode: int, folder_modes: tuple[int, ...], size: int) -> None:
        self._look()
        parts = path.split("/")
        for depth, folder_mode in enumerate(folder_modes):
            folder = "/".join(parts[:depth])
            if folder not in self._modes:
                if folder:
                    os.mkdir(folder, 0o700, dir_fd=self._root)
                self._modes[folder] = _readable(folder_mode, folder=True)
        self._file = os.open(path, _NEW_FILE, 0o600, dir_fd=self._root)
        os.fchmod(self._file, _readable(mode, folder=False))

    def write(self, data: bytes) -> None:
        self._look()
        write_all(self._file, data)

    def close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def finish(self) -> None:
        for folder, mode in sorted(self._modes.items(), reverse=True):  # what is inside comes first
            os.chmod(folder or ".", mode, dir_fd=self._root)


def _readable(mode: int, *, folder: bool) -> int:
    """The permissions of the copy: those of the original without writing; its owner can read it."""
    return (mode & 0o555) | 0o400 | (0o100 if folder or mode & 0o111 else 0)
