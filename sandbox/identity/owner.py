"""Who a plugin is outside of its cage: its uid and gid, and the state directory that belongs to them."""

from __future__ import annotations

import os

from sandbox.speed.scopes import contextmanager, suppress
from sandbox.speed.typed import TYPE_CHECKING, Iterator, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandbox.identity.accounts import Account


class Owner(NamedTuple):
    """The identity of a plugin outside its cage."""

    uid: int
    gid: int
    lease_fd: int | None  # held as long as any process of the plugin lives; None: nothing is leased
    # Device and inode of its state directory, and of the folders requested below it, by path.
    state: Mapping[str, tuple[int, int]] = {}


class Writing(NamedTuple):
    """Folders of the host in which a plugin leaves files of its own uid, so that uid has to be reserved."""

    folders: tuple[str, ...]
    state_dir: str  # the path the uid is reserved for, if the plugin has no state directory


@contextmanager
def owned_state(
    path: str | None,
    uid_range: tuple[int, int] | None,
    parts: Sequence[str] = (),
    *,
    manifest: str = "",
    writing: Writing | None = None,
    account: Account | None = None,
) -> Iterator[Owner]:
    """The plugin's identity for one run and, if it has one, its state directory made ready for it.

    `path` is without links. `uid_range` None: no uid is dropped (the runner is not root) and the plugin's
    files are the caller's. `parts`: folders below the directory that must exist too. `manifest`: of the
    plugin. Directories made for a launch that then fails are removed again, unless they have content.
    `writing`: other folders it writes to. `account`: owner of the directory, instead of a reserved uid.
    """
    if path is None and (writing is None or uid_range is None):
        if uid_range is None:
            yield Owner(os.geteuid(), os.getegid(), None)
            return
        from sandbox.identity.leases import lease_any

        lease = lease_any(*uid_range)
        try:
            # The same number for both, as systemd does for DynamicUser=: no other process has the group.
            yield Owner(lease.uid, lease.uid, lease.fd)
        finally:
            lease.close()
        return
    from sandbox.identity.state import claim_of

    claim = claim_of(path, uid_range, manifest, writing, account)
    try:
        try:
            claim.take(parts)
            yield claim.owner
        except BaseException:
            with suppress(OSError):
                claim.undo()
            raise
    finally:
        claim.close()
