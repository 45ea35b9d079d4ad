"""Checks the frames between a plugin and a vai host: each header and body, the plugin's hello, its responses.

What the host says is not judged. It is read for its hello and for the ids of its requests: a response to a
request that the host never sent ends the plugin. A plugin may say hello before its host does. Until both have
said hello, it may send nothing else: the host could take it for the answer to its first request.

Frames that a session drops are withheld and counted: a second response, an event after the response, an
event beyond the limits. An event for a request that never was is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.contracts.vai import handshake
from runner.contracts.vai.dialect import OPERATIONS
from runner.contracts.vai.events import TYPE, fault_of_event
from runner.contracts.vai.messages import (
    EVENT,
    EVENT_LIMIT,
    HELLO,
    RESPONSE,
    RULES,
    fault_of,
    invalid,
    read_json,
    rules_of,
    unexpected,
)
from runner.contracts.vai.results import read_response
from runner.contracts.vai.terms import HELLO_SECONDS
from runner.protocol.dialect import HandshakeFault, Setting, Violation
from runner.protocol.framing import HeaderFraming
from runner.protocol.rpc_reader import LONGEST, MOST_OPEN, Verdict, Withheld
from sandbox.document.diagnostic import quoted

_KINDS = {operation: kind for kind, operation in OPERATIONS.items()}


def make(setting: Setting) -> Inspector:
    return Inspector(setting)


class Inspector:
    framing = HeaderFraming(RULES)
    handshake_seconds = HELLO_SECONDS
    handshake_is_raisable = False

    def __init__(self, setting: Setting) -> None:
        self._plugin = setting.plugin
        if "frame_limit" in setting.options:
            rules = self.framing.rules._replace(body_limit=rules_of(setting.options).body_limit)
            self.framing = HeaderFraming(rules)
        self._open: dict[str, str] = {}  # id of a request -> kind; empty: an operation that we do not know
        self._closed: dict[str, None] = {}  # ids of requests that were answered
        self._unknown = 0  # frames of the host that could not be read, and may have been requests
        self._strays: dict[str, int] = {}
        self._host_greeted = False
        self.handshaken = False

    @property
    def awaiting(self) -> bool:
        return self._host_greeted and not self.handshaken

    @property
    def strays(self) -> Mapping[str, int]:
        return self._strays

    # --- the host -------------------------------------------------------------------------------------------

    def host_frame(self, raw: bytes | None) -> None:
        value, cause, *_ = read_json(raw or b"")
        if cause is not None:  # too long, or not JSON as we read it: it may have been a request
            self._unknown += 1
            self._host_greeted = True
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == HELLO:
            self._host_greeted = True
        elif kind == "request":
            self._host_greeted = True  # a host that does without its hello
            self._ask(value.get("id"), value.get("op"))

    def _ask(self, number: Any, operation: Any) -> None:
        if not isinstance(number, str) or len(number) > LONGEST:
            self._unknown += 1
            return
        kind = _KINDS.get(operation, "") if isinstance(operation, str) else ""
        self._open.pop(number, None)
        self._open[number] = kind
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
            self._unknown += 1

    # --- the plugin -----------------------------------------------------------------------------------------

    def plugin_frame(self, raw: bytes) -> Verdict:
        verdict = self._verdict(raw)
        if isinstance(verdict, Withheld):
            self._count(verdict.kind)
        return verdict

    def _verdict(self, raw: bytes) -> Verdict:
        value, cause, detail, _ = read_json(raw, unique=not self.handshaken)
        if cause is not None:
            return Violation("malformed_response", f"a frame that breaks the protocol: {detail}", cause)
        if (fault := fault_of(value, in_handshake=not self.handshaken)) is not None:
            return fault
        kind = value["type"]
        if not self.handshaken:
            return self._greet(value)
        if kind not in (EVENT, RESPONSE):
            return unexpected(f"it sends {quoted(kind)}: after its hello a plugin sends events and responses")
        if not self._host_greeted:
            text = f"it sends {quoted(kind)} before its host has said hello"
            return unexpected(text, "answer each request once, by its id")
        return self._check_event(value, len(raw)) if kind == EVENT else self._check_response(value)

    def _greet(self, value: Mapping[str, Any]) -> Violation | None:
        try:
            handshake.read_hello(value, self._plugin)
        except HandshakeFault as fault:
            return fault.violation
        self.handshaken = True
        return None

    def _check_event(self, value: Mapping[str, Any], size: int) -> Verdict:
        if why := fault_of_event(value):
            return invalid(f"a frame with an event breaks the protocol: {why}")
        number = value["request_id"]
        if number not in self._open:
            if number in self._closed:
                return Withheld("late_event", "an event after the response to its request")
            if not self._unknown:
                return unexpected(f"it sends an event for {quoted(number)}, which its host has not sent")
            self._count("unasked")
        if size > EVENT_LIMIT:
            return Withheld("long_event", f"an event of more than {EVENT_LIMIT} bytes")
        if TYPE.fullmatch(value["event"]["type"]) is None:
            return Withheld("bad_event_type", "an event whose type is not lower case letters and digits")
        return None

    def _check_response(self, value: Mapping[str, Any]) -> Verdict:
        if "id" not in value:
            return invalid("a response has no id")
        number = value["id"]
        if not isinstance(number, str):
            return unexpected("the id of a response is not a string")
        if number not in self._open:
            if number in self._closed:
                return Withheld("second_response", "a second response to a request; the first one counts")
            if self._unknown:  # it may answer a request that we could not read
                self._unknown -= 1
                self._count("unasked")
                return None
            return unexpected(f"it sends a response to {quoted(number)}, which its host has not sent")
        kind = self._open.pop(number)
        self._closed[number] = None
        if len(self._closed) > MOST_OPEN:
            del self._closed[next(iter(self._closed))]
        answer = read_response(0, kind, value, None) if kind else None
        return answer._replace(call=None) if isinstance(answer, Violation) else None

    def _count(self, kind: str) -> None:
        self._strays[kind] = self._strays.get(kind, 0) + 1
