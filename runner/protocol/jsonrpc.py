"""JSON-RPC 2.0 in both directions: ids and open calls, without the transport.

Each side numbers its own requests, so one number may belong to two calls; the direction tells which. We never
use a number twice, so a late reply to a cancelled call differs from a reply to no call at all. The plugin's
ids are sent back unchanged; the contract decides which ids are allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any, Literal

from runner.protocol import wire
from runner.protocol.ambiguity import hides_message, is_message, odd_key, two_kinds
from runner.protocol.dialect import Answer
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND = -32700, -32600, -32601
INVALID_PARAMS, INTERNAL_ERROR = -32602, -32603

# Requests of the plugin that wait for our answer. More is a fault: the plugin does not read its answers.
MOST_TICKETS = 1024

# Bytes of the ids of those requests together. An id can be as long as a frame, and is kept until the answer.
MOST_IDS = 4 * 1024 * 1024

# How many of our last errors are remembered. A plugin that returns one of them as an answer is an echo.
MOST_ERRORS = 64

# Keys that decide what a message means. A message with one of them twice is ambiguous.
IDENTITY = frozenset(("jsonrpc", "id", "method", "params", "result", "error"))


def read_line(raw: bytes, unique: bool = False) -> wire.Reading:
    """The value of a line, or its fault. `unique`: no object in it may have a key twice."""
    reading = wire.message(raw, identity=IDENTITY, unique=unique)
    if reading.cause is None and hides_message(raw, is_message=is_message):
        return wire.Reading(None, "ambiguous", "some hosts would read this line as more than one")
    return reading


class RpcRequest(NamedTuple):
    ticket: int  # ours, for the answer
    method: str
    params: Any


class RpcNotification(NamedTuple):
    method: str
    params: Any


class RpcResult(NamedTuple):
    token: Hashable
    value: Any


class RpcError(NamedTuple):
    token: Hashable
    code: int
    message: str
    data: Any = None


class RpcStray(NamedTuple):
    """A message that no request waits for, that is not JSON-RPC, or that hosts could read differently."""

    why: Literal["late", "unknown", "not_rpc", "too_many", "echo", "ambiguous"]
    detail: str = ""


Incoming = RpcRequest | RpcNotification | RpcResult | RpcError | RpcStray


def _show_id(number: Any) -> str:
    if isinstance(number, str):
        return quoted(number)
    return "of another type" if isinstance(number, list | dict) else wire.encode(number).decode()


class Peer:
    """Our end of one conversation."""

    def __init__(self, first_id: int = 1, *, passes_errors: bool = False, one_kind: bool = False) -> None:
        """`passes_errors`: the plugin may answer with an error that it has just got from us, because its own
        request failed. Otherwise that is an echo. `one_kind`: a message that is both a request and an answer,
        or both a result and an error, is ambiguous. Otherwise the method counts, and then the error."""
        self._passes_errors = passes_errors
        self._one_kind = one_kind
        self._first = self._next = first_id
        # Our id -> token, method, params, and the members of params that were encoded already.
        self._pending: dict[int, tuple[Hashable, str, Any, bytes]] = {}
        self._numbers: dict[Hashable, int] = {}  # token -> our id
        self._errors: deque[tuple[int, Any]] = deque(maxlen=MOST_ERRORS)  # the plugin's id, our error
        self._asked: dict[int, Any] = {}  # ticket -> the plugin's id
        self._tickets_of: dict[bytes, list[int]] = {}  # and back, by the id's JSON: 1, 1.0 and true are three
        self._id_bytes = 0
        self._tickets = 0
        self.late = 0
        self.unknown = 0
        self._stranger = (0, "")  # our next id when the last unknown answer came, and its id

    # --- outgoing messages, each a whole JSON document ----------------------------------------------------

    # ValueError: the value is not JSON. Then a request is not made, but the ticket of an answer is closed.

    def request(self, token: Hashable, method: str, params: Any = None, members: bytes = b"") -> bytes:
        """`members`: further members of params as JSON without braces, for what is the same in every request
        and is encoded once. `params` is then an object or None."""
        number = self._next
        message = {"jsonrpc": "2.0", "id": number, "method": method}
        if params is not None:
            message["params"] = params
        elif members:
            message["params"] = {}
        raw = wire.encode(message)
        if members:
            raw = b"%b%b%b}}" % (raw[:-2], b"," if params else b"", members)
        self._pending[number] = token, method, params, members
        self._numbers[token] = number
        self._next = number + 1
        return raw

    def notification(self, method: str, params: Any = None) -> bytes:
        message = {"jsonrpc": "2.0", "method": method}
        return wire.encode(message if params is None else {**message, "params": params})

    def result(self, ticket: int, value: Any) -> bytes | None:
        """None: the plugin no longer waits for it."""
        return self._answer(ticket, "result", value)

    def error(self, ticket: int, code: int, message: str, data: Any = None) -> bytes | None:
        fault = {"code": code, "message": message}
        return self._answer(ticket, "error", fault if data is None else {**fault, "data": data})

    def _answer(self, ticket: int, kind: str, value: Any) -> bytes | None:
        if ticket not in self._asked:
            return None
        plugin_id = self._close(ticket)
        if kind == "error" and type(plugin_id) is int:
            self._errors.append((plugin_id, value))
        return wire.encode({"jsonrpc": "2.0", "id": plugin_id, kind: value})

    def reply(self, ticket: int, answer: Answer, most: float, limit: str, not_json: str) -> bytes | None:
        """The frame of an answer. In place of an answer that is not JSON, an error with the text `not_json`,
        and of one with more than `most` bytes, an error whose text ends with `limit`. The plugin's own id may
        make that too long as well."""
        plugin_id = self.asked_as(ticket)
        try:
            if answer.error is not None:
                raw = self.error(ticket, *answer.error)
            else:
                raw = self.result(ticket, answer.result)
            if raw is None or len(raw) <= most:
                return raw
            why = f"the answer has {len(raw)} bytes, {limit}"
        except ValueError:
            why = not_json
        return wire.encode(
            {"jsonrpc": "2.0", "id": plugin_id, "error": {"code": INTERNAL_ERROR, "message": why}}
        )

    # --- open requests ------------------------------------------------------------------------------------

    def waits_for(self, token: Hashable) -> int | None:
        """The id under which `token` is open. The newest, if there are more."""
        return self._numbers.get(token)

    def token_of(self, number: Any) -> Hashable:
        """The inverse, for an id that the plugin names. By type: in Python, True and 1.0 equal 1."""
        ours = self._pending.get(number) if type(number) is int else None
        return None if ours is None else ours[0]

    @property
    def noise(self) -> str:
        """`Dialect.noise`: an answer came to no request while one was open."""
        then, theirs = self._stranger
        waiting = max((number for number in self._pending if number < then), default=None)
        if waiting is None:
            return ""
        return f"it sent an answer with the id {theirs}, and the open request has the number {waiting}"

    def forget(self, token: Hashable) -> int | None:
        """Stop waiting for the answer. Returns the id of the request."""
        number = self._numbers.pop(token, None)
        if number is not None:
            del self._pending[number]
        return number

    def asked_as(self, ticket: int) -> Any:
        """The plugin's id of an open request."""
        return self._asked.get(ticket)

    def drop(self, plugin_id: Any) -> int | None:
        """The plugin cancels a request: returns its ticket, if it is still open. No answer is sent for it.

        If several have this id, the oldest is taken.
        """
        tickets = self._tickets_of.get(wire.encode(plugin_id))
        if not tickets:
            return None
        ticket = tickets[0]
        self._close(ticket)
        return ticket

    def _close(self, ticket: int) -> Any:
        plugin_id = self._asked.pop(ticket)
        key = wire.encode(plugin_id)
        tickets = self._tickets_of[key]
        tickets.remove(ticket)
        if not tickets:
            del self._tickets_of[key]
        self._id_bytes -= len(key)
        return plugin_id

    # --- incoming messages --------------------------------------------------------------------------------

    def receive(self, message: Any) -> Incoming:
        if not isinstance(message, dict):
            return RpcStray("not_rpc", "not an object")
        method = message.get("method")
        if not message.keys() <= IDENTITY and (odd := odd_key(message, IDENTITY)):
            is_answer = "id" in message and ("result" in message or "error" in message)
            return RpcStray("ambiguous" if is_answer or isinstance(method, str) else "not_rpc", odd)
        if self._one_kind and (both := two_kinds(message)):
            return RpcStray("ambiguous", both)
        if isinstance(method, str) and method:
            params = message.get("params")
            if "id" not in message:
                return RpcNotification(method, params)
            return self._request(message["id"], method, params)
        if "id" in message and ("result" in message or "error" in message):
            return self._response(message)
        return RpcStray("not_rpc", "neither a request nor an answer")

    def _request(self, plugin_id: Any, method: str, params: Any) -> Incoming:
        # Without params it may be the plugin's own request: both sides may send a ping, and both count from
        # one.
        ours = self._pending.get(plugin_id) if type(plugin_id) is int and params else None
        if ours is not None and ours[1] == method and _whole(*ours[2:]) == params:
            return RpcStray("echo", "our own question came back")
        key = wire.encode(plugin_id)
        if len(self._asked) >= MOST_TICKETS:
            return RpcStray("too_many", f"{MOST_TICKETS} questions are open")
        if self._id_bytes + len(key) > MOST_IDS:
            return RpcStray("too_many", f"the ids of its open questions have more than {MOST_IDS} bytes")
        self._id_bytes += len(key)
        self._tickets += 1
        self._asked[self._tickets] = plugin_id
        self._tickets_of.setdefault(key, []).append(self._tickets)
        return RpcRequest(self._tickets, method, params)

    def _unasked(self, number: Any) -> RpcStray:
        if type(number) is int and self._first <= number < self._next:
            self.late += 1
            return RpcStray("late", str(number))
        self.unknown += 1
        self._stranger = self._next, _show_id(number)
        return RpcStray("unknown")

    def _response(self, message: dict[str, Any]) -> Incoming:
        number, error = message["id"], message.get("error")
        if (token := self.token_of(number)) is None:
            return self._unasked(number)
        if self._errors and not self._passes_errors and (number, error) in self._errors:
            return RpcStray("echo", "our own error came back as an answer")
        del self._pending[number]
        if self._numbers.get(token) == number:
            del self._numbers[token]
        if error is None:
            return RpcResult._make((token, message.get("result")))
        if not isinstance(error, dict):
            return RpcError(token, INTERNAL_ERROR, "an error that is not an object", error)
        code, text = error.get("code"), error.get("message")
        return RpcError(
            token,
            code if type(code) is int else INTERNAL_ERROR,
            text if isinstance(text, str) else "",
            error.get("data"),
        )


def _whole(params: Any, members: bytes) -> Any:
    return params if not members else {**(params or {}), **wire.decode(b"{%b}" % members)}
