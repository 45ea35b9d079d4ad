"""All states on this machine: the plugin of each, and how to remove one.

For root they are found by their reservations, wherever they are, and in the runner's own folder. An ordinary
user has only that folder.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, suppress

from sandbox.identity import reservations, uids
from sandbox.identity.host_side import remove_host_side
from sandbox.identity.leases import RESERVATIONS
from sandbox.identity.removal import first_owned_by, remove_tree
from sandbox.identity.state import lock_alone, record_path, state_root
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, resolve, walk
from sandbox.typed import Iterator, Mapping
from sandbox.value import NamedTuple


class State(NamedTuple):
    name: str  # its name in the runner's own folder; elsewhere its path
    path: str
    uid: int
    manifest: str  # empty: not known
    running: bool
    left: tuple[str, ...] = ()  # folders outside of it that may hold files of its uid

    @property
    def orphaned(self) -> bool:
        """Whether its manifest no longer exists."""
        return bool(self.manifest) and not os.path.lexists(self.manifest)


class StateInUse(Exception):
    """The plugin runs."""


class StateKept(Exception):
    """It cannot be removed; the message says why."""


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
            manifest, running = _record(path)
            found[path] = State(name, path, os.lstat(path).st_uid, manifest, running)
    return sorted(found.values())


def remove_state(state: State) -> None:
    """Remove it with all its content, and what hosts keep for the plugin. Raises StateInUse and StateKept; a
    running plugin loses nothing."""
    try:
        with _held(state):
            _require_nothing_left(state)
            # Before the directory: a state that is still listed can be removed again.
            remove_host_side(state.path)
            if state.left and not os.path.lexists(state.path):
                return  # a uid without a state directory
            steps = walk(os.path.dirname(state.path), follow="none")
            try:
                name = os.path.basename(state.path)
                remove_tree(name, steps[-1].fd, state.uid)
            finally:
                close(steps)
    except (LinkRefused, TooManyLinks) as refused:
        raise StateKept(f"{state.path}: {refused}") from None
    except OSError as error:
        raise StateKept(f"{state.path} cannot be removed: {error.strerror}") from None


def _require_nothing_left(state: State) -> None:
    """Raise StateKept if the plugin left files elsewhere: the next plugin with this uid would own them."""
    # Read again: the plugin may have been started since the listing, with another folder.
    held = reservations.read_reservation(RESERVATIONS, state.uid) if os.geteuid() == 0 else None
    for folder in dict.fromkeys((*state.left, *(held.left if held is not None else ()))):
        if (left := first_owned_by(state.uid, folder)) is not None:
            raise StateKept(
                f"{left} belongs to uid {state.uid}, a uid that another plugin would get: remove what the "
                "plugin "
                f"left, or change its owner (find {folder} -uid {state.uid} -exec chown -h USER {{}} +)"
            )


@contextmanager
def _held(state: State) -> Iterator[None]:
    """Nobody can start the plugin inside this context. Afterwards nothing refers to the state."""
    with ExitStack() as stack:
        if os.geteuid() != 0:
            record = _held_record(state, stack)
            yield
            if record is not None:
                os.unlink(record)
            return
        if state.uid == 0:  # a launch was killed before it had a uid
            stack.enter_context(uids.registry_lock())
            yield
            return
        record = _held_record(state, stack)  # a plugin that runs as an account
        # Not locked all the time: removing a large state takes long, and other plugins start meanwhile.
        with uids.registry_lock():
            lease = uids.lease_alone(state.uid)
        if lease is None:
            raise StateInUse
        stack.callback(lease.close)
        yield
        with uids.registry_lock():
            uids.release_reservation(lease, state.path)
        if record is not None:
            os.unlink(record)
            with suppress(OSError):
                os.rmdir(os.path.dirname(record))


def _held_record(state: State, stack: ExitStack) -> str | None:
    path = record_path(state.path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None  # an older version made it
    stack.callback(os.close, fd)
    if not lock_alone(fd):
        raise StateInUse
    return path


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


def _record(path: str) -> tuple[str, bool]:
    """The manifest of an ordinary user's state, and whether the plugin runs."""
    try:
        fd = os.open(record_path(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return "", False
    try:
        return os.fsdecode(os.read(fd, 1 << 16)), uids.count_locked(fd, 0, 0) > 0
    finally:
        os.close(fd)
