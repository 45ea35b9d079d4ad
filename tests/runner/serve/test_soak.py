"""A short day of a daemon: many clients, plugins and daemons that are killed, and not one outcome lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner.ledger.rows import UNKNOWN
from runner.serve.client import Client, NoDaemon
from tests.conftest import Caller, descendants, vanished
from tests.runner.serve.served import SECONDS, Served, put_plugins, serving
from tests.runner.serve.test_serve import event
from tests.tables import wait_for

pytestmark = [pytest.mark.launches, pytest.mark.broad]

CLIENTS, REQUESTS, DAEMONS = 8, 60, 4
ACTS = ("exit", "fail", "progress", "wait")


class Day:
    """What the clients were told."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}  # id of a call -> the code of its outcome
        self.posted: set[str] = set()  # ids of deliveries
        self.requests = 0  # that were made
        self.up = threading.Event()
        self.socket = ""

    def has_made(self, requests: int) -> bool:
        return self.requests >= requests

    def client(self, number: int) -> None:
        chance = random.Random(number)
        left = REQUESTS
        while left:
            self.up.wait()
            with contextlib.suppress(NoDaemon), Client(self.socket, SECONDS) as client:
                while left:
                    left -= 1
                    self.requests += 1
                    self.request(client, chance, f"d-{number}-{left}")

    def request(self, client: Client, chance: random.Random, delivery: str) -> None:
        if chance.random() < 0.1:
            body = {"id": delivery, "plugin": "acme.devkit", "hook": "notify", "event": event({})}
            if client.request("POST", "/deliveries", body).json().get("id") == delivery:
                self.posted.add(delivery)
            return
        act = chance.choice(ACTS)
        name, call = chance.choice(
            (
                ("greeter", {"tool": "greet", "input": {"name": "you"}}),
                ("acme.devkit", {"tool": "reader", "input": {"do": act}}),
            )
        )
        path, headers = f"/plugins/{name}/calls", {"Runner-Deadline": "0.3" if act == "wait" else "20"}
        found: dict[str, Any] = client.request("POST", path, call, headers).json()
        if "id" in found:
            self.told[found["id"]] = found["error"]["code"] if "error" in found else "ok"


def kill_plugins(served: Served) -> None:
    for each in served.ask("GET", "/plugins")[1]["plugins"]:
        for pid in each["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        served.ask("POST", f"/plugins/{each['name']}/reset")


def descriptors(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.process.pid}/fd"))


def test_every_accepted_call_has_the_outcome_that_its_caller_was_told(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    (plugin_dir / "plugins").mkdir()
    put_plugins(plugin_dir / "plugins")
    others = descendants()
    day = Day()
    clients = [threading.Thread(target=day.client, args=(number,), daemon=True) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for number in range(1, DAEMONS + 1):
        with serving(runner_as, plugin_dir) as served:
            day.socket = served.socket
            day.up.set()
            share = CLIENTS * REQUESTS * number // (DAEMONS + 1)
            for part in range(4):
                assert wait_for(partial(day.has_made, share - 30 + 10 * part), 120.0)
                kill_plugins(served)
            day.up.clear()
            served.process.kill()
            served.process.wait()
            assert vanished(descendants() - others)
    with serving(runner_as, plugin_dir) as served:
        fresh = descriptors(served)
        day.up.set()
        for client in clients:
            client.join()
        check_records(served, day)
        # Of the connections and cells of the day, none is left but the two plugins'.
        for name in ("greeter", "acme.devkit"):
            served.ask("POST", f"/plugins/{name}/stop")
        assert wait_for(lambda: descriptors(served) <= fresh + 8)
        served.end()


def check_records(served: Served, day: Day) -> None:
    rows = {row["id"]: row for row in served.ask("GET", "/calls?most=1000")[1]["calls"]}
    running = [row for row in rows.values() if row["code"] is None]
    assert all(row["delivery"] for row in running)  # the clients are done, deliveries may not be
    assert {name: rows[name]["code"] for name in day.told} == day.told
    # Calls about which nobody was told: their daemon was killed, before or after it knew the outcome.
    assert len(day.told) > CLIENTS * REQUESTS // 2
    codes = {row["code"] for row in rows.values()}
    assert {"ok", "crashed", "plugin_error", "timeout", UNKNOWN} <= codes
    stored = {row["id"]: row for row in served.ask("GET", "/deliveries?most=1000")[1]["deliveries"]}
    assert day.posted <= set(stored)
    for name, row in stored.items():
        attempts = sorted(each["attempt"] for each in rows.values() if each["delivery"] == name)
        assert attempts == list(range(1, row["attempt"] + 1))  # each is one call, and none is doubled
