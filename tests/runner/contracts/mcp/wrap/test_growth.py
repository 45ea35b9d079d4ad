"""`runner check` warns of variables that an entry got since it was wrapped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Caller

Write = Callable[..., Path]


@pytest.mark.parametrize("shape", ["env", "envFile"])
def test_check_warns_and_wrap_adds(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write, shape: str
) -> None:
    program = write_file(plugin_dir / "server", "#!/bin/sh\n", 0o755)
    entry = {"command": str(program), "env": {"A": "1"}, "envFile": "${workspaceFolder}/.env"}
    path = write_file(plugin_dir / "project/.cursor/mcp.json", json.dumps({"mcpServers": {"tool": entry}}))
    env_file = write_file(plugin_dir / "project/.env", "# names\nexport B=2\n")
    runner_as_user.give(plugin_dir / "project")
    assert runner_as_user("wrap", path, "--yes").returncode == 0
    before = runner_as_user("check", path)
    assert "wrapped_without_variable" not in before.stdout
    if shape == "env":
        path.write_text(path.read_text().replace('"A": "1"', '"A": "1", "NEW": "2"'))
    else:
        env_file.write_text("B=2\nNEW=3\n")
    done = runner_as_user("check", path)
    assert "wrapped_without_variable: 'tool' was wrapped without the variable 'NEW'" in done.stdout
    assert f"runner wrap {path} --server tool" in done.stdout
    assert done.returncode == before.returncode
    assert runner_as_user("wrap", path, "--server", "tool", "--yes").returncode == 0
    args = json.loads(path.read_text())["mcpServers"]["tool"]["args"]
    assert [args[i + 1] for i, word in enumerate(args) if word == "--env"] == ["A", "B", "NEW"]
    assert "wrapped_without_variable" not in runner_as_user("check", path).stdout


def test_a_file_that_holds_credentials_is_not_looked_at(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """A line of a key looks like a variable: its name would be shown, and written into the configuration."""
    key = write_file(runner_as_user.home / ".ssh/id", "AAAAkeyMaterial=\n")
    entry = {"command": "/bin/cat", "envFile": ""}
    for name in (str(key), "~/.ssh/id", "${workspaceFolder}/link"):
        text = json.dumps({"servers": {"tool": {**entry, "envFile": name}}})
        path = write_file(plugin_dir / "project/.vscode/mcp.json", text)
        (plugin_dir / "project/link").unlink(missing_ok=True)
        (plugin_dir / "project/link").symlink_to(key)
        shown = runner_as_user("wrap", path, "--dry-run")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "will run in a cage" in shown.stdout and "keyMaterial" not in shown.stdout


def test_a_file_that_a_launch_would_not_read_is_not_looked_at(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """A project's configuration may name any file, by a path, a link or a second name of it."""
    project = plugin_dir / "project"
    outside = write_file(plugin_dir / "notes", "SECRETNAME=1\n")
    inside = write_file(project / ".env", "SHOWN=1\nnot a variable\n1BAD=2\n")
    (project / "link").symlink_to(outside)
    os.link(outside, project / "second")

    def shown(name: str) -> str:
        text = json.dumps({"servers": {"tool": {"command": "/bin/cat", "envFile": name}}})
        path = write_file(project / ".vscode/mcp.json", text)
        done = runner_as_user("wrap", path, "--dry-run")
        assert (done.returncode, done.stderr) == (0, "")
        assert "will run in a cage" in done.stdout
        return str(done.stdout)

    for name in (str(inside), ".env", "${workspaceFolder}/.env"):
        told = shown(name)
        assert "SHOWN" in told and "BAD" not in told and "not a variable" not in told
    for name in (str(outside), "../notes", "link", "${workspaceFolder}/second"):
        assert "SECRETNAME" not in shown(name)
