"""HttpExchange: one request of the plugin and its answer. The request goes up in the connection's task, the
answer comes down in one of its own.

An answer that was cut never ends in order: neither the chunks of HTTP nor TLS get their end. A request that
was cut is reset at the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import h11

from sandbox.broker.echo import EchoFilter
from sandbox.broker.stream import Stream, StreamBroken
from sandbox.broker.tasks import Task, Tasks
from sandbox.broker.terms import HostTerms, Outgoing, RequestRefused, nominated
from sandbox.broker.websocket import FrameFilter, NotAFrame
from sandbox.network.http_connection import HttpConnection

DELIVERY_SECONDS = 5.0  # until the server has acknowledged what an ended plugin has sent
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.005, 0.08  # whether it has. Doubled up to the longest
_CONTINUE, _SWITCHING = 100, 101
_WITHOUT_BODY = (204, 304)
_HEAD = b"HEAD"


class BothEnds(NamedTuple):
    """Both ends of a connection, with what is read and written there."""

    plugin: Stream
    server: Stream
    up: HttpConnection  # in the server's place
    down: HttpConnection  # in the client's place


class Record:
    """What the line about a request says."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.method = self.path = self.rule = ""
        self.credentials: tuple[str, ...] = ()
        self.status = 0
        self.sent = self.received = 0  # bytes of bodies


class _ServerEnded(Exception):
    """After a change of protocol."""


class _AnsweredEarly(Exception):
    """The answer is whole, and the request is not."""


class HttpExchange:
    def __init__(
        self, tasks: Tasks, task: Task, ends: BothEnds, terms: HostTerms, outgoing: Outgoing, record: Record
    ) -> None:
        self._tasks = tasks
        self._task = task  # the connection's, in which run() runs
        self._ends = ends
        self._terms = terms
        self._outgoing = outgoing
        self._record = record
        self._answer: Task | None = None
        self._switched = False
        self._server_deaf = False  # it does not take more of the request
        self._failure: BaseException | None = None  # of the answer
        self._is_sent = self._over = False
        self.delivered = False  # the server has everything, and nobody waits for its answer
        self.leaving = False  # the plugin has ended: nobody reads the answer

    @property
    def is_cut(self) -> bool:
        """Whether the server has got a part of the request only."""
        return self._server_deaf or not self._is_sent

    async def run(self) -> bool:
        """Returns whether another request may follow on the connection."""
        up, down = self._ends.up, self._ends.down
        outgoing = self._outgoing
        head = h11.Request(method=outgoing.method, target=outgoing.target, headers=outgoing.headers)
        try:
            await self._ends.server.write(down.send(head))
            await self._let_body_come()
            self._answer = self._tasks.start(self._pass_answer(), self._on_answered)
            try:
                await self._send_body()
            except _AnsweredEarly:
                # Nothing more goes to this server: it may take it for another request.
                self._server_deaf = True
            self._is_sent = True
            await self._await_answer()
            if self._failure is not None:
                raise self._failure
        finally:
            self._over = True
            if self._answer is not None:
                self._answer.stop()
        if self._server_deaf or self.delivered or self._switched or down.trailing_data[0]:
            return False
        if {*up.states.values(), *down.states.values()} != {h11.DONE}:
            return False
        up.start_next_cycle()
        down.start_next_cycle()
        return True

    def _on_answered(self, failure: BaseException | None) -> None:
        self._failure = _ServerEnded() if failure is None and self._switched else failure
        # Not now: the connection's task may be the one that runs.
        self._tasks.loop.call_at(self._tasks.loop.now, self._tell)

    def _tell(self) -> None:
        if not self._over:
            failure = self._failure or (None if self._is_sent or self._switched else _AnsweredEarly())
            if failure is None:
                self._task.wake()
            else:
                self._task.throw(failure)

    # --- the request -------------------------------------------------------------------------------

    async def _let_body_come(self) -> None:
        up = self._ends.up
        if up.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=_CONTINUE, headers=[], reason=b"Continue")
            await self._ends.plugin.write(up.send(go_on))

    async def _send_body(self) -> None:
        while not self._server_deaf:
            event = await read_event(self._ends.up, self._ends.plugin)
            if isinstance(event, h11.Data):
                self._record.sent += len(event.data)
                await self._send(self._ends.down.send(event))
            elif isinstance(event, h11.EndOfMessage):
                # Without what may follow the last chunk: nobody has judged that.
                await self._send(self._ends.down.send(h11.EndOfMessage()))
                return

    async def _send(self, data: bytes) -> None:
        try:
            await self._ends.server.write(data)
        except StreamBroken:
            self._server_deaf = True  # perhaps it has answered already

    async def _await_answer(self) -> None:
        assert self._answer is not None
        plugin, has_closed = self._ends.plugin, False
        while not self._answer.ended:
            if self._switched:
                await self._pass_up()
                return
            if has_closed and self.leaving:
                await self._deliver()
                return
            has_closed |= await self._tasks.wait([] if has_closed else [plugin.closing]) is not None

    async def _deliver(self) -> None:
        """Wait until the server has everything."""
        self.delivered = True
        until, pause = self._tasks.loop.now + DELIVERY_SECONDS, _FIRST_LOOK_SECONDS
        while self._ends.server.count_unacknowledged() and self._tasks.loop.now < until:
            await self._tasks.wait(until=self._tasks.loop.now + pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)

    async def _pass_up(self) -> None:
        """After a change of protocol."""
        data = self._ends.up.trailing_data[0]
        try:
            while True:
                if data:
                    self._record.sent += len(data)
                    await self._ends.server.write(data)
                data = await self._ends.plugin.read()
                if not data:
                    break
            await self._deliver()
        except _ServerEnded as ended:
            self._failure = None
            del ended

    # --- the answer --------------------------------------------------------------------------------

    async def _pass_answer(self) -> None:
        body = EchoFilter(self._terms.echoes)
        up, down, plugin = self._ends.up, self._ends.down, self._ends.plugin
        while True:
            event = await read_event(down, self._ends.server)
            if isinstance(event, h11.Data):
                self._record.received += len(event.data)
                if piece := body.feed(bytes(event.data)):
                    await plugin.write(up.send(h11.Data(data=piece)))
            elif isinstance(event, h11.Response):
                await plugin.write(up.send(self._own_response(event)))
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == _CONTINUE:
                    continue  # said already, if it was asked for
                await plugin.write(up.send(self._own_response(event)))
                if event.status_code == _SWITCHING:
                    await self._pass_down()
                    return
            elif isinstance(event, h11.EndOfMessage):
                rest = body.flush()
                last = up.send(h11.Data(data=rest)) if rest else b""
                trailers = self._terms.answer_headers(event.headers, trailer=True)
                await plugin.write(last + up.send(h11.EndOfMessage(headers=trailers)))
                return
            else:
                raise StreamBroken("was closed by the server before it answered", "server")

    def _own_response(self, event: Any) -> Any:
        """The head that the plugin gets. Raises RequestRefused."""
        status, headers = event.status_code, event.headers
        self._record.status = status
        has_body = status not in _WITHOUT_BODY and self._outgoing.method != _HEAD
        if has_body and (reason := self._terms.unreadable(headers)):
            raise RequestRefused(reason, "Let the server answer without it.", 502)
        kept = self._terms.answer_headers(headers, upgrade=status == _SWITCHING)
        reason_phrase = self._terms.echoes.replace(event.reason)
        if isinstance(event, h11.InformationalResponse):
            return h11.InformationalResponse(status_code=status, headers=kept, reason=reason_phrase)
        closes = b"close" in nominated(headers) or event.http_version == b"1.0"
        if closes or (has_body and not _has_length(headers)):
            kept.append((b"Connection", b"close"))
        return h11.Response(status_code=status, headers=kept, reason=reason_phrase)

    async def _pass_down(self) -> None:
        """After a change of protocol."""
        frames = FrameFilter(self._terms.echoes)
        data = self._ends.down.trailing_data[0]
        self._switched = True
        self._tasks.loop.call_at(self._tasks.loop.now, self._tell)
        while True:
            if data:
                self._record.received += len(data)
                try:
                    passed = frames.feed(data)
                except NotAFrame as fault:
                    raise StreamBroken(str(fault), "server") from None
                await self._ends.plugin.write(passed)
            data = await self._ends.server.read()
            if not data:
                return


def _has_length(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


async def read_event(http: HttpConnection, stream: Stream, until: float | None = None) -> Any:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await stream.read(until))
    return event
