"""From a manifest to a plan: which refusal comes first, whose word counts, where state lives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.approvals.marks import mark_entry
from runner.launch.command import Command
from runner.launch.own_folders import managed_state_dir
from runner.launch.read import plugin_of
from runner.plugin import Template
from sandbox.identity.state import StateRefused
from tests.conftest import Caller
from tests.manifests import SANDBOX, nexo, rune
from tests.tables import one_case

Write = Callable[..., Path]

NEXO = nexo("asks", "/usr/bin/true") + SANDBOX


@pytest.fixture
def ask(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> Callable[..., dict[str, Any]]:
    """explain, as a document."""

    def explain(
        more: str = "", *words: str, policy: str = "", env: dict[str, str] | None = None
    ) -> dict[str, Any]:
        manifest = write_file(plugin_dir / "plugin.toml", NEXO + more)
        if policy:
            path = write_file(runner_as_user.home / "policy.toml", f"version = 1\n{policy}", 0o600)
            runner_as_user.give(path)
            words = ("--policy", str(path), *words)
        said = runner_as_user("explain", "--format", "json", *words, manifest, env=env)
        assert said.stderr == ""
        document: dict[str, Any] = json.loads(said.stdout)
        return document

    return explain


Ask = Callable[..., dict[str, Any]]


def refused(document: dict[str, Any]) -> tuple[str, str]:
    return document["outcome"]["code"], document["outcome"]["cause"]


@one_case(("policy", "code"), [("default", "policy_denied"), ("strict", "policy_denied"), ("dev", "ok")])
def test_a_list_of_hosts_is_granted_or_refused_and_never_ignored(ask: Ask, policy: str, code: str) -> None:
    told = ask('network = "allowlist"\nnetwork_allowlist = ["example.com:443"]\n', "--policy", policy)
    assert told["outcome"]["code"] == code
    if code == "ok":
        assert told["grant"]["network"] == {"mode": "allowlist", "hosts": ["example.com:443"]}
        (layer,) = (each for each in told["layers"] if each["layer"] == "network")
        assert (layer["effective"], layer["detail"]) == ("allowlist", "the 1 listed, by way of the gate")


def test_limits_below_the_ceiling_are_granted(ask: Ask) -> None:
    told = ask('[plugin.limits]\ntmp = "1M"\nshm = "2M"\ndeadline = "1m"\n')
    assert told["outcome"]["code"] == "ok"
    assert told["grant"]["limits"].items() >= {"tmp": 1 << 20, "shm": 2 << 20, "deadline": 60}.items()


def test_a_policys_own_limit_is_named_as_the_policys(ask: Ask) -> None:
    told = ask(policy='[limits.memory]\ndefault = "1G"\nmode = "prefer"\n')
    assert told["outcome"]["code"] == "ok"
    assert told["grant"]["limits"]["memory"] == 1 << 30
    assert told["grant"]["decided_by"]["memory"] == "policy"


def test_an_optional_path_that_is_missing_stops_nothing(ask: Ask) -> None:
    told = ask('fs_read_paths = ["/snap/bin/chromium", "/opt/nowhere/chrome"]\n')
    assert told["outcome"]["code"] == "ok"
    assert [row["verdict"] for row in told["asked"] if row["what"] == "read"] == ["skipped", "skipped"]
    # One that is there is a request like any other.
    assert refused(ask('fs_read_paths = ["/snap/bin/chromium", "/srv"]\n'))[0] == "policy_denied"
    # So is one for writing, which nexo cannot do without.
    assert refused(ask('fs_write_paths = ["/opt/nowhere/data"]\n'))[0] == "policy_denied"


def test_the_policy_may_ask_for_state_too(ask: Ask) -> None:
    assert "RUNNER_STATE_DIR" not in ask()["grant"]["env"]
    told = ask(policy='[write]\ndefault = ["${state_dir}"]\n')
    assert "RUNNER_STATE_DIR" in told["grant"]["env"]


def test_a_claimed_id_is_not_enough_for_the_state_behind_it(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    places = set()
    for folder in ("one", "two"):
        write_file(plugin_dir / folder / "plugin.toml", NEXO + 'fs_write_paths = ["${state_dir}"]\n')
        said = json.loads(runner_as_user("explain", "--format", "json", plugin_dir / folder).stdout)
        places |= {path["path"] for path in said["grant"]["paths"] if path["origin"] == "state"}
    assert len(places) == 2


def test_without_a_home_there_is_no_place_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # there is no such user
    with pytest.raises(StateRefused, match="HOME is not the path of a folder") as refused:
        managed_state_dir(plugin_of(Command(("/bin/true",), "/", "one"), "mcp"), {})
    assert "--state-dir" in refused.value.hint


# --- names of earlier versions ------------------------------------------------------------------------------


def test_state_of_an_earlier_version_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    home, file = {"HOME": str(tmp_path)}, str(tmp_path / "mcp.json")
    root = tmp_path / ".local/state/runner/plugins"
    command = Command(("/bin/true", "a"), "/", "one", file)
    started = plugin_of(command, "mcp")
    read = started._replace(mark="", former_marks=())
    assert managed_state_dir(started, home) == managed_state_dir(mark_entry(read), home)
    own = Path(managed_state_dir(started, home))
    # What an earlier version made of the words of the command line.
    words = Path(managed_state_dir(started._replace(mark=started.former_marks[0], former_marks=()), home))
    assert own.parent == words.parent == root and own != words
    words.mkdir(parents=True)
    for plugin in (started, mark_entry(read)):
        assert managed_state_dir(plugin, home) == str(words)
        other = plugin_of(command._replace(argv=("/bin/true", "b")), "mcp")
        assert managed_state_dir(other, home) == str(own)
    own.mkdir()
    (own / "notes").touch()
    for times, used in (((20, 10, 15), own), ((10, 10, 15), words), ((10, 20, 15), own)):
        for path, when in zip((own, own / "notes", words), times, strict=True):
            os.utime(path, (when, when))
        assert managed_state_dir(started, home) == str(used)


def test_the_words_count_where_the_file_alone_does_not_say_what_runs(tmp_path: Path) -> None:
    """A start that claims an entry of another configuration chooses what its host would fill in, and its own
    folder."""
    (tmp_path / "server.py").touch()
    entry = Command(("/bin/true", "server.py"), str(tmp_path), "one", "/x/mcp.json")
    marks = {
        plugin_of(each, "mcp").mark
        for each in (
            entry._replace(entry_directory=str(tmp_path)),
            entry._replace(entry_directory="/x"),
            entry._replace(argv=("/bin/true", "b"), filled=True),
            entry._replace(argv=("/bin/true", "c"), filled=True),
            entry._replace(argv=("/bin/true", "c"), scope="/y"),
        )
    }
    assert len(marks) == 5 and "" in marks
    same = entry._replace(argv=("/bin/true", "b")), entry._replace(argv=("/bin/true", "c"))
    assert {plugin_of(each, "mcp").mark for each in same} == {""}
    # By the file itself: what a person's own variables fill in names the state as the host's start does.
    plugin = plugin_of(same[0], "mcp")._replace(mark="", former_marks=())
    words = plugin_of(same[0]._replace(filled=True), "mcp").mark
    for decided_by, mark, former in (
        ("", "", (words,)),
        ("variables", words, ("",)),
        ("folder", words, ()),  # else a clone's own server would get the state
    ):
        read = mark_entry(plugin._replace(template=Template("cursor", decided_by=decided_by)))
        assert (read.mark, read.former_marks) == (mark, former)


def test_the_contracts_own_variables(ask: Ask) -> None:
    host = 'network = "host"\n'
    assert refused(ask(host)) == ("policy_denied", "network_ceiling")
    for word in ("1", "true", "TRUE", "yes", "YES"):
        told = ask(host, env={"NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW": word})
        assert told["grant"]["network"]["mode"] == "host"
        assert told["grant"]["decided_by"]["network"] == "environment"
        assert any("environment variable" in row["why"] for row in told["asked"])
    for word in ("0", "on", "True", ""):
        assert refused(ask(host, env={"NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW": word}))[0] == "policy_denied"
    # It never beats a policy that somebody chose, unless that policy says so.
    allow = {"NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW": "1"}
    strict = ask(host, "--policy", "strict", env=allow)
    assert refused(strict) == ("policy_denied", "network_ceiling")
    assert "NEXO_PLUGIN_SANDBOX_HOST_NET_ALLOW" in strict["grant"]["denials"][0]["reason"]
    for words, mode in (
        ("unsandboxed = 'deny'\n", "none"),
        ('[network]\nenvironment = "may_raise"\n', "host"),
    ):
        assert ask(host, policy=words, env=allow)["grant"]["network"]["mode"] == mode
    off = {"NEXO_PLUGIN_SANDBOX_REQUIRE": "1"}
    assert ask(env=off)["outcome"]["code"] == "ok"


def test_require_refuses_a_manifest_without_a_sandbox(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    manifest = write_file(plugin_dir / "plugin.toml", NEXO.replace("enabled = true", "enabled = false"))
    assert runner_as_user("explain", manifest).returncode == 0
    said = runner_as_user("exec", manifest, env={"NEXO_PLUGIN_SANDBOX_REQUIRE": "1"})
    assert said.returncode == 126 and "sandbox_required" in said.stderr


def test_which_policy(runner_as_user: Caller, plugin_dir: Path, write_file: Write) -> None:
    manifest = write_file(plugin_dir / "plugin.toml", NEXO)

    def policy(*words: str, **env: str) -> str:
        said = json.loads(runner_as_user("explain", "--format", "json", *words, manifest, env=env).stdout)
        return str(said["grant"]["policy"])

    assert policy() == "default"
    assert policy(RUNNER_POLICY="strict") == "strict"
    assert policy("--policy", "dev", RUNNER_POLICY="strict") == "dev"


def test_a_working_directory_that_is_missing(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    bundle = rune("p", "t", "/usr/bin/true", dir="nowhere")
    write_file(plugin_dir / "rterm-plugin.json", json.dumps(bundle))
    said = runner_as_user("exec", plugin_dir)
    assert said.returncode == 127 and f"{plugin_dir}/nowhere does not exist" in said.stderr


def test_faults_of_a_policy_are_the_policys(ask: Ask) -> None:
    told = ask(policy="foo = 1\n")
    assert (told["outcome"]["code"], told["outcome"]["phase"]) == ("policy_invalid", "policy")
    assert told["diagnostics"][0]["line"] == 2


def test_a_folder_too_large_to_search_is_not_the_manifests_wish(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """Nobody asked for it by name: the rule is told with its own place, and with what helps."""
    for number in range(12):
        write_file(plugin_dir / f"file{number}", "")
    manifest = write_file(plugin_dir / "plugin.toml", NEXO)
    policy = write_file(runner_as_user.home / "policy.toml", "version = 1\nscan_limit = 10\n", 0o600)
    runner_as_user.give(policy)
    said = runner_as_user("exec", "--policy", policy, manifest)
    reason = "it holds more than 10 files, so it was not searched for sockets, FIFOs and devices"
    assert said.returncode == 126
    assert said.stderr.splitlines() == [
        "runner: policy_denied: the plugin's folder cannot be shown to the plugin",
        f"  {policy}:2:1: scan_limit: the plugin's folder is {plugin_dir}; {reason}",
        "      move the files it does not need elsewhere, or raise scan_limit in your policy",
    ]
    # The control: with room enough it runs.
    policy.write_text("version = 1\nscan_limit = 20\n")
    assert runner_as_user("exec", "--policy", policy, manifest).returncode == 0


@pytest.mark.needs("root")
def test_a_folder_that_is_closed_is_not_called_empty(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "closed/plugin.toml", NEXO)
    assert runner_as_user("exec", plugin_dir / "closed").returncode == 0  # the control
    (plugin_dir / "closed").chmod(0o700)
    said = runner_as_user("exec", plugin_dir / "closed")
    assert said.returncode == 126
    assert "file_unreadable: the folder cannot be entered: Permission denied" in said.stderr


@pytest.mark.needs("root")
def test_a_plugin_in_a_denied_folder_is_told_to_move(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write
) -> None:
    home = plugin_dir / "home"
    write_file(home / ".aws/credentials", "s")
    write_file(home / "plugin.toml", NEXO)
    said = runner_as_root("exec", home, env={"HOME": str(home)})
    assert (
        said.returncode == 126 and "the plugin's folder" in said.stderr and "move the plugin" in said.stderr
    )
