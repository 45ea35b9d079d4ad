"""A live confined process tree."""

from __future__ import annotations

import os
import select
import time

from sandbox.cell import KILL_SECONDS as KILL_SECONDS
from sandbox.limits.cgroup import Cgroup, Counters
from sandbox.limits.rlimits import Rlimit
from sandbox.spawn import launcher, reaper
from sandbox.spawn.launcher import ExecReport
from sandbox.spawn.order import read_ending
from sandbox.speed.scopes import suppress
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Any, Callable
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.cell.agent import AgentProcess
    from sandbox.cell.egress import GateProcess
    from sandbox.cell.name_lookups import NameLookups
    from sandbox.cell.observer import CageObserver, Observation
    from sandbox.network.audit import AuditLog
    from sandbox.network.egress import AuditLine

_STATUS_BYTES = 64 << 10  # of bwrap's status output, which has two lines
_COMPLAINT_BYTES = 4 << 10  # of bwrap's error message

_STRAY_SECONDS = 1.0
_MANY_PROCESSES = 32


_PROGRAM_GENERATION = 3  # generations below the cell's init: bwrap, its init, the program


class Usage(NamedTuple):
    """What a cell used: all its processes if a cgroup counts them (the last two fields are then not None).
    Otherwise the program and the children that were waited for, without processes that were left running."""

    wall: float
    cpu_user: float
    cpu_system: float
    # Bytes, of the largest single process. Never less than some 15 MB: the kernel also counts the process
    # that becomes bwrap before its exec, while it still shares the memory of the runner.
    max_rss: int
    # Bytes, by system calls, from and to files, pipes and sockets. None: the cell's init was killed first.
    read: int | None = None
    written: int | None = None
    memory_peak: int | None = None  # bytes, of all processes together
    pids_peak: int | None = None


class Exit(NamedTuple):
    """How a cell ended. `code`: the program's exit code; 128+n if signal n ended it, also one of ours; None
    if it never ran or its code is not known."""

    code: int | None
    reached_exec: bool
    signal: int | None  # that ended bwrap itself: the cage was killed from outside
    usage: Usage
    expired: bool = False  # the deadline in the cell's init ended it
    counters: Counters = Counters()
    left: tuple[int, ...] = ()  # processes that could not be killed
    unexecuted: ExecReport | None = None  # the failed execve of the program
    complaint: str = ""  # bwrap's error message, if the program never ran
    scratch_full: bool = False  # at the end; False also if the cell's init was killed first

    @property
    def kill_incomplete(self) -> bool:
        return bool(self.left)


class Bounds(NamedTuple):
    """The limits of a launch that are not in its plan."""

    rlimits: tuple[Rlimit, ...]
    cgroup: Cgroup | None = None
    deadline: float | None = None  # on the monotonic clock
    streams: tuple[int, int, int] = (0, 1, 2)  # the descriptors that the program gets as 0, 1 and 2
    launch: float | None = None  # on the monotonic clock: by when the cage is built, and the gate serves
    is_parked: bool = False  # the program starts when `Cell.release` is called
    released_seconds: float | None = None  # of a parked program: its deadline, from the release on


class Cell:
    """The processes of one plugin: `pid`, which is the cell's init, and everything below it."""

    gate: GateProcess | None = None  # a process outside; launch() ends it
    agent: AgentProcess | None = None  # its ssh agent, a process outside; launch() ends it
    lookups: NameLookups | None = None  # of a plugin without a network
    observer: CageObserver | None = None  # of `runner learn`, a process outside; launch() ends it
    overlay_fault = ""  # why it has no overlay, although its plan has

    @property
    def audit(self) -> AuditLog | None:
        """What the plugin did with its network; None for a plugin that has no gate and asked for no host."""
        network = self.gate or self.lookups
        return None if network is None else network.log

    def observation(self) -> Observation | None:
        """What the plugin asked the kernel for; None if nobody observes it. To be asked when it has ended: it
        ends the observer."""
        if self.observer is None:
            return None
        return self.observer.collect({} if self.lookups is None else self.lookups.addresses)

    def watch_network(self, on_line: Callable[[AuditLine], None]) -> None:
        """Have `on_line` called for each connection and each DNS question of the plugin."""
        if self.gate is not None:
            self.gate.log.on_line = on_line
        elif self.lookups is not None:
            self.lookups.on_line = on_line

    def __init__(
        self,
        pid: int,
        status_fd: int,
        ending_fd: int,
        started: float,
        cgroup: Cgroup | None = None,
        launch_fd: int = -1,  # the launcher's report
        complaint_fd: int = -1,  # bwrap's stderr
        release_fd: int = -1,  # of a parked cell: its launcher waits for a byte at the other end
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)  # readable when the whole tree has ended
        self.cgroup = cgroup
        # Hangs up when bwrap ends. Then the program has ended, but other processes of the cell may still run.
        self.over_fd: int | None = status_fd
        self._status_fd = status_fd
        self._ending_fd = ending_fd
        self._launch_fd = launch_fd
        self._complaint_fd = complaint_fd
        self._release_fd = release_fd
        self._launch = b""  # the launcher's report so far
        self._launched = False  # its report is complete: it has become the program, or has ended
        self._started = started
        self._exit: Exit | None = None
        self._reaped: tuple[int, Any] | None = None  # the status of the cell's init, its usage

    def release(self) -> bool:
        """Start the program of a parked cell; its times run from now on. False: it was released before, or
        is dead, and nothing was started by this call."""
        if self._release_fd < 0:
            return False
        release, self._release_fd = self._release_fd, -1
        self._started = time.monotonic()
        try:
            # First the clock of the cell's init: no program runs without it.
            signal.pidfd_send_signal(self.pidfd, reaper.RELEASED)
            return os.write(release, b"r") == 1
        except (ProcessLookupError, BrokenPipeError):
            return False
        finally:
            os.close(release)  # the launcher reads the byte, and nobody can send a second one

    def end(self) -> None:
        """End the program, so that the cell's init can report what was used. Does not wait.

        The program is killed first: bwrap ends with it, and everything with bwrap. The kernel does not count
        the processes that it kills at the end of a namespace, so the namespace's init is not killed here.
        """
        self._unblock()
        # A program that ran and is not found has just ended by itself. bwrap is about to report its exit
        # code, which would be lost if we killed bwrap. The caller kills the cell if that takes too long.
        ended = self.signal_program(signal.SIGKILL) or self.runs()
        if not ended and not _signal_generation(self.pid, 1, signal.SIGKILL):
            self.kill()
        elif self.cgroup is not None and len(self.cgroup.processes()) > _MANY_PROCESSES:
            # Among so many processes, bwrap's init would get little processor time to end them. Nothing is
            # lost: the cgroup counts their usage.
            self.cgroup.kill()

    def kill(self) -> None:
        """Kill `pid`, the init of a pid namespace, so that the kernel kills all processes in it. Then kill
        the cgroup too, in case a process has escaped the namespace."""
        if self._exit is None:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if self.cgroup is not None:
                self._unblock()
                self.cgroup.kill()

    def _unblock(self) -> None:
        """Thaw the cgroup and lift its cpu limit: a frozen or throttled process dies late or never."""
        if self.cgroup is not None:
            self.cgroup.lift_cpu()
            self.cgroup.freeze(False)

    def processes(self) -> list[int]:
        """A snapshot of all processes of the cell."""
        if self.cgroup is not None and self.cgroup.groups:
            return self.cgroup.processes()
        return descendants(self.pid)

    def runs(self) -> bool:
        """Whether bwrap has started the program. It may have ended since."""
        return self._exec_report().executed and self._launched

    @property
    def report_fd(self) -> int:
        """Becomes readable when the launcher is about to execute the program, or has ended."""
        return self._launch_fd

    def has_ended_unexecuted(self) -> bool:
        """Whether the launcher has ended without an attempt to execute the program."""
        report = self._exec_report()
        return self._launched and not report.executed and not report.errno

    def _exec_report(self) -> ExecReport:
        """The launcher's report so far. Does not block: an unkillable process may hold the other end."""
        with suppress(BlockingIOError):
            while not self._launched:
                part = os.read(self._launch_fd, 64)
                self._launch += part
                self._launched = not part
        return launcher.read_report(self._launch)

    def member(self) -> int | None:
        """The pid of bwrap's own init, which is in all of the plugin's namespaces and ends last."""
        try:
            return children(children(self.pid)[0])[0]
        except (IndexError, OSError):
            return None

    def signal_program(self, number: int) -> bool:
        """Send a signal to the plugin's first process; False if it cannot be found (yet).

        Neither bwrap process passes signals on: the outer one dies of them, the inner init ignores them.
        """
        return _signal_generation(self.pid, _PROGRAM_GENERATION, number)

    def wait(self) -> Exit:
        """Reap the cell's init. Returns when the last process of the cell has ended, because the init of a
        pid namespace cannot be reaped before its namespace is empty."""
        if self._exit is None:
            if self._reaped is None:  # else an earlier call failed after it
                self._reaped = os.wait4(self.pid, 0)[1:]
            status, used = self._reaped
            wall = time.monotonic() - self._started
            code = self._reported_code()
            report = self._exec_report()
            ending = read_ending(self._ending_fd)
            if ending is not None:
                status = ending.status
                usage = Usage(wall, ending.user, ending.system, ending.max_rss, ending.read, ending.written)
            else:  # killed: the kernel did not count the processes it ended
                usage = Usage(wall, used.ru_utime, used.ru_stime, used.ru_maxrss * 1024)
            counters, usage = self._read_counters(usage)
            self._exit = Exit(
                code=code,
                reached_exec=report.executed,
                signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                usage=usage,
                expired=ending is not None and ending.expired,
                counters=counters,
                left=self._strays(),
                unexecuted=report if report.errno else None,
                complaint="" if report.executed else self._complaint(),
                scratch_full=ending is not None and ending.full,
            )
        return self._exit

    def _read_counters(self, usage: Usage) -> tuple[Counters, Usage]:
        """The counters of the cgroup, and the usage completed with them."""
        if self.cgroup is None:
            return Counters(), usage
        counters = self.cgroup.counters()
        if counters.cpu_user is not None and counters.cpu_system is not None:
            usage = usage._replace(cpu_user=counters.cpu_user, cpu_system=counters.cpu_system)
        return counters, usage._replace(memory_peak=counters.memory_peak, pids_peak=counters.pids_peak)

    def _strays(self) -> tuple[int, ...]:
        """Processes that are in the plugin's cgroup although its namespace is empty.

        Only a process outside can have put them there. They are killed, and survivors are returned.
        """
        if self.cgroup is None or not self.cgroup.left():
            return ()
        self.cgroup.kill()
        until = time.monotonic() + _STRAY_SECONDS
        while (left := self.cgroup.left()) and time.monotonic() < until:
            time.sleep(0.005)
        return left

    def give_up(self) -> Exit:
        """Stop waiting for processes that cannot be killed. They are listed in `Exit.left`."""
        if self._exit is None:
            left = tuple(self.cgroup.left()) if self.cgroup is not None else ()
            wall = time.monotonic() - self._started
            counters, usage = self._read_counters(Usage(wall, 0.0, 0.0, 0))
            os.set_blocking(self._status_fd, False)  # bwrap may be one of them
            code = self._reported_code()
            reached = self._exec_report().executed
            self._exit = Exit(code, reached, None, usage, counters=counters, left=left or (self.pid,))
        return self._exit

    def _reported_code(self) -> int | None:
        """The program's exit code. bwrap writes one JSON document per line, among them {"exit-code": N} if
        the launcher or the program ran. None for the launcher's own exit code."""
        if not self._exec_report().executed:
            return None
        raw = b""
        with suppress(BlockingIOError):
            while len(raw) < _STATUS_BYTES and (part := os.read(self._status_fd, 4096)):
                raw += part
        codes = (exit_code(line) for line in raw.splitlines())
        return next((code for code in codes if code is not None), None)

    def _complaint(self) -> str:
        """bwrap's stderr. Read only if the program never ran, because a plugin can write there
        (/proc/1/fd/2)."""
        try:
            said = os.read(self._complaint_fd, _COMPLAINT_BYTES)
        except BlockingIOError:
            return ""
        return said.decode(errors="replace").strip()

    def close(self) -> None:
        self.kill()
        if self._exit is None:
            gone = select.poll()
            gone.register(self.pidfd, select.POLLIN)
            if gone.poll(KILL_SECONDS * 1000):
                with suppress(OSError):  # it is reaped, and what it used could not be read
                    self.wait()
            else:
                self.give_up()
        own = (self.pidfd, self._status_fd, self._ending_fd, self._launch_fd, self._complaint_fd)
        for fd in (*own, self._release_fd):
            if fd >= 0:
                os.close(fd)
        self._release_fd = -1


def exit_code(line: bytes) -> int | None:
    """The exit code in this line of bwrap's status, or None."""
    match line.split():
        case [b"{", b'"exit-code":', number, b"}"] if number.isdigit():  # as bwrap writes it
            return int(number)
    if b'"exit-code"' not in line:
        return None
    import json

    try:
        document = json.loads(line)
    except ValueError:
        return None  # cut short: bwrap was killed while writing
    found = document.get("exit-code") if isinstance(document, dict) else None
    return found if isinstance(found, int) else None


# Without psutil: every launch looks at its children, and importing psutil takes 20 ms.
def children(pid: int) -> list[int]:
    """The children of a process, of all its threads."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
            found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    found, open_ends = [], [pid]
    while open_ends:  # not recursive: processes can be nested deeper than Python's stack
        try:
            below = children(open_ends.pop())
        except OSError:
            continue  # it has ended since it was listed
        found += below
        open_ends += below
    return found


def _signal_generation(pid: int, generations: int, number: int) -> bool:
    """Signal the first child of the first child … of `pid`, so many generations down; False if there is
    none."""
    try:
        for _ in range(generations):
            pid, parent = children(pid)[0], pid
        fd = os.pidfd_open(pid)
        try:
            # Listed again with the descriptor held: the pid may have been reused.
            if pid not in children(parent):
                return False
            signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
    except (IndexError, OSError):
        return False
    return True
