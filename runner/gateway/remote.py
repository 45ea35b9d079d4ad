"""A server elsewhere, on streamable HTTP, as one more source of tools. It has no cage: it is only asked.

Its host has to be on the policy's list, and its address must not be a private one, as for a plugin that asks
through the gate. Each message is one request, whose whole answer is read within a time and a size; what comes
before the answer is heard meanwhile (remote_call.py). The token comes from a file, a command or a person's
sign-in (sign_in.py), at the start of each session, and is sent to this host only.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeGuard

import trio

from runner import __version__
from runner.approvals.tools import remote_identity
from runner.exceptions import PluginFailure
from runner.gateway.calls import Maker
from runner.gateway.listed_hosts import Ask, asking, require_listed
from runner.gateway.logins import LoginRecord
from runner.gateway.remote_call import CALL_SECONDS, RemoteCall, data_of, is_stream
from runner.gateway.settings import RemoteSettings
from runner.gateway.sign_in import VERSION, SignIn, wanted_scope
from runner.gateway.tool_source import Lists
from runner.gateway.translate import LISTS, content_result
from runner.outcome import Code, Outcome
from runner.protocol import wire
from runner.protocol.calls import CallRequest
from runner.protocol.host_services import Services
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.fetch import MOST_BODY_BYTES, OnPart
from runner.protocol.https.request import Headers, HttpsRequest
from runner.protocol.https.response import HttpsResponse
from runner.serve.desk import CallAnswer, failed
from runner.serve.peer import read_token
from runner.serve.token_command import TokenCommandFailed, run_token_command
from sandbox.document.diagnostic import cut, printable
from sandbox.policy.policy import NetworkRule

_MOST_PAGES = 20
_MOST_LISTED_BYTES = 8 << 20  # of all pages of one list, as they came: in memory they take many times as much
_LIST_SECONDS = 120.0  # for all lists together, with the handshake
_MOST_CALLS = 32  # at once: each may hold an answer of 12 MiB, and what that is in memory
# Of an answer that is a stream of events. Each is parsed by itself: 12 MiB of tiny ones take half a minute.
_MOST_LINES = 100_000
_LARGE_BYTES = 16 << 10  # of an answer that is parsed in another thread: as events it may take 50 ms
_MOST_MESSAGE = 2000  # characters of what the server says about an error
_CODES: Mapping[str, Code] = {"denied": "policy_denied", "timeout": "timeout"}
_CALLS = {"tool": "tools/call", "prompt": "prompts/get", "resource": "resources/read"}
_PARTS = {"tool": "content", "prompt": "messages", "resource": "contents"}
_OFFERED = {
    "tools": "tools",
    "prompts": "prompts",
    "resources": "resources",
    "resource_templates": "resources",
}

_NO_TOKEN = 401
_REFUSED = (_NO_TOKEN, 403)
_AUTHORIZATION = "Authorization"
_CANCEL_SECONDS = 2.0  # to tell the server that nobody waits for an answer any more


class RemoteSource:
    """`ToolSource` and `Maker` at once."""

    passes = True
    moved = held = False

    def __init__(
        self,
        settings: RemoteSettings,
        rule: NetworkRule,
        ask: Ask | None = None,
        sign_in: SignIn | None = None,
    ) -> None:
        """`rule`: of the policy. `ask`: sends a request; None: to the server. `sign_in`: of a person, for a
        server whose token the settings do not give; None: nobody can."""
        self.name = settings.name
        self.mark = self.identity = remote_identity(settings.name, settings.url)
        self.look = shlex.join(("runner", "allow", "--diff", "--remote", settings.name))
        self.maker: Maker = self
        self._settings = settings
        self._rule = rule
        # A call has a clock of its own, which waits while a person is asked.
        self._ask = ask or asking(CALL_SECONDS, MOST_BODY_BYTES)
        self._ask_long = ask or asking(math.inf, MOST_BODY_BYTES)
        self._sign_in = None if settings.token_file or settings.token_command else sign_in
        self._token = ""  # that the session has by a sign-in
        self._login = ""  # the number of that sign-in
        # Whom questions go to: of the client whose calls these are. None: nobody can be asked.
        self.services: Callable[[], Services | None] = lambda: None
        self._numbers = itertools.count(1)
        self._turn = trio.Lock()
        self._calls = 0  # under way
        self._listening = False  # a call hears what the server says beside answers
        self._speaks_beside = True  # as far as is known: it has not refused that, or let a call wait for it
        self._headers: Headers | None = None  # of a session that has begun
        self._offered: Mapping[str, Any] = {}

    def origin(self) -> str:
        return self.identity

    def result(self, tool: str, value: Any) -> dict[str, Any]:
        return content_result(self.name, value)

    async def lists(self) -> Lists:
        with trio.move_on_after(_LIST_SECONDS):
            async with self._turn:
                self._headers = None  # another token, or another version of the server
            await self._session()
            return {what: await self._list(what) for what in LISTS if _OFFERED[what] in self._offered}
        raise _failure("timeout", f"its lists took more than {_LIST_SECONDS:g} s")

    async def _list(self, what: str) -> list[Mapping[str, Any]]:
        method, key, _ = LISTS[what]
        found: list[Mapping[str, Any]] = []
        params: dict[str, Any] = {}
        size = 0
        for _ in range(_MOST_PAGES):
            try:
                page, more = await self._request(method, params)
            except _RpcError as error:
                raise _failure("plugin_error", f"it refuses {method}: {error}", str(error.code)) from None
            entries = page.get(key)
            if not _are_objects(entries):
                raise _failure("malformed_response", f"its answer to {method} has no list of {key}")
            size += more
            if size > _MOST_LISTED_BYTES:
                message = f"its answers to {method} have more than {_MOST_LISTED_BYTES >> 20} MiB"
                raise _failure("malformed_response", message)
            found += entries
            if not isinstance(page.get("nextCursor"), str):
                return found
            params = {"cursor": page["nextCursor"]}
        raise _failure("malformed_response", f"its answer to {method} has more than {_MOST_PAGES} pages")

    async def make(self, call: CallRequest) -> CallAnswer:
        if self._calls >= _MOST_CALLS:
            message = f"{_MOST_CALLS} calls to this server are under way, which is the most"
            return failed(Outcome("overloaded", "call", message, "calls", "call again later"))
        self._calls += 1
        try:
            return await self._make(call)
        finally:
            self._calls -= 1

    async def _make(self, call: CallRequest) -> CallAnswer:
        kind = call.kind or "tool"
        given = {"uri": call.tool} if kind == "resource" else {"name": call.tool, "arguments": call.input}
        method, params = (call.tool, call.input) if kind == "method" else (_CALLS[kind], given)
        if call.trace:
            params = {**(params or {}), "_meta": dict(call.trace)}
        try:
            value, _ = await self._request(method, params, call)
        except PluginFailure as failure:
            return failed(failure.outcome)
        except _RpcError as error:
            return failed(Outcome("plugin_error", "call", str(error), str(error.code)), data=error.data)
        if kind in _PARTS and not _are_objects(value.get(_PARTS[kind])):
            message = f"its answer to {method} has no list of {_PARTS[kind]}"
            return failed(Outcome("malformed_response", "call", message, "bad_type"))
        if kind == "tool" and value.get("isError") is True:
            return failed(Outcome("plugin_error", "call", "the tool failed", "isError"), data=value)
        return CallAnswer(200, {"value": value})

    # --- messages -------------------------------------------------------------------------------------------

    async def _session(self) -> Headers:
        """The headers of the session, which is begun if there is none. Raises PluginFailure."""
        async with self._turn:
            if self._headers is not None and self._sign_in is None:
                return self._headers
            require_listed(self._rule, self._settings.url)
            token = await self._secret()
            # A person may have signed out meanwhile, or in anew: as somebody else, or for more.
            login = "" if self._sign_in is None else self._sign_in.number
            if self._headers is not None and login == self._login:
                if token != _token_in(self._headers):
                    self._headers = _with_token(self._headers, token)
                return self._headers
            headers = _with_token((), token)
            about = {"name": "runner", "version": __version__}
            services = self.services()
            able: Mapping[str, Any]
            able = {"elicitation": {}} if services is not None and services.elicitation is not None else {}
            asked = {"protocolVersion": VERSION, "capabilities": able, "clientInfo": about}
            number = next(self._numbers)
            answer = await self._post("initialize", asked, headers, number)
            if answer.status == _NO_TOKEN and (new := await self._renewed(token)):
                headers = _with_token(headers, new)
                answer = await self._post("initialize", asked, headers, number)
            self._require_welcome(answer)
            try:
                said = await _result(answer, number)
            except _RpcError as error:
                raise _failure("handshake_failed", f"it refuses the handshake: {error}") from None
            version, offered = said.get("protocolVersion"), said.get("capabilities")
            if not isinstance(version, str) or len(version) > 40 or not isinstance(offered, dict):
                raise _failure("handshake_failed", "its answer to initialize has no version or capabilities")
            headers = (*headers, ("MCP-Protocol-Version", version))
            sessions = [value for name, value in answer.headers if name.lower() == "mcp-session-id"]
            headers = (*headers, *(("Mcp-Session-Id", value) for value in sessions[:1]))
            self._require_welcome(await self._post("notifications/initialized", None, headers, None))
            self._headers, self._offered, self._speaks_beside = headers, offered, True
            self._login = login
            return headers

    async def _request(
        self, method: str, params: Any, call: CallRequest | None = None
    ) -> tuple[dict[str, Any], int]:
        """The result, and the bytes of the answer that had it. `call`: hears progress, and may be asked for.
        Raises PluginFailure and _RpcError."""
        headers = await self._session()
        more = () if call is None else tuple(call.trace.items())  # of this request alone
        number = next(self._numbers)
        answer = await self._exchange(method, params, (*headers, *more), number, call)
        if answer.status == 404:  # the session is over: nothing was done
            async with self._turn:
                if self._headers is headers:
                    self._headers = None
            headers = await self._session()
            answer = await self._exchange(method, params, (*headers, *more), number, call)
        elif answer.status == _NO_TOKEN and (new := await self._renewed(_token_in(headers))):
            async with self._turn:
                renewed = _with_token(headers, new)
                if self._headers is headers:
                    self._headers = renewed
            answer = await self._exchange(method, params, (*renewed, *more), number, call)
        self._require_welcome(answer)
        return await _result(answer, number), len(answer.body)

    async def _exchange(
        self, method: str, params: Any, headers: Headers, number: int, call: CallRequest | None
    ) -> HttpsResponse:
        """Post one request. Of a call that is given up, the server is told. Raises PluginFailure."""
        if call is None:
            return await self._post(method, params, headers, number)
        services = self.services()
        elicitation = None if services is None else services.elicitation

        async def reply(message: Mapping[str, Any]) -> None:
            with suppress(PluginFailure):  # the call itself tells what is wrong
                await self._send(message, headers)

        if call.on_progress is not None and isinstance(params, Mapping):
            params = {**params, "_meta": {**params.get("_meta", {}), "progressToken": number}}
        talk = RemoteCall(call.on_progress, None if elicitation is None else elicitation.elicit, reply)
        try:
            answer = await talk.run(lambda: self._converse(method, params, headers, number, talk))
        except PluginFailure:
            raise
        except BaseException:  # it is cancelled: the client has gone, or gives the call up
            await self._give_up(number, headers)
            raise
        if answer is None:
            await self._give_up(number, headers)
            raise _failure("timeout", f"there was no answer or progress within {CALL_SECONDS:g} s")
        return answer

    async def _converse(
        self, method: str, params: Any, headers: Headers, number: int, talk: RemoteCall
    ) -> HttpsResponse:
        """Servers may ask beside the answer, on a stream that one call at a time listens to."""
        listens = talk.can_ask and not self._listening and self._speaks_beside
        try:
            if listens:
                self._listening = True
                self._speaks_beside = await talk.listen(partial(self._ask_long, self._stream(headers)))
            answer = await self._post(method, params, headers, number, talk)

            async def rest(mark: str, on_part: OnPart) -> HttpsResponse:
                return await self._ask_long(self._stream((*headers, ("Last-Event-ID", mark))), on_part)

            return await talk.whole(answer, number, rest)
        finally:
            self._listening = self._listening and not listens

    def _stream(self, headers: Headers) -> HttpsRequest:
        """Asks for what the server says beside its answers to requests."""
        return HttpsRequest(self._settings.url, "GET", (("Accept", "text/event-stream"), *headers))

    async def _give_up(self, number: int, headers: Headers) -> None:
        gone = {"requestId": number, "reason": "nobody waits for the answer"}
        with trio.move_on_after(_CANCEL_SECONDS, shield=True), suppress(PluginFailure):
            await self._post("notifications/cancelled", gone, headers, None)

    async def _post(
        self, method: str, params: Any, headers: Headers, number: int | None, talk: RemoteCall | None = None
    ) -> HttpsResponse:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        message |= {} if number is None else {"id": number}
        message |= {} if params is None else {"params": params}
        return await self._send(message, headers, talk)

    async def _send(
        self, message: Mapping[str, Any], headers: Headers, talk: RemoteCall | None = None
    ) -> HttpsResponse:
        usual = (("Content-Type", "application/json"), ("Accept", "application/json, text/event-stream"))
        try:
            body = wire.encode(message)
        except ValueError as error:  # a client may send what the SDK reads and JSON has not
            raise _failure("invalid_call", f"the input cannot be sent: {error}", "bad_json") from None
        request = HttpsRequest(self._settings.url, "POST", (*usual, *headers), body)
        try:
            return await (self._ask(request) if talk is None else self._ask_long(request, talk.reader()))
        except FetchFailed as error:
            raise _failure(_CODES.get(error.kind, "launch_failed"), str(error), error.kind) from None

    def _require_welcome(self, answer: HttpsResponse) -> None:
        """Raises PluginFailure for a status that has no answer."""
        if answer.status in _REFUSED:
            hint, what = "check its token_file or token_command", "the token"
            if self._sign_in is not None:
                rights = wanted_scope(answer.headers)
                hint = f"run: {self._settings.login_with(rights)}"
                what = "the sign-in" if self._token else "access"
                what = f"what the sign-in was not for: {rights}" if rights else what
            message = f"the server refuses {what} ({answer.status})"
            raise _failure("policy_denied", message, "token", hint)
        if answer.status >= 400 and answer.status != 404:
            raise _failure("launch_failed", f"the server answers with the status {answer.status}", "status")

    # --- tokens ---------------------------------------------------------------------------------------------

    async def _renewed(self, refused: str) -> str:
        """A token of a sign-in in place of one that the server refuses; '' if there is none. Raises
        PluginFailure."""
        if not refused or self._sign_in is None:
            return ""
        self._token = await self._sign_in.token(refused)
        return self._token

    async def _secret(self) -> str:
        """Raises PluginFailure. No message has the token, or what the command wrote."""
        if self._sign_in is not None:
            self._token = await self._sign_in.token()
            return self._token
        if self._settings.token_file:
            try:
                return (await trio.to_thread.run_sync(read_token, self._settings.token_file, 1)).decode()
            except ValueError as error:
                raise _failure("launch_failed", str(error), "token_file") from None
        if not self._settings.token_command:
            return ""
        try:
            token = await run_token_command(self._settings.token_command)
        except TokenCommandFailed as error:
            code: Code = "timeout" if error.why == "timeout" else "launch_failed"
            raise _failure(code, str(error), "token_command") from None
        if not token.isascii() or not token.decode().isprintable():
            raise _failure("launch_failed", "its token_command gave no token", "token_command")
        return token.decode()


def remote_source(settings: RemoteSettings, rule: NetworkRule, environ: Mapping[str, str]) -> RemoteSource:
    """With the sign-in of the person whose environment it is. Raises ApprovalsUnusable."""
    sign_in = SignIn(settings, rule, LoginRecord(settings.name, settings.url, environ))
    return RemoteSource(settings, rule, sign_in=sign_in)


class _RpcError(Exception):
    def __init__(self, code: int, message: str, data: Any) -> None:
        super().__init__(printable(cut(message, _MOST_MESSAGE)))
        self.code, self.data = code, data


def _are_objects(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


async def _result(answer: HttpsResponse, number: int) -> dict[str, Any]:
    """The result of the request with this number. Raises PluginFailure and _RpcError."""
    if len(answer.body) <= _LARGE_BYTES:
        return _read_result(answer, number)
    return await trio.to_thread.run_sync(_read_result, answer, number)


def _read_result(answer: HttpsResponse, number: int) -> dict[str, Any]:
    try:
        messages = _events(answer.body) if is_stream(answer.headers) else [wire.decode(answer.body)]
    except ValueError as fault:
        raise _failure("malformed_response", f"its answer is not JSON that can be used: {fault}") from None
    for message in messages:
        if not isinstance(message, dict) or message.get("id") != number:
            continue
        error, result = message.get("error"), message.get("result")
        if isinstance(error, dict) and type(error.get("code")) is int:
            raise _RpcError(error["code"], str(error.get("message") or ""), error.get("data"))
        if isinstance(result, dict):
            return result
    raise _failure("malformed_response", "its answer has no result of the request")


def _events(body: bytes) -> list[Any]:
    """The data of server-sent events. Raises ValueError."""
    text = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if text.count(b"\n") > _MOST_LINES:
        raise ValueError(f"its events have more than {_MOST_LINES} lines")
    found = []
    for event in text.split(b"\n\n"):
        if data := data_of(event).strip(b"\n"):
            found.append(wire.decode(data))
    return found


def _token_in(headers: Headers) -> str:
    return next((value.removeprefix("Bearer ") for name, value in headers if name == _AUTHORIZATION), "")


def _with_token(headers: Headers, token: str) -> Headers:
    kept = tuple(each for each in headers if each[0] != _AUTHORIZATION)
    return (*kept, (_AUTHORIZATION, f"Bearer {token}")) if token else kept


def _failure(code: Code, message: str, cause: str = "", hint: str = "") -> PluginFailure:
    return PluginFailure(Outcome(code, "call", message, cause, hint))
