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
from scripts.benches.figures import median, percentile
from scripts.benches.launch import Command, Sample, without_shell
from scripts.internet.machine import Internet, make_internet

SERVER, NAME = "45.33.1.10", "api.example.com"
ECHO, SOURCE = 7, 19
HELD = 100  # connections, when memory is measured
BLOCK = 50  # connections of one turn
DOWNLOAD_BYTES = 256 << 20
WARM_UP = 2

RAW, NONE, LIST, EVERY = "raw bwrap", "no network", "one host", "every port of one"

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


def bench(caller: Caller, launches: int, connections: int, downloads: int) -> None:
    _bench_launch(caller, launches)
    if os.geteuid() != 0:
        print("  connections are not measured: only root can make the namespaces of their servers")
        return
    with _internet(caller) as internet:
        _bench_bytes(caller, internet, connections, downloads)


# --- launch -------------------------------------------------------------------------------------------------


def _bench_launch(caller: Caller, rounds: int) -> None:
    commands = {
        name: Command(_exec(caller, f"launch-{number}", hosts, "/usr/bin/true"), {})
        for number, (name, hosts) in enumerate(
            {NONE: "none", LIST: [f"{NAME}:443"], EVERY: [f"{NAME}:*"]}.items()
        )
    }
    for name, command in tuple(commands.items()):
        try:
            caller.output_of(command.argv)  # fills the caches
        except Unable:
            if name != EVERY:
                raise
            del commands[EVERY]  # it needs nftables in the kernel
    argv = list(commands[NONE].argv)
    argv[1:2] = ["explain", "--format", "argv"]
    commands[RAW] = without_shell(caller.output_of(argv), caller)
    names = list(commands)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            sample = launch.measure(caller, commands[name])
            if turn >= WARM_UP:
                samples[name].append(sample)
    print(
        f"\nnetwork, as {caller.name}: {rounds} launches of /usr/bin/true each, interleaved, in milliseconds"
    )
    pairs = ((LIST, NONE), (EVERY, NONE), (LIST, RAW), (NONE, RAW))
    launch.print_samples(samples, [pair for pair in pairs if pair[0] in samples])


# --- connections --------------------------------------------------------------------------------------------


def _bench_bytes(caller: Caller, internet: Internet, connections: int, downloads: int) -> None:
    ports = [str(ECHO), str(SOURCE)]
    script = caller.write("client/client.py", CLIENT)
    python = ["/usr/bin/python3", "-I", script]
    argv = _exec(caller, "client", [f"{NAME}:{ECHO},{SOURCE}"], *python, NAME, *ports)
    caller.output_of([argv[0], "explain", *argv[2:]])  # fills the caches: a gate has what its launcher had
    with (
        _client(caller, internet, argv) as caged,
        _client(caller, internet, [*python, SERVER, *ports]) as direct,
    ):
        caged.ask("connect", 1)
        gate = find_gate(caged.pid)
        idle = private_bytes(gate)
        block = min(BLOCK, connections)
        ways = {"direct": direct, "through the gate": caged}
        each = _by_turns(ways, "connect", block, -(-connections // block))
        pieces = _by_turns(ways, "download", DOWNLOAD_BYTES, downloads)
        before = private_bytes(gate)
        caged.ask("hold", HELD)
        held = private_bytes(gate)
    _print_connections(caller, each)
    _print_downloads(caller, pieces)
    print(
        f"\nmemory of the gate, as {caller.name}: private to its process, in kB\n"
        f"  after the first connection {idle >> 10:7}\n"
        f"  when all were closed       {before >> 10:7}\n"
        f"  with {HELD} open connections {held >> 10:7}, {(held - before) / HELD / 1024:.1f} for each"
    )


def _by_turns(ways: dict[str, Client], word: str, count: int, rounds: int) -> dict[str, list[list[float]]]:
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for turn in range(WARM_UP + rounds):
        for name in ways if turn % 2 else reversed(ways):
            seconds = ways[name].ask(word, count)
            if turn >= WARM_UP:
                taken[name].append(seconds)
    return taken


def _print_connections(caller: Caller, taken: dict[str, list[list[float]]]) -> None:
    flat = {name: [each * 1000 for block in blocks for each in block] for name, blocks in taken.items()}
    count = len(next(iter(flat.values())))
    print(
        f"\nconnections, as {caller.name}: {count} each, one after the other, by turns; connect, a question, "
        "an answer, close, in milliseconds"
    )
    for name, all_of_it in flat.items():
        print(
            f"  {name:18} p50 {median(all_of_it):7.3f}   p90 {percentile(all_of_it, 90):7.3f}   "
            f"min {min(all_of_it):7.3f}"
        )
    direct, gate = flat.values()
    added = median(gate) - median(direct)
    print(f"  the gate adds p50 {added:.3f} for each, ratio {median(gate) / median(direct):.2f}")


def _print_downloads(caller: Caller, taken: dict[str, list[list[float]]]) -> None:
    rates = {
        name: [DOWNLOAD_BYTES / seconds / (1 << 20) for [seconds] in blocks] for name, blocks in taken.items()
    }
    count = len(next(iter(rates.values())))
    print(
        f"\nthroughput, as {caller.name}: {count} downloads of {DOWNLOAD_BYTES >> 20} MiB each, by turns, "
        "in MiB per second"
    )
    for name, found in rates.items():
        print(f"  {name:18} p50 {median(found):7.0f}   max {max(found):7.0f}")
    direct, gate = rates.values()
    ratios = [one / other for one, other in zip(gate, direct, strict=True)]
    print(
        f"  through the gate over direct: ratio {median(gate) / median(direct):.2f} "
        f"(p10 {percentile(ratios, 10):.2f}, p90 {percentile(ratios, 90):.2f})"
    )


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
def _client(caller: Caller, internet: Internet, argv: list[str]) -> Iterator[Client]:
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
    """Of the children of `runner exec`, the one that is in its network namespace, and not in the cage's."""
    theirs = os.readlink(f"/proc/{pid}/ns/net")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children if os.readlink(f"/proc/{child}/ns/net") == theirs]
    if len(found) != 1:
        raise Unable(f"the gate is not among the children of {pid}: {children}")
    return found[0]


def private_bytes(pid: int) -> int:
    """What the process alone has in memory: what would be free without it."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))
