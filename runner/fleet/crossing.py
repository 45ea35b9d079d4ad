"""From trio to asyncio and back, in one process: trio has the main thread, nats-py a thread of its own.

A crossing costs some 0.1 ms, so that a call crosses once and not with each message (docs/fleet.md has the
figures). trio is in the main thread because the fork server ends with the thread that started it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

Value = TypeVar("Value")
_AGAIN_SECONDS = 0.5  # until a task is cancelled once more


class AsyncioThread:
    """Made by `open_asyncio_thread`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="asyncio", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def run(self, function: Callable[..., Awaitable[Value]], *args: Any) -> Value:
        """On trio: call a function on asyncio. If this task is cancelled, so is the one on asyncio; its end
        is waited for."""
        ended = trio.Event()
        tasks: list[asyncio.Task[Value]] = []

        def begin() -> None:
            task = self.loop.create_task(_as_coroutine(function, args))
            tasks.append(task)
            task.add_done_callback(lambda _: self._soon(ended.set))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self.loop.call_soon_threadsafe(begin)
        try:
            await ended.wait()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                while not ended.is_set():
                    self.loop.call_soon_threadsafe(cancel)
                    with trio.move_on_after(_AGAIN_SECONDS):
                        await ended.wait()
            raise
        return tasks[0].result()

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            pass

    async def on_trio(self, function: Callable[..., Awaitable[Value]], *args: Any) -> Value:
        """On asyncio: call a function on trio. If this task is cancelled, so is the one on trio."""
        future: asyncio.Future[Value] = self.loop.create_future()
        scope = trio.CancelScope()

        def tell(result: Value | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # the function's own result

        async def main() -> None:
            result: Value | None = None
            error: Exception | None = None
            try:
                with scope:
                    result = await function(*args)
                if scope.cancelled_caught:
                    error = CancelledOnTrio()
            except trio.Cancelled:
                error = CancelledOnTrio()
                raise
            except Exception as raised:  # noqa: BLE001 -- raised on the other side
                error = raised
            finally:
                self.loop.call_soon_threadsafe(tell, result, error)

        self._soon(self._nursery.start_soon, main)
        try:
            return await future
        except asyncio.CancelledError:
            self._soon(scope.cancel)
            raise

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """On asyncio: cancel tasks until they have ended. Once is not enough: asyncio.wait_for, by which nats-py
    waits for answers, forgets a cancellation that comes together with the answer (before Python 3.12), and a
    task that works for ever would do so."""
    asked = False
    while waiting := [each for each in tasks if not each.done()]:
        for each in waiting:
            each.cancel()
        try:
            await asyncio.wait(waiting, timeout=_AGAIN_SECONDS)
        except asyncio.CancelledError:
            asked = True
    if asked:
        raise asyncio.CancelledError


async def _as_coroutine(function: Callable[..., Awaitable[Value]], args: tuple[Any, ...]) -> Value:
    return await function(*args)


class CancelledOnTrio(Exception):
    """The function on trio was cancelled from there."""


@asynccontextmanager
async def open_asyncio_thread() -> AsyncIterator[AsyncioThread]:
    """The caller ends its own tasks on asyncio before it leaves the context."""
    failure: BaseException | None = None
    # What the body raises is kept until after the nursery, which would put it into a group.
    async with trio.open_nursery() as nursery:
        thread = AsyncioThread(nursery)
        try:
            yield thread
        except BaseException as error:  # noqa: BLE001 -- raised again below
            failure = error
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(thread.end)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure
