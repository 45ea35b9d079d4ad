"""Plugins that live, for programs on asyncio. It has the names of `runner.lifecycle`, and they mean the same.

    async with open_supervisor() as supervisor:
        await supervisor.add(Spec("notes", "./notes"))
        print((await supervisor.call("notes", "notes_add", {"text": "milk"})).value)

A supervisor lives on trio, like a plugin of `runner.aio`, so everything that it can do is awaited. `services`
of a Spec are a `runner.aio.Services`.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from runner import lifecycle
from runner.aio import OnProgress, Reader, Result, awaited, call_with_progress, services_on_trio
from runner.lifecycle import LifecycleNews, Overloaded, Spec, Status, Unavailable, UnknownPlugin
from runner.lifecycle.feed import BoundedFeed as BoundedFeedOnTrio
from runner.lifecycle.feed import LogPiece
from runner.protocol.dialect import Kind, Notice, Progress
from runner.protocol.memory import EVENTS, Share
from runner.trio_thread import TrioSide, trio_side

__all__ = [
    "LifecycleNews",
    "Overloaded",
    "Spec",
    "Status",
    "Supervisor",
    "Unavailable",
    "UnknownPlugin",
    "open_supervisor",
]

_T = TypeVar("_T")
# A plain function or a coroutine function. Each is awaited before the next of the same plugin.
OnEvent = Callable[[str, Notice | Progress], Awaitable[None] | None]


class BoundedFeed(Reader[_T]):
    """For one reader. Ends when it is closed and empty."""

    def __init__(self, feed: BoundedFeedOnTrio[_T], side: TrioSide) -> None:
        super().__init__(feed.__anext__, side)
        self._feed = feed

    @property
    def dropped(self) -> int:
        """How many items the reader has missed."""
        return self._feed.dropped

    def close(self) -> None:
        with suppress(RuntimeError):  # it has ended with its supervisor, and with trio's thread
            self._side.post(self._feed.close)


class Supervisor:
    """Made by `open_supervisor`. Any event loop may use it."""

    def __init__(self, supervisor: lifecycle.Supervisor, side: TrioSide) -> None:
        self._supervisor = supervisor
        self._side = side
        self._waiting = Share(EVENTS)  # progress of all calls that waits for callbacks

    async def add(self, spec: Spec) -> None:
        """Supervise a plugin. Its manifest is read in the background; then an eager one is started. Raises
        ValueError if there is one of this name, or the Spec is wrong."""
        await self._side.run(awaited(self._supervisor.add), self._on_trio(spec))

    async def replace(self, spec: Spec) -> None:
        """Take another Spec for the plugin of this name, or add it. Cells of the old one finish their calls
        and end first; a plugin that ran is started again. Calls that wait are served by the new one."""
        await self._side.run(self._supervisor.replace, self._on_trio(spec))

    async def remove(self, name: str) -> None:
        """End the plugin and forget it."""
        await self._side.run(self._supervisor.remove, name)

    async def plugins(self) -> list[Status]:
        return await self._side.run(awaited(self._supervisor.plugins))

    async def call(
        self,
        name: str,
        tool: str,
        input: Any = None,  # noqa: A002 -- what it is called everywhere else
        *,
        kind: Kind | None = None,
        seconds: float | None = None,
        context: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        caller: str = "",
    ) -> Result:
        """Call a plugin, which is started if it does not run. `seconds` counts from now. `caller`: callers
        take turns where calls have to wait. Raises what `OpenPlugin.call` does, Overloaded, Unavailable and
        UnknownPlugin; ValueError if an argument is wrong. A call is made once: it is not repeated if the
        plugin fails."""
        given: Any = {"kind": kind, "seconds": seconds, "context": context, "caller": caller}
        call = partial(self._supervisor.call, name, tool, input, **given)
        if on_progress is None:
            return await self._side.run(call)
        tell = self._side.callbacks()(on_progress)
        return await self._side.run(call_with_progress, call, tell, self._waiting)

    async def tools(self, name: str, what: str = "tools") -> Sequence[Mapping[str, Any]]:
        """List what a plugin exposes, as `OpenPlugin.list` does."""
        return await self._side.run(self._supervisor.tools, name, what)

    async def start(self, name: str) -> None:
        """Start a plugin and wait until it is ready. Raises Unavailable if it is held, and PluginFailure if
        it fails."""
        await self._side.run(self._supervisor.start, name)

    async def stop(self, name: str, seconds: float | None = None) -> None:
        """End a plugin until it is started again. Calls in flight have `seconds` to finish; None: its own
        number."""
        await self._side.run(self._supervisor.stop, name, seconds)

    async def reset(self, name: str) -> None:
        """Forget the failures of a plugin, and end its quarantine."""
        await self._side.run(self._supervisor.reset, name)

    async def reload(self, name: str) -> None:
        """Read the manifest again, and restart the plugin if it runs."""
        await self._side.run(self._supervisor.reload, name)

    async def drain(self, seconds: float) -> None:
        """Stop all plugins, and wait for them. Calls in flight have `seconds` to finish."""
        await self._side.run(self._supervisor.drain, seconds)

    async def subscribe(self) -> BoundedFeed[LifecycleNews]:
        """What happens to all plugins, from now on. Close it when it is no longer read."""
        return BoundedFeed(await self._side.run(awaited(self._supervisor.subscribe)), self._side)

    async def log_lines(self, name: str) -> list[LogPiece]:
        """What `logs` returns, line by line, each with the time when it was read."""
        return await self._side.run(awaited(self._supervisor.log_lines), name)

    async def logs(self, name: str) -> str:
        """The end of the plugin's stderr, in all its cells so far: 64 KiB at most."""
        return await self._side.run(awaited(self._supervisor.logs), name)

    async def follow(self, name: str) -> BoundedFeed[LogPiece]:
        """What the plugin writes to its stderr, from now on. Close it when it is no longer read."""
        return BoundedFeed(await self._side.run(awaited(self._supervisor.follow), name), self._side)

    def _on_trio(self, spec: Spec) -> Spec:
        return spec._replace(services=services_on_trio(spec.services, self._side))


@asynccontextmanager
async def open_supervisor(
    *,
    jitter: Callable[[], float] = random.random,
    clock: Callable[[], float] = time.time,
    on_event: OnEvent | None = None,
) -> AsyncIterator[Supervisor]:
    """As `runner.lifecycle.open_supervisor`. `on_event` runs on the event loop of this task. `jitter` and
    `clock` run in trio's thread."""
    here = trio_side()
    tell = None if on_event is None else here.callbacks()(on_event)
    opening = lifecycle.open_supervisor(jitter=jitter, clock=clock, on_event=tell)
    async with here.enter(opening) as supervisor:
        yield Supervisor(supervisor, here)
