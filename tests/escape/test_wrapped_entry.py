"""A hostile configuration whose entry was wrapped: its variables reach the plugin, and never the runner.

Each attack has its control: the same variable against a start that nobody wrapped, or whose variables have
the names they had.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.configurations import PLUGIN_PREFIX
from tests.conftest import ROOT, Caller

Write = Callable[..., Path]

pytestmark = [pytest.mark.needs("root"), pytest.mark.usefixtures("nothing_left")]

# Tells which file it is, what it was given, and what it can read.
SERVER = """#!/usr/bin/python3 -I
import json, os, sys
def text(path):
    try:
        return open(path).read()
    except OSError:
        return None
told = {"file": FILE, "secret": text(SECRET), "env": dict(os.environ), "host": os.path.exists(HOST)}
print(json.dumps(told))
"""
LIBRARY = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void act(void) {
    int fd = open(MARKER, O_CREAT | O_WRONLY, 0666);
    if (fd >= 0) close(fd);
}
"""


class Host:
    """A host with a project's configuration. It starts entries as hosts do: the entry's variables on top."""

    def __init__(self, caller: Caller, folder: Path, write_file: Write) -> None:
        self.caller, self.write_file = caller, write_file
        self.project = folder / "project"
        self.file = self.project / ".cursor/mcp.json"
        self.secret = write_file(folder / "private/secret", "s3cret")
        # `runner` as an installation has it, with a sh that is bash as on Fedora and others.
        (folder / "bin").mkdir()
        (folder / "bin/sh").symlink_to("/usr/bin/bash")
        start = "import sys; del sys.argv[0]; from runner.cli import entry; entry()\n"
        start = f"import sys; sys.path[:0] = {caller.environ['PYTHONPATH'].split(':')!r}\n{start}"
        write_file(folder / "bin/start.py", start)
        words = f'exec "{caller.python[0]}" -I "{folder}/bin/start.py" "$0" "$@"'
        self.runner = write_file(folder / "bin/runner", f"#!{folder}/bin/sh\n{words}\n", 0o755)
        self.server = self.add_server("server")
        caller.give(folder)

    def add_server(self, name: str) -> Path:
        path = self.project / name
        text = SERVER.replace("FILE", repr(str(path))).replace("SECRET", repr(str(self.secret)))
        path = self.write_file(path, text.replace("HOST", repr(str(self.file))), 0o755)
        self.caller.give(self.project)
        return path

    def write(self, entry: Mapping[str, Any]) -> None:
        self.write_file(self.file, json.dumps({"mcpServers": {"tool": dict(entry)}}))
        self.caller.give(self.project)

    def entry(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())["mcpServers"]["tool"]
        return found

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        entry = self.entry()
        change(entry)
        self.write(entry)

    def command(
        self, *words: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        argv = [*self.caller.prefix, *map(str, words)]
        environ = {**self.caller.environ, "PATH": "/usr/bin:/bin", **(env or {})}
        del environ["PYTHONPATH"]
        return subprocess.run(
            argv, env=environ, cwd=self.project, capture_output=True, text=True, timeout=60, input=""
        )

    def wrap(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        self.write(entry)
        done = self.command(self.runner, "wrap", self.file, "--yes")
        assert done.returncode == 0, done.stderr + done.stdout
        assert os.path.basename(self.entry()["command"]) == "runner", done.stdout
        return self.entry()

    def start(self, *, argv: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """`setpriv` and the like are not part of a host: variables are set for what they start."""
        entry = self.entry()
        variables = dict(entry.get("env") or {})
        if file := entry.get("envFile"):
            lines = Path(file.replace("${workspaceFolder}", str(self.project))).read_text().splitlines()
            variables = {**dict(line.split("=", 1) for line in lines), **variables}
        words = argv or (entry["command"], *entry["args"])
        words = tuple(word.replace("${workspaceFolder}", str(self.project)) for word in words)
        shell = [f"{name}={value}" for name, value in variables.items()]
        return self.command("/usr/bin/env", *shell, *words)

    def told(self, **how: Any) -> dict[str, Any]:
        done = self.start(**how)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["host"] is False  # it is caged
        return found

    def allow(self, *words: str | Path, file: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = self.command(self.runner, "allow", "--yes", *words, file or self.file)
        assert done.returncode == 0, done.stderr + done.stdout
        return done


@pytest.fixture
def host(account_user: Caller, plugin_dir: Path, write_file: Write) -> Host:
    return Host(account_user, plugin_dir, write_file)


def earlier(entry: dict[str, Any]) -> None:
    """The entry as the first version of `runner wrap` wrote it."""
    record = json.loads(entry["args"][2])
    del record["format"]
    entry["args"][2] = json.dumps(record)
    entry["env"] = {name.removeprefix(PLUGIN_PREFIX): value for name, value in entry["env"].items()}
    names = [word for name in entry["env"] for word in ("--env", name)]
    entry["args"][5:5] = names


# --- before the runner's first line -------------------------------------------------------------------------


@pytest.fixture
def library(host: Host, tmp_path: Path) -> tuple[Path, Path]:
    """A library that makes a file when it is loaded, and that file."""
    marker = host.project / "marker"
    source = tmp_path / "act.c"
    source.write_text(LIBRARY.replace("MARKER", json.dumps(str(marker))))
    built = host.project / "act.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, source], check=True, timeout=60)
    host.caller.give(host.project)
    return built, marker


def test_what_acts_before_the_runner_can_do_anything(host: Host, library: tuple[Path, Path]) -> None:
    built, marker = library
    attacks = ({"LD_PRELOAD": str(built)}, {"SHELLOPTS": "xtrace", "PS4": f"$(: > {marker})"})
    for env in attacks:
        wrapped = host.wrap({"command": str(host.server), "env": {**env, "TOKEN": "t"}})
        assert all(name.startswith(PLUGIN_PREFIX) for name in wrapped["env"])
        host.start()
        assert not marker.exists()
        host.edit(earlier)  # the control
        host.start()
        assert marker.exists()
        marker.unlink()
        # Found and mended.
        check = host.command(host.runner, "check", host.file)
        assert check.returncode != 0 and "wrapped_unsafely" in check.stdout
        assert "an earlier version wrapped it" in " ".join(check.stdout.split())
        mended = host.command(host.runner, "wrap", host.file, "--yes")
        assert "will be wrapped anew" in mended.stdout
        assert host.entry() == wrapped
        assert host.command(host.runner, "check", host.file).returncode == 0


def test_libraries_in_c_see_no_variable_either(host: Host, library: tuple[Path, Path]) -> None:
    """OpenSSL reads OPENSSL_CONF when it is first used, and loads what that names."""
    built, marker = library
    conf = host.project / "openssl.cnf"
    conf.write_text(
        "openssl_conf = init\n[init]\nengines = engines\nproviders = providers\n"
        f"[engines]\nx = act\n[act]\ndynamic_path = {built}\ninit = 0\n"
        f"[providers]\nact = provider\ndefault = usual\n[provider]\nmodule = {built}\nactivate = 1\n"
        "[usual]\nactivate = 1\n"
    )
    use = "import ssl, hashlib; ssl.create_default_context(); hashlib.new('sha256')"
    env = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "OPENSSL_CONF": str(conf)}

    def run(code: str) -> bool:
        subprocess.run([sys.executable, "-c", code], env=env, timeout=60, capture_output=True)
        found = marker.exists()
        marker.unlink(missing_ok=True)
        return found

    assert run(use)  # the control
    assert not run(f"from runner.cli import drop_environment; drop_environment(); {use}")


# --- where the runner looks ---------------------------------------------------------------------------------


def test_what_tells_the_runner_where_to_look(host: Host) -> None:
    """Also where the names are as they were: an entry that somebody wrapped by hand, or long ago."""
    given = f'version = 1\n[read]\ndefault = ["{host.secret.parent}"]\nceiling = ["*"]\n'
    policy = host.write_file(host.project / "policy.toml", given)
    home = host.project / "home"
    home.mkdir()
    places = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_STATE_HOME": str(home / ".local/state"),
        "TMPDIR": str(home / "tmp"),
        "RUNNER_BWRAP": str(host.server),
    }
    host.caller.give(host.project)
    # The controls: each variable works where nobody wrapped the entry.
    host.write({"command": str(host.runner), "args": ["run", "--", str(host.server)]})
    assert host.told()["secret"] is None
    host.edit(lambda entry: entry.update(env={"RUNNER_POLICY": str(policy)}))
    assert host.told()["secret"] == "s3cret"
    host.edit(lambda entry: entry.update(env={"RUNNER_BWRAP": str(host.server)}))
    assert "named by RUNNER_BWRAP" in host.start().stderr
    del places["RUNNER_BWRAP"]
    host.edit(lambda entry: entry.update(env=places, args=["run", "--name", "x", "--", str(host.server)]))
    host.told()
    assert (home / ".local/state/runner").is_dir() and (home / ".cache/runner").is_dir()
    shutil.rmtree(home)
    home.mkdir()
    # And wrapped, under both names.
    places |= {"RUNNER_POLICY": str(policy), "RUNNER_BWRAP": str(host.server), "RUNNER_CACHE": "off"}
    host.wrap({"command": str(host.server), "env": places})
    for change in (lambda entry: None, earlier):
        host.edit(change)
        host.caller.give(host.project)
        told = host.told()
        assert told["secret"] is None
        assert told["env"]["RUNNER_POLICY"] == str(policy)  # it is the plugin's
        assert list(home.iterdir()) == []
    assert "an earlier version of runner wrap wrote this entry" in " ".join(host.start().stderr.split())
    assert (host.caller.home / ".local/state/runner").is_dir()


def test_an_approval_that_the_project_brings_is_not_used(host: Host) -> None:
    host.wrap({"command": str(host.server)})
    host.allow("--read", host.secret.parent)
    assert host.told()["secret"] == "s3cret"  # the control: such an approval works
    theirs = host.project / "home/.config"
    theirs.parent.mkdir()
    shutil.move(host.caller.home / ".config/runner", theirs / "runner")
    host.caller.give(host.project)
    variables = {"XDG_CONFIG_HOME": str(theirs), "HOME": str(theirs.parent)}
    # The control: the variable works where nobody wrapped the entry.
    exec_ = ("/usr/bin/env", f"XDG_CONFIG_HOME={theirs}", str(host.runner), "exec", str(host.file))
    assert json.loads(host.command(*exec_).stdout)["secret"] is None
    host.write({"command": str(host.server)})
    assert json.loads(host.command(*exec_).stdout)["secret"] == "s3cret"
    host.wrap({"command": str(host.server)})
    host.edit(lambda entry: entry.update(env=variables))
    assert host.told()["secret"] is None
    check = host.command(host.runner, "check", host.file)
    assert check.returncode != 0
    assert "these act on the runner itself: 'XDG_CONFIG_HOME', 'HOME'" in " ".join(check.stdout.split())


def test_one_entry_has_one_state_and_no_other_start_gets_it(host: Host) -> None:
    """Started by its host, or by its file, before and after it is wrapped."""
    entry = {"command": "${workspaceFolder}/server"}
    asks = {"env": {"DATA": "${state_dir}/x", "OWN": "${plugin_dir}"}}
    elsewhere = {"XDG_STATE_HOME": str(host.caller.home / "elsewhere")}

    def by_file(**variables: str) -> list[str]:
        done = host.command(host.runner, "exec", host.file, env=variables)
        assert done.stdout, done.stderr
        told = json.loads(done.stdout)["env"]
        return [told["DATA"], told["OWN"]]

    def states(*words: str) -> str:
        """The state of the entry with these words, the same each way."""
        written = {**entry, "args": words, **asks}
        host.write(written)
        before = by_file()
        host.wrap(written)
        told = host.told()["env"]
        state: str = told["RUNNER_STATE_DIR"]
        expected = [f"{state}/x", str(host.file.parent)]
        assert [before, by_file(), by_file(**elsewhere)] == [expected] * 3
        assert [told["DATA"], told["OWN"]] == expected
        return state

    own = states("${state_dir}/a", "b")
    assert states("b") == own
    # A cloned project's server. Its entry claims to be this one, and its host has filled in the clone.
    (host.project / "clone").mkdir()
    clone = host.add_server("clone/server")
    args = host.entry()["args"]
    forged = [word.replace("${workspaceFolder}", str(clone.parent)) for word in args]
    told = host.told(argv=(host.entry()["command"], *forged))
    assert told["file"] == str(clone)  # the control: it is started
    assert told["env"]["RUNNER_STATE_DIR"] != own


def test_a_user_without_an_account_has_no_home(host: Host, runner_as_user: Caller) -> None:
    wrapped = host.wrap({"command": str(host.server)})
    done = runner_as_user(*wrapped["args"])  # the account is only in the namespace of the host
    assert done.returncode == 125 and "in the password database" in " ".join(done.stderr.split())


# --- which program it is ------------------------------------------------------------------------------------


def test_a_yes_for_one_program_is_none_for_another_of_its_name(host: Host) -> None:
    for name in ("mine", "theirs"):
        host.add_server(f"{name}/tool")
    entry = {"command": "tool", "env": {"PATH": f"{host.project}/mine:/usr/bin"}}
    host.wrap(entry)
    shown = host.allow("--read", host.secret.parent)
    assert f"program {host.project}/mine/tool" in shown.stdout
    told = host.told()
    assert (told["secret"], told["file"]) == ("s3cret", f"{host.project}/mine/tool")  # the control
    host.edit(lambda entry: entry["env"].update(PLUGIN_ENV_PATH=f"{host.project}/theirs:/usr/bin"))
    done = host.start()
    told = json.loads(done.stdout)
    assert (told["secret"], told["file"]) == (None, f"{host.project}/theirs/tool")
    said = " ".join(done.stderr.split())
    assert f"it is for {host.project}/mine/tool with PATH=" in said
    assert f"and this is {host.project}/theirs/tool with PATH=" in said
    assert f"runner allow {host.file} --server tool" in said
    # A program that another user could replace.
    host.edit(lambda entry: entry["env"].update(PLUGIN_ENV_PATH=f"{host.project}/mine:/usr/bin"))
    (host.project / "mine").chmod(0o777)
    refused = host.start()
    assert (refused.returncode, refused.stdout) == (126, "")
    assert "can be written by its group or by everybody" in " ".join(refused.stderr.split())
    again = host.command(host.runner, "allow", "--yes", "--read", "/srv", host.file)
    assert again.returncode != 0 and "can be written by" in " ".join(again.stderr.split())


def _tool(word: str, secret: Path) -> str:
    return f"#!/bin/sh\necho {word} $(cat {secret} 2>/dev/null)\n"


@pytest.mark.parametrize("variable", ["PLUGIN_ENV_PATH", "PATH"])
def test_a_path_of_the_entry_chooses_no_other_interpreter(host: Host, variable: str) -> None:
    """The program stays, and `env` in its first line finds another one."""
    person = host.caller.home / "bin"
    host.write_file(person / "mynode", _tool("mine", host.secret), 0o755)
    host.write_file(person / "server", "#!/usr/bin/env mynode\n", 0o755)
    host.write_file(host.project / "bin/mynode", _tool("theirs", host.secret), 0o755)
    host.caller.give(person)
    # The person's PATH: the host and `runner allow` have the same.
    own = f"{person}:/usr/bin:/bin"
    host.wrap({"command": str(person / "server")})

    def start(path: str, **variables: str) -> subprocess.CompletedProcess[str]:
        entry = host.entry()
        return host.command(entry["command"], *entry["args"], env={"PATH": path, **variables})

    words = ("allow", "--yes", "--read", host.secret.parent, host.file)
    allowed = host.command(host.runner, *words, env={"PATH": own})
    assert allowed.returncode == 0 and f"with {person}/mynode" in allowed.stdout, allowed.stderr
    assert start(own).stdout == "mine s3cret\n"  # the control
    other = f"{host.project}/bin:/usr/bin:/bin"
    if variable == "PATH":
        done = start(other)
    else:  # the project's file has it by now, or nothing would start
        document = json.loads(host.file.read_text())
        document["mcpServers"]["tool"]["env"] = {variable: other}
        host.file.write_text(json.dumps(document))
        done = start(own, PLUGIN_ENV_PATH=other)
    assert "s3cret" not in done.stdout
    said = " ".join(done.stderr.split())
    assert "your approval of" in said and f"is for {person}/server with {person}/mynode" in said
    # An upgrade asks nobody again: the same names with another content.
    (person / "mynode").unlink()
    host.write_file(person / "mynode", _tool("newer", host.secret), 0o755)
    host.caller.give(person)
    assert start(own).stdout == "newer s3cret\n"


def test_a_path_of_the_entry_finds_nothing_else_in_the_cage(host: Host) -> None:
    """The program calls others by their bare names, as launchers do."""
    program = host.write_file(host.caller.home / "bin/server", "#!/bin/sh\nid -u\n", 0o755)
    host.write_file(host.project / "bin/id", _tool("theirs", host.secret), 0o755)
    file = host.write_file(host.project / ".env", "PLAIN=1\n")
    host.caller.give(program.parent)
    host.wrap({"command": str(program), "envFile": "${workspaceFolder}/.env"})
    host.allow("--read", host.secret.parent, "--read", host.project)
    uid = host.start().stdout
    assert uid.strip().isdecimal()
    path = f"PATH={host.project}/bin:/usr/bin"
    file.write_text(f"{path}\n")
    done = host.start()
    assert (done.returncode, done.stdout) == (126, "")
    assert "a file of variables may not set it" in " ".join(done.stderr.split())
    file.write_text("PLAIN=1\n")
    host.edit(lambda entry: entry.update(env={PLUGIN_PREFIX + "PATH": path[5:]}))
    done = host.start()
    assert "s3cret" not in done.stdout and f"and this is {program} with {path}" in " ".join(
        done.stderr.split()
    )
    host.allow("--read", host.secret.parent, "--read", host.project)
    assert host.start().stdout == "theirs s3cret\n"  # the control: a yes for this PATH


def test_a_link_that_leads_elsewhere_since_is_another_program(host: Host) -> None:
    person = host.caller.home / "bin"
    for name in ("mine", "theirs"):
        host.write_file(person / name, _tool(name, host.secret), 0o755)
    (person / "tool").symlink_to("mine")
    host.caller.give(person)
    host.wrap({"command": str(person / "tool")})
    host.allow("--read", host.secret.parent)
    assert host.start().stdout == "mine s3cret\n"  # the control
    (person / "tool").unlink()
    (person / "tool").symlink_to("theirs")
    host.caller.give(person)
    assert host.start().stdout == "theirs\n"


@pytest.mark.parametrize("part", ["script", "interpreter"])
def test_code_that_others_could_replace_gets_nothing(host: Host, part: str) -> None:
    """Not only the program: its script and the interpreter of its first line are as good as it."""
    shared = host.project.parent / "shared"
    sh = shared / "sh"
    script = host.write_file(shared / "text.sh", _tool("mine", host.secret), 0o755)
    entry = {"command": "/bin/sh", "args": [str(script)]}
    if part == "interpreter":
        shutil.copy("/bin/sh", sh)
        script = host.write_file(host.project / "tool", f"#!{sh}\ncat {host.secret}\n", 0o755)
        entry = {"command": str(script)}
    host.caller.give(shared)
    host.wrap(entry)
    weak = sh if part == "interpreter" else script
    weak.chmod(0o777)
    words = ("allow", "--yes", "--read", host.secret.parent, host.file)
    refused = host.command(host.runner, *words)
    assert refused.returncode != 0 and "can be written by" in " ".join(refused.stderr.split())
    weak.chmod(0o755)
    host.allow("--read", host.secret.parent, "--read", shared)
    assert "s3cret" in host.start().stdout  # the control
    weak.chmod(0o777)
    done = host.start()
    assert (done.returncode, done.stdout) == (126, "")
    assert f"nothing is allowed for {weak}" in "".join(done.stderr.split("\n")).replace("  ", " ")


def test_an_approval_of_the_first_version_is_told_and_replaced(host: Host) -> None:
    host.wrap({"command": str(host.server)})
    host.allow("--read", host.secret.parent)
    [path] = (host.caller.home / ".config/runner/approvals").iterdir()
    record = json.loads(path.read_text())
    del record["plugin"]["program"], record["plugin"]["chosen"]
    old = path.with_name(path.name[8:])
    old.write_text(json.dumps({**record, "version": 1}))
    old.chmod(0o600)
    path.unlink()
    host.caller.give(old)
    done = host.start()
    assert json.loads(done.stdout)["secret"] is None
    assert "approvals now name the program" in " ".join(done.stderr.split())
    assert "approvals now" not in host.start().stderr  # told once
    # With the variables of a shell too: they do not lead to the approvals of wrapped entries.
    elsewhere = {"XDG_CONFIG_HOME": str(host.project / "xdg")}
    listed = host.command(host.runner, "allow", "--list", env=elsewhere).stdout
    assert "does not count any more" in " ".join(listed.split())
    host.allow()  # what was added then is shown and asked for again
    assert host.told()["secret"] == "s3cret"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    revoked = host.command(host.runner, "allow", "--revoke", host.file, env=elsewhere)
    assert revoked.returncode == 0 and list(path.parent.iterdir()) == [], revoked.stderr


# --- files of variables -------------------------------------------------------------------------------------


def test_a_file_of_variables_that_changes_after_wrap(host: Host, library: tuple[Path, Path]) -> None:
    built, marker = library
    file = host.write_file(host.project / ".env", "TOKEN=one\nPLAIN=1\n")
    entry = {"command": str(host.server), "envFile": "${workspaceFolder}/.env", "env": {"TOKEN": "own"}}
    host.wrap(entry)
    env = host.told()["env"]
    assert (env["TOKEN"], env["PLAIN"]) == ("own", "1")
    by_exec = json.loads(host.command(host.runner, "exec", host.file).stdout)["env"]
    assert (by_exec["TOKEN"], by_exec["PLAIN"]) == ("own", "1")
    file.write_text(f"LD_PRELOAD={built}\nRUNNER_POLICY={host.project}/policy.toml\n")
    refused = host.start()
    assert (refused.returncode, refused.stdout) == (126, "") and not marker.exists()
    assert "a file of variables may not set it" in " ".join(refused.stderr.split())
    file.write_text(f"RUNNER_POLICY={host.project}/policy.toml\n")
    assert host.told()["env"]["RUNNER_POLICY"]
    # Nor does it choose another file, by what it says about itself.
    foreign = host.write_file(host.secret.parent / "foreign.env", "SECRET=1\n")
    own = host.write_file(
        host.caller.home / ".cursor/mcp.json", json.dumps({"mcpServers": {"tool": {"command": "x"}}})
    )
    host.caller.give(own.parent)
    wrapped = host.entry()
    for claim in (host.file, own):
        options = ["run", "--wrapped", json.dumps({"file": str(claim), "format": "2"}), "--name", "tool"]
        words = [*options, f"--env-file={foreign}", "--", str(host.server)]
        host.write({**wrapped, "args": words})
        refused = host.start()
        assert refused.returncode in (2, 126) and not refused.stdout
        why = "no entry tool with this command line" if claim == own else f"it is outside of {host.project}"
        assert why in " ".join(refused.stderr.split())
    host.write(wrapped)
    undone = host.command(host.runner, "wrap", host.file, "--undo", "--yes")
    assert undone.returncode == 0 and host.entry() == entry
    file.write_text(f"LD_PRELOAD={built}\n")
    host.start(argv=("/bin/true",))  # the control
    assert marker.exists()


# --- what only looks caged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["./runner", "runner", "PROJECT/runner"])
def test_another_program_called_runner_is_not_taken_for_a_cage(host: Host, command: str) -> None:
    host.write_file(host.project / "runner", host.server.read_text(), 0o755)
    command = command.replace("PROJECT", str(host.project))
    env = {"PATH": f"{host.project}:/usr/bin"} if command == "runner" else {}
    record = json.dumps({"file": str(host.file), "format": "2"})
    for args in (["run", "--", "x"], ["run", "--wrapped", record, "--name", "tool", "--", str(host.server)]):
        host.write({"command": command, "args": args, "env": env})
        told = host.command(host.runner, "wrap", "--find", host.file).stdout
        assert "tool: not wrapped" in told and "cage" not in told
        done = host.command(host.runner, "wrap", "--dry-run", host.file).stdout
        assert "already" not in done and ("will run in a cage" in done or "wrapped anew" in done)
        check = host.command(host.runner, "check", host.file)
        assert "--wrapped" not in args or (check.returncode != 0 and "another program" in check.stdout)
    host.wrap(host.entry())
    assert host.told()["file"] == str(host.server)


def test_this_runner_by_hand_is_shown_with_its_options(host: Host) -> None:
    def told(*args: str, env: Mapping[str, str] | None = None) -> list[str]:
        host.write({"command": str(host.runner), "args": [*args, "--", str(host.server)], "env": env or {}})
        done = [
            host.command(host.runner, *verb, host.file)
            for verb in (("wrap", "--dry-run"), ("wrap", "--find"), ("check",))
        ]
        assert (done[2].returncode != 0) == ("error:" in done[2].stdout)
        return [" ".join(each.stdout.split()) for each in done]

    acting = {"XDG_CONFIG_HOME": "/x", "TOKEN": "t"}
    for said in told("run", "--policy", "/srv/p.toml", "--write", "/srv", env=acting):
        assert "cage already" not in said
        assert (
            "by options of its own: --policy /srv/p.toml --write /srv; runner wrap cannot judge them" in said
        )
        assert "chooses what only you should choose: --policy" in said
        assert "these act on the runner itself: 'XDG_CONFIG_HOME'" in said and "'TOKEN'" not in said
    for words in (("exec", "--policy", "p", "."), ("run", "--report", "r"), ("exec", "--secret=a=@f", ".")):
        *shown, check = told(*words)
        assert "error: wrapped_unsafely" in check and "cage already" not in " ".join((*shown, check))
    # What an option gives is the word of the project that the file came with.
    given = (("run", "--net", "host"), ("run", "--read=/srv"), ("run", "--env", "AWS_KEY"))
    for some in given:
        assert "error: wrapped_unsafely" in told(*some)[2]
    *shown, check = told("exec", ".", "--inspect")
    assert "warning: runner_by_hand" in check and "error:" not in check
    assert "cage already" not in " ".join((*shown, check))
    assert all("runs in a cage already" in said for said in told("run", "--memory", "1G"))  # the control
    host.file = host.caller.home / ".cursor/mcp.json"  # and so is a person's own file
    for some in given:
        *shown, check = told(*some)
        assert "warning: runner_by_hand" in check and "error:" not in check


def test_a_link_of_the_project_is_not_this_runner(host: Host) -> None:
    """Through a link `runner` looks for its Python in the folder of whoever made the link."""
    shutil.copy(ROOT / "scripts/entry/runner", host.runner)  # as it is installed
    venv = host.runner.parent.parent
    host.write_file(venv / "pyvenv.cfg", "")
    (host.runner.parent / "start.py").rename(host.runner.parent / "runner-start")
    words = f'#!/bin/sh\nshift 2; exec "{host.caller.python[0]}" -I "$@"\n'
    host.write_file(host.runner.parent / "python", words, 0o755)
    link, marker = host.project / "bin/runner", host.project / "marker"
    host.write_file(host.project / "pyvenv.cfg", "")
    host.write_file(host.project / "bin/runner-start", "")
    host.write_file(host.project / "bin/python", f"#!/bin/sh\n: > {marker}\n", 0o755)
    link.symlink_to(host.runner)
    host.caller.give(host.project)
    wrapped = host.wrap({"command": str(host.server)})
    assert host.told()["file"] == str(host.server)
    for command in ("/proc/self/cwd/bin/runner", str(link)):
        host.write({**wrapped, "command": command})
        find = host.command(host.runner, "wrap", "--find", host.file).stdout
        assert "not wrapped, although it looks so: it starts another program" in " ".join(find.split())
        check = host.command(host.runner, "check", host.file)
        assert check.returncode != 0 and "another program" in check.stdout
        host.start()
        assert marker.exists()  # the control: it is the project's program that starts
        marker.unlink()
        assert "wrapped anew" in host.command(host.runner, "wrap", host.file, "--yes").stdout
        assert host.entry() == wrapped
        host.start()
        assert not marker.exists()


# --- what an entry that looks wrapped asks of the runner ----------------------------------------------------


def test_options_of_an_entry_neither_give_nor_name_places(host: Host) -> None:
    wrapped = host.wrap({"command": str(host.server)})
    folder = host.secret.parent
    policy = host.write_file(
        host.project / "policy.toml",
        f'version = 1\n[read]\ndefault = ["{folder}"]\nceiling = ["*"]\n',
    )
    victim = host.write_file(host.caller.home / ".bashrc", "mine")
    host.caller.give(victim)
    host.caller.give(host.project)
    attacks = {
        ("--read", str(folder)): "s3cret",
        ("--policy", str(policy)): "s3cret",
        (f"--report={victim}",): None,
        (f"--events={victim}",): None,
        ("--state-dir", str(host.caller.home)): None,
        ("--env", "PYTHONPATH=/x"): None,
        ("--name", "tool"): None,  # twice, although both say the same
        ("--wrapped", wrapped["args"][2]): None,
    }
    for options, control in attacks.items():
        if control is not None:  # the same words of a person
            done = host.command(host.runner, "run", *options, "--", host.server)
            assert json.loads(done.stdout)["secret"] == control
        args = wrapped["args"]
        host.write({**wrapped, "args": [*args[:5], *options, *args[5:]]})
        refused = host.start()
        assert (refused.returncode, refused.stdout) == (2, ""), options
        assert victim.read_text() == "mine"
        check = host.command(host.runner, "check", host.file)
        assert check.returncode != 0 and "error: wrapped_unsafely" in check.stdout, options
    # Without them it starts, and with a limit.
    host.write({**wrapped, "args": [*wrapped["args"][:5], "--read", str(folder), *wrapped["args"][5:]]})
    assert "does not start with" in host.command(host.runner, "wrap", host.file, "--yes").stdout
    assert host.entry() == wrapped
    host.write({**wrapped, "args": [*wrapped["args"][:5], "--deadline", "30", *wrapped["args"][5:]]})
    assert host.told()["secret"] is None


def test_the_hosts_own_variables_need_a_yes(host: Host) -> None:
    wrapped = host.wrap({"command": str(host.server)})
    host.write({**wrapped, "args": [*wrapped["args"][:5], "--env", "AWS_KEY", *wrapped["args"][5:]]})
    words = (wrapped["command"], *host.entry()["args"])

    def start(*words: str) -> dict[str, str]:
        done = host.command(*words, env={"AWS_KEY": "aws"})
        found: dict[str, str] = json.loads(done.stdout)["env"]
        return found

    assert "AWS_KEY" not in start(*words)
    noted = " ".join(host.command(*words, env={"AWS_KEY": "aws"}).stderr.split())
    assert "which need your yes: AWS_KEY; to allow it: runner allow --env AWS_KEY" in noted
    allow = (host.runner, "allow", "--yes", "--env", "AWS_KEY", host.file)
    assert host.command(*allow, env={"AWS_KEY": "aws"}).returncode == 0
    assert start(*words)["AWS_KEY"] == "aws"  # the control
    # A person's own configuration passes on what it names.
    own = host.caller.home / ".cursor/mcp.json"
    mine = [word.replace(str(host.file), str(own)) for word in words]
    entry = {"command": mine[0], "args": mine[1:]}
    host.write_file(own, json.dumps({"mcpServers": {"tool": entry}}), 0o600)
    host.caller.give(own.parent)
    assert start(*mine)["AWS_KEY"] == "aws"
    # Also one that is kept elsewhere, with a link in the host's place.
    kept = host.caller.home / "dotfiles.json"
    host.write_file(kept, own.read_text().replace(str(own), str(kept)), 0o600)
    host.caller.give(kept)
    own.unlink()
    linked = [word.replace(str(own), str(kept)) for word in mine]
    assert "AWS_KEY" not in start(*linked)
    own.symlink_to(kept)
    assert start(*linked)["AWS_KEY"] == "aws"


def test_a_record_that_a_host_would_fill_in_is_none_of_ours(host: Host) -> None:
    """What `check` reads is what the runner gets, and a path says where it leads only if it is real."""
    entry = host.wrap({"command": str(host.server)})
    args = entry["args"]
    host.write_file(host.project / "x/.cursor/mcp.json", "{}")
    (host.project / "x/y").mkdir()
    (host.project / "link").symlink_to("x/y")
    foreign = f"{host.project}/link/../.cursor/mcp.json"  # for the kernel: that of x
    tricky = f'{{"file":"${{HOME:-","file":"{host.file}","format":"2","x":"}}{foreign}","format":"2"}}'
    host.write({**entry, "args": [*args[:2], tricky, *args[3:]]})
    assert json.loads(tricky)["file"] == str(
        host.file
    )  # the control: read as it is written, it looks like ours
    check = host.command(host.runner, "check", host.file)
    assert check.returncode != 0 and "error: wrapped_unsafely" in check.stdout
    claim = json.dumps({"file": foreign, "format": "2"})
    words = [*args[:2], claim, *args[3:]]
    host.write_file(Path(foreign), json.dumps({"mcpServers": {"tool": {**entry, "args": words}}}))
    refused = host.command(entry["command"], *words)
    assert refused.returncode == 2 and "is not the real path" in refused.stderr


def test_a_second_table_of_variables(host: Host) -> None:
    """Whether a host reads it is not known."""
    entry = host.wrap({"command": str(host.server), "env": {"TOKEN": "t"}})
    assert host.command(host.runner, "check", host.file).returncode == 0  # the control
    for key in ("environment", "ENV", "envs"):
        host.write({**entry, key: {"LD_PRELOAD": "/x.so"}})
        check = host.command(host.runner, "check", host.file)
        assert check.returncode != 0 and f"'{key}'" in check.stdout
        host.write({"command": str(host.server), key: {"LD_PRELOAD": "/x.so"}})
        assert "will run in a cage" not in host.command(host.runner, "wrap", "--dry-run", host.file).stdout


def test_an_entry_that_claims_another_configuration(host: Host) -> None:
    """Its approvals and its state are those of the configuration, so that must have the very entry."""
    own = host.caller.home / ".cursor/mcp.json"
    host.write_file(own, json.dumps({"mcpServers": {"tool": {"command": str(host.server)}}}), 0o600)
    host.caller.give(own.parent)
    assert host.command(host.runner, "wrap", own, "--yes").returncode == 0
    host.allow("--read", host.secret.parent, file=own)
    entry = json.loads(own.read_text())["mcpServers"]["tool"]
    host.write(entry)
    assert host.told()["secret"] == "s3cret"  # the control: as its own host starts it
    args = entry["args"]
    scoped = json.dumps({"file": str(own), "format": "2", "scope": "/"})
    for change in (
        {"env": {"PLUGIN_ENV_DUMP": "/etc"}},
        {"args": [*args, "more"]},
        {"args": [*args[:5], "--env", "AWS_KEY", *args[5:]]},
        {"args": [*args[:2], scoped, *args[3:]]},
        {"args": [*args[:2], json.dumps({"file": str(own)}), *args[3:]]},
    ):
        host.write({**entry, **change})
        refused = host.start()
        assert (refused.returncode, refused.stdout) == (2, "") and str(own) in refused.stderr
    host.write(entry)
    check = host.command(host.runner, "check", host.file)
    assert check.returncode != 0 and "another configuration" in " ".join(check.stdout.split())
    assert "wrapped anew" in host.command(host.runner, "wrap", host.file, "--yes").stdout
    assert json.loads(host.entry()["args"][2])["file"] == str(host.file)
    assert host.told()["secret"] is None
