"""Every system call of a launch fails in turn, and every process of it is killed or stopped at each.

The plugin prints what the kernel says about it. So a launch that goes on after a fault shows that it is as
confined as any other.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from errno import EACCES, ENOMEM
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.faults.inject import Fault, Place
from tests.faults.scenes import Ran, Scene, by_turns, confinement, each_of, select
from tests.faults.table import UNDROPPED
from tests.manifests import nexo
from tests.runner.serve.shelf import put_example

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
MINUTES = 60.0

SHOWS_ITSELF = [f"/proc/self/{name}" for name in ("status", "limits", "cgroup", "mountinfo", "net/dev")]
# With a state directory, and every limit for which the runner makes a cgroup, a descriptor, timer or file.
MANIFEST = f"""\
{nexo("faults", "/bin/cat")}\
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
"""
CLOCKS = ("--limit", "launch=1m", "--deadline", "90s")


def plain(caller: Caller, folder: Path, write: Callable[..., Path]) -> list[str]:
    return ["exec", *CLOCKS, str(write(folder / "nexo-plugin.toml", MANIFEST))]


def with_gate(caller: Caller, folder: Path, write: Callable[..., Path]) -> list[str]:
    """A plugin that may reach a host."""
    entry = {"command": "/bin/cat", "args": SHOWS_ITSELF, "x-sandbox": {"network": ["example.com:443"]}}
    text = (ROOT / "policies/default.toml").read_text()
    changed = text.replace('ceiling = "none"\nhosts = []', 'ceiling = "open"\nhosts = ["*:*"]')
    policy = write(folder / "operator/policy.toml", changed)
    manifest = write(folder / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    return ["exec", *CLOCKS, "--policy", str(policy), str(manifest)]


@pytest.fixture(params=[plain, with_gate])
def launch(
    request: pytest.FixtureRequest, runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> Scene:
    turn = [plain, with_gate].index(request.param) + 2 * (runner_as.uid != 0)
    scene = Scene(runner_as, request.param(runner_as, plugin_dir, write_file), reports=True, turn=turn)
    healthy = confinement(scene.run(None)[0].out)
    assert any(line.startswith("Seccomp: 2") for line in healthy)

    def is_as_confined(ran: Ran, fault: Fault | None) -> Iterable[str]:
        found, wanted = confinement(ran.out), healthy
        if fault is not None and fault.place[:2] == UNDROPPED:
            found, wanted = ([line for line in each if "CapBnd" not in line] for each in (found, healthy))
        if fault is not None and fault.error == EACCES:  # of the number of which it gets a share
            found, wanted = ([line for line in each if "open files" not in line] for each in (found, wanted))
        if found != wanted[: len(found)]:
            yield f"the plugin is confined otherwise: {set(found) ^ set(wanted)}"
        if ran.code == "ok" and found != wanted:
            yield "it is ok, and the plugin has not said all"

    scene.check = is_as_confined
    return scene


@pytest.fixture
def call(runner_as: Caller, plugin_dir: Path) -> Scene:
    """A call: of a host with threads, whose fork server makes a monitor, which launches the plugin."""
    plugin = put_example("nexo", "nexo0", plugin_dir)
    words = ["call", str(plugin_dir / "nexo0"), plugin.tool, "--input", json.dumps(plugin.input)]
    scene = Scene(runner_as, words, reports=True, turn=2 * (runner_as.uid != 0))
    healthy = scene.run(None)[0].out
    assert b"you" in healthy

    def is_answered(ran: Ran, fault: Fault | None) -> Iterable[str]:
        if ran.status == 0 and ran.out != healthy:
            yield f"it ends well without the answer: {ran.out!r}"

    scene.check = is_answered
    return scene


def test_some_calls_of_a_call_fail(call: Scene) -> None:
    kinds = "runner/openat runner/epoll_ctl runner-forksrv/clone runner-monitor/unshare bwrap-init/pivot_root"
    # What a monitor tells its host: the terms of the launch, and that the plugin runs.
    told = [Fault(Place("runner-forksrv", "sendto", number), ENOMEM) for number in (2, 3)]
    call.sweep([*select(call, kinds), *told])


@pytest.mark.broad
@pytest.mark.bound(120 * MINUTES)
def test_each_call_of_a_call_fails(call: Scene) -> None:
    call.sweep(each_of(by_turns(call, call.places(), 7)))


@pytest.mark.broad
@pytest.mark.bound(120 * MINUTES)
def test_each_process_of_a_call_is_killed_at_its_calls(call: Scene) -> None:
    places = by_turns(call, call.places(), 15)
    call.sweep([Fault(place, signal=signal.SIGKILL) for place in places])


def test_some_calls_of_a_launch_fail(launch: Scene) -> None:
    kinds = "runner/openat runner/memfd_create runner/clone init/unshare init/prlimit64 init/capset"
    launch.sweep(select(launch, f"{kinds} bwrap/clone bwrap-init/mount bwrap-init/pivot_root program/execve"))


# Until its first message nobody knows the pid of a monitor. If it is stopped there, it ends when it goes on.
_UNBORN = {Place("runner-forksrv", "openat", 1), Place("runner-forksrv", "write", 1)}


@pytest.mark.broad
@pytest.mark.bound(60 * MINUTES)
def test_processes_of_a_call_are_stopped(call: Scene) -> None:
    """Also the monitor, which has the clocks of the launch."""
    call.words = [call.words[0], "--limit", "launch=15s", "--deadline", "30s", *call.words[1:]]
    places = [place for place in call.places() if place.role not in ("runner", "runner-thread")]
    firsts = {place[:2]: place for place in reversed(places) if place not in _UNBORN}
    stopped = by_turns(call, [*firsts.values()], 6)
    call.sweep([Fault(place, signal=signal.SIGSTOP) for place in stopped], at_once=8)


@pytest.mark.broad
@pytest.mark.bound(60 * MINUTES)
def test_processes_of_a_launch_are_stopped(launch: Scene) -> None:
    """A runner that goes on later ends as any other. Another process that was stopped is ended in time."""
    launch.words = [{"launch=1m": "launch=15s", "90s": "30s"}.get(word, word) for word in launch.words]
    places = launch.places()
    firsts = {place[:2]: place for place in reversed(places) if place.role != "runner"}
    runners = by_turns(launch, [place for place in places if place.role == "runner"], 25)
    stopped = (*runners, *by_turns(launch, [*firsts.values()], 6))
    launch.sweep([Fault(place, signal=signal.SIGSTOP) for place in stopped], at_once=8)


@pytest.mark.broad
@pytest.mark.bound(120 * MINUTES)
def test_each_call_of_a_launch_fails(launch: Scene) -> None:
    launch.sweep(each_of(by_turns(launch, launch.places(), 7)))


@pytest.mark.broad
@pytest.mark.bound(60 * MINUTES)
def test_each_process_of_a_launch_is_killed_at_its_calls(launch: Scene) -> None:
    places = by_turns(launch, launch.places(), 15)
    launch.sweep([Fault(place, signal=signal.SIGKILL) for place in places])
