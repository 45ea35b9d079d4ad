"""A launch as frozen stages: what each failure carries, and a plan as bytes for another process.

The plans are real ones, as root and as an ordinary user.
"""

from __future__ import annotations

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


def launched_plan(text: str, lie: dict[str, Any]) -> list[Any]:
    """Carry out a plan of another process."""
    import os
    import time

    from runner.cli.shared.launching import CommandLineHost
    from runner.launch.carry_out import plan_steps
    from runner.launch.sources import Sources
    from runner.launch.stages import decode_planned
    from runner.launch.wait import drive
    from runner.outcome import Failure

    planned = decode_planned(text.encode())._replace(**lie)
    try:
        drive(plan_steps(planned, os.environ, time.monotonic(), CommandLineHost(), Sources()))
    except Failure as failure:
        return [failure.outcome.code, failure.outcome.cause, failure.exec_status]
    return ["launched"]


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
def test_a_plan_is_for_the_user_who_made_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    stored = Stored(runner_as, plugin_dir, write_file, SMALL)
    plan = stored.plan()
    found = elsewhere.run(runner_as, launched_plan, plan["plan"], {"euid": 12345})
    assert found == ["policy_denied", "plan_outdated", 126]


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
