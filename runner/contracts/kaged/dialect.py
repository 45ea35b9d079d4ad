"""The conversation with a kaged plugin: JSON-RPC 2.0, one object on each line.

    opening   initialize (id 1), its answer, the notification initialized, then Ready
    calls     PLUGIN.TOOL, a declared method, or kaged.hook.HOOK, each with `_context`
    health    health.check while no call runs, not even one that was given up; an error counts as an answer
    end       shutdown, then stdin is closed: some plugins exit only then

Stdout carries messages and nothing else. A line that is none ends the plugin. Every number that the manifest
gives in seconds reaches this module in `Plugin.timeouts` and `Plugin.lifecycle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runner.contracts.kaged import CONTRACT, handshake, hooks
from runner.contracts.kaged.calls import CallBook, Ids, make_context, make_id
from runner.contracts.kaged.declared import declared_by
from runner.contracts.kaged.notifications import Notifications
from runner.contracts.kaged.terms import CALL_SECONDS, HANDSHAKE_SECONDS, HEALTH_ANSWER_SECONDS
from runner.protocol import jsonrpc
from runner.protocol.dialect import (
    Alive,
    Answer,
    Call,
    CallRefused,
    Events,
    HealthCheck,
    LateAnswer,
    Message,
    Notice,
    Ready,
    Refusal,
    Reply,
    Setting,
    ShutdownSteps,
    Violation,
)
from runner.protocol.rpc_dialect import INITIALIZE, KINDS, MOST_CHARACTERS, SHOWN_BYTES, RpcCall, RpcDialect
from sandbox.document.diagnostic import cut, printable, quoted

FRAME_LIMIT = 4 * 1024 * 1024  # bytes of a line without its newline, both ways

# Seconds, where neither manifest nor contract names any.
HEALTH_INTERVAL_SECONDS = 30.0
HOOK_SECONDS = 10.0
SHUTDOWN_SECONDS = 5.0
TERMINATE_SECONDS = 1.0

HEALTH_CHECK = "health.check"

_MOST_OWED = 1024  # calls that were given up and whose answers are recognised

_SHOWN_CHARACTERS = 200  # of an error that answers nothing of ours
_HEALTH = "health"  # token of our own request
_NOT_YET = (jsonrpc.INVALID_REQUEST, "the answer to initialize comes before any request", None)
# JSON-RPC leaves these codes to the program. All others are errors of the protocol.
_KINDS = {**dict.fromkeys(range(-32099, -32000 + 1), "plugin_error"), **KINDS}


def make(setting: Setting) -> KagedDialect:
    return KagedDialect(setting)


class KagedDialect(RpcDialect):
    frame_limit = most = FRAME_LIMIT
    call_limit = f"and a message of this contract has at most {FRAME_LIMIT}"
    answer_limit = f"and a message has at most {FRAME_LIMIT}"
    context_keys = CONTRACT.calls
    kinds = _KINDS
    other_kind = "protocol_error"
    check_hint = "check that the manifest's command starts this plugin"
    large_hint = "list fewer methods"

    def __init__(self, setting: Setting, ids: Ids = make_id) -> None:
        super().__init__(jsonrpc.Peer(one_kind=True))
        self._setting = setting
        self._plugin = setting.plugin
        self._timeouts = dict(setting.plugin.timeouts)
        self._declared = declared_by(setting.plugin)
        self._calls = CallBook(setting.plugin.id, self._declared)
        self._notifications = Notifications(self._declared.notifications)
        self._dropped_counters = self._notifications.counters
        self._ids = ids
        self._session_id = ids()
        self._owed: dict[int, int] = {}  # id of a call that was given up -> its token

    # --- the Dialect interface ------------------------------------------------------------------------------

    @property
    def handshake_seconds(self) -> float:
        return self._timeouts.get("handshake", HANDSHAKE_SECONDS)

    def read(self, raw: bytes) -> Message:
        if not raw.strip():
            return Message(fault="blank")
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        value, cause, detail, weight = jsonrpc.read_line(raw, self._stage == "handshake")
        return Message(value, cause or "", detail, raw[:SHOWN_BYTES] if cause else b"", weight)

    def seconds(self, call: Call) -> float:
        if call.kind == "hook":
            return self._timeouts.get("hook", HOOK_SECONDS)
        return self._timeouts.get("call", CALL_SECONDS)

    # --- the handshake --------------------------------------------------------------------------------------

    def _greeting(self) -> bytes:
        secret = bool(self._setting.secrets)
        return self._configuration(
            INITIALIZE,
            "initialize",
            handshake.make_params(self._setting, self._declared),
            "the configuration or the secrets are not JSON",  # the fault's text may repeat a value
            f"with the configuration{' and the secrets' * secret}, initialize has {{}} bytes, "
            f"and a message has at most {FRAME_LIMIT}",
            "give it less with --config" + " or --secrets" * secret,
        )

    def _welcome(self, result: Any) -> Events:
        welcome = handshake.read_handshake_answer(result, self._plugin)
        self._stage = "ready"
        said = self._send(self._peer.notification("initialized", {}))
        return (*welcome.notices, said, Ready(welcome.identity))

    # --- incoming messages ----------------------------------------------------------------------------------

    def _unreadable(self, message: Message) -> Events:
        return self._end(judge_unreadable(message.fault, message.detail))

    def _take(self, value: Any, message: Message) -> Events:
        if (fault := judge_message(value)) is not None:
            return self._end(fault)
        if "id" in value and not value.get("method") and "error" not in value:
            # JavaScript leaves out a result that is undefined. It counts as null.
            value = {"result": None, **value}
        return super()._take(value, message)

    def _strayed(self, stray: jsonrpc.RpcStray, value: Any, message: Message) -> Events:
        if stray.why == "late" and value["id"] in self._owed:
            return (LateAnswer(self._owed.pop(value["id"])),)
        if stray.why != "unknown":
            return super()._strayed(stray, value, message)
        # Plugins answer what they cannot read with the id 0 or null.
        number, error = value["id"], value.get("error")
        if not isinstance(error, dict) or not (number is None or (type(number) is int and number == 0)):
            return ()
        self._count("unread")
        code, said = error.get("code"), error.get("message")
        text = self._quote(
            said if isinstance(said, str) else "", code if type(code) is int else jsonrpc.INTERNAL_ERROR
        )
        return (Notice("unread", f"the plugin could not read a message: {cut(text, _SHOWN_CHARACTERS)}"),)

    def _asked(self, request: jsonrpc.RpcRequest) -> Events:
        if self._stage == "handshake":
            return self.answer(request.ticket, Answer(error=_NOT_YET))
        return super()._asked(request)

    def _notified(self, method: str, params: Any, at: float) -> Events:
        return self._notifications.take(method, params, at)

    def _own_answered(self, error: jsonrpc.RpcError | None) -> Events:
        return (Alive(),)

    def _result(self, token: int, request: RpcCall, value: Any) -> Events:
        if not request.hook:
            return (Reply(token, value),)
        if fault := hooks.result_fault(request.hook, value, self._declared.roles):
            return self._substitute(token, request.hook, fault)
        return (Reply(token, hooks.contribution(request.hook, value)),)

    def _shorten(self, message: str) -> str:
        return printable(cut(message, MOST_CHARACTERS)).strip()

    # --- calls ----------------------------------------------------------------------------------------------

    def _entries(self, name: str) -> Iterable[str | dict[str, Any]] | None:
        return self._calls.entries(name)

    def _request(self, token: int, call: Call) -> RpcCall:
        context = make_context(token, call, self._declared, self._session_id, self._ids)
        method, params = self._calls.request(token, call, context)
        return RpcCall(method, params, call.name if call.kind == "hook" else "")

    def _give_up(self, token: int) -> int | None:
        number = super()._give_up(token)
        if number is not None:
            self._owed[number] = token
            if len(self._owed) > _MOST_OWED:
                del self._owed[next(iter(self._owed))]
        return number

    def _substitute(self, token: int, hook: str, why: str) -> Events:
        self._count("hooks_failed")
        return hooks.substitute_answer(token, hook, why)

    def notify(self, method: str, params: Any) -> Events:
        message = f"there is no notification {quoted(method)} to send to this plugin"
        raise CallRefused(Refusal(0, "-32601", message, "unsupported"))

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
        whole = self._timeouts.get("shutdown", SHUTDOWN_SECONDS)
        steps = ShutdownSteps(answer=whole / 2, exit=whole / 2, terminate=TERMINATE_SECONDS, whole=whole)
        return self._shut_down("shutdown", {}, steps, ShutdownSteps(terminate=TERMINATE_SECONDS))


# --- a line that is no message ------------------------------------------------------------------------------


def judge_unreadable(cause: str, detail: str) -> Violation:
    """A line that is not JSON, or JSON with a fault."""
    hint = "stdout is for messages only: print everything else to stderr" if cause == "bad_json" else ""
    text = f"a line on its stdout breaks the protocol: {detail}"
    return Violation("malformed_response", text, cause, hint)


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
