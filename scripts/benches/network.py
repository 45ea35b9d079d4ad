"""What a network of named hosts costs: at the launch, in memory, for each connection and for each byte.

The servers are in a network namespace of their own, behind a veth. The same client connects to them from the
machine itself and through the gate, by turns.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import policies
from scripts.benches import launch
from scripts.benches.caller import RUNNER, Caller, Unable
from scripts.benches.launch import OVER_RAW, RAW, Command
from scripts.benches.rows import PER_SECOND, Against, Row, Table
from scripts.internet.machine import Internet, make_internet

SERVER, NAME = "45.33.1.10", "api.example.com"
ECHO, SOURCE = 7, 19
HELD = 100  # connections, when memory is measured
BLOCK = 50  # connections of one turn
DOWNLOAD_BYTES = 256 << 20
WARM_UP = 2

NONE, LIST, EVERY = "no network", "one host", "every port of one"
DIRECT, GATE = "direct", "through the gate"
OVER_NONE, OVER_DIRECT = Against("no network", (NONE,)), Against("direct", (DIRECT,))

# Obeys lines on stdin: `connect N` makes N connections one after the other, each for one question and answer;
# `download N` reads so many bytes; `hold N` opens N connections and keeps them. Prints seconds, as JSON.
CLIENT = """\
import json, socket, sys, time
host, echo, source = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
address = socket.getaddrinfo(host, echo, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
held, buffer = [], bytearray(1 << 20)
stream = None
for line in sys.stdin:
    word, count = line.split()
    taken = []
    if word == "download":
        stream = stream or socket.create_connection((address, source), 60)
        start, left = time.perf_counter(), int(count)
        stream.sendall(b"%d\\n" % left)
        while left > 0:
            left -= stream.recv_into(buffer)
        taken.append(time.perf_counter() - start)
    else:
        for _ in range(int(count)):
            start = time.perf_counter()
            line = socket.create_connection((address, echo), 60)
            line.sendall(b"?")
            assert line.recv(1) == b"?"
            if word == "hold":
                held.append(line)
            else:
                line.close()
            taken.append(time.perf_counter() - start)
    print(json.dumps(taken), flush=True)
"""


def bench(caller: Caller, launches: int, connections: int, downloads: int) -> list[Table]:
    tables = _bench_launch(caller, launches)
    if os.geteuid() != 0:
        note = "connections are not measured: only root can make the namespaces of their servers"
        return [tables[0]._replace(notes=(*tables[0].notes, note)), *tables[1:]]
    with _internet(caller) as internet:
        return tables + _bench_bytes(caller, internet, connections, downloads)


# --- launch -------------------------------------------------------------------------------------------------


def _bench_launch(caller: Caller, rounds: int) -> list[Table]:
    commands = {
        name: Command(_exec(caller, f"launch-{number}", hosts, "/usr/bin/true"), {})
        for number, (name, hosts) in enumerate(
            {NONE: "none", LIST: [f"{NAME}:443"], EVERY: [f"{NAME}:*"]}.items()
        )
    }
    notes: tuple[str, ...] = ()
    for name, command in tuple(commands.items()):
        try:
            caller.output_of(command.argv)  # fills the caches
        except Unable:
            if name != EVERY:
                raise
            del commands[EVERY]
            notes = ("every port of one host is not measured: that needs nftables in the kernel",)
    commands[RAW] = launch.raw(caller, commands[NONE].argv)
    taken = launch.interleave(caller, commands, rounds)
    over = {NONE: (OVER_RAW,), LIST: (OVER_RAW, OVER_NONE), EVERY: (OVER_RAW, OVER_NONE)}
    about = f"{rounds} launches of /usr/bin/true each, interleaved"
    return launch.tables("network", "launch with a network", caller, about, taken, over, notes=notes)


# --- connections --------------------------------------------------------------------------------------------


def _bench_bytes(caller: Caller, internet: Internet, connections: int, downloads: int) -> list[Table]:
    ports = [str(ECHO), str(SOURCE)]
    script = caller.write("client/client.py", CLIENT)
    python = ["/usr/bin/python3", "-I", script]
    argv = _exec(caller, "client", [f"{NAME}:{ECHO},{SOURCE}"], *python, NAME, *ports)
    caller.output_of([argv[0], "explain", *argv[2:]])  # fills the caches: a gate has what its launcher had
    with (
        client(caller, internet, argv) as caged,
        client(caller, internet, [*python, SERVER, *ports]) as direct,
    ):
        caged.ask("connect", 1)
        gate = find_gate(caged.pid)
        idle = private_bytes(gate)
        block = min(BLOCK, connections)
        ways = {DIRECT: direct, GATE: caged}
        each = _by_turns(ways, "connect", block, -(-connections // block))
        pieces = _by_turns(ways, "download", DOWNLOAD_BYTES, downloads)
        before = private_bytes(gate)
        caged.ask("hold", HELD)
        held = private_bytes(gate)
    return [
        _connections(caller, each),
        _downloads(caller, pieces),
        Table(
            "network",
            "memory of the gate",
            caller.name,
            "what is private to its process",
            [
                Row("after the first connection", "kB", [idle / 1024]),
                Row("when all were closed", "kB", [before / 1024]),
                Row(f"with {HELD} open connections", "kB", [held / 1024]),
                Row("for each open connection", "kB", [(held - before) / HELD / 1024]),
            ],
        ),
    ]


def _by_turns(ways: dict[str, Client], word: str, count: int, rounds: int) -> dict[str, list[list[float]]]:
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for turn in range(WARM_UP + rounds):
        for name in ways if turn % 2 else reversed(ways):
            seconds = ways[name].ask(word, count)
            if turn >= WARM_UP:
                taken[name].append(seconds)
    return taken


def _connections(caller: Caller, taken: dict[str, list[list[float]]]) -> Table:
    flat = {name: [each * 1e6 for block in blocks for each in block] for name, blocks in taken.items()}
    about = f"{len(flat[GATE])} each, by turns: connect, a question, an answer, close"
    rows = [
        Row(DIRECT, "µs", flat[DIRECT]),
        Row(GATE, "µs", flat[GATE], (OVER_DIRECT,), "a connection through the gate"),
    ]
    return Table("network", "connections", caller.name, about, rows)


def _downloads(caller: Caller, taken: dict[str, list[list[float]]]) -> Table:
    size = DOWNLOAD_BYTES >> 20
    rates = {name: [size / seconds for [seconds] in blocks] for name, blocks in taken.items()}
    about = f"{len(rates[GATE])} downloads of {size} MiB each, by turns"
    unit = f"MiB {PER_SECOND}"
    rows = [Row(DIRECT, unit, rates[DIRECT]), Row(GATE, unit, rates[GATE], (OVER_DIRECT,))]
    return Table("network", "throughput", caller.name, about, rows)


class Client:
    """CLIENT, in the cage or without one."""

    def __init__(self, argv: list[str], process: subprocess.Popen[str]) -> None:
        self._argv = argv
        self._process = process
        self.pid = process.pid

    def ask(self, word: str, count: int) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word} {count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Unable(f"{' '.join(self._argv)} ended with {self._process.wait()}")
        found: list[float] = json.loads(line)
        return found


@contextmanager
def client(caller: Caller, internet: Internet, argv: list[str]) -> Iterator[Client]:
    identity = () if caller.uid == os.geteuid() else (f"--setuid={caller.uid}", f"--setgid={caller.uid}")
    whole = [*internet.entering(*identity), *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        whole, stdin=pipe, stdout=pipe, text=True, env=caller.environ(), cwd="/"
    ) as process:
        assert process.stdin is not None
        try:
            yield Client(argv, process)
            process.stdin.close()
        except BaseException:
            process.kill()
            raise
        if process.wait():
            raise Unable(f"{' '.join(argv)} ended with {process.returncode}")


@contextmanager
def _internet(caller: Caller) -> Iterator[Internet]:
    folder = Path(caller.folder, "internet")
    folder.mkdir()
    servers = [("echo", SERVER, ECHO), ("source", SERVER, SOURCE)]
    with make_internet(folder, [f"{SERVER}/16"], {NAME: {"A": [SERVER]}}, servers, {}) as internet:
        yield internet


def _exec(caller: Caller, folder: str, network: Any, *command: str) -> list[str]:
    """The arguments that start this command in a cage with this network."""
    text = (Path(policies.__file__).parent / "default.toml").read_text()
    changed = text.replace('ceiling = "none"\nhosts = []', 'ceiling = "allowlist"\nhosts = ["*:*"]')
    if changed == text:
        raise Unable("policies/default.toml has no ceiling of the network that can be raised")
    entry = {"command": command[0], "args": list(command[1:]), "x-sandbox": {"network": network}}
    manifest = caller.write(f"{folder}/mcp.json", json.dumps({"mcpServers": {"bench": entry}}))
    return [RUNNER, "exec", "--policy", caller.write("policies/network.toml", changed), manifest]


# --- memory -------------------------------------------------------------------------------------------------


def find_gate(pid: int) -> int:
    """The pid of the gate: the child of `runner exec` in the host's network namespace, and not in the
    cage's."""
    theirs = os.readlink(f"/proc/{pid}/ns/net")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children if os.readlink(f"/proc/{child}/ns/net") == theirs]
    if len(found) != 1:
        raise Unable(f"the gate is not among the children of {pid}: {children}")
    return found[0]


def private_bytes(pid: int) -> int:
    """The private memory of a process, in bytes."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))
