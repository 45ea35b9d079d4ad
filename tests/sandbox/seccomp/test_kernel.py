"""The filters in a real kernel, under the real bubblewrap: what is refused, and what still works.

Every refusal has its control: the same call, in the same cage, without the filter, ends differently.
Everything runs twice: as a uid that root has dropped to, and as an ordinary user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from sandbox.seccomp import filter as seccomp_filter
from sandbox.seccomp import syscalls
from tests.conftest import SPARE_UID, SYSTEM_PATH, TEMP_PREFIX, USER_UID
from tests.tables import one_case

LEASED_UID = SPARE_UID + 25
ARCH = os.uname().machine
KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])

pytestmark = pytest.mark.needs("gcc")


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """A directory that everybody may enter, with the compiled probe; inside the cage it is /probe."""
    path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    path.chmod(0o755)
    try:
        source = Path(__file__).with_name("probe.c")
        subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", path / "probe", source], check=True)
        (path / "attributes").touch()
        with contextlib.suppress(OSError):  # not every filesystem has them
            os.setxattr(path / "attributes", "user.large", bytes(2000))
        yield path
    finally:
        shutil.rmtree(path)


@dataclass(frozen=True)
class KernelCage:
    """The cage of a launch, as far as system calls depend on it."""

    become: tuple[str, ...]
    programs: Path

    def __call__(
        self, profile: str | None, *argv: str, userns: bool = True, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        bwrap = [
            "bwrap",
            "--unshare-user",
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-net",
        ]
        bwrap += ["--cap-drop", "ALL", "--new-session", "--die-with-parent"]
        bwrap += [] if userns else ["--disable-userns"]
        for place in ("/usr", "/etc", "/bin", "/lib", "/lib64", "/sbin"):
            if os.path.islink(place):
                bwrap += ["--symlink", os.readlink(place), place]
            elif os.path.isdir(place):
                bwrap += ["--ro-bind", place, place]
        bwrap += [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
            "--ro-bind",
            str(self.programs),
            "/probe",
        ]
        bwrap += [
            "--clearenv",
            "--setenv",
            "PATH",
            "/usr/bin:/bin",
            "--setenv",
            "HOME",
            "/tmp",
            "--chdir",
            "/tmp",
        ]
        with tempfile.TemporaryFile() as program:
            if profile is not None:
                program.write(seccomp_filter.filter_bytes(profile))
                program.flush()
                program.seek(0)
                bwrap += ["--seccomp", str(program.fileno())]
            return subprocess.run(
                [*self.become, *bwrap, "--", *argv],
                pass_fds=[program.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={"PATH": SYSTEM_PATH},
                cwd="/",
            )


@pytest.fixture(
    params=[
        pytest.param("dropped", marks=pytest.mark.needs("root")),
        pytest.param("user", marks=pytest.mark.needs("user")),
    ]
)
def cage(request: pytest.FixtureRequest, programs: Path) -> KernelCage:
    if request.param == "user" and os.geteuid() != 0:
        return KernelCage((), programs)
    uid = LEASED_UID if request.param == "dropped" else USER_UID
    more = ("--no-new-privs",) if request.param == "dropped" else ()
    return KernelCage(
        ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *more, "--"), programs
    )


def outcomes(cage: KernelCage, profile: str | None, calls: list[str], *, userns: bool = True) -> list[str]:
    """The result of each call: "ok", an errno's name, or "signal N"."""
    done = cage(profile, "/probe/probe", *calls, userns=userns)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(calls)
    return [line if line.startswith("signal") else errno.errorcode.get(int(line), "ok") for line in lines]


# --- Refusals ----------------------------------------------------------------------------------------------

HIGH = 0xFFFFFFFF_00000000
NEWUSER = 0x10000000
SIGCHLD = 17


class Row(NamedTuple):
    call: str | int
    arguments: str
    expected: str
    # Without the filter the kernel gives the same answer, so only the filtered side is a statement.
    same: bool = False
    since: tuple[int, int] = (0, 0)  # older kernels answer ENOSYS themselves

    def spec(self) -> str:
        number = syscalls.load(ARCH)[self.call] if isinstance(self.call, str) else self.call
        return f"{number},{self.arguments}"


REFUSED = [
    Row("mount", "0,0,0,0,0", "EPERM"),
    Row("umount2", "path,0", "EPERM"),
    Row("chroot", "path", "EPERM"),
    Row("pivot_root", "path,path", "EPERM", same=True),
    Row("setns", "-1,0", "EPERM"),
    Row("unshare", "0", "EPERM"),
    Row("unshare", f"{NEWUSER}", "EPERM"),
    Row("clone", f"{NEWUSER | SIGCHLD},0,0,0,0", "EPERM"),
    Row("clone", f"{HIGH | NEWUSER | SIGCHLD:#x},0,0,0,0", "EPERM"),
    Row("clone", f"{0x40000000 | SIGCHLD},0,0,0,0", "EPERM", same=True),  # NEWNET needs a capability
    Row("clone3", "buf,0", "ENOSYS"),
    Row("clone3", f"ns:{NEWUSER},64", "ENOSYS"),
    Row("ptrace", "0,0,0,0", "EPERM"),
    Row("process_vm_readv", "1,0,0,0,0,1", "EPERM"),
    Row("process_vm_writev", "1,0,0,0,0,1", "EPERM"),
    Row("pidfd_getfd", "-1,0,0", "EPERM"),
    Row("kcmp", "0,0,99,0,0", "EPERM"),
    Row("keyctl", "-1,0,0,0,0", "EPERM"),
    Row("add_key", "0,0,0,0,0", "EPERM"),
    Row("request_key", "0,0,0,0", "EPERM"),
    Row("perf_event_open", "0,0,0,-1,-1", "EPERM"),
    Row("bpf", "-1,buf,8", "EPERM", same=True),  # kernel.unprivileged_bpf_disabled
    Row("reboot", "0,0,0,0", "EPERM", same=True),
    Row("init_module", "0,0,0", "EPERM", same=True),
    Row("kexec_load", "0,0,0,0", "EPERM", same=True),
    Row("open_by_handle_at", "-1,buf,0", "EPERM", same=True),
    Row("sethostname", "path,4", "EPERM", same=True),
    Row("name_to_handle_at", "-1,path,buf,buf,0", "EPERM"),
    Row("fanotify_init", "-1,0", "EPERM", same=True),
    Row("fanotify_mark", "-1,0,0,-1,0", "EPERM"),
    Row("quotactl_fd", "-1,0,0,0", "EPERM", since=(5, 14)),
    Row("vmsplice", "-1,0,0,0", "EPERM"),
    Row("splice", "-1,0,-1,0,1,0", "EINVAL"),  # without the filter: EBADF
    Row("tee", "-1,-1,1,0", "EINVAL"),
    Row("sendfile", "-1,-1,0,1", "EINVAL"),
    Row("memfd_secret", "-1", "EPERM"),
    Row("mbind", "0,0,0,0,0,-1", "EPERM"),
    Row("move_pages", "0,0,0,0,0,-1", "EPERM"),
    Row("set_mempolicy", "-1,0,0", "EPERM"),
    Row("clock_settime", "0,0", "EPERM"),
    Row("clock_adjtime", "0,0", "EPERM"),
    Row("adjtimex", "0", "EPERM"),
    Row("io_uring_setup", "0,buf", "ENOSYS"),
    Row("io_uring_enter", "-1,0,0,0,0,0", "ENOSYS"),
    Row("io_uring_register", "-1,0,0,0", "ENOSYS"),
    Row("userfaultfd", "-1", "ENOSYS"),
    Row("process_madvise", "-1,0,0,0,-1", "ENOSYS", since=(5, 10)),
    Row("open_tree", "-1,path,0", "ENOSYS"),
    Row("open_tree_attr", "-1,path,0,0,0", "ENOSYS", since=(6, 15)),
    Row("move_mount", "-1,path,-1,path,0", "ENOSYS"),
    Row("fsopen", "path,0", "ENOSYS"),
    Row("fsconfig", "-1,0,0,0,0", "ENOSYS"),
    Row("fsmount", "-1,0,0", "ENOSYS"),
    Row("fspick", "-1,path,0", "ENOSYS"),
    Row("mount_setattr", "-1,path,0,0,0", "ENOSYS", since=(5, 12)),
    Row("statmount", "0,0,0,0", "ENOSYS", since=(6, 8)),
    Row("listmount", "0,0,0,0", "ENOSYS", since=(6, 8)),
    Row(599, "0", "ENOSYS", same=True),
    Row(0x40000000 | 39, "0", "ENOSYS", same=True),  # x32's getpid
    # stdin is /dev/null: a request that passes ends in ENOTTY.
    Row("ioctl", "0,0x5412,buf", "EPERM"),
    Row("ioctl", f"0,{HIGH | 0x5412:#x},buf", "EPERM"),
    Row("ioctl", "0,0x100005412,buf", "EPERM"),
    Row("ioctl", "0,0x541c,buf", "EPERM"),
    Row("ioctl", "0,0x541d,buf", "EPERM"),
    Row("ioctl", "0,0x5423,buf", "EPERM"),
    Row("socket", "17,3,0", "EAFNOSUPPORT"),  # AF_PACKET
    Row("socket", f"{HIGH | 17:#x},3,0", "EAFNOSUPPORT"),
    Row("socket", "16,3,15", "EAFNOSUPPORT"),  # NETLINK_KOBJECT_UEVENT
    Row("socket", "40,1,0", "EAFNOSUPPORT", same=True),  # AF_VSOCK, where the kernel has it
    Row("socket", "38,5,0", "EAFNOSUPPORT", same=True),  # AF_ALG, likewise
    Row("socketpair", "2,1,0,buf", "EAFNOSUPPORT"),
    Row("personality", "0x40000", "EPERM"),  # ADDR_NO_RANDOMIZE
    Row("personality", "0x400000", "EPERM"),  # READ_IMPLIES_EXEC
    Row("fchmod", "-1,04755", "EPERM"),  # set-user-id
    Row("fchmodat", "-1,path,02755", "EPERM"),  # set-group-id
    Row("openat", "-1,path,0101,04755", "EPERM"),
    Row("openat2", "-1,path,buf,24", "ENOSYS"),
    Row("io_setup", "1,buf", "ENOSYS"),
    Row("io_submit", "0,0,0", "ENOSYS"),
    Row("io_pgetevents", "0,0,0,0,0,0", "ENOSYS"),
    Row("sync", "", "EPERM"),
    Row("syncfs", "-1", "EPERM"),
    Row("remap_file_pages", "1,0,0,0,0", "EPERM"),
    Row("cachestat", "-1,buf,buf,0", "EPERM", since=(6, 5)),
    Row("sendto", "-1,buf,1,0x20000000,0,0", "ENOTSUP"),  # MSG_FASTOPEN; the number of EOPNOTSUPP
    Row("sendmsg", "-1,buf,0x20000000", "ENOTSUP"),
    Row("sendmmsg", "-1,buf,1,0x20000000", "ENOTSUP"),
    Row("setsockopt", "-1,6,30,buf,4", "ENOPROTOOPT"),  # TCP_FASTOPEN_CONNECT
    Row("setsockopt", "-1,6,34,buf,4", "ENOPROTOOPT"),  # TCP_FASTOPEN_NO_COOKIE
    Row("setsockopt", "-1,1,26,buf,16", "ENOPROTOOPT"),  # SO_ATTACH_FILTER
    Row("setsockopt", "-1,6,14,buf,216", "ENOPROTOOPT"),  # TCP_MD5SIG
    Row("setsockopt", "-1,41,6,buf,64", "ENOPROTOOPT"),  # IPV6_2292PKTOPTIONS
    Row("setsockopt", "-1,1,2,buf,4097", "EINVAL"),
    Row("setxattr", "path,buf,buf,1001,0", "ENOTSUP"),
    Row("lsetxattr", "path,path,buf,0x1000003e9,0", "ENOTSUP"),
    Row("fsetxattr", "-1,path,buf,0xffffffff,0", "ENOTSUP"),
    Row("setxattrat", "-1,path,0,path,buf,16", "ENOSYS", since=(6, 13)),
    Row("mmap", "0,4096,8,0x40022,-1,0", "ENOMEM", same=True),  # MAP_HUGETLB; most machines have no huge page
    Row("memfd_create", "path,4", "EINVAL", same=True),  # MFD_HUGETLB; the name has a /, which is allowed
    Row("seccomp", "1,8,0", "EINVAL"),  # SECCOMP_FILTER_FLAG_NEW_LISTENER
    Row("ppoll", "buf,1025,0,0,0", "EINVAL", same=True),
    Row("pselect6", "1025,0,0,0,buf,0", "EINVAL"),
    Row("fcntl", "0,1024,1", "EPERM"),  # F_SETLEASE, on a file that is somebody else's: EACCES
    Row("fcntl", "0,1026,0", "EPERM"),  # F_NOTIFY
    Row("fcntl", "0,4,0x2800", "EPERM"),  # F_SETFL with O_ASYNC
    Row("ioctl", "0,0x5452,buf", "EPERM"),  # FIOASYNC
]

# The strict profile refuses the families instead. Not every kernel has these protocols.
PROTOCOLS = [
    Row("socket", "2,1,262", "EPROTONOSUPPORT", same=True),  # MPTCP
    Row("socket", "10,1,262", "EPROTONOSUPPORT", same=True),
    Row("socket", f"2,1,{HIGH | 262:#x}", "EPROTONOSUPPORT", same=True),
    Row("socket", "2,2,136", "EPROTONOSUPPORT", same=True),  # UDP-Lite
    Row("socket", "2,2,1", "EPROTONOSUPPORT"),  # ICMP: a group that is not in ping_group_range gets EACCES
    Row("socket", "2,5,0", "EPROTONOSUPPORT"),  # SCTP by its type: ESOCKTNOSUPPORT where it is not loaded
    Row("socket", "2,6,0", "EPROTONOSUPPORT"),  # DCCP, likewise
    Row("socket", "2,3,0", "EPROTONOSUPPORT", same=True),  # a raw socket
]

ALLOWED = [
    Row("clone", f"{SIGCHLD},0,0,0,0", "ok"),
    Row("getpid", "", "ok"),
    Row("pidfd_open", "1,0", "ok"),
    Row("memfd_create", "path,0", "ok"),
    Row("socketpair", "1,1,0,buf", "ok"),
    Row("personality", "0xffffffff", "ok"),
    Row("eventfd2", "0,0", "ok"),
    Row("ioctl", "0,0x5401,buf", "ENOTTY"),
    Row("ioctl", "0x5412,0x541b,buf", "EBADF"),
    Row("seccomp", "2,0,buf", "ok"),  # SECCOMP_GET_ACTION_AVAIL of KILL_THREAD
    Row("close_range", "100,200,0", "ok"),
    Row("fchmod", "-1,01755", "EBADF"),
    Row("fsetxattr", "-1,path,buf,1000,0", "EBADF"),
    Row("fsetxattr", "-1,path,buf,0x100000001,0", "E2BIG"),  # the kernel looks at all 64 bits
    Row("setsockopt", "-1,1,2,buf,4096", "EBADF"),
    Row("pselect6", "1024,0,0,0,buf,0", "ok"),
    Row("openat", "-1,path,0,04755", "ENOENT"),  # nothing is made
    Row("fcntl", "0,4,0x800", "ok"),  # F_SETFL with O_NONBLOCK
]

SOCKETS = [
    Row("socket", "1,1,0", "ok"),
    Row("socket", "2,1,0", "ok"),
    Row("socket", "2,2,0", "ok"),
    Row("socket", "2,1,6", "ok"),
    Row("socket", "2,0x80802,17", "ok"),  # SOCK_CLOEXEC and SOCK_NONBLOCK
    Row("socket", "16,3,0", "ok"),
    Row("socketpair", "1,2,0,buf", "ok"),
    Row("bind", "-1,0,0", "EBADF"),
    Row("shmget", "0,4096,0x380", "ok"),
]

STRICT = [
    *(Row(row.call, row.arguments, "EAFNOSUPPORT") for row in SOCKETS[:7]),
    Row("bind", "-1,0,0", "EPERM"),
    Row("listen", "-1,0", "EPERM"),
    Row("connect", "-1,0,0", "EPERM"),
    Row("accept", "-1,0,0", "EPERM"),
    Row("accept4", "-1,0,0,0", "EPERM"),
    Row("shmget", "0,4096,0x380", "EPERM"),
    Row("msgget", "0,0x380", "EPERM"),
    Row("semget", "0,1,0x380", "EPERM"),
]

COMPAT = [
    Row("clone3", "buf,0", "ENOSYS"),
    Row("ptrace", "0,0,0,0", "EPERM"),
    Row("process_vm_readv", "1,0,0,0,0,1", "EPERM"),
    Row("process_vm_writev", "1,0,0,0,0,1", "EPERM"),
]


def label(row: Row) -> str:
    return f"{row.call}({row.arguments})"


def check_refusals(cage: KernelCage, profile: str, rows: list[Row]) -> None:
    calls = [row.spec() for row in rows]
    filtered = dict(zip(map(label, rows), outcomes(cage, profile, calls), strict=True))
    assert filtered == {label(row): row.expected for row in rows}
    free = outcomes(cage, None, calls)
    undecided = [
        label(row)
        for row, outcome in zip(rows, free, strict=True)
        if outcome == row.expected and not row.same and row.since <= KERNEL
    ]
    assert undecided == [], "the kernel refuses these in the same way without any filter"


def test_refusals(cage: KernelCage) -> None:
    check_refusals(cage, "default", [*REFUSED, *PROTOCOLS])


def test_strict_refuses_the_same_and_more(cage: KernelCage) -> None:
    check_refusals(cage, "strict", [*REFUSED, *STRICT])


def test_compat_refuses_all_but_what_it_adds(cage: KernelCage) -> None:
    added = {row.call for row in COMPAT}
    check_refusals(cage, "compat", [row for row in REFUSED if row.call not in added])


@one_case("profile", ["strict", "default", "compat", None])
def test_ordinary_calls_pass(cage: KernelCage, profile: str | None) -> None:
    rows = ALLOWED if profile == "strict" else [*ALLOWED, *SOCKETS]
    got = dict(zip(map(label, rows), outcomes(cage, profile, [row.spec() for row in rows]), strict=True))
    assert got == {label(row): row.expected for row in rows}


def test_compat_opens_what_default_refuses(cage: KernelCage) -> None:
    check_refusals(cage, "default", COMPAT)
    opened = outcomes(cage, "compat", [row.spec() for row in COMPAT])
    assert all(got != row.expected for got, row in zip(opened, COMPAT, strict=True)), opened


def test_under_compat_only_bubblewrap_stops_namespaces_through_clone3(cage: KernelCage) -> None:
    call = Row("clone3", f"ns:{NEWUSER},64", "").spec()
    assert outcomes(cage, "default", [call]) == ["ENOSYS"]
    assert outcomes(cage, "compat", [call]) == ["ok"]
    assert outcomes(cage, "compat", [call], userns=False) == ["ENOSPC"]


def test_the_filter_is_there(cage: KernelCage) -> None:
    def filters(profile: str | None) -> int:
        done = cage(profile, "grep", "Seccomp_filters", "/proc/self/status")
        return int(done.stdout.split()[1])

    assert filters("default") == filters(None) + 1


DATAGRAM = """
import socket
ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
ours.sendto(b"out of the cage", "/probe/listener")
"""


def test_strict_socket_pairs_cannot_be_connected_elsewhere(cage: KernelCage, programs: Path) -> None:
    """Even without socket(), one end of a datagram pair could reach any socket file that is mounted."""
    path = programs / "listener"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        try:
            done = cage("default", "/usr/bin/python3", "-I", "-c", DATAGRAM)
            assert done.returncode == 0, done.stderr
            assert listener.recv(100) == b"out of the cage"
            done = cage("strict", "/usr/bin/python3", "-I", "-c", DATAGRAM)
            assert "Address family not supported" in done.stderr
            with pytest.raises(BlockingIOError):
                listener.recv(100)
        finally:
            path.unlink()


# Makes a ring, which makes a socket of NETLINK_XFRM (IORING_OP_SOCKET): no call that a filter sees names it.
# Offsets of struct io_uring_params and of struct io_uring_sqe.
RING = """
import ctypes, mmap, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_void_p(each) for each in arguments))
    if result < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    return result
setup, enter = map(int, sys.argv[1:])
parameters = ctypes.create_string_buffer(120)
ring = call(setup, 1, ctypes.addressof(parameters))
(tail,), (array,), (completions,) = (struct.unpack_from("I", parameters, at) for at in (44, 64, 100))
queue = mmap.mmap(ring, 4096, offset=0)
work = mmap.mmap(ring, 64, offset=0x10000000)
struct.pack_into("=BBHiQQII", work, 0, 45, 0, 0, 16, 3, 0, 6, 0)
struct.pack_into("I", queue, array, 0)
struct.pack_into("I", queue, tail, 1)
call(enter, ring, 1, 1, 1, 0, 0)
_, made, _ = struct.unpack_from("=QiI", queue, completions)
print(os.readlink(f"/proc/self/fd/{made}").partition(":")[0] if made >= 0 else os.strerror(-made))
"""


@one_case("profile", ["strict", "default", "compat"])
def test_no_profile_has_a_ring_that_makes_sockets_unseen(cage: KernelCage, profile: str) -> None:
    numbers = [str(syscalls.load(ARCH)[name]) for name in ("io_uring_setup", "io_uring_enter")]
    control = cage(None, "/usr/bin/python3", "-I", "-c", RING, *numbers)
    if control.stdout != "socket\n":
        pytest.skip(f"io_uring makes no sockets here: {control.stdout}{control.stderr}")
    done = cage(profile, "/usr/bin/python3", "-I", "-c", RING, *numbers)
    assert (done.stdout, done.stderr) == ("", f"{os.strerror(errno.ENOSYS)}\n")


# --- The other door ----------------------------------------------------------------------------------------


def elf32(machine: int, flags: int, base: int, code: bytes) -> bytes:
    """The smallest static 32-bit program: headers, one segment, code."""
    start = 52 + 32
    size = start + len(code)
    identification = b"\x7fELF\x01\x01\x01" + bytes(9)
    header = struct.pack("<HHIIIIIHHHHHH", 2, machine, 1, base + start, 52, 0, flags, 52, 32, 1, 0, 0, 0)
    segment = struct.pack("<8I", 1, 0, base, base, size, size, 5, 0x1000)
    return identification + header + segment + code


# Each makes one system call, exit(42), in the way of the 32-bit architecture.
THIRTY_TWO_BIT = {
    "aarch64": elf32(40, 0x05000000, 0x10000, struct.pack("<3I", 0xE3A0002A, 0xE3A07001, 0xEF000000)),
    "x86_64": elf32(3, 0, 0x08048000, bytes.fromhex("b801000000 bb2a000000 cd80")),
}


@one_case("profile", ["strict", "default", "compat"])
def test_a_32_bit_program_is_killed(cage: KernelCage, programs: Path, profile: str) -> None:
    program = programs / "thirty-two"
    program.write_bytes(THIRTY_TWO_BIT[ARCH])
    program.chmod(0o755)
    control = cage(None, "/probe/thirty-two")
    if control.returncode != 42:
        pytest.skip(f"this machine runs no 32-bit programs: {control.stderr.strip()}")
    assert cage(profile, "/probe/thirty-two").returncode == 128 + 31


# --- What must work ----------------------------------------------------------------------------------------

PYTHON = """
import asyncio, mmap, os, shutil, socket, sqlite3, ssl, struct, subprocess, sys, tarfile, tempfile, threading
import concurrent.futures
results = []
threads = [threading.Thread(target=results.append, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(results) == list(range(8))
assert subprocess.run(["cat"], input=b"x", capture_output=True).stdout == b"x"
with concurrent.futures.ProcessPoolExecutor(2) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
with tempfile.TemporaryDirectory() as where:
    base = sqlite3.connect(os.path.join(where, "base"))
    base.execute("pragma journal_mode=wal"); base.execute("create table t(a)")
    base.execute("insert into t values (1)"); base.commit()
    assert base.execute("select a from t").fetchall() == [(1,)]; base.close()
    # Its attribute is too large for the cage, and left out.
    copied = shutil.copy2("/probe/attributes", where)
    assert os.listxattr(copied) == []
    rights = ((1, 7, -1), (2, 7, os.getuid()), (4, 5, -1), (16, 7, -1), (32, 5, -1))
    rights = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in rights)
    os.setxattr(copied, "system.posix_acl_access", rights)
    again = shutil.copy2(copied, os.path.join(where, "again"))
    assert os.getxattr(again, "system.posix_acl_access") == rights
    with tarfile.open(os.path.join(where, "t.tar"), "w") as archive:
        archive.add(again, "again")
    with tarfile.open(os.path.join(where, "t.tar")) as archive:
        archive.extractall(os.path.join(where, "out"))
    # sendfile is refused, so these copy by read and write.
    large = os.path.join(where, "large")
    with open(large, "wb") as file:
        file.write(bytes(range(256)) * 600)
    with open(shutil.copyfile(large, large + "2"), "rb") as file:
        assert file.read() == bytes(range(256)) * 600
    one, other = socket.socketpair()
    with one, other, open(large, "rb") as file:
        reader = threading.Thread(target=lambda: results.append(len(other.recv(153600, socket.MSG_WAITALL))))
        reader.start()
        assert one.sendfile(file) == 153600
        reader.join()
        assert results[-1] == 153600
ssl.create_default_context(); mmap.mmap(-1, 1 << 22).close(); os.close(os.memfd_create("m"))
async def main():
    child = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
    assert (await child.communicate())[0] == b"hello\\n"
    assert await asyncio.to_thread(lambda: 5) == 5
    if sys.argv[1] != "strict":
        async def serve(reader, writer):
            writer.write(await reader.readline()); await writer.drain()
            with open(os.__file__, "rb") as file:
                await asyncio.get_running_loop().sendfile(writer.transport, file)
            writer.close()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"over loopback\\n")
        assert await reader.readline() == b"over loopback\\n"
        assert len(await reader.read()) == os.stat(os.__file__).st_size
        writer.close(); server.close()
asyncio.run(main())
print("fine")
"""

NODE = """
const { Worker } = require('worker_threads'), cp = require('child_process');
const fs = require('fs'), http = require('http'), strict = process.argv.at(-1) === 'strict';
(async () => {
  const echo = new Worker("require('worker_threads').parentPort.postMessage(6*7)", { eval: true });
  if (await new Promise((ok) => echo.on('message', ok)) !== 42) throw 'worker';
  if (cp.execFileSync('echo', ['hello']).toString() !== 'hello\\n') throw 'execFileSync';
  const child = cp.spawn('cat'); child.stdin.end('x');
  if (String(await new Promise((ok) => child.stdout.on('data', ok))) !== 'x') throw 'spawn';
  await fs.promises.writeFile('/tmp/f', 'text');
  if (await fs.promises.readFile('/tmp/f', 'utf8') !== 'text') throw 'fs';
  fs.watch('/tmp').close();
  fs.copyFileSync('/tmp/f', '/tmp/g'); fs.cpSync('/tmp/g', '/tmp/h');
  if (fs.readFileSync('/tmp/h', 'utf8') !== 'text') throw 'copyFile';
  await require('stream/promises').pipeline(fs.createReadStream('/tmp/f'), fs.createWriteStream('/tmp/i'));
  await require('util').promisify(require('zlib').gzip)('x'); require('crypto').randomBytes(8);
  if (!strict) {
    const server = http.createServer((_, answer) => answer.end('served'));
    await new Promise((ok) => server.listen(0, '127.0.0.1', ok));
    const got = await fetch(`http://127.0.0.1:${server.address().port}/`);
    if (await got.text() !== 'served') throw 'http';
    server.closeAllConnections(); server.close();
    require('os').networkInterfaces();
    const group = require('dgram').createSocket('udp4');
    await new Promise((ok) => group.bind(0, ok));
    group.addMembership('224.0.0.251', '127.0.0.1'); group.setRecvBufferSize(65536); group.close();
  }
  console.log('fine'); process.exit(0);
})().catch((fault) => { console.error(fault); process.exit(1); });
"""

C = r"""
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static sem_t ready;
static void *post(void *unused) { sem_post(&ready); return unused; }
int main(void)
{
    pthread_t thread;
    sem_init(&ready, 0, 0);
    if (pthread_create(&thread, NULL, post, NULL) || sem_wait(&ready) || pthread_join(thread, NULL)) return 1;
    int *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fork() == 0) { *shared = 7; _exit(0); }
    wait(NULL);
    FILE *pipe = popen("echo hello", "r");
    char line[16];
    if (*shared != 7 || !fgets(line, sizeof line, pipe) || pclose(pipe)) return 2;
    puts("fine");
}
"""

SHELL = (
    'set -e; cd /tmp; mkfifo p; (echo a; echo b) | sort -r > p & read x < p; wait; test "$x" = b;'
    " cp -a /probe/attributes .; tar cf t attributes; tar xf t;"
    " cat t | cat > u; cmp t u; cp t v; tee w < t > x; cmp w x; echo fine"
)

GIT = """
set -e; cd /tmp; git init -q r; cd r; echo a > f; git add f
git -c user.name=n -c user.email=e@x commit -qm m; git clone -q . ../c
git -C ../c log --format=%s | grep -qx m
git gc -q; echo fine
"""

JAVA = """
import java.net.*; import java.nio.file.*; import java.util.concurrent.*;
public class Main { public static void main(String[] a) throws Exception {
  var pool = Executors.newFixedThreadPool(4);
  if (pool.submit(() -> 42).get() != 42) throw new Error("threads");
  var child = new ProcessBuilder("echo", "hello").start();
  if (!new String(child.getInputStream().readAllBytes()).equals("hello\\n")) throw new Error("process");
  var file = Files.createTempFile("a", "b"); Files.writeString(file, "text");
  if (!Files.readString(file).equals("text")) throw new Error("files");
  if (!a[0].equals("strict")) {
    try (var server = new ServerSocket(0, 1, InetAddress.getLoopbackAddress());
         var client = new Socket(server.getInetAddress(), server.getLocalPort());
         var accepted = server.accept()) {
      client.getOutputStream().write(7); if (accepted.getInputStream().read() != 7) throw new Error("socket");
    }
  }
  pool.shutdown(); System.out.println("fine");
} }
"""

RUST = r"""
use std::{io::{Read, Write}, net::{TcpListener, TcpStream}, process::Command, sync::mpsc, thread};
fn main() {
    let (tx, rx) = mpsc::channel();
    for n in 0..8 { let tx = tx.clone(); thread::spawn(move || tx.send(n).unwrap()); }
    drop(tx);
    assert_eq!(rx.iter().sum::<i32>(), 28);
    assert_eq!(Command::new("echo").arg("hello").output().unwrap().stdout, b"hello\n");
    std::fs::write("/tmp/f", "text").unwrap();
    assert_eq!(std::fs::read_to_string("/tmp/f").unwrap(), "text");
    let mut pipe = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    std::io::copy(&mut std::fs::File::open("/tmp/f").unwrap(), &mut pipe.stdin.take().unwrap()).unwrap();
    assert!(pipe.wait().unwrap().success());
    println!("");
    if std::env::args().nth(1).unwrap() != "strict" {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        client.write_all(b"x").unwrap();
        let mut byte = [0];
        server.accept().unwrap().0.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }
    println!("fine");
}
"""


def _build(programs: Path, source: str, text: str, *compiler: str) -> None:
    """Outside the cage, with a compiler that may be in a home directory."""
    file = programs / source
    if file.exists():
        return
    file.write_text(text)
    subprocess.run([*compiler, str(file)], check=True, cwd=programs, capture_output=True)


class Runtime(NamedTuple):
    name: str
    needs: tuple[str, ...]  # in /usr, for it must be visible inside
    argv: tuple[str, ...]
    source: tuple[str, str] = ("", "")
    compiler: tuple[str, ...] = ()


RUNTIMES = [
    Runtime("python", ("python3",), ("/usr/bin/python3", "-I", "-c", PYTHON)),
    Runtime("node", ("node",), ("/usr/bin/env", "node", "-e", NODE, "--")),
    Runtime("c", ("gcc",), ("/probe/c",), ("c.c", C), ("gcc", "-pthread", "-o", "c")),
    Runtime("shell", ("sh",), ("/bin/sh", "-c", SHELL)),
    Runtime("git", ("git",), ("/bin/sh", "-c", GIT)),
    Runtime(
        "java", ("java",), ("/usr/bin/env", "java", "-cp", "/probe", "Main"), ("Main.java", JAVA), ("javac",)
    ),
    Runtime("rust", (), ("/probe/rust",), ("rust.rs", RUST), ("rustc", "-o", "rust")),
]


@one_case("profile", ["strict", "default", "compat"])
@one_case("runtime", RUNTIMES, ids=lambda runtime: runtime.name)
def test_runtimes_work(cage: KernelCage, programs: Path, runtime: Runtime, profile: str) -> None:
    missing = [name for name in runtime.needs if not shutil.which(name, path=SYSTEM_PATH)]
    missing += [name for name in runtime.compiler[:1] if not shutil.which(name)]
    if missing:
        pytest.skip(f"{runtime.name}: needs {' and '.join(missing)} on this machine")
    if runtime.compiler:
        _build(programs, *runtime.source, *runtime.compiler)
    done = cage(profile, *runtime.argv, profile)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["fine"]), done.stdout + done.stderr
