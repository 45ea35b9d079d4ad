"""`runner wrap --gateway`: a host's entries become one, and come back byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.mcp.hosts.find import gateway_file, place_of
from runner.contracts.mcp.hosts.table import HOSTS
from runner.extras import install_command
from tests.conftest import ROOT, Caller

Write = Callable[..., Path]
SECRET = "s3cr3t-value"
TEXT = """{
  // mine
  "mcpServers": {
    "web": {"url": "https://example.com/mcp"},
    "files": {"command": "/bin/cat", "args": ["/etc/hostname"], "env": {"TOKEN": "s3cr3t-value"}},
    "off": {"command": "/bin/cat", "disabled": true}, // not now
    /* about two */ "two": {"command": "/bin/ls", "type": "stdio"},
    "open": {"command": "/bin/cat", "args": ["${workspaceFolder}/a"]},
    "near": {"command": "./server"},
    "three": {"command": "/bin/ls"},
  },
}
"""


class CursorHome:
    """A home with a configuration of Cursor."""

    def __init__(self, caller: Caller, write_file: Write) -> None:
        self.caller, self._write_file = caller, write_file
        self.file = self.write(TEXT)
        self.folder = caller.home / ".config/runner/gateway"

    def write(self, text: str, name: str = ".cursor/mcp.json") -> Path:
        path = self._write_file(self.caller.home / name, text)
        self.caller.give(self.caller.home)
        return path

    def wrap(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.caller("wrap", "--gateway", self.file, "--yes", *words)

    def undo(self) -> subprocess.CompletedProcess[str]:
        return self.wrap("--undo")

    def servers(self) -> dict[str, Any]:
        text = "\n".join(line.partition("//")[0] for line in self.file.read_text().splitlines())
        found: dict[str, Any] = json.loads(text)["mcpServers"]
        return found

    @property
    def stored(self) -> Path:
        [path] = self.folder.glob("*.json")
        return path


@pytest.fixture
def home(runner_as_user: Caller, write_file: Write) -> CursorHome:
    return CursorHome(runner_as_user, write_file)


def test_ten_entries_become_one_and_come_back(home: CursorHome) -> None:
    allowed = home.caller("allow", home.file, "--server", "files", "--read", "/etc/hostname", "--yes")
    assert allowed.returncode == 0, allowed.stderr
    assert home.caller("allow", home.file, "--server", "files", "--confirm", "w*").returncode == 0
    shown = home.wrap("--dry-run")
    assert shown.returncode == 0 and home.file.read_text() == TEXT and not home.folder.exists()
    done = home.wrap()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown.stdout) and SECRET not in done.stdout
    for name, why in (
        ("web", "it is reached over the network"),
        ("off", "it is switched off"),
        ("open", "names 'workspaceFolder', which only Cursor can fill in"),
        ("near", "names './server' in "),
    ):
        assert any(f"  {name}: stays" in line and why in line for line in done.stdout.splitlines()), name
    assert "Restart Cursor to use it." in done.stdout
    assert "mcp__SERVER__TOOL has to be written as mcp__runner-gateway__SERVER__TOOL" in done.stdout
    text = home.file.read_text()
    assert "// mine" in text and "// not now" in text and "/* about two */" in text  # comments stay
    stored = home.stored
    assert [path.stat().st_mode & 0o777 for path in (stored, home.folder)] == [0o600, 0o700]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in home.folder.iterdir())
    assert f'"args": ["gateway", "--config", "{stored}"]' in text and SECRET not in text
    entries = json.loads(stored.read_text())["mcpServers"]
    assert list(entries) == ["files", "two", "three"] and entries["files"]["env"] == {"TOKEN": SECRET}
    # The stored file is a configuration of Cursor's, and what was allowed holds for it too.
    assert "of Cursor" in home.caller("check", stored).stdout
    assert "What you allowed holds for the gateway too: files" in done.stdout
    asks = "files (mcp)  {}: a gateway asks you before it calls w*\n"
    assert asks.format(stored) in home.caller("allow", "--list").stdout
    diff = home.caller("allow", "--diff", stored, "--server", "files")
    assert (diff.returncode, "asks for the same as then" in diff.stdout) == (0, True), diff.stderr
    again = home.wrap()
    assert again.returncode == 0 and "nothing to change" in again.stdout and home.file.read_text() == text
    told = home.caller("wrap", home.file, "--undo", "--yes").stdout
    assert "--gateway --undo puts its servers back" in told
    undone = home.undo()
    assert undone.returncode == 0, undone.stderr
    assert home.file.read_text() == TEXT and not list(home.folder.iterdir())
    listed = home.caller("allow", "--list").stdout
    assert listed.count("files (mcp)") == 2 and asks.format(home.file) in listed  # only those of before
    assert "nothing to change" in home.undo().stdout


def test_a_variable_that_is_added_to_the_gateways_entry_is_told(home: CursorHome) -> None:
    home.file.write_text('{"mcpServers": {"files": {"command": "/bin/cat"}}}')
    assert home.wrap().returncode == 0
    servers = home.servers()
    servers["runner-gateway"]["env"] = {"API_KEY": SECRET, "PATH": "/usr/bin"}
    home.file.write_text(json.dumps({"mcpServers": servers}))

    def told() -> str:
        done = home.caller("gateway", "--config", home.stored)
        assert done.returncode == 0, done.stderr
        return done.stderr

    sets = f"the entry 'runner-gateway' of {home.file} sets API_KEY, which no server gets"
    assert told() == f"runner gateway: {sets}; move it to the env of the server in {home.stored}\n"
    moved = json.loads(home.stored.read_text())
    moved["mcpServers"]["files"]["env"] = {"API_KEY": SECRET}
    home.stored.write_text(json.dumps(moved))
    assert told() == ""


def test_a_file_that_was_partly_wrapped_before(home: CursorHome) -> None:
    home.write(
        json.dumps({"mcpServers": {"a": {"command": "/bin/a", "env": {"T": "1"}}, "b": {"command": "/b"}}})
    )
    assert home.caller("wrap", home.file, "--server", "a", "--yes").returncode == 0
    before = home.file.read_bytes()
    assert home.wrap().returncode == 0
    assert json.loads(home.stored.read_text())["mcpServers"] == {
        "a": {"command": "/bin/a", "env": {"T": "1"}},
        "b": {"command": "/b"},
    }
    assert list(home.servers()) == ["runner-gateway"]
    assert home.undo().returncode == 0 and home.file.read_bytes() == before
    # With limits of its own it would lose them.
    home.write(home.file.read_text().replace('"--name", "a",', '"--name", "a", "--memory", "64M",'))
    assert "a: stays as it is: it is wrapped, but it has options of its own: --memory" in home.wrap().stdout


def test_a_file_that_was_edited_between(home: CursorHome) -> None:
    assert home.wrap().returncode == 0
    home.write(home.file.read_text().replace("// mine", "// mine, edited").replace("/bin/cat", "/bin/tac"))
    told = home.wrap()
    assert told.returncode == 0 and "nothing to change" in told.stdout
    undone = home.undo()
    assert undone.returncode == 0, undone.stderr
    assert "only the entries are as they were" in undone.stdout
    text = home.file.read_text()
    assert "// mine, edited" in text and "runner-gateway" not in text and '"/bin/tac", "disabled"' in text
    for line in TEXT.splitlines():  # each with its own text
        if '"files"' in line or '"three"' in line:
            assert line.strip().rstrip(",") in text
    # A name that somebody took meanwhile is not overwritten.
    home.write('{"mcpServers": {"a": {"command": "/bin/a"}}}')
    assert home.wrap().returncode == 0
    home.write(home.file.read_text().replace('{"runner', '{"a": {"command": "/other"}, "runner'))
    before = home.file.read_bytes()
    refused = home.undo()
    assert refused.returncode == 1 and "there is 'a' already" in refused.stderr
    assert home.file.read_bytes() == before and home.stored.exists()


def test_a_stored_file_that_was_edited_or_is_gone(home: CursorHome) -> None:
    assert home.wrap().returncode == 0
    stored = home.stored
    stored.write_text(stored.read_text().replace("/bin/ls", "/bin/dir"))
    undone = home.undo()
    assert undone.returncode == 0 and "was changed by hand, and stays" in undone.stdout and stored.exists()
    assert home.file.read_text() == TEXT
    home.write(TEXT.replace("mine", "yours"))
    refused = home.wrap()
    assert refused.returncode == 1 and "has entries of an earlier gateway" in refused.stderr
    assert f"entries of an earlier one are in {stored}" in home.undo().stdout
    home.write(TEXT)  # as an interrupted run leaves it: nothing is lost by writing it anew
    assert home.wrap().returncode == 0
    Path(f"{stored}.undo").unlink()
    stored.unlink()
    before = home.file.read_bytes()
    refused = home.undo()
    assert refused.returncode == 1 and home.file.read_bytes() == before
    backups = refused.stderr.partition("before each change are ")[2].partition(";")[0]
    assert any(path.read_text() == TEXT for path in Path(backups).parent.glob(Path(backups).name))


def test_two_hosts_with_one_gateway(home: CursorHome) -> None:
    """A second host has a copy of the entry. Undo for the first would leave it without servers."""
    assert home.wrap().returncode == 0
    text = json.dumps(
        {"mcpServers": {"g": {"command": "runner", "args": ["gateway", "--config", str(home.stored)]}}}
    )
    other = home.write(text, ".codeium/windsurf/mcp_config.json")
    refused = home.undo()
    assert refused.returncode == 1 and f"{other} starts the same gateway" in refused.stderr
    refused = home.caller("wrap", "--gateway", "--undo", "--yes", other)
    assert refused.returncode == 1 and f"has the entries of {home.file}" in refused.stderr
    other.unlink()
    assert home.undo().returncode == 0 and home.file.read_text() == TEXT


def test_two_commands_at_once(home: CursorHome) -> None:
    """However they interleave: one entry, and the servers are in the file that it names."""
    words = ("wrap", "--gateway", home.file, "--yes")
    processes = [home.caller.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    statuses = [(process.communicate(timeout=60), process.returncode)[1] for process in processes]
    assert 0 in statuses and set(statuses) <= {0, 1}
    assert home.file.read_text().count('"gateway"') == 1
    assert list(json.loads(home.stored.read_text())["mcpServers"]) == ["files", "two", "three"]
    assert home.undo().returncode == 0 and home.file.read_text() == TEXT


def test_names_that_are_taken(home: CursorHome) -> None:
    entries = {name: {"command": "/bin/ls"} for name in ("runner-gateway", "b")}
    home.write(json.dumps({"mcpServers": entries}))
    assert home.wrap("--server", "b").returncode == 0
    assert list(home.servers()) == ["runner-gateway", "runner-gateway-2"]
    done = home.undo()
    assert done.returncode == 0 and json.loads(home.file.read_text())["mcpServers"] == entries


@pytest.mark.parametrize(
    ("name", "text", "words", "status", "message"),
    [
        ("work/.cursor/mcp.json", TEXT, (), 1, "may be a project's or the system's"),
        ("work/mcp.json", TEXT, (), 1, "of an unknown host"),
        (".codex/config.toml", '[mcp_servers.a]\ncommand = "/bin/ls"\n', (), 1, "this is toml of Codex"),
        (".cursor/mcp.json", '{"mcpServers": {"a": }}', (), None, "mcp.json:1:"),
        (".cursor/mcp.json", TEXT, ("--undo", "--server", "two"), 2, "leave --server out"),
        (".cursor/mcp.json", TEXT, ("--server", "nobody"), 2, "there is no such server"),
    ],
)
def test_wrap_refuses_a_gateway_and_changes_nothing(
    home: CursorHome, name: str, text: str, words: tuple[str, ...], status: int | None, message: str
) -> None:
    home.file = home.write(text, name)
    done = home.wrap(*words)
    assert status in (None, done.returncode) and done.returncode and message in done.stderr, done.stderr
    assert home.file.read_text() == text and not home.folder.exists()


@pytest.mark.parametrize(
    ("name", "text", "entry"),
    [
        (
            ".config/opencode/opencode.json",
            {"mcp": {"a": {"type": "local", "command": ["/bin/ls", "-l"], "enabled": True}}},
            {"type": "local", "command": ["RUNNER", "gateway", "--config", "STORED"]},
        ),
        (
            ".config/zed/settings.json",
            {"context_servers": {"a": {"command": {"path": "/bin/ls", "args": []}}}},
            {"command": {"path": "RUNNER", "args": ["gateway", "--config", "STORED"]}},
        ),
        (
            ".copilot/mcp-config.json",
            {"mcpServers": {"a": {"type": "local", "command": "/bin/ls", "args": [], "tools": ["*"]}}},
            {"type": "local", "tools": ["*"], "command": "RUNNER", "args": ["gateway", "--config", "STORED"]},
        ),
    ],
)
def test_each_host_has_its_own_notation(
    home: CursorHome, name: str, text: dict[str, Any], entry: dict[str, Any]
) -> None:
    before = json.dumps(text, indent="\t")
    home.file = home.write(before, name)
    assert home.wrap().returncode == 0
    [table] = json.loads(home.file.read_text()).values()
    program = next(word for word in json.dumps(table).split('"') if word.endswith("/runner"))
    wanted = json.dumps(entry).replace("RUNNER", program).replace("STORED", str(home.stored))
    assert table == {"runner-gateway": json.loads(wanted)}
    assert json.loads(home.stored.read_text()) == text
    assert "ok: a (mcp), of" in home.caller("check", home.stored).stdout
    assert home.undo().returncode == 0 and home.file.read_text() == before


def test_a_gateway_that_cannot_be_started_changes_nothing(home: CursorHome) -> None:
    """Neither without the extra, nor with a policy that has a fault: before any question and any file."""
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]; sys.modules['mcp'] = None\n"
        "from runner.cli import main; sys.exit(main(['wrap', '--gateway', *sys.argv[2:]]))"
    )
    argv = [sys.executable, "-c", program, str(ROOT), str(home.file)]
    for words in ((), ("--dry-run",)):
        done = subprocess.run([*argv, *words], env=home.caller.environ, capture_output=True, text=True)
        assert done.returncode == 1, done
        assert done.stderr == (
            f"runner wrap: {home.file}: no gateway can be started: mcp is missing; install it with"
            f" {install_command('gateway')}; nothing was changed\n"
        )
    policy = home.write("[netwrk]\n", "policy.toml")
    done = home.caller("wrap", "--gateway", home.file, "--yes", env={"RUNNER_POLICY": str(policy)})
    assert done.returncode == 20 and "policy.toml:1:2" in done.stderr, done
    assert home.file.read_text() == TEXT and not home.folder.exists()


def test_no_project_can_bring_a_stored_file_along() -> None:
    for host in HOSTS:
        if host.syntax in ("json", "jsonc"):
            name = f".config/runner/gateway/{gateway_file(host, '0123')}"
            place = place_of(f"/home/ada/{name}", "/home/ada")
            assert place is not None and place.own and place.host.name == host.name
            for path in (f"/srv/clone/{name}", f"/home/ada/work/{name}", f"/home/ada/{name}/x"):
                found = place_of(path, "/home/ada")
                assert found is None or not found.own, path


@pytest.mark.needs("root")
def test_a_folder_of_others_is_not_used(home: CursorHome) -> None:
    home.folder.mkdir(parents=True)
    home.caller.give(home.caller.home)
    os.chmod(home.folder, 0o777)
    refused = home.wrap()
    assert refused.returncode == 1 and "can be written by its group or by everybody" in refused.stderr
    assert home.file.read_text() == TEXT and not list(home.folder.iterdir())
    os.chmod(home.folder, 0o700)
    assert home.wrap().returncode == 0
