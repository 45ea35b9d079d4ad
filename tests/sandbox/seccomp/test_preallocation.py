"""The filter that keeps a plugin from allocating space without writing it."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.seccomp import syscalls
from sandbox.seccomp.filter import AUDIT_ARCH
from sandbox.seccomp.preallocation import NUMBERS, REQUESTS, no_preallocation
from tests.conftest import ROOT
from tests.quick import needs_filters
from tests.sandbox.seccomp.bpf_machine import Machine

ARCHES = ("aarch64", "x86_64")
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
EOPNOTSUPP = ERRNO | errno.EOPNOTSUPP


def _iow(kind: str, number: int, size: int) -> int:
    return 1 << 30 | size << 16 | ord(kind) << 8 | number


SPACE_RESV = struct.calcsize("hhqqII4I")  # struct space_resv of linux/falloc.h
FSXATTR = struct.calcsize("5I8s")  # struct fsxattr of linux/fs.h
RESVSP, RESVSP64, ZERO_RANGE = (_iow("X", number, SPACE_RESV) for number in (40, 42, 57))
FSSETXATTR = _iow("X", 32, FSXATTR)
# Neighbours that give space back, tell something, or are nobody's.
UNRESVSP, UNRESVSP64, FSGETXATTR, TCGETS = (
    _iow("X", 41, SPACE_RESV),
    _iow("X", 43, SPACE_RESV),
    0x801C581F,
    0x5401,
)


@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_are_those_of_the_tables(arch: str) -> None:
    table = syscalls.load(arch)
    assert NUMBERS[arch]._asdict() == {name: table[name] for name in NUMBERS[arch]._fields}


def test_requests_are_those_of_the_headers() -> None:
    assert sorted(REQUESTS) == sorted((RESVSP, RESVSP64, ZERO_RANGE, FSSETXATTR))


@pytest.mark.parametrize("arch", ARCHES)
def test_only_these_calls_are_refused(arch: str) -> None:
    machine, audit, table = Machine(no_preallocation(arch)), AUDIT_ARCH[arch], syscalls.load(arch)
    assert machine.unreachable() == []
    refused = {
        name: value for name, number in table.items() if (value := machine.run(audit, number)[0]) != ALLOW
    }
    assert refused == {"fallocate": EOPNOTSUPP, "file_setattr": EOPNOTSUPP}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("high", [0, 0xFFFFFFFF_00000000])
def test_only_these_ioctls_are_refused(arch: str, high: int) -> None:
    """The kernel uses the low half of a request and ignores the rest."""
    machine, audit, ioctl = Machine(no_preallocation(arch)), AUDIT_ARCH[arch], NUMBERS[arch].ioctl
    for request in (RESVSP, RESVSP64, ZERO_RANGE, FSSETXATTR):
        assert machine.run(audit, ioctl, 3, request | high)[0] == EOPNOTSUPP
        assert machine.run(audit, ioctl, request, 3)[0] == ALLOW  # as a descriptor it is no request
    for request in (UNRESVSP, UNRESVSP64, FSGETXATTR, TCGETS, 0):
        assert machine.run(audit, ioctl, 3, request | high)[0] == ALLOW


@pytest.mark.parametrize("arch", ARCHES)
def test_another_architecture_is_left_to_the_main_filter(arch: str) -> None:
    machine = Machine(no_preallocation(arch))
    for foreign in (0x40000003, 0x40000028, *(v for a, v in AUDIT_ARCH.items() if a != arch), 0):
        for number in NUMBERS[arch]:
            assert machine.run(foreign, number, 3, RESVSP64)[0] == ALLOW


# --- In the kernel -----------------------------------------------------------------------------------------

TRY = """
import ctypes, fcntl, os, struct, sys
from sandbox.seccomp.preallocation import NUMBERS, no_preallocation
libc = ctypes.CDLL(None, use_errno=True)
arch = os.uname().machine
if sys.argv[2] == "filtered":
    program = no_preallocation(arch)
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0) == 0
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
def taken(): return os.fstat(fd).st_blocks * 512
def failed(result): return os.strerror(ctypes.get_errno()) if result < 0 else "ok"
call = ctypes.c_long(NUMBERS[arch].fallocate), fd, 1, ctypes.c_long(0), ctypes.c_long(1 << 20)
print("fallocate", failed(libc.syscall(*call)), taken())
os.ftruncate(fd, 0)
for request in (0x40305828, 0x4030582A):
    space = struct.pack("hhqqII4I", 0, 0, 0, 1 << 20, 0, 0, 0, 0, 0, 0)
    try:
        fcntl.ioctl(fd, request, space); said = "ok"
    except OSError as error:
        said = error.strerror
    print("ioctl", said, taken())
    os.ftruncate(fd, 1); os.ftruncate(fd, 0)
os.posix_fallocate(fd, 0, 1 << 16)
print("posix_fallocate", taken())
os.ftruncate(fd, 0)
print("write", os.write(fd, b"x" * 8192), taken())
try:
    fcntl.ioctl(fd, 0x5401, b"0" * 64)
except OSError as error:
    print("terminal", error.strerror)
"""


def _tried(place: Path, how: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TRY, place / "file", how],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_filters
@pytest.mark.skipif(os.uname().machine not in ARCHES, reason="no filter for this machine")
def test_the_kernel_refuses_to_take_space_and_still_writes(plugin_dir: Path) -> None:
    free = _tried(plugin_dir, "unfiltered")
    # By each of these doors a megabyte beyond the end of the file, where RLIMIT_FSIZE does not look.
    assert free[:3] == ["fallocate ok 1048576", "ioctl ok 1048576", "ioctl ok 1048576"]
    filtered = _tried(plugin_dir, "filtered")
    refused = os.strerror(errno.EOPNOTSUPP)
    assert filtered[:3] == [f"fallocate {refused} 0", f"ioctl {refused} 0", f"ioctl {refused} 0"]
    # The C library writes instead, as it does on filesystems that cannot.
    assert filtered[3:] == [
        "posix_fallocate 65536",
        "write 8192 8192",
        f"terminal {os.strerror(errno.ENOTTY)}",
    ]
    assert free[3:] == filtered[3:]
