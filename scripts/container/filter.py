"""Write policies/container/seccomp.json: the filter for a container in which the runner runs.

    scripts/container-filter            write the file
    scripts/container-filter --plain    print the filter without the runner's additions, for comparison

It allows what Docker allows by default to a container without added capabilities, plus the calls that the
cage is built with (ADDITIONS). Docker, Podman and Kubernetes all read this form: a flat list. Docker's own
file has entries that depend on capabilities ("includes"); containerd ignores that key and would allow them.

The list is what the profile for plugins allows (policies/seccomp/default.toml), plus what Docker allows
beyond that. So the container refuses no call that a plugin may make. It is for 64-bit programs only: the
runner starts no others, and each further architecture is another kernel interface.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from sandbox.seccomp import syscalls

ROOT = Path(__file__).resolve().parent.parent.parent
OUTPUT = ROOT / "policies/container/seccomp.json"

ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")

# Docker allows these, the profile for plugins does not: they reach other processes of the same user, set the
# clock or the segment table, use up what the machine shares, or name files by handle, each within what the
# caller's capabilities allow. The runner and the gate use splice themselves.
_DOCKER_ALLOWS = (
    *("adjtimex", "clock_adjtime", "fanotify_mark", "memfd_secret", "name_to_handle_at", "openat2"),
    *("process_mrelease", "process_vm_readv", "process_vm_writev", "ptrace", "vmsplice"),
    *("statmount", "listmount", "lsm_get_self_attr", "lsm_set_self_attr", "lsm_list_modules"),
    *("io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents"),
    *("splice", "tee", "sendfile", "sync", "syncfs", "cachestat", "remap_file_pages", "uprobe", "uretprobe"),
    *("chroot", "modify_ldt", "get_thread_area", "set_thread_area", "epoll_ctl_old", "epoll_wait_old"),
)

_AF_VSOCK = 40  # the hypervisor and its other guests
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NAMESPACES = 0x7E020000
_KEYCTL_JOIN_SESSION_KEYRING = 1
_EPERM, _ENOSYS = 1, 38

# Calls that Docker's default refuses and the cage needs. keyctl is allowed only for leaving the caller's
# session keyring. Keyrings have no namespaces, so no other operation is allowed.
ADDITIONS: tuple[str, ...] = (
    "clone",
    "keyctl",
    "mount",
    "pivot_root",
    "sethostname",
    "umount2",
    "unshare",
)

Entry = dict[str, Any]


def profile(additions: tuple[str, ...] = ADDITIONS) -> dict[str, Any]:
    """The filter as container engines read it."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _EPERM,
        "architectures": list(ARCHITECTURES),
        "syscalls": [*_base(additions), *(_addition(name) for name in additions)],
    }


def _base(additions: tuple[str, ...]) -> list[Entry]:
    entries = [
        _allow(*_plain_names()),
        _allow("socket", args=[_argument(0, "SCMP_CMP_NE", _AF_VSOCK)]),
        *(_allow("personality", args=[_argument(0, "SCMP_CMP_EQ", value)]) for value in _PERSONALITIES),
        # A filter cannot read its flags, which are in memory. Every libc falls back to clone.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
    ]
    if "clone" not in additions:
        without = {**_argument(0, "SCMP_CMP_MASKED_EQ", _NAMESPACES), "valueTwo": 0}
        entries.append(_allow("clone", args=[without]))
    return entries


def _addition(name: str) -> Entry:
    if name == "keyctl":
        return _allow(name, args=[_argument(0, "SCMP_CMP_EQ", _KEYCTL_JOIN_SESSION_KEYRING)])
    return _allow(name)


def _plain_names() -> list[str]:
    """Calls that are allowed with any arguments."""
    verdicts = tomllib.loads((ROOT / "policies/seccomp/default.toml").read_text())
    names = {name for group in verdicts["allow"].values() for name in group}
    names |= set(verdicts["rules"]) | set(_DOCKER_ALLOWS)
    names -= {"clone", "personality", "socket"}
    known = {name for arch in syscalls.ARCHES for name in syscalls.load(arch)}
    assert names <= known, names - known
    return sorted(names)


def _allow(*names: str, args: list[Entry] | None = None) -> Entry:
    entry: Entry = {"names": list(names), "action": "SCMP_ACT_ALLOW"}
    return entry if args is None else {**entry, "args": args}


def _argument(index: int, operator: str, value: int) -> Entry:
    return {"index": index, "value": value, "op": operator}


def text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--plain"]:
        print(text(profile(())), end="")
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    OUTPUT.write_text(text(profile()))
    print(f"{OUTPUT.relative_to(ROOT)}: {len(_plain_names())} calls, and {', '.join(ADDITIONS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
