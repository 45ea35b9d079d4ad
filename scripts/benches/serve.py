"""What a daemon costs: a call through its door against the same call by the library, and idle plugins."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.serve.client import Client, NoDaemon
from scripts.benches import call
from scripts.benches.caller import RUNNER, Caller, Unable
from scripts.benches.figures import median
from scripts.benches.hosting import read_document
from scripts.benches.rows import PER_SECOND, Against, Row, Table

LIBRARY, DOOR = "the library", "the door"
START_SECONDS = 60.0


class BenchDaemon:
    def __init__(self, process: subprocess.Popen[bytes], socket: str) -> None:
        self.pid = process.pid
        self.socket = socket

    def start(self, name: str) -> str:
        """Start a plugin. Returns why that failed, or ''."""
        with Client(self.socket) as client:
            answer = client.request("POST", f"/plugins/{name}/start")
            found = answer.json()
        return "" if answer.status == 200 else str(found["error"]["message"])


@contextmanager
def daemon(caller: Caller, config: str) -> Iterator[BenchDaemon]:
    """A daemon that answers. Raises Unable if there is none."""
    folder = Path(caller.own("serve"))
    folder.chmod(0o700)
    socket = str(folder / "serve.sock")
    argv = [RUNNER, "serve", "--config", config, "--socket", socket, "--ledger", str(folder / "ledger.db")]
    # Its stderr goes to a file: a pipe that nobody reads could fill.
    errors = folder / "stderr"
    null = subprocess.DEVNULL
    with open(errors, "wb") as file, caller.start(argv, stdin=null, stdout=null, stderr=file) as process:
        try:
            _wait(process, socket, errors)
            yield BenchDaemon(process, socket)
        finally:
            process.terminate()
    if process.returncode:
        raise Unable(f"{' '.join(argv)} ended with {process.returncode}: {errors.read_text()}")


def _wait(process: subprocess.Popen[bytes], socket: str, errors: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with Client(socket) as client:
                client.request("GET", "/health").json()
            return
        except NoDaemon as fault:
            if process.poll() is not None or time.monotonic() > until:
                raise Unable(f"the daemon does not answer: {fault}; {errors.read_text()}") from None
        time.sleep(0.05)


def bench(caller: Caller, calls: int, idle: int) -> list[Table]:
    talker = call.plugin(caller)
    with daemon(caller, talker.manifest) as served:
        where = call.Plugin(talker.manifest, [served.socket, "talker"])
        with call.host(caller, where, "door", calls, 0) as process:
            lone, many = read_document(process), read_document(process)
    return [*_calls(caller, lone, many), _idle(caller, talker.argv[0], idle)]


def _calls(
    caller: Caller, lone: dict[str, list[list[float]]], many: dict[str, list[list[float]]]
) -> list[Table]:
    over = (Against(LIBRARY, (LIBRARY,)),)
    times = {name: [each for block in lone[name] for each in block] for name in lone}
    added = median(times["door"]) - median(times["library"])
    latency = [
        Row(LIBRARY, "µs", [1e6 * each for each in times["library"]]),
        Row(DOOR, "µs", [1e6 * each for each in times["door"]], over, "a call through a daemon"),
        Row("what the door adds", "µs", [1e6 * added]),
    ]
    rates = [
        Row(LIBRARY, PER_SECOND, [1 / each[0] for each in many["library"]]),
        Row(
            DOOR,
            PER_SECOND,
            [1 / each[0] for each in many["door"]],
            over,
            "calls through a daemon, 32 at once",
        ),
    ]
    about = (
        "an echo, by turns; the door is a unix socket, and each call is in the ledger before and after it ran"
    )
    return [
        Table("serve", "calls through a daemon", caller.name, about, latency),
        Table("serve", "calls through a daemon, 32 at once", caller.name, about, rates),
    ]


def _idle(caller: Caller, program: str, count: int) -> Table:
    servers = {f"idle{number}": {"command": program} for number in range(count)}
    config = caller.write("idle/mcp.json", json.dumps({"mcpServers": servers}))
    notes: tuple[str, ...] = ()
    with daemon(caller, config) as served:
        bare = call.memory(served.pid)["host"]
        started = 0
        for name in servers:
            if fault := served.start(name):
                notes = (f"only {started} of {count}: {fault}",)
                break
            started += 1
        if not started:
            raise Unable(f"no plugin starts: {notes[0]}")
        sizes = call.memory(served.pid)
    title, about = "memory of idle plugins of a daemon", f"{started} of them, in kB of proportional set size"
    if -1 in sizes.values():
        notes = (*notes, "this user cannot read the memory of some of the processes")
        return Table("serve", title, caller.name, about, (), notes)
    ours = sum(sizes[name] for name in call.OURS) + sizes["bwrap"] - bare
    rows = [
        Row("the daemon without plugins", "kB", [bare]),
        Row(
            f"each of {started}, all but the plugin",
            "kB",
            [ours / started],
            (),
            f"memory of each of {started} idle plugins of a daemon, beside the plugin",
        ),
        Row(f"each of {started}, the daemon's part", "kB", [(sizes["host"] - bare) / started]),
        Row(f"each of {started}, the plugin", "kB", [sizes["plugin"] / started]),
    ]
    return Table("serve", title, caller.name, about, rows, notes)
