"""`runner wrap` as people run it, and the host that starts what it wrote."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.outcome import EXIT
from tests.conftest import Caller
from tests.tables import one_case

Write = Callable[..., Path]
CONFIGS = Path(__file__).parent / "configs"
SECRET = "s3cr3t-value"


@pytest.fixture
def config(plugin_dir: Path, write_file: Write, runner_as_user: Caller) -> Path:
    text = {
        "mcpServers": {
            "tool": {"command": "/opt/tool", "args": ["-v"], "env": {"TOKEN": SECRET}},
            "web": {"url": "https://example.com/mcp"},
        }
    }
    path = write_file(plugin_dir / "project/.cursor/mcp.json", json.dumps(text, indent=2))
    runner_as_user.give(plugin_dir / "project")
    return path


def test_dry_run_shows_and_changes_nothing(runner_as_user: Caller, config: Path) -> None:
    before = config.read_bytes()
    done = runner_as_user("wrap", config, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "tool: will run in a cage" in done.stdout
    assert "web: stays as it is: it is reached over the network" in done.stdout
    assert '+        "--wrapped",' in done.stdout
    assert SECRET not in done.stdout
    assert config.read_bytes() == before


def test_without_a_terminal_yes_is_needed(runner_as_user: Caller, config: Path) -> None:
    before = config.read_bytes()
    done = runner_as_user("wrap", config)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert config.read_bytes() == before


def test_wrap_and_undo(runner_as_user: Caller, config: Path) -> None:
    before = config.read_bytes()
    done = runner_as_user("wrap", config, "--yes")
    assert done.returncode == 0, done.stderr
    entry = json.loads(config.read_bytes())["mcpServers"]["tool"]
    assert os.path.isabs(entry["command"])
    assert os.path.basename(entry["command"]) == "runner"
    assert entry["args"][0] == "run"
    assert entry["args"][3:] == ["--name", "tool", "--", "/opt/tool", "-v"]
    assert entry["env"] == {"PLUGIN_ENV_TOKEN": SECRET}
    assert json.loads(entry["args"][2]) == {"file": os.path.realpath(config), "format": "2"}
    backup = done.stdout.partition("As it was before: ")[2].splitlines()[0]
    assert Path(backup).read_bytes() == before
    again = runner_as_user("wrap", config, "--yes")
    assert again.returncode == 0
    assert "tool: stays as it is: it is wrapped already" in again.stdout
    assert "nothing to change" in again.stdout
    undone = runner_as_user("wrap", config, "--undo", "--yes")
    assert undone.returncode == 0, undone.stderr
    assert config.read_bytes() == before
    assert "nothing to change" in runner_as_user("wrap", config, "--undo", "--yes").stdout


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_a_terminal_is_asked(runner_as_user: Caller, config: Path, answer: str, status: int) -> None:
    before = config.read_bytes()
    ours, theirs = pty.openpty()
    try:
        process = runner_as_user.start("wrap", config, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE)
        os.write(ours, answer.encode())
        process.communicate(timeout=60)
    finally:
        os.close(theirs)
        os.close(ours)
    assert process.returncode == status
    assert (config.read_bytes() == before) == (status != 0)


@one_case(
    ("args", "status", "message"),
    [
        ((), 2, "runner wrap --find"),
        (("FILE", "--server", "nobody", "--yes"), 2, "there is no such server; there are 'tool', 'web'"),
        (("--find", "--undo"), 2, "--find only lists"),
        (("FILE", "--json"), 2, "--json goes with --find"),
        (("/missing/mcp.json",), 1, "No such file"),
        (("/",), 1, "it is a folder"),
    ],
)
def test_usage(
    runner_as_user: Caller, config: Path, args: tuple[str, ...], status: int, message: str
) -> None:
    done = runner_as_user("wrap", *(str(config) if word == "FILE" else word for word in args))
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


def test_a_file_with_a_fault_is_named_with_its_place(runner_as_user: Caller, config: Path) -> None:
    config.write_text('{"mcpServers": {\n  "a": {"command": }}}')
    done = runner_as_user("wrap", config, "--yes")
    assert done.returncode == EXIT["manifest_invalid"]
    assert f"{config}:2:" in done.stderr


def test_one_server_of_several(runner_as_user: Caller, config: Path) -> None:
    text = {"mcpServers": {"a": {"command": "/a"}, "b": {"command": "/b"}, "c": {"command": "/c"}}}
    config.write_text(json.dumps(text))
    assert runner_as_user("wrap", config, "--server", "a", "--server", "c", "--yes").returncode == 0
    servers = json.loads(config.read_text())["mcpServers"]
    assert [entry["command"] in ("/a", "/b", "/c") for entry in servers.values()] == [False, True, False]


@pytest.mark.needs("root")
def test_the_file_of_another_user_is_refused(runner_as_user: Caller, config: Path) -> None:
    os.chown(config, 0, 0)
    before = config.read_bytes()
    done = runner_as_user("wrap", config, "--yes")
    assert done.returncode == 1
    assert "belongs to uid 0" in done.stderr
    assert config.read_bytes() == before


def test_find(runner_as_user: Caller, write_file: Write) -> None:
    home = runner_as_user.home
    for name, place in (
        ("cursor.json", ".cursor/mcp.json"),
        ("codex.toml", ".codex/config.toml"),
        ("goose.yaml", ".config/goose/config.yaml"),
    ):
        write_file(home / place, (CONFIGS / name).read_bytes(), 0o600)
    write_file(home / ".gemini/settings.json", "{", 0o600)
    runner_as_user.give(home)
    assert runner_as_user("wrap", home / ".codex/config.toml", "--server", "bare", "--yes").returncode == 0
    done = runner_as_user("wrap", "--find", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    found = {each["host"]: each for each in json.loads(done.stdout)["files"]}
    assert set(found) == {"Cursor", "Codex", "Goose", "Gemini CLI"}
    states = {each["name"]: each["state"] for each in found["Codex"]["servers"]}
    assert states["bare"] == "wrapped"
    assert states["inline"] == "not wrapped"
    assert states["figma"] == "left"
    assert found["Gemini CLI"]["fault"]
    shown = runner_as_user("wrap", "--find", cwd=home).stdout
    assert "bare: wrapped" in shown
    assert "figma: cannot be wrapped: it is reached over the network" in shown
    assert "runner wrap FILE wraps the servers of one, after a question" in shown


def test_find_and_a_dry_run_say_what_wrap_will_fetch(runner_as_user: Caller, write_file: Write) -> None:
    fetched = {
        "files": {"command": "npx", "args": ["-y", "@x/files", "/"]},
        "git": {"command": "/opt/no-such/uvx", "args": ["mcp-server-git"]},  # a stored program needs none
        "image": {"command": "docker", "args": ["run", "-i", "--rm", "mcp/time"]},
        # Its program is in the image, and not on this machine.
        "root": {"command": "no-such-program", "x-sandbox": {"image": "python:3.13"}},
        "both": {"command": "npx", "args": ["-y", "@x/other"], "x-sandbox": {"image": "node:24"}},
    }
    left = {
        "line": {"command": "npx -y @x/files"},
        "folder": {"command": "npx", "args": ["./here"]},
        "index": {"command": "uvx", "args": ["a"], "env": {"UV_INDEX": "x=http://x"}},
        "box": {"command": "docker", "args": ["run", "--privileged", "x"]},
    }
    written = write_file(
        runner_as_user.home / ".cursor/mcp.json", json.dumps({"mcpServers": fetched | left}), 0o600
    )
    runner_as_user.give(runner_as_user.home)
    shown = runner_as_user("wrap", "--find").stdout
    assert "  files: not wrapped; wrap fetches @x/files first\n" in shown
    assert "  git: not wrapped; wrap fetches mcp-server-git first\n" in shown
    assert shown.count("cannot be wrapped") == len(left) and "if you say yes" in shown, shown
    [found] = json.loads(runner_as_user("wrap", "--find", "--json").stdout)["files"]
    assert {each["name"]: (each["state"], each["fetches"]) for each in found["servers"]} == {
        "files": ("not wrapped", ["@x/files"]),
        "git": ("not wrapped", ["mcp-server-git"]),
        "image": ("not wrapped", ["docker.io/mcp/time:latest"]),
        "root": ("not wrapped", ["docker.io/library/python:3.13"]),
        "both": ("not wrapped", ["@x/other", "docker.io/library/node:24"]),
        **dict.fromkeys(left, ("left", [])),
    }
    for options in ((), ("--gateway",)):
        tried = runner_as_user("wrap", *options, written, "--dry-run")
        assert tried.returncode == 0, tried.stderr
        assert "git: will " in tried.stdout and "; mcp-server-git is fetched before that" in tried.stdout
        told = " ".join(tried.stdout.split())
        assert "@x/other and docker.io/library/node:24 are fetched before that" in told
        assert (
            '"gateway"' if options else '"run", "--wrapped"'
        ) in tried.stdout  # of the lines that it would write
        assert tried.stdout.count("stays as it is") == len(left), tried.stdout
        assert "WARNING" not in tried.stdout
    # Without --install nothing is fetched, and nothing that is not stored is wrapped.
    before = written.read_bytes()
    done = runner_as_user("wrap", written, "--yes")
    assert "git: stays as it is: it needs mcp-server-git, which is not installed\n" in done.stdout
    assert "add --install" in done.stdout
    assert written.read_bytes() == before
    store = runner_as_user.home / ".local/share/runner/store"
    store.mkdir(parents=True)
    runner_as_user.give(runner_as_user.home / ".local")
    store.chmod(0o777)
    refused = runner_as_user("wrap", "--find").stdout
    assert f"git: cannot be wrapped: it cannot start from the store: {store} can be written" in refused


# --- the host starts it -------------------------------------------------------------------------------------


SERVER = """#!/usr/bin/python3 -I
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        told = {name: os.environ.get(name) for name in ("TOKEN", "HOST_ONLY")}
        told["argv"] = sys.argv[1:]
        told["caged"] = not os.path.exists("CONFIG")
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": told}), flush=True)
"""


@pytest.fixture
def program(plugin_dir: Path, write_file: Write, runner_as: Caller) -> Path:
    """`runner` as an installation has it: a script of that name."""
    # As pip writes it for an interpreter whose path has a space: a shell's command, and a string in Python.
    start = f"#!/bin/sh\n'''exec' '{runner_as.python[0]}' \"$0\" \"$@\"\n' '''\n"
    script = f"{start}from runner.cli import entry\nentry()\n"
    return write_file(plugin_dir / "bin/runner", script, 0o755)


@pytest.mark.needs("root")
@pytest.mark.parametrize(("file", "keys"), [("mcp.json", "mcpServers"), ("opencode.json", "mcp")])
def test_a_host_starts_what_was_written(
    account_as: Caller,
    program: Path,
    plugin_dir: Path,
    write_file: Write,
    nothing_left: None,
    file: str,
    keys: str,
) -> None:
    path = plugin_dir / "settings" / file
    server = write_file(plugin_dir / "server.py", SERVER.replace("CONFIG", str(path)), 0o755)
    entry: dict[str, Any] = {"command": str(server), "args": ["one", "two words"], "env": {"TOKEN": SECRET}}
    if keys == "mcp":
        entry = {"type": "local", "command": [str(server), "one", "two words"]}
        entry["environment"] = {"TOKEN": SECRET}
    write_file(path, json.dumps({keys: {"tool": entry}}, indent=2))
    account_as.give(path.parent)

    def answer() -> dict[str, Any]:
        """Start the entry as the host does: its argv, the host's environment and the entry's on top."""
        written = json.loads(path.read_text())[keys]["tool"]
        argv = written["command"] if keys == "mcp" else [written["command"], *written["args"]]
        env = {
            **account_as.environ,
            "HOST_ONLY": "1",
            **written["env" if keys == "mcpServers" else "environment"],
        }
        question = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}) + "\n"
        done = subprocess.run(
            [*account_as.prefix, *argv],
            env=env,
            cwd="/",
            input=question,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)["result"]
        assert isinstance(result, dict)
        return result

    before = path.read_bytes()
    argv = ["one", "two words"]
    assert answer() == {"TOKEN": SECRET, "HOST_ONLY": "1", "argv": argv, "caged": False}
    wrap = [*account_as.prefix, str(program), "wrap", str(path), "--yes"]
    done = subprocess.run(wrap, env=account_as.environ, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(program) in path.read_text()
    assert answer() == {"TOKEN": SECRET, "HOST_ONLY": None, "argv": argv, "caged": True}
    assert account_as("wrap", path, "--undo", "--yes").returncode == 0
    assert path.read_bytes() == before


def test_what_comes_next_and_what_is_missing(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    folder = plugin_dir / "project"
    kept = write_file(folder / "kept/notes.txt", "").parent
    servers = {
        "memory": {"command": "/bin/true", "env": {"MEMORY_FILE_PATH": f"{kept}/new.jsonl", "TOKEN": SECRET}},
        "db": {"command": "/bin/true", "args": [f"--db-path={kept}/x.db", f"{kept}/notes.txt"]},
        "here": {"command": "/bin/true", "args": ["${workspaceFolder}/kept"]},
        "gone": {"command": "/opt/no-such", "args": [f"{folder}/none"]},
        "plain": {"command": "/bin/true", "args": ["-v", "/v1/chat", "/usr/share"]},
    }
    file = write_file(folder / ".cursor/mcp.json", json.dumps({"mcpServers": servers}))
    own = write_file(runner_as_user.home / ".cursor/mcp.json", json.dumps({"mcpServers": servers}))
    runner_as_user.give(folder)
    runner_as_user.give(own.parent)
    told = runner_as_user("wrap", file, "--yes").stdout.splitlines()
    allow = f"  runner allow {file} --server"
    assert f"{allow} memory --write {kept}" in told
    assert f"{allow} db --write {kept} --read {kept}/notes.txt" in told
    assert f"{allow} here --read {kept}" in told
    assert len([line for line in told if line.startswith("  runner allow")]) == 3
    missing = "WARNING: /opt/no-such does not exist: correct the command"
    assert f"  gone: will run in a cage; {missing}; WARNING: there is no {folder}/none" in told
    assert SECRET not in "".join(told)
    # A user's own configuration is for whatever project is open.
    told = runner_as_user("wrap", own, "--yes").stdout.splitlines()
    assert f"  runner allow {own} --server here --read ." in told
