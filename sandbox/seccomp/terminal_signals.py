"""A small filter beside the main one, for a plugin that has a terminal of its caller's (`--tty`).

With O_ASYNC the kernel sends signals about a terminal to its foreground processes, which are the caller's.
SIGIO ends the runner of an ordinary user. The flag belongs to the open file and stays: the shell would end at
the next key. So such a plugin may not set it. Others may: nginx does, on sockets of its own.

It is made with the assembler and the tables, which the path of other launches does without.
"""

from __future__ import annotations

import os

from sandbox.seccomp import bpf, syscalls
from sandbox.seccomp.filter import AUDIT_ARCH

_EPERM = 1
_F_SETFL = 4
_FIOASYNC = 0x5452


def no_terminal_signals(arch: str) -> bytes:
    """The filter. The main filter judges calls of another architecture."""
    table = syscalls.load(arch)
    code = bpf.Assembler()
    allow, refuse = code.ret(bpf.ALLOW), code.ret(bpf.ERRNO | _EPERM)
    flags = code.load(bpf.argument_offset(2), code.branch(bpf.JSET, os.O_ASYNC, refuse, allow))
    fcntl = code.load(bpf.argument_offset(1), code.branch(bpf.JEQ, _F_SETFL, flags, allow))
    ioctl = code.load(bpf.argument_offset(1), code.branch(bpf.JEQ, _FIOASYNC, refuse, allow))
    other = code.branch(bpf.JEQ, table["fcntl"], fcntl, allow)
    number = code.load(bpf.OFFSET_NUMBER, code.branch(bpf.JEQ, table["ioctl"], ioctl, other))
    code.load(bpf.OFFSET_ARCH, code.branch(bpf.JEQ, AUDIT_ARCH[arch], number, allow))
    return code.program()
