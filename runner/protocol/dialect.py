"""What a protocol is to a session: bytes in, events out, no time and no files of its own.

A dialect is pure. It is handed frames and answers with events; some of them are frames to send. It never
waits, never reads a clock and never raises for anything a plugin can send: what is wrong becomes a Violation.
Each contract makes one per conversation: see runner/contracts/contract.py.

A session (runner/session/) owns the process, the clocks and the streams, and does what the events say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from runner.outcome import Code
from runner.plugin import Plugin
from runner.protocol.frames import Framer
from sandbox.document.diagnostic import quoted
from sandbox.spec import Limits
from sandbox.value import NamedTuple

# A contract's own word (see Contract.kinds), or one of two that mean the same everywhere: "list" asks what
# there is, and its name says of what ("tools", …); "event" is a notification and has no answer.
Kind = str

# Replies to the plugin go first and are never dropped, requests wait for room, events are dropped when there
# is none.
Lane = Literal["reply", "request", "event"]


class Call(NamedTuple):
    """One thing asked of a plugin."""

    kind: Kind
    name: str
    input: Any = None  # JSON; None: nothing was given
    context: Mapping[str, Any] = {}  # what a contract sends along: agent_id, workspace_id, …


def stray_context(call: Call, known: Mapping[str, Sequence[str]]) -> str:
    """What is wrong with the context of a call, if anything: what would not be sent is not taken."""
    keys = known.get(call.kind, ())
    stray = [key for key in call.context if key not in keys]
    if not stray or call.kind == "list":
        return ""
    text = f"the context has {quoted(stray[0])}, which is not sent along with a {call.kind}"
    return f"{text}; known are {', '.join(keys)}" if keys else f"{text}: in this contract it has no context"


class Setting(NamedTuple):
    """Where a conversation takes place."""

    plugin: Plugin
    limits: Limits = Limits()  # as granted: `handshake` and `call` are also a dialect's business
    environ: Mapping[str, str] = {}  # the operator's, for the variables a contract promises to heed
    declare: tuple[str, ...] = ()  # patterns of the capabilities a plugin may declare, by the policy
    call: Call | None = None  # of a one-shot dialect: the one call the process is for
    config: Any = None  # for contracts that configure their plugins
    services: frozenset[str] = frozenset()  # what the host has to offer: names of fields of Services
    on_hook_failure: Literal["continue", "abort"] = "continue"  # by the policy
    options: Mapping[str, str] = {}  # values of the contract's own command line options


# --- events ----------------------------------------------------------------------------------------------


class Send(NamedTuple):
    frame: bytes  # whole, with its newline or header
    lane: Lane = "request"


class Identity(NamedTuple):
    """Who answered, by its own word, checked as far as the contract says."""

    id: str
    version: str = ""
    protocol: str = ""
    title: str = ""
    instructions: str = ""
    tools: tuple[str, ...] = ()  # as far as the handshake tells
    details: Mapping[str, Any] = {}  # the rest of what it said of itself


class Ready(NamedTuple):
    identity: Identity


class Reply(NamedTuple):
    call: int
    value: Any
    failure: str = ""  # the plugin did not answer, for this reason: the value is what its contract says then


class Refusal(NamedTuple):
    """The plugin answered "no", in the way the contract has for it."""

    call: int
    code: str  # the contract's own, as text: "-33402", "invalid_input", "isError"
    message: str
    kind: str = ""  # what the contract says the code means: "invalid_arguments", "rate_limited", …
    data: Any = None


class Progress(NamedTuple):
    """More to come. `call` is None where it cannot be told which call is meant."""

    call: int | None
    value: Mapping[str, Any]


class HostCall(NamedTuple):
    """The plugin asks something of its host. Answered with `Dialect.answer` under the same ticket."""

    ticket: int
    method: str
    params: Any
    expects_answer: bool = True


class HostCallCancelled(NamedTuple):
    ticket: int


class Notice(NamedTuple):
    """Something worth telling that nobody waits for."""

    kind: str  # "log", "stdout" (not the protocol), "published", "changed", "dropped", …
    value: Any


class Farewelled(NamedTuple):
    """The plugin has said that it is done."""

    error: str = ""


class Violation(NamedTuple):
    """The end of the conversation. `call`: only that call has failed, the session goes on."""

    code: Code
    message: str
    cause: str = ""
    hint: str = ""
    call: int | None = None
    plugin_id: str | None = None  # by its own word, where the contract attaches that one


Event = (
    Send | Ready | Reply | Refusal | Progress | HostCall | HostCallCancelled | Notice | Farewelled | Violation
)
Events = Sequence[Event]


class Answer(NamedTuple):
    """To a HostCall: a result, or an error of the protocol's own."""

    result: Any = None
    error: tuple[int, str, Any] | None = None  # code, message, data


class Farewell(NamedTuple):
    """How a plugin is bid to go: the frames, then stdin is closed, then signals. Seconds."""

    frames: Events = ()
    answer: float = 0.0  # for Farewelled, before stdin is closed
    exit: float = 2.0  # after stdin was closed
    terminate: float = 0.0  # after SIGTERM; 0: none is sent. Then all of it is killed
    # Whether how the process ends is part of its answer (a one-shot plugin has to exit with 0 in time).
    counts: bool = False


class CallRefused(Exception):
    """A call that is not made, because it cannot succeed. Carries what would have come back."""

    def __init__(self, event: Refusal | Violation) -> None:
        super().__init__(event.message)
        self.event = event


class Message(NamedTuple):
    """A frame that was read: a value, or what is wrong with it."""

    value: Any = None
    fault: str = ""  # a cause of malformed_response: bad_json, bad_number, too_deep, …
    detail: str = ""
    raw: bytes = b""  # of a fault, the beginning; for people
    weight: int = 0  # bytes that the value takes in memory, for who keeps it


class Dialect(Protocol):
    """One conversation. `token` is the session's name for a call, unique in the conversation."""

    @property
    def one_shot(self) -> bool:
        """One process for one call, which is named in the setting and sent after Ready with `call`."""
        ...

    @property
    def handshake_seconds(self) -> float:
        """Until Ready, by the contract. The session takes less if the grant says less."""
        ...

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which `silence` is to be told; None: silence means nothing now."""
        ...

    def framer(self) -> Framer:
        """How the plugin's stdout is cut, and how long a frame may be."""
        ...

    def read(self, raw: bytes) -> Message:
        """One frame as a message. Touches nothing of the dialect: long frames are read in a thread."""
        ...

    def opening(self) -> Events: ...
    def silence(self) -> Events: ...
    def feed(self, message: Message) -> Events: ...

    def seconds(self, call: Call) -> float:
        """How long the contract lets a call take."""
        ...

    def call(self, token: int, call: Call) -> Events:
        """Raises CallRefused."""
        ...

    def cancel(self, token: int, reason: str) -> Events:
        """The call is not waited for any more: what still comes for it is dropped and counted."""
        ...

    def expired(self, token: int, why: str) -> Events:
        """The call will not be answered: its time is up, or the plugin is gone; `why` is for people.

        Called before `cancel`. Some contracts have an answer for that (the policy may say what a failed hook
        stands for): a Reply or Refusal to `token` among the events, which ends the call. Without one the call
        has failed.
        """
        ...

    def notify(self, method: str, params: Any) -> Events:
        """Raises CallRefused if there is no such notification."""
        ...

    def answer(self, ticket: int, answer: Answer) -> Events: ...

    def emit(self, ticket: int, value: Any) -> Iterable[Event]:
        """A part of an answer that is still being made (llm.complete's deltas). One by one: each frame waits
        for room before the next is made."""
        ...

    def farewell(self) -> Farewell: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """For the report: late, unknown, unreadable, dropped, …"""
        ...
