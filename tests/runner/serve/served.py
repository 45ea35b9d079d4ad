"""A daemon for tests: `runner serve` in a process of its own, which says by sd_notify when it is ready."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.serve.client import Client
from tests.conftest import ROOT, Caller

SECONDS = 60.0
READ_ONLY = """
[[exports]]
id = "peek"
kind = "tool"
execution_class = "worker"

[exports.tool]
effect_class = "read_only"
input_schema = "schemas/any.json"
"""


def put_plugins(folder: Path) -> None:
    """The plugins `greeter` (mcp) and `acme.devkit` (vai)."""
    shutil.copytree(ROOT / "runner/contracts/mcp/example", folder / "words")
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", folder / "devkit")
    manifest = folder / "devkit/vai-plugin.toml"
    manifest.write_text(manifest.read_text() + READ_ONLY)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


class Served:
    """A running daemon."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, manager: socket.socket) -> None:
        self.process = process
        self.socket = str(folder / "run/serve.sock")
        self._manager = manager

    def wait_for(self, state: str) -> str:
        """Wait for a state that the daemon sends to its service manager. Returns the whole message."""
        while True:
            said = self._manager.recv(4096).decode()
            if state in said.split("\n"):
                return said

    def ask(
        self, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        with Client(self.socket, SECONDS) as client:
            answer = client.request(method, path, document, headers)
            if "json" in answer.headers.get("content-type", ""):
                return answer.status, answer.json()
            return answer.status, b"".join(answer.parts()).decode()

    def call(self, plugin: str, tool: str, given: Any = None, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", f"/plugins/{plugin}/calls", {"tool": tool, "input": given}, named)

    def states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.ask("GET", "/plugins")[1]["plugins"]}

    def plugin(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/plugins/{name}")[1]
        return found

    def end(self) -> str:
        """End it by SIGTERM. Returns what it said."""
        self.process.terminate()
        _, err = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 0, err
        return err.decode()


# Starts a program as a service manager with socket activation does: with the socket as descriptor 3.
_ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", WATCHDOG_USEC="200000")
os.execvp(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def activated(caller: Caller, folder: Path) -> Iterator[Served]:
    """A daemon that gets its socket, and is watched, by a service manager."""
    with socket.socket(socket.AF_UNIX) as listener:
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        listener.bind(str(folder / "run/serve.sock"))
        listener.listen()
        fd = listener.fileno()

        def start(*words: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
            argv = [*caller.python, "-c", _ACTIVATE, str(fd), *caller.command(*words)]
            pipe = subprocess.PIPE
            environ = {**caller.environ, **env}
            return subprocess.Popen(argv, env=environ, pass_fds=[fd], stdout=pipe, stderr=pipe, cwd="/")

        with _serving(caller, folder, start, ()) as served:
            yield served


@contextlib.contextmanager
def serving_by(
    start: Callable[..., subprocess.Popen[bytes]], caller: Caller, folder: Path
) -> Iterator[Served]:
    """As `serving`, with a process that `start` starts from the arguments of the command line."""
    with _serving(caller, folder, start, ("--socket", str(folder / "run/serve.sock"))) as served:
        yield served


@contextlib.contextmanager
def serving(caller: Caller, folder: Path, *options: str, config: bool = True) -> Iterator[Served]:
    """`folder`: has the plugins in `plugins`; gets the socket in `run` and the ledger in `ledger`. `config`:
    False if the options say where plugins are."""
    at = ("--socket", str(folder / "run/serve.sock"))
    with _serving(caller, folder, caller.start, (*at, *options), config) as served:
        yield served


@contextlib.contextmanager
def _serving(
    caller: Caller,
    folder: Path,
    start: Callable[..., subprocess.Popen[bytes]],
    options: tuple[str, ...],
    config: bool = True,
) -> Iterator[Served]:
    for name in ("run", "ledger"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        caller.give(folder / name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = folder / "notify"
        path.unlink(missing_ok=True)
        manager.bind(str(path))
        path.chmod(0o777)
        manager.settimeout(SECONDS)
        plugins = ("--config", str(folder / "plugins")) if config else ()
        words = ("serve", *plugins, "--ledger", str(folder / "ledger/ledger.db"))
        process = start(*words, *options, env={"NOTIFY_SOCKET": str(path)})
        served = Served(process, folder, manager)
        with process:
            try:
                served.wait_for("READY=1")
                yield served
            except BaseException as error:
                process.kill()
                if process.stderr is not None and not process.stderr.closed:
                    error.add_note(process.stderr.read().decode())
                raise
            finally:
                if process.poll() is None:
                    process.kill()
