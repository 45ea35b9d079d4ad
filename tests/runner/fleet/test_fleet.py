"""A fleet of real processes: its verbs, its door, and the same answers as a cold call and a daemon give."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.exceptions import PluginFailure
from runner.fleet.client import FleetClient
from runner.fleet.library import open_fleet
from runner.outcome import EXIT
from tests.conftest import ROOT, Caller
from tests.runner.contracts.ainb.canaries import PAIR, put_pair
from tests.runner.fleet.bus import Bus, ask, working
from tests.runner.fleet.inside import new_call
from tests.runner.serve.served import Served, serving
from tests.runner.serve.shelf import SHARES, Shelved, put_example
from tests.tables import wait_for

pytestmark = [
    pytest.mark.launches,
    pytest.mark.needs("nats"),
    pytest.mark.usefixtures("nothing_left"),
]
SECRET = "s3cr3t-t0ken-0f-the-0perator"
# Parts of answers that differ from call to call.
VARYING = re.compile(
    r'"(id|invocation_id|trace_id|tool_execution_id|deadline_at|started_at|ended_at|pid|served)": '
    r'("[^"]*"|\d+)'
)


def plain(document: Any) -> Any:
    """Without what differs from call to call."""
    return json.loads(VARYING.sub(r'"\1": 0', json.dumps(document, sort_keys=True)))


# A cold call by the library, as the verbs make it: `runner call` also lists the tools if one is missing.
COLD = """
import json, runner, sys
from runner.outcome import outcome_document
path, tool, given = sys.argv[1:]
try:
    print(json.dumps({"value": runner.call(path, tool, json.loads(given))}))
except (runner.PluginError, runner.PluginFailure) as error:
    print(json.dumps({"error": outcome_document(error.outcome)}))
"""


def ask_all_ways(caller: Caller, folder: Path, url: str, door: Served, each: Shelved) -> None:
    """The same call and the same mistake: cold, at the door of the fleet, waited and durable in the fleet."""
    path = str(folder / "plugins" / each.name.removeprefix("acme."))
    for tool in (each.tool, "nothing"):
        given = json.dumps(each.input)
        argv = [*caller.python, "-c", COLD, path, tool, given]
        cold = subprocess.run(argv, env=caller.environ, capture_output=True, text=True, cwd="/", check=True)
        found = {"cold": json.loads(cold.stdout), "door": door.call(each.name, tool, each.input)[1]}

        async def in_fleet(client: FleetClient, tool: str = tool) -> list[Any]:
            plugin = await client.find(each.name)
            calls = [new_call(plugin.name, tool, each.input) for _ in range(2)]
            return [(await client.call(plugin, calls[way], durable=bool(way))).document for way in range(2)]

        found["fleet"], found["durable"] = ask(url, in_fleet)
        kept = {way: _kept(document) for way, document in found.items()}
        if each.contract == "kaged" and tool != "nothing":  # it counts its calls
            kept = {way: sorted(document) for way, document in kept.items()}
        assert len(set(map(json.dumps, kept.values()))) == 1, kept
        assert ("error" in kept["cold"]) == (tool == "nothing")


def _kept(document: Any) -> Any:
    """What has to be the same by each way."""
    if "value" in document:
        return plain({"value": document["value"]})
    return plain({"error": document["error"]})


def test_the_same_answers_cold_at_the_door_and_in_the_fleet(
    runner_as: Caller, plugin_dir: Path, bus: Bus
) -> None:
    (plugin_dir / "plugins").mkdir()
    shelved = [put_example(contract, f"{contract}9", plugin_dir / "plugins") for contract in SHARES]
    assert len(shelved) == 6
    put_pair(plugin_dir / "plugins")
    fails_if_asked(plugin_dir / "plugins/mcp9/server.py")
    settings = put_settings(plugin_dir)
    with working(runner_as, plugin_dir, bus.url, "--settings", str(settings), name="six") as worker:
        with serving(runner_as, plugin_dir, "--fleet", bus.url, config=False) as door:
            for each in shelved:
                ask_all_ways(runner_as, plugin_dir, bus.url, door, each)
            ask_the_door(door)
            for words in (("logs", "mcp9"), ("ctl", "stop", "mcp9")):
                done = runner_as(*words, "--socket", door.socket)
                assert done.returncode == 2 and "belongs to the workers of a fleet" in done.stderr, done
            repeat_at_the_door(runner_as, bus.url, door)
            ask_by_the_library(bus.url)
            give_up(runner_as, bus.url, door)
            door.end()
        ask_by_verbs(runner_as, bus.url)
        assert "draining" in worker.end()


def ask_the_door(door: Served) -> None:
    for name, argv, said in PAIR:  # the plugins of one worker share a bus
        status, found = door.call(name, name, {"argv": argv})
        assert (status, found["value"]["stdout"]) == (200, said)
    listed = {each["name"]: each for each in door.ask("GET", "/plugins")[1]["plugins"]}
    assert {each["state"] for each in listed.values()} == {"ready"}
    assert listed["mcp9"]["workers"] == ["six"]
    status, tools = door.ask("GET", "/plugins/mcp9/tools")
    assert status == 200 and "greet" in {each["name"] for each in tools["tools"]}
    headers = {"Idempotency-Key": "k"}
    first = door.call("mcp9", "greet", {"name": "you"}, **headers)
    assert first[0] == 200 and door.call("mcp9", "greet", {"name": "you"}, **headers) == first
    for path in ("start", "stop", "reset"):
        status, found = door.ask("POST", f"/plugins/mcp9/{path}")
        assert (status, found["error"]["code"]) == (501, "fleet")
    assert door.call("nothing", "greet")[0] == 404
    event = {"type": "run.completed", "subject": {"kind": "run", "id": "r"}, "summary": {}}
    delivery = {"id": "d.1", "plugin": "acme.vai9", "hook": "notify", "event": event}
    assert door.ask("POST", "/deliveries", delivery)[0] == 202
    while (row := door.ask("GET", "/deliveries/d.1")[1])["state"] in ("queued", "running"):
        pass
    assert row["state"] == "acked", row


def repeat_at_the_door(caller: Caller, url: str, door: Served) -> None:
    """A call that no plugin was asked about leaves its key free at the door of a fleet, too."""
    call, headers = ("mcp9", "greet", {"name": "you"}), {"Idempotency-Key": "held"}
    held = caller("ctl", "--fleet", url, "quarantine", "mcp9")
    assert held.returncode == 0, held
    refused: list[str] = []
    while len(refused) < 2:
        status, found = door.call(*call, **headers)
        if status == 200:  # the hold is not known yet; that key is taken
            headers = {"Idempotency-Key": f"held {found['id']}"}
            continue
        refused.append(found["id"])
        row = door.ask("GET", f"/calls/{found['id']}")[1]
        assert row["code"] in ("overloaded", "quarantined") and row["started"] is None, row
    assert refused[0] != refused[1]
    assert caller("ctl", "--fleet", url, "release", "mcp9").returncode == 0
    assert wait_for(lambda: door.call(*call, **headers)[0] == 200)


def put_settings(folder: Path) -> Path:
    """Two plugins are given up at their first failure, and one of them has a secret."""
    shutil.copytree(ROOT / "tests/plugins/kaged_quirks", folder / "plugins/kaged_quirks")
    settings, key = folder / "settings.toml", folder / "key"
    settings.write_text(
        "[mcp9]\nnumbers = {respawn = false}\n"
        '[quirks]\nfolder = "plugins/kaged_quirks"\nsecrets = {token = "@key"}\nnumbers = {respawn = false}\n'
    )
    key.write_text(SECRET)
    for path in (settings, key):
        path.chmod(0o644)
    for path in (folder / "plugins/kaged_quirks", *(folder / "plugins/kaged_quirks").rglob("*")):
        path.chmod(0o755)
    return settings


def fails_if_asked(server: Path) -> None:
    """For one name it writes to its stderr and ends."""
    text = server.read_text()
    begin = "def greet(arguments):\n"
    fault = (
        "    if arguments.get('name') == 'nobody':\n"
        "        sys.stderr.write('cannot open \\x1b[31mthe database\\n')\n"
        "        sys.stderr.flush()\n"
        "        import os\n"
        "        os._exit(3)\n"
    )
    assert begin in text
    server.write_text(text.replace(begin, begin + fault))


def give_up(caller: Caller, url: str, door: Served) -> None:
    """A plugin fails on a worker: who sees that, and how it is ended."""
    fleet = ("--fleet", url)
    call = ("call", *fleet, "mcp9", "greet", "--input")
    failed = caller(*call, '{"name": "nobody"}')
    assert failed.returncode == EXIT["crashed"] and "crashed" in failed.stderr, failed

    def held() -> list[dict[str, Any]]:
        shown = json.loads(caller("ps", *fleet, "--json").stdout)
        return [each for each in shown["queues"] if each["plugin"] == "mcp9" and each["held"]]

    assert wait_for(held)
    shown = caller("ps", *fleet).stdout
    assert re.search(r"^mcp9 .* quarantined on six: crashed: .*status 3", shown, re.M), shown
    for given in ((), ("--durable",)):
        refused = caller(*call, '{"name": "you"}', *given)
        assert refused.returncode == EXIT["quarantined"], refused
        for part in ("quarantined on six: crashed", "runner logs --fleet", "runner ctl reset --fleet"):
            assert part in refused.stderr
    status, answer = door.call("mcp9", "greet", {"name": "you"})
    assert (status, answer["error"]["code"]) == (503, "quarantined") and "on six" in answer["error"][
        "message"
    ]
    assert wait_for(lambda: door.ask("GET", "/plugins/mcp9")[1]["state"] == "quarantined")
    logs = caller("logs", *fleet, "mcp9")
    assert (logs.returncode, logs.stdout) == (0, "==> six <==\ncannot open \x1b[31mthe database\n")
    ours, terminal = os.openpty()
    with open(ours, "rb", buffering=0) as screen:
        process = caller.start("logs", *fleet, "--worker", "six", "mcp9", stdout=terminal)
        os.close(terminal)
        text = b""
        with process, contextlib.suppress(OSError):  # of a terminal that nobody has open any more
            while piece := screen.read(4096):
                text += piece
    assert b"the database" in text and b"\x1b" not in text
    reset = caller("ctl", "reset", "mcp9", *fleet)
    assert reset.returncode == 0 and reset.stdout in ("six: idle\n", "six: starting\n"), reset
    assert wait_for(lambda: not held())
    assert "Hello, you!" in caller(*call, '{"name": "you"}').stdout
    # What a plugin writes about its secrets does not travel.
    spilled = caller("call", *fleet, "quirks", "spill", "--input", '{"then": "exit"}')
    assert spilled.returncode == EXIT["crashed"], spilled
    told: list[str] = []

    def is_written() -> bool:
        told.append(caller("logs", *fleet, "quirks").stdout)
        return "the token is [secret]" in told[-1]

    assert wait_for(is_written) and SECRET not in "".join(told)
    assert SECRET not in caller("ps", *fleet, "--json").stdout


def ask_by_the_library(url: str) -> None:
    async def main() -> None:
        async with open_fleet(url) as fleet:
            result = await fleet.call("mcp9", "greet", {"name": "you"}, durable=True)
            assert "Hello, you!" in json.dumps(result.value)
            with pytest.raises(PluginFailure, match="tool_not_exposed"):
                await fleet.call("mcp9", "nothing")

    trio.run(main)


def ask_by_verbs(caller: Caller, url: str) -> None:
    fleet = ("--fleet", url)
    shown = caller("ps", *fleet)
    assert shown.returncode == 0 and re.search(r"^six +ready", shown.stdout, re.M), shown
    assert json.loads(caller("ps", *fleet, "--json").stdout)["workers"]
    call = ("call", *fleet, "--durable", "--key", "k.1", "mcp9", "greet", "--input", '{"name": "you"}')
    first, again = caller(*call), caller(*call)
    assert "Hello, you!" in first.stdout == again.stdout, (first, again)
    # Without waiting: the line that gets the answer later is told, and works.
    given = ("mcp9", "greet", "--input", '{"name": "later you"}')
    left = caller("call", *fleet, "--durable", "--no-wait", *given)
    assert left.returncode == 0 and set(json.loads(left.stdout)) == {"id"}, left
    asking = shlex.split(left.stderr.partition("to ask for the answer: runner ")[2])
    assert (
        asking[-2:] == ["--key", json.loads(left.stdout)["id"]]
        and "Hello, later you!" in caller(*asking).stdout
    )
    rows = [
        (("call", *fleet, "none", "x"), 2, "no worker of the fleet has a plugin 'none'"),
        (("call", *fleet, "--policy", "open", "mcp9", "greet"), 2, "--policy does not go with --fleet"),
        (("call", *fleet, "--no-wait", "mcp9", "greet"), 2, "add --durable"),
        (("call", *fleet, "mcp9"), 2, "runner call --fleet URL PLUGIN NAME"),
        (("call", "--durable", "none", "greet"), 2, "add --fleet URL"),
        (("call", "--fleet", "nats://127.0.0.1:1", "a", "b"), 10, "no server of the fleet at"),
        (("call", "--fleet", "/nowhere", "a", "b"), 2, "no such file"),
        (("ctl", "quarantine", "mcp9"), 2, "required: --fleet (use runner ctl quarantine"),
        (("ctl", "reset", "none", *fleet), 2, "no worker of the fleet has a plugin 'none'"),
        (("ctl", "reset", "mcp9", "--worker", "none", *fleet), 2, "the worker 'none' has no plugin"),
        (("ctl", "close", "anyone.none", *fleet), 2, "there is no dead letter"),
        (("logs", *fleet, "none"), 2, "no worker of the fleet has a plugin 'none'"),
        (("logs", *fleet, "--follow", "mcp9"), 2, "--follow does not go with --fleet"),
        (("logs", "--worker", "six", "mcp9"), 2, "--worker goes with --fleet"),
        (("ctl", "reload", *fleet), 2, "(use runner ctl reload [--socket PATH] [NAME])"),
        (("ctl", "show", "anyone.none", *fleet), 2, "there is no dead letter"),
        (("ctl", "init", "--replicas", "2", *fleet), 2, "1, 3 or 5"),
        (("ctl", "dead", *fleet), 0, ""),
        (("serve", *fleet, "--config", "/"), 2, "leave the others out"),
        (("worker", "--nats", url, "--config", "/none"), 2, "there is no such file"),
        (("worker", "--nats", url, "--config", "/etc", "--slots", "0"), 2, "--slots 0"),
        (("worker", "--nats", url, "--config", "/etc", "--name", "a.b"), 2, "--name"),
    ]
    for words, status, said in rows:
        done = caller(*words)
        assert done.returncode == status and said in done.stderr, (words, done)
