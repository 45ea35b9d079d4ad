"""What a server elsewhere says while it works on a call: progress, and questions for its person.

It comes as server-sent events before the answer. A server can send as many as it likes: so few are read, each
is small, and none of them makes the call last longer than it may.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from runner.protocol import wire
from runner.protocol.calls import OnProgress
from runner.protocol.host_services import HostError
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.fetch import OK, OnPart
from runner.protocol.https.request import Headers
from runner.protocol.https.response import HttpsResponse
from runner.protocol.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND

ELICIT = "elicitation/create"
CALL_SECONDS = 60.0  # for an answer, or for the next progress
MOST_SECONDS = 900.0  # for all of it
_MOST_EVENTS = 2000  # of one call that are not its answer
_MOST_EVENT_BYTES = 64 << 10
_MOST_QUESTIONS = 8  # of one call
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_OVERLAP = 3
_OPEN_SECONDS = 5.0  # for a stream of the server's own
_EVENT_ID = re.compile(rb"(?m)^id: ?([!-~]{1,500})\r?$")
_RETRY = re.compile(rb"(?m)^retry: ?([0-9]{1,7})\r?$")  # milliseconds
_RETRY_SECONDS = 1.0  # if the server says nothing
_LEAST_RETRY_SECONDS = 0.1
_MOST_RESUMED = 20

Elicit = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
Reply = Callable[[Mapping[str, Any]], Awaitable[None]]


def is_stream(headers: Headers) -> bool:
    kinds = [value for name, value in headers if name.lower() == "content-type"]
    return bool(kinds) and kinds[0].lower().startswith("text/event-stream")


def data_of(event: bytes) -> bytes:
    """The data of one server-sent event, whose lines end with \\n."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _last_event(answer: HttpsResponse) -> tuple[str, float] | None:
    """Of a stream that ended before its answer: the id of its last event, and the seconds after which the
    server wants to be asked for the rest. None: it is whole, or cannot be resumed."""
    if not is_stream(answer.headers) or _may_answer(answer.body):
        return None
    numbers, retries = _EVENT_ID.findall(answer.body), _RETRY.findall(answer.body)
    if not numbers:
        return None
    seconds = int(retries[-1]) / 1000 if retries else _RETRY_SECONDS
    return numbers[-1].decode(), max(seconds, _LEAST_RETRY_SECONDS)


def _may_answer(event: bytes) -> bool:
    return b'"result"' in event or b'"error"' in event


class _EventReader:
    """Of one stream of server-sent events, which comes in pieces."""

    def __init__(self, call: RemoteCall, number: int | None = None) -> None:
        """`number`: of the request whose answer may come on this stream."""
        self._call = call
        self._number = number
        self._began = self._searched = 0
        self._full = False
        self.has_answer = False

    def take(self, headers: Headers, body: bytearray) -> None:
        """More of it has come."""
        if not is_stream(headers):
            return
        while not self._full and (found := _END.search(body, self._searched)) is not None:
            small = found.start() - self._began < _MOST_EVENT_BYTES
            event = bytes(body[self._began : found.start()]) if small else b""
            self.has_answer = self.has_answer or not small
            self._began = self._searched = found.end()
            if self._number is not None and _may_answer(event):
                self.has_answer = self.has_answer or self._answers(_lines(event))
            if b'"method"' in event:
                self._full = not self._call.may_hear()
                if not self._full:
                    self._call.hear(_lines(event))
        self._searched = max(self._began, len(body) - _OVERLAP)

    def _answers(self, event: bytes) -> bool:
        try:
            message = wire.decode(data_of(event))
        except ValueError:
            return False
        return isinstance(message, dict) and message.get("id") == self._number and "method" not in message


def _lines(event: bytes) -> bytes:
    return event.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


class RemoteCall:
    def __init__(self, on_progress: OnProgress | None, elicit: Elicit | None, reply: Reply) -> None:
        """`elicit`: asks the person; None: nobody can be asked. `reply`: sends the server a message."""
        self._on_progress = on_progress
        self._elicit = elicit
        self._reply = reply
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._events = self._questions = self._open = 0
        self._at_most = math.inf

    @property
    def can_ask(self) -> bool:
        return self._elicit is not None

    async def run(self, work: Callable[[], Awaitable[HttpsResponse]]) -> HttpsResponse | None:
        """The answer. None: its time was over."""
        answer: HttpsResponse | None = None
        failure: Exception | None = None
        async with trio.open_nursery() as self._nursery:
            self._at_most = trio.current_time() + MOST_SECONDS
            self._extend()
            with self._scope:
                try:
                    answer = await work()
                except Exception as error:  # noqa: BLE001 -- raised below: the nursery would wrap it
                    failure = error
            self._nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return answer

    async def listen(self, get: Callable[[OnPart], Awaitable[HttpsResponse]]) -> bool:
        """Hear, while the call lasts, what the server says on a stream of its own. Returns whether it opened
        one in time. `get`: asks for it. To be called by what `run` runs."""
        opened, has_one = trio.Event(), False
        reader = _EventReader(self)

        def take(headers: Headers, body: bytearray) -> None:
            nonlocal has_one
            has_one = has_one or is_stream(headers)
            opened.set()
            reader.take(headers, body)

        async def follow() -> None:
            with suppress(FetchFailed):
                await get(take)
            opened.set()

        if self._nursery is not None:
            self._nursery.start_soon(follow)
            with trio.move_on_after(_OPEN_SECONDS):
                await opened.wait()
        return has_one

    async def whole(
        self, answer: HttpsResponse, number: int, get: Callable[[str, OnPart], Awaitable[HttpsResponse]]
    ) -> HttpsResponse:
        """The answer, also of a server that ends its stream before it and wants to be asked for the rest.
        `get`: asks for what follows the event with this id. To be called by what `run` runs."""
        for _ in range(_MOST_RESUMED):
            last = _last_event(answer)
            if last is None:
                break
            await trio.sleep(last[1])
            with suppress(FetchFailed):
                rest = await self._rest(number, partial(get, last[0]))
                if rest.status != OK:  # it does not do this
                    break
                answer = rest if _EVENT_ID.search(rest.body) or _may_answer(rest.body) else answer
        return answer

    async def _rest(self, number: int, get: Callable[[OnPart], Awaitable[HttpsResponse]]) -> HttpsResponse:
        """Up to the answer: the stream may go on after it."""
        reader, rest = _EventReader(self, number), HttpsResponse(OK, (), b"", "")
        with trio.CancelScope() as scope:

            def take(headers: Headers, body: bytearray) -> None:
                nonlocal rest
                reader.take(headers, body)
                if reader.has_answer:
                    rest = HttpsResponse(OK, headers, bytes(body), "")
                    scope.cancel()

            rest = await get(take)
        return rest

    def reader(self) -> OnPart:
        """Hears what comes before the answer."""
        return _EventReader(self).take

    def may_hear(self) -> bool:
        """Whether another event counts."""
        self._events += 1
        return self._events <= _MOST_EVENTS

    def hear(self, event: bytes) -> None:
        try:
            message = wire.decode(data_of(event))
        except ValueError:
            return  # who reads the whole answer tells it
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        number = message.get("id")
        if message["method"] == "notifications/progress" and self._on_progress is not None:
            self._extend()
            self._on_progress({key: each for key, each in params.items() if key != "progressToken"})
        elif (
            isinstance(number, int | str) and self._nursery is not None and self._questions < _MOST_QUESTIONS
        ):
            self._questions += 1
            self._nursery.start_soon(self._answer, number, message["method"], params)

    async def _answer(self, number: int | str, method: str, params: Mapping[str, Any]) -> None:
        said: dict[str, Any]
        try:
            said = {"result": await self._ask(method, params)}
        except HostError as error:
            said = {"error": {"code": error.code, "message": str(error)}}
        except Exception:  # noqa: BLE001 -- of one question: the call goes on
            said = {"error": {"code": INTERNAL_ERROR, "message": "the question could not be asked"}}
        await self._reply({"jsonrpc": "2.0", "id": number, **said})

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        if method == "ping":
            return {}
        if method != ELICIT or self._elicit is None:
            raise HostError(METHOD_NOT_FOUND, f"this client does not answer {method[:100]}")
        if params.get("mode", "form") != "form":
            raise HostError(INVALID_PARAMS, "mode: this client declared elicitation by form only")
        self._open += 1
        self._extend()
        try:
            return await self._elicit(params)
        finally:
            self._open -= 1
            self._extend()

    def _extend(self) -> None:
        """While a person is asked, only the longest time counts."""
        until = math.inf if self._open else trio.current_time() + CALL_SECONDS
        self._scope.deadline = min(self._at_most, until)
