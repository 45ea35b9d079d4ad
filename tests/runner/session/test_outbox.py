"""What waits for a plugin: in which order it is written, straight into the pipe or not, and never torn."""

from __future__ import annotations

import os
import select
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
import trio.testing

from runner.protocol.dialect import Lane, Send
from runner.session.outbox import MOST_EVENTS, MOST_REPLIES, MOST_REPLY_BYTES, Letter, Outbox

pytestmark = pytest.mark.trio


def written(letter: Letter | None) -> bool:
    assert letter is not None, "dropped"
    return letter.written


def frame(number: int, size: int = 16) -> bytes:
    return b"%0*d\n" % (size - 1, number)


@contextmanager
def pipe() -> Iterator[tuple[int, trio.lowlevel.FdStream]]:
    """Its end for reading, which does not wait, and the stream that writes."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    stream = trio.lowlevel.FdStream(write)
    try:
        yield read, stream
    finally:
        os.close(read)
        stream.close()


def content(read: int) -> bytes:
    said = b""
    while True:
        try:
            piece = os.read(read, 1 << 20)
        except BlockingIOError:
            return said
        if not piece:
            return said
        said += piece


@asynccontextmanager
async def writing(outbox: Outbox, stream: trio.abc.SendStream) -> AsyncIterator[trio.Nursery]:
    """Somebody who writes, and has nothing to do yet."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.write_to, stream)
        await trio.testing.wait_all_tasks_blocked()
        yield nursery
        nursery.cancel_scope.cancel()


async def test_a_short_frame_is_written_at_once() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            letters = [outbox.post(Send(frame(number))) for number in range(3)]
            assert all(map(written, letters))
            assert content(read) == frame(0) + frame(1) + frame(2)


async def test_nothing_is_written_before_there_is_somebody_who_writes() -> None:
    """The pipe's end may not even be the plugin's yet."""
    outbox = Outbox()
    with pipe() as (read, stream):
        letter = outbox.post(Send(frame(1)))
        assert not written(letter)
        async with writing(outbox, stream):
            assert written(letter) and content(read) == frame(1)


@pytest.mark.parametrize("size", [16, 1000, select.PIPE_BUF, select.PIPE_BUF + 1, 1 << 16, 1 << 18])
async def test_who_reads_slowly_gets_every_frame_whole_and_in_order(size: int) -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            expected = b""
            for number in range(2 * (1 << 16) // size + 4):  # more than a pipe holds
                outbox.post(Send(frame(number, size)))
                expected += frame(number, size)
            said = b""
            with trio.fail_after(60):
                while len(said) < len(expected):
                    said += content(read)[: len(expected)]
                    await trio.lowlevel.checkpoint()
            assert said == expected
            # And when all is read, the way is short again.
            await trio.testing.wait_all_tasks_blocked()
            letter = outbox.post(Send(frame(7)))
            assert written(letter) and content(read) == frame(7)


async def test_a_short_frame_never_gets_into_the_middle_of_a_long_one() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            long, short = frame(1, 1 << 18), frame(2)
            first = outbox.post(Send(long))
            await trio.testing.wait_all_tasks_blocked()
            os.read(read, 1 << 15)  # there is room now, but half a frame is in the pipe
            second = outbox.post(Send(short, "reply"))
            assert not written(first) and not written(second)
            said = b""
            with trio.fail_after(60):
                while not written(second):
                    said += content(read)
                    await trio.lowlevel.checkpoint()
            said += content(read)
            assert said == long[1 << 15 :] + short


async def test_what_was_taken_back_is_not_written_but_what_was_begun_is() -> None:
    outbox = Outbox()
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            begun, taken_back, kept = (outbox.post(Send(frame(number, 1 << 18))) for number in range(3))
            assert begun is not None and taken_back is not None and kept is not None
            await trio.testing.wait_all_tasks_blocked()
            assert not outbox.withdraw(begun)
            assert outbox.withdraw(taken_back) and not outbox.withdraw(taken_back)
            said = b""
            with trio.fail_after(60):
                while not written(kept):
                    said += content(read)
                    await trio.lowlevel.checkpoint()
            assert said + content(read) == frame(0, 1 << 18) + frame(2, 1 << 18)
            assert not outbox.withdraw(kept)


async def test_replies_overtake_requests_and_both_overtake_events() -> None:
    outbox = Outbox()
    lanes: list[Lane] = ["event", "request", "reply", "event", "request", "reply"]
    for number, lane in enumerate(lanes):
        outbox.post(Send(frame(number), lane))
    with pipe() as (read, stream):
        async with writing(outbox, stream):
            assert content(read) == b"".join(map(frame, (2, 5, 1, 4, 0, 3)))


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
            said = b""
            with trio.fail_after(60):
                while len(said) < sent * 1024:
                    said += content(read)
                    await trio.testing.wait_all_tasks_blocked()
    told = [int(line) for line in said.split()]
    assert sorted(told) == [*range(sent - 1), sent]
    in_the_pipe = told.index(sent)
    assert told == [*range(in_the_pipe), sent, *range(in_the_pipe, sent - 1)]
    assert len(told) - in_the_pipe - 1 in (MOST_EVENTS - 1, MOST_EVENTS)  # one was in the writer's hands


async def test_a_pipe_nobody_reads_any_more_is_told_to_who_writes() -> None:
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
            letter = outbox.post(Send(frame(1)))
            with trio.fail_after(60):
                await failed.wait()
    assert not written(letter)
    assert outbox.closed and outbox.post(Send(frame(2))) is None


async def test_a_stream_that_was_closed_is_not_written_to() -> None:
    """Its number may be somebody else's by now."""
    outbox = Outbox()
    with pipe() as (read, stream), pipe() as (other, heir):
        async with trio.open_nursery() as nursery:

            async def write_to() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await outbox.write_to(stream)

            nursery.start_soon(write_to)
            await trio.testing.wait_all_tasks_blocked()
            number = stream.fileno()
            stream.close()
            os.dup2(heir.fileno(), number)
            try:
                letter = outbox.post(Send(frame(1)))
                await trio.testing.wait_all_tasks_blocked()
                assert not written(letter)
                assert content(other) == b"" == content(read)
                assert os.write(number, b"x") == 1 and content(other) == b"x"  # it would have been seen
            finally:
                os.close(number)


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
                    content(read)
                    await trio.lowlevel.checkpoint()


async def test_there_is_room_for_everybody_who_waited_for_it() -> None:
    outbox = Outbox()
    for number in range(MOST_REPLIES):
        outbox.post(Send(frame(number), "reply"))
    through: list[int] = []

    async def wait(number: int) -> None:
        await outbox.room()
        through.append(number)

    with pipe() as (_, stream), trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(wait, number)
                await trio.testing.wait_all_tasks_blocked()
            assert through == []  # they wait, one after the other
            outbox.close()
            nursery.start_soon(outbox.write_to, stream)
    assert sorted(through) == [0, 1, 2]


async def test_who_waits_for_room_is_let_go_when_it_is_closed() -> None:
    outbox = Outbox()
    for number in range(MOST_REPLIES):
        outbox.post(Send(frame(number), "reply"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.room)
            await trio.testing.wait_all_tasks_blocked()
            assert nursery.child_tasks  # it waits
            outbox.close()


async def test_closed_it_takes_nothing_more_and_writes_what_it_has() -> None:
    outbox = Outbox()
    lanes: list[Lane] = ["reply", "request", "event"]
    for number, lane in enumerate(lanes):
        outbox.post(Send(frame(number), lane))
    outbox.close()
    assert [outbox.post(Send(frame(9), lane)) for lane in lanes] == [None] * 3
    assert outbox.dropped == 3
    with pipe() as (read, stream), trio.fail_after(60):
        await outbox.write_to(stream)
        assert content(read) == frame(0) + frame(1) + frame(2)


async def test_only_events_are_dropped_however_many_wait() -> None:
    outbox = Outbox()
    lanes: list[Lane] = ["reply", "request", "event"]
    taken = {lane: sum(outbox.post(Send(frame(0), lane)) is not None for _ in range(500)) for lane in lanes}
    assert taken == {"reply": 500, "request": 500, "event": MOST_EVENTS}
    assert outbox.dropped == 500 - MOST_EVENTS


async def test_a_few_long_replies_leave_no_room_either() -> None:
    """Each repeats the plugin's own id, which may be as long as a frame."""
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
        assert content(read).startswith(frame(0) + frame(1))
