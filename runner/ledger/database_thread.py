"""A SqliteFile for programs on trio. A thread does the work, one transaction at a time.

Orders that arrive while a transaction runs are written together in the next one. No order is lost to a
cancelled task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import trio

from runner.ledger.sqlite_file import DatabaseUnusable, Order, SqliteFile

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
File = TypeVar("File", bound=SqliteFile)


class _Waiting:
    """An order and, later, its result."""

    def __init__(self, order: Order, durable: bool) -> None:
        self.order = order
        self.durable = durable
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None


class DatabaseThread(Generic[File]):
    """Every method raises DatabaseUnusable if the file cannot be written, but those that end something."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._turn = trio.Lock()
        self._waiting: list[_Waiting] = []
        self._owed: list[Order] = []  # orders that could not be written yet
        self._changes = file.changes
        # Why a transaction failed; empty: none did since something was last written. Reading alone does not
        # clear it: a disk without room can be read.
        self.fault = ""
        self.on_fault: Callable[[str], None] = lambda fault: None  # called when that changes

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def owed(self) -> int:
        """How many outcomes are in memory only, because the file could not be written."""
        return len(self._owed)

    async def do(
        self,
        order: Callable[Concatenate[File, Arguments], Value],
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Value:
        """Carry out one order: a method of the file. Raises its OrderRefusal."""
        return cast(Value, await self.submit(lambda file: order(file, *args, **named)))

    async def submit(self, order: Order, *, durable: bool = False) -> Any:
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

    async def finish(self, order: Order) -> Any:
        """Carry out an order, and return its result. If that cannot be done now, it is done before the next
        transaction, and this returns None; if this process dies before, it is lost."""
        try:
            return await self.submit(order)
        except DatabaseUnusable:
            self._owed.append(order)
            return None

    async def flush(self) -> bool:
        """Try to write the outcomes that are owed. Returns whether none is left."""
        if self._owed:
            with trio.CancelScope(shield=True):
                async with self._turn:
                    await self._write_waiting()
        return not self._owed

    async def close(self) -> None:
        await self.flush()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._file.close)

    def _note_fault(self, fault: str) -> None:
        changed, self.fault = fault != self.fault, fault
        if changed:
            self.on_fault(fault)

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
            hint = f"; {error.hint}" if isinstance(error, DatabaseUnusable) else ""
            self._note_fault(f"{error}{hint}")
        else:
            if self._file.changes != self._changes:
                self._note_fault("")
        self._changes = self._file.changes
        for each, result in zip(batch, results, strict=True):
            each.done = True
            if isinstance(result, Exception):
                each.error = result
            else:
                each.result = result
