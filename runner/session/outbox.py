"""What waits to be written to a plugin, in three lanes.

Replies to the plugin's own questions go first: it may be waiting for one before it reads on. Then our
requests, in order. Events come last, and when the plugin does not keep up the newest are dropped and counted:
whoever publishes must not be held up by one slow reader, nor may its backlog grow.

When nothing waits, a short frame goes straight into the pipe: two turns of the scheduler less for each call.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable

import trio

from runner.protocol.dialect import Lane, Send

EVENTS = 64  # that wait. More are dropped
REPLIES = 256  # that wait before nothing more is read of what the plugin asks
REPLY_BYTES = 4 << 20  # of these: each repeats the plugin's own id, which can be as long as a frame


class Letter:
    """A frame on its way."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.written = False


class Outbox:
    def __init__(self) -> None:
        # In the order they are served.
        self._lanes: dict[Lane, deque[Letter]] = {"reply": deque(), "request": deque(), "event": deque()}
        self._changed = trio.Event()
        self._room = trio.Event()
        self._reply_bytes = 0
        self._at_once: Callable[[bytes], bool] | None = None  # while who writes has nothing to do
        self.closed = False  # nothing more is taken
        self.dropped = 0

    def post(self, send: Send) -> Letter | None:
        """None: it was dropped."""
        lane = self._lanes[send.lane]
        if self.closed or (send.lane == "event" and len(lane) >= EVENTS):
            self.dropped += 1
            return None
        letter = Letter(send.frame)
        if self._at_once is not None and self._at_once(letter.frame):
            letter.written = True
            return letter
        self._at_once = None
        lane.append(letter)
        if send.lane == "reply":
            self._reply_bytes += len(letter.frame)
        self._changed.set()
        return letter

    def withdraw(self, letter: Letter) -> bool:
        """Whether it need not be written any more, and will not be. One that was begun is written whole."""
        lane = self._lanes["request"]
        if letter not in lane:
            return False
        lane.remove(letter)
        return True

    async def room(self) -> None:
        """Until there is some for replies."""
        while self._is_full and not self.closed:
            if self._room.is_set():  # one for all who wait
                self._room = trio.Event()
            await self._room.wait()

    @property
    def _is_full(self) -> bool:
        return len(self._lanes["reply"]) >= REPLIES or self._reply_bytes >= REPLY_BYTES

    def close(self) -> None:
        """What is waiting is still written, if anybody writes."""
        self.closed = True
        self._at_once = None
        self._changed.set()
        self._room.set()

    async def write_to(self, stream: trio.abc.SendStream) -> None:
        """Until it is closed and empty. Raises what the stream raises: then nothing more can be written."""
        at_once = _writer(stream) if isinstance(stream, trio.lowlevel.FdStream) else None
        try:
            while (letter := await self._next(at_once)) is not None:
                # One piece: whoever gives up waiting for an answer does not tear the frame that asked.
                await stream.send_all(letter.frame)
                letter.written = True
        finally:
            self.close()

    async def _next(self, at_once: Callable[[bytes], bool] | None) -> Letter | None:
        while True:
            for name, lane in self._lanes.items():
                if lane:
                    letter = lane.popleft()
                    if name == "reply":
                        self._reply_bytes -= len(letter.frame)
                        if not self._is_full:
                            self._room.set()
                    return letter
            if self.closed:
                return None
            self._changed = trio.Event()
            self._at_once = at_once
            await self._changed.wait()


def _writer(pipe: trio.lowlevel.FdStream) -> Callable[[bytes], bool]:
    def write(frame: bytes) -> bool:
        """Whether it was written. A pipe takes so few bytes whole or not at all: no frame is torn."""
        if len(frame) > select.PIPE_BUF:
            return False
        try:
            return os.write(pipe.fileno(), frame) == len(frame)
        except OSError:  # it is full, or closed: who waits for it will see
            return False

    return write
