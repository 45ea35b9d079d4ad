"""A command in the place of a manifest: run, call, tools and explain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.contracts.registry import example_folder
from tests.conftest import Caller
from tests.tables import one_case

Write = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def server(plugin_dir: Path) -> Path:
    """A real server, as somebody has it on their disk."""
    program = plugin_dir / "server" / "server.py"
    program.parent.mkdir()
    program.parent.chmod(0o755)
    shutil.copy(os.path.join(example_folder("mcp"), "server.py"), program)
    program.chmod(0o755)
    return program


# --- call, tools, explain -----------------------------------------------------------------------------------


def test_a_command_is_called_and_listed(runner_as: Caller, server: Path) -> None:
    called = runner_as("call", "greet", "--input", '{"name": "you"}', "--", server)
    assert (called.returncode, called.stderr) == (0, "")
    assert json.loads(called.stdout)["content"] == [{"type": "text", "text": "Hello, you!"}]
    listed = runner_as("tools", "--json", "--", server)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert [tool["name"] for tool in json.loads(listed.stdout)["tools"]] == ["greet", "count"]


def test_its_options_are_those_of_run(runner_as: Caller, server: Path, write_file: Write) -> None:
    data = write_file(server.parent.parent / "data" / "text", "found").parent
    code = f"""import os, runpy; open('{data}/' + 'text'); os.environ['GREETING']
runpy.run_path('{server}', run_name='__main__')"""
    # No argument is a path: both folders are in the cage by their options only.
    command = ["--", "/usr/bin/python3", "-c", code]
    refused = runner_as("tools", *command)
    assert refused.returncode != 0
    shown = runner_as("tools", "--read", data, "--read", server.parent, "--env", "GREETING=hi", *command)
    assert shown.returncode == 0, shown.stderr
    refused = runner_as("tools", "--policy", "strict", "--read", data, *command)
    assert refused.returncode == 21
    assert "policy strict lets nobody approve reading it" in refused.stderr


def test_an_approval_reaches_a_session(runner_as: Caller, server: Path, write_file: Write) -> None:
    data = write_file(server.parent.parent / "data" / "text", "found").parent
    code = f"open('{data}/' + 'text'); import runpy; runpy.run_path('{server}', run_name='__main__')"
    command = ["--", "/usr/bin/python3", "-c", code]
    words = ["--name", "approved", "--read", str(server.parent)]
    assert runner_as("tools", *words, *command).returncode != 0
    assert runner_as("allow", "--yes", "--name", "approved", "--read", data, *command).returncode == 0
    assert runner_as("tools", *words, *command).returncode == 0


def test_a_manifest_keeps_its_meaning(runner_as_user: Caller, server: Path, write_file: Write) -> None:
    entry = {"mcpServers": {"greeter": {"command": str(server)}}}
    manifest = write_file(server.parent.parent / "mcp.json", json.dumps(entry))
    called = runner_as_user("call", manifest, "greet", "--input", '{"name": "you"}', "--", "--ignored")
    assert called.returncode == 0 and "Hello, you!" in called.stdout
    assert runner_as_user("tools", manifest, "--", "--ignored").returncode == 0
    explained = runner_as_user("explain", manifest, "--", "--passed-on")
    assert explained.returncode == 0 and "--passed-on" in explained.stdout


def test_explain_speaks_of_the_command_line(runner_as_user: Caller, plugin_dir: Path) -> None:
    words = ["--read", str(plugin_dir), "--net", "example.com", "--", "/bin/ls"]
    said = runner_as_user("explain", *words)
    assert said.returncode == 0 and "It would be launched." in said.stdout
    assert "manifest" not in said.stdout
    refused = runner_as_user("explain", "--policy", "strict", *words)
    assert refused.returncode == 21
    assert "the command line asks for 2 things it may not have" in refused.stdout
    assert "(command line)" in refused.stdout and "manifest" not in refused.stdout
    network = runner_as_user("explain", "--network", *words)
    assert "example.com:443  asked by the command line, allowed by the command line" in network.stdout


@one_case(
    ("words", "why"),
    [
        (("explain", "--"), "there is no command"),
        (("tools", "--", ""), "the command is empty"),
        (("call", "--", "ls"), "required: NAME"),
        (("call", "/usr", "--", "ls"), "NAME is missing"),
        (("exec", "--read", "/srv", "x"), "runner allow MANIFEST --read"),
        (("tools", "--net", "example.com", "x"), "runner allow MANIFEST --net"),
        (("run", "--name", "a/b", "--", "ls"), "without a slash"),
        (("run", "--cwd", "/nonexistent", "--", "ls"), "no such folder"),
        (("run", "--wrapped", "x", "--", "ls"), "run runner wrap again"),
        (("run", "--wrapped", "[" * 50_000, "--", "ls"), "run runner wrap again"),
        (("run", "--wrapped", '{"file": "/a\\u0000b"}', "--", "ls"), "run runner wrap again"),
        (("run", "--wrapped", '{"file": "/a\\ud800b"}', "--", "ls"), "run runner wrap again"),
        (("run", "--wrapped", '{"file": ["/a"]}', "--", "ls"), "run runner wrap again"),
        (("run", "--", "ls", "${state_dir}"), "only a command with a --name"),
        (("run", "--net", "host", "--net", "example.com", "--", "ls"), "leave the others out"),
        (("run", "--env", "NOT_THERE", "--", "ls"), "no such variable"),
    ],
)
def test_usage(runner_as_user: Caller, words: tuple[str, ...], why: str) -> None:
    said = runner_as_user(*words)
    assert (said.returncode, said.stdout) == (2, "")
    assert why in said.stderr and len(said.stderr.splitlines()) == 1


# --- run ----------------------------------------------------------------------------------------------------


def test_run_has_the_exit_codes_and_the_report_of_exec(runner_as: Caller, plugin_dir: Path) -> None:
    report = runner_as.home / "report.json"
    assert runner_as("run", "--report", report, "--", "/bin/sh", "-c", "exit 7").returncode == 7
    document = json.loads(report.read_text())
    assert (document["exit"]["status"], document["outcome"]["cause"]) == (7, "exit:7")
    assert document["plugin"]["id"] == "sh"
    assert runner_as("run", "--", "/bin/sh", "-c", "kill -TERM $$").returncode == 143
    assert runner_as("run", "--deadline", "200ms", "--", "/bin/sleep", "60").returncode == 124
    assert runner_as("run", "--", "/nonexistent/program").returncode == 127
    assert runner_as("run", "--read", "/root", "--", "/bin/true").returncode == 126
    # What it writes has the modes that it would have without a cage.
    words = "umask 027; exec " + " ".join(f"'{word}'" for word in runner_as.command("run", "--", "sh", "-c"))
    shell = subprocess.run(
        ["/bin/sh", "-c", f"{words} umask"],
        env=dict(runner_as.environ),
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert shell.stdout == "0027\n", shell.stderr


def test_run_gives_what_its_options_say_and_nothing_else(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    shown = write_file(plugin_dir / "shown" / "text", "found\n")
    hidden = write_file(plugin_dir / "hidden" / "text", "secret\n")
    cat = ["--", "/bin/sh", "-c", f"cat {plugin_dir}/*/text; echo $ONE $TWO"]
    # Nothing is shown to a shell whose argument only mentions folders.
    said = runner_as("run", *cat, env={"ONE": "1", "TWO": "2"})
    assert (said.stdout.strip(), hidden.read_text()) == ("", "secret\n")
    said = runner_as("run", "--read", shown.parent, "--env", "ONE", *cat, env={"ONE": "1", "TWO": "2"})
    assert said.stdout == "found\n1\n"
    said = runner_as("run", "--cwd", shown.parent, "--project", "--", "/bin/cat", "text")
    assert said.stdout == "found\n"
    said = runner_as("run", "--cwd", shown.parent, "--", "/bin/cat", "text")
    assert said.returncode == 126 and "use --project, --read or --write" in said.stderr


def test_events_are_not_written_where_the_plugin_may_write(runner_as_user: Caller, plugin_dir: Path) -> None:
    """It could put a file of its own in that place, and forge every line."""
    folder = plugin_dir / "work"
    folder.mkdir()
    runner_as_user.give(folder)
    forge = f"rm -f {folder}/events; echo forged > {folder}/events"
    words = ("--write", folder, "--", "/bin/sh", "-c", forge)
    refused = runner_as_user("run", "--events", folder / "events", *words)
    assert refused.returncode == 126 and "the plugin may write to" in " ".join(refused.stderr.split())
    assert (folder / "events").read_text() == ""
    assert runner_as_user("run", *words).returncode == 0
    assert (folder / "events").read_text() == "forged\n"  # the control


@one_case("option", ["--read", "--write", "--net", "--env", "--project"])
def test_under_strict_no_option_counts(runner_as: Caller, plugin_dir: Path, option: str) -> None:
    words = {
        "--read": ["--read", str(plugin_dir)],
        "--write": ["--write", str(plugin_dir)],
        "--net": ["--net", "example.com"],
        "--env": ["--env", "HOME"],
        "--project": ["--cwd", str(plugin_dir), "--project"],
    }[option]
    refused = runner_as("run", "--policy", "strict", *words, "--", "/bin/true")
    assert refused.returncode == 126
    assert "policy strict lets nobody approve" in refused.stderr


def test_a_state_of_run_is_listed_and_removed(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    program = write_file(plugin_dir / "keep", '#!/bin/sh\ncat "$1/kept"; echo kept > "$1/kept"\n', 0o755)
    words = ["run", "--name", "keeper", "--", str(program), "${state_dir}"]
    assert runner_as(*words).stdout == ""
    assert runner_as(*words).stdout == "kept\n"
    states = json.loads(runner_as("state", "list", "--json").stdout)["states"]
    [state] = [each for each in states if each["manifest"] == str(program)]
    assert state["name"].startswith("keeper.")
    assert runner_as("state", "remove", state["name"]).returncode == 0
    assert runner_as(*words).stdout == ""
    assert runner_as("state", "remove", program).returncode == 0


def _imported(caller: Caller, *words: str | Path) -> set[str]:
    """The modules of ours that a launch imports."""
    given = [os.fspath(word) for word in words]
    argv = [*caller.prefix, *caller.python, "-X", "importtime", "-m", "runner", *given]
    done = subprocess.run(argv, env=dict(caller.environ), cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return {module for module in modules if module.startswith(("runner", "sandbox"))}


def test_run_imports_what_exec_does(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    """A launch pays for each module. That of a manifest is the measure."""
    entry = {"mcpServers": {"true": {"command": "/bin/true"}}}
    manifest = write_file(plugin_dir / "mcp.json", json.dumps(entry))
    assert (
        runner_as_user("exec", manifest).returncode == 0
    )  # its manifest and the policy are in the cache now
    # With another word, so that no plan is stored for it.
    by_manifest = _imported(runner_as_user, "exec", manifest, "--", "word")
    by_command = _imported(runner_as_user, "run", "--", "/bin/true")
    more = {module for module in by_command - by_manifest if not module.startswith("sandbox.streams.")}
    # It relays stderr, for the advice about a plugin that fails.
    assert more <= {"runner.cli.run", "runner.cli.exec", "runner.cli.shared.command"}
    assert "sandbox.network.rules" not in by_command
    assert "runner.approvals.files" not in by_command
    with_host = _imported(runner_as_user, "run", "--net", "example.com", "--", "/bin/true")
    assert "sandbox.network.rules" in with_host  # the control
