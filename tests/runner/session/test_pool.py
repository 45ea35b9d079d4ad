"""The processes of an open plugin: which call gets which, how many there are, and when each ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from runner.contracts.prepared_calls import Prepared, PreparedCalls
from runner.exceptions import PluginError, PluginFailure
from runner.launch.stages import Invocation
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallEnd, Notice, Progress
from runner.protocol.secrets import Secrets
from runner.session import pool as pool_module
from runner.session import prepared as prepared_module
from runner.session.backlog import MOST_EVENTS
from runner.session.pending import Deadline
from runner.session.pool import Pool, open_pool
from runner.session.prepared import PreparedCall
from runner.session.session import Session
from tests.runner.session.graced import PLUGIN, GracedPlugin, Handle, graced, obliging

pytestmark = pytest.mark.trio


class PooledCalls(PreparedCalls):
    OPTIONS_OF_ONE_CALL = ("invocation_id",)
    CALLER_KEYS = ("org_id",)

    def __init__(self) -> None:
        self.processes = 2  # 0: each call has a process of its own
        self.isolated = 0

    def reuses(self, plugin: Plugin) -> int:
        return self.processes

    def concurrent(self, plugin: Plugin) -> int:
        return self.isolated

    def record(self, plugin: Plugin, call: Call, end: CallEnd, options: Any) -> Any:
        return {"code": end.outcome.code, "written": end.written, "id": options.get("invocation_id")}


class Machine:
    """The processes that were opened, in order."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.plugins: list[GracedPlugin] = []
        self.living = 0
        self.most = 0
        self.launches: Callable[[], Any] | None = None  # awaited before a launch

    reporting = False

    @asynccontextmanager
    async def open(self, prepared: PreparedCall, made: Callable[[Session], None]) -> AsyncIterator[Session]:
        self.living += 1
        self.most = max(self.most, self.living)
        try:
            if self.launches is not None:
                await self.launches()
            async with graced(self.handle) as (session, plugin):
                self.plugins.append(plugin)
                session.state.record.secrets = prepared.secrets
                made(session)
                yield session
                if self.reporting:
                    session.report = {"outcome": {}, "exit": {}}
        finally:
            self.living -= 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> PooledCalls:
    found = PooledCalls()  # type: ignore[abstract]
    contract = SimpleNamespace(prepared_calls=found)
    monkeypatch.setattr(prepared_module, "find_contract", lambda name: contract)

    async def read(invocation: Invocation) -> Plugin:  # in no thread: an autojump clock waits for none
        return PLUGIN

    monkeypatch.setattr(pool_module, "_read", read)
    return found


def prepared(
    name: str,
    given: Any = None,
    seconds: float = 50.0,
    secrets: Any = None,
    contents: Any = None,
    context: Any = None,
    **options: str,
) -> PreparedCall:
    call = Call("tool", name, given, context or {})
    made = Prepared(call, {"export": "one", **options}, contents or {}, {})
    deadline = Deadline(trio.current_time() + seconds, seconds)
    invocation = Invocation("/graced.json", options=tuple(made.options.items()))
    return PreparedCall(invocation, PLUGIN, made, Secrets(secrets), time.time(), time.monotonic(), deadline)


@asynccontextmanager
async def opened(
    handle: Handle = obliging, *, reporting: bool = False
) -> AsyncIterator[tuple[Pool, Machine]]:
    machine = Machine(handle)
    machine.reporting = reporting
    async with open_pool(machine.open) as pool:
        yield pool, machine
    assert machine.living == 0  # whatever happened


async def outcome(pool: Pool, call: PreparedCall) -> str:
    try:
        await pool.call(call)
    except (PluginError, PluginFailure) as error:
        recorded = (error.invocation or {}).get("code")
        return error.outcome.code if recorded == error.outcome.code else f"{recorded} in its record"
    return "ok"


async def test_calls_one_after_the_other_share_a_process(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        assert machine.living == 0  # nothing is started before a call
        for number in range(5):
            invoked = await pool.call(prepared("echo", number, invocation_id=f"inv_{number}"))
            assert invoked.value == number and invoked.report == {}
            assert invoked.invocation == {"code": "ok", "written": True, "id": f"inv_{number}"}
            assert pool.invocation == invoked.invocation
        assert len(machine.plugins) == 1


async def test_a_process_for_each_call(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    calls.processes = 0
    async with opened() as (pool, machine):
        for number in range(3):
            assert (await pool.call(prepared("echo", number))).value == number
            assert machine.living == 0
        assert len(machine.plugins) == 3


async def test_calls_that_were_prepared_otherwise_get_another_process(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        for binding in ("a", "b", "a", "b"):
            await pool.call(prepared("echo", 1, binding=binding))
        assert len(machine.plugins) == 2


async def test_callers_do_not_share_a_process(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    async with opened() as (pool, machine):
        for org, session in (("a", "1"), ("b", "1"), ("a", "2"), ("", "1"), ("b", "3")):
            await pool.call(prepared("echo", 1, context={"org_id": org, "session_id": session}))
        assert len(machine.plugins) == 3


async def test_a_call_that_brings_files_has_a_process_of_its_own(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    calls.processes = 1
    async with opened() as (pool, machine):
        for contents in ({}, {"/file": b"x"}, {"/file": b"y"}, {}, {}):
            await pool.call(prepared("echo", contents=contents))
        assert len(machine.plugins) == 4 and machine.most == 1


@pytest.mark.parametrize(("processes", "isolated"), [(2, 0), (0, 2)])
async def test_more_calls_than_processes(
    calls: PooledCalls, processes: int, isolated: int, autojump_clock: trio.abc.Clock
) -> None:
    calls.processes, calls.isolated = processes, isolated
    codes: list[str] = []

    async def one(pool: Pool) -> None:
        codes.append(await outcome(pool, prepared("sleep", 5.0)))

    async with opened() as (pool, machine), trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one, pool)
        await trio.sleep(20.0)
        assert sorted(codes) == ["ok", "ok", "overloaded"] and machine.most == 2
        assert await outcome(pool, prepared("echo")) == "ok"


@pytest.mark.parametrize(
    ("call", "code"), [("fail", "plugin_error"), ("die", "crashed"), ("hang", "timeout")]
)
async def test_a_process_whose_call_failed_is_not_used_again(
    calls: PooledCalls, call: str, code: str, autojump_clock: trio.abc.Clock
) -> None:
    calls.processes = 1
    async with opened() as (pool, machine):
        assert await outcome(pool, prepared(call, seconds=5.0)) == code
        # The next call waits for the end of the first process: there may be one at a time.
        assert await outcome(pool, prepared("echo")) == "ok"
        assert len(machine.plugins) == 2 and machine.most == 1


async def test_a_process_that_dies_while_it_waits_is_not_handed_out(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        await pool.call(prepared("echo"))
        machine.plugins[0].cell.end()
        await trio.testing.wait_all_tasks_blocked(0.01)
        await trio.sleep(5.0)
        assert machine.living == 0
        assert await outcome(pool, prepared("echo")) == "ok"
        assert len(machine.plugins) == 2


async def test_a_caller_that_gives_up(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    async with opened() as (pool, machine):
        with trio.move_on_after(1.0):
            await pool.call(prepared("hang"))
        assert machine.living == 0  # nothing is left of it when its caller goes on
        assert [why for _, why in machine.plugins[0].cancels] == ["user_cancelled"]
        assert pool.invocation is not None and pool.invocation["code"] in ("cancelled", "plugin_error")
        assert await outcome(pool, prepared("echo")) == "ok"


async def test_a_caller_that_gives_up_during_the_launch(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        machine.launches = trio.sleep_forever
        with trio.move_on_after(1.0):
            await pool.call(prepared("echo"))
        assert machine.living == 0
        assert pool.invocation == {"code": "cancelled", "written": False, "id": None}


async def test_a_launch_that_fails(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    async def fail() -> None:
        raise PluginFailure(Outcome("launch_failed", "launch", "no cage"))

    async with opened() as (pool, machine):
        machine.launches = fail
        assert await outcome(pool, prepared("echo")) == "launch_failed"
        machine.launches = None
        assert await outcome(pool, prepared("echo")) == "ok"


async def test_a_bug_reaches_the_caller_and_not_the_pool(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async with opened() as (pool, machine):
        machine.launches = fail
        with pytest.raises(ZeroDivisionError):
            await pool.call(prepared("echo"))
        machine.launches = None
        assert await outcome(pool, prepared("echo")) == "ok"


@pytest.mark.parametrize("processes", [0, 2])
async def test_the_end_of_the_pool_while_calls_run(
    calls: PooledCalls, processes: int, autojump_clock: trio.abc.Clock
) -> None:
    calls.processes = processes
    codes: list[str] = []

    async def one(pool: Pool, name: str) -> None:
        codes.append(await outcome(pool, prepared(name)))

    async with trio.open_nursery() as callers:
        async with opened() as (pool, machine):
            callers.start_soon(one, pool, "hang")
            callers.start_soon(one, pool, "hang")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert machine.living == 2
        callers.start_soon(one, pool, "echo")
    # The plugins answered the cancellation; the last call came too late.
    assert sorted(codes) == ["cancelled", "plugin_error", "plugin_error"]
    for plugin in machine.plugins:
        assert [why for _, why in plugin.cancels] == ["shutdown"]


async def test_the_end_of_the_pool_during_a_launch(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    codes: list[str] = []

    async def one(pool: Pool) -> None:
        codes.append(await outcome(pool, prepared("echo")))

    async with trio.open_nursery() as callers, opened() as (pool, machine):
        machine.launches = trio.sleep_forever
        callers.start_soon(one, pool)
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert codes == ["cancelled"]


async def test_an_error_in_the_body_leaves_as_itself(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async def body() -> None:
        async with opened() as (pool, _):
            await pool.call(prepared("echo"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()


async def test_everything_is_cancelled_in_the_middle(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    with trio.move_on_after(3.0):
        async with opened() as (pool, machine), trio.open_nursery() as nursery:
            nursery.start_soon(pool.call, prepared("hang"))
            nursery.start_soon(pool.call, prepared("hang"))
    assert machine.living == 0
    for plugin in machine.plugins:
        assert len(plugin.cancels) == 1


async def leaky(plugin: GracedPlugin, message: dict[str, Any]) -> None:
    if message.get("do") == "leak":
        await plugin.cell.its_stderr.send_all(b"first-secret second-secret\n")
        await plugin.say({"about": message["id"], "text": "second-secret"})
        await trio.sleep(1.0)
        await plugin.say({"id": message["id"], "no": "broken", "why": "second-secret"})
    else:
        await obliging(plugin, message)


async def test_calls_with_other_secrets_get_another_process(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    calls.processes = 3
    async with opened() as (pool, machine):
        for secrets in (None, {"a": "hidden"}, {"a": "two"}, {"a": "hidden"}, {}, {"a": "two"}):
            assert await outcome(pool, prepared("echo", secrets=secrets)) == "ok"
        assert len(machine.plugins) == 3
        # All of them wait. There are no more than three at once, whatever comes.
        for value in (b"two", {"two": [1]}, "three", "four"):
            assert await outcome(pool, prepared("echo", secrets={"a": value})) == "ok"
        assert len(machine.plugins) == 7 and machine.most == 3
        assert not any("hidden" in str(process.keys) for process in pool._processes)


async def test_secrets_that_are_no_json_are_like_no_others(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        for _ in range(3):
            await pool.call(prepared("echo", secrets={"a": object()}))
        assert len(machine.plugins) == 3 and machine.most == 2


async def test_callers_share_the_number_of_processes(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        for number in range(5):
            await pool.call(prepared("echo", 1, context={"org_id": f"org_{number}"}))
        assert len(machine.plugins) == 5 and machine.most == 2


# --- reports and events -------------------------------------------------------------------------------------


async def test_a_no_that_leaves_the_pool_has_a_report(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    with pytest.raises(PluginError) as caught:
        async with opened(reporting=True) as (pool, _):
            await pool.call(prepared("fail", invocation_id="inv_1"))
    report = caught.value.report
    assert report is not None and report["outcome"]["code"] == "plugin_error"
    assert report["invocation"] == caught.value.invocation and caught.value.invocation is not None


async def test_events_of_all_processes(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    async def talking(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        if "do" in message:
            await plugin.say({"about": message["id"], "text": message["with"]})
        await obliging(plugin, message)

    async with opened(talking) as (pool, machine):
        for org in ("a", "b"):
            await pool.call(prepared("echo", org, context={"org_id": org}))
        await outcome(pool, prepared("die", "c"))
        assert len(machine.plugins) == 3
    told = [event async for event in pool.events]
    assert [event.value["text"] for event in told if isinstance(event, Progress)] == ["a", "b", "c"]
    [ended] = [event for event in told if isinstance(event, Notice)]
    assert ended.kind == "ended" and ended.value["code"] == "crashed"


async def test_events_that_nobody_reads_are_dropped(
    calls: PooledCalls, autojump_clock: trio.abc.Clock
) -> None:
    async def talking(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        if "do" in message:
            for _ in range(200):
                await plugin.say({"about": message["id"]})
        await obliging(plugin, message)

    async with opened(talking) as (pool, _):
        for org in ("a", "b"):
            await pool.call(prepared("echo", context={"org_id": org}))
        dropped = [process.session.state.backlog.dropped for process in pool._processes if process.session]
    assert dropped == [0, 400 - MOST_EVENTS]
    assert len([event async for event in pool.events]) == MOST_EVENTS


# --- a process that waits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("frames", "size", "lives"), [(100, 1, True), (101, 1, False), (30, 50_000, False)])
async def test_a_process_that_waits_has_nothing_to_say(
    calls: PooledCalls, frames: int, size: int, lives: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        for _ in range(2):  # a call between them
            await pool.call(prepared("echo"))
            with trio.move_on_after(5.0):
                for _ in range(frames):
                    await machine.plugins[0].say({"about": 1, "text": "x" * size})
            await trio.sleep(5.0)
            if not lives:
                break
        assert machine.living == int(lives)
        assert await outcome(pool, prepared("echo")) == "ok"
    told = [event.value for event in await _all(pool) if isinstance(event, Notice)]
    assert [each["cause"] for each in told] == ([] if lives else ["unasked"])


async def test_a_process_that_works_may_say_much(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    async def talking(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        if "do" in message:
            for _ in range(300):
                await plugin.say({"about": message["id"], "text": "x" * 10_000})
        await obliging(plugin, message)

    async with opened(talking) as (pool, machine):
        for _ in range(2):
            assert await outcome(pool, prepared("echo")) == "ok"
        assert len(machine.plugins) == 1


async def _all(pool: Pool) -> list[Notice | Progress]:
    return [event async for event in pool.events]


async def test_secrets_are_hidden(calls: PooledCalls, autojump_clock: trio.abc.Clock) -> None:
    told: list[Any] = []
    async with opened(leaky) as (pool, _):
        with pytest.raises(PluginError) as caught:
            await pool.call(prepared("leak", secrets={"token": "second-secret"}), told.append)
    assert caught.value.stderr == "first-secret [secret]\n" and str(caught.value) == "no: [secret]"
    assert told[0]["text"] == "[secret]"
