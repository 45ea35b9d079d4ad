"""A server elsewhere behind the gateway: the official SDK's, asked in this process; and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings

from runner.exceptions import PluginFailure
from runner.gateway.making import GatewayCall
from runner.gateway.remote import RemoteSource
from runner.gateway.settings import RemoteSettings
from runner.protocol.https.fetch import follow
from runner.protocol.https.request import HttpsRequest, Target
from runner.protocol.https.response import HttpsResponse
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


def call(kind: str, name: str, given: Any = None) -> GatewayCall:
    return GatewayCall("tracker", name, given, kind, "me")


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
            made = await remote.make(call("tool", "close", {"number": 7}), None)
            assert (
                made.error is None and remote.result("close", made.value)["content"][0]["text"] == "closed 7"
            )
            made = await remote.make(call("tool", "close", {"number": -1}), None)
            assert (
                made.error is not None and made.error["cause"] == "isError" and made.data["isError"] is True
            )
            made = await remote.make(call("prompt", "triage", {"area": "doors"}), None)
            assert made.value["messages"][0]["content"]["text"] == "Sort the issues of doors."
            read = await remote.make(call("resource", "issue://one"), None)
            assert read.value["contents"][0]["text"] == "it is broken"
            made = await remote.make(call("method", "nothing/known"), None)
            assert made.error is not None and made.error["code"] == "plugin_error"
            begun = sum(b'"initialize"' in (each.body or b"") for each in wire.seen)
            wire.forget_session = True  # the server was restarted: a new session, and the call is made
            assert (await remote.make(call("tool", "close", {"number": 8}), None)).error is None
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
