"""Failures are attributed correctly: the plugin is blamed only for what it did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

import runner
from runner.library import InvalidCall, NotOnTrio, PluginError, PluginFailure, open_plugin
from tests.conftest import Caller
from tests.runner.launch.test_report import faults
from tests.runner.session.test_endings import ENVIRON, NAME, NEXO, PLUGIN, SECONDS, Write
from tests.tables import Line, check_rows, run_lines
from tests.template import prepared

CAT = '{"mcpServers": {"own": {"command": "/usr/bin/cat"}}}'
NOWHERE = '{"mcpServers": {"own": {"command": "/nowhere"}}}'


@pytest.fixture
def folder(plugin_dir: Path, write_file: Write, sessions: None) -> Path:
    write_file(plugin_dir / "own/run", PLUGIN, 0o755)
    write_file(plugin_dir / "own" / NAME, NEXO)
    write_file(plugin_dir / "cat.toml", NEXO.replace("./run", "/usr/bin/cat"))
    write_file(plugin_dir / "cat.json", CAT)
    write_file(plugin_dir / "nowhere.toml", NEXO.replace("./run", "/nowhere"))
    write_file(plugin_dir / "nowhere.json", NOWHERE)
    return plugin_dir


# --- before anything is started ----------------------------------------------------------------------------

# Arguments -> a part of the message. The programs do not exist, so starting one would fail differently.
MISFITS: Mapping[tuple[str, ...], str] = {
    ("nowhere.json", "--kind", "hook"): "--kind hook: the contract mcp has tool, prompt, resource, method",
    ("nowhere.toml", "--kind", "prompt"): "--kind prompt: the contract nexo has tool, hook, channel, ",
    (
        "nowhere.toml",
        "--context",
        '{"agent": "a"}',
    ): "'agent', which is not sent along with a tool; known are agent_id, policy",
    (
        "nowhere.toml",
        "--kind",
        "hook",
        "--context",
        '{"agent_id": "a"}',
    ): "'agent_id', which is not sent along",
    ("nowhere.json", "--context", '{"agent_id": "a"}'): "'agent_id', which is not sent along with a tool",
}


def test_a_kind_or_context_the_contract_lacks_is_a_usage_error(runner_as: Caller, folder: Path) -> None:
    words: list[list[str | Path]] = [["call", folder / file, "x", *options] for file, *options in MISFITS]
    # The control: valid usage gets as far as starting the plugin, which does not exist.
    words.append(["call", folder / "nowhere.toml", "x"])
    words.append(["call", folder / "nowhere.json", "x", "--kind", "prompt"])
    *ended, first, second = run_lines(runner_as, [Line(each) for each in words])

    def check(case: tuple[str, ...], done: Any) -> None:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("runner call: --") and MISFITS[case] in done.stderr, done.stderr

    check_rows(zip(MISFITS, ended, strict=True), check)
    assert (first.returncode, second.returncode) == (10, 10)


# --- a call that was not made ------------------------------------------------------------------------------


def test_a_call_refused_by_the_runner_is_not_blamed_on_the_plugin(runner_as: Caller, folder: Path) -> None:
    report = runner_as.home / "report.json"
    schema = 'dict(type="object", required=["text"])'
    run = folder / "own/run"
    run.write_text(PLUGIN.replace('dict(type="object")', schema))
    done = runner_as("call", "--report", report, folder / "own", "own_tool", "--", "never", "")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "runner: invalid_call in call (-33402, invalid_arguments): the arguments do not fit"
    )
    document = json.loads(report.read_bytes())
    assert faults(document) == []
    assert (document["outcome"]["code"], document["exit"]["status"]) == ("invalid_call", 2)


@pytest.mark.launches
@pytest.mark.trio
async def test_an_invalid_call_is_not_sent(folder: Path) -> None:
    """InvalidCall is a PluginError, so programs that catch that one catch both and can tell them apart."""
    with trio.fail_after(SECONDS):
        act = "send(id=number, error=dict(code=-33403, message='no'))"
        async with open_plugin(folder / "own", args=("called", act), environ=ENVIRON) as plugin:
            for given in ({"context": {"nobody": 1}}, {"kind": "prompt"}, {"input": {1, 2}}):
                with pytest.raises(InvalidCall) as invalid:
                    await plugin.call("own_tool", **given)
                assert invalid.value.outcome.code == "invalid_call"
            with pytest.raises(InvalidCall):
                await plugin.notify("news", {})
            with pytest.raises(PluginError) as refused:
                await plugin.call("own_tool")
            assert not isinstance(refused.value, InvalidCall)
            assert refused.value.outcome.code == "plugin_error"
    assert plugin.report is not None
    assert plugin.report["session"]["calls"] == {"ok": 0, "refused": 5, "failed": 0}


# --- an uncaught failure -----------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.trio
async def test_an_uncaught_failure_prints_message_and_stderr(folder: Path) -> None:
    act = "print('the disk is \\x1b[1mfull', file=sys.stderr, flush=True); os._exit(3)"
    with trio.fail_after(SECONDS):
        with pytest.raises(PluginFailure) as caught:
            await runner.run(folder / "own", "own_tool", args=("called", act), environ=ENVIRON)
        with pytest.raises(BaseExceptionGroup) as group:
            async with (
                open_plugin(folder / "own", args=("called", act), environ=ENVIRON) as plugin,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(plugin.call, "own_tool")
    (within,) = group.value.exceptions
    for failure in (caught.value, within):
        assert str(failure).splitlines() == [
            "crashed: the plugin ended with status 3, before it answered; the plugin's stderr may say why",
            "its stderr ends with:",
            r"| the disk is \x1b[1mfull",
        ]


# --- a plugin that echoes its input ------------------------------------------------------------------------


def test_an_echo_is_not_reported_as_a_refusal(runner_as: Caller, folder: Path) -> None:
    for file in ("cat.toml", "cat.json"):
        done = runner_as("tools", folder / file)
        assert done.returncode == 11
        assert "handshake_failed in handshake (echo): " in done.stderr
        assert "sends our own messages back" in done.stderr and "refuse" not in done.stderr


# --- a plugin that hangs -----------------------------------------------------------------------------------

HANGS = """\
for line in sys.stdin:
    if json.loads(line).get("method") == "shutdown":
        print("asked to leave", file=sys.stderr, flush=True)
        time.sleep(1000)
"""
# The contract gives much time for the answer to shutdown. After a timeout there is less, in which the plugin
# has to write its words.
TIMES = """\
from runner.contracts.nexo import timeouts
from runner.session import shutdown
timeouts._METHODS["shutdown"] = (1000.0, "")
shutdown._HURRIED_SECONDS = 3.0
"""


def test_after_a_timeout_the_shutdown_is_short(runner_as: Caller, folder: Path) -> None:
    report = runner_as.home / "report.json"
    words = (
        "call",
        "--timeout",
        "500ms",
        "--report",
        report,
        folder / "own",
        "own_tool",
        "--",
        "called",
        HANGS,
    )
    done = prepared(runner_as, TIMES)(*words)
    assert done.returncode == 12
    (line,) = done.stderr.splitlines()  # without the plugin's stderr during shutdown
    assert line.startswith("runner: timeout in call (deadline): there was no answer within 500ms; ")
    document = json.loads(report.read_bytes())
    assert faults(document) == []
    assert document["session"]["stderr_tail"] == "asked to leave\n" and document["session"]["forced"]
    assert document["timings"]["teardown"] < 1000.0


# --- not on trio -------------------------------------------------------------------------------------------


def test_calling_the_library_without_trio_raises() -> None:
    async def open_and_close() -> None:
        async with open_plugin("nowhere"):
            pass

    for work in (open_and_close, lambda: runner.run("nowhere", "x")):
        with pytest.raises(NotOnTrio, match="this library runs on trio"):
            asyncio.run(work())
    assert issubclass(runner.NotOnTrio, RuntimeError)
