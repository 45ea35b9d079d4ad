"""Whom a yes and a state are for, where what runs depends on the folder or on the project."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.mcp.hosts.wrapping import wrapped_argv
from tests.conftest import Caller
from tests.tables import one_case

Write = Callable[..., Path]
_READS = "import sys; print(open(sys.argv[1]).read(), end='')\n"
_KEEPS = """import os, sys
place = sys.argv[1] + "/kept"
print("kept" if os.path.exists(place) else "new")
open(place, "w").close()
"""


class Folders:
    """Two folders with a server.py each: a person's own, and one that was cloned."""

    def __init__(self, caller: Caller, folder: Path, write_file: Write) -> None:
        self.caller, self.write_file = caller, write_file
        self.secret = write_file(folder / "secret" / "text", "secret\n")
        self.mine = write_file(folder / "mine" / "server.py", _READS).parent
        self.clone = write_file(folder / "clone" / "server.py", _READS).parent

    def run(self, folder: Path, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.caller("run", *words, cwd=folder, **more)

    def allow(self, folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
        done = self.caller("allow", "--yes", *words, cwd=folder)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done

    def forget_states(self, names: str = "fold-") -> None:
        for each in json.loads(self.caller("state", "list", "--json").stdout)["states"]:
            if each["name"].startswith(names):
                assert self.caller("state", "remove", each["name"]).returncode == 0


@pytest.fixture
def folders(account_as: Caller, plugin_dir: Path, write_file: Write) -> Folders:
    return Folders(account_as, plugin_dir, write_file)


@pytest.fixture
def user_folders(account_user: Caller, plugin_dir: Path, write_file: Write) -> Folders:
    return Folders(account_user, plugin_dir, write_file)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.needs("root")
def test_a_clone_gets_no_yes_for_its_own_program(folders: Folders, wrapped: bool) -> None:
    claim: list[str | Path] = []
    command = ["--", "python3", "server.py", str(folders.secret)]
    if wrapped:  # the clone's entry claims the person's configuration
        file = folders.write_file(folders.mine / ".mcp.json", "{}")
        claim = ["--wrapped", json.dumps({"file": str(file)})]
        args = ["run", *map(str, claim), "--name", "github", *command]
        file.write_text(json.dumps({"mcpServers": {"github": {"command": "/opt/runner", "args": args}}}))
        shown = folders.allow(Path("/"), "--read", folders.secret, file)  # wherever the person stands
    else:
        shown = folders.allow(folders.mine, "--name", "github", "--read", folders.secret, *command)
    assert f"folder  {folders.mine}\n" in shown.stdout
    mine = folders.run(folders.mine, *claim, "--name", "github", *command)
    assert (mine.returncode, mine.stdout) == (0, "secret\n")  # the control
    clone = folders.run(folders.clone, *claim, "--name", "github", *command)
    assert clone.returncode != 0 and "secret" not in clone.stdout


@pytest.mark.usefixtures("nothing_left")
def test_the_yes_to_absolute_words_holds_in_every_folder(folders: Folders) -> None:
    command = ["--", "python3", str(folders.mine / "server.py"), str(folders.secret)]
    shown = folders.allow(folders.mine, "--name", "github", "--read", folders.secret, *command)
    assert "folder  " not in shown.stdout
    for folder in (folders.mine, folders.clone, Path("/")):
        assert folders.run(folder, "--name", "github", *command).stdout == "secret\n"


@pytest.mark.usefixtures("nothing_left")
def test_a_state_is_for_one_folder_only_if_what_runs_depends_on_it(folders: Folders) -> None:
    for folder in (folders.mine, folders.clone):
        folders.write_file(folder / "server.py", _KEEPS)

    def kept(folder: Path, script: str | Path, *options: str) -> str:
        words = ["--name", "fold-state", *options, "--", "python3", str(script), "${state_dir}"]
        return folders.run(folder, *words).stdout

    try:
        assert kept(folders.mine, "server.py") == "new\n"
        assert kept(folders.mine, "server.py") == "kept\n"  # the control
        assert kept(folders.clone, "server.py") == "new\n"
        absolute = folders.mine / "server.py"
        assert kept(folders.mine, absolute) == "new\n"
        assert kept(folders.clone, absolute) == "kept\n"
        assert kept(folders.clone, absolute, "--project") == "new\n"  # it works on the clone
        assert kept(folders.clone, absolute, "--project") == "kept\n"
    finally:
        folders.forget_states()


# A host: starts a program with the variables of an entry added to its own.
_HOST = """import json, os, subprocess, sys
env = {**os.environ, **json.loads(sys.argv[1])}
sys.exit(subprocess.run(sys.argv[2:], env=env).returncode)
"""


@pytest.mark.usefixtures("nothing_left")
def test_an_entry_that_sets_another_path_gets_no_state_of_the_one_it_repeats(folders: Folders) -> None:
    """It repeats the wrapped line of a person's own entry, and brings a program of the same name."""
    for folder in (folders.mine, folders.clone):
        folders.write_file(folder / "bin" / "keeper", f"#!/usr/bin/python3 -I\n{_KEEPS}", mode=0o755)
    file = folders.write_file(folders.mine / ".mcp.json", "{}")
    words = ["run", "--wrapped", json.dumps({"file": str(file), "format": "2"}), "--name", "path-keeper"]
    words += ["--", "keeper", "${state_dir}"]
    file.write_text(json.dumps({"mcpServers": {"path-keeper": {"command": "/opt/runner", "args": words}}}))
    caller = folders.caller

    def kept(env: dict[str, str]) -> str:
        runner = [*caller.python, "-m", "runner", *words]
        path = f"{folders.mine}/bin:/usr/bin:/bin"
        done = subprocess.run(
            [*caller.prefix, *caller.python, "-c", _HOST, json.dumps(env), *runner],
            env={**caller.environ, "PATH": path},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        other = {"PATH": f"{folders.clone}/bin:/usr/bin:/bin"}
        # The same program by another PATH is the same entry: the control.
        same = {"PATH": f"/usr/bin:{folders.mine}/bin"}
        assert [kept(env) for env in ({}, {}, same, other, other, {})] == [
            *("new", "kept", "kept"),
            *("new", "kept", "kept"),
        ]
    finally:
        folders.forget_states("path-")


def test_a_project_that_is_shown_has_a_yes_of_its_own(user_folders: Folders) -> None:
    command = ["--", "/bin/cat", str(user_folders.secret)]
    user_folders.allow(
        user_folders.mine,
        "--name",
        "shown",
        "--cwd",
        user_folders.mine,
        "--read",
        user_folders.secret,
        *command,
    )
    run = ("--name", "shown", "--project", *command)
    assert user_folders.run(user_folders.mine, *run).stdout == "secret\n"
    assert user_folders.run(user_folders.clone, *run).stdout == ""


@one_case("word", ["--config=server.py", "-m", "./server.py"])
def test_words_that_name_something_of_the_folder(user_folders: Folders, word: str) -> None:
    command = ["--", "python3", word, *(["server"] if word == "-m" else [])]
    shown = user_folders.allow(user_folders.mine, "--name", "x", "--read", user_folders.secret, *command)
    assert f"folder  {user_folders.mine}\n" in shown.stdout


@pytest.mark.needs("root")
def test_a_users_own_file_says_for_which_folder_a_yes_is(user_folders: Folders) -> None:
    home = user_folders.caller.home
    file = home / ".cursor" / "mcp.json"
    args = ["run", "--wrapped", json.dumps({"file": str(file)}), "--name", "github"]
    command = ["--", "python3", "server.py", str(user_folders.secret)]
    entry = {"command": "/opt/runner", "args": [*args, *command]}
    user_folders.write_file(file, json.dumps({"mcpServers": {"github": entry}}))
    shown = user_folders.allow(user_folders.mine, "--read", user_folders.secret, file)
    assert f"This yes holds for {user_folders.mine}," in shown.stdout
    assert "run runner allow there" in shown.stdout
    assert user_folders.caller(*args, *command, cwd=user_folders.mine).stdout == "secret\n"
    assert "secret" not in user_folders.caller(*args, *command, cwd=user_folders.clone).stdout


@pytest.mark.needs("root")
def test_a_users_own_file_for_the_project_that_is_open(user_folders: Folders) -> None:
    file = user_folders.caller.home / ".cursor" / "mcp.json"
    record = json.dumps({"file": str(file), "format": "2"})
    args = ["run", "--wrapped", record, "--name", "github", "--", "/bin/cat", "${workspaceFolder}/server.py"]
    user_folders.write_file(
        file, json.dumps({"mcpServers": {"github": {"command": "/opt/runner", "args": args}}})
    )
    shown = user_folders.allow(user_folders.mine, "--read", ".", file)
    assert f"where its host fills in {user_folders.mine} for the project" in shown.stdout

    def started(folder: Path) -> str:
        words = [word.replace("${workspaceFolder}", str(folder)) for word in args]
        return user_folders.caller(*words, cwd=folder).stdout

    assert (started(user_folders.mine), started(user_folders.clone)) == (_READS, "")


# --- projects of one file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.needs("root")
def test_two_projects_of_one_file_share_no_yes(user_folders: Folders, wrapped: bool) -> None:
    file = user_folders.caller.home / ".claude.json"
    command = ["/bin/cat", str(user_folders.secret)]
    projects, lines = {}, {}
    for folder in (user_folders.mine, user_folders.clone):
        record = json.dumps({"file": str(file), "scope": str(folder)})
        lines[folder] = ["run", "--wrapped", record, "--name", "db", "--", *command]
        argv = ["/opt/runner", *lines[folder]] if wrapped else command
        projects[str(folder)] = {"mcpServers": {"db": {"command": argv[0], "args": argv[1:]}}}
    user_folders.write_file(file, json.dumps({"projects": projects}))

    def started(folder: Path) -> str:
        if wrapped:
            return user_folders.caller(*lines[folder], cwd=folder).stdout
        return user_folders.caller("exec", file, "--server", f"{folder}:db").stdout

    label = f"{user_folders.mine}:db"
    user_folders.allow(Path("/"), file, "--server", label, "--read", user_folders.secret)
    assert started(user_folders.mine) == "secret\n"
    assert started(user_folders.clone) == ""
    assert f"project {user_folders.mine}" in user_folders.caller("allow", "--list").stdout
    other = user_folders.caller("allow", "--revoke", file, "--server", f"{user_folders.clone}:db")
    assert other.returncode == 2
    revoked = user_folders.caller("allow", "--revoke", file, "--server", label)
    assert revoked.returncode == 0, revoked.stderr
    assert started(user_folders.mine) == ""


def test_an_entry_that_claims_another_project_is_not_allowed_for_it(user_folders: Folders) -> None:
    file = user_folders.caller.home / ".claude.json"
    record = json.dumps({"file": str(file), "scope": str(user_folders.mine)})
    args = ["run", "--wrapped", record, "--name", "db", "--", "/bin/cat"]
    servers = {"mcpServers": {"db": {"command": "/opt/runner", "args": args}}}
    user_folders.write_file(file, json.dumps({"projects": {str(user_folders.clone): servers}}))
    done = user_folders.caller("allow", "--yes", file, "--read", user_folders.secret)
    assert done.returncode == 2 and "wrapped for another project" in done.stderr


# --- options of an entry ------------------------------------------------------------------------------------


def _wrapped_entry(folders: Folders, *options: str) -> Path:
    file = folders.mine / ".mcp.json"
    args = ["run", "--wrapped", json.dumps({"file": str(file)}), "--name", "x", *options, "--", "/bin/cat"]
    servers = {"x": {"command": "/opt/runner", "args": args}}
    return folders.write_file(file, json.dumps({"mcpServers": servers}))


@one_case(
    "options",
    [["--policy", "dev"], ["--state-dir", "/srv/state"], ["--project=write"], ["--read", "below"], ["--tty"]],
)
def test_options_that_only_a_person_gives_are_refused(user_folders: Folders, options: list[str]) -> None:
    shown = user_folders.caller("allow", _wrapped_entry(user_folders, *options))
    assert (shown.returncode, shown.stdout) == (2, "")
    option = options[0].partition("=")[0]
    assert f"an entry of a configuration may not have {option}" in shown.stderr


@one_case("options", [["-h"], ["--help"], ["--project=all"], ["--unknown"], ["--cwd", ""]])
def test_options_that_make_no_sense_are_one_line(user_folders: Folders, options: list[str]) -> None:
    shown = user_folders.caller("allow", _wrapped_entry(user_folders, *options))
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.count("\n") == 1 and shown.stderr.startswith("runner allow: ")


def test_an_argument_cannot_pretend_to_be_a_line(user_folders: Folders) -> None:
    fake = "x" + " " * 200 + "policy  strict"
    shown = user_folders.allow(
        user_folders.mine, "--name", "x", "--read", user_folders.secret, "--", "/bin/cat", fake, "a\nb"
    )
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("runs ")]
    assert f"'{fake}'" in line


def test_an_empty_working_directory_is_refused(user_folders: Folders) -> None:
    done = user_folders.run(user_folders.mine, "--cwd", "", "--", "/bin/true")
    assert done.returncode == 2 and "--cwd: its value is empty" in done.stderr


# --- what is as good as an argument -------------------------------------------------------------------------


def test_another_value_of_a_variable_that_steers_is_another_command(user_folders: Folders) -> None:
    file = user_folders.mine / "mcp.json"

    def write(value: str) -> None:
        entry = {"command": "/bin/cat", "args": [str(user_folders.secret)], "env": {"PYTHONPATH": value}}
        user_folders.write_file(file, json.dumps({"mcpServers": {"one": entry}}))

    write("/srv/mine")
    assert "secret" not in user_folders.caller("exec", file).stdout
    shown = user_folders.allow(Path("/"), file, "--read", user_folders.secret)
    assert "PYTHONPATH is set to '/srv/mine'" in shown.stdout
    assert user_folders.caller("exec", file).stdout == "secret\n"
    write("/srv/other")
    refused = user_folders.caller("exec", file)
    assert refused.returncode == 126 and "PYTHONPATH" in refused.stderr


@pytest.mark.needs("root")
def test_a_wrapped_entry_has_the_value_that_its_host_sets(user_folders: Folders) -> None:
    file = user_folders.mine / ".mcp.json"
    claim = json.dumps({"file": str(file)})
    args = ["run", "--wrapped", claim, "--name", "x", "--env", "PYTHONPATH"]
    args += ["--", "/bin/cat", str(user_folders.secret)]
    entry = {"command": "/opt/runner", "args": args, "env": {"PYTHONPATH": "/srv/mine"}}
    user_folders.write_file(file, json.dumps({"mcpServers": {"x": entry}}))
    shown = user_folders.allow(Path("/"), file, "--read", user_folders.secret)
    assert "PYTHONPATH is set to '/srv/mine'" in shown.stdout
    mine = user_folders.caller(*args, env={"PYTHONPATH": "/srv/mine"}, cwd=user_folders.mine)
    assert mine.stdout == "secret\n", mine.stderr
    other = user_folders.caller(*args, env={"PYTHONPATH": "/srv/other"}, cwd=user_folders.mine)
    assert other.returncode != 0 and "secret" not in other.stdout


def test_a_file_of_variables_cannot_steer(user_folders: Folders) -> None:
    entry = {"command": "/usr/bin/env", "envFile": "${workspaceFolder}/.env"}
    file = user_folders.write_file(
        user_folders.mine / ".vscode" / "mcp.json", json.dumps({"servers": {"x": entry}})
    )
    variables = user_folders.write_file(user_folders.mine / ".env", "PLAIN=1\n")
    assert "PLAIN=1\n" in user_folders.caller("exec", file).stdout  # the control
    variables.write_text("LD_PRELOAD=/srv/evil.so\n")
    user_folders.caller("allow", "--yes", file, "--env", "LD_PRELOAD")
    refused = user_folders.caller("exec", file)
    assert refused.returncode == 126
    assert "a file of variables may not set it" in refused.stderr
    assert "set LD_PRELOAD in the env of the entry" in refused.stderr and "to allow it" not in refused.stderr


def test_the_text_of_a_file_in_the_arguments(user_folders: Folders) -> None:
    entry = {"type": "local", "command": ["/bin/cat", str(user_folders.secret), "{file:./word}"]}
    text = json.dumps({"mcp": {"x": entry}})
    project = user_folders.write_file(user_folders.mine / "opencode.json", text)
    user_folders.write_file(user_folders.mine / "word", "-u\n")
    refused = user_folders.caller("exec", project)
    assert refused.returncode != 0
    assert "the text of a file would decide what runs" in refused.stderr
    assert f"{project}:1:" in refused.stderr and "write the text itself here" in refused.stderr
    own = user_folders.caller.home / ".config/opencode/opencode.json"
    user_folders.write_file(own, text)
    word = user_folders.write_file(own.parent / "word", "-u\n")
    user_folders.allow(Path("/"), own, "--read", user_folders.secret)
    assert user_folders.caller("exec", own).stdout == "secret\n"
    word.write_text("-n\n")
    assert user_folders.caller("exec", own).stdout == ""


@pytest.mark.needs("root")
def test_a_name_with_slashes(user_folders: Folders) -> None:
    name = "github.com/org/server"
    file = user_folders.mine / ".mcp.json"
    command = ["/bin/cat", str(user_folders.secret)]
    servers = {name: {"command": command[0], "args": command[1:]}, "other": {"command": "/bin/true"}}
    user_folders.write_file(file, json.dumps({"mcpServers": servers}))
    assert user_folders.caller("check", file).returncode == 0
    user_folders.allow(Path("/"), file, "--server", name, "--read", user_folders.secret)
    assert user_folders.caller("exec", file, "--server", name).stdout == "secret\n"
    line = wrapped_argv("/opt/runner", command, file=str(file), name=name)
    servers[name] = {"command": line[0], "args": list(line[1:])}
    user_folders.write_file(file, json.dumps({"mcpServers": servers}))
    assert user_folders.caller(*line[1:], cwd=user_folders.mine).stdout == "secret\n"
    user_folders.allow(Path("/"), file, "--server", name, "--read", user_folders.secret)
    listed = json.loads(user_folders.caller("allow", "--list", "--json").stdout)["approvals"]
    assert len(listed) == 1  # one and the same
    assert user_folders.caller("allow", "--revoke", file, "--server", name).returncode == 0
    assert user_folders.caller("exec", file, "--server", name).stdout == ""
