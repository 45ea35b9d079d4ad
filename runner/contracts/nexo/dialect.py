"""nexo's protocol: JSON-RPC lines, as in contract 1.10.

    opening   initialize (id 1), then plugin.configure if there is a configuration, then Ready
    calls     tool.invoke, hook.on_hook, channel.*, llm.chat, memory.vector_*, or any method by its name
    events    broker.event to the plugin, broker.publish from it, both on the manifest's topics only
    end       shutdown, then stdin is closed, then the plugin is killed

This host does not repeat three faults of the contract's reference host: it never uses an id twice, it names
the sender of an event as its source, and it reads an error from the error object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
from runner.protocol import jsonrpc
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Event,
    Events,
    HostCall,
    Identity,
    Message,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Setting,
    ShutdownSteps,
    Violation,
)
from runner.protocol.memory import COMPILED, BoundedCache
from runner.protocol.rpc_dialect import INITIALIZE, SHOWN_BYTES, RpcCall, RpcDialect
from runner.protocol.schema import Schema
from sandbox.document.diagnostic import printable
from sandbox.units import format_limit

FRAME_LIMIT = 1 << 20  # bytes, both ways, with the newline: every SDK drops a longer line without an answer
_LIMIT_SHOWN = "and nexo plugins read no line above 1 MiB"

SHUTDOWN_REASON = "host requested"
EXIT_SECONDS = 1.0
# Characters of text that fit into a frame even if each is escaped as six bytes.
_CHUNK_CHARS = FRAME_LIMIT // 8

_PUBLISH = "broker.publish"
_CONFIGURE = "configure"  # token of our own request


def make(setting: Setting) -> NexoDialect:
    return NexoDialect(setting)


class NexoDialect(RpcDialect):
    frame_limit, most = FRAME_LIMIT, FRAME_LIMIT - 1
    call_limit = answer_limit = _LIMIT_SHOWN
    context_keys = CONTRACT.calls
    check_hint = "check that the command starts a nexo plugin"
    large_hint = "advertise fewer tools or smaller schemas"
    allows_noise = True
    event_method = "broker.event"

    def __init__(self, setting: Setting, stamps: events.Stamps = events.stamp) -> None:
        super().__init__(jsonrpc.Peer())
        self._plugin = setting.plugin
        self._config = setting.config
        self._on_hook_failure = setting.on_hook_failure
        self._stamps = stamps
        self._timeouts = timeouts.read_timeouts(setting.environ)
        self._topics = topics.read_topics(setting.plugin)
        self._schema = exports.configuration_of(setting.plugin)
        self._identity = Identity(setting.plugin.id)
        self._tools: Mapping[str, tools.Tool] = tools.manifest_tools(setting.plugin)
        self._schemas = BoundedCache[Schema](COMPILED)
        self._questions: dict[int, str] = {}  # ticket -> method, of requests the plugin waits for
        self._published = 0
        self._publications: dict[int, Mapping[str, Any]] = {}  # ticket -> event, not yet published

    # --- the Dialect interface ------------------------------------------------------------------------------

    @property
    def handshake_seconds(self) -> float:
        seconds = self._timeouts.seconds("initialize")
        return seconds + self._timeouts.seconds("plugin.configure") if self._configures else seconds

    @property
    def patience(self) -> float | None:
        """With a configuration the handshake is two calls, each with its own time limit."""
        waits = self._stage == "handshake" and self._configures
        return self._timeouts.seconds("initialize") if waits else None

    def read(self, raw: bytes) -> Message:
        shown = raw[:SHOWN_BYTES]
        if not raw.strip():
            return Message(fault="blank", raw=shown)
        # Only `feed` ends the handshake, and it is not called while a frame is read.
        value, cause, detail, weight = jsonrpc.read_line(raw, self._stage == "handshake")
        # Some hosts read messages in an array.
        if isinstance(value, list) or (isinstance(value, dict) and value.get("method") == _PUBLISH):
            value, cause, detail, weight = jsonrpc.read_line(raw, unique=True)
        return Message(value, cause or "", detail, shown, weight)

    def silence(self) -> Events:
        if self._stage != "handshake":
            return ()
        amount = format_limit("handshake", self._timeouts.seconds("initialize"))
        hint = "set NEXO_PLUGIN_INIT_TIMEOUT_MS to give it more time"
        text = f"there was no answer to initialize within {amount}"
        return self._end(Violation("timeout", text, "deadline", hint))

    def seconds(self, call: Call) -> float:
        if call.kind == "tool" and call.name in self._tools:
            tool = self._tools[call.name]
            return self._timeouts.seconds("tool.invoke") if tool.seconds is None else tool.seconds
        return self._timeouts.seconds(timeouts.STREAM if calls.is_stream(call) else calls.method_of(call))

    # --- the handshake --------------------------------------------------------------------------------------

    def _greeting(self) -> bytes:
        version = ".".join(map(str, rules.NEXO_VERSION))
        return self._peer.request(INITIALIZE, "initialize", {"nexo_version": version})

    @property
    def _configures(self) -> bool:
        return self._schema is not None and self._config is not None

    def _welcome(self, result: Any) -> Events:
        found = handshake.read_handshake_answer(result, self._plugin)
        self._identity, self._tools = found.identity, found.tools
        said: list[Event] = []
        if found.missing:
            said.append(Notice("tools_missing", {"declared_but_not_advertised": list(found.missing)}))
        return (*said, *self._configured())

    def _configured(self) -> Events:
        """Raises HandshakeFault."""
        if self._schema is None or self._config is None:
            if self._config is not None:
                why = "the configuration was not sent: the manifest has no [plugin.config_schema]"
                return (Notice("config_ignored", why), *self._ready())
            return self._ready()
        handshake.check_config(self._schema, self._config)
        raw = self._configuration(
            _CONFIGURE,
            "plugin.configure",
            {"value": self._config},
            "its configuration is {}",
            f"its configuration is {{}} bytes long, {_LIMIT_SHOWN}",
        )
        self._stage = "configure"
        return (self._send(raw),)

    def _ready(self) -> Events:
        self._stage = "ready"
        return (Ready(self._identity),)

    # --- incoming messages ----------------------------------------------------------------------------------

    def _take(self, value: Any, message: Message) -> Events:
        if isinstance(value, dict) and "jsonrpc" in value and "id" in value and "error" not in value:
            value = {"result": None, **value}  # an answer without a result counts as one whose result is null
        return super()._take(value, message)

    def _noted(self, value: Any, message: Message) -> Events:
        self._count("stdout")
        return (Notice("stdout", message.raw.decode("utf-8", "replace")),)

    def _own_answered(self, error: jsonrpc.RpcError | None) -> Events:
        """The answer to plugin.configure."""
        if error is None:
            return self._ready()
        unknown = error.code == jsonrpc.METHOD_NOT_FOUND
        hint = "it does not know plugin.configure: run it without a configuration" if unknown else ""
        text = f"it refuses its configuration: {self._quote(error.message, error.code)}"
        return self._end(Violation("handshake_failed", text, "configure_refused", hint))

    def _quote(self, message: str, code: int) -> str:
        return f"{printable(message[:500])} ({code})"

    def _result(self, token: int, request: RpcCall, value: Any) -> Events:
        if not request.hook:
            return (Reply(token, value),)
        if why := hooks.fault(value):
            return self._substitute(token, request.hook, why)
        return hooks.without_odd_override(token, request.hook, value)

    def _call_refused(self, token: int, request: RpcCall, error: jsonrpc.RpcError) -> Events:
        # An outbound tool has any method that a manifest can name.
        family = request.about if request.about == calls.OUTBOUND_TOOL else request.method.partition(".")[0]
        text = self._shorten(error.message)
        return (errors.make_refusal(token, family, error.code, text, error.data),)

    def _asked(self, request: jsonrpc.RpcRequest) -> Events:
        if self._is_early:
            return self._refuse(request, jsonrpc.INTERNAL_ERROR, "not yet wired")
        if request.method == _PUBLISH:
            # The contract has it as a notification only.
            return self._refuse(request, jsonrpc.METHOD_NOT_FOUND, "broker.publish is a notification")
        self._questions[request.ticket] = request.method
        return super()._asked(request)

    def _refuse(self, request: jsonrpc.RpcRequest, code: int, why: str) -> Events:
        return super().answer(request.ticket, Answer(error=(code, why, None)))

    def _notified(self, method: str, params: Any, at: float) -> Events:
        if method == _PUBLISH:
            return self._publishes(params)
        if method == "llm.chat.delta":
            return self._streamed(params)
        self._count("notifications")
        return (Notice("notification", {"method": method, "params": params}),)

    def _streamed(self, params: Any) -> Events:
        given = params if isinstance(params, dict) else {}
        token, chunk = self._peer.token_of(given.get("request_id")), given.get("chunk")
        if isinstance(token, int) and self._open[token].about == calls.STREAM and isinstance(chunk, dict):
            return (Progress(token, chunk),)
        self._count("stray_deltas")
        return ()

    # --- events ---------------------------------------------------------------------------------------------

    def _publishes(self, params: Any) -> Events:
        given = params if isinstance(params, dict) else {}
        if self._is_early:
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
        shown = topic[:SHOWN_BYTES] if isinstance(topic, str) else ""
        return (Notice("dropped", {"reason": reason, "topic": shown, "why": why}),)

    def notify(self, method: str, params: Any) -> Events:
        event = events.deliver(method, params, self._topics, self._stamps, ready=self._stage == "ready")
        try:
            raw = self._peer.notification("broker.event", {"topic": event["topic"], "event": event})
        except ValueError as error:
            raise CallRefused(Refusal(0, "-32602", f"the event is {error}", "not_json")) from None
        if large := self._too_large(0, "the event", raw):
            raise CallRefused(large)
        return (self._send(raw, "event"),)

    # --- calls ----------------------------------------------------------------------------------------------

    def _entries(self, name: str) -> Iterable[str | dict[str, Any]] | None:
        if name == "tools":
            return [tool.shown() for tool in self._tools.values()]
        return calls.declared_entries(name, self._plugin)

    def _request(self, token: int, call: Call) -> RpcCall:
        if call.kind != "tool":
            return calls.request(token, call, self._plugin)
        tool = tools.find_tool(token, call.name, calls.arguments(call), self._tools, self._schemas)
        return calls.tool(call, self._plugin, tool.method)

    def _unsendable(self, request: RpcCall, why: Refusal) -> Events:
        if request.hook:
            return self._substitute(why.call, request.hook, why.message)
        return super()._unsendable(request, why)

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
        return super().answer(ticket, answer)

    def emit(self, ticket: int, value: Any) -> Iterator[Event]:
        if not isinstance(value, str):
            return
        text = value.encode("utf-8", "replace").decode()  # a model may split a character in two
        for at in range(0, len(text), _CHUNK_CHARS):
            if ticket in self._questions:
                params = {"request_id": self._peer.asked_as(ticket), "chunk": text[at : at + _CHUNK_CHARS]}
                yield from self._reply(self._peer.notification("llm.complete.delta", params))

    # --- the end --------------------------------------------------------------------------------------------

    def shutdown_steps(self) -> ShutdownSteps:
        steps = ShutdownSteps(answer=self._timeouts.seconds("shutdown"), exit=EXIT_SECONDS)
        return self._shut_down(
            "shutdown", {"reason": SHUTDOWN_REASON}, steps, ShutdownSteps(exit=EXIT_SECONDS)
        )
