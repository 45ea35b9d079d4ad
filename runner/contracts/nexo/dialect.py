"""nexo's protocol: JSON-RPC lines, as in contract 1.10.

    opening   initialize (id 1), then plugin.configure if there is a configuration, then Ready
    calls     tool.invoke, hook.on_hook, channel.*, llm.chat, memory.vector_*, or any method by its name
    events    broker.event to the plugin, broker.publish from it, both on the manifest's topics only
    end       shutdown, then stdin is closed, then the plugin is killed

This host does not repeat three faults of the contract's reference host: it never uses an id twice, it names
the sender of an event as its source, and it reads an error from the error object.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Literal

from runner.contracts.nexo import (
    CONTRACT,
    calls,
    errors,
    events,
    exports,
    handshake,
    hooks,
    rules,
    timeouts,
    tools,
    topics,
)
from runner.protocol import frames, jsonrpc
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Event,
    Events,
    HandshakeFault,
    HostCall,
    Identity,
    Lane,
    Message,
    Notice,
    Progress,
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
from runner.protocol.memory import COMPILED, STANDING, BoundedCache
from runner.protocol.schema import Schema
from sandbox.document.diagnostic import printable
from sandbox.units import format_limit

FRAME_LIMIT = 1 << 20  # bytes, both ways, with the newline: every SDK drops a longer line without an answer
_LIMIT_SHOWN = "and nexo plugins read no line above 1 MiB"

SHUTDOWN_REASON = "host requested"
EXIT_SECONDS = 1.0
_SHOWN_BYTES = 200  # of a line that is not the protocol, for messages
# Characters of text that fit into a frame even if each is escaped as six bytes.
_CHUNK_CHARS = FRAME_LIMIT // 8

_PUBLISH = "broker.publish"
_INITIALIZE, _CONFIGURE, _SHUTDOWN = "initialize", "configure", "shutdown"  # tokens of our own requests

Stage = Literal["new", "initialize", "configure", "ready", "leaving", "over"]


def make(setting: Setting) -> NexoDialect:
    return NexoDialect(setting)


class NexoDialect(Dialect):
    def __init__(self, setting: Setting, stamps: events.Stamps = events.stamp) -> None:
        self._plugin = setting.plugin
        self._config = setting.config
        self._on_hook_failure = setting.on_hook_failure
        self._stamps = stamps
        self._timeouts = timeouts.read_timeouts(setting.environ)
        self._topics = topics.read_topics(setting.plugin)
        self._configuration = exports.configuration_of(setting.plugin)
        self._peer = jsonrpc.Peer()
        self._stage: Stage = "new"
        self._identity = Identity(setting.plugin.id)
        self._tools: Mapping[str, tools.Tool] = tools.manifest_tools(setting.plugin)
        self._schemas = BoundedCache[Schema](COMPILED)
        self._open: dict[int, calls.OpenCall] = {}  # by token
        self._streams: dict[int, int] = {}  # id on the wire -> token
        self._questions: dict[int, str] = {}  # ticket -> method, of requests the plugin waits for
        self._published = 0
        self._publications: dict[int, Mapping[str, Any]] = {}  # ticket -> event, not yet published
        self._counters: dict[str, int] = {}

    # --- the Dialect interface ------------------------------------------------------------------------------

    event_method = "broker.event"

    @property
    def handshake_seconds(self) -> float:
        seconds = self._timeouts.seconds("initialize")
        return seconds + self._timeouts.seconds("plugin.configure") if self._configures else seconds

    @property
    def patience(self) -> float | None:
        """With a configuration the handshake is two calls, each with its own time limit."""
        waits = self._stage == "initialize" and self._configures
        return self._timeouts.seconds("initialize") if waits else None

    @property
    def counters(self) -> Mapping[str, int]:
        return {"late": self._peer.late, "unknown": self._peer.unknown, **self._counters}

    @property
    def noise(self) -> str:
        return self._peer.noise

    def framer(self) -> frames.Framer:
        return frames.LineFramer(FRAME_LIMIT)

    def read(self, raw: bytes) -> Message:
        shown = raw[:_SHOWN_BYTES]
        if not raw.strip():
            return Message(fault="blank", raw=shown)
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        value, cause, detail, weight = jsonrpc.read_line(raw, self._stage == "initialize")
        # Some hosts read messages in an array.
        if isinstance(value, list) or (isinstance(value, dict) and value.get("method") == _PUBLISH):
            value, cause, detail, weight = jsonrpc.read_line(raw, unique=True)
        return Message(value, cause or "", detail, shown, weight)

    def silence(self) -> Events:
        if self._stage != "initialize":
            return ()
        self._stage = "over"
        amount = format_limit("handshake", self._timeouts.seconds("initialize"))
        hint = "set NEXO_PLUGIN_INIT_TIMEOUT_MS to give it more time"
        return (Violation("timeout", f"there was no answer to initialize within {amount}", "deadline", hint),)

    def seconds(self, call: Call) -> float:
        if call.kind == "tool" and call.name in self._tools:
            tool = self._tools[call.name]
            return self._timeouts.seconds("tool.invoke") if tool.seconds is None else tool.seconds
        return self._timeouts.seconds(timeouts.STREAM if calls.is_stream(call) else calls.method_of(call))

    # --- the handshake --------------------------------------------------------------------------------------

    def opening(self) -> Events:
        self._stage = "initialize"
        version = ".".join(map(str, rules.NEXO_VERSION))
        return (self._send(self._peer.request(_INITIALIZE, "initialize", {"nexo_version": version})),)

    @property
    def _configures(self) -> bool:
        return self._configuration is not None and self._config is not None

    def _initialized(self, result: Any, weight: int) -> Events:
        if weight > STANDING:  # its tools are kept while it runs
            message = f"its answer to initialize takes more than {STANDING >> 20} MiB of memory"
            return self._failed("too_large", message, "advertise fewer tools or smaller schemas")
        try:
            found = handshake.read_handshake_answer(result, self._plugin)
        except HandshakeFault as fault:
            self._stage = "over"
            return (fault.violation,)
        self._identity, self._tools = found.identity, found.tools
        said: list[Event] = []
        if found.missing:
            said.append(Notice("tools_missing", {"declared_but_not_advertised": list(found.missing)}))
        return (*said, *self._configured())

    def _configured(self) -> Events:
        if self._configuration is None or self._config is None:
            if self._config is not None:
                why = "the configuration was not sent: the manifest has no [plugin.config_schema]"
                return (Notice("config_ignored", why), *self._ready())
            return self._ready()
        try:
            handshake.check_config(self._configuration, self._config)
            raw = self._peer.request(_CONFIGURE, "plugin.configure", {"value": self._config})
            if len(raw) >= FRAME_LIMIT:
                raise ValueError(f"{len(raw)} bytes long, {_LIMIT_SHOWN}")
        except HandshakeFault as fault:
            self._stage = "over"
            return (fault.violation,)
        except ValueError as error:
            return self._failed("config_invalid", f"its configuration is {error}")
        self._stage = "configure"
        return (self._send(raw),)

    def _ready(self) -> Events:
        self._stage = "ready"
        return (Ready(self._identity),)

    @property
    def _wired(self) -> bool:
        """The plugin has proven its identity and may send requests, even while it is being configured."""
        return self._stage in ("configure", "ready", "leaving")

    def _failed(self, cause: str, message: str, hint: str = "") -> Events:
        self._stage = "over"
        return (Violation("handshake_failed", message, cause, hint),)

    # --- incoming messages ----------------------------------------------------------------------------------

    def feed(self, message: Message) -> Events:
        if self._stage == "over" or message.fault == "blank":
            return ()
        if message.fault == "bad_json":
            return self._not_ours(message)
        if message.fault:
            self._stage = "over"
            text = f"a line on its stdout breaks the protocol: {message.detail}"
            return (Violation("malformed_response", text, message.fault),)
        value = message.value
        if isinstance(value, dict) and "jsonrpc" in value and "id" in value:
            # An answer without a result counts as one whose result is null.
            value = value if "error" in value else {"result": None, **value}
        heard = self._peer.receive(value)
        if isinstance(heard, jsonrpc.RpcResult):
            return self._answered(heard.token, heard.value, message.weight)
        if isinstance(heard, jsonrpc.RpcError):
            return self._refused(heard)
        if isinstance(heard, jsonrpc.RpcRequest):
            return self._asked(heard)
        if isinstance(heard, jsonrpc.RpcNotification):
            return self._take_notification(heard.method, heard.params)
        if heard.why == "not_rpc":
            return self._not_ours(message)
        broken = errors.judge_stray(heard.why, heard.detail, wired=self._wired)
        if broken is None:
            return ()
        self._stage = "over"
        return (broken,)

    def _not_ours(self, message: Message) -> Events:
        """Something else on stdout: a banner, a forgotten print, a line of a log."""
        self._count("stdout")
        return (Notice("stdout", message.raw.decode("utf-8", "replace")),)

    def _answered(self, token: Hashable, value: Any, weight: int) -> Events:
        if token == _INITIALIZE:
            return self._initialized(value, weight)
        if token == _CONFIGURE:
            return self._ready()
        if token == _SHUTDOWN:
            return (ShutdownAnswered(),)
        call = self._closed(token)
        if call is None:
            return ()
        number, known = call
        if known.hook and (why := hooks.fault(value)):
            return self._substitute(number, known.hook, why)
        if known.hook:
            return hooks.without_odd_override(number, known.hook, value)
        return (Reply(number, value),)

    def _refused(self, error: jsonrpc.RpcError) -> Events:
        said = f"{printable(error.message[:500])} ({error.code})"
        if error.token == _INITIALIZE:
            return self._failed("refused", f"it refuses to be initialized: {said}")
        if error.token == _CONFIGURE:
            unknown = error.code == jsonrpc.METHOD_NOT_FOUND
            hint = "it does not know plugin.configure: run it without a configuration" if unknown else ""
            return self._failed("configure_refused", f"it refuses its configuration: {said}", hint)
        if error.token == _SHUTDOWN:
            return (ShutdownAnswered(said),)
        call = self._closed(error.token)
        if call is None:
            return ()
        number, known = call
        if known.hook:
            return self._substitute(number, known.hook, f"it answered with an error: {said}")
        return (errors.make_refusal(number, known.family, error.code, error.message, error.data),)

    def _asked(self, question: jsonrpc.RpcRequest) -> Events:
        if not self._wired:
            return self._reply(question.ticket, Answer(error=(jsonrpc.INTERNAL_ERROR, "not yet wired", None)))
        if question.method == _PUBLISH:
            # The contract has it as a notification only.
            error = (jsonrpc.METHOD_NOT_FOUND, "broker.publish is a notification", None)
            return self._reply(question.ticket, Answer(error=error))
        self._questions[question.ticket] = question.method
        return (HostCall(question.ticket, question.method, question.params),)

    def _take_notification(self, method: str, params: Any) -> Events:
        if method == _PUBLISH:
            return self._publishes(params)
        if method == "llm.chat.delta":
            return self._streamed(params)
        self._count("notifications")
        return (Notice("notification", {"method": method, "params": params}),)

    def _streamed(self, params: Any) -> Events:
        given = params if isinstance(params, dict) else {}
        number, chunk = given.get("request_id"), given.get("chunk")
        token = self._streams.get(number) if type(number) is int else None
        if token is None or not isinstance(chunk, dict):
            self._count("stray_deltas")
            return ()
        return (Progress(token, chunk),)

    # --- events ---------------------------------------------------------------------------------------------

    def _publishes(self, params: Any) -> Events:
        given = params if isinstance(params, dict) else {}
        if not self._wired:
            return self._dropped("not_yet_wired", given.get("topic"))
        event, reason = events.accept(given, self._plugin.id, self._topics, self._stamps)
        if event is None:
            return self._dropped(reason, given.get("topic"))
        self._published += 1
        # A publication gets no answer, but needs a ticket. Requests have positive ones.
        self._publications[-self._published] = event
        return (HostCall(-self._published, "broker.publish", event, expects_answer=False),)

    def _dropped(self, reason: str, topic: object, why: str = "") -> Events:
        self._count(f"dropped_{reason}")
        shown = topic[:_SHOWN_BYTES] if isinstance(topic, str) else ""
        return (Notice("dropped", {"reason": reason, "topic": shown, "why": why}),)

    def notify(self, method: str, params: Any) -> Events:
        event = events.deliver(method, params, self._topics, self._stamps, ready=self._stage == "ready")
        try:
            raw = self._peer.notification("broker.event", {"topic": event["topic"], "event": event})
        except ValueError as error:
            raise CallRefused(Refusal(0, "-32602", f"the event is {error}", "not_json")) from None
        if len(raw) >= FRAME_LIMIT:
            why = f"the event has {len(raw)} bytes, {_LIMIT_SHOWN}"
            raise CallRefused(Refusal(0, "-32602", why, "too_large"))
        return (self._send(raw, "event"),)

    # --- calls ----------------------------------------------------------------------------------------------

    def call(self, token: int, call: Call) -> Events:
        if call.kind == "list":
            if call.name == "tools":
                return (Reply(token, [tool.shown() for tool in self._tools.values()]),)
            return (Reply(token, calls.list_declared(token, call, self._plugin)),)
        if self._stage != "ready" or token in self._open:
            twice = token in self._open
            why = "this call has been sent already" if twice else "the plugin is not ready for calls"
            raise CallRefused(Violation("internal", why, "not_ready", call=token))
        if stray := stray_context(call, CONTRACT.calls):
            raise CallRefused(Refusal(token, "-32602", stray, "invalid_context"))
        if call.kind == "tool":
            tool = tools.find_tool(token, call.name, calls.arguments(call), self._tools, self._schemas)
            request = calls.tool(call, self._plugin, tool.method)
        else:
            request = calls.request(token, call, self._plugin)
        hook = call.name if call.kind == "hook" else ""
        try:
            raw = self._peer.request(token, request.method, request.params)
        except ValueError as error:
            return self._unsendable(token, hook, f"the input is {error}", "not_json")
        if len(raw) >= FRAME_LIMIT:
            why = f"the call has {len(raw)} bytes, {_LIMIT_SHOWN}"
            return self._unsendable(token, hook, why, "too_large")
        number = self._peer.waits_for(token) or 0
        family = request.method.partition(".")[0]
        if call.kind == "tool" and request.method != "tool.invoke":
            family = "outbound_tool"  # for every method that a manifest can name
        self._open[token] = calls.OpenCall(family, number, hook)
        if request.streams:
            self._streams[number] = token
        return (self._send(raw),)

    def _unsendable(self, token: int, hook: str, why: str, kind: str) -> Events:
        self._peer.forget(token)
        if hook:
            return self._substitute(token, hook, why)
        raise CallRefused(Refusal(token, "-32602", why, kind))

    def cancel(self, token: int, reason: str) -> Events:
        """The contract cannot cancel a call: the plugin goes on, and its answer is dropped."""
        self._peer.forget(token)
        self._closed(token)
        return ()

    def expired(self, token: int, why: str) -> Events:
        call = self._open.get(token)
        if call is None or not call.hook:
            return ()
        self._peer.forget(token)
        self._closed(token)
        return self._substitute(token, call.hook, why)

    def _closed(self, token: Hashable) -> tuple[int, calls.OpenCall] | None:
        if not isinstance(token, int):
            return None
        known = self._open.pop(token, None)
        if known is None:
            return None
        self._streams.pop(known.number, None)
        return token, known

    def _substitute(self, token: int, hook: str, why: str) -> Events:
        self._count("hooks_failed")
        return hooks.substitute_answer(token, hook, why, self._on_hook_failure)

    # --- answers to the plugin ------------------------------------------------------------------------------

    def answer(self, ticket: int, answer: Answer) -> Events:
        event = self._publications.pop(ticket, None)
        if event is not None and answer.error is not None:
            return self._dropped("broker_error", event["topic"], answer.error[1])
        if event is not None:
            return (Notice("published", event),)
        if self._questions.pop(ticket, None) is None:
            return ()
        return self._reply(ticket, answer)

    def _reply(self, ticket: int, answer: Answer) -> Events:
        raw = self._peer.reply(ticket, answer, FRAME_LIMIT - 1, _LIMIT_SHOWN)
        return () if raw is None else self._spoken(raw)

    def emit(self, ticket: int, value: Any) -> Iterator[Event]:
        if not isinstance(value, str):
            return
        text = value.encode("utf-8", "replace").decode()  # a model may split a character in two
        for at in range(0, len(text), _CHUNK_CHARS):
            if ticket in self._questions:
                params = {"request_id": self._peer.asked_as(ticket), "chunk": text[at : at + _CHUNK_CHARS]}
                yield from self._spoken(self._peer.notification("llm.complete.delta", params))

    def _spoken(self, raw: bytes) -> Events:
        if len(raw) < FRAME_LIMIT:
            return (self._send(raw, "reply"),)
        self._count("unanswerable")  # the plugin's own id fills a line by itself
        return ()

    # --- the end --------------------------------------------------------------------------------------------

    def shutdown_steps(self) -> ShutdownSteps:
        if self._stage != "ready":
            return ShutdownSteps(exit=EXIT_SECONDS)
        self._stage = "leaving"
        frame = self._send(self._peer.request(_SHUTDOWN, "shutdown", {"reason": SHUTDOWN_REASON}))
        return ShutdownSteps((frame,), self._timeouts.seconds("shutdown"), EXIT_SECONDS)

    def _send(self, raw: bytes, lane: Lane = "request") -> Send:
        return Send(frames.line(raw), lane)

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1
