"""Run a program whose output and duration may be anything, and leave none of its processes."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sandbox import process

MOST_OUTPUT = 4 << 20  # a probe prints some 100 bytes for each attempt
_MOST_COMPLAINT = 4096
_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEFT_SECONDS = 2.0  # until a process that is still there counts as left behind
_GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL: a runner needs some to take its cage down


class BoundedRun(NamedTuple):
    output: bytes
    complaint: str  # the end of its stderr
    status: int | None  # None: it had to be ended
    fault: str = ""  # why it had to be ended, or could not be started
    left_processes: bool = False  # with the word that was asked about; they were ended


def run_bounded(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    uid: int | None = None,
    pass_fds: Sequence[int] = (),
    seconds: float = 120.0,
    most_output: int = MOST_OUTPUT,
    leftovers: str = "",
) -> BoundedRun:
    """Run a program to its end. `env`, `uid`: None for our own. `leftovers`: a word in the command lines of
    processes that it may leave behind.

    If this process is killed, the kernel ends the program. Processes that the program leaves behind become
    ours, and are ended.
    """
    process.load()
    process.adopt_orphans(True)
    before = _children()
    given = memory_file(stdin)
    # Held back while it is started: an exception of a handler that runs right after a fork is lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)

    def prepare() -> None:
        process.die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        child = subprocess.Popen(
            argv,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd="/",
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=prepare,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return BoundedRun(b"", "", None, f"{argv[0]} cannot be started: {error.strerror}")
    finally:
        os.close(given)
    with child:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            run = _collect(child, time.monotonic() + seconds, most_output)
            return run._replace(left_processes=bool(leftovers) and _end_leftovers(leftovers))
        finally:
            _end(child)
            _end_orphans(before)


def memory_file(content: bytes) -> int:
    made = os.memfd_create("attack")
    with open(made, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(made, 0, os.SEEK_SET)
    return made


def _collect(child: subprocess.Popen[bytes], until: float, most_output: int) -> BoundedRun:
    assert child.stdout is not None and child.stderr is not None
    output, complaint, fault = bytearray(), bytearray(), ""
    with selectors.DefaultSelector() as waiting:
        waiting.register(child.stdout, selectors.EVENT_READ, output)
        waiting.register(child.stderr, selectors.EVENT_READ, complaint)
        while waiting.get_map() and not fault:
            # A process that was left behind may keep the pipes open: then the program's own end counts.
            ready = waiting.select(min(0.2, max(0.0, until - time.monotonic())))
            for key, _ in ready:
                if chunk := os.read(key.fd, 65536):
                    key.data.extend(chunk)
                else:
                    waiting.unregister(key.fileobj)
            del complaint[:-_MOST_COMPLAINT]
            if len(output) > most_output:
                fault = f"it printed more than {most_output >> 20} MiB"
            elif not ready and child.poll() is not None:
                break
            elif time.monotonic() > until:
                fault = "it took too long"
    if not fault:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            fault = "it took too long"
    return BoundedRun(
        bytes(output), complaint.decode(errors="replace"), None if fault else child.poll(), fault
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_SECONDS)


def _end_orphans(before: set[int]) -> None:
    """Kill what became our child. Its own children become ours then, and are next. Bounded: some programs
    fork faster."""
    until = time.monotonic() + _GRACE_SECONDS
    while (orphans := _children() - before) and time.monotonic() < until:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _end_leftovers(word: str) -> bool:
    """End the processes with this word in their command lines. Returns whether there were any that did not
    end by themselves: the kernel may still be busy with ending a namespace."""
    until = time.monotonic() + _LEFT_SECONDS
    while (left := _with_word(word)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def _with_word(word: str) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            if word.encode() in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))
