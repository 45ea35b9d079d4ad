"""What people are told about hosts while a plugin runs: each once, whatever the plugin prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.launch.advice.telling import MOST_TOLD
from tests.conftest import Caller

Write = Callable[..., Path]

pytestmark = pytest.mark.launches

# It prints nothing, ends well, and asks in its own way too: a name server takes any bytes.
QUIET = f"""
import socket
for name in ("api.example.com", "api.example.com", "localhost"):
    try:
        socket.getaddrinfo(name, 443)
    except OSError as error:
        assert error.errno == socket.EAI_NONAME, error
ask = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for label in (b"*.com", b"10.0.0.0/8", b"evil$(id)\\x1b[2J"):
    name = bytes([len(label)]) + label
    ask.sendto(b"\\0\\7\\1\\0\\0\\1" + bytes(6) + name + b"\\0\\0\\1\\0\\1", ("127.0.0.1", 53))
    assert ask.recv(1024)[3] & 15 == 3
for number in range({MOST_TOLD} * 2):
    try:
        socket.getaddrinfo(f"n{{number}}.example", 443)
    except OSError:
        pass
"""


def lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("runner: ")]


def test_each_name_once_and_a_bounded_number(runner_as: Caller) -> None:
    report = runner_as.home / "report.json"
    done = runner_as("run", "--report", report, "--", "/usr/bin/python3", "-c", QUIET)
    assert done.returncode == 0 and "\x1b" not in done.stderr
    first, *others = lines(done.stderr)
    assert first == (
        "runner: the plugin asked for the host api.example.com, and it has no network; "
        "to let it reach that host: --net api.example.com:443"
    )
    assert len(others) == MOST_TOLD and len(set(others)) == MOST_TOLD
    hostile, names, last = others[:3], others[3:-1], others[-1]
    assert not any("--net" in line for line in hostile)
    assert all(line.count("--net") == 1 for line in names)
    assert last.startswith(f"runner: the plugin asked for more than {MOST_TOLD} hosts")
    network = json.loads(report.read_text())["network"]
    assert network["mode"] == "none" and network["totals"]["questions"] == {"refused": 4 + 2 * MOST_TOLD}


def test_a_wrapped_server_and_a_call(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """The answer is good, and nothing is on its stderr."""
    server = write_file(plugin_dir / "server.py", SERVER)
    entry = {"command": "/usr/bin/python3", "args": [str(server)]}
    config = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"quiet": entry}}))
    wanted = f"runner allow {config} --net api.example.com:443"
    called = runner_as("call", config, "look")
    assert called.returncode == 0
    [line] = lines(called.stderr)
    assert line.endswith(wanted)
    talk = b"".join(json.dumps(each).encode() + b"\n" for each in TALK)
    executed = runner_as("exec", config, input=talk.decode())
    assert executed.returncode == 0 and "fine" in executed.stdout
    assert lines(executed.stderr) == [line]


TALK = [
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "a", "version": "1"},
        },
    },
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "look", "arguments": {}}},
]

SERVER = """
import json, socket, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        result = {
            "protocolVersion": asked["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "quiet", "version": "1"},
        }
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}
    else:
        try:
            socket.getaddrinfo("api.example.com", 443)
        except OSError:
            pass
        result = {"content": [{"type": "text", "text": "fine"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
