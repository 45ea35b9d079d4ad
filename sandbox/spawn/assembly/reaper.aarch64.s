// The cell's init after setup, for aarch64. sandbox/spawn/reaper.py says what it is for, and does the same in
// Python (`wait`). scripts/machine_code.py assembles it.
//
// A system call: its number in w8, arguments in x0 to x5. The result is in x0, a negative errno if it failed: the
// highest bit of w0 is set. Other registers stay as they are.
//
// All signals are blocked, so those of the table wait until rt_sigtimedwait takes them.
//
//     x19   the message, and the stack
//     x22   the table

        .include "linux.inc"
        .include "reaper.inc"

        adr     x22, table
        sub     sp, sp, #stack_size
        mov     x19, sp
        str     xzr, [x19, #message_status]             // and message_expired
        str     xzr, [x19, #message_statfs_result]      // ppoll takes the first 16 bytes as its timeout

// Die with the runner. The init has asked for that before, but an exec on which a security module changes the
// label clears it.
        mov     w0, #PR_SET_PDEATHSIG
        mov     w1, #SIGKILL
        mov     w8, #SYS_prctl
        svc     #0

// Did the runner die before that? Then nobody can read the message: ppoll tells POLLERR of a pipe that has no
// reader. It skips a negative descriptor.
        ldr     w0, [x22, #table_ending]
        str     w0, [x19, #stack_pollfd]
        str     wzr, [x19, #stack_events]
        add     x0, x19, #stack_pollfd
        mov     x1, #1                                  // one descriptor
        mov     x2, x19                                 // struct timespec: do not wait
        mov     x3, #0                                  // no other mask of signals
        mov     x4, #0
        mov     w8, #SYS_ppoll
        svc     #0
        cmp     w0, #0
        b.gt    give_up

        mov     w0, #PR_SET_NAME
        add     x1, x22, #table_name
        mov     w8, #SYS_prctl
        svc     #0

// The account at the beginning. A failure is part of the message.
        ldr     w0, [x22, #table_account]
        add     x1, x19, #message_before
        mov     x2, #ACCOUNT_BYTES
        mov     x3, #0                                  // from its start
        mov     w8, #SYS_pread64
        svc     #0
        str     x0, [x19, #message_read_before]

// Take a process that has ended.
next:
        mov     w0, #EVERY
        add     x1, x19, #stack_status
        mov     w2, #WNOHANG
        mov     x3, #0                                  // its own usage is not needed
        mov     w8, #SYS_wait4
        svc     #0
        tbnz    w0, #31, report                         // ECHILD: none is left
        cbz     w0, wait                                // all that are left still run
        ldr     w1, [x22, #table_program]
        cmp     w0, w1
        b.ne    next                                    // an orphan
        ldr     w1, [x19, #stack_status]
        str     w1, [x19, #message_status]
        b       kill_all                                // bwrap ended: so does everything

// Wait for a signal. One that comes between wait4 and here is not lost, because it is blocked.
wait:
        add     x0, x22, #table_signals
        mov     x1, #0                                  // no siginfo
        mov     x2, #0                                  // for ever
        mov     x3, #SIGSET_BYTES
        mov     w8, #SYS_rt_sigtimedwait
        svc     #0
        cmp     w0, #SIGALRM
        b.eq    expired
        cmp     w0, #SIGUSR1
        b.eq    released
        cmn     w0, #EINTR                              // is it -EINTR: stopped and continued
        b.eq    next
        tbnz    w0, #31, give_up                        // it cannot wait: everything ends with it
        b       next                                    // SIGCHLD

expired:
        mov     w1, #1
        str     w1, [x19, #message_expired]
// One pass kills all of the pid namespace: the kernel holds the lock that a fork needs.
kill_all:
        mov     w0, #EVERY
        mov     w1, #SIGKILL
        mov     w8, #SYS_kill
        svc     #0
        b       next

// The parked program was released: its deadline runs from now on.
released:
        mov     w0, #ITIMER_REAL
        add     x1, x22, #table_timer
        mov     x2, #0                                  // the old timer is not needed
        mov     w8, #SYS_setitimer
        svc     #0
        tbz     w0, #31, next
        b       give_up                                 // a plugin without its deadline must not run

// No process is left. Failures are part of the message.
report:
        mov     w0, #RUSAGE_CHILDREN
        add     x1, x19, #message_usage
        mov     w8, #SYS_getrusage
        svc     #0
        add     x0, x22, #table_scratch
        add     x1, x19, #message_statfs
        mov     w8, #SYS_statfs
        svc     #0
        str     x0, [x19, #message_statfs_result]
        ldr     w0, [x22, #table_account]
        add     x1, x19, #message_after
        mov     x2, #ACCOUNT_BYTES
        mov     x3, #0                                  // from its start
        mov     w8, #SYS_pread64
        svc     #0
        str     x0, [x19, #message_read_after]
        ldr     w0, [x22, #table_ending]
        mov     x1, x19
        mov     x2, #message_size
        mov     w8, #SYS_write
        svc     #0

// Exit as the program did: with 128 + its signal (the low 7 bits of its status), or its exit code (the next 8).
        ldr     w1, [x19, #message_status]
        ands    w0, w1, #127
        b.eq    exited
        add     w0, w0, #128
        b       leave
exited:
        ubfx    w0, w1, #8, #8
        b       leave
give_up:
        mov     w0, #SETUP_FAILED
leave:
        mov     w8, #SYS_exit_group
        svc     #0

table:
