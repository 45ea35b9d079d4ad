"""Try system calls and programs in throw-away children, to find out what the kernel allows this process.

Each trial runs in a child that reports step by step and is killed after a timeout, so a probe can neither
hang nor leave anything behind. Used by `runner doctor`, and after a launch that has failed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sandbox import process
from sandbox.files import write_all
from sandbox.spawn.order import SpawnError, SpawnOrder
from sandbox.spawn.spawner import spawn

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_CHILD_SETTID = 0x01000000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

NAMESPACES = {
    "mount": CLONE_NEWNS,
    "pid": CLONE_NEWPID,
    "network": CLONE_NEWNET,
    "ipc": CLONE_NEWIPC,
    "uts": CLONE_NEWUTS,
    "cgroup": CLONE_NEWCGROUP,
}

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SILENT, MS_SLAVE = 2, 4, 8, 16384, 32768, 1 << 19

# The errno with which the kernel itself refuses the invalid calls that `user_namespace` makes.
NONSENSE: Mapping[str, int] = {
    "clone": errno.EINVAL,
    "unshare": errno.EINVAL,
    "mount": errno.EFAULT,
    "umount2": errno.EINVAL,
    "pivot_root": errno.EFAULT,
    "sethostname": errno.EINVAL,
}
KILLED = -1  # in place of an errno: a seccomp filter killed the child at this step
_NOWHERE = 1  # an address that is never mapped
_NO_SUCH_FLAG = 1 << 20

# A trial takes milliseconds. On an overloaded machine a late one must not be told as one that is refused.
TRIAL_SECONDS = 60.0
_POLL_SECONDS = 0.002

# System calls that not every libc has a wrapper for, by machine.
_NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "clone": 56,
        "keyctl": 250,
        "getppid": 110,
        "landlock_create_ruleset": 444,
        "pivot_root": 155,
    },
    "aarch64": {
        "clone": 220,
        "keyctl": 219,
        "getppid": 173,
        "landlock_create_ruleset": 444,
        "pivot_root": 41,
    },
}

Note = Callable[[str, int | str], None]

# PyDLL does not release the interpreter lock: the child of a raw clone() must still hold it.
_libc = ctypes.PyDLL(None, use_errno=True)


class Unsupported(Exception):
    """This processor is not in the tables."""


class TrialOutcome(NamedTuple):
    """The steps that a child reported, and how it ended."""

    steps: dict[str, int | str]
    signal: int = 0  # the signal that ended it
    late: bool = False  # it was killed at the timeout
    error: str = ""  # an exception in the act itself

    def number(self, step: str) -> int | None:
        value = self.steps.get(step)
        return value if isinstance(value, int) else None


def system_call_number(name: str) -> int:
    machine = os.uname().machine
    try:
        return _NUMBERS[machine][name]
    except KeyError:
        raise Unsupported(f"the number of {name} on {machine} is not known") from None


def system_call(name: str, *arguments: int) -> int:
    """Result of a raw system call; -errno when it failed, as the kernel itself returns it."""
    longs = [ctypes.c_long(argument) for argument in arguments]
    result: int = _libc.syscall(ctypes.c_long(system_call_number(name)), *longs)
    return -ctypes.get_errno() if result == -1 else result


def unshare(flags: int) -> int:
    """0 or an errno. os.unshare exists only from Python 3.12 on."""
    return ctypes.get_errno() if _libc.unshare(flags) else 0


def _errno(result: int) -> int:
    return ctypes.get_errno() if result < 0 else 0


def mount(source: str, target: str, kind: str | None, flags: int) -> int:
    failed = _libc.mount(
        source.encode(), target.encode(), None if kind is None else kind.encode(), ctypes.c_ulong(flags), None
    )
    return ctypes.get_errno() if failed else 0


def install_filter(program: bytes) -> int:
    """Install a seccomp filter; its errno, or 0. By hand: python-prctl knows only the strict mode."""
    instructions = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    process.forbid_new_privileges()
    failed = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), head, 0, 0)
    return ctypes.get_errno() if failed < 0 else 0


def drop_to(uid: int) -> None:
    """Change to `uid` irrevocably, with its groups, as a launch does."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # A change of uid makes the process undumpable: /proc/self then belongs to root and its id maps cannot be
    # written. In a launch, the exec of bwrap makes it dumpable again.
    process.allow_dumps()


def in_child(act: Callable[[Note], None], timeout: float = TRIAL_SECONDS) -> TrialOutcome:
    """Run `act` in a forked child and collect the steps it notes."""
    process.load()
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _run_act(act, writing, parent)
    os.close(writing)
    return _collect(child, reading, timeout)


def _run_act(act: Callable[[Note], None], writing: int, parent: int) -> None:
    def note(step: str, value: int | str) -> None:
        os.write(writing, json.dumps([step, value]).encode() + b"\n")

    try:
        process.die_with_parent()
        if os.getppid() == parent:
            act(note)
    except BaseException as failed:  # noqa: BLE001 -- a forked child may never return into its parent's code
        note("error", f"{type(failed).__name__}: {failed}")
    finally:
        os._exit(0)


def _collect(child: int, reading: int, timeout: float) -> TrialOutcome:
    deadline = time.monotonic() + timeout
    received = bytearray()
    late = False
    try:
        poller = select.poll()
        poller.register(reading, select.POLLIN | select.POLLHUP)
        while True:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                late = True
                break
            if not (chunk := os.read(reading, 65536)):
                break
            received += chunk
    finally:
        os.close(reading)
        # The report is complete. A child that ends by itself gets time to do so, so that its exit status is
        # its own.
        ended = None if late else reap(child, deadline)
        if ended is None:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)[1]
    steps: dict[str, int | str] = {}
    for line in received.splitlines():
        step, value = json.loads(line)
        steps[step] = value
    number = os.WTERMSIG(ended) if os.WIFSIGNALED(ended) and not late else 0
    return TrialOutcome(steps, number, late, str(steps.pop("error", "")))


def reap(child: int, deadline: float) -> int | None:
    """The child's wait status, or None if it still runs at the deadline."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


# --- user namespaces ------------------------------------------------------------------------------


def try_user_namespace(uid: int | None) -> TrialOutcome:
    """Create a user namespace and use it as bwrap would. Returns the errno of each step (0: it worked).

    A filter that kills at a call is met once for each such call: the next child leaves the call out.
    """
    killed: dict[str, int | str] = {}
    while True:
        outcome = in_child(lambda note: _user_namespace(uid, note, frozenset(killed)))
        step = next((name for name in _STEPS if name not in {**outcome.steps, **killed}), "")
        if outcome.signal != signal.SIGSYS or not step:
            break
        killed[step] = KILLED
        if step not in _NONSENSE_STEPS:  # nothing after it can be tried
            break
    return outcome._replace(steps={**outcome.steps, **killed}, signal=0 if killed else outcome.signal)


_NONSENSE_STEPS = frozenset(f"{call}_nonsense" for call in NONSENSE)
# In their order. "proc" is made by a child of the child.
_STEPS = (
    *"clone_nonsense unshare_nonsense mount_nonsense umount2_nonsense create label map".split(),
    *NAMESPACES,
    *"pivot_root_nonsense sethostname_nonsense slave tmpfs proc".split(),
)


def _user_namespace(uid: int | None, note: Note, skipped: frozenset[str]) -> None:
    """Note the errno of each step, but for `skipped` ones.

    The steps named nonsense are invalid calls that detect a seccomp filter. The kernel refuses them with the
    errno in NONSENSE before it asks any sysctl or security module. Any other errno comes from a seccomp
    filter, which runs before the kernel's own checks.
    """
    if uid is not None:
        drop_to(uid)

    def probe(call: str, act: Callable[[], int]) -> None:
        step = f"{call}_nonsense"
        if step not in skipped:
            note(step, act())

    probe("clone", lambda: -system_call("clone", CLONE_NEWUSER | CLONE_FS | signal.SIGCHLD, 0, 0, 0, 0))
    probe("unshare", lambda: unshare(CLONE_NEWUSER | CLONE_CHILD_SETTID))
    probe("mount", lambda: _errno(_libc.mount(None, b"/", ctypes.c_void_p(_NOWHERE), 0, None)))
    probe("umount2", lambda: _errno(_libc.umount2(b"/", _NO_SUCH_FLAG)))
    own_uid, own_gid = os.getuid(), os.getgid()
    if "unshare_nonsense" in skipped or note_errno(note, "create", unshare(CLONE_NEWUSER)):
        return
    note("label", apparmor_label())
    if note_errno(note, "map", _map_ids(own_uid, own_gid)):
        return
    for name, flag in NAMESPACES.items():
        note(name, unshare(flag))
    # The kernel checks the privilege for these two first, and only here, in the new namespace, we have it.
    probe("pivot_root", lambda: -system_call("pivot_root", _NOWHERE, _NOWHERE))
    probe("sethostname", lambda: _errno(_libc.sethostname(b"", ctypes.c_size_t(-1))))
    if "mount_nonsense" in skipped or note_errno(
        note, "slave", mount("none", "/", None, MS_SILENT | MS_SLAVE | MS_REC)
    ):
        return
    note("tmpfs", mount("tmpfs", "/tmp" if os.path.isdir("/tmp") else "/", "tmpfs", MS_NOSUID | MS_NODEV))
    # Only the next child is in the new pid namespace, and only a member may mount its procfs.
    first = os.fork()
    if first == 0:
        process.die_with_parent()
        os._exit(mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC))
    note("proc", os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))


def note_errno(note: Note, step: str, number: int) -> int:
    note(step, number)
    return number


def _map_ids(uid: int, gid: int) -> int:
    """Map our own ids onto themselves, which needs no privilege. Returns 0 or an errno."""
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
    except OSError as failed:
        return failed.errno or errno.EIO
    return 0


def apparmor_label() -> str:
    for path in ("/proc/self/attr/apparmor/current", "/proc/self/attr/current"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read().strip("\0\n ")
        except OSError:
            continue
    return ""


# --- through the spawner --------------------------------------------------------------------------


class Run(NamedTuple):
    """The result of one program that the spawner has started."""

    output: str = ""
    complaint: str = ""  # stderr
    reached: bool = False  # the program ran; for bwrap: the program inside the cage
    code: int = -1
    stage: str = ""  # the spawner's step, before bwrap, that failed
    number: int = 0  # its errno
    signal: int = 0  # that ended the spawner itself: SIGSYS if a filter kills it
    late: bool = False

    @property
    def worked(self) -> bool:
        return self.reached and self.code == 0


def run_bwrap(
    bwrap: str,
    options: Sequence[str],
    command: Sequence[str],
    *,
    uid: int | None,
    descriptors: Sequence[int],
) -> Run:
    """Run bwrap as a launch does: with the spawner, options in --args, and its status document."""
    arguments, status = os.memfd_create("arguments"), os.memfd_create("status")
    try:
        words = [*options, "--json-status-fd", str(status)]
        write_all(arguments, b"".join(word.encode() + b"\0" for word in words))
        os.lseek(arguments, 0, os.SEEK_SET)
        argv = (bwrap, "--args", str(arguments), "--", *command)
        run = run_spawned(argv, uid=uid, descriptors=(arguments, status, *descriptors))
        code = _exit_code_reported(_text(status))
        return run._replace(reached=code is not None, code=-1 if code is None else code)
    finally:
        os.close(arguments)
        os.close(status)


def run_spawned(
    argv: Sequence[str],
    *,
    uid: int | None,
    descriptors: Sequence[int] = (),
    timeout: float = TRIAL_SECONDS,
    **more: Any,
) -> Run:
    """Run a program with sandbox.spawn.spawner, as for a plugin.

    `uid`: the uid that root changes to; None for an ordinary user. `more`: of the order. Nothing is left
    behind: when the first process of the spawner's pid namespace is killed, the kernel ends everything in it.
    """
    output, complaint = os.memfd_create("stdout"), os.memfd_create("stderr")
    order = SpawnOrder(
        program=argv[0],
        argv=tuple(argv),
        uid=os.getuid() if uid is None else uid,
        gid=os.getgid() if uid is None else uid,
        drop=uid is not None,
        keep=tuple(descriptors),
        rlimits=(),
        keyring=False,
        **more,
    )

    def act(note: Note) -> None:
        os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
        os.dup2(output, 1)
        os.dup2(complaint, 2)
        try:
            child = spawn(order)
        except SpawnError as failed:
            note("stage", failed.stage)
            note("errno", failed.errno)
            return
        note("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    try:
        outcome = in_child(act, timeout)
        code = outcome.number("code")
        return Run(
            output=_text(output),
            complaint=_text(complaint).strip() or outcome.error,
            reached=code is not None,
            code=-1 if code is None else code,
            stage=str(outcome.steps.get("stage", "")),
            number=outcome.number("errno") or 0,
            signal=outcome.signal,
            late=outcome.late,
        )
    finally:
        os.close(output)
        os.close(complaint)


def _text(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 1 << 20).decode(errors="replace")


def _exit_code_reported(status: str) -> int | None:
    """The exit code in bwrap's status, which has one JSON document per line; None if the program never
    started."""
    for line in status.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and isinstance(code := document.get("exit-code"), int):
            return code
    return None
