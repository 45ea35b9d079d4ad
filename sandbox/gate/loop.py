"""The gate's event loop: epoll, timers in a heap, no threads.

All modules of the gate use `_socket`: the module `socket` makes a thousand constants, which cost every gate
1 MB and 5 ms.
"""

from __future__ import annotations

import _socket as socket
import heapq
import itertools
import select
import time

from sandbox.speed.typed import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
BROKEN = select.EPOLLERR | select.EPOLLHUP  # reported whether asked for or not

Handler = Callable[[int], None]

_MOST_EVENTS = 128  # handled before the timers are checked again
_FEWEST_SWEPT = 256  # cancelled timers in the heap, before it is rebuilt without them


class Timer:
    """One call in the future."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act


class Loop:
    """A level-triggered event loop. Sockets are closed only after all events of one wait are handled, so that
    no event reaches another socket that got the same descriptor."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._masks: dict[int, int] = {}
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        self._retired: list[socket.socket] = []

    # --- descriptors -------------------------------------------------------------------------------

    def watch(self, fd: int, mask: int, handler: Handler) -> None:
        """Call `handler` with the events of `fd`. With an empty mask only errors are reported."""
        if fd in self._handlers:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._handlers[fd], self._masks[fd] = handler, mask

    def change(self, fd: int, mask: int) -> None:
        if self._masks.get(fd) not in (mask, None):
            self._epoll.modify(fd, mask)
            self._masks[fd] = mask

    def resume(self, fd: int, mask: int, handler: Handler) -> None:
        """Like change(), but a descriptor that is not watched is watched again."""
        if fd in self._handlers:
            self.change(fd, mask)
        else:
            self.watch(fd, mask, handler)

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            del self._masks[fd]
            self._epoll.unregister(fd)

    def retire(self, connection: socket.socket) -> None:
        """Stop watching the socket now, and close it when all events of this wait are handled."""
        self.forget(connection.fileno())
        self._retired.append(connection)

    # --- timers ------------------------------------------------------------------------------------

    def call_at(self, when: float, act: Callable[[], None]) -> Timer:
        timer = Timer(act)
        heapq.heappush(self._heap, (when, next(self._numbers), timer))
        return timer

    def call_later(self, seconds: float, act: Callable[[], None]) -> Timer:
        return self.call_at(self.now + seconds, act)

    def cancel(self, timer: Timer | None) -> None:
        if timer is None or timer.act is None:
            return
        timer.act = None
        self._cancelled += 1
        if self._cancelled > max(_FEWEST_SWEPT, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].act is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    # --- running -----------------------------------------------------------------------------------

    def run(self, after_each: Callable[[], None]) -> None:
        """Run until a handler raises. `after_each`: called after each wait and its events."""
        while True:
            self.run_once()
            after_each()

    def run_once(self, most_seconds: float | None = None) -> None:
        events = self._epoll.poll(self._wait_seconds(most_seconds), _MOST_EVENTS)
        self.now = time.monotonic()
        for fd, mask in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)
        self._run_timers()
        for connection in self._retired:
            connection.close()
        self._retired.clear()

    def _wait_seconds(self, most: float | None) -> float | None:
        heap = self._heap
        while heap and heap[0][2].act is None:
            heapq.heappop(heap)
            self._cancelled = max(0, self._cancelled - 1)
        if not heap:
            return most
        wait = max(0.0, heap[0][0] - time.monotonic())
        return wait if most is None else min(wait, most)

    def _run_timers(self) -> None:
        heap = self._heap
        while heap and heap[0][0] <= self.now:
            timer = heapq.heappop(heap)[2]
            act, timer.act = timer.act, None
            if act is None:
                self._cancelled = max(0, self._cancelled - 1)
            else:
                act()


def accept(listener: socket.socket) -> socket.socket:
    """Accept the next connection, as a non-blocking socket."""
    fd, _ = listener._accept()  # type: ignore[attr-defined]  # what accept() of the module socket calls
    connection = socket.socket(listener.family, listener.type, listener.proto, fd)
    connection.setblocking(False)
    return connection


class RateLimiter:
    """Stops reading from some descriptors after so many events at once, and then lets so many through each
    second. It bounds the processor time that a plugin can cause in the gate, also where the plugin has no cpu
    limit (cpu_limiter.py)."""

    def __init__(self, loop: Loop, per_second: int, fds: tuple[int, ...], at_once: int = 0) -> None:
        """`at_once`: 0 for as many as in a second."""
        self._loop = loop
        self._per_second = per_second
        self._fds = fds
        self._most = self._room = float(at_once or per_second)
        self._since = loop.now
        self._on = False

    def count(self) -> bool:
        """Count one event. Returns whether to stop reading: the descriptors are not watched until there is
        room again."""
        now = self._loop.now
        self._room = min(self._most, self._room + (now - self._since) * self._per_second) - 1
        self._since = now
        if self._room < 1:
            self.pause()
        return self._on

    def pause(self) -> None:
        """Do not watch the descriptors for a second, or longer if more was counted than there was room
        for."""
        if not self._on:
            self._on = True
            for fd in self._fds:
                self._loop.change(fd, 0)
            self._loop.call_later(max(1.0, (1 - self._room) / self._per_second), self._release)

    def _release(self) -> None:
        self._on = False
        for fd in self._fds:
            self._loop.change(fd, READ)
