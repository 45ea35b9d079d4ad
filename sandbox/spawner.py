"""The last steps before bubblewrap: from a plan's fds and numbers to a process that has become bwrap.

Standard library only, and single-threaded by contract: the parent-death signal belongs to the *thread*
that forked, so a child made by a worker thread is killed when that thread is retired. `spawn` is called
from the main thread of a process that has no other.

The child is the init of a pid namespace of our own, one level outside the one bwrap makes. bwrap arms its
own parent-death signal only after it has mounted everything; killed before that, its child would carry on
as an orphan, or wait for ever on an eventfd nobody will write. With a namespace around all of it there is
one process whose death is everybody's, from the first instruction on, and waiting for it waits for all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39
_KEYCTL_JOIN_SESSION_KEYRING = 1
_OOM_SCORE = 500  # before anything of the host's

# (clone, keyctl, close_range): the only calls for which libc offers no function we can use.
_SYSCALLS = {"x86_64": (56, 250, 436), "aarch64": (220, 219, 436)}

# What a dead child says on the error pipe: index of the stage that failed, errno.
_FAULT = struct.Struct("=ii")
_STAGES = (
    "follow the runner's death",
    "wait for the id mapping",
    "start a session",
    "join a session keyring",
    "set resource limits",
    "raise the OOM score",
    "drop groups",
    "drop the group id",
    "drop the user id",
    "forbid new privileges",
    "close other files",
    "start bubblewrap",
)


class SpawnError(Exception):
    """The process never became bwrap."""

    def __init__(self, stage: str, code: int) -> None:
        super().__init__(f"could not {stage}: {os.strerror(code)}")
        self.stage = stage
        self.errno = code


class Order(NamedTuple):
    """Everything a child needs, decided beforehand: after the clone nothing is looked up or allocated."""

    program: str
    argv: tuple[str, ...]
    uid: int  # outside; the caller's own unless the caller is root
    gid: int
    drop: bool  # really change to uid/gid (root), or stay who we are
    keep: tuple[int, ...]  # fds the program may inherit besides 0-2
    rlimits: tuple[tuple[int, int, int], ...]
    keyring: bool
    umask: int = 0o077


def spawn(order: Order) -> int:
    """Start `order` and return its pid once it has become the program; raise SpawnError if it did not."""
    libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the interpreter lock stays held across the clone
    numbers = _SYSCALLS[os.uname().machine]
    fault_r, fault_w = os.pipe2(os.O_CLOEXEC)
    go_r, go_w = os.pipe2(os.O_CLOEXEC)
    # A signal between clone and exec would run the parent's handlers in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid: int = libc.syscall(numbers[0], signal.SIGCHLD | _CLONE_NEWUSER | _CLONE_NEWPID, 0, 0, 0, 0)
    if pid == 0:
        # Our own copies of the runner's ends would hide its death from us.
        os.close(go_w)
        os.close(fault_r)
        _become(order, libc, numbers, fault_w, go_r)
    clone_errno = ctypes.get_errno()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(fault_w)
    os.close(go_r)
    try:
        if pid < 0:
            raise SpawnError("create a user and pid namespace", clone_errno)
        try:
            _map_ids(pid, order)
            os.write(go_w, b"g")
        except OSError as error:
            _reap(pid)
            raise SpawnError("map the plugin's ids", error.errno or errno.EIO) from error
        # EOF without a word: the exec closed the pipe.
        fault = os.read(fault_r, _FAULT.size)
    finally:
        os.close(fault_r)
        os.close(go_w)
    if fault:
        _reap(pid)
        stage, code = _FAULT.unpack(fault)
        raise SpawnError(_STAGES[stage], code)
    return pid


def can_join_keyring() -> bool:
    """Whether keyctl works here, found by doing it: this process gets a session keyring of its own too."""
    libc = ctypes.PyDLL(None, use_errno=True)
    return int(libc.syscall(_SYSCALLS[os.uname().machine][1], _KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)) >= 0


def _reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _map_ids(pid: int, order: Order) -> None:
    """One id, onto itself. Written from outside: only there may root map an id that is not its own."""
    if not order.drop:
        # The kernel's rule for an unprivileged gid_map: setgroups must be given up first.
        _write(f"/proc/{pid}/setgroups", b"deny")
    _write(f"/proc/{pid}/uid_map", b"%d %d 1" % (order.uid, order.uid))
    _write(f"/proc/{pid}/gid_map", b"%d %d 1" % (order.gid, order.gid))


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _become(order: Order, libc: ctypes.CDLL, numbers: tuple[int, int, int], fault_w: int, go_r: int) -> NoReturn:
    """In the child. Never returns: it becomes the program, or says where it stuck and dies."""
    stage = 0
    try:
        for stage, step in enumerate(_steps(order, libc, numbers, fault_w, go_r)):
            step()
    except OSError as error:
        os.write(fault_w, _FAULT.pack(stage, error.errno or errno.EIO))
    except BaseException:
        os.write(fault_w, _FAULT.pack(stage, errno.EINVAL))
    finally:
        os._exit(125)


def _steps(
    order: Order, libc: ctypes.CDLL, numbers: tuple[int, int, int], fault_w: int, go_r: int
) -> Sequence[Callable[[], object]]:
    """The child's steps, in the order of _STAGES."""

    def call(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), "")

    def follow_runner() -> None:
        call(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        # getppid() is 0 in a pid namespace's init, so a runner that died before the call above shows
        # only as a pipe that nobody reads any more.
        watch = select.poll()
        watch.register(fault_w, 0)
        if watch.poll(0):
            os._exit(125)

    def wait_for_ids() -> None:
        if os.read(go_r, 1) != b"g":  # EOF: the runner is gone, or could not map us. Never start.
            os._exit(125)
        os.close(go_r)

    def join_keyring() -> None:
        if order.keyring:
            call(libc.syscall(numbers[1], _KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0))

    def limit() -> None:
        for kind, soft, hard in order.rlimits:
            _, ceiling = resource.getrlimit(kind)
            if ceiling != resource.RLIM_INFINITY:
                hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
                soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
            resource.setrlimit(kind, (soft, hard))
        os.umask(order.umask)
        # Python ignores these two, and "ignored" survives exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

    def raise_oom_score() -> None:
        # Only upwards: a container engine may have set a higher one, and lowering that needs a capability.
        with open("/proc/self/oom_score_adj", "rb") as file:
            current = int(file.read())
        if current < _OOM_SCORE:
            _write("/proc/self/oom_score_adj", b"%d" % _OOM_SCORE)

    def drop_groups() -> None:
        if order.drop:
            os.setgroups([])

    def drop_gid() -> None:
        if order.drop:
            os.setresgid(order.gid, order.gid, order.gid)
        if os.getresgid() != (order.gid,) * 3:
            raise OSError(errno.EPERM, "")

    def drop_uid() -> None:
        if order.drop:
            os.setresuid(order.uid, order.uid, order.uid)
        if os.getresuid() != (order.uid,) * 3:
            raise OSError(errno.EPERM, "")

    def forbid_privileges() -> None:
        call(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
            raise OSError(errno.EPERM, "")
        follow_runner()  # again: changing ids has disarmed it

    def close_others() -> None:
        kept = sorted(fd for fd in {fault_w, *order.keep} if fd > 2)
        low = 3
        for fd in kept:
            if fd > low:
                call(libc.syscall(numbers[2], low, fd - 1, 0))
            low = fd + 1
        call(libc.syscall(numbers[2], low, 0x7FFFFFFF, 0))
        for fd in order.keep:
            os.set_inheritable(fd, True)
        # A gap among 0-2 would be filled by bwrap's own descriptor of the host's /proc, which its init
        # keeps and the plugin reaches through /proc/1/fd.
        if not all(os.get_inheritable(fd) for fd in (0, 1, 2)):
            raise OSError(errno.EBADF, "")

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # An empty environment: bwrap's own stays readable in /proc/1/environ inside.
        os.execve(order.program, order.argv, {})

    return (
        follow_runner,
        wait_for_ids,
        os.setsid,
        join_keyring,
        limit,
        raise_oom_score,
        drop_groups,
        drop_gid,
        drop_uid,
        forbid_privileges,
        close_others,
        start,
    )
