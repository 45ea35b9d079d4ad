"""What a call costs: over an open session, with the start of the plugin, with a large answer, and in many
sessions at once.

For comparison the same plugin is called through plain pipes, with the same frames and without a cage.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sandbox.speed.value import NamedTuple
from scripts.benches import launch
from scripts.benches.caller import RUNNER, Caller, Unable, failed
from scripts.benches.hosting import go_on, hosting, read_document
from scripts.benches.launch import Command
from scripts.benches.rows import PER_SECOND, Against, Row, Table

LARGE_BYTES = 4 << 20
CALLS_EACH = 50  # for each of many sessions, per turn
WARM_UP = 2

# An MCP server: its contract is the one whose messages may be as large as LARGE_BYTES.
PLUGIN = f"""\
#!/usr/bin/python3 -ISE
import json, sys
lines = []
for line in sys.stdin.buffer:
    message = json.loads(line)
    if len(lines) < 8:
        lines.append(line.decode())
    if "id" not in message:
        continue
    if message["method"] == "server/discover":
        result = {{"supportedVersions": ["2026-07-28"], "capabilities": {{"tools": {{}}}}}}
    elif message["method"] == "tools/call":
        name = message["params"]["name"]
        text = "x" * {LARGE_BYTES} if name == "large" else message["params"]["arguments"]["text"]
        result = {{"content": [{{"type": "text", "text": text}}]}}
        if name == "heard":
            result["structuredContent"] = {{"lines": lines}}
    else:
        raise SystemExit(f"asked for {{message['method']}}")
    answer = {{"jsonrpc": "2.0", "id": message["id"], "result": {{"resultType": "complete", **result}}}}
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""

PIPE, TRIO, SESSION = "a raw pipe", "a raw pipe, by trio", "a session"
PARSED = "that, and json.loads"
ON_TRIO, ON_ASYNCIO = "a session, on trio", "a session, on asyncio"
SPAWN, RAW, CALL, IMPORT = "raw spawn", "raw bwrap", "runner call", "import trio"


class Plugin(NamedTuple):
    manifest: str
    argv: list[str]


class Exchange(NamedTuple):
    """The frames that are sent to a plugin that was started without the runner."""

    opening: list[bytes]
    echo: bytes


class Cold(NamedTuple):
    """Milliseconds since the start."""

    answer: float
    end: float


def plugin(caller: Caller) -> Plugin:
    program = caller.write("talker/talker.py", PLUGIN)
    os.chmod(program, 0o755)
    servers = {"talker": {"command": "./talker.py"}}
    return Plugin(caller.write("talker/mcp.json", json.dumps({"mcpServers": servers})), [program])


@contextmanager
def host(caller: Caller, talker: Plugin, kind: str, *counts: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run scripts/benches/host.py."""
    # Passed as source: the user that is measured may not be allowed to read the checkout.
    script = caller.write("host/host.py", Path(__file__).with_name("host.py").read_text())
    argv = [sys.executable, "-I", script, kind, talker.manifest, *map(str, counts), "--", *talker.argv]
    with hosting(caller, argv) as process:
        yield process


# --- one session --------------------------------------------------------------------------------------------


def bench(caller: Caller, calls: int, colds: int, larges: int) -> list[Table]:
    talker = plugin(caller)
    with host(caller, talker, "talk", calls, larges) as process:
        frames, warm, flights, large = (read_document(process) for _ in range(4))
    with host(caller, talker, "faces", calls, 0) as process:
        lone, many = read_document(process), read_document(process)
    exchange = Exchange([frame.encode() for frame in frames["opening"]], frames["echo"].encode())
    return [
        _warm(caller, {PIPE: warm["pipe"], TRIO: warm["trio"], SESSION: warm["session"]}),
        *_flights(caller, {TRIO: flights["trio"], SESSION: flights["session"]}),
        *_faces(caller, lone, many),
        _large(caller, {PIPE: large["pipe"], PARSED: large["json"], SESSION: large["session"]}),
        *_cold(caller, _colds(caller, talker, exchange, colds)),
    ]


def _warm(caller: Caller, taken: Mapping[str, list[list[float]]]) -> Table:
    over = {SESSION: (Against(PIPE, (PIPE,)), Against(TRIO, (TRIO,)))}
    rows = _rows(taken, "µs", 1e6, over, {SESSION: "a call of an open session"})
    about = f"{len(rows[0].samples)} of an echo each, by turns"
    return Table("call", "warm calls", caller.name, about, rows)


def _flights(caller: Caller, taken: Mapping[str, list[list[float]]]) -> list[Table]:
    """Concurrent calls. `taken`: seconds of a call, and processor seconds of the host."""
    over = {SESSION: (Against(TRIO, (TRIO,)),)}
    tables = []
    for column, (title, headline) in enumerate(
        (("calls in flight", "a call among many in flight"), ("calls in flight, the host's processor", ""))
    ):
        blocks = {name: [[each[column]] for each in rounds] for name, rounds in taken.items()}
        rows = _rows(blocks, "µs", 1e6, over, {SESSION: headline} if headline else {})
        tables.append(Table("call", title, caller.name, "many at once, by turns, for each call", rows))
    return tables


def _faces(
    caller: Caller, lone: Mapping[str, list[list[float]]], many: Mapping[str, list[list[float]]]
) -> list[Table]:
    """The library on trio and on asyncio. `many`: as in `_flights`."""
    over = {ON_ASYNCIO: (Against("trio", (ON_TRIO,)),)}
    seconds = {name: [each[:1] for each in rounds] for name, rounds in many.items()}
    busy = {name: [each[1:] for each in rounds] for name, rounds in many.items()}
    tables = []
    for title, taken, headline in (
        ("both faces, one call at a time", lone, "a call of an open session, on asyncio"),
        ("both faces, calls in flight", seconds, "the same among many in flight"),
        ("both faces, calls in flight, the host's processor", busy, ""),
    ):
        named = {ON_TRIO: taken["trio"], ON_ASYNCIO: taken["asyncio"]}
        rows = _rows(named, "µs", 1e6, over, {ON_ASYNCIO: headline} if headline else {})
        about = "an echo, by turns, for each call; with calls in flight there are 32 tasks"
        tables.append(Table("call", title, caller.name, about, rows))
    return tables


def _large(caller: Caller, taken: Mapping[str, list[list[float]]]) -> Table:
    over = {SESSION: (Against(PIPE, (PIPE,)), Against(PARSED, (PARSED,)))}
    rows = _rows(taken, "ms", 1e3, over, {})
    about = f"{len(rows[0].samples)} of 4 MiB each, by turns"
    return Table("call", "large answers", caller.name, about, rows)


def _rows(
    taken: Mapping[str, list[list[float]]],
    unit: str,
    scale: float,
    over: Mapping[str, tuple[Against, ...]],
    headlines: Mapping[str, str],
) -> list[Row]:
    return [
        Row(
            name,
            unit,
            [scale * each for block in blocks for each in block],
            over.get(name, ()),
            headlines.get(name, ""),
        )
        for name, blocks in taken.items()
    ]


# --- calls that start the plugin ----------------------------------------------------------------------------


def _colds(caller: Caller, talker: Plugin, exchange: Exchange, rounds: int) -> Mapping[str, list[Cold]]:
    bare = launch.raw(caller, [RUNNER, "exec", talker.manifest])
    call = [RUNNER, "call", talker.manifest, "echo", "--input", '{"text":"hello"}']
    commands: dict[str, tuple[Command, Exchange | None]] = {
        SPAWN: (Command(talker.argv, {}), exchange),
        RAW: (bare, exchange),
        IMPORT: (Command([sys.executable, "-Ic", "import trio; print('hello')"], {}), None),
        CALL: (Command(call, {}), None),
    }
    samples: dict[str, list[Cold]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(WARM_UP + rounds):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            sample = cold(caller, *commands[name])
            if turn >= WARM_UP:
                samples[name].append(sample)
    return samples


def cold(caller: Caller, command: Command, exchange: Exchange | None) -> Cold:
    """Start a plugin, get one answer, wait for its end. `exchange`: None if the command does all of that."""
    pipe = subprocess.PIPE
    with command.opened():
        start = time.perf_counter()
        process = caller.start(
            command.argv,
            stdin=pipe if exchange else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            pass_fds=tuple(command.files),
        )
    with process:
        assert process.stdout is not None and process.stderr is not None
        for frame in (*exchange.opening, exchange.echo) if exchange else (b"",):
            if exchange:
                assert process.stdin is not None
                process.stdin.write(frame)
            if exchange is None or b'"id"' in frame:
                line = process.stdout.readline()
        answered = time.perf_counter()
        if process.stdin is not None:
            process.stdin.close()
        errors = process.stderr.read()
        process.wait()
    ended = time.perf_counter()
    if process.returncode or errors or b"hello" not in line:
        raise failed(command.argv, process.returncode, errors)
    return Cold((answered - start) * 1000, (ended - start) * 1000)


def _cold(caller: Caller, samples: Mapping[str, list[Cold]]) -> list[Table]:
    over = {CALL: (Against(RAW, (RAW,)), Against(SPAWN, (SPAWN,)), Against(IMPORT, (IMPORT,)))}
    about = f"{len(samples[SPAWN])} each, interleaved, from the start of the process"
    tables = []
    for title, end in (("cold calls, to the answer", False), ("cold calls, to the end", True)):
        rows = [
            Row(
                name,
                "ms",
                [each.end if end else each.answer for each in taken],
                over.get(name, ()),
                "`runner call`, to the answer" if name == CALL and not end else "",
            )
            for name, taken in samples.items()
        ]
        tables.append(Table("call", title, caller.name, about, rows))
    return tables


# --- many sessions ------------------------------------------------------------------------------------------


def bench_many(caller: Caller, count: int) -> list[Table]:
    talker = plugin(caller)
    with host(caller, talker, "many", count, CALLS_EACH) as process:
        read_document(process)
        one = memory(process.pid)
        go_on(process)
        opened = read_document(process)["seconds"]
        many = memory(process.pid)
        go_on(process)
        raw, taken, closed = (
            read_document(process)["seconds"],
            read_document(process),
            read_document(process)["seconds"],
        )
    total = count * CALLS_EACH
    rates = {name: [total / each for each in seconds] for name, seconds in taken.items()}
    by_raw, started = "calls by raw pipes", "as many raw plugins started and greeted"
    rows = [
        Row(by_raw, PER_SECOND, rates["trio"]),
        Row("calls by sessions", PER_SECOND, rates["session"], (Against("raw pipes", (by_raw,)),)),
        Row(started, "ms", [raw * 1000]),
        Row("opened", "ms", [opened * 1000], (Against("raw plugins", (started,)),)),
        Row("closed", "ms", [closed * 1000]),
    ]
    about = f"{count} at once, {CALLS_EACH} calls of each in a turn"
    return [Table("sessions", "many sessions", caller.name, about, rows), _memory(caller, one, many, count)]


OURS = ("host", "fork server", "monitors", "inits")


def _memory(caller: Caller, one: Mapping[str, int], many: Mapping[str, int], count: int) -> Table:
    """Sizes in kB. A page that several processes share is divided among them, so sums are correct."""
    title, about = "memory of many sessions", f"{count} at once, for each of them (PSS)"
    if -1 in many.values():
        note = "memory is not measured: this user cannot read some of the processes"
        return Table("sessions", title, caller.name, about, (), (note,))
    mine = sum(many[name] for name in OURS)
    more = (mine - sum(one[name] for name in OURS)) / (count - 1)
    bwrap = "bwrap, not the runner's"
    rows = [
        Row("the runner", "kB", [mine / count], (Against("bwrap", (bwrap,)),)),
        Row("the runner, each after the first", "kB", [more], (Against("bwrap", (bwrap,)),)),
        *(Row(f"of that {name}", "kB", [many[name] / count]) for name in OURS),
        Row(bwrap, "kB", [many["bwrap"] / count]),
        Row("the plugin, not the runner's", "kB", [many["plugin"] / count]),
    ]
    return Table("sessions", title, caller.name, about, rows)


def memory(host_pid: int) -> dict[str, int]:
    """The proportional set size of a host and all its descendants, in kB, by kind; -1 if unreadable."""
    found = dict.fromkeys((*OURS, "bwrap", "plugin"), 0)
    for pid, what in family(host_pid).items():
        try:
            size = pss(pid)
        except PermissionError:
            found[what] = -1
            continue
        if found[what] >= 0:
            found[what] += size
    return found


def pss(pid: int) -> int:
    """The proportional set size of one process, in kB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    size = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    if size is None:
        raise Unable(f"this kernel has no Pss in /proc/{pid}/smaps_rollup")
    return int(size[1])


def family(host_pid: int) -> dict[int, str]:
    """A host and its descendants: what each is."""
    kinds = {host_pid: "host"}
    left = [host_pid]
    while left:
        parent = left.pop()
        for task in os.listdir(f"/proc/{parent}/task"):
            for word in Path(f"/proc/{parent}/task/{task}/children").read_text().split():
                name = Path(f"/proc/{word}/comm").read_text().strip()
                kinds[int(word)] = _kind(name, kinds[parent])
                left.append(int(word))
    return kinds


def _kind(name: str, parent: str) -> str:
    """A cell's init has the name of its monitor until it has executed the program that waits."""
    if parent == "host":
        return "fork server"
    if name == "runner-init":
        return "inits"
    if name == "runner-monitor":
        return "monitors" if parent == "fork server" else "inits"
    return "bwrap" if name == "bwrap" else "plugin"
