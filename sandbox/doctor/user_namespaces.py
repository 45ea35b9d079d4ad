"""Find out what refuses a user namespace here, and what to do about it.

Many layers refuse the same call with the same EPERM. They are distinguished by the order in which the kernel
asks them: a seccomp filter runs before the kernel checks anything, limits have an errno of their own, and
AppArmor changes the label of the process that it restricts.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sysconfig
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sandbox import CODE_ROOT
from sandbox.doctor.pages import page
from sandbox.doctor.trial import KILLED, NAMESPACES, NONSENSE, TrialOutcome, apparmor_label
from sandbox.identity.uid_range import id_is_mapped

FILTER = "policies/container/seccomp.json"
PROFILE = "policies/apparmor/runner"
UNIT = "policies/systemd/plugin-host.service"
_FLAGS = "--security-opt seccomp=FILE --security-opt apparmor=unconfined --security-opt"
_DOCKER = f"start the container with: docker run {_FLAGS} systempaths=unconfined …"
_PODMAN = f"start the container with: podman run {_FLAGS} unmask=ALL …"
_KUBERNETES = """in the container's securityContext:
  seccompProfile: {type: Localhost, localhostProfile: FILE}, procMount: Unmasked,
  appArmorProfile: {type: Unconfined}; and for the pod hostUsers: false"""
_WHY = f"""FILE: the runner's {FILTER}, in its image /usr/local/share/runner/seccomp.json;
without it seccomp=unconfined. What each of these is for: {{}}.
The plugins stay confined: the runner brings its own filter, masks and namespaces"""

_CAP_SETFCAP = 31


class Surroundings(NamedTuple):
    """What restricts this process from outside, read once."""

    uid: int
    capabilities: int  # effective
    seccomp: int  # 0 none, 1 strict, 2 filter
    no_new_privileges: bool
    label: str  # AppArmor's, empty without AppArmor
    max_user_namespaces: int | None
    userns_clone: int | None  # Debian's switch
    apparmor_restricts: int | None  # Ubuntu's switch
    chrooted: bool
    uid_mapped: bool
    container: str  # what it looks like, empty for none
    masked_proc: tuple[str, ...]  # mounts over parts of /proc
    unit: str = ""  # of systemd, empty for none


class NamespaceRefusal(NamedTuple):
    cause: str
    sentence: str
    remedy: str
    step: str = ""  # of trial.user_namespace, where the kernel itself refused


def read_surroundings() -> Surroundings:
    status = status_fields()
    points = mount_points()
    return Surroundings(
        uid=os.getuid(),
        capabilities=int(status.get("CapEff", "0"), 16),
        seccomp=int(status.get("Seccomp", "0")),
        no_new_privileges=status.get("NoNewPrivs") == "1",
        label=apparmor_label(),
        max_user_namespaces=sysctl_number("user.max_user_namespaces"),
        userns_clone=sysctl_number("kernel.unprivileged_userns_clone"),
        apparmor_restricts=sysctl_number("kernel.apparmor_restrict_unprivileged_userns"),
        # In a chroot the mount of the root directory is outside, so mountinfo has no mount at "/".
        chrooted=bool(points) and "/" not in points,
        uid_mapped=id_is_mapped(os.getuid()),
        container=container(),
        masked_proc=tuple(p for p in points if p.startswith("/proc/") and p != "/proc/sys/fs/binfmt_misc"),
        unit=unit(),
    )


def status_fields() -> dict[str, str]:
    """The fields of /proc/self/status."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def mount_points() -> tuple[str, ...]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            return tuple(line.split()[4] for line in file)
    except OSError:
        return ()


def sysctl_number(name: str) -> int | None:
    try:
        return int(sysctl(name) or "")
    except ValueError:
        return None


def sysctl(name: str) -> str | None:
    """The value, or None where this kernel has no such switch."""
    try:
        with open(f"/proc/sys/{name.replace('.', '/')}", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def container() -> str:
    """Guess the container engine, or ''. Only a hint: images are also unpacked onto real machines."""
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    try:
        with open("/run/systemd/container", encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        pass
    groups = _own_groups()
    for word, engine in (
        ("docker", "docker"),
        ("kubepods", "kubernetes"),
        ("libpod", "podman"),
        ("lxc", "lxc"),
    ):
        if word in groups:
            return engine
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    return os.environ.get("container", "")  # noqa: SIM112 -- systemd's convention


def unit() -> str:
    """The service of systemd that this process runs in, or ''. A login is in none."""
    for group in _own_groups().splitlines():
        names = [name for name in group.split("/") if name.endswith(".service")]
        if names and not names[-1].startswith("user@"):
            return names[-1]
    return ""


def _own_groups() -> str:
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def container_remedy(engine: str) -> str:
    """Explain how to start a container in which the cage can be built."""
    ways = {"podman": (_PODMAN,), "kubernetes": (_KUBERNETES,), "docker": (_DOCKER,)}
    return "\n".join(
        (
            *ways.get(engine, (_DOCKER, f"or: {_PODMAN.partition(': ')[2]}")),
            _WHY.format(page("containers.md")),
        )
    )


def refusal(outcome: TrialOutcome, around: Surroundings) -> NamespaceRefusal | None:
    """Why the steps of trial.user_namespace did not all work; None if they did."""
    if outcome.signal == signal.SIGSYS:
        return _seccomp("kills a process that asks for a user namespace", around, ("clone", "unshare"))
    if outcome.late:
        return NamespaceRefusal(
            "timeout",
            "the attempt took longer than 60 s",
            "find out what keeps this machine busy, and run runner doctor again",
        )
    if outcome.error:
        return NamespaceRefusal("error", outcome.error, "")
    if filtered := _filtered(outcome, around):
        return filtered
    for step in ("create", "map", *NAMESPACES, "slave", "tmpfs", "proc"):
        number = outcome.number(step)
        if number is not None and number < 0:
            calls = ("unshare",) if step in ("create", *NAMESPACES) else ("mount",)
            return _seccomp(f"kills a process that calls {calls[0]}", around, calls)
        if number:
            label = str(outcome.steps.get("label", ""))
            return _kernel_refusal(step, number, label, around)._replace(step=step)
    return None


def _filtered(outcome: TrialOutcome, around: Surroundings) -> NamespaceRefusal | None:
    """The refusal by a seccomp filter, if one of the calls returned another errno than the kernel's own."""
    # For these two the kernel asks first whether we may, so only a filter's kill tells without that right.
    may = outcome.number("map") == 0 and not any(outcome.number(name) for name in NAMESPACES)
    refused = [
        (call, answer)
        for call in NONSENSE
        if (answer := outcome.number(f"{call}_nonsense")) not in (NONSENSE[call], None)
        and (may or answer == KILLED or call not in ("pivot_root", "sethostname"))
    ]
    if not refused:
        return None
    answers = " and ".join(
        f"{call}{'(CLONE_NEWUSER)' if call in ('clone', 'unshare') else ''} with "
        f"{'SIGSYS' if answer == KILLED else errno.errorcode.get(answer or 0, answer)}"
        for call, answer in refused
    )
    return _seccomp(f"answers {answers}", around, tuple(call for call, _ in refused))


def _kernel_refusal(step: str, number: int, label: str, around: Surroundings) -> NamespaceRefusal:
    name = errno.errorcode.get(number, str(number))
    if step == "proc" and number == errno.EPERM and around.masked_proc:
        return NamespaceRefusal(
            "container",
            f"the kernel does not let this process mount a fresh /proc ({name}): "
            f"{len(around.masked_proc)} parts of the visible /proc "
            f"are masked, e.g. {around.masked_proc[0]}",
            masks_remedy(around),
        )
    if step == "create":
        if number in (errno.ENOSPC, errno.EUSERS):
            return _limit(name, around)
        if number in (errno.EINVAL, errno.ENOSYS):
            return NamespaceRefusal(
                "kernel",
                f"this kernel has no user namespaces ({name})",
                "use a kernel built with CONFIG_USER_NS=y",
            )
        if number == errno.EPERM and around.userns_clone == 0:
            return NamespaceRefusal(
                "sysctl:kernel.unprivileged_userns_clone",
                "kernel.unprivileged_userns_clone = 0 forbids user namespaces to ordinary users",
                sysctl_remedy("kernel.unprivileged_userns_clone", "1"),
            )
        if number == errno.EPERM and around.chrooted:
            return NamespaceRefusal(
                "chroot",
                "the kernel refuses user namespaces to a process in a chroot",
                "enter the tree with pivot_root (bwrap, systemd-nspawn, a container) instead of chroot",
            )
        if number == errno.EPERM and not around.uid_mapped:
            return NamespaceRefusal(
                "unmapped_uid",
                f"uid {around.uid} has no mapping in the user namespace that this process runs in",
                "map this uid in the outer user namespace",
            )
    if (
        step == "map"
        and number == errno.EPERM
        and around.uid == 0
        and not around.capabilities >> _CAP_SETFCAP & 1
    ):
        return NamespaceRefusal(
            "capabilities",
            "root without CAP_SETFCAP may not map uid 0 into a user namespace",
            "give the runner CAP_SETFCAP (docker: --cap-add SETFCAP), or start it as an ordinary user",
        )
    return _security_module(step, number, label, around)


def _security_module(step: str, number: int, label: str, around: Surroundings) -> NamespaceRefusal:
    name = errno.errorcode.get(number, str(number))
    what = {
        "create": "creating a user namespace",
        "map": "mapping ids in a user namespace",
        "slave": "separating the mounts",
        "tmpfs": "mounting a tmpfs",
        "proc": "mounting a fresh /proc",
    }.get(step, f"a {step} namespace")
    confined = label or around.label
    if around.apparmor_restricts or (confined and not confined.startswith("unconfined")):
        return NamespaceRefusal(
            "apparmor",
            f"AppArmor refuses {what} ({name}"
            + (f", profile {confined}" if confined else "")
            + (", kernel.apparmor_restrict_unprivileged_userns = 1)" if around.apparmor_restricts else ")"),
            container_remedy("docker") if "docker" in confined else apparmor_remedy(),
        )
    if around.container:
        return NamespaceRefusal(
            "container",
            f"{what} is refused ({name}), and this looks like a {around.container} container",
            container_remedy(around.container),
        )
    if number == errno.EACCES:
        return NamespaceRefusal(
            "security_module",
            f"a security module refuses {what} ({name})",
            "look for the denial in the audit log (ausearch -m avc, journalctl -k) and allow it for bwrap",
        )
    return NamespaceRefusal(
        "unknown", f"{what} is refused ({name})", "look for the denial in the kernel log: journalctl -k"
    )


def _limit(name: str, around: Surroundings) -> NamespaceRefusal:
    if around.max_user_namespaces == 0:
        return NamespaceRefusal(
            "sysctl:user.max_user_namespaces",
            f"user.max_user_namespaces = 0 allows no user namespace ({name})",
            sysctl_remedy("user.max_user_namespaces", "15000"),
        )
    return NamespaceRefusal(
        "limit",
        f"a limit on user namespaces is reached ({name}): the kernel nests them 32 deep, and an outer one "
        "may allow none",
        "start the runner in fewer nested containers, or raise user.max_user_namespaces in the outer one",
    )


def _seccomp(what: str, around: Surroundings, calls: tuple[str, ...]) -> NamespaceRefusal:
    remedy = filter_remedy(around, calls)
    return NamespaceRefusal("outer_seccomp", f"a seccomp filter around this process {what}", remedy)


# What systemd refuses each call by. SystemCallFilter= kills, unless SystemCallErrorNumber= is set.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "clone": ("RestrictNamespaces=no",),
    "unshare": ("RestrictNamespaces=no",),
    "mount": ("SystemCallFilter=@mount",),
    "umount2": ("SystemCallFilter=@mount",),
    "pivot_root": ("SystemCallFilter=@mount",),
    "sethostname": ("ProtectHostname=no", "SystemCallFilter=sethostname"),
    "openat2": ("RestrictSUIDSGID=no",),  # SystemCallFilter= has it in @file-system
    "keyctl": ("SystemCallFilter=@keyring",),
    "socket(AF_NETLINK)": ("RestrictAddressFamilies=AF_NETLINK",),
}


def filter_remedy(around: Surroundings, calls: Sequence[str]) -> str:
    """How to start the runner where no seccomp filter refuses `calls`, in the words of where it runs."""
    if around.container:
        return container_remedy(around.container)
    words: list[str] = []
    allowed: dict[str, list[str]] = {}
    for option in dict.fromkeys(option for call in calls for option in _OPTIONS[call]):
        name, _, value = option.partition("=")
        if value == "no":
            words.append(option)
        else:
            allowed.setdefault(name, []).append(value)
    told = ", ".join([*words, *(f"{name}= has to allow {' and '.join(v)}" for name, v in allowed.items())])
    unit = f"in the unit {around.unit}" if around.unit else "in a systemd unit"
    if around.unit:
        return f"{unit}: {told}. {CODE_ROOT}/{UNIT} has all that plugins need"
    return (
        f"start the runner without that filter: {unit}, {told}; in a container, "
        f"--security-opt seccomp={FILTER} (without that file: seccomp=unconfined)"
    )


def masks_remedy(around: Surroundings) -> str:
    """How to start the runner where no part of /proc is masked, in the words of where it runs."""
    if around.unit and not around.container:
        return (
            f"in the unit {around.unit}: ProtectKernelTunables=no, ProtectKernelLogs=no and ProcSubset=all, "
            "and no path below /proc in ReadOnlyPaths= or InaccessiblePaths="
        )
    return container_remedy(around.container)


def sysctl_remedy(name: str, value: str) -> str:
    keep = f"echo '{name} = {value}' > /etc/sysctl.d/60-runner-{name.split('.')[-1]}.conf"
    return f"as root: sysctl -w {name}={value}, and to keep it: {keep}"


def apparmor_remedy() -> str:
    """The commands that load the shipped AppArmor profile for this installation."""
    folder = os.path.realpath(sysconfig.get_path("scripts"))
    installed = "/etc/apparmor.d/runner"
    change = shlex.quote(f's|^@{{runner}} = .*|@{{runner}} = "{folder}"|')
    return (
        f"as root: sed {change} {shlex.quote(f'{CODE_ROOT}/{PROFILE}')} > {installed}\n"
        f"and load it: apparmor_parser -r {installed}\n"
        "It lets the command runner make user namespaces. A host that uses the library needs\n"
        "AppArmorProfile=runner in its unit, or aa-exec -p runner before its command"
    )
