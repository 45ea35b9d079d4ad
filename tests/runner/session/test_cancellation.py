"""A call that is cancelled: what the plugin is told, how long it may answer, and what its answer counts."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from runner.exceptions import PluginError, PluginFailure
from runner.protocol.dialect import Call
from runner.session.pending import Deadline
from runner.session.session import Session
from sandbox.spec import Limits
from tests.runner.session.graced import GRACE, GracedDialect, GracedPlugin, Handle, graced, obliging

HANG = Call("tool", "hang")

pytestmark = pytest.mark.trio


def after_cancel(answer: dict[str, Any] | None, seconds: float = 0.0) -> Handle:
    """A plugin that does nothing but answer a cancellation, after some seconds."""

    async def handle(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        if "hello" in message:
            await plugin.say({"hello": "plugin"})
        elif "cancel" in message and answer is not None:
            await trio.sleep(seconds)
            await plugin.say({"id": message["cancel"], **answer})

    return handle


def in_seconds(seconds: float) -> Deadline:
    return Deadline(trio.current_time() + seconds, seconds)


@pytest.mark.parametrize(
    ("handle", "late", "ended"),
    [
        (after_cancel(None), None, 5.0 + GRACE),
        (after_cancel({"did": {"checkpoint": 1}}), {"checkpoint": 1}, 5.0),
        (
            after_cancel({"no": "cancelled", "body": {"status": "cancelled"}}, 1.5),
            {"status": "cancelled"},
            6.5,
        ),
        (after_cancel({"did": "too late"}, GRACE + 0.5), None, 5.0 + GRACE),
    ],
)
async def test_a_deadline_gives_a_grace_and_no_success(
    handle: Handle, late: object, ended: float, autojump_clock: trio.abc.Clock
) -> None:
    async with graced(handle) as (session, plugin):
        began = trio.current_time()
        with pytest.raises(PluginFailure) as caught:
            await session.call(HANG, deadline=in_seconds(5.0))
        assert trio.current_time() - began == pytest.approx(ended, abs=0.01)
        assert (caught.value.outcome.code, caught.value.outcome.phase) == ("timeout", "call")
        assert [why for _, why in plugin.cancels] == ["deadline_exceeded"]
        assert session.state.record.limits_hit == []
        assert session.end is not None
        assert (session.end.outcome.code, session.end.late, session.end.written) == ("timeout", late, True)
        assert session.is_over
        with pytest.raises(PluginFailure) as again:
            await session.call(HANG)
        assert again.value.outcome.code == "timeout"
        # One that keeps to its grace is shut down when the session is closed, as after any other call.
        assert [number for number, _ in plugin.cell.signals] == ([] if late else [9])
    assert [number for number, _ in plugin.cell.signals] == ([] if late else [9])
    assert session.state.verdict is not None and session.state.verdict.code == "timeout"


async def test_an_answer_in_time_is_one(autojump_clock: trio.abc.Clock) -> None:
    async with graced() as (session, plugin):
        assert await session.call(Call("tool", "sleep", 4.9), deadline=in_seconds(5.0)) == "slept"
        assert session.end is not None and session.end.outcome.code == "ok" and session.end.value == "slept"
        assert plugin.cancels == [] and not session.is_over
        # The process may serve the next call.
        assert await session.call(Call("tool", "echo", 1), deadline=in_seconds(5.0)) == 1


async def test_the_caller_gives_up(autojump_clock: trio.abc.Clock) -> None:
    async with graced(after_cancel(None)) as (session, plugin):
        began = trio.current_time()
        with trio.move_on_after(3.0):
            await session.call(HANG, deadline=in_seconds(20.0))
        assert trio.current_time() - began == pytest.approx(3.0 + GRACE, abs=0.01)
        assert [why for _, why in plugin.cancels] == ["user_cancelled"]
        assert session.end is not None and session.end.outcome.code == "cancelled" and session.end.written
        assert session.is_over and plugin.cell.signals[0][0] == 9


async def test_a_call_that_is_given_up_is_ended_within_its_own_grace(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers that it is cancelled, and then does not end: its caller does not wait for that either."""
    monkeypatch.setattr(GracedDialect, "given_up_grace", lambda *_: 0.3)
    async with graced(after_cancel({"no": "cancelled"}, 0.2)) as (session, plugin):
        plugin.ends_with_its_stdin, plugin.cell.ignores_signals = False, True
        with trio.move_on_after(3.0):
            await session.call(HANG)
        assert trio.current_time() - plugin.began == pytest.approx(3.2, abs=0.01)
        await session.close()
    assert [number for number, _ in plugin.cell.signals] == [15, 9]
    ended = [at - plugin.began for _, at in plugin.cell.signals]
    assert ended == pytest.approx([3.4, 3.8], abs=0.01)
    async with graced(after_cancel({"no": "cancelled"}, 0.4)) as (session, plugin):
        with trio.move_on_after(3.0):
            await session.call(HANG)
        [(number, at)] = plugin.cell.signals
        assert number == 9 and at - plugin.began == pytest.approx(3.3, abs=0.01)


@pytest.mark.parametrize(
    ("answer", "code", "late"),
    [({"did": 1}, "cancelled", 1), ({"no": "cancelled", "body": {}}, "plugin_error", None)],
)
async def test_an_answer_that_crosses_the_cancellation_is_not_lost(
    answer: dict[str, Any], code: str, late: object, autojump_clock: trio.abc.Clock
) -> None:
    async with graced(after_cancel(answer, 0.5)) as (session, _):
        with trio.move_on_after(3.0) as scope:
            await session.call(HANG, deadline=in_seconds(20.0))
        assert scope.cancelled_caught  # the caller is gone all the same
        assert session.end is not None
        assert (session.end.outcome.code, session.end.late) == (code, late)


async def test_an_answer_after_cancellation_and_deadline_is_late(autojump_clock: trio.abc.Clock) -> None:
    async with graced(after_cancel({"did": 1}, 1.0)) as (session, _):
        with trio.move_on_after(4.5):
            await session.call(HANG, deadline=in_seconds(5.0))
        assert session.end is not None
        assert (session.end.outcome.code, session.end.late) == ("cancelled", 1)


async def test_a_request_that_was_not_sent_is_not_cancelled(autojump_clock: trio.abc.Clock) -> None:
    """The pipe is full of another request."""

    async with graced() as (session, plugin):
        plugin.reads_once = True
        for _ in range(2):  # one is begun, one waits
            session.state.outbox.post(_long_frame())
        with pytest.raises(PluginFailure) as caught:
            await session.call(HANG, deadline=in_seconds(5.0))
        assert caught.value.outcome.code == "timeout"
        assert session.end is not None and not session.end.written
        assert plugin.cancels == []


def _long_frame() -> Any:
    from runner.protocol.dialect import Send

    return Send(b'{"x": "' + b"x" * (1 << 20) + b'"}\n')


async def test_closing_tells_the_plugin(autojump_clock: trio.abc.Clock) -> None:
    failures: list[PluginError | PluginFailure] = []

    async def caller(session: Session) -> None:
        try:
            await session.call(HANG, deadline=in_seconds(50.0))
        except (PluginError, PluginFailure) as failure:
            failures.append(failure)

    async with graced(after_cancel(None)) as (session, plugin), trio.open_nursery() as nursery:
        nursery.start_soon(caller, session)
        await trio.testing.wait_all_tasks_blocked(0.01)
        began = trio.current_time()
        await session.close()
    [(number, at)] = plugin.cell.signals
    assert number == 9 and at - began == pytest.approx(GRACE, abs=0.01)
    assert [why for _, why in plugin.cancels] == ["shutdown"]
    assert [each.outcome.code for each in failures] == ["cancelled"]


async def test_a_call_that_is_answered_while_closing_has_its_answer(autojump_clock: trio.abc.Clock) -> None:
    answers: list[object] = []

    async def caller(session: Session) -> None:
        answers.append(await session.call(HANG, deadline=in_seconds(50.0)))

    async with graced(after_cancel({"did": 7}, 1.0)) as (session, plugin), trio.open_nursery() as nursery:
        nursery.start_soon(caller, session)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await session.close()
    assert answers == [7] and plugin.cell.signals == []  # it ended when its stdin was closed


async def test_one_cancellation_is_sent_when_all_give_up(autojump_clock: trio.abc.Clock) -> None:
    async with graced(after_cancel(None)) as (session, plugin), trio.open_nursery() as nursery:
        nursery.start_soon(session.call, HANG)
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await session.close()
    assert len(plugin.cancels) == 1


@pytest.mark.parametrize("act", ["die", "violate"])
async def test_what_happens_in_the_grace_does_not_change_the_cause(
    act: str, autojump_clock: trio.abc.Clock
) -> None:
    async def handle(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        if "hello" in message:
            await plugin.say({"hello": "plugin"})
        elif "cancel" in message and act == "die":
            plugin.cell.end()
        elif "cancel" in message:
            await plugin.say("no object")

    async with graced(handle) as (session, _):
        with pytest.raises(PluginFailure) as caught:
            await session.call(HANG, deadline=in_seconds(5.0))
    assert (caught.value.outcome.code, caught.value.outcome.phase) == ("timeout", "call")


async def test_a_kill_ends_the_grace(autojump_clock: trio.abc.Clock) -> None:
    """What a second signal does."""
    async with graced(after_cancel(None)) as (session, plugin), trio.open_nursery() as nursery:
        nursery.start_soon(session.call, HANG)
        await trio.testing.wait_all_tasks_blocked(0.01)
        began = trio.current_time()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked(0.01)
            session.kill()
    [(number, at)] = plugin.cell.signals
    assert number == 9 and at - began < GRACE
    assert session.end is not None and session.end.outcome.code == "cancelled"


async def test_a_callback_that_fails_cancels_the_call(autojump_clock: trio.abc.Clock) -> None:
    async def handle(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        await obliging(plugin, message)
        if message.get("do") == "hang":
            await plugin.say({"about": message["id"]})

    def fail(value: object) -> None:
        raise ZeroDivisionError

    async with graced(handle) as (session, plugin):
        with pytest.raises(ZeroDivisionError):
            await session.call(HANG, deadline=in_seconds(5.0), on_progress=fail)
        assert [why for _, why in plugin.cancels] == ["user_cancelled"]


async def test_the_limit_of_a_call_is_a_deadline_too(autojump_clock: trio.abc.Clock) -> None:
    async with graced(after_cancel(None), Limits(call=1.0)) as (session, plugin):
        with pytest.raises(PluginFailure) as caught:
            await session.call(HANG, deadline=in_seconds(5.0))
        assert "call limit" in caught.value.outcome.hint
        assert session.state.record.limits_hit == ["call"]
        assert [at for at, _ in plugin.cancels] == pytest.approx([1.0], abs=0.05)


async def test_the_deadline_counts_the_handshake(autojump_clock: trio.abc.Clock) -> None:
    async def mute(plugin: GracedPlugin, message: dict[str, Any]) -> None:
        await trio.sleep_forever()

    with pytest.RaisesGroup(PluginFailure) as caught:
        async with graced(mute, deadline=in_seconds(3.0)):
            pass
    [failure] = caught.value.exceptions
    assert isinstance(failure, PluginFailure)
    outcome = failure.outcome
    assert (outcome.code, outcome.phase, outcome.cause) == ("timeout", "handshake", "deadline_exceeded")
