"""Checks that any ainb plugin has to pass, whatever it does: the contract's checks of shipped plugins.

`check_plugin(caller, folder)` talks to the plugin through `runner exec`, with its bytes as they are: what is
checked is the plugin, and that the cage lets it work. Which checks apply follows from its manifest. A12 and
A13 are left out, because they need a supervisor.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import Caller

SECONDS = 60.0  # for each answer; the contract has five or ten, on a machine that does nothing else
SETTLE_FRAMES, EQUAL_FRAMES = 20, 3
_DENIED = ("host/fs/", "host/network/", "host/action/", "host/spawn", "host/unix_socket", "host/secret")


class RawHost:
    """A host with nothing to offer: a plugin has to survive its denials."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout
        self._held = b""
        self._last = 0

    def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. What the plugin asks meanwhile is answered."""
        self._last += 1
        self.send({"id": self._last, "method": method, "params": params})
        while True:
            message = self.receive()
            if "method" not in message and message["id"] == self._last:
                return message
            if "method" in message and message.get("id") is not None:
                self.send({"id": message["id"], **self._answer(message["method"])})

    def _answer(self, method: str) -> dict[str, Any]:
        if method == "host/snapshot/get":
            return {"result": {"payload": None, "version": 0}}
        if method == "host/snapshot/subscribe":
            return {"result": {}}
        if method.startswith(_DENIED):
            return {"error": {"code": -32001, "message": "capability denied: nothing is granted here"}}
        return {"error": {"code": -32601, "message": f"method not found: {method}"}}

    def send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self.stdin.flush()

    def receive(self) -> dict[str, Any]:
        while b"\r\n\r\n" not in self._held:
            self._read()
        header, _, rest = self._held.partition(b"\r\n\r\n")
        name, _, value = header.partition(b":")
        assert name.strip().lower() == b"content-length", header
        length = int(value)
        while len(rest) < length:
            self._held = rest
            self._read()
            rest = self._held
        self._held = rest[length:]
        message: dict[str, Any] = json.loads(rest[:length])
        assert message["jsonrpc"] == "2.0"
        return message

    def _read(self) -> None:
        assert select.select([self.stdout], [], [], SECONDS)[0], "the plugin is silent"
        data = os.read(self.stdout.fileno(), 65536)
        assert data, "the plugin has closed its stdout"
        self._held += data

    def init(self, folder: Path) -> Any:
        params = {
            "manifest_path": str(folder / "manifest.toml"),
            "granted_capabilities": [],
            "abi_version": 2,
            "config": None,
            "host": {"kind": "tui", "pid": 1},
        }
        return self.ask("plugin/init", params)["result"]

    def draw(self, width: int, height: int, generation: int = 0) -> Any:
        viewport = {"width": width, "height": height}
        return self.ask("plugin/render", {"viewport": viewport, "generation": generation})["result"]["buffer"]


@contextmanager
def raw_host(caller: Caller, folder: Path, *options: str) -> Iterator[RawHost]:
    process = caller.start(
        "exec", *options, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        try:
            yield RawHost(process)
        finally:
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(SECONDS)


def check_plugin(caller: Caller, folder: Path, *options: str) -> list[str]:
    """`options`: of `runner exec`. Raises AssertionError. Returns the checks that applied."""
    manifest = tomllib.loads((folder / "manifest.toml").read_text())
    provides = manifest.get("provides", {})
    done = ["A01 manifest", "A01 identity", "A02 framing", "A03", "A11"]
    assert caller("check", folder).returncode == 0
    with raw_host(caller, folder, *options) as host:
        answer = host.ask("cts/unknown", {})  # before plugin/init
        assert answer["error"]["code"] == -32601, answer
        welcome = host.init(folder)
        assert (welcome["name"], welcome["version"]) == (
            manifest["plugin"]["name"],
            manifest["plugin"]["version"],
        )
        buffer = host.draw(40, 12)
        for place, _ in buffer["cells"]:
            assert place["x"] < buffer["width"] and place["y"] < buffer["height"]
        if provides.get("screens"):
            done += ["A02 viewport", "A05"]
            assert (buffer["width"], buffer["height"]) == (40, 12)
            _check_settles(host)
        if provides.get("cli_namespaces"):
            done += ["A14"]
            for namespace in provides["cli_namespaces"]:
                _check_command(host, namespace)
        assert host.ask("plugin/shutdown", {})["result"] == {}
        host.stdin.close()
        assert host.process.wait(SECONDS) == 0
    return sorted(done)


def _check_settles(host: RawHost) -> None:
    """Two equal frames within the first twenty, and then three more."""
    last = host.draw(40, 12)
    for generation in range(SETTLE_FRAMES):
        now = host.draw(40, 12, generation)
        if now == last:
            break
        last = now
    else:
        raise AssertionError(f"its screen does not settle in {SETTLE_FRAMES} frames")
    assert all(host.draw(40, 12, generation) == last for generation in range(EQUAL_FRAMES))


def _check_command(host: RawHost, namespace: str) -> None:
    result = host.ask("plugin/cli_dispatch", {"namespace": namespace, "argv": ["--help"]})["result"]
    assert isinstance(result["exit_code"], int)
    for stream in ("stdout", "stderr"):
        assert isinstance(result[stream], str | list)
