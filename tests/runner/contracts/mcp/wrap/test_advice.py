"""What a wrapped start tells people is kept: `runner advice` shows it. What an entry gets later is told."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller

Write = Callable[..., Path]
SECRET = "s3cr3t-value"

pytestmark = [pytest.mark.needs("root"), pytest.mark.usefixtures("nothing_left")]

# Says what it has, asks for a host that it may not reach, and fails with a hostile line.
SERVER = """#!/usr/bin/python3 -I
import os, socket, sys
print(os.environ.get("API_KEY"), flush=True)
try:
    socket.getaddrinfo("api.example.com", 443)
except OSError as error:
    print(f"\\x1b[31mno answer\\x1b[0m for {os.environ['TOKEN']}", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


class Host:
    """A host with one entry, which it starts as hosts do."""

    def __init__(self, caller: Caller, file: Path) -> None:
        self.caller, self.file = caller, file

    def entry(self, name: str = "tool") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())["mcpServers"][name]
        return found

    def write(self, entry: dict[str, Any], other: dict[str, Any]) -> None:
        self.file.write_text(json.dumps({"mcpServers": {"tool": entry, "other": other}}))
        self.caller.give(self.file)

    def start(self, name: str = "tool") -> subprocess.CompletedProcess[str]:
        entry = self.entry(name)
        return self.caller(*entry["args"], env=entry.get("env"))

    def advice(self, *options: str) -> str:
        done = self.caller("advice", self.file, *options)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def starts(self) -> list[list[str]]:
        """The lines of each start of the entry."""
        found = json.loads(self.advice("--json", "--server", "tool"))
        assert (found["schema"], found["host"]) == ("runner.advice.v1", "Cursor")
        [server] = found["servers"]
        return [each["lines"] for each in server["starts"]]


@pytest.fixture
def host(account_as: Caller, plugin_dir: Path, write_file: Write) -> Host:
    server = write_file(plugin_dir / "server", SERVER, 0o755)
    file = write_file(account_as.home / ".cursor/mcp.json", "")
    account_as.give(file.parent)
    found = Host(account_as, file)
    tool = {"command": str(server), "args": ["1"], "env": {"TOKEN": SECRET}}
    found.write(tool, {"command": "/bin/true"})
    done = account_as("wrap", file, "--yes")
    assert done.returncode == 0, done.stderr
    assert f"  runner advice {file}" in done.stdout.splitlines()
    assert "the Output panel (MCP Logs)" in done.stdout
    return found


def test_the_last_starts_are_kept_without_values(host: Host) -> None:
    assert host.start("other").returncode == 0
    folder = host.caller.home / ".local/state/runner/advice"
    assert not folder.exists()  # of a start about which there is nothing to say
    nothing = host.advice()
    assert "Nothing is kept about tool, other: no start was seen to lack anything" in nothing
    assert f"runner call {host.file} --server NAME TOOL" in nothing  # the errors that it answers
    told = host.start()
    assert told.returncode == 1 and SECRET in told.stderr  # which is the plugin's own
    remedy = f"runner allow {host.file} --server tool --net api.example.com:443"
    asked = "the plugin asked for the host api.example.com, and it has no network; to let it reach that host"
    failed = ["crashed: the plugin ended with status 1", f"{asked}: {remedy}"]
    mark = "| \\x1b[31mno answer\\x1b[0m for [secret]"
    assert host.starts() == [[*failed, mark]]
    shown = host.advice()
    assert [line.strip() for line in shown.splitlines()[1:4]] == [*failed, mark]
    assert shown.startswith("tool, 20") and "is in the Output panel (MCP Logs) of Cursor." in shown
    [file] = folder.glob("*.json")
    status = file.stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, host.caller.uid)
    assert SECRET not in file.read_text()
    # A state folder that cannot be written stops no start; a damaged file is told, and written anew.
    os.chmod(file, 0o666)
    refused = host.caller("advice", host.file)
    assert refused.returncode == 1 and f"chmod go-w {file}" in refused.stderr
    file.parent.chmod(0o777)
    assert host.start().returncode == 1
    file.parent.chmod(0o700)
    assert host.start().returncode == 1
    assert len(host.starts()) == 1
    # A host that was not restarted since its entry changed.
    entry = host.entry()
    host.write({**entry, "args": [*entry["args"], "more"]}, host.entry("other"))
    assert host.caller(*entry["args"], env=entry["env"]).returncode == 2
    assert "has no entry tool with this command line; restart the host" in host.starts()[-1][0]


def test_a_variable_that_is_added_later_is_told_until_it_is_passed_on(host: Host) -> None:
    entry = host.entry()
    key = "k3y-of-an-api"
    host.write({**entry, "env": {**entry["env"], "API_KEY": key, "not a name": "x"}}, host.entry("other"))
    done = host.start()
    assert done.stdout == "None\n"
    remedy = f"runner wrap {host.file} --server tool"
    told = "added to the entry since it was wrapped, and dropped: API_KEY"
    line = f"{told}; to pass it on: {remedy}, then restart the host"
    assert f"runner: {line}" in done.stderr.splitlines()
    assert line in host.starts()[-1] and key not in host.advice()
    assert host.caller(*remedy.split()[1:], "--yes").returncode == 0
    done = host.start()
    assert done.stdout == f"{key}\n" and told not in done.stderr


def test_a_limit_is_raised_in_the_entry(host: Host) -> None:
    """Nobody types its command line, and `runner allow` gives no limits."""
    greedy = {"command": "/usr/bin/python3", "args": ["-Ic", "bytearray(200 << 20)"]}
    host.write(greedy, host.entry("other"))
    assert host.caller("wrap", host.file, "--yes").returncode == 0
    entry = host.entry()
    at = entry["args"].index("--")
    limited = [*entry["args"][:at], "--limit", "memory=64M", *entry["args"][at:]]
    host.write({**entry, "args": limited}, host.entry("other"))
    remedy = f'write "--limit", "memory=…" in front of "--" in the args of tool in {host.file}'
    told = f"raise the memory limit, up to the policy's ceiling: {remedy}"
    assert told in host.start().stderr
    assert any(told in line for line in host.starts()[-1])
    # As it says.
    limited[at + 1] = "memory=512M"
    host.write({**entry, "args": limited}, host.entry("other"))
    assert host.start().returncode == 0


def test_what_is_allowed_is_not_asked_for_again(host: Host, plugin_dir: Path) -> None:
    told = f"runner allow {host.file} --server"
    host.write(*({"command": "/bin/true", "args": [str(plugin_dir / name)]} for name in ("server", ".")))
    done = host.caller("wrap", host.file, "--yes")
    assert f"{told} tool --read" in done.stdout and f"{told} other --read" in done.stdout
    allowed = host.caller("allow", host.file, "--server", "tool", "--read", plugin_dir, "--yes")
    assert allowed.returncode == 0, allowed.stderr
    assert host.caller("wrap", host.file, "--undo", "--yes").returncode == 0
    done = host.caller("wrap", host.file, "--yes")
    assert f"{told} tool --read" not in done.stdout and f"{told} other --read" in done.stdout
