"""An answer that arrives over time: server-sent events, whose data is JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runner.serve.desk import off_loop_if_large

Emit = Callable[[str, Any], Awaitable[None]]


class EventStream(Response):
    """`produce` emits events until it returns. `on_gone`: called if the client closes the connection before;
    None: then `produce` is cancelled."""

    media_type = "text/event-stream"

    def __init__(
        self, produce: Callable[[Emit], Awaitable[None]], on_gone: Callable[[], None] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        self._produce = produce
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # Hypercorn holds the header back until there is a body.
        await send({"type": "http.response.body", "body": b": open\n\n", "more_body": True})

        async def emit(name: str, data: Any) -> None:
            text = await off_loop_if_large(json.dumps, data)
            body = f"event: {name}\ndata: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async with trio.open_nursery() as nursery:
            gone = nursery.cancel_scope.cancel if self._on_gone is None else self._on_gone
            nursery.start_soon(call_when_gone, receive, gone)
            await self._produce(emit)
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def call_when_gone(receive: Receive, gone: Callable[[], None]) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()
