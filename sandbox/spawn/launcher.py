"""The last program before the plugin: it connects the plugin's streams, and reports whether exec worked.

bwrap leaves two processes running, and both keep the descriptors 0, 1 and 2 that it was started with. If
these were the plugin's pipes, nobody could see that the plugin has closed one. Both close everything above
2. So the streams pass bwrap under higher numbers, and a program inside has to move them.

A shell could do that. But a shell adds variables to the environment (PWD, SHLVL), drops those with names it
does not accept, runs as a script what the kernel does not execute, cannot mark a descriptor close-on-exec,
and may not be in the cage. So the launcher is a program of our own: 65 instructions, without a library or a
loader. bwrap gets it as a descriptor without a name, and nothing of it is left when the plugin starts. Only
where a nameless file may not be executed (vm.memfd_noexec=2) it is a read-only file in the cage.

In a parked cell it waits for one byte on a pipe before it executes the program, and exits at the end of the
file: when the process that holds the other end dies, no program starts. bwrap's own --block-fd would start it
then.

It writes "exec" to a pipe that the exec closes. An errno after that means that the exec has failed. An empty
pipe means that the launcher did not get as far as the exec.
"""

from __future__ import annotations

import struct

from sandbox.spawn.machine_code import program
from sandbox.speed.value import NamedTuple

# Its name in the cage, by the number of its descriptor.
PATH = "/proc/self/fd/{}"

_ABOUT_TO_EXEC = b"exec"
_FAILURE = struct.Struct("=Ii")  # errno of execve, and the result of faccessat for the same path

# Instructions and their assembled bytes; the tests compare the two. The program:
#     for i in 0, 1, 2: dup3(table[i], i, 0)                  else exit(125)
#     for i in 0, 1, 2, 3: close(table[i])                    the streams' old numbers, and its own file
#     fcntl(table[4], F_SETFD, FD_CLOEXEC)                    else exit(125)
#     if table[5] >= 0:                                       the cell is parked
#         if read(table[5], stack, 1) != 1: exit(125)         the end of the file: nobody can release it
#         close(table[5])
#     write(table[4], "exec", 4)
#     execve(argv[1], argv + 1, envp)
#     write(table[4], (-result, faccessat(AT_FDCWD, argv[1], F_OK)), 8)
#     exit(125)
_X86_64 = """
    488b1c24            mov rbx, [rsp]
    4c8d642410          lea r12, [rsp+16]
    4c8d6cdc10          lea r13, [rsp+rbx*8+16]
    4c8d35d3000000      lea r14, [rip+table]
    31ed                xor ebp, ebp
                        each:
    418b3cae            mov edi, [r14+rbp*4]
    89ee                mov esi, ebp
    31d2                xor edx, edx
    b824010000          mov eax, 292
    0f05                syscall
    85c0                test eax, eax
    0f88ab000000        js lost
    ffc5                inc ebp
    83fd03              cmp ebp, 3
    75e2                jne each
    31ed                xor ebp, ebp
                        drop:
    418b3cae            mov edi, [r14+rbp*4]
    b803000000          mov eax, 3
    0f05                syscall
    ffc5                inc ebp
    83fd04              cmp ebp, 4
    75ee                jne drop
    418b7e10            mov edi, [r14+16]
    be02000000          mov esi, 2
    ba01000000          mov edx, 1
    b848000000          mov eax, 72
    0f05                syscall
    85c0                test eax, eax
    7877                js lost
    418b7e14            mov edi, [r14+20]
    85ff                test edi, edi
    781c                js go
    4889e6              mov rsi, rsp
    ba01000000          mov edx, 1
    31c0                xor eax, eax
    0f05                syscall
    83f801              cmp eax, 1
    755e                jne lost
    418b7e14            mov edi, [r14+20]
    b803000000          mov eax, 3
    0f05                syscall
                        go:
    418b7e10            mov edi, [r14+16]
    498d7618            lea rsi, [r14+24]
    ba04000000          mov edx, 4
    b801000000          mov eax, 1
    0f05                syscall
    498b3c24            mov rdi, [r12]
    4c89e6              mov rsi, r12
    4c89ea              mov rdx, r13
    b83b000000          mov eax, 59
    0f05                syscall
    f7d8                neg eax
    890424              mov [rsp], eax
    bf9cffffff          mov edi, -100
    498b3424            mov rsi, [r12]
    31d2                xor edx, edx
    b80d010000          mov eax, 269
    0f05                syscall
    89442404            mov [rsp+4], eax
    418b7e10            mov edi, [r14+16]
    4889e6              mov rsi, rsp
    ba08000000          mov edx, 8
    b801000000          mov eax, 1
    0f05                syscall
                        lost:
    bf7d000000          mov edi, 125
    b8e7000000          mov eax, 231
    0f05                syscall
    0f1f00              nop dword ptr [rax]
                        table:
"""
_AARCH64 = """
    f30340f9            ldr x19, [sp]
    f4430091            add x20, sp, #16
    950e138b            add x21, x20, x19, lsl #3
    b6070010            adr x22, table
    170080d2            mov x23, #0
                        each:
    c07a77b8            ldr w0, [x22, x23, lsl #2]
    e103172a            mov w1, w23
    02008052            mov w2, #0
    08038052            mov w8, #24
    010000d4            svc #0
    6006f837            tbnz w0, #31, lost
    f7060091            add x23, x23, #1
    ff0e00f1            cmp x23, #3
    01ffff54            b.ne each
    170080d2            mov x23, #0
                        drop:
    c07a77b8            ldr w0, [x22, x23, lsl #2]
    28078052            mov w8, #57
    010000d4            svc #0
    f7060091            add x23, x23, #1
    ff1200f1            cmp x23, #4
    61ffff54            b.ne drop
    c01240b9            ldr w0, [x22, #16]
    41008052            mov w1, #2
    22008052            mov w2, #1
    28038052            mov w8, #25
    010000d4            svc #0
    6004f837            tbnz w0, #31, lost
    c01640b9            ldr w0, [x22, #20]
    4001f837            tbnz w0, #31, go
    e1030091            mov x1, sp
    220080d2            mov x2, #1
    e8078052            mov w8, #63
    010000d4            svc #0
    1f040071            cmp w0, #1
    61030054            b.ne lost
    c01640b9            ldr w0, [x22, #20]
    28078052            mov w8, #57
    010000d4            svc #0
                        go:
    c01240b9            ldr w0, [x22, #16]
    c1620091            add x1, x22, #24
    820080d2            mov x2, #4
    08088052            mov w8, #64
    010000d4            svc #0
    800240f9            ldr x0, [x20]
    e10314aa            mov x1, x20
    e20315aa            mov x2, x21
    a81b8052            mov w8, #221
    010000d4            svc #0
    e003004b            neg w0, w0
    e00300b9            str w0, [sp]
    600c8012            mov w0, #-100
    810240f9            ldr x1, [x20]
    02008052            mov w2, #0
    08068052            mov w8, #48
    010000d4            svc #0
    e00700b9            str w0, [sp, #4]
    c01240b9            ldr w0, [x22, #16]
    e1030091            mov x1, sp
    020180d2            mov x2, #8
    08088052            mov w8, #64
    010000d4            svc #0
                        lost:
    a00f8052            mov w0, #125
    c80b8052            mov w8, #94
    010000d4            svc #0
                        table:
"""


LISTINGS = {"x86_64": _X86_64, "aarch64": _AARCH64}


def image(
    streams: tuple[int, int, int], own: int, report_fd: int, machine: str = "", release: int = -1
) -> bytes:
    """The program for one launch, as an ELF file.

    The numbers are those of its descriptors: the streams to move, its own file, the pipe on which it reports
    its progress, and in a parked cell the pipe on which its release comes. Raises OSError on a machine
    without a listing.
    """
    table = struct.pack("<6i", *streams, own, report_fd, release) + _ABOUT_TO_EXEC
    return program(LISTINGS, table, machine)


class ExecReport(NamedTuple):
    """The launcher's report, read after it has ended or has become the plugin."""

    executed: bool  # the plugin runs, or ran
    errno: int = 0  # of the failed execve; 0: it was not reached
    found: bool = False  # the file exists, so ENOENT is about its interpreter or loader


def read_report(written: bytes) -> ExecReport:
    if not written.startswith(_ABOUT_TO_EXEC):
        return ExecReport(False)
    rest = written[len(_ABOUT_TO_EXEC) :]
    if len(rest) < _FAILURE.size:
        return ExecReport(True)
    number, access = _FAILURE.unpack_from(rest)
    return ExecReport(False, number, access == 0)


def failure_report(number: int, *, found: bool) -> bytes:
    """The report of a failed execve. Also written where a program is executed without the launcher."""
    return _ABOUT_TO_EXEC + _FAILURE.pack(number, 0 if found else -1)
