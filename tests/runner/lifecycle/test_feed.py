"""Feeds and logs: bounded, the oldest is dropped, and the reader is told how much."""

from __future__ import annotations

import pickle

import pytest
import trio
import trio.testing

from runner.lifecycle.exceptions import Overloaded, Unavailable, UnknownPlugin
from runner.lifecycle.feed import LOG_BYTES, FeedSource, LineTimes, LogPiece, StderrLog
from runner.outcome import Outcome


@pytest.mark.trio
async def test_a_slow_reader_misses_the_oldest_and_is_told_how_many() -> None:
    source: FeedSource[int] = FeedSource(3)
    slow, closed = source.subscribe(), source.subscribe()
    closed.close()
    for number in range(5):
        source.tell(number)
    source.close()
    assert [each async for each in slow] == [2, 3, 4] and slow.dropped == 2
    assert [each async for each in closed] == []


@pytest.mark.trio
async def test_a_reader_waits_for_news() -> None:
    source: FeedSource[int] = FeedSource(3)
    feed, read = source.subscribe(), []

    async def reader() -> None:
        read.extend([each async for each in feed])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        source.tell(1)
        await trio.testing.wait_all_tasks_blocked()
        assert read == []
        source.tell(2)
        source.close()
    assert read == [1, 2]


def test_a_log_keeps_its_end() -> None:
    log = StderrLog()
    for number in range(100_000):
        log.add(f"{number:06}\n".encode())
    assert len(log.text) == LOG_BYTES and log.text.endswith("099998\n099999\n")
    mark = log.written
    assert log.since(mark) == "" and log.since(mark - 7) == "099999\n"
    log.add(b"\xff")
    assert log.text.endswith("\n�")


def test_a_log_knows_when_each_line_was_read() -> None:
    now = 1_700_000_000.25
    log, times = StderrLog(lambda: now), LineTimes()
    log.add(b"one\ntwo, which is")
    now += 1
    log.add(b" long\n\nthr\xc3")
    now += 1
    log.add(b"\xa9e")
    lines = "".join(map(times.write, log.lines()))
    assert lines == (
        "2023-11-14T22:13:20.250Z one\n2023-11-14T22:13:20.250Z two, which is long\n"
        "2023-11-14T22:13:21.250Z \n2023-11-14T22:13:21.250Z thrée"
    )
    # What follows goes on in that line.
    assert times.write(LogPiece("!\nfour", now)) == "!\n2023-11-14T22:13:22.250Z four"
    assert times.write(LogPiece("\n", now)) + times.write(LogPiece("", now)) == "\n"


def test_the_times_of_a_log_are_bounded() -> None:
    """A plugin that writes byte by byte: the newest times stay exact, and no line has an earlier one than its
    own."""
    written = 0
    log = StderrLog(lambda: float(written))
    for number in range(20_000):
        written = number
        log.add(b"\n")
    assert len(log._marks) <= 1024
    told = [line.at for line in log.lines()]
    assert (
        len(told) == 20_000
        and told == sorted(told)
        and told[-500:] == [float(n) for n in range(19_500, 20_000)]
    )
    assert all(number <= at for number, at in enumerate(told))


def test_refusals_can_be_sent_to_other_processes() -> None:
    overloaded = Overloaded(Outcome("overloaded", "call", "full", "queue"), 2.5)
    assert pickle.loads(pickle.dumps(overloaded)).retry_after == 2.5
    held = pickle.loads(pickle.dumps(Unavailable("a", "quarantined", "exit:1")))
    assert (held.name, held.state, held.reason) == ("a", "quarantined", "exit:1")
    assert held.outcome.code == "quarantined" and "reset" in held.outcome.hint
    assert pickle.loads(pickle.dumps(UnknownPlugin("a"))).name == "a"
