"""Whether a plugin is alive, asked between calls: exactly when, and what becomes of no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from runner.exceptions import PluginFailure
from runner.protocol.dialect import Call
from sandbox.spec import Limits
from tests.runner.contracts.kaged.conversation import error
from tests.runner.session.piped_session import after, like_the_reference, live

ADD = Call("tool", "add", {"text": "x"})
INTERVAL, ANSWER = 30.0, 5.0


@pytest.mark.trio
async def test_a_waiting_session_asks_once_in_each_interval(autojump_clock: trio.abc.Clock) -> None:
    async with live(like_the_reference) as rig:
        await trio.sleep(10 * INTERVAL + 1)
        assert rig.beats() == pytest.approx([INTERVAL * number for number in range(1, 11)])
        assert not rig.session.is_over
        # Nothing but that was sent.
        assert [method for method, _ in rig.heard if method != "health.check"] == [
            "initialize",
            "initialized",
        ]
    assert rig.session.state.verdict is None


@pytest.mark.trio
async def test_no_answer_ends_the_session(autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with live(after(1000.0, "health.check")) as rig:
        with pytest.raises(PluginFailure) as caught:
            await rig.session.ended()
        outcome = caught.value.outcome
        assert (outcome.code, outcome.phase, outcome.cause) == ("timeout", "idle", "health")
        assert outcome.message == "there was no answer to health.check within 5s"
        assert trio.current_time() - began == pytest.approx(INTERVAL + ANSWER, abs=0.5)


@pytest.mark.trio
async def test_an_answer_in_time_is_life(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(ANSWER - 0.5, "health.check")) as rig:
        await trio.sleep(5 * INTERVAL)
        assert len(rig.beats()) == 4
        assert not rig.session.is_over


@pytest.mark.trio
async def test_a_long_call_is_not_idle(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(50.0, "notes.add"), Limits(idle=20.0)) as rig:
        await trio.sleep(10.0)
        await rig.session.call(ADD)
        ended = trio.current_time()
        with pytest.raises(PluginFailure) as caught:
            await rig.session.ended()
        assert (caught.value.outcome.code, caught.value.outcome.phase) == ("timeout", "idle")
        assert trio.current_time() - ended == pytest.approx(20.0, abs=0.5)


@pytest.mark.trio
async def test_nothing_is_asked_during_a_call(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(50.0, "notes.add")) as rig:
        await trio.sleep(INTERVAL - 10)
        await rig.session.call(ADD)  # from 20 s to 70 s
        assert rig.beats() == []
        await trio.sleep(1.0)
        assert rig.beats() == pytest.approx([70.0])
        await trio.sleep(INTERVAL)
        assert rig.beats() == pytest.approx([70.0, 100.0])


@pytest.mark.trio
async def test_a_call_that_follows_a_question_waits_for_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(3.0, "health.check")) as rig:
        await trio.sleep(INTERVAL + 1)
        assert await rig.session.call(ADD) == {"status": "ok"}
        # The plugin takes it up as soon as it has answered the question, at 33 s.
        assert [method for method, _ in rig.heard[-2:]] == ["health.check", "notes.add"]
        assert [when for _, when in rig.heard[-2:]] == pytest.approx([30.0, 33.0])
        assert not rig.session.is_over


@pytest.mark.trio
async def test_a_call_that_was_given_up_may_still_run(autojump_clock: trio.abc.Clock) -> None:
    """The plugin works on it, one line after the other, until it answers."""
    async with live(after(55.0, "notes.add")) as rig:
        await trio.sleep(INTERVAL - 1)
        with trio.move_on_after(1.0):
            await rig.session.call(ADD)
        await trio.sleep(100.0)
        assert not rig.session.is_over
        assert rig.beats()[0] == pytest.approx(29.0 + 55.0)


@pytest.mark.trio
async def test_a_call_that_was_given_up_and_answered_delays_nothing(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(2.0, "notes.add")) as rig:
        with trio.move_on_after(1.0):
            await rig.session.call(ADD)
        await trio.sleep(2 * INTERVAL)
        assert rig.beats() == pytest.approx([INTERVAL, 2 * INTERVAL])


@pytest.mark.trio
@pytest.mark.parametrize(("works", "first"), [(50.0, 50.0), (63.0, 60.0)])
async def test_a_late_hook_may_still_run(autojump_clock: trio.abc.Clock, works: float, first: float) -> None:
    """Its time is up after 7 seconds. The plugin works on it and reads nothing meanwhile, and is not asked
    until it answers; or until a call would have been late too."""
    async with live(after(works, "kaged.hook.on_session_idle")) as rig:
        assert await rig.session.call(Call("hook", "on_session_idle", {"transcript": "x"})) is None
        assert rig.session.substituted
        await trio.sleep(100.0)
        assert not rig.session.is_over
        # The plugin takes it up as soon as it has answered the hook.
        assert rig.beats()[0] == pytest.approx(max(works, first))
        assert rig.session.state.dialect.counters["late"] == 1
        assert rig.session.state._owed == {}


@pytest.mark.trio
async def test_a_plugin_that_hangs_in_a_hook_is_found_out(autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with live(after(10_000.0, "kaged.hook.on_session_idle")) as rig:
        await rig.session.call(Call("hook", "on_session_idle", {"transcript": "x"}))
        with pytest.raises(PluginFailure) as caught:
            await rig.session.ended()
        assert caught.value.outcome.cause == "health"
        assert trio.current_time() - began == pytest.approx(60.0 + ANSWER, abs=0.5)


@pytest.mark.trio
async def test_each_call_that_was_given_up_has_its_own_answer(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(20.0, "notes.add")) as rig:
        for _ in range(2):
            with trio.move_on_after(1.0):
                await rig.session.call(ADD)
        await trio.sleep(60.0)
        assert rig.beats()[0] == pytest.approx(40.0)


@pytest.mark.trio
async def test_an_error_in_time_leaves_nothing_behind(autojump_clock: trio.abc.Clock) -> None:
    """A hook that fails has an answer, and no other one will come."""

    async def refuses(message: dict[str, Any]) -> dict[str, Any] | None:
        if message.get("method") == "kaged.hook.on_session_idle":
            return error(message["id"], -32000)
        return await like_the_reference(message)

    async with live(refuses) as rig:
        await rig.session.call(Call("hook", "on_session_idle", {"transcript": "x"}))
        assert rig.session.substituted
        await trio.sleep(INTERVAL + 1)
        assert rig.beats() == pytest.approx([INTERVAL])


@pytest.mark.trio
async def test_a_plugin_that_hangs_after_a_timeout_is_found_out(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(10_000.0, "notes.add")) as rig:
        with pytest.raises(PluginFailure) as caught:
            await rig.session.call(ADD)
        assert caught.value.outcome.phase == "call"
        assert not rig.session.is_over  # one timeout ends a call, and not the plugin
        with pytest.raises(PluginFailure) as caught:
            await rig.session.ended()
        assert caught.value.outcome.cause == "health"


@pytest.mark.trio
async def test_nothing_is_asked_while_the_host_serves_the_plugin(autojump_clock: trio.abc.Clock) -> None:
    async with live(like_the_reference) as rig:
        await trio.sleep(20.0)
        asked = {"jsonrpc": "2.0", "id": 1, "method": "slow", "params": {}}
        await rig.cell.its_stdout.send_all(json.dumps(asked).encode() + b"\n")
        await trio.sleep(50.0)  # served from 20 s to 80 s
        assert rig.beats() == []
        await trio.sleep(20.0)
        assert rig.beats() == pytest.approx([80.0])


@pytest.mark.trio
async def test_a_question_is_no_activity(autojump_clock: trio.abc.Clock) -> None:
    """A plugin that only answers health checks reaches its idle limit."""
    async with live(like_the_reference, Limits(idle=100.0)) as rig:
        with pytest.raises(PluginFailure) as caught:
            await rig.session.ended()
        outcome = caught.value.outcome
        assert (outcome.code, outcome.phase, outcome.cause) == ("timeout", "idle", "deadline")
        assert len(rig.beats()) == 3


@pytest.mark.trio
async def test_the_end_does_not_wait_for_an_answer(autojump_clock: trio.abc.Clock) -> None:
    async with live(after(1000.0, "health.check")) as rig:
        await trio.sleep(INTERVAL + 1)
        assert len(rig.beats()) == 1
    assert rig.session.state.verdict is None
