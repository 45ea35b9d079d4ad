"""Plugins that others wrote, through `runner exec`: unmodified, without a network, as root and as a user.

Only the pipe is tested here: what a host writes arrives, what the peer answers comes back.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller
from tests.peers import EVERY_SERVER, Peers

pytestmark = pytest.mark.usefixtures("nothing_left")

# An interpreter's start on a busy machine, with room.
_SECONDS = 60.0
LEGACY = "2025-11-25"
MODERN = "2026-07-28"


class Wire:
    """A host's end of a plugin's streams: JSON lines, each waited for."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._held = b""

    def send(self, method: str, params: Any = None, *, id: int | None = None) -> None:  # noqa: A002
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if id is not None:
            message["id"] = id
        if params is not None:
            message["params"] = params
        self.write(message)

    def write(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self._held:
            if not select.select([self.process.stdout], [], [], _SECONDS)[0]:
                raise TimeoutError(f"nothing after {self._held!r}")
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the plugin has closed its stdout after {self._held!r}: {self._said()}"
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def answer(self, id: int) -> dict[str, Any]:  # noqa: A002
        """The answer to one request; what comes before it is of no interest."""
        while True:
            message = self.read()
            if message.get("id") == id and "method" not in message:
                return message

    def result(self, method: str, params: Any = None, *, id: int = 7) -> Any:  # noqa: A002
        self.send(method, params, id=id)
        answer = self.answer(id)
        assert "result" in answer, answer
        return answer["result"]

    def leave(self) -> tuple[int, str]:
        """Close its stdin, as a host does that has no more to say; how it ended, and its stderr."""
        _, err = self.process.communicate(timeout=_SECONDS)
        return self.process.returncode, err.decode(errors="replace")

    def _said(self) -> str:
        return self.leave()[1]


@contextmanager
def running(caller: Caller, *args: str | Path) -> Iterator[Wire]:
    with caller.start("exec", *args) as process:
        try:
            yield Wire(process)
        finally:
            if process.poll() is None:
                process.terminate()


def initialize(wire: Wire) -> dict[str, Any]:
    hello = {
        "protocolVersion": LEGACY,
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    result: dict[str, Any] = wire.result("initialize", hello, id=1)
    wire.send("notifications/initialized")
    return result


def call(wire: Wire, name: str, arguments: Mapping[str, Any], *, id: int = 3) -> dict[str, Any]:  # noqa: A002
    result: dict[str, Any] = wire.result("tools/call", {"name": name, "arguments": arguments}, id=id)
    return result


def text(result: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in result["content"])


# --- MCP servers -------------------------------------------------------------------------------------------

# A tool of each, what to ask it, and what must occur in its answer.
TOOLS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "time": (
        "convert_time",
        {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
        "21:00",
    ),
    "sdk": ("echo", {"text": "grüße"}, "grüße"),
    "everything": ("echo", {"message": "grüße"}, "grüße"),
    "filesystem": ("list_allowed_directories", {}, "/tmp"),
    "memory": ("read_graph", {}, "entities"),
}


@pytest.mark.parametrize("name", EVERY_SERVER)
def test_a_server_answers_and_leaves_when_its_stdin_ends(
    runner_as: Caller, peers: Peers, plugin_dir: Path, name: str
) -> None:
    config = peers.mcp(plugin_dir, name)
    report = runner_as.home / "report.json"
    tool, arguments, expected = TOOLS[name]
    with running(runner_as, "--report", report, "--server", name, config) as wire:
        assert initialize(wire)["protocolVersion"] == LEGACY
        assert tool in [each["name"] for each in wire.result("tools/list", {}, id=2)["tools"]]
        result = call(wire, tool, arguments)
        assert not result.get("isError"), result
        assert expected in text(result)
        code, err = wire.leave()
    assert code == 0, err
    told = json.loads(report.read_text())
    assert told["grant"]["network"]["mode"] == "none"


@pytest.mark.parametrize("name", ["time", "sdk"])
def test_the_newer_protocol(runner_as: Caller, peers: Peers, plugin_dir: Path, name: str) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    tool, arguments, expected = TOOLS[name]
    with running(runner_as, "--server", name, peers.mcp(plugin_dir, name)) as wire:
        found = wire.result("server/discover", {"_meta": meta}, id=1)
        assert MODERN in found["supportedVersions"]
        params = {"name": tool, "arguments": arguments, "_meta": meta}
        assert expected in text(wire.result("tools/call", params, id=2))
        assert wire.leave()[0] == 0


def test_the_sdks_server_works_behind_exec(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    """Structured content, progress, log messages, a tool that fails, and questions to the client."""
    with running(runner_as, peers.mcp(plugin_dir, "sdk")) as wire:
        assert initialize(wire)["serverInfo"]["version"] == "1.2.3"
        assert call(wire, "add", {"a": 2, "b": 3})["structuredContent"] == {"total": 5, "parts": [2, 3]}
        failed = call(wire, "fail", {"reason": "on purpose"})
        assert failed["isError"] and "on purpose" in text(failed)

        params = {"name": "steps", "arguments": {"count": 3}, "_meta": {"progressToken": "t"}}
        wire.send("tools/call", params, id=4)
        seen: dict[str, list[Any]] = {"notifications/progress": [], "notifications/message": []}
        while "id" not in (message := wire.read()):
            seen[message["method"]].append(message["params"])
        assert text(message["result"]) == "3 steps"
        assert [each["progress"] for each in seen["notifications/progress"]] == [1, 2, 3]
        assert [each["data"] for each in seen["notifications/message"]] == [{"step": n} for n in (1, 2, 3)]

        wire.send("tools/call", {"name": "roots", "arguments": {}}, id=5)
        asked = wire.read()
        assert asked["method"] == "roots/list"
        error = {"code": -32601, "message": "no roots here"}
        wire.write({"jsonrpc": "2.0", "id": asked["id"], "error": error})
        assert text(wire.answer(5)["result"]) == "refused: no roots here"

        contents = wire.result("resources/read", {"uri": "memo://today"}, id=6)["contents"]
        assert contents[0]["text"] == "nothing"
        prompt = wire.result("prompts/get", {"name": "greet", "arguments": {"name": "you"}}, id=8)
        assert "hello to you" in prompt["messages"][0]["content"]["text"]
        assert wire.leave()[0] == 0


@pytest.mark.needs("npm")
def test_files_written_by_a_server_stay(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    """In the state directory, where the manifest asks for one: it outlives the process."""
    state = runner_as.home / "state"
    runner_as.home.chmod(0o755)
    config = peers.mcp(plugin_dir, "filesystem", state=str(state))
    kept = str(state / "note.txt")

    def ask(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with running(runner_as, "--state-dir", state, config) as wire:
            initialize(wire)
            result = call(wire, tool, arguments)
            assert wire.leave()[0] == 0
        return result

    assert not ask("write_file", {"path": kept, "content": "kept"}).get("isError")
    assert text(ask("read_text_file", {"path": kept})) == "kept"
    # The rest of the machine is not there, whatever the server would allow.
    assert ask("read_text_file", {"path": "/etc/shadow"})["isError"]


@pytest.mark.needs("npm")
def test_a_server_sees_no_variables_of_the_host(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    config = peers.mcp(plugin_dir, "everything")
    process = runner_as.start("exec", config, env={"SECRET_TOKEN": "hunter2"})
    with process:
        wire = Wire(process)
        initialize(wire)
        variables = json.loads(text(call(wire, "get-env", {})))
        assert wire.leave()[0] == 0
    assert "PATH" in variables
    assert "hunter2" not in json.dumps(variables)


# --- nexo --------------------------------------------------------------------------------------------------

ENTRY = {"id": "1", "agent_id": "a1", "content": "it rained"}


def invoke(wire: Wire, tool: str, args: Mapping[str, Any], *, id: int) -> None:  # noqa: A002
    params = {"plugin_id": "sdk", "tool_name": f"sdk_{tool}", "args": args, "agent_id": "a1"}
    wire.send("tool.invoke", params, id=id)


@contextmanager
def nexo_plugin(caller: Caller, peers: Peers, folder: Path) -> Iterator[Wire]:
    with running(caller, peers.nexo(folder)) as wire:
        hello = wire.result("initialize", {"nexo_version": "0.1.0"}, id=1)
        assert hello["manifest"]["plugin"]["id"] == "sdk"
        assert "sdk_echo" in [tool["name"] for tool in hello["tools"]]
        yield wire


def shut_down(wire: Wire) -> str:
    wire.send("shutdown", {"reason": "host requested"}, id=99)
    assert wire.answer(99)["result"] == {"ok": True}
    code, err = wire.leave()
    assert code == 0, err
    return err


def test_tools_of_the_nexo_sdk(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    with nexo_plugin(runner_as, peers, plugin_dir) as wire:
        invoke(wire, "echo", {"text": "grüße"}, id=2)
        assert wire.answer(2)["result"] == {"echo": {"text": "grüße"}}
        codes = {
            "not_found": -33401,
            "argument": -33402,
            "execution": -33403,
            "unavailable": -33404,
            "denied": -33405,
            "python": -33403,
        }
        for number, (kind, code) in enumerate(codes.items(), 10):
            invoke(wire, "fail", {"kind": kind}, id=number)
            assert wire.answer(number)["error"]["code"] == code, kind
        err = shut_down(wire)
    assert "echoing" in err and "goodbye" in err


def test_host_calls_of_the_nexo_sdk(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    with nexo_plugin(runner_as, peers, plugin_dir) as wire:
        invoke(wire, "recall", {"query": "weather"}, id=2)
        asked = wire.read()
        assert asked["method"] == "memory.recall"
        assert asked["params"] == {"agent_id": "a1", "query": "weather", "limit": 2}
        wire.write({"jsonrpc": "2.0", "id": asked["id"], "result": {"entries": [ENTRY]}})
        assert wire.answer(2)["result"] == ["it rained"]

        invoke(wire, "complete", {"text": "hi"}, id=3)
        asked = wire.read()
        assert asked["method"] == "llm.complete"
        error = {"code": -32603, "message": "llm not configured"}
        wire.write({"jsonrpc": "2.0", "id": asked["id"], "error": error})
        assert "llm not configured" in wire.answer(3)["error"]["message"]

        invoke(wire, "stream", {"text": "hi"}, id=4)
        asked = wire.read()
        assert asked["params"]["stream"] is True
        for chunk in ("one ", "two"):
            wire.send("llm.complete.delta", {"request_id": asked["id"], "chunk": chunk})
        wire.write({"jsonrpc": "2.0", "id": asked["id"], "result": {"finish_reason": "stop"}})
        assert wire.answer(4)["result"] == {"chunks": ["one ", "two"], "finish_reason": "stop"}
        shut_down(wire)


def test_events_of_the_nexo_sdk(runner_as: Caller, peers: Peers, plugin_dir: Path) -> None:
    with nexo_plugin(runner_as, peers, plugin_dir) as wire:
        event = {"topic": "plugin.outbound.memo", "source": "host", "payload": {"n": 1}}
        wire.send("broker.event", {"topic": "plugin.outbound.memo", "event": event})
        published = wire.read()
        assert published["method"] == "broker.publish"
        assert published["params"]["topic"] == "plugin.inbound.memo"
        assert published["params"]["event"]["payload"]["payload"] == {"n": 1}
        shut_down(wire)


def test_the_nexo_sdk_finishes_its_work_before_it_leaves(
    runner_as: Caller, peers: Peers, plugin_dir: Path
) -> None:
    with nexo_plugin(runner_as, peers, plugin_dir) as wire:
        invoke(wire, "linger", {}, id=2)
        assert wire.read()["params"]["event"]["payload"] == {"state": "begun"}
        assert wire.read()["method"] == "memory.recall"
        wire.send("shutdown", {"reason": "host requested"}, id=3)
        assert wire.read()["params"]["event"]["payload"] == {"state": "ended"}
        assert wire.read() == {"jsonrpc": "2.0", "id": 2, "result": {"ended": "RpcTransportError"}}
        assert wire.read() == {"jsonrpc": "2.0", "id": 3, "result": {"ok": True}}
        assert wire.leave()[0] == 0
