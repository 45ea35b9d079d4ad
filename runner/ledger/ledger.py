"""The ledger for programs on trio. No order is lost to a cancelled task: a call that was accepted is in the
ledger, and its caller has to end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from runner.ledger.database_thread import DatabaseThread
from runner.ledger.file import Acceptance, Attempt, LedgerFile, Recovered, open_file
from runner.ledger.rows import (
    Delivery,
    DeliveryRow,
    DeliveryState,
    EndOfCall,
    InvocationRow,
    KeysFull,
    Verdict,
)


class Ledger(DatabaseThread[LedgerFile]):
    """Made by `open_ledger`. Every method raises LedgerUnusable if the file cannot be written, but those that
    end something."""

    async def accept(self, call: InvocationRow) -> Acceptance:
        """Write a call before it runs. Raises KeyReused, and KeysFull."""
        while True:
            try:
                return await self.do(LedgerFile.accept, call)
            except KeysFull:
                # In an order of its own: what a refused one has removed is undone with it.
                if not await self.do(LedgerFile.forget_keys):
                    raise

    async def ask(self, invocation: str, now: float) -> None:
        """Write that the plugin is asked. When this returns, that survives the end of this process."""
        await self.do(LedgerFile.ask, invocation, now)

    async def end(self, invocation: str, ended: EndOfCall) -> None:
        """Write the outcome of a call. If that cannot be done now, it is done before the next transaction;
        if this process dies before, the outcome is `unknown`, or `not_started`."""
        await self.finish(lambda file: file.end(invocation, ended))

    async def enqueue(self, delivery: Delivery) -> DeliveryRow:
        """Store a delivery. When this returns, it survives the end of the machine. Raises
        DeliveryConflict."""
        stored: DeliveryRow = await self.submit(lambda file: file.enqueue(delivery), durable=True)
        return stored

    async def enqueue_all(self, event: Delivery, hooks: Sequence[tuple[str, str]]) -> list[DeliveryRow]:
        """Store a delivery of an event to each of these hooks, or none, as `enqueue` stores one."""
        stored: list[DeliveryRow] = await self.submit(
            lambda file: file.enqueue_all(event, hooks), durable=True
        )
        return stored

    async def claim(
        self,
        most: int,
        name: Callable[[], str],
        busy: tuple[str, ...] = (),
        running: Counter[str] | None = None,
    ) -> list[Attempt]:
        return await self.do(LedgerFile.claim, most, name, busy, running)

    async def next_due(self, busy: tuple[str, ...] = (), after: float = 0.0) -> float | None:
        return await self.do(LedgerFile.next_due, busy, after)

    async def settle(
        self, attempt: Attempt, verdict: Verdict, ended: EndOfCall, reason: str = ""
    ) -> DeliveryState | None:
        """End an attempt, as `end` ends a call. Returns the state of the delivery, if it is known."""
        state: DeliveryState | None = await self.finish(
            lambda file: file.settle(attempt, verdict, ended, reason)
        )
        return state

    @property
    def recovered(self) -> Recovered:
        """What the last daemon left."""
        return self._file.recovered

    async def note(self, what: str, caller: str, plugin: str = "", detail: str = "{}") -> None:
        await self.do(LedgerFile.note, what, caller, plugin, detail)

    async def note_surely(self, what: str, caller: str, plugin: str, detail: str) -> None:
        """Write a row of the audit about something that has happened, as `end` ends a call."""
        await self.finish(lambda file: file.note(what, caller, plugin, detail))


@asynccontextmanager
async def open_ledger(path: str, **settings: Any) -> AsyncIterator[Ledger]:
    """Open the ledger until the context ends. `settings`: those of `open_file`. Raises LedgerUnusable."""
    file = await trio.to_thread.run_sync(partial(open_file, path, **settings))
    ledger = Ledger(file)
    try:
        yield ledger
    finally:
        await ledger.close()
