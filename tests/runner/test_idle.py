"""Waiting costs no processor time: measured for every state in which a session, `exec` or `call` waits.

Each state is a process of its own (a host, or the command line). While it waits, the processor time of every
process below it is read twice. The kernel counts that per process, so a busy machine changes little. All
states of one test wait at once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import sysconf
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import elsewhere
from tests.conftest import Caller
from tests.limits.cage import policy
from tests.runner.launch.monitored_plugins import below
from tests.tables import wait_for
from tests.template import quick_runner, templates  # noqa: F401 -- fixtures

pytestmark = pytest.mark.usefixtures("nothing_left")

Write = Callable[..., Path]

# How long is measured, and the part of that which may be spent. A busy loop spends all of it.
WINDOW_SECONDS = 2.0
MOST_SPENT = 0.05
# Work that began before the plugin fell silent ends within this.
SETTLE_SECONDS = 0.5

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


@pytest.fixture
def folder(plugin_dir: Path, write_file: Write) -> Path:
    run = write_file(plugin_dir / "own/run", PLUGIN, 0o755)
    write_file(plugin_dir / "own/nexo-plugin.toml", NEXO)
    write_file(plugin_dir / "own/policy.toml", policy("prefer"))
    write_file(plugin_dir / "own/mcp.json", MCP % run)
    return plugin_dir / "own"


# --- measuring ---------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Processor time of each process of one state, as a part of the measured time."""

    names: tuple[str, ...]
    parts: tuple[float, ...]


def tree(pid: int) -> list[int]:
    found, ends = [], [pid]
    while ends:
        found.append(ends.pop())
        ends += below(found[-1])
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


def spent_below(pid: int) -> Spent:
    before = {each: seconds_of(each) for each in tree(pid)}
    began = time.monotonic()
    time.sleep(WINDOW_SECONDS)
    after = {each: seconds_of(each) for each in before}
    wall = time.monotonic() - began
    lived = {each: (first, last) for each, first in before.items() if (last := after[each]) and first}
    none = {each for each, last in after.items() if last is not None} - set(lived)
    parts = {each: (last - first) / wall for each, (first, last) in lived.items()} | dict.fromkeys(none, 0.0)
    return Spent(tuple(map(name_of, parts)), tuple(parts.values()))


def measure_quiet(process: subprocess.Popen[bytes], quiet: Callable[[int], bool]) -> Spent:
    """Measure a process and all its descendants once it is quiet."""
    with process:
        try:
            assert wait_for(lambda: quiet(process.pid) or process.poll() is not None, 60.0)
            time.sleep(SETTLE_SECONDS)
            assert process.poll() is None, process.stderr and process.stderr.read()
            return spent_below(process.pid)
        finally:
            process.kill()


def has_silent_plugin(pid: int) -> bool:
    return "sleep" in map(name_of, tree(pid))


def measure_all(starts: Mapping[str, Callable[[], subprocess.Popen[bytes]]]) -> dict[str, Spent]:
    def measure(start: Callable[[], subprocess.Popen[bytes]]) -> Spent:
        return measure_quiet(start(), has_silent_plugin)

    with ThreadPoolExecutor(len(starts)) as pool:
        return dict(zip(starts, pool.map(measure, starts.values()), strict=True))


def check_idle(found: Mapping[str, Spent], processes: int) -> None:
    """`processes`: how many of the runner's, besides the plugin."""
    few = {state: spent.names for state, spent in found.items() if len(spent.parts) <= processes}
    assert not few, f"some processes were missing: {few}"
    busy = {
        state: list(zip(spent.names, spent.parts, strict=True))
        for state, spent in found.items()
        if max(spent.parts) > MOST_SPENT
    }
    assert not busy, busy


def test_a_busy_loop_is_detected() -> None:
    """The control: the measurement detects a busy loop."""
    polls = "import select\nepoll = select.epoll()\nwhile True: epoll.poll(0)"  # like an expired timeout
    loops = subprocess.Popen([sys.executable, "-c", polls])
    assert max(measure_quiet(loops, lambda pid: True).parts) > 2 * MOST_SPENT


# --- sessions ----------------------------------------------------------------------------------------------


def hold(given: dict[str, Any]) -> None:
    """A host whose session enters one state and stays there."""
    import os

    import trio

    from runner.launch.stages import Invocation
    from runner.protocol.dialect import Call
    from runner.session.open import open_session
    from sandbox.policy.grant import Overrides
    from sandbox.spec import Limits

    invocation = Invocation(
        given["manifest"],
        policy=given["policy"],
        args=(given["argument"],),
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
    "farewell pending": ("shutdown", "leave", {}),
    "events unread": ("unread", "wait", {}),
    "plugin does not read": ("deaf", "call", {"bytes": 900_000}),
}


def test_a_waiting_session_is_idle(runner_as: Caller, folder: Path) -> None:
    """Also measures its fork server, its monitor, the cell's init and bubblewrap."""

    def starts(state: str) -> Callable[[], subprocess.Popen[bytes]]:
        argument, then, more = SESSIONS[state]
        manifest = "mcp.json" if argument == "silence" else "nexo-plugin.toml"
        given = {
            "manifest": str(folder / manifest),
            "policy": str(folder / "policy.toml"),
            "argument": argument,
            "then": then,
            **more,
        }
        return lambda: elsewhere.start(runner_as, hold, given)

    # host, fork server, monitor, init, bwrap twice
    check_idle(measure_all({state: starts(state) for state in SESSIONS}), 6)


# --- the command line --------------------------------------------------------------------------------------

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


def test_a_waiting_exec_is_idle(runner_as: Caller, folder: Path) -> None:
    states = folder.parent / "states"
    states.mkdir(mode=0o755)
    runner_as.give(states)

    def starts(name: str) -> Callable[[], subprocess.Popen[bytes]]:
        words: list[str | Path] = ["exec", "--policy", folder / "policy.toml", "--state-dir", states / name]
        words += EXEC[name]
        return lambda: runner_as.start(*words, folder / "nexo-plugin.toml", "--", "launched")

    # the runner, init, bwrap twice
    check_idle(measure_all({name: starts(name) for name in EXEC}), 4)


def test_waiting_tools_and_call_are_idle(runner_as: Caller, folder: Path) -> None:
    """`tools` and `call` with a server that does not answer, for longer than the handshake's first wait."""
    lines: Mapping[str, Sequence[str | Path]] = {
        "tools": ("tools", folder / "mcp.json", "--", "silence"),
        "call": ("call", folder / "mcp.json", "x", "--", "silence"),
    }

    def starts(words: Sequence[str | Path]) -> Callable[[], subprocess.Popen[bytes]]:
        return lambda: runner_as.start(*words)

    # the runner, its fork server, the monitor, init, bwrap twice
    check_idle(measure_all({name: starts(words) for name, words in lines.items()}), 5)
