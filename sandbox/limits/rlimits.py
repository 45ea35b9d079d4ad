"""Limits -> resource limits of the kernel, which hold for each process on its own."""

from __future__ import annotations

import math
import resource
from collections.abc import Container

from sandbox.spec import Limits

Rlimit = tuple[int, int, int]  # kind, soft, hard

# Where processes are counted by user namespace, those of the cage count too: init, bwrap and its init.
COUNTED_BESIDE = 3


def rlimits(limits: Limits, fallbacks: Container[str] = ()) -> tuple[Rlimit, ...]:
    """What every process of a plugin is held to: hygiene, the limits that are resource limits by nature, and
    the `fallbacks`, limits for which this machine has nothing better."""
    found = [
        _both(resource.RLIMIT_CORE, 0),
        _both(resource.RLIMIT_RTPRIO, 0),
        _both(resource.RLIMIT_SIGPENDING, 1024),
        _both(resource.RLIMIT_MSGQUEUE, limits.message_queues or 0),
        _both(resource.RLIMIT_MEMLOCK, limits.locked_memory or 64 << 10),
    ]
    if limits.open_files is None:
        found.append((resource.RLIMIT_NOFILE, 1024, 4096))
    else:
        found.append(_both(resource.RLIMIT_NOFILE, limits.open_files))
    # A single file cannot be larger than all of them together may be.
    sizes = [size for size in (limits.file_size, limits.disk) if size is not None]
    if sizes:
        found.append(_both(resource.RLIMIT_FSIZE, min(sizes)))
    if limits.cpu_time is not None:
        # Whole seconds, and each process on its own. Where somebody counts all of them this is for the case
        # that he is stopped, and comes second. Soft before hard: SIGXCPU says why, SIGKILL does not.
        seconds = math.ceil(limits.cpu_time) + (0 if "cpu_time" in fallbacks else 1)
        found.append((resource.RLIMIT_CPU, seconds, seconds + 1))
    if limits.memory is not None and "memory" in fallbacks:
        # Not RLIMIT_AS: what is reserved and never touched (node: a gigabyte) would count.
        found.append(_both(resource.RLIMIT_DATA, limits.memory))
    if limits.pids is not None and "pids" in fallbacks:
        found.append(_both(resource.RLIMIT_NPROC, limits.pids + COUNTED_BESIDE))
    return tuple(found)


def _both(kind: int, value: int) -> Rlimit:
    return kind, value, value
