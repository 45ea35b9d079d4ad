"""`runner call`, the library and live events, with an MCP server that fetches through its gate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.egress.conftest import Plugin
from tests.egress.test_reaching import LINE
from tests.internet import API

pytestmark = [pytest.mark.launches, pytest.mark.needs("root")]

SERVER = """\
#!/usr/bin/python3 -I
import json, sys, urllib.request
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "server/discover":
        result = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
    else:
        url, error = message["params"]["arguments"]["url"], False
        try:
            text = urllib.request.urlopen(url, timeout=60).read().decode()
        except OSError as fault:
            text, error = str(fault), True
        result = {"content": [{"type": "text", "text": text}], "isError": error}
    answer = {"jsonrpc": "2.0", "id": message["id"], "result": {"resultType": "complete", **result}}
    print(json.dumps(answer), flush=True)
"""

# The same with the library: one session, two calls. Prints both answers, the events and the report.
HOST = """\
import json, sys
import runner, trio

async def main():
    manifest, policy, *urls = sys.argv[1:]
    answers, events = [], []
    async with trio.open_nursery() as nursery:
        async with runner.open_plugin(manifest, policy=policy) as plugin:
            async def listen():
                async for event in plugin.events():
                    events.append([event.kind, event.value])
            nursery.start_soon(listen)
            for url in urls:
                try:
                    answers.append((await plugin.call("fetch", {"url": url}))["content"][0]["text"])
                except runner.PluginError as error:
                    answers.append(f"refused: {error.message}")
    print(json.dumps({"answers": answers, "events": events, "network": plugin.report["network"]}))

trio.run(main)
"""

FINE, FOREIGN = "http://ipv4.example.com/x", "http://other.example.org/x"


@pytest.fixture
def server(plugin: Plugin) -> tuple[Path, Path]:
    """A manifest and a policy."""
    plugin.write(plugin.folder / "server.py", SERVER, mode=0o755)
    manifest = plugin.manifest(["ipv4.example.com:80"], "./server.py")
    return manifest, plugin.policy('ceiling = "allowlist"\nhosts = ["*.example.com:80,443,2525"]')


def seen(events: list[tuple[str, dict[str, Any]]]) -> set[tuple[str, str, int, str]]:
    return {
        (value["kind"], value["name"], value["port"], value["verdict"])
        for kind, value in events
        if kind == "network"
    }


CONNECTED = ("connect", "ipv4.example.com", 80, "allowed")
ASKED = ("dns", "ipv4.example.com", 0, "allowed")
REFUSED = ("dns", "other.example.org", 0, "refused")


def test_a_call_reaches_its_host_and_says_so_live(plugin: Plugin, server: tuple[Path, Path]) -> None:
    manifest, policy = server
    report = plugin.caller.home / "report.json"
    done = plugin.caller(
        *("call", "--policy", policy, "--events", "2", "--report", report, manifest, "fetch"),
        *("--input", json.dumps({"url": FINE})),
    )
    assert done.returncode == 0 and "ipv4.example.com" in done.stdout, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"event"')]
    assert seen([(line["event"], line["value"]) for line in lines]) == {CONNECTED, ASKED}
    network = json.loads(report.read_text())["network"]
    assert [each["address"] for each in network["connections"]] == [API]


OTHER_PORT = "http://ipv4.example.com:2525/x"


@pytest.mark.parametrize("verb", ["call", "run"])
def test_another_port_of_a_listed_host_is_told(plugin: Plugin, server: tuple[Path, Path], verb: str) -> None:
    manifest, policy = server
    if verb == "call":
        words = ["--policy", policy, manifest, "fetch", "--input", json.dumps({"url": OTHER_PORT})]
    else:
        words = [
            "--policy",
            plugin.policy('ceiling = "open"\nhosts = ["*:*"]'),
            "--net",
            "ipv4.example.com:80",
        ]
        words += ["--", "/usr/bin/python3", "-I", "-c", LINE, "ipv4.example.com", "2525"]
    done = plugin.caller(verb, *map(str, words))
    told = [line for line in done.stderr.splitlines() if "ipv4.example.com:2525" in line and "asked" in line]
    assert done.returncode != 0 and len(told) == 1, done.stderr
    assert "ipv4.example.com:2525, which was refused: it is not in its list; " in told[0]
    assert "--net ipv4.example.com:2525" in told[0]


def test_the_library(plugin: Plugin, server: tuple[Path, Path]) -> None:
    argv = [*plugin.caller.prefix, *plugin.caller.python, "-c", HOST, *map(str, server), FINE, FOREIGN]
    done = subprocess.run(
        argv, env=plugin.caller.environ, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    fine, foreign = told["answers"]
    assert json.loads(fine)["host"] == "ipv4.example.com" and foreign.startswith("refused: ")
    assert seen(told["events"]) == {CONNECTED, ASKED, REFUSED}
    assert told["network"]["totals"]["connections"] == {"allowed": 1}


def test_exec_says_each_connection_live_and_the_plugin_forges_none(plugin: Plugin) -> None:
    forged = {"kind": "dns", "name": "forged.example.com", "port": 0, "verdict": "allowed"}
    line = json.dumps({"event": "network", "value": forged})
    script = f"{LINE}\nprint({line!r}, file=sys.stderr)\n"
    real = {("connect", "ipv4.example.com", 2525, "allowed"), ASKED}
    place = plugin.caller.home / "events"
    for target, found in ((str(place), real), ("2", {*real, ("dns", "forged.example.com", 0, "allowed")})):
        words = ("ipv4.example.com", "2525")
        ran = plugin.python(["ipv4.example.com:2525"], script, *words, options=["--events", target])
        said = place.read_text() if target != "2" else ran.process.stderr  # the control: a shared stream
        lines = [json.loads(each) for each in said.splitlines()]
        assert seen([(each["event"], each["value"]) for each in lines]) == found
        assert line in ran.process.stderr
    assert place.stat().st_mode & 0o777 == 0o600 and place.stat().st_uid == plugin.caller.uid


FAILING = """
import socket, sys
for name in sys.argv[1:]:
    try:
        socket.create_connection((name, 2525)).recv(1)
    except OSError:
        pass
sys.exit(3)
"""


def test_people_are_told_which_listed_host_was_not_reached(plugin: Plugin) -> None:
    """Nothing listens on this port of a host that exists."""
    script = "import socket\nline = socket.create_connection(('ipv4.example.com', 2599))\n"
    script += "line.settimeout(60)\nassert line.recv(1)"
    ran = plugin.python(["ipv4.example.com:2599"], script)
    assert ran.process.returncode == 1 and ran.verdicts() == [("ipv4.example.com", 2599, "failed")]
    told = f"ipv4.example.com:2599 was allowed and not reached: it cannot be reached at {API}: "
    assert told in ran.process.stderr and told in ran.report["notes"][0]["message"]


def test_people_are_told_what_was_refused_to_a_plugin_that_failed(plugin: Plugin) -> None:
    ran = plugin.python(["inside.example.com:2525"], FAILING, "inside.example.com", "example.com")
    assert ran.process.returncode == 3
    told = ran.process.stderr
    assert "the plugin asked for inside.example.com:2525, which was refused: it leads to 10.9.9.9" in told
    assert (
        "the plugin asked for the host example.com, which is not in its list; to let it reach that host: "
        in told
    )
    assert "--net example.com:443" in told
