"""A live confined process tree."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from sandbox import bwrap, spawner
from sandbox.plan import LaunchPlan, OpenPlan, Text
from sandbox.state import Owner
from sandbox.value import NamedTuple
from sandbox.writing import write_all

_STATUS_LIMIT = 64 << 10  # what bwrap may say about itself; it says two lines

# Not budgets, hygiene: what no plugin needs and what has hurt others.
_RLIMITS = (
    (resource.RLIMIT_CORE, 0, 0),
    (resource.RLIMIT_NOFILE, 1024, 4096),
    (resource.RLIMIT_MSGQUEUE, 0, 0),
    (resource.RLIMIT_RTPRIO, 0, 0),
    (resource.RLIMIT_MEMLOCK, 64 << 10, 64 << 10),
    (resource.RLIMIT_SIGPENDING, 1024, 1024),
)


class Usage(NamedTuple):
    """Of the program and of all it has waited for. Not of what it left running: the kernel sweeps that up
    uncounted."""

    wall: float
    cpu_user: float
    cpu_system: float
    # Bytes, of the largest single process. Never below what the keeper itself takes (some 15 MB): the kernel
    # counts a process from before its exec, when it still shared the keeper's memory.
    max_rss: int


class Exit(NamedTuple):
    """How it ended. `code` is what the program returned, 128+n if signal n ended it (also ours), None if it
    never ran or nobody was left to tell."""

    code: int | None
    reached_exec: bool
    signal: int | None  # that ended bwrap itself: somebody killed the cage
    usage: Usage


class Cell:
    """One plugin's processes. Everything below `pid`, its keeper, and nothing else, is in it."""

    def __init__(self, pid: int, status_fd: int, ending_fd: int, started: float) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)  # readable when the tree is gone
        self._status_fd = status_fd
        self._ending_fd = ending_fd
        self._started = started
        self._exit: Exit | None = None

    def end(self) -> None:
        """End all of it from within, so that the keeper lives to tell what was used. Not waited for.

        The program first: bwrap ends with it, and everything with bwrap. What the kernel sweeps up when a
        namespace ends it does not count, so its init is not the one to kill.
        """
        if not self.signal_program(signal.SIGKILL) and not _signal_below(self.pid, 1, signal.SIGKILL):
            self.kill()

    def kill(self) -> None:
        """End all of it. The kernel does: `pid` is the init of a namespace around everything."""
        if self._exit is None:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def signal_program(self, number: int) -> bool:
        """Pass a signal on to the plugin's own first process; False if it cannot be found (yet).

        Neither bwrap process passes signals on: the outer one dies of them, the inner init ignores them.
        """
        return _signal_below(self.pid, 3, number)  # keeper, bwrap, its init, the program

    def wait(self) -> Exit:
        """Reap it. Returns when the last process of the tree is gone, since a namespace's init is not
        waitable before its namespace is empty."""
        if self._exit is None:
            _, status, used = os.wait4(self.pid, 0)
            wall = time.monotonic() - self._started
            code = self._reported_code()
            ending = spawner.read_ending(self._ending_fd)
            if ending is not None:
                status = ending.status
                usage = Usage(wall, ending.user, ending.system, ending.max_rss)
            else:  # killed: what the kernel swept up it did not count
                usage = Usage(wall, used.ru_utime, used.ru_stime, used.ru_maxrss * 1024)
            self._exit = Exit(
                code=code,
                reached_exec=code is not None,
                signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                usage=usage,
            )
        return self._exit

    def _reported_code(self) -> int | None:
        """bwrap's status: one JSON document per line; {"exit-code": N} only if the program was executed."""
        raw = b""
        while len(raw) < _STATUS_LIMIT and (part := os.read(self._status_fd, 4096)):
            raw += part
        import json

        for line in raw.splitlines():
            try:
                document = json.loads(line)
            except ValueError:
                continue  # cut short: bwrap was killed while writing
            if isinstance(document, dict) and isinstance(document.get("exit-code"), int):
                return int(document["exit-code"])
        return None

    def close(self) -> None:
        self.kill()
        self.wait()
        for fd in (self.pidfd, self._status_fd, self._ending_fd):
            os.close(fd)


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
        return [int(word) for word in file.read().split()]


def _signal_below(pid: int, generations: int, number: int) -> bool:
    """Signal the first child's first child's … of `pid`; False if there is none."""
    try:
        for _ in range(generations):
            pid, parent = children(pid)[0], pid
        fd = os.pidfd_open(pid)
        try:
            # Looked at again with the descriptor held: the number may have been given to somebody else.
            if pid not in children(parent):
                return False
            signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
    except (IndexError, OSError):
        return False
    return True


@contextmanager
def launched(open_plan: OpenPlan, owner: Owner, bwrap_path: str) -> Iterator[Cell]:
    """Start the plan; whatever happens inside the context, nothing of it is left afterwards."""
    plan = open_plan.plan
    with ExitStack() as stack:
        status_r, status_w = os.pipe2(os.O_CLOEXEC)
        ending_r, ending_w = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, status_w)
        stack.callback(os.close, ending_w)
        slots = bwrap.Slots(
            sources=open_plan.descriptors,
            texts={op.dest: _data(stack, op.content) for op in plan.operations if isinstance(op, Text)},
            seccomp=_data(stack, plan.layers.seccomp_filter) if plan.layers.seccomp_filter else None,
            status=status_w,
        )
        try:
            arguments = _data(stack, _nul_separated(bwrap.options(plan, slots)))
            started = time.monotonic()
            pid = spawner.spawn(_order(plan, slots, arguments, owner, bwrap_path, ending_w))
            cell = Cell(pid, status_r, ending_r, started)
        except BaseException:
            os.close(status_r)
            os.close(ending_r)
            raise
    try:
        yield cell
    finally:
        cell.close()


def _order(
    plan: LaunchPlan, slots: bwrap.Slots, arguments: int, owner: Owner, bwrap_path: str, ending: int
) -> spawner.Order:
    given = (*slots.sources.values(), *slots.texts.values(), slots.status, slots.seccomp, arguments)
    return spawner.Order(
        program=bwrap_path,
        # All that /proc/1/cmdline shows to the plugin.
        argv=("bwrap", "--args", str(arguments), "--", *plan.argv),
        uid=owner.uid,
        gid=owner.gid,
        drop=plan.layers.uid_range is not None,
        keep=tuple(fd for fd in given if fd is not None),
        rlimits=_RLIMITS,
        keyring=plan.layers.session_keyring,
        ending=ending,
        # The uid is given back when the last process that has it is gone, not when the runner is.
        hold=() if owner.lease_fd is None else (owner.lease_fd,),
    )


def _data(stack: ExitStack, content: bytes) -> int:
    """Content as a descriptor. bwrap reads it to the end, so each is for one launch."""
    fd = os.memfd_create("runner", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    write_all(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _nul_separated(words: Sequence[str]) -> bytes:
    if any("\0" in word for word in words):
        raise ValueError("a NUL in an argument would start another option")
    return b"".join(os.fsencode(word) + b"\0" for word in words)
