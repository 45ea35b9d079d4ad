"""Limits -> the kernel's resource limits, which apply to each process separately."""

from __future__ import annotations

import math
import resource

from sandbox.spec import Limits
from sandbox.speed.typed import Container

Rlimit = tuple[int, int, int]  # kind, soft, hard

# Soft and hard limit of each process, if neither manifest nor policy has a number.
OPEN_FILES = (1024, 4096)
# RLIMIT_NPROC counts the cage's own processes too: the cell's init, bwrap and bwrap's init.
COUNTED_BESIDE = 3


def rlimits(
    limits: Limits, fallbacks: Container[str] = (), open_files: int | None = None
) -> tuple[Rlimit, ...]:
    """The resource limits of every process of a plugin: fixed ones, the limits that are always resource
    limits, and the `fallbacks`, for which this machine has nothing better. `open_files`: the most that the
    plugin's share of the machine allows."""
    found = [
        _both(resource.RLIMIT_CORE, 0),
        _both(resource.RLIMIT_RTPRIO, 0),
        _both(resource.RLIMIT_NICE, 0),
        _both(resource.RLIMIT_SIGPENDING, 1024),
        _both(resource.RLIMIT_MSGQUEUE, limits.message_queues or 0),
        _both(resource.RLIMIT_MEMLOCK, limits.locked_memory or 64 << 10),
    ]
    soft, hard = OPEN_FILES if limits.open_files is None else (limits.open_files, limits.open_files)
    most = hard if open_files is None else min(hard, open_files)
    found.append((resource.RLIMIT_NOFILE, min(soft, most), most))
    # A single file cannot be larger than the limit of all files together.
    sizes = [size for size in (limits.file_size, limits.disk) if size is not None]
    if sizes:
        found.append(_both(resource.RLIMIT_FSIZE, min(sizes)))
    if limits.cpu_time is not None:
        # In whole seconds, for each process. If a cgroup counts the total, this is a safety net for the case
        # that the runner is stopped, so it allows a second more. Soft before hard: only SIGXCPU shows the
        # reason.
        seconds = math.ceil(limits.cpu_time) + (0 if "cpu_time" in fallbacks else 1)
        found.append((resource.RLIMIT_CPU, seconds, seconds + 1))
    if limits.memory is not None and "memory" in fallbacks:
        # Not RLIMIT_AS, which also counts memory that is reserved and never used (node: a gigabyte).
        found.append(_both(resource.RLIMIT_DATA, limits.memory))
    if limits.pids is not None and "pids" in fallbacks:
        found.append(_both(resource.RLIMIT_NPROC, limits.pids + COUNTED_BESIDE))
    return tuple(found)


def _both(kind: int, value: int) -> Rlimit:
    return kind, value, value
