"""Servers of hosts' configurations, launched: what is filled in, what is withheld, what is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.mcp.hosts.find import place_of
from tests.conftest import Caller
from tests.runner.contracts.mcp.hosts.test_hosts import FILES, HOME, SAMPLES
from tests.tables import one_case

Write = Callable[..., Path]
ECHO = "/bin/echo"


def entry(**keys: Any) -> dict[str, Any]:
    return {"command": ECHO, "args": [], **keys}


@pytest.mark.usefixtures("nothing_left")
def test_variables_are_withheld_until_they_are_allowed(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    file = write_file(
        plugin_dir / ".mcp.json",
        json.dumps(
            {"mcpServers": {"one": entry(args=["${SECRET}", "${TERM}", "${HOME}", "${OTHER:-else}"])}}
        ),
    )
    env = {"SECRET": "s3cret", "TERM": "dumb", "OTHER": "0ther"}
    withheld = runner_as("exec", file, env=env)
    assert withheld.stdout == f"${{SECRET}} dumb {runner_as.home} else\n", withheld.stderr
    [line] = [line for line in withheld.stderr.splitlines() if "withheld" in line]
    assert "SECRET, OTHER" in line and "runner allow" in withheld.stderr and "s3cret" not in withheld.stderr
    assert runner_as("exec", "--env", "SECRET", file, env=env).stdout.startswith("s3cret dumb")
    allowed = runner_as("allow", "--yes", file, env=env)
    assert allowed.returncode == 0 and "SECRET" in allowed.stdout + allowed.stderr, allowed.stderr
    given = runner_as("exec", file, env=env)
    assert given.stdout == f"s3cret dumb {runner_as.home} 0ther\n" and "withheld" not in given.stderr
    # Only the words have it: the variable itself was not asked for.
    write_file(
        file, json.dumps({"mcpServers": {"one": {"command": "/usr/bin/env", "env": {"A": "${SECRET}"}}}})
    )
    runner_as("allow", "--yes", file, env=env)
    assert "A=s3cret" in (printed := runner_as("exec", file, env=env).stdout) and "SECRET=" not in printed


@pytest.mark.usefixtures("nothing_left")
def test_vscode_reads_comments_an_env_file_and_the_projects_folder(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / ".env", "export TOKEN='from the file' # why\nOVER=file\n")
    file = write_file(
        plugin_dir / ".vscode/mcp.json",
        """// servers
        {"servers": {"one": {"command": "/usr/bin/env", "envFile": "${workspaceFolder}/.env",
            "env": {"OVER": "entry", "KEY": "${input:key}", "WHERE": "${workspaceFolder}"},},},}""",
    )
    runner_as.give(plugin_dir)
    done = runner_as("exec", file)
    lines = done.stdout.splitlines()
    assert "TOKEN=from the file" in lines and "OVER=entry" in lines and "KEY=" in lines, done.stderr
    assert f"WHERE={plugin_dir}" in lines
    assert "input:key" in done.stderr


ATTACKS = (
    "/etc/shadow",
    "~/.ssh/id_rsa",
    "../outside",
    "link",
    "deep/../../outside",
    "hard",
    "missing",
    "fifo",
)


@one_case("named", ATTACKS)
def test_a_cloned_project_cannot_read_files_outside_of_it(
    runner_as: Caller, plugin_dir: Path, write_file: Write, named: str
) -> None:
    key = write_file(runner_as.home / ".ssh/id_rsa", "KEY=stolen\n")
    outside = write_file(plugin_dir / "outside", "KEY=stolen\n")
    project = plugin_dir / "project"
    write_file(project / "inside", "KEY=mine\n")
    (project / "deep").mkdir()
    (project / "link").symlink_to(key)
    (project / "inner").symlink_to("inside")
    os.mkfifo(project / "fifo")
    os.link(outside, project / "hard")
    file = project / ".vscode/mcp.json"

    def env_file(name: str) -> None:
        server = {"command": "/usr/bin/env", "envFile": name}
        write_file(file, json.dumps({"servers": {"one": server}}))
        runner_as.give(plugin_dir)

    env_file(named)
    done = runner_as("exec", file)
    assert done.returncode != 0 and "KEY=" not in done.stdout and "stolen" not in done.stderr
    assert "file_unusable" in done.stderr and "mcp.json:1:" in done.stderr and "Traceback" not in done.stderr
    for good in ("inside", "${workspaceFolder}/inside", "inner"):  # the same within the project
        env_file(good)
        assert "KEY=mine" in runner_as("exec", file).stdout


def test_a_users_own_configuration_may_name_other_files_but_no_credentials(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(runner_as.home / ".ssh/id_rsa", "KEY=stolen\n")
    outside = write_file(plugin_dir / "outside", "KEY=mine\n")
    file = runner_as.home / ".config/Code/User/mcp.json"
    for named, ok in ((str(outside), True), ("~/.ssh/id_rsa", False)):
        write_file(file, json.dumps({"servers": {"one": {"command": "/usr/bin/env", "envFile": named}}}))
        runner_as.give(runner_as.home / ".config")
        done = runner_as("exec", file)
        assert ("KEY=mine" in done.stdout) == ok and "stolen" not in done.stdout, done.stderr


def test_the_content_of_a_file_in_a_word(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "key.txt", "k3y\n")
    file = write_file(
        plugin_dir / "opencode.jsonc",
        """{"mcp": {"one": {"type": "local", "command": ["/bin/sh", "-c", "echo $A"],
        "environment": {"A": "{file:./key.txt} {env:X}|"},}}}""",
    )
    runner_as.give(plugin_dir)
    assert runner_as("exec", file).stdout == "k3y |\n"
    write_file(plugin_dir / "big", "x" * 70_000)
    file.write_text(file.read_text().replace("key.txt", "big"))
    assert "more than 65536 bytes" in runner_as("exec", file).stderr


def test_disabled_and_remote_servers(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    servers = {"on": entry(), "off": entry(disabled=True), "far": {"url": "https://mcp.example.com"}}
    file = write_file(plugin_dir / ".cursor/mcp.json", json.dumps({"mcpServers": servers}))
    done = runner_as_user("check", file)
    assert done.returncode == 0, done.stdout
    assert f"{file}: ok: on (mcp), off (mcp), of Cursor" in done.stdout
    assert "'far' is reached over the network" in done.stdout and "'off' is disabled" in done.stdout
    far = runner_as_user("explain", "--server", "far", file)
    assert far.returncode != 0 and "over the network" in far.stderr
    write_file(file, json.dumps({"mcpServers": {"far": servers["far"]}}))
    assert runner_as_user("check", file).returncode == 0
    write_file(file, json.dumps({"mcpServers": {"off": servers["off"]}}))
    refused = runner_as_user("explain", file)
    assert refused.returncode != 0 and "--server 'off'" in refused.stderr
    assert runner_as_user("explain", "--server", "off", file).returncode == 0


CHECKED = [(sample, sample.places[-1 if "/src" in sample.places[-1] else 0]) for sample in SAMPLES]


@one_case(("sample", "place"), CHECKED, ids=[f"{s.host}-{s.file}" for s, _ in CHECKED])
def test_check_names_the_host_of_every_file(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write, sample: Any, place: str
) -> None:
    if not place.startswith((HOME, "/src/")):
        pytest.fail(place)
    base = runner_as_user.home if place.startswith(HOME) else plugin_dir
    file = base / place.removeprefix(HOME).removeprefix("/src/shop").lstrip("/")
    write_file(file, (FILES / sample.file).read_text())
    [checked] = json.loads(runner_as_user("check", "--format", "json", file).stdout)["files"]
    assert checked["origin"] == sample.host
    faults = {each["rule"] for each in checked["diagnostics"] if each["severity"] == "error"}
    assert faults <= {"entrypoint_missing"}, checked["diagnostics"]  # they are not installed here
    assert "unknown_key" not in {each["rule"] for each in checked["diagnostics"]}
    found = place_of(str(file), str(runner_as_user.home))
    assert found is not None and found.own == place.startswith(HOME)


def test_manifests_of_other_contracts_stay_theirs(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    for name in ("settings.json", "config.toml", "config.yaml"):
        file = write_file(plugin_dir / name, "{}" if name.endswith("json") else "a: 1" if "y" in name else "")
        assert "not a manifest of a known contract" in runner_as_user("check", file).stdout
    file = write_file(plugin_dir / "manifest.toml", '[mcp_servers.x]\ncommand = "x"\n')
    assert "(mcp)" not in runner_as_user("check", file).stdout
