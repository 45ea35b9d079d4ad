"""The identity of a plugin outside of its cage: its uid and gid, and the state directory that belongs to
them."""

from __future__ import annotations

import os

from sandbox.speed.scopes import contextmanager
from sandbox.speed.typed import TYPE_CHECKING, Iterator
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Owner(NamedTuple):
    """The identity of a plugin outside of its cage."""

    uid: int
    gid: int
    lease_fd: int | None  # stays open as long as any process of the plugin lives; None: nothing is leased
    # Device and inode of its state directory, and of the folders requested below it, by path.
    state: Mapping[str, tuple[int, int]] = {}


class Writing(NamedTuple):
    """Folders of the host in which a plugin writes files of its own uid. That uid has to be reserved."""

    folders: tuple[str, ...]
    state_dir: str  # for a plugin without a state directory: the path that the uid is reserved for


@contextmanager
def leased_owner(uid_range: tuple[int, int] | None) -> Iterator[Owner]:
    """The identity of a plugin without a state directory, for one run. `uid_range` None: the plugin has the
    runner's own uid."""
    if uid_range is None:
        yield Owner(os.geteuid(), os.getegid(), None)
        return
    from sandbox.identity.leases import lease_any

    lease = lease_any(*uid_range)
    try:
        # The same number for both, as systemd does for DynamicUser=: no other process is in the group.
        yield Owner(lease.uid, lease.uid, lease.fd)
    finally:
        lease.close()
