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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandbox.value import NamedTuple
from scripts.benches.caller import RUNNER, Caller, Unable, failed
from scripts.benches.figures import median, percentile, tail
from scripts.benches.launch import Command, without_shell

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
    pipe = subprocess.PIPE
    with caller.start(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            yield process
            process.stdin.close()
            errors = process.stderr.read()
        except EOFError:
            errors = process.stderr.read()
            raise failed(argv, process.wait(), errors) from None
        except BaseException:
            process.kill()
            raise
        if process.wait() or errors:
            raise failed(argv, process.returncode, errors)


def read_document(process: subprocess.Popen[bytes]) -> Any:
    """Read the next JSON document. Raises EOFError if there is none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise EOFError
    return json.loads(line)


# --- one session --------------------------------------------------------------------------------------------


def bench(caller: Caller, calls: int, colds: int, larges: int) -> None:
    talker = plugin(caller)
    with host(caller, talker, "talk", calls, larges) as process:
        frames, warm, flights, large = (read_document(process) for _ in range(4))
    _show_warm(caller, {PIPE: warm["pipe"], TRIO: warm["trio"], SESSION: warm["session"]})
    _show_flights(caller, {TRIO: flights["trio"], SESSION: flights["session"]})
    _show_large(caller, {PIPE: large["pipe"], PARSED: large["json"], SESSION: large["session"]})
    exchange = Exchange([frame.encode() for frame in frames["opening"]], frames["echo"].encode())
    _show_cold(caller, _colds(caller, talker, exchange, colds))


def _show_warm(caller: Caller, taken: Mapping[str, list[list[float]]]) -> None:
    micro = {name: [1e6 * each for block in blocks for each in block] for name, blocks in taken.items()}
    count = len(micro[PIPE])
    print(f"\nwarm calls, as {caller.name}: {count} of an echo each, in turns, in microseconds")
    for name, samples in micro.items():
        rate = count / sum(samples) * 1e6
        print(f"  {name:20} p50 {median(samples):8.1f}   {tail(samples)}   {rate:8.0f} per second")
    for one, other in ((SESSION, PIPE), (SESSION, TRIO)):
        print(f"  {one} over {other}: {_ratio(taken[one], taken[other])}")


def _show_flights(caller: Caller, taken: Mapping[str, list[list[float]]]) -> None:
    """Calls that do not wait for the answers to others. `taken`: seconds of a call, and those of the host's
    processor."""
    print(f"\ncalls in flight, as {caller.name}: many at once, in turns, in microseconds for each call")
    for name, rounds in taken.items():
        each, busy = ([1e6 * seconds for seconds in column] for column in zip(*rounds, strict=True))
        rate, busy_rate = 1e6 / median(each), 1e6 / median(busy)
        print(
            f"  {name:20} p50 {median(each):8.1f}   min {min(each):7.1f}   {rate:8.0f} per second;  "
            f"of the host's processor {median(busy):6.1f}, {busy_rate:6.0f} per second of it"
        )
    walls = {name: [[seconds] for seconds, _ in rounds] for name, rounds in taken.items()}
    print(f"  {SESSION} over {TRIO}: {_ratio(walls[SESSION], walls[TRIO])}")


def _show_large(caller: Caller, taken: Mapping[str, list[list[float]]]) -> None:
    milli = {name: [1e3 * each for block in blocks for each in block] for name, blocks in taken.items()}
    print(f"\nlarge answers, as {caller.name}: {len(milli[PIPE])} of 4 MiB each, in turns, in milliseconds")
    for name, samples in milli.items():
        rate = LARGE_BYTES / (1 << 20) / median(samples) * 1e3
        print(f"  {name:20} p50 {median(samples):8.1f}   {tail(samples)}   {rate:8.0f} MiB per second")
    for one, other in ((SESSION, PIPE), (SESSION, PARSED)):
        print(f"  {one} over {other}: {_ratio(taken[one], taken[other])}")


def _ratio(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> str:
    """The ratio turn by turn, because both halves of a turn saw the same machine."""
    ratios = [median(one) / median(other) for one, other in zip(ones, others, strict=True)]
    return f"ratio {median(ratios):.2f} (p10 {percentile(ratios, 10):.2f}, p90 {percentile(ratios, 90):.2f})"


# --- calls that start the plugin ----------------------------------------------------------------------------


def _colds(caller: Caller, talker: Plugin, exchange: Exchange, rounds: int) -> Mapping[str, list[Cold]]:
    explain = [RUNNER, "explain", "--format", "argv", talker.manifest]
    bare = without_shell(caller.output_of(explain), caller)
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


def _show_cold(caller: Caller, samples: Mapping[str, list[Cold]]) -> None:
    count = len(samples[SPAWN])
    print(f"\ncold calls, as {caller.name}: {count} each, interleaved, in milliseconds")
    print(f"  {'':20} {'answer':>7} {'p90':>7} {'min':>7}   {'end':>7} {'p90':>7}")
    for name, taken in samples.items():
        answer, end = zip(*taken, strict=True)
        print(
            f"  {name:20} {median(answer):7.1f} {percentile(answer, 90):7.1f} {min(answer):7.1f}   "
            f"{median(end):7.1f} {percentile(end, 90):7.1f}"
        )
    for one, other in ((CALL, SPAWN), (CALL, RAW), (CALL, IMPORT)):
        pairs = list(zip(samples[one], samples[other], strict=True))
        added = median([a.answer - b.answer for a, b in pairs])
        ratio = median([a.answer / b.answer for a, b in pairs])
        whole = median([a.end / b.end for a, b in pairs])
        print(f"  {one} over {other}: answer {added:+.1f}, ratio {ratio:.2f}; end, ratio {whole:.2f}")


# --- many sessions ------------------------------------------------------------------------------------------


def bench_many(caller: Caller, count: int) -> None:
    talker = plugin(caller)
    with host(caller, talker, "many", count, CALLS_EACH) as process:
        assert process.stdin is not None
        read_document(process)
        one = memory(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        opened = read_document(process)["seconds"]
        many = memory(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        raw, taken, closed = (
            read_document(process)["seconds"],
            read_document(process),
            read_document(process)["seconds"],
        )
    print(f"\nsessions, as {caller.name}: {count} at once")
    print(
        f"  opened in {opened * 1000:.0f} ms, closed in {closed * 1000:.0f} ms; "
        f"as many raw plugins were started and greeted in {raw * 1000:.0f} ms"
    )
    total = count * CALLS_EACH
    rates = {name: median([total / each for each in seconds]) for name, seconds in taken.items()}
    pairs = zip(taken["session"], taken["trio"], strict=True)
    ratio = median([one / other for one, other in pairs])
    print(
        f"  calls per second, over all of them: {rates['session']:.0f}; "
        f"by raw pipes {rates['trio']:.0f}, ratio {ratio:.2f}"
    )
    _show_memory(one, many, count)


OURS = ("host", "fork server", "monitors", "inits")


def _show_memory(one: Mapping[str, int], many: Mapping[str, int], count: int) -> None:
    """Print sizes in kB. A page that several processes share is divided among them, so sums are correct."""
    if -1 in many.values():
        print("  memory: not measured, because some processes cannot be read by this user")
        return
    mine = sum(many[name] for name in OURS)
    more = (mine - sum(one[name] for name in OURS)) / (count - 1)
    print(
        f"  memory of the runner per session: {mine / count:.0f} kB; each after the first adds {more:.0f} kB"
    )
    for name in OURS:
        print(f"    {name:8} {many[name]:8} kB, {many[name] / count:8.1f} kB per session")
    for name in ("bwrap", "plugin"):
        print(f"    {name:8} {many[name]:8} kB, {many[name] / count:8.1f} kB per session, not the runner's")


def memory(host_pid: int) -> dict[str, int]:
    """The proportional set size of a host and all its descendants, in kB, by kind; -1 if unreadable."""
    found = dict.fromkeys((*OURS, "bwrap", "plugin"), 0)
    for pid, what in _family(host_pid).items():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except PermissionError:
            found[what] = -1
            continue
        size = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
        if size is None:
            raise Unable(f"this kernel has no Pss in /proc/{pid}/smaps_rollup")
        if found[what] >= 0:
            found[what] += int(size[1])
    return found


def _family(host_pid: int) -> dict[int, str]:
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
