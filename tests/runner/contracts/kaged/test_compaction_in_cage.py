"""A compaction with real plugins in their cages, as root and as a user."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

PROGRAM = """
import contextlib, json, sys
import runner, trio
from runner.contracts.kaged.compaction import TwoCompactors, compact


async def builtin():
    return "dropped"


async def main():
    async with contextlib.AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(
                runner.open_plugin(f"bare/{name}.yaml", policy="policy.toml", state_dir=f"state-{name}")
            )
            for name in sys.argv[1:]
        ]
        for number in range(2):
            done = await compact(
                members,
                messages_being_compacted="old",
                messages_remaining="new",
                strategy="summarize",
                trigger="token_limit",
                agent_path="primary.subagents.scout",
                builtin=builtin,
            )
            print(json.dumps(done))


try:
    trio.run(main)
except* TwoCompactors as group:
    print(group.exceptions[0])
"""

BAD = ("slow", "crashing", "refusing")


@pytest.fixture
def compacted(
    plugin_dir: Path, runner_as: Caller, write_file: Callable[..., Path]
) -> Callable[..., list[str]]:
    """What the program prints that compacts twice with these plugins."""
    shutil.copytree(ROOT / "tests/plugins/kaged_bare", plugin_dir / "bare")
    (plugin_dir / "bare/kaged-plugin.yaml").rename(plugin_dir / "bare/observer.yaml")
    for path in (plugin_dir / "bare").rglob("*"):
        path.chmod(0o755)
    for mode in (*BAD, "second"):
        data = {
            "name": mode,
            "version": "1.0.0",
            "kaged_api": 1,
            "description": "Takes part.",
            "command": ["./plugin.py", mode, mode],
            "hooks": ["pre_compact", "post_compact"],
            "roles": ["compactor" if mode == "second" else "observer"],
            "hook_timeout_sec": 1 if mode == "slow" else 30,
        }
        write_file(plugin_dir / f"bare/{mode}.yaml", json.dumps(data))
        data |= {"name": f"{mode}-compactor", "roles": ["compactor"]}
        data["command"] = ["./plugin.py", mode, f"{mode}-compactor"]
        write_file(plugin_dir / f"bare/{mode}-compactor.yaml", json.dumps(data))
    write_file(plugin_dir / "policy.toml", 'version = 1\n[write]\nceiling = ["${state_dir}"]\n')
    # In a folder of its own: no plugin may write to where a program of the host is.
    write_file(plugin_dir / "host/program.py", PROGRAM)
    runner_as.give(plugin_dir)

    def run(*names: str) -> list[str]:
        done = subprocess.run(
            [*runner_as.prefix, *runner_as.python, "host/program.py", *names],
            cwd=plugin_dir,
            env=dict(runner_as.environ),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


OBSERVED = ["bare", "bare was here", ["summarize", "token_limit"]]


def test_all_take_part(compacted: Callable[..., list[str]]) -> None:
    summary = {"summary": "OLD", "agent": "primary.subagents.scout"}
    expected = [summary, "shortener", [OBSERVED], []]
    assert [json.loads(line) for line in compacted("compactor", "observer")] == [expected] * 2


def test_those_that_fail_stop_nobody(compacted: Callable[..., list[str]]) -> None:
    first, second = (json.loads(line) for line in compacted(*BAD, "observer", "compactor"))
    replacement, by, contributions, failures = first
    assert (replacement["summary"], by) == ("OLD", "shortener")
    # The refusing one lives and answers the next hook. The slow one still sleeps, the crashing one is gone.
    assert [each[0] for each in contributions] == ["refusing", "bare"]
    assert [each[:2] for each in failures] == [
        ["slow", "pre_compact"],
        ["crashing", "pre_compact"],
        ["refusing", "pre_compact"],
        ["slow", "post_compact"],
        ["crashing", "post_compact"],
    ]
    assert all(each[2] for each in failures)
    assert "not now" in failures[2][2]
    assert [each[0] for each in second[2]] == ["refusing", "bare"]


@one_case("mode", BAD)
def test_a_compactor_that_fails_is_replaced(compacted: Callable[..., list[str]], mode: str) -> None:
    replacement, by, contributions, failures = json.loads(compacted(f"{mode}-compactor", "observer")[0])
    assert (replacement, by) == ("dropped", "")
    assert failures[0][:2] == [f"{mode}-compactor", "pre_compact"]
    assert OBSERVED in contributions


def test_two_compactors_are_refused(compacted: Callable[..., list[str]]) -> None:
    [said] = compacted("compactor", "observer", "second")
    assert said.startswith("the plugins 'shortener' and 'second' both have the role compactor")
