"""20 plugins of six contracts, many clients, kills of plugins and daemons: each call has one outcome."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.runner.serve.day import Day, DayPlan, Resources

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

# What the allocator does not give back after the peaks. A leak of 600 bytes at each of the last 20,000 calls
# would be as much.
RSS_SLACK_BYTES = 12 << 20


def live_through(caller: Caller, folder: Path, plan: DayPlan) -> tuple[Resources, Resources]:
    (folder / "plugins").mkdir()
    day = Day(caller, folder, plan)
    before, after = day.run()
    counts = day.check()
    assert sum(counts.values()) > plan.calls * 0.9 and counts["ok"] > plan.calls // 2
    assert day.killed == plan.plugin_kills
    # Shown by --log-cli-level=info.
    logging.info("%s\n%s\n%s\n%s", plan, dict(counts), before, after)
    return before, after


def test_an_hour_of_a_daemon_that_is_killed_and_whose_plugins_are(
    runner_as: Caller, plugin_dir: Path
) -> None:
    live_through(runner_as, plugin_dir, DayPlan(calls=600, clients=8, plugin_kills=10, daemon_kills=2))


@pytest.mark.broad
@pytest.mark.machine
@pytest.mark.bound(3600.0)
def test_a_day_of_a_daemon_that_is_killed_and_whose_plugins_are(runner_as: Caller, plugin_dir: Path) -> None:
    plan = DayPlan(calls=50_000, clients=32, plugin_kills=1000, daemon_kills=20)
    before, after = live_through(runner_as, plugin_dir, plan)
    assert after.descriptors == before.descriptors
    assert after.rss <= before.rss + RSS_SLACK_BYTES
