"""Find out which limits this machine can enforce, by making the cgroups of a launch without a plugin.

It does what a launch does: the same survey, the same choice of means, the same groups. A process joins them,
and they are removed. All of it runs in a child. There is one difference: where a launch would first have to
enable controllers (cgroup v2), the doctor does not try, because that would change a group that others may
use.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import psutil

from sandbox.doctor.finding import Finding, Status
from sandbox.doctor.trial import Note, TrialOutcome, in_child
from sandbox.limits.assign import assign, most_open_files
from sandbox.limits.assigned import AssignedLimit, Shares
from sandbox.limits.cgroup import Cgroup, CgroupFault, has_swap, make_cgroup, whole_disks
from sandbox.limits.cgroup_survey import (
    CONTROLLERS,
    DELEGATE,
    READ_ONLY,
    Lack,
    Survey,
    own_hierarchies,
    survey,
)
from sandbox.limits.rlimits import OPEN_FILES
from sandbox.limits.shares import shares_of
from sandbox.limits.uncounted import SPARE_BYTES, uncounted_bytes, unseen_machine
from sandbox.paths.mounts import Mounts, read_mounts
from sandbox.policy.policy import LimitRule, Policy
from sandbox.spawn.init import fork_into, join_cgroups
from sandbox.spec import Grant, Limits, Network

# Small enough for every machine: the process that joins ends at once.
_LIMITS = Limits(memory=64 << 20, pids=16, cpu=0.5, cpu_time=60.0, io=64 << 20)
TRIED_LIMITS = tuple(name for name in Limits._fields if getattr(_LIMITS, name) is not None)
# The names of the findings, and of the probe as a whole, should it fail.
LAYERS = frozenset((*(f"{name}_limit" for name in TRIED_LIMITS), "limits"))

_GRANT = Grant("", False, (), Network(), (), "default", _LIMITS, (), ())
_PREFER_ALL = Policy(
    "", "", limits=tuple((name, LimitRule(mode="prefer")) for name in TRIED_LIMITS), machine_share=1.0
)
_NO_MEMBERS = "no process can be moved into"
_SWAP_FILES = ("memory.swap.max", "memory.memsw.limit_in_bytes")

_AS_A_WHOLE = "and limit the container as a whole: docker run --memory … --pids-limit …"
_SWAP = Lack(
    "swap is on and this kernel does not count it per cgroup: a plugin at its memory limit would go on "
    "into swap",
    "swapoff -a, or start the kernel with swapaccount=1",
)


class Trial(NamedTuple):
    """A survey of cgroups without what failed when it was tried."""

    survey: Survey
    disks: tuple[tuple[int, int], ...]
    later: frozenset[str] = frozenset()  # controllers that a launch has to enable first
    kills: bool = False
    freezes: bool = False
    causes: tuple[tuple[str, str], ...] = ()  # controller -> swap, read_only


def limits(rules: Iterable[tuple[str, LimitRule]], move_host: bool = False) -> list[Finding]:
    """One finding for each limit. `rules`: the policy's limits. `move_host`: whether the policy lets the
    runner move other processes."""
    by_name = dict(rules)
    trial = try_survey(read_mounts(), move_host)
    held = {limit.name: limit for limit in assign(_GRANT, _PREFER_ALL, trial.survey, trial.disks).all}
    findings = [_finding(held[name], by_name.get(name, LimitRule()), trial) for name in TRIED_LIMITS]
    return [
        *findings,
        _swap(findings[0]),
        _killing(trial),
        _freezing(trial, by_name.get("disk", LimitRule())),
    ]


# --- the trial ----------------------------------------------------------------------------------------------


def try_survey(mounts: Mounts, move_host: bool) -> Trial:
    """Survey the cgroups and try them. The survey runs in this process: a child would count this process as
    another member of their group."""
    found = survey(mounts, move_host=move_host)
    disks = whole_disks(os.stat(place).st_dev for place in ("/", "/usr"))
    later = frozenset(name for site in found.sites for name in site.enable)
    ready = found._replace(
        sites=tuple(
            site._replace(controllers=site.controllers - set(site.enable), enable=(), leave=False, host=False)
            for site in found.sites
        )
    )
    outcome = in_child(lambda note: _try(ready, disks, note))
    lacks, causes = _read_only(found, mounts)
    found = found._replace(lacks=tuple(sorted({**dict(found.lacks), **lacks}.items())))
    for directory, controllers, message in _faults(outcome):
        gone = next((site.controllers for site in found.sites if site.directory == directory), frozenset())
        gone = gone if controllers is None else controllers
        lack = Lack(
            message if message.startswith(_NO_MEMBERS) else f"cgroup {message}",
            "find out what else makes or removes cgroups there, and run runner doctor again",
        )
        if any(name in message for name in _SWAP_FILES):
            lack = _SWAP
            causes["memory"] = "swap"
        found = found.without(directory, gone, lack)
    return Trial(
        found,
        disks,
        later,
        outcome.number("kills") == 1,
        outcome.number("freezes") == 1,
        tuple(causes.items()),
    )


def _try(found: Survey, disks: Sequence[tuple[int, int]], note: Note) -> None:
    """Make the groups; note each fault, and try again without what failed."""
    number = 0
    while True:
        try:
            with make_cgroup(assign(_GRANT, _PREFER_ALL, found, disks).sites, _LIMITS, disks) as cgroup:
                _join(cgroup)
                kills = any(os.path.exists(f"{group.path}/cgroup.kill") for group in cgroup.groups)
                note("kills", int(kills))
                note("freezes", int(cgroup.can_freeze))
            return
        except CgroupFault as fault:
            whole = str(fault).startswith((f"{fault.site.directory}: ", f"{_NO_MEMBERS} "))
            names = "*" if whole else ",".join(sorted(fault.controllers))
            note(f"fault {number}", f"{fault.site.directory}\n{names}\n{fault}")
            lack = Lack(str(fault), "")
            found = found.without(fault.site.directory, fault.controllers, lack)
            number += 1


def _join(cgroup: Cgroup) -> None:
    """Have a process join each group and end at once. Raises CgroupFault."""
    for group in cgroup.groups:
        with Cgroup([group]).open_handles() as handles:
            member, born_inside = fork_into(handles)
            if member == 0:
                try:
                    join_cgroups(handles, born_inside=born_inside)
                    os._exit(0)
                except OSError as error:
                    os._exit(error.errno or errno.EIO)
                finally:
                    os._exit(errno.EIO)
            code = os.waitstatus_to_exitcode(os.waitpid(member, 0)[1])
            if code:
                number = code if code > 0 else errno.EIO
                raise CgroupFault(group.site, group.site.controllers, f"{_NO_MEMBERS} {group.path}", number)


def _faults(outcome: TrialOutcome) -> Iterator[tuple[str, frozenset[str] | None, str]]:
    """The faults that `_try` noted: directory, controllers (None: all of them), message."""
    if outcome.error or outcome.late or outcome.signal:
        raise RuntimeError(outcome.error or "the trial of cgroups did not end by itself")
    for step, value in outcome.steps.items():
        if step.startswith("fault "):
            directory, names, message = str(value).split("\n", 2)
            yield directory, None if names == "*" else frozenset(names.split(",")), message


def _read_only(found: Survey, mounts: Mounts) -> tuple[dict[str, Lack], dict[str, str]]:
    """Hierarchies that are mounted read-only, as container engines do: the only thing that stops root."""
    lacking = {name for name, _ in found.lacks}
    bound = {name for own in own_hierarchies(mounts) if own.version == 1 for name in own.controllers}
    lacks: dict[str, Lack] = {}
    for own in own_hierarchies(mounts):
        try:
            read_only = os.statvfs(own.directory).f_flag & os.ST_RDONLY
        except OSError:  # hidden by another mount
            continue
        if read_only:
            names = own.controllers if own.version == 1 else set(CONTROLLERS) - bound
            lack = Lack(f"{own.directory} is mounted read-only, as in a container", READ_ONLY[own.version])
            lacks.update(dict.fromkeys(names & lacking, lack))
    return lacks, dict.fromkeys(lacks, "read_only")


# --- findings -----------------------------------------------------------------------------------------------


def _finding(limit: AssignedLimit, rule: LimitRule, trial: Trial) -> Finding:
    name, layer = limit.name, f"{limit.name}_limit"
    if not limit.degraded:
        summary = f"held by {limit.enforced_by}" + (f": {limit.detail}" if limit.detail else "")
        if name in trial.later:
            summary += ", after a launch has enabled the controller for its group"
            if any(site.host for site in trial.survey.sites):
                summary += " and moved the other processes of this unit to a group below it"
            return Finding(
                layer, "ok", summary, "not tried, because that would change a cgroup that others may use"
            )
        return Finding(layer, "ok", summary)
    required = rule.required(trial.survey.delegated)
    status: Status = "info" if rule.default is None else "missing" if required else "degraded"
    controller = "cpu" if name == "cpu_time" else name
    lack = trial.survey.lack(controller)
    if trial.survey.site(name) is not None:  # io, and no disk
        lack = Lack(limit.detail, "")
    # The weaker means, without the reason, which the summary already has.
    weak = limit.detail.removesuffix(lack.reason).removesuffix(": ")
    instead = f"{limit.enforced_by or 'nothing'}{f' ({weak})' if weak else ''}"
    cause = dict(trial.causes).get(controller, "cgroup")
    remedies = [lack.remedy]
    if required:
        remedies.append(
            f'or say mode = "prefer" under [limits.{name}] in a policy, which then has only {instead};'
        )
        remedies.append(_AS_A_WHOLE if cause == "read_only" else "every report then says so")
    return Finding(
        layer,
        status,
        f"{'cannot be held in full' if limit.enforced_by else 'is not enforced here'}: {lack.reason}",
        f"a plugin that has this limit {'is not started' if required else f'has only {instead}'}",
        "\n".join(filter(None, remedies)),
        cause,
    )


def _swap(memory: Finding) -> Finding:
    if not has_swap():
        return Finding("swap", "info", "this machine has no swap")
    if memory.status == "ok":
        return Finding("swap", "ok", "on; a plugin with a memory limit gets no swap")
    return Finding("swap", "info", "on; a plugin's memory can be swapped out", "see the memory limit")


def _killing(trial: Trial) -> Finding:
    if trial.kills:
        return Finding("cgroup_kill", "ok", "the kernel can kill all processes of a plugin at once")
    why = _not_made(trial, "cgroup.kill") or "no cgroup.kill here (it needs cgroup v2 and Linux 5.14)"
    return Finding("cgroup_kill", "info", f"{why}: a plugin is killed by ending its pid namespace")


def _freezing(trial: Trial, disk: LimitRule) -> Finding:
    if trial.freezes:
        return Finding("cgroup_freeze", "ok", "a plugin can be frozen while its folders are measured")
    why = _not_made(trial, "cgroup.freeze") or "no cgroup.freeze here (it needs cgroup v2)"
    return Finding(
        "cgroup_freeze",
        "info" if disk.default is None else "degraded",
        f"{why}: a plugin is stopped with SIGSTOP while its folders are measured",
        "one of many processes may go on writing meanwhile, beyond the disk limit",
        DELEGATE,
    )


def _not_made(trial: Trial, file: str) -> str:
    """The reason why a file of cgroups that the kernel has cannot be used for a plugin, or ''."""
    for own in trial.survey.own:
        if own.version == 2 and os.path.exists(f"{own.directory}/{file}"):
            why = "" if trial.survey.delegated else ", because nothing was delegated to this process"
            if os.statvfs(own.directory).f_flag & os.ST_RDONLY:
                why = ", because it is mounted read-only"
            return f"no group can be made in {own.directory}{why}"
    return ""


# --- what the whole machine shares ------------------------------------------------------------------------


def shares(rules: Iterable[tuple[str, LimitRule]], part: float) -> list[Finding]:
    """What one plugin may take of each machine-wide number, with the policy's default limits."""
    by_name = dict(rules)
    memory = by_name.get("memory", LimitRule()).default
    found, whole = shares_of(part), shares_of(1.0)
    return [
        _shared_memory(memory),
        _shared_files(found, whole, by_name),
        _shared_sockets(found, whole, memory),
        Finding(
            "shared_orphans",
            "info",
            f"a plugin may leave {found.orphans} of {whole.orphans} connections that it closed with data to "
            f"send, {found.describe('net.ipv4.tcp_max_orphans')}, and is ended if there are more",
            _NOT_OF_THE_HOST,
        ),
        _uncounted_memory(unseen_machine()),
    ]


def _uncounted_memory(unseen: str) -> Finding:
    """`unseen`: why the runner cannot see it, or ''."""
    layer = "uncounted_memory"
    if unseen:
        return Finding(
            layer,
            "degraded",
            f"kernel memory that no limit counts is not watched: {unseen}",
            "a plugin that finds a way to take such memory is ended by no limit",
            "run the runner where /proc is the kernel's own, without lxcfs and not in gVisor",
            "proc",
        )
    most = f"its memory limit and {SPARE_BYTES >> 20} MiB"
    return Finding(
        layer,
        "info",
        f"a plugin is ended if kernel memory that no limit counts grows by more than {most} while it works",
        f"now {uncounted_bytes() >> 20} MiB on this machine",
    )


_NOT_OF_THE_HOST = "not of a plugin with the host's network: there nobody can tell whose they are"


def _shared_memory(limit: float | None) -> Finding:
    """How many plugins with the default memory limit fit into the memory of this machine."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    summary = (
        f"{memory.available >> 20} of {memory.total >> 20} MiB are available, and {swap.free >> 20} MiB of "
        f"swap, on {psutil.cpu_count() or 1} processors"
    )
    if limit is None:
        return Finding("shared_memory", "info", summary, "by default the policy sets no memory limit")
    fitting = memory.available // int(limit)
    return Finding(
        "shared_memory",
        "info" if fitting else "degraded",
        f"{summary}: room for {fitting} plugins at their limit of {int(limit) >> 20} MiB",
        "" if fitting else "one plugin within its limit can use up the memory of this machine",
        "" if fitting else "lower limits.memory.default in the policy",
    )


def _shared_files(found: Shares, whole: Shares, rules: Mapping[str, LimitRule]) -> Finding:
    layer = "shared_files"
    if found.files is None:
        return Finding(layer, "info", "fs.file-max sets no bound on open files here: memory limits do")
    pids = rules.get("pids", LimitRule())
    asked = int(rules.get("open_files", LimitRule()).default or OPEN_FILES[1])
    each = [
        f"; each of {int(most)} processes{word} may open {min(asked, most_open_files(found, int(most)))}"
        for word, most in (("", pids.default), (" (the ceiling)", pids.ceiling))
        if most is not None
    ]
    return Finding(
        layer,
        "info",
        f"a plugin may hold {found.files} of {whole.files} open and mapped files, "
        f"{found.describe('fs.file-max')}, and is ended if it has more{''.join(each)}",
    )


def _shared_sockets(found: Shares, whole: Shares, memory: float | None) -> Finding:
    most, detail = found.socket_bytes, ""
    if memory is not None and memory < most:
        most, detail = int(memory), f"by its memory limit; its share would be {found.socket_bytes >> 20} MiB"
    share = f"{100 * most / whole.socket_bytes:.3g}% of net.ipv4.tcp_mem"
    return Finding(
        "shared_socket_memory",
        "info",
        f"a plugin's sockets may hold {most >> 20} of {whole.socket_bytes >> 20} MiB, {share}, "
        "and it is ended if they have more",
        detail,
    )
