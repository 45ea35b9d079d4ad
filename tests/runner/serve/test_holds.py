"""Calls that never came to their plugins, plugins that must not start, and what operators are told, in one
daemon and its next lives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.approvals.names import NamePlace
from runner.approvals.record import ApprovalsUnusable
from runner.lifecycle.machine import Hold
from runner.serve.holds import HoldRecord
from tests.conftest import Caller
from tests.runner.serve.served import Served, put_plugins, serving
from tests.runner.serve.test_serve import GREEDY, event
from tests.tables import check_rows, wait_for

GREET = ("greeter", "greet", {"name": "you"})
# Key -> a call that never comes to its plugin, the status of the answer and the code
UNREACHABLE: dict[str, tuple[tuple[str, str, Any], int, str]] = {
    "broken": (("broken", "greet", {}), 503, "quarantined"),
    "absent": (("absent", "greet", {}), 502, "launch_failed"),
    "greedy": (("greedy", "greet", {}), 403, "policy_denied"),
    "greeter": (GREET, 499, "cancelled"),
    "acme.devkit": (("acme.devkit", "nothing", {}), 404, "tool_not_exposed"),
}


@pytest.fixture
def shelf(plugin_dir: Path, nothing_left: None) -> Path:
    """`greeter`, `acme.devkit`, and plugins that no call comes to."""
    (plugin_dir / "data").mkdir()
    plugins = plugin_dir / "plugins"
    plugins.mkdir()
    put_plugins(plugins)
    for name in ("greedy", "broken", "absent"):
        (plugins / name).mkdir()
    (plugins / "greedy/nexo-plugin.toml").write_text(GREEDY.replace("DATA", str(plugin_dir / "data")))
    broken = GREEDY.replace("greedy", "broken").partition("fs_read_paths")[0]
    (plugins / "broken/nexo-plugin.toml").write_text(broken)
    (plugins / "absent/mcp.json").write_text('{"mcpServers": {"absent": {"command": "./absent"}}}')
    for path in (plugins, *plugins.rglob("*")):
        path.chmod(0o755)
    return plugin_dir


def reasons(served: Served) -> tuple[int, str, list[str]]:
    status, found = served.ask("GET", "/health")
    return status, found["status"], [each["code"] for each in found["reasons"]]


def gauges(served: Served) -> dict[str, float]:
    lines = served.ask("GET", "/metrics")[1].splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] != "#"}


def killed(served: Served) -> str:
    """Kill it. Returns what it had said."""
    served.process.kill()
    return served.process.communicate(timeout=60)[1].decode()


def check_keys(served: Served) -> None:
    """A call that never comes to its plugin leaves its key free. `started` says that it was not asked."""
    assert served.ask("POST", "/plugins/greeter/stop")[0] == 200

    def check(key: str, wanted: tuple[tuple[str, str, Any], int, str]) -> None:
        call, *refusal = wanted
        answers = [served.call(*call, Idempotency_Key=key) for _ in range(2)]
        assert [[status, found["error"]["code"]] for status, found in answers] == [refusal] * 2, answers
        ids = [found["id"] for _, found in answers]
        rows = [served.ask("GET", f"/calls/{each}")[1] for each in ids]
        assert ids[0] != ids[1] and [row["started"] for row in rows] == [None, None]
        assert [(row["key"], row["repeated_by"]) for row in rows] == [(key, "")] * 2

    check_rows(UNREACHABLE, check)
    assert served.ask("POST", "/plugins/greeter/start")[0] == 200
    first = served.call(*GREET, Idempotency_Key="greeter")
    assert first[0] == 200 and served.call(*GREET, Idempotency_Key="greeter") == first  # it runs once
    row = served.ask("GET", f"/calls/{first[1]['id']}")[1]
    assert row["accepted"] <= row["started"] <= row["ended"] and row["repeated_by"] is None


def check_alerts(served: Served) -> None:
    """Quarantines and dead letters are told to who asks, and do not keep calls away."""
    assert reasons(served) == (200, "degraded", ["quarantined"])
    assert "broken: " in served.ask("GET", "/health")[1]["reasons"][0]["message"]
    dead = {"id": "d1", "plugin": "acme.devkit", "hook": "notify", "event": event({"do": "fail"})}
    assert served.ask("POST", "/deliveries", dead)[0] == 202
    assert wait_for(lambda: served.ask("GET", "/deliveries/d1")[1]["state"] == "dead")
    assert reasons(served) == (200, "degraded", ["quarantined", "dead_deliveries"])
    assert served.ask("POST", "/plugins/acme.devkit/stop")[0] == 200
    waits = {"id": "d2", "plugin": "acme.devkit", "hook": "notify", "event": event({})}
    assert served.ask("POST", "/deliveries", waits)[0] == 202
    found = gauges(served)
    assert (found["runner_deliveries_dead"], found["runner_deliveries_waiting"]) == (1, 1)
    assert found["runner_ledger_fault"] == 0
    for name, state in (("broken", "quarantined"), ("greedy", "pending"), ("acme.devkit", "stopped")):
        labels = f'runner_plugin_state{{plugin="{name}",state='
        assert [key for key, value in found.items() if key.startswith(labels) and value] == [
            f'{labels}"{state}"}}'
        ]
    assert served.ask("GET", "/live") == (200, {"status": "live"})


@pytest.mark.launches
def test_what_must_not_run_and_what_operators_are_told_outlive_the_daemon(
    runner_as: Caller, shelf: Path
) -> None:
    with serving(runner_as, shelf) as served:
        assert wait_for(lambda: served.states()["broken"] == "quarantined")
        check_keys(served)
        check_alerts(served)
        assert served.ask("POST", "/plugins/greeter/stop")[0] == 200
        before = served.plugin("broken")["reason"]
        said = killed(served)
    assert said.count("broken is quarantined: ") == 1 and "runner ctl reset broken" in said
    assert said.count("the delivery d1 to the hook notify of acme.devkit is dead after attempt 1: ") == 1
    held = {"greeter": "stopped", "acme.devkit": "stopped", "broken": "quarantined"}
    with serving(runner_as, shelf) as served:
        states = served.states()
        assert {name: states[name] for name in held} == held and states["greedy"] == "pending"
        assert served.plugin("broken")["reason"] == before
        assert served.call(*GREET)[0] == 499 and served.call("broken", "greet")[0] == 503
        assert served.ask("GET", "/deliveries/d2")[1]["state"] == "queued"
        assert reasons(served) == (200, "degraded", ["quarantined", "dead_deliveries"])
        listed = runner_as("ps", "--socket", served.socket).stdout
        assert "stopped" in listed and "quarantined" in listed
        for verb, name in (("start", "greeter"), ("start", "acme.devkit")):
            done = runner_as("ctl", "--socket", served.socket, verb, name)
            assert done.returncode == 0, done.stderr
        assert served.call(*GREET)[0] == 200
        assert wait_for(lambda: served.ask("GET", "/deliveries/d2")[1]["state"] == "acked")
        assert served.ask("DELETE", "/deliveries/d1")[0] == 200
        assert served.ask("POST", "/plugins/acme.devkit/stop")[0] == 200
        said = served.end()
    for name, verb in (("greeter", "start"), ("acme.devkit", "start"), ("broken", "reset")):
        assert said.count(f"{name} is {held[name]}, as before: ") == 1, said
        assert f"runner ctl {verb} {name} ends that" in said
    assert "broken is quarantined: " not in said  # it is nothing new
    # The end of the daemon has stopped all plugins, which is nobody's intent. What was ended is over.
    # Another plugin that gets a name is not held by what the first one was told.
    moved = shelf / "plugins/moved"
    shutil.move(shelf / "plugins/devkit", moved)
    settings = shelf / "settings.toml"
    settings.write_text(f'["acme.devkit"]\nfolder = "{moved}"\n')
    settings.chmod(0o644)
    runner_as.give(settings)
    with serving(runner_as, shelf, "--settings", str(settings)) as served:
        states = served.states()
        assert (states["greeter"], states["acme.devkit"]) == ("idle", "idle")
        assert states["broken"] == "quarantined"
        assert served.ask("POST", "/plugins/broken/reset")[0] == 200
        assert wait_for(lambda: served.states()["broken"] == "quarantined")  # it is started, and fails again
        (shelf / "plugins/broken/nexo-plugin.toml").unlink()
        assert wait_for(lambda: "broken" not in served.states())
        assert wait_for(lambda: reasons(served) == (200, "ok", []))
        assert served.end().count("broken is quarantined: ") == 1


# --- the record ---------------------------------------------------------------------------------------------


def test_a_hold_belongs_to_a_place_and_is_written_before_note_returns(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.db.holds")
    here, there = NamePlace("/srv/a"), NamePlace("/srv/b")
    first = HoldRecord(path)
    assert first.find("demo", here) == ("", "") and not first.note("demo", here, "", "")
    assert first.note("demo", here, "stopped", "it was stopped")
    assert not first.note("demo", here, "stopped", "it was stopped")
    assert first.note("other", here, "quarantined", "x" * 10_000)
    again = HoldRecord(path)
    assert again.find("demo", here) == ("stopped", "it was stopped")
    assert again.find("demo", there) == ("", "")
    assert again.find("other", here) == ("quarantined", "x" * 500)
    endings: tuple[Hold, ...] = ("", "pending")
    for ends in endings:
        again.note("demo", here, "stopped", "")
        assert again.note("demo", here, ends, "why")
        assert HoldRecord(path).find("demo", here) == ("", "")
    # In memory, nothing is written.
    assert HoldRecord().note("demo", here, "stopped", "")


def test_a_record_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    rows = {
        "": "is damaged",
        "{": "is damaged",
        "[]": "is damaged",
        '{"version": 2, "holds": []}': "of another version",
        '{"version": 1, "holds": [["a", "b", "", "pending", ""]]}': "a row of it is not",
        '{"version": 1, "holds": [["a", "b", "", "stopped", 5]]}': "a row of it is not",
    }

    def check(text: str, wanted: str) -> None:
        path = tmp_path / "holds"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ApprovalsUnusable, match=wanted) as caught:
            HoldRecord(str(path))
        assert f"rm {path}" in caught.value.hint

    check_rows(rows, check)


def test_nothing_is_written_that_the_next_daemon_would_not_read(tmp_path: Path) -> None:
    """As of the record of names beside it: a folder of a private group is one that others may write."""
    folder, place = tmp_path / "ledger", NamePlace("/plugins/notes")
    folder.mkdir()
    folder.chmod(0o775)
    record = HoldRecord(str(folder / "holds"))
    with pytest.raises(ApprovalsUnusable, match="can be written by its group") as caught:
        record.note("notes", place, "stopped", "it was stopped")
    assert f"chmod go-w {folder}" in caught.value.hint
    assert record.find("notes", place) == ("stopped", "it was stopped")  # in this process
    assert not list(folder.iterdir())
    assert HoldRecord(str(folder / "holds")).find("notes", place) == ("", "")  # so that it starts
    folder.chmod(0o755)
    assert record.note("notes", place, "quarantined", "it failed")
    assert HoldRecord(str(folder / "holds")).find("notes", place) == ("quarantined", "it failed")
