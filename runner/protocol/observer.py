"""Reads JSON-RPC between a plugin and its host without taking part: which answer belongs to which request.

A line of the plugin is judged as the contract's dialect judges it. What ends a session is a fault here. What
a session drops is passed on, because hosts ignore it, and counted.

The host's JSON parser is unknown. So a line that a session drops, but that another parser could read as a
message, is withheld: the host does not get it, and the plugin goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeGuard

from runner.outcome import Code
from runner.protocol import wire
from runner.protocol.ambiguity import MOST_PIECES, hides_message, is_message, odd_key, two_kinds
from runner.protocol.dialect import Violation
from runner.protocol.jsonrpc import IDENTITY, read_line
from sandbox.speed.value import NamedTuple

# Open requests of the host. With more, the oldest is forgotten, and its answer counts as a stray.
MOST_OPEN = 4096
# Characters of a method or an id that are kept. An answer with a longer id counts as a stray.
LONGEST = 256
# Messages in an array, in a contract that has no arrays.
MOST_IN_STRAY = 1000

# Characters of a method that are compared with the contract's methods, and how many of them may be visible.
# The contract's methods are shorter.
MOST_OF_METHOD = 1024
MOST_VISIBLE = 64
# Elements of an array that are read: some hosts read an array as the fields of a message, which has fewer.
MOST_FIELDS = 16

# Patterns for lines that are not JSON, in lower case. Each pattern begins with plain letters,
# which the regex engine finds much faster than a boundary.
_ESCAPED = re.compile(r"\\(?:(?:u\{0*|u00|u000000|x)([4-7][0-9a-f])\}?|([01][0-7]{2}))")
_MESSAGE_WORDS = tuple(re.compile(rf"{word}(?<!\w{word})(?!\w)") for word in ("jsonrpc", "method"))
_ID_KEY, _RESULT_KEY, _ERROR_KEY = (
    re.compile(rf"{word}(?<!\w{word})[\"'\s]*[:/#]") for word in ("id", "result", "error")
)
# Text that some readers skip inside a word: the end of a continued line, a backslash that escapes nothing,
# and bytes that are not UTF-8.
_SKIPPED = ("\\\r", "\\\u2028", "\\\u2029", "\\", "\ufffd")


class Withheld(NamedTuple):
    """A frame that the host does not get, and that does not end the plugin: a session drops it too."""

    kind: str  # under which it is counted
    why: str


class Rewritten(NamedTuple):
    """What the host gets in place of a frame: the same message, which other hosts could have read otherwise.
    Only for a contract whose frames are lines."""

    frame: bytes


Verdict = Violation | Withheld | Rewritten | None
# The contract's own judgement of a line: its value, or the cause and the detail of its fault.
Judge = Callable[[Any, str | None, str], Violation | Withheld | None]
Reader = Callable[[bytes, bool], wire.Reading]  # the second: no object may have a key twice


def judge_line(value: Any, cause: str | None, detail: str) -> Violation | None:
    """JSON with a fault ends the plugin. What is no JSON is noise."""
    if cause in (None, "bad_json"):
        return None
    return Violation("malformed_response", f"a line that breaks the protocol: {detail}", cause)


class Question(NamedTuple):
    """A request or notification of one side."""

    method: str
    params: Any
    is_question: bool
    number: Any = None  # the id
    again: bool = False  # the plugin uses the id of another request that the host has not answered


class Answered(NamedTuple):
    """The plugin's answer to a request of its host."""

    method: str  # of the request
    result: Any
    error: Any  # None: there is none


Heard = Question | Answered


class Observer:
    """Both sides of one conversation. `methods`: those the contract acts on. A host that ignores case would
    also take other spellings of them. `handshakes`: the methods whose answer completes the handshake; None:
    each of `methods` does. `one_kind`: a message that is both a request and an answer, or both a result and
    an error, is a fault; otherwise the contract says which of them counts, and hosts may read another.
    `null_results`: an answer with neither a result nor an error has the result null.

    Until the handshake is complete, an answer without a request of the host is withheld. The host could take
    it for the answer to a request that it is about to send, and that answer would be unchecked."""

    def __init__(
        self,
        methods: frozenset[str] = frozenset(),
        *,
        handshakes: frozenset[str] | None = None,
        read: Reader = read_line,
        judge: Judge = judge_line,
        one_kind: bool = False,
        null_results: bool = False,
    ) -> None:
        # Whether the handshake is complete. An inspector sets it too, where the host uses no handshake.
        self.settled = False
        self._read, self._judge = read, judge
        self._one_kind, self._null_results = one_kind, null_results
        self._handshakes = methods if handshakes is None else handshakes
        self._methods = methods
        self._open: dict[tuple[type, Any], str] = {}
        self._sent: dict[tuple[type, Any], int] = {}  # id of an open request with params -> hash of it
        self._asked: dict[tuple[type, Any], None] = {}  # ids of the plugin's requests without an answer
        self._again: set[tuple[type, Any]] = set()  # ids that the host used for two open requests
        self._unknown = 0  # frames of the host that could not be read, and may have been requests
        self._strays: dict[str, int] = {}

    @property
    def strays(self) -> Mapping[str, int]:
        return self._strays

    def stray(self, kind: str) -> None:
        self._strays[kind] = self._strays.get(kind, 0) + 1

    def host(self, raw: bytes | None) -> list[Question]:
        """The requests and notifications in a frame of the host. The host's faults are not reported."""
        value, cause, *_ = wire.message(raw or b"")
        said = value if isinstance(value, list) else [value]
        if cause is not None:
            self._unknown += raw is None or bool(raw.strip())
            return []
        return [asked for one in said if (asked := self._from_host(one)) is not None]

    def _from_host(self, message: Any) -> Question | None:
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
        return Question(method, message.get("params"), "id" in message, number)

    def forget_question(self, number: Any) -> None:
        """The plugin's request of this id was answered or cancelled."""
        if (key := self._key(number)) is not None:
            self._asked.pop(key, None)

    def plugin(self, raw: bytes, *, batch: int = 0) -> list[Heard] | Violation | Withheld:
        """The messages in a line of the plugin. `batch`: messages that one array may hold; 0: the contract
        has no arrays."""
        found = self._hear(raw, batch)
        if isinstance(found, Withheld):
            self.stray(found.kind)
        return found

    def _hear(self, raw: bytes, batch: int) -> list[Heard] | Violation | Withheld:
        if not raw.strip():
            return []
        value, cause, detail, _ = self._read(raw, not self.settled)
        if (verdict := self._judge(value, cause, detail)) is not None:
            return verdict
        if cause is not None:
            if hides_message(raw, is_json=False, is_message=is_message) or _is_lenient_message(raw):
                return Withheld(
                    "ambiguous", "some hosts could read a message in this line, which is not JSON"
                )
            self.stray("not_json")
            return []
        if isinstance(value, list) and any(map(self._is_field, islice(value, MOST_FIELDS))):
            return Withheld("ambiguous", "some hosts would read this array as the fields of a message")
        if self.settled and self._matters(value) and self._read(raw, True).cause is not None:
            return Violation("malformed_response", "a message that has a key twice", "duplicate_key")
        said = value if isinstance(value, list) else [value]
        is_stray = isinstance(value, list) and not batch
        if is_stray:
            # Most hosts ignore such an array. Some read it all the same.
            said = [each for each in value if isinstance(each, dict) and is_message(each)]
        most = batch or MOST_IN_STRAY
        if len(said) > most:
            text = f"more than {most} messages in one array"
            if is_stray:
                return Withheld("ambiguous", text)
            return Violation("malformed_response", text, "batch_too_large")
        for message in said:
            if isinstance(message, dict) and (fault := self._fault_of(message)) is not None:
                if is_stray and isinstance(fault, Violation):
                    return Withheld("ambiguous", fault.message)
                return fault
        if not self.settled and any(self._is_forged(message) for message in said):
            why = "before the handshake was complete, it answered a request that the host had not sent"
            return Withheld("unasked", why)
        if is_stray:
            self.stray("not_rpc")
        return list(self._from_plugin(said, is_stray=is_stray))

    def _matters(self, value: Any) -> bool:
        """Whether the contract looks at the parts of a message. Also an array, which some hosts read."""
        if not isinstance(value, dict):
            return isinstance(value, list)
        method = value.get("method")
        if isinstance(method, str) and method in self._methods:
            return True
        key = self._key(value.get("id"))
        asked = self._open.get(key) if key is not None else None
        return (asked or self._nearly(value.get("id"))) in self._methods

    def _fault_of(self, message: Mapping[str, Any]) -> Violation | Withheld | None:
        """The fault of a message that hosts could read differently, or that was the host's own."""
        is_exact = isinstance(message.get("method"), str) or self._is_answer(message)
        if odd := odd_key(message, IDENTITY):
            if is_exact:
                return _ambiguous(odd)
            return Withheld("ambiguous", odd) if is_message(message) else None
        if self._one_kind and (both := two_kinds(message)):
            return _ambiguous(both)
        method = message.get("method")
        if isinstance(method, str) and ("\0" in method or self._is_misspelled(method)):
            why = "another spelling of one of the contract's methods, which some hosts accept"
            return Withheld("ambiguous", why)
        key = self._key(message.get("id"))
        if method and key is not None and key in self._sent and self._sent[key] == _hash(message):
            code: Code = "malformed_response" if self.settled else "handshake_failed"
            return Violation(code, "it sends its host's own messages back", "echo")
        return None

    def _is_forged(self, message: Any) -> bool:
        """Whether a message is an answer without a request of the host. Errors alone do not count: a host
        cannot use them. One beside a result does: a host may read the result."""
        is_error = self._is_answer(message) and message.get("error") not in (None, "")
        if not self._is_answer(message) or (is_error and message.get("result") is None):
            return False
        number = message["id"]
        if self._key(number) in self._open or self._nearly(number) is not None:
            return False
        if self._unknown:  # it may answer a request that we could not read
            self._unknown -= 1
            return False
        return True

    def _is_field(self, value: Any) -> bool:
        """Whether a value in an array is one that only messages have."""
        if not isinstance(value, str):
            return False
        return value == "2.0" or value in self._methods or self._is_misspelled(value)

    def _is_misspelled(self, method: Any) -> bool:
        """Whether a host that trims methods, drops invisible characters or ignores case would read this as a
        method of the contract. A method that is too long to search counts as one."""
        if not isinstance(method, str) or method in self._methods:
            return False
        begin = method[:MOST_OF_METHOD]
        # U+FFFD stands for bytes that are not UTF-8, and for halves of surrogate pairs.
        visible = "".join(each for each in begin if each.isprintable() and each not in " \ufffd")
        if len(visible) > MOST_VISIBLE:
            return False
        if len(method) > len(begin):
            return True
        return visible.casefold() in {word.casefold() for word in self._methods}

    def _is_answer(self, message: Any) -> TypeGuard[Mapping[str, Any]]:
        """Also of a message that is a request too: a host may read it as either."""
        if not isinstance(message, dict) or "id" not in message:
            return False
        if "result" in message or "error" in message:
            return True
        return self._null_results and "jsonrpc" in message and not _is_request(message)

    def _from_plugin(self, messages: list[Any], *, is_stray: bool) -> Iterator[Heard]:
        for message in messages:
            is_request = isinstance(message, dict) and _is_request(message)
            if is_request:
                yield self._question(message)
            if self._is_answer(message):
                yield from self._answers(message, counts=not is_request and not is_stray)
            elif not is_request:
                self.stray("not_rpc")

    def _question(self, message: Mapping[str, Any]) -> Question:
        number = message.get("id")
        key = self._key(number)
        again = key is not None and key in self._asked
        if key is not None and len(str(number)) <= LONGEST:
            self._asked[key] = None
            if len(self._asked) > MOST_OPEN:
                del self._asked[next(iter(self._asked))]
        return Question(message["method"], message.get("params"), "id" in message, number, again)

    def _answers(self, message: Mapping[str, Any], *, counts: bool) -> Iterator[Answered]:
        """The answer, in each way that a host could read it. `counts`: it closes the request."""
        number, result, error = message["id"], message.get("result"), message.get("error")
        asked = self._close(number) if counts else None
        if error == "":  # hosts that test it for truth see no error
            error = None
        if asked is not None and error is None and asked in self._handshakes:
            self.settled = True
        if asked is None:
            if counts:
                self.stray("unasked")
            asked = self._nearly(number)
        if asked is None:
            return
        if error is not None and result is not None:
            yield Answered(asked, result, None)
        yield Answered(asked, result, error)

    def _key(self, number: Any) -> tuple[type, Any] | None:
        return (type(number), number) if type(number) in (int, str) else None

    def _close(self, number: Any) -> str | None:
        """Close the request that this answers, and return its method. It stays open if it was sent twice."""
        key = self._key(number)
        if key is None or key not in self._open:
            return None
        if key in self._again:
            self._again.discard(key)
            return self._open[key]
        self._sent.pop(key, None)
        return self._open.pop(key)

    def _nearly(self, number: Any) -> str | None:
        """The request that this answers if a host treats 1, 1.0, "1" and [1] as equal. It stays open, because
        other hosts still wait for the right answer."""
        while isinstance(number, list) and len(number) == 1:
            number = number[0]
        if isinstance(number, str) and (str, number) in self._open:
            return self._open[str, number]
        try:
            whole = int(number, 0) if isinstance(number, str) and "x" in number else int(float(number or 0))
            return self._open.get((int, whole)) or self._open.get((str, str(whole)))
        except (TypeError, ValueError, OverflowError):  # also a number that is too long for a text
            return None


def _is_lenient_message(raw: bytes) -> bool:
    """Whether a line that is not JSON could be a message for lenient readers. They accept comments, single
    quotes, keys without quotes, extra commas, control characters in strings, UTF-16 and the like. The words
    of a message are enough; the line is not parsed."""
    begin = raw.find(b"{")
    if begin < 0:
        return False
    # Without NUL, UTF-16 and UTF-32 are ASCII here. Python's json.loads detects both in bytes.
    text = raw[begin:].replace(b"\0", b"").decode("utf-8", "replace").casefold()
    if "\\" in text:
        text, escapes = _ESCAPED.subn(_unescaped, text, MOST_PIECES + 1)
        if escapes > MOST_PIECES:  # escapes of plain letters, which no honest plugin writes
            return True
    if _has_words(text):
        return True
    bare = text
    for skipped in _SKIPPED:
        bare = bare.replace(skipped, "")
    return len(bare) != len(text) and _has_words(bare)


def _unescaped(escape: re.Match[str]) -> str:
    hexadecimal, octal = escape.groups()
    return chr(int(hexadecimal, 16) if hexadecimal else int(octal, 8)).casefold()


def _has_words(text: str) -> bool:
    if any(word.search(text) for word in _MESSAGE_WORDS):
        return True
    return bool(_ID_KEY.search(text)) and bool(_RESULT_KEY.search(text) or _ERROR_KEY.search(text))


def _hash(message: Mapping[str, Any]) -> int:
    return hash(wire.encode([message.get("method"), message.get("params")]))


def _is_request(message: Mapping[str, Any]) -> bool:
    method = message.get("method")
    return isinstance(method, str) and bool(method)


def _ambiguous(what: str) -> Violation:
    return Violation("malformed_response", what, "ambiguous")
