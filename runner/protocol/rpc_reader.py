"""Reads JSON-RPC between a plugin and its host without taking part: which answer belongs to which request.

A line of the plugin is judged as the contract's dialect judges it. What ends a session is a fault here. What
a session drops is withheld and counted: the host does not get it, and the plugin goes on. The host's reader
is not known, so nothing reaches it that is not strictly one message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from runner.outcome import Code
from runner.protocol import wire
from runner.protocol.ambiguity import odd_key, two_kinds
from runner.protocol.dialect import Violation
from runner.protocol.jsonrpc import IDENTITY, read_line
from sandbox.speed.value import NamedTuple

# Open requests of the host. With more, the oldest is forgotten, and its answer counts as a stray.
MOST_OPEN = 4096
# Characters of a method or an id that are kept. An answer with a longer id counts as a stray.
LONGEST = 256
# A host that drops other characters, or cuts a text, could read one of the contract's methods.
_PLAIN_METHOD = re.compile(r"[!-~]{1,1024}")


class Withheld(NamedTuple):
    """A frame that the host does not get, and that does not end the plugin: a session drops it too."""

    kind: str  # under which it is counted
    why: str


class Rewritten(NamedTuple):
    """What the host gets in place of a frame: the same message, which other hosts could have read otherwise.
    Only for a contract whose frames are lines."""

    frame: bytes


_NOT_RPC = Withheld("not_rpc", "JSON that is not a message")
_OTHER_REQUEST = Withheld(
    "ambiguous", "a question that some hosts could read as another one, or as an answer"
)

Verdict = Violation | Withheld | Rewritten | None
# The contract's own judgement of a line: its value, or the cause and the detail of its fault.
Judge = Callable[[Any, str | None, str], Violation | Withheld | None]
Reader = Callable[[bytes, bool], wire.Reading]  # the second: no object may have a key twice


def judge_line(value: Any, cause: str | None, detail: str) -> Violation | None:
    """JSON with a fault ends the plugin. What is no JSON is noise."""
    if cause in (None, "bad_json"):
        return None
    return Violation("malformed_response", f"a line that breaks the protocol: {detail}", cause)


class Statement(NamedTuple):
    """A request or notification of one side."""

    method: str
    params: Any
    is_request: bool
    number: Any = None  # the id
    again: bool = False  # the plugin uses the id of another request that the host has not answered


class Answered(NamedTuple):
    """The plugin's answer to a request of its host."""

    method: str  # of the request; empty: it is not known
    result: Any
    error: Any  # None: there is none


Heard = Statement | Answered


class RpcReader:
    """Both sides of one conversation. `methods`: those the contract acts on. `handshakes`: the methods whose
    answer completes the handshake; None: each of `methods` does. `versioned`: a message has "jsonrpc": "2.0".
    `one_kind`: a message that is both a request and an answer, or has both a result and an error, ends the
    plugin; otherwise it is withheld. `null_results`: an answer without a result or an error has the result
    null.

    An answer without a request of the host is withheld. The host could take it for the answer to a request
    that it is about to send, and that answer would be unchecked."""

    def __init__(
        self,
        methods: frozenset[str] = frozenset(),
        *,
        handshakes: frozenset[str] | None = None,
        read: Reader = read_line,
        judge: Judge = judge_line,
        versioned: bool = False,
        one_kind: bool = False,
        null_results: bool = False,
    ) -> None:
        # Whether the handshake is complete. An inspector sets it too, where the host uses no handshake.
        self.settled = False
        self._read, self._judge = read, judge
        self._versioned, self._one_kind, self._null_results = versioned, one_kind, null_results
        self._handshakes = methods if handshakes is None else handshakes
        self._methods = methods
        self._folded = {method.casefold() for method in methods}
        self._open: dict[tuple[type, Any], str] = {}
        self._sent: dict[tuple[type, Any], int] = {}  # id of an open request with params -> hash of it
        self._asked: dict[tuple[type, Any], None] = {}  # ids of the plugin's requests without an answer
        self._again: set[tuple[type, Any]] = set()  # ids that the host used for two open requests
        self._unknown = 0  # frames of the host that could not be read, and may have been requests
        self._strays: dict[str, int] = {}

    @property
    def strays(self) -> Mapping[str, int]:
        return self._strays

    def host(self, raw: bytes | None) -> list[Statement]:
        """The requests and notifications in a frame of the host. The host's faults are not reported."""
        value, cause, *_ = wire.message(raw or b"")
        said = value if isinstance(value, list) else [value]
        if cause is not None:
            self._unknown += raw is None or bool(raw.strip())
            return []
        return [asked for one in said if (asked := self._from_host(one)) is not None]

    def _from_host(self, message: Any) -> Statement | None:
        if not isinstance(message, dict):
            return None
        if not isinstance(method := message.get("method"), str):
            self.forget_question(message.get("id"))
            return None
        number = message.get("id")
        # Cut short, because the host may send any number. The methods we look for are shorter.
        method = method[:LONGEST]
        if type(number) in (int, str) and len(str(number)) <= LONGEST:
            key = type(number), number
            if self._open.pop(key, None) is not None:
                self._again.add(key)
            self._open[key] = method
            # Without params it may be the plugin's own request: both sides may send a ping.
            if message.get("params"):
                self._sent[key] = _hash(message)
            if len(self._open) > MOST_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._sent.pop(oldest, None)
                self._again.discard(oldest)
                self._unknown += 1
        elif "id" in message:
            self._unknown += 1
        return Statement(method, message.get("params"), "id" in message, number)

    def forget_question(self, number: Any) -> None:
        """The plugin's request of this id was answered or cancelled."""
        if (key := self._key(number)) is not None:
            self._asked.pop(key, None)

    def plugin(self, raw: bytes, check: Callable[[Heard], Verdict], *, batch: int = 0) -> Verdict:
        """The verdict about a line of the plugin. `check`: the contract's own, about each message in it.
        `batch`: messages that one array may hold; 0: the contract has no arrays."""
        withheld = None
        for heard in self._hear(raw, batch):
            verdict = heard if isinstance(heard, Violation | Withheld) else check(heard)
            if verdict is not None and not isinstance(verdict, Withheld):
                return verdict
            withheld = withheld or verdict
        if withheld is not None:
            self._count(withheld.kind)
        return withheld

    def _count(self, kind: str) -> None:
        self._strays[kind] = self._strays.get(kind, 0) + 1

    def _hear(self, raw: bytes, batch: int) -> Iterator[Heard | Violation | Withheld]:
        if not raw.strip():
            return
        value, cause, detail, _ = self._read(raw, not self.settled)
        if (verdict := self._judge(value, cause, detail)) is not None:
            yield verdict
        elif cause is not None:
            yield Withheld("not_json", "a line that is not JSON")
        elif batch and value and isinstance(value, list):
            yield from self._hear_batch(raw, value, batch)
        elif self.settled and self._matters(value) and self._read(raw, True).cause is not None:
            yield Violation("malformed_response", "a message that has a key twice", "duplicate_key")
        else:
            yield from self._hear_one(value)

    def _hear_batch(
        self, raw: bytes, messages: list[Any], most: int
    ) -> Iterator[Heard | Violation | Withheld]:
        if len(messages) > most:
            text = f"more than {most} messages in one array"
            yield Violation("malformed_response", text, "batch_too_large")
        elif self._read(raw, True).cause is not None:
            yield Withheld("ambiguous", "an array with a key twice in an object")
        else:
            for message in messages:
                yield from self._hear_one(message)

    def _hear_one(self, message: Any) -> Iterator[Heard | Violation | Withheld]:
        fault = self._fault_of(message)
        if fault is not None:
            yield fault
        if fault is None or fault is _OTHER_REQUEST:  # a session takes that for a question
            yield self._question(message) if _is_request(message) else self._answer(message)

    def _matters(self, value: Any) -> bool:
        """Whether the contract looks at the parts of a message."""
        if not isinstance(value, dict):
            return False
        key = self._key(value.get("id"))
        asked = self._open.get(key) if key is not None else None
        return asked in self._methods or (_is_request(value) and value["method"] in self._methods)

    def _fault_of(self, message: Any) -> Violation | Withheld | None:
        if not isinstance(message, dict) or (self._versioned and message.get("jsonrpc") != "2.0"):
            return _NOT_RPC
        is_answer = self._is_answer(message)
        if odd := odd_key(message, IDENTITY):
            return _ambiguous(odd) if is_answer or isinstance(message.get("method"), str) else _NOT_RPC
        if self._one_kind and (both := two_kinds(message)):
            return _ambiguous(both)
        if _is_request(message):
            return self._fault_of_request(message)
        return self._fault_of_answer(message) if is_answer else _NOT_RPC

    def _fault_of_request(self, message: Mapping[str, Any]) -> Violation | Withheld | None:
        key = self._key(message.get("id"))
        if key is not None and key in self._sent and self._sent[key] == _hash(message):
            code: Code = "malformed_response" if self.settled else "handshake_failed"
            return Violation(code, "it sends its host's own messages back", "echo")
        method = message["method"]
        is_plain = _PLAIN_METHOD.fullmatch(method) is not None and method.casefold() not in self._folded
        is_answer = "result" in message or "error" in message
        return None if (is_plain or method in self._methods) and not is_answer else _OTHER_REQUEST

    def _fault_of_answer(self, message: Mapping[str, Any]) -> Withheld | None:
        number, result, error = message["id"], message.get("result"), message.get("error")
        if result is not None and error not in (None, ""):
            return Withheld("ambiguous", "an answer with both a result and an error")
        if self._key(number) in self._open:
            return None
        unasked = Withheld("unasked", "it answered a request that the host had not sent")
        if isinstance(number, bool | list | dict):  # in JavaScript a table has one entry for 1 and [1]
            return unasked
        if error and isinstance(error, dict):
            return None  # a host cannot use an error alone
        # It may answer a request that we could not read. But some hosts take "1" for the 1 they wait for.
        if self._unknown and self._handshakes.isdisjoint(self._open.values()):
            self._unknown -= 1
            return None
        return unasked

    def _is_answer(self, message: Any) -> TypeGuard[Mapping[str, Any]]:
        if not isinstance(message, dict) or "id" not in message:
            return False
        if "result" in message or "error" in message:
            return True
        return self._null_results and "jsonrpc" in message and not _is_request(message)

    def _question(self, message: Mapping[str, Any]) -> Statement:
        number = message.get("id")
        key = self._key(number)
        again = key is not None and key in self._asked
        if key is not None and len(str(number)) <= LONGEST:
            self._asked[key] = None
            if len(self._asked) > MOST_OPEN:
                del self._asked[next(iter(self._asked))]
        return Statement(message["method"], message.get("params"), "id" in message, number, again)

    def _answer(self, message: Mapping[str, Any]) -> Answered:
        error = message.get("error")
        if error == "":  # hosts that test it for truth see no error
            error = None
        asked = self._close(message["id"])
        if error is None and asked in self._handshakes:
            self.settled = True
        return Answered(asked, message.get("result"), error)

    def _key(self, number: Any) -> tuple[type, Any] | None:
        return (type(number), number) if type(number) in (int, str) else None

    def _close(self, number: Any) -> str:
        """Close the request that this answers, and return its method. It stays open if it was sent twice."""
        key = self._key(number)
        if key is None or key not in self._open:
            self._count("unasked")
            return ""
        if key in self._again:
            self._again.discard(key)
            return self._open[key]
        self._sent.pop(key, None)
        return self._open.pop(key)


def _hash(message: Mapping[str, Any]) -> int:
    return hash(wire.encode([message.get("method"), message.get("params")]))


def _is_request(message: Mapping[str, Any]) -> bool:
    method = message.get("method")
    return isinstance(method, str) and bool(method)


def _ambiguous(what: str) -> Violation:
    return Violation("malformed_response", what, "ambiguous")
