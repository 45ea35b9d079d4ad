"""The cell's init after setup: a program that waits for all processes, kills leftovers and reports the usage.

The init is a clone of the runner or of a monitor. As such it has some 4 MB of private memory, because CPython
writes to almost every page it reads. But from now on it only waits for its children. So it executes a program
of some 100 instructions that takes 12 kB. An exec keeps all that matters: pid, namespaces, ids, no_new_privs,
open files and blocked signals. The parent-death signal is set again: it is cleared by an exec on which a
security module changes the label.

Where no nameless file may be executed (vm.memfd_noexec=2), the init remains a Python process and does the
same (`wait` in this module).
"""

from __future__ import annotations

import os
import resource
import struct
import time

from sandbox.spawn.machine_code import program
from sandbox.spawn.order import ENDING, IO_BYTES
from sandbox.speed.signals import signal
from sandbox.speed.value import NamedTuple

# Its name in ps(1), at most 15 bytes.
NAME = "runner-init"

# The program, with `message` on its stack, laid out as ENDING says:
#     message.status = message.expired = 0
#     prctl(PR_SET_PDEATHSIG, SIGKILL)
#     if poll({table.ending, 0}, 1, 0) > 0: goto gone         nobody can read it: the runner died before
#     prctl(PR_SET_NAME, table.name)
#     message.read_before = pread(table.account, message.before, 512, 0)
# next:
#     pid = wait4(-1, &status, WNOHANG, NULL)
#     if pid < 0: goto over                                   no child is left
#     if pid == 0:
#         number = rt_sigtimedwait(table.signals, NULL, NULL, 8)
#         if number < 0 and number != -EINTR: goto gone       it cannot wait: everything ends with it
#         if number == SIGUSR1:                               a parked program was released
#             if setitimer(ITIMER_REAL, table.timer, NULL) < 0: goto gone
#         if number != SIGALRM: goto next
#         message.expired = 1
#     else:
#         if pid != table.program: goto next
#         message.status = status
#     kill(-1, SIGKILL); goto next
# over:
#     getrusage(RUSAGE_CHILDREN, message.usage)
#     message.statfs_result = statfs(table.scratch, message.statfs)
#     message.read_after = pread(table.account, message.after, 512, 0)
#     write(table.ending, message, 1328)
#     exit_group(128 + its signal, or its exit code, from message.status)
# gone:
#     exit_group(125)
_X86_64 = """
    4c8d35a9010000      lea r14, [rip+table]
    4881ec40050000      sub rsp, 1344
    4989e4              mov r12, rsp
    49c7042400000000    mov qword ptr [r12], 0
    bf01000000          mov edi, 1
    be09000000          mov esi, 9
    b89d000000          mov eax, 157
    0f05                syscall
    418b4608            mov eax, [r14+8]
    4189842430050000    mov [r12+1328], eax
    41c784243405000000000000  mov dword ptr [r12+1332], 0
    498dbc2430050000    lea rdi, [r12+1328]
    be01000000          mov esi, 1
    31d2                xor edx, edx
    b807000000          mov eax, 7
    0f05                syscall
    85c0                test eax, eax
    0f8f42010000        jg gone
    bf0f000000          mov edi, 15
    498d7618            lea rsi, [r14+24]
    b89d000000          mov eax, 157
    0f05                syscall
    418b7e04            mov edi, [r14+4]
    498db42430010000    lea rsi, [r12+304]
    ba00020000          mov edx, 512
    4531d2              xor r10d, r10d
    b811000000          mov eax, 17
    0f05                syscall
    4989842420010000    mov [r12+288], rax
                        next:
    bfffffffff          mov edi, -1
    498db42430050000    lea rsi, [r12+1328]
    ba01000000          mov edx, 1
    4531d2              xor r10d, r10d
    b83d000000          mov eax, 61
    0f05                syscall
    85c0                test eax, eax
    7878                js over
    7413                jz sleep
    413b06              cmp eax, [r14]
    75d9                jne next
    418b8c2430050000    mov ecx, [r12+1328]
    41890c24            mov [r12], ecx
    eb37                jmp kill
                        sleep:
    498d7e10            lea rdi, [r14+16]
    31f6                xor esi, esi
    31d2                xor edx, edx
    41ba08000000        mov r10d, 8
    b880000000          mov eax, 128
    0f05                syscall
    83f80e              cmp eax, 14
    7414                je expired
    83f80a              cmp eax, 10
    742b                je arm
    83f8fc              cmp eax, -4
    74a7                je next
    85c0                test eax, eax
    0f88ae000000        js gone
    eb9d                jmp next
                        expired:
    41c744240401000000  mov dword ptr [r12+4], 1
                        kill:
    bfffffffff          mov edi, -1
    be09000000          mov esi, 9
    b83e000000          mov eax, 62
    0f05                syscall
    eb81                jmp next
                        arm:
    31ff                xor edi, edi
    498d7628            lea rsi, [r14+40]
    31d2                xor edx, edx
    b826000000          mov eax, 38
    0f05                syscall
    85c0                test eax, eax
    0f896affffff        jns next
    eb77                jmp gone
                        over:
    bfffffffff          mov edi, -1
    498d742410          lea rsi, [r12+16]
    b862000000          mov eax, 98
    0f05                syscall
    498d7e48            lea rdi, [r14+72]
    498db424a0000000    lea rsi, [r12+160]
    b889000000          mov eax, 137
    0f05                syscall
    4989442408          mov [r12+8], rax
    418b7e04            mov edi, [r14+4]
    498db42430030000    lea rsi, [r12+816]
    ba00020000          mov edx, 512
    4531d2              xor r10d, r10d
    b811000000          mov eax, 17
    0f05                syscall
    4989842428010000    mov [r12+296], rax
    418b7e08            mov edi, [r14+8]
    4c89e6              mov rsi, r12
    ba30050000          mov edx, 1328
    b801000000          mov eax, 1
    0f05                syscall
    418b0424            mov eax, [r12]
    89c7                mov edi, eax
    83e77f              and edi, 127
    7408                jz ended
    81c780000000        add edi, 128
    eb0a                jmp leave
                        ended:
    0fb6fc              movzx edi, ah
    eb05                jmp leave
                        gone:
    bf7d000000          mov edi, 125
                        leave:
    b8e7000000          mov eax, 231
    0f05                syscall
    6690                xchg ax, ax
                        table:
"""
_AARCH64 = """
    360d0010            adr x22, table
    ff0315d1            sub sp, sp, #1344
    f3030091            mov x19, sp
    7f0200f9            str xzr, [x19]
    7f0600f9            str xzr, [x19, #8]
    20008052            mov w0, #1
    21018052            mov w1, #9
    e8148052            mov w8, #167
    010000d4            svc #0
    c00a40b9            ldr w0, [x22, #8]
    603205b9            str w0, [x19, #1328]
    7f3605b9            str wzr, [x19, #1332]
    60c21491            add x0, x19, #1328
    210080d2            mov x1, #1
    e20313aa            mov x2, x19
    030080d2            mov x3, #0
    040080d2            mov x4, #0
    28098052            mov w8, #73
    010000d4            svc #0
    1f000071            cmp w0, #0
    4c0a0054            b.gt gone
    e0018052            mov w0, #15
    c1620091            add x1, x22, #24
    e8148052            mov w8, #167
    010000d4            svc #0
    c00640b9            ldr w0, [x22, #4]
    61c20491            add x1, x19, #304
    024080d2            mov x2, #512
    030080d2            mov x3, #0
    68088052            mov w8, #67
    010000d4            svc #0
    609200f9            str x0, [x19, #288]
                        next:
    00008012            mov w0, #-1
    61c21491            add x1, x19, #1328
    22008052            mov w2, #1
    030080d2            mov x3, #0
    88208052            mov w8, #260
    010000d4            svc #0
    8004f837            tbnz w0, #31, over
    e0000034            cbz w0, sleep
    c10240b9            ldr w1, [x22]
    1f00016b            cmp w0, w1
    c1feff54            b.ne next
    613245b9            ldr w1, [x19, #1328]
    610200b9            str w1, [x19]
    11000014            b kill
                        sleep:
    c0420091            add x0, x22, #16
    010080d2            mov x1, #0
    020080d2            mov x2, #0
    030180d2            mov x3, #8
    28118052            mov w8, #137
    010000d4            svc #0
    1f380071            cmp w0, #14
    e0000054            b.eq expired
    1f280071            cmp w0, #10
    80010054            b.eq arm
    1f100031            cmn w0, #4
    e0fcff54            b.eq next
    8005f837            tbnz w0, #31, gone
    e5ffff17            b next
                        expired:
    21008052            mov w1, #1
    610600b9            str w1, [x19, #4]
                        kill:
    00008012            mov w0, #-1
    21018052            mov w1, #9
    28108052            mov w8, #129
    010000d4            svc #0
    deffff17            b next
                        arm:
    00008052            mov w0, #0
    c1a20091            add x1, x22, #40
    020080d2            mov x2, #0
    e80c8052            mov w8, #103
    010000d4            svc #0
    00fbff36            tbz w0, #31, next
    1d000014            b gone
                        over:
    00008012            mov w0, #-1
    61420091            add x1, x19, #16
    a8148052            mov w8, #165
    010000d4            svc #0
    c0220191            add x0, x22, #72
    61820291            add x1, x19, #160
    68058052            mov w8, #43
    010000d4            svc #0
    600600f9            str x0, [x19, #8]
    c00640b9            ldr w0, [x22, #4]
    61c20c91            add x1, x19, #816
    024080d2            mov x2, #512
    030080d2            mov x3, #0
    68088052            mov w8, #67
    010000d4            svc #0
    609600f9            str x0, [x19, #296]
    c00a40b9            ldr w0, [x22, #8]
    e10313aa            mov x1, x19
    02a680d2            mov x2, #1328
    08088052            mov w8, #64
    010000d4            svc #0
    610240b9            ldr w1, [x19]
    20180072            ands w0, w1, #127
    60000054            b.eq ended
    00000211            add w0, w0, #128
    04000014            b leave
                        ended:
    203c0853            ubfx w0, w1, #8, #8
    02000014            b leave
                        gone:
    a00f8052            mov w0, #125
                        leave:
    c80b8052            mov w8, #94
    010000d4            svc #0
                        table:
"""

LISTINGS = {"x86_64": _X86_64, "aarch64": _AARCH64}

# The values that the instructions read: the program's pid, the descriptors of account and message, the
# signals to wait for, the process name, the timer of a parked program (struct itimerval), and the scratch
# folder, which ends with a NUL.
_TABLE = struct.Struct("<iii4xQ16s16xqq")
_CHILD, _ALARM = 1 << (signal.SIGCHLD - 1), 1 << (signal.SIGALRM - 1)

# Tells the cell's init that its parked program was released. Only processes outside of the cell can send it.
RELEASED = signal.SIGUSR1


class ReaperOrder(NamedTuple):
    """What the reaper waits for, and what it reports."""

    program: int  # the pid: when it ends, everything is ended
    deadline: float | None  # on the monotonic clock: then everything is ended
    ending: int  # descriptor for the message; -1: nobody reads it
    account: int  # of /proc/self/io; -1: the kernel has none
    scratch: str  # the folder that Ending.full is about; empty: none
    seconds: float | None = None  # of a parked program: its deadline, from RELEASED on


def image(order: ReaperOrder, machine: str = "") -> bytes:
    # Without a deadline there is no timer: a SIGALRM from elsewhere stays blocked.
    signals = _CHILD if order.deadline is None else _CHILD | _ALARM
    timer = 0, 0
    if order.seconds is not None:
        signals |= _ALARM | 1 << (RELEASED - 1)
        timer = int(order.seconds), max(1, int(order.seconds % 1 * 1e6))  # a timer of 0 would never expire
    table = _TABLE.pack(order.program, order.account, order.ending, signals, NAME.encode(), *timer)
    return program(LISTINGS, table + os.fsencode(order.scratch) + b"\0", machine)


def execute(file: int, order: ReaperOrder, held: tuple[int, ...]) -> None:
    """Execute the program, with `held` and the order's descriptors open. Returns only if that fails.

    `file` is an empty memfd that may be executed. All signals have to be blocked.
    """
    written = image(order)
    try:
        if os.write(file, written) != len(written):
            return
        for fd in (order.ending, order.account, *held):
            if fd >= 0:
                os.set_inheritable(fd, True)
        # A timer survives an exec. Its signal stays blocked: the program waits for it and SIGCHLD.
        if order.deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, order.deadline - time.monotonic()))
        os.execve(file, [NAME], {})
    except OSError:  # most likely a security module that forbids executing nameless files
        signal.setitimer(signal.ITIMER_REAL, 0)


def wait(order: ReaperOrder) -> int:
    """The same in Python. Returns the status to exit with."""
    before = _read_account(order.account)
    status, expired, deadline = 0, False, order.deadline
    awaited = {signal.SIGCHLD} if order.seconds is None else {signal.SIGCHLD, RELEASED}
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == order.program:
            status = ended
            # bwrap's own namespace ends with bwrap, but bwrap may have ended before it made one.
            _kill_all()
        if pid:
            continue
        # All signals are blocked here, so a SIGCHLD that arrives between two calls is not lost.
        if deadline is None or expired:
            if signal.sigwait(awaited) == RELEASED and order.seconds is not None and not expired:
                deadline = time.monotonic() + order.seconds
        elif not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic())):
            expired = True
            _kill_all()
    if order.ending >= 0:
        os.write(order.ending, _message(order, status, expired, before))
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _message(order: ReaperOrder, status: int, expired: bool, before: bytes) -> bytes:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    after = _read_account(order.account)
    times = (int(part) for each in (used.ru_utime, used.ru_stime) for part in (each, each % 1 * 1e6))
    try:
        found = os.statvfs(order.scratch)
    except OSError:
        room = -1, 0, 0, 0, 0, 0, 0, 0
    else:
        room = 0, 0, 0, found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
    return ENDING.pack(
        *(status, expired, room[0], *times, used.ru_maxrss, *room[1:]),
        *(len(before), len(after), before, after),
    )


def _kill_all() -> None:
    """Kill every process below us in one pass. No fork escapes: the kernel holds the lock that fork needs."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read_account(fd: int) -> bytes:
    return b"" if fd < 0 else os.pread(fd, IO_BYTES, 0)
