"""One live plugin and its session: every way to misbehave, every clock, every end, in the real cage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runner.contracts.mcp.dialect import McpDialect
from runner.exceptions import PluginFailure
from runner.launch.stages import Invocation
from runner.outcome import EXIT
from runner.protocol.dialect import Call, Message
from runner.protocol.host_services import Services
from runner.session.open import open_session
from runner.session.session import Session
from sandbox.spec import Limits, Overrides
from tests import elsewhere, manifests, misbehaviour
from tests.conftest import (
    ROOT,
    SYSTEM_PATH,
    Caller,
    _public_directory,
    children_of,
    descendants,
    vanished,
)
from tests.misbehaviour import BEHAVIOURS, CONTRACTS, REQUESTS, TOOL, Contract
from tests.runner.launch.monitored_plugins import is_sound
from tests.tables import REPEAT, check_rows, one_case, wait_for
from tests.template import session_host

MEBI = 1 << 20
INPUT = {"text": "hello"}
ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
# Far above what any test here takes, far below the timeouts that must not end it.
SECONDS = 120.0  # only guards against hanging

Write = Callable[..., Path]

pytestmark = pytest.mark.launches


def invocation(manifest: Path, **limits: Any) -> Invocation:
    return Invocation(str(manifest), overrides=Overrides(limits=Limits(**limits)))


def opened(manifest: Path, *, limits: Mapping[str, Any] | None = None, **more: Any) -> Any:
    more.setdefault("environ", ENVIRON)
    return open_session(invocation(manifest, **(limits or {})), **more)


# --- Every behaviour ---------------------------------------------------------------------------------------


class Seen:
    """The result of one call."""

    def __init__(self) -> None:
        self.outcome = ("ok", "", "")
        self.value: Any = None
        self.stderr = ""
        self.report: dict[str, Any] = {}


async def ask(
    manifest: Path,
    contract: Contract,
    limits: Mapping[str, Any],
    seconds: float | None,
    *,
    patient: bool = False,
) -> Seen:
    """Call the plugin. `patient`: it ends by itself, if a busy machine lets it within the contract's time."""
    seen = Seen()
    call = Call("tool", TOOL[contract], misbehaviour.given_to(contract, INPUT))
    try:
        with trio.fail_after(2 * SECONDS):
            async with opened(manifest, limits=limits, call=call, seconds=seconds) as session:
                seen.value = await session.call(call, seconds=seconds)
                if session.is_one_shot:
                    if patient and contract == "rune":
                        vars(session.state.dialect)["_seconds"] = lambda phase: SECONDS
                    await session.conclude()
        seen.report, seen.stderr = session.report, session.stderr
    except PluginFailure as failure:
        outcome = failure.outcome
        seen.outcome = (outcome.code, outcome.phase, outcome.cause)
        seen.report, seen.stderr = failure.report or {}, failure.stderr
    return seen


OK = ("ok", "", "")
LATE = ("timeout", "call", "deadline")
SPENT = ("timeout", "invocation", "deadline")
STALLED = {LATE, ("crashed", "call", "write_stalled")}


def malformed(cause: str, phase: str = "call") -> tuple[str, str, str]:
    return ("malformed_response", phase, cause)


def crashed(cause: str, phase: str = "call") -> tuple[str, str, str]:
    return ("crashed", phase, cause)


# Behaviour -> outcome for rune, nexo, MCP, kaged, ainb and vai, or one outcome for all. Hosts of nexo and MCP
# ignore lines that are not messages, so such a call times out. In kaged nothing but messages may be on
# stdout. In ainb a broken header ends the plugin, and a frame without a message in it is dropped; in vai that
# ends the plugin too.
TABLE: Mapping[str, Any] = {
    "good": OK,
    "nan": [*[malformed("bad_number")] * 4, LATE, malformed("bad_number")],
    "infinity": [*[malformed("bad_number")] * 4, LATE, malformed("bad_number")],
    "overflow": [*[malformed("bad_number")] * 4, LATE, malformed("bad_number")],
    "huge_int": [*[malformed("bad_number")] * 4, LATE, malformed("bad_number")],
    "int_65_bit": [*[malformed("bad_number")] * 4, LATE, malformed("bad_number")],
    "deep": [*[malformed("too_deep")] * 4, LATE, malformed("too_deep")],
    "deep_129": [*[malformed("too_deep")] * 4, LATE, malformed("too_deep")],
    "surrogate": OK,
    "not_utf8": [OK, OK, OK, OK, LATE, malformed("bad_json")],
    "large": [malformed("frame_too_large"), malformed("frame_too_large"), *[OK] * 4],
    "bom": [*[malformed("bom")] * 4, LATE, malformed("bom")],
    "blank": [malformed("blank_line"), *[OK] * 5],
    "crlf": OK,
    "trailing": [malformed("bad_json"), LATE, LATE, malformed("bad_json"), LATE, malformed("bad_json")],
    "array": [malformed("bad_type"), LATE, LATE, malformed("not_object"), LATE, malformed("invalid_frame")],
    "duplicate_key": [OK, *[malformed("duplicate_key")] * 3, LATE, malformed("duplicate_key")],
    "wrong_id": [malformed("request_id"), *[LATE] * 4, malformed("unexpected_frame")],
    "silent": ("timeout", "handshake", "deadline"),
    "drip": OK,
    "trickle": [SPENT, *[LATE] * 5],
    "banner": [
        *(malformed("bad_json", "handshake"), OK, OK, malformed("bad_json", "handshake")),
        *[malformed("bad_header", "handshake")] * 2,
    ],
    "half_frame": [
        *(malformed("bad_json"), crashed("exit:3"), crashed("exit:3"), malformed("bad_json")),
        *[crashed("exit:3")] * 2,
    ],
    "unterminated": [OK, OK, OK, OK, malformed("cut_short"), malformed("cut_short")],
    "endless_line": malformed("frame_too_large"),
    "flood_frames": [malformed("message_type"), *[LATE] * 5],
    "flood_garbage": [
        malformed("bad_json"),
        LATE,
        LATE,
        malformed("bad_json"),
        *[malformed("bad_header")] * 2,
    ],
    "flood_stderr": [SPENT, *[LATE] * 5],
    "burst_stderr": OK,
    "burst_frames": [malformed("message_type"), *[OK] * 5],
    "chatter_after": OK,
    "deaf": [SPENT, *[LATE] * 5],
    # rune: a second line comes with the handshake's, before the session returns to its caller or just after.
    # vai: a plugin sends no requests. Others: our replies fill the pipe, before the call is written or just
    # after.
    "storm": [
        {malformed("message_type", when) for when in ("handshake", "run", "call")},
        *[STALLED] * 4,
        {malformed("unexpected_frame", when) for when in ("handshake", "run", "call")},
    ],
    "twice": OK,
    "late": [SPENT, *[LATE] * 5],
    "exit_failing": crashed("exit:3", "handshake"),
    "exit_zero": crashed("exit:0", "handshake"),
    "killed": crashed("signal:9"),
    "answer_and_exit": OK,
    "answer_and_fail": [crashed("exit:3", "teardown"), *[OK] * 5],
    "orphan": OK,
    "close_stdout": crashed("stdout_closed"),
    "close_stdin": crashed("stdin_closed"),
    "oom": crashed("oom"),
    "stop": [SPENT, *[LATE] * 5],
    "stubborn": [crashed("no_exit", "teardown"), *[OK] * 5],
}
CASES = [(name, contract) for name in TABLE for contract in CONTRACTS]


def expected(behaviour: str, contract: Contract) -> set[tuple[str, str, str]]:
    row = TABLE[behaviour]
    one = row[CONTRACTS.index(contract)] if isinstance(row, list) else row
    return one if isinstance(one, set) else {one}


def limits_for(behaviour: str, contract: Contract) -> tuple[dict[str, Any], float | None]:
    """Limits and seconds: short where the clock is what is expected, long everywhere else."""
    limits: dict[str, Any] = {"memory": 64 * MEBI} if behaviour == "oom" else {}
    outcomes = expected(behaviour, contract)
    if ("timeout", "handshake", "deadline") in outcomes:
        return {**limits, "handshake": 1.5}, SECONDS
    if outcomes & {LATE, SPENT}:
        # A flood takes two processors until it is ended, and is long enough after a moment. rune's clock
        # counts the start of the interpreter, too.
        moment = 1.0 if behaviour.startswith("flood") else 2.5
        return {**limits, "handshake": SECONDS, "call": 6.0 if contract == "rune" else moment}, None
    # A contract's own limit may be a few seconds, which a busy machine takes to start five interpreters.
    return {**limits, "handshake": SECONDS}, SECONDS


@pytest.fixture(scope="module")
def results(templates: None) -> Mapping[tuple[str, str], Seen]:
    """The results of all cases. Several run at once, and more of those that wait for a clock."""
    found: dict[tuple[str, str], Seen] = {}
    working, waiting = trio.CapacityLimiter(4), trio.CapacityLimiter(8)

    async def one(folder: Path, behaviour: str, contract: Contract) -> None:
        _, seconds = limits_for(behaviour, contract)
        async with working if seconds or behaviour.startswith("flood") else waiting:
            place = folder / f"{behaviour}-{contract}"
            place.mkdir()
            place.chmod(0o755)
            manifest = misbehaviour.plugin(place, behaviour, contract)
            limits, seconds = limits_for(behaviour, contract)
            patient = crashed("no_exit", "teardown") not in expected(behaviour, contract)
            found[behaviour, contract] = await ask(manifest, contract, limits, seconds, patient=patient)

    async def main(folder: Path) -> None:
        async with trio.open_nursery() as nursery:
            for case in CASES:
                nursery.start_soon(one, folder, *case)

    before = descendants()
    with _public_directory() as folder, session_host():
        trio.run(main, folder)
    assert vanished(descendants() - before), "processes left behind"
    return found


def test_the_table_has_every_behaviour() -> None:
    assert set(TABLE) == set(BEHAVIOURS)


@pytest.mark.bound(1200)  # all cases at once: a busy machine takes minutes
@one_case("behaviour", TABLE)
def test_misbehaviour(results: Mapping[tuple[str, str], Seen], behaviour: str) -> None:
    check_rows(
        {contract: contract for contract in CONTRACTS},
        lambda _, contract: _check_misbehaviour(results[behaviour, contract], behaviour, contract),
    )


def _check_misbehaviour(seen: Seen, behaviour: str, contract: Contract) -> None:
    assert seen.outcome in expected(behaviour, contract)
    if seen.outcome == OK:
        value = misbehaviour.echoed(contract, seen.value)
        assert value["input"] == INPUT
        if behaviour in ("surrogate", "not_utf8") and contract != "ainb":  # it reads only what it knows
            assert set(value["note"]) == {"\ufffd"}
    report = seen.report
    is_sound(report)
    told = report["outcome"]
    if seen.outcome != OK:
        assert (told["code"], told["phase"], told["cause"]) == seen.outcome
        assert told["message"] and report["exit"]["status"] == EXIT[told["code"]]
    timings = report["timings"]
    assert {"launch", "handshake", "teardown"} <= set(timings) and min(timings.values()) >= 0
    assert ("call" in timings) == (seen.outcome[1] != "handshake")
    assert report["session"]["stderr_tail"] == seen.stderr


def test_the_report_names_the_limit_that_was_hit(results: Mapping[tuple[str, str], Seen]) -> None:
    hits = {"silent": ["handshake"], "trickle": ["call"], "oom": ["memory"], "good": []}
    seen = {case: results[case].report["limits_hit"] for case in CASES if case[0] in hits}
    assert seen == {case: hits[case[0]] for case in seen}


@one_case("contract", CONTRACTS)
def test_the_failure_has_the_end_of_stderr(
    results: Mapping[tuple[str, str], Seen], contract: Contract
) -> None:
    assert results["exit_failing", contract].stderr == "cannot open the database\n"
    flood = results["flood_stderr", contract]
    assert len(flood.stderr) == 8 << 10 and "\nsomething is the matter, some" in flood.stderr
    assert flood.report["session"]["stderr_bytes"] > MEBI


@one_case("contract", ["nexo", "mcp"])
def test_unread_notices_are_dropped(results: Mapping[tuple[str, str], Seen], contract: Contract) -> None:
    assert results["burst_frames", contract].report["session"]["dropped"]["notices"] == REQUESTS - 256
    assert results["good", contract].report["session"]["dropped"]["notices"] == 0


CHATTY = ("burst_frames", "flood_frames", "wrong_id")


def test_counters_in_the_report(results: Mapping[tuple[str, str], Seen]) -> None:
    for contract in ("nexo", "mcp"):
        counted = {
            name: results[name, contract].report["session"] for name in ("twice", "wrong_id", "banner")
        }
        assert counted["twice"]["counters"]["late"] == 1
        assert counted["wrong_id"]["counters"]["unknown"] == 1
        assert counted["wrong_id"]["calls"] == {"ok": 0, "refused": 0, "failed": 1}
        assert counted["banner"]["counters"]["stdout" if contract == "nexo" else "unreadable"] == 1
        assert results["stubborn", contract].report["session"]["forced"] is True
        assert results["good", contract].report["session"]["forced"] is False
    kaged = {name: results[name, "kaged"].report["session"]["counters"] for name in CHATTY}
    taken, dropped = (kaged["burst_frames"][name] for name in ("notifications", "notifications_dropped"))
    assert taken >= 100 and taken + dropped == REQUESTS and dropped  # a hundred in each second
    assert kaged["flood_frames"]["notifications_dropped"] > REQUESTS
    assert kaged["wrong_id"]["unknown"] == 1


# --- As root and as an ordinary user -----------------------------------------------------------------------


def run_cases(given: list[list[Any]], at_once: int = 1) -> list[Any]:
    """Run the cases, `at_once` of them at a time. Returns their results and the remaining children."""
    import os
    import resource

    import trio

    from runner.contracts.registry import contract_names
    from runner.exceptions import PluginFailure
    from runner.launch.remote import forkserver
    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.launch.stages import Invocation
    from runner.protocol.dialect import Call
    from runner.session.open import open_session
    from sandbox.cell.cell import children
    from sandbox.spec import Limits, Overrides

    # Once for all of its monitors, each of which reads a new manifest.
    models = ", ".join(f"runner.contracts.{name}.manifest" for name in contract_names())
    forkserver._START = forkserver._START.replace("from runner", f"import {models}; from runner")

    async def one(
        manifest: str, tool: str, given: Any, limits: dict[str, Any], seconds: float | None = None
    ) -> list[Any]:
        call = Call("tool", tool, given)
        asked = Invocation(manifest, overrides=Overrides(limits=Limits(**limits)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with trio.fail_after(200):
                async with open_session(
                    asked, environ=dict(os.environ), call=call, seconds=seconds
                ) as session:
                    await session.call(call, seconds=seconds)
                    if session.is_one_shot:
                        await session.conclude()
            outcome, report = ["ok", "", ""], session.report
        except PluginFailure as failure:
            ending = failure.outcome
            outcome, report = [ending.code, ending.phase, ending.cause], failure.report
        assert report is not None
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        said = report["session"]["stdout_bytes"] + report["session"]["stderr_bytes"]
        return [outcome, grown << 10, said]

    async def main() -> list[Any]:
        found: list[Any] = [None] * len(given)
        left = list(enumerate(given))

        async def work() -> None:
            while left:
                number, case = left.pop(0)
                found[number] = await one(*case)

        async with trio.open_nursery() as nursery:
            for _ in range(at_once):
                nursery.start_soon(work)
        await aclose_forkserver()
        return [found, children(os.getpid())]

    return trio.run(main)


REPRESENTATIVE = ("good", "nan", "half_frame", "exit_failing", "killed", "wrong_id", "orphan")


def test_outcomes_are_the_same_for_root_and_user(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    cases = [(name, contract) for name in REPRESENTATIVE for contract in CONTRACTS]
    given = []
    for name, contract in cases:
        folder = plugin_dir / f"{name}-{contract}"
        folder.mkdir()
        folder.chmod(0o755)
        manifest = misbehaviour.plugin(folder, name, contract)
        limits, _ = limits_for(name, contract)
        given.append([str(manifest), TOOL[contract], misbehaviour.given_to(contract, INPUT), limits])
    runner_as.give(plugin_dir)
    found, left = elsewhere.run(runner_as, run_cases, given, 6, timeout=240)
    seen = {case: tuple(outcome) for case, (outcome, _, _) in zip(cases, found, strict=True)}
    wrong = {case: outcome for case, outcome in seen.items() if outcome not in expected(*case)}
    assert wrong == {}
    assert left == []


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("behaviour", "contract"),
    [
        ("endless_line", "rune"),
        ("endless_line", "mcp"),
        ("endless_line", "vai"),
        ("flood_frames", "nexo"),  # each is an event and a request to the host
        ("flood_garbage", "mcp"),
        ("flood_stderr", "mcp"),
        *(
            pytest.param(*case, marks=pytest.mark.broad)
            for case in (
                *(("endless_line", contract) for contract in ("nexo", "kaged", "ainb")),
                *(("flood_frames", contract) for contract in ("mcp", "kaged", "vai", "ainb")),
                ("flood_stderr", "rune"),
            )
        ),
    ],
)
def test_a_flood_does_not_fill_the_hosts_memory(
    runner_as_root: Caller, plugin_dir: Path, nothing_left: None, behaviour: str, contract: Contract
) -> None:
    """The plugin writes far more than the host grows by: the host keeps a frame and a few copies of it."""
    limits: dict[str, Any] = {"handshake": SECONDS, "call": 10 * SECONDS}
    if behaviour != "endless_line":
        limits["output"] = 5 * MEBI
    good, bad = plugin_dir / "good", plugin_dir / "bad"
    good.mkdir()
    bad.mkdir()
    tool = [TOOL[contract], misbehaviour.given_to(contract, INPUT)]
    cases = [[str(misbehaviour.plugin(good, "good", contract)), *tool, {}]]  # imports everything
    # Many times what it takes: a busy machine needs long for so many bytes.
    cases.append([str(misbehaviour.plugin(bad, behaviour, contract)), *tool, limits, 180.0])
    found, _ = elsewhere.run(runner_as_root, run_cases, cases, timeout=240)
    (outcome, grown, said) = found[1]
    if behaviour == "endless_line":
        assert tuple(outcome) == malformed("frame_too_large")
        assert grown < {"mcp": 64, "kaged": 24}.get(contract, 8) * MEBI
    else:
        assert tuple(outcome) == crashed("output")
        assert said > 5 * MEBI and grown < 4 * MEBI


# --- Answers and ends at once ------------------------------------------------------------------------------


@one_case("contract", ["rune", "nexo"])
def test_an_answer_before_the_exit_is_not_lost(plugin_dir: Path, sessions: None, contract: Contract) -> None:
    """The plugin exits right after its answer."""
    count = 20 * REPEAT
    manifest = misbehaviour.plugin(plugin_dir, "answer_and_exit", contract)
    answers: list[tuple[str, str, str]] = []

    async def some(numbers: Sequence[int]) -> None:
        for _ in numbers:
            answers.append((await ask(manifest, contract, {}, SECONDS)).outcome)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for start in range(4):
                nursery.start_soon(some, range(start, count, 4))

    trio.run(main)
    assert answers == [OK] * count


# --- Plugins of a few lines --------------------------------------------------------------------------------

PRELUDE = """\
#!/usr/bin/python3 -I
import json, os, sys, threading, time

def say(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")
    sys.stdout.flush()

def hear():
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return json.loads(line)

def wait_for_a_word():  # the test dates the program back: of its folder this may be all that the cage has
    while os.stat(sys.argv[0]).st_mtime:
        time.sleep(0.01)

def hello():
    message = hear()
    if message["method"] == "server/discover":
        say(id=message["id"], error={"code": -32601, "message": "no"})
        message = hear()
    if message["method"] == "initialize" and "protocolVersion" in message["params"]:
        say(id=message["id"], result={"protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}}, "serverInfo": {"name": "plugin", "version": "1"}})
        hear()
    else:
        tools = [{"name": "plugin_do", "description": "Does.", "input_schema": {"type": "object"}}]
        say(id=message["id"], result={"manifest": {"plugin": {"id": "plugin", "version": "1.0.0"}},
            "server_version": "1.0.0", "tools": tools})

def text(words):
    return {"content": [{"type": "text", "text": words}]}

"""
NEXO = (
    manifests.nexo("plugin", "./plugin.py")
    + """\
[plugin.extends]
tools = ["plugin_do"]
[plugin.capabilities.broker]
subscribe = ["news.*"]
"""
)
DO = Call("tool", "plugin_do", {})
TOUCH = Call("tool", "touch", {})


def nexo(write: Write, folder: Path, code: str) -> Path:
    write(folder / "plugin.py", PRELUDE + code, 0o755)
    return write(folder / "nexo-plugin.toml", NEXO)


def mcp(write: Write, folder: Path, code: str) -> Path:
    write(folder / "plugin.py", PRELUDE + code, 0o755)
    return write(folder / "mcp.json", json.dumps({"mcpServers": {"plugin": {"command": "./plugin.py"}}}))


async def failure_of(manifest: Path, call: Call = DO, **more: Any) -> PluginFailure:
    with trio.fail_after(SECONDS), pytest.raises(PluginFailure) as caught:
        async with opened(manifest, **more) as session:
            await session.call(call)
    return caught.value


@pytest.mark.trio
async def test_output_before_the_monitors_message(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """The plugin's first bytes can arrive before the monitor's message that the plugin was launched. What is
    wrong with them is then the handshake's fault, not the launch's."""

    def delay(session: Session) -> None:
        launched = session.state.cell.launched

        async def late() -> Mapping[str, float]:
            await session.state.over.wait()
            return await launched()

        setattr(session.state.cell, "launched", late)  # noqa: B010 -- a method, replaced for this test

    manifest = nexo(write_file, plugin_dir, 'while True:\n    os.write(1, b"x" * 65536)\n')
    failure = await failure_of(manifest, on_made=delay)
    assert failure.outcome[:2] == ("malformed_response", "handshake")
    assert failure.outcome.cause == "frame_too_large"


# --- Which cause counts ------------------------------------------------------------------------------------


@pytest.mark.trio
@one_case("contract", ["nexo", "mcp"])
async def test_an_early_exit_is_reported_at_once(
    plugin_dir: Path, sessions: None, contract: Contract
) -> None:
    """The failure does not wait for the handshake's timeout of ten minutes."""
    manifest = misbehaviour.plugin(plugin_dir, "exit_failing", contract)
    environ = {**ENVIRON, "NEXO_PLUGIN_INIT_TIMEOUT_MS": "600000"}
    if contract == "mcp":
        document = json.loads(manifest.read_text())
        document["mcpServers"][misbehaviour.ID]["x-sandbox"] = {"limits": {"handshake": "1m"}}
        manifest.write_text(json.dumps(document))
    with trio.fail_after(30):  # less than a handshake may take
        failure = await failure_of(manifest, environ=environ)
    assert failure.outcome[:2] == ("crashed", "handshake") and failure.outcome.cause == "exit:3"


@pytest.mark.trio
async def test_a_violation_counts_before_the_exit(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    manifest = nexo(write_file, plugin_dir, 'hello()\nhear()\nos.write(1, b"NaN\\n")\nos._exit(3)\n')
    failure = await failure_of(manifest)
    assert (failure.outcome.code, failure.outcome.cause) == ("malformed_response", "bad_number")


@pytest.mark.trio
@one_case("contract", ["nexo", "mcp"])
async def test_a_late_answer_is_dropped_and_the_session_continues(
    plugin_dir: Path, sessions: None, contract: Contract
) -> None:
    manifest = misbehaviour.plugin(plugin_dir, "late", contract)
    call = Call("tool", TOOL[contract], INPUT)
    with trio.fail_after(SECONDS):
        async with opened(manifest) as session:
            with pytest.raises(PluginFailure) as caught:
                await session.call(call, seconds=0.5)
            assert caught.value.outcome[:2] == ("timeout", "call")
            # The next message makes the plugin send the late answer. This call is answered too.
            with pytest.raises(Exception, match="no ") as refused:
                await session.call(Call("method", "no_such", {}))
            assert not isinstance(refused.value, PluginFailure)
    assert session.report is not None
    assert session.report["session"]["counters"]["late"] == 1
    assert session.report["outcome"]["code"] == "ok"


@pytest.mark.trio
async def test_a_crash_does_not_affect_another_session(plugin_dir: Path, sessions: None) -> None:
    folders = plugin_dir / "good", plugin_dir / "bad"
    for folder in folders:
        folder.mkdir()
    good = misbehaviour.plugin(folders[0], "good", "nexo")
    bad = misbehaviour.plugin(folders[1], "killed", "nexo")
    call = Call("tool", TOOL["nexo"], INPUT)
    with trio.fail_after(SECONDS):
        async with opened(good) as session:
            assert (await failure_of(bad, call)).outcome.cause == "signal:9"
            assert (await session.call(call))["input"] == INPUT


# --- Callers that give up ----------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_cancelled_call_is_cancelled_in_the_protocol(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    code = """
hello()
heard = hear()
say(method="notifications/message", params={"level": "info", "data": "begun"})
cancelled = hear()
say(id=heard["id"], result=text("too late"))
last = hear()
same = cancelled["method"] == "notifications/cancelled" and cancelled["params"]["requestId"] == heard["id"]
say(id=last["id"], result=text(str(same)))
hear()
"""
    with trio.fail_after(SECONDS):
        async with opened(mcp(write_file, plugin_dir, code)) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, TOUCH)
                async for _ in session.events():
                    break
                nursery.cancel_scope.cancel()
            answer = await session.call(TOUCH)
    assert answer["content"][0]["text"] == "True"
    assert session.report["session"]["counters"]["late"] == 1
    assert session.report["session"]["calls"]["ok"] == 1


@pytest.mark.trio
async def test_a_cancelled_call_does_not_truncate_its_frame(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """The plugin does not read 1 MiB yet: the pipe is full in the middle of the frame."""
    code = """
hello()
wait_for_a_word()  # a cancelled call waits until its frame is written, so no message can come
while True:
    message = hear()
    if "id" in message:
        say(id=message["id"], result=text(str(len(message["params"]["arguments"]["x"]))))
"""
    with trio.fail_after(SECONDS):
        async with opened(mcp(write_file, plugin_dir, code)) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, Call("tool", "touch", {"x": "x" * MEBI}))
                await trio.testing.wait_all_tasks_blocked(0.01)  # the pipe is full
                nursery.cancel_scope.cancel()
                os.utime(plugin_dir / "plugin.py", (0, 0))
            assert nursery.cancel_scope.cancelled_caught
            answer = await session.call(Call("tool", "touch", {"x": "yy"}))
            assert answer["content"][0]["text"] == "2"
    # The first frame was complete: the plugin answered it, but the caller had given up.
    assert session.report["session"]["counters"]["late"] == 1


@pytest.mark.trio
async def test_cancelled_calls_leave_no_frames_to_write(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """The plugin does not read. Frames of cancelled calls must not pile up in the host."""
    code = """
hello()
wait_for_a_word()
said = [hear() for _ in range(3)]
say(id=said[2]["id"], result=text(" ".join(message["method"] for message in said)))
hear()
"""
    long = Call("tool", "touch", {"x": "x" * MEBI})
    with trio.fail_after(SECONDS):
        async with opened(mcp(write_file, plugin_dir, code)) as session:
            for _ in range(20):
                with trio.move_on_after(0.01) as scope:
                    await session.call(long)
                assert scope.cancelled_caught
            os.utime(plugin_dir / "plugin.py", (0, 0))
            answer = await session.call(TOUCH)
    # Only the first frame was begun, so only that call is cancelled in the protocol.
    assert answer["content"][0]["text"] == "tools/call notifications/cancelled tools/call"


@pytest.mark.trio
async def test_a_call_to_a_plugin_that_does_not_read(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    manifest = mcp(write_file, plugin_dir, "hello()\ntime.sleep(1000)\n")
    failure = await failure_of(manifest, Call("tool", "touch", {"x": "x" * MEBI}), limits={"call": 1.0})
    assert failure.outcome[:2] == ("crashed", "call") and failure.outcome.cause == "write_stalled"


class Steps(trio.abc.Instrument):
    """Calls `act` after `count` task steps."""

    def __init__(self, count: int, act: Callable[[], None]) -> None:
        self.left = count
        self._act = act

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self._act()


@pytest.mark.parametrize("how", ["cancel", "interrupt"])
def test_cancelled_at_any_step(plugin_dir: Path, sessions: None, how: str) -> None:
    manifest = misbehaviour.plugin(plugin_dir, "good", "nexo")
    entered = 0

    async def once(count: int) -> bool:
        """Whether the session was cancelled before its end."""
        nonlocal entered
        scope = trio.CancelScope()
        act = scope.cancel if how == "cancel" else (lambda: signal.raise_signal(signal.SIGINT))
        steps = Steps(count, act)
        trio.lowlevel.add_instrument(steps)
        with trio.fail_after(SECONDS), scope:
            async with opened(manifest) as session:
                entered += 1
                await session.call(Call("tool", TOOL["nexo"], INPUT))
        trio.lowlevel.remove_instrument(steps)
        return steps.left <= 0

    def run(count: int) -> bool:
        try:
            return trio.run(once, count)
        except KeyboardInterrupt:
            return True

    others = set(children_of(os.getpid()))  # that other tests keep
    assert run(1 << 30) is False  # starts the fork server, and opens what is opened once
    before = len(os.listdir("/proc/self/fd"))
    (ours,) = set(children_of(os.getpid())) - others
    count = 1
    while run(count):
        # What has been killed may need a moment to end.
        assert wait_for(lambda: set(children_of(os.getpid())) - others == {ours}), children_of(os.getpid())
        count += 1 + count // 8
    assert count > 30 and entered > 2
    assert len(os.listdir("/proc/self/fd")) == before


# --- Limits ------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_the_idle_limit_ends_the_session(plugin_dir: Path, sessions: None) -> None:
    manifest = misbehaviour.plugin(plugin_dir, "good", "nexo")
    call = Call("tool", TOOL["nexo"], INPUT)
    with trio.fail_after(SECONDS):
        async with opened(manifest, limits={"idle": 0.5}) as session:
            # No call before: a busy machine may need half a second to come to it.
            async for _ in session.events():
                pass  # until it ends
            with pytest.raises(PluginFailure) as caught:
                await session.call(call)
    assert (caught.value.outcome.code, caught.value.outcome.phase) == ("timeout", "idle")
    assert session.report["limits_hit"] == ["idle"]


@pytest.mark.trio
@one_case(("name", "limit", "stream"), [("output", 4096, 1), ("output", 4096, 2), ("output_lines", 50, 2)])
async def test_output_limits(
    plugin_dir: Path, write_file: Write, sessions: None, name: str, limit: int, stream: int
) -> None:
    code = f'hello()\nm = hear()\nfor _ in range(100):\n    os.write({stream}, b"x" * 99 + b"\\n")\nhear()\n'
    manifest = nexo(write_file, plugin_dir, code)
    failure = await failure_of(manifest, limits={name: limit})
    assert failure.outcome[:2] == ("crashed", "call") and failure.outcome.cause == "output"
    assert failure.report is not None and failure.report["limits_hit"] == [name]
    (peak,) = [limit["peak"] for limit in failure.report["limits"] if limit["name"] == name]
    assert peak > limit


@pytest.mark.trio
async def test_a_teardown_limit(plugin_dir: Path, sessions: None) -> None:
    """The limit is shorter than rune's default of half a second."""
    manifest = misbehaviour.plugin(plugin_dir, "stubborn", "rune")
    seen = await ask(manifest, "rune", {"teardown": 0.1}, SECONDS)
    assert seen.outcome == crashed("no_exit", "teardown")
    assert "100ms" in seen.report["outcome"]["message"] and seen.report["limits_hit"] == ["teardown"]


@pytest.mark.trio
@one_case("contract", ["nexo", "mcp"])
async def test_a_teardown_limit_covers_the_whole_shutdown(
    plugin_dir: Path, sessions: None, contract: Contract
) -> None:
    """The limit is shorter than nexo's timeout for the answer to `shutdown`."""
    manifest = misbehaviour.plugin(plugin_dir, "stubborn", contract)
    seen = await ask(manifest, contract, {"teardown": 0.2}, SECONDS)
    assert seen.outcome == OK and seen.report["session"]["forced"] is True
    assert seen.report["limits_hit"] == ["teardown"]
    longer = await ask(manifest, contract, {"teardown": 60}, SECONDS)
    assert longer.report["session"]["forced"] is True and longer.report["limits_hit"] == []


@pytest.mark.trio
async def test_a_plugin_that_the_monitor_kills_first_was_forced(
    plugin_dir: Path, sessions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitor waits as long for a plugin that got a signal as the session does."""
    monkeypatch.setattr("runner.contracts.mcp.dialect.TERMINATE_SECONDS", SECONDS)
    seen = await ask(misbehaviour.plugin(plugin_dir, "stubborn", "mcp"), "mcp", {}, SECONDS)
    assert seen.outcome == OK and seen.report["session"]["forced"] is True


@pytest.mark.trio
async def test_a_hook_of_an_ended_plugin_lets_its_message_pass(plugin_dir: Path, sessions: None) -> None:
    shutil.copytree(ROOT / "tests/plugins/nexo_bare", plugin_dir / "bare")
    async with opened(plugin_dir / "bare") as session:
        session.kill()
        with trio.fail_after(SECONDS):
            async for _ in session.events():
                pass  # until the plugin has ended
            hook = Call("hook", "bare_hook", {"name": "before_message", "event": {}})
            assert await session.call(hook) == {"abort": False}
            with pytest.raises(PluginFailure):  # any other call fails
                await session.call(Call("tool", "bare_echo", {"text": "x"}))


# --- The writer --------------------------------------------------------------------------------------------


class Shelf:
    """A memory service with one entry."""

    def __init__(self, entry: Any = None) -> None:
        self.entry = entry if entry is not None else {"id": "1", "agent_id": "a", "content": "x"}
        self.asked = 0
        self.asked_enough = trio.Event()  # by the test that asks most

    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        if self.asked == 5:
            self.asked_enough.set()
        await trio.lowlevel.checkpoint()
        return [self.entry]


@pytest.mark.trio
async def test_replies_overtake_events(plugin_dir: Path, write_file: Write, sessions: None) -> None:
    """Of 200 events 64 are queued and the newest are dropped. Replies to five requests, sent after the first
    event, are delivered before the other events."""
    code = """
hello()
order = []
while True:
    message = hear()
    if message.get("method") == "broker.event":
        order.append(message["params"]["event"]["payload"]["n"])
        if len(order) == 1:
            for n in range(5):
                say(id=f"q{n}", method="memory.recall", params={"agent_id": "a", "query": "x", "limit": 1})
            wait_for_a_word()
    elif "method" not in message:
        order.append(message["id"] if "result" in message else "refused")
    elif message["method"] == "tool.invoke":
        number = message["id"]
    else:
        say(id=message["id"], result={})
        break
    if len(order) == 69:
        say(id=number, result=order)
"""
    shelf = Shelf()

    async def let_it_read() -> None:
        await shelf.asked_enough.wait()
        await trio.testing.wait_all_tasks_blocked()  # the replies are queued
        os.utime(plugin_dir / "plugin.py", (0, 0))

    with trio.fail_after(SECONDS):
        async with (
            opened(nexo(write_file, plugin_dir, code), services=Services(memory=shelf)) as session,
            trio.open_nursery() as nursery,
        ):
            for n in range(200):
                session.notify("broker.event", {"topic": "news.x", "payload": {"n": n, "pad": "x" * 20000}})
            nursery.start_soon(let_it_read)
            order = await session.call(DO)
    assert [entry for entry in order if isinstance(entry, int)] == list(range(64))
    replies = [place for place, entry in enumerate(order) if isinstance(entry, str)]
    assert sorted(order[place] for place in replies) == [f"q{n}" for n in range(5)]
    assert max(replies) < 30
    assert session.report["session"]["dropped"]["events"] == 136


# --- Requests of a plugin to its host ----------------------------------------------------------------------

RECALLS = """
hello()
heard = hear()
say(id="q", method="memory.recall", params={"agent_id": "a", "query": "x", "limit": 1})
say(id=heard["id"], result=hear())
say(id=hear()["id"], result={})
"""


class Broken(Shelf):
    async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
        raise KeyError("secret of the host")


@pytest.mark.trio
@one_case(
    ("memory", "allowed", "code"),
    [
        (Shelf(), True, None),
        (Shelf(), False, -32603),
        (None, True, -32603),
        (Broken(), True, -32603),
        (Shelf({"no": {"json": object()}}), True, -32603),
    ],
    ids=["answered", "denied", "absent", "raises", "no-json"],
)
async def test_a_request_to_the_host_is_always_answered(
    plugin_dir: Path, write_file: Write, sessions: None, memory: Any, allowed: bool, code: int | None
) -> None:
    manifest = nexo(write_file, plugin_dir, RECALLS)
    policy = write_file(
        plugin_dir / "policy.toml",
        f"version = 1\n[capabilities]\nhost = {json.dumps(['memory.*'] if allowed else [])}\n",
    )
    asked = Invocation(str(manifest), policy=str(policy))
    with trio.fail_after(SECONDS):
        async with open_session(asked, environ=ENVIRON, services=Services(memory=memory)) as session:
            answer = await session.call(DO)
    assert session.report is not None
    assert answer.get("error", {}).get("code") == code
    assert "secret" not in json.dumps(answer)
    served = session.report["session"]["host_calls"]
    unserved = memory is None or not allowed
    assert served["refused" if unserved else "served"] == {"memory.recall": 1}


@pytest.mark.trio
async def test_a_service_that_hangs_ends_with_the_session(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    begun, cancelled = trio.Event(), trio.Event()

    class Hanging(Shelf):
        async def recall(self, agent_id: str, query: str, limit: int) -> Sequence[Mapping[str, Any]]:
            begun.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
            raise AssertionError

    with trio.fail_after(SECONDS):
        async with opened(
            nexo(write_file, plugin_dir, RECALLS), services=Services(memory=Hanging())
        ) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call, DO)
                await begun.wait()
                nursery.cancel_scope.cancel()
            assert not cancelled.is_set()
    assert cancelled.is_set()


@pytest.mark.trio
async def test_two_thousand_requests_at_once(plugin_dir: Path, write_file: Write, sessions: None) -> None:
    """All are answered, some with the error that the host is busy."""
    code = """
hello()
heard = hear()
params = {"agent_id": "a", "query": "x", "limit": 1}
lines = [json.dumps({"jsonrpc": "2.0", "id": n, "method": "memory.recall", "params": params})
    for n in range(2000)]
threading.Thread(target=os.write, args=(1, ("\\n".join(lines) + "\\n").encode())).start()
answers = [hear() for _ in range(2000)]
say(id=heard["id"], result=[len({a["id"] for a in answers}), sum("result" in a for a in answers)])
say(id=hear()["id"], result={})
"""
    shelf = Shelf()
    with trio.fail_after(SECONDS):
        async with opened(nexo(write_file, plugin_dir, code), services=Services(memory=shelf)) as session:
            different, answered = await session.call(DO)
    assert different == 2000 and answered == shelf.asked >= 32
    calls = session.report["session"]["host_calls"]
    assert calls["served"].get("memory.recall", 0) + calls["refused"].get("memory.recall", 0) == 2000


# --- Many calls, large answers -----------------------------------------------------------------------------


@pytest.mark.trio
async def test_fifty_calls_answered_in_reverse_order(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    code = """
hello()
asked = [hear() for _ in range(50)]
for message in reversed(asked):
    say(id=message["id"], result=message["params"]["args"]["n"])
say(id=hear()["id"], result={})
"""
    answers: dict[int, Any] = {}

    async def one(session: Session, n: int) -> None:
        answers[n] = await session.call(Call("tool", "plugin_do", {"n": n}))

    with trio.fail_after(SECONDS):
        async with opened(nexo(write_file, plugin_dir, code)) as session, trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(one, session, n)
    assert answers == {n: n for n in range(50)}
    assert session.report["session"]["calls"] == {"ok": 50, "refused": 0, "failed": 0}


@pytest.mark.trio
async def test_a_large_answer_does_not_block_other_sessions(
    plugin_dir: Path, write_file: Write, sessions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a session parses 4 MiB, which the test prolongs, another session is called and answers."""
    code = 'hello()\nm = hear()\nsay(id=m["id"], result=text("x" * (4 << 20)))\nhear()\n'
    reading, go_on = threading.Event(), threading.Event()
    read = McpDialect.read

    def slowly(self: McpDialect, raw: bytes) -> Message:
        if len(raw) > MEBI:
            reading.set()
            assert go_on.wait(SECONDS)
        return read(self, raw)

    monkeypatch.setattr(McpDialect, "read", slowly)
    folder = plugin_dir / "other"
    folder.mkdir()
    other = misbehaviour.plugin(folder, "good", "mcp")
    got: list[Any] = []

    async def large(session: Session) -> None:
        got.append(await session.call(TOUCH))

    with trio.fail_after(SECONDS):
        async with (
            opened(mcp(write_file, plugin_dir, code)) as one,
            opened(other) as two,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(large, one)
            await trio.to_thread.run_sync(reading.wait)
            answer = await two.call(Call("tool", TOOL["mcp"], INPUT))
            assert answer["structuredContent"]["input"] == INPUT and not got
            go_on.set()
    assert len(got[0]["content"][0]["text"]) == 4 * MEBI
