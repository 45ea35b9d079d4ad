"""A raw conversation with a plugin in its cage: frames as they are, also bad ones.

The plugin is hostile. Every wait has a deadline, and a conversation takes a bounded number of bytes and
frames. What arrives is read all the time, so that a plugin that waits for its reader cannot stall the trial.
"""

from __future__ import annotations

import fcntl
import os
import termios
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import trio

from runner.conformance.report import Transcript, TranscriptLine
from runner.conformance.rules import (
    Check,
    CloseInput,
    Kill,
    RuleBook,
    Say,
    See,
    SeeExit,
    Step,
    TrialFacts,
    Watch,
    body_of,
    fill,
    find,
    mismatch,
    shown,
)
from runner.exceptions import PluginFailure
from runner.launch.remote.remote_cell import RemoteCell, open_cage
from runner.launch.stages import Invocation
from runner.outcome import Failure
from runner.protocol.frames import FrameFault
from runner.protocol.wire import encode
from runner.protocol.wire import message as read_json
from sandbox.cell.contents import Contents

_MOST_BYTES = 64 << 20  # that a plugin may write in one conversation
_MOST_FRAMES = 20_000
_PIECE_SECONDS, _POLL_SECONDS = 2.0, 0.002
_STDERR_BYTES = 2000  # of the end that is kept
_END_SECONDS = 5.0  # for the monitor to tell how a plugin ended that has closed its stdout


class RuleBroken(Exception):
    """The plugin breaks the rule that is tried. The text says how."""


class RawConversation:
    """Made by `converse`."""

    def __init__(self, cell: RemoteCell, book: RuleBook, facts: TrialFacts, seconds: float) -> None:
        """`seconds`: for each answer, for each write, and for the exit."""
        self._cell, self._book, self._seconds = cell, book, seconds
        self.facts = facts
        self.transcript = Transcript()
        # The first fault of each kind, in the messages that no step was about.
        self.faults: dict[Watch, tuple[str, tuple[TranscriptLine, ...]]] = {}
        self.count = 0  # messages that came
        self.reply = book.reply
        self.heard: set[Watch] = set()  # of the contract's own rules for messages: those that applied
        self._memory: dict[Any, Any] = {}
        self._inbox: deque[bytes | str] = deque()  # frames; a text is what is wrong with the stream
        self._arrived = trio.Event()
        self._ended = False  # nothing more arrives
        self._flood = ""  # why nothing more is read, if the plugin writes without end
        # What is still unanswered, and what was answered, as JSON: 1, true and "1" differ.
        self._asked: set[bytes] = set()
        self._answered: set[bytes] = set()
        self._early: dict[bytes, Any] = {}  # answers that came before a step waited for them
        self._garbled = False  # something was sent that is no message
        self._stderr = bytearray()

    # --- steps ----------------------------------------------------------------------------------------------

    async def run(self, steps: tuple[Step, ...]) -> None:
        """Carry out the steps. Raises RuleBroken, or MissingFact."""
        for step in steps:
            match step:
                case Say():
                    await self._say(step)
                case See():
                    await self._see(step)
                case Check():
                    self._check(step)
                case CloseInput():
                    self.transcript.seen("stdin is closed")
                    await self._cell.stdin.aclose()
                case Kill():
                    self.transcript.seen("it is killed")
                    self._cell.kill()
                    await self._see_exit(())
                case SeeExit():
                    await self._see_exit(step.statuses)

    def _check(self, step: Check) -> None:
        if isinstance(step.fact, str):
            name, value = step.fact, self.facts[f"${step.fact}"]
        else:
            name, value = "", {each: self.facts[f"${each}"] for each in step.fact}
        self.transcript.seen(f"{name or 'they were'}: {shown(value, 300)}")
        if fault := mismatch(fill(step.pattern, self.facts), value, name):
            raise RuleBroken(fault)

    async def _say(self, step: Say) -> None:
        if isinstance(step.message, bytes):
            self._garbled, raw = True, step.message
        else:
            if (asked := self._book.asks(fill(step.message, self.facts))) is not None:
                self._asked.add(encode(asked))
            raw = self._book.encode(body_of(step, self.facts))
        await self._send(raw, step.pieces)

    async def _send(self, raw: bytes, pieces: int = 1) -> None:
        untold = self.facts.untold
        self.transcript.sent(raw.replace(untold, b'"[secret]"') if untold else raw)
        size = -(-len(raw) // pieces)
        for start in range(0, len(raw), size):
            await self._write(raw[start : start + size])
            if pieces > 1:
                await self._see_read()

    async def _write(self, raw: bytes) -> None:
        with trio.move_on_after(self._seconds) as waiting:
            try:
                await self._cell.stdin.send_all(raw)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.transcript.seen("nobody reads stdin any more")  # the next answer will be missing
        if waiting.cancelled_caught:
            raise RuleBroken(f"it did not read its stdin within {self._seconds:g} s")

    async def _see_read(self) -> None:
        """Wait until the pipe is empty, so that the next piece is read by itself. Not for long: nobody has to
        read half a message."""
        with trio.move_on_after(min(self._seconds, _PIECE_SECONDS)):
            unread = bytearray(4)
            fd = self._cell.stdin.fileno()
            # The kernel tells nobody when a pipe is emptied.
            while not fcntl.ioctl(fd, termios.FIONREAD, unread) and any(unread):  # noqa: ASYNC110
                await trio.sleep(_POLL_SECONDS)

    async def _see(self, step: See) -> None:
        wanted = encode(fill(step.to, self.facts))
        if wanted in self._early:
            self._take_answer(step, self._early.pop(wanted))
            return
        until = trio.current_time() + self._seconds
        while (frame := await self._next(until, wanted.decode())) is not None:
            value, kind, answered = self._judge(frame)
            key = encode(answered)
            if kind != "answer":
                await self._reply(kind, value)
                continue
            if key == wanted and key in self._asked:
                self._note_answer(key)
                self._take_answer(step, value)
                return
            if step.alone and key not in self._asked | self._answered:
                raise RuleBroken(f"it answered what must not be answered, with {shown(value)}")
            if key in self._asked:
                self._early[key] = value
            self._check_answer(answered, value)
        ended = await self._end()
        if not step.or_exit or self._cell.has_ended is None:
            raise RuleBroken(f"{ended}, and did not answer")

    async def _reply(self, kind: str, value: Any) -> None:
        """Answer a plugin's own request."""
        if kind == "request" and (answer := self.reply(value)) is not None:
            # Not as a step: the plugin's own id may look like a fact.
            await self._send(self._book.encode(encode(answer)))

    def _take_answer(self, step: See, value: Any) -> None:
        if fault := mismatch(fill(step.pattern, self.facts), value):
            raise RuleBroken(fault)
        for name, path in step.keep:
            if (found := find(value, path)) is not None:
                self.facts[f"${name}"] = found

    async def _see_exit(self, statuses: tuple[int, ...]) -> None:
        until = trio.current_time() + self._seconds
        while (frame := await self._next(until, "null")) is not None:
            # A plugin may ask its host for something before it exits.
            await self._reply(*self._judge_rest(frame))
        with trio.move_on_at(until):
            await self._cell.over.wait()
        ended = self._cell.has_ended
        if ended is None:
            raise RuleBroken(f"it closed its stdout, and did not exit within {self._seconds:g} s")
        text = await self._end()
        if statuses and ended.status not in statuses:
            raise RuleBroken(f"{text}, and not with {' or '.join(map(str, statuses))}")

    async def _end(self) -> str:
        """How the plugin ended, after the end of its stdout."""
        with trio.move_on_after(_END_SECONDS):
            await self._cell.over.wait()
        ended = self._cell.has_ended
        if ended is None:
            text = "it closed its stdout and runs on"
        elif ended.outcome.code == "ok":
            text = f"it exited with status {ended.status}"
        else:
            text = f"it ended: {ended.outcome.message}"
        self.transcript.seen(text)
        if self._stderr:
            self.transcript.seen(
                f"stderr ends with: {self._stderr.decode('utf-8', 'replace').strip()[-200:]}"
            )
        return text

    # --- what arrives ---------------------------------------------------------------------------------------

    async def _next(self, until: float, wanted: str) -> bytes | str | None:
        """The next frame; a text is a fault of the stream, and None its end. Raises RuleBroken if nothing
        comes until then."""
        while not self._inbox:
            if self._flood:
                raise RuleBroken(self._flood)
            if self._ended:
                return None
            with trio.move_on_at(until) as waiting:
                await self._arrived.wait()
            if waiting.cancelled_caught:
                what = "it did not exit" if wanted == "null" else f"no answer to {wanted} came"
                raise RuleBroken(f"{what} within {self._seconds:g} s")
        frame = self._inbox.popleft()
        if not self._inbox and not self._ended:
            self._arrived = trio.Event()
        return frame

    def _judge(self, frame: bytes | str) -> tuple[Any, str, Any]:
        """Hold a frame against the rules for all messages. Returns its value, kind and what it answers."""
        if isinstance(frame, str):
            self.transcript.seen(frame)
            self._note("message", frame)
            return None, "other", None
        self.count += 1
        self.transcript.received(frame)
        read = read_json(frame)
        if read.cause is not None:
            self._note("message", f"something else than a message came on stdout: {read.detail}")
            return None, "other", None
        if fault := self._book.shape(read.value):
            self._note("shape", fault)
        else:
            self._judge_by_contract(read.value)
        return read.value, *self._book.sort(read.value)

    def _judge_by_contract(self, message: Any) -> None:
        for watch, judge in self._book.watches.items():
            fault = judge(message, self.facts, self._memory)
            if fault is not None:
                self.heard.add(watch)
            if fault:
                self._note(watch, fault)

    def _judge_rest(self, frame: bytes | str) -> tuple[str, Any]:
        """Judge a frame that no step waits for. Returns its kind and value."""
        value, kind, answered = self._judge(frame)
        if kind == "answer":
            self._check_answer(answered, value)
        return kind, value

    def _check_answer(self, answered: Any, value: Any) -> None:
        key = encode(answered)
        if key in self._asked:
            self._note_answer(key)
        elif answered is None and self._garbled and isinstance(value, dict) and value.get("error"):
            pass  # the answer to something that could not be read
        elif key in self._answered:
            self._note("answer", f"a second answer to {shown(answered)} came")
        else:
            self._note("answer", f"an answer to {shown(answered)} came, which nobody asked")

    def _note_answer(self, key: bytes) -> None:
        self._asked.remove(key)
        self._answered.add(key)

    def _note(self, watch: Watch, fault: str) -> None:
        self.faults.setdefault(watch, (fault, self.transcript.lines))

    def finish(self) -> None:
        """Judge what has arrived and no step waited for."""
        while self._inbox:
            self._judge_rest(self._inbox.popleft())

    # --- streams --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        framer, size, count, is_told = self._book.framing.cutter(), 0, 0, False
        try:
            while data := await self._cell.stdout.receive_some(1 << 16):
                size += len(data)
                frames = framer.feed(data)
                count += len(frames)
                if size > _MOST_BYTES or count > _MOST_FRAMES:
                    self._flood = f"it wrote more than {_MOST_BYTES >> 20} MiB or {_MOST_FRAMES} frames"
                    self._take(self._flood)
                    break
                self._take(*frames, *(() if is_told else _fault_text(framer.fault)))
                is_told = framer.fault is not None
            else:
                self._take(*framer.finish(), *(() if is_told else _fault_text(framer.fault)))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._ended = True
        self._arrived.set()

    def _take(self, *frames: bytes | str) -> None:
        if frames:
            self._inbox.extend(frames)
            self._arrived.set()

    async def _read_stderr(self) -> None:
        try:
            while data := await self._cell.stderr.receive_some(1 << 16):
                self._stderr += data
                del self._stderr[:-_STDERR_BYTES]
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


def _fault_text(fault: FrameFault | None) -> tuple[str, ...]:
    return () if fault is None else (f"its stdout cannot be read further: {fault.message}",)


class CageLaunch(NamedTuple):
    """What is launched for each conversation."""

    invocation: Invocation
    contents: Contents | None = None  # of the cage's memory files


@asynccontextmanager
async def converse(
    launch: CageLaunch, book: RuleBook, facts: TrialFacts, seconds: float
) -> AsyncIterator[RawConversation]:
    """Start a plugin in its cage, and end it. Raises PluginFailure if it cannot be started."""
    try:
        async with open_cage(launch.invocation, environ=os.environ, contents=launch.contents) as cell:
            try:
                await cell.launched()
            except Failure as failed:
                ended = cell.has_ended
                raise PluginFailure(failed.outcome, ended.explanation if ended is not None else ()) from None
            talk = RawConversation(cell, book, facts, seconds)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk._read)
                nursery.start_soon(talk._read_stderr)
                yield talk
                nursery.cancel_scope.cancel()
            talk.finish()
    except Failure as failed:  # the fork server did not accept the launch
        raise PluginFailure(failed.outcome) from None
