"""The last steps before bubblewrap, and its init: from a plan's fds and numbers to a running bwrap.

Standard library only, and single-threaded by contract: the parent-death signal belongs to the *thread*
that forked, so a child made by a worker thread is killed when that thread is retired. `spawn` is called
from the main thread of a process that has no other.

The child, the cell's init, is the init of a pid namespace of our own, one level outside the one bwrap
makes. bwrap arms its own parent-death signal only after it has mounted everything; killed before that, its
child would carry on as an orphan, or wait for ever on an eventfd nobody will write. With a namespace around
all of it there is one process whose death is everybody's, from the first instruction on; waiting for it
waits for all. It stays, because bwrap does not wait for its own child: only who reaps all of them knows
what they used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

_CLONE_PARENT = 0x00008000
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_INTO_CGROUP = 0x200000000
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_NOEXEC = 0x8
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39
_KEYCTL_JOIN_SESSION_KEYRING = 1
_MOVE_MOUNT = 429  # of every architecture
_AT_FDCWD = -100
_MOVE_MOUNT_F_EMPTY_PATH = 4

# capset(2): version 3 and "this process"; effective, permitted, inheritable, for the low and the high half.
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
_CAPABILITIES = struct.Struct("=6I")
_CAP_KILL = 1 << 5
_CAP_SETUID = 1 << 7
_CAP_SYS_PTRACE = 1 << 19
_CAP_SYS_ADMIN = 1 << 21
_OOM_SCORE = 500  # before anything of the host's


class _Numbers(NamedTuple):
    """The only calls for which libc offers no function we can use."""

    clone: int
    keyctl: int
    close_range: int
    clone3: int


_SYSCALLS = {"x86_64": _Numbers(56, 250, 436, 435), "aarch64": _Numbers(220, 219, 436, 435)}

# struct clone_args up to and with `cgroup`, eleven 64-bit words; all but these three stay zero.
_CLONE_ARGS_WORDS, _CLONE_ARGS_FLAGS, _CLONE_ARGS_SIGNAL, _CLONE_ARGS_CGROUP = 11, 0, 4, 10

# What a dead child says on the error pipe: index of the stage that failed, errno.
_FAULT = struct.Struct("=ii")
_STAGES = (
    "follow the runner's death",
    "wait for the id mapping",
    "cut the host's mounts off",
    "mount a fresh /proc",
    "start a session",
    "join a session keyring",
    "reset signals",
    "drop groups",
    "drop the group id",
    "drop the user id",
    "close other files",
    "start a process",
    "drop root's access to files",
    "make its temporary folders",
    "forbid new privileges",
    "join its cgroups",
    "be found in its cgroups",
    "set resource limits",
    "start bubblewrap",
)


# Where temporary folders are mounted for bwrap to bind: bwrap can bound their size, but not their inodes.
# Only in the cell's init's own mount namespace, in which nothing looks at the host's /sys.
FOLDERS_ROOT = "/sys"


# What the cell's init says in the end: bwrap's wait status, whether time ran out, seconds of user and
# system time, largest RSS in KiB, bytes read and written.
_ENDING = struct.Struct("=iiddqqq")


class Ending(NamedTuple):
    status: int  # as wait(2) gives it
    expired: bool  # the cell's init's own clock ended it
    user: float
    system: float
    max_rss: int  # bytes, of the largest single process
    read: int  # bytes, by system calls, from files, pipes and sockets
    written: int


class SpawnError(Exception):
    """bwrap was never started."""

    def __init__(self, stage: str, code: int) -> None:
        super().__init__(f"could not {stage}: {os.strerror(code)}")
        self.stage = stage
        self.errno = code


class CgroupDoors(NamedTuple):
    """Descriptors by which a single-threaded process gets into its cgroups.

    Writing to a cgroup.procs takes a lock of the whole machine and waits for an RCU grace period, some 11 ms
    each. The kernel does without for a thread that moves itself on v1, and for a process born into its group
    on v2.
    """

    tasks: tuple[int, ...] = ()  # v1: each a `tasks` file, opened for writing
    unified: int = -1  # v2: the group's directory
    unified_procs: int = -1  # v2: its cgroup.procs, where clone3 does not work

    @property
    def files(self) -> tuple[int, ...]:
        """What the program writes to. The directory is among what the cell's init holds."""
        return self.tasks if self.unified_procs < 0 else (*self.tasks, self.unified_procs)


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
    ending: int = -1  # where the cell's init tells how it ended; see read_ending
    hold: tuple[int, ...] = ()  # fds the cell's init holds open for as long as anything lives
    umask: int = 0o077
    cgroups: CgroupDoors = CgroupDoors()  # the program joins, the cell's init does not
    membership: tuple[bytes, ...] = ()  # the lines of /proc/self/cgroup that must be there then
    deadline: float | None = None  # on the monotonic clock: the cell's init ends everything, whoever sleeps
    stdio: tuple[int, int, int] = (0, 1, 2)  # what the program gets as these
    folders: tuple[str, ...] = ()  # options of a tmpfs each, mounted at folder_path of its number
    mounts: tuple[
        tuple[int, bool], ...
    ] = ()  # detached mounts, and whether of a directory; numbered after these


def folder_path(number: int) -> str:
    return f"{FOLDERS_ROOT}/{number}"


def spawn(order: Order) -> int:
    """Start `order` and return its init's pid once the program runs; raise SpawnError if it does not.

    Killing the cell's init ends everything at once; killing its child, the program, ends everything as well
    and lets the cell's init tell what was used.
    """
    libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the interpreter lock stays held across the clone
    numbers = _SYSCALLS.get(os.uname().machine)
    if numbers is None:
        raise SpawnError(f"make system calls on {os.uname().machine}", errno.ENOSYS)
    fault_r, fault_w = os.pipe2(os.O_CLOEXEC)
    go_r, go_w = os.pipe2(os.O_CLOEXEC)
    # A signal between clone and exec would run the parent's handlers in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def clone(flags: int, *others: int) -> int:
        pid: int = libc.syscall(numbers.clone, signal.SIGCHLD | flags, 0, 0, 0, 0)
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
            if not order.drop:
                _map_ids(pid, order)
            step = "raise the OOM score"
            _raise_oom_score(pid)
            os.write(go_w, b"g")
        except OSError as error:
            _reap(pid)
            said = os.read(fault_r, _FAULT.size)  # it may have died on its own, and said why
            if said:
                step, code = _STAGES[_FAULT.unpack(said)[0]], _FAULT.unpack(said)[1]
                raise SpawnError(step, code) from None
            raise SpawnError(step, error.errno or errno.EIO) from error
        # EOF without a word: the program runs.
        fault = os.read(fault_r, _FAULT.size)
    finally:
        os.close(fault_r)
        os.close(go_w)
    if fault:
        _reap(pid)
        stage, code = _FAULT.unpack(fault)
        raise SpawnError(_STAGES[stage], code)
    return pid


# What the maker tells: how far it got, errno if it went no further, the child's pid.
_MADE = struct.Struct("=iii")
_MAKER_STAGES = ("drop the user id", "create a user and pid namespace", "map the plugin's ids")


def _clone_as_owner(order: Order, clone: Callable[..., int]) -> int:
    """Clone by way of a process that has dropped the uid already, and return the child's pid.

    A user namespace belongs to the uid that made it, and what is used inside (inotify instances, namespaces,
    locked memory, pending signals) counts against that uid's limits outside. Made by root, every plugin could
    use up root's. CLONE_PARENT: the child is the runner's own all the same.

    The maker owns the namespace, so it can map the ids. Root could do that only with CAP_SYS_ADMIN, which it
    does not have in most containers.

    The maker keeps the *file system* uid and gid of root, and the child inherits them. They let the maker
    open its own child in /proc, and let the child start the program in a cgroup that belongs to root. They
    give no capability, and both processes drop them before any other program runs.
    """
    # Without it neither we nor our death could end a process of another uid.
    if not _effective_capabilities() & _CAP_KILL:
        raise SpawnError("end a process of another uid: CAP_KILL is missing", errno.EPERM)
    born_r, born_w = os.pipe2(os.O_CLOEXEC)
    try:
        maker = os.fork()
    except OSError as error:
        os.close(born_r)
        os.close(born_w)
        raise SpawnError("start a process", error.errno or errno.EAGAIN) from None
    if maker == 0:
        stage, code, made = 0, errno.EIO, 0
        try:
            os.close(born_r)
            os.setgroups([])
            os.setresgid(order.gid, order.gid, order.gid)
            libc = ctypes.PyDLL(None, use_errno=True)
            libc.setfsgid(0)  # a /proc mounted with hidepid shows everything to this group
            libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setresuid(order.uid, order.uid, order.uid)
            _keep_root_file_access(libc)
            stage = 1
            made = clone(_CLONE_PARENT | _CLONE_NEWUSER | _CLONE_NEWPID, born_w)
            if made < 0:
                raise OSError(-made, "")
            stage = 2
            os.write(born_w, _MADE.pack(stage, errno.EIO, made))  # should we be killed from here on
            _map_ids(made, order)
            code = 0
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            try:
                os.write(born_w, _MADE.pack(stage, code, made))
            finally:
                os._exit(0)  # also if the runner is gone: below us is its own stack
    os.close(born_w)
    os.waitpid(maker, 0)
    answer = os.read(born_r, 2 * _MADE.size)  # its first word and its last, or one of them
    os.close(born_r)
    if len(answer) < _MADE.size:
        raise SpawnError("go on: a process on the way was killed", errno.EIO)
    stage, code, made = _MADE.unpack(answer[-_MADE.size :])
    if code:
        if made > 0:
            _reap(made)
        raise SpawnError(_MAKER_STAGES[stage], code)
    return int(made)


def _effective_capabilities() -> int:
    """The low half."""
    held = ctypes.create_string_buffer(_CAPABILITIES.size)
    if ctypes.PyDLL(None).capget(_CAPABILITY_HEADER, held) < 0:
        return 0
    return int(_CAPABILITIES.unpack(held.raw)[0])


def _keep_root_file_access(libc: ctypes.CDLL) -> None:
    """Become root again for the file system only, after the uid was dropped with its capabilities kept."""
    # AppArmor (Ubuntu from 24.04) lets only CAP_SYS_ADMIN make a user namespace that works. A /proc mounted
    # with hidepid and a group shows the child only to CAP_SYS_PTRACE. Container root has neither.
    for wanted in (_CAP_SETUID | _CAP_SYS_ADMIN | _CAP_SYS_PTRACE, _CAP_SETUID | _CAP_SYS_ADMIN, _CAP_SETUID):
        if libc.capset(_CAPABILITY_HEADER, _CAPABILITIES.pack(wanted, wanted, 0, 0, 0, 0)) == 0:
            break
    libc.setfsuid(0)
    if _file_system_ids(libc) != (0, 0):
        raise OSError(errno.EPERM, "")


def _drop_root_file_access(order: Order, libc: ctypes.CDLL) -> None:
    if order.drop:
        libc.setfsgid(order.gid)
        libc.setfsuid(order.uid)
    if _file_system_ids(libc) != (order.uid, order.gid):
        raise OSError(errno.EPERM, "")


def _file_system_ids(libc: ctypes.CDLL) -> tuple[int, int]:
    """Each call tells the id in force before it; -1 is no id, so that it changes nothing."""
    return int(libc.setfsuid(-1)), int(libc.setfsgid(-1))


def read_ending(fd: int) -> Ending | None:
    """What the cell's init said; None if it was killed before it could."""
    raw = os.read(fd, _ENDING.size)
    if len(raw) < _ENDING.size:
        return None
    status, expired, user, system, kibibytes, read, written = _ENDING.unpack(raw)
    return Ending(status, bool(expired), user, system, kibibytes * 1024, read, written)


def fork_into(doors: CgroupDoors) -> tuple[int, bool]:
    """Fork: the child's pid (0 in the child), and whether it is in its v2 cgroup from birth.

    The child has to be single-threaded, as after every fork.
    """
    if doors.unified >= 0 and (numbers := _SYSCALLS.get(os.uname().machine)) is not None:
        arguments = (ctypes.c_uint64 * _CLONE_ARGS_WORDS)()
        arguments[_CLONE_ARGS_FLAGS] = _CLONE_INTO_CGROUP
        arguments[_CLONE_ARGS_SIGNAL] = signal.SIGCHLD
        arguments[_CLONE_ARGS_CGROUP] = doors.unified
        libc = ctypes.PyDLL(None)
        pid: int = libc.syscall(numbers.clone3, ctypes.byref(arguments), ctypes.sizeof(arguments))
        if pid >= 0:
            return pid, True
        # A container's filter, most likely: Docker's own refuses clone3. What else is in the way is told when
        # the child joins by cgroup.procs.
    return os.fork(), False


def join_cgroups(doors: CgroupDoors, *, born_inside: bool) -> None:
    """This process, which must have one thread only."""
    for door in doors.tasks if born_inside else doors.files:
        os.write(door, b"0")


def be_found(membership: Sequence[bytes]) -> None:
    """In all the groups that were joined, by the kernel's own word; or go no further."""
    if membership:
        with open("/proc/self/cgroup", "rb") as file:
            if not set(membership) <= set(file.read().split(b"\n")):
                raise OSError(errno.ESRCH, "")


def set_rlimits(rlimits: Sequence[tuple[int, int, int]]) -> None:
    """(kind, soft, hard) each, as far as this process's own limits allow."""
    for kind, soft, hard in rlimits:
        _, ceiling = resource.getrlimit(kind)
        if ceiling != resource.RLIM_INFINITY:
            hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(kind, (soft, hard))


def can_join_keyring() -> bool:
    """Whether keyctl works here, found by doing it: this process gets a session keyring of its own too."""
    numbers = _SYSCALLS.get(os.uname().machine)
    if numbers is None:
        return False
    libc = ctypes.PyDLL(None, use_errno=True)
    return int(libc.syscall(numbers.keyctl, _KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)) >= 0


def _reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _map_ids(pid: int, order: Order) -> None:
    """One id, onto itself. Written from outside by a process that has these ids: the kernel lets it map them
    without any capability, if setgroups is given up first."""
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


def _become(order: Order, libc: ctypes.CDLL, numbers: _Numbers, fault_w: int, go_r: int) -> NoReturn:
    """In the child. Never returns: it keeps the program until its end, or says where it stuck and dies."""
    done = 0
    try:
        account = _open_account()
        for step in _steps(order, libc, numbers, fault_w, go_r, account):
            step()
            done += 1
        program, born_inside = fork_into(order.cgroups)
        done += 1
        if program == 0:
            # The cell's init stays outside of the cgroups: it must not be throttled with, or killed for,
            # those it is to end.
            for step in _program_steps(order, libc, born_inside):
                step()
                done += 1
        _drop_root_file_access(order, libc)
        _forbid_privileges(libc)
        _follow_runner(libc, fault_w)  # again: changing an id has disarmed it
        os.close(fault_w)
        os._exit(_keep(program, order, account))
    except OSError as error:
        os.write(fault_w, _FAULT.pack(done, error.errno or errno.EIO))
    except BaseException:  # noqa: BLE001 -- nothing may get out: below us is the parent's own stack
        os.write(fault_w, _FAULT.pack(done, errno.EINVAL))
    finally:
        os._exit(125)


def _open_account() -> int:
    """Where the kernel counts what we and all we have waited for read and wrote.

    Opened while root's access to files lasts: these files belong to root if a process has changed its uid.
    """
    try:
        return os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1  # a kernel that does not count


def _follow_runner(libc: ctypes.CDLL, fault_w: int) -> None:
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "")
    # getppid() is 0 in a pid namespace's init, so a runner that died before the call above shows only as a
    # pipe that nobody reads any more.
    watch = select.poll()
    watch.register(fault_w, 0)
    if watch.poll(0):
        os._exit(125)


def _forbid_privileges(libc: ctypes.CDLL) -> None:
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "")
    if libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise OSError(errno.EPERM, "")
    # Exec would take them from bwrap, but the cell's init never execs.
    if libc.capset(_CAPABILITY_HEADER, _CAPABILITIES.pack(0, 0, 0, 0, 0, 0)) < 0:
        raise OSError(ctypes.get_errno(), "")


def _make_folders(order: Order, libc: ctypes.CDLL) -> None:
    """By the program, after it has dropped the file system uid of root: in a user namespace nobody can write
    to what belongs to a uid without a mapping."""
    if not order.folders and not order.mounts:
        return
    ids = f"uid={order.uid},gid={order.gid}"
    _mount_tmpfs(libc, FOLDERS_ROOT, f"size=64k,mode=755,{ids}")
    for number, options in enumerate(order.folders):
        os.mkdir(folder_path(number))
        _mount_tmpfs(libc, folder_path(number), f"{options},{ids}")
    for number, (fd, is_directory) in enumerate(order.mounts, len(order.folders)):
        path = folder_path(number)
        if is_directory:
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        # Made by root, in no mount namespace yet: it can be attached in ours, with the mapping it has.
        if libc.syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH) < 0:
            raise OSError(ctypes.get_errno(), "")


def _mount_tmpfs(libc: ctypes.CDLL, path: str, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()) < 0:
        raise OSError(ctypes.get_errno(), "")


def _read_account(fd: int) -> tuple[int, int]:
    if fd < 0:
        return 0, 0
    words = os.pread(fd, 4096, 0).split()
    told = dict(zip(words[::2], words[1::2], strict=False))
    return int(told.get(b"rchar:", 0)), int(told.get(b"wchar:", 0))


def _keep(program: int, order: Order, account: int) -> int:
    """Wait until nothing is left, say what it used, and give the status to leave with."""
    mounts = (fd for fd, _ in order.mounts)
    held = {0, 1, 2, *order.keep, *order.cgroups.files, *mounts, *order.stdio}
    for fd in held - {order.ending, *order.hold}:
        os.close(fd)
    before = _read_account(account)
    status, expired = 0, False
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == program:
            status = ended
            # Its own namespace dies with it if it got so far as to ask for that; we do not rely on it.
            _kill_all()
        if pid:
            continue
        # All signals are blocked here, so that one which comes between two looks is not lost.
        if order.deadline is None or expired:
            signal.sigwait({signal.SIGCHLD})
        elif not signal.sigtimedwait({signal.SIGCHLD}, max(0.0, order.deadline - time.monotonic())):
            expired = True
            _kill_all()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if order.ending >= 0:
        read, written = (now - then for now, then in zip(_read_account(account), before, strict=True))
        told = status, expired, used.ru_utime, used.ru_stime, used.ru_maxrss, read, written
        os.write(order.ending, _ENDING.pack(*told))
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _kill_all() -> None:
    """Everybody below us, in one pass that no fork escapes: the kernel does it under the lock forks need."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _steps(
    order: Order, libc: ctypes.CDLL, numbers: _Numbers, fault_w: int, go_r: int, account: int
) -> Sequence[Callable[[], Any]]:
    """The cell's init's steps, in the order of _STAGES."""

    def call(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), "")

    def wait_for_ids() -> None:
        if os.read(go_r, 1) != b"g":  # EOF: the runner is gone, or could not map us. Never start.
            os._exit(125)
        os.close(go_r)

    def private_mounts() -> None:
        # bwrap leaves its mounts receiving what the host mounts later: below a folder the plugin was shown it
        # would appear inside, writable. A copy that receives nothing has nothing to pass on.
        call(libc.unshare(_CLONE_NEWNS))
        call(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))

    def fresh_proc() -> None:
        # bwrap looks its child up in /proc by the number the child has in our pid namespace. The host's /proc
        # has another process of that number, or none.
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        call(libc.mount(b"proc", b"/proc", b"proc", flags, None))

    def join_keyring() -> None:
        if order.keyring:
            call(libc.syscall(numbers.keyctl, _KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0))

    def reset() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.umask(order.umask)
        # "Ignored" survives exec: Python ignores SIGPIPE and SIGXFSZ, and a caller may ignore anything.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)

    # The maker has dropped them, before there was a namespace. Here it is seen to have worked.
    def drop_groups() -> None:
        if order.drop and os.getgroups():
            raise OSError(errno.EPERM, "")

    def drop_gid() -> None:
        if os.getresgid() != (order.gid,) * 3:
            raise OSError(errno.EPERM, "")

    def drop_uid() -> None:
        if os.getresuid() != (order.uid,) * 3:
            raise OSError(errno.EPERM, "")

    def close_others() -> None:
        held = {fault_w, account, order.ending, *order.stdio, *order.keep, *order.hold}
        held.update(order.cgroups.files)
        held.update(fd for fd, _ in order.mounts)  # closed by the exec
        kept = sorted(fd for fd in held if fd > 2)
        low = 3
        for fd in kept:
            if fd > low:
                call(libc.syscall(numbers.close_range, low, fd - 1, 0))
            low = fd + 1
        call(libc.syscall(numbers.close_range, low, 0x7FFFFFFF, 0))
        for fd in order.keep:
            os.set_inheritable(fd, True)
        # A gap among 0-2 would be filled by bwrap's own descriptor of the host's /proc, which its init
        # keeps and the plugin reaches through /proc/1/fd.
        if not all(os.get_inheritable(fd) for fd in (0, 1, 2)):
            raise OSError(errno.EBADF, "")

    return (
        lambda: _follow_runner(libc, fault_w),
        wait_for_ids,
        private_mounts,
        fresh_proc,
        os.setsid,
        join_keyring,
        reset,
        drop_groups,
        drop_gid,
        drop_uid,
        close_others,
    )


def _program_steps(order: Order, libc: ctypes.CDLL, born_inside: bool) -> Sequence[Callable[[], Any]]:
    """The steps of the process that becomes bwrap, in the order of _STAGES."""

    def start() -> NoReturn:
        for number, fd in enumerate(order.stdio):  # each is its own number, or above 2
            if fd != number:
                os.dup2(fd, number)
        # If the cell's init dies before bwrap follows it, the namespace goes, and we with it.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # An empty environment: bwrap's own stays readable in /proc/1/environ inside.
        os.execve(order.program, order.argv, {})

    return (
        lambda: _drop_root_file_access(order, libc),
        lambda: _make_folders(order, libc),
        lambda: _forbid_privileges(libc),
        lambda: join_cgroups(order.cgroups, born_inside=born_inside),
        lambda: be_found(order.membership),
        lambda: set_rlimits(order.rlimits),
        start,
    )
