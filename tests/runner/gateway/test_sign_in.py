"""Signing in at a server elsewhere: the official SDK's servers in a process, by TLS; and hostile ones."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import mcp_types as types
import pytest
import trio
import trio.testing
from mcp import Client
from mcp.shared.memory import create_client_server_memory_streams

from runner.approvals.record import ApprovalsUnusable
from runner.approvals.tools import ToolRecord
from runner.exceptions import PluginFailure
from runner.gateway.callback import open_callback
from runner.gateway.catalogue import Catalogue
from runner.gateway.listed_hosts import Ask
from runner.gateway.logins import Login, LoginRecord
from runner.gateway.questions import ClientQuestions
from runner.gateway.remote import RemoteSource
from runner.gateway.server import ClientGateway
from runner.gateway.settings import ClientSettings, RemoteSettings
from runner.gateway.sign_in import VERSION, SignIn, run_sign_in, wanted_scope
from runner.protocol.calls import CallRequest
from runner.protocol.https.request import HttpsRequest
from runner.protocol.https.response import HttpsResponse
from runner.serve.desk import CallAnswer
from sandbox.policy.policy import NetworkRule
from tests.runner.gateway.signing import RULE, Tracker, browse, get, running_tracker
from tests.runner.gateway.tracker import KNOWN, LOGIN, SECRET, TRACKER, URL

SETTINGS = RemoteSettings("tracker", URL, file="/home/me/gateway.toml")
LOGIN_COMMAND = "runner gateway login tracker --settings /home/me/gateway.toml"


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Tracker]:
    with running_tracker(tmp_path) as running:
        yield running


def record_in(folder: Path, name: str = "tracker", url: str = URL) -> LoginRecord:
    return LoginRecord(name, url, {"HOME": str(folder)})


def sign_in_at(
    folder: Path, ask: Ask, settings: RemoteSettings = SETTINGS, rule: NetworkRule = RULE
) -> SignIn:
    return SignIn(settings, rule, record_in(folder), ask)


async def sign_in(signing: SignIn, open_link: Callable[[str], Any], scope: str = "") -> None:
    """`open_link`: an async function for the person's browser."""
    send, receive = trio.open_memory_channel[str](1)

    async def browser() -> None:
        await open_link(await receive.receive())

    failure = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(browser)
        try:
            await signing.run(send.send_nowait, scope)
        except PluginFailure as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def call(tool: str, given: Any = None, **more: Any) -> CallRequest:
    return CallRequest("tracker", tool, given or {}, "tool", caller="me", **more)


def tokens_in(asked: list[HttpsRequest]) -> set[str]:
    """Hosts that a token was sent to."""
    return {each.url.split("/")[2] for each in asked if "authorization" in dict(map(_low, each.headers))}


def _low(header: tuple[str, str]) -> tuple[str, str]:
    return header[0].lower(), header[1]


@pytest.mark.trio
async def test_a_person_signs_in_and_out(tracker: Tracker, tmp_path: Path) -> None:
    ask = tracker.asking()
    remote = RemoteSource(SETTINGS, RULE, ask, sign_in_at(tmp_path, ask))
    with pytest.raises(PluginFailure, match=r"the server refuses access \(401\)") as caught:
        await remote.lists()
    assert caught.value.outcome.hint == f"run: {LOGIN_COMMAND}"

    async def open_link(url: str) -> None:
        assert url.startswith(f"https://{LOGIN}/authorize?") and "code_challenge_method=S256" in url
        assert "You are signed in" in await browse(tracker, url)

    await sign_in(sign_in_at(tmp_path, ask), open_link)
    [kept] = (tmp_path / ".config/runner/logins").glob("*/login.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    listed = {each["name"] for each in (await remote.lists())["tools"]}
    assert listed == {"ask", "ask_beside", "close", "count", "wait"}
    assert (await remote.make(call("close", {"number": 7}))).is_ok
    assert tokens_in(tracker.asked) == {TRACKER}

    # Two gateways of one person, whose token is over at the same time. A refresh token is good for one use.
    other = RemoteSource(SETTINGS, RULE, ask, sign_in_at(tmp_path, ask))
    await other.lists()
    assert tracker.tell("expire") == ["registered", "exchanged"]
    made: list[CallAnswer] = []

    async def make(source: RemoteSource, number: int) -> None:
        made.append(await source.make(call("close", {"number": number})))

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(make, remote, number)
            nursery.start_soon(make, other, number)
    assert len(made) == 12 and all(each.is_ok for each in made), made
    assert tracker.tell() == ["registered", "exchanged", "refreshed"]

    # The authorization server takes it back.
    tracker.tell("forget")
    ended = await remote.make(call("close", {"number": 7}))
    assert (ended.error["code"], ended.error["hint"]) == ("policy_denied", f"run: {LOGIN_COMMAND}")
    assert ended.error["message"] == "the sign-in is over"
    assert record_in(tmp_path).remove() and not kept.exists() and not record_in(tmp_path).remove()
    with pytest.raises(PluginFailure, match="refuses access"):
        await remote.lists()


@asynccontextmanager
async def serving(gateway: ClientGateway, nursery: trio.Nursery) -> AsyncIterator[Any]:
    """A transport of the official client. Its in-memory one passes no progress."""
    server = gateway.server()
    async with create_client_server_memory_streams() as (here, there):
        nursery.start_soon(server.run, *there, server.create_initialization_options())
        yield here


class Person:
    """At the official client."""

    def __init__(self) -> None:
        self.progress: list[tuple[float, float | None, str | None]] = []
        self.arrived = trio.Event()

    async def answer(self, context: Any, params: Any) -> types.ElicitResult:
        assert params.message == "Really?"
        return types.ElicitResult(action="accept", content={"sure": True})

    async def heard(self, progress: float, total: float | None, message: str | None) -> None:
        self.progress.append((progress, total, message))
        self.arrived.set()


@pytest.mark.trio
@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
async def test_what_passes_while_a_server_works(tracker: Tracker, tmp_path: Path) -> None:
    """Progress, questions and cancellation, from the official server to the official client."""
    ask = tracker.asking()
    await sign_in(sign_in_at(tmp_path, ask), lambda url: browse(tracker, url))
    questions = ClientQuestions()
    for mode in ("auto", "legacy"):
        person, remote = Person(), RemoteSource(SETTINGS, RULE, ask, sign_in_at(tmp_path, ask))
        async with trio.open_nursery() as nursery:
            sources, record = [remote], ToolRecord.at(tmp_path / "tools")
            catalogue = Catalogue(nursery, sources.copy, record, lambda text: None)
            gateway = ClientGateway(catalogue, remote, questions, "me", ClientSettings(), nursery)

            async def load(context: Any, remote: RemoteSource = remote) -> None:
                remote.services = partial(questions.services, "tracker", context)

            gateway.on_first = load
            async with Client(
                serving(gateway, nursery), mode=mode, elicitation_callback=person.answer
            ) as client:
                result = await client.call_tool("tracker__count", {"to": 3}, progress_callback=person.heard)
                assert not result.is_error
                asked = await client.call_tool("tracker__ask", {})
                assert "accept True" in str(asked.content)
                for _ in range(2):
                    beside = await client.call_tool("tracker__ask_beside", {})
                    assert "'sure': True" in str(beside.content)
                while len(person.progress) < 3:  # the client may tell of it after the answer
                    await trio.lowlevel.checkpoint()
                # ... and, of what comes at the same time, in any order.
                assert sorted(person.progress) == [(number, 3, f"at {number}") for number in (1, 2, 3)], mode
                person.arrived = trio.Event()
                given_up = tracker.tell().count("given up")
                async with trio.open_nursery() as calls:
                    wait = partial(client.call_tool, progress_callback=person.heard)
                    calls.start_soon(wait, "tracker__wait", {})
                    await person.arrived.wait()
                    calls.cancel_scope.cancel()
                while tracker.tell().count("given up") == given_up:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_only_its_own_callback_counts(tracker: Tracker, tmp_path: Path) -> None:
    signing = sign_in_at(tmp_path, tracker.asking())

    async def strangers(url: str) -> None:
        port = int(url.split("redirect_uri=http%3A%2F%2F127.0.0.1%3A")[1].split("%2F")[0])
        state = url.split("&state=")[1].split("&")[0]
        for path in (
            "/callback?code=evil&state=guessed",
            f"/callback?code=evil&state={state}&state=x",
            "/callback?code=evil",
            f"/other?code=evil&state={state}",
            "/" + "x" * 9_000,
        ):
            assert (await get(port, path)).startswith("HTTP/1.1 404"), path
        assert "You are signed in" in await browse(tracker, url)
        assert (await get(port, f"/callback?code=late&state={state}")).startswith("HTTP/1.1 404")

    await sign_in(signing, strangers)
    assert await signing.token()

    async def declines(url: str) -> None:
        state = url.split("&state=")[1].split("&")[0]
        port = int(url.split("redirect_uri=http%3A%2F%2F127.0.0.1%3A")[1].split("%2F")[0])
        await get(port, f"/callback?error=access_denied&error_description=not%1b[2Jtoday&state={state}")

    with pytest.raises(PluginFailure, match=r"the sign-in was refused: not\\x1b\[2Jtoday"):
        await sign_in(signing, declines)
    # Another issuer's answer, which the browser was led to bring here.
    with pytest.raises(PluginFailure, match="iss mismatch"):
        await sign_in(signing, lambda url: browse(tracker, url, iss="https://evil.example.com"))


@pytest.mark.trio
async def test_a_callback_listens_for_one_sign_in() -> None:
    async with open_callback() as callback:
        port = int(callback.url.split(":")[2].split("/")[0])
        assert (await get(port, "/callback?code=x&state=")).startswith("HTTP/1.1 404")  # none has begun
    with pytest.raises(OSError, match="all attempts to connect"):
        await trio.open_tcp_stream("127.0.0.1", port)


@pytest.mark.trio
async def test_a_client_that_the_operator_registered(tracker: Tracker, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    known = SETTINGS._replace(client_id=KNOWN, client_secret_file=str(secret), issuer=f"https://{LOGIN}/")
    ask = tracker.asking()
    with socket.socket() as held:  # it does not listen: nobody else gets the port, and the callback may
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        tracker.tell(f"know {port}")
        signing = sign_in_at(tmp_path, ask, known._replace(callback_port=port))
        await sign_in(signing, lambda url: browse(tracker, url))
    tracker.tell("expire")
    remote = RemoteSource(known, RULE, ask, signing)
    assert (await remote.make(call("close", {"number": 1}))).is_ok
    assert tracker.tell() == ["exchanged", "refreshed"]  # and it was not asked to register anybody

    # The server names another authorization server than the operator: that one never sees the secret.
    tracker.asked.clear()
    elsewhere = known._replace(issuer="https://other.example.com")
    await sign_in(sign_in_at(tmp_path, ask, elsewhere), lambda url: browse(tracker, url))
    basic = base64.b64encode(f"{KNOWN}:{SECRET}".encode()).decode()
    sent = "".join(f"{each.headers}{each.body!r}" for each in tracker.asked)
    assert SECRET not in sent and basic not in sent and tracker.tell()[2] == "registered"


# --- hostile servers ----------------------------------------------------------------------------------------

RESOURCE = {"resource": URL, "authorization_servers": [f"https://{LOGIN}"]}
SERVER = {
    "issuer": f"https://{LOGIN}",
    "authorization_endpoint": f"https://{LOGIN}/authorize",
    "token_endpoint": f"https://{LOGIN}/token",
    "registration_endpoint": f"https://{LOGIN}/register",
    "response_types_supported": ["code"],
}
CLIENT = {
    "client_id": "c",
    "redirect_uris": ["http://127.0.0.1:1/callback"],
    "token_endpoint_auth_method": "none",
}
TOKEN = {"access_token": "good", "token_type": "bearer", "refresh_token": "more", "expires_in": 3600}


def hostile(answers: Mapping[str, Any]) -> tuple[Ask, list[str]]:
    """Servers that speak as they should, apart from these answers: by the end of the path."""
    usual: dict[str, Any] = {
        "/.well-known/oauth-protected-resource/mcp": RESOURCE,
        "/.well-known/oauth-authorization-server": SERVER,
        "/register": CLIENT,
        "/token": TOKEN,
    }
    asked: list[str] = []

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
        asked.append(request.url)
        path = "/" + request.url.split("/", 3)[3]
        if path == "/mcp":
            if "authorization" in dict(map(_low, request.headers)):
                return HttpsResponse(200, (), b"{}", request.url)
            return HttpsResponse(401, tuple(answers.get("challenge", ())), b"", request.url)
        found = {**usual, **answers}.get(path, 404)
        if isinstance(found, int):
            return HttpsResponse(found, (), b"", request.url)
        headers = (("Content-Type", "application/json"), ("Content-Encoding", "gzip"), ("Location", "/evil"))
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        return HttpsResponse(200, headers, body, request.url)

    return ask, asked


async def open_at_callback(url: str) -> None:
    state = url.split("&state=")[1].split("&")[0]
    port = int(url.split("redirect_uri=http%3A%2F%2F127.0.0.1%3A")[1].split("%2F")[0])
    await get(port, f"/callback?code=c&state={state}")


@pytest.mark.trio
async def test_servers_that_lead_elsewhere(tmp_path: Path) -> None:
    ask, asked = hostile({})
    signing = sign_in_at(tmp_path, ask)
    await sign_in(signing, open_at_callback)  # the control
    assert await signing.token() == "good"
    before = record_in(tmp_path).read()
    metadata = "/.well-known/oauth-authorization-server"
    odd = (("WWW-Authenticate", 'Bearer realm="\xe9"'), ("Content-Type", "\xff"))
    challenge = (("WWW-Authenticate", 'Bearer resource_metadata="https://evil.example.com/x"'),)
    evil = "https://evil.example.com"
    rows: dict[str, tuple[Mapping[str, Any], str]] = {
        "discovery": ({"challenge": challenge}, "the policy does not list the host evil.example.com:443"),
        "issuer": (
            {"/.well-known/oauth-protected-resource/mcp": {**RESOURCE, "authorization_servers": [evil]}},
            "the policy does not list the host evil.example.com:443",
        ),
        "characters of no header": ({"challenge": odd, "/register": 500}, "Registration failed: 500"),
        "an address": (
            {
                "/.well-known/oauth-protected-resource/mcp": {
                    **RESOURCE,
                    "authorization_servers": ["https://10.0.0.1"],
                }
            },
            "the policy does not list the host 10.0.0.1:443",
        ),
        "another resource": (
            {"/.well-known/oauth-protected-resource/mcp": {**RESOURCE, "resource": f"{evil}/mcp"}},
            "does not match expected",
        ),
        "another issuer's metadata": ({metadata: {**SERVER, "issuer": evil}}, "issuer mismatch"),
        "tokens": ({metadata: {**SERVER, "token_endpoint": f"{evil}/token"}}, "does not list the host evil"),
        "registration": (
            {metadata: {**SERVER, "registration_endpoint": f"{evil}/r"}},
            "does not list the host evil",
        ),
        "the browser": (
            {metadata: {**SERVER, "authorization_endpoint": f"{evil}/a"}},
            "does not list the host evil",
        ),
        "the browser without TLS": (
            {metadata: {**SERVER, "authorization_endpoint": f"http://{LOGIN}/a"}},
            "is not an https:// URL",
        ),
        "no token": ({"/token": {"token_type": "bearer"}}, "Invalid token response"),
        "a token that ends a line": (
            {"/token": {**TOKEN, "access_token": "x\r\nHost: y"}},
            "cannot be used|failed",
        ),
        "words for the terminal": ({"/token": 400, "/register": b'{"a": "\x1b[2J'}, "Invalid registration"),
        "nesting": ({"/register": b"[" * 100_000}, "the sign-in failed"),
    }
    for name, (answers, message) in rows.items():
        ask, asked = hostile(answers)
        with pytest.raises(PluginFailure, match=message) as caught:
            await sign_in(sign_in_at(tmp_path, ask), open_at_callback)
        assert "\x1b" not in str(caught.value), name
        assert not [url for url in asked if "evil" in url or "10.0.0.1" in url], name
        assert record_in(tmp_path).read() == before, name


@pytest.mark.trio
async def test_a_right_that_the_sign_in_was_not_for(tmp_path: Path) -> None:
    """The command says which, and a sign-in for it reaches a gateway that runs."""
    rows = {  # what the server says at first -> what the authorization server is asked for then
        (("WWW-Authenticate", 'Bearer scope="read", realm="x"'),): "read write",
        (("WWW-Authenticate", "Bearer scope=read"),): "read write",
        (("WWW-Authenticate", "Bearer"),): "read write",  # what the token has
        (): "write",
    }
    for number, (challenge, expected) in enumerate(rows.items()):
        home = tmp_path / str(number)
        answers = {"challenge": challenge, "/token": {**TOKEN, "scope": "read"} if challenge else TOKEN}
        usual, _ = hostile(answers)
        tokens, asked_for = ["good"], list[str]()

        async def ask(
            request: HttpsRequest, *more: Any, usual: Ask = usual, tokens: list[str] = tokens
        ) -> HttpsResponse:
            if b"tools/call" in (request.body or b""):
                used = dict(map(_low, request.headers))["authorization"].split()[1]
                if used != "more":
                    wants = 'Bearer error="insufficient_scope", scope="write"'
                    return HttpsResponse(403, (("WWW-Authenticate", wants),), b"", request.url)
            found = json.loads(request.body or b"{}") if request.url == URL else {}
            if "authorization" in dict(map(_low, request.headers)):
                result = {"protocolVersion": VERSION, "capabilities": {"tools": {}}, "content": []}
                answer = {"jsonrpc": "2.0", "id": found.get("id"), "result": result}
                return HttpsResponse(200, (), json.dumps(answer).encode(), request.url)
            answered = await usual(request)
            if request.url.endswith("/token"):
                body = json.dumps({**json.loads(answered.body), "access_token": tokens[-1]}).encode()
                answered = answered._replace(body=body)
            return answered

        async def open_link(url: str, asked_for: list[str] = asked_for) -> None:
            asked_for.append(dict(parse_qsl(urlsplit(url).query)).get("scope", ""))
            await open_at_callback(url)

        await sign_in(sign_in_at(home, ask), open_link)
        remote = RemoteSource(SETTINGS, RULE, ask, sign_in_at(home, ask))
        refused = await remote.make(call("close"))
        assert refused.error["message"] == "the server refuses what the sign-in was not for: write (403)"
        assert refused.error["hint"] == f"run: {LOGIN_COMMAND} --scope write"
        tokens.append("more")
        await sign_in(sign_in_at(home, ask), open_link, "write")
        assert set(asked_for[1].split()) == set(expected.split()), challenge
        assert (await remote.make(call("close"))).is_ok
    for header in ("Bearer", 'Bearer error="insufficient_scope", scope="a\x1b"', 'Bearer scope="write"'):
        assert wanted_scope((("WWW-Authenticate", header),)) == "", header


@pytest.mark.trio
async def test_who_signs_in_anew_or_out_is_no_longer_who_it_was(tmp_path: Path) -> None:
    """Also in a gateway that runs. A token that is renewed is the same person's, in the same session."""
    tokens, expires = ["first"], {"expires_in": 3600}
    sent: list[tuple[str, str, str]] = []

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
        token = {**TOKEN, **expires, "access_token": tokens[-1]}
        if request.url != URL or "authorization" not in dict(map(_low, request.headers)):
            return await hostile({"/token": token})[0](request)
        headers, asked = dict(map(_low, request.headers)), json.loads(request.body or b"")
        sent.append((asked["method"], headers["authorization"], headers.get("mcp-session-id", "")))
        result = {"protocolVersion": VERSION, "capabilities": {"tools": {}}, "content": []}
        answer = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode()
        return HttpsResponse(200, (("Mcp-Session-Id", f"of-{tokens[-1]}"),), answer, request.url)

    async def made() -> CallAnswer:
        sent.clear()
        return await remote.make(call("close"))

    await sign_in(sign_in_at(tmp_path, ask), open_at_callback)
    remote = RemoteSource(SETTINGS, RULE, ask, sign_in_at(tmp_path, ask))
    assert (await made()).is_ok and sent[-1] == ("tools/call", "Bearer first", "of-first")
    tokens.append("second")
    expires["expires_in"] = 1  # it is renewed before each call
    await sign_in(sign_in_at(tmp_path, ask), open_at_callback)
    assert (await made()).is_ok and sent[0][:2] == ("initialize", "Bearer second")
    assert sent[-1] == ("tools/call", "Bearer second", "of-second")
    tokens.append("renewed")
    assert (await made()).is_ok and sent == [("tools/call", "Bearer renewed", "of-second")]
    assert record_in(tmp_path).remove()
    ended = await made()
    assert (ended.error["code"], ended.error["hint"]) == ("policy_denied", f"run: {LOGIN_COMMAND}")
    assert not sent  # with a token


@pytest.mark.trio
async def test_a_server_that_greets_everybody(tmp_path: Path) -> None:
    usual, _ = hostile({})
    sessions = set()

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
        if b'"initialize"' in (request.body or b""):
            return HttpsResponse(200, (("Mcp-Session-Id", "s1"),), b"{}", request.url)
        if b'"tools/list"' in (request.body or b""):
            sessions.add(dict(map(_low, request.headers)).get("mcp-session-id"))
        return await usual(request)

    signing = sign_in_at(tmp_path, ask)
    await sign_in(signing, open_at_callback)
    assert await signing.token() == "good" and sessions == {"s1"}

    async def welcome(request: HttpsRequest, *_: Any) -> HttpsResponse:
        return HttpsResponse(200, (), b"{}", request.url)

    with pytest.raises(PluginFailure, match="it asks for no sign-in"):
        await sign_in(sign_in_at(tmp_path, welcome), open_at_callback)


@pytest.mark.trio
async def test_a_renewal_is_finished_without_its_client(tmp_path: Path) -> None:
    """The refresh token that it has used may be worth nothing any more."""
    await sign_in(sign_in_at(tmp_path, hostile({})[0]), open_at_callback)
    renews, _ = hostile({"/token": {**TOKEN, "access_token": "newer", "refresh_token": "next"}})
    has_come, may_answer = trio.Event(), trio.Event()

    async def ask(request: HttpsRequest, *_: Any) -> HttpsResponse:
        if request.url.endswith("/token"):
            has_come.set()
            await may_answer.wait()
        return await renews(request)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sign_in_at(tmp_path, ask).token, "good")
        await has_come.wait()
        nursery.cancel_scope.cancel()
        may_answer.set()
    kept = record_in(tmp_path).read()
    assert kept is not None
    assert (kept.token["access_token"], kept.token["refresh_token"]) == ("newer", "next")


@pytest.mark.trio
async def test_nobody_comes_back(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    ask, _ = hostile({})

    async def look_away(url: str) -> None:
        await trio.sleep_forever()

    with pytest.raises(PluginFailure, match="nobody signed in within 600 s"):
        await sign_in(sign_in_at(tmp_path, ask), look_away)


def test_who_gives_up_sees_no_traceback(tmp_path: Path) -> None:
    def interrupt(url: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sign_in(sign_in_at(tmp_path, hostile({})[0]), interrupt, "")


def test_records_that_are_not_used(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    with record.locked():
        record.write(Login({"client_id": "c"}, TOKEN, None))
    kept = next((tmp_path / ".config/runner/logins").glob("*/login.json"))
    assert record.read() is not None
    for name, url in (("other", URL), ("tracker", f"{URL}2")):
        assert record_in(tmp_path, name, url).read() is None
    elsewhere = record_in(tmp_path, "other")
    with elsewhere.locked():
        os.link(
            kept, next(each for each in kept.parent.parent.iterdir() if each != kept.parent) / "login.json"
        )
    with pytest.raises(ApprovalsUnusable, match="about another server than its name says"):
        elsewhere.read()
    kept.chmod(0o644)
    with pytest.raises(ApprovalsUnusable, match="others than its owner can read it"):
        record.read()
    kept.chmod(0o600)
    stolen = kept.rename(tmp_path / "stolen")
    kept.symlink_to(stolen)
    with pytest.raises(ApprovalsUnusable, match="is a link"):
        record.read()
    kept.unlink()
    kept.touch(mode=0o600)
    kept.write_text("{")
    with pytest.raises(ApprovalsUnusable, match=re.escape("is damaged")):
        record.read()
