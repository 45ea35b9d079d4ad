"""Overlays of a launch: the folders that the cell's init needs to mount them, and their numbers."""

from __future__ import annotations

import os
import stat

from sandbox.plan.plan import changes_of
from sandbox.spawn.order import OVERLAY, OverlayOrder, SpawnError
from sandbox.speed.scopes import ExitStack
from sandbox.speed.typed import Iterable, Sequence
from sandbox.speed.value import NamedTuple


class OverlaidFolder(NamedTuple):
    """A folder, and the one that keeps its changes: each with a descriptor and its name on the host."""

    dest: str
    lower: tuple[int, str]
    changes: tuple[int, str] | None  # has `upper` and `work`; None: they are in memory
    work: str
    owner: tuple[int, int] | None = None  # who appears as the plugin; None: the owner of the folder itself


def add_parts(
    stack: ExitStack,
    folders: Iterable[OverlaidFolder],
    plugin: tuple[int, int] | None,
    mounts: dict[str, tuple[int, bool]],
    binds: dict[str, tuple[int, str]],
) -> None:
    """Add both folders of each overlay to what the cell's init attaches or binds. `plugin`: the uid and gid
    that root drops to; None: it is the caller's own. Raises SpawnError."""
    if plugin is not None:
        from sandbox.identity.idmap import FileOwner, IdmapUnavailable, detached_mount, idmapped_mount
    for dest, lower, changes, _, staged_for in folders:
        if plugin is None:
            binds[_lower(dest)] = lower
            if changes is not None:
                binds[changes_of(dest)] = changes
            continue
        # The plugin's uid cannot go to the folders by name, and what it changes of root's files has to appear
        # as its own. Overlayfs never writes to a lower folder; this mount is read-only besides.
        held = os.fstat(lower[0])
        try:
            owner = FileOwner(*(staged_for or (held.st_uid, held.st_gid)))
            mapped = idmapped_mount(lower[0], owner, FileOwner(*plugin), read_only=True)
            stack.callback(os.close, mapped)
            mounts[_lower(dest)] = mapped, stat.S_ISDIR(held.st_mode)
            if changes is not None:
                detached = detached_mount(changes[0])
                stack.callback(os.close, detached)
                mounts[changes_of(dest)] = detached, True
        except IdmapUnavailable as refused:
            raise SpawnError(OVERLAY, refused.errno) from None


def overlay_orders(folders: Iterable[OverlaidFolder], numbers: Sequence[str]) -> tuple[OverlayOrder, ...]:
    """`numbers`: the names of all folders that are mounted before bwrap starts, each at its number."""
    return tuple(
        OverlayOrder(numbers.index(_lower(each.dest)), numbers.index(changes_of(each.dest)), each.work)
        for each in folders
    )


def _lower(dest: str) -> str:
    return f"lower of {dest}"  # as changes_of: no destination
