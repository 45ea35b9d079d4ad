"""A stream given away is closed here, a kept one stays open, and no descriptor is left over."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.streams.handover import hand_over


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


def is_null(fd: int) -> bool:
    return os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev


def test_a_pipe_is_opened_anew_and_given_away() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with hand_over([write]) as handover:
        end = handover.end(write)
        assert end != write and os.fstat(end).st_ino == os.fstat(write).st_ino
        assert not os.get_blocking(end)  # with the caller's flags
        os.set_blocking(end, True)
        assert not os.get_blocking(write)  # which it does not share
        plugin = os.dup(end)
        handover.give_away()
        assert is_null(write)
        fcntl.fcntl(plugin, fcntl.F_SETPIPE_SZ, 4096)
        os.write(plugin, b"last")
        os.close(plugin)
        assert (os.read(read, 100), os.read(read, 100)) == (b"last", b"")  # the end is seen
    assert fcntl.fcntl(read, fcntl.F_GETPIPE_SZ) == 1 << 16
    os.close(read)
    os.close(write)


def test_a_kept_stream_stays_and_has_no_flags_of_the_plugins() -> None:
    read, write = os.pipe()
    with hand_over([write], keep=[write]) as handover:
        handover.give_away()
        os.write(write, b"the runner's own word")
    assert os.read(read, 100) == b"the runner's own word"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_files_and_named_pipes_are_the_callers_own(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "fifo":
        os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with hand_over([fd]) as handover:
        assert handover.end(fd) == fd
        handover.give_away()
        assert not is_null(fd)
        os.set_blocking(fd, False)
    assert os.get_blocking(fd)
    os.close(fd)


def test_a_socket_of_our_own_is_given_away() -> None:
    """Our parent does not have it. test_handover_flags.py shows that a shared one is kept."""
    ours, theirs = socket.socketpair()
    fd = theirs.detach()
    with hand_over([fd]) as handover:
        assert handover.end(fd) == fd and stat.S_ISSOCK(os.fstat(fd).st_mode)
        plugin = os.dup(fd)
        handover.give_away()
        os.close(plugin)
        assert ours.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            ours.send(b"x")
    ours.close()
    os.close(fd)


def test_a_launch_that_fails_gives_nothing_away() -> None:
    read, write = os.pipe()
    with pytest.raises(KeyError), hand_over([read, write]):
        raise KeyError("ours")
    os.write(write, b"still here")
    assert os.read(read, 100) == b"still here"
    os.close(read)
    os.close(write)
