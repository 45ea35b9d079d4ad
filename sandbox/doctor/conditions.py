"""What surrounds the cage and is worth knowing, although no layer of the default policy rests on it.

cgroups are here because budgets are not part of the cage itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Mapping

from sandbox.denylist import homes, lexical_hit
from sandbox.doctor.refusal import Surroundings, sysctl, sysctl_number, sysctl_remedy
from sandbox.doctor.trial import in_child, system_call
from sandbox.host import Finding
from sandbox.value import NamedTuple

_LANDLOCK_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_SECCOMP_MODE_FILTER = 2
_INTERPRETERS = ("python3", "node")
_CHILD_PREFIX = "runner-doctor-"
_V1_BUDGETS = ("memory", "pids", "cpu")


def core_dumps() -> Finding:
    pattern = sysctl("kernel.core_pattern") or ""
    if not pattern.startswith("|"):
        return Finding("core_dumps", "ok", "a crash starts no program of the host")
    return Finding(
        "core_dumps",
        "degraded",
        f"a crashing plugin starts a program of the host as root: {pattern[1:].split()[0]}",
        "core_pattern is a pipe, which RLIMIT_CORE=0 does not stop",
        "as root: sysctl -w kernel.core_pattern=core, unless that program is trusted with hostile core dumps",
    )


def protected_links() -> list[Finding]:
    return [
        _protection(
            "hard_links",
            "fs.protected_hardlinks",
            "anyone can make a second name for a file that is not theirs",
        ),
        _protection(
            "symlinks", "fs.protected_symlinks", "links of others are followed in shared folders such as /tmp"
        ),
    ]


def _protection(layer: str, name: str, danger: str) -> Finding:
    value = sysctl_number(name)
    if value is None:
        return Finding(layer, "info", f"{name} cannot be read here")
    if value:
        return Finding(layer, "ok", f"{name} = {value}")
    return Finding(
        layer,
        "degraded",
        f"{name} = 0: {danger}",
        "the cage does not depend on it: paths are opened link by link and judged by what they are",
        sysctl_remedy(name, "1"),
    )


def interpreters(environ: Mapping[str, str]) -> list[Finding]:
    """Interpreters a plugin's command would find first, but cannot be shown."""
    findings = []
    for name in _INTERPRETERS:
        found = shutil.which(name, path=environ.get("PATH", os.defpath))
        if found is None:
            findings.append(Finding(f"interpreter_{name}", "info", "not on PATH"))
            continue
        hit, place = _denied(found, homes(environ))
        if not hit:
            findings.append(Finding(f"interpreter_{name}", "ok", found))
            continue
        other = next(
            (p for d in ("/usr/bin", "/usr/local/bin") if os.access(p := f"{d}/{name}", os.X_OK)), ""
        )
        remedy = (
            f"name {other} in the manifest, or put its folder first on PATH"
            if other
            else f"install {name} system-wide"
        )
        findings.append(
            Finding(
                f"interpreter_{name}",
                "degraded",
                f"{place} lies below {hit}, which is denied: no plugin can use it",
                remedy=remedy,
                cause="denylist",
            )
        )
    return findings


def _denied(path: str, denied_homes: tuple[str, ...]) -> tuple[str, str]:
    """The denied path and the spelling of `path` it was found by, links resolved or not."""
    for spelling in (os.path.abspath(path), os.path.realpath(path)):
        if hit := lexical_hit(spelling, denied_homes):
            return hit, spelling
    return "", path


def surroundings(around: Surroundings) -> Finding:
    seen = [f"looks like a {around.container} container" if around.container else "no sign of a container"]
    if around.seccomp == _SECCOMP_MODE_FILTER:
        seen.append("a seccomp filter stands around this process")
    if around.no_new_privileges:
        seen.append("no_new_privs is set")
    if around.label:
        seen.append(f"AppArmor label {around.label}")
    if around.masked_proc:
        seen.append(f"{len(around.masked_proc)} mounts over parts of /proc")
    return Finding("surroundings", "info", "; ".join(seen))


def landlock() -> Finding:
    outcome = in_child(
        lambda note: note("abi", system_call("landlock_create_ruleset", 0, 0, _LANDLOCK_VERSION))
    )
    abi = outcome.number("abi")
    if abi is not None and abi > 0:
        return Finding("landlock", "info", f"ABI {abi}")
    return Finding(
        "landlock", "info", f"not here ({errno.errorcode.get(-(abi or 0), 'no answer')}); no layer needs it"
    )


def switches() -> list[Finding]:
    told_by = {
        "ptrace_scope": ("kernel.yama.ptrace_scope", "plugins cannot trace: the filter refuses ptrace"),
        "terminal_injection": (
            "dev.tty.legacy_tiocsti",
            "plugins cannot inject: own session, and the filter refuses TIOCSTI",
        ),
        "memfd_exec": ("vm.memfd_noexec", "running code from memory is no escape"),
    }
    return [
        Finding(
            layer,
            "info",
            f"{name} = {value}" if (value := sysctl(name)) is not None else f"no {name} here",
            why,
        )
        for layer, (name, why) in told_by.items()
    ]


# --- cgroups: information until budgets are enforced ----------------------------------------------


class Hierarchy(NamedTuple):
    kind: str  # "cgroup" or "cgroup2"
    controllers: frozenset[str]
    directory: str  # our own cgroup in it


def cgroups() -> Finding:
    hierarchies = own_cgroups()
    unified = next((h for h in hierarchies if h.kind == "cgroup2"), None)
    legacy = [h for h in hierarchies if h.kind == "cgroup" and h.controllers & set(_V1_BUDGETS)]
    if unified and not legacy:
        return _unified(unified)
    if legacy:
        mode = "hybrid" if unified else "v1"
        tried = {c: _child_allowed(h.directory) for c in _V1_BUDGETS for h in legacy if c in h.controllers}
        able = [name for name, fault in tried.items() if not fault]
        unable = [f"{name}: {fault}" for name, fault in tried.items() if fault]
        summary = f"{mode}; groups can be made for {', '.join(able) or 'no controller'}"
        remedy = "" if able else "budgets need root on cgroup v1, or a machine with cgroup v2 and delegation"
        return Finding("cgroups", "info", summary, "; ".join(unable), remedy, mode)
    return Finding(
        "cgroups",
        "info",
        "no cgroup file system is mounted",
        remedy="mount -t cgroup2 none /sys/fs/cgroup",
        cause="none",
    )


def own_cgroups() -> list[Hierarchy]:
    """Where this process is in every mounted hierarchy."""
    places: dict[frozenset[str], str] = {}  # controllers (none for v2) -> path below the hierarchy's root
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            places[frozenset(filter(None, names.split(",")))] = path
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            root, point = left.split()[3:5]
            kind, _, options = right.split()[:3]
            if kind not in ("cgroup", "cgroup2"):
                continue
            words = set(options.split(","))
            for controllers, path in places.items():
                if (kind == "cgroup2") != (not controllers) or not controllers <= words:
                    continue
                inside = os.path.relpath(path, root)
                if not inside.startswith(".."):
                    found.append(Hierarchy(kind, controllers, os.path.normpath(f"{point}/{inside}")))
    return found


def _child_name(directory: str) -> str:
    """A name for a cgroup of ours; those of doctors that were killed are swept."""
    for name in os.listdir(directory):
        pid = name.removeprefix(_CHILD_PREFIX)
        if pid != name and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            try:
                os.rmdir(f"{directory}/{name}")
            except OSError:
                pass  # not empty, or swept by somebody else
    return f"{directory}/{_CHILD_PREFIX}{os.getpid()}"


def _child_allowed(directory: str) -> str:
    """Make a cgroup below our own and remove it. Empty if that worked."""
    child = _child_name(directory)
    try:
        os.mkdir(child)
        os.rmdir(child)
    except OSError as refused:
        return refused.strerror or str(refused)
    return ""


def _unified(own: Hierarchy) -> Finding:
    child = _child_name(own.directory)
    remedy = (
        "run the runner in a delegated unit: systemd-run --user --scope -p Delegate=yes runner …, "
        "or Delegate=yes in its service file"
    )
    try:
        os.mkdir(child)
    except OSError as refused:
        return Finding(
            "cgroups", "info", f"v2, not delegated: {child}: {refused.strerror}", remedy=remedy, cause="v2"
        )
    try:
        moved = in_child(lambda note: note("join", _write(f"{child}/cgroup.procs", "0"))).number("join")
        available = _words(f"{own.directory}/cgroup.controllers")
        enabled = _words(f"{child}/cgroup.controllers")
        refused_controllers = [
            name for name in enabled if _write(f"{child}/cgroup.subtree_control", f"+{name}")
        ]
    finally:
        _remove(child)
    budgets = [name for name in enabled if name not in refused_controllers]
    if moved:
        summary = f"v2, not delegated: a process may not be moved ({errno.errorcode.get(moved, moved)})"
        return Finding("cgroups", "info", summary, remedy=remedy, cause="v2")
    if budgets:
        return Finding(
            "cgroups", "info", f"v2, delegated: groups made, joined, with {', '.join(budgets)}", cause="v2"
        )
    may = available and os.access(f"{own.directory}/cgroup.subtree_control", os.W_OK)
    # Not tried: it would change the group we share with others, and the kernel refuses it anyway while the
    # group itself holds processes.
    summary = (
        f"v2: groups can be made and joined; {', '.join(available) or 'no controllers'} not handed down yet"
    )
    return Finding(
        "cgroups", "info", summary, "handing down is permitted" if may else "", "" if may else remedy, "v2"
    )


def _remove(directory: str) -> None:
    """A member that was just reaped may count for a moment longer."""
    deadline = time.monotonic() + 1
    while True:
        try:
            return os.rmdir(directory)
        except OSError as refused:
            if refused.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _write(path: str, text: str) -> int:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as refused:
        return refused.errno or errno.EIO
    return 0


def _words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []
