"""Which disk a file is on, as cgroups name it."""

from __future__ import annotations

import os
from collections.abc import Iterable


def whole_disks(devices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The disks behind some st_dev, as (major, minor). A partition has no limits of its own; a filesystem
    that is on no single disk (overlay, btrfs, tmpfs) has none to find."""
    found: dict[tuple[int, int], None] = {}
    for device in devices:
        place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
        if os.major(device) and os.path.exists(place):
            if os.path.exists(f"{place}/partition"):
                place = os.path.dirname(os.path.realpath(place))
            try:
                with open(f"{place}/dev", encoding="ascii") as file:
                    major, minor = file.read().strip().split(":")
            except (OSError, ValueError):
                continue
            found[int(major), int(minor)] = None
    return tuple(found)
