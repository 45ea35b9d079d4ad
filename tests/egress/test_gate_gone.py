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
# limit. `more`: what else arrives on it. `look`: the name again, from a resolver that asks once. `fail`: end.
CLIENT = """
import errno, socket, struct, sys
address = socket.getaddrinfo("ipv4.example.com", 2525, socket.AF_INET, socket.SOCK_STREAM)[0][4]
question = bytes.fromhex("123401000001000000000000046970763407") + b"example\\3com\\0\\0\\1\\0\\1"
line = None
for word in sys.stdin:
    try:
        if word == "fail\\n":
            sys.exit(3)
        elif word == "look\\n":
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

    def end(self, words: bytes | None = None, code: int = 0) -> dict[str, Any]:
        _, errors = self._process.communicate(words, timeout=60)
        self.errors = errors.decode()
        assert self._process.returncode == code, errors
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report


@contextmanager
def running(plugin: Plugin) -> Iterator[Running]:
    manifest = plugin.manifest(["ipv4.example.com:2525"], PYTHON, "-I", "-c", CLIENT)
    policy = plugin.policy('ceiling = "allowlist"\nhosts = ["*:*"]')
    report = plugin.caller.home / "report.json"
    words = ("exec", "--events", "2", "--policy", policy, "--report", report, manifest)
    with plugin.caller.start(*words) as process:
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
        # Not an orderly end: the plugin would take what it has for everything.
        assert client.ask("more") == "ECONNRESET"
        assert client.ask("dial") == "ECONNREFUSED" and client.ask("look") == "ECONNREFUSED"
        report = client.end(b"fail\n", 3)
    assert plugin.internet.look() == []
    assert report["network"]["gate_ended_early"] is True
    assert report["outcome"]["code"] == "crashed"
    told = "ended too early: open connections were reset, and new ones refused"
    assert [told in note["message"] for note in report["notes"] if note["rule"] == "network"] == [True]
    live, *said = [line for line in client.errors.splitlines() if told in line]
    event = json.loads(live)
    assert (event["event"], event["value"]["kind"]) == ("network", "gate")
    assert said and said[0].startswith("runner")  # the plugin has failed, and this may be why


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
