"""Lines for operators: every one is told, but not a flood of them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from runner.serve.alerts import MOST_LINES, WINDOW_SECONDS, Alerts


@pytest.mark.trio
async def test_a_flood_of_one_kind_is_counted_and_hides_no_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    said: list[str] = []
    alerts = Alerts(said.append)
    for number in range(MOST_LINES + 7):
        alerts.tell("dead letter", f"letter {number}")
    alerts.tell("quarantine", "q" * 10_000)
    assert said[:-1] == [f"letter {number}" for number in range(MOST_LINES)]
    assert said[-1].startswith("qqq") and len(said[-1]) < 1000
    said.clear()
    alerts.flush()
    assert said == []  # the minute is not over
    await trio.sleep(WINDOW_SECONDS)
    alerts.flush()
    alerts.flush()
    assert said == [f"7 more of the kind 'dead letter' in {WINDOW_SECONDS:g} seconds"]
    alerts.tell("dead letter", "the next one")
    assert said[-1] == "the next one"
