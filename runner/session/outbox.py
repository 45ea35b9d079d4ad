"""Frames that wait to be written to a plugin, in lanes.

    reply       answers to the plugin's own questions: the plugin may wait for one before it reads on
    key         notifications that a request must not overtake: the contract posts them only while no request
    mouse       of ours is open. A key overtakes deliveries that wait because the pipe is full. When the
    delivery    plugin does not keep up, the oldest keys are dropped. Deliveries are not: the session bounds
                their bytes
    request     our requests, in order
    event       notifications of other contracts. The newest are dropped

Dropped frames are counted.
Within a lane the order is kept. When nothing waits, a short frame goes straight into the pipe. That saves two
turns of the scheduler per call.
"""

from __future__ import annotations

import math
import os
import select
from collections import deque
from collections.abc import Callable
from typing import get_args

import trio

from runner.protocol.dialect import Lane, Send
from runner.protocol.memory import delivery_cost

# Most events that wait. More are dropped.
MOST_EVENTS = 64
# Most keys that wait, and most events of the mouse. With more, the oldest is dropped.
MOST_KEYS = 64
# Most replies that wait, and their bytes: a reply repeats the plugin's id, which can be as long as a frame.
# Beyond them nothing more is read from the plugin, which may then wait for us as we wait for it: many plugins
# write some thousand requests before they read an answer.
MOST_REPLIES = 8192
MOST_REPLY_BYTES = 4 << 20


class WriteStalled(Exception):
    """The plugin does not read what is written to it."""


class QueuedFrame:
    """A frame that waits to be written, or was written."""

    __slots__ = ("frame", "written")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.written = False


class Outbox:
    def __init__(self) -> None:
        # In the order in which they are written.
        self._lanes: dict[Lane, deque[QueuedFrame]] = {lane: deque() for lane in get_args(Lane)}
        self._changed = trio.Event()
        self._room = trio.Event()
        self._delivered = trio.Event()  # replaced by those who wait for one
        self.bytes: dict[Lane, int] = {"reply": 0, "delivery": 0}  # in those lanes
        self._at_once: Callable[[bytes], bool] | None = None  # set while the writer is idle
        self.closed = False  # no more frames are accepted
        self.is_full = False  # there is no room for replies
        self.dropped = 0
        self.sent = 0  # bytes that the pipe took

    def post(self, send: Send) -> QueuedFrame | None:
        """Returns None if the frame was dropped."""
        queued_frame = QueuedFrame(send.frame)
        if self._at_once is not None:  # nothing waits, so there is room
            if self._at_once(queued_frame.frame):
                queued_frame.written = True
                self.sent += len(queued_frame.frame)
                return queued_frame
            self._at_once = None
        if self.closed or not self._has_room(send):
            self.dropped += 1
            return None
        lane = self._lanes[send.lane]
        if send.lane in ("key", "mouse") and len(lane) >= MOST_KEYS:
            lane.popleft()
            self.dropped += 1
        lane.append(queued_frame)
        if send.lane in self.bytes:
            self.bytes[send.lane] += delivery_cost(queued_frame.frame)
            self.is_full = self._fills()
        self._changed.set()
        return queued_frame

    def _has_room(self, send: Send) -> bool:
        return send.lane != "event" or len(self._lanes["event"]) < MOST_EVENTS

    def withdraw(self, queued_frame: QueuedFrame) -> bool:
        """Remove a request from the queue. Returns False if writing has begun: then all of it is written."""
        lane = self._lanes["request"]
        if queued_frame not in lane:
            return False
        lane.remove(queued_frame)
        return True

    async def room(self) -> None:
        """Wait until there is room for replies."""
        while self.is_full and not self.closed:
            if self._room.is_set():  # one event for all tasks that wait
                self._room = trio.Event()
            await self._room.wait()

    async def delivered(self) -> None:
        """Wait until writing of a delivery has begun, or it is closed."""
        if self._delivered.is_set() and not self.closed:
            self._delivered = trio.Event()
        await self._delivered.wait()

    def _fills(self) -> bool:
        return len(self._lanes["reply"]) >= MOST_REPLIES or self.bytes["reply"] >= MOST_REPLY_BYTES

    def close(self) -> None:
        """Take no more frames. Those that wait are still written."""
        self.closed = True
        self._at_once = None
        self._changed.set()
        self._room.set()
        self._delivered.set()

    async def write_to(
        self,
        stream: trio.abc.SendStream,
        is_stalled: Callable[[float], bool] = lambda _: False,
        seconds: float = math.inf,
    ) -> None:
        """Write until it is closed and empty. Raises what the stream raises: then nothing more is written.

        `is_stalled`: asked with the time when a pipe last took a byte, each time it took none for `seconds`.
        If it says yes, WriteStalled is raised."""
        at_once = _writer(stream) if isinstance(stream, trio.lowlevel.FdStream) else None
        try:
            while (queued_frame := await self._next(at_once)) is not None:
                # Shielded: a caller that stops waiting must not leave half a request in the pipe.
                if seconds < math.inf and isinstance(stream, trio.lowlevel.FdStream):
                    await self._send_all(stream, queued_frame.frame, is_stalled, seconds)
                else:
                    await stream.send_all(queued_frame.frame)
                    self.sent += len(queued_frame.frame)
                queued_frame.written = True
        finally:
            self.close()

    async def _next(self, at_once: Callable[[bytes], bool] | None) -> QueuedFrame | None:
        while True:
            for name, lane in self._lanes.items():
                if lane:
                    queued_frame = lane.popleft()
                    if name in self.bytes:
                        self.bytes[name] -= delivery_cost(queued_frame.frame)
                        self.is_full = self._fills()
                    if name == "reply" and not self.is_full:
                        self._room.set()
                    if name == "delivery":
                        self._delivered.set()
                    return queued_frame
            if self.closed:
                return None
            self._changed = trio.Event()
            self._at_once = at_once
            await self._changed.wait()

    async def _send_all(
        self, pipe: trio.lowlevel.FdStream, frame: bytes, is_stalled: Callable[[float], bool], seconds: float
    ) -> None:
        """FdStream.send_all with a clock that starts again with each byte that the pipe takes."""
        left = memoryview(frame)
        while left:
            moved = trio.current_time()
            try:
                taken = os.write(pipe.fileno(), left)
                left = left[taken:]
                self.sent += taken
                await trio.lowlevel.checkpoint()
            except BlockingIOError:
                waiting = True
                while waiting:
                    with trio.move_on_after(seconds):
                        await trio.lowlevel.wait_writable(pipe.fileno())
                        waiting = False
                    if waiting and is_stalled(moved):
                        raise WriteStalled from None
            except OSError as error:
                raise trio.BrokenResourceError from error


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
