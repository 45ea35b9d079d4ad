"""Every system call of a launch fails in turn, and every process of it is killed or stopped at each.

The plugin prints what the kernel says about it. So a launch that goes on after a fault shows that it is as
confined as any other.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.faults.inject import Fault
from tests.faults.scenes import Ran, Scene, confinement, each_of, select
from tests.tables import REPEAT

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
MINUTES = 60.0

SHOWS_ITSELF = [f"/proc/self/{name}" for name in ("status", "limits", "cgroup", "mountinfo", "net/dev")]
# With a state directory, and every limit for which the runner makes a cgroup, a descriptor, a timer or a file.
MANIFEST = f"""\
[plugin]
id = "faults"
version = "1.0.0"
name = "Faults"
description = "Shows its cage."
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "/bin/cat"
args = {json.dumps(SHOWS_ITSELF)}
[plugin.sandbox]
enabled = true
fs_write_paths = ["${{state_dir}}"]
[plugin.limits]
memory = "256M"
pids = 32
cpu = 2
cpu_time = "1m"
open_files = 256
file_size = "1M"
disk = "4M"
output = "1M"
launch = "10s"
deadline = "2m"
"""


def plain(caller: Caller, folder: Path, write: Callable[..., Path]) -> list[str]:
    return ["exec", str(write(folder / "nexo-plugin.toml", MANIFEST))]


def with_gate(caller: Caller, folder: Path, write: Callable[..., Path]) -> list[str]:
    """A plugin that may reach a host."""
    entry = {"command": "/bin/cat", "args": SHOWS_ITSELF, "x-sandbox": {"network": ["example.com:443"]}}
    text = (ROOT / "policies/default.toml").read_text()
    changed = text.replace('ceiling = "none"\nhosts = []', 'ceiling = "open"\nhosts = ["*:*"]')
    policy = write(folder / "operator/policy.toml", changed)
    manifest = write(folder / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    return ["exec", "--policy", str(policy), "--limit", "launch=10s", str(manifest)]


@pytest.fixture(params=[plain, with_gate])
def launch(
    request: pytest.FixtureRequest, runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> Scene:
    scene = Scene(runner_as, request.param(runner_as, plugin_dir, write_file), reports=True)
    healthy = confinement(scene.run(None)[0].out)
    assert any(line.startswith("Seccomp: 2") for line in healthy)

    def is_as_confined(ran: Ran, fault: Fault | None) -> Iterable[str]:
        found = confinement(ran.out)
        if found != healthy[: len(found)]:
            yield f"the plugin is confined otherwise: {set(found) ^ set(healthy)}"
        if ran.code == "ok" and found != healthy:
            yield "it is ok, and the plugin has not said all"

    scene.check = is_as_confined
    return scene


def test_some_calls_of_a_launch_fail(launch: Scene) -> None:
    launch.sweep(select(launch.places(), 12))


@pytest.mark.broad
@pytest.mark.bound(120 * MINUTES)
def test_each_call_of_a_launch_fails(launch: Scene) -> None:
    launch.sweep(each_of(launch.places()))


@pytest.mark.broad
@pytest.mark.bound(60 * MINUTES)
def test_each_process_of_a_launch_is_killed_at_its_calls(launch: Scene) -> None:
    places = launch.places()[:: 1 if REPEAT > 1 else 5]
    launch.sweep([Fault(place, signal=signal.SIGKILL) for place in places])
