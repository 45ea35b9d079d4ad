"""When the sockets of a plugin are looked at, and what is found out without looking."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Generator
from typing import Any

import pytest

from sandbox.limits import meter as meters
from sandbox.limits import socket_meter
from sandbox.limits.cgroup import ChargedMemory
from sandbox.limits.socket_meter import SocketCounters, SocketMeter, largest_socket_bytes, parse_sockstat

MIB = 1 << 20


class Group:
    """Stands for a cgroup: what it counts is set by the tests."""

    counts_memory = True

    def __init__(self, seconds: float | None = 0.0, memory: int = 0) -> None:
        self.seconds = seconds
        self.memory = memory

    def cpu(self) -> float | None:
        return self.seconds

    def charged(self) -> ChargedMemory:
        return ChargedMemory(self.memory)


class Scripted(SocketMeter):
    """With counters and tables that the tests set."""

    def __init__(self, limit: int, group: Any = None, *, each: float = math.inf, **options: Any) -> None:
        super().__init__(limit, lambda: 1, lambda: self.pids, group, **options)
        self.pids = list(range(100))  # too many to ask for their time
        self._each = each
        self.shown: SocketCounters | None = SocketCounters(1, 0, 0)
        self.in_sockets = 0.0
        self.steps = 0
        self.reads = 0

    def _open(self) -> bool:
        return True

    def _open_tables(self) -> bool:
        return True

    def _shown(self) -> SocketCounters | None:
        return self.shown

    def _read(self, charged: float, closed: int, kernel: int) -> Generator[None, None, float]:
        self.reads += 1
        for _ in range(self.steps):
            yield
        return charged + closed + self.in_sockets


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which only the tests advance."""
    now = [100.0]
    for module in (socket_meter, meters):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(socket_meter, "thread_time", lambda: 1.0)
    return now


@pytest.mark.parametrize(
    ("limit", "held", "wait"),
    [(64 * MIB, 0, 0.0625), (1024 * MIB, 0, 1.0), (64 * MIB, 63 * MIB, 0.02)],
)
def test_the_next_look_is_when_it_could_be_full(
    clock: list[float], limit: int, held: int, wait: float
) -> None:
    meter = Scripted(limit)
    meter.in_sockets = held
    for now, reads in ((100.0, 0), (101.0, 1)):  # at first not yet
        assert (meter.look({}, now), meter.reads) == (None, reads)
    assert meter.due == pytest.approx(100.0 + wait)


@pytest.mark.parametrize(("took", "wait"), [(0.001, 0.0625), (0.01, 0.2), (5.0, 0.25)])
def test_looking_takes_a_small_part_of_the_time_and_is_never_late(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, took: float, wait: float
) -> None:
    """A plugin can make a look slow with many empty sockets."""
    times = iter((1.0, 1.0 + took))
    monkeypatch.setattr(socket_meter, "thread_time", lambda: next(times))
    meter = Scripted(64 * MIB)
    assert meter.look({}, 101.0) is None
    assert meter.due == pytest.approx(100.0 + wait)


def test_more_than_the_limit(clock: list[float]) -> None:
    """Of the memory that the cgroup charges, and what the sockets hold."""
    for charged, held, found in ((0, 1001, "memory"), (600, 401, "memory"), (600, 400, None)):
        meter = Scripted(1000, Group(memory=charged))
        meter.in_sockets = held
        assert meter.look({}, 101.0) == found
        assert meter.peaks() == {"memory": charged + held}
    without = Scripted(1000)
    without.in_sockets = 1000
    assert without.look({}, 101.0) is None and without.peaks() == {}  # no memory of processes is in it
    without.in_sockets = 1001
    clock[0] += 2.0
    assert without.look({}, clock[0]) == "memory" and without.peaks() == {"memory": 1001}


def test_few_sockets_are_not_looked_at(clock: list[float]) -> None:
    """As long as it would not matter if each held all it can."""
    meter = Scripted(100 * MIB, Group(memory=40 * MIB), each=10 * MIB)
    for sockets, closed, reads in ((0, 0, 0), (6, 0, 0), (6, 1, 1), (7, 0, 1)):
        meter.reads = 0
        meter.shown = SocketCounters(sockets, closed, 0)
        meter._last_look = socket_meter._LastLook()
        clock[0] += 10.0
        meter.look({}, clock[0])
        assert meter.reads == reads, (sockets, closed)


def test_a_plugin_that_uses_no_processor_time_is_not_looked_at(clock: list[float]) -> None:
    group = Group()
    meter = Scripted(1024 * MIB, group)
    for seconds, used, held, reads in (
        (0, 0.0, 512 * MIB, 1),
        (2, 0.12, 512 * MIB, 0),  # it takes an eighth of a second to fill the other half
        (2, 0.01, 0, 1),
        (2, 0.25, 0, 0),
        (29, 0.0, 0, 1),  # others may have sent something
    ):
        meter.reads = 0
        meter.in_sockets = held
        clock[0] += seconds
        group.seconds = (group.seconds or 0) + used
        meter.look({}, clock[0] + 1)
        assert meter.reads == reads, (seconds, used)


def test_a_plugin_that_does_nothing_is_looked_at_later(clock: list[float]) -> None:
    group = Group()
    meter, without, empty = (Scripted(64 * MIB, each) for each in (group, None, None))
    empty.shown = SocketCounters(0, 0, 0)
    for used, queued, wait in ((0.0, 0, 0.0625), (0.0009, 0, 0.25), (0.002, 1, 0.0625), (0.0, 1, 0.25)):
        clock[0] += 2.0
        group.seconds = (group.seconds or 0) + used
        without.shown = SocketCounters(1, 0, queued)
        for each, pause in ((meter, wait), (without, wait), (empty, 0.25)):
            each.look({}, clock[0])
            assert each.due == pytest.approx(clock[0] + pause)


def test_where_nobody_counts_processor_time(clock: list[float]) -> None:
    meter = Scripted(64 * MIB)
    for seconds, shown, reads in (
        (1.0, SocketCounters(10, 0, 0), 1),
        (0.5, SocketCounters(14, 0, 8 * MIB), 0),
        (0.1, SocketCounters(15, 0, 0), 1),
        (0.1, SocketCounters(15, 0, 8 * MIB + 1), 1),
        (1.0, SocketCounters(1, 0, 0), 1),
        (0.1, None, 1),  # a kernel that does not tell
        (0.1, None, 0),
    ):
        meter.reads = 0
        meter.shown = shown
        clock[0] += seconds
        meter.look({}, clock[0])
        assert meter.reads == reads, (seconds, shown)


def test_the_processes_tell_their_time(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = {1: 100, 2: 0}
    monkeypatch.setattr(socket_meter, "_ticks_of", lambda pid: ticks[pid])
    meter = Scripted(1024 * MIB)
    second = os.sysconf("SC_CLK_TCK")
    for pids, used, reads in (
        ([1, 2], 0.0, 1),
        ([1, 2], 0.2, 0),
        ([1, 2], 0.1, 1),
        ([1], 0.0, 1),  # who knows how long the other one has run
        ([1], 0.0, 0),
    ):
        meter.reads, meter.pids = 0, pids
        ticks[1] += int(used * second)
        clock[0] += 2.0
        meter.look({}, clock[0])
        assert meter.reads == reads, (pids, used)


def test_the_time_of_a_process() -> None:
    began = time.process_time()
    before = socket_meter._ticks_of(os.getpid())
    while time.process_time() < began + 0.05:
        pass
    assert socket_meter._ticks_of(os.getpid()) >= before + 0.03 * os.sysconf("SC_CLK_TCK")
    assert socket_meter._ticks_of(2**22 + 1) == 0


def test_as_long_as_sockets_are_missing_the_next_look_is_soon(clock: list[float]) -> None:
    class Unsure:
        is_sure = False

    meter = Scripted(1024 * MIB, Group())
    meter._tables = Unsure()  # type: ignore[assignment]
    for _ in range(2):
        meter.reads = 0
        clock[0] += 2.0
        meter.look({}, clock[0])
        assert meter.reads
    Unsure.is_sure = True
    for reads in (1, 0):
        meter.reads = 0
        clock[0] += 2.0
        meter.look({}, clock[0])
        assert meter.reads == reads


def test_a_look_at_many_sockets_lets_others_have_their_turn(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process waits for all plugins of a host."""
    times = iter(range(100))
    monkeypatch.setattr(socket_meter, "thread_time", lambda: next(times) * 0.001)
    monkeypatch.setattr(meters, "_SLICE_SECONDS", 0)
    meter = Scripted(1000)
    meter.steps, meter.in_sockets = 3, 1001
    for now in (100.1, 100.2, 100.3):
        clock[0] = now
        assert (meter.look({}, now), meter.due) == (None, now)
    assert meter.look({}, 100.4) == "memory" and meter.reads == 1
    # All parts count as one look, which should take a small part of the time.
    assert meter.due == pytest.approx(100.3 + 4 * 0.001 / 0.05)
    # A look that has lasted long goes on without a pause: others would have time to move what was not read.
    monkeypatch.setattr(socket_meter, "_LONGEST_LOOK_SECONDS", 0)
    assert meter.look({}, 200.0) == "memory" and meter.reads == 2


COUNTERS = """\
sockets: used 5
TCP: inuse 1 orphan 0 tw 2 alloc 1 mem 3
UDP: inuse 0 mem 4
RAW: inuse 0
"""


def test_the_counters_of_the_machine() -> None:
    assert parse_sockstat(COUNTERS) == SocketCounters(5, 2 * 512, 7 * os.sysconf("SC_PAGE_SIZE"))
    assert parse_sockstat(COUNTERS.replace("TCP", "SCTP")) is None
    assert parse_sockstat("") is None


def test_what_one_socket_can_hold_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as largest:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            largest.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        sizes = [largest.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
    assert sum(sizes) + 4096 * 512 <= largest_socket_bytes() < math.inf
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    assert largest_socket_bytes() == math.inf  # then the number of sockets is never enough


def test_a_namespace_without_a_process_yet() -> None:
    members: list[int | None] = [None, 2**22 + 1, os.getpid()]
    meter = SocketMeter(1 << 40, lambda: members.pop(0), list)
    for _ in range(3):
        assert meter.look({}, math.inf) is None
    assert members == [] and meter._counters is not None
    meter.close()
    meter.close()


def test_a_look_at_no_sockets_costs_little() -> None:
    """Listing them costs the same for any number of sockets."""
    meter = SocketMeter(1 << 50, os.getpid, list)
    meter.look({}, math.inf)
    began = time.thread_time()
    for _ in range(100):
        meter.look({}, math.inf)
    assert time.thread_time() - began < 0.1
    meter.close()
