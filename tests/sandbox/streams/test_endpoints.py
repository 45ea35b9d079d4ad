"""Reading from a caller's streams without blocking. test_relay.py has the writing."""

from __future__ import annotations

import os
import pty
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.streams.endpoints import StreamSource, source_for

Make = Callable[[Path], tuple[int, int]]  # where to read, where to write


def pipe(tmp_path: Path) -> tuple[int, int]:
    return os.pipe()


def fifo(tmp_path: Path) -> tuple[int, int]:
    os.mkfifo(tmp_path / "fifo")
    read = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    write = os.open(tmp_path / "fifo", os.O_WRONLY)
    os.set_blocking(read, True)
    return read, write


def connection(tmp_path: Path) -> tuple[int, int]:
    one, other = socket.socketpair()
    return one.detach(), other.detach()


def terminal(tmp_path: Path) -> tuple[int, int]:
    leader, follower = pty.openpty()
    return follower, leader


@pytest.fixture(params=[pipe, fifo, connection, terminal])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StreamSource, int, int, str]]:
    read, write = request.param(tmp_path)
    source = source_for(read)
    yield source, read, write, request.param.__name__
    source.close()
    for fd in (read, write):
        with suppress(OSError):  # closed by the test
            os.close(fd)


def is_ready(source: StreamSource, seconds: float = 10.0) -> bool:
    poll = select.poll()
    poll.register(source.fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_reading_never_blocks(ends: tuple[StreamSource, int, int, str]) -> None:
    source, read, write, _ = ends
    with pytest.raises(BlockingIOError):
        source.read(10)
    os.write(write, b"hello\n")
    assert is_ready(source) and source.read(3) == b"hel" and source.read(100) == b"lo\n"
    with pytest.raises(BlockingIOError):
        source.read(10)
    assert os.get_blocking(read)  # the caller's own, and others rely on it


def test_another_reader_was_faster(ends: tuple[StreamSource, int, int, str]) -> None:
    source, read, write, _ = ends
    os.write(write, b"hello\n")
    assert is_ready(source)
    assert os.read(read, 100) == b"hello\n"
    with pytest.raises(BlockingIOError):
        source.read(10)


def test_the_end(ends: tuple[StreamSource, int, int, str]) -> None:
    source, _, write, kind = ends
    os.write(write, b"last\n")
    os.close(write)
    if kind == "terminal":
        assert is_ready(source)
        with suppress(OSError):  # a line that hung up says so, or that it has ended
            while source.read(100):
                pass
        return
    assert is_ready(source) and source.read(100) == b"last\n"
    assert is_ready(source) and source.read(100) == b""


def test_a_named_pipe_that_ended_before_the_first_read(tmp_path: Path) -> None:
    read, write = fifo(tmp_path)
    os.close(write)
    source = source_for(read)
    assert is_ready(source) and source.read(10) == b""
    source.close()
    os.close(read)


def test_files_and_devices(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    for path, expected in ((tmp_path / "file", [b"te", b"xt", b""]), (Path("/dev/null"), [b""])):
        fd = os.open(path, os.O_RDONLY)
        source = source_for(fd)
        assert [source.read(2) for _ in expected] == expected
        os.close(fd)


def test_an_unreadable_stream_counts_as_ended_and_is_not_reopened(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"private")
    source = source_for(write)
    assert is_ready(source) and source.read(10) == b""
    source.close()
    assert os.read(read, 10) == b"private"
    os.close(read)
    os.close(write)
