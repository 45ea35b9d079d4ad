"""What the gateway adds to a call of an MCP server on stdio, and how long it takes to answer at all."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.benches.caller import RUNNER, Caller, Unable
from scripts.benches.figures import median
from scripts.benches.rows import Against, Row, Table

DIRECT, GATEWAY = "the plugin itself", "the gateway"
EXAMPLE = Path(__file__).parents[2] / "runner/contracts/mcp/example"
_ABOUT = {"name": "bench", "version": "1"}
_HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": _ABOUT}


class Conversation:
    """A client of the older protocol, on the pipes of a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._number = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, method: str, params: Any) -> dict[str, Any]:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            answer = json.loads(line)
            if answer.get("id") == self._number and "result" in answer:
                found: dict[str, Any] = answer["result"]
                return found
            if "error" in answer:
                raise Unable(f"{method}: {answer['error']}")
        raise Unable(f"the process ended before it answered {method}")

    def begin(self) -> None:
        self.ask("initialize", _HELLO)
        self._send({"method": "notifications/initialized"})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self._process.stdin.flush()


@contextmanager
def conversation(caller: Caller, *words: str) -> Iterator[Conversation]:
    pipe = subprocess.PIPE
    with caller.start([RUNNER, *words], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        try:
            yield Conversation(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def bench(caller: Caller, calls: int, colds: int) -> list[Table]:
    os.chmod(caller.write("greeter/server.py", (EXAMPLE / "server.py").read_text()), 0o755)
    manifest = caller.write("greeter/mcp.json", (EXAMPLE / "mcp.json").read_text())
    given = {"name": "you"}
    times: dict[str, list[float]] = {DIRECT: [], GATEWAY: []}
    with (
        conversation(caller, "exec", manifest) as direct,
        conversation(caller, "gateway", "--config", manifest) as gateway,
    ):
        direct.begin()
        gateway.begin()
        gateway.ask("tools/list", {})
        both = ((DIRECT, direct, "greet"), (GATEWAY, gateway, "greeter__greet"))
        for number in range(calls + 20):
            for name, one, tool in both:
                began = time.perf_counter()
                one.ask("tools/call", {"name": tool, "arguments": given})
                if number >= 20:  # the first ones compile and fill caches
                    times[name].append(1e6 * (time.perf_counter() - began))
    added = median(times[GATEWAY]) - median(times[DIRECT])
    over = (Against(DIRECT, (DIRECT,)),)
    rows = [
        Row(DIRECT, "µs", times[DIRECT]),
        Row(GATEWAY, "µs", times[GATEWAY], over, "a call through the gateway"),
        Row("what the gateway adds", "µs", [added]),
    ]
    about = "a greeting in its cage, by turns, as one message on stdio and one back"
    starts = [_cold(caller, manifest) for _ in range(colds)]
    cold = [
        Row("until it answers", "ms", [each[0] for each in starts]),
        Row("until its list has a plugin's tools", "ms", [each[1] for each in starts], (), "a cold gateway"),
    ]
    return [
        Table("gateway", "calls through the gateway", caller.name, about, rows),
        Table("gateway", "the start of the gateway", caller.name, "its imports are most of it", cold),
    ]


def _cold(caller: Caller, manifest: str) -> tuple[float, float]:
    began = time.perf_counter()
    with conversation(caller, "gateway", "--config", manifest) as one:
        one.begin()
        answered = time.perf_counter()
        one.ask("tools/list", {})
        listed = time.perf_counter()
    return 1e3 * (answered - began), 1e3 * (listed - began)
