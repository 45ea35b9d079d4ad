"""A dialect of JSON-RPC 2.0: stages, incoming messages, calls, answers, sizes and counters.

A contract inherits from RpcDialect. It sets the limits and the words of the class, and brings what is its
own: the handshake (`_greeting`, `_welcome`), the request for a call and its result (`_request`, `_result`).
Once a conversation is over, nothing is heard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from runner.outcome import Code
from runner.protocol import frames, jsonrpc
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Events,
    HandshakeFault,
    HostCall,
    Identity,
    Lane,
    Message,
    Notice,
    Refusal,
    Reply,
    Send,
    ShutdownAnswered,
    ShutdownSteps,
    Violation,
    stray_context,
)
from runner.protocol.memory import STANDING
from sandbox.document.diagnostic import cut, did_you_mean, printable, quoted
from sandbox.speed.value import NamedTuple

Stage = Literal["new", "handshake", "configure", "ready", "leaving", "over"]

# Tokens of our own requests. Those of calls are numbers.
INITIALIZE, SHUTDOWN = "initialize", "shutdown"

SHOWN_BYTES = 200  # of a frame that cannot be read
MOST_CHARACTERS = 2000  # of an error's message
_MOST_QUOTED = 500  # of one, inside a sentence of ours

# The meanings of the codes that JSON-RPC defines.
KINDS: Mapping[int, str] = {
    jsonrpc.PARSE_ERROR: "parse_error",
    jsonrpc.INVALID_REQUEST: "invalid_request",
    jsonrpc.METHOD_NOT_FOUND: "method_not_found",
    jsonrpc.INVALID_PARAMS: "invalid_params",
    jsonrpc.INTERNAL_ERROR: "internal",
}


class RpcCall(NamedTuple):
    """The request for a call. It is kept until the answer comes."""

    method: str
    params: Any
    hook: str = ""  # the hook's name: one that fails has a substitute for its answer
    about: Any = None  # what the contract needs to read the answer


class Welcome(NamedTuple):
    identity: Identity
    notices: tuple[Notice, ...] = ()


class RpcDialect(Dialect):
    frame_limit: int  # bytes of a frame of the plugin's
    most: float  # bytes of a message of ours
    # Ends of the sentences "the call has … bytes, " and "the answer has … bytes, ".
    call_limit: str
    answer_limit: str = ""
    not_json = "the answer is not JSON"  # the text of the error in place of such an answer

    context_keys: Mapping[str, Sequence[str]]  # of each kind of call: Contract.calls
    kinds: Mapping[int, str] = KINDS
    other_kind = "plugin_error"  # of codes that are not in `kinds`

    # What messages say.
    plugin_word = "it"
    frame_word = "a line on its stdout"
    handshake_word = "to be initialized"  # it refuses …
    check_hint: str  # for a plugin that echoes
    flood_cause = "too_many_requests"
    allows_noise = False  # whether a frame that is not JSON, or no message, goes to `_noted`
    # For one whose answer to the handshake is too large. Empty: nothing of it is kept, so it may be large.
    large_hint = ""

    def __init__(self, peer: jsonrpc.Peer) -> None:
        self._peer = peer
        self._stage: Stage = "new"
        self._open: dict[int, RpcCall] = {}  # by token
        self._dropped_counters: Mapping[str, int] = {}  # of the contract's queues
        self._counters: dict[str, int] = {}

    @property
    def counters(self) -> Mapping[str, int]:
        peer = {"late": self._peer.late, "unknown": self._peer.unknown}
        return {**peer, **self._dropped_counters, **self._counters}

    @property
    def noise(self) -> str:
        return self._peer.noise

    def framer(self) -> frames.Framer:
        return frames.LineFramer(self.frame_limit)

    def _send(self, raw: bytes, lane: Lane = "request") -> Send:
        return Send._make((frames.line(raw), lane))

    def _count(self, name: str) -> int:
        count = self._counters[name] = self._counters.get(name, 0) + 1
        return count

    # --- the handshake --------------------------------------------------------------------------------------

    def opening(self) -> Events:
        self._stage = "handshake"
        try:
            return (self._send(self._greeting()),)
        except HandshakeFault as fault:
            return self._end(fault.violation)

    def _greeting(self) -> bytes:
        """The request INITIALIZE. Raises HandshakeFault."""
        raise NotImplementedError

    def _configuration(
        self, token: str, method: str, params: Any, not_json: str, too_long: str, hint: str = ""
    ) -> bytes:
        """A request with the configuration. Raises HandshakeFault, with `not_json` and the fault for {}, or
        with `too_long` and the number of bytes."""
        try:
            raw = self._peer.request(token, method, params)
        except ValueError as error:
            text = not_json.format(error)
            raise HandshakeFault(Violation("handshake_failed", text, "config_invalid")) from None
        if len(raw) > self.most:
            text = too_long.format(len(raw))
            raise HandshakeFault(Violation("handshake_failed", text, "config_invalid", hint))
        return raw

    def _initialized(self, result: Any, weight: int) -> Events:
        if self.large_hint and weight > STANDING:
            text = f"its answer to initialize takes more than {STANDING >> 20} MiB of memory"
            return self._end(Violation("handshake_failed", text, "too_large", self.large_hint))
        try:
            return self._welcome(result)
        except HandshakeFault as fault:
            return self._end(fault.violation)

    def _welcome(self, result: Any) -> Events:
        """What follows from the answer to INITIALIZE. Raises HandshakeFault."""
        raise NotImplementedError

    @property
    def _is_early(self) -> bool:
        """Whether the plugin has yet to prove its identity."""
        return self._stage in ("new", "handshake")

    def _end(self, violation: Violation) -> Events:
        self._stage = "over"
        return (violation,)

    # --- incoming messages ----------------------------------------------------------------------------------

    def feed(self, message: Message) -> Events:
        if self._stage == "over" or message.fault == "blank":
            return ()
        if message.fault == "bad_json" and self.allows_noise:
            return self._noted(message.raw, message)
        if message.fault:
            return self._unreadable(message)
        return self._take(message.value, message)

    def _unreadable(self, message: Message) -> Events:
        return self._malformed(message.fault, message.detail)

    def _noted(self, value: Any, message: Message) -> Events:
        """Something else in place of a message: a banner, a forgotten print. Libraries do that. `value`: its
        bytes, if it is not JSON."""
        raise NotImplementedError

    def _malformed(self, cause: str, detail: str) -> Events:
        text = f"{self.frame_word} breaks the protocol: {detail}"
        return self._end(Violation("malformed_response", text, cause))

    def _take(self, value: Any, message: Message) -> Events:
        heard = self._peer.receive(value)
        if isinstance(heard, (jsonrpc.RpcResult, jsonrpc.RpcError)):
            return self._replied(heard, message.weight)
        if isinstance(heard, jsonrpc.RpcRequest):
            return self._asked(heard)
        if isinstance(heard, jsonrpc.RpcNotification):
            return self._notified(heard.method, heard.params, message.at)
        return self._strayed(heard, value, message)

    def _asked(self, request: jsonrpc.RpcRequest) -> Events:
        return (HostCall(request.ticket, request.method, request.params),)

    def _notified(self, method: str, params: Any, at: float) -> Events:
        raise NotImplementedError

    def _strayed(self, stray: jsonrpc.RpcStray, value: Any, message: Message) -> Events:
        """A message that is neither request nor answer. Late and unknown answers are counted by the peer."""
        if stray.why == "not_rpc" and self.allows_noise:
            return self._noted(value, message)
        if stray.why == "ambiguous":
            return self._malformed("ambiguous", stray.detail)
        if stray.why == "echo":
            code: Code = "handshake_failed" if self._is_early else "malformed_response"
            text = f"{self.plugin_word} sends our own messages back: {stray.detail}"
            return self._end(Violation(code, text, "echo", self.check_hint))
        if stray.why == "too_many":
            text = f"{self.plugin_word} does not wait for answers: {stray.detail}"
            return self._end(Violation("malformed_response", text, self.flood_cause))
        return ()

    def _replied(self, answer: jsonrpc.RpcResult | jsonrpc.RpcError, weight: int) -> Events:
        if isinstance(answer, jsonrpc.RpcError):
            return self._refused(answer)
        if answer.token == INITIALIZE:
            return self._initialized(answer.value, weight)
        if answer.token == SHUTDOWN:
            return (ShutdownAnswered(),)
        if not isinstance(answer.token, int):
            return self._own_answered(None)
        return self._result(answer.token, self._open.pop(answer.token), answer.value)

    def _refused(self, error: jsonrpc.RpcError) -> Events:
        token, said = error.token, self._quote(error.message, error.code)
        if token == INITIALIZE:
            text = f"it refuses {self.handshake_word}: {said}"
            return self._end(Violation("handshake_failed", text, "refused"))
        if token == SHUTDOWN:
            return (ShutdownAnswered(said),)
        if not isinstance(token, int):
            return self._own_answered(error)
        request = self._open.pop(token)
        if request.hook:
            return self._substitute(token, request.hook, f"it answered with an error: {said}")
        return self._call_refused(token, request, error)

    def _quote(self, message: str, code: int) -> str:
        """An error of the plugin's, inside a sentence of ours."""
        return f"{printable(cut(message, _MOST_QUOTED))} ({code})".strip()

    def _own_answered(self, error: jsonrpc.RpcError | None) -> Events:
        """The answer to a request of the contract's own, neither INITIALIZE nor SHUTDOWN."""
        return ()

    def _result(self, token: int, request: RpcCall, value: Any) -> Events:
        return (Reply(token, value),)

    def _call_refused(self, token: int, request: RpcCall, error: jsonrpc.RpcError) -> Events:
        text = self._shorten(error.message) or f"the plugin answered with error {error.code}"
        kind = self.kinds.get(error.code, self.other_kind)
        return (Refusal(token, str(error.code), text, kind, error.data),)

    def _shorten(self, message: str) -> str:
        return printable(message[:MOST_CHARACTERS]).strip()

    # --- calls ----------------------------------------------------------------------------------------------

    def call(self, token: int, call: Call) -> Events:
        if call.kind == "list":
            return (Reply(token, self._list(token, call.name)),)
        if self._stage != "ready" or token in self._open:
            twice = token in self._open
            why = "this call has been sent already" if twice else "the plugin is not ready for calls"
            raise CallRefused(Violation("internal", why, "not_ready", call=token))
        if stray := stray_context(call, self.context_keys):
            raise CallRefused(Refusal(token, "-32602", stray, "invalid_context"))
        request = self._request(token, call)
        try:
            raw = self._peer.request(token, request.method, request.params)
        except ValueError as error:
            return self._unsendable(request, Refusal(token, "-32602", f"the input is {error}", "not_json"))
        if large := self._too_large(token, "the call", raw):
            self._peer.forget(token)
            return self._unsendable(request, large)
        self._open[token] = request
        return (self._send(raw),)

    def _list(self, token: int, name: str) -> list[dict[str, Any]]:
        """Raises CallRefused."""
        entries = self._entries(name)
        if entries is None:
            message = f"there is no list of {quoted(name)}"
            raise CallRefused(Refusal(token, "-32601", message, "unsupported"))
        return [{"name": each} if isinstance(each, str) else each for each in entries]

    def _entries(self, name: str) -> Iterable[str | dict[str, Any]] | None:
        """A list of the manifest's, or None if there is none of that name."""
        raise NotImplementedError

    def _request(self, token: int, call: Call) -> RpcCall:
        """Raises CallRefused."""
        raise NotImplementedError

    def _too_large(self, token: int, what: str, raw: bytes) -> Refusal | None:
        if len(raw) <= self.most:
            return None
        return Refusal(token, "-32602", f"{what} has {len(raw)} bytes, {self.call_limit}", "too_large")

    def _unsendable(self, request: RpcCall, why: Refusal) -> Events:
        """Raises CallRefused."""
        raise CallRefused(why)

    def cancel(self, token: int, reason: str) -> Events:
        """The plugin is not told: it goes on, and its answer is dropped."""
        self._give_up(token)
        return ()

    def expired(self, token: int, why: str) -> Events:
        request = self._open.get(token)
        if request is None or not request.hook:
            return ()
        self._give_up(token)
        return self._substitute(token, request.hook, why)

    def _give_up(self, token: int) -> int | None:
        """The id of its request."""
        self._open.pop(token, None)
        return self._peer.forget(token)

    def _substitute(self, token: int, hook: str, why: str) -> Events:
        """The answer in place of that of a hook that failed."""
        raise NotImplementedError

    # --- answers to the plugin, and the end -----------------------------------------------------------------

    def answer(self, ticket: int, answer: Answer) -> Events:
        raw = self._peer.reply(ticket, answer, self.most, self.answer_limit, self.not_json)
        return () if raw is None else self._reply(raw)

    def _reply(self, raw: bytes) -> Events:
        if len(raw) <= self.most:
            return (self._send(raw, "reply"),)
        self._count("unanswerable")  # the plugin's own id fills a frame by itself
        return ()

    def _shut_down(
        self, method: str, params: Any, steps: ShutdownSteps, unasked: ShutdownSteps
    ) -> ShutdownSteps:
        """`unasked`: for a plugin that is not ready, which is not asked to shut down."""
        if self._stage != "ready":
            return unasked
        self._stage = "leaving"
        return steps._replace(frames=(self._send(self._peer.request(SHUTDOWN, method, params)),))


def undeclared(
    token: int,
    what: str,
    name: str,
    known: Collection[str],
    remedy: str,
    where: str = "",
    plural: str = "",
) -> CallRefused:
    """For a call of what the manifest does not declare. `remedy`: if it declares none of the kind."""
    message, hint = f"the plugin's manifest declares no {plural or what + 's'}", remedy
    if known:
        message = f"there is no {what} {quoted(name)}{where}"
        hint = did_you_mean(name, known) or f"there are: {', '.join(known)}"
    return CallRefused(Violation("tool_not_exposed", message, what.replace(" ", "_"), hint, token))
