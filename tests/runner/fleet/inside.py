"""A worker in the test's process, whose plugins are functions: what a fleet does, without any launch."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from runner.fleet import client
from runner.fleet.client import FleetClient, FleetPlugin, open_client
from runner.fleet.connection import connect, read_address
from runner.fleet.crossing import AsyncioThread, end_tasks, open_asyncio_thread
from runner.fleet.messages import FleetCall
from runner.fleet.worker import FleetWorker, WorkerOptions
from runner.fleet.worker_plugins import Hold, Offer, OnAsk, Performed, unperformed
from runner.ledger.retry import Schedule
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest, OnProgress
from runner.serve.desk import CallAnswer

_ACT_SECONDS = 120
QUICK = Schedule(attempts=3, first_seconds=0.01, jitter=0.0)
EFFECTS = {"read": "read_only", "put": "idempotent_write", "pay": "non_idempotent_write"}


class Functions:
    """A shelf. Each tool notes that it ran and answers; `hold` waits until it is let go."""

    def __init__(self, name: str = "plain", digest: str = "d" * 64) -> None:
        self.offer = Offer(name, digest, "mcp", "1", ("event",), ("event",))
        self.held: dict[str, Hold] = {}
        self.stderr = ""
        self.ran: list[tuple[str, int | None]] = []  # tool, attempt
        self.at_once = self.most_at_once = 0
        self.begun = trio.Event()
        self.go = trio.Event()
        self.outcome: Outcome | None = None
        self.fate: Any = "ended"
        self.asks = True  # its plugin
        self.before_asking: Callable[[], object] = lambda: None

    @property
    def plugin(self) -> FleetPlugin:
        return FleetPlugin(self.offer.name, self.offer.digest, durable=self.offer.durable)

    def offers(self) -> tuple[Offer, ...]:
        return (self.offer,)

    def holds(self) -> dict[str, Hold]:
        return self.held

    async def logs(self, offer: Offer) -> str:
        return self.stderr

    async def reset(self, offer: Offer) -> str:
        self.held = {}
        return "idle"

    def effect(self, offer: Offer, tool: str) -> str:
        return EFFECTS.get(tool, "unknown")

    async def perform(
        self,
        offer: Offer,
        call: FleetCall,
        caller: str,
        attempt: int | None,
        on_progress: OnProgress,
        on_ask: OnAsk,
    ) -> Performed:
        self.before_asking()
        if self.asks:
            await on_ask(1.0)
        self.ran.append((call.tool, attempt))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.begun.set()
        on_progress({"message": "half"})
        try:
            if isinstance(call.input, dict) and call.input.get("hold"):
                await self.go.wait()
        finally:
            self.at_once -= 1
        if self.outcome is not None:
            return unperformed(call.id, self.outcome, self.fate)._replace(asked=self.asks)
        document = {"id": call.id, "value": [caller, call.tool, call.input], "invocation": None}
        return Performed(CallAnswer(200, document), Outcome("ok", "call", ""))


def new_call(
    plugin: str,
    tool: str,
    given: Any = None,
    *,
    kind: str | None = None,
    seconds: float | None = None,
    call: str | None = None,
    retry: bool = True,
) -> FleetCall:
    request = CallRequest(plugin, tool, given, kind, seconds)
    return client.new_call(request, call=call, retry=retry)


class Inside:
    """On asyncio: a client, and workers that are started and cut off."""

    def __init__(self, url: str, thread: AsyncioThread, client: FleetClient, said: list[str]) -> None:
        self.url, self.thread, self.client, self.said = url, thread, client, said

    @asynccontextmanager
    async def worker(
        self, shelf: Functions, name: str = "w", slots: int = 4, **options: Any
    ) -> AsyncIterator[FleetWorker]:
        given = WorkerOptions(name, slots, schedule=QUICK, **options)
        async with connect(read_address(self.url), name, stays=True) as bus:
            worker = FleetWorker(bus, self.thread, shelf, given, self.said.append)
            ready = asyncio.Event()
            task = asyncio.ensure_future(worker.run(ready.set))
            waiting = asyncio.ensure_future(ready.wait())
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                waiting.cancel()
            assert ready.is_set(), task.result()
            try:
                yield worker
            finally:
                self.thread._soon(shelf.go.set)
                await worker.drain(30)
                await end_tasks(task, waiting)

    async def durable(self, shelf: Functions, tool: str, given: Any = None, **options: Any) -> CallAnswer:
        call = new_call(shelf.offer.name, tool, given, **options)
        return await self.client.call(shelf.plugin, call, durable=True)

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Poll: what NATS does has no event of ours."""
        async with asyncio.timeout(60):
            while True:
                found = condition()
                if isinstance(found, Awaitable):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.01)


async def known(worker: FleetWorker) -> None:
    """Until the server knows what a worker has subscribed to. Its answer to a message shows that: the PING of
    nats-py's `flush` overtakes what waits to be sent."""
    await worker._show()


def inside(url: str, act: Callable[[Inside], Awaitable[Any]]) -> Any:
    """Run it on asyncio, in a thread beside trio, as the product does."""

    async def on_asyncio(thread: AsyncioThread) -> Any:
        said: list[str] = []
        stacks = io.StringIO()

        def look() -> None:
            for task in asyncio.all_tasks():
                task.print_stack(file=stacks)

        # A call that nobody ends would be waited for until its deadline. The rest of a test's bound is for
        # workers that drain while servers do not answer.
        looking = asyncio.get_running_loop().call_later(_ACT_SECONDS - 1, look)
        opening = open_client(read_address(url), say=said.append, stays=True)
        try:
            async with asyncio.timeout(_ACT_SECONDS), opening as client:
                return await act(Inside(url, thread, client, said))
        except TimeoutError as error:
            error.add_note(f"{said}\n{stacks.getvalue()}")
            raise
        finally:
            looking.cancel()

    async def main() -> Any:
        async with open_asyncio_thread() as thread:
            return await thread.run(on_asyncio, thread)

    return trio.run(main)
