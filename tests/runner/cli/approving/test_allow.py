"""`runner allow`: what is shown, what is recorded, and who gets it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.mcp.hosts.wrapping import split_wrapped
from tests.conftest import USER_UID, Caller
from tests.tables import one_case

Write = Callable[..., Path]


class Server:
    """One server of an mcp.json, which prints a file."""

    def __init__(self, caller: Caller, folder: Path, write_file: Write, name: str = "mcp.json") -> None:
        self.caller = caller
        self.file = folder / name
        self.data = write_file(folder / "data" / "text", "found\n").parent
        self.more = write_file(folder / "more" / "text", "more\n").parent
        self._write_file = write_file
        self.write({"read": [str(self.data)]})

    def write(
        self, asks: dict[str, Any] | None, args: Sequence[str] = (), name: str = "one", **entry: Any
    ) -> None:
        words = list(args) or [str(self.data / "text")]
        server = {"command": "/bin/cat", "args": words, **({"x-sandbox": asks} if asks else {}), **entry}
        self._write_file(self.file, json.dumps({"mcpServers": {name: server}}))

    def allow(self, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.caller("allow", *words, self.file, **more)

    def exec(self, *words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.caller("exec", *words, self.file, **more)

    def records(self) -> list[Path]:
        return sorted((self.caller.home / ".config/runner/approvals").glob("*"))

    def record(self) -> dict[str, Any]:
        [path] = self.records()
        data: dict[str, Any] = json.loads(path.read_text())
        return data


@pytest.fixture
def server(account_as: Caller, plugin_dir: Path, write_file: Write) -> Server:
    return Server(account_as, plugin_dir, write_file)


@pytest.fixture
def user_server(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> Server:
    """For what launches nothing."""
    return Server(runner_as_user, plugin_dir, write_file)


# --- a yes, and what it gives -------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_a_plugin_gets_what_was_allowed_and_nothing_before(server: Server) -> None:
    refused = server.exec()
    assert refused.returncode == 126
    assert f"to allow it: runner allow {server.file}; or the operator can add" in refused.stderr
    allowed = server.allow("--yes")
    assert (allowed.returncode, allowed.stderr) == (0, "")
    assert f"read  {server.data}" in allowed.stdout
    given = server.exec()
    assert (given.returncode, given.stdout) == (0, "found\n")
    [path] = server.records()
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.allow("--revoke").returncode == 0
    assert server.records() == []
    assert server.exec().returncode == 126


@pytest.mark.usefixtures("nothing_left")
def test_more_asked_is_not_covered_by_the_old_yes(server: Server) -> None:
    assert server.allow("--yes").returncode == 0
    assert server.exec().returncode == 0
    server.write({"read": [str(server.data), str(server.more)]})
    refused = server.exec()
    assert refused.returncode == 126
    assert str(server.more) in refused.stderr and f"{server.data}:" not in refused.stderr
    assert "your approval of 20" in refused.stderr and "does not cover it" in refused.stderr
    assert f"to see what is new: runner allow --diff {server.file}" in refused.stderr
    diff = server.allow("--diff")
    assert diff.returncode == 1
    lines = [line for line in diff.stdout.splitlines() if line[:1] in "+-"]
    assert len(lines) == 2 and not lines[1]  # and an empty one
    assert lines[0].startswith("+ ") and str(server.more) in lines[0]
    assert f"To allow what is new: runner allow {server.file}" in diff.stdout
    again = server.allow("--yes")
    assert "NEW since your last yes" in again.stdout
    assert server.exec().returncode == 0
    assert server.allow("--diff").returncode == 0


def test_after_an_upgrade_the_difference_to_the_former_yes_is_shown(user_server: Server) -> None:
    """Its command line is another, or its file. Nothing of the former yes counts, so all is shown."""
    server, folder = user_server, user_server.file.parent
    assert server.allow("--yes", "--net", "old.example").returncode == 0
    server.write({"read": [str(server.data), str(server.more)]}, ["--version=2", str(server.data / "text")])
    upgraded = server.allow("--diff")
    server.file = folder / "2.0" / "mcp.json"
    server.file.parent.mkdir()
    server.write({"read": [str(server.more)]})
    moved = server.allow("--diff")
    for diff, why, marks in (
        (upgraded, "its command or arguments are others now", (" ", "+", "-")),
        (moved, f"it is for {folder / 'mcp.json'}", ("-", "+", "-")),
    ):
        assert (diff.returncode, diff.stderr) == (1, ""), diff
        head, *lines = diff.stdout.splitlines()
        assert head.startswith("one (mcp); your yes of 20") and head.endswith(f"does not count: {why}"), head
        found = [
            next((line[0] for line in lines if text in line), "")
            for text in (f"{server.data} ".rstrip(), str(server.more), "old.example")
        ]
        assert tuple(found) == marks, diff.stdout
        assert lines[-1].startswith("To allow it: runner allow ")
    # Of another name there is none, and a yes for the upgrade is an end of it.
    server.write({"read": [str(server.more)]}, name="two")
    assert "you have allowed nothing for this plugin" in server.allow("--diff").stderr
    server.write({"read": [str(server.more)]})
    assert server.allow("--yes").returncode == 0
    assert "it asks for the same as then" in server.allow("--diff").stdout


@pytest.mark.usefixtures("nothing_left")
def test_less_asked_is_covered(server: Server) -> None:
    server.write({"read": [str(server.data), str(server.more)]})
    assert server.allow("--yes").returncode == 0
    server.write({"read": [str(server.data)]})
    assert server.exec().returncode == 0
    diff = server.allow("--diff")
    assert diff.returncode == 1
    assert any(line.startswith("- ") and str(server.more) in line for line in diff.stdout.splitlines())


@pytest.mark.usefixtures("nothing_left")
def test_other_arguments_another_file_and_another_name_get_nothing_of_it(
    server: Server, plugin_dir: Path, write_file: Write
) -> None:
    asks = {"read": [str(server.data), str(server.more)]}
    server.write(asks)
    assert server.allow("--yes").returncode == 0
    assert server.exec().returncode == 0  # the control
    server.write(asks, args=[str(server.more / "text")])
    assert server.exec().returncode == 126
    server.write(asks, name="two")
    assert server.exec().returncode == 126
    clone = Server(server.caller, plugin_dir / "clone", write_file)
    clone.write(asks, args=[str(server.data / "text")])
    assert clone.exec().returncode == 126
    server.write(asks)
    assert server.exec().returncode == 0  # the control


@pytest.mark.usefixtures("nothing_left")
def test_a_server_that_asks_nothing_gets_what_is_added(server: Server) -> None:
    server.write(None)
    allowed = server.allow("--yes", "--read", server.data)
    assert allowed.returncode == 0
    assert "It asks for nothing beyond" in allowed.stdout and "You allow besides:" in allowed.stdout
    assert server.exec().stdout == "found\n"
    assert (server.record()["asked"]["read"], server.record()["added"]["read"]) == ([], [str(server.data)])
    # A second one is added to the first.
    assert server.allow("--yes", "--read", server.more).returncode == 0
    assert server.record()["added"]["read"] == [str(server.data), str(server.more)]
    assert server.exec().stdout == "found\n"


@pytest.mark.usefixtures("nothing_left")
def test_added_variables_and_writable_folders_reach_the_plugin(server: Server) -> None:
    if os.geteuid() == 0:  # what root's plugins write belongs to the folder's owner, and never to root
        os.chown(server.more, USER_UID, USER_UID)
    server.write(None, args=["-c", f'echo "$GREETING" > {server.more}/new'], command="/bin/sh")
    named = server.allow("--yes", "--env", "GREETING")  # alone, and while it is not set
    assert named.returncode == 0, named.stderr
    assert server.allow("--yes", "--write", server.more).returncode == 0
    done = server.exec(env={"GREETING": "hello"})
    assert (done.returncode, done.stderr) == (0, "")
    assert (server.more / "new").read_text() == "hello\n"
    # A variable that is not set at some launch is no reason to refuse it.
    assert server.exec().returncode == 0
    assert (server.more / "new").read_text() == "\n"


@pytest.mark.usefixtures("nothing_left")
def test_a_path_that_was_added_and_is_gone_is_skipped(server: Server) -> None:
    server.write(None, args=["/etc/ld.so.cache"])
    assert server.allow("--yes", "--read", server.more).returncode == 0
    (server.more / "text").unlink()
    server.more.rmdir()
    assert server.exec().returncode == 0


@pytest.mark.usefixtures("nothing_left")
def test_the_folder_it_works_on_can_be_allowed(server: Server) -> None:
    server.write(None, args=["text"], cwd="data")
    refused = server.exec()
    assert refused.returncode == 126
    assert f"to allow it: runner allow {server.file}; or" in refused.stderr
    allowed = server.allow("--yes")
    assert allowed.returncode == 0 and f"project  {server.data}" in allowed.stdout
    assert server.exec().stdout == "found\n"
    strict = server.exec("--policy", "strict")
    assert strict.returncode in (125, 126) and strict.stdout == ""


@pytest.mark.usefixtures("nothing_left")
def test_strict_lets_nobody_allow_anything(server: Server) -> None:
    assert server.allow("--yes").returncode == 0
    assert server.exec().returncode == 0
    refused = server.exec("--policy", "strict")
    assert refused.returncode == 126
    assert "policy strict lets nobody approve reading it" in refused.stderr
    assert "runner allow" not in refused.stderr


def test_under_strict_nothing_is_recorded(user_server: Server) -> None:
    refused = user_server.allow("--yes", "--policy", "strict")
    assert refused.returncode == 21
    assert "CANNOT BE ALLOWED by you" in refused.stdout
    assert user_server.records() == []
    user_server.write(None)
    refused = user_server.allow("--yes", "--policy", "strict", "--read", user_server.data)
    assert refused.returncode == 21
    assert user_server.records() == []


@pytest.mark.usefixtures("nothing_left")
def test_the_denylist_is_nobodys_to_allow(server: Server) -> None:
    secret = server.caller.home / ".ssh"
    secret.mkdir(mode=0o700)
    (secret / "key").write_text("secret")
    server.caller.give(secret)
    server.write({"read": [str(server.data)]}, args=[str(secret / "key")])
    # By its name nothing is recorded: the plugin could not start with such a yes.
    link = server.data.parent / "link"
    link.symlink_to(secret)
    for path in (secret, secret / "key", link):
        told = server.allow("--yes", "--read", path)
        assert (told.returncode, server.records()) == (21, [])
        assert f"--read {path}: it " in told.stderr and "nothing is recorded" in told.stderr
    # What becomes one later is refused at the launch.
    link.unlink()
    link.mkdir()
    assert server.allow("--yes", "--read", link).returncode == 0
    assert server.exec().returncode == 1  # cat finds no such file
    link.rmdir()
    link.symlink_to(secret)
    refused = server.exec()
    assert refused.returncode == 126
    assert "your approval: symlink" in refused.stderr
    assert "secret" not in refused.stdout


def test_a_hosts_configuration_is_nobodys_to_allow(user_server: Server) -> None:
    place = user_server.caller.home / ".cursor"
    place.mkdir()
    user_server.caller.give(place)
    told = user_server.allow("--yes", "--write", place)
    assert (told.returncode, user_server.records()) == (21, [])
    assert "no plugin may write it" in told.stderr
    assert user_server.allow("--yes", "--read", place).returncode == 21  # a file in it may have tokens
    place = user_server.caller.home / ".vscode"
    place.mkdir()
    user_server.caller.give(place)
    assert user_server.allow("--yes", "--write", place).returncode == 21
    assert user_server.allow("--yes", "--read", place).returncode == 0


# --- records that are not one's own -------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", ["mode", "folder", "damaged", "link", "unknown"])
def test_a_record_that_cannot_be_trusted_stops_the_launch(server: Server, how: str) -> None:
    assert server.allow("--yes").returncode == 0
    assert server.exec().returncode == 0  # the control
    [path] = server.records()
    if how == "mode":
        path.chmod(0o620)
    elif how == "folder":
        path.parent.chmod(0o770)
    elif how == "damaged":
        path.write_text("{")
    elif how == "unknown":
        path.write_text(json.dumps({**json.loads(path.read_text()), "also": 1}))
    else:
        kept = path.rename(path.with_suffix(".kept"))
        path.symlink_to(kept)
        server.caller.give(path)
    refused = server.exec()
    assert (refused.returncode, refused.stdout) == (126, "")
    first, remedy = refused.stderr.splitlines()
    assert first.startswith("runner: policy_denied: ") and str(path.parent) in first
    assert "chmod go-w" in remedy or "rm " in remedy


@pytest.mark.needs("root", "user")
@pytest.mark.usefixtures("nothing_left")
def test_a_record_of_another_user_stops_the_launch(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    server = Server(runner_as_user, plugin_dir, write_file)
    assert server.allow("--yes").returncode == 0
    [path] = server.records()
    os.chown(path, 54999, 54999)
    refused = server.exec()
    assert refused.returncode == 126
    assert "belongs to uid 54999" in refused.stderr


def test_the_list_shows_what_cannot_be_used(user_server: Server) -> None:
    assert user_server.allow("--yes").returncode == 0
    [path] = user_server.records()
    path.write_text("{")
    said = user_server.caller("allow", "--list")
    assert said.returncode == 0 and "UNUSABLE" in said.stdout and "rm " in said.stdout
    [entry] = json.loads(user_server.caller("allow", "--list", "--json").stdout)["approvals"]
    assert entry["usable"] is False
    assert user_server.caller("allow", "--revoke", path.stem).returncode == 0
    assert user_server.records() == []


# --- commands, and entries that are wrapped -----------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_a_command_with_a_name_gets_what_was_allowed_for_it(server: Server) -> None:
    command = ["--", "/bin/cat", str(server.data / "text")]
    run = server.caller("run", "--name", "shown", *command)
    assert run.returncode == 1  # cat does not find it
    allowed = server.caller("allow", "--yes", "--name", "shown", "--read", server.data, *command)
    assert (allowed.returncode, allowed.stderr) == (0, "")
    assert server.caller("run", "--name", "shown", *command).stdout == "found\n"
    assert server.caller("run", "--name", "other", *command).returncode == 1
    assert server.caller("run", *command).returncode == 1
    other = ["--", "/bin/cat", "-u", str(server.data / "text")]
    assert server.caller("run", "--name", "shown", *other).returncode == 1
    assert server.caller("allow", "--revoke", "--name", "shown", *command).returncode == 0
    assert server.caller("run", "--name", "shown", *command).returncode == 1


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.needs("root")
def test_a_wrapped_entry_and_what_its_host_starts_are_one(server: Server) -> None:
    old = ["/bin/cat", str(server.data / "text")]
    wrapped = json.dumps({"file": str(server.file)})
    args = ["run", "--wrapped", wrapped, "--name", "one", "--env", "TOKEN", "--", *old]
    assert split_wrapped(("/opt/runner", *args)) is not None
    server.write(None, args=args, command="/opt/runner")
    allowed = server.allow("--yes", "--server", "one", "--read", server.data)
    assert (allowed.returncode, allowed.stderr) == (0, "")
    assert f"runs    {' '.join(old)}" in allowed.stdout
    started = server.caller(*args, env={"TOKEN": "t"})
    assert (started.returncode, started.stdout) == (0, "found\n")
    # Before and after wrapping, the entry is the same plugin.
    server.write(None)
    assert server.exec().stdout == "found\n"


def test_an_entry_that_claims_another_configuration_is_not_allowed_for_it(server: Server) -> None:
    """Else a yes to what came with a project would be one for the caller's own server."""
    for claimed in ({"file": str(server.file) + "x"}, {}):
        args = ["run", "--wrapped", json.dumps(claimed), "--name", "one", "--", "/bin/cat"]
        server.write(None, args=args, command="/opt/runner")
        allowed = server.allow("--yes", "--server", "one", "--read", server.data)
        assert (allowed.returncode, allowed.stdout) == (2, "")
        assert ("for another configuration" if claimed else "not what runner wrap writes") in allowed.stderr
    assert server.caller("allow", "--list").stdout == "nothing is allowed\n"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.needs("root")
def test_two_servers_of_one_name_share_neither_state_nor_approvals(
    server: Server, plugin_dir: Path, write_file: Write
) -> None:
    """A cloned project that calls its server as another one does gets nothing of the other's."""
    mine, clone = (plugin_dir / name / "mcp.json" for name in ("mine", "clone"))
    keep = ["--", "/bin/sh", "-c", 'cat "$0/kept" 2>/dev/null; echo kept > "$0/kept"', "${state_dir}"]

    def run(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
        args = ["run", "--wrapped", json.dumps({"file": str(file)}), "--name", "github", *words]
        entry = {"command": "/opt/runner", "args": args}
        write_file(file, json.dumps({"mcpServers": {"github": entry}}))
        return server.caller(*args)

    assert [run(mine, *keep).stdout, run(mine, *keep).stdout] == ["", "kept\n"]  # the control
    assert run(clone, *keep).stdout == ""
    assert run(mine, *keep, "other").stdout == "kept\n"  # it is the same entry with other arguments
    states = server.caller("state", "list", "--json").stdout
    ours = [each for each in json.loads(states)["states"] if str(plugin_dir) in (each["manifest"] or "")]
    assert len(ours) == 2
    for each in ours:
        assert server.caller("state", "remove", each["name"]).returncode == 0


# --- what is shown ------------------------------------------------------------------------------------------


def test_unusual_requests_stand_out(user_server: Server) -> None:
    home = user_server.caller.home
    user_server.write(
        {
            "read": [str(user_server.data), "~/notes"],
            "write": [str(user_server.more)],
            "network": ["api.example.com:443", "*.example.org:443", "10.1.2.3:5432", "example.net:*"],
            "env": ["EDITOR", "GITHUB_TOKEN", "LD_PRELOAD"],
            "seccomp": "compat",
            "limits": {"memory": "2G"},
        },
        args=[
            str(user_server.more / "text"),
            f"--config={user_server.file.parent}",
            "--level=/no/such",
            "/etc/shadow",
        ],
    )
    said = user_server.allow()
    assert said.returncode == 2
    assert "there is no terminal to ask on; --yes" in said.stderr
    assert user_server.records() == []
    lines = {" ".join(line.split()) for line in said.stdout.splitlines()}
    marked = sorted(line for line in lines if line.startswith("! "))
    assert marked == sorted(
        [
            f"! write {user_server.more} it can change what is there",
            f"! read {home}/notes in your home directory; does not exist now",
            "! host *.example.org:443 a wildcard",
            "! host 10.1.2.3:5432 it is private",
            "! host example.net:* every port",
            "! variable GITHUB_TOKEN it looks like a secret; not set here now",
            "! variable LD_PRELOAD it decides which code runs; not set here now",
            "! seccomp compat more system calls than the default filter lets through",
        ]
    )
    assert f"read {user_server.data}" in lines
    assert "host api.example.com:443" in lines
    assert "variable EDITOR not set here now" in lines
    assert any(line.startswith("limit memory 2 GiB") for line in lines)
    folder = user_server.file.parent
    hint = f"Its arguments name {folder}, which it does not ask for: add --read {folder} or --write {folder}"
    assert hint in lines
    assert not any(line.startswith("Its arguments name") for line in lines - {hint})


def test_the_script_of_an_interpreter_needs_no_yes(user_server: Server) -> None:
    words = [str(user_server.more / "text"), str(user_server.data / "text")]
    user_server.write(None, args=words, command="/usr/bin/python3")
    said = " ".join(user_server.allow().stdout.split())
    assert f"Its arguments name {words[1]}" in said and words[0] not in said.partition("Its arguments")[2]


def test_what_the_policy_gives_needs_no_yes(user_server: Server) -> None:
    user_server.write({"env": ["TERM"]})
    said = user_server.allow("--yes", env={"TERM": "dumb"})
    assert (said.returncode, said.stderr) == (0, "")
    assert "nothing has to be allowed" in said.stdout
    assert user_server.records() == []


def _answered(server: Server, answer: bytes) -> tuple[int, str]:
    """`runner allow` with a terminal on which `answer` is typed."""
    ours, theirs = pty.openpty()
    try:
        process = server.caller.start("allow", server.file, stdin=theirs, stdout=subprocess.PIPE)
        os.close(theirs)
        os.write(ours, answer)
        out, err = process.communicate(timeout=60)
    finally:
        os.close(ours)
    return process.returncode, (out + err).decode()


@pytest.mark.parametrize(
    ("answer", "status"), [(b"y\n", 0), (b"YES\n", 0), (b"n\n", 1), (b"\n", 1), (b"\x04", 1), (b"yep\n", 1)]
)
def test_on_a_terminal_it_asks(user_server: Server, answer: bytes, status: int) -> None:
    returned, said = _answered(user_server, answer)
    assert returned == status
    assert "Allow this? [y/N]" in said
    assert len(user_server.records()) == (1 if status == 0 else 0)


def test_what_was_shown_is_what_is_recorded(user_server: Server) -> None:
    """The manifest changes while the person reads: the yes is to what they saw."""
    ours, theirs = pty.openpty()
    try:
        process = user_server.caller.start("allow", user_server.file, stdin=theirs)
        os.close(theirs)
        assert process.stderr is not None
        said = b""
        while b"[y/N]" not in said:
            said += os.read(process.stderr.fileno(), 4096)
        user_server.write({"read": [str(user_server.data), "/srv"]})
        os.write(ours, b"y\n")
        process.communicate(timeout=60)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert user_server.record()["asked"]["read"] == [str(user_server.data)]
    assert user_server.allow("--diff").returncode == 1


def test_the_list(user_server: Server) -> None:
    assert user_server.caller("allow", "--list").stdout == "nothing is allowed\n"
    assert user_server.allow("--yes", "--read", user_server.more).returncode == 0
    said = user_server.caller("allow", "--list")
    [path] = user_server.records()
    assert said.stdout.startswith(path.stem[:12]) and str(user_server.file) in said.stdout
    document = json.loads(user_server.caller("allow", "--list", "--json").stdout)
    assert document["schema"] == "runner.allow.v1"
    [entry] = document["approvals"]
    assert (entry["id"], entry["contract"], entry["file"]) == ("one", "mcp", str(user_server.file))
    assert entry["asked"]["read"] == [str(user_server.data)]
    assert entry["added"]["read"] == [str(user_server.more)]
    user_server.file.unlink()
    assert "(the file is gone)" in user_server.caller("allow", "--list").stdout
    assert user_server.caller("allow", "--revoke", user_server.file).returncode == 0


def test_all_of_a_file_is_revoked_only_after_a_question(user_server: Server) -> None:
    entry = {"command": "/bin/cat", "args": ["x"], "x-sandbox": {"read": [str(user_server.data)]}}
    user_server._write_file(user_server.file, json.dumps({"mcpServers": {"one": entry, "two": entry}}))
    for name in ("one", "two"):
        assert user_server.allow("--yes", "--server", name).returncode == 0
    done = subprocess.run(
        user_server.caller.command("allow", "--revoke", user_server.file),
        env=user_server.caller.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 2 and len(user_server.records()) == 2
    # What it is about comes before the error, also in one pipe.
    first, *_, last = done.stdout.splitlines()
    assert "one (mcp)" in first and "--yes revokes them all" in last
    assert user_server.caller("allow", "--revoke", user_server.file, "--server", "one").returncode == 0
    assert user_server.allow("--yes", "--server", "one").returncode == 0
    assert user_server.caller("allow", "--revoke", "--yes", user_server.file).returncode == 0
    assert user_server.records() == []


def test_what_could_never_start_is_not_recorded(user_server: Server) -> None:
    for command in ("/no/such", "no-such"):
        user_server.write(None, command=command)
        said = user_server.allow("--yes", "--read", user_server.more)
        assert said.returncode == 10 and "nothing is recorded" in said.stderr, said.stderr
        assert "does not exist" in said.stderr or "is not on PATH" in said.stderr
    user_server.write(None)
    said = user_server.allow("--yes", "--read", user_server.more / "none")
    assert said.returncode == 0 and "none  does not exist now" in said.stdout
    assert len(user_server.records()) == 1


@pytest.mark.needs("root")
@pytest.mark.usefixtures("nothing_left")
def test_a_folder_that_the_plugin_could_not_write(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    server = Server(runner_as_root, plugin_dir, write_file)
    server.write(None, command="/usr/bin/touch", args=[str(server.more / "made")])
    said = server.allow("--yes", "--write", server.more)
    assert said.returncode == 21 and server.records() == []
    chown = said.stderr.partition("chown ")[2].split()[:2]
    assert chown[1] == str(server.more)
    os.chown(server.more, int(chown[0]), -1)  # the choice that works
    assert server.allow("--yes", "--write", server.more).returncode == 0
    done = server.exec()
    assert done.returncode == 0, done.stderr
    assert (server.more / "made").stat().st_uid == int(chown[0])
    (server.more / "made").unlink()
    os.chown(server.more, 0, -1)
    states = json.loads(server.caller("state", "list", "--json").stdout)["states"]
    [own] = [each["name"] for each in states if each["manifest"] == str(server.file)]
    assert server.caller("state", "remove", own).returncode == 0


@one_case(
    ("words", "why"),
    [
        ([], "MANIFEST is missing"),
        (["--list", "--diff", "x"], "leave all but one"),
        (["--json", "x"], "goes with --list"),
        (["--list", "x"], "leave the rest out"),
        (["--diff", "x", "--read", "/srv"], "does not go with --diff"),
        (["--name", "n"], "write --name NAME -- COMMAND"),
        (["--", "ls"], "write --name NAME -- COMMAND"),
        (["x", "--name", "n", "--", "ls"], "leave one of them out"),
        (["--revoke", "nothing"], "nothing is allowed for it"),
        (["--env", "A=B", "x"], "write the name of a variable"),
        (["--read", "", "x"], "its value is empty"),
        (["--net", "*:443", "x"], "stands for every name"),
        (["--server", "", "x"], "its value is empty"),
    ],
)
def test_usage(runner_as_user: Caller, words: list[str], why: str) -> None:
    said = runner_as_user("allow", *words)
    assert (said.returncode, said.stdout) == (2, "")
    assert why in said.stderr and said.stderr.startswith("runner allow: ")


def test_a_manifest_with_a_fault_is_shown_as_by_check(user_server: Server) -> None:
    user_server.file.write_text("{")
    said = user_server.allow("--yes")
    assert said.returncode == 20
    assert "manifest_invalid" in said.stderr


# --- a policy of root's -------------------------------------------------------------------------------------

BOUND = """\
version = 1
description = "of root"
[approvals]
read = ["{}"]
"""
OPEN = """\
version = 1
[approvals]
read = ["*"]
"""
# The path is root's and stands in the code. A test cannot have it, so it runs the program with another.
DRIVER = """\
import sys
import sandbox.policy.load as load
load.SYSTEM_POLICY = sys.argv.pop(1)
from runner.cli import entry
entry()
"""


@pytest.mark.needs("root", "user")
@pytest.mark.usefixtures("nothing_left")
def test_a_policy_of_root_binds_who_chooses_another(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    server = Server(runner_as_user, plugin_dir, write_file)
    system = write_file(plugin_dir / "etc" / "policy.toml", BOUND.format(server.data))
    own = write_file(runner_as_user.home / "own.toml", OPEN)
    runner_as_user.give(own)

    def runner(*words: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [*runner_as_user.prefix, *runner_as_user.python, "-c", DRIVER, system, *words]
        return subprocess.run(
            [os.fspath(word) for word in argv],
            env=dict(runner_as_user.environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    server.write({"read": [str(server.data)]})
    assert runner("allow", "--yes", "--policy", own, server.file).returncode == 0
    assert runner("exec", "--policy", own, server.file).stdout == "found\n"
    server.write({"read": [str(server.data), str(server.more)]})
    assert server.allow("--yes", "--policy", own).returncode == 0  # without root's policy: the control
    assert server.exec("--policy", own).returncode == 0
    refused = runner("exec", "--policy", own, server.file)
    assert refused.returncode == 126
    assert f"policy {system} lets nobody approve reading it" in refused.stderr
    words = runner("run", "--policy", own, "--read", server.more, "--", "/bin/cat", server.more / "text")
    assert words.returncode == 126
    assert f"policy {system} lets nobody approve reading it" in words.stderr
    # A file of an ordinary user in that place binds nobody.
    runner_as_user.give(system)
    assert runner("exec", "--policy", own, server.file).returncode == 0


# --- explain and the report ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_explain_and_the_report_say_what_was_approved(server: Server) -> None:
    server.write({"read": [str(server.data)]})
    assert server.allow("--yes", "--read", server.more, "--net", "example.com").returncode == 0
    said = server.caller("explain", server.file).stdout
    assert "approved by your yes of 20" in said
    rows = [" ".join(line.split()) for line in said.splitlines()]
    assert f"read {server.data} counts" in rows and f"read {server.more} counts" in rows
    assert f"read {server.more} bound your approval" in rows
    assert f"read {server.data} bound manifest" in rows
    network = server.caller("explain", "--network", server.file).stdout
    assert "example.com:443  asked by the approval, allowed by your approval" in network
    cut = server.caller("explain", "--policy", "strict", server.file).stdout
    assert "DOES NOT COUNT: the policy lets nobody approve it" in cut
    report = server.caller.home / "report.json"
    assert server.exec("--report", report).returncode == 0
    approval = json.loads(report.read_text())["grant"]["approval"]
    assert (approval["by"], approval["at"] > 0) == (["stored"], True)
    assert approval["counted"]["read"] == [str(server.data), str(server.more)]
    assert approval["counted"]["hosts"] == ["example.com:443"]
    assert approval["withheld"]["read"] == []
    assert server.exec("--policy", "strict", "--report", report).returncode == 126
    approval = json.loads(report.read_text())["grant"]["approval"]
    assert approval["counted"]["read"] == []
    assert approval["withheld"]["read"] == [str(server.data), str(server.more)]
    assert server.caller("run", "--report", report, "--read", server.data, "--", "/bin/true").returncode == 0
    approval = json.loads(report.read_text())["grant"]["approval"]
    assert (approval["by"], approval["at"]) == (["command line"], None)
    assert server.caller("run", "--report", report, "--", "/bin/true").returncode == 0
    assert json.loads(report.read_text())["grant"]["approval"] is None
