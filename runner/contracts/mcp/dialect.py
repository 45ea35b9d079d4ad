"""MCP over stdio, in its modern and its legacy versions.

handshake.py has the handshake. pending_call.py has the calls and the meaning of their answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from runner.contracts.mcp import CONTRACT, pending_call, versions
from runner.contracts.mcp.handshake import DISCOVER, INITIALIZE, Handshake
from runner.contracts.mcp.pending_call import Ask, More, PendingCall, Step
from runner.contracts.mcp.tools import Catalogue
from runner.contracts.mcp.versions import Era
from runner.protocol import jsonrpc, wire
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Event,
    Events,
    HostCall,
    HostCallCancelled,
    Message,
    Notice,
    Progress,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownSteps,
    Violation,
    stray_context,
)
from runner.protocol.memory import STANDING, Share
from runner.protocol.rpc_dialect import RpcDialect
from runner.protocol.trace import read_trace
from sandbox.document.diagnostic import quoted

# Bytes. The protocol has no limit, and results carry images and files in base64: 16 MiB holds a file of 12
# MiB. Servers can refer to larger ones with resource links.
FRAME_LIMIT: Final = 16 * 1024 * 1024

CALL_SECONDS: Final = 60.0

# After stdin was closed, and again after SIGTERM: the same time that the official clients give.
EXIT_SECONDS: Final = 2.0
TERMINATE_SECONDS: Final = 2.0

# Bytes of a line that is not the protocol, for messages.
SHOWN: Final = 200

# Characters. An id is kept while its request is open, and a server may have a thousand open requests.
ID_LIMIT: Final = 1024

# Messages in one array, in the one version that has arrays.
MOST_IN_BATCH: Final = 1000

_CHANGED: Final = {
    "notifications/tools/list_changed": "tools",
    "notifications/prompts/list_changed": "prompts",
    "notifications/resources/list_changed": "resources",
}
_NO_CONTENT: Final = (
    "has no content, so hosts show nothing of it: the server has to answer with"
    ' {"content": [{"type": "text", "text": …}]}'
)
_SUBSCRIPTION: Final = "subscriptions/listen"
_LOG_LEVEL: Final = f"{versions.PREFIX}logLevel"


def make(setting: Setting) -> McpDialect:
    return McpDialect(setting)


class McpDialect(RpcDialect):
    frame_limit = FRAME_LIMIT
    most = math.inf  # bytes of a message of ours: the protocol has no limit
    not_json = "the host has no answer that could be sent"
    plugin_word, frame_word = "the server", "a line that"
    check_hint = "check that the command starts an MCP server"
    flood_cause = "flood"
    allows_noise = True
    handshake_is_raisable = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(jsonrpc.Peer(one_kind=True))
        self._setting = setting
        self._handshake = Handshake(setting, self._peer)
        self._standing = Share(STANDING)
        self._catalogue = Catalogue(self._standing)
        self._pending: dict[int, PendingCall] = {}
        self._questions: dict[tuple[type, Any], int] = {}  # the plugin's id -> ticket
        # Inputs that a modern server asks for are not requests. Their tickets count down, tickets of
        # requests up.
        self._inputs: dict[int, tuple[int, str, str]] = {}  # ticket -> token, key, method
        self._tickets = 0
        # What requests say in `_meta`, as JSON without braces. The second: after the token, of those with
        # progress.
        self._envelopes: tuple[bytes, bytes] | None = None
        self._call_seconds = dict(setting.plugin.timeouts).get("call", CALL_SECONDS)
        self._told_empty = False
        self._counters = {"unreadable": 0, "not_rpc": 0, "stray_progress": 0, "dropped": 0}

    # --- the Dialect interface -------------------------------------------------------------------

    @property
    def handshake_seconds(self) -> float:
        return self._handshake.seconds

    @property
    def patience(self) -> float | None:
        return self._handshake.patience

    def seconds(self, call: Call) -> float:
        return self._call_seconds

    def read(self, raw: bytes) -> Message:
        # Only `feed` ends the handshake, and it is not called while a frame is read. For an array, the keys
        # of each message count.
        value, cause, detail, weight = jsonrpc.read_line(raw, self._handshake.era is None or raw[:1] == b"[")
        if cause is not None:
            return Message(fault=cause, detail=detail, raw=raw[:SHOWN])
        return Message._make((value, "", "", b"", weight, 0.0))

    def shutdown_steps(self) -> ShutdownSteps:
        return ShutdownSteps(exit=EXIT_SECONDS, terminate=TERMINATE_SECONDS)

    # --- outgoing messages --------------------------------------------------------------------------------

    def opening(self) -> list[Event]:
        events: list[Event] = list(self._handshake.opening())
        if events and self._setting.config is not None:
            why = "the configuration was not sent: MCP servers take none from their host"
            events.append(Notice("config_ignored", why))
        return events

    def silence(self) -> list[Event]:
        return self._handshake.silence()

    def call(self, token: int, call: Call) -> list[Event]:
        agreed = self._handshake.era
        if agreed is None or token in self._pending:
            early, twice = "called before the handshake", f"call {token} is on its way already"
            raise CallRefused(Violation("internal", early if agreed is None else twice, call=token))
        if stray := stray_context(call, CONTRACT.calls):
            raise CallRefused(Refusal(token, "-32602", stray, "invalid_context"))
        if call.context and call.kind != "list" and read_trace(call.context) != call.context:
            text = "traceparent or tracestate of the context is not as the W3C writes it"
            raise CallRefused(Refusal(token, "-32602", text, "invalid_context"))
        if call.kind == "tool" and (unknown := self._catalogue.find_missing(token, call.name)) is not None:
            raise CallRefused(unknown)
        started = PendingCall(token, call, agreed, self._standing)
        if call.context and call.kind != "list":
            params = started.params or {}
            given = params.get("_meta")
            meta = {**(given if isinstance(given, dict) else {}), **call.context}
            started.params = {**params, "_meta": meta}
        try:
            sent = self._make_request(started, started.params)
        except ValueError as error:
            self._peer.forget(token)
            text = f"the input cannot be sent: {error}"
            raise CallRefused(Refusal(token, "-32602", text, "invalid_arguments")) from None
        self._pending[token] = started
        return [sent]

    def cancel(self, token: int, reason: str) -> list[Event]:
        started = self._pending.pop(token, None)
        if started is None:
            return []
        started.release()
        events = self._drop_inputs(token)
        number = self._peer.forget(token)
        if number is not None:
            params = {"requestId": number, "reason": reason}
            events.append(self._send(self._peer.notification("notifications/cancelled", params)))
        return events

    def notify(self, method: str, params: Any) -> list[Event]:
        agreed = self._handshake.era
        if agreed is None or agreed.modern or method != "notifications/roots/list_changed":
            message = f"there is no notification {method} to send to this server"
            raise CallRefused(Refusal(0, str(jsonrpc.METHOD_NOT_FOUND), message, "method_not_found"))
        return [self._send(self._peer.notification(method), "event")]

    def answer(self, ticket: int, answer: Answer) -> Events:
        if ticket < 0:
            return self._input(ticket, answer)
        plugin_id = self._peer.asked_as(ticket)
        self._questions.pop((type(plugin_id), plugin_id), None)
        return super().answer(ticket, answer)

    def _make_request(self, started: PendingCall, params: Mapping[str, Any] | None) -> Send:
        """Raises ValueError if the params are not JSON."""
        agreed = self._handshake.era
        assert agreed is not None
        if self._envelopes is None:
            self._envelopes = self._make_envelopes(agreed)
        common, with_progress = self._envelopes
        if started.shows_progress:
            member = b'"_meta":{"progressToken":%d%b}' % (started.token, with_progress)
        else:
            member = b'"_meta":{%b}' % common if common else b""
        if member and params and "_meta" in params:  # the caller's own, which is kept
            given, meta = params["_meta"], wire.decode(b"{%b}" % member)["_meta"]
            params = {**params, "_meta": {**given, **meta} if isinstance(given, dict) else meta}
            member = b""
        return self._send(self._peer.request(started.token, started.method, params or None, member))

    def _make_envelopes(self, agreed: Era) -> tuple[bytes, bytes]:
        if not agreed.modern:
            return b"", b""
        envelope = versions.envelope(agreed.protocol, self._setting.services)
        leveled = {**envelope, _LOG_LEVEL: versions.LOG_LEVEL}
        return wire.encode(envelope)[1:-1], b"," + wire.encode(leveled)[1:-1]

    # --- incoming messages --------------------------------------------------------------------------------

    def _end(self, violation: Violation) -> list[Event]:
        return [violation]  # what else stands in the same array is still heard

    @property
    def _is_early(self) -> bool:
        return self._handshake.era is None

    def _take(self, value: Any, message: Message) -> Events:
        agreed = self._handshake.era
        if not isinstance(value, list) or agreed is None or not agreed.batches:
            return self._take_one(value, message)
        if len(value) > MOST_IN_BATCH:
            text = f"more than {MOST_IN_BATCH} messages in one array"
            return self._end(Violation("malformed_response", text, "batch_too_large"))
        return [event for one in value for event in self._take_one(one, message)]

    def _take_one(self, value: Any, message: Message) -> Events:
        if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
            return self._noted(value, message)
        return super()._take(value, message)

    def _noted(self, value: Any, message: Message) -> list[Event]:
        self._count("unreadable" if message.fault else "not_rpc")
        if not message.fault:
            return [Notice("stdout", _glimpse(value))]
        text = message.raw[:SHOWN].decode("utf-8", "replace")
        return [Notice("stdout", text)] if text.strip() else []

    # --- answers ------------------------------------------------------------------------------------------

    def _replied(self, incoming: jsonrpc.RpcResult | jsonrpc.RpcError, weight: int) -> Events:
        if incoming.token in (DISCOVER, INITIALIZE):
            # Their answers are kept while the server runs, so they count towards the memory of the session.
            if self._standing.take(weight):
                return self._handshake.feed(incoming)
            text = f"its answer to the handshake takes more than {STANDING >> 20} MiB of memory"
            hint = "shorten its instructions or capabilities"
            return self._end(Violation("handshake_failed", text, "too_large", hint))
        token = incoming.token
        started = self._pending.get(token) if isinstance(token, int) else None
        if started is None:
            return []
        if isinstance(incoming, jsonrpc.RpcError):
            return self._done(started, started.failed(incoming.code, incoming.message, incoming.data))
        return self._step(started, started.result(incoming.value, weight))

    def _step(self, started: PendingCall, step: Step) -> list[Event]:
        if isinstance(step, Ask):
            return self._ask(started, step)
        if not isinstance(step, More):
            return self._done(started, step)
        try:
            return [self._make_request(started, step.params)]
        except ValueError:  # a service returned something that is not JSON
            self._peer.forget(started.token)
            text = "the host's answer to the server's request cannot be sent"
            return self._done(started, Violation("internal", text, "bad_answer", call=started.token))

    def _done(self, started: PendingCall, event: Reply | Refusal | Violation) -> list[Event]:
        del self._pending[started.token]
        weight = started.weight
        started.release()
        events = self._drop_inputs(started.token)
        if isinstance(event, Reply) and started.call.kind == "tool":
            if not self._told_empty and event.value.keys().isdisjoint(("content", "structuredContent")):
                self._told_empty = True  # once: a server does so in each of its answers
                events.append(
                    Notice("no_content", f"the result of {quoted(started.call.name)} {_NO_CONTENT}")
                )
            return [*events, *self._catalogue.check_result(event, started.call.name)]
        if isinstance(event, Reply) and started.call.kind == "list" and not started.stale:
            self._catalogue.remember(started.call.name, event.value, weight)
        return [*events, event]

    # --- inputs a modern server asks for before a call goes on -------------------------------------

    def _ask(self, started: PendingCall, ask: Ask) -> list[Event]:
        if len(self._inputs) + len(ask.inputs) > jsonrpc.MOST_TICKETS:
            return self._done(
                started, started.malformed("flood", f"{jsonrpc.MOST_TICKETS} questions are open")
            )
        events: list[Event] = []
        for one in ask.inputs:
            self._tickets -= 1
            self._inputs[self._tickets] = (started.token, one.key, one.method)
            events.append(HostCall(self._tickets, one.method, one.params))
        return events

    def _input(self, ticket: int, answer: Answer) -> list[Event]:
        token, key, method = self._inputs.pop(ticket, (0, "", ""))
        started = self._pending.get(token)
        if started is None or not method:
            return []
        if answer.error is not None:
            code, message, _ = answer.error
            return self._done(started, pending_call.refused_input(token, method, code, message))
        step = started.answered(key, answer.result)
        return [] if step is None else self._step(started, step)

    def _drop_inputs(self, token: int) -> list[Event]:
        if not self._inputs:
            return []
        tickets = [ticket for ticket, (owner, _, _) in self._inputs.items() if owner == token]
        for ticket in tickets:
            del self._inputs[ticket]
        return [HostCallCancelled(ticket) for ticket in tickets]

    # --- requests of a legacy server ------------------------------------------------------------------------

    def _asked(self, request: jsonrpc.RpcRequest) -> list[Event]:
        plugin_id = self._peer.asked_as(request.ticket)
        if fault := fault_of_id(request.method, plugin_id):
            self._peer.drop(plugin_id)
            return [fault]
        key = (type(plugin_id), plugin_id)
        if key in self._questions:
            return [repeated_id(plugin_id)]
        agreed = self._handshake.era
        if agreed is not None and agreed.modern:
            # Clients of that era send no answers at all, not even this one.
            self._peer.drop(plugin_id)
            self._count("dropped")
            why = "a server of this protocol version asks by answering input_required"
            return [Notice("dropped", {"method": request.method[:SHOWN], "why": why})]
        if request.method == "ping":
            frame = self._peer.result(request.ticket, {})
        elif agreed is None:
            frame = self._peer.error(request.ticket, jsonrpc.INVALID_REQUEST, "the handshake is not done")
        elif request.method in pending_call.INPUTS:
            self._questions[key] = request.ticket
            return [HostCall(request.ticket, request.method, request.params)]
        else:
            # Not the usual text of servers: if their ids met ours, that would look like an echo.
            frame = self._peer.error(request.ticket, jsonrpc.METHOD_NOT_FOUND, "the host has no such method")
        return [] if frame is None else [self._send(frame, "reply")]

    # --- notifications --------------------------------------------------------------------------------------

    def _notified(self, method: str, params: Any, at: float) -> list[Event]:
        given = params if isinstance(params, dict) else {}
        if method == "notifications/progress":
            return self._progress(given)
        if method == "notifications/cancelled":
            return self._cancelled(given.get("requestId"))
        if method == "notifications/message":
            keys = ("level", "logger", "data")
            return [Notice("log", {key: given[key] for key in keys if key in given})]
        if method in _CHANGED:
            self._catalogue.forget(_CHANGED[method])
            for started in self._pending.values():
                started.stale = True
            return [Notice("changed", {"list": _CHANGED[method]})]
        if method == "notifications/resources/updated":
            return [Notice("changed", {"resource": given.get("uri")})]
        return [Notice("notification", {"method": method, "params": params})]

    def _progress(self, params: Mapping[str, Any]) -> list[Event]:
        token, progress = params.get("progressToken"), params.get("progress")
        if type(token) is not int or token not in self._pending or type(progress) not in (int, float):
            self._count("stray_progress")  # after a cancel, servers continue for a while
            return []
        keys = ("progress", "total", "message")
        return [Progress(token, {key: params[key] for key in keys if params.get(key) is not None})]

    def _cancelled(self, request_id: Any) -> list[Event]:
        agreed = self._handshake.era
        if agreed is not None and agreed.modern:
            return self._unsubscribed(request_id)
        if type(request_id) not in (int, str):
            return []
        self._questions.pop((type(request_id), request_id), None)
        ticket = self._peer.drop(request_id)
        return [] if ticket is None else [HostCallCancelled(ticket)]

    def _unsubscribed(self, request_id: Any) -> list[Event]:
        """A modern server uses it for one thing: a subscription of ours is over."""
        for token, started in self._pending.items():
            if started.method == _SUBSCRIPTION and self._peer.waits_for(token) == request_id:
                self._peer.forget(token)
                return self._done(started, Reply(token, {}))
        return []


def fault_of_id(method: str, number: Any) -> Violation | None:
    """The fault of the id of a server's request."""
    if type(number) is int or (isinstance(number, str) and len(number) <= ID_LIMIT):
        return None
    text = f"the id of {_glimpse(method)} is neither a number nor a short string"
    return Violation("malformed_response", text, "bad_id")


def repeated_id(number: Any) -> Violation:
    text = f"two open requests have the id {_glimpse(number)}"
    return Violation("malformed_response", text, "duplicate_id")


def _glimpse(value: Any) -> str:
    """The beginning of a value, for messages; a large value is not written out."""
    if isinstance(value, dict):
        return f"a JSON object with {', '.join(repr(key[:40]) for key in list(value)[:5]) or 'no keys'}"
    if isinstance(value, list):
        return f"a JSON array of {len(value)}"
    return repr(value[:SHOWN] if isinstance(value, str) else value)
