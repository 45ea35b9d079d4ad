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

from collections.abc import Iterable
from typing import Any

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
from runner.protocol import frames, jsonrpc
from runner.protocol.dialect import (
    NEVER_SENT,
    Call,
    CallRefused,
    Events,
    HostCall,
    Lane,
    Message,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownSteps,
    Violation,
)
from runner.protocol.header_frames import HeaderFramer, header_frame
from runner.protocol.rpc_dialect import INITIALIZE, KINDS, SHOWN_BYTES, RpcCall, RpcDialect
from sandbox.document.diagnostic import printable

TERMINATE_SECONDS = 2.0
SHUTDOWN = "plugin/shutdown"

_EARLY_BYTES = 256 << 10  # of a frame that is read in a thread
_SECONDS = {"tool": CLI_SECONDS, "render": RENDER_SECONDS, "action": ACTION_SECONDS}

# The contract's meanings of error codes.
_KINDS = {
    **KINDS,
    -32001: "capability_denied",
    -32002: "action_timeout",
    -32003: "manifest_validation",
    -32004: "secret_not_found",
    -32005: "not_implemented",
    -32006: "secret_backend_locked",
    -32007: "secret_access_denied",
    -32008: "workspace_creation_disabled",
}


def make(setting: Setting) -> AinbDialect:
    return AinbDialect(setting)


class AinbDialect(RpcDialect):
    most = BODY_LIMIT
    call_limit = f"and a frame of this contract has at most {BODY_LIMIT}"
    answer_limit = f"and a frame has at most {BODY_LIMIT}"
    context_keys = CONTRACT.calls
    kinds = _KINDS
    handshake_word = handshake.INIT
    check_hint = "check that the executable beside the manifest is the plugin"
    handshake_seconds = INIT_SECONDS
    event_method = "plugin/handle_event"
    write_seconds = WRITE_SECONDS

    def __init__(self, setting: Setting) -> None:
        super().__init__(jsonrpc.Peer(passes_errors=True))
        self._setting = setting
        self._plugin = setting.plugin
        self._declared = declared_by(setting.plugin)
        self._given_up = 0  # cancelled calls that the plugin may still be working on
        self._held = notifications.HeldNotifications()
        self._dropped_counters = self._held.dropped
        self._generation = 0
        self._notified_count = 0  # notifications of the plugin
        self._last_drop = ""  # why the last dropped frame was dropped

    # --- the Dialect interface ------------------------------------------------------------------------------

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

    def _send(self, raw: bytes, lane: Lane = "request") -> Send:
        return Send(header_frame(raw), lane)

    def read(self, raw: bytes) -> Message:
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        value, cause, detail, weight = read_json(raw, unique=self._stage == "handshake")
        if cause is None and len(raw) > _EARLY_BYTES:
            value = calls.draw_early(value)
        return Message(value, cause or "", detail, raw[:SHOWN_BYTES] if cause else b"", weight)

    def seconds(self, call: Call) -> float:
        return _SECONDS.get(call.kind, CLI_SECONDS)

    # --- the handshake --------------------------------------------------------------------------------------

    def _greeting(self) -> bytes:
        return self._configuration(
            INITIALIZE,
            handshake.INIT,
            handshake.make_params(self._setting),
            "the configuration is not JSON",
            f"with its configuration, {handshake.INIT} has {{}} bytes; a frame has {BODY_LIMIT}",
            "configure it with less",
        )

    def _welcome(self, result: Any) -> Events:
        welcome = handshake.read_handshake_answer(calls.undrawn(result), self._plugin)
        self._stage = "ready"
        return (*welcome.notices, Ready(welcome.identity), *self._release())

    def _end(self, violation: Violation) -> Events:
        self._held.clear()
        return super()._end(violation)

    # --- incoming messages ----------------------------------------------------------------------------------

    def _unreadable(self, message: Message) -> Events:
        return self._drop(message.fault, f"its body breaks the rules of JSON: {message.detail}")

    def _take(self, value: Any, message: Message) -> Events:
        if fault := fault_of(value):
            return self._drop("not_message", fault)
        return super()._take(normalise(value), message)

    def _notified(self, method: str, params: Any, at: float) -> Events:
        self._notified_count += 1
        # It gets no answer, but needs a ticket. Requests have positive ones.
        return (HostCall(-self._notified_count, method, params, expects_answer=False),)

    def _drop(self, cause: str, why: str) -> Events:
        """A notice for the first, the second, the fourth, the eighth, …"""
        count = self._count("frames_dropped")
        self._last_drop = printable(why)
        if count & (count - 1):
            return ()
        return (Notice("dropped", {"reason": cause, "why": self._last_drop, "count": count}),)

    def _strayed(self, stray: jsonrpc.RpcStray, value: Any, message: Message) -> Events:
        if stray.why == "late" and self._given_up:
            self._given_up -= 1
            return self._release()
        return () if stray.why == "ambiguous" else super()._strayed(stray, value, message)

    def _result(self, token: int, request: RpcCall, value: Any) -> Events:
        self._given_up = 0  # requests are handled one after the other
        return (self._value(token, request, value), *self._release())

    def _value(self, token: int, request: RpcCall, value: Any) -> Reply | Violation:
        try:
            if request.about == "render":
                return Reply(token, calls.read_render(value, **request.params["viewport"]))
            read = calls.read_dispatch if request.about == "tool" else calls.read_action
            return Reply(token, read(calls.undrawn(value)))
        except calls.BadResult as fault:
            self._count("results_refused")
            text = f"its answer to the {request.about} breaks the protocol: {fault}"
            return Violation("malformed_response", text, "bad_result", call=token)

    def _quote(self, message: str, code: int) -> str:
        return f"{self._shorten(message)} ({code})".strip()

    def _call_refused(self, token: int, request: RpcCall, error: jsonrpc.RpcError) -> Events:
        self._given_up = 0
        return (*super()._call_refused(token, request, error), *self._release())

    # --- calls ----------------------------------------------------------------------------------------------

    def _entries(self, name: str) -> Iterable[str | dict[str, Any]] | None:
        return calls.entries(name, self._declared, self._plugin.description)

    def _request(self, token: int, call: Call) -> RpcCall:
        granted = self._setting.limits.call
        seconds = self.seconds(call) if granted is None else min(granted, self.seconds(call))
        request = calls.make_request(token, call, self._declared, self._generation, seconds)
        self._generation += call.kind == "render"
        return request

    def cancel(self, token: int, reason: str) -> Events:
        """The contract cannot cancel a call: the plugin goes on, and its answer is dropped. Until that answer
        or the answer to a later call comes, the plugin may still work on the call, so notifications wait."""
        request = self._open.get(token)
        if request is None or request.about == "action" or reason == NEVER_SENT:
            return self.expired(token, reason)
        self._give_up(token)
        self._given_up += 1
        return ()

    def expired(self, token: int, why: str) -> Events:
        """The call timed out: send the notifications that waited for its end."""
        was_open = token in self._open
        self._give_up(token)
        return self._release() if was_open else ()

    # --- what the plugin is told ----------------------------------------------------------------------------

    @property
    def _is_held(self) -> bool:
        busy = self._given_up > 0 or any(request.about != "action" for request in self._open.values())
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
        if large := self._too_large(0, method, raw):
            raise CallRefused(large)
        return header_frame(raw)

    def _release(self) -> Events:
        return () if self._is_held else self._held.release()

    # --- the end --------------------------------------------------------------------------------------------

    def shutdown_steps(self) -> ShutdownSteps:
        if self._stage == "ready":
            self._held.clear()
        half, whole = SHUTDOWN_SECONDS / 2, SHUTDOWN_SECONDS
        steps = ShutdownSteps(answer=half, exit=half, terminate=TERMINATE_SECONDS, whole=whole)
        return self._shut_down(SHUTDOWN, {}, steps, ShutdownSteps(exit=whole, terminate=TERMINATE_SECONDS))
