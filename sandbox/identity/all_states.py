"""Lists and removes the states of plugins on this machine.

For root they are found by their reservations, in any folder, and in the runner's own folder. An ordinary user
has only that folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from sandbox.identity import reservations, uids
from sandbox.identity.host_side import host_side, remove_host_side
from sandbox.identity.leases import UidLease
from sandbox.identity.removal import first_owned_by, remove_tree
from sandbox.identity.state import lock_exclusively, open_record, record_path, remove_record, state_root
from sandbox.identity.uid_range import RESERVATIONS
from sandbox.paths.mounts import contains, read_mounts
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, resolve, walk


class State(NamedTuple):
    name: str  # its name in the runner's own folder; its path if it is elsewhere
    path: str
    uid: int
    manifest: str  # empty if unknown
    running: bool
    left: tuple[str, ...] = ()  # folders outside of the state that may hold files of its uid

    @property
    def orphaned(self) -> bool:
        """Whether its manifest no longer exists."""
        return bool(self.manifest) and not os.path.lexists(self.manifest)


class StateInUse(Exception):
    """The plugin runs."""


class StateNotRemoved(Exception):
    """The state cannot be removed; the message says why."""


def list_states(environ: Mapping[str, str]) -> list[State]:
    """All states, sorted by name."""
    root = _root(environ)
    found: dict[str, State] = {}
    if os.geteuid() == 0:
        for held in reservations.list_reservations():
            if held.left or os.path.lexists(held.state):
                name = os.path.basename(held.state) if os.path.dirname(held.state) == root else held.state
                running = uids.is_leased(held.uid)
                found[held.state] = State(name, held.state, held.uid, held.manifest, running, held.left)
    for name in _names(root):
        path = os.path.join(root, name)
        if path not in found:
            manifest, running = _read_record(path)
            with suppress(FileNotFoundError):  # removed meanwhile
                found[path] = State(name, path, os.lstat(path).st_uid, manifest, running)
    return sorted(found.values())


def remove_state(state: State) -> None:
    """Remove a state with all its content, and with what hosts store for the plugin. Raises StateInUse and
    StateNotRemoved. Nothing of a running plugin is removed."""
    try:
        with ExitStack() as stack:
            above = _open_above(state.path, stack)
            with _locked_state(state, above):
                _require_nothing_left(state)
                if above is None:
                    return  # a uid without a state directory
                name = os.path.basename(state.path)
                _require_removable(state, name, above)
                # Before the directory: if this fails, the state is still listed and can be removed again.
                remove_host_side(state.path)
                if not state.left or os.path.lexists(state.path):
                    remove_tree(name, above, state.uid)
    except (LinkRefused, TooManyLinks) as refused:
        raise StateNotRemoved(f"{state.path}: {refused}") from None
    except OSError as error:
        raise StateNotRemoved(f"{state.path} cannot be removed: {error.strerror}") from None


def _require_nothing_left(state: State) -> None:
    """Raise StateNotRemoved if the plugin left files elsewhere: the next plugin with this uid would own
    them."""
    # Read again: the plugin may have been started since the listing, with another folder.
    held = reservations.read_reservation(RESERVATIONS, state.uid) if os.geteuid() == 0 else None
    for folder in dict.fromkeys((*state.left, *(held.left if held is not None else ()))):
        if (left := first_owned_by(state.uid, folder)) is not None:
            raise StateNotRemoved(
                f"{left} belongs to uid {state.uid}, a uid that another plugin would get: remove what the "
                "plugin "
                f"left, or change its owner (find {folder} -uid {state.uid} -exec chown -h USER {{}} +)"
            )


def _require_removable(state: State, name: str, above: int) -> None:
    """Raise StateNotRemoved if something is mounted in it, which is not the plugin's and would be removed
    too. Raise OSError if the directory belongs to another plugin by now."""
    for mount in read_mounts().all:
        if any(contains(place, mount.point) for place in (state.path, host_side(state.path))):
            raise StateNotRemoved(f"{mount.point} is a mount point: unmount it, and try again")
    with suppress(FileNotFoundError):
        if os.stat(name, dir_fd=above, follow_symlinks=False).st_uid != state.uid:
            raise OSError(errno.ESTALE, "it was replaced meanwhile")


def _open_above(path: str, stack: ExitStack) -> int | None:
    """Open the folder that a state is in. None if it does not exist."""
    try:
        steps = walk(os.path.dirname(path), follow="none")
    except (FileNotFoundError, NotADirectoryError):
        return None
    stack.callback(close, steps)
    return steps[-1].fd


@contextmanager
def _locked_state(state: State, above: int | None) -> Iterator[None]:
    """Prevent starts of the plugin during this context. At its end the reservation and the record are
    removed."""
    with ExitStack() as stack:
        if os.geteuid() == 0 and state.uid == 0:  # left by a launch that was killed before it had a uid
            stack.enter_context(uids.registry_lock())
            yield
            return
        record = above is not None and _lock_record(state, above, stack)
        lease = _lease_exclusively(state, stack) if os.geteuid() == 0 else None
        yield
        if lease is not None:
            with uids.registry_lock():
                uids.release_reservation(lease, state.path)
        if above is not None and record:
            remove_record(above, os.path.basename(state.path))


def _lease_exclusively(state: State, stack: ExitStack) -> UidLease:
    # The registry is locked for a moment only: removing a large state takes long, and other plugins must
    # start.
    with uids.registry_lock():
        lease = uids.lease_exclusively(state.uid)
    if lease is None:
        raise StateInUse
    stack.callback(lease.close)
    return lease


def _lock_record(state: State, above: int, stack: ExitStack) -> bool:
    """Lock the record of a state. Returns whether it has one. A missing record is made, because a launch
    makes it only after the directory. If a uid is reserved for the state, that uid is locked instead."""
    held = reservations.read_reservation(RESERVATIONS, state.uid) if os.geteuid() == 0 else None
    reserved = held is not None and held.state == state.path
    try:
        fd = open_record(above, os.path.basename(state.path), make=not reserved)
    except OSError:
        if not reserved:
            raise
        return False  # there is none, or another user's file is in its place
    stack.callback(os.close, fd)
    if not lock_exclusively(fd):
        raise StateInUse
    return True


def _root(environ: Mapping[str, str]) -> str:
    try:
        return resolve(state_root(environ), follow="own")
    except (OSError, LinkRefused, TooManyLinks):
        return state_root(environ)


def _names(root: str) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [
                each.name
                for each in entries
                if not each.name.startswith(".") and each.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _read_record(path: str) -> tuple[str, bool]:
    """The manifest of an ordinary user's state, and whether the plugin runs."""
    try:
        fd = os.open(record_path(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return "", False
    try:
        return os.fsdecode(os.read(fd, 1 << 16)), uids.count_locked(fd, 0, 0) > 0
    finally:
        os.close(fd)
