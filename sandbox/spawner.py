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

_CLONE_PARENT = 0x00008000
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

    def clone(flags: int, *others: int) -> int:
        pid: int = libc.syscall(numbers[0], signal.SIGCHLD | flags, 0, 0, 0, 0)
        if pid == 0:
            # Our own copies of the runner's ends would hide its death from us.
            for fd in (go_w, fault_r, *others):
                os.close(fd)
            _become(order, libc, numbers, fault_w, go_r)
        return pid if pid > 0 else -ctypes.get_errno()

    try:
        try:
            pid = _clone_as_owner(order, clone) if order.drop else clone(_CLONE_NEWUSER | _CLONE_NEWPID)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(fault_w)
            os.close(go_r)
        if pid < 0:
            raise SpawnError("create a user and pid namespace", -pid)
        step = "map the plugin's ids"
        try:
            _map_ids(pid, order)
            step = "raise the OOM score"
            _raise_oom_score(pid)
            os.write(go_w, b"g")
        except OSError as error:
            _reap(pid)
            raise SpawnError(step, error.errno or errno.EIO) from error
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


def _clone_as_owner(order: Order, clone: Callable[..., int]) -> int:
    """Clone by way of a process that has dropped the uid already: the child's pid, or minus clone's errno.

    A user namespace belongs to the uid that made it, and what is used inside (inotify instances, namespaces,
    locked memory, pending signals) counts against that uid's limits outside. Made by root, every plugin could
    use up root's. CLONE_PARENT: the child is the runner's own all the same.
    """
    born_r, born_w = os.pipe2(os.O_CLOEXEC)
    maker = os.fork()
    if maker == 0:
        dropped, made = False, -errno.EIO
        try:
            os.close(born_r)
            os.setgroups([])
            os.setresgid(order.gid, order.gid, order.gid)
            os.setresuid(order.uid, order.uid, order.uid)
            dropped = True
            made = clone(_CLONE_PARENT | _CLONE_NEWUSER | _CLONE_NEWPID, born_w)
        except OSError as error:
            made = -(error.errno or errno.EIO)
        finally:
            os.write(born_w, _FAULT.pack(dropped, made))
            os._exit(0)
    os.close(born_w)
    answer = os.read(born_r, _FAULT.size)
    os.close(born_r)
    os.waitpid(maker, 0)
    if len(answer) < _FAULT.size:
        raise SpawnError("drop the user id", errno.EIO)  # somebody killed it
    dropped, made = _FAULT.unpack(answer)
    if not dropped:
        raise SpawnError("drop the user id", -made)
    return int(made)


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


def _raise_oom_score(pid: int) -> None:
    """Only upwards: a container engine may have set a higher one, and lowering that needs a capability.

    Written from outside: what somebody with CAP_SYS_RESOURCE has written, the plugin cannot lower again.
    """
    path = f"/proc/{pid}/oom_score_adj"
    with open(path, "rb") as file:
        current = int(file.read())
    _write(path, b"%d" % max(current, _OOM_SCORE))


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _become(
    order: Order, libc: ctypes.CDLL, numbers: tuple[int, int, int], fault_w: int, go_r: int
) -> NoReturn:
    """In the child. Never returns: it becomes the program, or says where it stuck and dies."""
    done = 0
    try:
        for step in _steps(order, libc, numbers, fault_w, go_r):
            step()
            done += 1
    except OSError as error:
        os.write(fault_w, _FAULT.pack(done, error.errno or errno.EIO))
    except BaseException:  # noqa: BLE001 -- nothing may get out: below us is the parent's own stack
        os.write(fault_w, _FAULT.pack(done, errno.EINVAL))
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
        # "Ignored" survives exec: Python ignores SIGPIPE and SIGXFSZ, and a caller may ignore anything.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)

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
        drop_groups,
        drop_gid,
        drop_uid,
        forbid_privileges,
        close_others,
        start,
    )
