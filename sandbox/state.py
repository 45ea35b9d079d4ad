"""A plugin's state directory: created once, its own for ever."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sandbox import uids
from sandbox.value import NamedTuple


class StateRefused(Exception):
    """The directory cannot be the plugin's; the message says why, the hint what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Owner(NamedTuple):
    """Who a plugin is outside of its cage."""

    uid: int
    gid: int
    lease_fd: int | None  # held for as long as anything of the plugin lives; None when nothing is leased


def state_root(environ: Mapping[str, str]) -> str:
    """Where state directories live unless the operator says otherwise."""
    if os.geteuid() == 0:
        return "/var/lib/runner/plugins"
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local/state")
    return os.path.join(home, "runner/plugins")


@contextmanager
def owned_state(path: str | None, uid_range: tuple[int, int] | None) -> Iterator[Owner]:
    """The plugin's identity for one run and, if it has one, its state directory made ready for it.

    `uid_range` None: no uid is dropped (the runner is not root) and the plugin's files are the caller's.
    """
    if uid_range is None:
        if path is not None:
            os.close(_open_directory(path))
        yield Owner(os.geteuid(), os.getegid(), None)
        return
    if path is None:
        lease = uids.lease_any(*uid_range)
    else:
        lease = _claim(path, uid_range)
    try:
        # One number for both: DynamicUser's habit, and a group of one is a group shared with nobody.
        yield Owner(lease.uid, lease.uid, lease.fd)
    finally:
        lease.close()


def _claim(path: str, uid_range: tuple[int, int]) -> uids.UidLease:
    fd = _open_directory(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # two first starts at once would choose two owners
        held = os.fstat(fd)
        first, last = uid_range
        if not first <= held.st_uid <= last and os.listdir(fd):
            raise StateRefused(
                f"state directory {path} belongs to uid {held.st_uid}, which is outside of the plugins' uids "
                f"{first}-{last}, and is not empty",
                "choose an empty directory with --state-dir, or give this one to a uid of the range "
                f"(chown -R {first}:{first} {path})",
            )
        lease = uids.lease_for_state(path, held.st_uid, first, last)
        try:
            os.fchown(fd, lease.uid, lease.uid)
            os.fchmod(fd, 0o700)
        except BaseException:
            lease.close()
            raise
        return lease
    finally:
        os.close(fd)


def _open_directory(path: str) -> int:
    """Open `path`, created with its parents if missing, following no link in its last component."""
    parent, name = os.path.split(path)
    _make_parents(parent)
    parent_fd = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        except FileExistsError:
            pass
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        except OSError as error:
            raise StateRefused(
                f"state directory {path} cannot be used: {error.strerror}",
                "it must be a directory, not a link: remove it or choose another with --state-dir",
            ) from None
    finally:
        os.close(parent_fd)
    if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077 and os.fstat(fd).st_uid == os.geteuid():
        os.fchmod(fd, 0o700)
    return fd


def _make_parents(path: str) -> None:
    """Create what is missing. Root's are searchable by all, since the dropped uid walks through here to its
    own. Others' are closed: a plugin owns its directory and may open it to everybody."""
    if os.path.isdir(path):
        return
    _make_parents(os.path.dirname(path))
    try:
        os.mkdir(path)
        os.chmod(path, 0o711 if os.geteuid() == 0 else 0o700)
    except FileExistsError:
        pass
