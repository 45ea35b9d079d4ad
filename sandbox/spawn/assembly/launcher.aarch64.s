// The last program before the plugin, for aarch64. sandbox/spawn/launcher.py says what it is for.
// scripts/machine_code.py assembles it.
//
// A system call: its number in w8, arguments in x0 to x5. The result is in x0, a negative errno if it failed: the
// highest bit of w0 is set. Other registers stay as they are.
//
//     x20   argv of the command
//     x21   envp
//     x22   the table
//     x23   a counter

        .include "linux.inc"
        .include "launcher.inc"

        ldr     x19, [sp, #stack_argc]
        add     x20, sp, #stack_command
        add     x21, x20, x19, lsl #3                   // behind the NULL that ends argv: x20 is one after argv[0]
        adr     x22, table

// Move the streams to 0, 1 and 2. dup3 refuses a descriptor that is there already: Python gives higher ones.
        mov     x23, #0
each_stream:
        ldr     w0, [x22, x23, lsl #2]                  // table_streams is at 0
        mov     w1, w23
        mov     w2, #0                                  // stays open on exec
        mov     w8, #SYS_dup3
        svc     #0
        tbnz    w0, #31, give_up
        add     x23, x23, #1
        cmp     x23, #3
        b.ne    each_stream

// Close their old numbers, and this program's own file, which stands behind them in the table.
        mov     x23, #0
each_close:
        ldr     w0, [x22, x23, lsl #2]
        mov     w8, #SYS_close
        svc     #0
        add     x23, x23, #1
        cmp     x23, #4
        b.ne    each_close

// The exec closes the pipe of the report: that tells its reader that it succeeded.
        ldr     w0, [x22, #table_report]
        mov     w1, #F_SETFD
        mov     w2, #FD_CLOEXEC
        mov     w8, #SYS_fcntl
        svc     #0
        tbnz    w0, #31, give_up

// In a parked cell: wait for one byte. The end of the file means that nobody can release it any more.
        ldr     w0, [x22, #table_release]
        tbnz    w0, #31, go
        mov     x1, sp                                  // argc is not needed any more
        mov     x2, #1
        mov     w8, #SYS_read
        svc     #0
        cmp     w0, #1
        b.ne    give_up
        ldr     w0, [x22, #table_release]
        mov     w8, #SYS_close
        svc     #0

go:
        ldr     w0, [x22, #table_report]
        add     x1, x22, #table_about_to_exec
        mov     x2, #4
        mov     w8, #SYS_write
        svc     #0
        ldr     x0, [x20]                               // argv[1]
        mov     x1, x20
        mov     x2, x21
        mov     w8, #SYS_execve
        svc     #0

// It returns only if it failed. Report its errno, and whether the file exists: ENOENT may be about its interpreter.
        neg     w0, w0
        str     w0, [sp, #report_errno]
        mov     w0, #AT_FDCWD
        ldr     x1, [x20]
        mov     w2, #F_OK
        mov     w8, #SYS_faccessat
        svc     #0
        str     w0, [sp, #report_access]
        ldr     w0, [x22, #table_report]
        mov     x1, sp
        mov     x2, #report_size
        mov     w8, #SYS_write
        svc     #0
give_up:
        mov     w0, #SETUP_FAILED
        mov     w8, #SYS_exit_group
        svc     #0

table:
