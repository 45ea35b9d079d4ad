# The cell's init after setup, for x86_64. sandbox/spawn/reaper.py says what it is for, and does the same in
# Python (`wait`). scripts/machine_code.py assembles it.
#
# A system call: its number in eax, arguments in rdi, rsi, rdx, r10, r8, r9. The result is in rax, a negative
# errno if it failed. It changes rcx and r11.
#
# All signals are blocked, so those of the table wait until rt_sigtimedwait takes them.
#
#     r12   the message, and the stack
#     r14   the table

        .intel_syntax noprefix
        .include "linux.inc"
        .include "reaper.inc"

        lea     r14, [rip+table]
        sub     rsp, stack_size
        mov     r12, rsp
        mov     qword ptr [r12+message_status], 0       # and message_expired

# Die with the runner. The init has asked for that before, but an exec on which a security module changes the
# label clears it.
        mov     edi, PR_SET_PDEATHSIG
        mov     esi, SIGKILL
        mov     eax, SYS_prctl
        syscall

# Did the runner die before that? Then nobody can read the message: poll tells POLLERR of a pipe that has no
# reader. It skips a negative descriptor.
        mov     eax, [r14+table_ending]
        mov     [r12+stack_pollfd], eax
        mov     dword ptr [r12+stack_events], 0
        lea     rdi, [r12+stack_pollfd]
        mov     esi, 1                                  # one descriptor
        xor     edx, edx                                # do not wait
        mov     eax, SYS_poll
        syscall
        test    eax, eax
        jg      give_up

        mov     edi, PR_SET_NAME
        lea     rsi, [r14+table_name]
        mov     eax, SYS_prctl
        syscall

# The account at the beginning. A failure is part of the message.
        mov     edi, [r14+table_account]
        lea     rsi, [r12+message_before]
        mov     edx, ACCOUNT_BYTES
        xor     r10d, r10d                              # from its start
        mov     eax, SYS_pread64
        syscall
        mov     [r12+message_read_before], rax

# Take a process that has ended.
next:
        mov     edi, EVERY
        lea     rsi, [r12+stack_status]
        mov     edx, WNOHANG
        xor     r10d, r10d                              # its own usage is not needed
        mov     eax, SYS_wait4
        syscall
        test    eax, eax
        js      report                                  # ECHILD: none is left
        jz      wait                                    # all that are left still run
        cmp     eax, [r14+table_program]
        jne     next                                    # an orphan
        mov     ecx, [r12+stack_status]
        mov     [r12+message_status], ecx
        jmp     kill_all                                # bwrap ended: so does everything

# Wait for a signal. One that comes between wait4 and here is not lost, because it is blocked.
wait:
        lea     rdi, [r14+table_signals]
        xor     esi, esi                                # no siginfo
        xor     edx, edx                                # for ever
        mov     r10d, SIGSET_BYTES
        mov     eax, SYS_rt_sigtimedwait
        syscall
        cmp     eax, SIGALRM
        je      expired
        cmp     eax, SIGUSR1
        je      released
        cmp     eax, -EINTR                             # stopped and continued
        je      next
        test    eax, eax
        js      give_up                                 # it cannot wait: everything ends with it
        jmp     next                                    # SIGCHLD

expired:
        mov     dword ptr [r12+message_expired], 1
# One pass kills all of the pid namespace: the kernel holds the lock that a fork needs.
kill_all:
        mov     edi, EVERY
        mov     esi, SIGKILL
        mov     eax, SYS_kill
        syscall
        jmp     next

# The parked program was released: its deadline runs from now on.
released:
        xor     edi, edi                                # ITIMER_REAL
        lea     rsi, [r14+table_timer]
        xor     edx, edx                                # the old timer is not needed
        mov     eax, SYS_setitimer
        syscall
        test    eax, eax
        jns     next
        jmp     give_up                                 # a plugin without its deadline must not run

# No process is left. Failures are part of the message.
report:
        mov     edi, RUSAGE_CHILDREN
        lea     rsi, [r12+message_usage]
        mov     eax, SYS_getrusage
        syscall
        lea     rdi, [r14+table_scratch]
        lea     rsi, [r12+message_statfs]
        mov     eax, SYS_statfs
        syscall
        mov     [r12+message_statfs_result], rax
        mov     edi, [r14+table_account]
        lea     rsi, [r12+message_after]
        mov     edx, ACCOUNT_BYTES
        xor     r10d, r10d                              # from its start
        mov     eax, SYS_pread64
        syscall
        mov     [r12+message_read_after], rax
        mov     edi, [r14+table_ending]
        mov     rsi, r12
        mov     edx, message_size
        mov     eax, SYS_write
        syscall

# Exit as the program did: with 128 + its signal (the low 7 bits of its status), or its exit code (the next 8).
        mov     eax, [r12+message_status]
        mov     edi, eax
        and     edi, 127
        jz      exited
        add     edi, 128
        jmp     leave
exited:
        movzx   edi, ah
        jmp     leave
give_up:
        mov     edi, SETUP_FAILED
leave:
        mov     eax, SYS_exit_group
        syscall

        .balign 8
table:
