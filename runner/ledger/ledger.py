"""The ledger for programs on trio. A thread does the work, one transaction at a time.

Orders that arrive while a transaction runs are written together in the next one. No order is lost to a
cancelled task: a call that was accepted is in the ledger, and its caller has to end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import trio

from runner.ledger.file import Acceptance, Attempt, LedgerFile, LedgerUnusable, Order, open_file
from runner.ledger.rows import Accepted, Delivery, DeliveryRow, EndOfCall, Verdict

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class _Waiting:
    """An order and, later, its result."""

    def __init__(self, order: Order, durable: bool) -> None:
        self.order = order
        self.durable = durable
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None


class Ledger:
    """Made by `open_ledger`. Every method raises LedgerUnusable if the file cannot be written, but those that
    end something."""

    def __init__(self, file: LedgerFile) -> None:
        self._file = file
        self._turn = trio.Lock()
        self._waiting: list[_Waiting] = []
        self._owed: list[Order] = []  # ends that could not be written yet
        self.fault = ""  # why the last transaction failed; empty: it did not

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def owed(self) -> int:
        """How many outcomes are in memory only, because the file could not be written."""
        return len(self._owed)

    async def accept(self, call: Accepted) -> Acceptance:
        """Write a call before it runs. Raises KeyReused."""
        return await self.do(LedgerFile.accept, call)

    async def end(self, invocation: str, ended: EndOfCall) -> None:
        """Write the outcome of a call. If that cannot be done now, it is done before the next transaction;
        if this process dies before, the outcome is `unknown`."""
        await self._finish(lambda file: file.end(invocation, ended))

    async def enqueue(self, delivery: Delivery) -> DeliveryRow:
        """Store a delivery. When this returns, it survives the end of the machine. Raises
        DeliveryConflict."""
        stored: DeliveryRow = await self._submit(lambda file: file.enqueue(delivery), durable=True)
        return stored

    async def enqueue_all(self, event: Delivery, hooks: Sequence[tuple[str, str]]) -> list[DeliveryRow]:
        """Store a delivery of an event to each of these hooks, or none, as `enqueue` stores one."""
        stored: list[DeliveryRow] = await self._submit(
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

    async def next_due(self, busy: tuple[str, ...] = ()) -> float | None:
        return await self.do(LedgerFile.next_due, busy)

    async def settle(self, attempt: Attempt, verdict: Verdict, ended: EndOfCall, reason: str = "") -> None:
        """End an attempt, as `end` ends a call."""
        await self._finish(lambda file: file.settle(attempt, verdict, ended, reason))

    async def note(self, what: str, caller: str, plugin: str = "", detail: str = "{}") -> None:
        await self.do(LedgerFile.note, what, caller, plugin, detail)

    async def do(
        self,
        order: Callable[Concatenate[LedgerFile, Arguments], Value],
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Value:
        """Carry out one order: a method of LedgerFile. Raises its LedgerRefusal."""
        return cast(Value, await self._submit(lambda file: order(file, *args, **named)))

    async def _submit(self, order: Order, *, durable: bool = False) -> Any:
        """Carry out one order in a transaction, with others that wait for one. `durable`: it also survives
        the end of the machine."""
        waiting = _Waiting(order, durable)
        self._waiting.append(waiting)
        # Bounded by the time that a transaction waits for a lock. Without a shield the order might be written
        # although its caller was told that it was not.
        with trio.CancelScope(shield=True):
            async with self._turn:
                if not waiting.done:
                    await self._write_waiting()
        if waiting.error is not None:
            raise waiting.error
        return waiting.result

    async def flush(self) -> bool:
        """Try to write the outcomes that are owed. Returns whether none is left."""
        if self._owed:
            with trio.CancelScope(shield=True):
                async with self._turn:
                    await self._write_waiting()
        return not self._owed

    async def _finish(self, order: Order) -> None:
        try:
            await self._submit(order)
        except LedgerUnusable:
            self._owed.append(order)

    async def _write_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        owed, self._owed = self._owed, []
        write = partial(
            self._file.write,
            [*owed, *(each.order for each in batch)],
            durable=any(each.durable for each in batch),
        )
        try:
            results = (await trio.to_thread.run_sync(write))[len(owed) :]
        except Exception as error:  # noqa: BLE001 -- each who waits raises it
            self._owed[:0] = owed
            results = [error] * len(batch)
            hint = f"; {error.hint}" if isinstance(error, LedgerUnusable) else ""
            self.fault = f"{error}{hint}"
        else:
            self.fault = ""
        for each, result in zip(batch, results, strict=True):
            each.done = True
            if isinstance(result, Exception):
                each.error = result
            else:
                each.result = result


@asynccontextmanager
async def open_ledger(path: str, **settings: Any) -> AsyncIterator[Ledger]:
    """Open the ledger until the context ends. `settings`: those of `open_file`. Raises LedgerUnusable."""
    file = await trio.to_thread.run_sync(partial(open_file, path, **settings))
    ledger = Ledger(file)
    try:
        yield ledger
    finally:
        await ledger.flush()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(file.close)
