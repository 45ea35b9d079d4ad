"""A gateway for tests, and the official client that uses it: on stdio, or at a daemon's door."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import trio
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.conftest import ROOT, Caller
from tests.runner.serve.shelf import put_example

SECONDS = 120.0
# What each contract's example answers, by the name that the gateway gives the tool.
CALLS: Mapping[str, tuple[dict[str, Any], str]] = {
    "ainb1__ainb1": ({"argv": ["hello", "you"]}, "Hello, you!\n"),
    "kaged1__kaged1-greet-7dd3340ed059": ({"name": "you"}, '{"greeting": "Hello, you!"}'),
    "mcp1__greet": ({"name": "you"}, "Hello, you!"),
    "nexo1__nexo1_greet": ({"name": "you"}, '{"greeting": "Hello, you!"}'),
    "rune1__greet": ({"name": "you"}, '{"greeting": "Hello, you!"}'),
    "acme-vai1-bb1d3791dada__reader": ({"text": "x"}, "reader was called"),
}


def put_examples(folder: Path) -> None:
    """An example of each contract."""
    for contract in ("ainb", "kaged", "mcp", "nexo", "rune", "vai"):
        put_example(contract, f"{contract}1", folder)


def put_servers(folder: Path, servers: Mapping[str, tuple[str, ...]]) -> None:
    """MCP servers, each with its program and the words for it. The program lies in this folder."""
    entries = {
        name: {"command": f"./{program}", "args": list(words)} for name, (program, *words) in servers.items()
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": entries}))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)


def bare(folder: Path) -> str:
    """The server without an SDK, in this folder."""
    (folder / "bare.py").write_bytes((ROOT / "tests/plugins/mcp_bare/server.py").read_bytes())
    return "bare.py"


@asynccontextmanager
async def on_stdio(caller: Caller, config: Path, *options: str, **client: Any) -> AsyncIterator[Client]:
    """`client`: arguments of the client, and errlog: a file for the gateway's stderr."""
    errlog = client.pop("errlog", sys.stderr)
    command, *args = caller.command("gateway", "--config", config, "--list-wait", "100s", *options)
    parameters = StdioServerParameters(command=command, args=args, env=dict(caller.environ), cwd="/")
    with trio.fail_after(SECONDS):
        async with Client(stdio_client(parameters, errlog), **client) as opened:
            yield opened


@asynccontextmanager
async def at_door(
    socket: str, headers: Mapping[str, str] | None = None, **client: Any
) -> AsyncIterator[Client]:
    transport = httpx2.AsyncHTTPTransport(uds=socket)
    with trio.fail_after(SECONDS):
        async with httpx2.AsyncClient(transport=transport, timeout=SECONDS, headers=headers) as http:
            streams = streamable_http_client("http://localhost/mcp", http_client=http)
            async with Client(streams, **client) as opened:
                yield opened


async def names(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools()).tools]


def text(result: Any) -> str:
    return "".join(part.text for part in result.content if isinstance(part, types.TextContent))


async def called(client: Client, name: str, given: dict[str, Any] | None = None) -> tuple[bool, str]:
    """Whether a call failed, and its text."""
    result = await client.call_tool(name, given or {})
    return bool(result.is_error), text(result)
