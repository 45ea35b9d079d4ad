"""How a contract writes down the rules that its plugins are tried by: what is sent, and what must be seen.

A message is JSON. In it, and in patterns, "$name" stands for a fact about the plugin, and "#name" for an id
that is new in each trial. A pattern is compared with an answer (`mismatch`):

    str, int, dict, list, bool, None     a value of that type
    {"a": P, "b?": Q}                    an object with `a`, and perhaps `b`; it may have more keys
    [P]                                  an array of any length, in which each element matches P
    (P, Q)                               one of these
    a function                           returns what is wrong with the value, or ''
    anything else                        exactly this value
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from runner.conformance.report import ContractRule
from runner.plugin import Plugin
from runner.protocol.dialect import Call, Setting
from runner.protocol.frames import line
from runner.protocol.framing import Framing, LineFraming
from runner.protocol.header_frames import header_frame
from runner.protocol.wire import encode
from sandbox.document.diagnostic import cut, printable

PAD = "$pad"  # in a message: a text that makes its frame as long as `Say.size`
_FIRST_ID = 100


class Say(NamedTuple):
    """Send a message."""

    message: Any  # JSON; bytes are sent as they are, without a frame
    size: int = 0  # bytes of the frame, without newline or header; 0: whatever it takes
    pieces: int = 1  # that it is written in


class See(NamedTuple):
    """Wait for the answer to a request."""

    to: Any  # what it answers, as RuleBook.sort names it
    pattern: Any = object
    keep: tuple[tuple[str, str], ...] = ()  # fact -> where it is in the answer: "result.tools"
    alone: bool = False  # an answer to nothing, before it, is a fault
    or_exit: bool = False  # the plugin may exit instead


class Check(NamedTuple):
    """Compare what was kept. Nothing is sent."""

    fact: str | tuple[str, ...]  # several facts are one object
    pattern: Any


class CloseInput(NamedTuple):
    """Close the plugin's stdin."""


class Kill(NamedTuple):
    """End the plugin with SIGKILL, as a crash would."""


class SeeExit(NamedTuple):
    """Wait until the plugin has exited."""

    statuses: tuple[int, ...] = (0,)  # empty: any


Step = Say | See | Check | CloseInput | Kill | SeeExit

UNANSWERED = See(None, alone=True, or_exit=True)  # nothing is answered until the plugin exits

# Rules that every message of a plugin is held against, in all trials: it is one ("message"), it has the right
# shape ("shape"), and it answers something that was asked, once ("answer"). Others are RuleBook.watches.
Watch = str
# Returns what is wrong with a message, '' if nothing is, or None if the rule is not about it. It gets the
# message, the facts ("$name" -> value), and what it remembers of the conversation.
Judge = Callable[[Mapping[str, Any], Mapping[str, Any], dict[Any, Any]], str | None]


class TriedRule(NamedTuple):
    """A rule, and how a plugin is tried by it."""

    rule: ContractRule
    steps: tuple[Step, ...] = ()
    watch: Watch | None = None  # it has no steps
    own: bool = False  # in a process of its own; otherwise after the handshake, where others were tried
    after_handshake: bool = True
    needs: tuple[str, ...] = ()  # facts without which it does not apply
    again: tuple[Step, ...] = ()  # after these steps, in another process and after its handshake
    # What the plugin's own requests are answered with. None: RuleBook.reply.
    reply: Callable[[Any], Any] | None = None
    # It does not apply to a plugin of which the first fact is known in the end, and the second is not.
    unless: tuple[str, str] | None = None


# How a message of a plugin is sorted: an answer and what it answers; a request, to be answered with
# RuleBook.reply; or neither.
Sort = tuple[Literal["answer", "request", "other"], Any]


class RuleBook(NamedTuple):
    """The rules of a contract."""

    framing: Framing
    rules: tuple[TriedRule, ...]
    handshake: tuple[Step, ...]
    sort: Callable[[Any], Sort]
    asks: Callable[[Any], Any]  # what a message that is sent asks for, as `sort` names it; None: nothing
    shape: Callable[[Any], str]  # returns what is wrong with a message, or ''
    # What is known from the manifest and from a call that succeeds. None: there is none.
    facts: Callable[[Plugin | None, Call | None], dict[str, Any]]
    # Fact -> why rules that need it do not apply. A fact of the manifest needs no row.
    missing: Mapping[str, str]
    reply: Callable[[Any], Any] = lambda value: None  # the answer to a plugin's own request, or None
    # What is known from the operator's configuration and secrets, beside `facts`. Raises HandshakeFault if
    # they do not fit the plugin.
    given: Callable[[Setting], dict[str, Any]] = lambda setting: {}
    excuse: str = ""  # why rules with `unless` do not apply
    watches: Mapping[Watch, Judge] = {}  # the contract's own
    make_id: Callable[[int], Any] = int

    def encode(self, body: bytes) -> bytes:
        """A frame with its newline or header."""
        return line(body) if isinstance(self.framing, LineFraming) else header_frame(body)


# A rule without its number: (sentence, place, steps or one step or watch, {other fields}?).
Row = tuple[Any, ...]


def numbered(contract: str, source: str, *rows: Row) -> tuple[TriedRule, ...]:
    """Number the rules of a contract from 01. `source` is the name of its text, and stands before a place
    that is a section (§)."""
    made = []
    for number, (text, place, what, *more) in enumerate(rows, 1):
        place = f"{source} {place}" if place.startswith("§") else place
        fields = dict(more[0]) if more else {}
        if isinstance(what, str):
            fields["watch"] = what
        else:
            fields["steps"] = (what,) if isinstance(what, Step) else what
        made.append(TriedRule(ContractRule(f"{contract}-{number:02}", text, place), **fields))
    return tuple(made)


CALL_MISSING = "name a call that succeeds: --call NAME --input JSON"  # a reason for RuleBook.missing
OWN = {"own": True}  # fields of rules
FIRST = {"own": True, "after_handshake": False}  # tried in place of the handshake, or before it
ENDS_WITH_STDIN: tuple[Step, ...] = (CloseInput(), SeeExit(()))


def in_pieces(place: str, message: Any, pieces: int, *fields: Any) -> Row:
    steps = (Say(message, pieces=pieces), See("#1"))
    return "A request that arrives in pieces is answered.", place, steps, *fields


def long_request(place: str, message: Any, size: int, *fields: Any) -> Row:
    steps = (Say(message, size=size), See("#1"))
    return f"A request of {size} bytes is answered.", place, steps, *fields


def called(call: Call | None) -> dict[str, Any]:
    """The facts about a call."""
    return {} if call is None else {"tool": call.name, "input": {} if call.input is None else call.input}


# --- messages and patterns ----------------------------------------------------------------------------------


class MissingFact(Exception):
    """A message names a fact that is not known. The text is its name."""


class TrialFacts(dict[str, Any]):
    """What is known about the plugin: "$name" -> value. An id, "#name", is made when it is first used."""

    def __init__(self, known: Mapping[str, Any], make_id: Callable[[int], Any]) -> None:
        super().__init__({f"${name}": value for name, value in known.items()})
        self._make_id, self._last = make_id, _FIRST_ID
        self.untold = b""  # JSON with secrets that a message may have, and no transcript

    def __missing__(self, name: str) -> Any:
        if not name.startswith("#"):
            raise MissingFact(name[1:])
        self._last += 1
        made = self[name] = self._make_id(self._last)
        return made

    def forget_ids(self) -> None:
        """Called before each trial."""
        for name in [each for each in self if each.startswith("#")]:
            del self[name]


def fill(value: Any, facts: TrialFacts) -> Any:
    """The value with its facts and ids filled in. Raises MissingFact."""
    if isinstance(value, str) and value[:1] in ("$", "#") and value not in ("$", "#", PAD):
        return facts[value]
    if isinstance(value, dict):
        return {key: fill(each, facts) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(fill(each, facts) for each in value)
    return value


def body_of(say: Say, facts: TrialFacts) -> bytes:
    """The bytes of a message, without its frame. Raises MissingFact."""
    message = fill(say.message, facts)
    if not say.size:
        return encode(message)
    short = encode(fill_pad(message, ""))
    return encode(fill_pad(message, "x" * (say.size - len(short))))


def fill_pad(value: Any, text: str) -> Any:
    if value == PAD:
        return text
    return {key: fill_pad(each, text) for key, each in value.items()} if isinstance(value, dict) else value


def find(value: Any, path: str) -> Any:
    """What is at "a.b" in an object, or None. "" is the object itself."""
    for key in path.split(".") if path else ():
        value = value.get(key) if isinstance(value, dict) else None
    return value


_TYPES: Mapping[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "an array",
    None: "null",
}


def mismatch(pattern: Any, value: Any, where: str = "") -> str:
    """Returns what is wrong with a value, or ''. `where`: it is in the answer."""
    at = where or "the answer"
    if pattern is object:
        return ""
    if isinstance(pattern, type) or pattern is None:
        return "" if _is_of(value, pattern) else f"{at} is {shown(value)}, and not {_TYPES[pattern]}"
    if isinstance(pattern, tuple):
        faults = [mismatch(each, value, where) for each in pattern]
        return "" if "" in faults else "; ".join(dict.fromkeys(faults))
    if isinstance(pattern, dict):
        if not isinstance(value, dict):
            return f"{at} is {shown(value)}, and not an object"
        return next(filter(None, (_member(key, each, value, where) for key, each in pattern.items())), "")
    if isinstance(pattern, list) and pattern:
        if not isinstance(value, list):
            return f"{at} is {shown(value)}, and not an array"
        each = (mismatch(pattern[0], one, f"{where}[{number}]") for number, one in enumerate(value))
        return next(filter(None, each), "")
    if callable(pattern):
        fault = pattern(value)
        return f"{at}: {fault}" if fault else ""
    if type(pattern) is type(value) and pattern == value:
        return ""
    return f"{at} is {shown(value)}, and not {shown(pattern)}"


def _member(key: str, pattern: Any, value: dict[str, Any], where: str) -> str:
    name = key.removesuffix("?")
    place = f"{where}.{name}" if where else name
    if name not in value:
        return "" if name != key else f"{place} is missing"
    return mismatch(pattern, value[name], place)


def contains(names: Iterable[str]) -> Callable[[Any], str]:
    """A pattern: an array with all of these."""
    return lambda value: _first_of(sorted(names), value, value, "is missing")


def within(names: Iterable[str]) -> Callable[[Any], str]:
    """A pattern: an array that has nothing else than these."""
    return lambda value: _first_of(value, names, value, "is not declared")


def _first_of(wanted: Any, there: Any, value: Any, fault: str) -> str:
    if not isinstance(value, list):
        return "it is not an array"
    return next((f"{shown(each)} {fault}" for each in wanted if each not in there), "")


def not_blank(value: Any) -> str:
    """A pattern."""
    return "" if isinstance(value, str) and value.strip() else "it has to be a text that is not blank"


def _is_of(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if kind is None else isinstance(value, kind)


def shown(value: Any, most: int = 80) -> str:
    """A value of the peer as JSON, of at most so many characters and safe to print."""
    return printable(cut(encode(value).decode(), most))
