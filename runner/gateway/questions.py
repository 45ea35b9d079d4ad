"""What a plugin asks its host while it works on a call: passed on to the client that made the call.

A client of the older protocol is sent a request. One of the newer protocol gets the question as the answer to
its call, and calls again with the reply; meanwhile the plugin's call goes on here. A plugin does not say for
which call it asks. So its question is passed on only if all its calls are of one client.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import mcp_types as types
import trio
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from runner.protocol.host_services import HostError, Services
from runner.protocol.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND

MOST_WAITING = 64  # calls of one client that wait for a reply
REPLY_SECONDS = 600.0

Context = ServerRequestContext[Any, Any]
Work = Callable[["ClientRequest"], Awaitable[dict[str, Any]]]
_REQUESTS: Mapping[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "elicitation/create": (types.ElicitRequest, types.ElicitResult),
    "sampling/createMessage": (types.CreateMessageRequest, types.CreateMessageResult),
}


def can_answer(context: Context, method: str) -> bool:
    said = context.session.client_capabilities
    return said is not None and getattr(said, method.partition("/")[0]) is not None


class _Question:
    def __init__(self, method: str, params: Mapping[str, Any]) -> None:
        self.request = {"method": method, "params": dict(params)}
        self.reply: Any = None
        self.replied = trio.Event()


class ClientRequest:
    """A request of a client, while a plugin works on it."""

    def __init__(self, client: object, context: Context, subject: str) -> None:
        self.client = client
        self.context = context  # of the newer protocol: of its last repetition
        self.subject = subject
        self.scope = trio.CancelScope()
        self.changed = trio.Event()
        self.over = False
        self.result: dict[str, Any] = {}
        self.error: Exception | None = None
        self.questions: dict[str, _Question] = {}
        self._count = 0

    @property
    def is_modern(self) -> bool:
        return self.context.protocol_version in MODERN_PROTOCOL_VERSIONS

    async def run(self, work: Work) -> None:
        with self.scope:
            try:
                self.result = await work(self)
            except Exception as error:  # noqa: BLE001 -- also a bug: the client is told, and nobody else ends
                self.error = error
        if self.scope.cancelled_caught:
            message = f"no reply to the plugin's question came within {REPLY_SECONDS:g} seconds"
            self.error = MCPError(INVALID_PARAMS, message)
        self.over = True
        self.changed.set()

    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises HostError."""
        if not can_answer(self.context, method):
            raise HostError(METHOD_NOT_FOUND, f"this client does not answer {method}")
        if not self.is_modern:
            return await self._request(method, params)
        self._count += 1
        key = str(self._count)
        question = self.questions[key] = _Question(method, params)
        self.changed.set()
        try:
            await question.replied.wait()
        finally:
            self.questions.pop(key, None)
        return question.reply if isinstance(question.reply, Mapping) else {}

    async def _request(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        asked, answered = _REQUESTS[method]
        try:
            request: Any = asked.model_validate({"method": method, "params": params}, by_name=False)
            related = ServerMessageMetadata(related_request_id=self.context.request_id)
            reply = await self.context.session.send_request(request, answered, metadata=related)
        except ValidationError:
            raise HostError(INVALID_PARAMS, f"the params or the answer of {method} are malformed") from None
        except MCPError as error:
            raise HostError(error.error.code, error.error.message) from None
        return reply.model_dump(by_alias=True, mode="json", exclude_none=True)


class ClientQuestions:
    """The requests of all clients that plugins work on, by plugin."""

    def __init__(self) -> None:
        self._active: dict[str, list[ClientRequest]] = {}
        self._last: dict[str, ClientRequest] = {}

    def enter(self, plugin: str, request: ClientRequest) -> None:
        self._active.setdefault(plugin, []).append(request)

    def leave(self, plugin: str, request: ClientRequest) -> None:
        self._active[plugin].remove(request)
        self._last[plugin] = request

    def asked_by(self, plugin: str) -> ClientRequest | None:
        """The request that something a plugin says belongs to. None: there is none, or one of several."""
        active = self._active.get(plugin)
        if not active or any(each.client is not active[-1].client for each in active):
            return None
        return active[-1]

    def said_to(self, plugin: str) -> ClientRequest | None:
        """The request that a plugin's remark belongs to. It may be heard after the answer."""
        return self.asked_by(plugin) if self._active.get(plugin) else self._last.get(plugin)

    def services(self, plugin: str, context: Context) -> Services | None:
        """What the plugin may ask, by what the client can answer."""
        asking = _PluginQuestions(self, plugin)
        return Services(
            elicitation=asking if can_answer(context, "elicitation/create") else None,
            sampling=asking if can_answer(context, "sampling/createMessage") else None,
        )

    async def ask(self, plugin: str, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        request = self.asked_by(plugin)
        if request is None:
            raise HostError(INTERNAL_ERROR, f"{method} is possible only during a call, of one client")
        return await request.ask(method, params)


class _PluginQuestions:
    """What one plugin asks."""

    def __init__(self, questions: ClientQuestions, plugin: str) -> None:
        self._questions, self._plugin = questions, plugin

    async def elicit(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._questions.ask(self._plugin, "elicitation/create", request)

    async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._questions.ask(self._plugin, "sampling/createMessage", request)


class Waiting:
    """Requests of one client of the newer protocol, and those among them that wait for its reply."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._waiting: dict[str, ClientRequest] = {}

    async def answer(self, client: object, context: Context, subject: str, work: Work) -> dict[str, Any]:
        """The result of a request, or the questions that the client has to answer first. `subject`: what is
        called. Raises MCPError."""
        given = context.params or {}
        state = given.get("requestState")
        if state is not None:
            request = self._resume(state, subject, context, given.get("inputResponses"))
        else:
            request = ClientRequest(client, context, subject)
            methods = _REQUESTS if request.is_modern else ()
            if not any(can_answer(context, method) for method in methods):
                return await work(request)
            self._nursery.start_soon(request.run, work)
        try:
            await request.changed.wait()
        except BaseException:
            request.scope.cancel()
            raise
        if request.over:
            if request.error is not None:
                raise request.error
            # It is known for as long as its plugin makes no other call, and a result may be large.
            result, request.result = request.result, {}
            return result
        return self._suspend(request)

    def _suspend(self, request: ClientRequest) -> dict[str, Any]:
        self._waiting = {state: each for state, each in self._waiting.items() if not each.over}
        if len(self._waiting) >= MOST_WAITING:
            request.scope.cancel()
            raise MCPError(INTERNAL_ERROR, f"{MOST_WAITING} calls wait for replies, which is the most")
        state = secrets.token_urlsafe(18)
        self._waiting[state] = request
        request.changed = trio.Event()
        request.scope.deadline = trio.current_time() + REPLY_SECONDS
        asked = {key: question.request for key, question in request.questions.items()}
        return {"resultType": "input_required", "inputRequests": asked, "requestState": state}

    def _resume(self, state: str, subject: str, context: Context, replies: Any) -> ClientRequest:
        request = self._waiting.pop(state, None)
        if request is None or request.over or request.subject != subject:
            message = "this requestState is unknown, or its call is over; call again without it"
            raise MCPError(INVALID_PARAMS, message)
        request.context, request.scope.deadline = context, float("inf")
        for key, question in list(request.questions.items()):
            if isinstance(replies, Mapping) and key in replies:
                question.reply = replies[key]
                question.replied.set()
                del request.questions[key]
        if request.questions:  # it answered only some: it is asked for the others again
            request.changed.set()
        return request
