"""Probes: find out by trying whether this machine can enforce each layer. Findings carry the remedy.

A probe never raises and never hangs: an error in it becomes its finding. None leaves anything behind.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from sandbox.doctor import conditions, ids, own_files
from sandbox.doctor import limits as limits
from sandbox.doctor.bwrap_version import bwrap_version
from sandbox.doctor.finding import Finding
from sandbox.doctor.pages import page
from sandbox.doctor.rehearsal import describe_run, foundation, rehearse
from sandbox.doctor.trial import (
    Note,
    drop_to,
    in_child,
    install_filter,
    note_errno,
    run_bwrap,
    run_spawned,
    system_call,
    system_call_number,
    try_user_namespace,
)
from sandbox.doctor.user_namespaces import (
    Surroundings,
    filter_remedy,
    masks_remedy,
    read_surroundings,
    refusal,
)
from sandbox.files import write_all
from sandbox.identity.leases import LEASES
from sandbox.identity.uid_range import usable_range
from sandbox.network.egress import EgressPlan
from sandbox.network.recipe import find_recipe
from sandbox.network.trial import RecipeRefusal, try_recipe
from sandbox.plan.bwrap import LAUNCHER
from sandbox.plan.find_bwrap import Bwrap, BwrapUnusable, find_bwrap
from sandbox.policy.policy import LimitRule
from sandbox.seccomp.filter import SeccompUnavailable, filter_bytes
from sandbox.spawn import launcher
from sandbox.spawn.machine_code import executable

# The layers a policy may name under [layers], and the findings about each.
POLICY_LAYERS: Mapping[str, tuple[str, ...]] = {
    "seccomp": ("seccomp", "seccomp_in_cage"),
    "uid": ("uid_drop",),
    "user_namespace_lock": ("nested_user_namespaces",),
    "cgroup_namespace": ("cgroup_namespace",),
    "session_keyring": ("session_keyring",),
}

# If one of these is missing, the default policy is not fully enforced. The other findings are information.
REQUIRED = frozenset(
    {
        "bwrap",
        "user_namespaces",
        "fresh_proc",
        "pid_namespace",
        "uid_drop",
        "session_keyring",
        "seccomp",
        "cage",
        "namespaces",
        "cgroup_namespace",
        "network",
        "nested_user_namespaces",
        "identity",
        "capabilities",
        "session",
        "fd_binds",
        "masked_proc",
        "scratch",
        "seccomp_in_cage",
        "read_only_root",
        "launcher",
    }
)

# What root needs so that each plugin can have a uid of its own. KILL: to end processes of another uid, also
# by the parent-death signal. CHOWN and FOWNER: to give it a state directory. DAC_OVERRIDE: to read that, and
# /proc.
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}
_MAP_UIDS = (
    "map them (podman: --uidmap, --gidmap; 65536 ids are enough), name a mapped range with [user] uids in "
    "the policy, or start the runner as an ordinary user"
)
_KEYCTL_JOIN_SESSION_KEYRING = 1
_LAUNCHER_REMEDY = (
    "let bubblewrap execute a memfd: an allowlist of programs (fapolicyd, IMA, a profile of "
    "SELinux or AppArmor) refuses them; the kernel log (journalctl -k) names the denial"
)
_SOME_HOSTS = EgressPlan(("example.com:443",))
_EVERY_PORT = EgressPlan(("*:*",), every_port=True)


class Machine(NamedTuple):
    """The inputs of the probes."""

    environ: Mapping[str, str]
    bwrap: Bwrap | None
    around: Surroundings
    uid_range: tuple[int, int]
    limits: tuple[tuple[str, LimitRule], ...] = ()  # of the policy to judge by
    move_host: bool = False  # by the same policy
    share: float = 0.25  # of the whole machine, by the same policy

    @property
    def plugin_uid(self) -> int | None:
        """The uid that a trial changes to; None for an ordinary user, who keeps their own."""
        return self.uid_range[1] if self.around.uid == 0 else None


def unmet(findings: Iterable[Finding], preferred: Iterable[str] = ()) -> tuple[Finding, ...]:
    """The findings that keep plugins from being started. `preferred`: layers that the policy does not
    require.

    A limit counts as missing only if the policy requires it: its finding already says so.
    """
    spared = {layer for name in preferred for layer in POLICY_LAYERS[name]}
    needed = (REQUIRED | limits.LAYERS) - spared
    return tuple(f for f in findings if f.status == "missing" and f.layer in needed)


def examine(
    environ: Mapping[str, str],
    *,
    uid_range: tuple[int, int],
    limits: tuple[tuple[str, LimitRule], ...],
    move_host: bool,
    share: float,
) -> tuple[Finding, ...]:
    """Run all probes. Findings about what the cage depends on come first.

    `limits`, `share`: the policy's limits and machine_share. `move_host`: whether the policy lets the runner
    move other processes to another group.
    """
    found: Bwrap | None = None
    findings: list[Finding] = []
    try:
        found = find_bwrap(environ)
        findings.append(_bwrap_finding(found))
    except BwrapUnusable as unusable:
        findings.append(
            Finding("bwrap", "missing", unusable.reason, remedy=unusable.hint, cause=unusable.rule)
        )
    except Exception as failed:  # noqa: BLE001 -- a probe's bug is a finding, not a traceback
        findings.append(_probe_failure("bwrap", failed))
    try:
        uids = usable_range(uid_range) or uid_range
        machine = Machine(environ, found, read_surroundings(), uids, limits, move_host, share)
    except Exception as failed:  # noqa: BLE001 -- a probe's bug is a finding, not a traceback
        # Without a readable /proc/self nothing below can be checked, so no layer counts as enforced.
        return (*findings, _probe_failure("user_namespaces", failed), _probe_failure("cage", failed))
    for layer, probe in _PROBES.items():
        findings += run_probe(layer, probe, machine)
    return tuple(findings)


# In the order in which a launch needs them.
_FOUNDATIONS = ("uid_drop", "user_namespaces", "session_keyring", "seccomp")
_ABOVE = ("pid_namespace", "cage")  # fail for what the others lack, and then say nothing new


def obstacles(
    environ: Mapping[str, str], *, uid_range: tuple[int, int], preferred: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """Every layer that keeps plugins from being started, after a launch has failed.

    `preferred`: layers that the policy does not require.
    """
    try:
        machine = Machine(environ, find_bwrap(environ), read_surroundings(), uid_range)
    except (BwrapUnusable, OSError):
        return ()
    spared = tuple(preferred)
    found: list[Finding] = []
    for layers in (_FOUNDATIONS, _ABOVE):
        for layer in layers:
            found += (
                each
                for each in unmet(run_probe(layer, _PROBES[layer], machine), spared)
                if each.cause != "probe_failed"
            )
        if found:
            break
    return tuple(found)


def run_probe(
    layer: str, probe: Callable[[Machine], Finding | list[Finding]], machine: Machine
) -> list[Finding]:
    try:
        found = probe(machine)
    except Exception as failed:  # noqa: BLE001 -- a probe's bug is a finding, not a traceback
        return [_probe_failure(layer, failed)]
    return found if isinstance(found, list) else [found]


def _probe_failure(layer: str, failed: Exception) -> Finding:
    return Finding(
        layer, "missing", f"this check itself failed: {type(failed).__name__}: {failed}", cause="probe_failed"
    )


# --- bwrap ----------------------------------------------------------------------------------------


def _bwrap_finding(bwrap: Bwrap) -> Finding:
    detail = "; ".join(f"skipped: {fault}" for fault in bwrap.faults)
    return Finding(
        "bwrap", "ok", f"{bwrap.path}, which only root can change; not setuid, no file capabilities", detail
    )


# --- what the cage depends on ---------------------------------------------------------------------


def user_namespaces(machine: Machine) -> list[Finding]:
    # uid_drop reports a root that cannot drop its uid. Then root's own namespaces are tried instead.
    uid = None if _cannot_drop(machine) else machine.plugin_uid
    who = f"uid {machine.around.uid if uid is None else uid}"
    refused = refusal(try_user_namespace(uid), machine.around)
    works = Finding("user_namespaces", "ok", f"{who} made a user namespace, mapped its ids and mounted in it")
    if refused is None:
        return [works]
    if (
        refused.cause == "apparmor"
        and uid is not None
        and machine.bwrap
        and _bwrap_may(machine.bwrap.path, uid)
    ):
        # Under root, only bwrap makes one after the uid is dropped, and a profile may allow that.
        allowed = "an AppArmor profile allows them for bwrap"
        return [Finding("user_namespaces", "ok", allowed, refused.sentence)]
    fault = (refused.sentence, f"tried as {who}", refused.remedy, refused.cause)
    if refused.step == "proc":
        return [works, Finding("fresh_proc", "missing", *fault)]
    found = [Finding("user_namespaces", "missing", *fault)]
    if masked := machine.around.masked_proc:
        found.append(
            Finding(
                "fresh_proc",
                "missing",
                f"{len(masked)} parts of the visible /proc are masked, e.g. {masked[0]}: the kernel would "
                "not let a plugin have a fresh one",
                "not tried, because there is no user namespace to try it in",
                masks_remedy(machine.around),
                "container",
            )
        )
    return found


def _bwrap_may(path: str, uid: int) -> bool:
    return all(finding.status == "ok" for finding in rehearse(path, uid))


def pid_namespace(machine: Machine) -> Finding:
    """The pid namespace that our own spawner makes: all processes in it die with its first one."""
    run = run_spawned(("/bin/sh", "-c", "readlink /proc/self/ns/pid"), uid=machine.plugin_uid)
    if run.worked and run.output.strip() not in ("", os.readlink("/proc/self/ns/pid")):
        return Finding("pid_namespace", "ok", "a program got a pid namespace of its own")
    remedy = "follow the remedies for user namespaces, fresh proc and uid drop"
    return Finding("pid_namespace", "missing", describe_run(run), remedy=remedy, cause="spawner")


def cage(machine: Machine) -> list[Finding]:
    if machine.bwrap is None:
        return [
            Finding(
                "cage",
                "missing",
                "not tried, because there is no usable bwrap",
                remedy="follow the remedy for bwrap",
                cause="bwrap",
            )
        ]
    try:
        program = filter_bytes("default")
    except SeccompUnavailable as unavailable:
        return [
            *rehearse(machine.bwrap.path, machine.plugin_uid),
            Finding("seccomp_in_cage", "missing", str(unavailable), cause="no_filter"),
        ]
    findings = rehearse(machine.bwrap.path, machine.plugin_uid, program)
    if all(finding.status == "ok" for finding in findings):
        findings.append(launcher_in_cage(machine.bwrap.path, machine.plugin_uid))
    return findings


def launcher_in_cage(bwrap: str, uid: int | None) -> Finding:
    """Whether the launcher, our own program that starts every plugin, can be executed in a cage."""
    options = [*foundation(), "--proc", "/proc", "--chdir", "/"]
    null = os.open(os.devnull, os.O_RDWR)
    streams = os.dup(null), os.dup(null), os.dup(null)
    report_fd = os.memfd_create("report")
    try:
        file = executable("runner-launcher")
        path, detail, own = launcher.PATH.format(file), "executed from memory", file
    except PermissionError:
        file = os.memfd_create("launcher")
        options += ["--perms", "0555", "--file", str(file), LAUNCHER]
        path, detail, own = (
            LAUNCHER,
            "executed from a file in the cage, because vm.memfd_noexec forbids executing memory",
            -1,
        )
    try:
        write_all(file, launcher.image(streams, own, report_fd))
        os.lseek(file, 0, os.SEEK_SET)
        command = (path, "/bin/sh", "-c", ":")
        run = run_bwrap(bwrap, options, command, uid=uid, descriptors=(*streams, report_fd, file))
        report = launcher.read_report(os.pread(report_fd, 64, 0))
    finally:
        for fd in (null, *streams, report_fd, file):
            os.close(fd)
    if run.worked and report.executed:
        return Finding(
            "launcher",
            "ok",
            "the launcher, which connects a plugin's standard streams, runs in a cage",
            detail,
        )
    why = f"it could not execute a shell: {os.strerror(report.errno)}" if report.errno else describe_run(run)
    return Finding(
        "launcher",
        "missing",
        f"the launcher, which connects a plugin's standard streams, does not run in a cage: {why}",
        detail,
        _LAUNCHER_REMEDY,
        "launcher",
    )


def named_hosts() -> list[Finding]:
    """Whether a plugin can be given a list of hosts: its network namespace is made as in a launch."""
    try:
        try_recipe(find_recipe(_SOME_HOSTS))
    except RecipeRefusal as refused:
        return [
            Finding(
                "named_hosts",
                "missing",
                f"no plugin can be given a list of hosts: {refused}",
                remedy="follow the remedies for user namespaces and network; in a container, its seccomp "
                f"filter has to allow unshare and netlink sockets ({page('containers.md')})",
                cause="network_namespace",
            )
        ]
    works = Finding("named_hosts", "ok", "a network namespace for a list of hosts was made and set up")
    try:
        try_recipe(find_recipe(_EVERY_PORT))
    except RecipeRefusal as refused:
        return [
            works,
            Finding(
                "every_port",
                "info",
                f'rules for every port (example.com:*) and network = "open" are refused: {refused}',
                remedy="use a kernel built with CONFIG_NF_TABLES, CONFIG_NFT_NAT and CONFIG_NFT_REDIR, "
                "or list the ports",
                cause="nftables",
            ),
        ]
    return [works, Finding("every_port", "ok", "nftables redirected every port in that namespace")]


def uid_drop(machine: Machine) -> Finding:
    last = machine.uid_range[1]
    if machine.around.uid != 0:
        return Finding(
            "uid_drop",
            "info",
            f"not root: plugins run as uid {machine.around.uid}, mapped to nobody inside",
            "all plugins of this user have the same uid outside, by which the kernel counts processes "
            "and inotify watches",
        )
    if fault := _cannot_drop(machine):
        return Finding("uid_drop", "missing", fault[0], remedy=fault[1], cause=fault[2])
    outcome = in_child(lambda note: _drop_uid(last, note))
    if outcome.error or outcome.signal or outcome.late:
        return Finding(
            "uid_drop",
            "missing",
            f"changing to uid {last} failed: {outcome.error or outcome}",
            cause="uid_drop",
        )
    for step, sentence in (
        ("regain", "the process could become root again"),
        ("shadow", "/etc/shadow could be read"),
    ):
        if outcome.number(step) == 0:
            return Finding(
                "uid_drop", "missing", f"after changing to uid {last}, {sentence}", cause="ineffective"
            )
    return Finding("uid_drop", "ok", f"a process changed to uid {last} and could not become root again")


def _drop_uid(uid: int, note: Note) -> None:
    drop_to(uid)
    for step, act in (("regain", _become_root), ("shadow", _read_shadow)):
        try:
            act()
            note(step, 0)
        except OSError as refused:
            note(step, refused.errno or errno.EIO)


def _become_root() -> None:
    os.setresuid(0, 0, 0)


def _read_shadow() -> None:
    os.close(os.open("/etc/shadow", os.O_RDONLY | os.O_CLOEXEC))


def _cannot_drop(machine: Machine) -> tuple[str, str, str] | None:
    """Why this root cannot change to a plugin's uid: (reason, remedy, cause), or None. None for other
    users."""
    if machine.around.uid != 0:
        return None
    first, last = machine.uid_range
    lacking = [name for name, bit in _CAPABILITIES.items() if not machine.around.capabilities >> bit & 1]
    if lacking:
        named = " and ".join(f"CAP_{name}" for name in lacking)
        options = " ".join(f"--cap-add {name}" for name in lacking)
        return (
            f"this root lacks {named}: it cannot run plugins with uids of their own and end them",
            (
                f"give them to the runner (docker: {options}; systemd: CapabilityBoundingSet=), or start it "
                "as an ordinary user"
            ),
            "capabilities",
        )
    if usable_range(machine.uid_range) is None:
        return (
            f"uids {first}-{last} for plugins are not mapped in the user namespace that this process runs in",
            _MAP_UIDS,
            "unmapped_uid",
        )
    place = os.path.dirname(LEASES)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if not os.access(place, os.W_OK):
        return (
            f"no uid can be leased, because {place} cannot be written",
            f"make {place} writable",
            "leases",
        )
    return None


def seccomp(machine: Machine) -> Finding:
    """Install a filter that makes getppid() fail with an errno of our choice, and call it."""
    del machine
    marker = errno.ENOTUNIQ  # an errno that getppid() never returns otherwise
    outcome = in_child(lambda note: _filtered_getppid(marker, note))
    if outcome.number("getppid") == -marker:
        return Finding("seccomp", "ok", "a seccomp filter was installed and had its effect")
    number = outcome.number("install") or 0
    what = errno.errorcode.get(number, "") or outcome.error or f"signal {outcome.signal}"
    if number == errno.EINVAL:
        remedy = "use a kernel built with CONFIG_SECCOMP_FILTER=y"
    else:
        remedy = "start the runner without the outer seccomp filter that refuses prctl(PR_SET_SECCOMP)"
    return Finding(
        "seccomp", "missing", f"no seccomp filter can be installed ({what})", remedy=remedy, cause=what
    )


def _filtered_getppid(marker: int, note: Note) -> None:
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 0),  # seccomp_data.nr
            (equal, 0, 1, system_call_number("getppid")),
            (answer, 0, 0, 0x00050000 | marker),  # SECCOMP_RET_ERRNO
            (answer, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
        )
    )
    if note_errno(note, "install", install_filter(program)):
        return
    note("getppid", system_call("getppid"))


def _most_keys() -> str:
    """How many plugins an ordinary user can run at once. For root each plugin has a uid of its own."""
    if os.geteuid() == 0:
        return ""
    try:
        most = Path("/proc/sys/kernel/keys/maxkeys").read_text().strip()
    except OSError:
        return ""
    return f"; each plugin has one, and this user may have {most} (kernel.keys.maxkeys)"


def session_keyring(machine: Machine) -> Finding:
    """Whether a session keyring can be joined. In an inherited one, plugins could read each other's keys."""
    outcome = in_child(
        lambda note: note("join", system_call("keyctl", _KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0))
    )
    joined = outcome.number("join")
    if joined is not None and joined > 0:
        return Finding("session_keyring", "ok", f"a new session keyring was joined{_most_keys()}")
    if joined == -errno.ENOSYS:
        return Finding(
            "session_keyring",
            "missing",
            "this kernel has no keyrings, or a seccomp filter hides them (ENOSYS)",
            remedy="use a kernel built with CONFIG_KEYS=y",
            cause="kernel",
        )
    what = errno.errorcode.get(-joined, "") if joined else outcome.error or f"signal {outcome.signal}"
    if outcome.signal == signal.SIGSYS:
        what = "SIGSYS"
    full = joined == -errno.EDQUOT
    return Finding(
        "session_keyring",
        "missing",
        f"no new session keyring can be joined: keyctl is answered with {what}"
        + (" by the seccomp filter around this process" if machine.around.seccomp and not full else ""),
        remedy="as root: raise kernel.keys.maxkeys" if full else filter_remedy(machine.around, ("keyctl",)),
        cause="keyring",
    )


_PROBES: Mapping[str, Callable[[Machine], Finding | list[Finding]]] = {
    "bwrap_version": lambda machine: [bwrap_version(machine.bwrap.path)] if machine.bwrap else [],
    "user_namespaces": user_namespaces,
    "pid_namespace": pid_namespace,
    "uid_drop": uid_drop,
    "uid_range": lambda machine: ids.uid_range(machine.around.uid, *machine.uid_range),
    "uid_pool": lambda machine: ids.uid_pool(machine.around.uid, *machine.uid_range),
    "session_keyring": session_keyring,
    "seccomp": seccomp,
    "cage": cage,
    "named_hosts": lambda machine: named_hosts(),
    "limits": lambda machine: limits.limits(machine.limits, machine.move_host),
    "shares": lambda machine: limits.shares(machine.limits, machine.share),
    "core_dumps": lambda machine: conditions.core_dumps(),
    "links": lambda machine: conditions.protected_links(),
    "interpreters": lambda machine: conditions.interpreters(machine.environ),
    "cache": lambda machine: conditions.manifest_cache(),
    "state_directory": lambda machine: own_files.state_directory(machine.environ),
    "package_overlays": lambda machine: own_files.package_overlays(machine.environ, machine.plugin_uid),
    "own_code": lambda machine: own_files.own_code(machine.around.uid),
    "surroundings": lambda machine: conditions.surroundings(machine.around),
    "landlock": lambda machine: conditions.landlock(),
    "switches": lambda machine: conditions.switches(),
}
