"""runner explain: what people read, what programs read, and the line that can be tried."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SYSTEM_PATH, Caller
from tests.manifests import SANDBOX, nexo
from tests.sandbox.doctor.groups import with_read_only_groups
from tests.tables import one_case

Write = Callable[..., Path]

DEFAULT_HOST = [
    *("broker.*", "memory.*", "llm.*"),
    *(
        "host/snapshot/*",
        "host/event_stream_*",
        "host/log",
        "host/workspace_list",
        "host/workspace_get_active",
    ),
]

NEXO = nexo("tried", version="1.2.3") + SANDBOX


@pytest.fixture
def plugin(plugin_dir: Path, write_file: Write) -> Path:
    write_file(plugin_dir / "run", "#!/bin/sh\nid -u; pwd; cat /etc/passwd | wc -l; exit 5\n", 0o755)
    write_file(plugin_dir / "nexo-plugin.toml", NEXO)
    return plugin_dir


def test_asked_granted_refused(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    more = 'fs_read_paths = ["/usr/share", "/srv"]\nfs_write_paths = ["${state_dir}"]\nnetwork = "host"\n'
    write_file(plugin / "nexo-plugin.toml", NEXO + more)
    said = runner_as("explain", plugin)
    assert said.returncode == 21 and said.stderr == ""
    rows = {
        line.split()[1]: line
        for line in said.stdout.splitlines()
        if line.startswith("  ") and " " in line.strip()
    }
    assert "granted" in rows["/usr/share"] and "granted" in rows["${state_dir}"]
    assert "REFUSED" in rows["/srv"] and "read_ceiling" in rows["/srv"]
    assert f"{plugin}/nexo-plugin.toml:11:32" in rows["/srv"]
    assert "REFUSED" in rows["host"] and "network_ceiling" in rows["host"]
    assert "It would NOT be launched: policy_denied" in said.stdout
    assert runner_as("exec", plugin).returncode == 126


def test_explain_says_what_a_failed_hook_does(
    runner_as_user: Caller, plugin: Path, write_file: Write
) -> None:
    assert "hook" not in runner_as_user("explain", plugin).stdout
    hooks = NEXO.replace("[plugin.entry", '[plugin.extends]\nhooks = ["before_message"]\n[plugin.entry')
    write_file(plugin / "nexo-plugin.toml", hooks)
    assert "if a hook fails: continue (on_failure" in runner_as_user("explain", plugin).stdout


def test_explain_shows_the_other_declarations_of_a_manifest(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    manifest = {
        "name": "tried",
        "version": "1.0.0",
        "kaged_api": 1,
        "description": "d",
        "command": ["/bin/true"],
        "hooks": ["pre_compact"],
        "roles": ["observer", "compactor"],
        "hook_timeout_sec": 7,
        "config_schema": {"type": "object", "properties": {"most": {"type": "integer"}}},
        "knobs": {
            "most": {
                "type": "int_range",
                "label": "m",
                "binds_to": "config.most",
                "min": 1,
                "max": 9,
                "default": 5,
            }
        },
    }
    write_file(plugin_dir / "kaged-plugin.yaml", json.dumps(manifest))
    said = runner_as_user("explain", plugin_dir).stdout
    assert "\nroles:\n  observer\n  compactor\n" in said
    assert "\nknobs:\n  most  config.most  int_range 1 to 9  default 5\n" in said
    at = said.index("time limits of the contract and the manifest:")
    assert said[at:].split()[8:16] == ["handshake", "10", "s", "call", "60", "s", "hook", "7"]
    document = json.loads(runner_as_user("explain", "--format", "json", plugin_dir).stdout)
    assert document["timeouts"] == {"handshake": 10.0, "call": 60.0, "hook": 7.0, "shutdown": 5.0}
    assert document["declarations"]["roles"] == [["observer"], ["compactor"]]


def test_nothing_is_changed(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO + 'fs_write_paths = ["${state_dir}"]\n')
    runner_as.give(plugin)
    state = plugin / "state"
    said = runner_as("explain", "--state-dir", state, plugin)
    assert said.returncode == 0 and "made at launch" in said.stdout
    assert not state.exists()


@one_case(
    ("policy", "declare", "host"),
    [("default", ["*"], DEFAULT_HOST), ("strict", [], []), ("dev", ["*"], ["*"])],
)
def test_what_it_may_say_to_its_host(
    runner_as: Caller, plugin: Path, policy: str, declare: list[str], host: list[str]
) -> None:
    said = runner_as("explain", "--policy", policy, plugin).stdout.splitlines()
    at = said.index("capabilities:")
    assert said[at + 1].split() == ["may", "declare", *(declare or ["nothing"])]
    # People read those of the contract, programs the policy's own.
    own = [pattern for pattern in host if not pattern.startswith("host/")]
    told = ["may", "ask", "of", "its", "host", *(own or ["nothing"])]
    assert " ".join(said[at + 2 :]).split()[: len(told)] == told
    document = json.loads(runner_as("explain", "--format", "json", "--policy", policy, plugin).stdout)
    assert document["capabilities"] == {"declare": declare, "host": host}


def test_a_server_has_no_methods_of_other_contracts(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    entry = {"mcpServers": {"a": {"command": "/usr/bin/true"}}}
    config = write_file(plugin_dir / "mcp.json", json.dumps(entry))
    said = runner_as("explain", config).stdout
    assert re.search(r"may ask of its host  nothing$", said, re.MULTILINE)
    assert re.search(r"^  seccomp +default +sha256:[0-9a-f]{12}…$", said, re.MULTILINE)


def test_for_programs(runner_as: Caller, plugin: Path) -> None:
    said = runner_as("explain", "--format", "json", "--env", "TOKEN=s3cret", plugin)
    document = json.loads(said.stdout)
    assert document["schema"] == "runner.explain.v1"
    assert document["plugin"]["id"] == "tried" and document["outcome"]["code"] == "ok"
    assert "TOKEN" in document["grant"]["env"] and {"seccomp", "uid"} <= {
        row["layer"] for row in document["layers"]
    }
    refused = runner_as("explain", "--format", "json", "--policy", "nope", plugin)
    assert json.loads(refused.stdout)["capabilities"] is None  # there is no policy to ask
    assert refused.returncode == 26 and json.loads(refused.stdout)["outcome"]["code"] == "policy_invalid"


@pytest.mark.needs("user")
def test_the_line_does_in_bash_what_exec_does(runner_as_user: Caller, plugin: Path) -> None:
    line = runner_as_user("explain", "--format", "argv", plugin).stdout
    by_hand = subprocess.run(
        [*runner_as_user.prefix, "/bin/bash", "-c", line],
        env={"PATH": SYSTEM_PATH},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    ran = runner_as_user("exec", plugin)
    assert (
        (by_hand.returncode, by_hand.stdout) == (ran.returncode, ran.stdout) == (5, f"65534\n{plugin}\n2\n")
    )


def test_names_of_strangers_cannot_paint_the_terminal(
    runner_as_user: Caller, plugin: Path, write_file: Write
) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO + 'fs_write_paths = ["/srv/\\u001b[2Jx"]\n')
    for verb in ("explain", "exec"):
        said = runner_as_user(verb, plugin)
        assert "\x1b" not in said.stdout + said.stderr and "x1b" in said.stdout + said.stderr


@one_case("verb", ["explain", "exec"])
def test_without_a_cage_it_says_so_in_capitals(
    runner_as: Caller, plugin: Path, write_file: Write, verb: str
) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO.replace("enabled = true", "enabled = false"))
    policy = write_file(runner_as.home / "policy.toml", 'version = 1\nunsandboxed = "allow"\n', 0o600)
    runner_as.give(policy)
    report = runner_as.home / "report.json"
    more = ("--report", report) if verb == "exec" else ()
    said = runner_as(verb, "--policy", policy, *more, plugin)
    assert "UNSANDBOXED" in said.stdout + said.stderr
    if verb == "exec":
        assert said.stdout.splitlines()[0] == str(os.geteuid() if runner_as.name == "root" else runner_as.uid)
        document = json.loads(report.read_text())
        assert document["grant"]["unsandboxed"] is True
        assert {row["effective"] for row in document["layers"] if row["layer"] == "seccomp"} == {"NONE"}
    # The control: the same manifest under the default policy is in a cage.
    said = runner_as(verb, plugin)
    assert "UNSANDBOXED" not in said.stdout + said.stderr
    if verb == "exec":
        assert said.stdout.splitlines()[0] == "65534"


# --- limits ---


def limits(said: str) -> dict[str, list[str]]:
    """By name: how much, whose word, what holds it, and the rest of the line."""
    lines = said.partition("\nlimits:\n")[2].partition("\n\n")[0].splitlines()
    return {row[0]: row[1:] for row in (re.split(r"  +", line.strip()) for line in lines)}


ASKED = """\
[plugin.limits]
memory = "512M"
pids = 100
cpu = 2
open_files = 64
file_size = "3M"
disk = "2M"
call = "30s"
"""
DECIDING = """\
version = 1
[limits.memory]
ceiling = "256M"
mode = "prefer"
[limits.pids]
ceiling = 200
mode = "prefer"
[limits.cpu]
ceiling = 4
mode = "prefer"
[limits.shm]
default = "8M"
[limits.output]
default = "1M"
"""


def test_whose_word_each_limit_is(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    """The lowest of three: each of them decides something."""
    write_file(plugin / "nexo-plugin.toml", NEXO + ASKED)
    policy = write_file(plugin / "policy.toml", DECIDING)
    options = (
        "--policy",
        policy,
        "--cpu",
        "0.5",
        "--pids",
        "150",
        "--deadline",
        "90",
        "--limit",
        "output=2M",
    )
    said = runner_as("explain", *options, plugin)
    assert said.returncode == 0, said.stderr
    found = {name: row[:2] for name, row in limits(said.stdout).items()}
    assert found == {
        "memory": ["256 MiB", "policy"],
        "pids": ["100", "manifest"],
        "cpu": ["0.5 cores", "command line"],
        "open_files": ["64", "manifest"],
        "file_size": ["3 MiB (in effect 2 MiB)", "manifest"],
        "disk": ["2 MiB", "manifest"],
        "tmp": ["256 MiB", "policy"],
        "shm": ["8 MiB", "policy"],
        "output": ["2 MiB", "command line"],
        "call": ["30s", "manifest"],
        "deadline": ["1m30s", "command line"],
    }
    held = {name: row[2] for name, row in limits(said.stdout).items()}
    assert (held["open_files"], held["tmp"], held["deadline"]) == ("rlimit", "size of the mount", "clock")
    assert (held["call"], held["output"]) == ("caller", "runner")
    asked = {line.split()[1]: line for line in said.stdout.splitlines() if line.startswith("  limit ")}
    assert "lowered  256 MiB, by the policy" in asked["memory"] and "limit_ceiling" in asked["memory"]
    assert "lowered  0.5 cores, by the command line" in asked["cpu"]
    assert asked["pids"].endswith("granted")


@pytest.mark.parametrize("weak", [False, pytest.param(True, marks=pytest.mark.needs("root"))])
def test_what_holds_each_limit_is_what_a_launch_reports(
    runner_as: Caller, plugin: Path, write_file: Write, weak: bool
) -> None:
    """Also where nobody can make groups: then it says what is weak, and why."""
    caller = with_read_only_groups(runner_as) if weak else runner_as
    write_file(plugin / "nexo-plugin.toml", NEXO + ASKED)
    policy = write_file(plugin / "policy.toml", DECIDING)
    where = runner_as.home / "report.json"
    told = json.loads(caller("explain", "--format", "json", "--policy", policy, plugin).stdout)
    assert caller("exec", "--policy", policy, "--report", where, plugin).returncode == 5
    report = json.loads(where.read_text())
    promised, kept = (
        [{key: row[key] for key in row if key not in ("peak", "effective")} for row in document["limits"]]
        for document in (told, report)
    )
    assert promised == kept and promised
    assert told["degraded"] == report["degraded"]
    rows = limits(caller("explain", "--policy", policy, plugin).stdout)
    for limit in promised:
        assert rows[limit["name"]][2] == (limit["enforced_by"] or "nothing")
        assert rows[limit["name"]][3:] == [
            ": ".join(filter(None, ("DEGRADED" if limit["degraded"] else "", limit["detail"])))
        ] or (not limit["degraded"] and not limit["detail"])
    if weak:
        assert told["degraded"] == ["memory", "pids", "cpu"]
        assert rows["memory"][2] == "RLIMIT_DATA" and rows["memory"][3].startswith(
            "DEGRADED: for each process"
        )
        assert rows["cpu"][2] == "nothing"


@pytest.mark.needs("root")
def test_a_limit_that_is_required_and_cannot_be_held(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    policy = write_file(plugin / "policy.toml", "version = 1\n[limits.pids]\ndefault = 50\n")
    said = with_read_only_groups(runner_as)("explain", "--policy", policy, "--deadline", "9", plugin)
    assert said.returncode == 22
    rows = limits(said.stdout)
    assert rows["pids"] == ["50", "policy", "CANNOT BE HELD"]
    assert rows["deadline"] == ["9s", "command line"]
    assert "It would NOT be launched: sandbox_unavailable: the pids limit cannot be enforced" in said.stdout
    assert 'mode = "prefer" under [limits.pids]' in said.stdout.splitlines()[-1]


def test_without_a_cage_limits_that_are_walls_are_gone(
    runner_as_user: Caller, plugin: Path, write_file: Write
) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO.replace("enabled = true", "enabled = false"))
    policy = write_file(plugin / "policy.toml", 'version = 1\nunsandboxed = "allow"\n')
    runner_as_user.give(policy)
    rows = limits(runner_as_user("explain", "--policy", policy, plugin).stdout)
    assert rows["tmp"][2:] == rows["shm"][2:] == ["nothing", "DEGRADED: the plugin runs without a cage"]
