"""What waits to be written to a plugin, in three lanes.

Replies to the plugin's own questions go first: it may be waiting for one before it reads on. Then our
requests, in order. Events come last, and when the plugin does not keep up the newest are dropped and counted:
whoever publishes must not be held up by one slow reader, nor may its backlog grow.
"""

from __future__ import annotations

from collections import deque

import trio

from runner.dialect import Lane, Send

EVENTS = 64  # that wait. More are dropped
REPLIES = 256  # that wait before nothing more is read of what the plugin asks


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
        self.closed = False  # nothing more is taken
        self.dropped = 0

    def post(self, send: Send) -> Letter | None:
        """None: it was dropped."""
        lane = self._lanes[send.lane]
        if self.closed or (send.lane == "event" and len(lane) >= EVENTS):
            self.dropped += 1
            return None
        letter = Letter(send.frame)
        lane.append(letter)
        self._changed.set()
        return letter

    async def room(self) -> None:
        """Until there is some for replies."""
        while len(self._lanes["reply"]) >= REPLIES and not self.closed:
            self._room = trio.Event()
            await self._room.wait()

    def close(self) -> None:
        """What is waiting is still written, if anybody writes."""
        self.closed = True
        self._changed.set()
        self._room.set()

    async def write_to(self, stream: trio.abc.SendStream) -> None:
        """Until it is closed and empty. Raises what the stream raises: then nothing more can be written."""
        try:
            while (letter := await self._next()) is not None:
                # One piece: whoever gives up waiting for an answer does not tear the frame that asked.
                await stream.send_all(letter.frame)
                letter.written = True
        finally:
            self.close()

    async def _next(self) -> Letter | None:
        while True:
            for name, lane in self._lanes.items():
                if lane:
                    letter = lane.popleft()
                    if name == "reply" and len(lane) < REPLIES:
                        self._room.set()
                    return letter
            if self.closed:
                return None
            self._changed = trio.Event()
            await self._changed.wait()
