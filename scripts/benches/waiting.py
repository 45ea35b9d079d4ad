"""What waiting costs: the processor time of every state in which a session, `exec` or `call` waits.

Each state is a process of its own (a host, or the command line). While it waits, the processor time of every
process below it is read twice. The kernel counts that per process, so a busy machine changes little. All
states wait at once. tests/runner/test_idle.py makes the same states and checks that none of them is busy.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import sysconf
from pathlib import Path
from typing import Any

from sandbox.speed.value import NamedTuple
from scripts.benches.caller import RUNNER, Caller, Unable
from scripts.benches.launch import policy
from scripts.benches.rows import Row, Table

Start = Callable[[], "subprocess.Popen[bytes]"]

WINDOW_SECONDS = 2.0
# Work that began before the plugin fell silent ends within this.
SETTLE_SECONDS = 0.5
QUIET_WITHIN_SECONDS = 120.0
_BY_CGROUP = ("memory", "pids", "cpu", "cpu_time", "io")

# A plugin that falls silent by executing `sleep`, which can be seen from outside.
PLUGIN = """\
#!/usr/bin/python3 -I
import json, os, sys
state = sys.argv[1]

def fall_silent():
    os.execv("/bin/sleep", ["sleep", "1000"])

def answer(message, result):
    sys.stdout.write(json.dumps(dict(jsonrpc="2.0", id=message["id"], result=result)) + "\\n")
    sys.stdout.flush()

if state == "launched":
    fall_silent()
first = sys.stdin.readline()
if state == "silence":
    sys.stdin.readline()
if state in ("handshake", "silence"):
    fall_silent()
plugin = dict(id="own", version="1.0.0", name="Own")
tool = dict(name="own_tool", description="Own.", input_schema=dict(type="object"))
answer(json.loads(first), dict(manifest=dict(plugin=plugin), server_version="1", tools=[tool]))
if state == "unread":
    print("not the protocol\\n" * 1000, flush=True)
if state in ("idle", "unread", "deaf"):
    fall_silent()
for line in sys.stdin:
    if json.loads(line)["method"] in (state, "shutdown"):
        fall_silent()
"""
NEXO = """\
[plugin]
id = "own"
version = "1.0.0"
name = "Own"
description = "Falls silent."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "./run"
[plugin.extends]
tools = ["own_tool"]
[plugin.sandbox]
enabled = true
fs_write_paths = ["${state_dir}"]
"""
MCP = '{"mcpServers": {"own": {"command": "%s"}}}'


# --- measuring ---------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Processor time of each process of one state, as a part of the measured time."""

    names: tuple[str, ...]
    parts: tuple[float, ...]


def child_pids(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def tree(pid: int) -> list[int]:
    found, ends = [], [pid]
    while ends:
        found.append(ends.pop())
        ends += child_pids(found[-1])
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def seconds_of(pid: int) -> float | None:
    """Processor time in user and kernel mode, of all threads."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[11]) + int(words[12])) / sysconf("SC_CLK_TCK")


def spent_below(pid: int, seconds: float) -> Spent:
    """The processor time that a process and its descendants use within `seconds`."""
    before = {each: seconds_of(each) for each in tree(pid)}
    began = time.monotonic()
    time.sleep(seconds)
    after = {each: seconds_of(each) for each in before}
    wall = time.monotonic() - began
    lived = {each: (first, last) for each, first in before.items() if (last := after[each]) and first}
    none = {each for each, last in after.items() if last is not None} - set(lived)
    parts = {each: (last - first) / wall for each, (first, last) in lived.items()} | dict.fromkeys(none, 0.0)
    return Spent(tuple(map(name_of, parts)), tuple(parts.values()))


def measure_quiet(
    process: subprocess.Popen[bytes], quiet: Callable[[int], bool], seconds: float = WINDOW_SECONDS
) -> Spent:
    """Measure a process and all its descendants once it is quiet."""
    with process:
        try:
            until = time.monotonic() + QUIET_WITHIN_SECONDS
            while not quiet(process.pid) and process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            if not quiet(process.pid):
                raise Unable(f"{process.args!r} did not begin to wait; its status is {process.poll()}")
            time.sleep(SETTLE_SECONDS)
            spent = spent_below(process.pid, seconds)
            if process.poll() is not None:
                raise Unable(f"{process.args!r} ended with {process.returncode} while it should have waited")
            return spent
        finally:
            process.kill()


def has_silent_plugin(pid: int) -> bool:
    return "sleep" in map(name_of, tree(pid))


def measure_all(starts: Mapping[str, Start], seconds: float = WINDOW_SECONDS) -> dict[str, Spent]:
    """Measure all states at once."""

    def measure(start: Start) -> Spent:
        return measure_quiet(start(), has_silent_plugin, seconds)

    with ThreadPoolExecutor(len(starts)) as pool:
        return dict(zip(starts, pool.map(measure, starts.values()), strict=True))


# --- the states --------------------------------------------------------------------------------------------


def hold(given: dict[str, Any]) -> None:
    """A host whose session enters one state and stays there."""
    import os

    import trio

    from runner.launch.stages import Invocation
    from runner.protocol.dialect import Call
    from runner.session.open import open_session
    from sandbox.spec import Limits, Overrides

    invocation = Invocation(
        given["manifest"],
        policy=given["policy"],
        args=(given["argument"],),
        state_dir=given.get("state_dir"),
        overrides=Overrides(limits=Limits(**given.get("limits", {}))),
    )
    environ = {**os.environ, "NEXO_PLUGIN_INIT_TIMEOUT_MS": "600000", "NEXO_PLUGIN_TOOL_TIMEOUT_MS": "600000"}

    async def main() -> None:
        async with open_session(invocation, environ=environ) as session:
            if given["then"] == "call":
                await session.call(Call("tool", "own_tool", {"text": "x" * given.get("bytes", 1)}))
            elif given["then"] == "wait":
                await trio.sleep_forever()
            # Otherwise the session shuts down when the context ends.

    trio.run(main)


# State -> the plugin's argument, what the host does after the handshake, and other settings.
SESSIONS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "handshake pending": ("handshake", "wait", {}),
    "silent after its patience": ("silence", "wait", {"limits": {"handshake": 30}}),
    "call pending": ("tool.invoke", "call", {}),
    "open and idle": ("idle", "wait", {"limits": {"idle": 1000, "memory": 64 << 20, "cpu_time": 900}}),
    "shutdown pending": ("shutdown", "leave", {}),
    "events unread": ("unread", "wait", {}),
    "plugin does not read": ("deaf", "call", {"bytes": 900_000}),
}

EXEC: Mapping[str, Sequence[str]] = {
    "nothing limited": (),
    "memory": ("--memory", "64M"),
    "pids": ("--pids", "16"),
    "output": ("--limit", "output=1M", "--limit", "output_lines=1000"),
    "cpu time": ("--cpu-time", "60"),
    "disk": ("--limit", "disk=256M"),
    "deadline": ("--deadline", "600", "--limit", "launch=30"),
    "inspected": ("--inspect",),
    "everything": (
        *("--memory", "64M", "--pids", "16", "--cpu-time", "60", "--deadline", "600", "--inspect"),
        *("--limit", "output=1M", "--limit", "disk=256M"),
    ),
}


# State -> the arguments, of which FOLDER stands for the plugin's.
LINES: Mapping[str, Sequence[str]] = {
    "tools, no answer": ("tools", "FOLDER/mcp.json", "--", "silence"),
    "call, no answer": ("call", "FOLDER/mcp.json", "x", "--", "silence"),
}


def session(folder: Path, state: str, state_dir: Path | None = None) -> dict[str, Any]:
    """What `hold` has to know to enter a state. `state_dir`: None is the usual one."""
    argument, then, more = SESSIONS[state]
    manifest = "mcp.json" if argument == "silence" else "nexo-plugin.toml"
    return {
        "manifest": str(folder / manifest),
        "policy": str(folder / "policy.toml"),
        "argument": argument,
        "then": then,
        "state_dir": state_dir and str(state_dir),
        **more,
    }


def exec_line(folder: Path, state_dir: Path, name: str) -> list[str]:
    """The arguments with which `runner` enters a state of EXEC."""
    words = ["exec", "--policy", str(folder / "policy.toml"), "--state-dir", str(state_dir), *EXEC[name]]
    return [*words, str(folder / "nexo-plugin.toml"), "--", "launched"]


def line(folder: Path, name: str) -> list[str]:
    return [word.replace("FOLDER", str(folder)) for word in LINES[name]]


# --- the benchmark -----------------------------------------------------------------------------------------


def bench(caller: Caller, seconds: float) -> list[Table]:
    folder = _install(caller)
    script = caller.write("waiting/hold.py", _program())
    states = Path(caller.own("states-waiting"))
    commands = {
        f"session: {state}": [
            sys.executable,
            "-I",
            script,
            json.dumps(session(folder, state, states / state)),
        ]
        for state in SESSIONS
    }
    commands |= {f"exec: {name}": [RUNNER, *exec_line(folder, states / name, name)] for name in EXEC}
    commands |= {name: [RUNNER, *line(folder, name)] for name in LINES}
    found = measure_all({name: _start(caller, argv) for name, argv in commands.items()}, seconds)
    # Only the largest: the sum of many processes would be mostly rounding.
    rows = [
        Row(name, "% of a processor", [100 * max(spent.parts)])
        for name, spent in found.items()
        if spent.parts
    ]
    about = (
        f"the busiest process of each state during {seconds:g} seconds of waiting, all states at once; the "
        f"kernel counts in steps of {100 / sysconf('SC_CLK_TCK') / seconds:.2g} %"
    )
    return [Table("waiting", "processor time of waiting", caller.name, about, rows)]


def _install(caller: Caller) -> Path:
    program = caller.write("own/run", PLUGIN)
    os.chmod(program, 0o755)
    caller.write("own/mcp.json", MCP % program)
    # Preferred, so that an ordinary user without cgroups can be measured too.
    preferred = "".join(f'[limits.{name}]\nmode = "prefer"\n' for name in _BY_CGROUP)
    caller.write("own/policy.toml", policy({}) + preferred)
    return Path(caller.write("own/nexo-plugin.toml", NEXO)).parent


def _program() -> str:
    """`hold` as a program: the user that is measured may not be able to read this file."""
    lines = ("from __future__ import annotations", inspect.getsource(hold), "import json, sys")
    return "\n".join((*lines, "hold(json.loads(sys.argv[1]))\n"))


def _start(caller: Caller, argv: Sequence[str]) -> Start:
    # Not a pipe: nobody would read it.
    null = subprocess.DEVNULL
    return lambda: caller.start(argv, stdin=null, stdout=null, stderr=null)
