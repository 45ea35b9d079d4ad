"""MCP's own conformance suite: its questions to a server, at a daemon's door and through the hub; and its
servers, with a gateway as their client. What fails is in the tables here, each with its reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conftest import ROOT, Caller
from tests.published.install import InstallationFailed, install_suite
from tests.runner.gateway.test_shared import hub_of
from tests.runner.serve.served import serving
from tests.runner.session.test_real_peers import policy

pytestmark = [
    pytest.mark.needs("registry", "node"),
    pytest.mark.launches,
    pytest.mark.bound(900),
    pytest.mark.broad,
    pytest.mark.usefixtures("nothing_left"),
]
SERVER = ROOT / "tests/plugins/mcp_suite/server.py"
SUITE = "node_modules/@modelcontextprotocol/conformance/dist/index.js"

_NO_QUESTIONS = "at a daemon's door a plugin cannot ask its client"
_ONLY_HTTP = "it is about HTTP, and this is stdio"
_NO_PERSON = "an extension for programs that sign in by themselves; here a person signs in"
AT_DOOR = {
    "tools-call-sampling": _NO_QUESTIONS,
    "tools-call-elicitation": _NO_QUESTIONS,
    "elicitation-sep1034-defaults": _NO_QUESTIONS,
    "elicitation-sep1330-enums": _NO_QUESTIONS,
    "dns-rebinding-protection": "the door refuses every Origin, also that of a page on this machine",
}
ON_STDIO = {"server-sse-polling": _ONLY_HTTP, "dns-rebinding-protection": _ONLY_HTTP}
AS_CLIENT = {
    "auth/2025-03-26-oauth-metadata-backcompat": "its metadata name another issuer than the"
    " place they are at, which RFC 8414 forbids and the SDK refuses",
    "auth/client-credentials-jwt": _NO_PERSON,
    "auth/client-credentials-basic": _NO_PERSON,
    "auth/cross-app-access-complete-flow": _NO_PERSON,
}
_TIMED = "client-sse-retry-timing"  # a check that fails on a busy machine
# What the protocol says a client or server SHOULD do.
WARNED = {
    "server-sse-polling": "a stream of the door ends with its answer, so it has no event to go on from",
    "server-sse-multiple-streams": _ONLY_HTTP,
    "auth/basic-cimd": "a runner has no address on the web that could say who it is",
}


@pytest.fixture(scope="module")
def suite() -> Path:
    try:
        return install_suite()
    except InstallationFailed as error:
        pytest.fail(f"the registry answers, and the suite cannot be installed:\n{error}")


@pytest.fixture
def shelf(plugin_dir: Path) -> Path:
    (plugin_dir / "plugins").mkdir()
    program = plugin_dir / "plugins/server.py"
    program.write_bytes(SERVER.read_bytes())
    entry = {"command": "./server.py", "x-sandbox": {"shared": True}}
    (plugin_dir / "plugins/mcp.json").write_text(json.dumps({"mcpServers": {"suite": entry}}))
    for path in (plugin_dir / "plugins", *(plugin_dir / "plugins").iterdir()):
        path.chmod(0o755)
    return plugin_dir


def put_settings(caller: Caller, folder: Path) -> Path:
    """The suite calls tools and prompts by their own names."""
    names = sorted(set(re.findall(r'"((?:test|json)_[a-z0-9_]+)"', SERVER.read_text())))
    renamed = ", ".join(f'suite__{name} = "{name}"' for name in names)
    path = folder / "settings.toml"
    path.write_text(f"[clients.default]\nrename = {{ {renamed} }}\n")
    path.chmod(0o600)
    caller.give(path)
    return path


async def run_suite(suite: Path, folder: Path, *words: str, **environ: str) -> dict[str, Mapping[str, int]]:
    """How often each scenario had each status."""
    argv = ["node", "--import", "./preload.mjs", SUITE, *words, "--suite", "all", "-o", str(folder / "out")]
    usual = {"PATH": os.environ["PATH"], "RUNNER_SUITE_PREFIX": "runner:suite/"}
    (folder / "out").mkdir()
    with (folder / "log").open("w") as log:
        await trio.run_process(argv, cwd=suite, env={**usual, **environ}, check=False, stdout=log, stderr=log)
    found: dict[str, Mapping[str, int]] = {}
    for path in sorted((folder / "out").rglob("checks.json")):
        scenario = str(path.parent.relative_to(folder / "out"))
        name = re.sub(r"^server-|-\d{4}-\d\d-\d\dT[\d-]+Z$", "", scenario)
        checks = json.loads(path.read_text())
        statuses = [each["status"] for each in checks if each["id"] != _TIMED]
        found[name] = {status: statuses.count(status) for status in ("SUCCESS", "FAILURE", "WARNING")}
    return found


def said_by(folder: Path, scenarios: set[str]) -> str:
    """The end of what each of these clients wrote."""
    files = [each for name in sorted(scenarios) for each in folder.glob(f"out/{name}-*/stderr.txt")]
    return "\n".join(f"{each.parent.name}: {each.read_text()[-2000:]}" for each in files)


def judge(
    folder: Path,
    what: str,
    found: Mapping[str, Mapping[str, int]],
    expected: Mapping[str, str],
    scenarios: int,
    note: Callable[[str, object], None],
) -> None:
    assert len(found) == scenarios, sorted(found)
    failed = {name for name, each in found.items() if each["FAILURE"]}
    warned = {name for name, each in found.items() if each["WARNING"] and not each["FAILURE"]}
    passed = sum(each["SUCCESS"] for each in found.values())
    refused = sum(each["FAILURE"] for each in found.values())
    whole = f"{len(found) - len(failed)} of {len(found)} scenarios"
    line = f"{what}: {whole}; checks: {passed} passed, {refused} failed"
    note("published", "\n".join([line, *(f"  {name}: {why}" for name, why in expected.items())]))
    assert failed == set(expected), f"{line}\n{said_by(folder, failed - set(expected))}"
    assert warned <= set(WARNED), (line, warned)


@asynccontextmanager
async def relay(path: str) -> AsyncIterator[int]:
    """A port of this machine that leads to a daemon's socket: the suite knows no sockets."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream, await trio.open_unix_socket(path) as door, trio.open_nursery() as nursery:
            nursery.start_soon(_pump, stream, door)
            nursery.start_soon(_pump, door, stream)

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _pump(source: trio.SocketStream, target: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in source:
            await target.send_all(data)
        await target.send_eof()


@pytest.mark.trio
async def test_the_suite_at_a_daemons_door(
    suite: Path, runner_as: Caller, shelf: Path, tmp_path: Path, record_property: Any
) -> None:
    settings = put_settings(runner_as, shelf)
    with serving(runner_as, shelf, "--gateway-settings", str(settings)) as served:
        async with relay(served.socket) as port:
            found = await run_suite(suite, tmp_path, "server", "--url", f"http://localhost:{port}/mcp")
    judge(tmp_path, "a daemon's door", found, AT_DOOR, 32, record_property)


@pytest.mark.trio
async def test_the_suite_through_the_hub(
    suite: Path, runner_as: Caller, shelf: Path, tmp_path: Path, record_property: Any
) -> None:
    settings = put_settings(runner_as, shelf)
    asks = policy(shelf, "elicitation/create", "sampling/createMessage")
    runner_as.give(asks)
    with hub_of(runner_as, shelf) as hub:
        at = ("--via", hub.path, "--config", shelf / "plugins")
        command = runner_as.command("gateway", *at, "--settings", settings, "--policy", asks)
        environ = {**runner_as.environ, "RUNNER_SUITE_COMMAND": json.dumps(list(map(str, command)))}
        found = await run_suite(suite, tmp_path, "server", "--url", "http://localhost:1/mcp", **environ)
    judge(tmp_path, "the hub, on stdio", found, ON_STDIO, 32, record_property)


@pytest.mark.trio
async def test_the_suites_servers_behind_a_gateway(suite: Path, tmp_path: Path, record_property: Any) -> None:
    script = tmp_path / "client"
    start = shlex.join((sys.executable, "-W", "ignore", "-m", "tests.published.suite_client"))
    script.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {start} "$@"\n')
    script.chmod(0o755)
    words = ("client", "--command", str(script), "--timeout", "280000")  # all at once, on a busy machine
    found = await run_suite(suite, tmp_path, *words, HOME=str(tmp_path))
    judge(tmp_path, "a gateway as the client", found, AS_CLIENT, 26, record_property)
