"""A server elsewhere, on streamable HTTP, as one more source of tools. It has no cage: it is only asked.

Its host has to be on the policy's list, and its address must not be a private one, as for a plugin that asks
through the gate. Each message is one request, whose whole answer is read within a time and a size: so there
is no progress, and the server cannot ask anything. The token comes from a file or a command, at the start of
each session, and is sent to this host only. OAuth is not supported.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeGuard

import trio

from runner import __version__
from runner.approvals.tools import remote_identity
from runner.exceptions import PluginFailure
from runner.gateway.calls import Maker
from runner.gateway.settings import RemoteSettings
from runner.gateway.tool_source import Lists
from runner.gateway.translate import LISTS, content_result
from runner.outcome import Code, Outcome
from runner.protocol import wire
from runner.protocol.calls import CallRequest
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.fetch import fetch
from runner.protocol.https.request import HttpsRequest, parse_url
from runner.protocol.https.response import HttpsResponse
from runner.serve.desk import CallAnswer, failed
from runner.serve.peer import read_token
from runner.serve.token_command import TokenCommandFailed, run_token_command
from sandbox.document.diagnostic import cut, printable
from sandbox.network.rules import parse_rules
from sandbox.policy.policy import NetworkRule, host_matches

_VERSION = "2025-11-25"
_CALL_SECONDS = 60.0
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

Ask = Callable[[HttpsRequest], Awaitable[HttpsResponse]]


class RemoteSource:
    """`ToolSource` and `Maker` at once."""

    passes = True
    moved = held = False

    def __init__(self, settings: RemoteSettings, rule: NetworkRule, ask: Ask | None = None) -> None:
        """`rule`: of the policy. `ask`: sends a request; None: to the server."""
        self.name = settings.name
        self.mark = self.identity = remote_identity(settings.name, settings.url)
        self.look = shlex.join(("runner", "allow", "--diff", "--remote", settings.name))
        self.maker: Maker = self
        self._settings = settings
        self._rule = rule
        self._ask = ask or self._fetch
        self._numbers = itertools.count(1)
        self._turn = trio.Lock()
        self._calls = 0  # under way
        self._headers: tuple[tuple[str, str], ...] | None = None  # of a session that has begun
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
        try:
            value, _ = await self._request(method, params)
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

    async def _session(self) -> tuple[tuple[str, str], ...]:
        """The headers of the session, which is begun if there is none. Raises PluginFailure."""
        async with self._turn:
            if self._headers is not None:
                return self._headers
            self._require_host()
            token = await self._token()
            headers: tuple[tuple[str, str], ...] = (("Authorization", f"Bearer {token}"),) if token else ()
            about = {"name": "runner", "version": __version__}
            asked = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": about}
            number = next(self._numbers)
            answer = await self._post("initialize", asked, headers, number)
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
            await self._post("notifications/initialized", None, headers, None)
            self._headers, self._offered = headers, offered
            return headers

    async def _request(self, method: str, params: Any) -> tuple[dict[str, Any], int]:
        """The result, and the bytes of the answer that had it. Raises PluginFailure and _RpcError."""
        headers = await self._session()
        number = next(self._numbers)
        answer = await self._post(method, params, headers, number)
        if answer.status == 404:  # the session is over: nothing was done
            async with self._turn:
                if self._headers is headers:
                    self._headers = None
            headers = await self._session()
            answer = await self._post(method, params, headers, number)
        return await _result(answer, number), len(answer.body)

    async def _post(
        self, method: str, params: Any, headers: tuple[tuple[str, str], ...], number: int | None
    ) -> HttpsResponse:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        message |= {} if number is None else {"id": number}
        message |= {} if params is None else {"params": params}
        usual = (("Content-Type", "application/json"), ("Accept", "application/json, text/event-stream"))
        try:
            body = wire.encode(message)
        except ValueError as error:  # a client may send what the SDK reads and JSON has not
            raise _failure("invalid_call", f"the input cannot be sent: {error}", "bad_json") from None
        request = HttpsRequest(self._settings.url, "POST", (*usual, *headers), body)
        try:
            answer = await self._ask(request)
        except FetchFailed as error:
            raise _failure(_CODES.get(error.kind, "launch_failed"), str(error), error.kind) from None
        if answer.status in (401, 403):
            hint = "check its token_file or token_command; servers that need OAuth are not supported"
            raise _failure("policy_denied", f"the server refuses the token ({answer.status})", "token", hint)
        if answer.status >= 400 and answer.status != 404:
            raise _failure("launch_failed", f"the server answers with the status {answer.status}", "status")
        return answer

    async def _fetch(self, request: HttpsRequest) -> HttpsResponse:
        """To this host and port alone, also after a redirect."""
        only = parse_rules((parse_url(self._settings.url).origin,))
        return await fetch(request, only, seconds=_CALL_SECONDS)

    def _require_host(self) -> None:
        """Raises PluginFailure."""
        try:
            origin = parse_url(self._settings.url).origin
        except FetchFailed as error:
            raise _failure("policy_denied", str(error), "url") from None
        listed = any(host_matches(pattern, origin) for pattern in self._rule.hosts)
        if self._rule.ceiling == "open" or (self._rule.ceiling == "allowlist" and listed):
            return
        hint = f'the operator can add "{origin}" to hosts under [network] in the policy'
        raise _failure("policy_denied", f"the policy does not list the host {origin}", "host", hint)

    async def _token(self) -> str:
        """Raises PluginFailure. No message has the token, or what the command wrote."""
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
    kinds = [value for name, value in answer.headers if name.lower() == "content-type"]
    try:
        streamed = bool(kinds) and kinds[0].lower().startswith("text/event-stream")
        messages = _events(answer.body) if streamed else [wire.decode(answer.body)]
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
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if any(lines):
            found.append(wire.decode(b"\n".join(lines)))
    return found


def _failure(code: Code, message: str, cause: str = "", hint: str = "") -> PluginFailure:
    return PluginFailure(Outcome(code, "call", message, cause, hint))
