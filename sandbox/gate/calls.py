"""The seccomp filter of a serving gate: a list of allowed system calls. Any other kills it.

It opens no file, starts no process, binds no port, and makes no memory executable. The numbers are written
out, because reading the tables would cost every launch more than the rest of the filter. A test compares
them.
"""

from __future__ import annotations

from sandbox.seccomp import bpf
from sandbox.seccomp.filter import AUDIT_ARCH
from sandbox.speed.typed import Mapping

_ARCHES = ("x86_64", "aarch64")

# Name to number, in the order of _ARCHES; None where the architecture has no such call.
Numbers = Mapping[str, tuple[int | None, int | None]]

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
_SOL_SOCKET, _SO_LINGER, _IPPROTO_TCP, _TCP_NODELAY = 1, 13, 6, 1
_NETLINK_ROUTE = 0  # asks the kernel which addresses are this machine's (sandbox/network/addresses.py)


def gate_filter(arch: str, *, broker: bool = False) -> bytes:
    """The filter program for this architecture. System calls of another one, such as x32, kill the process.
    `broker`: whether connections are handed over to one."""
    calls = Calls()
    protocol = calls.one_of(2, (_DEFAULT_PROTOCOL,))
    netlink = calls.one_of(2, (_NETLINK_ROUTE,))
    internet = calls.one_of(1, (_SOCK_STREAM, _SOCK_DGRAM), protocol, mask=_SOCK_KIND)
    rules = {
        "setsockopt": calls.option_rule(),
        "socket": calls.one_of(0, (_AF_INET, _AF_INET6), internet, calls.one_of(0, (_AF_NETLINK,), netlink)),
        "fcntl": calls.one_of(1, (_F_SETPIPE_SZ,)),
        "ioctl": calls.one_of(1, (_FIONBIO,)),
        **calls.memory_rules(),
    }
    if not broker:
        return calls.program(arch, CALLS, rules)
    rules["socketpair"] = calls.one_of(0, (_AF_UNIX,))
    return calls.program(arch, {**CALLS, **WITH_BROKER}, rules)


class Calls:
    """A filter under construction, from its end. Each rule is a place that looks at arguments."""

    def __init__(self) -> None:
        self._code = bpf.Assembler()

    def _kill(self) -> int:
        return self._code.ret(bpf.KILL_PROCESS)

    def _allow(self) -> int:
        return self._code.ret(bpf.ALLOW)

    def one_of(
        self,
        argument: int,
        values: tuple[int, ...],
        then: int | None = None,
        otherwise: int | None = None,
        mask: int = 0,
    ) -> int:
        """Go on at `then`, or allow the call, if the argument is one of the values. Else go on at
        `otherwise`, or kill."""
        code = self._code
        place = self._kill() if otherwise is None else otherwise
        for value in reversed(values):
            place = code.branch(bpf.JEQ, value, self._allow() if then is None else then, place)
        if mask:
            place = code.mask(mask, place)
        return code.load(bpf.argument_offset(argument), place)

    def without_bits(self, argument: int, bits: int, then: int | None = None) -> int:
        test = self._code.branch(bpf.JSET, bits, self._kill(), self._allow() if then is None else then)
        return self._code.load(bpf.argument_offset(argument), test)

    def option_rule(self) -> int:
        """For setsockopt: the options that are needed. Others could attach programs to a socket."""
        tcp = self.one_of(1, (_IPPROTO_TCP,), self.one_of(2, (_TCP_NODELAY,)))
        return self.one_of(1, (_SOL_SOCKET,), self.one_of(2, (_SO_LINGER,)), tcp)

    def memory_rules(self) -> dict[str, int]:
        """No memory is executable, and none is in huge pages."""
        return {
            "mmap": self.without_bits(2, _PROT_EXEC, self.without_bits(3, _MAP_HUGETLB)),
            "mprotect": self.without_bits(2, _PROT_EXEC),
        }

    def program(self, arch: str, calls: Numbers, rules: Mapping[str, int]) -> bytes:
        """`rules`: for the calls that are not allowed with all arguments."""
        code, column = self._code, _ARCHES.index(arch)
        place = self._kill()
        for name, numbers in calls.items():
            number = numbers[column]
            if number is not None:
                place = code.branch(bpf.JEQ, number, rules.get(name) or self._allow(), place)
        numbered = code.load(bpf.OFFSET_NUMBER, place)
        known_arch = code.branch(bpf.JEQ, AUDIT_ARCH[arch], numbered, self._kill())
        code.load(bpf.OFFSET_ARCH, known_arch)
        return code.program()
