"""runner call --kind event: one event for a plugin, and what it publishes in return."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.runner.launch.test_report import faults
from tests.runner.session.test_endings import NAME, NEXO, PLUGIN, Write

pytestmark = pytest.mark.usefixtures("nothing_left")

BROKER = '[plugin.capabilities.broker]\nsubscribe = ["news.*"]\npublish = ["shout.>"]\n'
# Long enough for the plugin to answer on a busy machine; it is waited for in full.
TIME = "4s"


@pytest.fixture
def bare(plugin_dir: Path) -> Path:
    shutil.copytree(ROOT / "tests/plugins/nexo_bare", plugin_dir / "bare")
    for path in (plugin_dir / "bare", *(plugin_dir / "bare").rglob("*")):
        path.chmod(0o755)
    return plugin_dir / "bare"


def test_an_event_and_what_comes_in_return(runner_as: Caller, bare: Path) -> None:
    report = runner_as.home / "report.json"
    words = ("call", "--kind", "event", "--timeout", TIME, "--report", report, bare, "news.today")
    done = runner_as(*words, "--input", '{"n": 1}')
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    event = json.loads(line)
    assert (event["topic"], event["source"]) == ("plugin.inbound.bare", "bare")
    assert event["payload"] == {"echo": {"n": 1}} and event["id"] and event["timestamp"]
    told = json.loads(report.read_bytes())
    assert faults(told) == []
    assert told["outcome"]["code"] == "ok" and "1 came in return" in told["outcome"]["message"]
    assert told["session"]["calls"] == {"ok": 0, "refused": 0, "failed": 0}


def test_a_policy_that_lets_nobody_publish(runner_as: Caller, bare: Path, write_file: Write) -> None:
    """Nothing is shown, and people are told by whom it was dropped."""
    policy = write_file(bare.parent / "policy.toml", "version = 1\n")
    done = runner_as("call", "--policy", policy, "--kind", "event", "--timeout", TIME, bare, "news.today")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("runner: dropped: ") and "host under [capabilities]" in done.stderr


def test_an_event_that_cannot_be_sent(runner_as: Caller, bare: Path, write_file: Write) -> None:
    done = runner_as("call", "--kind", "event", bare, "weather.today")
    assert (done.returncode, done.stdout) == (2, "")
    assert "invalid_call in call (-32602, not_subscribed): " in done.stderr and "news.*" in done.stderr
    server = write_file(bare.parent / "mcp.json", '{"mcpServers": {"own": {"command": "/nowhere"}}}')
    done = runner_as("call", "--kind", "event", server, "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "runner call: --kind event: the contract mcp has tool, prompt, resource, method\n"


PUBLISHES = """
for number in range(3):
    event = dict(topic="shout.loud", source="own", payload=number)
    send(method="broker.publish", params=dict(topic="shout.loud", event=event))
"""


def test_a_plugin_that_ends_instead(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """What it had published is shown, and its end is told at once."""
    write_file(plugin_dir / "run", PLUGIN.replace("number is not None and", ""), 0o755)
    write_file(plugin_dir / NAME, NEXO + BROKER)
    words = ("call", "--kind", "event", "--timeout", "1000", plugin_dir, "news.today", "--", "called")
    done = runner_as(*words, PUBLISHES + "os._exit(3)")
    assert done.returncode == 13
    assert [json.loads(line)["payload"] for line in done.stdout.splitlines()] == [0, 1, 2]
    assert done.stderr.startswith("runner: crashed in idle (exit:3): ")
    # Nobody reads: it does not go on for nobody until its time is up.
    process = runner_as.start(*words, PUBLISHES, stdin=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (24, b"")
