"""The seccomp filter of a serving gate: a list of allowed system calls. Any other kills it.

It opens no file, starts no process, binds no port, and makes no memory executable. The numbers are written
out, because reading the tables would cost every launch more than the rest of the filter. A test compares
them.
"""

from __future__ import annotations

from sandbox.seccomp import bpf
from sandbox.seccomp.filter import AUDIT_ARCH

_ARCHES = ("x86_64", "aarch64")

# Name to number, in the order of _ARCHES; None where the architecture has no such call.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "fcntl": (72, 25),
    "write": (1, 64),
    "close": (3, 57),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "getrandom": (318, 278),
    "clock_gettime": (228, 113),
    "gettimeofday": (96, 169),
    "getpid": (39, 172),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_ctl": (233, 21),
    "socket": (41, 198),
    "connect": (42, 203),
    "accept4": (288, 242),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "setsockopt": (54, 208),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "splice": (275, 76),
    "pipe2": (293, 59),
    "ioctl": (16, 29),
    "rt_sigreturn": (15, 139),
    "rt_sigprocmask": (14, 135),
    "rt_sigaction": (13, 134),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

# Of a gate that hands connections over to a broker.
WITH_BROKER: dict[str, tuple[int | None, int | None]] = {"sendmsg": (46, 211), "socketpair": (53, 199)}

_FIONBIO = 0x5421  # used by setblocking()
_F_SETPIPE_SZ = 1031
_PROT_EXEC = 4
_MAP_HUGETLB = 0x40000  # huge pages: no memory limit counts them
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_KIND = 1, 2, 0xF
_DEFAULT_PROTOCOL = 0  # TCP or UDP: not MPTCP, UDP-Lite or SCTP
# The socket options that the gate sets. Others could attach programs to a socket.
_SOL_SOCKET, _SO_LINGER, _IPPROTO_TCP, _TCP_NODELAY = 1, 13, 6, 1
_NETLINK_ROUTE = 0  # asks the kernel which addresses are this machine's (sandbox/network/addresses.py)


def gate_filter(arch: str, *, broker: bool = False) -> bytes:
    """The filter program for this architecture. System calls of another one, such as x32, kill the process.
    `broker`: whether connections are handed over to one."""
    code = bpf.Assembler()

    def kill() -> int:
        return code.ret(bpf.KILL_PROCESS)

    def allow() -> int:
        return code.ret(bpf.ALLOW)

    def without_bits(argument: int, bits: int, then: int | None = None) -> int:
        test = code.branch(bpf.JSET, bits, kill(), allow() if then is None else then)
        return code.load(bpf.argument_offset(argument), test)

    def one_of(argument: int, values: tuple[int, ...], then: int, otherwise: int, mask: int = 0) -> int:
        place = otherwise
        for value in reversed(values):
            place = code.branch(bpf.JEQ, value, then, place)
        if mask:
            place = code.mask(mask, place)
        return code.load(bpf.argument_offset(argument), place)

    protocol = one_of(2, (_DEFAULT_PROTOCOL,), allow(), kill())
    internet = one_of(1, (_SOCK_STREAM, _SOCK_DGRAM), protocol, kill(), _SOCK_KIND)
    netlink = one_of(2, (_NETLINK_ROUTE,), allow(), kill())
    family = code.branch(bpf.JEQ, _AF_NETLINK, netlink, kill())
    for value in (_AF_INET6, _AF_INET):
        family = code.branch(bpf.JEQ, value, internet, family)
    level = code.branch(
        bpf.JEQ,
        _SOL_SOCKET,
        one_of(2, (_SO_LINGER,), allow(), kill()),
        code.branch(bpf.JEQ, _IPPROTO_TCP, one_of(2, (_TCP_NODELAY,), allow(), kill()), kill()),
    )
    rules = {
        "setsockopt": code.load(bpf.argument_offset(1), level),
        "socket": code.load(bpf.argument_offset(0), family),
        "fcntl": one_of(1, (_F_SETPIPE_SZ,), allow(), kill()),
        "ioctl": one_of(1, (_FIONBIO,), allow(), kill()),
        "mmap": without_bits(2, _PROT_EXEC, without_bits(3, _MAP_HUGETLB)),
        "mprotect": without_bits(2, _PROT_EXEC),
    }
    if broker:
        rules["socketpair"] = one_of(0, (_AF_UNIX,), allow(), kill())
    column = _ARCHES.index(arch)
    place = kill()
    for name, numbers in {**CALLS, **(WITH_BROKER if broker else {})}.items():
        number = numbers[column]
        if number is not None:
            place = code.branch(bpf.JEQ, number, rules.get(name) or allow(), place)
    numbered = code.load(bpf.OFFSET_NUMBER, place)
    known_arch = code.branch(bpf.JEQ, AUDIT_ARCH[arch], numbered, kill())
    code.load(bpf.OFFSET_ARCH, known_arch)
    return code.program()
