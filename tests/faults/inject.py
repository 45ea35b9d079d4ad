"""Faults at the boundary to the kernel: of all system calls that a runner and its children make, one fails.

A seccomp filter hands the calls of tests/faults/table.py to this process, which lets each go on, but for one:
that one gets an errno instead, or its process gets a signal. The kernel makes no difference between a runner
in Python, bubblewrap, the cell's init and the gate. So every step of each can fail, with every errno, and no
line of the product knows about it.

A call is named by its place: the process that makes it, the call, and how many of that kind this process has
made before. A healthy run lists all places. A fault that was not reached is a test that proves nothing: it
fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sandbox.cell.notifier import _ANSWER, _CONTINUE, _NOTIFICATION, _RECEIVE, _SEND
from sandbox.seccomp import bpf, syscalls
from sandbox.seccomp.filter import AUDIT_ARCH, machine_arch
from sandbox.seccomp.observation import USER_NOTIF
from tests.conftest import Caller
from tests.faults.table import ERRNOS
from tests.template import prepared

# The runner's end of the socket that the listener comes by. Nothing else of a runner has such a number.
_CHANNEL = 499
_STARTING = threading.Lock()  # several runs may begin at once, and each needs that number
_NUMBERS = syscalls.load(machine_arch())
_NAMES = {_NUMBERS[name]: name for name in (*ERRNOS, "fcntl") if name in _NUMBERS}
# Of fcntl those that can fail: the others ask for flags of a file that is open, or set them.
_LOCKS = (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW)
_FCNTL = {
    **dict.fromkeys((fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC), "fcntl-dup"),
    **dict.fromkeys(_LOCKS, "fcntl-lock"),
}


class Place(NamedTuple):
    """One system call of a run."""

    role: str  # the process: runner, init, bwrap, ...
    call: str
    number: int  # from 1, of this call by this process


class Fault(NamedTuple):
    """What happens at a place."""

    place: Place
    error: int = 0
    signal: int = 0

    def __str__(self) -> str:
        what = errno.errorcode[self.error] if self.error else signal.Signals(self.signal).name
        return f"{self.place.role} {self.place.call} {self.place.number} {what}"


def observing(caller: Caller, program: str = "", first: str = "") -> Caller:
    """The same caller. Its runners install the filter before they begin: `Injector.run` starts them.
    `program`: Python to run in place of the runner. `first`: Python to run before it."""
    instead = f"{program}\nraise SystemExit(0)" if program else ""
    return prepared(caller, _INSTALL.format(filter=_filter().hex(), channel=_CHANNEL) + first + instead)


_INSTALL = """\
import os
from sandbox.spawn.observer import install_filter
from sandbox.spawn.order import ObserverOrder
from sandbox.speed.libc import open_libc
if os.geteuid():
    open_libc().prctl(38, 1, 0, 0, 0)  # no new privileges: else only root may install a filter
install_filter(open_libc(), ObserverOrder(bytes.fromhex("{filter}"), {channel}))
"""


def _filter() -> bytes:
    code = bpf.Assembler()
    allow, notify = code.ret(bpf.ALLOW), code.ret(USER_NOTIF)
    command = allow
    for number in _FCNTL:
        command = code.branch(bpf.JEQ, number, notify, command)
    then = {
        "fcntl": code.load(bpf.argument_offset(1), command),
        "sendmsg": code.load(bpf.argument_offset(0), code.branch(bpf.JEQ, _CHANNEL, allow, notify)),
        # To change or remove what is watched takes no memory: only the kernel's EPOLL_CTL_ADD can fail.
        "epoll_ctl": code.load(bpf.argument_offset(1), code.branch(bpf.JEQ, 1, notify, allow)),
        # One that asks for a limit and sets none does not fail.
        "prlimit64": code.load(bpf.argument_offset(2), code.branch(bpf.JEQ, 0, allow, notify)),
    }
    place = allow
    for number, name in sorted(_NAMES.items(), reverse=True):
        place = code.branch(bpf.JEQ, number, then.get(name, notify), place)
    place = code.load(bpf.OFFSET_NUMBER, place)
    place = code.branch(bpf.JEQ, AUDIT_ARCH[machine_arch()], place, allow)
    code.load(bpf.OFFSET_ARCH, place)
    return code.program()


class Injector:
    """Answers for all calls of one run, in a thread."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.reached = False
        self.places: list[Place] = []  # all of this run, in order
        self.hit: int = 0  # the pid of the process at the place
        self.pids: set[int] = set()  # all processes that made a call, but for the runner
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._roles: dict[int, str] = {}
        self._born: list[int] = []  # children of the runner in its own pid namespace
        self._runner = 0
        self._own = os.readlink("/proc/self/ns/pid")

    @contextlib.contextmanager
    def run(self, start: Callable[..., subprocess.Popen[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process with `start(pass_fds=...)` and answer for it until the context ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            with _STARTING:
                os.dup2(theirs.fileno(), _CHANNEL)
                try:
                    process = start(pass_fds=[_CHANNEL])
                finally:
                    os.close(_CHANNEL)
            theirs.close()
            self._runner = process.pid
            ours.settimeout(60)
            _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
        over_r, over_w = os.pipe()
        thread = threading.Thread(target=self._serve, args=(listener, over_r))
        thread.start()
        try:
            yield process
        finally:
            os.close(over_w)
            thread.join()
            os.close(over_r)
            os.close(listener)  # what still waits fails with ENOSYS

    def _serve(self, listener: int, over: int) -> None:
        watch = select.poll()
        watch.register(listener, select.POLLIN)
        watch.register(over, select.POLLIN)
        while True:
            for fd, events in watch.poll():
                if fd == over:
                    return
                if events & select.POLLIN:
                    self._answer(listener)
                else:  # no process has the filter any more
                    watch.unregister(listener)

    def _answer(self, listener: int) -> None:
        raw = bytearray(_NOTIFICATION.size)
        with contextlib.suppress(OSError):  # killed meanwhile
            fcntl.ioctl(listener, _RECEIVE, raw, True)
            number, pid, _, call, _, _, _, command, *_ = _NOTIFICATION.unpack(raw)
            name = _NAMES[call]
            error = self._judge(pid, _FCNTL[command & 0xFFFFFFFF] if name == "fcntl" else name)
            answer = (number, 0, -error, 0) if error else (number, 0, 0, _CONTINUE)
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(*answer))

    def _judge(self, pid: int, call: str) -> int:
        """The errno that this call gets; 0: it goes on."""
        role = self._roles.get(pid) or self._role(pid)
        if pid != self._runner:
            self.pids.add(pid)
        if role == "plugin":
            return 0
        self._counts[pid, role, call] += 1
        place = Place(role, call, self._counts[pid, role, call])
        if self.fault is None:
            self.places.append(place)
        if call in ("execve", "execveat"):
            self._roles.pop(pid, None)  # it may be another program next
        if self.fault is None or self.reached or place != self.fault.place:
            return 0
        self.reached, self.hit = True, pid
        if self.fault.signal:
            os.kill(pid, self.fault.signal)
            return errno.EINTR if self.fault.signal == signal.SIGKILL else 0
        return self.fault.error

    def _role(self, pid: int) -> str:
        role = self._roles[pid] = "runner" if pid == self._runner else self._look_up(pid)
        return role

    def _look_up(self, pid: int) -> str:
        try:
            program = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
            with open(f"/proc/{pid}/comm", encoding="ascii") as file:
                name = file.read().strip()
            with open(f"/proc/{pid}/status", encoding="ascii") as file:
                status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        except OSError:
            return "plugin"  # it has ended
        if program.startswith("memfd:runner-") or name.startswith("runner-"):
            return program.removeprefix("memfd:") if "memfd" in program else name
        if program == "bwrap":
            return "bwrap" if len(status["NSpid"].split()) == 2 else "bwrap-init"
        if not program.startswith("python"):
            return "plugin"
        if int(status["Tgid"]) == self._runner:
            return "runner-thread"
        levels = status["NSpid"].split()
        if len(levels) > 2:
            return "plugin"
        if len(levels) == 2:
            return "init" if levels[1] == "1" else "program"
        if int(status["PPid"]) != self._runner:
            return "other"
        # In the order of their births, whichever of them calls first.
        self._born = sorted({*self._born, pid, *_children(self._runner)})
        return f"child-{self._born.index(pid) + 1}"


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []
