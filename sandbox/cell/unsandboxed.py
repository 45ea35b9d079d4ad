"""Run a plugin without a cage: only if it asks for that under a policy that allows it.

The plugin still gets its own session, the granted environment, no inherited descriptors, and the limits that
cgroups and rlimits enforce. There is no namespace that would end its processes. So the runner becomes the
reaper of every process that the plugin leaves behind, and kills until none is left.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

from sandbox import process
from sandbox.cell.cell import Bounds, Cell, Exit, Usage, descendants
from sandbox.limits.cgroup import Cgroup
from sandbox.limits.rlimits import rlimits
from sandbox.plan.plan import LaunchPlan
from sandbox.spawn.init import fork_into, join_cgroups, require_membership, set_rlimits
from sandbox.spawn.launcher import ExecReport, failure_report, read_report
from sandbox.spawn.order import CgroupHandles
from sandbox.spawn.priority import take_ordinary_priority
from sandbox.speed.libc import open_libc
from sandbox.speed.typed import Iterator

_PASSES = 200  # over the process tree; each finds what was forked during the one before
_PASS_SECONDS = 0.005  # between two of them


class UnsandboxedCell(Cell):
    def __init__(self, pid: int, status_fd: int, ending_fd: int, started: float, bounds: Bounds) -> None:
        super().__init__(pid, status_fd, ending_fd, started, bounds.cgroup)
        self.over_fd = None  # there is no bwrap: `pid` is the program itself
        self._deadline = bounds.deadline

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self.cgroup is not None:
            self._unblock()
            self.cgroup.kill()
        for _ in range(_PASSES):
            if not descendants(os.getpid()):
                return
            living = _kill_descendants(os.getpid())
            if self._exit is not None:
                _reap_strays()
            elif not living:
                return
            time.sleep(_PASS_SECONDS)

    def runs(self) -> bool:
        return True  # the exec has already succeeded

    def _exec_report(self) -> ExecReport:
        return ExecReport(True)

    def processes(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]

    def signal_program(self, number: int) -> bool:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> Exit:
        if self._exit is None:
            _, status, used = os.wait4(self.pid, 0)
            wall = time.monotonic() - self._started
            code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            usage = Usage(wall, used.ru_utime, used.ru_stime, used.ru_maxrss * 1024)
            told = os.read(self._status_fd, 64)
            why = read_report(told)
            counters, usage = self._read_counters(usage)
            self._exit = Exit(None if told else code, not told, None, usage, counters=counters)
            self._exit = self._exit._replace(unexecuted=why if why.errno else None)
            self.kill()
            left = tuple(_living_descendants(os.getpid()))
            expired = self._deadline is not None and time.monotonic() >= self._deadline
            self._exit = self._exit._replace(left=left, expired=expired and code == 128 + signal.SIGKILL)
        return self._exit


def _living_descendants(pid: int) -> list[int]:
    """All descendants that are not zombies.

    Without psutil, which reads every process of the machine: with 240 of them it takes seven times as long.
    Here processes are killed that may fork meanwhile.
    """
    return [each for each in descendants(pid) if not _is_zombie(each)]


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"Z"
    except OSError:
        return True  # it has ended


def _kill_descendants(pid: int) -> list[int]:
    """Kill all descendants except the caller, and return those that were alive."""
    living = [each for each in _living_descendants(pid) if each != os.getpid()]
    for each in living:
        with suppress(OSError):
            os.kill(each, signal.SIGKILL)
    return living


def _reap_strays() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


@contextmanager
def start_unsandboxed(plan: LaunchPlan, bounds: Bounds | None = None) -> Iterator[Cell]:
    process.load()
    bounds = bounds or Bounds(rlimits(plan.limits))
    parent = os.getpid()
    with ExitStack() as stack:
        # Every step that can fail comes before the plugin starts, so that a plugin that runs is always ended.
        handles = stack.enter_context(bounds.cgroup.open_handles()) if bounds.cgroup else CgroupHandles()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, null)
        status_r, status_w = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, status_w)
        stack.callback(os.close, status_r)
        process.adopt_orphans(True)
        # Before the plugin starts, because the runner may be stopped (SIGSTOP) at any time.
        clock = None if bounds.deadline is None else _start_clock(bounds.deadline, bounds.cgroup)
        try:
            pid, born_inside = fork_into(handles)
        except BaseException:
            if clock is not None:
                _end(clock)
            raise
        if pid == 0:
            _exec_program(plan, bounds, handles, born_inside, parent, status_w)
        try:
            cell = UnsandboxedCell(pid, os.dup(status_r), os.dup(null), time.monotonic(), bounds)
        except BaseException:
            for each in (pid,) if clock is None else (pid, clock):
                _end(each)
            raise
    try:
        yield cell
    finally:
        cell.close()
        process.adopt_orphans(False)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _start_clock(deadline: float, cgroup: Cgroup | None) -> int:
    """Start a process that ends the plugin at its deadline, even if the runner is stopped or busy. In a cage
    the cell's init does that."""
    runner = os.getpid()
    if pid := os.fork():
        return pid
    try:
        process.die_with_parent()
        os.closerange(0, 0x7FFFFFFF)
        while os.getppid() == runner and (left := deadline - time.monotonic()) > 0:
            time.sleep(left)
        if cgroup is not None:
            cgroup.kill()
        for _ in range(_PASSES):
            if not _kill_descendants(runner):
                break
            time.sleep(_PASS_SECONDS)
    finally:
        os._exit(0)


def _exec_program(
    plan: LaunchPlan, bounds: Bounds, handles: CgroupHandles, born_inside: bool, parent: int, status_w: int
) -> NoReturn:
    """Runs in the child, and never returns."""
    try:
        process.die_with_parent()
        if os.getppid() != parent:
            os._exit(125)
        join_cgroups(handles, born_inside=born_inside)
        if bounds.cgroup is not None:
            require_membership([os.fsencode(line) for line in bounds.cgroup.lines])
        os.setsid()
        for number, fd in enumerate(bounds.streams):  # each has its final number, or one above 2
            if fd != number:
                os.dup2(fd, number)
        set_rlimits(bounds.rlimits)
        take_ordinary_priority(open_libc())
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_DFL)
        # Not only up to the soft limit: it may have been lowered while descriptors above it were open.
        os.closerange(3, status_w)
        os.closerange(status_w + 1, 0x7FFFFFFF)
        os.chdir(plan.directory)
        try:
            os.execve(plan.argv[0], plan.argv, dict(plan.env))
        except OSError as error:
            os.write(status_w, failure_report(error.errno or 0, found=os.path.exists(plan.argv[0])))
    finally:
        os.write(status_w, b"!")  # exec closes this pipe: a byte on it means that exec failed
        os._exit(127)
