"""Confine the gate's process: it reads what a hostile plugin and hostile servers send.

A step that fails ends the gate, and with it the launch. Two steps are best effort: Landlock, and for root an
empty root directory. Without them the system call filter alone already denies the file system.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import struct

from sandbox.speed.libc import Library, addressof, get_errno, memory_at, open_libc, writable
from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable, Collection

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_PR_GET_DUMPABLE, _PR_GET_SECCOMP, _PR_GET_NO_NEW_PRIVS = 3, 21, 39
_SECCOMP_MODE_FILTER = 2
# The same numbers on every architecture.
_CLOSE_RANGE, _LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 436, 444, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
# All file rights of version 1 of Landlock, and those that each later version added.
_LANDLOCK_FILES = {1: 0x1FFF, 2: 0x2000, 3: 0x4000, 5: 0x8000}
_LANDLOCK_BIND_TCP = 1  # from version 4
_LANDLOCK_SCOPES = 3  # from version 6: no abstract sockets and no signals to other processes
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
_NO_CAPABILITIES = bytes(24)
_HIGHEST_FD = 0x7FFFFFFF
_STAT_ENV_START, _STAT_ENV_END = 50, 51  # fields of /proc/PID/stat, counted from 1; the third is the state
_EMPTY_DIRECTORY_PLACES = ("/run", "/tmp", "/dev/shm")  # the first in which a directory can be made is used

_MORE_DATA_BYTES = 64 * 1024 * 1024  # RLIMIT_DATA, above what the process has when it is confined


class ConfinementError(Exception):
    """A step of the confinement failed. The text says which."""


def leave_terminal() -> None:
    """Start a new session, so that Ctrl-C reaches only the launching process, and reset signal handlers.
    SIGPIPE stays ignored: splice to a closed socket raises it."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o077)


def close_others(kept: Collection[int]) -> None:
    """Close all other descriptors, and make 0, 1 and 2 /dev/null."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if fd not in kept and fd != null:
            os.dup2(null, fd)
    libc = open_libc()
    low = 3
    for fd in sorted(fd for fd in kept if fd > 2):
        if fd > low and libc.syscall(_CLOSE_RANGE, low, fd - 1, 0) < 0:
            _raise("close other files")
        low = fd + 1
    if libc.syscall(_CLOSE_RANGE, low, _HIGHEST_FD, 0) < 0:
        _raise("close other files")


def forget_environment() -> None:
    """Erase the environment variables, in Python and in the memory that /proc/PID/environ shows."""
    os.environ.clear()
    with open("/proc/self/stat", "rb") as file:
        words = file.read().rpartition(b") ")[2].split()
    start, end = (int(words[field - 3]) for field in (_STAT_ENV_START, _STAT_ENV_END))
    if 0 < start < end:
        memory_at(start, end - start).raw = bytes(end - start)


def is_alive(alive: int) -> bool:
    """Whether nothing has come on this pipe, and it is still open at its other end."""
    watch = select.poll()
    watch.register(alive, select.POLLIN)
    return not watch.poll(0)


def follow_parent(alive: Callable[[], bool]) -> None:
    """Ask the kernel to kill this process when the one that forked it dies. `alive` tells whether that has
    happened already. The kernel forgets the request when the uid changes."""
    libc = open_libc()
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) < 0:
        _raise("follow the death of the launching process")
    if not alive():
        raise ConfinementError("the launching process has ended")


def forbid_tracing() -> None:
    """No process of the same user reads the memory of this one, and it leaves no core file."""
    _prctl(open_libc(), "forbid to be traced", _PR_SET_DUMPABLE, 0, _PR_GET_DUMPABLE, 0)


def confine(
    identity: tuple[int, int] | None, descriptors: int, alive: Callable[[], bool], program: bytes
) -> None:
    """Take every step, or raise ConfinementError. `identity`: the uid and the gid to change to.
    `descriptors`: how many may be open. `program`: the filter of system calls."""
    libc = open_libc()
    ruleset = _make_ruleset(libc)
    _set_limits(descriptors)
    if os.geteuid() == 0:
        _leave_root_directory()
    if identity is not None:
        uid, gid = identity
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        if os.getgroups() or os.getresuid() != (uid,) * 3 or os.getresgid() != (gid,) * 3:
            raise ConfinementError("the uid did not change")
    if libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES) < 0:
        _raise("drop capabilities")
    _prctl(libc, "forbid new privileges", _PR_SET_NO_NEW_PRIVS, 1, _PR_GET_NO_NEW_PRIVS, 1)
    forbid_tracing()  # a change of the uid allows it again
    follow_parent(alive)
    if ruleset >= 0:
        if libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) < 0:
            _raise("use Landlock")
        os.close(ruleset)
    code = writable(len(program))
    code.raw = program
    head = struct.pack("@HP", len(program) // 8, addressof(code))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0) < 0:
        _raise("filter system calls")


def _set_limits(descriptors: int) -> None:
    """Set the rlimits. Called before the uid changes: an ordinary user cannot raise a limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY:
        descriptors = min(descriptors, hard)
    limits = {
        resource.RLIMIT_NOFILE: descriptors,
        resource.RLIMIT_DATA: _read_data_bytes() + _MORE_DATA_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, value in limits.items():
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            value = min(value, ceiling)
        resource.setrlimit(kind, (value, value))


def _read_data_bytes() -> int:
    """The bytes that count against RLIMIT_DATA now: the sixth number of statm, in pages."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _leave_root_directory() -> None:
    """Change the root to an empty, removed directory. Best effort: a container may forbid it or have no place
    for a directory, and the system call filter holds without it."""
    for place in _EMPTY_DIRECTORY_PLACES:
        folder = f"{place}/gate-{os.urandom(8).hex()}"
        try:
            os.mkdir(folder, 0o700)
            try:
                os.chdir(folder)
            finally:
                os.rmdir(folder)
            os.chroot(".")
            return
        except OSError:
            os.chdir("/")


def _make_ruleset(libc: Library) -> int:
    """A Landlock ruleset that allows nothing; -1 where the kernel has no Landlock."""
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return -1
    files = sum(rights for since, rights in _LANDLOCK_FILES.items() if version >= since)
    words = [files]
    if version >= 4:
        words.append(_LANDLOCK_BIND_TCP)
    if version >= 6:
        words.append(_LANDLOCK_SCOPES)
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = int(libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))
    if ruleset < 0:
        _raise("use Landlock")
    return ruleset


def _prctl(libc: Library, step: str, option: int, value: int, getter: int, expected: int) -> None:
    if libc.prctl(option, value, 0, 0, 0) < 0:
        _raise(step)
    if libc.prctl(getter, 0, 0, 0, 0) != expected:
        raise ConfinementError(f"could not {step}: the kernel did not do it")


def _raise(step: str) -> None:
    code = get_errno() or errno.EPERM
    raise ConfinementError(f"could not {step}: {os.strerror(code)}")
