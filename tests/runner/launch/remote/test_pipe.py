"""The end of a pipe that a session reads: what was written, the end, and a close by another task."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from runner.launch.remote.pipe import PipeReader

pytestmark = pytest.mark.trio


@asynccontextmanager
async def pipe() -> AsyncIterator[tuple[PipeReader, int]]:
    read, write = os.pipe()
    reader = PipeReader(read)
    try:
        yield reader, write
    finally:
        await reader.aclose()
        os.close(write)


async def test_reads_what_was_written_and_the_rest_of_it() -> None:
    async with pipe() as (reader, write):
        os.write(write, b"12345")
        assert [await reader.receive_some(3) for _ in range(2)] == [b"123", b"45"]
        os.write(write, b"678")
        assert [await reader.receive_some(3)] == [b"678"]
        with trio.move_on_after(0.01) as clock:  # the buffer was filled, and the pipe is empty all the same
            await reader.receive_some(3)
        assert clock.cancelled_caught
        os.write(write, b"9")
        assert await reader.receive_some() == b"9"


async def test_waits_for_the_writer_and_lets_others_run() -> None:
    async with pipe() as (reader, write), trio.open_nursery() as nursery:

        async def write_later() -> None:
            await trio.testing.wait_all_tasks_blocked()
            os.write(write, b"late")

        nursery.start_soon(write_later)
        assert await reader.receive_some(64) == b"late"


@pytest.mark.parametrize("written", [b"", b"rest"])
async def test_the_end(written: bytes) -> None:
    read, write = os.pipe()
    async with PipeReader(read) as reader:
        os.write(write, written)
        os.close(write)
        said = [await reader.receive_some(64) for _ in range(2 if written else 1)]
        assert b"".join(said) == written and said[-1] == b""
        assert await reader.receive_some(64) == b""


async def test_a_full_pipe_does_not_keep_other_tasks_from_running() -> None:
    async with pipe() as (reader, write), trio.open_nursery() as nursery:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(count)
        os.write(write, bytes(1000))
        for _ in range(1000):
            await reader.receive_some(1)
        assert turns >= 999
        nursery.cancel_scope.cancel()


async def test_a_close_wakes_the_reader() -> None:
    async with pipe() as (reader, _), trio.open_nursery() as nursery:

        async def close_later() -> None:
            await trio.testing.wait_all_tasks_blocked()
            reader.close()

        nursery.start_soon(close_later)
        with pytest.raises(trio.ClosedResourceError):
            await reader.receive_some(64)
        with pytest.raises(trio.ClosedResourceError):
            await reader.receive_some(64)


async def test_who_reads_more_than_a_pipe_holds_gets_a_larger_one() -> None:
    read, write = os.pipe()
    usual = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    async with PipeReader(read) as reader:
        os.write(write, b"1")
        assert await reader.receive_some(64 << 10) == b"1"
        assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == usual
        os.write(write, b"2")
        assert await reader.receive_some(256 << 10) == b"2"
        assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == 256 << 10
        os.set_blocking(write, False)
        assert os.write(write, bytes(256 << 10)) == 256 << 10
        assert len(await reader.receive_some(256 << 10)) == 256 << 10
    os.close(write)


async def test_what_cannot_be_made_larger_is_read_all_the_same() -> None:
    ours, theirs = socket.socketpair()  # the kernel refuses it as for a pipe of a user who has too many
    async with PipeReader(ours.detach()) as reader:
        theirs.send(b"said")
        theirs.close()
        assert await reader.receive_some(256 << 10) == b"said"
        assert await reader.receive_some(256 << 10) == b""
