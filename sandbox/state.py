"""A plugin's state directory: created once, its own for ever."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
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
    # A relative XDG_STATE_HOME is invalid by its specification and ignored.
    base = environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return os.path.join(base, "runner/plugins")


@contextmanager
def owned_state(
    path: str | None, uid_range: tuple[int, int] | None, parts: Sequence[str] = ()
) -> Iterator[Owner]:
    """The plugin's identity for one run and, if it has one, its state directory made ready for it.

    `uid_range` None: no uid is dropped (the runner is not root) and the plugin's files are the caller's.
    `parts`: folders below the directory that must exist too.
    """
    if uid_range is None:
        if path is not None:
            _prepare_own(path, parts)
        yield Owner(os.geteuid(), os.getegid(), None)
        return
    if path is None:
        lease = uids.lease_any(*uid_range)
    else:
        lease = _claim(path, uid_range, parts)
    try:
        # One number for both: DynamicUser's habit, and a group of one is a group shared with nobody.
        yield Owner(lease.uid, lease.uid, lease.fd)
    finally:
        lease.close()


def _prepare_own(path: str, parts: Sequence[str]) -> None:
    fd = _open_directory(path)
    try:
        held = os.fstat(fd)
        if held.st_uid != os.geteuid():
            raise StateRefused(
                f"state directory {path} belongs to uid {held.st_uid}", "choose another with --state-dir"
            )
        if stat.S_IMODE(held.st_mode) & 0o077:
            if os.listdir(fd):
                raise StateRefused(
                    f"state directory {path} is not empty and others can enter it",
                    f"chmod 700 {path} if it is the plugin's, or choose another with --state-dir",
                )
            os.fchmod(fd, 0o700)
        for part in parts:
            _make_below(fd, part, os.geteuid(), os.getegid())
    finally:
        os.close(fd)


def _claim(path: str, uid_range: tuple[int, int], parts: Sequence[str]) -> uids.UidLease:
    # Two first starts at once would choose two owners. Not the directory itself is locked: the plugin, whose
    # it is, could hold that lock for ever.
    with uids.registry_lock():
        fd = _open_directory(path)
        try:
            held = os.fstat(fd)
            first, last = uid_range
            if not first <= held.st_uid <= last and os.listdir(fd):
                raise StateRefused(
                    f"state directory {path} belongs to uid {held.st_uid}, which is outside of the plugins' "
                    f"uids {first}-{last}, and is not empty",
                    "choose an empty or a new directory with --state-dir",
                )
            lease = uids.lease_for_state(path, held.st_uid, first, last)
            try:
                os.fchown(fd, lease.uid, lease.uid)
                os.fchmod(fd, 0o700)
                for part in parts:
                    _make_below(fd, part, lease.uid, lease.uid)
            except BaseException:
                lease.close()
                raise
            return lease
        finally:
            os.close(fd)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _make_below(fd: int, part: str, uid: int, gid: int) -> None:
    """Folders inside of the state directory, through no link: what is there already is the plugin's doing."""
    here = os.dup(fd)
    try:
        for name in part.split("/"):
            try:
                os.mkdir(name, 0o700, dir_fd=here)
                made = True
            except FileExistsError:
                made = False
            try:
                below = os.open(name, _DIRECTORY, dir_fd=here)
            except OSError as error:
                raise StateRefused(
                    f"{part} in the state directory cannot be used: {error.strerror}", "remove it"
                ) from None
            os.close(here)
            here = below
            if made:
                os.fchown(here, uid, gid)
    finally:
        os.close(here)


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
        return os.open(name, _DIRECTORY, dir_fd=parent_fd)
    except OSError as error:
        raise StateRefused(
            f"state directory {path} cannot be used: {error.strerror}",
            "it must be a directory, not a link: remove it or choose another with --state-dir",
        ) from None
    finally:
        os.close(parent_fd)


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
