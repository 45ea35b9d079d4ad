"""What a server is given it can use, and what it is not given people are told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Caller
from tests.manifests import nexo, rune
from tests.sandbox.paths.test_program import node_package
from tests.tables import one_case

Write = Callable[..., Path]
SERVER = ROOT / "tests/plugins/mcp_bare/server.py"
POLICY = "version = 1\n"


def entry(folder: Path, write_file: Write, name: str = "mcp.json", **words: Any) -> Path:
    return write_file(folder / name, json.dumps({"mcpServers": {"server": words}}))


def shell(
    folder: Path, write_file: Write, script: str, *args: str, name: str = "mcp.json", **words: Any
) -> Path:
    """A server that is a line of shell; `args` are its $1 and so on."""
    return entry(folder, write_file, name, command="/bin/sh", args=["-c", script, "sh", *args], **words)


def asks(read: list[Any]) -> dict[str, Any]:
    return {"x-sandbox": {"read": read}}


def policy(caller: Caller, write_file: Write, text: str) -> Path:
    path = write_file(caller.home / "policy.toml", POLICY + text, 0o600)
    caller.give(path)
    return path


def report(caller: Caller, *args: Any) -> tuple[Any, dict[str, Any]]:
    place = caller.home / "report.json"
    place.unlink(missing_ok=True)
    said = caller("exec", "--report", place, *args)
    document: dict[str, Any] = json.loads(place.read_text())
    return said, document


# --- paths that nobody shows -------------------------------------------------------------------------------


def test_a_path_outside_of_the_cage_is_told_once(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    lost = plugin_dir / "x.db"
    manifest = shell(plugin_dir, write_file, 'echo run >> "$2"; cat "$2"', "--db-path", str(lost))
    words = (
        f"runner: --db-path {lost} names a host path that is not in the cage; what is written there is lost; "
        "show it with runner allow and --read PATH or --write PATH"
    )
    said, written = report(runner_as, manifest)
    assert words in said.stderr.splitlines() and said.stderr.count("not in the cage") == 1
    assert [note["rule"] for note in written["notes"]] == ["outside"]
    assert not lost.exists()
    explained = runner_as("explain", manifest)
    assert f"note: --db-path {lost} names a host path" in explained.stdout
    assert (
        "It would be launched, but paths that it names are not in the cage: see the notes."
        in explained.stdout
    )
    # The control: where the manifest asks for it and the policy lets it, nobody needs to be told.
    data = str(write_file(plugin_dir / "data/file", "").parent)
    shell(plugin_dir, write_file, "exit 0", "--db-path", data, **asks([data]))
    allowed = policy(runner_as, write_file, f'[read]\nceiling = ["{data}"]\n')
    said, written = report(runner_as, "--policy", allowed, manifest)
    assert (said.stderr, written["notes"]) == ("", [])
    assert "It would be launched.\n" in runner_as("explain", "--policy", allowed, manifest).stdout


def test_a_full_stderr_does_not_hold_up_a_launch(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """What is told before the launch must not wait past the deadline for who does not read."""
    manifest = shell(plugin_dir, write_file, "echo ran", "--db-path", str(plugin_dir / "x.db"))
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    process = runner_as.start("exec", manifest, stdout=subprocess.PIPE, stderr=write)
    try:
        assert process.communicate(timeout=60)[0].strip() in ("ran", b"ran")
        assert process.returncode == 0
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.needs("user")
def test_a_folder_that_a_user_may_not_write(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """What explain calls granted can be used."""
    data = plugin_dir / "data"
    data.mkdir(mode=0o755)
    allowed = policy(runner_as_user, write_file, f'[write]\nceiling = ["{data}"]\n')
    words: dict[str, Any] = {"x-sandbox": {"write": [str(data)]}}
    manifest = shell(plugin_dir, write_file, f"echo x > {data}/x", **words)
    for verb, status in (("explain", 21), ("exec", 126)):
        said = runner_as_user(verb, "--policy", allowed, manifest)
        assert said.returncode == status
        assert f"{data} cannot be written by the plugin" in said.stdout + said.stderr
    data.chmod(0o777)  # the control
    assert runner_as_user("exec", "--policy", allowed, manifest).returncode == 0


@one_case("verb", [("tools",), ("call", "echo")])
def test_call_and_tools_tell_it_too(
    runner_as: Caller, plugin_dir: Path, write_file: Write, verb: tuple[str, ...]
) -> None:
    write_file(plugin_dir / "server.py", SERVER.read_text(), 0o755)
    lost = plugin_dir / "cache"
    words: dict[str, Any] = {"command": "/usr/bin/python3", "args": [f"{plugin_dir}/server.py", "modern"]}
    manifest = entry(plugin_dir, write_file, **words, env={"CACHE": str(lost), "FINE": "1"})
    place = runner_as.home / "report.json"
    said = runner_as(verb[0], "--report", place, manifest, *verb[1:])
    assert said.returncode == 0, said.stderr
    # The folder of the script is shown: what lies beside it is not.
    assert json.loads(place.read_text())["notes"] == []
    lost = runner_as.home / "cache"
    entry(plugin_dir, write_file, **words, env={"CACHE": str(lost)})
    said = runner_as(verb[0], "--report", place, manifest, *verb[1:])
    assert said.returncode == 0
    assert said.stderr.count(f"CACHE={lost} names a host path that is not in the cage") == 1
    assert [note["rule"] for note in json.loads(place.read_text())["notes"]] == ["outside"]
    events = runner_as.home / "events"
    told = runner_as(verb[0], "--events", events, manifest, *verb[1:]).stderr
    assert json.loads(events.read_text().splitlines()[0])["event"] == "note"
    assert f"CACHE={lost} names a host path" in told  # people see it all the same


def test_a_missing_path_is_reported_and_told_where_the_plugin_fails(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    nowhere = str(plugin_dir / "nowhere")
    words = asks([{"path": nowhere, "optional": True}])
    allowed = policy(runner_as, write_file, f'[read]\nceiling = ["{plugin_dir}"]\n')
    told = f"{nowhere}, which the manifest asks for, does not exist on this machine"
    for status in (0, 3):
        manifest = shell(plugin_dir, write_file, f"exit {status}", **words)
        said, written = report(runner_as, "--policy", allowed, manifest)
        assert said.returncode == status
        assert [(note["rule"], note["message"]) for note in written["notes"]] == [("missing", told)]
        assert (told in said.stderr) is (status != 0)
    said = runner_as("call", "--policy", allowed, manifest, "anything")
    assert said.returncode == 13 and told in said.stderr
    # Also where the policy would not have allowed it, had it been there.
    said, written = report(runner_as, manifest)
    assert told in said.stderr and [note["rule"] for note in written["notes"]] == ["missing"]
    assert re.search(f"{nowhere} +skipped +does not exist here", runner_as("explain", manifest).stdout)


# --- placeholders ------------------------------------------------------------------------------------------

NEXO = (
    nexo("keeps")
    + """\
args = ["${state_dir}/book"]
env = { BESIDE = "${plugin_dir}/beside:${state_dir}" }
"""
)
RUNE = rune("keeps", "t", args=["${state_dir}/book"], env=["BESIDE=${plugin_dir}/beside:${state_dir}"])
SCRIPT = '#!/bin/sh\necho line >> "$1"; /usr/bin/wc -l < "$1"; echo "$1 $BESIDE"\n'


def keeping(contract: str, folder: Path, write_file: Write) -> Path:
    run = write_file(folder / "run", SCRIPT, 0o755)
    if contract == "mcp":
        env = {"BESIDE": "${plugin_dir}/beside:${state_dir}"}
        return entry(folder, write_file, command=str(run), args=["${state_dir}/book"], env=env)
    if contract == "rune":
        return write_file(folder / "rterm-plugin.json", json.dumps(RUNE))
    more = "[plugin.sandbox]\nenabled = true\n" if contract == "nexo" else ""
    return write_file(folder / "plugin.toml", NEXO + more)


@one_case("contract", ["mcp", "nexo", "nexo without a sandbox", "rune"])
def test_a_place_that_lasts_by_name(
    runner_as: Caller, plugin_dir: Path, write_file: Write, contract: str
) -> None:
    manifest = keeping(contract, plugin_dir, write_file)
    for count in ("1", "2"):
        said, written = report(runner_as, manifest)
        assert said.returncode == 0, said.stderr
        # Of an MCP configuration the folder is not shown.
        assert [note["rule"] for note in written["notes"]] == (["outside"] if contract == "mcp" else [])
        lines, words = said.stdout.splitlines()
        assert lines == count
    book, beside = words.split()
    state = book.removesuffix("/book")
    assert beside == f"{plugin_dir}/beside:{state}"
    assert {"path": state, "access": "write"}.items() <= written["grant"]["paths"][-1].items()
    assert runner_as("state", "remove", manifest).returncode == 0  # root's are in a place that stays
    # Whoever names it asks for it, at that place: a policy may refuse.
    refused = runner_as(
        "exec", "--policy", policy(runner_as, write_file, "[write]\nceiling = []\n"), manifest
    )
    assert refused.returncode == 126 and "write_ceiling: ${state_dir}" in refused.stderr
    assert f"{manifest}:" in refused.stderr


def test_a_placeholder_cannot_make_an_argument_too_long(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    manifest = shell(plugin_dir, write_file, "exit 0", "${plugin_dir}" * 10000)
    said = runner_as("exec", manifest)
    assert said.returncode == 126 and "are filled in" in said.stderr


def test_only_these_are_filled_in(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    manifest = shell(plugin_dir, write_file, 'echo "$1"', "${HOME} ${plugin_dir}")
    assert runner_as("exec", manifest).stdout == f"${{HOME}} {plugin_dir}\n"
    checked = runner_as("check", manifest).stdout
    assert "'${HOME}' is not expanded: only ${state_dir} and ${plugin_dir} are expanded" in checked
    shell(plugin_dir, write_file, 'echo "$1"', "${plugin_dir}")
    assert "variable_not_expanded" not in runner_as("check", manifest).stdout


# --- the project -------------------------------------------------------------------------------------------

READ = '[project]\naccess = "read"\n'
LOOK = "pwd; cat data/word; test -e .mcp.json && cat .mcp.json; true"


def test_the_project_is_offered_by_policy(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "data/word", "of the project\n")
    manifest = shell(plugin_dir, write_file, LOOK, name=".mcp.json", env={"TOKEN": "s3cret"})
    shown = runner_as("exec", "--policy", policy(runner_as, write_file, READ), manifest)
    # And not the configuration, which may hold other servers' secrets.
    assert shown.stdout == f"{plugin_dir}\nof the project\n" and "s3cret" not in shown.stderr
    assert runner_as("exec", manifest).stdout == "/tmp\n"  # default: nothing of it
    # A file of that name only: other configurations lie among the settings of a client.
    manifest.rename(plugin_dir / "mcp.json")
    other = runner_as("exec", "--policy", policy(runner_as, write_file, READ), plugin_dir / "mcp.json")
    assert other.stdout == "/tmp\n"


@one_case("how", ["named", "unnamed"])
def test_a_home_directory_is_no_project(
    runner_as: Caller, plugin_dir: Path, write_file: Write, how: str
) -> None:
    words: dict[str, Any] = {"cwd": str(runner_as.home)} if how == "named" else {}
    manifest = shell(runner_as.home, write_file, "pwd", name=".mcp.json", **words)
    runner_as.give(manifest)
    said = runner_as("exec", "--policy", policy(runner_as, write_file, READ), manifest)
    if how == "unnamed":
        assert said.stdout == "/tmp\n"
    else:
        assert said.returncode == 126 and "it is a home directory" in said.stderr


def test_a_working_directory_is_honoured_or_refused(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "work/data/word", "at work\n")
    manifest = shell(plugin_dir, write_file, LOOK, cwd="work")
    said, written = report(runner_as, manifest)
    assert said.returncode == 126 and said.stdout == ""
    [denial] = written["grant"]["denials"]
    assert (denial["rule"], denial["asked"]) == ("project", f"{plugin_dir}/work")
    assert denial["where"].startswith(f"{manifest}:1:") and "[project]" in denial["hint"]
    assert 'says access = "none" under [project]' in denial["reason"]
    explained = runner_as("explain", manifest).stdout
    assert "It would NOT be launched" in explained
    assert re.search(rf"^  cwd +{plugin_dir}/work +REFUSED +project: ", explained, re.MULTILINE)
    # Each way to have it honoured.
    reading = policy(runner_as, write_file, READ)
    assert runner_as("exec", "--policy", reading, manifest).stdout == f"{plugin_dir}/work\nat work\n"
    ceiling = write_file(
        runner_as.home / "ceiling.toml", f'version = 1\n[read]\nceiling = ["{plugin_dir}"]\n', 0o600
    )
    runner_as.give(ceiling)
    shell(plugin_dir, write_file, LOOK, cwd="work", **asks([f"{plugin_dir}/work"]))
    assert runner_as("exec", "--policy", ceiling, manifest).stdout == f"{plugin_dir}/work\nat work\n"
    for place in ("/", "/tmp", "//tmp", "/usr/share", "/bin"):
        shell(plugin_dir, write_file, "/bin/pwd", cwd=place)
        there = {"//tmp": "/tmp", "/bin": "/usr/bin"}.get(place, place)
        assert runner_as("exec", manifest).stdout == f"{there}\n"
        assert runner_as("exec", "--policy", reading, manifest).stdout == f"{there}\n"


def test_a_script_by_a_relative_name(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "src/server.py", "print('ran')\n")
    manifest = entry(plugin_dir, write_file, command="/usr/bin/python3", args=["src/server.py"])
    assert runner_as("exec", manifest).stdout == "ran\n"


def test_a_file_that_came_with_a_project_does_not_choose_among_its_neighbours(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "private/data/word", "private\n")
    write_file(plugin_dir / "project/sub/data/word", "sub\n")
    reading = policy(runner_as, write_file, READ)
    (plugin_dir / "project/link").symlink_to("../private")
    for name in (".mcp.json", "mcp.json"):
        for cwd in ("../private", str(plugin_dir / "private"), "link"):
            manifest = shell(plugin_dir / "project", write_file, LOOK, name=name, cwd=cwd)
            said = runner_as("exec", "--policy", reading, manifest)
            assert said.returncode == 126 and "it leads out of" in said.stderr, cwd
        shell(plugin_dir / "project", write_file, LOOK, name=name, cwd="sub")  # the control
        assert runner_as("exec", "--policy", reading, manifest).stdout.endswith("sub\n")
    # Which only lies among the settings of a client.
    name = "claude_desktop_config.json"
    manifest = shell(plugin_dir / "project", write_file, LOOK, name=name, cwd="../private")
    assert runner_as("exec", "--policy", reading, manifest).stdout.endswith("private\n")


def test_a_project_that_cannot_be_shown_is_only_an_offer(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(plugin_dir / "door"))
        manifest = shell(plugin_dir, write_file, "pwd", name=".mcp.json")
        said, written = report(runner_as, "--policy", policy(runner_as, write_file, READ), manifest)
    assert said.stdout == "/tmp\n"
    [note] = written["notes"]
    assert note["rule"] == "project" and f"{plugin_dir}/door" in note["message"]


# --- what npm installs -------------------------------------------------------------------------------------


@pytest.mark.needs("node")
@one_case("way", ["link", "target"])
def test_a_server_of_npms_runs_by_its_link(
    runner_as: Caller, plugin_dir: Path, write_file: Write, way: str
) -> None:
    link = node_package(plugin_dir, write_file)
    words: dict[str, Any] = {"command": str(link), "args": ["a"]}
    if way == "target":
        words = {"command": "node", "args": [str(link.resolve()), "a"]}
    said = runner_as("exec", entry(plugin_dir / "elsewhere", write_file, **words))
    assert said.stdout == "needs met a\n", said.stderr
