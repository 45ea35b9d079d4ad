"""The kernel's socket tables, and the time of the next look."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from sandbox.limits import socket_meter, socket_tables
from sandbox.limits.socket_meter import SocketMeter
from sandbox.limits.socket_tables import Shown, SocketTables, held_in, shown_by, unseen_bytes

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: 0100007F:8CA0 00000000:0000 {state} {sent:08X}:{received:08X} 00:00000000 00000000 0 0 1\n"


@pytest.mark.parametrize(
    ("lines", "held"),
    [
        ("", 0),
        (LINE.format(state="01", sent=0, received=0), 4096),
        (LINE.format(state="01", sent=1000, received=500), 5596),
        (LINE.format(state="0A", sent=128, received=7), 4096),  # listening: connections, not bytes
        (LINE.format(state="04", sent=10, received=0) * 3, 3 * 4106),
        (LINE.format(state="06", sent=0, received=0) * 4, 4 * 512),
        ("   0: 0100007F:8C", 0),
    ],
    ids=["none", "empty", "both queues", "listening", "three", "closed", "cut short"],
)
def test_a_table(lines: str, held: int) -> None:
    assert held_in((HEAD + lines).encode().split(b"\n")) == held


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that are never interrupted."""
    monkeypatch.setattr(socket_tables, "_SLICE_SECONDS", math.inf)


def test_our_own_tables(at_once: None) -> None:
    tables = SocketTables(os.getpid)
    before = tables.held()
    assert before is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        with server.accept()[0]:
            client.setblocking(False)
            sent = client.send(bytes(1 << 20))
            # Others on this machine may close theirs meanwhile, but not three times as much.
            assert (tables.held() or 0) - before > sent / 2
    tables.close()
    tables.close()


def test_a_namespace_without_a_process_yet(at_once: None) -> None:
    members: list[int | None] = [None, 2**22 + 1, os.getpid()]
    tables = SocketTables(lambda: members.pop(0))
    assert [tables.held(), tables.held()] == [None, None]
    assert tables.held() is not None
    assert members == []
    tables.close()


@pytest.mark.parametrize(
    ("limit", "held", "wait"),
    [(64 << 20, 0, 0.0625), (1 << 30, 0, 1.0), (64 << 20, 63 << 20, 0.02), (1 << 20, None, 0.02)],
)
def test_the_next_look_is_when_it_could_be_full(
    monkeypatch: pytest.MonkeyPatch, limit: int, held: int | None, wait: float
) -> None:
    monkeypatch.setattr(socket_meter, "monotonic", lambda: 100.0)
    monkeypatch.setattr(socket_meter, "thread_time", lambda: 1.0)
    meter = SocketMeter(limit, lambda: held)
    assert meter.look({}, 100.0) is None and meter.due == 100.02  # not yet
    assert meter.look({}, 101.0) is None
    assert meter.due == pytest.approx(100.0 + wait)


@pytest.mark.parametrize(("took", "wait"), [(0.001, 0.0625), (0.01, 0.2), (5.0, 0.25)])
def test_looking_takes_a_small_part_of_the_time_and_is_never_late(
    monkeypatch: pytest.MonkeyPatch, took: float, wait: float
) -> None:
    """A plugin can make a look slow with many empty sockets."""
    clock = [1.0]
    monkeypatch.setattr(socket_meter, "monotonic", lambda: 100.0)
    monkeypatch.setattr(socket_meter, "thread_time", lambda: clock[0])

    def slow() -> int:
        clock[0] += took
        return 0

    meter = SocketMeter(64 << 20, slow)
    assert meter.look({}, 101.0) is None
    assert meter.due == pytest.approx(100.0 + wait)


def test_more_sockets_than_are_looked_at_are_too_many(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_tables, "_TABLE_BYTES", 10)
    tables = SocketTables(os.getpid)
    assert tables.held() == math.inf
    assert SocketMeter(1 << 40, tables.held).look({}, math.inf) == "memory"
    tables.close()


def test_more_than_the_limit() -> None:
    meter = SocketMeter(1000, lambda: 1001)
    assert meter.look({}, meter.due) == "memory"
    assert SocketMeter(1000, lambda: 1000).look({}, meter.due + 1) is None


COUNTERS = """\
sockets: used 5
TCP: inuse 1 orphan 0 tw 2 alloc 1 mem 3
UDP: inuse 0 mem 4
RAW: inuse 0
"""


def test_the_counters_of_the_machine() -> None:
    pages = 7 * os.sysconf("SC_PAGE_SIZE")
    assert shown_by(COUNTERS) == Shown(5, 5 * 4096 + 2 * 512 + pages)
    assert shown_by(COUNTERS.replace("TCP", "SCTP")) is None
    assert shown_by("") is None


def test_what_the_counters_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that holds as much as it can, and one that waits for connections."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as largest:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            largest.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        sizes = [largest.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
    assert sum(sizes) + 4096 * 512 <= unseen_bytes() < math.inf
    monkeypatch.setattr(socket_tables, "_BUFFER_LIMITS", ("wmem_max", "no such setting"))
    assert unseen_bytes() == math.inf  # then the counters are never enough


@pytest.mark.parametrize("sockets", [0, 10, 1000])
def test_the_tables_are_rarely_read_while_the_counters_are_low(
    monkeypatch: pytest.MonkeyPatch, sockets: int
) -> None:
    """Sockets may hold what the counters do not show. Where it could matter, they are read once a second."""
    limit, unseen, late = 100 << 20, 1 << 20, 10 * 2 << 20
    clock = [100.0]
    read: list[int] = []

    def reads(_: SocketTables) -> Generator[None, None, float]:
        read.append(1)
        yield from ()
        return 0.0

    monkeypatch.setattr(socket_tables, "monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "sysconf", lambda name: 10)  # processors
    monkeypatch.setattr(socket_tables, "unseen_bytes", lambda: unseen)
    monkeypatch.setattr(SocketTables, "_read", reads)
    monkeypatch.setattr(socket_tables, "shown_by", lambda text: shown)
    shown: Shown | None = Shown(sockets, limit // 2)
    tables = SocketTables(os.getpid, limit)
    assert tables.held() == 0.0 and read  # the first look
    sure = limit // 2 - late - sockets * unseen
    for seconds, held, looked in (
        (0.5, limit // 2, False),
        (0.5, limit // 2 + 1, True),
        (0.5, None, True),
        (0.9, sure + 1, False),
        (0.2, sure + 1, True),
        (29.9, max(0, sure), sure < 0),
        (0.2, max(0, sure), sure >= 0),
        (30.1, 0, True),
    ):
        shown = None if held is None else Shown(sockets, held)
        read.clear()
        clock[0] += seconds
        assert tables.held() == (0.0 if looked else held)
        assert bool(read) == looked
    tables.close()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[int]:
    """As the kernel's, of a thousand sockets."""
    file = tmp_path / "tcp"
    file.write_text(HEAD + LINE.format(state="01", sent=1000, received=0) * 1000)
    fd = os.open(file, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_a_look_at_many_sockets_lets_others_have_their_turn(
    table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process waits for all plugins of a host."""
    monkeypatch.setattr(socket_tables, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(socket_tables, "_SLICE_SECONDS", 0)
    tables = SocketTables(os.getpid)
    tables._fds = (table, table)
    for _ in range(2):  # the next look begins anew
        said = [tables.held()]
        while said[-1] == socket_meter.UNFINISHED:
            said.append(tables.held())
        assert len(said) == 2 * (os.fstat(table).st_size // 4096 + 1) + 1
        assert said[-1] == 2 * 1000 * (4096 + 1000)
    with monkeypatch.context() as patch:
        patch.setattr(socket_tables, "_SLICE_SECONDS", math.inf)
        assert tables.held() == said[-1]  # the control: at once
    # A look that has lasted long goes on without a pause: others would have time to move what was not read.
    monkeypatch.setattr(socket_tables, "_LONGEST_LOOK_SECONDS", 0)
    assert tables.held() == said[-1]


def test_a_look_ends_when_there_is_too_much(
    table: int, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_tables, "_PIECE_BYTES", 4096)
    tables = SocketTables(os.getpid, 100 * (4096 + 1000))
    tables._fds = (table,)
    held = tables.held()
    assert held is not None and held > 100 * (4096 + 1000)
    assert os.lseek(table, 0, os.SEEK_CUR) < os.fstat(table).st_size / 5


def test_a_look_that_is_not_finished_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = [1.0], [socket_meter.UNFINISHED] * 3 + [1001.0]
    monkeypatch.setattr(socket_meter, "monotonic", lambda: 100.0)
    monkeypatch.setattr(socket_meter, "thread_time", lambda: clock[0])

    def held() -> float:
        clock[0] += 0.001
        return left.pop(0)

    meter = SocketMeter(1000, held)
    for now in (101.0, 102.0, 103.0):
        assert (meter.look({}, now), meter.due) == (None, now)
    assert meter.look({}, 104.0) == "memory"
    # All parts count as one look, which should take a small part of the time.
    assert meter.due == pytest.approx(100.0 + 4 * 0.001 / 0.05)


def test_a_look_at_no_sockets_costs_little(at_once: None) -> None:
    """Reading the tables costs the same for any number of sockets."""
    tables = SocketTables(os.getpid, 1 << 40)
    tables.held()
    began = time.thread_time()
    for _ in range(100):
        tables.held()
    assert time.thread_time() - began < 0.1
    tables.close()
