"""Waiting costs no processor time: measured for every state in which a session, `exec` or `call` waits.

scripts/benches/waiting.py has the states and measures them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scripts.benches import waiting
from scripts.benches.waiting import Spent, Start, measure_all, measure_quiet
from tests import elsewhere
from tests.conftest import Caller
from tests.limits.cage import policy

pytestmark = pytest.mark.usefixtures("nothing_left")

Write = Callable[..., Path]

# The part of the measured time that may be spent. A busy loop spends all of it.
MOST_SPENT = 0.05


@pytest.fixture
def folder(plugin_dir: Path, write_file: Write) -> Path:
    run = write_file(plugin_dir / "own/run", waiting.PLUGIN, 0o755)
    write_file(plugin_dir / "own/nexo-plugin.toml", waiting.NEXO)
    write_file(plugin_dir / "own/policy.toml", policy("prefer"))
    write_file(plugin_dir / "own/mcp.json", waiting.MCP % run)
    return plugin_dir / "own"


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
    # Before others, where that is allowed: on a busy machine it would get a small part of a core.
    loops = subprocess.Popen(["nice", "-n", "-20", sys.executable, "-c", polls], stderr=subprocess.DEVNULL)
    assert max(measure_quiet(loops, lambda pid: True).parts) > MOST_SPENT


def test_a_waiting_session_is_idle(runner_as: Caller, folder: Path) -> None:
    """Also measures its fork server, its monitor, the cell's init and bubblewrap."""

    def starts(state: str) -> Start:
        return lambda: elsewhere.start(runner_as, waiting.hold, waiting.session(folder, state))

    # host, fork server, monitor, init, bwrap twice
    check_idle(measure_all({state: starts(state) for state in waiting.SESSIONS}), 6)


def test_a_waiting_exec_is_idle(runner_as: Caller, folder: Path) -> None:
    states = folder.parent / "states"
    states.mkdir(mode=0o755)
    runner_as.give(states)

    def starts(name: str) -> Start:
        return lambda: runner_as.start(*waiting.exec_line(folder, states / name, name))

    # the runner, init, bwrap twice
    check_idle(measure_all({name: starts(name) for name in waiting.EXEC}), 4)


def test_waiting_tools_and_call_are_idle(runner_as: Caller, folder: Path) -> None:
    """`tools` and `call` with a server that does not answer, for longer than the handshake's first wait."""

    def starts(name: str) -> Start:
        return lambda: runner_as.start(*waiting.line(folder, name))

    # the runner, its fork server, the monitor, init, bwrap twice
    check_idle(measure_all({name: starts(name) for name in waiting.LINES}), 5)
