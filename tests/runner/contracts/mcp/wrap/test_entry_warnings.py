"""`runner check` reports variables that an entry got since it was wrapped: they act on the runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Caller

Write = Callable[..., Path]


def test_check_reports_and_wrap_mends(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    program = write_file(plugin_dir / "server", "#!/bin/sh\n", 0o755)
    entry: dict[str, Any] = {"command": str(program), "args": [], "env": {"A": "1"}}
    path = write_file(plugin_dir / "project/.cursor/mcp.json", json.dumps({"mcpServers": {"tool": entry}}))
    runner_as_user.give(plugin_dir / "project")

    def read() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text())["mcpServers"]["tool"]
        return found

    assert runner_as_user("wrap", path, "--yes").returncode == 0
    assert "wrapped_" not in runner_as_user("check", path).stdout
    grown = read()
    grown["env"]["NEW"], grown["envFile"] = "2", "/srv/.env"
    grown["args"][3:3] = ["--memory", "1G", "--read", "/data"]
    path.write_text(json.dumps({"mcpServers": {"tool": grown}}))
    done = runner_as_user("check", path)
    told = " ".join(done.stdout.split())
    assert (
        "wrapped_unsafely: 'tool' looks wrapped, but these act on the runner itself: 'NEW', 'envFile'" in told
    )
    assert f"runner wrap {path} --server tool" in told
    assert done.returncode != 0
    assert runner_as_user("wrap", path, "--server", "tool", "--yes").returncode == 0
    mended = read()
    assert mended["env"] == {"PLUGIN_ENV_A": "1", "PLUGIN_ENV_NEW": "2"}
    assert mended["envFile"] == "/dev/null"
    # A limit stays. What gives the server something does not: that is said by runner allow.
    assert mended["args"][3:] == [
        *("--name", "tool", "--env-file=/srv/.env", "--memory", "1G", "--", str(program)),
    ]
    assert "wrapped_unsafely" not in runner_as_user("check", path).stdout
    assert runner_as_user("wrap", path, "--undo", "--yes").returncode == 0
    assert read() == {**entry, "env": {"A": "1", "NEW": "2"}, "envFile": "/srv/.env"}


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
