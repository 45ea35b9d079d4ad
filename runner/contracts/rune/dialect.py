"""rterm.plugin.v1: one handshake, one request, one response, then the plugin goes by itself.

The contract is what its first host does, so each check stands where that host has it and the first one hit
decides. Its JSON is Go's: null is the empty value of whatever was expected, a known field of another type
spoils the whole line, an unknown one is nobody's business. Where we differ on purpose: a line is refused as
soon as it is too long and not after it was read whole, nothing is lost or judged by what comes after the
response, keys are told apart by their case, and JSON is as strict as runner/protocol/wire.py is.

The plugin's word on what it may do is held against what its bundle lists *and* the policy lets it declare.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NoReturn

from runner.contracts.rune import CONTRACT
from runner.outcome import Code
from runner.plugin import Plugin
from runner.protocol import frames, wire
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Events,
    Farewell,
    Identity,
    Message,
    Notice,
    Ready,
    Refusal,
    Reply,
    Send,
    Setting,
    Violation,
    stray_context,
)
from runner.protocol.frames import FrameFault, Framer
from runner.protocol.memory import STANDING
from sandbox.document.diagnostic import quoted
from sandbox.value import NamedTuple

# As in manifest.py, whose models take longer to import than a plugin to answer.
PROTOCOL: Final = "rterm.plugin.v1"
CLOCKS: Final[Mapping[str, float]] = {"invocation": 5.0, "launch": 2.0, "handshake": 2.0, "teardown": 0.5}

LINE_LIMIT: Final = 1 << 20  # of what the plugin says; what it is told may be longer
LINES: Final = 2  # a handshake and a response

# What the contract's codes of a "no" mean to the layer above; all others are the plugin's own trouble.
REFUSALS: Final = ("invalid_input", "not_found")

# What the first host takes for blank. str.strip() knows four more.
BLANKS: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)

Stage = Literal["silent", "ready", "asked", "answered", "listed", "over"]

# What a session sees and a dialect does not, and what the contract makes of it: before there is a good
# response, and after. None: nothing. A plugin that answered "no" is ended at once: then nothing counts.
Happening = Literal[
    "not_started",
    "started_late",
    "write_failed",
    "read_failed",
    "end_of_output",
    "no_handshake",
    "deadline",
    "bad_exit",
    "no_exit",
]
MEANING: Final[Mapping[Happening, tuple[Code | None, Code | None]]] = {
    "not_started": ("launch_failed", None),
    "started_late": ("launch_failed", None),
    "write_failed": ("crashed", None),
    "read_failed": ("crashed", None),
    "end_of_output": ("crashed", None),
    "no_handshake": ("timeout", None),
    "deadline": ("timeout", "timeout"),
    "bad_exit": ("crashed", "crashed"),
    "no_exit": (None, "crashed"),
}


def make(setting: Setting) -> RuneDialect:
    if setting.call is None or setting.call.kind != "list":
        return RuneDialect(setting)
    from runner.contracts.rune.manifest import catalogue

    return RuneDialect(setting, catalogue=catalogue(setting.plugin))


def allow_list(plugin: Plugin, patterns: Iterable[str]) -> frozenset[str]:
    """The capabilities a plugin may declare: a bundle asks, the policy allows."""
    patterns = tuple(patterns)
    return frozenset(
        name for name in plugin.capabilities if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def objection(setting: Setting) -> Violation | Refusal | None:
    """What the contract refuses before there is a process. None of the nine codes is meant for that.

    A manifest that was read by us has passed all of it; a Plugin made by hand may not have.
    """
    plugin, call = setting.plugin, setting.call
    if _blank(plugin.id):
        return Violation("manifest_invalid", "the plugin has no id", cause="plugin_id")
    if plugin.entrypoint is None or _blank(plugin.entrypoint.command):
        return Violation("manifest_invalid", "the plugin has no command to start", cause="command")
    if call is not None and (refusal := _unspeakable(0, call)):
        return refusal
    for name in plugin.capabilities:
        if not _canonical(name):
            message = f"the capability {quoted(name)} of the bundle is empty or has blanks around it"
            return Violation("manifest_invalid", message, cause="capability")
    if len(set(plugin.capabilities)) != len(plugin.capabilities):
        return Violation("manifest_invalid", "a capability of the bundle is there twice", cause="capability")
    return None


class RuneDialect:
    """One conversation, which is one call."""

    one_shot = True
    patience = None

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
        """Of the whole invocation, launch and exit included: the contract has no clock for the call alone."""
        return self._seconds("invocation")

    def framer(self) -> Framer:
        return self._stdout

    def farewell(self) -> Farewell:
        teardown = self._seconds("teardown")
        if self._stage == "answered":
            return Farewell(exit=teardown, counts=True)
        # Whoever was not asked anything may well be startled by the end of its input.
        unasked = self._stage in ("silent", "ready", "listed")
        return Farewell(exit=teardown if unasked else 0.0)

    @property
    def counters(self) -> Mapping[str, int]:
        return {"late": self._late, "drained": self._stdout.drained}

    def _seconds(self, phase: str) -> float:
        seconds = dict(self._plugin.timeouts).get(phase, 0.0)
        return seconds if seconds > 0 else CLOCKS[phase]

    # --- what we hear -------------------------------------------------------------------------------------

    def read(self, raw: bytes) -> Message:
        text = _trimmed(raw)
        if not text:
            return Message(fault="blank_line", detail="a line with nothing on it")
        if len(text) > LINE_LIMIT:
            return Message(fault="frame_too_large", detail=_too_long(), raw=text[:200])
        value, cause, detail, weight = wire.message(text)
        return Message(value, weight=weight) if cause is None else Message(None, cause, detail, text[:200])

    def feed(self, message: Message) -> Events:
        if self._stage in ("answered", "listed", "over"):
            self._late += 1
            return ()
        try:
            if self._stage == "silent":
                return self._handshake(message)
            return self._response(message)
        except _Violated as violated:
            self._stage = "over"
            return (violated.violation,)

    def _handshake(self, message: Message) -> Events:
        if message.weight > STANDING:
            text = f"its handshake takes more than {STANDING >> 20} MiB of memory"
            raise _Violated(Violation("handshake_failed", text, "too_large"))
        said = read_handshake(_value(message, "handshake", None))
        check_handshake(said, self._plugin, self._tool(), self._allowed)
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
        # Also before the request: who answers what it was not asked cannot know the id.
        plugin_id = self._identity.id
        said = read_response(_value(message, "response", plugin_id), plugin_id)
        check_response(said, self._request_id, plugin_id)
        if said.error is not None:
            self._stage = "over"
            code, text = said.error
            kind = code if code in REFUSALS else "internal_error"
            return (Refusal(self._token, code, text, kind),)
        self._stage = "answered"
        return (Reply(self._token, said.output),)

    def _tool(self) -> str | None:
        """The tool that has to be exposed. None: no tool is asked for, or none that can be."""
        call = self._setting.call
        if call is None or call.kind != "tool" or _blank(call.name):
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
        why = "rune plugins are not configured by their host: the configuration is not sent"
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
            raise CallRefused(_not_exposed(call.name, self._identity.tools, self._identity.id, token))
        request_id = f"plugin_req_{self._random(8).hex()}"
        request = {
            "type": "request",
            "request_id": request_id,
            "tool_name": call.name,
            "context": {key: call.context[key] for key in CONTRACT.context["tool"] if call.context.get(key)},
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
        # There is no word for it. The process is ended, and what it still says is not for anybody.
        if self._stage == "asked" and token == self._token:
            self._stage = "over"
        return ()

    def expired(self, token: int, why: str) -> Events:
        return ()  # what is not answered has failed

    def notify(self, method: str, params: Any) -> Events:
        message = f"a rune plugin takes one request and no notifications, not even {quoted(method)}"
        raise CallRefused(Refusal(0, "not_found", message, "not_found"))

    def silence(self) -> Events:
        return ()

    def answer(self, ticket: int, answer: Answer) -> Events:
        return ()  # these plugins ask nothing of their host

    def emit(self, ticket: int, value: Any) -> Events:
        return ()


# --- the lines -------------------------------------------------------------------------------------------


class ExchangeFramer:
    """The two lines of an exchange. What comes after them is counted and let go, however long it is.

    Blanks before a line are not held, so they are neither limited nor part of what is.
    """

    def __init__(self) -> None:
        self._lines = frames.LineFramer(LINE_LIMIT + 1)  # one for a carriage return
        self._left = LINES
        self.drained = 0

    @property
    def fault(self) -> FrameFault | None:
        return FrameFault("frame_too_large", _too_long()) if self._lines.fault else None

    @property
    def pending(self) -> int:
        return self._lines.pending

    def feed(self, data: bytes) -> list[bytes]:
        found: list[bytes] = []
        while data and self._left and not self._lines.fault:
            if not self._lines.pending:
                data = data.lstrip(b"\t\v\f\r ")
            end = data.find(b"\n") + 1 or len(data)
            found += self._taken(self._lines.feed(data[:end]))
            data = data[end:]
        self.drained += len(data)
        return found

    def finish(self) -> list[bytes]:
        # Blanks without a newline are no line but the end of the output.
        return self._taken([rest for rest in self._lines.finish() if self._left and _trimmed(rest)])

    def _taken(self, lines: list[bytes]) -> list[bytes]:
        self._left -= len(lines)
        return lines


def _trimmed(raw: bytes) -> bytes:
    raw = raw.strip()
    if raw[:1] < b"\x80" and raw[-1:] < b"\x80":
        return raw
    # There are blanks beyond ASCII. No JSON begins or ends with such a byte, so this is rare.
    text = raw.decode("utf-8", "surrogateescape").strip(BLANKS)
    return text.encode("utf-8", "surrogateescape")


def _too_long() -> str:
    return f"a line is longer than {LINE_LIMIT} bytes"


def _send(message: Mapping[str, Any]) -> Send:
    return Send(frames.line(wire.encode(message)))


# --- the messages ----------------------------------------------------------------------------------------


class Handshake(NamedTuple):
    type: str
    plugin_id: str
    plugin_version: str
    protocol_version: str
    exposed_tools: tuple[str, ...]
    capabilities: tuple[str, ...]


class Response(NamedTuple):
    type: str
    request_id: str
    status: str
    output: Any
    error: tuple[str, str] | None  # code, message


class _Violated(Exception):
    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.message)
        self.violation = violation


class _WrongType(Exception):
    def __init__(self, where: str, wanted: str) -> None:
        super().__init__(f"{where} has to be {wanted}")


def _value(message: Message, what: str, plugin_id: str | None) -> Any:
    if not message.fault:
        return message.value
    shown = f" in {quoted(message.raw.decode('utf-8', 'replace'))}" if message.raw else ""
    raise _Violated(
        Violation(
            "malformed_response",
            f"its {what} cannot be read: {message.detail}{shown}",
            message.fault,
            "the output of a plugin is for the protocol alone; anything else belongs on its standard error",
            plugin_id=plugin_id,
        )
    )


def read_handshake(value: Any) -> Handshake:
    try:
        top = _object(value, "the handshake")
        said = _object(top.get("manifest"), "manifest")
        return Handshake(
            _text(top, "type"),
            _text(said, "plugin_id", "manifest."),
            _text(said, "plugin_version", "manifest."),
            _text(said, "protocol_version", "manifest."),
            _texts(said, "exposed_tools", "manifest."),
            _texts(said, "capabilities", "manifest."),
        )
    except _WrongType as wrong:
        _violated("malformed_response", f"its handshake has a wrong shape: {wrong}", "bad_type")


def read_response(value: Any, plugin_id: str) -> Response:
    try:
        top = _object(value, "the response")
        _object(top.get("metadata"), "metadata")
        error = None
        if top.get("error") is not None:
            said = _object(top["error"], "error")
            error = _text(said, "code", "error."), _text(said, "message", "error.")
        return Response(
            _text(top, "type"), _text(top, "request_id"), _text(top, "status"), top.get("output", {}), error
        )
    except _WrongType as wrong:
        message = f"its response has a wrong shape: {wrong}"
        _violated("malformed_response", message, "bad_type", plugin_id=plugin_id)


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _WrongType(where, "an object")
    return value


def _text(table: dict[str, Any], key: str, prefix: str = "") -> str:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise _WrongType(prefix + key, "a string")
    return value or ""


def _texts(table: dict[str, Any], key: str, prefix: str) -> tuple[str, ...]:
    value = table.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(item is None or isinstance(item, str) for item in value):
        raise _WrongType(prefix + key, "an array of strings")
    return tuple(item or "" for item in value)


# --- the checks ------------------------------------------------------------------------------------------


def check_handshake(said: Handshake, plugin: Plugin, tool: str | None, allowed: frozenset[str]) -> None:
    """In the contract's order."""
    if said.type != "handshake":
        message = f"its first message is of type {quoted(said.type)} and not a handshake"
        _violated("handshake_failed", message, "message_type")
    own = said.plugin_id
    if said.protocol_version.strip(BLANKS) != PROTOCOL:
        message = f"it speaks {quoted(said.protocol_version)}; spoken here is {PROTOCOL}"
        _violated("protocol_version_mismatch", message, "protocol_version", plugin_id=own)
    if _blank(own):
        _violated("handshake_failed", "its handshake has no plugin_id", "plugin_id_missing")
    if _blank(said.plugin_version):
        message = "its handshake has no plugin_version"
        _violated("handshake_failed", message, "plugin_version_missing", plugin_id=own)
    if not said.exposed_tools:
        message = "its handshake has no exposed_tools"
        _violated("handshake_failed", message, "exposed_tools_missing", plugin_id=own)
    if own != plugin.id:
        message = f"it calls itself {quoted(own)}, the bundle calls it {quoted(plugin.id)}"
        hint = "the plugin_id has to be the same in the handshake and in the manifest, to the letter"
        _violated("handshake_failed", message, "plugin_id_mismatch", hint, own)
    if tool is not None and tool not in said.exposed_tools:
        raise _Violated(_not_exposed(tool, said.exposed_tools, own))
    _check_capabilities(said, plugin, allowed)


def _check_capabilities(said: Handshake, plugin: Plugin, allowed: frozenset[str]) -> None:
    own = said.plugin_id
    if allowed and not said.capabilities:
        message = "it declares no capabilities, although its bundle lists some"
        hint = "declare those it uses in the handshake, or list none in the manifest"
        _violated("capability_not_declared", message, "capabilities_missing", hint, own)
    seen: set[str] = set()
    for name in said.capabilities:
        if not _canonical(name):
            message = f"the capability {quoted(name)} it declares is empty or has blanks around it"
            _violated("capability_not_declared", message, "capability_blank", plugin_id=own)
        if name in seen:
            message = f"it declares the capability {quoted(name)} twice"
            _violated("capability_not_declared", message, "capability_repeated", plugin_id=own)
        seen.add(name)
        if name not in allowed:
            listed = name in plugin.capabilities
            message = f"it declares the capability {quoted(name)}, which " + (
                "the policy does not let plugins declare" if listed else "its bundle does not list"
            )
            hint = "the operator allows it in the policy" if listed else "list it in the manifest"
            cause = "policy" if listed else "bundle"
            _violated("capability_not_allowed", message, cause, hint, own)


def check_response(said: Response, request_id: str | None, plugin_id: str) -> None:
    """In the contract's order."""
    fault: tuple[str, str] | None = None
    if said.type != "response":
        fault = f"a message of type {quoted(said.type)} where the response should be", "message_type"
    elif request_id is None:
        fault = "a response before there was a request", "request_id"
    elif said.request_id != request_id:
        fault = f"a response to {quoted(said.request_id)}, asked was {quoted(request_id)}", "request_id"
    elif said.status not in ("ok", "error"):
        fault = f"a response whose status is {quoted(said.status)}, neither 'ok' nor 'error'", "status"
    elif said.status == "ok" and said.error is not None:
        fault = "a response that is 'ok' and has an error", "error_with_ok"
    elif said.status == "error" and (said.error is None or _blank(said.error[1])):
        fault = "a response that is an error and does not say which", "error_missing"
    if fault is not None:
        _violated("malformed_response", f"it sent {fault[0]}", fault[1], plugin_id=plugin_id)


def _unspeakable(token: int, call: Call) -> Refusal | None:
    """A call that cannot be put into this contract's words."""
    message = ""
    code = "invalid_input"
    wrong = [key for key in CONTRACT.context["tool"] if not isinstance(call.context.get(key) or "", str)]
    if call.kind == "list" and call.name != "tools":
        code, message = "not_found", f"a rune plugin has no {quoted(call.name)} to list, only tools"
    elif call.kind not in ("tool", "list"):
        message = f"a rune plugin has tools and nothing of the kind {quoted(call.kind)}"
    elif _blank(call.name):
        message = "a tool has to be named"
    elif wrong:
        message = f"{wrong[0]} of the context has to be a string"
    elif stray := stray_context(call, CONTRACT.context):
        code, message = "invalid_input", stray
    return Refusal(token, code, message, code) if message else None


def _not_exposed(tool: str, exposed: Sequence[str], plugin_id: str, token: int | None = None) -> Violation:
    message = f"it does not expose the tool {quoted(tool)}"
    shown = ", ".join(quoted(name) for name in exposed[:8]) + (", …" if len(exposed) > 8 else "")
    return Violation("tool_not_exposed", message, "exposed_tools", f"exposed: {shown}", token, plugin_id)


def _violated(code: Code, message: str, cause: str, hint: str = "", plugin_id: str | None = None) -> NoReturn:
    raise _Violated(Violation(code, message, cause, hint, plugin_id=plugin_id))


def _blank(text: str) -> bool:
    return not text.strip(BLANKS)


def _canonical(name: str) -> bool:
    return bool(name) and name == name.strip(BLANKS)
