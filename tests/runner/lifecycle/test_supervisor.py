"""A supervisor with real plugins: what each call gets, and what becomes of plugins that are killed."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from runner.contracts.registry import contract_names, example_folder, find_contract
from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.lifecycle import (
    LifecycleNews,
    Overloaded,
    Spec,
    Status,
    Supervisor,
    Unavailable,
    UnknownPlugin,
    open_supervisor,
)
from runner.lifecycle.feed import BoundedFeed
from sandbox.cell.cell import descendants
from tests.conftest import ROOT, SYSTEM_PATH
from tests.manifests import nexo

pytestmark = [pytest.mark.launches]

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
SOON: Mapping[str, Any] = {"backoff": 0.05, "jitter": 0.0}

MANIFEST = (
    nexo("steer", "./plugin.py")
    + """\
[plugin.extends]
tools = ["steer_note", "steer_hold", "steer_exit"]
[plugin.capabilities.broker]
subscribe = ["plugin.lifecycle.>"]
[plugin.supervisor]
respawn = true
backoff_ms = 100
max_attempts = 3
"""
)

PLUGIN = """#!/usr/bin/python3
import json, sys

seen = []
print("started", file=sys.stderr, flush=True)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))


def answer(number, result):
    print(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}), flush=True)


for line in sys.stdin:
    message = json.loads(line)
    method, params, number = message.get("method"), message.get("params"), message.get("id")
    if method == "initialize":
        names = ["steer_note", "steer_hold", "steer_exit"]
        tools = [{"name": n, "description": n, "input_schema": {"type": "object"}} for n in names]
        answer(number, {"manifest": {"plugin": {"id": "steer"}}, "tools": tools})
    elif method == "broker.event":
        seen.append(params["topic"])
    elif method == "shutdown":
        answer(number, {"ok": True})
        break
    elif method == "tool.invoke" and params["tool_name"] == "steer_note":
        seen.append(params["args"].get("text"))
        answer(number, {"seen": seen})
    elif method == "tool.invoke" and params["tool_name"] == "steer_exit":
        sys.exit(3)
    elif method == "tool.invoke":
        seen.append("held")  # and never answered
"""


@pytest.fixture
def shelf(plugin_dir: Path, sessions: None) -> Path:
    return plugin_dir


@pytest.fixture
def steer(shelf: Path) -> Path:
    folder = shelf / "steer"
    folder.mkdir()
    (folder / "plugin.toml").write_text(MANIFEST)
    (folder / "plugin.py").write_text(PLUGIN)
    _open_to_all(folder)
    return folder


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def spec(name: str, path: Path, **more: Any) -> Spec:
    return Spec(name, path, environ=ENVIRON, **more)


def status(supervisor: Supervisor, name: str) -> Status:
    return next(each for each in supervisor.plugins() if each.name == name)


async def news_of(feed: BoundedFeed[LifecycleNews], name: str, what: str) -> LifecycleNews:
    """Read on until a plugin has this state, or this has happened to it."""
    async for news in feed:
        if news.name == name and what in ((news.state,) if news.what == "state" else (news.what,)):
            return news
    raise AssertionError("the feed has ended")


async def in_flight(supervisor: Supervisor, name: str, calls: int) -> None:
    while status(supervisor, name).in_flight != calls:
        await trio.lowlevel.checkpoint()


async def failure_of(supervisor: Supervisor, name: str, tool: str, **more: Any) -> PluginFailure:
    with pytest.raises(PluginFailure) as raised:
        await supervisor.call(name, tool, {}, **more)
    return raised.value


@pytest.mark.trio
async def test_plugins_of_all_contracts_are_called_killed_and_called_again(shelf: Path) -> None:
    names = contract_names()
    async with open_supervisor(jitter=lambda: 1.0, clock=lambda: 1e9) as supervisor:
        feed = supervisor.subscribe()
        for name in names:
            shutil.copytree(example_folder(name), shelf / name / "greeter")
            _open_to_all(shelf / name)
            numbers = {**SOON, "respawn": True, "healthy": 1e9}
            supervisor.add(spec(name, shelf / name / "greeter", numbers=numbers))
        assert {each.state for each in supervisor.plugins()} == {"idle"}

        async def greet(name: str) -> None:
            example = find_contract(name).example
            result = await supervisor.call(name, example.call, json.loads(example.input))
            assert "Hello, world!" in json.dumps(result.value) and result.identity.version == "0.1.0"
            assert (result.invocation is None) == (find_contract(name).prepared_calls is None)

        for name in names:  # one after the other: some contracts give a process little time to end
            await greet(name)
        found = {each.name: each for each in supervisor.plugins()}
        assert {(each.state, each.sessions, each.restarts, each.since <= 1e9) for each in found.values()} == {
            ("ready", 1, 0, True)
        }
        assert {name for name in names if not found[name].pids} == {"rune", "vai"}  # a process for each call
        for name in names:
            assert found[name].contract == name and found[name].identity is not None
            listed = await supervisor.tools(name)
            called = find_contract(name).example.call
            assert any(tool["name"].endswith(called) for tool in listed)  # some add the plugin's name
            with pytest.raises(PluginError):
                await supervisor.call(name, called, {"x": ["y"]})
        killed = [name for name in names if found[name].pids]
        for name in killed:
            os.kill(found[name].pids[0], signal.SIGKILL)
        left = set(killed)
        async for news in feed:
            if news.what == "crashed":
                assert news.facts["exit_code"] == -1 and "killed by signal 9" in news.reason
                left.discard(news.name)
            if not left:
                break
        for name in killed:
            await greet(name)
            again = status(supervisor, name)
            assert (again.state, again.attempts, again.restarts) == ("ready", 1, 1)
            assert again.pids and again.pids != found[name].pids
    assert [news.state async for news in feed][-len(names) :] == ["stopped"] * len(names)  # and it ends


@pytest.mark.trio
async def test_a_plugin_that_ends_with_calls_in_flight(steer: Path) -> None:
    """They end with its failure and are not repeated. It is started again, and others are told."""
    other = steer.parent / "other"
    shutil.copytree(steer, other)
    async with open_supervisor(jitter=lambda: 0.0) as supervisor:
        supervisor.add(spec("steer", steer))
        supervisor.add(spec("other", other))
        await supervisor.start("other")
        await supervisor.start("steer")  # eager: it starts anyway
        feed, log = supervisor.subscribe(), supervisor.follow("steer")
        async with trio.open_nursery() as nursery:

            async def hold() -> None:
                failure = await failure_of(supervisor, "steer", "steer_hold")
                assert failure.outcome.code == "crashed"
                assert status(supervisor, "steer").state != "ready"  # the next call is for another process

            nursery.start_soon(hold)
            await in_flight(supervisor, "steer", 1)
            failure = await failure_of(supervisor, "steer", "steer_exit")
        assert (failure.outcome.code, failure.outcome.cause) == ("crashed", "exit:3")
        crashed = await news_of(feed, "steer", "crashed")
        assert crashed.facts["exit_code"] == 3 and crashed.facts["stderr"] == "started\n"
        assert (await news_of(feed, "steer", "respawning")).facts["seconds"] == 0.1
        assert (await news_of(feed, "steer", "respawned")).facts["attempt"] == 1
        assert (await supervisor.call("steer", "steer_note", {"text": "new"})).value == {"seen": ["new"]}
        assert supervisor.logs("steer") == "started\n" * 2 and await anext(log) == "started\n"
        heard = (await supervisor.call("other", "steer_note", {})).value["seen"]
        topics = [f"plugin.lifecycle.steer.{what}" for what in ("crashed", "respawning", "respawned")]
        assert heard == [*topics, None]
        with pytest.raises(InvalidCall):
            await supervisor.call("steer", "steer_note", {}, context={"stray": "x"})


@pytest.mark.trio
async def test_what_people_ask_of_a_plugin(steer: Path) -> None:
    async with open_supervisor() as supervisor:
        await supervisor.replace(spec("steer", steer, pending="its network is not approved"))
        refused = await failure_of(supervisor, "steer", "steer_note")
        assert isinstance(refused, Unavailable) and refused.state == "pending"
        assert refused.outcome.code == "policy_denied" and "not approved" in str(refused)
        with pytest.raises(Unavailable, match="pending"):
            await supervisor.start("steer")
        wrong: Any
        for wrong in (-1, "2"):
            with pytest.raises(ValueError, match="seconds"):
                await supervisor.call("steer", "steer_note", {}, seconds=wrong)
        for faulty in (Spec("", steer), spec("x", steer, numbers={"sesions": 2}), Spec("x", "")):
            with pytest.raises(ValueError, match=r"^(name|numbers|path):"):
                supervisor.add(faulty)
        with pytest.raises(ValueError, match="already"):
            supervisor.add(spec("steer", steer))
        numbers = {"drain": 0.1}
        await supervisor.replace(spec("steer", steer, numbers=numbers))  # approved meanwhile, and eager
        [first] = status(supervisor, "steer").pids
        feed = supervisor.subscribe()
        await supervisor.reload("steer")
        assert (await news_of(feed, "steer", "restarted")).facts["pid"] not in (first, None)
        await supervisor.stop("steer")
        stopped = await failure_of(supervisor, "steer", "steer_note")
        assert isinstance(stopped, Unavailable) and stopped.state == "stopped"
        await supervisor.reload("steer")  # stays so
        assert status(supervisor, "steer").state == "stopped"
        await supervisor.start("steer")
        assert (await supervisor.call("steer", "steer_note", {"text": 1}, seconds=60)).value == {"seen": [1]}
        async with trio.open_nursery() as nursery:

            async def hold() -> None:
                failure = await failure_of(supervisor, "steer", "steer_hold")
                assert failure.outcome.code == "cancelled"

            nursery.start_soon(hold)
            await in_flight(supervisor, "steer", 1)
            await supervisor.remove("steer")
        with pytest.raises(UnknownPlugin, match="'steer'"):
            await supervisor.call("steer", "steer_note", {})
        await supervisor.replace(spec("steer", steer, numbers={"eager": False}))
        await supervisor.drain(0.0)
        with pytest.raises(Unavailable, match="drained"):
            await supervisor.start("steer")
        assert isinstance(await failure_of(supervisor, "steer", "steer_note"), Unavailable)


@pytest.mark.trio
async def test_a_plugin_that_cannot_start_is_quarantined_until_reset(steer: Path) -> None:
    (steer / "plugin.toml").write_text(
        MANIFEST.replace('command = "./plugin.py"', 'command = "./plugin.py"\nargs = ["7"]')
    )
    numbers = {**SOON, "eager": False, "retry_first": True, "attempts": 0, "failures": 2}
    async with open_supervisor() as supervisor:
        feed = supervisor.subscribe()
        supervisor.add(spec("steer", steer, numbers=numbers))
        # Two that wait for the same start get its failure, each one of its own.
        failures = []

        async def call() -> None:
            failures.append(await failure_of(supervisor, "steer", "steer_note"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(call)
        assert [failure.outcome.cause for failure in failures] == ["exit:7"] * 2
        assert failures[0] is not failures[1]
        await news_of(feed, "steer", "backoff")
        await call()  # waits for the pause, and for the second start
        refused = await failure_of(supervisor, "steer", "steer_note")
        assert isinstance(refused, Unavailable) and refused.outcome.code == "quarantined"
        assert "failed 2 times" in refused.reason
        assert supervisor.logs("steer") == "started\n" * 2
        (steer / "plugin.toml").write_text(MANIFEST)
        await supervisor.reset("steer")
        assert (await supervisor.call("steer", "steer_note", {})).value == {"seen": [None]}

        supervisor.add(spec("nowhere", steer / "nowhere"))
        missing = await failure_of(supervisor, "nowhere", "x")
        assert missing.outcome.code == "manifest_invalid" and status(supervisor, "nowhere").contract == ""


@pytest.mark.trio
async def test_callers_take_turns_and_too_many_calls_are_refused(steer: Path) -> None:
    """All are accepted while the plugin starts, and it serves one at a time."""
    numbers = {"eager": False, "calls": 1, "queued": 20}
    order: list[str] = []
    refused: list[float] = []
    async with open_supervisor() as supervisor:
        await supervisor.replace(spec("steer", steer, numbers=numbers))

        async def call(caller: str, number: int) -> None:
            try:
                await supervisor.call("steer", "steer_note", {"text": number}, caller=caller)
                order.append(caller)
            except Overloaded as overloaded:
                refused.append(overloaded.retry_after)

        async with trio.open_nursery() as nursery:
            for number in range(25):
                nursery.start_soon(call, "many", number)
            while status(supervisor, "steer").queued < 20 or len(refused) < 5:
                await trio.lowlevel.checkpoint()
            assert status(supervisor, "steer").state == "starting"
            nursery.start_soon(call, "one", 0)  # it takes a place from who has most
        assert len(order) == 20 and len(refused) == 6 and order.index("one") <= 1
        assert all(1.0 <= seconds <= 60.0 for seconds in refused)
        seen = (await supervisor.call("steer", "steer_note", {"text": "last"})).value["seen"]
        assert len(seen) == 21  # none was made twice


@pytest.mark.trio
async def test_sessions_up_to_their_number_and_a_deadline_in_the_queue(steer: Path) -> None:
    numbers = {"sessions": 2, "calls": 1, "eager": False}
    outcomes: list[str] = []
    with trio.CancelScope() as given_up:
        async with trio.open_nursery() as nursery, open_supervisor() as supervisor:
            await supervisor.replace(spec("steer", steer, numbers=numbers))

            async def hold() -> None:
                outcomes.append((await failure_of(supervisor, "steer", "steer_hold")).outcome.code)

            for _ in range(2):
                nursery.start_soon(hold)
            await in_flight(supervisor, "steer", 2)
            found = status(supervisor, "steer")
            assert found.sessions == len(set(found.pids)) == 2
            late = await failure_of(supervisor, "steer", "steer_note", seconds=0.05)
            assert (late.outcome.code, late.outcome.phase) == ("timeout", "call")
            assert "did not begin" in str(late) and status(supervisor, "steer").queued == 0
            with trio.move_on_after(0.05):  # a caller that gives up leaves the queue
                await supervisor.call("steer", "steer_note", {})
            assert status(supervisor, "steer").queued == 0
            given_up.cancel()
    # The supervisor ended with its calls in flight, and each has its answer or was cancelled with its caller.
    assert set(outcomes) <= {"cancelled"}


@pytest.mark.trio
async def test_a_plugin_that_no_longer_answers_is_restarted(shelf: Path) -> None:
    shutil.copytree(ROOT / "tests/plugins/mcp_bare", shelf / "mcp")
    _open_to_all(shelf / "mcp")
    numbers = {**SOON, "health_interval": 0.1, "health_answer": 3.0, "health_misses": 1, "failures": 0}
    async with open_supervisor() as supervisor:
        feed = supervisor.subscribe()
        supervisor.add(spec("bare", shelf / "mcp", server="legacy", numbers=numbers))
        await supervisor.start("bare")
        [pid] = status(supervisor, "bare").pids
        stopped = descendants(pid)
        for each in stopped:
            os.kill(each, signal.SIGSTOP)
        assert "timeout" in (await news_of(feed, "bare", "crashed")).reason
        assert "sum" in json.dumps((await supervisor.call("bare", "add", {"a": 1, "b": 2})).value)
        assert status(supervisor, "bare").pids != (pid,)


@pytest.mark.trio
async def test_a_kaged_plugin_that_misses_its_health_checks_is_restarted_and_at_last_disabled(
    shelf: Path, mock_clock: MockClock
) -> None:
    """The clock almost stands still while a process starts or has to answer, however busy the machine is."""
    mock_clock.rate = 0.1  # not 0: what looks again after a moment has to go on
    shutil.copytree(ROOT / "tests/plugins/kaged_quirks", shelf / "quirks")
    _open_to_all(shelf / "quirks")
    given = spec("quirks", shelf / "quirks", state_dir=shelf / "state")
    async with open_supervisor(jitter=lambda: 0.0) as supervisor:
        # The control: it answers each check, here with an error, and is left alone.
        await supervisor.replace(given)
        await supervisor.start("quirks")
        [session] = supervisor._plugins["quirks"].sessions
        assert session._session is not None
        state = session._session.state
        for number in range(1, 4):
            while state.dialect.counters.get("health_checks", 0) < number:
                mock_clock.jump(1.0)
                await wait_all_tasks_blocked(0.01)
            while not state.alive.is_set():
                await wait_all_tasks_blocked(0.01)
        assert (status(supervisor, "quirks").state, status(supervisor, "quirks").restarts) == ("ready", 0)
        # It hangs at the first check of each start.
        feed = supervisor.subscribe()
        await supervisor.replace(given._replace(args=("hangs",)))
        seen: dict[int, float] = {}  # pid -> when it was ready
        while (found := status(supervisor, "quirks")).state != "quarantined":
            for pid in found.pids:
                seen.setdefault(pid, trio.current_time())
            if found.state != "starting":
                mock_clock.jump(1.0)
            await wait_all_tasks_blocked(0.01)
        assert len(seen) == 5 and found.restarts == 4
        assert found.reason == (
            "timeout: there was no answer to health.check within 5s (it failed 5 times within 600 seconds)"
        )
        feed.close()
        pauses = [news.facts["seconds"] async for news in feed if news.what == "respawning"]
        assert pauses == [1.0, 2.0, 4.0, 8.0]
        refused = await failure_of(supervisor, "quirks", "store")
        assert isinstance(refused, Unavailable) and refused.state == "quarantined"
        await supervisor.replace(given)
        await supervisor.start("quirks")
        assert (await supervisor.call("quirks", "store", {"text": "x"})).value["got"]["text"] == "x"


KILLED = """
import os, sys, trio
from runner.lifecycle import Spec, open_supervisor

async def main():
    async with open_supervisor() as supervisor:
        supervisor.add(Spec("steer", sys.argv[1]))
        await supervisor.start("steer")
        print(*supervisor.plugins()[0].pids, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_plugins_end_with_a_process_that_is_killed(steer: Path) -> None:
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", KILLED, str(steer)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        try:
            pid = int(process.stdout.readline())
            files = [os.pidfd_open(each) for each in (pid, *descendants(pid))]
            assert len(files) >= 3
            assert select.select(files, [], [], 0)[0] == []  # all live
        finally:
            process.kill()
    for file in files:
        assert select.select([file], [], [], 60.0)[0] == [file]
        os.close(file)


@pytest.mark.trio
async def test_what_programs_obey_is_in_the_log(shelf: Path, steer: Path) -> None:
    """A plugin leaves a file of an editor in a folder that it may write."""
    place = shelf / "work"
    (place / "sub").mkdir(parents=True)
    for folder in (place, place / "sub"):
        folder.chmod(0o777)
    asked = f'[plugin.sandbox]\nenabled = true\nfs_write_paths = ["{place}"]\n'
    (steer / "plugin.toml").write_text(MANIFEST + asked)
    line = f"import os; os.makedirs({str(place)!r} + '/sub/.vscode', exist_ok=True)\n"
    (steer / "plugin.py").write_text(PLUGIN.replace("seen = []", line + "seen = []"))
    policy = shelf / "policy.toml"
    policy.write_text(f'version = 1\n[write]\nceiling = ["{place}"]\n')
    policy.chmod(0o644)
    async with open_supervisor() as supervisor:
        feed = supervisor.subscribe()
        supervisor.add(spec("steer", steer, policy=policy))
        await failure_of(supervisor, "steer", "steer_exit")
        await news_of(feed, "steer", "respawning")
        assert f"runner: while it ran, {place}/sub/.vscode was made or changed" in supervisor.logs("steer")
