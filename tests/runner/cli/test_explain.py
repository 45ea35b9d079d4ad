"""runner explain: what people read, what programs read, and the line that can be tried."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SYSTEM_PATH, Caller

Write = Callable[..., Path]

NEXO = """\
[plugin]
id = "tried"
version = "1.2.3"
name = "Tried"
description = "d"
min_nexo_version = ">=0.1"
[plugin.entrypoint]
command = "./run"
[plugin.sandbox]
enabled = true
"""


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


def test_nothing_is_changed(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO + 'fs_write_paths = ["${state_dir}"]\n')
    runner_as.give(plugin)
    state = plugin / "state"
    said = runner_as("explain", "--state-dir", state, plugin)
    assert said.returncode == 0 and "made at launch" in said.stdout
    assert not state.exists()


def test_for_programs(runner_as: Caller, plugin: Path) -> None:
    said = runner_as("explain", "--format", "json", "--env", "TOKEN=s3cret", plugin)
    document = json.loads(said.stdout)
    assert document["schema"] == "runner.explain.v1"
    assert document["plugin"]["id"] == "tried" and document["outcome"]["code"] == "ok"
    assert "TOKEN" in document["grant"]["env"] and {"seccomp", "uid"} <= {
        row["layer"] for row in document["layers"]
    }
    refused = runner_as("explain", "--format", "json", "--policy", "nope", plugin)
    assert refused.returncode == 20 and json.loads(refused.stdout)["outcome"]["code"] == "manifest_invalid"


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


@pytest.mark.parametrize("verb", ["explain", "exec"])
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
