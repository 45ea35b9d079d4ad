"""Stored plans of entries that `runner wrap` wrote: what such an entry claims is checked at each start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Caller
from tests.runner.launch.stored.stored_plugin import plans_in
from tests.runner.launch.stored.test_both_ways import USED
from tests.template import prepared

pytestmark = [pytest.mark.launches, pytest.mark.needs("root"), pytest.mark.usefixtures("nothing_left")]

Write = Callable[..., Path]
# RUNNER_DEBUG of an entry is dropped with its other variables.
SAYS = """\
import os
import sandbox.look
import runner.cli.shared.stored_plan as first, runner.launch.stored.run as second
sandbox.look.SETTLED_SECONDS = -3600.0
first.say = second.say = lambda text: os.write(2, f"runner: {text}\\n".encode())
"""
SERVER = '#!/bin/sh\necho "$TOKEN,$OTHER,$*"\ncat "$1" 2>&1\n'
# That of the packages, and a credential whose value a command knows.
POLICY = (ROOT / "policies/default.toml").read_text().replace("hosts = []\n", 'hosts = ["a.example:443"]\n')
POLICY += """
[credentials.given]
hosts = ["a.example:443"]
from = ["TOKEN"]
"""
SECRET, NEXT = "t0ken-s3cret-17", "t0ken-an0ther-18"


class Entry:
    def __init__(self, caller: Caller, place: Path, write_file: Write) -> None:
        self.caller = caller
        self.server = write_file(place / "bin/server", SERVER, 0o755)
        self.data = write_file(place / "data/file", "of the host\n")
        self.file = place / "mcp.json"
        entry = {"command": str(self.server), "args": [str(self.data)], "env": {"TOKEN": SECRET}}
        self.write({"mcpServers": {"tool": entry}})
        caller.give(place)
        done = caller("wrap", str(self.file), "--yes")
        assert done.returncode == 0, done.stdout + done.stderr

    def write(self, document: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(document))

    def change(self, change: Callable[[dict[str, Any]], object]) -> None:
        document = json.loads(self.file.read_text())
        change(document["mcpServers"]["tool"])
        self.write(document)

    def start(self, **env: str) -> subprocess.CompletedProcess[str]:
        """As a host does: the entry's variables on top of its own."""
        entry = json.loads(self.file.read_text())["mcpServers"]["tool"]
        return self.caller(*entry["args"], env={**entry["env"], **env}, cwd="/")

    def use(self, **env: str) -> str:
        for _ in range(5):
            if USED in (ended := self.start(**env)).stderr:
                break
        assert USED in ended.stderr and ended.returncode != 126, ended.stderr
        return ended.stdout


@pytest.fixture
def entry(runner_as: Caller, plugin_dir: Path, write_file: Write) -> Iterator[Entry]:
    """The caller has an account, and the machine a policy, in a mount namespace that stays: another one would
    be another machine."""
    own = f"tester:x:{runner_as.uid}:{runner_as.uid}::{runner_as.home}:/bin/sh\n"
    others = [line for line in Path("/etc/passwd").read_text().splitlines(True) if ":x:0:" not in line]
    write_file(plugin_dir / "etc/passwd", own + "".join(others))
    write_file(plugin_dir / "etc/runner/policy.toml", POLICY.replace("TOKEN", str(plugin_dir / "token")))
    script = 'mount -t overlay -o "lowerdir=$0:/etc" overlay /etc && echo ready && exec cat'
    private = ("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script)
    words = (*private, str(plugin_dir / "etc"))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        enter = ("/usr/bin/nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--")
        caller = dataclasses.replace(runner_as, prefix=(*enter, *runner_as.prefix))
        yield Entry(prepared(caller, SAYS), plugin_dir, write_file)


@pytest.mark.both_callers
def test_an_entry_is_held_against_its_configuration_each_time(entry: Entry) -> None:
    assert entry.use().startswith(f"{SECRET},,{entry.data}\n")
    caller = entry.caller
    folder = Path("/var/cache/runner") if caller.uid == 0 else caller.home / ".cache/runner"
    stored = plans_in(folder).values()
    assert any(str(entry.server).encode() in raw for raw in stored)
    assert not any(SECRET.encode() in raw for raw in stored)

    # Another value than the configuration's, a variable that it does not have, and a host's own variable.
    for env in ({"PLUGIN_ENV_TOKEN": NEXT}, {"PLUGIN_ENV_OTHER": "more"}):
        refused = entry.start(**env)
        assert USED not in refused.stderr and refused.returncode == 2 and not refused.stdout, refused.stderr
    other = entry.start(OTHER="of the host", TOKEN="of the host")
    assert other.stdout.startswith(f"{SECRET},,")
    entry.use()

    # A person changes it, and then allows something.
    entry.change(lambda each: each["env"].update(PLUGIN_ENV_TOKEN=NEXT))
    changed = entry.start()
    assert USED not in changed.stderr and changed.stdout.startswith(f"{NEXT},,")
    assert "of the host" not in entry.use()
    policy = ("allow", str(entry.file), "--server", "tool", "--read", str(entry.data), "--yes")
    done = entry.caller(*policy)
    assert done.returncode == 0, done.stdout + done.stderr
    allowed = entry.start()
    assert USED not in allowed.stderr and "of the host" in allowed.stdout
    assert "of the host" in entry.use()

    # The same words, which the configuration does not have any more.
    words = json.loads(entry.file.read_text())["mcpServers"]["tool"]
    entry.change(lambda each: each["args"].append("more"))
    gone = entry.caller(*words["args"], env=words["env"], cwd="/")
    assert USED not in gone.stderr and gone.returncode == 2 and not gone.stdout

    # A program by its name, found by a PATH that may be the entry's own: that is looked at each time.
    path = f"{entry.server.parent}:/usr/bin:/bin"
    entry.use(PATH=path)  # the control: the same program by its path
    entry.change(lambda each: each.update(args=[*each["args"][:-3], "server", *each["args"][-2:]]))
    for _ in range(
        3 if caller.uid == 0 else 0
    ):  # nobody else can read the PATH of root's process, its parent
        ended = entry.start(PATH=path)
        assert USED not in ended.stderr and ended.stdout.startswith(f"{NEXT},,"), ended.stderr


@pytest.mark.both_callers
def test_the_command_of_a_credential_has_no_variable_of_an_entry(entry: Entry, write_file: Write) -> None:
    """It runs outside of the cage, and an entry could say there which programs it starts."""
    log = entry.caller.home / "asked"
    said = f'#!/bin/sh\necho "asked$FROM_HOST$SSH_AUTH_SOCK$(planted)" >> {log}\necho gh_f7Qz2mW9xLrT4vB8\n'
    planted = write_file(entry.file.parent / "planted/planted", "#!/bin/sh\necho planted\n", 0o755)
    write_file(entry.file.parent / "token", said, 0o755)
    words = ("--server", "tool", "--hide", "given@a.example:443", "--net", "a.example:443", "--yes")
    done = entry.caller("allow", str(entry.file), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    entry.caller.give(entry.file.parent)
    outside = {"FROM_HOST": " by the entry", "SSH_AUTH_SOCK": " an agent of the entry"}
    entry.use(**outside, PATH=f"{planted.parent}:/usr/bin:/bin")
    asked = log.read_text().splitlines()
    assert len(asked) > 1 and {*asked} == {"asked"}


@pytest.mark.both_callers
def test_other_options_are_not_those_of_the_entry(entry: Entry) -> None:
    entry.use()
    words = json.loads(entry.file.read_text())["mcpServers"]["tool"]
    report = entry.caller.home / "report.json"
    for option in (f"--report={report}", "--memory=1G"):
        ended = entry.caller(words["args"][0], option, *words["args"][1:], env=words["env"], cwd="/")
        assert USED not in ended.stderr and ended.returncode == 2 and not ended.stdout, ended.stderr
    assert not report.exists()
    entry.use()
