"""How a plugin's end is reported: who ended it, in which phase, and the call it left unanswered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.library import OpenPlugin, PluginFailure, open_plugin
from runner.protocol.dialect import Notice
from scripts.benches.waiting import has_silent_plugin
from tests.conftest import SYSTEM_PATH, Caller
from tests.limits.cage import group_of, whole_group
from tests.manifests import nexo
from tests.runner.launch.monitored_plugins import is_sound
from tests.runner.launch.test_report import faults
from tests.tables import Line, check_rows, run_lines, wait_for

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
SECONDS = 60.0

Write = Callable[..., Path]

# Speaks nexo and MCP, and executes its second argument, which is Python, at the moment its first argument
# names: `start`, `ready` after the handshake, `called` on a call, `leave` on shutdown.
PLUGIN = """\
#!/usr/bin/python3 -I
import json, os, signal, sys, time

def send(**message):
    sys.stdout.write(json.dumps(dict(jsonrpc="2.0", **message)) + "\\n")
    sys.stdout.flush()

when, what = sys.argv[1:3]
name = dict(id="own", version="1.0.0", name="own")
tools = [dict(name="own_tool", description="Own.", input_schema=dict(type="object"))]
if when == "start":
    exec(what)
for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if method == "server/discover":
        send(id=number, error=dict(code=-32601, message="no"))
    elif method == "initialize" and "nexo_version" in message["params"]:
        send(id=number, result=dict(manifest=dict(plugin=name), server_version="1", tools=tools))
    elif method == "initialize":
        version = message["params"]["protocolVersion"]
        send(id=number, result=dict(protocolVersion=version, capabilities=dict(tools={}), serverInfo=name))
    elif method == "shutdown" and when != "leave":
        send(id=number, result=dict(ok=True))
        break
    elif number is not None and when == "called":
        exec(what)
    if method in ("initialize", "notifications/initialized") and "method" in message and when == "ready":
        if method != "initialize" or "nexo_version" in message["params"]:
            exec(what)
if when == "leave":
    exec(what)
"""
NAME = "nexo-plugin.toml"
NEXO = nexo("own") + '[plugin.extends]\ntools = ["own_tool"]\nhooks = ["own_hook"]\n'
POLICY = 'version = 1\n[hooks]\non_failure = "abort"\n'


@pytest.fixture
def folder(plugin_dir: Path, write_file: Write, sessions: None) -> Path:
    run = write_file(plugin_dir / "own/run", PLUGIN, 0o755)
    write_file(plugin_dir / "own/nexo-plugin.toml", NEXO)
    write_file(plugin_dir / "own/mcp.json", json.dumps({"mcpServers": {"own": {"command": str(run)}}}))
    write_file(plugin_dir / "abort.toml", POLICY)
    return plugin_dir / "own"


def opened(manifest: Path, *args: str, **more: Any) -> Any:
    return open_plugin(manifest, args=args, environ=ENVIRON, **more)


# --- ended by itself ---------------------------------------------------------------------------------------

# What it does -> cause, and words of the message.
UNASKED: Mapping[str, tuple[str, str]] = {
    "os._exit(0)": ("exit:0", "with status 0"),
    "print('why', file=sys.stderr, flush=True); os._exit(3)": ("exit:3", "with status 3"),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("signal:11", "by signal 11"),
}


@pytest.mark.launches
@pytest.mark.trio
async def test_an_unexpected_end_is_an_event_and_in_the_report(folder: Path) -> None:
    """The end is an event, the session's outcome, and the outcome of every later call."""
    found: dict[tuple[str, str], tuple[list[Any], PluginFailure, OpenPlugin]] = {}

    async def use(manifest: str, act: str) -> None:
        with trio.fail_after(SECONDS):
            async with opened(folder / manifest, "ready", act) as plugin:
                events = [event async for event in plugin.events()]  # until it ends
                with pytest.raises(PluginFailure) as caught:
                    await plugin.call("own_tool")
        found[manifest, act] = events, caught.value, plugin

    async with trio.open_nursery() as nursery:
        for act in UNASKED:
            for manifest in ("nexo-plugin.toml", "mcp.json"):
                nursery.start_soon(use, manifest, act)

    def check(case: tuple[str, str], ended: tuple[list[Any], PluginFailure, OpenPlugin]) -> None:
        cause, words = UNASKED[case[1]]
        events, failure, plugin = ended
        outcome = failure.outcome
        assert (outcome.code, outcome.phase, outcome.cause) == ("crashed", "idle", cause)
        assert words in outcome.message and "not asked to end" in outcome.message
        said = "print" in case[1]
        assert outcome.hint == (
            "the plugin's stderr may say why" if said else "the plugin wrote nothing to its stderr"
        )
        told = {key: getattr(outcome, key) for key in ("code", "phase", "cause", "message", "hint")}
        assert events[-1] == Notice("ended", told)
        report = plugin.report
        is_sound(report)
        assert report is not None and report["outcome"] == told
        assert report["session"]["calls"] == {"ok": 0, "refused": 0, "failed": 1}
        assert (report["exit"]["ended_by"], report["exit"]["forced"]) == (None, False)

    check_rows(found.items(), check)


@pytest.mark.launches
@pytest.mark.trio
async def test_the_end_is_an_event_even_if_the_backlog_is_full(folder: Path) -> None:
    act = "print('noise\\n' * 1000, flush=True); os._exit(0)"
    with trio.fail_after(SECONDS):
        async with opened(folder / NAME, "ready", act) as plugin:
            while not plugin._session.is_over:  # noqa: ASYNC110 -- nobody reads the events
                await trio.sleep(0.01)
            events = [event async for event in plugin.events()]
    assert len(events) == 257 and events[-1].kind == "ended" and events[-1].value["cause"] == "exit:0"


def group_of_limits(token: str) -> Path:
    """The group with the pids limit of the plugin that has `token` in its command line."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and token.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                group = group_of(int(entry.name), "pids")
                # The monitor has it in its command line too, and bwrap in the middle of a longer one.
                if whole_group(group).name.startswith("runner-") and (group / "pids.max").exists():
                    return group
        except OSError:
            continue
    pytest.skip("no cgroup limits processes here")


@pytest.mark.launches
@pytest.mark.trio
async def test_limits_that_are_lifted_end_a_session(folder: Path) -> None:
    """While it waits for a call, and at its end: an answer that came without limits is not `ok`."""
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}

    async def use(case: str) -> None:
        token, kinds = f"# {case} {os.getpid()}", list[str]()
        with trio.fail_after(SECONDS):
            async with opened(folder / NAME, "never", token, limits={"pids": "20"}) as plugin:
                if case != "control":
                    (group_of_limits(token) / "pids.max").write_text("max")
                if case == "idle":
                    kinds = [event.kind async for event in plugin.events()]
        is_sound(plugin.report)
        assert plugin.report is not None
        found[case] = kinds, plugin.report

    async with trio.open_nursery() as nursery:
        for case in ("control", "idle", "end"):
            nursery.start_soon(use, case)
    assert found["control"][1]["outcome"]["code"] == "ok"
    for case in ("idle", "end"):
        kinds, report = found[case]
        outcome = report["outcome"]
        assert (outcome["code"], outcome["phase"], outcome["cause"]) == ("sandbox_unavailable", "run", "pids")
        (limit,) = (each for each in report["limits"] if each["name"] == "pids")
        assert limit["degraded"] and limit["enforced_by"] == "" and "pids" in report["degraded"]
        assert kinds == (["ended"] if case == "idle" else [])


# --- hooks -------------------------------------------------------------------------------------------------

# How a hook fails -> a part of the reason, and how the session ended.
HOOKS: Mapping[str, tuple[str, str]] = {
    "print('last words', file=sys.stderr, flush=True); os._exit(3)": ("ended with status 3", "crashed"),
    "os._exit(0)": ("ended with status 0", "crashed"),
    "print('{\"a\": NaN}', flush=True)": ("NaN", "malformed_response"),
    "send(id=number, error=dict(code=-32603, message='fell over'))": ("fell over", "ok"),
    "time.sleep(1000)": ("no answer within", "ok"),
}
ABORT = ("--policy", "abort.toml")


def test_a_failed_hook_is_printed_and_reported(runner_as: Caller, folder: Path) -> None:
    """The policy decides whether its message passes."""
    reports = folder.parent / "reports"
    reports.mkdir(mode=0o755)
    runner_as.give(reports)
    cases = [(act, policy) for act in HOOKS for policy in ("continue", "abort")]
    lines = [
        Line(
            (
                *("call", "--kind", "hook", "--timeout", "2", "--report", reports / str(number)),
                *(() if policy == "continue" else ("--policy", folder.parent / "abort.toml")),
                *(folder / NAME, "own_hook", "--", "called", act),
            )
        )
        for number, (act, policy) in enumerate(cases)
    ]
    ended = run_lines(runner_as, lines)

    def check(case: tuple[str, str], number: int) -> None:
        act, policy = case
        words, _ = HOOKS[act]
        done = ended[number]
        assert done.returncode == 0, done
        answer = json.loads(done.stdout)
        if policy == "continue":
            assert answer == {"abort": False}
        else:
            assert (answer["abort"], answer["decision"]) == (True, "block") and words in answer["reason"]
        first = done.stderr.splitlines()[0]
        assert first.startswith("runner: hook_failed: the hook 'own_hook' failed: ") and words in first
        assert f'on_failure = "{policy}"' in first
        assert ("| last words" in done.stderr) == ("last words" in act)
        report = json.loads((reports / str(number)).read_bytes())
        assert faults(report) == []
        assert (report["outcome"]["code"], report["outcome"]["cause"]) == ("ok", "hook_failed")
        assert words in report["outcome"]["message"]
        assert report["session"]["calls"] == {"ok": 0, "refused": 0, "failed": 1}
        assert report["session"]["counters"]["hooks_failed"] == 1

    check_rows(zip(cases, range(len(cases)), strict=True), check)


def test_a_failed_hook_is_a_json_event(runner_as: Caller, folder: Path) -> None:
    done = runner_as(
        "call", "--kind", "hook", "--json", folder / NAME, "own_hook", "--", "called", "os._exit(3)"
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"abort": False})
    (line,) = done.stderr.splitlines()
    told = json.loads(line)
    assert told["event"] == "hook_failed" and told["value"]["on_failure"] == "continue"


@pytest.mark.launches
@pytest.mark.trio
async def test_a_hook_of_an_ended_plugin(folder: Path) -> None:
    with trio.fail_after(SECONDS):
        async with opened(folder / NAME, "ready", "os._exit(0)") as plugin:
            assert [event.kind async for event in plugin.events()] == ["ended"]
            assert await plugin.call("own_hook", kind="hook") == {"abort": False}
    assert plugin.report["outcome"]["code"] == "crashed"
    assert plugin.report["session"]["calls"]["failed"] == 1
    assert plugin.report["session"]["counters"]["hooks_failed"] == 1


# --- ended by the runner -----------------------------------------------------------------------------------

# When, what, options of the call -> exit status, and why the runner ended it. One that has to say something
# first has the time for it.
KILLED: Mapping[str, tuple[str, str, tuple[str, ...], int, str]] = {
    "handshake": ("start", "time.sleep(1000)", ("--limit", "handshake=1"), 12, "deadline"),
    "no whole message": (
        "start",
        "print('{}', end='', flush=True); time.sleep(1000)",
        ("--limit", "handshake=5"),
        12,
        "deadline",
    ),
    "another id": (
        "start",
        """input(); print('{"jsonrpc": "2.0", "id": "x", "result": {}}', flush=True); time.sleep(1000)""",
        ("--limit", "handshake=5"),
        12,
        "deadline",
    ),
    "malformed": ("called", "print('{\"a\": NaN}', flush=True)", (), 14, "violation"),
    "output": ("called", "print('x' * 2000000, flush=True)", ("--limit", "output=1M"), 13, "limit"),
    "does not leave": (
        "leave",
        "time.sleep(1000)",
        ("--timeout", "1s", "--limit", "teardown=1"),
        12,
        "deadline",
    ),
}


# What is said of a plugin that did not answer the handshake.
HEARD = {
    "handshake": "it wrote nothing to its stdout: each message has to be flushed",
    "no whole message": "the last 2 bytes on its stdout are no whole message",
    "another id": "it sent an answer with the id 'x', and the open request has the number 1",
}


def test_the_report_says_why_the_runner_ended_the_plugin(runner_as: Caller, folder: Path) -> None:
    """`signal` is empty because the runner got none, and `code` because the plugin returned none."""
    reports = folder.parent / "reports"
    reports.mkdir(mode=0o755)
    runner_as.give(reports)
    lines = [
        Line(("call", *options, "--report", reports / name, folder / NAME, "own_tool", "--", when, act))
        for name, (when, act, options, _, _) in KILLED.items()
    ]
    ended = dict(zip(KILLED, run_lines(runner_as, lines), strict=True))

    def check(name: str, case: tuple[str, str, tuple[str, ...], int, str]) -> None:
        *_, status, reason = case
        report = json.loads((reports / name).read_bytes())
        assert faults(report) == []
        assert ended[name].returncode == status, ended[name]
        assert HEARD.get(name, "") in " ".join(ended[name].stderr.split())
        assert report["exit"] == {
            "status": status,
            "code": None,
            "reached_exec": True,
            "ended_by": reason,
            "signal": None,
            "forced": True,
            "kill_incomplete": False,
            "left": [],
        }

    check_rows(KILLED, check)


def test_an_interrupt_in_the_handshake(runner_as: Caller, folder: Path) -> None:
    report = runner_as.home / "report.json"
    words = ("call", "--report", report, folder / NAME, "own_tool", "--", "start")
    silent = "sys.stdin.readline(); os.execv('/bin/sleep', ['sleep', '1000'])"  # after the first request
    with runner_as.start(*words, silent, stdin=subprocess.DEVNULL) as process:
        assert wait_for(lambda: has_silent_plugin(process.pid))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 24
    assert err.decode().startswith("runner: cancelled in handshake (signal:2): ended by signal 2")
    told = json.loads(report.read_bytes())
    assert faults(told) == []
    assert (told["outcome"]["phase"], told["outcome"]["cause"]) == ("handshake", "signal:2")
    exit = told["exit"]  # noqa: A001
    assert (exit["ended_by"], exit["signal"], exit["code"], exit["forced"]) == ("signal", 2, None, True)
