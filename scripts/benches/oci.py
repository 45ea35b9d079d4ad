"""A bundle for runc and crun that confines as a bwrap command line does: the same namespaces, mounts, limits
and system calls.

It is made from that command line and not from a plan, so that both confine in the same way.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import policies
from sandbox.seccomp import syscalls

# bwrap's options that take no word; all others here take those of _WORDS.
_FLAGS = frozenset(
    [
        "--unshare-user",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-net",
        "--unshare-cgroup",
        "--disable-userns",
        "--assert-userns-disabled",
        "--new-session",
        "--die-with-parent",
        "--clearenv",
    ]
)
_WORDS = {"--ro-bind": 2, "--bind": 2, "--symlink": 2, "--setenv": 2, "--file": 2}
_NAMESPACES = {
    "--unshare-user": "user",
    "--unshare-pid": "pid",
    "--unshare-ipc": "ipc",
    "--unshare-uts": "uts",
    "--unshare-net": "network",
    "--unshare-cgroup": "cgroup",
}
# The ids of the container: 0 is for the engine, the other one is the plugin's.
_FIRST_ID, _IDS = 100_000, 65_536

Option = tuple[str, tuple[str, ...]]


def options(argv: Sequence[str]) -> Iterator[Option]:
    """bwrap's options with their words, and at last "--" with the program's."""
    words = iter(argv[1:])
    for word in words:
        if word == "--":
            yield word, tuple(words)
        else:
            count = 0 if word in _FLAGS else _WORDS.get(word, 1)
            yield word, tuple(next(words) for _ in range(count))


def make_bundle(bundle: Path, argv: Sequence[str], files: Mapping[int, str]) -> None:
    """`argv` and `files`: of bwrap. The folders that are mounted upon are made in the bundle's root."""
    root = bundle / "rootfs"
    root.mkdir(parents=True)
    mounts: list[dict[str, Any]] = []
    namespaces = ["mount"]
    ids, environ, size, mode, directory, hostname = [0, 0], [], "", "755", "/", ""
    program: tuple[str, ...] = ()
    masked = []
    for option, words in options(argv):
        match option:
            case "--uid":
                ids[0] = int(words[0])
            case "--gid":
                ids[1] = int(words[0])
            case "--hostname":
                hostname = words[0]
            case "--chdir":
                directory = words[0]
            case "--setenv":
                environ.append("=".join(words))
            case "--size":
                size = words[0]
            case "--perms":
                mode = words[0]
            case "--ro-bind" | "--bind" if words[0] == "/dev/null":
                masked.append(words[1])
            case "--ro-bind" | "--bind":
                ends = ["rbind", "nosuid", "nodev", *(["ro"] if option == "--ro-bind" else [])]
                mounts.append(_mount(words[1], "bind", ends, words[0]))
                _make_target(root, words[1], os.path.isdir(words[0]))
            case "--symlink":
                target = root / words[1].lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(words[0])
            case "--file":
                target = root / words[1].lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(Path(files[int(words[0])]).read_bytes())
            case "--tmpfs":
                # Without a size bwrap has none either.
                ends = ["nosuid", "nodev", f"mode={mode}", *([f"size={size}"] if size else [])]
                mounts.append(_mount(words[0], "tmpfs", ends))
                _make_target(root, words[0], folder=True)
            case "--proc":
                mounts.append(_mount(words[0], "proc", ["nosuid", "noexec", "nodev"]))
                _make_target(root, words[0], folder=True)
            case "--dev":
                # The engine itself adds the devices that bwrap's --dev has.
                mounts.append(_mount(words[0], "tmpfs", ["nosuid", "mode=755", "size=65536k"]))
                _make_target(root, words[0], folder=True)
            case "--":
                program = words
            case _ if option in _NAMESPACES:
                namespaces.append(_NAMESPACES[option])
        if option not in ("--size", "--perms"):
            size, mode = "", "755"
    for path in (root, *(each for each in root.rglob("*") if each.is_dir() and not each.is_symlink())):
        path.chmod(0o755)
    mapping = [{"containerID": 0, "hostID": _FIRST_ID, "size": _IDS}]
    document = {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": ids[0], "gid": ids[1]},
            "args": list(program),
            "env": environ,
            "cwd": directory,
            "capabilities": {},
            "noNewPrivileges": True,
            "rlimits": _rlimits(),
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": hostname,
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in namespaces],
            "uidMappings": mapping,
            "gidMappings": mapping,
            "maskedPaths": masked,
            "seccomp": filter_document("default"),
        },
    }
    (bundle / "config.json").write_text(json.dumps(document))


def _mount(target: str, kind: str, ends: Sequence[str], source: str | None = None) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source or kind, "options": list(ends)}


def _make_target(root: Path, path: str, folder: bool) -> None:
    target = root / path.lstrip("/")
    if folder:
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _rlimits() -> list[dict[str, Any]]:
    """The rlimits that bwrap inherits, as the runner sets them."""
    names = ("NOFILE", "CORE", "MEMLOCK", "MSGQUEUE")
    found = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}
    return [
        {"type": f"RLIMIT_{name}", "soft": _limit(soft), "hard": _limit(hard)}
        for name, (soft, hard) in found.items()
    ]


def _limit(value: int) -> int:
    return (1 << 64) - 1 if value == resource.RLIM_INFINITY else value


# --- system calls -------------------------------------------------------------------------------------------


def filter_document(profile: str) -> dict[str, Any]:
    """A seccomp profile of ours as the engines read it.

    A call whose arguments decide is allowed or refused by an equal rule if it has one test, and otherwise
    allowed: libseccomp's lists know no order of cases. So the filter here is a little shorter than ours.
    """
    rules = tomllib.loads((Path(policies.__file__).parent / f"seccomp/{profile}.toml").read_text())
    known = set(syscalls.load(os.uname().machine))
    entries = [_entry(_names(rules["allow"]) & known, "SCMP_ACT_ALLOW")]
    entries.append(_entry(_names(rules["enosys"]) & known, "SCMP_ACT_ERRNO", errno.ENOSYS))
    entries.append(_entry(_names(rules["einval"]) & known, "SCMP_ACT_ERRNO", errno.EINVAL))
    for name in sorted(set(rules["rules"]) & known):
        entries += _rule(name, rules["rules"][name])
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [{"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}[os.uname().machine]],
        "syscalls": entries,
    }


def _names(groups: Mapping[str, Sequence[str]]) -> set[str]:
    return {name for group in groups.values() for name in group}


def _entry(names: set[str], action: str, number: int | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"names": sorted(names), "action": action}
    return entry if number is None else {**entry, "errnoRet": number}


def _rule(name: str, rule: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One case with one test, after which all else is allowed, or the other way round."""
    [case, *more] = rule["cases"]
    [test, *others] = case["if"]
    allowed = _entry({name}, "SCMP_ACT_ALLOW")
    if more or others or "mask" in test:
        return [allowed]
    if "any" in test and rule["otherwise"] == "allow":
        none = {"index": test["arg"], "value": test["any"], "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
        return [{**allowed, "args": [none]}]
    if "in" in test and case["then"] == "allow":
        return [
            {**allowed, "args": [{"index": test["arg"], "value": value, "op": "SCMP_CMP_EQ"}]}
            for value in test["in"]
        ]
    if "in" in test and rule["otherwise"] == "allow":
        differs = [{"index": test["arg"], "value": value, "op": "SCMP_CMP_NE"} for value in test["in"]]
        # Two tests of one argument in one rule are more than older engines accept.
        return [{**allowed, "args": differs}] if len(differs) == 1 else [allowed]
    return [allowed]
