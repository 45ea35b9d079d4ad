"""rterm.plugin.v1: one handshake, one request, one response, then the plugin exits by itself.

The contract is what its first host does. So the checks are in that host's order, and the first one that
fails decides (see messages.py). This host differs on purpose in four points: a line is refused as soon as
it is too long and not after it was read whole; output after the response is ignored; keys have to match in
case; and JSON is as strict as in runner/protocol/wire.py.

A capability that the plugin declares has to be listed in its bundle and allowed by the policy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from runner.contracts.rune import CONTRACT
from runner.contracts.rune.exchange import LINE_LIMIT, ExchangeFramer, too_long, trim_line
from runner.contracts.rune.messages import (
    BrokenContract,
    check_handshake,
    check_keys,
    check_response,
    is_blank,
    is_canonical,
    message_value,
    not_exposed,
    read_handshake,
    read_response,
)
from runner.contracts.rune.terms import PROTOCOL, TIMEOUTS
from runner.plugin import Plugin
from runner.protocol import frames, wire
from runner.protocol.ambiguity import hides_message
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Events,
    Identity,
    Message,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    ShutdownSteps,
    Violation,
    stray_context,
)
from runner.protocol.frames import Framer
from runner.protocol.memory import STANDING
from sandbox.document.diagnostic import quoted

# Error codes of the contract that keep their meaning. Every other code is an internal error of the plugin.
REFUSALS: Final = ("invalid_input", "not_found")

Stage = Literal["silent", "ready", "asked", "answered", "listed", "over"]


def make(setting: Setting) -> RuneDialect:
    if setting.call is None or setting.call.kind != "list":
        return RuneDialect(setting)
    from runner.contracts.rune.manifest import catalogue

    return RuneDialect(setting, catalogue=catalogue(setting.plugin))


def allow_list(plugin: Plugin, patterns: Iterable[str]) -> frozenset[str]:
    """The capabilities a plugin may declare: listed in its bundle and allowed by the policy."""
    patterns = tuple(patterns)
    return frozenset(
        name for name in plugin.capabilities if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def objection(setting: Setting) -> Violation | Refusal | None:
    """Returns why the contract refuses a plugin or call before a process is started, or None.

    A manifest that the runner has read passes all of it; a Plugin made by a program may not.
    """
    plugin, call = setting.plugin, setting.call
    if is_blank(plugin.id):
        return Violation("manifest_invalid", "the plugin has no id", cause="plugin_id")
    if plugin.entrypoint is None or is_blank(plugin.entrypoint.command):
        return Violation("manifest_invalid", "the plugin has no command to start", cause="command")
    if call is not None and (refusal := _unspeakable(0, call)):
        return refusal
    for name in plugin.capabilities:
        if not is_canonical(name):
            message = f"the capability {quoted(name)} of the bundle is empty or has blanks around it"
            return Violation("manifest_invalid", message, cause="capability")
    if len(set(plugin.capabilities)) != len(plugin.capabilities):
        return Violation("manifest_invalid", "a capability of the bundle appears twice", cause="capability")
    return None


class RuneDialect(Dialect):
    """One conversation, which is one call."""

    one_shot = True

    def __init__(
        self,
        setting: Setting,
        *,
        catalogue: Sequence[Mapping[str, Any]] | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._setting = setting
        self._plugin = setting.plugin
        self._allowed = allow_list(setting.plugin, setting.declare)
        self._catalogue = catalogue
        self._random = random
        self._stdout = ExchangeFramer()
        self._stage: Stage = "silent"
        self._opened = False
        self._identity = Identity("")
        self._token = 0
        self._request_id: str | None = None  # None: no response can be right
        self._late = 0

    # --- clocks and streams -------------------------------------------------------------------------------

    @property
    def handshake_seconds(self) -> float:
        return self._seconds("handshake")

    def seconds(self, call: Call) -> float:
        """The limit of the whole invocation, launch and exit included: the contract has none for the call.

        The contract leaves it to the host, for each plugin. So the `call` limit takes its place, also a
        longer one: a bundle cannot ask for limits, and what is granted is the operator's word."""
        granted = self._setting.limits.call
        return self._seconds("invocation") if granted is None else granted

    def framer(self) -> Framer:
        return self._stdout

    def shutdown_steps(self) -> ShutdownSteps:
        teardown = self._seconds("teardown")
        if self._stage == "answered":
            return ShutdownSteps(exit=teardown, counts=True)
        # A plugin that got no request may need a moment to notice the end of its input.
        unasked = self._stage in ("silent", "ready", "listed")
        return ShutdownSteps(exit=teardown if unasked else 0.0)

    @property
    def counters(self) -> Mapping[str, int]:
        return {"late": self._late, "drained": self._stdout.drained}

    def _seconds(self, phase: str) -> float:
        seconds = dict(self._plugin.timeouts).get(phase, 0.0)
        return seconds if seconds > 0 else TIMEOUTS[phase]

    # --- what we hear -------------------------------------------------------------------------------------

    def read(self, raw: bytes) -> Message:
        text = trim_line(raw)
        if not text:
            return Message(fault="blank_line", detail="a line with nothing on it")
        if len(text) > LINE_LIMIT:
            return Message(fault="frame_too_large", detail=too_long(), raw=text[:200])
        value, cause, detail, weight = wire.message(text)
        if cause is None and hides_message(text, is_message=_is_object):
            cause, detail = "ambiguous", "some hosts would read this line as more than one"
        return Message(value, weight=weight) if cause is None else Message(None, cause, detail, text[:200])

    def feed(self, message: Message) -> Events:
        if self._stage in ("answered", "listed", "over"):
            self._late += 1
            return ()
        try:
            if self._stage == "silent":
                return self._handshake(message)
            return self._response(message)
        except BrokenContract as violated:
            self._stage = "over"
            return (violated.violation,)

    def _handshake(self, message: Message) -> Events:
        if message.weight > STANDING:
            text = f"its handshake takes more than {STANDING >> 20} MiB of memory"
            raise BrokenContract(Violation("handshake_failed", text, "too_large"))
        said = read_handshake(message_value(message, "handshake", None))
        check_handshake(said, self._plugin, self._tool(), self._allowed)
        check_keys(message.value, "manifest", said.plugin_id)
        self._identity = Identity(
            id=said.plugin_id,
            version=said.plugin_version,
            protocol=PROTOCOL,
            tools=said.exposed_tools,
            details={"capabilities": list(said.capabilities)},
        )
        self._stage = "ready"
        return (Ready(self._identity),)

    def _response(self, message: Message) -> Events:
        # Also before the request is sent: a response then is a fault, whatever its id.
        plugin_id = self._identity.id
        said = read_response(message_value(message, "response", plugin_id), plugin_id)
        check_response(said, self._request_id, plugin_id)
        check_keys(message.value, "error", plugin_id)
        if said.error is not None:
            self._stage = "over"
            code, text = said.error
            kind = code if code in REFUSALS else "internal_error"
            return (Refusal(self._token, code, text, kind),)
        self._stage = "answered"
        return (Reply(self._token, said.output),)

    def _tool(self) -> str | None:
        """The tool that the handshake has to expose. None: the call names none."""
        call = self._setting.call
        if call is None or call.kind != "tool" or is_blank(call.name):
            return None
        return call.name

    # --- what we say --------------------------------------------------------------------------------------

    def opening(self) -> Events:
        if self._opened or self._stage == "over":
            return ()
        self._opened = True
        fault = objection(self._setting)
        if isinstance(fault, Violation):
            self._stage = "over"
            return (fault,)
        opening = _send({"type": "handshake", "protocol_version": PROTOCOL})
        if self._setting.config is None:
            return (opening,)
        why = "the configuration was not sent: rune plugins take none from their host"
        return (opening, Notice("config_ignored", why))

    def call(self, token: int, call: Call) -> Events:
        if self._stage != "ready" or not self._opened:
            when = "it has to wait" if self._stage in ("silent", "ready") else "it is too late"
            message = f"one process of a rune plugin takes one call, after the handshake: {when}"
            raise CallRefused(Violation("internal", message, cause="one_shot", call=token))
        if refusal := _unspeakable(token, call):
            raise CallRefused(refusal)
        if call.kind == "list":
            self._stage = "listed"
            return (Reply(token, self._listed()),)
        if call.name not in self._identity.tools:
            raise CallRefused(not_exposed(call.name, self._identity.tools, self._identity.id, token))
        request_id = f"plugin_req_{self._random(8).hex()}"
        request = {
            "type": "request",
            "request_id": request_id,
            "tool_name": call.name,
            "context": {key: call.context[key] for key in CONTRACT.calls["tool"] if call.context.get(key)},
            "input": {} if call.input is None else call.input,
        }
        try:
            send = _send(request)
        except ValueError as error:
            message = f"the input cannot be sent: {error}"
            raise CallRefused(Refusal(token, "invalid_input", message, "invalid_input")) from None
        self._token, self._request_id, self._stage = token, request_id, "asked"
        return (send,)

    def _listed(self) -> list[dict[str, Any]]:
        if self._catalogue is not None:
            return [dict(tool) for tool in self._catalogue]
        return [{"name": name} for name in dict(self._plugin.exports).get("tools", ())]

    def cancel(self, token: int, reason: str) -> Events:
        # The contract cannot cancel a call. The session ends the process, and further output is ignored.
        if self._stage == "asked" and token == self._token:
            self._stage = "over"
        return ()

    def notify(self, method: str, params: Any) -> Events:
        message = f"a rune plugin takes one request and no notifications, not even {quoted(method)}"
        raise CallRefused(Refusal(0, "not_found", message, "not_found"))

    def answer(self, ticket: int, answer: Answer) -> Events:
        return ()  # these plugins send no requests


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _unspeakable(token: int, call: Call) -> Refusal | None:
    """Returns the refusal of a call that this contract cannot send, or None."""
    message = ""
    code = "invalid_input"
    wrong = [key for key in CONTRACT.calls["tool"] if not isinstance(call.context.get(key) or "", str)]
    if call.kind == "list" and call.name != "tools":
        code, message = "not_found", f"a rune plugin has no {quoted(call.name)} to list, only tools"
    elif call.kind not in ("tool", "list"):
        message = f"a rune plugin has tools and nothing of the kind {quoted(call.kind)}"
    elif is_blank(call.name):
        message = "a tool has to be named"
    elif wrong:
        message = f"{wrong[0]} of the context has to be a string"
    elif stray := stray_context(call, CONTRACT.calls):
        code, message = "invalid_input", stray
    return Refusal(token, code, message, code) if message else None


def _send(message: Mapping[str, Any]) -> Send:
    return Send(frames.line(wire.encode(message)))
