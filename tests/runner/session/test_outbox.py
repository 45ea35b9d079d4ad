"""The outbox writes frames for a plugin by priority, whole, and at once if the pipe has room."""

from __future__ import annotations

import os
import select
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import get_args

import pytest
import trio
import trio.testing

from runner.protocol.dialect import Lane, Send
from runner.protocol.memory import delivery_cost
from runner.session.outbox import (
    MOST_EVENTS,
    MOST_KEYS,
    MOST_REPLIES,
    MOST_REPLY_BYTES,
    Outbox,
    QueuedFrame,
    WriteStalled,
)

pytestmark = pytest.mark.trio


def is_written(queued_frame: QueuedFrame | None) -> bool:
    assert queued_frame is not None, "dropped"
    return queued_frame.written


def frame(number: int, size: int = 16) -> bytes:
    return b"%0*d\n" % (size - 1, number)


@contextmanager
def pipe() -> Iterator[tuple[int, trio.lowlevel.FdStream]]:
    """A pipe: its non-blocking read end, and a stream for the write end."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    stream = trio.lowlevel.FdStream(write)
    try:
        yield read, stream
    finally:
        os.close(read)
        stream.close()


def read_all(read: int) -> bytes:
    data = b""
    while True:
        try:
            piece = os.read(read, 1 << 20)
        except BlockingIOError:
            return data
        if not piece:
            return data
        data += piece


@asynccontextmanager
async def writing(outbox: Outbox, stream: trio.abc.SendStream) -> AsyncIterator[trio.Nursery]:
    """A running writer task that has nothing to write yet."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.write_to, stream)
        await trio.testing.wait_all_tasks_blocked()
        yield nursery
        nursery.cancel_scope.cancel()


async def test_a_short_frame_is_written_at_once() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            queued = [outbox.post(Send(frame(number))) for number in range(3)]
            assert all(map(is_written, queued))
            assert read_all(read) == frame(0) + frame(1) + frame(2)


async def test_nothing_is_written_before_the_writer_runs() -> None:
    """Before that, the plugin may not have its end of the pipe."""
    outbox = Outbox()
    with pipe() as (read, stream):
        queued_frame = outbox.post(Send(frame(1)))
        assert not is_written(queued_frame)
        async with writing(outbox, stream):
            assert is_written(queued_frame) and read_all(read) == frame(1)


@pytest.mark.parametrize("size", [16, 1000, select.PIPE_BUF, select.PIPE_BUF + 1, 1 << 16, 1 << 18])
async def test_a_slow_reader_gets_every_frame_whole_and_in_order(size: int) -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            expected = b""
            for number in range(2 * (1 << 16) // size + 4):  # more than a pipe holds
                outbox.post(Send(frame(number, size)))
                expected += frame(number, size)
            data = b""
            with trio.fail_after(60):
                while len(data) < len(expected):
                    data += read_all(read)[: len(expected)]
                    await trio.lowlevel.checkpoint()
            assert data == expected
            # When all is read, short frames are written at once again.
            await trio.testing.wait_all_tasks_blocked()
            queued_frame = outbox.post(Send(frame(7)))
            assert is_written(queued_frame) and read_all(read) == frame(7)


async def test_a_short_frame_is_never_written_into_a_long_one() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            long, short = frame(1, 1 << 18), frame(2)
            first = outbox.post(Send(long))
            await trio.testing.wait_all_tasks_blocked()
            os.read(read, 1 << 15)  # there is room now, but the long frame is not complete
            second = outbox.post(Send(short, "reply"))
            assert not is_written(first) and not is_written(second)
            data = b""
            with trio.fail_after(60):
                while not is_written(second):
                    data += read_all(read)
                    await trio.lowlevel.checkpoint()
            data += read_all(read)
            assert data == long[1 << 15 :] + short


async def test_a_withdrawn_frame_is_not_written_unless_it_was_begun() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            begun, taken_back, kept = (outbox.post(Send(frame(number, 1 << 18))) for number in range(3))
            assert begun is not None and taken_back is not None and kept is not None
            await trio.testing.wait_all_tasks_blocked()
            assert not outbox.withdraw(begun)
            assert outbox.withdraw(taken_back) and not outbox.withdraw(taken_back)
            data = b""
            with trio.fail_after(60):
                while not is_written(kept):
                    data += read_all(read)
                    await trio.lowlevel.checkpoint()
            assert data + read_all(read) == frame(0, 1 << 18) + frame(2, 1 << 18)
            assert not outbox.withdraw(kept)


async def test_replies_overtake_requests_and_both_overtake_events() -> None:
    outbox = Outbox()
    lanes: list[Lane] = ["event", "request", "reply", "event", "request", "reply"]
    for number, lane in enumerate(lanes):
        outbox.post(Send(frame(number), lane))
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            assert read_all(read) == b"".join(map(frame, (2, 5, 1, 4, 0, 3)))


async def test_a_plugin_that_does_not_keep_up_loses_the_newest_events() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            sent = 0
            while outbox.dropped == 0:
                outbox.post(Send(frame(sent, 1024), "event"))
                sent += 1
            assert outbox.post(Send(frame(sent, 1024), "request")) is not None  # these are never dropped
            assert outbox.dropped == 1
            data = b""
            with trio.fail_after(60):
                while len(data) < sent * 1024:
                    data += read_all(read)
                    await trio.testing.wait_all_tasks_blocked()
    numbers = [int(line) for line in data.split()]
    assert sorted(numbers) == [*range(sent - 1), sent]
    in_the_pipe = numbers.index(sent)
    assert numbers == [*range(in_the_pipe), sent, *range(in_the_pipe, sent - 1)]
    assert len(numbers) - in_the_pipe - 1 in (MOST_EVENTS - 1, MOST_EVENTS)  # the writer had taken one


async def test_a_broken_pipe_raises_in_the_writer() -> None:
    outbox = Outbox()
    read, write = os.pipe2(os.O_CLOEXEC)
    async with trio.lowlevel.FdStream(write) as stream:
        os.close(read)
        failed = trio.Event()

        async def write_to() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await outbox.write_to(stream)
            failed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_to)
            await trio.testing.wait_all_tasks_blocked()
            queued_frame = outbox.post(Send(frame(1)))
            with trio.fail_after(60):
                await failed.wait()
    assert not is_written(queued_frame)
    assert outbox.closed and outbox.post(Send(frame(2))) is None


async def test_a_closed_stream_is_not_written_to() -> None:
    """Its descriptor number may belong to another file by now."""
    outbox = Outbox()
    with pipe() as (read, stream), pipe() as (other, other_stream):
        async with trio.open_nursery() as nursery:

            async def write_to() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await outbox.write_to(stream)

            nursery.start_soon(write_to)
            await trio.testing.wait_all_tasks_blocked()
            number = stream.fileno()
            stream.close()
            os.dup2(other_stream.fileno(), number)
            try:
                queued_frame = outbox.post(Send(frame(1)))
                await trio.testing.wait_all_tasks_blocked()
                assert not is_written(queued_frame)
                assert read_all(other) == b"" == read_all(read)
                assert os.write(number, b"x") == 1 and read_all(other) == b"x"  # a write would be seen
            finally:
                os.close(number)


async def test_thousands_of_short_replies_have_room() -> None:
    """A plugin may write so many requests before it reads the first answer."""
    outbox = Outbox()
    for number in range(4000):
        assert outbox.post(Send(frame(number), "reply"))
    assert not outbox.is_full and not outbox.dropped


async def test_there_is_room_again_when_replies_are_written() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream) as nursery:
            outbox.post(Send(frame(0, 1 << 18)))  # keeps the pipe full
            await trio.testing.wait_all_tasks_blocked()
            for number in range(MOST_REPLIES):
                outbox.post(Send(frame(number), "reply"))
            passed = trio.Event()

            async def wait() -> None:
                await outbox.room()
                passed.set()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not passed.is_set()
            with trio.fail_after(60):
                while not passed.is_set():
                    read_all(read)
                    await trio.lowlevel.checkpoint()


async def test_all_tasks_that_wait_for_room_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.session.outbox.MOST_REPLIES", 256)  # as many as the pipe takes
    outbox = Outbox()
    for number in range(256):
        outbox.post(Send(frame(number), "reply"))
    through: list[int] = []

    async def wait(number: int) -> None:
        await outbox.room()
        through.append(number)

    with pipe() as (_, stream), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(wait, number)
                await trio.testing.wait_all_tasks_blocked()
            assert through == []  # all of them wait
            outbox.close()
            nursery.start_soon(outbox.write_to, stream)
    assert sorted(through) == [0, 1, 2]


async def test_closing_wakes_tasks_that_wait_for_room() -> None:
    outbox = Outbox()
    for number in range(MOST_REPLIES):
        outbox.post(Send(frame(number), "reply"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.room)
            await trio.testing.wait_all_tasks_blocked()
            assert nursery.child_tasks  # it waits
            outbox.close()


async def test_a_closed_outbox_accepts_nothing_and_writes_the_rest() -> None:
    outbox = Outbox()
    lanes: list[Lane] = ["reply", "request", "event"]
    for number, lane in enumerate(lanes):
        outbox.post(Send(frame(number), lane))
    outbox.close()
    assert [outbox.post(Send(frame(9), lane)) for lane in lanes] == [None] * 3
    assert outbox.dropped == 3
    with pipe() as (read, stream), trio.fail_after(60):
        await outbox.write_to(stream)
        assert read_all(read) == frame(0) + frame(1) + frame(2)


async def test_only_events_are_dropped() -> None:
    outbox = Outbox()
    lanes: list[Lane] = ["reply", "request", "event"]
    taken = {lane: sum(outbox.post(Send(frame(0), lane)) is not None for _ in range(500)) for lane in lanes}
    assert taken == {"reply": 500, "request": 500, "event": MOST_EVENTS}
    assert outbox.dropped == 500 - MOST_EVENTS


async def test_a_few_long_replies_leave_no_room() -> None:
    """A reply repeats the request's id, which the plugin chose and which may be as long as a frame."""
    outbox = Outbox()
    for number in range(MOST_REPLIES // 2):
        outbox.post(Send(frame(number), "reply"))
    await outbox.room()
    outbox.post(Send(frame(0, MOST_REPLY_BYTES), "reply"))
    with pipe() as (read, stream):
        with trio.move_on_after(0.05) as waited:
            await outbox.room()
        assert waited.cancelled_caught
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(outbox.write_to, stream)
                await outbox.room()
                nursery.cancel_scope.cancel()
        assert read_all(read).startswith(frame(0) + frame(1))


async def test_a_key_overtakes_deliveries_and_no_request_overtakes_either() -> None:
    """The pipe is full, so everything waits."""
    outbox = Outbox()
    lanes: tuple[Lane, ...] = ("delivery", "delivery", "mouse", "key", "request", "event", "reply")
    for number, lane in enumerate(lanes):
        outbox.post(Send(frame(number), lane))
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            order = [6, 3, 2, 0, 1, 4, 5]  # reply, key, mouse, deliveries, request, event
            assert read_all(read) == b"".join(map(frame, order))


@pytest.mark.parametrize("lane", ["key", "mouse"])
async def test_the_oldest_keys_are_dropped(lane: Lane) -> None:
    outbox = Outbox()
    for number in range(MOST_KEYS + 2):
        outbox.post(Send(frame(number), lane))
    assert outbox.dropped == 2
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            assert read_all(read) == b"".join(map(frame, range(2, MOST_KEYS + 2)))


async def test_deliveries_are_counted_and_not_dropped() -> None:
    outbox = Outbox()
    for number in range(1000):
        assert outbox.post(Send(frame(number), "delivery")) is not None
    assert outbox.bytes["delivery"] == 1000 * delivery_cost(frame(0))
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            with trio.fail_after(60):
                while outbox.bytes["delivery"]:
                    await outbox.delivered()
            await trio.testing.wait_all_tasks_blocked()
            assert read_all(read) == b"".join(map(frame, range(1000)))
    with trio.fail_after(60):
        await outbox.delivered()  # it is closed: nobody waits for ever


@pytest.mark.parametrize("lane", get_args(Lane))
async def test_a_reader_that_takes_no_byte_for_the_time_has_stalled(
    autojump_clock: trio.testing.MockClock, lane: Lane
) -> None:
    """Whatever the frame carries. The clock starts again with each byte that is read."""
    outbox, began = Outbox(), trio.current_time()
    stalled: list[float] = []

    def is_stalled(since: float) -> bool:
        stalled.append(trio.current_time() - since)
        return len(stalled) == 2

    async def write() -> None:
        with pytest.raises(WriteStalled):
            await outbox.write_to(stream, is_stalled, 2.0)

    outbox.post(Send(bytes(1 << 20), lane))
    with pipe() as (read, stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for _ in range(10):
                await trio.sleep(1.5)
                assert os.read(read, 1 << 16)
        # It is asked at each interval, and the excuse of the first answer does not start the clock again.
        assert stalled == [2.0, 4.0]
        assert trio.current_time() - began == 15.0 + 4.0
    assert outbox.closed
