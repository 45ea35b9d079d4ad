"""traceparent and tracestate of a client reach plugins, and stand in the audit and in the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.conftest import Caller
from tests.runner.gateway.entries import SECONDS, on_stdio, text
from tests.runner.gateway.test_shared import put_teller
from tests.runner.serve.served import serving

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
TRACE = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "me=1"}
OTHER = {"traceparent": f"00-{'c' * 32}-{'d' * 16}-00"}


async def meta(client: Client, **said: Any) -> dict[str, Any]:
    """What the plugin has heard in `_meta`."""
    result = await client.call_tool("teller__who", meta=said or None)  # type: ignore[arg-type]  # also other keys
    found: dict[str, Any] = json.loads(text(result))["meta"]
    return {name: value for name, value in found.items() if name != "progressToken"}


@pytest.mark.trio
async def test_a_trace_on_stdio(runner_as: Caller, plugin_dir: Path) -> None:
    shelf, audit = put_teller(plugin_dir / "shelf"), plugin_dir / "audit"
    audit.touch(mode=0o600)
    runner_as.give(audit)
    async with on_stdio(runner_as, shelf, "--audit", str(audit), mode="auto") as client:
        assert await meta(client, **TRACE, baggage="x=1") == TRACE
        assert await meta(client, traceparent="00-0-0-00", tracestate="me=1") == {}
        assert await meta(client) == {}
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [{name: each[name] for name in TRACE if name in each} for each in lines] == [TRACE, {}, {}]


@pytest.mark.trio
@pytest.mark.filterwarnings("ignore:Async generator", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_trace_at_the_door(runner_as_user: Caller, plugin_dir: Path) -> None:
    put_teller(plugin_dir / "plugins")
    with serving(runner_as_user, plugin_dir) as served:
        transport = httpx2.AsyncHTTPTransport(uds=served.socket)
        http = httpx2.AsyncClient(transport=transport, timeout=SECONDS, headers=OTHER)
        streams = streamable_http_client("http://localhost/mcp", http_client=http)
        with trio.fail_after(SECONDS):
            async with http, Client(streams) as client:
                assert await meta(client) == OTHER
                assert await meta(client, **TRACE) == TRACE  # the message counts first
        rows = served.ask("GET", "/calls")[1]["calls"]
        assert sorted(json.dumps(row["record"].get("trace")) for row in rows) == sorted(
            map(json.dumps, (OTHER, TRACE))
        )
        served.end()
