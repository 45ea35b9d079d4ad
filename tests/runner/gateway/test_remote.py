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
from runner.gateway.listed_hosts import Ask
from runner.gateway.questions import ClientQuestions, ClientRequest
from runner.gateway.remote import RemoteSource
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

    async def ask(self, request: HttpsRequest, *_: Any) -> HttpsResponse:
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
            traced = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "me=1"}
            assert (await remote.make(call("tool", "close", {"number": 7})._replace(trace=traced))).is_ok
            asked = wire.seen[-1]
            assert json.loads(asked.body or b"")["params"]["_meta"] == traced
            assert traced.items() <= dict(asked.headers).items()
            made = await remote.make(call("tool", "close", {"number": -1}))
            assert "traceparent" not in dict(wire.seen[-1].headers)
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
            assert caught.value.outcome.hint == "check its token_file or token_command"
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

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
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

        async def ask(request: HttpsRequest, *_: Any, body: bytes = body) -> HttpsResponse:
            return HttpsResponse(200, (("Content-Type", "application/json"),), body, request.url)

        with pytest.raises(PluginFailure, match=message):
            await RemoteSource(RemoteSettings("x", URL), RULE, ask).lists()

    async def refuse(request: HttpsRequest, *_: Any) -> HttpsResponse:
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

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
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

    async def slow(request: HttpsRequest, *_: Any) -> HttpsResponse:
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

    async def slow(request: HttpsRequest, *_: Any) -> HttpsResponse:
        await trio.sleep(59)
        return await usual(request)

    with pytest.raises(PluginFailure, match="more than 120 s"):
        await RemoteSource(RemoteSettings("x", URL), RULE, slow).lists()


def event(message: Mapping[str, Any], end: str = "\n\n") -> bytes:
    return f"event: message\ndata: {json.dumps({'jsonrpc': '2.0', **message})}{end}".encode()


@pytest.mark.trio
async def test_what_comes_before_an_answer_is_bounded() -> None:
    """In pieces of every size; and from a server that says as much as it likes."""
    progress = {"method": "notifications/progress", "params": {"progress": 1, "total": 2}}
    question = {"method": "elicitation/create", "id": "q", "params": {"message": "?", "requestedSchema": {}}}
    answer = {"id": 2, "result": {"content": []}}
    usual, replies, heard = hostile({}), list[Any](), list[Any]()
    body, size = b"", 1

    async def ask(request: HttpsRequest, on_part: Any = None) -> HttpsResponse:
        asked = json.loads(request.body or b"{}")
        if "method" not in asked:
            replies.append(asked)
            return HttpsResponse(202, (), b"", request.url)
        if asked["method"] != "tools/call":
            return await usual(request)
        headers, came = (("Content-Type", "text/event-stream"),), bytearray()
        for begin in range(0, len(body), size):
            came += body[begin : begin + size]
            on_part(headers, came)
        await trio.testing.wait_all_tasks_blocked()
        return HttpsResponse(200, headers, bytes(came), request.url)

    async def made() -> CallAnswer:
        remote = RemoteSource(RemoteSettings("x", URL), RULE, ask)
        return await remote.make(call("tool", "t")._replace(on_progress=heard.append))

    for end in ("\n\n", "\r\n\r\n", "\r\r"):
        for size in (1, 7, 10_000):
            replies.clear()
            heard.clear()
            body = event(progress, end) + event(question, end) + event(progress, end) + event(answer)
            assert (await made()).is_ok
            assert heard == [{"progress": 1, "total": 2}] * 2, (end, size)
            refused = {"code": -32601, "message": "this client does not answer elicitation/create"}
            assert replies == [{"jsonrpc": "2.0", "id": "q", "error": refused}]
    size = 1 << 20
    for body, count in (
        (event(progress) * 3000, 2000),
        (event({**progress, "params": {"progress": 1, "message": "x" * (64 << 10)}}), 0),
        (b'data: {"method"\n\n' * 10, 0),
        (event({"method": 7, "id": {}}) + event({"method": "x", "id": True}), 0),
    ):
        heard.clear()
        body += event(answer)
        answered = await made()
        assert len(heard) == count
        assert answered.is_ok or "not JSON" in answered.error["message"]
    replies.clear()
    body = event(question) * 100 + event(answer)
    assert (await made()).is_ok and len(replies) == 8


@pytest.mark.trio
async def test_a_server_that_ends_its_stream_and_goes_on(autojump_clock: trio.testing.MockClock) -> None:
    """It is asked for the rest by the id of its last event, after the time that it says."""
    usual = hostile({})
    stream = (("Content-Type", "text/event-stream"),)
    progress = event({"method": "notifications/progress", "params": {"progress": 1}})
    answer = event({"id": 2, "result": {"content": []}})
    other = event({"id": 3, "result": {"content": []}})
    parts: list[bytes] = []
    asked_for: list[tuple[str, float]] = []
    heard: list[Any] = []

    async def ask(request: HttpsRequest, on_part: Any = None) -> HttpsResponse:
        if request.method == "GET":
            asked_for.append((dict(request.headers)["Last-Event-ID"], trio.current_time()))
        elif b'"tools/call"' not in (request.body or b""):
            return await usual(request)
        if not parts:
            return HttpsResponse(405, (), b"", request.url)
        body, ends = bytearray(parts[0].rstrip(b"+")), not parts.pop(0).endswith(b"+")
        on_part(stream, body)
        if not ends:
            await trio.sleep_forever()
        return HttpsResponse(200, stream, bytes(body), request.url)

    async def made(*given: bytes) -> tuple[CallAnswer, list[tuple[str, float]]]:
        parts[:], asked_for[:], heard[:] = given, (), ()
        began = trio.current_time()
        remote = RemoteSource(RemoteSettings("x", URL), RULE, ask)
        found = await remote.make(call("tool", "t")._replace(on_progress=heard.append))
        return found, [(number, when - began) for number, when in asked_for]

    found, asked = await made(
        b"id: a1\nretry: 500\ndata: \n\n", progress + b"id: a2\ndata: \n\n", answer + b"+"
    )
    assert found.is_ok and asked == [("a1", 0.5), ("a2", 1.5)] and heard == [{"progress": 1}]
    found, asked = await made(b"id: a1\ndata: \n\n", other + answer)
    assert found.is_ok and len(asked) == 1
    for given, times in (
        ((b"data: \n\n",), 0),  # nothing to go on from
        ((b"id: \x1b[2J\ndata: \n\n",), 0),
        ((b"id: a1\ndata: \n\n",), 1),  # it does not do this
        ((b"id: a1\ndata: \n\n" + other,), 0),
        ((b"id: a1\nretry: 0\ndata: \n\n",) * 50, 20),
    ):
        found, asked = await made(*given)
        assert found.error["code"] == "malformed_response" and len(asked) == times, given
    assert asked[-1][1] == pytest.approx(2.0)  # not faster than it may
    found, asked = await made(b"id: a1\nretry: 9999999\ndata: \n\n", answer)
    assert found.error["code"] == "timeout" and not asked


@pytest.mark.trio
async def test_a_call_has_an_end(autojump_clock: trio.testing.MockClock) -> None:
    """Progress makes it longer, up to 15 minutes. Then the server is told that nobody waits."""
    usual, told = hostile({}), list[str]()
    progress = {"method": "notifications/progress", "params": {"progress": 1}}

    async def ask(request: HttpsRequest, on_part: Any = None) -> HttpsResponse:
        asked = json.loads(request.body or b"{}")
        told.append(asked["method"])
        if asked["method"] == "tools/call":
            came = bytearray()
            while True:
                await trio.sleep(50)
                came += event(progress)
                on_part((("Content-Type", "text/event-stream"),), came)
        return await usual(request)

    remote, began = RemoteSource(RemoteSettings("x", URL), RULE, ask), trio.current_time()
    for on_progress, seconds in ((None, 60), (lambda value: None, 900)):
        made = await remote.make(call("tool", "t")._replace(on_progress=on_progress))
        assert made.error["code"] == "timeout" and told[-1] == "notifications/cancelled"
        assert trio.current_time() - began == pytest.approx(seconds)
        began = trio.current_time()
