"""A host with open plugins, and beside it the same plugins in raw bubblewrap. Prints samples, not figures.

Started by the user that is measured: `live_host.py talk|once|grow JSON`. Each line of stdout is one JSON
document. It imports only installed packages and scripts/benches/host.py, a copy of which lies beside it: that
user may not be able to read the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # -I leaves out the script's folder

import runner
from scripts.benches.host import READ_BYTES, Ask, hold, in_turns, tell, tell_and_wait

SMALL = 5
BLOCK = 20
AT_ONCE = 16
# Openings at once while many are opened. More would only wait for a processor, with their clocks running.
OPENING = 4
_FD_OPTIONS = ("--seccomp", "--add-seccomp-fd", "--file")


# --- a plugin without the runner ----------------------------------------------------------------------------


def start(argv: Sequence[str], files: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start bwrap (`files`: by the number that its arguments have), or any other program."""
    fds = {number: os.open(path, os.O_RDONLY) for number, path in files.items()}
    words = [
        str(fds[word]) if before in _FD_OPTIONS and word in fds else word
        for before, word in zip(("", *argv), argv, strict=False)
    ]
    try:
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=tuple(fds.values())
        )
    finally:
        for fd in fds.values():
            os.close(fd)


class Raw:
    """A plugin behind two pipes that trio reads, with the framing of its contract and nothing else."""

    def __init__(self, process: subprocess.Popen[bytes], framing: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._lines = framing == "lines"
        self._in = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        self._out = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        process.stdin.close()
        process.stdout.close()
        self._rest = b""

    async def open(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await self._in.send_all(frame)
            body = json.loads(body_of(frame))
            if "id" in body or body.get("type") in ("hello", "handshake"):
                await self.read()

    async def ask(self, frame: bytes) -> Any:
        await self._in.send_all(frame)
        return json.loads(await self.read())

    async def ask_many(self, frame: bytes, count: int) -> None:
        await self._in.send_all(frame * count)
        for _ in range(count):
            json.loads(await self.read())

    async def read(self) -> bytes:
        """The body of the next frame."""
        whole = bytearray(self._rest)
        while (end := self._end(whole)) is None:
            data = await self._out.receive_some(READ_BYTES)
            if not data:
                raise EOFError(f"the plugin has ended after {bytes(whole[:200])!r}")
            whole += data
        self._rest = bytes(whole[end:])
        return body_of(bytes(whole[:end]))

    def _end(self, whole: bytearray) -> int | None:
        if self._lines:
            # Only the last piece can have brought the end of the line.
            at = whole.find(b"\n", max(0, len(whole) - READ_BYTES))
            return at + 1 or None
        head = whole.find(b"\r\n\r\n")
        if head < 0:
            return None
        end = head + 4 + int(whole[:head].split(b":")[1])
        return end if len(whole) >= end else None

    async def aclose(self) -> None:
        await self._in.aclose()
        await self._out.aclose()
        await trio.to_thread.run_sync(self.process.wait)


def body_of(frame: bytes) -> bytes:
    return frame.partition(b"\r\n\r\n")[2] if frame.startswith(b"Content-Length") else frame


def reword_frame(frame: bytes, text: str) -> bytes:
    """The frame that asks for `text`, made from the one that asked for "heard"."""
    body = body_of(frame).replace(b'"heard"', json.dumps(text).encode())
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body) if body_of(frame) != frame else body


async def record(plugin: runner.OpenPlugin, given: dict[str, Any]) -> list[bytes]:
    """What the session has written to the plugin, frame by frame; the last one asked for "heard"."""
    answer = await plugin.call(given["call"], given["heard"])
    text = answer["stdout"] if "stdout" in answer else answer.get("said") or answer["content"][0]["text"]
    return [frame.encode() for frame in json.loads(text)]


# --- calls --------------------------------------------------------------------------------------------------


async def talk(given: dict[str, Any]) -> None:
    """Calls of an open session, of raw bwrap and of `runner exec`, by turns, for each size of the answer."""
    async with runner.open_plugin(given["manifest"], state_dir=given["state"]) as plugin:
        *opening, heard = await record(plugin, given)
        # The session and the raw plugin exchange the same frames.
        others = {name: Raw(start(*started), given["framing"]) for name, started in given["others"].items()}
        for other in others.values():
            await other.open(opening)
        for size, calls in given["sizes"]:
            asked = json.loads(json.dumps(given["heard"]).replace("heard", str(size)))
            frame = reword_frame(heard, str(size))
            asks: dict[str, Ask] = {name: partial(other.ask, frame) for name, other in others.items()}
            asks["session"] = partial(plugin.call, given["call"], asked)
            block = min(BLOCK, calls)
            tell({"size": size, "taken": await in_turns(asks, -(-calls // block), block)})
        if given["pipelined"]:
            frame, raw = reword_frame(heard, str(SMALL)), others["raw bwrap"]
            asked = json.loads(json.dumps(given["heard"]).replace("heard", str(SMALL)))
            once: Ask = partial(plugin.call, given["call"], asked)
            many: dict[str, Ask] = {
                "raw bwrap": partial(raw.ask_many, frame, AT_ONCE),
                "session": partial(all_of, [once] * AT_ONCE),
            }
            tell({"at_once": AT_ONCE, "taken": await in_turns(many, -(-given["pipelined"] // BLOCK), BLOCK)})
        for other in others.values():
            await other.aclose()


async def all_of(asks: Sequence[Ask]) -> None:
    async with trio.open_nursery() as nursery:
        for ask in asks:
            nursery.start_soon(ask)


async def once(given: dict[str, Any]) -> None:
    """Calls that each start a process, for contracts whose plugins answer one call."""
    async with runner.open_plugin(given["manifest"], state_dir=given["state"]) as plugin:
        *opening, heard = await record(plugin, given)
        asked = json.loads(json.dumps(given["heard"]).replace("heard", str(SMALL)))
        frame = reword_frame(heard, str(SMALL))

        async def by_raw() -> None:
            raw = Raw(start(*given["others"]["raw bwrap"]), given["framing"])
            await raw.open(opening)
            await raw.ask(frame)
            await raw.aclose()

        asks: dict[str, Ask] = {"raw bwrap": by_raw, "session": partial(plugin.call, given["call"], asked)}
        tell({"size": SMALL, "taken": await in_turns(asks, given["calls"], 1)})


# --- growth -------------------------------------------------------------------------------------------------


async def grow(given: dict[str, Any]) -> None:
    """Open more and more sessions. At each stop: what a call costs, and one more start. The parent process
    measures the memory."""
    plugins: list[runner.OpenPlugin] = []
    done = trio.Event()
    asked = json.loads(json.dumps(given["heard"]).replace("heard", str(SMALL)))
    async with trio.open_nursery() as nursery:
        limit = trio.CapacityLimiter(OPENING)

        async def enter() -> None:
            async with limit:
                plugins.append(await nursery.start(hold, given["manifest"], done))

        await enter()
        *opening, _ = await record(plugins[0], given)
        for count in given["counts"]:
            started, before = time.perf_counter(), len(plugins)
            try:
                await all_of([enter] * (count - len(plugins)))
            except (runner.PluginFailure, BaseExceptionGroup) as fault:
                # The kernel has limits of its own for one user: keyrings, processes, descriptors.
                stopped = f"only {len(plugins)} of {count} could be opened: {why(fault)}"
                if len(plugins) == before:
                    tell({"stopped": stopped})
                    break
                opened = time.perf_counter() - started
                tell_and_wait({"count": len(plugins), "opened": opened, "stopped": stopped})
                tell({"calls": await _call_each(plugins, given, asked), "starts": {}})
                break
            tell_and_wait({"count": count, "opened": time.perf_counter() - started})
            calls = await _call_each(plugins, given, asked)
            try:
                tell({"calls": calls, "starts": await _starts(given, opening)})
            except runner.PluginFailure as fault:
                tell({"calls": calls, "starts": {}, "stopped": f"beside {count} no more start: {why(fault)}"})
                break
        started = time.perf_counter()
        done.set()
    tell({"closed": time.perf_counter() - started})


def why(fault: BaseException) -> str:
    """The failure itself, without the groups around it."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    if not isinstance(fault, runner.PluginFailure):
        raise fault
    return str(fault)


async def _call_each(plugins: Sequence[runner.OpenPlugin], given: dict[str, Any], asked: Any) -> list[float]:
    """Calls in a row, each in another session if there are enough."""
    taken = []
    for number in range(given["warm_up"] + given["calls"]):
        plugin = plugins[number % len(plugins)]
        began = time.perf_counter()
        await plugin.call(given["call"], asked)
        if number >= given["warm_up"]:
            taken.append(time.perf_counter() - began)
    return taken


async def _starts(given: dict[str, Any], opening: Sequence[bytes]) -> dict[str, list[float]]:
    """One more, by turns: in a session and in raw bwrap, each until it has answered the greeting."""
    taken: dict[str, list[float]] = {"session": [], "raw bwrap": []}
    for _ in range(given["starts"]):
        began = time.perf_counter()
        async with runner.open_plugin(given["manifest"], state_dir=given["state"]):
            taken["session"].append(time.perf_counter() - began)
        began = time.perf_counter()
        raw = Raw(start(*given["raw"]), given["framing"])
        await raw.open(opening)
        taken["raw bwrap"].append(time.perf_counter() - began)
        await raw.aclose()
    return taken


if __name__ == "__main__":
    trio.run({"talk": talk, "once": once, "grow": grow}[sys.argv[1]], json.loads(sys.argv[2]))
