"""Which system calls fail, and how: the errnos that their manual pages name for a call that is right.

EFAULT, EBADF and EINVAL are not here: they mean a bug of the caller. Nor is ENOENT, which means another
machine and not a fault. Nor are close(2), which closes whatever it returns, and memory (mmap, brk): for these
the resources of tests/faults/test_resources.py are really used up.
"""

from __future__ import annotations

from errno import (
    EACCES,
    EAGAIN,
    EBUSY,
    EDQUOT,
    EINTR,
    EIO,
    EMFILE,
    ENFILE,
    ENOBUFS,
    ENODEV,
    ENOLCK,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    EPERM,
    EROFS,
    ESRCH,
    EUSERS,
)

_MAKES_FD = (EMFILE, ENFILE, ENOMEM)
_CHANGES_NAME = (ENOSPC, EROFS, EIO, EACCES)
_MOUNTS = (EPERM, ENOMEM, EBUSY)
_NAMESPACE = (EPERM, ENOSPC, EUSERS, ENOMEM)

ERRNOS: dict[str, tuple[int, ...]] = {
    "openat": (EMFILE, EACCES, EIO, ENFILE, ENOMEM),
    "openat2": (EMFILE, EACCES, ENOSYS, EAGAIN),
    "read": (EIO, EINTR),
    "pread64": (EIO,),
    "write": (ENOSPC, EIO, EINTR, EDQUOT),
    "pwrite64": (ENOSPC, EIO),
    "writev": (ENOSPC, EIO),
    "fsync": (EIO, ENOSPC),
    "fdatasync": (EIO, ENOSPC),
    "ftruncate": (EIO, ENOSPC),
    "fallocate": (ENOSPC, EIO),
    "getdents64": (EIO,),
    "mkdirat": _CHANGES_NAME,
    "mkdir": _CHANGES_NAME,
    "unlinkat": (EBUSY, EIO, EROFS),
    "unlink": (EBUSY, EIO, EROFS),
    "rmdir": (EBUSY, EIO),
    "renameat": _CHANGES_NAME,
    "renameat2": _CHANGES_NAME,
    "rename": _CHANGES_NAME,
    "linkat": _CHANGES_NAME,
    "symlinkat": _CHANGES_NAME,
    "fchmod": (EPERM, EROFS, EIO),
    "fchmodat": (EPERM, EROFS, EIO),
    "fchown": (EPERM, EROFS, EIO),
    "fchownat": (EPERM, EROFS, EIO),
    "flock": (ENOLCK, EINTR),
    "fcntl-dup": (EMFILE,),
    "fcntl-lock": (ENOLCK,),
    "dup": (EMFILE,),
    "dup3": (EMFILE, EBUSY),
    "dup2": (EMFILE, EBUSY),
    "pipe2": _MAKES_FD,
    "socket": _MAKES_FD,
    "socketpair": _MAKES_FD,
    "bind": (EACCES, ENOMEM),
    "listen": (EACCES,),
    "sendmsg": (ENOBUFS, ENOMEM),
    "sendto": (ENOBUFS, ENOMEM),
    "recvmsg": (ENOMEM, EINTR),
    "epoll_create1": _MAKES_FD,
    "epoll_ctl": (ENOMEM, ENOSPC),
    "eventfd2": _MAKES_FD,
    "signalfd4": _MAKES_FD,
    "memfd_create": (EMFILE, ENOMEM, EACCES),
    "inotify_init1": _MAKES_FD,
    "pidfd_open": (EMFILE, ENFILE, ENODEV, ENOMEM),
    "pidfd_send_signal": (EPERM,),
    "clone": (EAGAIN, ENOMEM, EPERM, ENOSPC),
    "clone3": (EAGAIN, ENOMEM, EPERM, ENOSYS),
    "fork": (EAGAIN, ENOMEM),
    "vfork": (EAGAIN, ENOMEM),
    "execve": (ENOMEM, EACCES, EAGAIN, EIO),
    "execveat": (ENOMEM, EACCES, EAGAIN),
    "setsid": (EPERM,),
    "setgroups": (EPERM, ENOMEM),
    "setresuid": (EPERM, EAGAIN),
    "setresgid": (EPERM,),
    "capset": (EPERM,),
    "prctl": (EPERM, ENOSYS, ENOMEM),
    "prlimit64": (EPERM,),
    "setrlimit": (EPERM,),
    "unshare": _NAMESPACE,
    "setns": (EPERM, ENOMEM),
    "mount": _MOUNTS,
    "umount2": _MOUNTS,
    "pivot_root": _MOUNTS,
    "chdir": (EACCES, EIO),
    "fchdir": (EACCES,),
    "open_tree": (EPERM, EMFILE, ENOSYS),
    "move_mount": _MOUNTS,
    "mount_setattr": (EPERM, ENOSYS),
    "fsopen": (EPERM, ENOSYS),
    "seccomp": (ENOMEM, EACCES),
    "keyctl": (EDQUOT, ENOMEM, EACCES),
    "close_range": (ENOMEM, ENOSYS),
    "sethostname": (EPERM,),
    "landlock_create_ruleset": (ENOSYS,),
    "landlock_restrict_self": (EPERM,),
    "kill": (EPERM, ESRCH),
}

# bubblewrap goes on if a capability cannot be dropped from the bounding set. Nobody in the cage can gain one:
# no new privileges, and none in any other set.
UNDROPPED = ("bwrap-init", "prctl")
NEVER_FAILS = {
    # The launcher's word that it executes the program: four bytes into an empty pipe. That cannot fail while
    # there is a reader, and without one the cage ends.
    ("runner-launcher", "write"),
    # trio's threads wake its loop by a byte into a socket of its own. trio has no other way to tell, so that
    # it would wait for ever. The kernel lacks the memory for one byte only if it is killing the process.
    ("runner-thread", "sendto"),
}

# The runner or the machine has no more of something. That is no fault of a file, a policy or a plugin.
SHORTAGES = frozenset({EMFILE, ENFILE, ENOMEM, EAGAIN, ENOBUFS})

# Classes of outcomes (runner/outcome.py). A plugin that may have run is never of a class that says that
# nothing was started: whoever asked would start it again.
NOT_STARTED = frozenset(
    {"launch_failed", "sandbox_unavailable", "policy_denied", "policy_invalid", "manifest_invalid"}
)
MAY_HAVE_RUN = frozenset({"ok", "internal", "crashed", "timeout"})
