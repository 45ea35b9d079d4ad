"""Move the processes of a cgroup v2 to groups below it, so that it can hand its controllers down.

A process starts in the group of its parent. So once every process of a group was moved, later ones are below
it too. Several runners may do this at once: each moves the processes that are left.
"""

from __future__ import annotations

import errno
import os

from sandbox.facts import is_of_this_user, members, strangers
from sandbox.files import write_once
from sandbox.limits.site import HOST_LEAF

# Each pass moves the processes that exist when it begins. The next pass moves those started meanwhile.
_PASSES = 100


def vacate(directory: str, leaf: str, *, host: bool) -> None:
    """Move our processes to the group `leaf` and, if `host`, the other processes of this user to HOST_LEAF.
    Raises OSError if a process cannot be moved."""
    if not os.path.exists(f"{directory}/cgroup.type"):
        return  # the real root group can hand down with processes in it
    for _ in range(_PASSES):
        found = members(directory)
        if not found:
            return
        others = strangers(found)
        if others and not host:
            raise OSError(errno.EBUSY, "")
        for pid in found:
            _move(pid, f"{directory}/{HOST_LEAF}" if pid in others else leaf, ours=pid not in others)
    raise OSError(errno.EBUSY, "")


def _move(pid: int, group: str, *, ours: bool) -> None:
    if not ours:
        if not is_of_this_user(pid):
            if not os.path.exists(f"/proc/{pid}"):
                return
            raise OSError(errno.EPERM, "")
        try:
            os.mkdir(group, 0o755)
        except FileExistsError:
            pass
    try:
        write_once(f"{group}/cgroup.procs", str(pid))
    except ProcessLookupError:  # it has ended
        pass
