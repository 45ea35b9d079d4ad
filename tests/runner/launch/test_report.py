"""Reports of real launches against the schema that is shipped with them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pytest
from jsonschema import Draft202012Validator

from runner import __version__
from runner.launch import report as account
from runner.launch.stages import Decided, Ended, Invocation, Loaded, Planned, Provision, Started
from runner.launch.stdio import Plumbing
from runner.launch.verdict import judge
from runner.launch.wait import Clocks, End, Reason
from runner.outcome import EXIT, SCHEMA, Code, Phase, schema
from runner.plugin import Plugin
from sandbox.cell.cell import Exit, Usage
from sandbox.limits.assigned import AssignedLimit, AssignedLimits
from sandbox.plan.layers import Layers
from sandbox.plan.plan import LaunchPlan
from sandbox.policy.policy import Policy
from sandbox.spec import SIZES, Grant, Limits, Network, SandboxSpec
from tests.conftest import ROOT, Caller
from tests.manifests import nexo
from tests.sandbox.doctor.groups import with_read_only_groups
from tests.tables import check_rows, one_case

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
    limit = properties["limits"]["items"]["properties"]
    assert limit["name"]["enum"] == properties["limits_hit"]["items"]["enum"] == list(Limits._fields)
    assert list(limit) == [*AssignedLimit._fields, "peak"]
    assert list(properties["usage"]["properties"]) == list(Usage._fields)
    assert properties["outcome"]["properties"]["code"]["enum"] == list(get_args(Code)) == list(EXIT)
    assert properties["outcome"]["properties"]["phase"]["enum"] == list(get_args(Phase))
    assert properties["exit"]["properties"]["ended_by"]["enum"] == [*get_args(Reason), "cancelled", None]
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


@one_case(
    ("path", "value"),
    [
        ("schema", "runner.report.v2"),
        ("plugin", "name"),
        ("outcome.code", "exploded"),
        ("outcome.phase", "later"),
        ("exit.status", 256),
        ("exit.reached_exec", False),  # with a code
        ("exit.ended_by", "boredom"),
        ("exit.kill_incomplete", True),  # with nobody left
        ("exit.left", [7]),  # with nothing incomplete
        ("grant.paths.0.access", "execute"),
        ("grant.env", ["A", "A"]),
        ("grant.decided_by.tmp", "nobody"),
        ("layers.0.effective", None),
        ("limits.0.name", "patience"),
        ("limits.0.decided_by", "environment"),
        ("limits.0.effective", "much"),
        ("limits.0.peak", -1),
        ("degraded", ["memory", "memory"]),
        ("limits_hit", ["patience"]),
        ("stderr", "text"),
        ("timings.run", -1),
        ("usage.max_rss", 1.5),
        ("usage.pids_peak", 1.5),
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


# --- sessions: more of them in tests/runner/cli/test_call.py -----------------------------------------------


@pytest.fixture
def session_report(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> Any:
    for name in ("plugin.py", "rterm-plugin.json"):
        write_file(plugin_dir / name, (ROOT / "tests/plugins/rune_echo" / name).read_bytes(), 0o755)
    where = runner_as_user.home / "report.json"
    runner_as_user("call", "--report", where, plugin_dir, "echo")
    return json.loads(where.read_text())


def test_a_session_has_a_section(session_report: Any, launches: dict[str, Launch]) -> None:
    assert faults(session_report) == []
    assert "session" not in launches["success"].report
    assert faults({**session_report, "session": None}) == []
    described_keys = schema()["properties"]["session"]
    assert list(session_report["session"]) == list(described_keys["properties"]) == described_keys["required"]


@one_case(
    ("path", "value"),
    [
        ("session", []),
        ("session.identity", "somebody"),
        ("session.identity.id", None),
        ("session.calls.ok", -1),
        ("session.frames", 1.5),
        ("session.stdout_bytes", None),
        ("session.stderr_tail", None),
        ("session.dropped.events", "many"),
        ("session.counters.late", -1),
        ("session.host_calls.served", []),
        ("session.forced", None),
        ("timings.handshake", -1),
        ("timings.call", "long"),
    ],
)
def test_the_schema_refuses_in_a_session(session_report: Any, path: str, value: Any) -> None:
    *way, last = path.split(".")
    place = changed = copy.deepcopy(session_report)
    for step in way:
        place = place[step]
    place[last] = value
    assert faults(session_report) == [] and faults(changed) != []


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
    env: tuple[tuple[str, str], ...] = ()


STATE = '[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'
SPIN = "import time\nwhile time.process_time() < 0.3: pass"
HOG = "b = bytearray(256 << 20); b[::4096] = bytes([1]) * len(b[::4096])"

CASES = {
    "success": Case('echo "$TOKEN"', ("--env", f"TOKEN={CANARY}")),
    "failure": Case("exit 7"),
    "crash": Case("kill -SEGV $$"),
    "timeout": Case("echo ready; sleep 1000", ("--deadline", "1")),
    "state": Case("exit 0", manifest=STATE),
    "refusal": Case("exit 0", manifest='[plugin.sandbox]\nenabled = true\nfs_read_paths = ["/srv"]\n'),
    "invalid": Case("exit 0", head='id = "told"\n'),
    "not found": Case(""),
    "network": Case(
        "exit 0",
        manifest='[plugin.sandbox]\nenabled = true\nnetwork = "host"\n',
        env=(("NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW", "1"),),
    ),
    # Endings by limits.
    "memory": Case(f"exec /usr/bin/python3 -c '{HOG}'", ("--memory", "64M")),
    "memory of a child": Case(f"/usr/bin/python3 -c '{HOG}'; exit 0", ("--memory", "64M")),
    "processes": Case("for n in 1 2 3 4 5 6 7 8 9; do sleep 9 & done; wait", ("--pids", "6")),
    "processor time": Case("while :; do :; done", ("--cpu-time", "1500ms")),
    "share": Case(f"exec /usr/bin/python3 -c '{SPIN}'", ("--cpu", "0.1")),
    "file size": Case("exec dd if=/dev/zero of=/tmp/x bs=64k count=9", ("--limit", "file_size=65536")),
    "disk": Case(
        'cd "$RUNNER_STATE_DIR"\nfor n in 1 2 3 4 5 6 7 8; do dd if=/dev/zero of=$n bs=1M count=1; done\n'
        "sleep 1000",
        ("--limit", "disk=2M"),
        STATE,
    ),
    "output": Case("yes >&2", ("--limit", "output=4096")),
    "lines": Case("yes >&2", ("--limit", "output_lines=100")),
    "last words": Case("printf '%010000d' 1 >&2", ("--limit", "output=1000")),
    "everything": Case(
        "exit 0",
        tuple(
            word
            for name, value in {
                **dict.fromkeys(Limits._fields, "60"),
                **dict.fromkeys(SIZES, "64M"),
                "cpu": "0.5",
                "pids": "64",
                "message_queues": "64K",
            }.items()
            for word in ("--limit", f"{name}={value}")
        ),
        STATE,
    ),
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
        *("exec", "--report", str(where), "--state-dir", str(state), *case.options, str(folder)),
        env={"OTHER_SECRET": CANARY, **dict(case.env)},
        timeout=300,
    )
    return Launch(done.returncode, done.stdout, json.loads(where.read_text()))


def launch_in_time(caller: Caller, plugin_dir: Path, write_file: Write) -> tuple[Launch, int]:
    """The case "timeout", with a deadline by which the program has run: machines differ. With its seconds."""
    for seconds in (1, 4, 16, 64):
        CASES["late"] = CASES["timeout"]._replace(options=("--deadline", str(seconds)))
        done = launch(caller, plugin_dir, write_file, "late")
        if done.output == "ready\n":
            break
    return done, seconds


@one_case(
    ("name", "code", "cause", "status"),
    [
        ("success", "ok", "", 0),
        ("failure", "crashed", "exit:7", 7),
        ("crash", "crashed", "signal:11", 139),
        ("timeout", "timeout", "deadline", 124),
        ("state", "ok", "", 0),
        ("refusal", "policy_denied", "read_ceiling", 126),
        ("invalid", "manifest_invalid", None, 126),
        ("not found", "launch_failed", "not_found", 127),
        ("network", "ok", "", 0),
        ("everything", "ok", "", 0),
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
    if name == "timeout":
        done, _ = launch_in_time(runner_as, plugin_dir, write_file)
    else:
        done = launch(runner_as, plugin_dir, write_file, name)
    report = done.report
    assert faults(report) == []
    assert (report["schema"], report["runner"]) == (SCHEMA, __version__)
    assert report["outcome"]["code"] == code
    assert cause is None or report["outcome"]["cause"] == cause
    assert report["exit"]["status"] == done.status == status
    ran = name not in ("refusal", "invalid", "not found")
    assert (report["usage"] is not None) == ran
    assert ("run" in report["timings"]) == ran
    assert ("manifest" in report["timings"]) == (name != "invalid")
    assert (report["plugin"] is None) == (name == "invalid")
    if report["plugin"] is not None:
        assert report["plugin"]["id"] == "told" and report["plugin"]["version"] == "1.2.3"
    assert CANARY not in json.dumps(report)
    if report["grant"] is not None:
        # Every process has open_files, also if nobody asks for it.
        asked = [limit["name"] for limit in report["limits"] if limit["name"] != "open_files"]
        assert asked in ([], [name for name in report["grant"]["limits"] if name != "open_files"])
        weak = {limit["name"] for limit in report["limits"] if limit["degraded"]}
        weak |= {row["layer"] for row in report["layers"] if row["requested"] != row["effective"]}
        assert set(report["degraded"]) == weak


# What is told where a cgroup holds the limit, and where it does not: cause, status, limits hit.
Told = tuple[str, int | None, set[str]]
BY_LIMIT: dict[str, tuple[str, Told, Told]] = {
    "memory": ("memory", ("oom", 137, {"memory"}), ("exit:1", 1, set())),
    "memory of a child": ("memory", ("oom", None, {"memory"}), ("", 0, set())),
    "processes": ("pids", ("pids", 2, {"pids"}), ("exit:2", 2, set())),
    "processor time": ("cpu_time", ("cpu_time", 137, {"cpu_time"}), ("cpu_time", None, {"cpu_time"})),
    "share": ("cpu", ("", 0, {"cpu"}), ("", 0, set())),
    "file size": ("", ("file_size", 153, {"file_size"}), ("file_size", 153, {"file_size"})),
    "disk": ("", ("disk", 137, {"disk"}), ("disk", 137, {"disk"})),
    "output": ("", ("output", 137, {"output"}), ("output", 137, {"output"})),
    "lines": ("", ("output", 137, {"output_lines"}), ("output", 137, {"output_lines"})),
}


@one_case("name", BY_LIMIT)
@pytest.mark.usefixtures("nothing_left")
def test_a_report_of_each_limit(
    runner_as: Caller, plugin_dir: Path, write_file: Write, documented: set[tuple[str, str]], name: str
) -> None:
    done = launch(runner_as, plugin_dir, write_file, name)
    report = done.report
    assert faults(report) == []
    limit, by_cgroup, otherwise = BY_LIMIT[name]
    held = {each["name"]: each for each in report["limits"]}
    in_full = not limit or held[limit]["enforced_by"].startswith("cgroup")
    cause, status, hits = by_cgroup if in_full else otherwise
    assert (report["outcome"]["cause"], set(report["limits_hit"])) == (cause, hits), report
    assert status in (None, done.status) and report["exit"]["status"] == done.status
    if cause:
        assert (report["outcome"]["code"], re.sub(r":\d+", ":N", cause)) in documented
    if limit:
        assert held[limit]["degraded"] == (not in_full) == (limit in report["degraded"])
    for hit in hits & {"memory", "cpu_time", "disk", "output", "output_lines"}:
        peak, most = held[hit]["peak"], held[hit]["requested"]
        # Memory ends at its limit, give or take what the kernel holds back for each core.
        assert peak >= most * (0.9 if hit == "memory" else 1), held[hit]
    assert (report["stderr"] is not None) == (name in ("output", "lines"))
    if report["stderr"] is not None:
        assert report["stderr"]["dropped"] > 0
        assert report["stderr"]["tail"] == "y\n" * (2048 if name == "output" else 100)
    assert (report["usage"]["memory_peak"] is None) == (
        not held["memory"]["enforced_by"].startswith("cgroup")
    )


def test_what_was_printed_last_counts_too(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """Also if the plugin has ended before anybody looked."""
    report = launch(runner_as, plugin_dir, write_file, "last words").report
    assert faults(report) == []
    assert (report["outcome"]["cause"], report["limits_hit"]) == ("output", ["output"])
    assert report["exit"]["ended_by"] == "limit"
    assert (report["stderr"]["bytes"], report["stderr"]["dropped"]) == (10000, 9000)


def test_a_launch_that_takes_too_long(
    runner_as: Caller, plugin_dir: Path, write_file: Write, documented: set[tuple[str, str]]
) -> None:
    """A millisecond is over before bubblewrap is ready, unless the machine is elsewhere meanwhile."""
    CASES["launch"] = Case("sleep 1", ("--limit", "launch=1ms"))
    for _ in range(20):
        done = launch(runner_as, plugin_dir, write_file, "launch")
        assert faults(done.report) == []
        if done.status:
            break
    outcome = done.report["outcome"]
    assert (outcome["phase"], outcome["cause"]) == ("launch", "deadline")
    # timeout: the program had started, and bubblewrap had not let go yet.
    assert outcome["code"] in ("launch_failed", "timeout") and (outcome["code"], "deadline") in documented
    assert (done.status, done.report["exit"]["ended_by"], done.report["limits_hit"]) == (
        124,
        "launch",
        ["launch"],
    )


# --- report and reality ------------------------------------------------------------------------------------

ENDS_AS_TOLD = """\
import os, signal, sys, time
word, number = sys.argv[1], int(sys.argv[2])
if word == "handle":
    signal.signal(number, lambda *_: os._exit(0))
elif number not in (0, 9) and word != "exit":
    signal.signal(number, signal.SIG_DFL)
if word == "exit":
    os._exit(number)
elif word == "self" or (word == "child" and os.fork() == 0):
    os.kill(os.getpid() if word == "self" else os.getppid(), number)
    os._exit(0)
print("ready", flush=True)
time.sleep(1000)
"""
# All that end a process by default. SIGSTOP and the like do not, nor do those that are ignored.
FATAL = (*range(1, 17), *range(24, 28), 29, 30, 31, 34, 64)
SENT = (1, 2, 15)  # to the runner


@pytest.mark.broad
@pytest.mark.usefixtures("nothing_left")
def test_report_and_reality_agree_on_who_ended_it(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "run", f"#!/usr/bin/python3 -I\n{ENDS_AS_TOLD}", 0o755)
    write_file(plugin_dir / "nexo-plugin.toml", nexo("t"))
    where = runner_as.home / "report.json"
    rows = [
        *(("exit", code) for code in (0, 1, 7, 126, 127, 128, 129, 137, 192, 193, 255)),
        *(("self", number) for number in FATAL),
        *(("child", number) for number in (1, 9, 11, 15)),
        *((how, number) for how in ("obey", "handle") for number in SENT),
    ]

    def check(row: tuple[str, int], _: object) -> None:
        word, number = row
        with runner_as.start("exec", "--report", where, plugin_dir, "--", word, str(number)) as process:
            if word in ("obey", "handle"):
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
                process.send_signal(number)
            process.communicate(timeout=60)
        report = json.loads(where.read_text())
        outcome, ended = report["outcome"], report["exit"]
        code = {"exit": number, "handle": 0}.get(word, 128 + number)
        sent = word in ("obey", "handle")
        assert faults(report) == []
        assert (process.returncode, ended["status"], ended["code"]) == (code, code, code)
        assert (ended["ended_by"], ended["signal"]) == (("signal", number) if sent else (None, None))
        assert not ended["forced"] and not ended["left"] and ended["reached_exec"]
        # bubblewrap tells 128+N for signal N, and for a program that returns it.
        cause = "" if code == 0 else f"signal:{code - 128}" if 128 < code <= 192 else f"exit:{code}"
        cause = "seccomp" if code == 128 + 31 else cause
        told = "ok" if code == 0 else "cancelled" if sent else "crashed"
        assert (outcome["code"], outcome["cause"], report["limits_hit"]) == (told, cause, [])

    check_rows([(row, None) for row in rows], check)


def test_a_signal_that_is_not_obeyed(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "run", "#!/bin/sh\ntrap '' TERM\necho ready\nwhile :; do sleep 1; done\n", 0o755)
    write_file(plugin_dir / "nexo-plugin.toml", nexo("t"))
    where = runner_as.home / "report.json"
    process = runner_as.start("exec", "--report", where, "--limit", "teardown=100ms", plugin_dir)
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.terminate()
        process.communicate(timeout=60)
    report = json.loads(where.read_text())
    assert faults(report) == []
    assert report["outcome"]["cause"] == "signal:15" and report["outcome"]["phase"] == "teardown"
    assert (report["exit"]["ended_by"], report["exit"]["forced"]) == ("signal", True)
    assert report["limits_hit"] == ["teardown"]


@pytest.mark.needs("root")
def test_a_limit_that_is_required_and_cannot_be_held(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    policy = write_file(plugin_dir / "policy.toml", 'version = 1\n[limits.memory]\ndefault = "1G"\n')
    CASES["required"] = Case("exit 0", ("--policy", str(policy)))
    done = launch(with_read_only_groups(runner_as), plugin_dir, write_file, "required")
    assert faults(done.report) == []
    outcome = done.report["outcome"]
    assert (outcome["code"], outcome["cause"], done.status) == ("sandbox_unavailable", "memory", 125)
    assert 'mode = "prefer" under [limits.memory]' in outcome["hint"]
    assert done.report["grant"]["limits"]["memory"] == 1 << 30
    assert (done.report["limits"], done.report["degraded"]) == ([], [])


def test_who_cannot_be_killed_is_named() -> None:
    """Nobody here can hang a process in the kernel at will: the ending is made up, the report is not."""
    granted = Grant("default", False, (), Network(), (), "default", Limits(), (), ())
    end = End(Exit(None, True, None, Usage(1.0, 0.0, 0.0, 0), left=(7, 8)), "deadline", None, True)
    outcome, status = judge(end, Limits())
    plugin = Plugin("odd", "1", "nexo", "Odd", "", "/nowhere", None, None, SandboxSpec())
    decided = Decided(Loaded(Invocation("/nowhere"), plugin), Policy("default", "/policy.toml"), granted)
    plan = LaunchPlan(
        (), "/", (), (), False, Layers(b"", True, True, True, None), "default", Limits(), *((),) * 4
    )
    provision = Provision(False, None, (), "", "", (), ())
    planned = Planned(decided, plan, "/usr/bin/bwrap", (), AssignedLimits(), 0, provision)
    cell: Any = SimpleNamespace(audit=None, observation=lambda: None)
    started = Started(planned, cell, Clocks(), (), Plumbing((0, 1, 2), ("direct", "direct", "direct")))
    told = account.report(Ended(started, end), outcome, status)
    assert faults(told) == []
    assert (told["exit"]["kill_incomplete"], told["exit"]["left"]) == (True, [7, 8])


@pytest.fixture
def documented() -> set[tuple[str, str]]:
    """Code and cause, as the page has them."""
    page = (ROOT / "docs/report.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (`[^|]+) \|", page, re.MULTILINE)
    found = {(code, cause) for code, causes in rows for cause in re.findall(r"`([^`]+)`", causes)}
    assert len(found) > 15
    return found


def test_values_of_variables_are_not_in_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    done = launch(runner_as, plugin_dir, write_file, "success")
    assert done.output == f"{CANARY}\n"  # the plugin has it
    assert "TOKEN" in done.report["grant"]["env"]
    assert CANARY not in json.dumps(done.report)


def test_a_refusal_names_rule_and_position(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    report = launch(runner_as, plugin_dir, write_file, "refusal").report
    (denial,) = report["grant"]["denials"]
    assert (denial["rule"], denial["asked"], denial["required"]) == ("read_ceiling", "/srv", True)
    file, line, column = denial["where"].rsplit(":", 2)
    text = Path(file).read_text().splitlines()[int(line) - 1]
    assert "/srv" in text[int(column) - 1 :]
    assert report["exit"]["reached_exec"] is False and report["exit"]["code"] is None


def test_a_timeout_names_clock_and_limit(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    done, seconds = launch_in_time(runner_as, plugin_dir, write_file)
    report = done.report
    assert report["exit"] == {
        "status": 124,
        "code": None,
        "reached_exec": True,
        "ended_by": "deadline",
        "signal": None,
        "forced": True,
        "kill_incomplete": False,
        "left": [],
    }
    assert report["grant"]["limits"]["deadline"] == seconds
    (deadline,) = (limit for limit in report["limits"] if limit["name"] == "deadline")
    assert deadline["peak"] > seconds * 0.9  # a moment passes before anybody counts
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
