"""Frames that wait to be written to a plugin, in lanes.

    reply       answers to the plugin's own questions: the plugin may wait for one before it reads on
    key         notifications that a request must not overtake: the contract posts them only while no request
    mouse       of ours is open. A key overtakes deliveries that wait because the pipe is full. When the
    delivery    plugin does not keep up, the oldest keys are dropped, and the newest deliveries
    request     our requests, in order
    event       notifications of other contracts. The newest are dropped

What is dropped is counted: a publisher must not be delayed by one slow reader, and the queue must not grow.
Within a lane the order is kept. When nothing waits, a short frame goes straight into the pipe. That saves two
turns of the scheduler per call.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from typing import get_args

import trio

from runner.protocol.dialect import Lane, Send
from runner.protocol.memory import DELIVERIES

# Most events that wait. More are dropped.
MOST_EVENTS = 64
# Most keys that wait, and most events of the mouse. With more, the oldest is dropped.
MOST_KEYS = 64
# Most deliveries that wait; their bytes have a limit too (DELIVERIES).
MOST_DELIVERIES = 256
# Most replies that wait, and their bytes: a reply repeats the plugin's id, which can be as long as a frame.
# Beyond them nothing more is read from the plugin.
MOST_REPLIES = 256
MOST_REPLY_BYTES = 4 << 20


class Letter:
    """A frame on its way to the plugin."""

    __slots__ = ("frame", "written")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.written = False


class Outbox:
    def __init__(self) -> None:
        # In the order in which they are written.
        self._lanes: dict[Lane, deque[Letter]] = {lane: deque() for lane in get_args(Lane)}
        self._changed = trio.Event()
        self._room = trio.Event()
        self._bytes: dict[Lane, int] = {"reply": 0, "delivery": 0}  # in those lanes
        self._at_once: Callable[[bytes], bool] | None = None  # set while the writer has nothing to do
        self.closed = False  # nothing more is taken
        self.is_full = False  # there is no room for replies
        self.dropped = 0

    def post(self, send: Send) -> Letter | None:
        """Returns None if the frame was dropped."""
        letter = Letter(send.frame)
        if self._at_once is not None:  # nothing waits, so there is room
            if self._at_once(letter.frame):
                letter.written = True
                return letter
            self._at_once = None
        if self.closed or not self._has_room(send):
            self.dropped += 1
            return None
        lane = self._lanes[send.lane]
        if send.lane in ("key", "mouse") and len(lane) >= MOST_KEYS:
            lane.popleft()
            self.dropped += 1
        lane.append(letter)
        if send.lane in self._bytes:
            self._bytes[send.lane] += len(letter.frame)
            self.is_full = self._fills()
        self._changed.set()
        return letter

    def _has_room(self, send: Send) -> bool:
        waiting = len(self._lanes[send.lane])
        if send.lane == "event":
            return waiting < MOST_EVENTS
        if send.lane == "delivery":
            return waiting < MOST_DELIVERIES and self._bytes["delivery"] + len(send.frame) <= DELIVERIES
        return True

    def withdraw(self, letter: Letter) -> bool:
        """Take a request back. Returns False if it was begun: then it is written to its end."""
        lane = self._lanes["request"]
        if letter not in lane:
            return False
        lane.remove(letter)
        return True

    async def room(self) -> None:
        """Wait until there is room for replies."""
        while self.is_full and not self.closed:
            if self._room.is_set():  # one event for all tasks that wait
                self._room = trio.Event()
            await self._room.wait()

    def _fills(self) -> bool:
        return len(self._lanes["reply"]) >= MOST_REPLIES or self._bytes["reply"] >= MOST_REPLY_BYTES

    def close(self) -> None:
        """Take no more frames. Those that wait are still written."""
        self.closed = True
        self._at_once = None
        self._changed.set()
        self._room.set()

    async def write_to(self, stream: trio.abc.SendStream) -> None:
        """Write until it is closed and empty. Raises what the stream raises: then nothing more is written."""
        at_once = _writer(stream) if isinstance(stream, trio.lowlevel.FdStream) else None
        try:
            while (letter := await self._next(at_once)) is not None:
                # Whole: a caller that gives up waiting for its answer does not cut its request short.
                await stream.send_all(letter.frame)
                letter.written = True
        finally:
            self.close()

    async def _next(self, at_once: Callable[[bytes], bool] | None) -> Letter | None:
        while True:
            for name, lane in self._lanes.items():
                if lane:
                    letter = lane.popleft()
                    if name in self._bytes:
                        self._bytes[name] -= len(letter.frame)
                        self.is_full = self._fills()
                    if name == "reply" and not self.is_full:
                        self._room.set()
                    return letter
            if self.closed:
                return None
            self._changed = trio.Event()
            self._at_once = at_once
            await self._changed.wait()


def _writer(pipe: trio.lowlevel.FdStream) -> Callable[[bytes], bool]:
    def write(frame: bytes) -> bool:
        """Returns whether it was written. A pipe takes up to PIPE_BUF bytes whole or not at all."""
        if len(frame) > select.PIPE_BUF:
            return False
        try:
            return os.write(pipe.fileno(), frame) == len(frame)
        except OSError:  # the pipe is full or closed: write_to finds out
            return False

    return write
