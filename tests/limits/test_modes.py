"""Which limit applies: manifest, policy or command line, and what happens if a limit cannot be enforced.

The tests observe what the plugin can do, or the values in the kernel. `runner explain` has to predict them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.limits.altered import altered
from tests.limits.cage import BY_CGROUP, SH, Box, Result, by_cgroup, enforced_by, group_of, policy, rlimit_of
from tests.tables import one_case

MIB = 1 << 20
OK = ("ok", "run", "")
LIMITS: Mapping[str, object] = {"memory": "64M", "pids": 20, "cpu": 0.5, "cpu_time": "10s", "io": "10M"}

# Writes a file to show that it has run.
LEAVES_A_MARK = SH + "echo ran > {place}/mark\n"

# Counts how many processes it can start.
COUNT = """
import json, os
made = 1
gate, open_gate = os.pipe()
try:
    while made < 100:
        if os.fork() == 0:
            os.close(open_gate)
            os.read(gate, 1)
            os._exit(0)
        made += 1
except BlockingIOError:
    pass
print(json.dumps(made), flush=True)
os._exit(0)
"""


@pytest.fixture
def place(box: Box) -> Path:
    """A folder that the plugin may write to."""
    path = box.folder / "open"
    path.mkdir()
    path.chmod(0o777)
    return path


def launch(box: Box, place: Path, mode: str, *names: str) -> Result:
    return box.run(
        LEAVES_A_MARK.format(place=place),
        policy=policy(mode, write=(str(place),)),
        write=(str(place),),
        limits={name: LIMITS[name] for name in names},
    )


@one_case("name", BY_CGROUP)
def test_mode_require(box: Box, place: Path, name: str) -> None:
    result = launch(box, place, "require", name)
    if by_cgroup(box, name):
        assert (result.status, result.outcome) == (0, OK)
        assert (place / "mark").exists() and not result.limit(name)["degraded"]
        return
    assert (result.status, result.outcome) == (125, ("sandbox_unavailable", "plan", name))
    assert f"the {name} limit cannot be enforced" in result.message
    # The message names the controller, and the hint says what to do.
    assert "cpu" in result.message if name == "cpu_time" else name in result.message
    assert f'mode = "prefer" under [limits.{name}]' in result.hint
    assert result.hint.partition("; or say mode")[0], "the only remedy is to go without"
    assert result.message in result.err and result.hint in result.err
    assert list(place.iterdir()) == [], "the plugin ran"
    assert not result.exit["reached_exec"] and result.report["usage"] is None and result.hits == []


def test_mode_prefer(box: Box, place: Path) -> None:
    result = launch(box, place, "prefer", *LIMITS)
    assert (result.status, result.outcome) == (0, OK)
    assert (place / "mark").exists()
    for name in LIMITS:
        limit = result.limit(name)
        assert limit["enforced_by"] == enforced_by(box, name)
        assert limit["degraded"] == (not by_cgroup(box, name))
        assert (limit["effective"] is None) == (not enforced_by(box, name))
        assert limit["detail"] or not limit["degraded"]
    lacking = [name for name in LIMITS if not by_cgroup(box, name)]
    assert set(result.report["degraded"]) == set(lacking)
    # The manifest asked for them: no limit is weaker, or missing, without a line on stderr.
    assert result.err.count("limits that are not enforced in full") == bool(lacking)
    for name in lacking:
        assert f"{name} by {enforced_by(box, name) or 'nothing'}" in result.err
    assert [note["rule"] for note in result.report["notes"]].count("limits") == bool(lacking)


@one_case("name", ["memory", "cpu_time"])
def test_mode_delegated(box: Box, place: Path, name: str) -> None:
    """Mode "delegated" requires cgroups only for root and for callers with a delegated cgroup."""
    result = launch(box, place, "delegated", name)
    expected = box.caller.uid == 0 or any(by_cgroup(box, each) for each in BY_CGROUP)
    if by_cgroup(box, name) or not expected:
        assert (result.status, result.outcome) == (0, OK)
        assert result.limit(name)["degraded"] == (not by_cgroup(box, name))
        assert (place / "mark").exists()
    else:
        assert (result.status, result.outcome) == (125, ("sandbox_unavailable", "plan", name))
        assert list(place.iterdir()) == []


def test_the_default_policy(box: Box) -> None:
    """The default policy limits memory and processes, by the best means on this machine."""
    result = box.run("pass", "--policy", "default", policy=None)
    lacking = [name for name in ("memory", "pids") if not by_cgroup(box, name)]
    if box.caller.uid == 0 and lacking:
        assert (result.status, result.outcome) == (125, ("sandbox_unavailable", "plan", lacking[0]))
        return
    assert (result.status, result.outcome) == (0, OK)
    for name, value in (("memory", 1024 * MIB), ("pids", 256)):
        limit = result.limit(name)
        assert (limit["requested"], limit["decided_by"]) == (value, "policy")
        assert (limit["enforced_by"], limit["degraded"]) == (enforced_by(box, name), name in lacking)
    assert result.err == ""  # nobody asked for these, and nobody promised them


def test_explain_predicts_the_limits(box: Box) -> None:
    asked = {**LIMITS, "open_files": 64, "file_size": "1M", "tmp": "8M", "deadline": "1m"}
    launched = {limit["name"]: limit for limit in box.run("pass", limits=asked).report["limits"]}
    explained = {limit["name"]: limit for limit in box.explain("pass", limits=asked)["limits"]}
    assert launched.keys() == explained.keys() >= asked.keys()
    for name, limit in explained.items():
        assert {**limit, "peak": None} == {**launched[name], "peak": None}


# --- means on this machine, found without the runner --------------------------------------------------------


@one_case("name", ["memory", "pids", "cpu", "io"])
def test_the_runner_finds_the_cgroups_of_this_machine(box: Box, name: str) -> None:
    """`enforced_by` is the runner's own answer. Here it is compared with a cgroup made by hand."""
    directory = _own_group(box.caller, name)
    made = directory / f"rt-{os.getpid()}"
    tried = subprocess.run(
        [*box.caller.prefix, "/usr/bin/mkdir", made], capture_output=True, text=True, check=False
    )
    works = tried.returncode == 0
    try:
        limited = (
            works and any(made.glob(f"{'blkio' if name == 'io' else name}.*")) and _has_limit(made, name)
        )
    finally:
        if works:
            made.rmdir()
    if limited:
        assert by_cgroup(box, name), f"a cgroup in {directory} could enforce {name}"
    elif not works and box.caller.uid != 0:
        assert not by_cgroup(box, name), f"no cgroup can be made in {directory}: {tried.stderr}"


def _own_group(caller: Caller, name: str) -> Path:
    with subprocess.Popen([*caller.prefix, "/usr/bin/cat"], stdin=subprocess.PIPE) as process:
        return group_of(process.pid, name)


def _has_limit(group: Path, name: str) -> bool:
    files = {
        "memory": ("memory.max", "memory.limit_in_bytes"),
        "pids": ("pids.max",),
        "cpu": ("cpu.max", "cpu.cfs_quota_us"),
        "io": ("io.max", "blkio.throttle.read_bps_device"),
    }
    return any((group / file).exists() for file in files[name])


# The controller is gone between the survey and the launch.
PIDS_GONE = """
import sandbox.limits.cgroup as cgroups
write = cgroups.write_once
def refuse(path, text):
    if path.endswith("/pids.max"):
        raise FileNotFoundError(2, "gone")
    write(path, text)
cgroups.write_once = refuse
"""


@one_case("mode", ["require", "prefer"])
def test_the_report_of_a_group_that_could_not_be_limited(box: Box, mode: str) -> None:
    if not by_cgroup(box, "pids"):
        pytest.skip("no cgroup limits processes here")
    limits = {"pids": 20, "memory": "64M"}
    spoilt = Box(altered(box.caller, PIDS_GONE), box.folder)
    result = spoilt.run("", policy=policy(mode), limits=limits)
    assert result.outcome == (("sandbox_unavailable", "plan", "pids") if mode == "require" else OK)
    limit = result.limit("pids")
    assert limit["degraded"] and not limit["enforced_by"].startswith("cgroup"), limit
    assert result.limit("memory")["enforced_by"].startswith("cgroup")
    control = box.run("", policy=policy(mode), limits=limits)
    assert control.outcome == OK and control.limit("pids")["enforced_by"].startswith("cgroup")


@one_case("ends", [False, True], ids=["while it runs", "at its end"])
def test_a_limit_that_somebody_lifts(box: Box, ends: bool) -> None:
    """Whatever the plugin returns, it is not `ok`, and the report does not say that the limit held."""
    if not by_cgroup(box, "pids"):
        pytest.skip("no cgroup limits processes here")
    waits = "print('ready', flush=True)\ninput()"
    with box.running(waits, limits={"pids": 20, "memory": "64M"}) as running:
        (running.group("pids") / "pids.max").write_text("max")
        if ends:
            running.say("thanks")
        running.process.wait(120)
    result = running.result
    assert result is not None and result.outcome == ("sandbox_unavailable", "run", "pids")
    assert result.status == 125 and "were lifted from outside" in result.err and "Delegate=yes" in result.err
    assert (result.limit("pids")["enforced_by"], result.report["degraded"].count("pids")) == ("", 1)
    assert result.limit("memory")["enforced_by"].startswith("cgroup")  # the control


# --- the lowest wins ----------------------------------------------------------------------------------------


@one_case(
    ("manifest", "line", "ceiling", "lowest", "who"),
    [
        (6, 9, 12, 6, "manifest"),
        (9, 6, 12, 6, "command line"),
        (12, 9, 6, 6, "policy"),
        (None, 9, 6, 6, "policy"),
    ],
)
def test_the_lowest_wins(
    box: Box, manifest: int | None, line: int, ceiling: int, lowest: int, who: str
) -> None:
    result = box.run(
        COUNT,
        *("--pids", str(line)),
        policy=policy(ceiling={"pids": ceiling}),
        limits={} if manifest is None else {"pids": manifest},
    )
    assert result.printed == lowest
    limit = result.limit("pids")
    assert (limit["requested"], limit["effective"], limit["decided_by"]) == (lowest, lowest, who)


def test_a_default_applies_only_if_nothing_else_is_stated(box: Box) -> None:
    stated = policy(default={"pids": 6}, ceiling={"pids": 9})
    assert box.run(COUNT, policy=stated).printed == 6
    assert box.run(COUNT, policy=stated, limits={"pids": 8}).printed == 8
    assert box.run(COUNT, "--pids", "50", policy=stated).printed == 9


@one_case(
    ("manifest", "line", "ceiling"), [("24M", "32M", "40M"), ("40M", "24M", "32M"), ("32M", "40M", "24M")]
)
def test_the_kernel_has_the_lowest(box: Box, manifest: str, line: str, ceiling: str) -> None:
    waits = "print('ready', flush=True)\ninput()"
    stated = policy(ceiling={"memory": ceiling})
    with box.running(waits, "--memory", line, policy=stated, limits={"memory": manifest}) as running:
        if by_cgroup(box, "memory"):
            group = running.group("memory")
            file = next(f for f in ("memory.max", "memory.limit_in_bytes") if (group / f).exists())
            limit: int | None = int((group / file).read_text())
        else:
            limit = rlimit_of(running.pid, "Max data size")
        running.say("thanks")
    assert limit == 24 * MIB
    assert running.result is not None and running.result.limit("memory")["effective"] == 24 * MIB
