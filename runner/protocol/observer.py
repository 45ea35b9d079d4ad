"""Reads JSON-RPC between a plugin and its host without taking part: which answer belongs to which request.

A line of the plugin is one of three things: JSON with a fault, which must not reach the host; text outside
the protocol, which hosts ignore and which is counted; or messages.

The host's JSON parser is unknown. So a line that two parsers could read differently is a fault too. Otherwise
a plugin could show us one message and its host another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeGuard

from runner.protocol import wire
from runner.protocol.dialect import Violation
from runner.protocol.jsonrpc import IDENTITY
from sandbox.document.diagnostic import quoted
from sandbox.speed.value import NamedTuple

# Open requests of the host. With more, the oldest is forgotten, and its answer counts as a stray.
MOST_OPEN = 4096
# Characters of a method or an id that are kept. An answer with a longer id counts as a stray.
LONGEST = 256
# Messages in an array, in a contract that has no arrays.
MOST_IN_STRAY = 1000

# Pieces of one line that are looked at. Time limits are not checked meanwhile.
MOST_PIECES = 10_000
# Characters of a method that are compared with the contract's methods, and how many of them may be visible.
# The contract's methods are shorter.
MOST_OF_METHOD = 1024
MOST_VISIBLE = 64
# Elements of an array that are read: some hosts read an array as the fields of a message, which has fewer.
MOST_FIELDS = 16

_KEYS = IDENTITY | {"params"}
_PARTS = ("params", "result", "error")
# Characters that end a line for some readers: those of str.splitlines, and NUL, which ends a string in C.
_ENDS = dict.fromkeys(map(ord, "\0\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), "\n")
# Numbers are not needed here. Converting long ones is slow, and CPython refuses integers of 4301 digits.
_STREAM = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0)
_SOMETHING = re.compile(r"\S")

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


class Question(NamedTuple):
    """A request or notification of one side."""

    method: str
    params: Any
    is_question: bool


class Answered(NamedTuple):
    """The plugin's answer to a request of its host."""

    method: str  # of the request
    result: Any
    error: Any  # None: there is none


Heard = Question | Answered


class Observer:
    """Both sides of one conversation. `words`: the keys the contract reads in the parts of a message;
    `methods`: those it acts on. A host that ignores case would also take other spellings of them.
    `messages_only`: a line that is no object of JSON-RPC 2.0 is a fault. `handshakes`: the methods whose
    answer completes the handshake; None: each of `methods` does.

    Until the handshake is complete, an answer without a request of the host is a fault. The host could take
    it for the answer to a request that it is about to send, and that answer would be unchecked."""

    def __init__(
        self,
        words: frozenset[str] = frozenset(),
        methods: frozenset[str] = frozenset(),
        *,
        messages_only: bool = False,
        handshakes: frozenset[str] | None = None,
    ) -> None:
        # Whether the handshake is complete. An inspector sets it too, where the host uses no handshake.
        self.settled = False
        self._messages_only = messages_only
        self._handshakes = methods if handshakes is None else handshakes
        self._words = words
        self._methods = methods
        self._open: dict[tuple[type, Any], str] = {}
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
        if not isinstance(message, dict) or not isinstance(method := message.get("method"), str):
            return None
        number = message.get("id")
        # Cut short, because the host may send any number. The methods we look for are shorter.
        method = method[:LONGEST]
        if type(number) in (int, str) and len(str(number)) <= LONGEST:
            key = type(number), number
            if self._open.pop(key, None) is not None:
                self._again.add(key)
            self._open[key] = method
            if len(self._open) > MOST_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._again.discard(oldest)
                self._unknown += 1
        elif "id" in message:
            self._unknown += 1
        return Question(method, message.get("params"), "id" in message)

    def plugin(self, raw: bytes, *, batch: int = 0) -> list[Heard] | Violation:
        """The messages in a line of the plugin. `batch`: messages that one array may hold; 0: the contract
        has no arrays."""
        if not raw.strip():
            return []
        value, cause, detail, _ = wire.message(raw, identity=_KEYS, unique=True)
        if cause not in (None, "bad_json"):
            return Violation("malformed_response", f"a line that breaks the protocol: {detail}", cause)
        if self._messages_only and (cause is not None or not _is_rpc(value)):
            text = f"a line that is no message of JSON-RPC 2.0: {detail}".removesuffix(": ")
            return Violation("malformed_response", text, cause or "not_rpc")
        if hides_message(raw, is_json=cause is None, is_message=_is_message):
            return _ambiguous("some hosts would read this line as more than one")
        if cause is not None:
            if _is_lenient_message(raw):
                return _ambiguous("the line is not JSON, but some hosts would read it as a message")
            self.stray("not_json")
            return []
        if isinstance(value, list) and any(map(self._is_field, islice(value, MOST_FIELDS))):
            return _ambiguous("some hosts would read this array as the fields of a message")
        said = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not batch:
            # Most hosts ignore such an array. Some read it all the same.
            self.stray("not_rpc")
            said = [each for each in value if isinstance(each, dict) and _is_message(each)]
        most = batch or MOST_IN_STRAY
        if len(said) > most:
            return Violation(
                "malformed_response", f"more than {most} messages in one array", "batch_too_large"
            )
        for message in said:
            if isinstance(message, dict) and (double := _double_meaning(message) or self._odd_part(message)):
                return _ambiguous(double)
            if isinstance(message, dict) and self._is_misspelled(message.get("method")):
                return _ambiguous(
                    "another spelling of one of the contract's methods, which some hosts accept"
                )
        is_stray = isinstance(value, list) and not batch
        if not self.settled and any(self._is_forged(message) for message in said):
            text = "before the handshake was complete, it answered a request that the host had not sent"
            return Violation("malformed_response", text, "unasked", "answer each request once, by its id")
        return list(self._from_plugin(said, is_stray=is_stray))

    def _is_forged(self, message: Any) -> bool:
        """Whether a message is an answer without a request of the host. Errors do not count: a host cannot
        use them."""
        if not _is_answer(message) or message.get("error") not in (None, ""):
            return False
        number = message["id"]
        if self._key(number) in self._open or self._nearly(number) is not None:
            return False
        if self._unknown:  # it may answer a request that we could not read
            self._unknown -= 1
            return False
        return True

    def _odd_part(self, message: Mapping[str, Any]) -> str:
        return next((odd for part in _PARTS if (odd := odd_key(message.get(part), self._words))), "")

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

    def _from_plugin(self, messages: list[Any], *, is_stray: bool) -> Iterator[Heard]:
        for message in messages:
            method = message.get("method") if isinstance(message, dict) else None
            if isinstance(method, str) and method:
                yield Question(method, message.get("params"), "id" in message)
            elif _is_answer(message):
                number = message["id"]
                asked = None if is_stray else self._close(number)
                error = message.get("error")
                if error == "":  # hosts that test it for truth see no error
                    error = None
                if asked is not None and error is None and asked in self._handshakes:
                    self.settled = True
                if asked is None:
                    if not is_stray:
                        self.stray("unasked")
                    asked = self._nearly(number)
                if asked is not None:
                    yield Answered(asked, message.get("result"), error)
            else:
                self.stray("not_rpc")

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
        except (TypeError, ValueError, OverflowError):
            return None
        return self._open.get((int, whole)) or self._open.get((str, str(whole)))


def hides_message(raw: bytes, *, is_json: bool, is_message: Callable[[Any], bool]) -> bool:
    """Whether a parser that ends lines at other characters, or reads one value after another, would find a
    message in the line. True also if the line has too many pieces to search."""
    if not is_json:
        if b"{" not in raw:
            return False
        text, end = raw.decode("utf-8", "replace").translate(_ENDS), "\n"
    elif b"\r" in raw.strip():  # the only such character that JSON allows between tokens
        text, end = raw.decode("utf-8", "replace"), "\r"
    else:
        return False
    if text.count(end) > MOST_PIECES:
        return True
    values = (value for piece in text.split(end) for value in _values(piece))
    try:
        return any(number > MOST_PIECES or is_message(value) for number, value in enumerate(values))
    except (ValueError, RecursionError):
        return True  # other readers may be able to read it


def _values(text: str) -> Iterator[Any]:
    """The values that a stream of JSON begins with. Raises ValueError or RecursionError where this parser
    has limits that others do not have."""
    at = 0
    while (found := _SOMETHING.search(text, at)) is not None:
        try:
            value, at = _STREAM.raw_decode(text, found.start())
        except json.JSONDecodeError:
            return
        yield value


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


def _is_message(value: Any) -> bool:
    """Whether a value is a message, also for hosts that ignore case or end a key at a NUL."""
    if isinstance(value, list):
        return any(isinstance(each, dict) and _is_message(each) for each in value)
    if not isinstance(value, dict):
        return False
    keys = set()
    for key, each in value.items():
        folded = key.partition("\0")[0].casefold()
        if folded == "method" and isinstance(each, str):
            return True
        keys.add(folded)
    return "id" in keys and ("result" in keys or "error" in keys)


def _is_rpc(value: Any) -> bool:
    """Whether a value is a request, a notification or an answer of JSON-RPC 2.0."""
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        return False
    if "id" not in value:
        return isinstance(value.get("method"), str)
    # JavaScript finds the same entry of a table for 1 and for [1].
    return value["id"] is None or type(value["id"]) in (int, float, str)


def _is_answer(message: Any) -> TypeGuard[Mapping[str, Any]]:
    if not isinstance(message, dict) or "id" not in message:
        return False
    method = message.get("method")
    return not (isinstance(method, str) and method) and ("result" in message or "error" in message)


def _double_meaning(message: Mapping[str, Any]) -> str:
    """Returns why hosts could read a message differently, or ''."""
    kinds = [key for key in ("method", "result", "error") if message.get(key) not in (None, "")]
    if len(kinds) > 1:
        return f"a message with both {kinds[0]} and {kinds[1]}"
    if isinstance(method := message.get("method"), str) and "\0" in method:
        return "a method with a NUL in its name, where some hosts end it"
    return odd_key(message, _KEYS) if _is_message(message) else ""


def odd_key(table: Any, words: frozenset[str]) -> str:
    """Returns why hosts could find different values in an object, or ''."""
    if not isinstance(table, dict):
        return ""
    spelled = {word.casefold(): word for word in words}
    seen: set[str] = set()
    for key in table:
        if "\0" in key:
            return "a key with a NUL in it, where some hosts end it"
        folded = key.casefold()
        if folded in seen:
            return "an object with two keys that differ in capital letters only"
        if spelled.get(folded, key) != key:
            return f"a message whose keys are written with capital letters: {quoted(key)}"
        seen.add(folded)
    return ""


def _ambiguous(what: str) -> Violation:
    return Violation("malformed_response", what, "ambiguous")
