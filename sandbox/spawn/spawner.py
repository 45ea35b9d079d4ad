"""Start the cell's init and bwrap in it, from a SpawnOrder.

Standard library only. Call `spawn` from the main thread of a process that has no other thread: the
parent-death signal follows the *thread* that forked, so a child of a thread that ends before the
process is killed then.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import time

from sandbox.spawn import reaper
from sandbox.spawn.init import (
    CAPABILITIES,
    CAPABILITY_HEADER,
    FAULT_SIZE,
    KEYCTL_JOIN_SESSION_KEYRING,
    SYSCALLS,
    become_init,
    file_system_ids,
    read_fault,
)
from sandbox.spawn.machine_code import executable
from sandbox.spawn.order import NetworkFault, SpawnError, SpawnOrder
from sandbox.speed.libc import Library, get_errno, open_libc, writable
from sandbox.speed.signals import signal
from sandbox.speed.typed import Callable

_CLONE_PARENT = 0x00008000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_FS = 0x00000200
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_GET_SECCOMP = 21
_SECCOMP_MODE_FILTER = 2
_CAP_KILL = 1 << 5
_CAP_SETUID = 1 << 7
_CAP_NET_ADMIN = 1 << 12
_CAP_SYS_PTRACE = 1 << 19
_CAP_SYS_ADMIN = 1 << 21
_UNREADABLE = 1  # an address in the first page, which no process has
_TRIAL_SECONDS = 10.0  # for one system call
# What `spawn` waits for takes milliseconds. It has this long also if `until` is past: then the clocks of the
# caller end the launch, and know which of them ran out.
_LEAST_SECONDS = 5.0
_LONGEST_POLL_SECONDS = 86400.0  # poll(2) counts milliseconds in an int: 24 days
_LATE = "make the namespaces before the launch limit"
_OOM_SCORE_ADJ = 500  # a plugin is killed before any process of the host


def spawn(order: SpawnOrder) -> int:
    """Start `order` and return the pid of the cell's init once the program runs. Raises SpawnError.

    At `order.until`, or shortly after, it is returned too, and the caller's clocks end what was started so
    far. It is not ended here: if the cell's init was stopped at its last step, the plugin may have run.

    Killing the cell's init ends everything at once. Killing its child, the program, ends everything as well,
    and the cell's init lives to report what was used.
    """
    libc = open_libc()  # its functions keep the interpreter lock across the clone
    numbers = SYSCALLS.get(os.uname().machine)
    if numbers is None:
        raise SpawnError(f"make system calls on {os.uname().machine}", errno.ENOSYS)
    if order.until is not None:
        order = order._replace(until=max(order.until, time.monotonic() + _LEAST_SECONDS))
    # The kernel refuses this pair of flags itself, so that no namespace is made.
    refused = lambda: libc.syscall(numbers.clone, _CLONE_NEWUSER | _CLONE_FS, 0, 0, 0, 0)  # noqa: E731
    kills = _filter_kills(libc, refused, order.until)
    if kills is None:
        raise SpawnError(_LATE, errno.ETIME)
    if kills:
        raise SpawnError("create a user and pid namespace: a seccomp filter kills for it", errno.EPERM)
    _load_steps(order)
    if order.network is not None and order.drop and may_make_networks():
        order = order._replace(network=order.network._replace(made_by_root=True))
    fault_r, fault_w = os.pipe2(os.O_CLOEXEC)
    go_r, go_w = os.pipe2(os.O_CLOEXEC)
    reaper_file = _open_reaper_file(order)  # last: it does not raise, so nothing stays open
    # A signal between clone and exec would run the parent's handlers in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def clone(flags: int, *others: int) -> int:
        pid: int = libc.syscall(numbers.clone, signal.SIGCHLD | flags, 0, 0, 0, 0)
        if pid == 0:
            # With copies of the runner's pipe ends we could not notice its death.
            for fd in (go_w, fault_r, *others):
                os.close(fd)
            become_init(order, libc, numbers, fault_w, go_r, reaper_file)
        return pid if pid > 0 else -get_errno()

    try:
        try:
            pid = _clone_as_owner(order, clone) if order.drop else clone(_CLONE_NEWUSER | _CLONE_NEWPID)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(fault_w)
            os.close(go_r)
            if reaper_file >= 0:
                os.close(reaper_file)
        if pid < 0:
            raise SpawnError("create a user and pid namespace", -pid)
        step = "map the plugin's ids"
        try:
            if not order.drop:
                _map_ids(pid, order)
            step = "raise the OOM score"
            _raise_oom_score(pid)
            os.write(go_w, b"g")
        except OSError as error:
            _reap(pid)
            if fault := read_fault(fault_r):  # it died earlier and reported why
                raise SpawnError(*fault) from None
            raise SpawnError(step, error.errno or errno.EIO) from error
        try:
            fault = read_fault(fault_r) if _is_ready(fault_r, order.until) else None
        except BaseException:
            _reap(pid)  # nobody else knows of it
            raise
    finally:
        os.close(fault_r)
        os.close(go_w)
    if fault:
        _reap(pid)
        raise SpawnError(*fault)
    return pid


def _load_steps(order: SpawnOrder) -> None:
    """Import what only some orders need, before the clone: after it has dropped its uid and closed files, it
    might not be able to read the modules."""
    if order.network is not None:
        from sandbox.spawn import network as network
    if order.binds or order.guards:
        from sandbox.spawn import guards as guards
    if order.observer is not None:
        from sandbox.spawn import observer as observer
    if order.agent is not None:
        from sandbox.spawn import agent as agent


def _open_reaper_file(order: SpawnOrder) -> int:
    """Open the file that the cell's init fills and executes; -1 if nameless files cannot be executed here.

    It is made here, so that it belongs to root if the caller is root. The cell's init can then execute it,
    but not read it. The kernel protects the memory of such a process from others of the same uid, as after a
    change of uid.
    """
    try:
        file = executable(reaper.NAME)
    except OSError:
        return -1
    os.fchmod(file, 0o111 if order.drop else 0o555)
    return file


# The message of the maker (_clone_as_owner): its stage, the errno if that stage failed, the child's pid.
_MAKER_MESSAGE = struct.Struct("=iii")
_MAKER_STAGES = ("drop the user id", "create a user and pid namespace", "map the plugin's ids", "")
# In the last stage, the message is followed by the name of the failed step.
_DROPPING, _CLONING, _MAPPING, _NETWORKING = range(len(_MAKER_STAGES))


def _clone_as_owner(order: SpawnOrder, clone: Callable[..., int]) -> int:
    """Clone in a helper process, the maker, that has already dropped the uid. Returns the child's pid.

    A user namespace belongs to the uid that made it, and what is used inside (inotify instances, namespaces,
    locked memory, pending signals) counts against that uid's limits outside. If root made it, every plugin
    could use up root's limits. With CLONE_PARENT the child is still a child of the runner.

    A network namespace is made before the uid is dropped, and belongs to the user namespace that root is in.
    No process of the plugin's uid can then have a capability over it.

    The maker owns the user namespace, so it can map the ids. Root could do that only with CAP_SYS_ADMIN,
    which it does not have in most containers.

    The maker keeps the *file system* uid and gid of root, and the child inherits them. They let the maker
    open its own child in /proc, and let the child start the program in a cgroup that belongs to root. They
    give no capability, and both processes drop them before any other program runs.
    """
    # Without CAP_KILL the runner cannot kill a process of another uid, not even by its parent-death signal.
    if not _effective_capabilities() & _CAP_KILL:
        raise SpawnError("end a process of another uid: CAP_KILL is missing", errno.EPERM)
    # Nobody waits for its end: the maker's child has a copy at first, and may be stopped.
    born_r, born_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        maker = os.fork()
    except OSError as error:
        os.close(born_r)
        os.close(born_w)
        raise SpawnError("start a process", error.errno or errno.EAGAIN) from None
    if maker == 0:
        stage, code, made, step = _DROPPING, errno.EIO, 0, ""
        try:
            os.close(born_r)
            if order.network is not None and order.network.made_by_root:
                from sandbox.spawn.network import make_network

                make_network(order.network, open_libc())
            os.setgroups([])
            os.setresgid(order.gid, order.gid, order.gid)
            libc = open_libc()
            libc.setfsgid(0)  # a /proc mounted with hidepid shows everything to this group
            libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setresuid(order.uid, order.uid, order.uid)
            _keep_root_file_access(libc)
            stage = _CLONING
            made = clone(_CLONE_PARENT | _CLONE_NEWUSER | _CLONE_NEWPID, born_w)
            if made < 0:
                raise OSError(-made, "")
            stage = _MAPPING
            os.write(
                born_w, _MAKER_MESSAGE.pack(stage, errno.EIO, made)
            )  # so that the runner knows the pid if we are killed from here on
            _map_ids(made, order)
            code = 0
        except NetworkFault as fault:
            stage, code, step = _NETWORKING, fault.errno or errno.EIO, fault.step
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            try:
                os.write(born_w, _MAKER_MESSAGE.pack(stage, code, made) + step.encode())
            finally:
                os._exit(0)  # even if the runner is dead: the stack below is a copy of its own
    os.close(born_w)
    lack: SpawnError | None = None
    try:
        if _reap_by(maker, order.until) is None:
            lack = SpawnError(_LATE, errno.ETIME)
    except OSError as error:  # no descriptor is left to wait with
        lack = SpawnError("wait for the process that makes the namespaces", error.errno or errno.EIO)
    try:
        answer = os.read(born_r, FAULT_SIZE)  # its first message, its last, or both
    except BlockingIOError:
        answer = b""
    finally:
        os.close(born_r)
    if len(answer) < _MAKER_MESSAGE.size:
        raise lack or SpawnError("go on: the process that makes the namespaces was killed", errno.EIO)
    stage, code, _ = _MAKER_MESSAGE.unpack_from(answer)
    if stage == _NETWORKING:
        raise SpawnError(answer[_MAKER_MESSAGE.size :].decode(), code)
    stage, code, made = _MAKER_MESSAGE.unpack(answer[-_MAKER_MESSAGE.size :])
    if code:
        if made > 0:
            _reap(made)
        raise lack or SpawnError(_MAKER_STAGES[stage], code)
    return int(made)


def _effective_capabilities() -> int:
    """The low 32 bits of the effective capabilities."""
    held = writable(CAPABILITIES.size)
    if open_libc().capget(CAPABILITY_HEADER, held) < 0:
        return 0
    return int(CAPABILITIES.unpack(held.raw)[0])


def may_make_networks() -> bool:
    """Whether this root can make and set up a network namespace. In most containers it cannot."""
    wanted = _CAP_SYS_ADMIN | _CAP_NET_ADMIN
    return _effective_capabilities() & wanted == wanted


def _keep_root_file_access(libc: Library) -> None:
    """Set the file system uid to root again, after the uid was dropped with capabilities kept."""
    # AppArmor (Ubuntu from 24.04) lets only CAP_SYS_ADMIN make a user namespace that works. A /proc mounted
    # with hidepid and a group shows the child only to CAP_SYS_PTRACE. Container root has neither.
    for wanted in (_CAP_SETUID | _CAP_SYS_ADMIN | _CAP_SYS_PTRACE, _CAP_SETUID | _CAP_SYS_ADMIN, _CAP_SETUID):
        if libc.capset(CAPABILITY_HEADER, CAPABILITIES.pack(wanted, wanted, 0, 0, 0, 0)) == 0:
            break
    libc.setfsuid(0)
    if file_system_ids(libc) != (0, 0):
        raise OSError(errno.EPERM, "")


def can_join_keyring() -> bool:
    """Whether keyctl works here. Found by trying, with a name that cannot be read: no keyring is made.

    One of this process would count against the user's kernel.keys.maxkeys, beside that of the plugin, until
    the last file is closed that this process has opened, also where it was sent to.
    """
    numbers = SYSCALLS.get(os.uname().machine)
    if numbers is None:
        return False
    libc = open_libc()

    def join(name: int = _UNREADABLE) -> int:
        return int(libc.syscall(numbers.keyctl, KEYCTL_JOIN_SESSION_KEYRING, name, 0, 0, 0))

    if _filter_kills(libc, join, time.monotonic() + _TRIAL_SECONDS) is not False:
        return False
    return (join() < 0 and get_errno() == errno.EFAULT) or join(0) >= 0


def _filter_kills(libc: Library, act: Callable[[], int], until: float | None) -> bool | None:
    """Whether a seccomp filter around this process kills who does `act`; None: not known by then. Tried in a
    child, if there is a filter: the runner itself has to live to say so."""
    if libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) != _SECCOMP_MODE_FILTER:
        return False
    try:
        child = os.fork()
    except OSError:
        return False  # no process can be made: the spawn that follows reports that
    if child == 0:
        try:
            libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no core file with the runner's memory
            act()
        finally:
            os._exit(0)
    status = _reap_by(child, until)
    if status is None:
        return None
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS


def _is_ready(fd: int, until: float | None) -> bool:
    """Wait until there is something to read. False: that time has come first."""
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    while True:
        left = _LONGEST_POLL_SECONDS if until is None else max(0.0, until - time.monotonic())
        if watch.poll(min(left, _LONGEST_POLL_SECONDS) * 1000):
            return True
        if left < _LONGEST_POLL_SECONDS:
            return False


def _reap_by(pid: int, until: float | None) -> int | None:
    """Reap a child that is about to end, and return its wait status. None: somebody has stopped it, and when
    that time came it was killed."""
    ended = False
    try:
        pidfd = os.pidfd_open(pid)
        try:
            ended = _is_ready(pidfd, until)
        finally:
            os.close(pidfd)
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return status if ended else None


def _reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _map_ids(pid: int, order: SpawnOrder) -> None:
    """Map one uid and one gid onto themselves.

    Written from outside, by a process that has these ids: the kernel lets it map them without a capability if
    setgroups is denied first.
    """
    _write(f"/proc/{pid}/setgroups", b"deny")
    _write(f"/proc/{pid}/uid_map", b"%d %d 1" % (order.uid, order.uid))
    _write(f"/proc/{pid}/gid_map", b"%d %d 1" % (order.gid, order.gid))


def _raise_oom_score(pid: int) -> None:
    """Raise the OOM score. Never lower it: a container engine may have set a higher one, and lowering needs a
    capability.

    Written from outside: the plugin cannot go below a score that a process with CAP_SYS_RESOURCE has written.
    """
    path = f"/proc/{pid}/oom_score_adj"
    with open(path, "rb") as file:
        current = int(file.read())
    _write(path, b"%d" % max(current, _OOM_SCORE_ADJ))


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
