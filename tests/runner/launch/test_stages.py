"""A launch as frozen stages: what each failure carries, and a stored plan that another process launches.

The plans are real ones, as root and as an ordinary user.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.launch.stages import Stopwatch, decode_planned
from sandbox.speed.codec import encode
from tests import elsewhere
from tests.conftest import Caller
from tests.manifests import nexo
from tests.tables import one_case

Write = Callable[..., Path]

HEAD = nexo("{id}", "./plugin")
SMALL = HEAD.format(id="small")
RICH = (
    HEAD.format(id="rich")
    + """\
args = ["${state_dir}/count", "/srv/not-shown"]
[plugin.sandbox]
enabled = true
fs_read_paths = ["/etc/ssl/certs", "%(read)s", "%(missing)s", "/srv/refused-and-absent"]
fs_write_paths = ["${state_dir}"]
[plugin.limits]
memory = "64M"
deadline = "30s"
disk = "1M"
output = "10K"
"""
)
PLUGIN = """\
#!/bin/sh
echo "runs with $WORD"
[ -z "$1" ] || echo more >> "$1"
[ -z "$1" ] || cat "$1"
exit 3
"""
POLICY = """\
version = 1
[read]
ceiling = ["{place}"]
[env]
ceiling = ["WORD"]
[limits.memory]
mode = "prefer"
[limits.pids]
mode = "prefer"
default = 50
"""


def made_plan(given: dict[str, Any]) -> dict[str, Any]:
    """A plan as text, and what is to be known of it."""
    import json
    import os

    from runner.launch.rehearse import rehearse
    from runner.launch.report import report
    from runner.launch.stages import Invocation, decode_planned, encode_planned
    from runner.outcome import Outcome
    from sandbox.spec import Overrides

    invocation = Invocation(
        given["manifest"],
        policy=given["policy"],
        state_dir=given["state"],
        overrides=Overrides(env=(("WORD", "\udcff\n'"),)),
    )
    planned = rehearse(invocation, os.environ)
    raw = encode_planned(planned)
    copy = decode_planned(raw)
    outcome = Outcome("ok", "plan", "")

    def all_types(value: object) -> object:
        if isinstance(value, tuple):
            return [type(value).__name__, *(all_types(each) for each in value)]
        return type(value).__name__

    told = report(planned, outcome, 0)
    return {
        "plan": raw.decode("ascii"),
        "equal": copy == planned and all_types(copy) == all_types(planned),
        "same report": json.dumps(report(copy, outcome, 0)) == json.dumps(told),
        "report": told,
        "state": os.path.exists(given["state"]) if given["state"] else None,
    }


def launched_plan(text: str, lie: dict[str, Any]) -> dict[str, Any]:
    """Launch from a stored plan, with the plugin's output in a pipe."""
    import os
    import tempfile
    import time

    from runner.cli.shared.launching import CommandLineHost
    from runner.launch.carry_out import plan_steps
    from runner.launch.report import report
    from runner.launch.stages import decode_planned
    from runner.launch.verdict import judge
    from runner.launch.wait import drive
    from runner.outcome import Failure

    planned = decode_planned(text.encode())._replace(**lie)
    before = sorted(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as output:
        saved = [os.dup(fd) for fd in (0, 1)]
        os.dup2(output.fileno(), 1)
        try:
            ended = drive(plan_steps(planned, os.environ, time.monotonic(), CommandLineHost()))
        except Failure as failure:
            outcome, status, stage = failure.outcome, failure.exec_status, failure.stage
        else:
            outcome, status = judge(ended.end, ended.started.planned.grant.limits)
            stage = ended
        finally:
            for fd, copy in enumerate(saved):
                os.dup2(copy, fd)
                os.close(copy)
        output.seek(0)
        said = os.fsdecode(output.read())
    return {
        "outcome": [outcome.code, outcome.cause, status],
        "denials": [[denial.rule, denial.asked] for denial in outcome.denials],
        "stage": type(stage).__name__,
        "said": said,
        "report": report(stage, outcome, status),
        "leaked": len(os.listdir("/proc/self/fd")) - len(before),
    }


class Stored:
    """A plugin in a folder of its own, beside a folder it may read."""

    def __init__(self, caller: Caller, place: Path, write_file: Write, manifest: str) -> None:
        self.caller = caller
        self.place = place
        self.folder = place / "plugin"
        self.read = place / "read"
        manifest = manifest.replace("%(read)s", str(self.read))
        manifest = manifest.replace("%(missing)s", f"{place}/missing")
        write_file(self.folder / "nexo-plugin.toml", manifest)
        write_file(self.folder / "plugin.toml", manifest)  # shadowed: a warning
        write_file(self.folder / "plugin", PLUGIN, 0o755)
        write_file(self.read / "file", "text")
        self.policy = write_file(place / "policy.toml", POLICY.format(place=place))
        caller.give(place)

    def plan(self, *, state: bool = True) -> dict[str, Any]:
        given = {
            "manifest": str(self.folder),
            "policy": str(self.policy),
            "state": f"{self.place}/state" if state else None,
        }
        found: dict[str, Any] = elsewhere.run(self.caller, made_plan, given)
        return found

    def launch(self, plan: dict[str, Any], **lie: Any) -> dict[str, Any]:
        found: dict[str, Any] = elsewhere.run(self.caller, launched_plan, plan["plan"], lie)
        assert found["leaked"] == 0
        return found


@pytest.mark.launches
@one_case("manifest", [SMALL, RICH], ids=["small", "rich"])
def test_a_plan_survives_bytes(runner_as: Caller, plugin_dir: Path, write_file: Write, manifest: str) -> None:
    found = Stored(runner_as, plugin_dir, write_file, manifest).plan()
    assert found["equal"] and found["same report"]
    told = found["report"]
    assert told["layers"] and told["limits"] and told["diagnostics"]
    if manifest is RICH:
        assert {note["rule"] for note in told["notes"]} >= {"missing", "outside"}
        assert [path["state"] for path in told["grant"]["paths"] if path["origin"] == "state"]
        assert [denial["asked"] for denial in told["grant"]["denials"]] == ["/srv/refused-and-absent"]
        assert {limit["name"] for limit in told["limits"]} >= {"memory", "deadline", "disk", "output"}
    assert not found["state"]  # planning has made nothing


@pytest.mark.launches
@one_case("manifest", [SMALL, RICH], ids=["small", "rich"])
def test_another_process_launches_a_stored_plan(
    runner_as: Caller, plugin_dir: Path, write_file: Write, manifest: str, nothing_left: None
) -> None:
    stored = Stored(runner_as, plugin_dir, write_file, manifest)
    plan = stored.plan()
    for run in (1, 2):  # the second one finds its state directory there, and what is in it
        found = stored.launch(plan)
        assert found["outcome"] == ["crashed", "exit:3", 3], found
        assert found["stage"] == "Ended"
        assert found["said"] == "runs with \udcff\n'\n" + (run * "more\n" if manifest is RICH else "")
        told = found["report"]
        assert list(told["timings"]) == ["plan", "launch", "run", "teardown"]
        for key in ("plugin", "grant", "diagnostics"):
            expected = plan["report"][key]
            if key == "grant":
                expected = {
                    **expected,
                    "paths": [{**path, "state": _bound(path)} for path in expected["paths"]],
                }
            assert told[key] == expected


def _bound(path: dict[str, str]) -> str:
    return "bound" if path["origin"] == "state" else path["state"]


@pytest.mark.launches
@one_case("change", ["", "replaced", "removed", "mode", "socket", "link", "state", "storage"])
def test_a_source_that_changed_since_the_plan_was_made(
    runner_as: Caller, plugin_dir: Path, write_file: Write, change: str
) -> None:
    stored = Stored(runner_as, plugin_dir, write_file, RICH)
    plan = stored.plan()
    read, away = stored.read, stored.place / "away"
    match change:
        case "replaced":
            read.rename(away)
            write_file(read / "file", "another")
        case "removed":
            read.rename(away)
        case "mode":
            read.chmod(0o777)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(f"{read}/door")
        case "storage":  # a second name of a file that a host keeps for plugins
            kept = write_file(stored.place / ".storage/other/file", "kept")
            os.link(kept, read / "second")
        case "state":  # a link in its place, which others than root could change
            os.symlink(away, stored.place / "state")
            if os.geteuid() == 0:
                os.lchown(stored.place / "state", 65534, 65534)
        case "link":
            read.rename(away)
            os.symlink(away, read)
            if os.geteuid() == 0:
                os.lchown(read, 65534, 65534)
    found = stored.launch(plan)
    if not change:
        assert found["outcome"][0] == "crashed"  # the control: by itself
        return
    rules = {"socket": "special_file", "link": "symlink", "state": "symlink", "storage": "hard_link"}
    rule = rules.get(change, "plan_outdated")
    assert found["outcome"] == ["policy_denied", rule, 126], found["denials"]
    assert found["stage"] == "Planned" and found["report"]["layers"]
    assert not (stored.place / "state").exists()  # refused before anything was made
    assert away.exists() == (change in ("replaced", "removed", "link"))


@pytest.mark.launches
def test_a_plan_is_for_the_user_who_made_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    stored = Stored(runner_as, plugin_dir, write_file, SMALL)
    plan = stored.plan()
    found = stored.launch(plan, euid=12345)
    assert found["outcome"] == ["policy_denied", "plan_outdated", 126]
    assert found["said"] == ""


@pytest.mark.launches
def test_a_bubblewrap_that_is_no_longer_trusted(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """A plan names its bubblewrap. Others may have replaced it, or made it setuid, since then."""
    stored = Stored(runner_as, plugin_dir, write_file, SMALL)
    plan = stored.plan(state=False)
    copy = plugin_dir / "bwrap"
    shutil.copy("/usr/bin/bwrap", copy)
    copy.chmod(0o4755)
    found = stored.launch(plan, bwrap=str(copy))
    assert found["outcome"] == ["sandbox_unavailable", "bubblewrap", 125]
    assert found["said"] == "" and found["stage"] == "Planned"
    assert not found["report"]["exit"]["reached_exec"]
    assert stored.launch(plan)["report"]["exit"]["reached_exec"]  # the control


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'["Planned"]', b'["Invocation","m"]', b'["",1]'])
def test_bytes_that_are_no_plan_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a|Expecting|fields, not"):
        decode_planned(raw)


def test_what_is_a_value_but_no_plan() -> None:
    with pytest.raises(ValueError, match="not a plan"):
        decode_planned(encode((1, 2)))


def test_a_phase_that_goes_on_is_one_phase() -> None:
    watch = Stopwatch()
    assert [name for name, _ in watch.lap("plan")] == ["plan"]
    again = watch.lap("plan")
    assert [name for name, _ in again] == ["plan"] and again[0][1] >= 0
    assert [name for name, _ in watch.lap("launch")] == ["plan", "launch"]


# --- the stage that a failure carries -----------------------------------------------------------------------


def failed(manifest: str, policy: str, state: str | None) -> list[Any]:
    import os

    from runner.launch.rehearse import rehearse
    from runner.launch.stages import Invocation
    from runner.outcome import Failure

    try:
        planned = rehearse(Invocation(manifest, policy=policy, state_dir=state), os.environ)
    except Failure as failure:
        return [failure.outcome.code, failure.outcome.phase, type(failure.stage).__name__]
    try:
        setattr(planned, "plan", None)  # noqa: B010 -- a frozen value refuses it
    except AttributeError:
        return ["ok", "plan", type(planned).__name__]
    return ["changed"]


@one_case(
    ("manifest", "expected"),
    [
        ("[plugin]\n", ["manifest_invalid", "manifest", "NoneType"]),
        (SMALL.partition("[plugin.entrypoint]")[0], ["launch_failed", "manifest", "Loaded"]),
        (
            SMALL + '[plugin.sandbox]\nenabled = true\nfs_read_paths = ["/srv"]\n',
            ["policy_denied", "policy", "Decided"],
        ),
        (SMALL.replace("./plugin", "./none"), ["launch_failed", "plan", "Decided"]),
        (SMALL, ["ok", "plan", "Planned"]),
    ],
    ids=["invalid", "no command", "denied", "no program", "fine"],
)
@pytest.mark.launches
def test_the_last_stage_that_was_reached(
    runner_as: Caller, plugin_dir: Path, write_file: Write, manifest: str, expected: list[str]
) -> None:
    stored = Stored(runner_as, plugin_dir, write_file, manifest)
    assert elsewhere.run(runner_as, failed, str(stored.folder), str(stored.policy), None) == expected
