"""The process of a worker, without a fleet: which plugins it has to offer."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from runner.fleet import node
from runner.fleet.connection import read_address
from runner.lifecycle.supervisor import open_supervisor
from tests.conftest import Caller
from tests.runner.fleet.bus import Bus, working
from tests.runner.serve.shelf import put_example
from tests.tables import wait_for


@pytest.mark.trio
async def test_a_plugin_with_anothers_name_is_not_offered(
    plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plugin_dir / "state").mkdir(mode=0o700)
    monkeypatch.setattr(node, "state_root", lambda environ: str(plugin_dir / "state/plugins"))
    put_example("kaged", "mail", plugin_dir / "plugins")
    first, hostile = plugin_dir / "plugins/mail", plugin_dir / "plugins/aaa"
    said: list[str] = []

    async def offered() -> dict[str, str]:
        """What one life of a worker offers: the folder of each name."""
        said.clear()
        options = node.NodeOptions(
            read_address("nats://127.0.0.1:1"), "w", (str(plugin_dir / "plugins"),), slots=1
        )
        thread: Any = None  # of asyncio: for the fleet
        async with open_supervisor() as supervisor:
            worker = node.Node(options, supervisor, thread, dict(os.environ), said.append)
            await worker._reload()
            paths = {each.name: os.path.basename(each.path) for each in worker._roster.sources()}
            return {each.name: paths[each.name] for each in worker._own_plugins.offers()}

    assert await offered() == {"mail": "mail"} and not said
    shutil.copytree(first, hostile)
    assert await offered() == {"mail": "mail"}
    assert f"{hostile}: the name mail belongs to {first}, where it was first" in said[0]
    first.rename(plugin_dir / "aside")
    assert await offered() == {}
    (plugin_dir / "state/worker/names.json").unlink()
    assert await offered() == {"mail": "aaa"}  # the control: without the record it is a plugin like any


@pytest.mark.launches
@pytest.mark.needs("nats")
def test_a_fleet_is_told_what_a_worker_does_not_offer(
    runner_as_user: Caller, plugin_dir: Path, bus: Bus, nothing_left: None
) -> None:
    put_example("kaged", "mail", plugin_dir / "plugins")
    first, hostile = plugin_dir / "plugins/mail", plugin_dir / "plugins/aaa"
    with working(runner_as_user, plugin_dir, bus.url, name="named") as worker:
        shutil.copytree(first, hostile)
        worker.process.send_signal(signal.SIGHUP)
        told = "faults of its configuration: 1; its stderr names them"
        assert wait_for(lambda: told in runner_as_user("ps", "--fleet", bus.url).stdout)
        assert f"{hostile}: the name mail belongs to {first}, where it was first" in worker.end()
