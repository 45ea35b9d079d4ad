"""The cell's init: the first process of a pid namespace around bwrap, from its clone to its final report.

It is the parent of bwrap and the init of a pid namespace one level outside the one bwrap makes. bwrap arms
its own parent-death signal only after it has mounted everything. If bwrap were killed before that, its child
would carry on as an orphan, or wait for ever on an eventfd. With a namespace around everything, the death of
one process ends all of them at any time, and waiting for it waits for all of them. The cell's init outlives
bwrap, because bwrap does not wait for its own child: only the process that reaps all of them knows what they
used.

Everything here runs in the clone. Standard library only. No exception may leave this module, because the
stack below it is a copy of the parent's.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import struct

from sandbox.spawn import reaper
from sandbox.spawn.order import (
    AGENT,
    FOLDERS_ROOT,
    LEAVE,
    MEET_GATE,
    OBSERVE,
    OVERLAY,
    CgroupHandles,
    GuardOrder,
    NetworkFault,
    SpawnOrder,
    folder_path,
)
from sandbox.spawn.priority import take_ordinary_priority
from sandbox.speed.libc import Library, get_errno, open_libc
from sandbox.speed.signals import signal
from sandbox.speed.typed import Any, Callable, Collection, NoReturn, Sequence
from sandbox.speed.value import NamedTuple

_CLONE_NEWNS = 0x00020000
_CLONE_INTO_CGROUP = 0x200000000
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_NOEXEC = 0x8
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39
KEYCTL_JOIN_SESSION_KEYRING = 1
_MOVE_MOUNT = 429  # the same number on every architecture
_AT_FDCWD = -100
_MOVE_MOUNT_F_EMPTY_PATH = 4

# capset(2): version 3 and "this process"; effective, permitted, inheritable, for the low and the high half.
CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
CAPABILITIES = struct.Struct("=6I")


class SyscallNumbers(NamedTuple):
    """System calls for which libc has no function that we can use."""

    clone: int
    keyctl: int
    close_range: int
    clone3: int


SYSCALLS = {"x86_64": SyscallNumbers(56, 250, 436, 435), "aarch64": SyscallNumbers(220, 219, 436, 435)}

# struct clone_args up to and including `cgroup`: flags, exit_signal and cgroup, and zeros between them.
_CLONE_ARGS = struct.Struct("=Q24xQ40xQ")


# The message of a child that failed: errno, followed by the name of its stage.
FAULT_CODE = struct.Struct("=i")
FAULT_SIZE = 256
# The name of a step and the step itself. Messages read "could not NAME: ERRNO".
Stage = tuple[str, Callable[[], Any]]


def become_init(
    order: SpawnOrder, libc: Library, numbers: SyscallNumbers, fault_w: int, go_r: int, reaper_file: int
) -> NoReturn:
    """Runs in the clone and never returns: it waits until the program has ended, or reports the failed stage.

    `reaper_file`: an empty executable file for the program of sandbox/spawn/reaper.py; -1: there is none.
    """
    stage = "open its account"  # for the message if the next line raises
    try:
        account = _open_account()
        for stage, step in _init_stages(order, libc, numbers, fault_w, go_r, {account, reaper_file}):  # noqa: B007
            step()
        stage = "start a process"
        program, born_inside = fork_into(order.cgroups)
        if program == 0:
            # The cell's init stays outside the cgroups: it must not be throttled with, or killed for, the
            # processes that it has to end.
            for stage, step in _program_stages(order, libc, born_inside):  # noqa: B007
                step()
        stage = "drop root's access to files"
        _drop_root_file_access(order, libc)
        stage = "forbid new privileges"
        _forbid_privileges(libc)
        stage = "follow the runner's death"
        _follow_runner(libc, fault_w)  # again: changing an id has reset it
        os.close(fault_w)
        os._exit(_wait_for_all(program, order, account, reaper_file))
    except NetworkFault as fault:
        _report_fault(fault_w, fault.step, fault.errno or errno.EIO)
    except OSError as error:
        _report_fault(fault_w, stage, error.errno or errno.EIO)
    except BaseException:  # noqa: BLE001 -- no exception may leave: the stack below is the parent's
        _report_fault(fault_w, stage, errno.EINVAL)
    finally:
        os._exit(125)


def _report_fault(fault_w: int, stage: str, code: int) -> None:
    os.write(fault_w, FAULT_CODE.pack(code) + stage.encode())


def read_fault(fd: int) -> tuple[str, int] | None:
    """The stage that failed and its errno. None at the end of file: the program runs."""
    raw = os.read(fd, FAULT_SIZE)
    return (raw[FAULT_CODE.size :].decode(), FAULT_CODE.unpack_from(raw)[0]) if raw else None


def _open_account() -> int:
    """Open /proc/self/io, where the kernel counts bytes read and written by us and all reaped children.

    Done while we still have root's access to files: after a change of uid this file belongs to root.
    """
    try:
        return os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1  # the kernel was built without these counters


def _follow_runner(libc: Library, fault_w: int) -> None:
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) < 0:
        raise OSError(get_errno(), "")
    # getppid() is 0 in a pid namespace's init. If the runner died before the call above, only a pipe without
    # a reader shows it.
    watch = select.poll()
    watch.register(fault_w, 0)
    if watch.poll(0):
        os._exit(125)


def _forbid_privileges(libc: Library) -> None:
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        raise OSError(get_errno(), "")
    if libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise OSError(errno.EPERM, "")
    # An exec drops them too, but not every init executes a program.
    if libc.capset(CAPABILITY_HEADER, CAPABILITIES.pack(0, 0, 0, 0, 0, 0)) < 0:
        raise OSError(get_errno(), "")


def make_folders(order: SpawnOrder, libc: Library) -> None:
    """Mount the temporary folders and the idmapped mounts, for bwrap to bind.

    Called after root's file system uid was dropped: in a user namespace nobody can write to a file of a uid
    that has no mapping.
    """
    if not order.folders and not order.mounts and not order.binds and order.agent is None:
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
        # Root made this mount and left it detached. Attached here, it keeps its mapping.
        if libc.syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH) < 0:
            raise OSError(get_errno(), "")
    if order.binds:
        from sandbox.spawn.guards import bind_source  # loaded before the clone
    for number, (fd, real) in enumerate(order.binds, len(order.folders) + len(order.mounts)):
        os.mkdir(folder_path(number))
        bind_source(libc, fd, real, folder_path(number))


def mount_overlays(order: SpawnOrder, libc: Library) -> None:
    """Mount each overlay over folders that are mounted already, for bwrap to bind.

    In a user namespace overlayfs keeps its marks in attributes that the owner of a file may set
    (`userxattr`); on the mount it hides them. Without an index two cages may share the changes, each with a
    work folder of its own. What one of them then sees of the other is undefined, says the kernel; in fact it
    does not see what became of a name that it has looked at before.
    """
    first = len(order.folders) + len(order.mounts) + len(order.binds)
    for number, each in enumerate(order.overlays, first):
        os.mkdir(folder_path(number))
        # Overlayfs would follow a link that was put in their place, before the cage confines anything.
        changes = os.open(folder_path(each.changes), _FOLDER)
        if not each.work:  # in memory: it is new
            for name in ("upper", "work"):
                os.mkdir(name, 0o755, dir_fd=changes)
        upper, work = (os.open(name, _FOLDER, dir_fd=changes) for name in ("upper", each.work or "work"))
        options = (
            f"userxattr,index=off,lowerdir={folder_path(each.lower)},"
            f"upperdir=/proc/self/fd/{upper},workdir=/proc/self/fd/{work}"
        )
        flags = _MS_NOSUID | _MS_NODEV
        if libc.mount(b"overlay", folder_path(number).encode(), b"overlay", flags, options.encode()) < 0:
            raise OSError(get_errno(), "")
        for fd in (changes, upper, work):
            os.close(fd)


def _guard(libc: Library, guard: GuardOrder) -> None:
    from sandbox.spawn.guards import make_guard  # loaded before the clone

    make_guard(libc, folder_path(guard.folder), guard)


def _mount_tmpfs(libc: Library, path: str, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()) < 0:
        raise OSError(get_errno(), "")


def _wait_for_all(program: int, order: SpawnOrder, account: int, reaper_file: int) -> int:
    """Wait until no process is left, report what they used, and return the status to exit with."""
    mounts = (fd for fd, _ in (*order.mounts, *order.binds))
    held = {0, 1, 2, *order.keep, *order.cgroups.files, *mounts, *order.stdio}
    if order.observer is not None:
        held.add(order.observer.channel)
    if order.agent is not None:
        held.add(order.agent.channel)
    for fd in held - {order.ending, *order.hold}:
        os.close(fd)
    scratch = "" if order.scratch < 0 else folder_path(order.scratch)
    reaper_order = reaper.ReaperOrder(
        program, order.deadline, order.ending, account, scratch, order.released_seconds
    )
    if reaper_file >= 0:
        reaper.execute(reaper_file, reaper_order, order.hold)
    return reaper.wait(reaper_order)


def _init_stages(
    order: SpawnOrder,
    libc: Library,
    numbers: SyscallNumbers,
    fault_w: int,
    go_r: int,
    own: Collection[int],
) -> Sequence[Stage]:
    """The steps of the cell's init before it starts the program, in order. `own`: descriptors it needs
    itself."""

    def wait_for_ids() -> None:
        if os.read(go_r, 1) != b"g":  # EOF: the runner is dead, or could not map our ids
            os._exit(125)
        os.close(go_r)

    def make_mounts_private() -> None:
        # bwrap's mounts are slaves of the host's: what the host mounts later below a shown folder would
        # appear in the cage, writable. A private copy neither receives nor propagates mounts.
        _call(libc.unshare(_CLONE_NEWNS))
        _call(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))

    def mount_fresh_proc() -> None:
        # bwrap looks its child up in /proc by the child's pid in our namespace. In the host's /proc that pid
        # is another process, or none.
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        _call(libc.mount(b"proc", b"/proc", b"proc", flags, None))

    def enter_network() -> None:
        if order.network is not None:
            from sandbox.spawn.network import make_network, require_own_network  # loaded before the clone

            if not order.network.made_by_root:
                make_network(order.network, libc)
            require_own_network(order.network)

    def meet_gate() -> None:
        if order.network is not None and order.network.gate:
            from sandbox.spawn.network import wait_for_gate  # loaded before the clone

            wait_for_gate(order.network)

    def join_keyring() -> None:
        if order.keyring:
            _call(libc.syscall(numbers.keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0))

    def reset_signals() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The caller's own, so that others can read what they could without the cage. A mask of 0, which some
        # daemons have, would let everybody write it.
        os.umask(os.umask(0o077) | 0o002)
        # "Ignored" survives exec: Python ignores SIGPIPE and SIGXFSZ, and a caller may ignore anything.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)

    # The maker (spawner.py) dropped groups, gid and uid before the namespace existed. These steps check that.
    def check_groups() -> None:
        if order.drop and os.getgroups():
            raise OSError(errno.EPERM, "")

    def check_gid() -> None:
        if os.getresgid() != (order.gid,) * 3:
            raise OSError(errno.EPERM, "")

    def check_uid() -> None:
        if os.getresuid() != (order.uid,) * 3:
            raise OSError(errno.EPERM, "")

    return (
        ("follow the runner's death", lambda: _follow_runner(libc, fault_w)),
        ("wait for the id mapping", wait_for_ids),
        ("cut the host's mounts off", make_mounts_private),
        ("mount a fresh /proc", mount_fresh_proc),
        (LEAVE, enter_network),
        ("start a session", os.setsid),
        ("join a session keyring", join_keyring),
        ("reset signals", reset_signals),
        ("take an ordinary priority", lambda: take_ordinary_priority(libc)),
        ("drop groups", check_groups),
        ("drop the group id", check_gid),
        ("drop the user id", check_uid),
        ("close other files", lambda: _close_others(order, libc, numbers, {fault_w, *own})),
        (MEET_GATE, meet_gate),
    )


def _close_others(order: SpawnOrder, libc: Library, numbers: SyscallNumbers, own: Collection[int]) -> None:
    """Close all descriptors but those that the init (`own`) or bwrap needs."""
    held = {*own, order.ending, *order.stdio, *order.keep, *order.hold}
    held.update(order.cgroups.files)
    if order.network is not None and order.network.gate:
        held.add(order.network.channel)
    if order.observer is not None:
        held.add(order.observer.channel)
    if order.agent is not None:
        held.add(order.agent.channel)
    held.update(fd for fd, _ in (*order.mounts, *order.binds))  # closed by the exec
    kept = sorted(fd for fd in held if fd > 2)
    low = 3
    for fd in kept:
        if fd > low:
            _call(libc.syscall(numbers.close_range, low, fd - 1, 0))
        low = fd + 1
    _call(libc.syscall(numbers.close_range, low, 0x7FFFFFFF, 0))
    for fd in order.keep:
        os.set_inheritable(fd, True)
    # If 0, 1 or 2 were closed, bwrap would open the host's /proc under that number. bwrap's init keeps it,
    # and the plugin could reach it through /proc/1/fd.
    if not all(os.get_inheritable(fd) for fd in (0, 1, 2)):
        raise OSError(errno.EBADF, "")


def _call(result: int) -> None:
    if result < 0:
        raise OSError(get_errno(), "")


def _program_stages(order: SpawnOrder, libc: Library, born_inside: bool) -> Sequence[Stage]:
    """The steps of the process that becomes bwrap, in order."""

    def start() -> NoReturn:
        for number, fd in enumerate(order.stdio):  # each has its final number, or one above 2
            if fd != number:
                os.dup2(fd, number)
        # No parent-death signal is needed here: if the cell's init dies, its namespace ends with all of us.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # An empty environment, because bwrap's own can be read inside, in /proc/1/environ.
        os.execve(order.program, order.argv, {})

    def be_observed() -> None:
        if order.observer is not None:
            from sandbox.spawn.observer import install_filter  # loaded before the clone

            install_filter(libc, order.observer)

    def be_served() -> None:
        if order.agent is not None:
            from sandbox.spawn.agent import make_agent_socket  # loaded before the clone

            make_agent_socket(order.agent)

    return (
        ("drop root's access to files", lambda: _drop_root_file_access(order, libc)),
        ("make its temporary folders", lambda: make_folders(order, libc)),
        (AGENT, be_served),
        (OVERLAY, lambda: mount_overlays(order, libc)),
        *(
            (f"guard {each.path[-60:]!a} in a writable folder", lambda each=each: _guard(libc, each))
            for each in order.guards
        ),
        ("forbid new privileges", lambda: _forbid_privileges(libc)),
        ("join its cgroups", lambda: join_cgroups(order.cgroups, born_inside=born_inside)),
        ("be found in its cgroups", lambda: require_membership(order.membership)),
        ("set resource limits", lambda: set_rlimits(order.rlimits)),
        (OBSERVE, be_observed),
        ("start bubblewrap", start),
    )


def _drop_root_file_access(order: SpawnOrder, libc: Library) -> None:
    if order.drop:
        libc.setfsgid(order.gid)
        libc.setfsuid(order.uid)
    if file_system_ids(libc) != (order.uid, order.gid):
        raise OSError(errno.EPERM, "")


def file_system_ids(libc: Library) -> tuple[int, int]:
    """Our file system uid and gid. Each call returns the id in force; -1 is not a valid id, so it changes
    nothing."""
    return int(libc.setfsuid(-1)), int(libc.setfsgid(-1))


def fork_into(handles: CgroupHandles) -> tuple[int, bool]:
    """Fork. Returns the child's pid (0 in the child), and whether it was born in its v2 cgroup.

    The process has to be single-threaded, as for every fork.
    """
    if handles.unified >= 0 and (numbers := SYSCALLS.get(os.uname().machine)) is not None:
        arguments = _CLONE_ARGS.pack(_CLONE_INTO_CGROUP, signal.SIGCHLD, handles.unified)
        pid: int = open_libc().syscall(numbers.clone3, arguments, len(arguments))
        if pid >= 0:
            return pid, True
        # Most likely a container's seccomp filter: Docker's default refuses clone3. For any other cause,
        # joining through cgroup.procs fails too.
    return os.fork(), False


def join_cgroups(handles: CgroupHandles, *, born_inside: bool) -> None:
    """Move this process into its cgroups. It must be single-threaded."""
    for handle in handles.tasks if born_inside else handles.files:
        os.write(handle, b"0")


def require_membership(membership: Sequence[bytes]) -> None:
    """Raise OSError unless /proc/self/cgroup names all the groups that this process joined."""
    if membership:
        with open("/proc/self/cgroup", "rb") as file:
            if not set(membership) <= set(file.read().split(b"\n")):
                raise OSError(errno.ESRCH, "")


def set_rlimits(rlimits: Sequence[tuple[int, int, int]]) -> None:
    """Set each (kind, soft, hard), as far as this process's own limits allow."""
    for kind, soft, hard in rlimits:
        _, ceiling = resource.getrlimit(kind)
        if ceiling != resource.RLIM_INFINITY:
            hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(kind, (soft, hard))
