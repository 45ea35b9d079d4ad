"""Stdin on its way to a plugin: every byte, no more than is wanted, and each side sees the other's end."""

from __future__ import annotations

import os
import pty
import select
import time
import tty
from collections.abc import Iterator

import pytest

from sandbox.streams.feed import Feed
from tests.bounds import BOUND_SECONDS


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


class Fed:
    """A Feed with both sides in our hands."""

    def __init__(self, stdin: int) -> None:
        self.forgotten: list[int] = []
        self.feed = Feed(stdin, self.forgotten.append)
        self.plugin = os.dup(self.feed.end)
        os.set_blocking(self.plugin, False)
        self.feed.release()

    def turn(self, wait: float = 0.0) -> int:
        """Look as long as something is ready. Returns how often that was."""
        for count in range(1000):
            poll = select.poll()
            for fd, events in self.feed.interest().items():
                poll.register(fd, events)
            ready = dict(poll.poll(wait * 1000))
            if not ready:
                return count
            self.feed.look(ready, time.monotonic())
        raise AssertionError("it never rests")

    def got(self) -> bytes | None:
        """The bytes that the plugin reads; None: nothing yet."""
        try:
            return os.read(self.plugin, 1 << 20)
        except BlockingIOError:
            return None

    def next(self) -> bytes:
        """A terminal passes written bytes on at a time of its own."""
        until = time.monotonic() + BOUND_SECONDS
        while (data := self.got()) is None and time.monotonic() < until:
            self.turn(0.02)
        assert data is not None
        return data

    def close(self) -> None:
        self.feed.close()
        if self.plugin >= 0:
            os.close(self.plugin)


@pytest.fixture
def piped() -> Iterator[tuple[Fed, int]]:
    read, write = os.pipe()
    fed = Fed(read)
    yield fed, write
    fed.close()
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass  # by the test


def test_every_byte_and_then_the_end(piped: tuple[Fed, int]) -> None:
    fed, write = piped
    said = b"".join(b"%d\n" % number for number in range(9000))
    os.write(write, said)
    fed.turn()
    assert fed.got() == said and fed.got() is None
    os.write(write, b"last, without a newline")
    os.close(write)
    fed.turn()
    assert fed.got() == b"last, without a newline"
    assert (fed.got(), fed.feed.interest(), fed.feed.passed) == (b"", {}, len(said) + 23)
    assert not fed.feed.stream_closed and fed.forgotten == []


def test_a_closed_stdin_is_seen_without_writing(piped: tuple[Fed, int]) -> None:
    fed, write = piped
    assert fed.turn() == 0
    os.close(fed.plugin)
    fed.plugin = -1
    assert fed.turn() == 1
    assert fed.feed.stream_closed and len(fed.forgotten) == 1 and fed.feed.interest() == {}
    os.write(write, b"nobody takes this")
    assert fed.turn() == 0 and len(fed.forgotten) == 1


def test_a_plugin_that_does_not_read_is_waited_for(piped: tuple[Fed, int]) -> None:
    fed, write = piped
    os.set_blocking(write, False)
    taken = 0
    while True:
        try:
            taken += os.write(write, bytes(1 << 16))
        except BlockingIOError:
            if not fed.turn():
                break
    assert taken == 3 << 16  # its pipe, ours, and what is between them
    assert fed.turn(0.1) == 0  # it costs nothing meanwhile
    assert len(fed.got() or b"") == 1 << 16
    assert fed.turn() > 0


def test_no_more_is_read_from_a_terminal_than_the_plugin_takes() -> None:
    ours, theirs = pty.openpty()
    fed = Fed(theirs)
    os.write(ours, b"one\ntwo\nthree\n")
    assert fed.next() == b"one\n"
    assert fed.next() == b"two\n"
    # Two are taken, and the third is still in the terminal, for whoever reads there next.
    os.set_blocking(theirs, False)
    assert os.read(theirs, 100) == b"three\n"
    os.set_blocking(theirs, True)
    os.write(ours, b"\x04")
    assert fed.next() == b"" and fed.feed.interest() == {}
    fed.close()
    os.close(ours)
    os.close(theirs)


def test_keys_of_a_raw_terminal_pass_one_by_one_and_its_end_is_an_end() -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    fed = Fed(theirs)
    for key in (b"a", b"\x03", b"\x04"):
        os.write(ours, key)
        assert fed.next() == key
    os.close(ours)  # it hangs up
    assert fed.next() == b"" and fed.feed.interest() == {}
    fed.close()
    os.close(theirs)
