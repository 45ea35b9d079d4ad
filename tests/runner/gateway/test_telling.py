"""What a gateway tells about plugins that lack something or fail: on stderr, to its client, for later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mcp_types as types
import pytest
import trio

from tests.conftest import Caller
from tests.runner.gateway.entries import called, names, on_stdio

Write = Callable[..., Path]
SECRET = "s3cr3t-value"

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

# Asks for a host that it may not reach, and ends when it is called with "end".
SERVER = """#!/usr/bin/python3 -I
import json, os, socket, sys
if sys.argv[1:]:
    sys.exit(f"\\x1b[31mno argument\\x1b[0m was expected: {os.environ['TOKEN']}")
for line in sys.stdin:
    asked = json.loads(line)
    result = {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}], "content": []}
    if asked["method"] == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "lookup", "version": "1"}
    if asked["method"] == "tools/call":
        try:
            socket.getaddrinfo("api.example.com", 443)
        except OSError as error:
            print(f"{error} for {os.environ['TOKEN']}", file=sys.stderr, flush=True)
        if "end" in asked["params"]["arguments"]:
            sys.exit(3)
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


class Heard:
    def __init__(self) -> None:
        self.logged: list[tuple[str, str | None, str]] = []
        self._more = trio.Event()

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logged.append((params.level, params.logger, str(params.data)))
        self._more.set()
        self._more = trio.Event()

    async def until(self, text: str) -> tuple[str, str | None, str]:
        while not (found := [each for each in self.logged if text in each[2]]):
            await self._more.wait()
        assert len(found) == 1, found
        return found[0]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
@pytest.mark.trio
async def test_a_client_is_told_and_it_is_kept(
    runner_as: Caller, plugin_dir: Path, write_file: Write, mode: str
) -> None:
    server = write_file(plugin_dir / "server", SERVER, 0o755)
    entry = {"command": str(server), "env": {"TOKEN": SECRET}}
    servers = {"lookup": entry, "broken": {**entry, "args": ["wrong"]}}
    file = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": servers}))
    runner_as.give(plugin_dir)
    heard = Heard()
    with (plugin_dir / "stderr").open("w") as errors:
        options = {"mode": mode, "logging_callback": heard.log, "log_level": "warning", "errlog": errors}
        async with on_stdio(runner_as, file, **options) as client:
            if mode == "legacy":
                await client.set_logging_level("warning")
            assert await names(client) == ["lookup__ask"]

            async def until(text: str) -> tuple[str, str | None, str]:
                while mode == "auto" and not any(text in each[2] for each in heard.logged):
                    await names(client)  # it has logs only beside an answer
                return await heard.until(text)

            failed = await until("broken: its tools are missing: crashed: ")
            assert failed[:2] == ("warning", "runner")
            level, _, text = await until("| ")
            assert level == "error" and "crashed: " in text
            mark = "broken: | \\x1b[31mno argument\\x1b[0m was expected: [secret]"
            assert mark in text.splitlines()
            await called(client, "lookup__ask")
            remedy = f"runner allow {file} --server lookup --net api.example.com:443"
            level, _, refused = await until("api.example.com")
            assert (level, refused.partition("; to let it reach that host: ")[2]) == ("warning", remedy)
            assert (await called(client, "lookup__ask", {"end": True}))[0]
            await until(
                "lookup: crashed: the plugin ended with status 3"
            )  # a client that goes now hears nothing
    told = (plugin_dir / "stderr").read_text()
    for line in (failed[2], mark, refused):
        assert f"runner gateway: {line}\n" in told
    assert SECRET not in told and not any(SECRET in data for _, _, data in heard.logged)
    host = write_file(runner_as.home / ".cursor/mcp.json", "")
    through = {"command": "runner", "args": ["gateway", "--config", str(file)]}
    host.write_text(json.dumps({"mcpServers": {"all": through}}))
    runner_as.give(host.parent)
    for shown in (file, host):
        done = runner_as("advice", shown, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        kept = {each["name"]: each["starts"][0]["lines"] for each in json.loads(done.stdout)["servers"]}
        assert refused.removeprefix("lookup: ") in kept["lookup"]
        assert "crashed: the plugin ended with status 3" in "".join(kept["lookup"])
        assert mark.removeprefix("broken: ") in kept["broken"] and SECRET not in done.stdout
