"""The conversation with a vai plugin: frames with a Content-Length header, one request at a time.

    opening   our hello at once; the plugin's hello may come before or after it. Until then nothing else may
    calls     request, events, response. The value is body.result, or the status of a hook
    cancel    one frame. The request stays open: the plugin answers it within `grace`, normally with the
              status cancelled, and its answer is a Reply, Refusal or Violation of that call as always. The
              session waits for it, and then calls `expired`: from then on an answer is a LateAnswer
    end       shutdown, which has no answer, then stdin is closed

A frame that cannot be read, of a wrong protocol, an unknown type, or that only a host sends ends the plugin.
So does a response or event for a request that never was, while one is open and before the first. Between two
requests such a frame is counted and dropped; so are a second response, and an event after the response, at
any time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from runner.contracts.vai import handshake
from runner.contracts.vai.call.requests import with_pinned
from runner.contracts.vai.declared import declared_by
from runner.contracts.vai.events import EventCount, fault_of_event
from runner.contracts.vai.messages import (
    EVENT,
    HELLO,
    HOST_TYPES,
    RESPONSE,
    LongEvent,
    encode_frame,
    fault_of,
    invalid,
    make_frame,
    read_message,
    rules_of,
    unexpected,
    unreadable,
)
from runner.contracts.vai.results import read_response
from runner.contracts.vai.terms import HELLO_SECONDS
from runner.protocol.dialect import (
    NEVER_SENT,
    Answer,
    Call,
    CallRefused,
    Dialect,
    Events,
    HandshakeFault,
    LateAnswer,
    Message,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownSteps,
    Violation,
)
from runner.protocol.frames import Framer
from runner.protocol.header_frames import HeaderFramer, header_frame
from runner.protocol.schema import Schema
from runner.protocol.schema_cost import SchemaFault
from sandbox.document.diagnostic import printable, quoted
from sandbox.speed.value import NamedTuple

EXIT_SECONDS = 5.0  # after shutdown
TERMINATE_SECONDS = 1.0  # after SIGTERM

OPERATIONS: Mapping[str, str] = {
    "tool": "tool.invoke",
    "hook": "hook.handle",
    "compactor": "compactor.compact",
    "harness": "harness.run",
}
# Seconds for the answer to a request that was cancelled.
GRACE_SECONDS: Mapping[str, float] = {"tool": 2.0, "hook": 2.0, "compactor": 5.0, "harness": 10.0}
# The same for a call that its caller has given up. Only a harness is worth waiting for: it may answer with a
# checkpoint.
_GIVEN_UP_SECONDS = 0.3
_CALL_SECONDS = 20.0  # of an export that is not declared

# The session's reasons for a cancellation, in the words of the contract. Others are sent as they are.
_REASONS = {"no answer in time": "deadline_exceeded", "cancelled by the host": "user_cancelled"}

# Requests that were given up, whose answers are told as late ones.
_MOST_GIVEN_UP = 64

Stage = Literal["greeting", "ready", "leaving", "over"]


class OpenRequest(NamedTuple):
    token: int
    id: str
    call: Call
    cancelled: bool = False

    @property
    def kind(self) -> str:
        return self.call.kind


def make(setting: Setting) -> VaiDialect:
    return VaiDialect(setting)


class VaiDialect(Dialect):
    handshake_seconds = HELLO_SECONDS

    def __init__(self, setting: Setting) -> None:
        self._plugin = setting.plugin
        self._options = setting.options
        self._rules = rules_of(setting.options)
        self._declared = declared_by(setting.plugin)
        self._stage: Stage = "greeting"
        self._has_greeted = False
        self._requests = 0  # that were sent; the id of each has its number
        self._open: OpenRequest | None = None
        self._given_up: dict[str, int] = {}  # id -> token
        self._events = EventCount()
        self._schema: Schema | None = None  # of a tool's output, once it is needed
        self._late = 0
        self._unexpected = 0
        self._last_unexpected = ""  # what was wrong with it

    # --- the Dialect interface ------------------------------------------------------------------------------

    @property
    def counters(self) -> Mapping[str, int]:
        # One request is open at a time: what an event adds to `events` or `dropped_events` between a call and
        # its end belongs to that call.
        return {
            "late": self._late,
            "unexpected": self._unexpected,
            "events": self._events.passed,
            "dropped_events": self._events.dropped,
        }

    @property
    def noise(self) -> str:
        count = self._unexpected
        text = f"{count} of its frames were dropped, the last one because {self._last_unexpected}"
        return text if count else ""

    def framer(self) -> Framer:
        return HeaderFramer(self._rules)

    def read(self, raw: bytes) -> Message:
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        return read_message(raw, unique=self._stage == "greeting")

    def seconds(self, call: Call) -> float:
        """What `prepare` decided for this call; otherwise what the export declares."""
        try:
            seconds = float(self._options.get("timeout") or "nan")
        except ValueError:
            seconds = math.nan
        if math.isfinite(seconds) and seconds > 0:
            return seconds
        export = self._declared.find(call.name)
        return _CALL_SECONDS if export is None else export.timeout

    def grace(self, call: Call) -> float:
        return GRACE_SECONDS.get(call.kind, 0.0)

    def given_up_grace(self, call: Call) -> float:
        return self.grace(call) if call.kind == "harness" else min(self.grace(call), _GIVEN_UP_SECONDS)

    def opening(self) -> Events:
        if self._stage == "over":
            return ()  # the plugin sent a faulty frame first: it gets nothing
        self._has_greeted = True
        return (Send(handshake.make_hello()),)

    # --- incoming frames ------------------------------------------------------------------------------------

    def feed(self, message: Message) -> Events:
        if self._stage == "over":
            return ()
        if message.fault:
            return self._end(unreadable(message))
        value = message.value
        if (fault := fault_of(value, in_handshake=self._stage == "greeting")) is not None:
            return self._end(fault)
        if self._stage == "greeting":
            return self._greet(value)
        if isinstance(value, LongEvent):
            return self._take_event(value.request_id, value, message.at)
        kind = value["type"]
        if kind == EVENT:
            if why := fault_of_event(value):
                return self._end(invalid(f"a frame with an event breaks the protocol: {why}"))
            return self._take_event(value["request_id"], value["event"], message.at)
        if kind == RESPONSE:
            return self._take_response(value)
        if kind == HELLO:
            return self._end(unexpected("it sends a second hello", "say hello once for each process"))
        if kind in HOST_TYPES:
            return self._end(unexpected(f"it sends {quoted(kind)}, which only a host may send"))
        known = f"a plugin sends {HELLO}, {EVENT} and {RESPONSE}"
        return self._end(unexpected(f"it sends a frame of the unknown type {quoted(kind)}", known))

    def _greet(self, value: Any) -> Events:
        hello = {"type": EVENT} if isinstance(value, LongEvent) else value
        try:
            identity = handshake.read_hello(hello, self._plugin)
        except HandshakeFault as fault:
            return self._end(fault.violation)
        self._stage = "ready"
        return (Ready(identity),)

    def _end(self, violation: Violation) -> Events:
        if self._stage == "leaving":
            return self._drop(violation.message)  # it was told to end: only its end counts
        self._stage = "over"
        return (violation,)

    def _drop(self, why: str) -> Events:
        """A notice for the first, the second, the fourth, the eighth, …"""
        self._unexpected += 1
        count = self._unexpected
        self._last_unexpected = printable(why)
        if count & (count - 1):
            return ()
        told = {"reason": "unexpected_frame", "why": self._last_unexpected, "count": count}
        return (Notice("dropped", told),)

    def _stray(self, why: str) -> Events:
        """A response or an event that belongs to no request that ever was."""
        if self._open is not None:
            return self._end(
                unexpected(why, f"use the id of the request, the string {quoted(self._open.id)}")
            )
        if not self._requests:
            return self._end(unexpected(why, "after the hello, send nothing before the request"))
        return self._drop(why)

    def _was_sent(self, number: str) -> bool:
        digits = number.removeprefix("req_")
        if len(digits) == len(number) or len(digits) > 20 or not digits.isascii() or not digits.isdigit():
            return False
        return digits[0] != "0" and int(digits) <= self._requests

    # --- events and responses -------------------------------------------------------------------------------

    def _take_event(self, number: Any, event: Any, at: float) -> Events:
        if not isinstance(number, str):
            return self._end(
                invalid("a frame with an event breaks the protocol: its request_id is not a string")
            )
        if self._open is not None and number == self._open.id:
            long = isinstance(event, LongEvent)
            return self._events.take_long(event, at) if long else self._events.take(event, at)
        if self._was_sent(number):
            return self._drop(f"it sends an event for {quoted(number)} after the response to it")
        return self._stray(f"it sends an event for {quoted(number)}, which is not one of our requests")

    def _take_response(self, frame: Mapping[str, Any]) -> Events:
        if "id" not in frame:
            return self._end(invalid("a response has no id"))
        number = frame["id"]
        if not isinstance(number, str):
            return self._stray("the id of a response is not a string")
        request = self._open
        if request is not None and number == request.id:
            self._open = None
            schema = self._schema if request.kind == "tool" else None
            answer = read_response(request.token, request.kind, frame, schema)
            if isinstance(answer, Reply) and request.kind == "compactor":
                answer = answer._replace(value=with_pinned(request.call, answer.value))
            return (answer,)
        if number in self._given_up:
            self._late += 1
            return (LateAnswer(self._given_up.pop(number)),)
        if self._was_sent(number):
            return self._drop(f"it sends a second response to {quoted(number)}; the first one counts")
        return self._stray(f"it sends a response to {quoted(number)}, which is not one of our requests")

    # --- calls ----------------------------------------------------------------------------------------------

    def call(self, token: int, call: Call) -> Events:
        if self._stage != "ready" or not self._has_greeted:
            raise CallRefused(
                Violation("internal", "the plugin is not ready for calls", "not_ready", call=token)
            )
        if self._open is not None:
            text = "the plugin works on another request, and a process of this contract serves one at a time"
            raise CallRefused(Violation("overloaded", text, "busy", "call again later", token))
        operation = OPERATIONS.get(call.kind)
        if operation is None:
            text = f"there are no calls of the kind {quoted(call.kind)}; known are {', '.join(OPERATIONS)}"
            raise CallRefused(Refusal(token, "protocol.unexpected_frame", text, "unsupported"))
        if not isinstance(call.input, Mapping):
            text = "the call was not prepared: its input is not the body of a request"
            raise CallRefused(Violation("internal", text, "not_prepared", call=token))
        number = f"req_{self._requests + 1}"
        try:
            raw = encode_frame("request", id=number, op=operation, body=call.input)
        except ValueError as error:
            raise CallRefused(
                Refusal(token, "tool.invalid_input", f"the input is {error}", "not_json")
            ) from None
        if len(raw) > (most := self._rules.body_limit):
            text = f"the request has {len(raw)} bytes, and a frame has at most {most}"
            raise CallRefused(Refusal(token, "asset.payload_too_large", text, "too_large"))
        if call.kind == "tool" and self._schema is None:
            self._schema = self._compile_schema(token)
        export = self._declared.find(call.name)
        silent = call.kind == "tool" and (export is None or not export.streaming)
        self._events.begin(token, takes_content=not silent)
        self._requests += 1
        self._open = OpenRequest(token, number, call)
        return (Send(header_frame(raw)),)

    def _compile_schema(self, token: int) -> Schema | None:
        text = self._options.get("output_schema", "")
        if not text:
            return None
        try:
            return Schema(json.loads(text))
        except (ValueError, RecursionError, SchemaFault) as fault:
            message = f"the output_schema of the export cannot be used: {fault}"
            raise CallRefused(Violation("manifest_invalid", message, "output_schema", call=token)) from None

    def cancel(self, token: int, reason: str) -> Events:
        """One cancel frame. The request stays open for the answer that the session waits for (`grace`)."""
        request = self._open
        if request is None or request.token != token:
            return ()  # it is finished: no cancel is sent
        if reason == NEVER_SENT:
            self._open = None
            return ()
        if request.cancelled or self._stage != "ready":
            return ()
        self._open = request._replace(cancelled=True)
        return (Send(make_frame("cancel", request_id=request.id, reason=_REASONS.get(reason, reason))),)

    def expired(self, token: int, why: str) -> Events:
        """After `cancel`: the grace is over, and an answer is a LateAnswer. Before `cancel`: nothing changes,
        since the plugin is still to be told."""
        request = self._open
        if request is not None and request.token == token and request.cancelled:
            self._open = None
            self._given_up[request.id] = token
            if len(self._given_up) > _MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        return ()

    def notify(self, method: str, params: Any) -> Events:
        text = f"this contract has no notifications; {quoted(method)} is not sent"
        raise CallRefused(Refusal(0, "protocol.unexpected_frame", text, "unsupported"))

    # --- the plugin asks for nothing ------------------------------------------------------------------------

    def answer(self, ticket: int, answer: Answer) -> Events:
        return ()

    # --- the end --------------------------------------------------------------------------------------------

    def shutdown_steps(self) -> ShutdownSteps:
        """The same steps each time."""
        frames: Events = ()
        if self._stage in ("ready", "leaving"):
            self._stage = "leaving"
            frames = (Send(make_frame("shutdown")),)
        return ShutdownSteps(frames, exit=EXIT_SECONDS, terminate=TERMINATE_SECONDS)
