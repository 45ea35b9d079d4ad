"""A server elsewhere behind the gateway: the official SDK's, asked in this process; and what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import mcp_types as types
import pytest
import trio
import trio.testing
from mcp import Client, MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings

from runner.approvals.tools import ToolRecord
from runner.exceptions import PluginFailure
from runner.gateway.catalogue import Catalogue
from runner.gateway.questions import ClientQuestions, ClientRequest
from runner.gateway.remote import Ask, RemoteSource
from runner.gateway.server import ClientGateway
from runner.gateway.settings import ClientSettings, RemoteSettings
from runner.protocol.calls import CallRequest
from runner.protocol.https.fetch import follow
from runner.protocol.https.request import HttpsRequest, Target
from runner.protocol.https.response import HttpsResponse
from runner.serve.desk import CallAnswer
from sandbox.network.rules import parse_rules
from sandbox.policy.policy import NetworkRule

URL = "https://tracker.example/mcp"
RULE = NetworkRule(ceiling="allowlist", hosts=("tracker.example:443", "127.0.0.1:443"))
TOKEN = "a-token-of-the-tracker"


class Wire:
    """Passes requests on to a server in this process, and remembers what it saw."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self.seen: list[HttpsRequest] = []
        self.forget_session = False

    async def ask(self, request: HttpsRequest) -> HttpsResponse:
        self.seen.append(request)
        if dict(request.headers).get("Authorization") != f"Bearer {TOKEN}":
            return HttpsResponse(401, (), b"", request.url)
        headers = dict(request.headers)
        if self.forget_session and headers.pop("Mcp-Session-Id", ""):
            self.forget_session = False
            return HttpsResponse(404, (), b"", request.url)
        answer = await self._client.post(request.url, content=request.body, headers=headers)
        return HttpsResponse(answer.status_code, tuple(answer.headers.items()), answer.content, request.url)


@asynccontextmanager
async def tracker(*, json_response: bool) -> AsyncIterator[Wire]:
    server = MCPServer("tracker")

    @server.tool()
    def close(number: int) -> str:
        """Closes an issue."""
        if number < 0:
            raise ToolError("no such issue")
        return f"closed {number}"

    @server.prompt()
    def triage(area: str) -> str:
        return f"Sort the issues of {area}."

    @server.resource("issue://one")
    def one() -> str:
        return "it is broken"

    open_to_all = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    application = server.streamable_http_app(json_response=json_response, transport_security=open_to_all)
    transport = httpx2.ASGITransport(app=application)
    async with server.session_manager.run(), httpx2.AsyncClient(transport=transport) as client:
        yield Wire(client)


def call(kind: str, name: str, given: Any = None) -> CallRequest:
    return CallRequest("tracker", name, given, kind, caller="me")


@pytest.mark.trio
@pytest.mark.filterwarnings("ignore:Async generator", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_remote_server(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    by_command = ("/bin/sh", "-c", f"cat {token}")
    for json_response, secret in ((True, {"token_file": str(token)}), (False, {"token_command": by_command})):
        async with tracker(json_response=json_response) as wire:
            remote = RemoteSource(RemoteSettings("tracker", URL, **secret), RULE, wire.ask)
            lists = await remote.lists()
            assert [each["name"] for each in lists["tools"]] == ["close"]
            assert lists["tools"][0]["inputSchema"]["required"] == ["number"]
            assert [each["uri"] for each in lists["resources"]] == ["issue://one"]
            made = await remote.make(call("tool", "close", {"number": 7}))
            assert made.is_ok and remote.result("close", made.value)["content"][0]["text"] == "closed 7"
            made = await remote.make(call("tool", "close", {"number": -1}))
            assert not made.is_ok and made.error["cause"] == "isError" and made.data["isError"] is True
            made = await remote.make(call("prompt", "triage", {"area": "doors"}))
            assert made.value["messages"][0]["content"]["text"] == "Sort the issues of doors."
            read = await remote.make(call("resource", "issue://one"))
            assert read.value["contents"][0]["text"] == "it is broken"
            made = await remote.make(call("method", "nothing/known"))
            assert not made.is_ok and made.error["code"] == "plugin_error"
            begun = sum(b'"initialize"' in (each.body or b"") for each in wire.seen)
            wire.forget_session = True  # the server was restarted: a new session, and the call is made
            assert (await remote.make(call("tool", "close", {"number": 8}))).is_ok
            assert sum(b'"initialize"' in (each.body or b"") for each in wire.seen) == begun + 1
            token.write_text("another-token\n")
            with pytest.raises(PluginFailure, match="refuses the token") as caught:
                await remote.lists()
            assert "OAuth" in caught.value.outcome.hint
            token.write_text(TOKEN + "\n")


@pytest.mark.trio
async def test_hosts_and_tokens_that_are_refused(tmp_path: Path) -> None:
    open_file = tmp_path / "open"
    open_file.write_text(TOKEN)
    open_file.chmod(0o644)
    rows = {
        "the policy does not list the host other.example:443": RemoteSettings(
            "x", "https://other.example/mcp"
        ),
        "others than its owner can read it": RemoteSettings("x", URL, str(open_file)),
        "token_command '/bin/false' gave no token": RemoteSettings("x", URL, "", ("/bin/false",)),
        "token_command '/nowhere' cannot be started": RemoteSettings("x", URL, "", ("/nowhere",)),
        # The policy lists it, and still no private address is dialled.
        "127.0.0.1:443 was not asked": RemoteSettings("x", "https://127.0.0.1/mcp"),
    }
    for message, settings in rows.items():
        with pytest.raises(PluginFailure, match=re.escape(message)):
            await RemoteSource(settings, RULE).lists()
    with pytest.raises(PluginFailure, match="does not list"):  # the default policy: no network at all
        await RemoteSource(RemoteSettings("x", URL), NetworkRule(hosts=RULE.hosts)).lists()


@pytest.mark.trio
async def test_no_token_follows_a_redirect_elsewhere() -> None:
    asked: list[str] = []

    async def ask(request: HttpsRequest) -> HttpsResponse:
        async def one(wanted: HttpsRequest, target: Target) -> HttpsResponse:
            asked.append(target.origin)
            location = (("Location", "https://evil.example/mcp"),)
            return HttpsResponse(307, location, b"", wanted.url)

        return await follow(request, parse_rules(("tracker.example:443",)), one)

    with pytest.raises(PluginFailure, match=r"evil\.example:443 was not asked"):
        await RemoteSource(RemoteSettings("x", URL), RULE, ask).lists()
    assert asked == ["tracker.example:443"]


@pytest.mark.trio
async def test_answers_that_are_none() -> None:
    bodies = {
        b"<html>": "not JSON",
        json.dumps({"jsonrpc": "2.0", "id": 1, "result": []}).encode(): "no result",
        json.dumps({"jsonrpc": "2.0", "id": 99, "result": {}}).encode(): "no result",
        json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": 1}}).encode(): "no version",
        b"[" * 100_000: "not JSON",
    }
    for body, message in bodies.items():

        async def ask(request: HttpsRequest, body: bytes = body) -> HttpsResponse:
            return HttpsResponse(200, (("Content-Type", "application/json"),), body, request.url)

        with pytest.raises(PluginFailure, match=message):
            await RemoteSource(RemoteSettings("x", URL), RULE, ask).lists()

    async def refuse(request: HttpsRequest) -> HttpsResponse:
        asked = json.loads(request.body or b"")
        greeting = {"result": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}}
        refusal = {"error": {"code": -32000, "message": "not\x1b[2J today"}}
        answer = {"id": asked.get("id"), **(greeting if asked["method"] == "initialize" else refusal)}
        return HttpsResponse(200, (), json.dumps(answer).encode(), request.url)

    with pytest.raises(PluginFailure, match=r"it refuses tools/list: not\\x1b\[2J today"):
        await RemoteSource(RemoteSettings("x", URL), RULE, refuse).lists()


def hostile(answers: Mapping[str, Any]) -> Ask:
    """A server that speaks as one should, apart from these results: by method, or bytes as they are."""
    usual = {
        "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}, "prompts": {}}},
        "tools/list": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]},
        "prompts/list": {"prompts": [{"name": "p"}]},
        "tools/call": {"content": [{"type": "text", "text": "done"}]},
    }

    async def ask(request: HttpsRequest) -> HttpsResponse:
        asked = json.loads(request.body or b"")
        result = {**usual, **answers}.get(asked["method"])
        kind = "application/json" if not isinstance(result, bytes) else "text/event-stream"
        answer = {"jsonrpc": "2.0", "id": asked.get("id"), "result": result}
        body = result if isinstance(result, bytes) else json.dumps(answer).encode()
        return HttpsResponse(200, (("Content-Type", kind),), body, request.url)

    return ask


@pytest.mark.trio
@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
async def test_no_answer_ends_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the newer protocol that answers questions has its calls made in a task of all clients."""
    monkeypatch.setattr("runner.gateway.server.MOST_VALUES", 1000)
    messages: list[Any] = [1]
    content: list[Any] = []
    ask = hostile({"prompts/get": {"messages": messages}, "tools/call": {"content": content}})
    remote = RemoteSource(RemoteSettings("tracker", URL), RULE, ask)

    async def answer(context: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    for mode in ("auto", "legacy"):
        async with trio.open_nursery() as nursery:
            record = ToolRecord.at(tmp_path / "tools")
            catalogue = Catalogue(nursery, lambda: [remote], record, lambda text: None)
            questions, settings = ClientQuestions(), ClientSettings()
            gateway = ClientGateway(catalogue, remote, questions, "me", settings, nursery)
            async with Client(gateway.server(), mode=mode, elicitation_callback=answer) as client:
                messages[0] = 1
                with pytest.raises(MCPError, match="has no list of messages"):
                    await client.get_prompt("tracker__p", {})
                for unsendable in ("\ud800", float("nan")):  # the SDK reads both
                    found = await remote.make(call("tool", "t", {"x": unsendable}))
                    assert found.error.get("code") == "invalid_call"
                # One of many parts: each costs the check some 30 µs, and meanwhile nobody else is served.
                for parts, is_refused in ((300, False), (400, True)):
                    content[:] = [{"type": "text", "text": ""}] * parts
                    result = await client.call_tool("tracker__t", {})
                    assert result.is_error is is_refused
                assert "more than 1000 lists, objects and keys" in str(result.content)
                content[:] = [{"type": "text", "text": "done"}]
                messages[0] = {"role": "user", "content": {"type": "text", "text": "Hello."}}
                prompt = await client.get_prompt("tracker__p", {})
                assert isinstance(prompt.messages[0].content, types.TextContent)
                assert not (await client.call_tool("tracker__t", {})).is_error
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_bug_in_one_call_is_told_to_its_client_alone() -> None:
    async def work(request: ClientRequest) -> dict[str, Any]:
        raise TypeError("a bug")

    context: Any = SimpleNamespace(protocol_version="2026-07-28")
    async with trio.open_nursery() as nursery:
        request = ClientRequest(object(), context, "tool t")
        nursery.start_soon(request.run, work)
    assert request.over and isinstance(request.error, TypeError)


@pytest.mark.trio
async def test_what_a_server_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(number: int) -> bytes:
        answer = {"jsonrpc": "2.0", "id": number, "result": {"content": []}}
        return b"event: message\ndata: " + json.dumps(answer).encode() + b"\n\n"

    async def made_with(body: bytes) -> CallAnswer:
        remote = RemoteSource(RemoteSettings("x", URL), RULE, hostile({"tools/call": body}))
        return await remote.make(call("tool", "t"))

    few, many = 1000, 60_000  # each would be parsed by itself
    assert (await made_with(b'data: {"method": "x"}\n\n' * few + event(2))).is_ok
    for tiny in (b"data:1\n\n", b"\n\n", b"\r\r", b"data:\ndata:1\n\n"):
        refused = (await made_with(tiny * many + event(2))).error
        assert "more than 100000 lines" in refused["message"], tiny
    # Pages: all of them together count.
    entry = {"name": "t", "description": "x" * (3 << 20), "inputSchema": {}}
    page = {"tools": [entry], "nextCursor": "more"}
    with pytest.raises(PluginFailure, match="more than 8 MiB"):
        await RemoteSource(RemoteSettings("x", URL), RULE, hostile({"tools/list": page})).lists()
    page = {"tools": [entry]}
    lists = await RemoteSource(RemoteSettings("x", URL), RULE, hostile({"tools/list": page})).lists()
    assert len(lists["tools"]) == 1
    # Calls that a client made and did not wait for.
    waiting, usual = trio.Event(), hostile({})

    async def slow(request: HttpsRequest) -> HttpsResponse:
        if b"tools/call" in (request.body or b""):
            await waiting.wait()
        return await usual(request)

    remote = RemoteSource(RemoteSettings("x", URL), RULE, slow)
    outcomes: Counter[str] = Counter()

    async def make() -> None:
        found = await remote.make(call("tool", "t"))
        outcomes[found.error.get("code", "ok")] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(make)
        await trio.testing.wait_all_tasks_blocked()
        waiting.set()
    assert outcomes == {"ok": 32, "overloaded": 8}


@pytest.mark.trio
async def test_a_server_that_never_ends_its_list(autojump_clock: trio.testing.MockClock) -> None:
    page = {"tools": [], "nextCursor": "more"}
    usual = hostile({"tools/list": page})

    async def slow(request: HttpsRequest) -> HttpsResponse:
        await trio.sleep(59)
        return await usual(request)

    with pytest.raises(PluginFailure, match="more than 120 s"):
        await RemoteSource(RemoteSettings("x", URL), RULE, slow).lists()
