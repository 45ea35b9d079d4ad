"""Every durable call ends once in the records, whatever is killed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.runner.fleet.storm import Storm, StormPlan

pytestmark = [pytest.mark.broad, pytest.mark.launches, pytest.mark.needs("nats")]


def weather(caller: Caller, folder: Path, plan: StormPlan) -> None:
    storm = Storm(caller, folder, plan)
    storm.run()
    # Shown by --log-cli-level=info.
    logging.info("%s\n%s", plan, storm.check())


def test_a_gust(runner_as: Caller, plugin_dir: Path) -> None:
    plan = StormPlan(calls=80, servers=1, workers=2, submitters=1, worker_kills=1, submitter_kills=1)
    weather(runner_as, plugin_dir, plan)


@pytest.mark.machine
@pytest.mark.bound(7200.0)
@pytest.mark.needs("nats-cluster")
def test_a_storm(runner_as: Caller, plugin_dir: Path) -> None:
    plan = StormPlan(calls=20_000, worker_kills=40, server_kills=12, submitter_kills=12)
    weather(runner_as, plugin_dir, plan)
