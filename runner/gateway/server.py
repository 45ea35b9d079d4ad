"""The tools, prompts and resources of all plugins as one MCP server, for one client."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import mcp_types as types
import trio
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from runner import __version__
from runner.gateway.calls import Maker
from runner.gateway.catalogue import Catalogue, KnownSource
from runner.gateway.confirm import Confirmer
from runner.gateway.names import public_uri, split_uri
from runner.gateway.questions import ClientQuestions, ClientRequest, Context, Waiting
from runner.gateway.rate import RateLimit
from runner.gateway.settings import ClientSettings
from runner.gateway.tool_source import ToolSource
from runner.gateway.translate import (
    LISTS,
    MOST_VALUES,
    Shown,
    content_result,
    count_values,
    error_result,
    error_text,
    finished,
    is_sound,
    progress_of,
    prompt_result,
    resource_result,
)
from runner.outcome import Outcome
from runner.protocol.calls import CallRequest
from runner.protocol.dialect import Notice, Progress
from runner.protocol.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS
from runner.protocol.trace import read_trace
from runner.serve.desk import CallAnswer, failed
from runner.serve.news import NewsQueue
from runner.serve.refusal import outcome_error
from sandbox.document.diagnostic import quoted

_RESOURCE_NOT_FOUND = -32002
_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_MOST_URI = 4096  # characters: the ledger keeps it
_MOST_REMARKS = 1000  # that one client is told: a plugin may fail with other words each time
_MOST_UNTOLD = 32  # remarks that wait for a request
_MOST_SESSIONS = 256  # that are told of changes
_MOST_SUBSCRIBED = 256  # resources of one session
_TELL_SECONDS = 5.0
_CHANGES: Mapping[str, tuple[ServerEvent, str]] = {  # the newer protocol's event, the older one's method
    "tools": (ToolsListChanged(), "send_tool_list_changed"),
    "prompts": (PromptsListChanged(), "send_prompt_list_changed"),
    "resources": (ResourcesListChanged(), "send_resource_list_changed"),
}
INSTRUCTIONS = (
    "Tools of several plugins, each named PLUGIN__TOOL. Descriptions and results are the plugins' own words."
)


class _Session:
    """A connection of the older protocol."""

    def __init__(self, session: ServerSession) -> None:
        self.session = session
        self.level = 0
        self.subscribed: set[str] = set()


class ClientGateway:
    def __init__(
        self,
        catalogue: Catalogue,
        maker: Maker,
        questions: ClientQuestions,
        client: str,
        settings: ClientSettings,
        nursery: trio.Nursery,
        confirmer: Confirmer | None = None,
    ) -> None:
        """`confirmer`: None: nobody is asked before calls."""
        self._confirmer = confirmer
        self._catalogue = catalogue
        self._maker = maker
        self._questions = questions
        self._client = client
        self._settings = settings
        self._nursery = nursery
        self._rate = RateLimit(settings.calls_per_minute, trio.current_time)
        self._waiting = Waiting(nursery)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._bus = InMemorySubscriptionBus()
        self._told: set[str] = set()  # remarks that this client has heard
        self._listing = 0  # lists that are being made: what is told meanwhile comes before their answers
        self._untold: deque[tuple[str, str]] = deque(maxlen=_MOST_UNTOLD)  # levels and texts
        self._changed: set[str] = set()
        self._news = NewsQueue[Callable[[], Awaitable[None]] | None]()
        self.on_first: Callable[[Context], Awaitable[None]] | None = None
        catalogue.on_changed.append(self._list_changed)
        catalogue.on_remark.append(self._remarked)
        nursery.start_soon(self._tell)

    def close(self) -> None:
        """This client is told nothing more."""
        self._catalogue.on_changed.remove(self._list_changed)
        self._catalogue.on_remark.remove(self._remarked)

    def server(self) -> Server[Any]:
        server: Server[Any] = Server(
            "runner",
            version=__version__,
            title="runner gateway",
            instructions=INSTRUCTIONS,
            on_list_tools=self._lister("tools"),
            on_list_prompts=self._lister("prompts"),
            on_list_resources=self._lister("resources"),
            on_list_resource_templates=self._lister("resource_templates"),
            on_call_tool=self._call_tool,  # type: ignore[arg-type]  # a dict is a result too
            on_get_prompt=self._get_prompt,  # type: ignore[arg-type]
            on_read_resource=self._read_resource,  # type: ignore[arg-type]
            on_completion=self._complete,  # type: ignore[arg-type]
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=ListenHandler(self._bus),
        )
        # Not by the constructor, which warns that the newer protocol has no levels.
        server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, self._set_level)
        server.middleware[:] = [self._remember]  # type: ignore[list-item]  # its arguments have other names
        options = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        server.create_initialization_options = (  # type: ignore[method-assign]  # HTTP makes them itself
            lambda *_, make=server.create_initialization_options, **__: make(options)
        )
        return server

    # --- lists ----------------------------------------------------------------------------------------------

    def _lister(self, what: str) -> Callable[[Context, Any], Awaitable[Any]]:
        async def lists(context: Context, params: Any) -> dict[str, Any]:
            found: list[dict[str, Any]] = []
            self._listing += 1
            try:
                for known in await self._catalogue.all():
                    if not self._settings.sees_plugin(known.source.name):
                        continue
                    await self._tell_remarks(context, known)
                    found += (self._entry(what, each) for each in known.shown.get(what, {}).values())
                await self._tell_untold(context)
            finally:
                self._listing -= 1
            return finished({LISTS[what][1]: [each for each in found if each]})

        return lists

    def _entry(self, what: str, one: Shown) -> dict[str, Any]:
        """As this client sees it; empty: it does not."""
        if LISTS[what][2] != "name":
            return dict(one.entry)
        if not self._settings.sees_tool(one.public):
            return {}
        return {**one.entry, "name": self._settings.shown_as(one.public)}

    async def _tell_remarks(self, context: Context, known: KnownSource) -> None:
        for remark in (known.fault, *known.remarks):
            if remark and self._is_new(remark):
                await self._log(context, "warning", "runner", remark)

    def _remarked(self, plugin: str, remark: str) -> None:
        self.tell(plugin, "warning", remark)

    def _is_new(self, remark: str) -> bool:
        if remark in self._told or len(self._told) >= _MOST_REMARKS:
            return False
        self._told.add(remark)
        return True

    # --- calls ----------------------------------------------------------------------------------------------

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> dict[str, Any]:
        one, known = found = await self._find("tools", params.name)
        if refusal := self._over_rate():
            return finished(refusal)

        async def work(request: ClientRequest) -> dict[str, Any]:
            source = known.source
            if refused := await self._refusal(request, params, found):
                return finished(error_result(outcome_error(refused)["error"]))
            made = await self._make(request, source, one.own, params.arguments or {}, "tool")
            if made.is_ok:
                result = source.result(one.own, made.value)
            elif source.passes and made.error["cause"] == "isError" and isinstance(made.data, dict):
                result = content_result(one.plugin, made.data)
            else:
                result = error_result(made.error)
            result = finished(result)
            if not is_sound("tools/call", request.context.protocol_version, result):
                result = finished(error_result(_unreadable("tools/call", one.own)))
            if self._confirmer is not None:
                for told in await self._confirmer.ask_about_hosts(request, one.plugin):
                    result["content"] = [*result["content"], {"type": "text", "text": f"runner: {told}"}]
            return result

        return await self._waiting.answer(self, context, f"tool {params.name}", work)

    async def _refusal(
        self, request: ClientRequest, params: types.CallToolRequestParams, found: tuple[Shown, KnownSource]
    ) -> Outcome | None:
        """Why a call must not be made, after a person was asked if one wants to be. `found`: its tool."""
        if self._confirmer is None:
            return None
        one, known = found
        await self._confirmer.ask_about_hosts(request, one.plugin)  # that it was refused at the end of a call
        session, arguments = _session_of(request.context), params.arguments or {}
        refused = await self._confirmer.refusal(request, session, known.source, one, arguments)
        # Also if another plugin has come in the place of this one, with the same tool.
        if refused is None and await self._find("tools", params.name) != found:
            message = f"the tool {quoted(one.public)} changed while a person was asked about it"
            return Outcome("policy_denied", "call", message, "changed", "call again")
        return refused

    async def _get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> dict[str, Any]:
        one, known = await self._find("prompts", params.name)
        self._require_rate()

        async def work(request: ClientRequest) -> dict[str, Any]:
            made = await self._make(request, known.source, one.own, params.arguments or {}, "prompt")
            return _sound(request, "prompts/get", one.own, prompt_result(one.plugin, _value(made)))

        return await self._waiting.answer(self, context, f"prompt {params.name}", work)

    async def _read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> dict[str, Any]:
        source, uri = await self._resource(str(params.uri))
        self._require_rate()

        async def work(request: ClientRequest) -> dict[str, Any]:
            made = await self._make(request, source, uri, None, "resource")
            return _sound(request, "resources/read", uri, resource_result(source.name, _value(made)))

        return await self._waiting.answer(self, context, f"resource {params.uri}", work)

    async def _complete(self, context: Context, params: types.CompleteRequestParams) -> dict[str, Any]:
        given = params.model_dump(by_alias=True, mode="json", exclude_none=True)
        given.pop("_meta", None)
        if isinstance(params.ref, types.PromptReference):
            one, known = await self._find("prompts", params.ref.name)
            source, given["ref"]["name"] = known.source, one.own
        else:
            source, given["ref"]["uri"] = await self._resource(params.ref.uri)
        self._require_rate()
        request = ClientRequest(self, context, "completion")
        value = _value(await self._make(request, source, "completion/complete", given, "method"))
        value = value if isinstance(value, dict) else {}
        return _sound(request, "completion/complete", params.argument.name, value)

    async def _make(
        self, request: ClientRequest, source: ToolSource, name: str, given: Any, kind: str
    ) -> CallAnswer:
        plugin, maker = source.name, source.maker or self._maker
        call = CallRequest(plugin, name, given, kind, caller=self._client, trace=_trace(request.context))
        self._questions.enter(plugin, request)
        try:
            if not (request.context.meta or {}).get("progress_token"):
                made = await maker.make(call)
            else:
                made = await _make_with_progress(maker, request, call)
        finally:
            self._questions.leave(plugin, request)
        if count_values([made.value, made.data], MOST_VALUES) <= MOST_VALUES:
            return made
        message = f"the answer has more than {MOST_VALUES} lists, objects and keys"
        hint = "ask for less at a time, or for a text"
        return failed(Outcome("malformed_response", "call", message, "too_many_values", hint))

    async def _find(self, what: str, shown: str) -> tuple[Shown, KnownSource]:
        """Raises MCPError if this client has no such tool or prompt."""
        public = self._settings.meant_by(shown)
        one = await self._catalogue.find(what, public) if public else None
        if one is None or not (self._settings.sees_plugin(one.plugin) and self._settings.sees_tool(public)):
            raise MCPError(INVALID_PARAMS, f"there is no {what[:-1]} {quoted(shown)} here{self._why(public)}")
        known = await self._catalogue.plugin(public.partition("__")[0])
        assert known is not None
        return one, known

    def _why(self, public: str) -> str:
        """Why a plugin that this client sees has no tools now."""
        known = self._catalogue.known(public.partition("__")[0])
        if known is None or not known.fault or not self._settings.sees_plugin(known.source.name):
            return ""
        return f"; {known.fault}"

    async def _resource(self, uri: str) -> tuple[ToolSource, str]:
        """The plugin and its own URI. Raises MCPError."""
        split = split_uri(uri) if len(uri) <= _MOST_URI else None
        known = None if split is None else await self._catalogue.plugin(split[0])
        if split is None or known is None or not self._settings.sees_plugin(known.source.name):
            raise MCPError(_RESOURCE_NOT_FOUND, f"there is no resource {quoted(uri)} here")
        if not known.shown.get("resources") and not known.shown.get("resource_templates"):
            raise MCPError(_RESOURCE_NOT_FOUND, f"{known.source.name} has no resources")
        return known.source, split[1]

    def _over_rate(self) -> dict[str, Any] | None:
        seconds = self._rate.take()
        if not seconds:
            return None
        message = f"this client may make {self._settings.calls_per_minute} calls a minute"
        outcome = Outcome("overloaded", "call", message, "rate", f"call again in {math.ceil(seconds)} s")
        return error_result({**outcome_error(outcome)["error"], "retry_after": math.ceil(seconds)})

    def _require_rate(self) -> None:
        if refusal := self._over_rate():
            raise MCPError(INTERNAL_ERROR, refusal["content"][0]["text"], refusal["_meta"]["runner/error"])

    # --- what is told without being asked -------------------------------------------------------------------

    def hear(self, plugin: str, event: Notice | Progress) -> None:
        """What a plugin says beside its answers."""
        if not isinstance(event, Notice) or not isinstance(event.value, dict):
            return
        if event.kind == "log":
            self._heard_log(plugin, event.value)
            return
        if event.kind == "advice" and self._confirmer is not None and self._settings.sees_plugin(plugin):
            self._confirmer.refused_host(plugin, event.value)
        uri = event.value.get("resource") if event.kind == "changed" else None
        if isinstance(uri, str) and len(uri) <= _MOST_URI:  # nobody can subscribe to a longer one
            self._resource_changed(public_uri(plugin, uri))

    def tell(self, plugin: str, level: str, text: str) -> None:
        """Tell this client about a plugin that it sees; '': about none. Each text once. The newer protocol
        has logs only beside an answer, so what is not about a call in progress waits for the next request."""
        if plugin and not self._settings.sees_plugin(plugin):
            return
        if text in self._told or len(self._told) >= _MOST_REMARKS:
            return
        self._told.add(text)
        request = self._questions.asked_by(plugin)
        if self._sessions and not self._listing:
            self._news.put(partial(self._tell_sessions, level, text), text)
        elif request is not None and request.client is self:
            self._news.put(partial(self._tell_caller, plugin, level, text), text)
        else:
            self._untold.append((level, text))

    async def _tell_caller(self, plugin: str, level: str, text: str) -> None:
        request = self._questions.asked_by(plugin)
        if request is None or request.client is not self or request.questions:
            self._untold.append((level, text))  # it has been answered meanwhile: a log would be dropped
        else:
            await self._log(request.context, level, "runner", text)

    async def _tell_untold(self, context: Context) -> None:
        while self._untold:
            level, text = self._untold.popleft()
            if self._sessions:
                await self._tell_sessions(level, text)
            else:
                await self._log(context, level, "runner", text)

    async def _tell_sessions(self, level: str, text: str) -> None:
        for each in list(self._sessions.values()):
            if _LEVELS.index(level) >= each.level:
                await _try(partial(each.session.send_log_message, level, text, "runner"))  # type: ignore[arg-type]

    def _heard_log(self, plugin: str, value: Mapping[str, Any]) -> None:
        """To the client whose call it belongs to: it may be about that call's input."""
        request = self._questions.said_to(plugin)
        if request is None or request.client is not self:
            return
        level = value.get("level") if value.get("level") in _LEVELS else "info"
        context, logger = request.context, value.get("logger")
        name = f"{plugin}/{logger[:100]}" if isinstance(logger, str) and logger else plugin
        self._news.put(lambda: self._log(context, str(level), name, value.get("data")), value)

    def _resource_changed(self, uri: str) -> None:
        self._news.put(partial(self._bus.publish, ResourceUpdated(uri)), uri)
        for each in self._sessions.values():
            if uri in each.subscribed:
                self._news.put(partial(each.session.send_resource_updated, uri), uri)

    def _list_changed(self, what: str) -> None:
        self._changed.add("resources" if what == "resource_templates" else what)
        self._news.put(None, None)  # if the client does not read, changes of lists stay noted

    async def _tell(self) -> None:
        async for news in self._news:
            changed, self._changed = self._changed, set()
            for what in sorted(changed):
                event, method = _CHANGES[what]
                await self._bus.publish(event)
                for each in list(self._sessions.values()):
                    await _try(getattr(each.session, method))
            if news is not None:
                await _try(news)

    async def _log(self, context: Context, level: str, logger: str, data: Any) -> None:
        known = self._sessions.get(_key(context))
        if known is not None and _LEVELS.index(level) < known.level:
            return
        # Not on the stream of its request, which may be over. The newer protocol has no other.
        send = partial(context.session.send_log_message, level, data, logger)  # type: ignore[arg-type]
        await _try(send)

    # --- sessions of the older protocol ---------------------------------------------------------------------

    async def _remember(self, context: Context, call_next: CallNext) -> HandlerResult:
        if context.method != "initialize":
            if self.on_first is not None and context.request_id is not None:
                await self.on_first(context)
            if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
                self._session(context).session = context.session
            if context.request_id is not None:
                await self._tell_untold(context)
        return await call_next(context)

    def _session(self, context: Context) -> _Session:
        key = _key(context)
        if key not in self._sessions:
            self._sessions[key] = _Session(context.session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return self._sessions[key]

    async def _set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        self._session(context).level = _LEVELS.index(params.level)
        return types.EmptyResult()

    async def _subscribe(self, context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        source, uri = await self._resource(str(params.uri))
        session = self._session(context)
        if len(session.subscribed) >= _MOST_SUBSCRIBED:
            raise MCPError(INVALID_PARAMS, f"a client may subscribe to {_MOST_SUBSCRIBED} resources")
        self._require_rate()
        request = ClientRequest(self, context, "subscription")
        _value(await self._make(request, source, "resources/subscribe", {"uri": uri}, "method"))
        session.subscribed.add(str(params.uri))
        return types.EmptyResult()

    async def _unsubscribe(
        self, context: Context, params: types.UnsubscribeRequestParams
    ) -> types.EmptyResult:
        """Its plugin goes on telling: another client may have subscribed too."""
        self._session(context).subscribed.discard(str(params.uri))
        return types.EmptyResult()


async def _make_with_progress(maker: Maker, request: ClientRequest, call: CallRequest) -> CallAnswer:
    news = NewsQueue[Mapping[str, Any]]()  # a client that does not read misses some

    async def pass_on() -> None:
        count = 0
        async for value in news:
            count += 1
            await request.context.session.report_progress(*progress_of(value, count))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_on)
        try:
            made = await maker.make(call._replace(on_progress=lambda value: news.put(value, value)))
        finally:
            news.close()
    return made


def _trace(context: Context) -> dict[str, str]:
    """Of the message; else of the request that it came with."""
    said = read_trace(context.meta or {})
    return said or ({} if context.request is None else read_trace(context.request.headers))


def _key(context: Context) -> str:
    """Tells sessions of one client apart. On stdio there is one."""
    key: str = "" if context.request is None else context.request.headers.get("mcp-session-id", "")
    return key


def _session_of(context: Context) -> str | None:
    """What a yes may count for. None: a request of its own, as the newer protocol makes them by HTTP, even
    if a header names a session."""
    key, is_modern = _key(context), context.protocol_version in MODERN_PROTOCOL_VERSIONS
    return None if context.request is not None and (is_modern or not key) else key


def _value(made: CallAnswer) -> Any:
    """Raises MCPError with the plugin's own code, where that is one of the protocol's."""
    if made.is_ok:
        return made.value
    cause = str(made.error["cause"])
    code = int(cause) if cause.removeprefix("-").isdigit() and len(cause) < 8 else INTERNAL_ERROR
    raise MCPError(code, error_text(made.error), dict(made.error))


def _sound(request: ClientRequest, method: str, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result. Raises MCPError if the client could not read it."""
    whole = finished(result)
    if not is_sound(method, request.context.protocol_version, whole):
        error = _unreadable(method, name)
        raise MCPError(INTERNAL_ERROR, error_text(error), dict(error))
    return whole


def _unreadable(method: str, name: str) -> Mapping[str, Any]:
    message = f"the result of {method} {quoted(name)} does not fit the protocol"
    outcome = Outcome("malformed_response", "call", message, "bad_type")
    error: Mapping[str, Any] = outcome_error(outcome)["error"]
    return error


async def _try(send: Callable[[], Awaitable[None]]) -> None:
    """One that does not read must not keep news from the other sessions of its caller."""
    with trio.move_on_after(_TELL_SECONDS):
        try:
            await send()
        except Exception:  # noqa: BLE001 -- the client has gone, or cannot be told
            pass
