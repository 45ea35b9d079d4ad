"""A call that waits for its answer; and how a task waits for the first of several events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import trio

from runner.protocol.dialect import Refusal, Reply, Violation
from runner.session.outbox import Letter

OnProgress = Callable[[Mapping[str, Any]], None]


class Waiter:
    """One call that waits for its answer."""

    __slots__ = ("_on_progress", "answer", "events", "fault", "grace", "late", "letters", "told", "woken")

    def __init__(self, on_progress: OnProgress | None, grace: float = 0.0) -> None:
        """`grace`: seconds that the plugin has to answer after the call was cancelled."""
        self.grace = grace
        self.letters: list[Letter] = []  # the request, on its way
        self.told = False  # the plugin knows that the call was cancelled
        self.late: Any = None  # what was answered after the time was up
        self.events = 0  # that came about the call
        self.answer: Reply | Refusal | Violation | None = None
        self.fault: Exception | None = None  # raised by the caller's own callback
        self.woken = trio.Event()
        self._on_progress = on_progress

    def progress(self, value: Mapping[str, Any]) -> None:
        self.events += 1
        if self._on_progress is not None and self.fault is None:
            try:
                self._on_progress(value)
            except Exception as error:  # noqa: BLE001 -- raised to the caller whose callback it is, not in the session
                self.fault = error
                self.woken.set()


async def first_of(*events: trio.Event) -> None:
    """Wait until one of them is set."""
    try:
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            for event in events:
                nursery.start_soon(wait, event)
    except BaseExceptionGroup as group:
        # The tasks raise nothing, so this is KeyboardInterrupt. It leaves here as itself, not in a group.
        raise group.exceptions[0] from None
