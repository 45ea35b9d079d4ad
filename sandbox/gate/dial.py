"""Connect to one of several vetted addresses of a host."""

from __future__ import annotations

import _socket as socket
import os

from sandbox.gate.loop import WRITE, Loop, Timer
from sandbox.speed.typed import Callable, Sequence

MOST_DIALLED = 8  # addresses of one name
_NEXT_SECONDS = 0.25  # until the next address is tried in parallel (RFC 8305)


def _is_connected(attempt: socket.socket) -> bool:
    try:
        attempt.getpeername()
    except OSError:
        return False
    return True


class Dial:
    """Connection attempts to the addresses of one host. Calls `done` once, after the constructor has
    returned: with a connected socket and its address, or with None and the reason the last attempt failed."""

    __slots__ = ("_again", "_attempts", "_done", "_left", "_loop", "_port", "_reason", "_started", "_timer")

    def __init__(
        self,
        loop: Loop,
        addresses: Sequence[str],
        port: int,
        done: Callable[[socket.socket | None, str], None],
        again: Callable[[], None],
    ) -> None:
        """`again`: called for each attempt but the first."""
        self._loop = loop
        self._again = again
        self._started = False
        self._left = list(addresses[:MOST_DIALLED])
        self._port = port
        self._done: Callable[[socket.socket | None, str], None] | None = done
        self._attempts: dict[int, socket.socket] = {}
        self._reason = "no address is left"
        self._timer: Timer | None = loop.call_at(loop.now, self._dial_next)

    def cancel(self) -> None:
        self._done = None
        self._loop.cancel(self._timer)
        for attempt in self._attempts.values():
            self._loop.retire(attempt)
        self._attempts.clear()

    def _dial_next(self) -> None:
        self._loop.cancel(self._timer)
        while self._left:
            address = self._left.pop(0)
            if self._started:
                self._again()
            self._started = True
            if self._dial(address):
                if self._left:
                    self._timer = self._loop.call_later(_NEXT_SECONDS, self._dial_next)
                return
        if not self._attempts:
            self._finish(None, self._reason)

    def _dial(self, address: str) -> bool:
        """Start an attempt. Returns whether it is under way."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            attempt = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            self._note(address, error.errno)
            return False
        fd = attempt.fileno()
        try:
            try:
                attempt.connect((address, self._port))
            except BlockingIOError:
                pass
            if _is_connected(attempt):  # a server near by
                self._finish(attempt, address)
                return True
            self._loop.watch(fd, WRITE, lambda _: self._on_event(fd, address))
        except OSError as error:
            self._note(address, error.errno)
            attempt.close()
            return False
        self._attempts[fd] = attempt
        return True

    def _on_event(self, fd: int, address: str) -> None:
        attempt = self._attempts.pop(fd, None)
        if attempt is None:
            return
        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._note(address, code)
            self._loop.retire(attempt)
            self._dial_next()
            return
        self._loop.forget(fd)
        self._finish(attempt, address)

    def _note(self, address: str, code: int | None) -> None:
        self._reason = f"cannot be reached at {address}: {os.strerror(code or 0)}"

    def _finish(self, connection: socket.socket | None, text: str) -> None:
        done = self._done
        self.cancel()
        if done is not None:
            done(connection, text)
