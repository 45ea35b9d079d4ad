"""Plugins written by others, used by a host in the cage, without a network.

A plugin on the nexoai SDK and a server on the official MCP SDK through the library, published servers through
`runner call` and `runner tools`, and the other way round: the official SDK's client through `runner exec`.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import trio
from mcp import Client, StdioServerParameters, stdio_client
from pydantic import FileUrl

from runner import Notice, OpenPlugin, PluginError, PluginFailure, Progress, Services, open_plugin
from runner.outcome import EXIT
from runner.protocol.host_services import Completion
from tests.conftest import ROOT, SYSTEM_PATH, Caller
from tests.peers import EVERY_SERVER, Peers
from tests.runner.launch.test_report import faults
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

# Far more than any test here takes, even on a busy machine.
SECONDS = 120.0
ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
LEGACY, MODERN = "2025-11-25", "2026-07-28"


def policy(folder: Path, *host: str) -> Path:
    """The default policy with other host capabilities. It is not in the plugin's folder, which others may be
    able to write to: a policy must not be writable by others."""
    text = (ROOT / "policies/default.toml").read_text()
    text, count = re.subn(r"(?m)^host = \[.*$", f"host = {json.dumps(host)}", text)
    assert count == 1
    path = folder / "policy.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


class Events:
    """Collects a plugin's events, and waits for them."""

    def __init__(self) -> None:
        self.events: list[Notice | Progress] = []
        self._more = trio.Event()

    async def listen(self, plugin: OpenPlugin) -> None:
        async for event in plugin.events():
            self.events.append(event)
            self._more.set()
            self._more = trio.Event()

    def values(self, kind: str) -> list[Any]:
        return [event.value for event in self.events if isinstance(event, Notice) and event.kind == kind]

    async def until(self, kind: str, count: int = 1) -> list[Any]:
        while len(self.values(kind)) < count:
            await self._more.wait()
        return self.values(kind)


@asynccontextmanager
async def opened(manifest: Path, **more: Any) -> AsyncIterator[tuple[OpenPlugin, Events]]:
    events = Events()
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery, open_plugin(manifest, environ=ENVIRON, **more) as plugin:
            nursery.start_soon(events.listen, plugin)
            yield plugin, events
    # By now all events have been read.
    report = plugin.report
    assert report is not None
    assert not faults(report)
    assert report["grant"]["network"]["mode"] == "none"


async def refusal(asked: Awaitable[Any]) -> PluginError:
    with pytest.raises(PluginError) as caught:
        await asked
    return caught.value


# --- nexo: the host --------------------------------------------------------------------------------------


class Memory:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.keeps_waiting = trio.Event()

    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        self.asked.append((agent_id, query, limit))
        if query == "linger":
            self.keeps_waiting.set()
            await trio.sleep_forever()
        texts = ("it rained", "it snowed", "one too many")
        return [{"id": str(n), "agent_id": agent_id, "content": text} for n, text in enumerate(texts)]


class Model:
    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    async def complete(
        self, request: Mapping[str, Any], delta: Callable[[str], Awaitable[None]] | None
    ) -> Completion:
        self.asked.append(request)
        if delta is None:
            return Completion("grüße", "length", 3, 1)
        for piece in ("one ", "two ", "drei"):
            await delta(piece)
        return Completion("")


class Broker:
    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self._more = trio.Event()

    async def publish(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self._more.set()
        self._more = trio.Event()

    async def until(self, count: int) -> list[Any]:
        """Wait for `count` events and return their payloads."""
        while len(self.events) < count:
            await self._more.wait()
        return [event["payload"] for event in self.events]


class Host:
    def __init__(self) -> None:
        self.memory, self.model, self.broker = Memory(), Model(), Broker()
        self.services = Services(memory=self.memory, llm=self.model, broker=self.broker)


# The SDK's exceptions -> the code on the wire, and the kind that the host sees.
REFUSALS = {
    "not_found": ("-33401", "tool_not_found"),
    "argument": ("-33402", "invalid_arguments"),
    "execution": ("-33403", "execution_failed"),
    "unavailable": ("-33404", "unavailable"),
    "denied": ("-33405", "denied"),
    "python": ("-33403", "execution_failed"),
}


@pytest.mark.trio
async def test_a_plugin_on_the_nexo_sdk(peers: Peers, plugin_dir: Path, sessions: None) -> None:
    """Tools, events in both directions and requests to the host, in one session."""
    host = Host()
    async with opened(peers.nexo(plugin_dir), services=host.services) as (plugin, events):
        identity = plugin.identity
        assert (identity.id, identity.version) == ("sdk", "1.2.3")
        listed = {tool["name"]: tool for tool in await plugin.list()}
        assert set(listed) == set(identity.tools)
        assert listed["sdk_echo"]["input_schema"]["required"] == ["text"]

        # Tools.
        assert await plugin.call("sdk_echo", {"text": "grüße"}) == {"echo": {"text": "grüße"}}
        for kind, expected in REFUSALS.items():
            error = await refusal(plugin.call("sdk_fail", {"kind": kind}))
            assert (error.code, error.kind) == expected, kind
        wrong = await refusal(plugin.call("sdk_echo", {"text": 7}))
        assert (wrong.code, wrong.kind) == ("-33402", "invalid_arguments")
        assert "text" in wrong.message
        with pytest.raises(PluginFailure) as nowhere:
            await plugin.call("sdk_ech", {})
        assert nowhere.value.outcome.code == "tool_not_exposed"
        assert "sdk_echo" in nowhere.value.outcome.hint

        # Events.
        await plugin.notify("broker.event", {"topic": "news.today", "payload": {"n": 1}})
        await plugin.notify("broker.event", {"topic": "plugin.outbound.memo", "payload": {"n": 2}})
        await host.broker.until(2)
        unsubscribed = await refusal(plugin.notify("broker.event", {"topic": "secret.today", "payload": {}}))
        assert unsubscribed.kind == "not_subscribed"
        published = {"topic": "seen.it", "inner": "seen.else", "payload": {"n": 3}}
        assert await plugin.call("sdk_publish", published) == {"published": "seen.it"}
        await host.broker.until(3)
        await plugin.call("sdk_publish", {"topic": "secret.today"})
        assert (await events.until("dropped"))[0]["reason"] == "not_allowed"

        # Its requests to the host.
        assert await plugin.call("sdk_recall", {"query": "weather"}) == ["it rained", "it snowed"]
        assert host.memory.asked == [("a1", "weather", 2)]
        complete = await plugin.call("sdk_complete", {"text": "hello"})
        assert complete == {"content": "grüße", "finish_reason": "length"}
        stream = await plugin.call("sdk_stream", {"text": "hello"})
        assert stream == {"chunks": ["one ", "two ", "drei"], "finish_reason": "stop"}
        for request, streams in zip(host.model.asked, (False, True), strict=True):
            assert (request["provider"], request["model"], request["max_tokens"]) == ("p", "m", 8)
            assert request["messages"] == [{"role": "user", "content": "hello"}]
            assert request["stream"] is streams

    by_payload = {json.dumps(event["payload"]): event for event in host.broker.events}
    payloads: tuple[Any, ...] = (
        {"topic": "news.today", "source": "host", "payload": {"n": 1}},
        {"topic": "plugin.outbound.memo", "source": "host", "payload": {"n": 2}},
        {"n": 3},
    )
    for topic, payload in zip(
        ("plugin.inbound.memo", "plugin.inbound.memo", "seen.it"), payloads, strict=True
    ):
        event = by_payload.pop(json.dumps(payload))
        assert (event["topic"], event["source"]) == (topic, "sdk")
        assert uuid.UUID(event["id"]).version == 4
        assert abs(datetime.now(UTC) - datetime.fromisoformat(event["timestamp"])).total_seconds() < SECONDS
        assert event in events.values("published")
    assert not by_payload
    said = plugin.report
    assert said is not None and said["outcome"]["code"] == "ok"
    session = said["session"]
    assert session["host_calls"]["served"] == {"broker.publish": 3, "memory.recall": 1, "llm.complete": 2}
    assert session["host_calls"]["refused"] == {}
    assert session["counters"]["dropped_not_allowed"] == 1
    assert (session["forced"], session["farewell_error"]) == (False, "")
    assert "echoing" in plugin.stderr and "goodbye" in plugin.stderr


@pytest.mark.trio
@one_case("offered", [True, False])
async def test_the_nexo_sdk_sees_a_denied_service_as_not_configured(
    peers: Peers, plugin_dir: Path, tmp_path: Path, sessions: None, offered: bool
) -> None:
    """The plugin gets the same error whether the policy denies a service or the host does not offer it."""
    host = Host()
    chosen = {"services": host.services, "policy": policy(tmp_path)} if offered else {}
    async with opened(peers.nexo(plugin_dir), **chosen) as (plugin, events):
        for tool, service in {"recall": "memory", "complete": "llm", "stream": "llm"}.items():
            error = await refusal(plugin.call(f"sdk_{tool}", {}))
            assert error.code == "-33403"
            # The SDK's text for an error reply.
            assert "RpcServerError" in error.message and "-32603" in error.message, error.message
            assert f"{service} not configured" in error.message
        await plugin.call("sdk_publish", {"topic": "seen.it", "payload": {}})
        if offered:
            assert (await events.until("dropped"))[0]["reason"] == "broker_error"
        else:  # the event still reaches listeners
            assert (await events.until("published"))[0]["topic"] == "seen.it"
        assert await plugin.call("sdk_echo", {"text": "still here"}) == {"echo": {"text": "still here"}}
    assert (host.memory.asked, host.model.asked, host.broker.events) == ([], [], [])
    assert plugin.report is not None
    host_calls = plugin.report["session"]["host_calls"]
    assert host_calls["served"] == {}
    assert host_calls["refused"] == {"memory.recall": 1, "llm.complete": 2, "broker.publish": 1}


async def try_call(answers: list[Any], plugin: OpenPlugin, *args: Any) -> None:
    try:
        answers.append(await plugin.call(*args))
    except PluginFailure as failure:
        answers.append(failure.outcome)


@pytest.mark.trio
async def test_the_nexo_sdk_finishes_its_work_before_it_exits(
    peers: Peers, plugin_dir: Path, sessions: None
) -> None:
    """A tool is running when the host shuts down. Its later events and its answer still arrive."""
    host, answers = Host(), list[Any]()
    manifest = peers.nexo(plugin_dir)
    async with trio.open_nursery() as nursery, opened(manifest, services=host.services) as (plugin, _):
        # Longer than the time to exit after the answer to shutdown.
        nursery.start_soon(try_call, answers, plugin, "sdk_linger", {"seconds": 2.0})
        await host.memory.keeps_waiting.wait()
        assert await host.broker.until(1) == [{"state": "begun"}]
        assert answers == []
    assert [event["payload"]["state"] for event in host.broker.events] == ["begun", "ended"]
    assert answers == [{"ended": "RpcTransportError"}]
    assert plugin.report is not None
    session = plugin.report["session"]
    assert (session["forced"], session["farewell_error"]) == (False, "")
    assert session["calls"] == {"ok": 1, "refused": 0, "failed": 0}
    assert "goodbye" in plugin.stderr  # printed after all work is done, before the answer to shutdown


@pytest.mark.trio
async def test_a_plugin_on_the_nexo_sdk_that_never_finishes_is_killed(
    peers: Peers, plugin_dir: Path, sessions: None
) -> None:
    host, answers = Host(), list[Any]()
    manifest = peers.nexo(plugin_dir)
    async with trio.open_nursery() as nursery, opened(manifest, services=host.services) as (plugin, _):
        nursery.start_soon(try_call, answers, plugin, "sdk_linger", {"seconds": 3600})
        await host.memory.keeps_waiting.wait()
    [outcome] = answers
    assert (outcome.code, outcome.phase, outcome.cause) == ("cancelled", "call", "closed")
    assert plugin.report is not None
    session = plugin.report["session"]
    assert session["forced"] is True
    assert session["calls"] == {"ok": 0, "refused": 0, "failed": 1}
    assert "goodbye" not in plugin.stderr


def test_the_nexo_sdk_on_the_command_line(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    """The command line offers no host services."""
    manifest = peers.nexo(plugin_dir)
    done = runner_as("call", "--input", '{"text": "grüße"}', manifest, "sdk_echo")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"echo": {"text": "grüße"}}), done.stderr
    refused = runner_as("call", "--input", "{}", manifest, "sdk_recall")
    assert (refused.returncode, refused.stdout) == (EXIT["plugin_error"], "")
    assert "memory not configured" in refused.stderr


# --- MCP: a server on the official SDK --------------------------------------------------------------------


class Places:
    async def roots(self) -> Sequence[Mapping[str, Any]]:
        return [{"uri": "file:///data", "name": "data"}]


class Sampler:
    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    async def sample(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(request)
        return {"role": "assistant", "content": {"type": "text", "text": "blue"}, "model": "m"}


ERAS = {"modern": MODERN, "legacy": LEGACY}


def sdk_server(peers: Peers, folder: Path, era: str) -> Path:
    """The SDK speaks both eras of the protocol. The runner asks for the newer one first."""
    path = folder / "mcp.json"
    entry = peers.server("sdk", folder)
    entry["args"] += ["legacy"] if era == "legacy" else []
    path.write_text(json.dumps({"mcpServers": {"sdk": entry}}))
    path.chmod(0o644)
    return path


def text(result: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in result["content"])


@pytest.mark.trio
@one_case("era", ERAS)
async def test_a_server_on_the_mcp_sdk(peers: Peers, plugin_dir: Path, sessions: None, era: str) -> None:
    """Everything a server can offer, in one session. A cancelled call does not end it."""
    async with opened(sdk_server(peers, plugin_dir, era)) as (plugin, events):
        identity = plugin.identity
        assert (identity.id, identity.title, identity.version) == ("sdk", "sdk", "1.2.3")
        assert identity.protocol == ERAS[era]
        assert identity.instructions == "Ask it anything small."

        tools = {tool["name"]: tool for tool in await plugin.list()}
        assert set(tools["add"]["outputSchema"]["properties"]) == {"total", "parts"}
        added = await plugin.call("add", {"a": 2, "b": 3})
        assert added["structuredContent"] == {"total": 5, "parts": [2, 3]}
        assert text(await plugin.call("echo", {"text": "grüße"})) == "grüße"
        failed = await refusal(plugin.call("fail", {"reason": "on purpose"}))
        assert (failed.code, failed.kind) == ("isError", "tool_error")
        assert "on purpose" in failed.message
        wrong = await refusal(plugin.call("add", {"a": "x", "b": 3}))
        assert wrong.code == "isError"
        with pytest.raises(PluginFailure) as nowhere:
            await plugin.call("ad", {})
        assert nowhere.value.outcome.code == "tool_not_exposed"

        steps: list[Mapping[str, Any]] = []
        assert text(await plugin.call("steps", {"count": 3}, on_progress=steps.append)) == "3 steps"
        assert steps == [{"progress": n, "total": 3, "message": f"step {n}"} for n in (1, 2, 3)]
        logged = await events.until("log", 3)
        assert [entry["data"] for entry in logged] == [{"step": n} for n in (1, 2, 3)]
        assert [entry["level"] for entry in logged] == ["info"] * 3

        assert [entry["uri"] for entry in await plugin.list("resources")] == ["memo://today"]
        templates = await plugin.list("resource_templates")
        assert [entry["uriTemplate"] for entry in templates] == ["memo://{day}"]
        for uri, content in {"memo://today": "nothing", "memo://monday": "nothing on monday"}.items():
            read = await plugin.call(uri, kind="resource")
            assert read["contents"][0]["text"] == content
        assert (await refusal(plugin.call("note://today", kind="resource"))).data == {"uri": "note://today"}
        [prompt] = await plugin.list("prompts")
        assert (prompt["name"], prompt["arguments"][0]["name"]) == ("greet", "name")
        greeting = await plugin.call("greet", {"name": "you"}, kind="prompt")
        assert greeting["messages"][0]["content"]["text"] == "Say hello to you."
        assert await plugin.call("ping", kind="method") == {}

        async with trio.open_nursery() as nursery:
            begun = trio.Event()

            async def wait() -> None:
                await plugin.call("wait", {"seconds": 3600}, on_progress=lambda _: begun.set())
                raise AssertionError("it has waited an hour")

            nursery.start_soon(wait)
            await begun.wait()
            nursery.cancel_scope.cancel()
        # The interrupted handler recorded this.
        assert text(await plugin.call("cancelled")) == "cancelled"
        assert text(await plugin.call("echo", {"text": "still here"})) == "still here"
    assert plugin.report is not None
    session = plugin.report["session"]
    assert session["identity"] == {"id": "sdk", "version": "1.2.3", "protocol": ERAS[era]}
    assert session["forced"] is False
    # A server that starts slowly was asked in both ways, and answers the second question late.
    assert session["counters"].pop("late") <= 1
    assert {name: count for name, count in session["counters"].items() if count} == {}


# The server's tools that send requests to the client, by era.
ASKING = {"modern": ("input_roots", "input_sample"), "legacy": ("roots", "sample")}


@pytest.mark.trio
@one_case("era", ERAS)
async def test_requests_of_a_server_are_refused_by_default(
    peers: Peers, plugin_dir: Path, sessions: None, era: str
) -> None:
    """The host offers the services, but the policy does not allow them."""
    sampler = Sampler()
    services = Services(roots=Places(), sampling=sampler)
    words = ("Roots not supported", "User rejected sampling request")
    async with opened(sdk_server(peers, plugin_dir, era), services=services) as (plugin, _):
        for tool, given, word in zip(ASKING[era], ({}, {"text": "a colour?"}), words, strict=True):
            if era == "legacy":  # the tool call continues
                assert text(await plugin.call(tool, given)) == f"refused: {word}"
                continue
            with pytest.raises(PluginFailure) as caught:
                await plugin.call(tool, given)
            assert caught.value.outcome.code == "capability_not_allowed"
            assert word in caught.value.outcome.message
        assert text(await plugin.call("echo", {"text": "still here"})) == "still here"
    assert sampler.asked == []
    assert plugin.report is not None
    refused = {"roots/list": 1, "sampling/createMessage": 1}
    assert plugin.report["session"]["host_calls"] == {"served": {}, "refused": refused, "busy": {}}


@pytest.mark.trio
@one_case("era", ERAS)
async def test_requests_of_a_server_are_answered_if_policy_and_host_allow(
    peers: Peers, plugin_dir: Path, tmp_path: Path, sessions: None, era: str
) -> None:
    sampler = Sampler()
    services = Services(roots=Places(), sampling=sampler)
    chosen = policy(tmp_path, "roots/list", "sampling/*")
    async with opened(sdk_server(peers, plugin_dir, era), services=services, policy=chosen) as (plugin, _):
        roots, sample = ASKING[era]
        assert "file:///data" in text(await plugin.call(roots))
        assert "blue" in text(await plugin.call(sample, {"text": "a colour?"}))
    [request] = sampler.asked
    assert request["messages"][0]["content"]["text"] == "a colour?"
    assert plugin.report is not None
    served = {"roots/list": 1, "sampling/createMessage": 1}
    assert plugin.report["session"]["host_calls"] == {"served": served, "refused": {}, "busy": {}}


class Form:
    async def elicit(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        assert "name" in request["requestedSchema"]["properties"]
        return {"action": "accept", "content": {"name": "Ada"}}


@pytest.mark.trio
@pytest.mark.needs("npm")
async def test_a_published_server_sends_every_kind_of_request(
    peers: Peers, plugin_dir: Path, tmp_path: Path, sessions: None
) -> None:
    """The server's own results show that it understood our replies."""
    services = Services(roots=Places(), sampling=Sampler(), elicitation=Form())
    chosen = policy(tmp_path, "roots/list", "sampling/createMessage", "elicitation/create")
    config = peers.mcp(plugin_dir, "everything")
    async with opened(config, services=services, policy=chosen) as (plugin, _):
        assert plugin.identity.protocol == LEGACY
        # It offers these tools only to clients with the capabilities.
        assert "file:///data" in text(await plugin.call("get-roots-list"))
        sampled = await plugin.call("trigger-sampling-request", {"prompt": "a colour?", "maxTokens": 10})
        assert "blue" in text(sampled)
        assert "Name: Ada" in text(await plugin.call("trigger-elicitation-request"))
        steps: list[Mapping[str, Any]] = []
        given = {"duration": 0.2, "steps": 2}
        await plugin.call("trigger-long-running-operation", given, on_progress=steps.append)
        assert steps == [{"progress": n, "total": 2} for n in (1, 2)]
    assert plugin.report is not None
    host_calls = plugin.report["session"]["host_calls"]
    assert set(host_calls["served"]) == {"roots/list", "sampling/createMessage", "elicitation/create"}
    assert host_calls["refused"] == {}


# --- MCP: published servers, on the command line -----------------------------------------------------------

ENTITY = {"name": "rain", "entityType": "weather", "observations": ["wet"]}

# Server -> calls, each in a process of its own, and text that must occur in the result.
CALLS: Mapping[str, Sequence[tuple[str, Mapping[str, Any], str]]] = {
    "time": [
        (
            "convert_time",
            {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
            "21:00",
        )
    ],
    "sdk": [("add", {"a": 2, "b": 3}, '"structuredContent": {"total": 5, "parts": [2, 3]}')],
    "everything": [
        ("get-structured-content", {"location": "Chicago"}, '"structuredContent": {"temperature": 36'),
    ],
    "filesystem": [
        ("write_file", {"path": "{state}/note.txt", "content": "kept"}, "Successfully wrote"),
        ("read_text_file", {"path": "{state}/note.txt"}, "kept"),
    ],
    "memory": [("create_entities", {"entities": [ENTITY]}, "rain"), ("read_graph", {}, "rain")],
}


@pytest.mark.parametrize("name", EVERY_SERVER)
def test_a_published_server_on_the_command_line(
    runner_as: Caller, peers: Peers, plugin_dir: Path, name: str
) -> None:
    runner_as.home.chmod(0o755)
    state, report = runner_as.home / "state", runner_as.home / "report.json"
    config = peers.mcp(plugin_dir, name, state=str(state))
    options = ("--state-dir", state, "--report", report, "--server", name)
    listed = runner_as("tools", "--json", *options, config)
    assert listed.returncode == 0, listed.stderr
    tools = {tool["name"]: tool for tool in json.loads(listed.stdout)["tools"]}
    for tool, given, expected in CALLS[name]:
        assert tools[tool]["inputSchema"]["type"] == "object"
        word = json.dumps(given).replace("{state}", str(state))
        done = runner_as("call", *options, "--input", word, config, tool)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert not result.get("isError")
        assert expected in json.dumps(result, ensure_ascii=False)
        document = json.loads(report.read_text())
        assert not faults(document)
        assert document["grant"]["network"]["mode"] == "none"
        assert document["session"]["forced"] is False


@pytest.mark.needs("npm")
def test_a_published_server_sees_no_files_but_its_own(
    runner_as: Caller, peers: Peers, plugin_dir: Path
) -> None:
    """Its arguments allow it to read everything. The cage does not."""
    config = peers.mcp(plugin_dir, "filesystem")
    entry = json.loads(config.read_text())
    entry["mcpServers"]["filesystem"]["args"][-1] = "/"
    config.write_text(json.dumps(entry))

    def listing(folder: Path) -> subprocess.CompletedProcess[str]:
        return runner_as("call", "--input", json.dumps({"path": str(folder)}), config, "list_directory")

    hidden = listing(runner_as.home)
    assert hidden.returncode == EXIT["plugin_error"]
    assert "isError" in hidden.stderr and "ENOENT" in hidden.stderr
    shown = listing(Path("/usr"))
    assert "[DIR] share" in shown.stdout, shown.stderr


# --- MCP: the official client ------------------------------------------------------------------------------


class Callbacks:
    """Progress and log messages that the client received. They arrive asynchronously, so tests wait."""

    def __init__(self) -> None:
        self._progress, self.progress = trio.open_memory_channel[float](math.inf)
        self._logged, self.logged = trio.open_memory_channel[Any](math.inf)

    async def step(self, progress: float, total: float | None, message: str | None) -> None:
        self._progress.send_nowait(progress)

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self._logged.send_nowait(params.data)


async def next_of(channel: trio.MemoryReceiveChannel[Any], count: int) -> list[Any]:
    return [await channel.receive() for _ in range(count)]


@asynccontextmanager
async def client(
    caller: Caller, *args: str | Path, errors: Path, **more: Any
) -> AsyncIterator[tuple[Client, Callbacks]]:
    """The SDK's own client, with `runner exec ARGS` as its server command."""
    command, *rest = caller.command("exec", *args)
    callbacks = Callbacks()
    with trio.fail_after(SECONDS), errors.open("w") as errlog:
        server = StdioServerParameters(command=command, args=rest, env=dict(caller.environ), cwd="/")
        transport = stdio_client(server, errlog)
        async with Client(transport, logging_callback=callbacks.log, log_level="info", **more) as connected:
            yield connected, callbacks


def first_text(result: types.CallToolResult) -> str:
    [part] = result.content
    assert isinstance(part, types.TextContent)
    return part.text


@pytest.mark.trio
@pytest.mark.parametrize(
    ("mode", "inspect"),
    [
        ("legacy", ()),
        ("auto", ("--inspect",)),
        pytest.param("legacy", ("--inspect",), marks=pytest.mark.broad),
        pytest.param("auto", (), marks=pytest.mark.broad),
    ],
)
async def test_the_official_client_works_through_runner_exec(
    runner_as: Caller, peers: Peers, plugin_dir: Path, tmp_path: Path, mode: str, inspect: tuple[str, ...]
) -> None:
    report, errors = runner_as.home / "report.json", tmp_path / "stderr"
    config = peers.mcp(plugin_dir, "sdk")

    async def roots(context: object) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=FileUrl("file:///data"))])

    args: list[str | Path] = [*inspect, "--report", report, "--server", "sdk", config]
    connection = client(runner_as, *args, errors=errors, mode=mode, list_roots_callback=roots)
    async with connection as (peer, callbacks):
        assert peer.protocol_version == (LEGACY if mode == "legacy" else MODERN)
        listed = {tool.name: tool for tool in (await peer.list_tools()).tools}
        assert listed["add"].output_schema is not None
        added = await peer.call_tool("add", {"a": 2, "b": 3})
        assert added.structured_content == {"total": 5, "parts": [2, 3]}
        done = await peer.call_tool("steps", {"count": 3}, progress_callback=callbacks.step)
        assert first_text(done) == "3 steps"
        assert await next_of(callbacks.progress, 3) == [1, 2, 3]
        assert await next_of(callbacks.logged, 3) == [{"step": n} for n in (1, 2, 3)]
        asking = "roots" if mode == "legacy" else "input_roots"
        assert "file:///data" in first_text(await peer.call_tool(asking))
        [content] = (await peer.read_resource("memo://today")).contents
        assert isinstance(content, types.TextResourceContents) and content.text == "nothing"

        async with trio.open_nursery() as nursery:

            async def begun(progress: float, total: float | None, message: str | None) -> None:
                nursery.cancel_scope.cancel()

            nursery.start_soon(partial(peer.call_tool, "wait", {"seconds": 3600}, progress_callback=begun))
        assert first_text(await peer.call_tool("cancelled")) == "cancelled"
        big = "ü" * (1 << 20)
        assert first_text(await peer.call_tool("echo", {"text": big})) == big
    reported = json.loads(report.read_text())
    assert not faults(reported)
    assert reported["outcome"]["code"] == "ok", reported["outcome"]
    assert errors.read_text() == ""


@pytest.mark.trio
@pytest.mark.needs("npm", "user")
@one_case("inspect", [(), ("--inspect",)], ids=["plain", "inspect"])
async def test_the_official_client_and_a_server_of_the_other_sdk(
    runner_as_user: Caller, peers: Peers, plugin_dir: Path, tmp_path: Path, inspect: tuple[str, ...]
) -> None:
    """The server runs on node and speaks the older era. The client asks for the newer one first."""
    report, errors = runner_as_user.home / "report.json", tmp_path / "stderr"
    config = peers.mcp(plugin_dir, "everything")
    args: list[str | Path] = [*inspect, "--report", report, config]
    async with client(runner_as_user, *args, errors=errors) as (peer, callbacks):
        assert peer.protocol_version == LEGACY
        assert "echo" in [tool.name for tool in (await peer.list_tools()).tools]
        assert first_text(await peer.call_tool("echo", {"message": "grüße"})) == "Echo: grüße"
        given = {"duration": 0.2, "steps": 2}
        await peer.call_tool("trigger-long-running-operation", given, progress_callback=callbacks.step)
        assert await next_of(callbacks.progress, 2) == [1, 2]
    reported = json.loads(report.read_text())
    assert reported["outcome"]["code"] == "ok", reported["outcome"]
