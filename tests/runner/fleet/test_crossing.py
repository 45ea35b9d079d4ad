"""Tasks that a cancellation does not reach at once end all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio

from runner.fleet.crossing import end_tasks, open_asyncio_thread
from tests.runner.fleet.bus import Bus
from tests.runner.fleet.inside import Inside, inside
from tests.runner.fleet.test_worker import shelf


async def forgetful(began: asyncio.Event) -> None:
    """As asyncio.wait_for before Python 3.12, whose answer came together with the cancellation."""
    try:
        began.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass
    await asyncio.Event().wait()


def test_a_task_is_cancelled_until_it_ends() -> None:
    async def main() -> None:
        began = asyncio.Event()
        task = asyncio.ensure_future(forgetful(began))
        await began.wait()
        task.cancel()
        assert (await asyncio.wait((task,), timeout=0.01))[1]  # the control: it goes on
        async with asyncio.timeout(60):
            await end_tasks(task)
        assert task.cancelled()
        # Who is cancelled while he waits for that learns it then.
        began.clear()
        task = asyncio.ensure_future(forgetful(began))
        await began.wait()
        ending = asyncio.ensure_future(end_tasks(task))
        await asyncio.sleep(0)
        ending.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait((ending,))
        assert ending.cancelled() and task.cancelled()

    asyncio.run(main())


def test_a_task_of_trio_does_not_wait_for_one_that_forgot() -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with open_asyncio_thread() as thread, trio.open_nursery() as nursery:
                began = asyncio.Event()
                token = trio.lowlevel.current_trio_token()

                async def on_asyncio() -> None:
                    token.run_sync_soon(nursery.cancel_scope.cancel)
                    await forgetful(began)

                nursery.start_soon(thread.run, on_asyncio)

    trio.run(main)


@pytest.mark.needs("nats")
def test_a_worker_ends_although_a_loop_of_it_forgot(bus: Bus) -> None:
    async def act(it: Inside) -> None:
        async with asyncio.timeout(60):
            async with it.worker(shelf()) as worker:
                began = asyncio.Event()

                async def unanswered(*_: Any, **__: Any) -> None:
                    await forgetful(began)

                setattr(worker._js, "get_msg", unanswered)  # noqa: B010 -- a method
                worker._doubted.set()
                await began.wait()

    inside(bus.url, act)
