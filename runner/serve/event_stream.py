"""An answer that arrives over time: server-sent events, whose data is JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runner.serve.desk import off_loop_if_large
from runner.serve.peer import Departure

Emit = Callable[[str, Any], Awaitable[None]]


class EventStream(Response):
    """`produce` emits events until it returns. `on_gone`: called if the client closes the connection before;
    None: then `produce` is cancelled. `at_end`: called in any case, also if `produce` was never begun."""

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        at_end: Callable[[], Awaitable[None] | None],
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        self._produce = produce
        self._at_end = at_end
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] != "HEAD":
                await self._send_events(scope["state"]["departure"], send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if (ending := self._at_end()) is not None:
                with trio.CancelScope(shield=True):
                    await ending

    async def _send_events(self, departure: Departure, send: Send) -> None:
        async def emit(name: str, data: Any) -> None:
            text = await off_loop_if_large(json.dumps, data)
            body = f"event: {name}\ndata: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        with trio.CancelScope() as scope, departure.calls(self._on_gone or scope.cancel):
            # The head goes out with the first part of the body.
            await send({"type": "http.response.body", "body": b": open\n\n", "more_body": True})
            await self._produce(emit)
