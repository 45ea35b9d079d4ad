"""Functions that wait, on the gate's event loop: `async def`, without a library for it.

A task waits for descriptors, or to be woken. When it is woken it checks again whether it can go on. So there
is one way to wait, and to wake a task too often does no harm.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any

from sandbox.gate.loop import BROKEN, Loop, Timer

# The descriptor, and READ, WRITE or CLOSED.
Wanted = tuple[int, int]
CLOSED = 0x2000  # EPOLLRDHUP: the other end sends nothing any more, but what it has sent may be unread
_NEXT_TURN_SECONDS = 1e-6  # a timer for now would be run in this turn
_MOST_AT_ONCE = 32  # steps without a wait, before others have their turn


class Stopped(BaseException):
    """A task is stopped from outside."""


class Task:
    """One running function. Its failure goes to `done`."""

    def __init__(
        self, tasks: Tasks, coroutine: Coroutine[Any, Any, None], done: Callable[[BaseException | None], None]
    ) -> None:
        self._tasks = tasks
        self._coroutine = coroutine
        self._done = done
        self._wanted: tuple[Wanted, ...] = ()
        self._timer: Timer | None = tasks.loop.call_at(tasks.loop.now, self.wake)
        self.ended = False

    def wake(self, ready: Wanted | None = None) -> None:
        self._step(ready, None)

    def throw(self, error: BaseException) -> None:
        """Raise an error where the task waits. Like wake(), it must not be called from within a task."""
        self._step(None, error)

    def stop(self) -> None:
        self._step(None, Stopped())

    def _step(self, ready: Wanted | None, error: BaseException | None) -> None:
        if self.ended:
            return
        self._tasks.loop.cancel(self._timer)
        self._timer = None
        self._tasks.forget(self, self._wanted)
        self._wanted = ()
        failure: BaseException | None = None
        try:
            coroutine = self._coroutine
            wanted, until = coroutine.send(ready) if error is None else coroutine.throw(error)
            self._wanted = wanted
            self._tasks.want(self, wanted)
            if until is not None:
                self._timer = self._tasks.loop.call_at(until, self.wake)
            return
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 -- whoever started the task is told
            failure = raised
        self.ended = True
        self._done(failure)


class Tasks:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._waiting: dict[int, dict[int, Task]] = {}  # by descriptor and by READ, WRITE or CLOSED

    def start(
        self, coroutine: Coroutine[Any, Any, None], done: Callable[[BaseException | None], None]
    ) -> Task:
        """Run it from the next turn of the loop on. `done`: called at its end, with what it raised."""
        return Task(self, coroutine, done)

    @types.coroutine
    def wait(
        self, wanted: Iterable[Wanted] = (), until: float | None = None
    ) -> Generator[tuple[tuple[Wanted, ...], float | None], Wanted | None, Wanted | None]:
        """Wait for one of the descriptors, for the time, or to be woken. Returns the descriptor's."""
        return (yield tuple(wanted), until)

    def want(self, task: Task, wanted: Iterable[Wanted]) -> None:
        for fd, mask in wanted:
            waiting = self._waiting.setdefault(fd, {})
            assert mask not in waiting, "two tasks wait for the same"
            waiting[mask] = task
            self.loop.resume(fd, sum(waiting), lambda events, fd=fd: self._on_event(fd, events))  # type: ignore[misc]

    def forget(self, task: Task, wanted: Iterable[Wanted]) -> None:
        for fd, mask in wanted:
            if self._waiting.get(fd, {}).get(mask) is task:
                del self._waiting[fd][mask]

    def drop(self, fd: int) -> None:
        """A descriptor will be closed."""
        self._waiting.pop(fd, None)

    def _on_event(self, fd: int, events: int) -> None:
        waiting = self._waiting.get(fd, {})
        for mask, task in [each for each in waiting.items() if events & (each[0] | BROKEN)]:
            if waiting.get(mask) is task:  # else the one before has woken or ended it
                task.wake((fd, mask))
        left = self._waiting.get(fd)
        if left is None:
            return
        if left or not events & BROKEN:
            self.loop.change(fd, sum(left))
        else:
            self.loop.forget(fd)  # it would be reported again and again; want() watches it again


class Turns:
    """Counts steps that did not have to wait."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._count = 0

    async def take(self) -> None:
        self._count += 1
        if self._count >= _MOST_AT_ONCE:
            self._count = 0
            await self._tasks.wait(until=self._tasks.loop.now + _NEXT_TURN_SECONDS)
