"""Which mechanism enforces each limit of a plugin, on this machine, under this policy.

A limit is enforced in full, or by something weaker (an rlimit, which counts each process on its own), or not
at all. Anything less than full stops the launch unless the policy sets mode "prefer". Then `explain` and the
report show it. The launch also says it on stderr if the manifest or the command line asked for the limit, or
if it can be expected to work: for root, and in a delegated unit. `exec` enforces no protocol timeouts
(handshake, call, idle): only a host that speaks the protocol can.
"""

from __future__ import annotations

import math
import os

from sandbox.limits.assigned import AssignedLimit, AssignedLimits, Shares
from sandbox.limits.cgroup_survey import Lack, Survey
from sandbox.limits.rlimits import COUNTED_BESIDE, OPEN_FILES
from sandbox.limits.shares import shares_of
from sandbox.limits.site import Site
from sandbox.plan.layers import LayerUnavailable
from sandbox.policy.policy import Policy
from sandbox.spec import SECCOMP_WITHOUT_INTERNET, Grant, Limits
from sandbox.speed.typed import Iterable, Iterator

_CGROUPS = ("memory", "pids", "cpu", "io")
_BY_CGROUP = (*_CGROUPS, "cpu_time")
# Since Linux 5.14 every user namespace counts its processes itself. Before, all processes of one uid were one
# number, and an ordinary user's plugin would be counted with everything else that the user runs.
_NPROC_PER_NAMESPACE = (5, 14)
# A program with fewer may fail. Where this number for each process exceeds the share, only the meter bounds
# the total.
_FEWEST_OPEN_FILES = 64
_PER_PROCESS = "for each process separately"
_NO_CAGE = "the plugin runs without a cage"
_NO_DISK = "the plugin's files are not on a disk that a cgroup can limit"


def assign(
    grant: Grant,
    policy: Policy,
    survey: Survey,
    disks: Iterable[object] = ("?",),
    *,
    refuse: bool = True,
) -> AssignedLimits:
    """Choose a mechanism for each limit of `grant`. Raises LayerUnavailable if a required one has none.

    `disks`: the disks with the plugin's files; without one, an io limit has nothing to apply to. `refuse`:
    False for the report of a launch that was refused: then nothing is raised.
    """
    limits, decided = grant.limits, dict(grant.decided_by)
    shares = shares_of(policy.machine_share)
    found: list[AssignedLimit] = []
    announced: list[str] = []
    fallbacks: set[str] = set()
    for name in limits._fields:
        value = getattr(limits, name)
        if name == "open_files" and value is None:
            value = OPEN_FILES[1]  # every process has this limit, and the machine may allow less
        if value is None:
            continue
        limit = AssignedLimit(name, value, decided.get(name, "policy"), "", value)
        if name in _BY_CGROUP:
            limit = _assign_cgroup(limit, survey, disks)
            if refuse and limit.degraded and policy.limit(name).required(survey.delegated):
                raise _unavailable(name, survey)
            if limit.enforced_by.startswith("RLIMIT"):
                fallbacks.add(name)
                limit = _cap_by_rlimit(limit)
        elif grant.unsandboxed and name in ("tmp", "shm", "disk"):
            # Never refused: the policy itself allows the plugin to run without a cage.
            limit = limit._replace(effective=None, degraded=True, detail=_NO_CAGE)
        else:
            limit = _assign_other(limit, limits, grant)
        if not grant.unsandboxed:
            limit = _cap_by_share(limit, shares, limits.pids, grant)
        if limit.degraded and (_is_asked_for(limit, policy) or (name in _BY_CGROUP and survey.delegated)):
            announced.append(name)
        found.append(limit)
    sites = tuple(_needed_sites(limits, survey))
    return AssignedLimits(tuple(found), sites, frozenset(fallbacks), tuple(announced), shares)


def _is_asked_for(limit: AssignedLimit, policy: Policy) -> bool:
    """Whether the manifest or the command line asked for it: the policy's default did not decide. The
    policy's ceiling may have."""
    return limit.decided_by != "policy" or limit.requested != policy.limit(limit.name).default


def _cap_by_share(limit: AssignedLimit, shares: Shares, pids: int | None, grant: Grant) -> AssignedLimit:
    """Lower open_files to the plugin's share of the machine, and describe the share of open files and of
    socket memory."""
    effective, detail = limit.effective, ""
    if limit.name == "open_files" and shares.files is not None and effective is not None:
        detail = f"all processes together {shares.files}, with mapped files: {shares.describe('fs.file-max')}"
        most = most_open_files(shares, pids or 1)
        if effective > most:
            effective, detail = most, f"lowered, for {pids or 1} processes; {detail}"
    elif limit.name == "memory" and shares.socket_bytes < limit.requested and _counts_sockets(limit, grant):
        detail = f"in sockets {shares.socket_bytes >> 20} MiB at most: {shares.describe('net.ipv4.tcp_mem')}"
    return limit._replace(effective=effective, detail="; ".join(filter(None, (limit.detail, detail))))


def most_open_files(shares: Shares, pids: int) -> int:
    """The open files of each process, if there are `pids` of them. Only where the machine has a bound."""
    return max(_FEWEST_OPEN_FILES, (shares.files or 0) // pids)


def _counts_sockets(memory: AssignedLimit, grant: Grant) -> bool:
    """Whether the plugin can make sockets, and its sockets can be distinguished from the host's."""
    own = grant.network.mode != "host" or memory.enforced_by.startswith("cgroup")
    return own and grant.seccomp not in SECCOMP_WITHOUT_INTERNET


def _assign_cgroup(limit: AssignedLimit, survey: Survey, disks: Iterable[object]) -> AssignedLimit:
    name = limit.name
    if name == "cpu_time":
        if (site := survey.counts_cpu) is not None:
            return limit._replace(enforced_by=f"cgroup v{site.version}", detail="checked by the runner")
        whole = math.ceil(limit.requested)  # RLIMIT_CPU takes whole seconds only
        return limit._replace(enforced_by="RLIMIT_CPU", effective=whole, degraded=True, detail=_PER_PROCESS)
    site = survey.site(name)
    if site is not None and name == "io" and not list(disks):
        return limit._replace(
            effective=None,
            degraded=True,
            detail=_NO_DISK,
        )
    if site is not None:
        detail = "reads and synchronous writes only" if name == "io" and site.version == 1 else ""
        return limit._replace(enforced_by=f"cgroup v{site.version}", detail=detail)
    reason = survey.lack(name).reason
    if name == "memory":
        return limit._replace(
            enforced_by="RLIMIT_DATA",
            degraded=True,
            detail=f"{_PER_PROCESS}, and shared memory is not counted: {reason}",
        )
    if name == "pids" and _kernel_version() >= _NPROC_PER_NAMESPACE:
        return limit._replace(
            enforced_by="RLIMIT_NPROC", degraded=True, detail=f"hits are not counted: {reason}"
        )
    return limit._replace(effective=None, degraded=True, detail=reason)


def _assign_other(limit: AssignedLimit, limits: Limits, grant: Grant) -> AssignedLimit:
    match limit.name:
        case "open_files" | "locked_memory" | "message_queues":
            return _cap_by_rlimit(limit._replace(enforced_by="rlimit"))
        case "file_size":
            most = min(limit.requested, limits.disk or limit.requested)
            return _cap_by_rlimit(limit._replace(enforced_by="rlimit", effective=most))
        case "tmp" | "shm":
            return limit._replace(enforced_by="size of the mount")
        case "disk":
            if any(path.access == "write" for path in grant.paths):
                also = "; the scratch folder by the size of its mount" if grant.scratch is not None else ""
                return limit._replace(
                    enforced_by="runner", detail=f"measured in each folder the plugin may write{also}"
                )
            if grant.scratch is not None:
                return limit._replace(enforced_by="size of the mount", detail="of the scratch folder")
            return limit._replace(enforced_by="mounts", detail="the plugin has no folder to write to")
        case "output" | "output_lines":
            return limit._replace(enforced_by="runner", detail="of stderr; stdout is passed on unread")
        case "handshake" | "call" | "idle":
            return limit._replace(
                enforced_by="caller",
                effective=None,
                detail="only a host that speaks the protocol can enforce it; "
                "runner exec passes the streams on unread",
            )
        case _:
            return limit._replace(enforced_by="clock")


def _cap_by_rlimit(limit: AssignedLimit) -> AssignedLimit:
    """Lower a limit to the runner's own hard rlimit, which the plugin cannot exceed."""
    import resource

    kinds = {
        "open_files": resource.RLIMIT_NOFILE,
        "file_size": resource.RLIMIT_FSIZE,
        "locked_memory": resource.RLIMIT_MEMLOCK,
        "message_queues": resource.RLIMIT_MSGQUEUE,
        "memory": resource.RLIMIT_DATA,
        "pids": resource.RLIMIT_NPROC,
        "cpu_time": resource.RLIMIT_CPU,
    }
    _, ceiling = resource.getrlimit(kinds[limit.name])
    if ceiling == resource.RLIM_INFINITY or limit.effective is None:
        return limit
    if limit.name == "pids":
        ceiling = max(0, ceiling - COUNTED_BESIDE)
    return limit._replace(effective=min(limit.effective, ceiling))


def _needed_sites(limits: Limits, survey: Survey) -> Iterator[Site]:
    """The sites whose controllers are needed and, if there is one, a site to count processor time and to
    freeze and kill the plugin."""
    needed = [name for name in _CGROUPS if getattr(limits, name) is not None]
    sites = [site for name in needed if (site := survey.site(name)) is not None]
    if (sites or limits.cpu_time is not None or limits.disk is not None) and (counting := survey.counts_cpu):
        sites.append(counting)
    return iter(dict.fromkeys(sites))


def _unavailable(name: str, survey: Survey) -> LayerUnavailable:
    lack = survey.lack(name)
    if name == "cpu_time":
        lack = survey.lack("cpu")
    elif name == "io" and survey.site("io") is not None:
        lack = Lack(_NO_DISK, "ask for no io limit")
    return LayerUnavailable(
        name,
        f"the {name} limit cannot be enforced: {lack.reason}",
        f'{lack.remedy}; or say mode = "prefer" under [limits.{name}] in the policy',
    )


def _kernel_version() -> tuple[int, ...]:
    """Major and minor version of the kernel, from texts such as 6.1.0-13-arm64 and 5.10-rc7."""
    found = []
    for word in os.uname().release.split(".")[:2]:
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        found.append(int(digits or 0))
    return tuple(found)
