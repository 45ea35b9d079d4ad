"""Plugins that try to exhaust their host or send after their end, and callers in unlucky races."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runner.cli.live.output import Output
from runner.exceptions import PluginFailure
from runner.launch.stages import Invocation
from runner.protocol.dialect import Call, Notice
from runner.protocol.host_services import Services
from runner.session.open import open_session
from runner.session.session import Session
from tests.conftest import ROOT
from tests.manifests import rune
from tests.runner.session.test_session import (
    DO,
    ENVIRON,
    SECONDS,
    TOUCH,
    Write,
    failure_of,
    mcp,
    nexo,
    opened,
)
from tests.tables import one_case

# --- Unread events -----------------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.trio
@one_case(("length", "kept"), [(1000, 20), (4 << 20, 8)], ids=["short", "long"])
async def test_fewer_long_unread_events_are_kept(
    plugin_dir: Path, write_file: Write, sessions: None, length: int, kept: int
) -> None:
    """The maximum number of queued events, each as long as a frame, would be gigabytes."""
    code = f"""
hello()
m = hear()
for _ in range(20):
    say(method="notifications/message", params={{"level": "info", "data": "x" * {length}}})
say(id=m["id"], result=text("done"))
hear()
"""
    heard: list[Notice] = []
    with trio.fail_after(SECONDS):
        async with opened(mcp(write_file, plugin_dir, code)) as session:
            await session.call(TOUCH)
        async for event in session.events():
            heard.append(event)
    assert session.report["session"]["dropped"]["notices"] == 20 - len(heard)
    assert len(heard) == kept if length < 10000 else 1 <= len(heard) <= kept


# --- Fair scheduling ---------------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.trio
async def test_a_flood_of_lines_does_not_starve_other_tasks(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """One read has 64 thousand empty lines. Other tasks run many times while the session handles them."""
    code = 'hello()\nm = hear()\nos.write(1, b"\\n" * 65536)\nsay(id=m["id"], result=text("x"))\nhear()\n'
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with opened(mcp(write_file, plugin_dir, code)) as session:
        taken: list[int] = []
        read = session.state.dialect.read

        def counted(raw: bytes) -> Any:
            taken.append(turns)
            return read(raw)

        session.state.dialect.read = counted
        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(count)
                await session.call(TOUCH)
                nursery.cancel_scope.cancel()
    assert len(taken) > 65536
    # There were only a few reads, each of which took a good part of a second to handle.
    assert len(set(taken)) > 20


# --- Answers after a failure -------------------------------------------------------------------------------

ANSWER_AFTER = """
hello()
m = hear()
os.write(1, %r + json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": text("x" * 20000)}).encode() + b"\\n")
hear()
"""


@pytest.mark.launches
@pytest.mark.trio
async def test_an_answer_after_a_violation_does_not_count(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """Also if both came in one read, before the caller's task could see the violation."""
    for place, before in enumerate((b"no message, no fault\n", b"NaN\n")):
        folder = plugin_dir / str(place)
        manifest = mcp(write_file, folder, ANSWER_AFTER % before)
        if not place:
            async with opened(manifest) as session:
                assert "content" in await session.call(TOUCH)
        else:
            failure = await failure_of(manifest, TOUCH)
            assert (failure.outcome.code, failure.outcome.cause) == ("malformed_response", "bad_number")


@pytest.mark.launches
@pytest.mark.trio
async def test_an_answer_beyond_the_output_limit_does_not_count(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    manifest = mcp(write_file, plugin_dir, ANSWER_AFTER % b"")
    async with opened(manifest, limits={"output": 30000}) as session:
        assert "content" in await session.call(TOUCH)
    failure = await failure_of(manifest, TOUCH, limits={"output": 10000})
    assert failure.outcome[:1] == ("crashed",) and failure.outcome.cause == "output"


# --- Services ----------------------------------------------------------------------------------------------


def hosted(write: Write, folder: Path, code: str, services: Services) -> Any:
    manifest = mcp(write, folder, code)
    policy = write(folder / "policy.toml", 'version = 1\n[capabilities]\nhost = ["*"]\n')
    return open_session(Invocation(str(manifest), policy=str(policy)), environ=ENVIRON, services=services)


ASKS_AND_TAKES_BACK = """
hello()
m = hear()
out = ""
for n in range(20):
    out += json.dumps({"jsonrpc": "2.0", "id": f"q{n}", "method": "roots/list"}) + "\\n"
    back = {"requestId": f"q{n}"}
    out += json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": back}) + "\\n"
os.write(1, out.encode())
say(id="last", method="ping")
while hear().get("id") != "last":
    pass
say(id=m["id"], result=text("x"))
hear()
"""


@pytest.mark.launches
@pytest.mark.trio
async def test_a_request_cancelled_at_once_is_not_served(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """The service's task may not have run yet when the request is cancelled."""
    serving = 0

    class Hanging:
        async def roots(self) -> Sequence[Mapping[str, Any]]:
            nonlocal serving
            serving += 1
            try:
                await trio.sleep_forever()
            finally:
                serving -= 1
            raise AssertionError

    with trio.fail_after(SECONDS):
        async with hosted(write_file, plugin_dir, ASKS_AND_TAKES_BACK, Services(roots=Hanging())) as session:
            await session.call(TOUCH)
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert serving == 0
    assert session.report["session"]["host_calls"]["served"] == {"roots/list": 20}


@pytest.mark.launches
@pytest.mark.trio
@one_case("taken_back", [True, False])
async def test_a_service_that_fails_while_it_is_cancelled(
    plugin_dir: Path, write_file: Write, sessions: None, taken_back: bool
) -> None:
    """Its exception neither ends the session nor reaches the caller."""
    begun, failed = trio.Event(), trio.Event()

    class Untidy:
        async def roots(self) -> Sequence[Mapping[str, Any]]:
            async def untidy() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    failed.set()
                    raise ValueError("while tidying up")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(untidy)
                nursery.start_soon(trio.sleep_forever)
                begun.set()
            raise AssertionError

    back = 'say(method="notifications/cancelled", params={"requestId": "q"})' if taken_back else ""
    code = f"""
hello()
m = hear()
say(id="q", method="roots/list")
say(id=m["id"], result=text("x"))
m = hear()
{back}
say(id=m["id"], result=text("y"))
hear()
"""
    with trio.fail_after(SECONDS):
        async with hosted(write_file, plugin_dir, code, Services(roots=Untidy())) as session:
            await session.call(TOUCH)
            await begun.wait()
            await session.call(TOUCH)
            if taken_back:
                await failed.wait()
            assert failed.is_set() == taken_back
    assert failed.is_set() and session.report["outcome"]["code"] == "ok"


@pytest.mark.launches
@pytest.mark.trio
@one_case("breaks", [True, False])
async def test_a_violation_cancels_running_services(
    plugin_dir: Path, write_file: Write, sessions: None, breaks: bool
) -> None:
    """The service is cancelled before the session is closed, because it may cost money."""
    begun, given_up = trio.Event(), trio.Event()

    class Hanging:
        async def roots(self) -> Sequence[Mapping[str, Any]]:
            begun.set()
            try:
                await trio.sleep_forever()
            finally:
                given_up.set()
            raise AssertionError

    breach = 'print("NaN", flush=True)' if breaks else ""
    code = f"""
hello()
m = hear()
say(id="q", method="roots/list")
say(id=m["id"], result=text("x"))
hear()
{breach}
time.sleep(60)
"""
    with trio.fail_after(SECONDS):
        async with hosted(write_file, plugin_dir, code, Services(roots=Hanging())) as session:
            await session.call(TOUCH)
            await begun.wait()
            with pytest.raises(PluginFailure) as caught:
                await session.call(TOUCH, seconds=SECONDS if breaks else 1.0)
            assert caught.value.outcome.code == ("malformed_response" if breaks else "timeout")
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert given_up.is_set() == breaks
    assert given_up.is_set()


# --- Races -------------------------------------------------------------------------------------------------


@pytest.mark.launches
@pytest.mark.trio
async def test_an_answer_counts_before_its_caller_has_run(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """Answer and end can arrive in one scheduler pass, which handles the end first."""
    for answered in (True, False):
        answer = 'say(id=m["id"], result="done")' if answered else ""
        manifest = nexo(write_file, plugin_dir / str(answered), f"hello()\nm = hear()\n{answer}\n")
        async with opened(manifest) as session:
            woken, wake = session.state.waiters, session.state.wake

            def held(token: int, answer: Any, wake: Any = wake, session: Any = session) -> None:
                """Wake the caller only after the session's end was handled."""
                event, session.state.waiters[token].woken = session.state.waiters[token].woken, trio.Event()
                wake(token, answer)
                session._late = event

            session.state.wake = held
            outcome: list[str] = []

            async def ask(session: Any = session, outcome: list[str] = outcome) -> None:
                try:
                    outcome.append(await session.call(DO))
                except PluginFailure as failure:
                    outcome.append(failure.outcome.cause)

            with trio.fail_after(SECONDS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask)
                    await session.state.over.wait()
                    if answered:
                        assert len(woken) == 1  # the caller has not run yet
                        session._late.set()
        assert outcome == (["done"] if answered else ["exit:0"])
        # The plugin ended by itself in both cases. The phase says whether that was during the call.
        assert session.report["outcome"]["phase"] == ("idle" if answered else "call")
        assert session.report["session"]["calls"]["ok"] == answered


@pytest.mark.launches
def test_an_interrupt_reaches_the_caller_and_not_the_reader_task(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """Otherwise it would end the session's reader task and come out in an exception group."""
    manifest = nexo(write_file, plugin_dir, 'hello()\nm = hear()\nprint("x", flush=True)\nhear()\n')
    seen: list[Session] = []

    async def main() -> None:
        with trio.fail_after(SECONDS):
            async with opened(manifest, on_made=seen.append) as session:
                read = session.state.dialect.read

                def interrupted(raw: bytes) -> Any:
                    signal.raise_signal(signal.SIGINT)  # while the reader task runs
                    return read(raw)

                session.state.dialect.read = interrupted
                await session.call(DO)

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    report = seen[0].report
    assert report is not None and report["session"]["frames"] == 2


@pytest.mark.launches
@pytest.mark.trio
async def test_noise_counts_as_silence(plugin_dir: Path, write_file: Write, sessions: None) -> None:
    """An older server that ignores unknown methods, and prints text while it starts."""
    code = """
import select
while not select.select([0], [], [], 0.1)[0] or "initialize" not in (m := hear())["method"]:
    print("still warming up", flush=True)
version = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "n", "version": "1"}}
say(id=m["id"], result=version)
hear()
"""
    with trio.fail_after(SECONDS):
        async with opened(mcp(write_file, plugin_dir, code), limits={"handshake": 15.0}) as session:
            assert session.identity.protocol == "2025-11-25"


@pytest.mark.launches
@pytest.mark.trio
async def test_a_long_shutdown_is_not_idle(plugin_dir: Path, write_file: Write, sessions: None) -> None:
    # The shutdown takes one and a half times the idle limit.
    code = 'hello()\nm = hear()\ntime.sleep(1.5)\nsay(id=m["id"], result={})\n'
    with trio.fail_after(SECONDS):
        async with opened(nexo(write_file, plugin_dir, code), limits={"idle": 1.0}) as session:
            pass
    assert session.report["outcome"]["code"] == "ok" and session.report["limits_hit"] == []


@pytest.mark.launches
@pytest.mark.trio
async def test_a_short_timeout_does_not_end_the_session_for_other_calls(
    plugin_dir: Path, write_file: Write, sessions: None
) -> None:
    """The plugin is busy and does not read. One call fills the pipe, and another times out behind it."""
    code = """
hello()
m = hear()
wait_for_a_word()
say(id=m["id"], result="first")
m = hear()
say(id=m["id"], result="second")
say(id=hear()["id"], result={})
"""
    answers: list[Any] = []

    async def ask(session: Session, pad: int) -> None:
        answers.append(await session.call(Call("tool", "plugin_do", {"pad": "x" * pad})))

    with trio.fail_after(SECONDS):
        async with opened(nexo(write_file, plugin_dir, code)) as session, trio.open_nursery() as nursery:
            nursery.start_soon(ask, session, 1)
            await trio.testing.wait_all_tasks_blocked(0.2)
            nursery.start_soon(ask, session, 500_000)
            await trio.testing.wait_all_tasks_blocked(0.2)
            with pytest.raises(PluginFailure) as caught:
                await session.call(DO, seconds=0.5)
            assert (caught.value.outcome.code, caught.value.outcome.phase) == ("timeout", "call")
            os.utime(plugin_dir / "plugin.py", (0, 0))
    assert answers == ["first", "second"]


_INTERRUPTED = """
import os, signal, sys, trio
from runner.protocol.dialect import Call
from runner.session.open import open_session
from runner.launch.stages import Invocation

block = trio._core.wait_task_rescheduled

async def main():
    call = Call("tool", "echo", {})
    async with open_session(Invocation(sys.argv[1]), environ=os.environ, call=call, seconds=3000) as session:
        await session.call(call)
        # The default of half a second may pass before the interrupt.
        session.state.dialect._seconds = lambda phase: 600.0
        wait = session.shutdown._has_ended_within

        def interrupt(abort):
            # In trio.Event.wait, when the event has the task and the task does not wait yet.
            assert sys._getframe(1).f_code is trio.Event.wait.__code__
            trio._core.wait_task_rescheduled = block
            signal.raise_signal(signal.SIGINT)
            return block(abort)

        async def interrupted(seconds):
            trio._core.wait_task_rescheduled = interrupt
            return await wait(seconds)

        session.shutdown._has_ended_within = interrupted
        await session.conclude()

try:
    trio.run(main)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
_LINGERING = """#!/usr/bin/python3 -I
import json, sys, time
manifest = {"plugin_id": "p", "plugin_version": "1", "protocol_version": "rterm.plugin.v1"}
sys.stdin.readline()
print(json.dumps({"type": "handshake", "manifest": {**manifest, "exposed_tools": ["echo"]}}), flush=True)
asked = json.loads(sys.stdin.readline())
answer = {"type": "response", "request_id": asked["request_id"], "status": "ok", "output": {}}
print(json.dumps(answer), flush=True)
time.sleep(1000)
"""


@pytest.mark.launches
def test_an_interrupt_during_the_shutdown(plugin_dir: Path, write_file: Write, nothing_left: None) -> None:
    """One ^C is enough to end a shutdown that would not finish."""
    write_file(plugin_dir / "plugin.py", _LINGERING, 0o755)
    bundle = rune("p", "echo", "./plugin.py")
    manifest = write_file(plugin_dir / "rterm-plugin.json", json.dumps(bundle))
    host = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(manifest)],
        capture_output=True,
        env={**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT)},
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert host.stdout == "interrupted\n", host.stderr


def test_progress_messages_do_not_accumulate() -> None:
    output = Output("call", as_json=False)
    for _ in range(100):
        output.progress({"message": "x" * 10_000})
    assert len(output._line) < 1000
    output.progress({"progress": 1, "total": 4, "message": "a quarter"})
    assert output._line == "25 % a quarter"
