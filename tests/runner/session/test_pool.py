"""The processes of an open plugin: which call gets which, how many there are, and when each ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from runner.contracts.contract import Contract, Prepared
from runner.exceptions import PluginError, PluginFailure
from runner.launch.stages import Invocation
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.dialect import Call, CallEnd
from runner.protocol.secrets import Secrets
from runner.session import pool as pool_module
from runner.session import prepared as prepared_module
from runner.session.deadline import Deadline
from runner.session.pool import Pool, open_pool
from runner.session.prepared import PreparedCall
from runner.session.session import Session
from tests.runner.session.graced import PLUGIN, GracedPlugin, Handle, graced, obliging

pytestmark = pytest.mark.trio


class PooledContract(Contract):
    name = "pooled"
    about = ""
    no_command_hint = ""
    sign = ""
    format = "json"
    file_names = ()
    options_of_one_call = ("invocation_id",)
    caller_keys = ("org_id",)

    def __init__(self) -> None:
        self.workers = 2  # 0: each call has a process of its own
        self.isolated = 0

    def reuses(self, plugin: Plugin) -> int:
        return self.workers

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

    @asynccontextmanager
    async def open(self, prepared: PreparedCall, made: Callable[[Session], None]) -> AsyncIterator[Session]:
        self.living += 1
        self.most = max(self.most, self.living)
        try:
            if self.launches is not None:
                await self.launches()
            async with graced(self.handle) as (session, plugin):
                self.plugins.append(plugin)
                made(session)
                yield session
        finally:
            self.living -= 1


@pytest.fixture
def contract(monkeypatch: pytest.MonkeyPatch) -> PooledContract:
    found = PooledContract()  # type: ignore[abstract]
    monkeypatch.setattr(prepared_module, "find_contract", lambda name: found)

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
    return PreparedCall(
        invocation, call, PLUGIN, made, Secrets(secrets), time.time(), time.monotonic(), deadline
    )


@asynccontextmanager
async def opened(handle: Handle = obliging) -> AsyncIterator[tuple[Pool, Machine]]:
    machine = Machine(handle)
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
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        assert machine.living == 0  # nothing is started before a call
        for number in range(5):
            invoked = await pool.call(prepared("echo", number, invocation_id=f"inv_{number}"))
            assert invoked.value == number and invoked.report is None
            assert invoked.invocation == {"code": "ok", "written": True, "id": f"inv_{number}"}
            assert pool.invocation == invoked.invocation
        assert len(machine.plugins) == 1


async def test_a_process_for_each_call(contract: PooledContract, autojump_clock: trio.abc.Clock) -> None:
    contract.workers = 0
    async with opened() as (pool, machine):
        for number in range(3):
            assert (await pool.call(prepared("echo", number))).value == number
            assert machine.living == 0
        assert len(machine.plugins) == 3


async def test_calls_that_were_prepared_otherwise_get_another_process(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        for binding in ("a", "b", "a", "b"):
            await pool.call(prepared("echo", 1, binding=binding))
        assert len(machine.plugins) == 2


async def test_callers_do_not_share_a_process(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        for org, session in (("a", "1"), ("b", "1"), ("a", "2"), ("", "1"), ("b", "3")):
            await pool.call(prepared("echo", 1, context={"org_id": org, "session_id": session}))
        assert len(machine.plugins) == 3


async def test_a_call_that_brings_files_has_a_process_of_its_own(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    contract.workers = 1
    async with opened() as (pool, machine):
        for contents in ({}, {"/file": b"x"}, {"/file": b"y"}, {}, {}):
            await pool.call(prepared("echo", contents=contents))
        assert len(machine.plugins) == 4 and machine.most == 1


@pytest.mark.parametrize(("workers", "isolated"), [(2, 0), (0, 2)])
async def test_more_calls_than_processes(
    contract: PooledContract, workers: int, isolated: int, autojump_clock: trio.abc.Clock
) -> None:
    contract.workers, contract.isolated = workers, isolated
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
    contract: PooledContract, call: str, code: str, autojump_clock: trio.abc.Clock
) -> None:
    contract.workers = 1
    async with opened() as (pool, machine):
        assert await outcome(pool, prepared(call, seconds=5.0)) == code
        # The next call waits for the end of the first process: there may be one at a time.
        assert await outcome(pool, prepared("echo")) == "ok"
        assert len(machine.plugins) == 2 and machine.most == 1


async def test_a_process_that_dies_while_it_waits_is_not_handed_out(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        await pool.call(prepared("echo"))
        machine.plugins[0].cell.end()
        await trio.testing.wait_all_tasks_blocked(0.01)
        await trio.sleep(5.0)
        assert machine.living == 0
        assert await outcome(pool, prepared("echo")) == "ok"
        assert len(machine.plugins) == 2


async def test_a_caller_that_gives_up(contract: PooledContract, autojump_clock: trio.abc.Clock) -> None:
    async with opened() as (pool, machine):
        with trio.move_on_after(1.0):
            await pool.call(prepared("hang"))
        assert machine.living == 0  # nothing is left of it when its caller goes on
        assert [why for _, why in machine.plugins[0].cancels] == ["user_cancelled"]
        assert pool.invocation is not None and pool.invocation["code"] in ("cancelled", "plugin_error")
        assert await outcome(pool, prepared("echo")) == "ok"


async def test_a_caller_that_gives_up_during_the_launch(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async with opened() as (pool, machine):
        machine.launches = trio.sleep_forever
        with trio.move_on_after(1.0):
            await pool.call(prepared("echo"))
        assert machine.living == 0
        assert pool.invocation == {"code": "cancelled", "written": False, "id": None}


async def test_a_launch_that_fails(contract: PooledContract, autojump_clock: trio.abc.Clock) -> None:
    async def fail() -> None:
        raise PluginFailure(Outcome("launch_failed", "launch", "no cage"))

    async with opened() as (pool, machine):
        machine.launches = fail
        assert await outcome(pool, prepared("echo")) == "launch_failed"
        machine.launches = None
        assert await outcome(pool, prepared("echo")) == "ok"


async def test_a_bug_reaches_the_caller_and_not_the_pool(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async with opened() as (pool, machine):
        machine.launches = fail
        with pytest.raises(ZeroDivisionError):
            await pool.call(prepared("echo"))
        machine.launches = None
        assert await outcome(pool, prepared("echo")) == "ok"


@pytest.mark.parametrize("workers", [0, 2])
async def test_the_end_of_the_pool_while_calls_run(
    contract: PooledContract, workers: int, autojump_clock: trio.abc.Clock
) -> None:
    contract.workers = workers
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
    contract: PooledContract, autojump_clock: trio.abc.Clock
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
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async def body() -> None:
        async with opened() as (pool, _):
            await pool.call(prepared("echo"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()


async def test_everything_is_cancelled_in_the_middle(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    with trio.move_on_after(3.0):
        async with opened() as (pool, machine), trio.open_nursery() as nursery:
            nursery.start_soon(pool.call, prepared("hang"))
            nursery.start_soon(pool.call, prepared("hang"))
    assert machine.living == 0
    for plugin in machine.plugins:
        assert len(plugin.cancels) == 1


async def test_secrets_of_all_its_calls_are_hidden(
    contract: PooledContract, autojump_clock: trio.abc.Clock
) -> None:
    async def leaky(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        if message.get("do") == "leak":
            await plugin.cell.its_stderr.send_all(b"first-secret second-secret\n")
            await plugin.say({"about": message["id"], "text": "second-secret"})
            await trio.sleep(1.0)
            await plugin.say({"id": message["id"], "no": "broken", "why": "first-secret"})
        else:
            await obliging(plugin, message)

    told: list[Any] = []
    async with opened(leaky) as (pool, machine):
        await pool.call(prepared("echo", secrets={"token": "first-secret"}))
        with pytest.raises(PluginError) as caught:
            await pool.call(prepared("leak", secrets={"token": "second-secret"}), told.append)
        assert len(machine.plugins) == 1
    assert caught.value.stderr == "[secret] [secret]\n" and str(caught.value) == "no: [secret]"
    assert told[0]["text"] == "[secret]"


async def test_a_process_ends_when_it_has_seen_many_secrets(
    contract: PooledContract, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    monkeypatch.setattr(pool_module, "_MOST_SECRETS", 3)
    async with opened() as (pool, machine):
        for number in range(7):
            assert await outcome(pool, prepared("echo", secrets={"token": f"secret-{number:04}"})) == "ok"
        assert len(machine.plugins) == 3
        for _ in range(7):  # the same ones again are no new ones
            await outcome(pool, prepared("echo", secrets={"token": "secret-0006"}))
        assert len(machine.plugins) == 3
