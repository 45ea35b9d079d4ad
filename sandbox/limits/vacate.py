"""Move the processes out of a cgroup v2, to groups below it, so that it can hand its controllers down.

A process is born in the group of its parent. So once every process of a group was moved, those that are
started later are below it too. Several runners may do this at once: each moves what it still finds.
"""

from __future__ import annotations

import errno
import os

from sandbox.facts import is_of_this_user, members, strangers
from sandbox.files import write_once
from sandbox.limits.site import HOST_LEAF

# Each pass moves all that were there when it began. What they have started meanwhile is for the next.
_PASSES = 100


def vacate(directory: str, leaf: str, *, host: bool) -> None:
    """Move our processes to `leaf`, and with `host` the others of this user to a leaf of their own. Raises
    OSError if somebody is left."""
    if not os.path.exists(f"{directory}/cgroup.type"):
        return  # the real root group hands down whoever is in it
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
