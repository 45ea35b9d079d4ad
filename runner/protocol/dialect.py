"""The interface between a session and a contract's protocol: frames in, events out.

A dialect is pure: it has no clock, no files and no streams. A session hands it frames, and the dialect
returns events; some of them are frames to send. A dialect never waits, and it never raises for anything
that a plugin can send: a fault of the plugin becomes a Violation. Each contract makes one dialect per
conversation (see runner/contracts/contract.py).

A session (runner/session/) owns the process, the clocks and the streams, and carries out the events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from runner.outcome import Code, Outcome
from runner.plugin import Allowance, Plugin
from runner.protocol.frames import Framer
from sandbox.document.diagnostic import quoted
from sandbox.spec import Limits
from sandbox.speed.value import NamedTuple

# A contract's own word (see Contract.calls), or one of two with the same meaning everywhere: "list" asks for
# a list, and its name says which ("tools", …); "event" is a notification and has no answer.
Kind = str

# Replies to the plugin are written first and never dropped. Keys, mouse and deliveries are notifications of
# contracts that send none while a request of ours is open: a later request does not overtake them. Requests
# wait for room in the queue. Events are dropped when there is no room.
Lane = Literal["reply", "key", "mouse", "delivery", "request", "event"]
# Those that a request does not overtake.
AHEAD_OF_REQUESTS: tuple[Lane, ...] = ("key", "mouse", "delivery")


NEVER_SENT = "never sent"  # reason for cancelling a request that was not sent to the plugin


NO_CONTEXT: Mapping[str, Any] = {}


class Call(NamedTuple):
    """One call of a plugin."""

    kind: Kind
    name: str
    input: Any = None  # JSON; None: nothing was given
    context: Mapping[str, Any] = NO_CONTEXT  # fields that a contract sends along: agent_id, workspace_id, …


def stray_context(
    call: Call, known: Mapping[str, Sequence[str]], flags: Mapping[str, str] | None = None
) -> str:
    """Returns the fault of a call's context, or ''. A key that the contract does not send is a fault.
    `flags`: the contract's own options, by name."""
    if not call.context:
        return ""
    keys = known.get(call.kind, ())
    stray = [key for key in call.context if key not in keys]
    if not stray or call.kind == "list":
        return ""
    if flags and stray[0] in flags:
        return f"the context has {quoted(stray[0])}, which is an option of its own: give {flags[stray[0]]}"
    article = "an" if call.kind[:1] in tuple("aeiou") else "a"
    text = f"the context has {quoted(stray[0])}, which is not sent along with {article} {call.kind}"
    return f"{text}; known are {', '.join(keys)}" if keys else f"{text}: in this contract it has no context"


class Setting(NamedTuple):
    """The settings of one conversation."""

    plugin: Plugin
    limits: Limits = Limits()  # as granted; a dialect looks at `handshake` and `call`
    environ: Mapping[str, str] = {}  # the operator's; a contract may define variables of its own
    declare: tuple[str, ...] = ()  # patterns of the capabilities that the policy lets a plugin declare
    call: Call | None = None  # the one call of a one-shot dialect
    config: Any = None  # for contracts that configure their plugins
    services: frozenset[str] = frozenset()  # what the host offers: names of fields of Services
    on_hook_failure: Literal["continue", "abort"] = "continue"  # by the policy
    options: Mapping[str, str] = {}  # values of the contract's own command line options
    # The operator's, for contracts that deliver them: never shown or kept. None: there are none, which is not
    # the same as an empty object.
    secrets: Mapping[str, Any] | None = None
    allowance: Allowance = Allowance()
    allows: Callable[[str], bool] = lambda method: False  # whether the policy lets it ask its host for that


# --- events ----------------------------------------------------------------------------------------------


class Send(NamedTuple):
    frame: bytes  # whole, with its newline or header
    lane: Lane = "request"


class Identity(NamedTuple):
    """The plugin's own description in the handshake, checked as far as the contract demands."""

    id: str
    version: str = ""
    protocol: str = ""
    title: str = ""
    instructions: str = ""
    tools: tuple[str, ...] = ()  # those in the handshake's answer
    details: Mapping[str, Any] = {}  # the rest


class Ready(NamedTuple):
    identity: Identity


class Reply(NamedTuple):
    call: int
    value: Any
    failure: str = ""  # why the plugin did not answer; the value is then the contract's substitute


class Refusal(NamedTuple):
    """The plugin answered with an error, as the contract defines errors."""

    call: int
    code: str  # the contract's own, as text: "-33402", "invalid_input", "isError"
    message: str
    kind: str = ""  # the contract's meaning of the code: "invalid_arguments", "rate_limited", …
    data: Any = None


class Progress(NamedTuple):
    """News about a call that is still running. `call` is None if the plugin does not name one."""

    call: int | None
    value: Mapping[str, Any]


class HostCall(NamedTuple):
    """A request of the plugin to its host. Answered with `Dialect.answer` under the same ticket."""

    ticket: int
    method: str
    params: Any
    expects_answer: bool = True


class HostCallCancelled(NamedTuple):
    ticket: int


class Notice(NamedTuple):
    """Information for the host that belongs to no open call."""

    kind: str  # "log", "stdout" (not the protocol), "published", "changed", "dropped", …
    value: Any


class ShutdownAnswered(NamedTuple):
    """The plugin has answered the request to shut down."""

    error: str = ""


class Alive(NamedTuple):
    """The plugin has answered a health check."""


class LateAnswer(NamedTuple):
    """The plugin has answered a call that its caller had given up. The answer itself is dropped."""

    call: int


class Violation(NamedTuple):
    """The plugin broke the contract, and the conversation ends. With `call`, only that call has failed."""

    code: Code
    message: str
    cause: str = ""
    hint: str = ""
    call: int | None = None
    plugin_id: str | None = None  # the id the plugin claims, if the contract adds it


Event = (
    Send
    | Ready
    | Reply
    | Refusal
    | Progress
    | HostCall
    | HostCallCancelled
    | Notice
    | ShutdownAnswered
    | Alive
    | LateAnswer
    | Violation
)
Events = Sequence[Event]


class Answer(NamedTuple):
    """The answer to a HostCall: a result, or an error of the protocol."""

    result: Any = None
    error: tuple[int, str, Any] | None = None  # code, message, data


class ShutdownSteps(NamedTuple):
    """How a plugin is shut down: send the frames, close stdin, then signals. The waits are in seconds."""

    frames: Events = ()
    answer: float = 0.0  # wait for ShutdownAnswered before stdin is closed
    exit: float = 2.0  # wait for the exit after stdin was closed
    terminate: float = 0.0  # wait after SIGTERM; 0: none is sent. Then every process is killed
    # For answer and exit together: the time that the answer did not use is added to `exit`.
    whole: float = 0.0
    # Whether the exit belongs to the answer: a one-shot plugin has to exit with 0 in time.
    counts: bool = False


class HealthCheck(NamedTuple):
    """The clocks of health checks, which are sent while no call is open."""

    method: str  # for messages
    interval: float  # seconds from one check to the next
    answer: float  # seconds for the answer; an error counts as one
    # Seconds from the beginning of a call that was given up. Until then, or until its LateAnswer, no check is
    # sent: the plugin may still be working on the call.
    busy: float


class CallRefused(Exception):
    """A call that is not sent because it cannot succeed. `event` is the result of the call."""

    def __init__(self, event: Refusal | Violation) -> None:
        super().__init__(event.message)
        self.event = event
        # The context of the call with the ids that were added so far, for its record. None: as the caller
        # gave it.
        self.context: Mapping[str, Any] | None = None


class HandshakeFault(Exception):
    """The plugin's part of the handshake, or the configuration for it, breaks the contract."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.message)
        self.violation = violation


class Message(NamedTuple):
    """A parsed frame: its value, or its fault."""

    value: Any = None
    fault: str = ""  # a cause of malformed_response: bad_json, bad_number, too_deep, …
    detail: str = ""
    raw: bytes = b""  # the beginning of a faulty frame, for messages
    weight: int = 0  # bytes that the value takes in memory
    at: float = 0.0  # when it was read, in seconds on the session's clock: a dialect has none of its own


class CallEnd(NamedTuple):
    """How one call ended, for the contract's own record of it."""

    outcome: Outcome
    value: Any = None  # the answer, if the outcome is ok
    refusal: Refusal | None = None  # the plugin's error, or the runner's own before anything was sent
    written: bool = False  # whether a byte of the request may have reached the plugin
    late: Any = None  # an answer after the deadline, if there was one; it is no success
    began: float = 0.0  # seconds since 1970
    ended: float = 0.0
    events: int = 0  # about the call, passed on
    dropped_events: int = 0


class Dialect(Protocol):
    """One conversation. `token` is the session's number for a call, unique in the conversation.

    A contract's dialect inherits from it. The members at the end of the class have defaults, because few
    contracts need them.
    """

    @property
    def handshake_seconds(self) -> float:
        """The contract's time limit until Ready. The grant may set a lower one."""
        ...

    def framer(self) -> Framer:
        """Cuts the plugin's stdout into frames, and limits their length."""
        ...

    def read(self, raw: bytes) -> Message:
        """One frame as a message. It must not use the dialect's state: long frames are read in a thread."""
        ...

    def opening(self) -> Events: ...
    def feed(self, message: Message) -> Events: ...

    def seconds(self, call: Call) -> float:
        """The contract's time limit for a call."""
        ...

    def call(self, token: int, call: Call) -> Events:
        """Raises CallRefused."""
        ...

    def cancel(self, token: int, reason: str) -> Events:
        """Cancel a call. A late answer is dropped and counted.

        With a `grace` period the session still waits: an answer, a Reply or a Refusal to `token`, is passed
        on. `reason` is then "deadline_exceeded", "user_cancelled" or "shutdown". The plugin ends with the
        call.
        """
        ...

    def notify(self, method: str, params: Any) -> Events:
        """Raises CallRefused if there is no such notification."""
        ...

    def answer(self, ticket: int, answer: Answer) -> Events: ...

    def shutdown_steps(self) -> ShutdownSteps: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """For the report: late, unknown, unreadable, dropped, …"""
        ...

    # --- what a contract may leave out ----------------------------------------------------------------------

    # Whether the grant may set a longer time than `handshake_seconds` too: the contract has none of its own.
    handshake_is_raisable: bool = False

    @property
    def write_seconds(self) -> float:
        """How long a plugin that is ready may leave what is written to it unread. Then it is ended."""
        return math.inf

    @property
    def held_bytes(self) -> int:
        """Bytes of deliveries that it holds back until the plugin may be told (memory.delivery_cost)."""
        return 0

    @property
    def one_shot(self) -> bool:
        """Whether the process serves one call: Setting.call, which the session sends with `call` after
        Ready."""
        return False

    @property
    def event_method(self) -> str:
        """The notification for a call of kind "event", with its topic and its payload."""
        return ""

    @property
    def patience(self) -> float | None:
        """Seconds without a frame after which the session calls `silence`; None: never."""
        return None

    def silence(self) -> Events:
        """Nothing came for the seconds of `patience`."""
        return ()

    def expired(self, token: int, why: str) -> Events:
        """The call will get no answer: its time is up, or the plugin has ended. `why` is for messages.

        Called before `cancel`. Some contracts have an answer for that case (the policy may define one for a
        failed hook): a Reply or Refusal to `token` among the events, which ends the call. Without one the
        call has failed.
        """
        return ()

    def emit(self, ticket: int, value: Any) -> Iterable[Event]:
        """Send part of an unfinished answer to the plugin. An iterator, because each frame waits for room in
        the queue before the next one is made."""
        return ()

    @property
    def noise(self) -> str:
        """Shown when a call times out: frames that were dropped, among which the answer may be."""
        return ""

    @property
    def health_check(self) -> HealthCheck | None:
        """None: the contract has no health checks."""
        return None

    def send_health_check(self) -> Events:
        """Send a health check. The plugin's answer becomes the event Alive."""
        return ()

    def grace(self, call: Call) -> float:
        """Seconds for the plugin to answer a cancelled call before it is killed (see `cancel`). 0: the call
        is dropped at once, and the plugin keeps running."""
        return 0.0

    def given_up_grace(self, call: Call) -> float:
        """The same for a call that its caller has given up. The caller waits for the end of it."""
        return self.grace(call)
