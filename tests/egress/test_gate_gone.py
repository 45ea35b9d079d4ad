"""A gate that is stopped or killed lets nothing through, and the report says so."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.benches.network import find_gate
from tests.egress.conftest import PYTHON, Plugin
from tests.internet import API

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

# Obeys words on stdin. `dial`: a new connection, and the server's line. `wait`: the same with a short time
# limit. `more`: what else arrives on it. `look`: the name again, from a resolver that asks once.
CLIENT = """
import errno, socket, struct, sys
address = socket.getaddrinfo("ipv4.example.com", 2525, socket.AF_INET, socket.SOCK_STREAM)[0][4]
question = bytes.fromhex("123401000001000000000000046970763407") + b"example\\3com\\0\\0\\1\\0\\1"
line = None
for word in sys.stdin:
    try:
        if word == "look\\n":
            line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            line.connect(("127.0.0.1", 53))
            line.send(question)
            told = "answered" if line.recv(512) else ""
        elif word == "more\\n":
            line.settimeout(60)
            told = line.recv(100).decode().strip()
        else:
            line = socket.create_connection(address)
            line.settimeout(1 if word == "wait\\n" else 60)
            told = line.recv(100).decode().strip()
    except TimeoutError:
        told = "nothing"
    except OSError as error:
        told = errno.errorcode[error.errno]
    print(told, flush=True)
"""


class Running:
    def __init__(self, process: subprocess.Popen[bytes], report: Path) -> None:
        self._process = process
        self._report = report
        assert self.ask("dial") == f"220 {API}"
        self.gate = find_gate(process.pid)

    def ask(self, word: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(word.encode() + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().decode().strip()

    def end(self) -> dict[str, Any]:
        _, errors = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, errors
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report


@contextmanager
def running(plugin: Plugin) -> Iterator[Running]:
    manifest = plugin.manifest(["ipv4.example.com:2525"], PYTHON, "-I", "-c", CLIENT)
    policy = plugin.policy('ceiling = "allowlist"\nhosts = ["*:*"]')
    report = plugin.caller.home / "report.json"
    with plugin.caller.start("exec", "--policy", policy, "--report", report, manifest) as process:
        try:
            yield Running(process, report)
        finally:
            process.kill()


def test_a_killed_gate(plugin: Plugin) -> None:
    with running(plugin) as client:
        plugin.internet.look()
        ended = os.pidfd_open(client.gate)
        os.kill(client.gate, signal.SIGKILL)
        select.select([ended], [], [])
        os.close(ended)
        # A connection that was open is closed too, whichever way.
        assert client.ask("more") in ("", "ECONNRESET")
        assert client.ask("dial") == "ECONNREFUSED" and client.ask("look") == "ECONNREFUSED"
        report = client.end()
    assert plugin.internet.look() == []
    assert report["network"]["gate_ended_early"] is True
    assert report["outcome"]["code"] == "ok"


def test_a_stopped_gate(plugin: Plugin) -> None:
    with running(plugin) as client:
        plugin.internet.look()
        os.kill(client.gate, signal.SIGSTOP)
        assert client.ask("wait") == "nothing"
        assert plugin.internet.look() == []
        os.kill(client.gate, signal.SIGCONT)  # it had only not been served yet
        assert client.ask("more") == f"220 {API}"
        os.kill(client.gate, signal.SIGSTOP)
        report = client.end()  # a gate that cannot say goodbye does not keep the launch
    assert report["network"]["gate_ended_early"] is False
