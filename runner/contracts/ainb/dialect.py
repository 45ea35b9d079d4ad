"""The conversation with an ainb plugin: JSON-RPC 2.0 in frames with a Content-Length header.

    opening   plugin/init (id 1), its answer, then Ready. What the plugin asks and publishes is served before
              that, too: some plugins ask while they are being initialised, and wait for the answer
    calls     plugin/cli_dispatch, plugin/render, and host/action/invoke towards the plugin
    told      plugin/handle_key, _mouse, _event and _action, never while one of our requests is open
              (notifications.py says why)
    end       plugin/shutdown, then stdin is closed: most plugins exit only then

A frame whose body is no message is dropped and counted (messages.py). A broken header ends the plugin.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal

from runner.contracts.ainb import CONTRACT, calls, handshake, notifications
from runner.contracts.ainb.declared import declared_by
from runner.contracts.ainb.messages import BODY_LIMIT, RULES, fault_of, normalise, read_json
from runner.contracts.ainb.terms import (
    ACTION_SECONDS,
    CLI_SECONDS,
    INIT_SECONDS,
    RENDER_SECONDS,
    SHUTDOWN_SECONDS,
    WRITE_SECONDS,
)
from runner.outcome import Code
from runner.protocol import frames, jsonrpc
from runner.protocol.dialect import (
    NEVER_SENT,
    Answer,
    Call,
    CallRefused,
    Dialect,
    Events,
    HandshakeFault,
    HostCall,
    Lane,
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
from runner.protocol.header_frames import HeaderFramer, header_frame
from sandbox.document.diagnostic import printable
from sandbox.speed.value import NamedTuple

TERMINATE_SECONDS = 2.0
SHUTDOWN = "plugin/shutdown"

_SHOWN_BYTES = 200  # of a faulty frame
_EARLY_BYTES = 256 << 10  # of a frame that is read in a thread
_MOST_CHARACTERS = 2000  # of an error's message
_INIT, _SHUTDOWN = "init", "shutdown"  # tokens of our own requests
_SECONDS = {"tool": CLI_SECONDS, "render": RENDER_SECONDS, "action": ACTION_SECONDS}

# The contract's meanings of error codes.
_KINDS = {
    jsonrpc.PARSE_ERROR: "parse_error",
    jsonrpc.INVALID_REQUEST: "invalid_request",
    jsonrpc.METHOD_NOT_FOUND: "method_not_found",
    jsonrpc.INVALID_PARAMS: "invalid_params",
    jsonrpc.INTERNAL_ERROR: "internal",
    -32001: "capability_denied",
    -32002: "action_timeout",
    -32003: "manifest_validation",
    -32004: "secret_not_found",
    -32005: "not_implemented",
    -32006: "secret_backend_locked",
    -32007: "secret_access_denied",
    -32008: "workspace_creation_disabled",
}

Stage = Literal["new", "init", "ready", "leaving", "over"]


class OpenCall(NamedTuple):
    kind: str
    width: int = 0  # of a render
    height: int = 0

    @property
    def holds(self) -> bool:
        """Whether notifications have to wait while this call is open."""
        return self.kind != "action"


def make(setting: Setting) -> AinbDialect:
    return AinbDialect(setting)


class AinbDialect(Dialect):
    handshake_seconds = INIT_SECONDS
    event_method = "plugin/handle_event"
    write_seconds = WRITE_SECONDS

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._plugin = setting.plugin
        self._declared = declared_by(setting.plugin)
        self._peer = jsonrpc.Peer(passes_errors=True)
        self._stage: Stage = "new"
        self._open: dict[int, OpenCall] = {}  # by token
        self._given_up = 0  # cancelled calls that the plugin may still be working on
        self._held = notifications.HeldNotifications()
        self._generation = 0
        self._notified = 0  # notifications of the plugin
        self._last_drop = ""  # why the last dropped frame was dropped
        self._counters: dict[str, int] = {}

    # --- the Dialect interface ------------------------------------------------------------------------------

    @property
    def counters(self) -> Mapping[str, int]:
        peer = {"late": self._peer.late, "unknown": self._peer.unknown}
        return {**peer, **self._held.dropped, **self._counters}

    @property
    def noise(self) -> str:
        count = self._counters.get("frames_dropped", 0)
        dropped = f"{count} of its frames were dropped, the last one because {self._last_drop}"
        return self._peer.noise or dropped * bool(count)

    @property
    def held_bytes(self) -> int:
        return self._held.bytes

    def framer(self) -> frames.Framer:
        return HeaderFramer(RULES)

    def read(self, raw: bytes) -> Message:
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        value, cause, detail, weight = read_json(raw, unique=self._stage == "init")
        if cause is None and len(raw) > _EARLY_BYTES:
            value = calls.draw_early(value)
        return Message(value, cause or "", detail, raw[:_SHOWN_BYTES] if cause else b"", weight)

    def seconds(self, call: Call) -> float:
        return _SECONDS.get(call.kind, CLI_SECONDS)

    # --- the handshake --------------------------------------------------------------------------------------

    def opening(self) -> Events:
        self._stage = "init"
        try:
            raw = self._peer.request(_INIT, handshake.INIT, handshake.make_params(self._setting))
        except ValueError:
            return self._end(Violation("handshake_failed", "the configuration is not JSON", "config_invalid"))
        if len(raw) > BODY_LIMIT:
            text = f"with its configuration, {handshake.INIT} has {len(raw)} bytes; a frame has {BODY_LIMIT}"
            return self._end(Violation("handshake_failed", text, "config_invalid", "configure it with less"))
        return (_send(raw),)

    def _initialised(self, result: Any) -> Events:
        try:
            welcome = handshake.read_handshake_answer(result, self._plugin)
        except HandshakeFault as fault:
            return self._end(fault.violation)
        self._stage = "ready"
        return (*welcome.notices, Ready(welcome.identity), *self._release())

    def _end(self, violation: Violation) -> Events:
        self._stage = "over"
        self._held.clear()
        return (violation,)

    # --- incoming messages ----------------------------------------------------------------------------------

    def feed(self, message: Message) -> Events:
        if self._stage == "over":
            return ()
        if message.fault:
            return self._drop(message.fault, f"its body breaks the rules of JSON: {message.detail}")
        if fault := fault_of(message.value):
            return self._drop("not_message", fault)
        heard = self._peer.receive(normalise(message.value))
        if isinstance(heard, jsonrpc.RpcResult):
            return self._answered(heard.token, heard.value)
        if isinstance(heard, jsonrpc.RpcError):
            return self._refused(heard)
        if isinstance(heard, jsonrpc.RpcRequest):
            return (HostCall(heard.ticket, heard.method, heard.params),)
        if isinstance(heard, jsonrpc.RpcNotification):
            self._notified += 1
            # It gets no answer, but needs a ticket. Requests have positive ones.
            return (HostCall(-self._notified, heard.method, heard.params, expects_answer=False),)
        return self._strayed(heard)

    def _drop(self, cause: str, why: str) -> Events:
        """A notice for the first, the second, the fourth, the eighth, …"""
        count = self._count("frames_dropped")
        self._last_drop = printable(why)
        if count & (count - 1):
            return ()
        return (Notice("dropped", {"reason": cause, "why": self._last_drop, "count": count}),)

    def _strayed(self, stray: jsonrpc.RpcStray) -> Events:
        if stray.why == "echo":
            text = f"it sends our own messages back: {stray.detail}"
            hint = "check that the executable beside the manifest is the plugin"
            code: Code = "handshake_failed" if self._stage in ("new", "init") else "malformed_response"
            return self._end(Violation(code, text, "echo", hint))
        if stray.why == "too_many":
            text = f"it does not wait for answers: {stray.detail}"
            return self._end(Violation("malformed_response", text, "too_many_requests"))
        if stray.why == "late" and self._given_up:
            self._given_up -= 1
            return self._release()
        return ()  # an answer to nothing: counted

    def _answered(self, token: Hashable, value: Any) -> Events:
        if token == _INIT:
            return self._initialised(calls.undrawn(value))
        if token == _SHUTDOWN:
            return (ShutdownAnswered(),)
        if not isinstance(token, int):
            return ()
        call = self._open.pop(token)
        self._given_up = 0  # requests are handled one after the other
        return (self._value(token, call, value), *self._release())

    def _value(self, token: int, call: OpenCall, value: Any) -> Reply | Violation:
        try:
            if call.kind == "render":
                return Reply(token, calls.read_render(value, call.width, call.height))
            read = calls.read_dispatch if call.kind == "tool" else calls.read_action
            return Reply(token, read(calls.undrawn(value)))
        except calls.BadResult as fault:
            self._count("results_refused")
            text = f"its answer to the {call.kind} breaks the protocol: {fault}"
            return Violation("malformed_response", text, "bad_result", call=token)

    def _refused(self, error: jsonrpc.RpcError) -> Events:
        text = printable(error.message[:_MOST_CHARACTERS]).strip()
        if error.token == _INIT:
            said = f"{text} ({error.code})".strip()
            return self._end(Violation("handshake_failed", f"it refuses {handshake.INIT}: {said}", "refused"))
        if error.token == _SHUTDOWN:
            return (ShutdownAnswered(f"{text} ({error.code})".strip()),)
        if not isinstance(error.token, int):
            return ()
        del self._open[error.token]
        self._given_up = 0
        kind = _KINDS.get(error.code, "plugin_error")
        message = text or f"the plugin answered with error {error.code}"
        return (Refusal(error.token, str(error.code), message, kind, error.data), *self._release())

    # --- calls ----------------------------------------------------------------------------------------------

    def call(self, token: int, call: Call) -> Events:
        if call.kind == "list":
            about = self._plugin.description
            return (Reply(token, calls.list_entries(token, call.name, self._declared, about)),)
        if self._stage != "ready" or token in self._open:
            twice = token in self._open
            why = "this call has been sent already" if twice else "the plugin is not ready for calls"
            raise CallRefused(Violation("internal", why, "not_ready", call=token))
        if stray := stray_context(call, CONTRACT.calls):
            raise CallRefused(Refusal(token, "-32602", stray, "invalid_context"))
        granted = self._setting.limits.call
        seconds = self.seconds(call) if granted is None else min(granted, self.seconds(call))
        request = calls.make_request(token, call, self._declared, self._generation, seconds)
        try:
            raw = self._peer.request(token, request.method, request.params)
        except ValueError as error:
            raise CallRefused(Refusal(token, "-32602", f"the input is {error}", "not_json")) from None
        if len(raw) > BODY_LIMIT:
            self._peer.forget(token)
            text = f"the call has {len(raw)} bytes, and a frame of this contract has at most {BODY_LIMIT}"
            raise CallRefused(Refusal(token, "-32602", text, "too_large"))
        self._generation = request.generation
        self._open[token] = OpenCall(call.kind, *request.params.get("viewport", {}).values())
        return (_send(raw),)

    def cancel(self, token: int, reason: str) -> Events:
        """The contract cannot cancel a call: the plugin goes on, and its answer is dropped. Until that answer
        or the answer to a later call comes, the plugin may still work on the call, so notifications wait."""
        self._peer.forget(token)
        call = self._open.pop(token, None)
        if call is not None and call.holds and reason != NEVER_SENT:
            self._given_up += 1
            return ()
        return self._release() if call is not None else ()

    def expired(self, token: int, why: str) -> Events:
        """The call timed out: send the notifications that waited for its end."""
        self._peer.forget(token)
        return self._release() if self._open.pop(token, None) is not None else ()

    # --- what the plugin is told ----------------------------------------------------------------------------

    @property
    def _is_held(self) -> bool:
        busy = self._given_up > 0 or any(call.holds for call in self._open.values())
        return self._stage != "ready" or busy

    def notify(self, method: str, params: Any) -> Events:
        frame = params.frame if isinstance(params, notifications.SharedParams) else b""
        if not frame:
            frame = self._notification(method, params)
            if isinstance(params, notifications.SharedParams):
                params.frame = frame
        lane = notifications.LANES[method]
        if self._stage in ("leaving", "over"):
            self._count("untold")
            return ()
        return self._held.put(lane, frame) if self._is_held else (Send(frame, lane),)

    def _notification(self, method: str, params: Any) -> bytes:
        """The frame. Raises CallRefused."""
        made = notifications.make_params(method, params, self._generation)
        if "generation" in made and "generation" not in params:
            self._generation += 1
        try:
            raw = notifications.encode_message(method, made)
        except ValueError as error:
            raise CallRefused(Refusal(0, "-32602", f"the params are {error}", "not_json")) from None
        if len(raw) > BODY_LIMIT:
            text = f"{method} has {len(raw)} bytes, and a frame of this contract has at most {BODY_LIMIT}"
            raise CallRefused(Refusal(0, "-32602", text, "too_large"))
        return header_frame(raw)

    def _release(self) -> Events:
        return () if self._is_held else self._held.release()

    # --- answers to the plugin ------------------------------------------------------------------------------

    def answer(self, ticket: int, answer: Answer) -> Events:
        if self._peer.asked_as(ticket) is None:
            return ()  # a notification
        raw = self._peer.reply(ticket, answer, BODY_LIMIT, f"and a frame has at most {BODY_LIMIT}")
        assert raw is not None
        return (_send(raw, "reply"),)

    # --- the end --------------------------------------------------------------------------------------------

    def shutdown_steps(self) -> ShutdownSteps:
        if self._stage != "ready":
            return ShutdownSteps(exit=SHUTDOWN_SECONDS, terminate=TERMINATE_SECONDS)
        self._stage = "leaving"
        self._held.clear()
        half = SHUTDOWN_SECONDS / 2
        frame = _send(self._peer.request(_SHUTDOWN, SHUTDOWN, {}))
        return ShutdownSteps(
            (frame,), answer=half, exit=half, terminate=TERMINATE_SECONDS, whole=SHUTDOWN_SECONDS
        )

    def _count(self, name: str) -> int:
        count = self._counters[name] = self._counters.get(name, 0) + 1
        return count


def _send(raw: bytes, lane: Lane = "request") -> Send:
    return Send(header_frame(raw), lane)
