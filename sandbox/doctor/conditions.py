"""Facts about this machine on which no layer of the default policy depends, but that weaken or slow it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping

from sandbox import cache
from sandbox.doctor.finding import Finding
from sandbox.doctor.trial import in_child, system_call
from sandbox.doctor.user_namespaces import Surroundings, sysctl, sysctl_number, sysctl_remedy
from sandbox.paths import shims
from sandbox.paths.denied_paths import lexical_hit
from sandbox.paths.homes import homes

_LANDLOCK_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_SECCOMP_MODE_FILTER = 2
_CACHE_PLACES = "its home, XDG_CACHE_HOME, or /tmp (root: /var/cache or /run; in a container --tmpfs)"
_INTERPRETERS = ("python3", "node")


def core_dumps() -> Finding:
    pattern = sysctl("kernel.core_pattern") or ""
    if not pattern.startswith("|"):
        return Finding("core_dumps", "ok", "a crashing plugin starts no program of the host")
    return Finding(
        "core_dumps",
        "degraded",
        f"a crashing plugin starts a program of the host as root: {pattern[1:].split()[0]}",
        "kernel.core_pattern is a pipe, and RLIMIT_CORE=0 does not stop pipes",
        "as root: sysctl -w kernel.core_pattern=core; leave it only if that program can be trusted with "
        "hostile core dumps",
    )


def protected_links() -> list[Finding]:
    return [
        _protection(
            "hard_links",
            "fs.protected_hardlinks",
            "any user can hard-link a file that belongs to somebody else",
        ),
        _protection(
            "symlinks",
            "fs.protected_symlinks",
            "symbolic links of other users are followed in shared folders such as /tmp",
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
        "the cage does not depend on it: it opens paths component by component and judges the files it "
        "opened",
        sysctl_remedy(name, "1"),
    )


def interpreters(environ: Mapping[str, str]) -> list[Finding]:
    """Interpreters that are first on PATH, but that no plugin can be shown."""
    findings = []
    for name in _INTERPRETERS:
        found = shutil.which(name, path=environ.get("PATH", os.defpath))
        if found is None:
            findings.append(Finding(f"interpreter_{name}", "info", "not on PATH"))
            continue
        hit, place = _denied(found, homes(environ))
        manager = "" if hit else shims.manager_of(found)
        if not hit and not manager:
            findings.append(Finding(f"interpreter_{name}", "ok", found))
            continue
        other = next(
            (p for d in ("/usr/bin", "/usr/local/bin") if os.access(p := f"{d}/{name}", os.X_OK)), ""
        )
        if manager:
            instead = f"; {other} is used instead" if other else ""
            findings.append(
                Finding(
                    f"interpreter_{name}",
                    "degraded",
                    f"{found} is a shim of {manager}, whose files are not in the cage: "
                    f"no plugin can use it{instead}",
                    remedy=shims.remedy(name, manager),
                    cause="shim",
                )
            )
            continue
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
    """The denied path that covers `path`, and `path` as it was written or with links resolved."""
    for spelling in (os.path.abspath(path), os.path.realpath(path)):
        if hit := lexical_hit(spelling, denied_homes):
            return hit.denied, spelling
    return "", path


def manifest_cache() -> Finding:
    """The cache of manifests and policies, which saves more than half of the time of a launch."""
    place = cache.directory()
    if place is None:
        return Finding(
            "cache", "info", "no cache: RUNNER_CACHE=off is set, or this user has no home directory"
        )
    if why := cache.unusable(place):
        return Finding(
            "cache",
            "degraded",
            f"{place} is not used: {why}",
            "every launch reads manifest and policy again, and takes two to three times as long",
            f"make one of these directories writable for this user: {_CACHE_PLACES}",
        )
    return Finding("cache", "ok", place)


def surroundings(around: Surroundings) -> Finding:
    seen = [f"looks like a {around.container} container" if around.container else "no sign of a container"]
    if around.unit:
        seen.append(f"in the systemd service {around.unit}")
    if around.seccomp == _SECCOMP_MODE_FILTER:
        seen.append("this process runs under a seccomp filter")
    if around.no_new_privileges:
        seen.append("no_new_privs is set")
    if around.label:
        seen.append(f"AppArmor label {around.label}")
    if around.masked_proc:
        seen.append(f"{len(around.masked_proc)} parts of /proc are masked")
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
    request_of = {
        "ptrace_scope": (
            "kernel.yama.ptrace_scope",
            "plugins cannot trace processes: their seccomp filter refuses ptrace",
        ),
        "terminal_injection": (
            "dev.tty.legacy_tiocsti",
            (
                "plugins cannot type into a terminal: they have a session of their own, and their seccomp "
                "filter refuses TIOCSTI"
            ),
        ),
        "memfd_exec": ("vm.memfd_noexec", "a plugin that runs code from memory is still in its cage"),
    }
    return [
        Finding(
            layer,
            "info",
            f"{name} = {value}" if (value := sysctl(name)) is not None else f"no {name} here",
            why,
        )
        for layer, (name, why) in request_of.items()
    ]
