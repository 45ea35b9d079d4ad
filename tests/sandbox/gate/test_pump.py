"""Bytes between two connections, over this machine's loopback."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from sandbox.gate.loop import Loop
from sandbox.gate.pump import ByteMeter, PipePool, PumpEnding, SplicePump
from tests.tables import wait_for

MUCH = 8 << 20


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    return one, other


class Bench:
    """A plugin's end and a server's end, with the pump between them."""

    def __init__(
        self, most: int | None = None, rate: int | None = None, idle: float = 1000.0, first: bytes = b""
    ) -> None:
        self.loop = Loop()
        self.meter = ByteMeter(self.loop, most, rate)
        self.pool = PipePool()
        self.plugin, client = tcp_pair()
        self.server, upstream = tcp_pair()
        for each in (self.plugin, self.server, client, upstream):
            each.setblocking(False)
        self.endings: list[PumpEnding] = []
        self.inner = (client, upstream)
        self.pump = SplicePump(
            self.loop, self.pool, self.meter, client, upstream, first, idle, self.endings.append
        )

    def turn(self, times: int = 20) -> None:
        for _ in range(times):
            self.loop.run_once(0)

    def until(self, condition: Callable[[], object]) -> None:
        """What is on its way has a moment of its own to arrive, on loopback too."""
        while not condition():
            self.loop.run_once(0.05)

    def is_at_rest(self, seconds: float) -> bool:
        """Whether it has nothing to do for so long: it waits instead of turning round."""
        before = self.loop.now
        self.loop.run_once(seconds)
        return self.loop.now - before >= 0.9 * seconds

    def receive(self, end: socket.socket, count: int) -> bytes:
        """Until so many bytes are there, or the end."""
        found = b""
        while len(found) < count:
            self.loop.run_once(0)
            try:
                piece = end.recv(1 << 20)
            except BlockingIOError:
                continue
            if not piece:
                break
            found += piece
        return found

    def close(self) -> None:
        self.pump.end("the test is over")
        self.turn(1)
        self.plugin.close()
        self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_bytes_go_both_ways(bench: Bench) -> None:
    bench.plugin.send(b"ask")
    assert bench.receive(bench.server, 3) == b"ask"
    bench.server.send(b"answer")
    assert bench.receive(bench.plugin, 6) == b"answer"
    assert bench.pump.counted == (3, 6)


def test_what_was_read_before_comes_first() -> None:
    bench = Bench(first=b"first ")
    bench.plugin.send(b"second")
    assert bench.receive(bench.server, 12) == b"first second"
    bench.close()


@pytest.mark.parametrize("who", ["plugin", "server"])
def test_a_half_close_is_passed_on_and_the_other_way_stays_open(bench: Bench, who: str) -> None:
    one, other = (bench.plugin, bench.server) if who == "plugin" else (bench.server, bench.plugin)
    one.send(b"all")
    one.shutdown(socket.SHUT_WR)
    assert bench.receive(other, 10) == b"all"
    other.send(b"late answer")
    assert bench.receive(one, 11) == b"late answer"
    assert bench.endings == []
    other.close()
    assert bench.receive(one, 1) == b""
    bench.until(lambda: bench.endings)
    sent = (3, 11) if who == "plugin" else (11, 3)
    assert bench.endings == [PumpEnding("", *sent)]
    assert [each.fileno() for each in bench.inner] == [-1, -1]


def test_an_end_in_the_last_round_is_passed_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.gate.pump._MOST_ROUNDS", 1)
    bench.plugin.send(b"all")
    bench.plugin.shutdown(socket.SHUT_WR)
    assert bench.receive(bench.server, 4) == b"all"


@pytest.mark.parametrize("who", ["plugin", "server"])
def test_a_reset_is_passed_on(bench: Bench, who: str) -> None:
    """Or the other end would take half of an answer for all of it."""
    one, other = (bench.plugin, bench.server) if who == "plugin" else (bench.server, bench.plugin)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    one.close()
    bench.until(lambda: bench.endings)
    with pytest.raises(ConnectionResetError):
        bench.receive(other, 1)
    assert len(bench.endings) == 1 and "reset" in bench.endings[0].reason


def test_a_slow_reader_stops_the_writer(bench: Bench) -> None:
    written = 0
    for _ in range(2000):
        try:
            written += bench.server.send(bytes(65536))
        except BlockingIOError:
            bench.turn(1)
    held = bench.pump._down
    assert 0 < held.pending <= 256 << 10
    assert wait_for(lambda: bench.is_at_rest(0.01))
    assert len(bench.receive(bench.plugin, written)) == written
    assert held.pipe is None
    assert len(bench.pool._spare) == 1


def test_a_gone_reader_of_a_full_connection_costs_nothing(bench: Bench) -> None:
    """EPOLLHUP is reported again and again, whether asked for or not."""
    bench.server.shutdown(socket.SHUT_WR)
    bench.turn()
    while True:  # the server reads nothing
        try:
            bench.plugin.send(bytes(65536))
        except BlockingIOError:
            before = bench.pump.counted
            bench.turn(5)
            if bench.pump.counted == before:
                break
    bench.plugin.shutdown(socket.SHUT_WR)
    bench.turn(5)
    assert wait_for(lambda: bench.is_at_rest(0.02))
    bench.server.setblocking(False)
    bench.receive(bench.server, MUCH * 8)
    bench.until(lambda: bench.endings)
    assert [ending.reason for ending in bench.endings] == [""]


def test_the_bytes_limit_is_met_exactly() -> None:
    bench = Bench(most=100_000)
    bench.plugin.send(bytes(99_999))
    bench.until(lambda: sum(bench.pump.counted) == 99_999)
    bench.plugin.send(bytes(2))
    bench.until(lambda: bench.endings)
    assert sum(bench.pump.counted) == 100_000 and bench.meter.spent
    assert "bytes limit" in bench.endings[0].reason
    bench.close()


def test_one_byte_below_the_bytes_limit_nothing_happens() -> None:
    bench = Bench(most=100_000)
    bench.plugin.send(bytes(99_999))
    assert len(bench.receive(bench.server, 99_999)) == 99_999
    bench.turn()
    assert bench.endings == []
    bench.close()


def test_the_rate_limit_counts_both_ways_and_loses_nothing() -> None:
    bench = Bench(rate=1_000_000)
    began = bench.loop.now
    bench.plugin.send(bytes(100_000))
    bench.server.send(bytes(100_000))
    assert len(bench.receive(bench.server, 100_000)) == 100_000
    assert len(bench.receive(bench.plugin, 100_000)) == 100_000
    # 100 000 bytes may go at once; the others need a tenth of a second, on every machine.
    assert bench.loop.now - began >= 0.09
    bench.close()


def test_an_idle_connection_is_ended() -> None:
    bench = Bench(idle=100.0)
    bench.loop.now += 99
    bench.pump._on_idle()
    assert bench.endings == []
    bench.loop.now += 1
    bench.pump._on_idle()
    assert "idle limit" in bench.endings[0].reason
    with pytest.raises(ConnectionResetError):
        bench.receive(bench.plugin, 1)
    bench.close()


def test_many_bytes_stay_the_same(bench: Bench) -> None:
    data = os.urandom(1 << 20) * 2
    sent = 0
    found = bytearray()
    while len(found) < len(data):
        if sent < len(data):
            try:
                sent += bench.plugin.send(data[sent : sent + 100_000])
            except BlockingIOError:
                pass
        bench.loop.run_once(0)
        try:
            found += bench.server.recv(1 << 20)
        except BlockingIOError:
            pass
    assert bytes(found) == data


def test_pipes_are_given_back_empty_only() -> None:
    pool = PipePool()
    first = pool.take()
    os.write(first[1], b"someone else's")
    pool.give_back(first, empty=False)
    with pytest.raises(OSError, match="Bad file"):
        os.write(first[1], b"x")
    second = pool.take()
    pool.give_back(second, empty=True)
    assert pool.take() == second
    pool.give_back(second, empty=False)


def test_only_some_pipes_are_large() -> None:
    pool = PipePool()
    pipes = [pool.take() for _ in range(20)]
    sizes = [fcntl.fcntl(pipe[0], fcntl.F_GETPIPE_SZ) for pipe in pipes]
    assert sizes.count(256 << 10) == 8 and sizes.count(64 << 10) == 12
    for pipe in (pipes[19], *pipes[:19]):  # a small one, then the large ones
        pool.give_back(pipe, empty=True)
    taken = [pool.take() for _ in range(8)]
    assert set(taken[:7]) <= set(pipes[:8]) and taken[7] == pipes[19]
    for pipe in taken:
        pool.give_back(pipe, empty=False)
    fresh = pool.take()  # there is room for a large one again
    assert fcntl.fcntl(fresh[0], fcntl.F_GETPIPE_SZ) == 256 << 10
    pool.give_back(fresh, empty=False)


def test_a_socket_that_the_kernel_does_not_watch_again_ends_this_connection_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "")

    bench.loop.forget(bench.inner[0].fileno())  # as after a hang-up with nothing to do
    monkeypatch.setattr(bench.loop, "watch", refuse)
    bench.pump._settle()
    bench.turn()
    assert [ending.reason for ending in bench.endings] == [f"broke: {os.strerror(errno.ENOSPC)}"]
    assert [each.fileno() for each in bench.inner] == [-1, -1]
    bench.plugin.close()
    bench.server.close()
