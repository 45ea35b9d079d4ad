"""A request that is a call: its headers, and its answer at once or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response

from runner.ledger.rows import InvocationRow
from runner.protocol.calls import CallRequest
from runner.protocol.trace import read_trace
from runner.serve.desk import CallAnswer, CallTarget, Desk, off_loop_if_large
from runner.serve.event_stream import Emit, EventStream
from runner.serve.news import NewsQueue
from runner.serve.refusal import Refused

_MOST_KEY = 255


def with_headers(request: Request, call: CallRequest) -> CallRequest:
    """The call with what the headers of its request say. Raises Refused."""
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= _MOST_KEY and key.isascii() and key.isprintable()):
        raise Refused(400, "invalid_key", f"Idempotency-Key: 1 to {_MOST_KEY} printable ASCII characters")
    seconds = read_seconds(request.headers.get("runner-deadline"), "Runner-Deadline")
    caller, trace = request.scope["state"]["caller"], read_trace(request.headers)
    return call._replace(key=key, seconds=seconds, caller=caller, trace=trace)


def read_seconds(word: str | None, name: str) -> float | None:
    if word is None:
        return None
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise Refused(400, "invalid_deadline", f"{name}: it has to be a number of seconds")
    return seconds


async def answer_call(
    desk: Desk, request: Request, asked: CallRequest, target: CallTarget | None = None
) -> Response:
    """Make a call, and answer its request. Raises Refused; then nothing was accepted."""
    accepted = await desk.accept(asked, target)
    if isinstance(accepted, CallAnswer):
        return await _answer(accepted)
    row = accepted

    def give_up() -> None:
        desk.give_up(row.id)

    if "text/event-stream" in request.headers.get("accept", ""):
        return EventStream(lambda emit: _stream(desk, row, asked, emit), lambda: desk.abandon(row), give_up)
    with request.scope["state"]["departure"].calls(give_up):
        return await _answer(await desk.make(row, asked))


async def _stream(desk: Desk, row: InvocationRow, asked: CallRequest, emit: Emit) -> None:
    news = NewsQueue[Mapping[str, Any]]()

    async def pass_on() -> None:
        async for value in news:
            await emit("progress", dict(value))

    await emit("accepted", {"id": row.id})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_on)
        try:
            answer = await desk.make(row, asked._replace(on_progress=lambda value: news.put(value, value)))
        finally:
            news.close()
    await emit(
        "result" if answer.is_ok else "error",
        {"status": answer.status, "dropped_progress": news.dropped, **answer.document},
    )


async def _answer(answer: CallAnswer) -> Response:
    text = await off_loop_if_large(json.dumps, answer.document)
    return Response(text, answer.status, dict(answer.headers), "application/json")
