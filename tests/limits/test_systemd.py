"""The runner in a delegated systemd unit: alone or with other processes, with limits of the unit or without.

Needs a systemd that starts transient units: the user's, or the system's as root. The tests read the plugin's
cgroups from outside while it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import MANAGER, Caller
from tests.limits.cage import Box, group_of, policy, whole_group
from tests.template import settled

pytestmark = [pytest.mark.needs("systemd"), pytest.mark.usefixtures("nothing_left")]

PIDS = 16
LIMITS = {"memory": "64M", "pids": PIDS}
WAITS = "print('ready', flush=True); input()"
HOGS = "print('ready', flush=True); input(); bytearray(200 << 20)"

SCOPE = ("--scope", "-q", "-p", "Delegate=yes")
SERVICE = ("--pipe", "--wait", "-q", "--collect", "-p", "Delegate=yes")


@pytest.fixture
def box(request: pytest.FixtureRequest, plugin_dir: Path, templates: None) -> Box:
    caller: Caller = request.getfixturevalue("runner_as_root" if os.geteuid() == 0 else "runner_as_user")
    return Box(caller, plugin_dir)


class InUnit(NamedTuple):
    process: subprocess.Popen[bytes]
    report: Path
    runner: int

    def go_on(self) -> dict[str, Any]:
        return self.go_on_and_tell()[0]

    def go_on_and_tell(self) -> tuple[dict[str, Any], str]:
        """The report, and what was written to stderr."""
        out, err = self.process.communicate(b"\n", timeout=120)
        assert self.report.exists(), (out, err)
        return json.loads(self.report.read_bytes()), err.decode()


SYSTEMS_OWN = pytest.mark.needs("root")  # a user's own systemd does not mark the units that it delegates
NAMED = '{"name": "world"}'
MOVES = '[cgroups]\nhost = "move"\n'


def in_transient(box: Box, unit: tuple[str, ...], command: list[str]) -> dict[str, Any]:
    """What to start, and with which environment, to have a command in a transient unit."""
    variables = {**box.caller.environ, "RUNNER_DEBUG": "1"}
    given = [f"--setenv={name}={value}" for name, value in variables.items()]
    if "--scope" in unit:
        given = []  # a scope inherits our environment
    return {"args": [*MANAGER, *unit, *given, "--", *command], "env": {**os.environ, **variables}}


@contextmanager
def in_unit(
    box: Box, code: str, *unit: str, host: bool = False, mode: str = "prefer", more: str = ""
) -> Iterator[InUnit]:
    """`runner exec` in a transient unit. `host`: started by a shell in the unit. `more`: of the policy."""
    folder = box.plugin(code, limits=LIMITS)
    report = box.caller.home / "report.json"
    options = box.policy_options(policy(mode) + more)
    command = box.caller.command("exec", *options, "--report", report, folder)
    if host:
        command = ["/bin/sh", "-c", f"{shlex.join(command)}; exit $?"]
    with subprocess.Popen(
        **in_transient(box, unit, command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            if mode == "prefer":
                assert process.stdout.readline() == b"ready\n", process.communicate()
            yield InUnit(process, report, _runner(folder) if mode == "prefer" else 0)
        except BaseException:
            process.kill()
            raise


def _runner(folder: Path) -> int:
    """The runner of the plugin in `folder`. systemd starts it, so it is no child of this process."""
    for entry in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # The shell around it and systemd-run have the same words in their command lines.
        if b"python" in words[0] and b"exec" in words and os.fsencode(folder) in words:
            return int(entry)
    raise LookupError("no runner")


def program_of(pid: int) -> int:
    for _ in range(4):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


def unit_of(group: Path) -> Path:
    return next(place for place in (group, *group.parents) if place.name.endswith((".scope", ".service")))


def enforced(report: dict[str, Any]) -> dict[str, str]:
    return {limit["name"]: limit["enforced_by"] for limit in report["limits"] if limit["name"] in LIMITS}


@pytest.mark.parametrize("unit", [SCOPE, SERVICE], ids=["scope", "service"])
def test_alone_in_a_delegated_unit(box: Box, unit: tuple[str, ...]) -> None:
    with in_unit(box, WAITS, *unit) as running:
        own, plugin = group_of(running.runner, "memory"), group_of(program_of(running.runner), "memory")
        assert own.name.startswith(f"runner-{running.runner}-") and own.name.endswith("-self")
        assert whole_group(plugin).parent == own.parent == unit_of(own)
        assert (plugin / "memory.max").read_text() == f"{64 << 20}\n"
        assert (plugin / "memory.swap.max").read_text() == "0\n"
        assert (plugin / "memory.oom.group").read_text() == "1\n"
        assert int((plugin / "pids.max").read_text()) == PIDS + 2
        report = running.go_on()
    assert report["outcome"]["code"] == "ok"
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")
    assert not whole_group(plugin).exists()


@pytest.mark.parametrize("unit", [SCOPE, SERVICE], ids=["scope", "service"])
def test_an_oom_kill_is_reported_and_does_not_end_the_unit(box: Box, unit: tuple[str, ...]) -> None:
    with in_unit(box, HOGS, *unit) as running:
        report = running.go_on()
    assert (report["outcome"]["code"], report["outcome"]["cause"]) == ("crashed", "oom")
    assert report["limits_hit"] == ["memory"]
    assert report["exit"]["ended_by"] is None  # the runner got no signal


def test_another_process_in_the_same_unit(box: Box) -> None:
    """With another process in it the unit cannot enable controllers, so a cgroup above is used."""
    with in_unit(box, WAITS, *SCOPE, host=True) as running:
        own, plugin = group_of(running.runner, "memory"), group_of(program_of(running.runner), "memory")
        assert own == unit_of(own)  # no process was moved
        assert whole_group(plugin).parent in own.parents
        report = running.go_on()
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")


def test_the_plugin_stays_within_the_limits_of_the_unit(box: Box) -> None:
    with in_unit(box, WAITS, *SCOPE, "-p", "MemoryMax=500M", host=True) as running:
        own, plugin = group_of(running.runner, "memory"), group_of(program_of(running.runner), "memory")
        assert plugin == own or own in plugin.parents
        report, err = running.go_on_and_tell()
    assert enforced(report) == {"memory": "RLIMIT_DATA", "pids": "RLIMIT_NPROC"}
    assert "not enforced in full: memory by RLIMIT_DATA, pids by RLIMIT_NPROC" in err
    assert "sh (" in next(b["detail"] for b in report["limits"] if b["name"] == "memory")


@SYSTEMS_OWN
def test_beside_a_host_that_may_be_moved(box: Box) -> None:
    """The unit's limits keep the runner from looking for a group above."""
    unit = (*SCOPE, "-p", "MemoryMax=500M")
    with in_unit(box, WAITS, *unit, host=True, more=MOVES) as running:
        own, plugin = group_of(running.runner, "memory"), group_of(program_of(running.runner), "memory")
        status = Path(f"/proc/{running.runner}/status").read_text().split()
        host = group_of(int(status[status.index("PPid:") + 1]), "memory")
        assert own.name.endswith("-self") and own.parent == host.parent == whole_group(plugin).parent
        assert host.name == "runner-host" and host.parent == unit_of(host)
        assert (plugin / "memory.max").read_text() == f"{64 << 20}\n"
        report, err = running.go_on_and_tell()
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")
    assert "not enforced in full" not in err


def test_a_call_alone_in_a_unit(box: Box) -> None:
    """The command has a fork server, which has a monitor: all three are ours, and leave the unit's group."""
    folder, report = box.caller.home / "greeter", box.caller.home / "report.json"
    box.caller("new", "nexo", folder)
    options = box.policy_options(policy("require"))
    command = box.caller.command(
        "call", *options, "--cpu", "0.5", "--report", report, folder, "greeter_greet", "--input", NAMED
    )
    ended = subprocess.run(**in_transient(box, SERVICE, command), capture_output=True, timeout=120)
    told = json.loads(report.read_bytes())
    assert (ended.returncode, told["outcome"]["code"]) == (0, "ok"), ended
    means = {b["name"]: b["enforced_by"] for b in told["limits"]}
    assert [means[name] for name in ("memory", "pids", "cpu")] == ["cgroup v2"] * 3


def test_alone_in_a_unit_with_limits(box: Box) -> None:
    with in_unit(box, WAITS, *SCOPE, "-p", "MemoryMax=500M") as running:
        own, plugin = group_of(running.runner, "memory"), group_of(program_of(running.runner), "memory")
        assert whole_group(plugin).parent == unit_of(own)
        assert int((whole_group(plugin).parent / "memory.max").read_text()) == 500 << 20
        report = running.go_on()
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")


@pytest.mark.parametrize("mode", ["require", pytest.param("delegated", marks=SYSTEMS_OWN)])
def test_mode_require_without_usable_controllers(box: Box, mode: str) -> None:
    """A delegated unit is one also with its host in it."""
    with in_unit(box, WAITS, *SCOPE, "-p", "MemoryMax=500M", host=True, mode=mode) as running:
        report = running.go_on()
    assert running.process.returncode == 125
    outcome = report["outcome"]
    assert (outcome["code"], outcome["cause"]) == ("sandbox_unavailable", "memory")
    assert "while processes are in it: sh (" in outcome["message"] and "Delegate" in outcome["hint"]


# --- a unit that was not delegated --------------------------------------------------------------------------

UNDELEGATED = ("--pipe", "--wait", "-q", "--collect", "-p", "CPUWeight=100")  # cpu is handed down to it
SYSTEMCTL = ["systemctl", *([] if os.geteuid() == 0 else ["--user"])]


def test_systemd_lifts_no_limit_when_it_reloads(box: Box) -> None:
    """It takes controllers back from a unit that it did not delegate, and the kernel refuses that."""
    with in_unit(box, WAITS, *UNDELEGATED) as running:
        plugin = group_of(program_of(running.runner), "memory")
        had = (plugin / "cgroup.controllers").read_text().split()
        subprocess.run([*SYSTEMCTL, "daemon-reload"], check=True, timeout=120)
        assert (plugin / "memory.max").read_text() == f"{64 << 20}\n"
        assert int((plugin / "pids.max").read_text()) == PIDS + 2
        assert (plugin / "cgroup.controllers").read_text().split() == had
        report = running.go_on()
    assert report["outcome"]["code"] == "ok"
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")


def test_systemd_lifts_no_limit_when_another_unit_stops(box: Box) -> None:
    """The last unit with CPUWeight= stops, and cpu is handed down for nobody else."""
    name = f"rt-{os.getpid()}.service"
    weighted = [*MANAGER, "-q", "--unit", name, "-p", "CPUWeight=200", "/bin/sleep", "1000"]
    subprocess.run(weighted, check=True, timeout=120)
    try:
        with in_unit(box, WAITS, "--pipe", "--wait", "-q", "--collect", host=True) as running:
            plugin = group_of(program_of(running.runner), "memory")
            had = (plugin / "cgroup.controllers").read_text().split()
            subprocess.run([*SYSTEMCTL, "stop", name], check=True, timeout=120)
            assert (plugin / "cgroup.controllers").read_text().split() == had
            report = running.go_on()
    finally:
        subprocess.run([*SYSTEMCTL, "stop", name], capture_output=True, timeout=120)
    assert report["outcome"]["code"] == "ok"
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")


# --- stored plans -------------------------------------------------------------------------------------------

USED = "runner: a stored plan is used"


def settle(box: Box) -> None:
    """Write what `in_unit` needs, which then finds it as it is. Its runners store plans that rest on files
    which were changed a moment ago."""
    box.plugin(WAITS, limits=LIMITS)
    box.policy_options(policy("prefer"))
    box.caller = settled(box.caller)


@pytest.mark.parametrize("unit", [SCOPE, SERVICE], ids=["scope", "service"])
def test_a_plan_is_for_the_next_unit_too(box: Box, unit: tuple[str, ...]) -> None:
    """Each launch has a unit of its own, and limits in it. The questions are asked about that unit."""
    settle(box)
    with in_unit(box, WAITS, *unit) as first:
        before = unit_of(group_of(first.runner, "memory"))
        _, told = first.go_on_and_tell()
    assert USED not in told and "not stored" not in told
    with in_unit(box, WAITS, *unit) as second:
        own, plugin = group_of(second.runner, "memory"), group_of(program_of(second.runner), "memory")
        assert whole_group(plugin).parent == own.parent == unit_of(own) != before
        assert (plugin / "memory.max").read_text() == f"{64 << 20}\n"
        report, told = second.go_on_and_tell()
    assert USED in told
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")
    with in_unit(box, WAITS, *unit, "-p", "MemoryMax=500M") as bounded:
        report, told = bounded.go_on_and_tell()
    assert USED not in told and "memory.max is not as it was" in told
    assert enforced(report) == dict.fromkeys(LIMITS, "cgroup v2")


def test_a_plan_is_not_for_a_unit_with_another_process(box: Box) -> None:
    settle(box)
    for expected in (False, True):  # the control
        with in_unit(box, WAITS, *SCOPE) as alone:
            assert (USED in alone.go_on_and_tell()[1]) == expected
    with in_unit(box, WAITS, *SCOPE, "-p", "MemoryMax=500M", host=True) as running:
        report, told = running.go_on_and_tell()
    assert USED not in told
    assert enforced(report) == {"memory": "RLIMIT_DATA", "pids": "RLIMIT_NPROC"}
    with in_unit(box, WAITS, *SCOPE, host=True) as running:
        plugin = group_of(program_of(running.runner), "memory")
        assert whole_group(plugin).parent in unit_of(group_of(running.runner, "memory")).parents
        _, told = running.go_on_and_tell()
    assert USED not in told
