"""A hostile plugin in the cage: what it publishes, and what it asks for and does not read, is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.protocol.bus import KEPT_MOST_BYTES_EACH
from tests import elsewhere
from tests.conftest import Caller
from tests.runner.contracts.ainb.canaries import Nest

MEBI = 1 << 20


def flooded(folder: str, policy: str, act: str, bounded: bool) -> dict[str, Any]:
    """Open the plugin and let it act. Returns how far the host's memory has grown."""
    import math
    import os

    import trio
    import trio.testing

    import runner
    from runner.contracts.ainb.dialect import AinbDialect
    from runner.contracts.ainb.host.services import AinbMethods
    from runner.launch.remote.remote_cell import aclose_forkserver
    from runner.protocol import bus as bus_module

    # Its clock would end a plugin that does not read, before its answers are counted.
    setattr(AinbDialect, "write_seconds", math.inf)  # noqa: B010
    if not bounded:
        setattr(AinbMethods, "LONG", {})  # noqa: B010
        setattr(bus_module, "KEPT_MOST_BYTES_EACH", 1 << 40)  # noqa: B010
        setattr(bus_module, "KEPT_MOST_BYTES", 1 << 40)  # noqa: B010

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    bus = runner.SnapshotBus()
    finished = 0

    async def main() -> dict[str, Any]:
        answering = trio.Event()

        async def large(payload: bytes) -> bytes:
            nonlocal finished
            await answering.wait()
            finished += 1
            return os.urandom(8 << 20)

        bus.register_action("large", large)
        services = runner.Services(bus=bus)
        async with runner.open_plugin(
            folder, policy=policy, services=services, environ=dict(os.environ)
        ) as plugin:
            before = resident()
            await plugin.call("flood", {"argv": [act]}, seconds=240)
            await trio.testing.wait_all_tasks_blocked(1.0)
            answering.set()
            await trio.testing.wait_all_tasks_blocked(1.0)
            grown, answers = resident() - before, finished
            assert plugin._session is not None
            plugin._session.kill()  # it would not read the goodbye either
        await aclose_forkserver()
        told = [event async for event in plugin.events()]
        counts = [event.value["count"] for event in told if getattr(event, "kind", "") == "dropped"]
        return {
            "grown": grown,
            "held": bus.held,
            "version": bus.version,
            "answers": answers,
            "told": counts,
        }

    return trio.run(main)


@pytest.fixture
def nest(plugin_dir: Path, runner_as: Caller) -> Nest:
    return Nest(plugin_dir, runner_as)


@pytest.mark.usefixtures("nothing_left")
def test_publications_are_bounded(nest: Nest) -> None:
    folder = nest.put("flood", "flood.py", capabilities={"event_bus": True}, namespaces=["flood"])
    found = elsewhere.run(nest.caller, flooded, folder, str(nest.policy), "publish", True, timeout=280)
    assert (
        found["version"] == KEPT_MOST_BYTES_EACH // MEBI - 1
    )  # each topic costs a little more than its payload
    assert found["held"] <= KEPT_MOST_BYTES_EACH
    assert found["told"] == [1, 2, 4, 8, 16]  # of the 27 that were dropped
    # The control: without the bounds it keeps all of it.
    loose = elsewhere.run(nest.caller, flooded, folder, str(nest.policy), "publish", False, timeout=280)
    assert loose["version"] == 90 and loose["held"] > 90 * MEBI
    assert loose["grown"] - found["grown"] > 20 * MEBI


@pytest.mark.usefixtures("nothing_left")
def test_answers_that_nobody_reads_are_bounded(nest: Nest) -> None:
    folder = nest.put("flood", "flood.py", capabilities={"event_bus": True}, namespaces=["flood"])
    found = elsewhere.run(nest.caller, flooded, folder, str(nest.policy), "ask", True, timeout=280)
    assert 1 <= found["answers"] <= 5
    loose = elsewhere.run(nest.caller, flooded, folder, str(nest.policy), "ask", False, timeout=280)
    assert loose["answers"] == 30
    # Each answer has 11 MiB.
    assert found["grown"] < 150 * MEBI < 250 * MEBI < loose["grown"]
