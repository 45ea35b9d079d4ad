"""Plugins of one daemon publish to each other, and invoke actions of each other."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller
from tests.runner.contracts.ainb.canaries import Nest
from tests.runner.serve.served import Served, serving
from tests.tables import wait_for

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

GET, INVOKE = "host/snapshot/get", "host/action/invoke"
BUS = {"event_bus": True}


def run(served: Served, plugin: str, *argv: str) -> str:
    status, found = served.call(plugin, plugin, {"argv": list(argv)})
    assert status == 200, found
    output: str = found["value"]["stdout"]
    return output


def ask(served: Served, plugin: str, method: str, **params: Any) -> Any:
    """What the host answers to a question of a plugin."""
    return json.loads(run(served, plugin, "ask", method, json.dumps(params)))


def bytes_of(text: Any) -> str:
    return base64.b64encode((text if isinstance(text, str) else json.dumps(text)).encode()).decode()


@pytest.mark.both_callers
def test_one_bus_for_the_plugins_of_a_daemon(runner_as: Caller, plugin_dir: Path) -> None:
    nest = Nest(plugin_dir, runner_as)
    nest.put("a06", capabilities=BUS, namespaces=["a06"], spawn="eager")
    nest.put("a07", capabilities=BUS, namespaces=["a07"])
    nest.put("doer", capabilities=BUS, namespaces=["doer", "a07"])  # the action a07 is not its to take
    nest.put("mute", namespaces=["mute"], subscribes=["cts.chunks"])
    nest.put("narrow", capabilities={"event_bus": ["cts.chunks"]}, namespaces=["narrow", "slender"])
    nest.put("greedy", capabilities={**BUS, "write_plugin_data": True}, namespaces=["greedy", "slender"])
    nest.policy.write_text(nest.policy.read_text() + "[write]\nceiling = []\n")
    with serving(runner_as, plugin_dir, "--policy", str(nest.policy)) as served:
        check_snapshots(served)
        check_grants(served)
        check_actions(served)
        check_ends(served, nest)
        served.end()


def check_snapshots(served: Served) -> None:
    # The eager publisher runs before anybody calls it, and its first snapshot is there for all.
    assert wait_for(lambda: ask(served, "a07", GET, topic="cts.a06")["result"]["version"])
    found = ask(served, "a07", GET, topic="cts.a06")["result"]
    assert base64.b64decode(found["payload"]) == b"a06-payload"
    assert run(served, "mute") == ""
    run(served, "a06", "publish", "cts.chunks", "5", "1000")
    assert json.loads(run(served, "a07", "told")) == [["cts.chunks", f"{number}:"] for number in range(5)]


def check_grants(served: Served) -> None:
    """The daemon's bus is for those who have event_bus, and for the topics of their lists."""
    denied = {"code": -32001, "message": "capability denied: event_bus"}
    assert ask(served, "mute", GET, topic="cts.a06")["error"] == denied
    assert json.loads(run(served, "mute", "told")) == []
    assert ask(served, "narrow", GET, topic="cts.a06")["error"]["code"] == -32001
    assert ask(served, "narrow", GET, topic="cts.chunks")["result"]["version"] > 1
    run(served, "narrow", "publish", "cts.a07", "1", "1")
    assert len(json.loads(run(served, "a07", "told"))) == 5


def check_actions(served: Served) -> None:
    # A plugin that does not run is started for an action.
    assert served.states()["doer"] == "idle"
    found = ask(served, "a07", INVOKE, action="doer", payload=bytes_of("abc"))
    assert base64.b64decode(found["result"]["payload"]) == b"cba"
    assert served.states()["doer"] == "ready"
    # A plugin that may not start takes no names.
    assert served.states()["greedy"] == "pending"
    found = ask(served, "a07", INVOKE, action="slender", payload=bytes_of("abc"))
    assert base64.b64decode(found["result"]["payload"]) == b"cba"
    assert ask(served, "a07", INVOKE, action="greedy", payload="")["error"]["code"] == -32602
    # a07 waits for doer, which asks a07: neither could go on. It is refused at once.
    back = [INVOKE, {"action": "a07", "payload": bytes_of("abc")}]
    found = ask(served, "a07", INVOKE, action="doer", payload=bytes_of(back))
    refused = json.loads(base64.b64decode(found["result"]["payload"]))["error"]
    assert refused["code"] == -32602 and "a07 waits for an action of doer itself" in refused["message"]
    # What the other one refuses is told; whom nobody may start fails for who asks, and for nobody else.
    assert served.ask("POST", "/plugins/doer/stop")[0] == 200
    found = ask(served, "a07", INVOKE, action="doer", payload="")["error"]
    assert found == {"code": -32603, "message": "the plugin failed: cancelled"}
    assert ask(served, "a07", INVOKE, action="nothing", payload="")["error"]["code"] == -32602
    assert served.ask("POST", "/plugins/doer/start")[0] == 200
    found = ask(served, "a07", INVOKE, action="doer", payload=bytes_of("hang"), timeout_ms=50)
    assert found["error"] == {"code": -32002, "message": "action timed out: doer"}


def check_ends(served: Served, nest: Nest) -> None:
    # A subscriber that comes back is subscribed anew. What was told to the one before is not repeated.
    assert served.ask("POST", "/plugins/a07/stop")[0] == 200
    run(served, "a06", "publish", "cts.chunks", "2", "1")
    assert served.ask("POST", "/plugins/a07/start")[0] == 200
    run(served, "a06", "publish", "cts.chunks", "1", "1")
    assert json.loads(run(served, "a07", "told")) == [["cts.chunks", "0:"]]
    # What a plugin published outlives its process, and not its place in the configuration.
    assert served.ask("POST", "/plugins/a06/stop")[0] == 200
    assert ask(served, "a07", GET, topic="cts.chunks")["result"]["version"]
    shutil.rmtree(nest.root / "a06")
    assert wait_for(lambda: ask(served, "a07", GET, topic="cts.chunks")["result"]["version"] == 0)
