"""Reports of real launches against the schema that is shipped with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from jsonschema import Draft202012Validator

from runner import __version__
from runner.report import EXIT, SCHEMA, Code, Phase, schema
from runner.watch import Reason
from sandbox.spec import Limits
from tests.conftest import ROOT, Caller

Write = Callable[..., Path]

CANARY = "canary-8c1f03"


def closed(part: Any) -> Any:
    """The schema with every object shut: a reader must bear unknown keys, the writer must not invent any."""
    if isinstance(part, list):
        return [closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    copy = {key: value if key in ("const", "enum") else closed(value) for key, value in part.items()}
    if "properties" in copy and "description" in copy:
        copy.setdefault("additionalProperties", False)
    return copy


def faults(report: Any) -> list[str]:
    return [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(closed(schema())).iter_errors(report)
    ]


# --- the schema --------------------------------------------------------------------------------------------


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["$id"] == schema()["properties"]["schema"]["const"] == SCHEMA


def described(part: dict[str, Any], path: str = "$") -> Iterator[tuple[str, str]]:
    for name, child in part.get("properties", {}).items():
        yield f"{path}.{name}", child.get("description", "")
        yield from described(child, f"{path}.{name}")
    if isinstance(part.get("items"), dict):
        yield from described(part["items"], f"{path}[]")


def test_every_key_is_described() -> None:
    found = dict(described(schema()))
    assert len(found) > 60
    assert [path for path, text in found.items() if not text.endswith((".", "…"))] == []


def test_the_schema_knows_every_word() -> None:
    properties = schema()["properties"]
    assert properties["outcome"]["properties"]["code"]["enum"] == list(get_args(Code)) == list(EXIT)
    assert properties["outcome"]["properties"]["phase"]["enum"] == list(get_args(Phase))
    assert properties["exit"]["properties"]["ended_by"]["enum"] == [*get_args(Reason), None]
    assert list(properties["grant"]["properties"]["limits"]["properties"]) == list(Limits._fields)


def test_every_key_is_on_the_page() -> None:
    page = (ROOT / "docs/report.md").read_text()
    words = set(re.findall(r"`(\w+)`", page))
    names = {path.rpartition(".")[2] for path in dict(described(schema()))}
    assert names - words - set(Limits._fields) == set()


def test_readers_bear_keys_of_later_versions(launches: dict[str, Launch]) -> None:
    report = json.loads(json.dumps(launches["success"].report))
    report["later"] = report["exit"]["later"] = report["grant"]["denials"] = []
    report["grant"]["limits"]["later"] = 1
    assert Draft202012Validator(schema()).is_valid(report)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", "runner.report.v2"),
        ("plugin", "name"),
        ("outcome.code", "exploded"),
        ("outcome.phase", "later"),
        ("exit.status", 256),
        ("exit.reached_exec", False),  # with a code
        ("exit.ended_by", "boredom"),
        ("grant.paths.0.access", "execute"),
        ("grant.env", ["A", "A"]),
        ("grant.decided_by.tmp", "nobody"),
        ("layers.0.effective", None),
        ("timings.run", -1),
        ("usage.max_rss", 1.5),
    ],
)
def test_the_schema_refuses(launches: dict[str, Launch], path: str, value: Any) -> None:
    report = json.loads(json.dumps(launches["success"].report))
    assert faults(report) == []
    *way, last = path.split(".")
    place = report
    for step in way:
        place = place[int(step) if step.isdecimal() else step]
    place[last] = value
    assert faults(report) != []
    del place[last]
    optional = path in ("grant.decided_by.tmp", "timings.run")
    assert Draft202012Validator(schema()).is_valid(report) == optional


# --- real ones ---------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    status: int
    output: str
    report: Any


class Case(NamedTuple):
    script: str
    options: tuple[str, ...] = ()
    manifest: str = ""  # more of it
    head: str = 'id = "told"\nversion = "1.2.3"\n'


CASES = {
    "success": Case('echo "$TOKEN"', ("--env", f"TOKEN={CANARY}")),
    "failure": Case("exit 7"),
    "crash": Case("kill -SEGV $$"),
    "timeout": Case("sleep 1000", ("--deadline", "0.3")),
    "state": Case("exit 0", manifest='[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'),
    "refusal": Case("exit 0", manifest='[plugin.sandbox]\nenabled = true\nfs_read_paths = ["/srv"]\n'),
    "no such budget": Case("exit 0", manifest='[plugin.limits]\nmemory = "1M"\n'),
    "invalid": Case("exit 0", head='id = "told"\n'),
    "not found": Case(""),
}


@pytest.fixture
def launches(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> dict[str, Launch]:
    return {"success": launch(runner_as_user, plugin_dir, write_file, "success")}


def launch(caller: Caller, plugin_dir: Path, write_file: Write, name: str) -> Launch:
    case = CASES[name]
    folder = plugin_dir / name.replace(" ", "-")
    if case.script:
        write_file(folder / "run", f"#!/bin/sh\n{case.script}\n", 0o755)
    write_file(
        folder / "nexo-plugin.toml",
        f'[plugin]\n{case.head}name = "Told"\ndescription = "is told about"\nmin_nexo_version = ">=0.1.0"\n'
        f'[plugin.entrypoint]\ncommand = "./run"\n{case.manifest}',
    )
    caller.give(plugin_dir)
    where = caller.home / "report.json"
    state = plugin_dir / "kept"  # not root's own place for it: a test leaves nothing there
    done = caller(
        "exec", "--report", where, "--state-dir", state, *case.options, folder, env={"OTHER_SECRET": CANARY}
    )
    return Launch(done.returncode, done.stdout, json.loads(where.read_text()))


@pytest.mark.parametrize(
    ("name", "code", "cause", "status"),
    [
        ("success", "ok", "", 0),
        ("failure", "crashed", "exit:7", 7),
        ("crash", "crashed", "signal:11", 139),
        ("timeout", "timeout", "deadline", 124),
        ("state", "ok", "", 0),
        ("refusal", "policy_denied", "read_ceiling", 126),
        ("no such budget", "sandbox_unavailable", "memory", 125),
        ("invalid", "manifest_invalid", None, 126),
        ("not found", "launch_failed", "not_found", 127),
    ],
)
def test_a_report_of_each_kind(
    runner_as: Caller,
    plugin_dir: Path,
    write_file: Write,
    name: str,
    code: str,
    cause: str | None,
    status: int,
) -> None:
    done = launch(runner_as, plugin_dir, write_file, name)
    report = done.report
    assert faults(report) == []
    assert (report["schema"], report["runner"]) == (SCHEMA, __version__)
    assert report["outcome"]["code"] == code
    assert cause is None or report["outcome"]["cause"] == cause
    assert report["exit"]["status"] == done.status == status
    ran = name in ("success", "failure", "crash", "timeout", "state")
    assert (report["usage"] is not None) == ran
    assert ("run" in report["timings"]) == ran
    assert (report["plugin"] is None) == (name == "invalid")
    if report["plugin"] is not None:
        assert report["plugin"]["id"] == "told" and report["plugin"]["version"] == "1.2.3"
    assert CANARY not in json.dumps(report)


def test_values_of_variables_are_not_in_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    done = launch(runner_as, plugin_dir, write_file, "success")
    assert done.output == f"{CANARY}\n"  # the plugin has it
    assert "TOKEN" in done.report["grant"]["env"]
    assert CANARY not in json.dumps(done.report)


def test_what_a_refusal_tells(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    report = launch(runner_as, plugin_dir, write_file, "refusal").report
    (denial,) = report["grant"]["denials"]
    assert (denial["rule"], denial["asked"], denial["required"]) == ("read_ceiling", "/srv", True)
    file, line, column = denial["where"].rsplit(":", 2)
    text = Path(file).read_text().splitlines()[int(line) - 1]
    assert "/srv" in text[int(column) - 1 :]
    assert report["exit"]["reached_exec"] is False and report["exit"]["code"] is None


def test_what_a_timeout_tells(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    report = launch(runner_as, plugin_dir, write_file, "timeout").report
    assert report["exit"] == {
        "status": 124,
        "code": 137,
        "reached_exec": True,
        "ended_by": "deadline",
        "signal": None,
        "forced": True,
    }
    assert report["grant"]["limits"]["deadline"] == 0.3
    assert report["grant"]["decided_by"]["deadline"] == "command line"
    assert list(report["timings"]) == ["manifest", "policy", "plan", "launch", "run", "teardown"]


def test_a_state_directory_is_in_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    report = launch(runner_as, plugin_dir, write_file, "state").report
    (state,) = (path for path in report["grant"]["paths"] if path["access"] == "write")
    assert (state["origin"], state["state"]) == ("state", "bound")
    assert Path(state["path"]).stat().st_mode & 0o777 == 0o700


def test_faults_of_a_manifest_are_in_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    report = launch(runner_as, plugin_dir, write_file, "invalid").report
    errors = [fault for fault in report["diagnostics"] if fault["severity"] == "error"]
    assert errors and all(fault["file"].endswith("nexo-plugin.toml") for fault in errors)
    assert report["grant"] is None and report["layers"] == []
