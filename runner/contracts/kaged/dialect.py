"""The conversation with a kaged plugin: JSON-RPC 2.0, one object on each line.

    opening   initialize (id 1), its answer, the notification initialized, then Ready
    calls     PLUGIN.TOOL, a declared method, or kaged.hook.HOOK, each with `_context`
    health    health.check while no call runs, not even one that was given up; an error counts as an answer
    end       shutdown, then stdin is closed: some plugins exit only then

Stdout carries messages and nothing else. A line that is none ends the plugin. Every number that the manifest
gives in seconds reaches this module in `Plugin.timeouts` and `Plugin.lifecycle`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal

from runner.contracts.kaged import CONTRACT, handshake, hooks
from runner.contracts.kaged.calls import CallBook, Ids, make_context, make_id
from runner.contracts.kaged.declared import declared_by
from runner.contracts.kaged.notifications import Notifications
from runner.contracts.kaged.terms import CALL_SECONDS, HANDSHAKE_SECONDS, HEALTH_ANSWER_SECONDS
from runner.outcome import Code
from runner.protocol import frames, jsonrpc
from runner.protocol.dialect import (
    Alive,
    Answer,
    Call,
    CallRefused,
    Dialect,
    Events,
    HandshakeFault,
    HealthCheck,
    HostCall,
    Lane,
    LateAnswer,
    Message,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownAnswered,
    ShutdownSteps,
    Violation,
    stray_context,
)
from runner.protocol.memory import STANDING
from sandbox.document.diagnostic import cut, printable, quoted

FRAME_LIMIT = 4 * 1024 * 1024  # bytes of a line without its newline, both ways

# Seconds, where neither manifest nor contract names any.
HEALTH_INTERVAL_SECONDS = 30.0
HOOK_SECONDS = 10.0
SHUTDOWN_SECONDS = 5.0
TERMINATE_SECONDS = 1.0

HEALTH_CHECK = "health.check"

_MOST_OWED = 1024  # calls that were given up and whose answers are recognised

_SHOWN_BYTES = 200  # of a faulty line
_SHOWN_CHARACTERS = 200  # of an error that answers nothing of ours
_INITIALIZE, _SHUTDOWN, _HEALTH = "initialize", "shutdown", "health"  # tokens of our own requests
_NOT_YET = (jsonrpc.INVALID_REQUEST, "the answer to initialize comes before any request", None)

Stage = Literal["new", "initialize", "ready", "leaving", "over"]


def make(setting: Setting) -> KagedDialect:
    return KagedDialect(setting)


class KagedDialect(Dialect):
    def __init__(self, setting: Setting, ids: Ids = make_id) -> None:
        self._setting = setting
        self._plugin = setting.plugin
        self._timeouts = dict(setting.plugin.timeouts)
        self._declared = declared_by(setting.plugin)
        self._calls = CallBook(setting.plugin.id, self._declared)
        self._notifications = Notifications(self._declared.notifications)
        self._ids = ids
        self._session_id = ids()
        self._peer = jsonrpc.Peer(one_kind=True)
        self._stage: Stage = "new"
        self._open: dict[int, str] = {}  # token of an open call -> its hook; empty for other calls
        self._owed: dict[int, int] = {}  # id of a call that was given up -> its token
        self._counters: dict[str, int] = {}

    # --- the Dialect interface ------------------------------------------------------------------------------

    @property
    def handshake_seconds(self) -> float:
        return self._timeouts.get("handshake", HANDSHAKE_SECONDS)

    @property
    def counters(self) -> Mapping[str, int]:
        peer = {"late": self._peer.late, "unknown": self._peer.unknown}
        return {**peer, **self._notifications.counters, **self._counters}

    @property
    def noise(self) -> str:
        return self._peer.noise

    def framer(self) -> frames.Framer:
        return frames.LineFramer(FRAME_LIMIT)

    def read(self, raw: bytes) -> Message:
        if not raw.strip():
            return Message(fault="blank")
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        value, cause, detail, weight = jsonrpc.read_line(raw, self._stage == "initialize")
        return Message(value, cause or "", detail, raw[:_SHOWN_BYTES] if cause else b"", weight)

    def seconds(self, call: Call) -> float:
        if call.kind == "hook":
            return self._timeouts.get("hook", HOOK_SECONDS)
        return self._timeouts.get("call", CALL_SECONDS)

    # --- the handshake --------------------------------------------------------------------------------------

    def opening(self) -> Events:
        self._stage = "initialize"
        try:
            params = handshake.make_params(self._setting, self._declared)
        except HandshakeFault as fault:
            return self._end(fault.violation)
        try:
            raw = self._peer.request(_INITIALIZE, "initialize", params)
        except ValueError:  # its text may repeat a value
            text = "the configuration or the secrets are not JSON"
            return self._end(Violation("handshake_failed", text, "config_invalid"))
        if len(raw) > FRAME_LIMIT:
            given = "the configuration and the secrets" if self._setting.secrets else "the configuration"
            text = f"with {given}, initialize has {len(raw)} bytes, and a message has at most {FRAME_LIMIT}"
            hint = "give it less with --config" + (" or --secrets" if self._setting.secrets else "")
            return self._end(Violation("handshake_failed", text, "config_invalid", hint))
        return (self._send(raw),)

    def _initialized(self, result: Any, weight: int) -> Events:
        if weight > STANDING:  # its lists are kept while it runs
            text = f"its answer to initialize takes more than {STANDING >> 20} MiB of memory"
            return self._end(Violation("handshake_failed", text, "too_large", "list fewer methods"))
        try:
            welcome = handshake.read_handshake_answer(result, self._plugin)
        except HandshakeFault as fault:
            return self._end(fault.violation)
        self._stage = "ready"
        said = self._send(self._peer.notification("initialized", {}))
        return (*welcome.notices, said, Ready(welcome.identity))

    def _end(self, violation: Violation) -> Events:
        self._stage = "over"
        return (violation,)

    # --- incoming messages ----------------------------------------------------------------------------------

    def feed(self, message: Message) -> Events:
        if self._stage == "over" or message.fault == "blank":
            return ()
        if message.fault:
            return self._end(judge_unreadable(message.fault, message.detail))
        value = message.value
        if (fault := judge_message(value)) is not None:
            return self._end(fault)
        if "id" in value and not value.get("method") and "error" not in value:
            # JavaScript leaves out a result that is undefined. It counts as null.
            value = {"result": None, **value}
        heard = self._peer.receive(value)
        if isinstance(heard, jsonrpc.RpcResult):
            return self._answered(heard.token, heard.value, message.weight)
        if isinstance(heard, jsonrpc.RpcError):
            return self._refused(heard)
        if isinstance(heard, jsonrpc.RpcRequest):
            return self._asked(heard)
        if isinstance(heard, jsonrpc.RpcNotification):
            return self._notifications.take(heard.method, heard.params, message.at)
        broken = judge_stray(heard.why, heard.detail, ready=self._stage != "initialize")
        if broken is not None:
            return self._end(broken)
        if heard.why == "late":
            token = self._owed.pop(value["id"], None)
            return () if token is None else (LateAnswer(token),)
        return self._unread(value) if heard.why == "unknown" else ()

    def _unread(self, value: Mapping[str, Any]) -> Events:
        """Plugins answer what they cannot read with the id 0 or null."""
        number, error = value["id"], value.get("error")
        if not isinstance(error, dict) or not (number is None or (type(number) is int and number == 0)):
            return ()
        self._count("unread")
        text = quote_error(error.get("code"), error.get("message"))
        return (Notice("unread", f"the plugin could not read a message: {cut(text, _SHOWN_CHARACTERS)}"),)

    def _answered(self, token: Hashable, value: Any, weight: int) -> Events:
        if token == _INITIALIZE:
            return self._initialized(value, weight)
        if token == _SHUTDOWN:
            return (ShutdownAnswered(),)
        if token == _HEALTH:
            return (Alive(),)
        if not isinstance(token, int):
            return ()
        hook = self._open.pop(token)
        if not hook:
            return (Reply(token, value),)
        if fault := hooks.result_fault(hook, value, self._declared.roles):
            return self._substitute(token, hook, fault)
        return (Reply(token, hooks.contribution(hook, value)),)

    def _refused(self, error: jsonrpc.RpcError) -> Events:
        said = quote_error(error.code, error.message)
        if error.token == _INITIALIZE:
            return self._end(
                Violation("handshake_failed", f"it refuses to be initialized: {said}", "refused")
            )
        if error.token == _SHUTDOWN:
            return (ShutdownAnswered(said),)
        if error.token == _HEALTH:
            return (Alive(),)
        if not isinstance(error.token, int):
            return ()
        hook = self._open.pop(error.token)
        if hook:
            return self._substitute(error.token, hook, f"it answered with an error: {said}")
        return (make_refusal(error.token, error.code, error.message, error.data),)

    def _asked(self, question: jsonrpc.RpcRequest) -> Events:
        if self._stage == "initialize":
            return self.answer(question.ticket, Answer(error=_NOT_YET))
        return (HostCall(question.ticket, question.method, question.params),)

    # --- calls ----------------------------------------------------------------------------------------------

    def call(self, token: int, call: Call) -> Events:
        if call.kind == "list":
            return (Reply(token, self._calls.list(token, call.name)),)
        if self._stage != "ready" or token in self._open:
            twice = token in self._open
            why = "this call has been sent already" if twice else "the plugin is not ready for calls"
            raise CallRefused(Violation("internal", why, "not_ready", call=token))
        if stray := stray_context(call, CONTRACT.calls):
            raise CallRefused(Refusal(token, "-32602", stray, "invalid_context"))
        context = make_context(token, call, self._declared, self._session_id, self._ids)
        method, params = self._calls.request(token, call, context)
        try:
            raw = self._peer.request(token, method, params)
        except ValueError as error:
            raise CallRefused(Refusal(token, "-32602", f"the input is {error}", "not_json")) from None
        if len(raw) > FRAME_LIMIT:
            self._peer.forget(token)
            why = f"the call has {len(raw)} bytes, and a message of this contract has at most {FRAME_LIMIT}"
            raise CallRefused(Refusal(token, "-32602", why, "too_large"))
        self._open[token] = call.name if call.kind == "hook" else ""
        return (self._send(raw),)

    def cancel(self, token: int, reason: str) -> Events:
        """The contract cannot cancel a call: the plugin goes on, and its answer is dropped."""
        self._give_up(token)
        return ()

    def expired(self, token: int, why: str) -> Events:
        hook = self._open.get(token)
        if not hook:
            return ()
        self._give_up(token)
        return self._substitute(token, hook, why)

    def _give_up(self, token: int) -> None:
        self._open.pop(token, None)
        number = self._peer.forget(token)
        if number is not None:
            self._owed[number] = token
            if len(self._owed) > _MOST_OWED:
                del self._owed[next(iter(self._owed))]

    def _substitute(self, token: int, hook: str, why: str) -> Events:
        self._count("hooks_failed")
        return hooks.substitute_answer(token, hook, why)

    def notify(self, method: str, params: Any) -> Events:
        message = f"there is no notification {quoted(method)} to send to this plugin"
        raise CallRefused(Refusal(0, "-32601", message, "unsupported"))

    # --- answers to the plugin ------------------------------------------------------------------------------

    def answer(self, ticket: int, answer: Answer) -> Events:
        raw = self._peer.reply(ticket, answer, FRAME_LIMIT, f"and a message has at most {FRAME_LIMIT}")
        if raw is None:
            return ()
        if len(raw) <= FRAME_LIMIT:
            return (self._send(raw, "reply"),)
        self._count("unanswerable")  # the plugin's own id fills a line by itself
        return ()

    # --- health and the end ---------------------------------------------------------------------------------

    @property
    def health_check(self) -> HealthCheck:
        lifecycle = dict(self._plugin.lifecycle)
        return HealthCheck(
            HEALTH_CHECK,
            float(lifecycle.get("health_interval", HEALTH_INTERVAL_SECONDS)),
            float(lifecycle.get("health_answer", HEALTH_ANSWER_SECONDS)),
            busy=self._timeouts.get("call", CALL_SECONDS),
        )

    def send_health_check(self) -> Events:
        if self._stage != "ready":
            return ()
        self._count("health_checks")
        return (self._send(self._peer.request(_HEALTH, HEALTH_CHECK, {})),)

    def shutdown_steps(self) -> ShutdownSteps:
        if self._stage != "ready":
            return ShutdownSteps(terminate=TERMINATE_SECONDS)
        self._stage = "leaving"
        whole = self._timeouts.get("shutdown", SHUTDOWN_SECONDS)
        frame = self._send(self._peer.request(_SHUTDOWN, "shutdown", {}))
        return ShutdownSteps(
            (frame,), answer=whole / 2, exit=whole / 2, terminate=TERMINATE_SECONDS, whole=whole
        )

    def _send(self, raw: bytes, lane: Lane = "request") -> Send:
        return Send(frames.line(raw), lane)

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1


# --- the meaning of an error, and of a message that is none -------------------------------------------------

_MOST_CHARACTERS = 2000  # of a message
_MOST_QUOTED = 500  # of a message inside one of our sentences

# JSON-RPC leaves these codes to the program. All others are errors of the protocol.
_OWN_CODES = range(-32099, -32000 + 1)
_KINDS = {
    jsonrpc.PARSE_ERROR: "parse_error",
    jsonrpc.INVALID_REQUEST: "invalid_request",
    jsonrpc.METHOD_NOT_FOUND: "method_not_found",
    jsonrpc.INVALID_PARAMS: "invalid_params",
    jsonrpc.INTERNAL_ERROR: "internal",
}

_CHECK_COMMAND = "check that the manifest's command starts this plugin"


def make_refusal(call: int, code: int, message: str, data: Any) -> Refusal:
    kind = "plugin_error" if code in _OWN_CODES else _KINDS.get(code, "protocol_error")
    text = printable(cut(message, _MOST_CHARACTERS)).strip()
    return Refusal(call, str(code), text or f"the plugin answered with error {code}", kind, data)


def quote_error(code: object, message: object) -> str:
    """An error of the plugin's, inside one of our sentences."""
    text = message if isinstance(message, str) else ""
    number = code if type(code) is int else jsonrpc.INTERNAL_ERROR
    return f"{printable(cut(text, _MOST_QUOTED))} ({number})".strip()


def judge_unreadable(cause: str, detail: str) -> Violation:
    """A line that is not JSON, or JSON with a fault."""
    hint = "stdout is for messages only: print everything else to stderr" if cause == "bad_json" else ""
    text = f"a line on its stdout breaks the protocol: {detail}"
    return Violation("malformed_response", text, cause, hint)


def judge_stray(why: str, detail: str, *, ready: bool) -> Violation | None:
    """Returns the fault of a message that is neither request nor answer. None: it is dropped and counted."""
    if why == "ambiguous":
        return Violation("malformed_response", f"a line on its stdout breaks the protocol: {detail}", why)
    if why == "echo":
        text = f"it sends our own messages back: {detail}"
        code: Code = "malformed_response" if ready else "handshake_failed"
        return Violation(code, text, "echo", _CHECK_COMMAND)
    if why == "too_many":
        text = f"it does not wait for answers: {detail}"
        return Violation("malformed_response", text, "too_many_requests")
    return None


def judge_message(value: Any) -> Violation | None:
    """The fault of a value that is not a message of JSON-RPC 2.0."""
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else "a single value"
        text = f"a line on its stdout is {kind}, and every message is an object"
        return Violation("malformed_response", text, "not_object")
    if value.get("jsonrpc") != "2.0":
        text = 'a message on its stdout lacks "jsonrpc": "2.0"'
        return Violation("malformed_response", text, "jsonrpc_version")
    method = value.get("method")
    if not (isinstance(method, str) and method) and (method or "id" not in value):
        text = "a line on its stdout is no message: neither a request nor an answer"
        return Violation("malformed_response", text, "not_rpc")
    return None
