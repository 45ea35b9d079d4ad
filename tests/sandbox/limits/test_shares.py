"""Shares of the machine, the kernel's counters, and what a process holds."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from sandbox.limits.assigned import Shares
from sandbox.limits.meter import MACHINE_SHARE, LazyMeter, Meter
from sandbox.limits.shares import (
    ShareMeter,
    ShareSources,
    can_hold_files,
    count_files,
    files_in_use,
    is_orphan,
    shares_of,
)
from tests import elsewhere
from tests.conftest import Caller

Result = TypeVar("Result")

ROW = b"   1: 0100007F:EC22 0100007F:DA5D %s 00001C01:00000000 %s:00000012 00000000     0        0 %s 2 0 20"
_CLONE_FILES = 0x400


def finish(counting: Generator[None, None, Result]) -> Result:
    while True:
        try:
            next(counting)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def test_a_quarter_of_what_the_machine_has() -> None:
    whole, quarter = shares_of(1.0), shares_of(0.25)
    assert quarter.socket_bytes == whole.socket_bytes // 4 > 0 and quarter.orphans == whole.orphans // 4 > 0
    most = int(Path("/proc/sys/fs/file-max").read_text())
    assert quarter.files == (most // 4 if most < 1 << 40 else None)
    assert quarter.describe("fs.file-max") == "25% of fs.file-max"


def test_memory_that_bounds_the_files_itself() -> None:
    shares = Shares(0.25, 1000, 0, 0)
    assert can_hold_files(shares, None) and can_hold_files(shares, 1 << 20)
    assert not can_hold_files(shares, 1000 * 192)
    assert not can_hold_files(shares._replace(files=None), None)


@pytest.mark.parametrize(
    ("state", "timer", "inode", "counted"),
    [
        (b"04", b"01", b"0", True),  # FIN_WAIT1, which sends again and again
        (b"04", b"04", b"0", True),
        (b"05", b"02", b"0", True),  # FIN_WAIT2 with TCP_LINGER2
        (b"05", b"03", b"0", False),  # FIN_WAIT2 that became TIME_WAIT
        (b"06", b"03", b"0", False),
        (b"01", b"00", b"0", False),  # not accepted yet
        (b"08", b"00", b"0", False),
        (b"04", b"01", b"4711", False),  # shut down, and a program still has it
    ],
)
def test_a_row_of_a_table(state: bytes, timer: bytes, inode: bytes, counted: bool) -> None:
    assert is_orphan(ROW % (state, timer, inode)) == counted


def test_a_row_that_is_cut_short() -> None:
    assert not is_orphan(b"") and not is_orphan(ROW[:60])


def closed_connections() -> list[int]:
    """In a network of its own: the closed connections in its tables, before and after it makes 20, and the
    counters that it is shown."""
    import ctypes
    import fcntl
    import os
    import socket
    import struct
    from contextlib import ExitStack

    from sandbox.limits.shares import count_orphans, sockets_in_use

    assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x40000000) == 0  # with a user namespace
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS: up
    before = finish(count_orphans(os.getpid()))
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        server.bind(("127.0.0.1", 0))
        server.listen()
        for _ in range(20):
            with socket.create_connection(server.getsockname()) as client:
                stack.enter_context(server.accept()[0])
                client.setblocking(False)
                try:
                    while True:
                        client.send(bytes(1 << 16))
                except BlockingIOError:
                    pass
        return [before, finish(count_orphans(os.getpid())), *map(int, sockets_in_use())]


@pytest.mark.needs("user")
def test_connections_of_ours_that_were_closed(runner_as_user: Caller) -> None:
    """Every namespace shows the orphans of all in its counters, and its own in its tables."""
    before, after, used, orphans = elsewhere.run(runner_as_user, closed_connections, using=(finish,))
    assert (before, after) == (0, 20)
    assert orphans >= 20 and used > 0


@contextmanager
def thread_with_its_own_table(count: int) -> Iterator[bool]:
    """A thread that shares no descriptors with the others, and opens so many."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened, over, apart = threading.Event(), threading.Event(), [False]

    def hold() -> None:
        apart[0] = libc.unshare(_CLONE_FILES) == 0
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)] if apart[0] else []
        opened.set()
        over.wait()
        for fd in fds:
            os.close(fd)

    thread = threading.Thread(target=hold)
    thread.start()
    opened.wait()
    try:
        yield apart[0]
    finally:
        over.set()
        thread.join()


def test_files_of_a_process() -> None:
    own = os.getpid()

    def count(enough: int = 10**6) -> int:
        return finish(count_files(lambda: [own], enough))

    before = count()
    assert 0 < before <= 10**6 and count(5) > 5
    maps = []
    for _ in range(50):  # mapped, and the descriptor closed
        with open("/usr/bin/env", "rb") as file:
            maps.append(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ))
    mapped = count()
    assert mapped >= before + 50
    for each in maps:
        each.close()
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(open(os.devnull, "rb"))
        opened = count()
        assert opened >= before + 50
        waiting = [threading.Event() for _ in range(8)]
        threads = [threading.Thread(target=each.wait) for each in waiting]
        for thread in threads:
            thread.start()
        # Threads that share a table do not count it again. A thread's stack is no file.
        assert count() < opened + 50
        for event, thread in zip(waiting, threads, strict=True):
            event.set()
            thread.join()
        with thread_with_its_own_table(100) as apart:
            assert apart and count() >= opened + 50 + 100


def test_processes_that_end_and_begin_while_they_are_counted() -> None:
    looks = iter([[os.getpid(), 4_194_305], [os.getpid(), os.getppid()], [os.getpid(), os.getppid()]])
    alone = finish(count_files(lambda: [os.getpid()], 10**6))
    assert finish(count_files(lambda: next(looks), 10**6)) > alone


# --- the meter --------------------------------------------------------------------------------------------


def looked(meter: ShareMeter) -> str | None:
    """The next finished look. Each look begins at a time when it is due."""
    while True:
        found = meter.look({}, meter.due)
        if found is not None or meter.due > 0:
            return found


def test_a_number_is_only_looked_at_more_closely_if_the_machine_shows_more_than_the_share() -> None:
    asked: list[str] = []

    def processes() -> list[int]:
        asked.append("processes")
        return [os.getpid()]

    def socket_bytes() -> Generator[None, None, float]:
        asked.append("sockets")
        yield
        return 1 << 60

    watched = ShareSources(processes, socket_bytes, None)
    roomy = Shares(0.5, int(files_in_use()) * 4 + 10**6, 1 << 50, 1 << 50)
    assert looked(ShareMeter(roomy, watched)) is None and asked == []
    meter = ShareMeter(roomy._replace(files=3), watched)
    assert looked(meter) == MACHINE_SHARE and set(asked) == {"processes"}
    assert " open and mapped files, of 3 (50% of fs.file-max)" in meter.why
    assert looked(ShareMeter(roomy._replace(files=None), watched)) is None


def test_a_machine_without_a_file_left() -> None:
    """Only root can still look at a plugin then. What cannot be counted counts as too much."""
    meter = ShareMeter(Shares(1.0, 1, 1 << 50, 1 << 50), ShareSources(list, None, None))
    assert looked(meter) == MACHINE_SHARE and meter.why.startswith("no file can be opened on this machine")
    shares = Shares(1e-6, 1, 1 << 50, 1 << 50)  # a machine with a million files
    assert looked(ShareMeter(shares, ShareSources(list, None, None))) is None


def test_a_meter_that_is_made_later() -> None:
    made: list[Meter] = []

    class Made(Meter):
        due, why = 7.0, "because"

        def look(self, ready: object, now: float) -> str | None:
            return MACHINE_SHARE

    def make() -> Meter:
        made.append(Made())
        return made[0]

    meter = LazyMeter(100.0, make)
    assert meter.look({}, meter.due - 1) is None and made == []
    assert meter.look({}, meter.due) == MACHINE_SHARE
    assert (meter.due, meter.why, len(made)) == (7.0, "because", 1)
    assert meter.look({}, 8.0) == MACHINE_SHARE and len(made) == 1
