"""A host with sessions and, for comparison, the same plugin behind plain pipes. Prints samples, not figures.

Started by the user that is measured: `host.py talk|faces|many|door MANIFEST COUNT COUNT -- PLUGIN`. Each line
of stdout is one JSON document. It imports only installed packages: that user may not be able to read the
checkout.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from typing import Any

import trio

import runner
from runner import aio, trio_thread

IN_FLIGHT, IN_A_ROW = 32, 10  # concurrent tasks, and calls of each
BLOCK = 50  # calls in a row, before the next alternative's turn
WARM_UP = 2
TURNS = 4
READ_BYTES = 64 << 10
GIVEN = {"text": "hello"}


class Pipes:
    """The plugin without the runner: a process, two pipes, and a host that waits in read()."""

    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    def ask(self, frame: bytes) -> bytes:
        os.write(self._in, frame)
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            pieces.append(os.read(self._out, READ_BYTES))
            if not pieces[-1]:
                raise EOFError("the plugin has ended")
        return b"".join(pieces)

    def streams(self) -> Streams:
        """The same pipes for trio. Makes them non-blocking, so `ask` must not be used any more."""
        return Streams(os.dup(self._in), os.dup(self._out))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Streams:
    """The same pipes, read by trio: the lower bound for a host on trio."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._in, self._out = trio.lowlevel.FdStream(stdin), trio.lowlevel.FdStream(stdout)

    async def ask(self, frame: bytes) -> bytes:
        await self._in.send_all(frame)
        data_read = bytearray()
        while not data_read.endswith(b"\n"):
            data = await self._out.receive_some(READ_BYTES)
            if not data:
                raise EOFError("the plugin has ended")
            data_read += data
        return bytes(data_read)

    async def ask_many(self, frame: bytes, count: int) -> None:
        await self._in.send_all(frame * count)
        while count:
            data = await self._out.receive_some(READ_BYTES)
            if not data:
                raise EOFError("the plugin has ended")
            count -= data.count(b"\n")

    async def aclose(self) -> None:
        await self._in.aclose()
        await self._out.aclose()


# --- one session --------------------------------------------------------------------------------------------


class Frames:
    """The frames that a session wrote, as the plugin received them. They are sent over plain pipes too."""

    def __init__(self, lines: list[str]) -> None:
        *opening, echo, large, _ = (line.encode() for line in lines)
        self.opening, self.echo, self.large = opening, echo, large

    def open(self, pipes: Pipes) -> None:
        for frame in self.opening:
            if b'"id"' in frame:
                pipes.ask(frame)


async def record_frames(plugin: runner.OpenPlugin) -> Frames:
    for name in ("echo", "large"):
        await plugin.call(name, GIVEN)
    return Frames((await plugin.call("heard", GIVEN))["structuredContent"]["lines"])


Ask = Callable[[], Awaitable[Any]]


async def in_turns(asks: dict[str, Ask], rounds: int, block: int) -> dict[str, list[list[float]]]:
    """The seconds of each call of each block, by name. Each alternative is first as often as last."""
    taken: dict[str, list[list[float]]] = {name: [] for name in asks}
    names = list(asks)
    for turn in range(WARM_UP + rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            times = await timed(asks[name], block)
            if turn >= WARM_UP:
                taken[name].append(times)
    return taken


async def timed(ask: Ask, count: int) -> list[float]:
    """The seconds of each call."""
    times = [time.perf_counter()]
    for _ in range(count):
        await ask()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


async def in_flight(asks: dict[str, Ask], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each round, by name: its seconds, and those of this process's processor, divided by its calls."""
    count = IN_FLIGHT * IN_A_ROW
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in asks}
    for turn in range(WARM_UP + rounds):
        for name in asks if turn % 2 else reversed(asks):
            began, before = time.perf_counter(), time.process_time()
            await asks[name]()
            if turn >= WARM_UP:
                seconds, busy = time.perf_counter() - began, time.process_time() - before
                taken[name].append((seconds / count, busy / count))
    return taken


async def talk(manifest: str, calls: int, larges: int, argv: list[str]) -> None:
    async with runner.open_plugin(manifest) as plugin:
        frames = await record_frames(plugin)
        tell({"opening": [frame.decode() for frame in frames.opening], "echo": frames.echo.decode()})
        pipes, others = Pipes(argv), Pipes(argv)
        for each in (pipes, others):
            frames.open(each)
        streams = others.streams()

        async def by_pipe(frame: bytes, read: Callable[[bytes], Any] = len) -> None:
            read(pipes.ask(frame))

        block = min(BLOCK, calls)
        warm: dict[str, Ask] = {
            "pipe": partial(by_pipe, frames.echo),
            "trio": partial(streams.ask, frames.echo),
            "session": partial(plugin.call, "echo", GIVEN),
        }
        tell(await in_turns(warm, -(-calls // block), block))
        flights: dict[str, Ask] = {
            "trio": partial(repeat, partial(streams.ask_many, frames.echo, IN_FLIGHT), IN_A_ROW),
            "session": partial(all_at_once, [partial(repeat, warm["session"], IN_A_ROW)] * IN_FLIGHT),
        }
        tell(await in_flight(flights, -(-calls // (IN_FLIGHT * IN_A_ROW))))
        large: dict[str, Ask] = {
            "pipe": partial(by_pipe, frames.large),
            "json": partial(by_pipe, frames.large, json.loads),
            "session": partial(plugin.call, "large", GIVEN),
        }
        tell(await in_turns(large, larges, 1))
        await streams.aclose()
        for each in (pipes, others):
            each.close()


# --- both faces of the library ------------------------------------------------------------------------------


async def faces(manifest: str, calls: int) -> None:
    """On asyncio: the same calls by a task of asyncio, and by a task of trio in trio's thread."""
    thread = trio_thread.trio_side()
    assert isinstance(thread, trio_thread.TrioThread)
    async with aio.open_plugin(manifest) as plugin, thread.enter(runner.open_plugin(manifest)) as on_trio:
        here, there = partial(plugin.call, "echo", GIVEN), partial(on_trio.call, "echo", GIVEN)
        block = min(BLOCK, calls)
        lone = {"trio": partial(thread.run, timed, there, block), "asyncio": partial(timed, here, block)}
        tell(await by_turns(lone, -(-calls // block)))

        async def gather() -> None:
            await asyncio.gather(*(repeat(here, IN_A_ROW) for _ in range(IN_FLIGHT)))

        flights = [partial(repeat, there, IN_A_ROW)] * IN_FLIGHT
        many: dict[str, Ask] = {"trio": partial(thread.run, all_at_once, flights), "asyncio": gather}
        tell(await in_flight(many, -(-calls // (IN_FLIGHT * IN_A_ROW))))


async def by_turns(blocks: dict[str, Ask], rounds: int) -> dict[str, list[list[float]]]:
    """The result of each block, by name."""
    taken: dict[str, list[list[float]]] = {name: [] for name in blocks}
    for turn in range(WARM_UP + rounds):
        for name in blocks if turn % 2 else reversed(blocks):
            block = await blocks[name]()
            if turn >= WARM_UP:
                taken[name].append(block)
    return taken


# --- many sessions ------------------------------------------------------------------------------------------


async def many(manifest: str, count: int, calls: int, argv: list[str]) -> None:
    """The parent process measures our memory when one plugin is open, and when all are."""
    plugins: list[runner.OpenPlugin] = []
    done = trio.Event()
    async with trio.open_nursery() as nursery:

        async def enter() -> None:
            plugins.append(await nursery.start(hold, manifest, done))

        await enter()
        frames = await record_frames(plugins[0])
        tell_and_wait({})
        seconds = await all_at_once([enter] * (count - 1))
        tell_and_wait({"seconds": seconds})
        await compare(plugins, frames, calls, argv)
        start = time.perf_counter()
        done.set()
    tell({"seconds": time.perf_counter() - start})


async def hold(
    manifest: str,
    done: trio.Event,
    *,
    task_status: trio.TaskStatus[runner.OpenPlugin] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with runner.open_plugin(manifest) as plugin:
        task_status.started(plugin)
        await done.wait()


async def compare(plugins: list[runner.OpenPlugin], frames: Frames, calls: int, argv: list[str]) -> None:
    start = time.perf_counter()
    pipes = [Pipes(argv) for _ in plugins]
    for each in pipes:
        frames.open(each)
    tell({"seconds": time.perf_counter() - start})
    streams = [each.streams() for each in pipes]

    kinds: dict[str, list[Ask]] = {
        "trio": [partial(each.ask, frames.echo) for each in streams],
        "session": [partial(each.call, "echo", GIVEN) for each in plugins],
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(1 + TURNS):
        for name in kinds if turn % 2 else reversed(kinds):
            seconds = await all_at_once([partial(repeat, ask, calls) for ask in kinds[name]])
            if turn:  # the first warms up
                taken[name].append(seconds)
    tell(taken)
    for stream in streams:
        await stream.aclose()
    for each in pipes:
        each.close()


# --- a daemon -----------------------------------------------------------------------------------------------


class Door:
    """A connection to the door of a daemon, with one request that is sent again and again."""

    def __init__(self, stream: trio.SocketStream, name: str) -> None:
        self._stream = stream
        body = json.dumps({"tool": "echo", "input": GIVEN}).encode()
        head = (
            f"POST /plugins/{name}/calls HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    async def ask(self) -> bytes:
        await self._stream.send_all(self._request)
        data = bytearray()
        while (at := data.find(b"\r\n\r\n")) < 0 or len(data) < at + 4 + _length(data[:at]):
            more = await self._stream.receive_some(READ_BYTES)
            if not more:
                raise EOFError("the daemon has ended")
            data += more
        if not data.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(data.decode())
        return bytes(data)


def _length(head: bytearray) -> int:
    (found,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(found.partition(b":")[2])


async def door(manifest: str, calls: int, _: int, where: list[str]) -> None:
    """Calls by the library, and by the door of a daemon that has the same plugin."""
    path, name = where
    async with runner.open_plugin(manifest) as plugin:
        doors = [Door(await trio.open_unix_socket(path), name) for _ in range(IN_FLIGHT)]
        lone: dict[str, Ask] = {"library": partial(plugin.call, "echo", GIVEN), "door": doors[0].ask}
        block = min(BLOCK, calls)
        tell(await in_turns(lone, -(-calls // block), block))
        many: dict[str, Ask] = {
            "library": partial(all_at_once, [partial(repeat, lone["library"], IN_A_ROW)] * IN_FLIGHT),
            "door": partial(all_at_once, [partial(repeat, each.ask, IN_A_ROW) for each in doors]),
        }
        tell(await in_flight(many, -(-calls // (IN_FLIGHT * IN_A_ROW))))


async def repeat(ask: Ask, count: int) -> None:
    for _ in range(count):
        await ask()


async def all_at_once(tasks: list[Ask]) -> float:
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(task)
    return time.perf_counter() - start


def tell(document: Any) -> None:
    print(json.dumps(document), flush=True)


def tell_and_wait(document: Any) -> None:
    tell(document)
    sys.stdin.readline()  # nothing runs until the parent has measured


if __name__ == "__main__":
    kind, path, one, other, _, *plugin = sys.argv[1:]
    if kind == "faces":
        asyncio.run(faces(path, int(one)))
    else:
        trio.run({"talk": talk, "many": many, "door": door}[kind], path, int(one), int(other), plugin)
