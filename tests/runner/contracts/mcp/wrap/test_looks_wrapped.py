"""Entries that look as if `runner wrap` had written them, links to configurations, and names of servers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.mcp.hosts.wrapping import record_of, run_name, split_wrapped
from tests.conftest import Caller
from tests.tables import one_case

Write = Callable[..., Path]
Entries = dict[str, dict[str, Any]]


@pytest.fixture
def config(plugin_dir: Path, write_file: Write, runner_as_user: Caller) -> Path:
    server = write_file(plugin_dir / "server", "#!/bin/sh\n", 0o755)
    text = json.dumps({"mcpServers": {"tool": {"command": str(server), "env": {"A": "1"}}}})
    path = write_file(plugin_dir / "project/.cursor/mcp.json", text)
    runner_as_user.give(plugin_dir / "project")
    return path


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    edit(data["mcpServers"]["tool"])
    path.write_text(json.dumps(data))


def outputs(runner: Caller, path: Path) -> list[str]:
    """What wrap, --find and check say."""
    done = [runner("wrap", path, "--dry-run"), runner("wrap", "--find", path), runner("check", path)]
    assert [each.returncode for each in done[:2]] == [0, 0], done
    assert (done[2].returncode != 0) == ("error:" in done[2].stdout), done
    return [" ".join(each.stdout.split()) for each in done]


def test_an_entry_that_wrap_wrote_is_wrapped(runner_as_user: Caller, config: Path) -> None:
    assert runner_as_user("wrap", config, "--yes").returncode == 0
    wrap, find, check = outputs(runner_as_user, config)
    assert "it is wrapped already There is nothing to change" in wrap
    assert find.endswith("tool: wrapped")
    assert "wrapped_otherwise" not in check


def test_a_program_beside_a_url_is_an_error(runner_as_user: Caller, config: Path) -> None:
    helper = {"type": "http", "url": "https://example.com/", "headersHelper": "./evil.sh"}
    for entry, said in (
        ({"command": "./evil", "uri": "x"}, "'command' and 'uri'"),
        (helper, "a command that"),
    ):
        config.write_text(json.dumps({"mcpServers": {"tool": entry}}))
        before = config.read_text()
        for told in outputs(runner_as_user, config):
            assert said in told and "no program to run" not in told
        assert runner_as_user("check", config).returncode == 20
        assert config.read_text() == before
    config.write_text(json.dumps({"mcpServers": {"tool": {"url": "https://example.com/"}}}))
    assert "no program to run" in outputs(runner_as_user, config)[0]  # the control
    assert "'headersHelper'" not in outputs(runner_as_user, config)[2]


def test_every_difference_is_named_at_once(runner_as_user: Caller, config: Path) -> None:
    assert runner_as_user("wrap", config, "--yes").returncode == 0

    def edit(entry: dict[str, Any]) -> None:
        entry["command"] = "/x/runner"
        entry["args"][2] = '{"file":"/other/mcp.json"}'
        own = ["--net", "host", "--policy", "dev", "--write", "/data", "--env", "AWS_PROFILE"]
        own += ["--env", "API_TOKEN=s3cr3t"]
        entry["args"][3:3] = own

    change(config, edit)
    for told in outputs(runner_as_user, config):
        assert "another program: '/x/runner'" in told
        assert "another configuration: '/other/mcp.json'" in told
        assert "options of its own: --net host --policy dev --write /data --env AWS_PROFILE" in told
        assert "s3cr3t" not in told
    # Whoever wrote it, their program and their options are gone when it is wrapped anew.
    assert runner_as_user("wrap", config, "--yes").returncode == 0
    wrap, _, check = outputs(runner_as_user, config)
    assert "wrapped already There is nothing to change" in wrap and "wrapped_" not in check


def test_another_name_is_a_difference(runner_as_user: Caller, config: Path) -> None:
    assert runner_as_user("wrap", config, "--yes").returncode == 0
    change(config, lambda entry: entry["args"].__setitem__(4, "github"))
    assert all("options of its own: --name github" in told for told in outputs(runner_as_user, config))


@one_case(
    ("name", "kept"),
    [
        (".cursor/mcp.json", '"/opt/tool" /* run /bin/evil */'),
        (".cursor/mcp.json", '"/opt/tool", "x": "y"'),
        (".vscode/mcp.json", '"/opt/tool" // evil\n'),
        (".vscode/mcp.json", '\n\n"/opt/tool"'),
        (".vscode/mcp.json", '"/opt/other"'),
    ],
)
def test_undo_takes_only_a_bare_word_back(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write, name: str, kept: str
) -> None:
    record = json.dumps({"file": "/x", "command": kept})
    args = ["run", "--wrapped", record, "--name", "tool", "--", "/opt/tool", "-v"]
    key = "servers" if "vscode" in name else "mcpServers"
    path = write_file(
        plugin_dir / "project" / name, json.dumps({key: {"tool": {"command": "/x/runner", "args": args}}})
    )
    runner_as_user.give(plugin_dir / "project")
    done = runner_as_user("wrap", path, "--undo", "--yes")
    assert done.returncode == 0, done.stderr
    assert path.read_text() == json.dumps({key: {"tool": {"command": "/opt/tool", "args": ["-v"]}}})


def test_undo_takes_another_spelling_back(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    before = '{"mcpServers": {"tool": {"command": "\\u002fopt/tool", "args": ["-v"]}}}'
    path = write_file(plugin_dir / "project/mcp.json", before)
    runner_as_user.give(plugin_dir / "project")
    assert runner_as_user("wrap", path, "--yes").returncode == 0
    assert path.read_text() != before
    assert runner_as_user("wrap", path, "--undo", "--yes").returncode == 0
    assert path.read_text() == before


# --- a link, as people have who keep their settings in one folder -------------------------------------------


def test_a_linked_configuration_keeps_its_host(runner_as_user: Caller, write_file: Write) -> None:
    home = runner_as_user.home
    env_file = write_file(home / "vars.env", "B=2\n", 0o600)
    server = write_file(home / "server", "#!/bin/sh\n", 0o755)
    text = json.dumps(
        {"mcpServers": {"tool": {"command": str(server), "args": [], "envFile": str(env_file)}}}
    )
    real = write_file(home / "dot/mcp.json", text, 0o600)
    (home / ".cursor").mkdir()
    link = home / ".cursor/mcp.json"
    link.symlink_to(real)
    runner_as_user.give(home)
    done = runner_as_user("wrap", link, "--yes")
    assert done.returncode == 0, done.stderr
    assert f"{real}: Cursor" in done.stdout
    assert link.is_symlink()
    args = json.loads(real.read_text())["mcpServers"]["tool"]["args"]
    assert args[5] == f"--env-file={env_file}"
    assert json.loads(args[2]) == {"file": os.path.realpath(real), "format": "2"}
    check = runner_as_user("check", link).stdout
    assert "Cursor" in check and "wrapped_" not in check
    assert "tool: wrapped\n" in runner_as_user("wrap", "--find", cwd=home).stdout
    assert "nothing to change" in runner_as_user("wrap", link).stdout


def test_a_link_to_a_configuration_has_its_host(runner_as_user: Caller, write_file: Write) -> None:
    home = runner_as_user.home
    server = write_file(home / "server", "#!/bin/sh\n", 0o755)
    text = json.dumps({"mcpServers": {"tool": {"command": str(server)}}})
    real = write_file(home / ".cursor/mcp.json", text, 0o600)
    (home / "link.json").symlink_to(real)
    runner_as_user.give(home)
    assert "Cursor" in runner_as_user("wrap", home / "link.json", "--dry-run").stdout
    assert "Cursor" in runner_as_user("check", home / "link.json").stdout


# --- servers of several projects, and names -----------------------------------------------------------------


def test_servers_of_several_projects_are_told_apart(runner_as_user: Caller, write_file: Write) -> None:
    home = runner_as_user.home
    entry = {"mcpServers": {"db": {"command": "/opt/db", "args": []}}}
    text = json.dumps({**entry, "projects": {"/srv/a": entry, "/srv/b": entry}}, indent=2)
    path = write_file(home / ".claude.json", text, 0o600)
    runner_as_user.give(home)
    assert runner_as_user("wrap", path, "--yes").returncode == 0
    data = json.loads(path.read_text())

    def record(table: Any) -> dict[str, str]:
        server = table["mcpServers"]["db"]
        old = split_wrapped((server["command"], *server["args"]))
        assert old is not None
        return {key: value for key, value in record_of(old.options).items() if key != "format"}

    file = os.path.realpath(path)
    assert record(data) == {"file": file}
    assert record(data["projects"]["/srv/a"]) == {"file": file, "scope": "/srv/a"}
    assert record(data["projects"]["/srv/b"]) == {"file": file, "scope": "/srv/b"}
    assert "wrapped_otherwise" not in runner_as_user("check", path).stdout
    assert runner_as_user("wrap", path, "--undo", "--server", "/srv/a:db", "--yes").returncode == 0
    data = json.loads(path.read_text())
    assert data["projects"]["/srv/a"] == entry
    data["projects"]["/srv/a"] = data["projects"]["/srv/b"]  # as if copied
    path.write_text(json.dumps(data))
    assert "another project: '/srv/b'" in " ".join(runner_as_user("check", path).stdout.split())
    path.write_text(json.dumps(data))
    assert runner_as_user("wrap", path, "--undo", "--yes").returncode == 0
    assert json.loads(path.read_text()) == json.loads(text)


def test_each_server_has_a_name_of_its_own() -> None:
    names = ["a/b", "a_b", "a%2Fb", "a%252Fb", "a%b", "-a", "_a", "%2Da", ".", "..", "_", "", " ", "a\nb"]
    names += ["x" * 128, "x" * 129, "x" * 130, "/" * 128, "é" * 60, "%", "%/", "%2/"]
    found = [run_name(name) for name in names]
    assert len(set(found)) == len(names)
    for name in found:
        assert 0 < len(name) <= 128 and name.isprintable() and "/" not in name and name[0] != "-"
        assert name.strip() and name not in (".", "..")
    plain = ["github", "my server", "a_b", "a%b", "é" * 60, "x" * 128]
    assert [run_name(name) for name in plain] == plain


def test_a_large_file_of_a_live_host_is_read_by_all_verbs(runner_as_user: Caller, write_file: Write) -> None:
    home = runner_as_user.home
    server = write_file(home / "server", "#!/bin/sh\n", 0o755)
    history = [{"display": "x" * 50, "n": n} for n in range(15_000)]
    data = {"mcpServers": {"tool": {"command": str(server)}}, "history": history}
    path = write_file(home / ".claude.json", json.dumps(data), 0o600)
    other = write_file(home / "project/.mcp.json", json.dumps(data), 0o600)
    runner_as_user.give(home)
    assert path.stat().st_size > 1 << 20
    assert runner_as_user("wrap", path, "--yes").returncode == 0
    check = runner_as_user("check", path)
    assert (check.returncode, "Claude Code" in check.stdout) == (0, True), check.stdout + check.stderr
    refused = runner_as_user("check", other)  # which may have come with a project
    assert refused.returncode != 0 and "file_too_large" in refused.stdout + refused.stderr
