# The last program before the plugin, for x86_64. sandbox/spawn/launcher.py says what it is for.
# scripts/machine_code.py assembles it.
#
# A system call: its number in eax, arguments in rdi, rsi, rdx, r10, r8, r9. The result is in rax, a negative
# errno if it failed. It changes rcx and r11.
#
#     r12   argv of the command
#     r13   envp
#     r14   the table
#     rbp   a counter

        .intel_syntax noprefix
        .include "linux.inc"
        .include "launcher.inc"

        mov     rbx, [rsp+stack_argc]
        lea     r12, [rsp+stack_command]
        lea     r13, [rsp+rbx*8+stack_argv0+8]          # behind the NULL that ends argv
        lea     r14, [rip+table]

# Move the streams to 0, 1 and 2. dup3 refuses a descriptor that is there already: Python gives higher ones.
        xor     ebp, ebp
each_stream:
        mov     edi, [r14+rbp*4+table_streams]
        mov     esi, ebp
        xor     edx, edx                                # stays open on exec
        mov     eax, SYS_dup3
        syscall
        test    eax, eax
        js      give_up
        inc     ebp
        cmp     ebp, 3
        jne     each_stream

# Close their old numbers, and this program's own file, which stands behind them in the table.
        xor     ebp, ebp
each_close:
        mov     edi, [r14+rbp*4+table_streams]
        mov     eax, SYS_close
        syscall
        inc     ebp
        cmp     ebp, 4
        jne     each_close

# The exec closes the pipe of the report: that tells its reader that it succeeded.
        mov     edi, [r14+table_report]
        mov     esi, F_SETFD
        mov     edx, FD_CLOEXEC
        mov     eax, SYS_fcntl
        syscall
        test    eax, eax
        js      give_up

# In a parked cell: wait for one byte. The end of the file means that nobody can release it any more.
        mov     edi, [r14+table_release]
        test    edi, edi
        js      go
        mov     rsi, rsp                                # argc is not needed any more
        mov     edx, 1
        xor     eax, eax                                # SYS_read
        syscall
        cmp     eax, 1
        jne     give_up
        mov     edi, [r14+table_release]
        mov     eax, SYS_close
        syscall

go:
        mov     edi, [r14+table_report]
        lea     rsi, [r14+table_about_to_exec]
        mov     edx, 4
        mov     eax, SYS_write
        syscall
        mov     rdi, [r12]                              # argv[1]
        mov     rsi, r12
        mov     rdx, r13
        mov     eax, SYS_execve
        syscall

# It returns only if it failed. Report its errno, and whether the file exists: ENOENT may be about its interpreter.
        neg     eax
        mov     [rsp+report_errno], eax
        mov     edi, AT_FDCWD
        mov     rsi, [r12]
        xor     edx, edx                                # F_OK
        mov     eax, SYS_faccessat
        syscall
        mov     [rsp+report_access], eax
        mov     edi, [r14+table_report]
        mov     rsi, rsp
        mov     edx, report_size
        mov     eax, SYS_write
        syscall
give_up:
        mov     edi, SETUP_FAILED
        mov     eax, SYS_exit_group
        syscall

        .balign 8
table:
