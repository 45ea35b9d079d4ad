"""Limits as cgroup files: which value is written to which file, and the value the kernel made of it."""

from __future__ import annotations

import errno
import os

from sandbox.files import kernel_text
from sandbox.limits.site import Site
from sandbox.spec import Limits
from sandbox.speed.typed import Callable, Iterable, Iterator

# bwrap and the init it leaves in the cage: a plugin that may have 64 processes gets 64 of its own.
CAGE_PROCESSES = 2


_MOST_PIDS = 1 << 22  # PID_MAX_LIMIT: the kernel accepts no more


_CPU_PERIOD_MICROSECONDS = 100_000  # the kernel's default


_SHORTEST_CPU_QUOTA_MICROSECONDS = 1_000


def settings(
    site: Site, limits: Limits, devices: Iterable[tuple[int, int]] = ()
) -> Iterator[tuple[str, str, str]]:
    """(controller, file, value to write), in order."""
    has, v2 = site.controllers, site.version == 2
    if limits.memory is not None and "memory" in has:
        if v2:
            yield "memory", "memory.max", str(limits.memory)
            yield "memory", "memory.swap.max", "0"
            yield "memory", "memory.oom.group", "1"
        else:
            yield "memory", "memory.limit_in_bytes", str(limits.memory)
            yield "memory", "memory.memsw.limit_in_bytes", str(limits.memory)  # memory and swap together
            # v1 counts memory in network sockets separately, and without this setting not at all.
            yield "memory", "memory.kmem.tcp.limit_in_bytes", str(limits.memory)
    if limits.pids is not None and "pids" in has:
        most = limits.pids + CAGE_PROCESSES
        yield "pids", "pids.max", str(most) if most <= _MOST_PIDS else "max"
    if limits.cpu is not None and "cpu" in has:
        quota = max(_SHORTEST_CPU_QUOTA_MICROSECONDS, round(limits.cpu * _CPU_PERIOD_MICROSECONDS))
        if v2:
            yield "cpu", "cpu.max", f"{quota} {_CPU_PERIOD_MICROSECONDS}"
        else:
            yield "cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_MICROSECONDS)
            yield "cpu", "cpu.cfs_quota_us", str(quota)
    if limits.io is not None and "io" in has:
        for major, minor in devices:
            if v2:
                yield "io", "io.max", f"{major}:{minor} rbps={limits.io} wbps={limits.io}"
            else:
                for file in ("read", "write"):
                    yield "io", f"blkio.throttle.{file}_bps_device", f"{major}:{minor} {limits.io}"


def is_optional(file: str, error: OSError) -> bool:
    """Not every kernel counts swap; without swap there is nothing to limit. A kernel without network has no
    sockets to count."""
    if file == "memory.kmem.tcp.limit_in_bytes":
        return error.errno == errno.ENOENT
    if file not in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
        return False
    missing = error.errno in (errno.ENOENT, errno.EACCES, errno.EOPNOTSUPP)
    return missing and not has_swap()


def has_swap() -> bool:
    try:
        with open("/proc/swaps", "rb") as file:  # with names of files, which need not be ASCII
            return len(file.read().splitlines()) > 1
    except OSError:
        return False


def as_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def effective_limits(
    site: Site, limits: Limits, read: Callable[[str], str | None]
) -> Iterator[tuple[str, float]]:
    """The limits in force, by name: the kernel rounds written values. `read` reads a file of the group."""
    has, v2 = site.controllers, site.version == 2
    if limits.memory is not None and "memory" in has:
        value = as_number(read("memory.max" if v2 else "memory.limit_in_bytes"))
        if value is not None:
            yield "memory", value
    if limits.pids is not None and "pids" in has:
        value = as_number(read("pids.max"))
        if value is not None:
            yield "pids", value - CAGE_PROCESSES
    if limits.cpu is not None and "cpu" in has:
        words = read("cpu.max" if v2 else "cpu.cfs_quota_us") or ""
        if words.split()[:1] and words.split()[0].isdecimal():
            yield "cpu", int(words.split()[0]) / _CPU_PERIOD_MICROSECONDS
    if limits.io is not None and "io" in has:
        yield "io", limits.io


def whole_disks(devices: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The disks behind some st_dev, as (major, minor). A partition has no limits of its own. A filesystem
    that is on no single disk (overlay, btrfs, tmpfs) gives none."""
    found: dict[tuple[int, int], None] = {}
    for device in devices:
        place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
        if os.major(device) and os.path.exists(place):
            if os.path.exists(f"{place}/partition"):
                place = os.path.dirname(os.path.realpath(place))
            try:
                major, minor = kernel_text(f"{place}/dev").strip().split(":")
            except (OSError, ValueError):
                continue
            found[int(major), int(minor)] = None
    return tuple(found)
