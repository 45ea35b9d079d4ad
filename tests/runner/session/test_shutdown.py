"""The steps of a shutdown and their clocks: the request, stdin closed, SIGTERM, SIGKILL.

The plugin's manifest gives it 4 s: 2 for its answer, the rest for its exit, and one more after SIGTERM.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from runner.exceptions import PluginFailure
from runner.protocol.dialect import Call
from tests.runner.session.piped_session import after, like_the_reference, live

FOREVER = 1000.0


@pytest.mark.trio
@pytest.mark.parametrize(
    ("answer", "exit", "closed", "signals"),
    [
        (0.0, 0.0, 0.0, []),  # as the reference plugin does: it answers, and ends when stdin is closed
        (0.0, 3.9, 0.0, []),  # what the answer did not take is left for the exit
        (1.0, 2.9, 1.0, []),
        (0.0, 4.1, 0.0, [(15, 4.0)]),
        (1.0, 3.1, 1.0, [(15, 4.0)]),
        (FOREVER, 0.0, None, [(15, 4.0)]),  # no answer, so no look at its stdin either
        (FOREVER, FOREVER, None, [(15, 4.0)]),
    ],
)
async def test_the_steps(
    autojump_clock: trio.abc.Clock,
    answer: float,
    exit: float,  # noqa: A002 -- the word of the ShutdownSteps
    closed: float | None,
    signals: list[tuple[int, float]],
) -> None:
    async with live(after(answer, "shutdown"), exits_after=exit) as rig:
        began = trio.current_time()
        await rig.session.close()
        assert [method for method, _ in rig.heard][-1] == "shutdown"
        assert [number for number, _ in rig.cell.signals] == [number for number, _ in signals]
        found = [when - began for _, when in rig.cell.signals]
        assert found == pytest.approx([when for _, when in signals], abs=0.01)
        if closed is not None:
            assert rig.stdin_closed - began == pytest.approx(closed, abs=0.01)
    # However it went, nobody says that the plugin crashed.
    assert rig.session.state.verdict is None
    assert rig.session.state.record.forced is False


@pytest.mark.trio
async def test_a_plugin_that_ignores_sigterm_is_killed_a_second_later(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with live(like_the_reference, exits_after=FOREVER) as rig:
        rig.cell.ignores_signals = True
        began = trio.current_time()
        await rig.session.close()
        assert [number for number, _ in rig.cell.signals] == [15, 9]
        assert [when - began for _, when in rig.cell.signals] == pytest.approx([4.0, 5.0], abs=0.01)
    assert rig.session.state.record.forced is True


@pytest.mark.trio
@pytest.mark.parametrize(
    ("gives_up", "cancelled", "signals"),
    [
        ("cancel", True, [(15, 0.4), (9, 0.6)]),
        ("seconds", False, [(15, 0.4), (9, 0.6)]),
        ("cancel", False, [(15, 4.0), (9, 5.0)]),  # the session goes on after it, and keeps what it has
        ("answered", True, [(15, 4.0), (9, 5.0)]),
    ],
)
async def test_a_plugin_that_owes_an_answer_is_ended_within_a_second(
    autojump_clock: trio.abc.Clock, gives_up: str, cancelled: bool, signals: list[tuple[int, float]]
) -> None:
    """It is busy and hears nothing. `cancelled`: whether its session is, together with the call."""
    busy = 0.0 if gives_up == "answered" else FOREVER
    async with live(after(busy, "notes.add"), exits_after=FOREVER) as rig:
        rig.cell.ignores_signals = True
        call, seconds = Call("tool", "add", {"text": "x"}), 1.0 if gives_up == "seconds" else None
        with trio.move_on_after(2.0), suppress(PluginFailure):
            await rig.session.call(call, seconds=seconds)
        began = trio.current_time()
        await rig.session.close(cancelled=cancelled)
        assert [number for number, _ in rig.cell.signals] == [number for number, _ in signals]
        found = [when - began for _, when in rig.cell.signals]
        assert found == pytest.approx([when for _, when in signals], abs=0.01)
