"""What a plugin had sent when it ended arrives, and is not waited for without end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.egress.conftest import PYTHON, Plugin

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

SEND = """
import socket
line = socket.create_connection(("ipv4.example.com", 2526))
line.sendall(b"z" * 300000)
"""
# As much as anybody takes. The server reads nothing of it.
FLOOD = """
import socket
line = socket.create_connection(("ipv4.example.com", 9))
line.settimeout(3)
try:
    while True:
        line.send(b"z" * 65536)
except TimeoutError:
    print("sent")
"""


def test_a_plugin_that_sends_and_ends(plugin: Plugin) -> None:
    ran = plugin.python(["ipv4.example.com:2526"], SEND)
    assert ran.process.returncode == 0, ran.process.stderr
    seen: list[dict[str, Any]] = []
    while not seen:
        seen = [each for each in plugin.internet.look() if each["seen"] == "bytes"]
    assert seen == [{"seen": "bytes", "count": 300_000, "trouble": ""}]
    (connection,) = ran.network["connections"]
    assert connection["sent"] == 300_000
    assert connection["reason"] in ("", "was closed: the plugin has ended")  # the server may have been faster
    assert not ran.network["gate_ended_early"]


def test_a_signal_ends_the_delivery(plugin: Plugin) -> None:
    manifest = plugin.manifest(["ipv4.example.com:9"], PYTHON, "-I", "-c", FLOOD)
    policy = plugin.policy('ceiling = "allowlist"\nhosts = ["*:*"]')
    report = plugin.caller.home / "report.json"
    words = ("exec", "--policy", policy, "--report", report, manifest)
    with plugin.caller.start(*words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sent\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) > 1:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # the plugin has ended, only the gate is left
        assert process.wait(60) == 0
    told = json.loads(report.read_text())
    (connection,) = told["network"]["connections"]
    assert "was cut" in connection["reason"] and not told["network"]["gate_ended_early"]
