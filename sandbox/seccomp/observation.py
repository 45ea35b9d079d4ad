"""The filter of `runner learn`: it hands the calls that name files, programs and addresses to an observer.

It defends nothing. Each of these calls waits until the observer has read its arguments and lets it continue
(sandbox/cell/notifier.py). The cage's own filters are stacked on it, and decide as they always do: what they
refuse never comes here, because the kernel takes the strictest answer of all filters.
"""

from __future__ import annotations

from sandbox.seccomp import bpf, syscalls
from sandbox.seccomp.filter import AUDIT_ARCH
from sandbox.speed.typed import Literal
from sandbox.speed.value import NamedTuple

USER_NOTIF = 0x7FC00000
AT_EMPTY_PATH = 0x1000

CallKind = Literal["open", "look", "make", "run", "connect"]


class ObservedCall(NamedTuple):
    """Which arguments of a system call say what it is about. -1: there is none."""

    kind: CallKind
    path: int  # the address of the path or, for connect, of the socket's address
    directory: int = -1  # the descriptor that a relative path starts from; -1: the working directory
    flags: int = -1  # of open: a value; for openat2 the address of struct open_how
    empty: int = -1  # the flags that may have AT_EMPTY_PATH: the call is then about a descriptor
    mode: int = -1  # what access is asked about


# mkdir is here because it is how most programs begin to write where they have never been.
OBSERVED: dict[str, ObservedCall] = {
    "open": ObservedCall("open", 0, flags=1),
    "openat": ObservedCall("open", 1, 0, flags=2),
    "openat2": ObservedCall("open", 1, 0, flags=2),
    "creat": ObservedCall("make", 0),
    "mkdir": ObservedCall("make", 0),
    "mkdirat": ObservedCall("make", 1, 0),
    "stat": ObservedCall("look", 0),
    "lstat": ObservedCall("look", 0),
    "newfstatat": ObservedCall("look", 1, 0, empty=3),
    "statx": ObservedCall("look", 1, 0, empty=2),
    "access": ObservedCall("look", 0, mode=1),
    "faccessat": ObservedCall("look", 1, 0, mode=2),
    "faccessat2": ObservedCall("look", 1, 0, empty=3, mode=2),
    "readlink": ObservedCall("look", 0),
    "readlinkat": ObservedCall("look", 1, 0),
    "execve": ObservedCall("run", 0),
    "execveat": ObservedCall("run", 1, 0, empty=4),
    "connect": ObservedCall("connect", 1),
}


def observed_calls(arch: str) -> dict[int, tuple[str, ObservedCall]]:
    """The observed calls by their number; each with its name. Not every architecture has all of them."""
    table = syscalls.load(arch)
    return {table[name]: (name, call) for name, call in OBSERVED.items() if name in table}


def observing_filter(arch: str) -> bytes:
    """The program. Calls of another architecture pass: the cage's own filter kills for them."""
    code = bpf.Assembler()
    allow, notify = code.ret(bpf.ALLOW), code.ret(USER_NOTIF)
    place = allow
    for number, (_, call) in sorted(observed_calls(arch).items(), reverse=True):
        then = notify
        if call.empty >= 0:  # fstat is newfstatat with an empty path, and more frequent than all others
            then = code.branch(bpf.JSET, AT_EMPTY_PATH, allow, notify)
            then = code.load(bpf.argument_offset(call.empty), then)
        place = code.branch(bpf.JEQ, number, then, place)
    place = code.load(bpf.OFFSET_NUMBER, place)
    place = code.branch(bpf.JEQ, AUDIT_ARCH[arch], place, allow)
    code.load(bpf.OFFSET_ARCH, place)
    return code.program()
