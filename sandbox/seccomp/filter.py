"""The compiled system call filters: which one this machine needs, and its bytes for bubblewrap.

A launch uses this module and no compiler. Reading and compiling a profile takes 9 ms in a fresh process, as
long as all of bubblewrap, and 2 ms more for the imports; reading the compiled program takes 0.05 ms. So the
programs are compiled in advance from the profiles (sandbox/seccomp/profile.py, scripts/seccomp-filters) and
committed beside them. A test compiles again and compares every byte. The bytes are the same on every machine,
so a report names a filter by its digest.
"""

from __future__ import annotations

import os

from sandbox import CODE_ROOT, look

PROFILES: tuple[str, ...] = ("strict", "default", "compat")
PROFILE_DIRECTORY = os.path.join(CODE_ROOT, "policies", "seccomp")

# AUDIT_ARCH_* as seccomp reports it: the ELF machine, with the bits for 64-bit and little-endian. Both
# kernels also accept calls of a second architecture with other numbers (i386 is 0x40000003, AArch32
# 0x40000028). No profile allows these.
AUDIT_ARCH: dict[str, int] = {"aarch64": 0xC00000B7, "x86_64": 0xC000003E}


class SeccompUnavailable(Exception):
    """There is no filter for this machine. The text says why and what to do."""


def machine_arch() -> str:
    """The architecture whose filter this kernel needs."""
    machine = os.uname().machine
    if machine in AUDIT_ARCH:
        return machine
    raise SeccompUnavailable(
        f"no system call table for this machine's architecture, {machine}; "
        f"filters exist for {' and '.join(sorted(AUDIT_ARCH))}"
    )


def filter_path(profile: str, arch: str) -> str:
    return os.path.join(PROFILE_DIRECTORY, f"{profile}.{arch}.bpf")


def filter_bytes(profile: str, arch: str | None = None) -> bytes:
    """The compiled filter of a profile, for this machine or for `arch`."""
    if profile not in PROFILES:
        raise ValueError(f"no seccomp profile is called {profile!r}; there are {', '.join(PROFILES)}")
    path = filter_path(profile, arch or machine_arch())
    look.note(path)
    try:
        with open(path, "rb") as file:
            program = file.read()
    except OSError as error:
        raise SeccompUnavailable(f"{path}: {error.strerror}; install the runner again") from None
    # An empty file must not count as a filter: bubblewrap would give the kernel an empty program.
    if not program or len(program) % 8:
        raise SeccompUnavailable(f"{path}: damaged ({len(program)} bytes); install the runner again")
    return program


def digest(program: bytes) -> str:
    import hashlib

    return "sha256:" + hashlib.sha256(program).hexdigest()
