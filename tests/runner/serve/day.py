"""A day of a daemon in a few minutes: many clients call many plugins, and plugins and daemon are killed.

What the clients saw is compared with the ledger afterwards. Which plugin is called, how, and which process is
killed comes from a seed; when exactly, from the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from runner.ledger.rows import REPEATABLE, UNKNOWN, DeliveryRow, InvocationRow, digest
from runner.serve.client import Client, DoorAnswer, NoDaemon
from tests.conftest import Caller, descendants, vanished
from tests.runner.serve.served import SECONDS, Served, serving
from tests.runner.serve.shelf import Shelved, fill_shelf
from tests.tables import wait_for

# How clients call, and how often: wait for a document, follow a stream, go away, ask for what does not exist.
MANNERS = {"document": 84, "stream": 10, "gone": 3, "wrong": 3}
# What hooks do with events, and how often.
EVENTS: dict[str, tuple[dict[str, Any], int]] = {
    "acknowledge": ({}, 8),
    "fail": ({"do": "fail"}, 1),
    "crash": ({"do": "exit"}, 1),
}
CALLS_PER_DELIVERY = 50


class DayPlan(NamedTuple):
    calls: int
    clients: int
    plugin_kills: int
    daemon_kills: int
    seed: int = 29


class Resources(NamedTuple):
    rss: int  # bytes
    descriptors: Counter[str]  # by kind
    threads: int


# What a daemon says about a day like this one.
_TOLD = re.compile(
    "runner serve: (draining$|ready at |the delivery .* is dead after attempt"
    "|[0-9]+ more of the kind 'dead letter'"
    "|calls in flight when the last daemon ended|[a-z0-9.]+ is quarantined(:|, as before:) )"
)


class Seen(NamedTuple):
    """The last that a client saw of one of its calls."""

    status: int = 0  # 0: no answer
    call: str | None = None  # its id
    code: str = ""
    digest: str = ""  # of the value
    lost: int = 0  # answers that did not come before


class Day:
    def __init__(self, caller: Caller, folder: Path, plan: DayPlan) -> None:
        self._caller = caller
        self._folder = folder
        self._plan = plan
        self._shelf = fill_shelf(folder / "plugins")
        self._weights = [each.weight for each in self._shelf]
        self._hooks = [each.name for each in self._shelf if each.contract == "vai"]
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._up = threading.Event()  # a daemon answers
        self._over = False  # all calls are made
        self._failed = False  # a check failed: all threads end
        self._done = 0  # calls
        self._stack = contextlib.ExitStack()
        self._served: Served | None = None
        self.seen: dict[str, Seen] = {}  # by key
        self.accepted: set[str] = set()  # ids that a client was told
        self.deliveries: set[str] = set()
        self.killed = 0  # plugins
        self.said: list[str] = []  # by daemons

    def run(self) -> tuple[Resources, Resources]:
        """Live through the day. Returns what the last daemon had after it had warmed up, and at its end."""
        calls = self._plan.calls
        others = descendants()
        self._start()
        with ThreadPoolExecutor(self._plan.clients + 1) as pool:
            killer = pool.submit(self._kill_plugins)
            try:
                clients = self._clients(pool, calls // 2)
                for number in range(1, self._plan.daemon_kills + 1):
                    self._until(calls // 2 * number // (self._plan.daemon_kills + 1), clients)
                    self._kill_daemon(others)
                    self._start()
                _raise(clients)
                _raise(self._clients(pool, calls * 6 // 10))
                before = self._look()
                _raise(self._clients(pool, calls))
                with self._changed:
                    self._over = True
                    self._changed.notify_all()
                killer.result()
                self._end_deliveries()
                after = self._look()
            except BaseException:
                with self._changed:
                    self._over = self._failed = True
                    self._changed.notify_all()
                self._up.set()
                self._stack.close()
                raise
        assert self._served is not None
        self.said.append(self._served.end())
        self._stack.close()
        return before, after

    # --- the daemon -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._served = self._stack.enter_context(serving(self._caller, self._folder))
        self._up.set()

    def _kill_daemon(self, others: set[int]) -> None:
        """SIGKILL. Nothing of it is left afterwards."""
        assert self._served is not None
        self._up.clear()
        process = self._served.process
        process.kill()
        _, err = process.communicate(timeout=SECONDS)
        self.said.append(err.decode())
        while left := descendants() - others:
            assert vanished(left), f"processes left by a killed daemon: {left}"
        self._stack.close()
        self._hurry()

    def _look(self) -> Resources:
        """The daemon's resources without any plugin. They start again with the next call."""
        assert self._served is not None
        served = self._served
        for plugin in self._shelf:
            assert served.ask("POST", f"/plugins/{plugin.name}/stop")[1]["state"] == "stopped"
        pid = served.process.pid
        kinds: Counter[str] = Counter()
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                kinds[os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")[0]] += 1
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        for plugin in self._shelf:
            served.ask("POST", f"/plugins/{plugin.name}/start")
        return Resources(int(status["VmRSS"].split()[0]) << 10, kinds, int(status["Threads"]))

    # --- clients --------------------------------------------------------------------------------------------

    def _clients(self, pool: ThreadPoolExecutor, until: int) -> list[Future[None]]:
        """Clients that call until so many calls are made."""
        return [pool.submit(self._client, until) for _ in range(self._plan.clients)]

    def _client(self, until: int) -> None:
        with contextlib.ExitStack() as connection:
            client: Client | None = None
            while not self._over:
                with self._changed:
                    if self._done >= until:
                        return
                    self._done += 1
                    number = next(self._numbers)
                    self._changed.notify_all()
                client = self._make(number, client, connection)

    def _make(self, number: int, client: Client | None, connection: contextlib.ExitStack) -> Client | None:
        """One call, repeated with its key until there is an answer. Returns the connection if it still can
        be used."""
        chance = random.Random(f"{self._plan.seed} {number}")
        (plugin,) = chance.choices(self._shelf, self._weights)
        (manner,) = chance.choices(list(MANNERS), list(MANNERS.values()))
        key = f"call-{number}"
        seen = self.seen[key] = Seen()
        while not self._over:
            try:
                client = client or connection.enter_context(self._connect())
                if number % CALLS_PER_DELIVERY == 0:
                    self._deliver(client, number)
                if manner == "gone":
                    _post(client, plugin, key, manner, wait=False)
                    connection.close()
                    return None
                found = self._read(_post(client, plugin, key, manner))
                self.seen[key] = found._replace(lost=seen.lost)
                return client
            except NoDaemon:
                seen = self.seen[key] = seen._replace(lost=seen.lost + 1)
                connection.close()
                client = None
        return None

    def _connect(self) -> Client:
        self._up.wait()
        assert self._served is not None
        return Client(self._served.socket)

    def _read(self, answer: DoorAnswer) -> Seen:
        status, found = answer.status, None
        if "event-stream" in answer.headers["content-type"]:
            for name, data in answer.events():
                if name == "accepted":
                    self.accepted.add(data["id"])
                elif name in ("result", "error"):
                    status, found = data["status"], data
            assert found is not None, "a stream without an end"
        else:
            found = answer.json()
        call = found.get("id")
        if call is not None:
            self.accepted.add(call)
        if status == 200:
            return Seen(status, call, "ok", digest(found["value"]).digest)
        return Seen(status, call, found["error"]["code"])

    def _deliver(self, client: Client, number: int) -> None:
        """Again, if no answer comes: the same delivery changes nothing."""
        chance, names = random.Random(f"{self._plan.seed} delivery {number}"), list(EVENTS)
        (what,) = chance.choices(names, [EVENTS[name][1] for name in names])
        event = {
            "type": "run.completed",
            "occurred_at": "2026-01-01T00:00:00Z",
            "subject": {"kind": "run", "id": f"run_{number}"},
            "summary": EVENTS[what][0],
        }
        name = f"delivery-{number}"
        given = {"id": name, "plugin": chance.choice(self._hooks), "hook": "notify", "event": event}
        answer = client.request("POST", "/deliveries", given)
        assert (answer.status, answer.json()["id"]) == (202, name)
        self.deliveries.add(name)

    def _until(self, done: int, clients: list[Future[None]]) -> None:
        """Wait until so many calls are made."""
        while True:
            with self._changed:
                if self._done >= done:
                    return
                self._changed.wait(1.0)
            _raise([each for each in clients if each.done()])

    # --- kills of plugins -----------------------------------------------------------------------------------

    def _kill_plugins(self) -> None:
        """Kill plugins all day long, and do what an operator does then: reset those that failed too often."""
        chance = random.Random(self._plan.seed)
        while self.killed < self._plan.plugin_kills and not self._failed:
            with self._changed:
                while not self._over and (
                    self._done * self._plan.plugin_kills <= self.killed * self._plan.calls
                ):
                    self._changed.wait()
            self._up.wait()
            assert self._served is not None
            with contextlib.suppress(NoDaemon, ProcessLookupError):
                self.killed += self._kill_one(self._served, chance)

    def _kill_one(self, served: Served, chance: random.Random) -> int:
        """Kill any process of any cell. Returns how many were killed."""
        for each in served.ask("GET", "/plugins")[1]["plugins"]:
            if each["state"] in ("backoff", "quarantined"):
                served.ask("POST", f"/plugins/{each['name']}/reset")
            elif self._over and each["state"] == "idle":
                served.ask("POST", f"/plugins/{each['name']}/start")
        cells = [pid for pid in _below(served.process.pid) if _comm(pid) == "runner-init"]
        if not cells:
            return 0
        cell = chance.choice(sorted(cells))
        victim = chance.choice(sorted([cell, *_below(cell)]))
        handle = os.pidfd_open(victim)
        try:
            if _comm(cell) != "runner-init" or not self._up.is_set():
                return 0  # its number may be another's meanwhile
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
        return 1

    # --- deliveries -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        path = self._folder / "ledger/ledger.db"
        with contextlib.closing(sqlite3.connect(path, timeout=SECONDS, isolation_level=None)) as opened:
            yield opened

    def _hurry(self) -> int:
        """The pauses between attempts pass. Returns how many there were."""
        with self._database() as opened:
            return opened.execute("UPDATE deliveries SET due = 0 WHERE state = 'queued' AND due > 0").rowcount

    def _end_deliveries(self) -> None:
        def all_ended() -> bool:
            if self._hurry():
                assert self._served is not None
                self._served.process.send_signal(signal.SIGHUP)
            with self._database() as opened:
                query = "SELECT count(*) FROM deliveries WHERE state IN ('queued', 'running')"
                return bool(opened.execute(query).fetchone() == (0,))

        assert wait_for(all_ended, 5 * SECONDS, 0.2)

    # --- the evening ----------------------------------------------------------------------------------------

    def rows(self) -> tuple[list[InvocationRow], list[DeliveryRow]]:
        """Everything in the ledger."""
        with self._database() as opened:
            calls = [InvocationRow(*row) for row in opened.execute("SELECT * FROM invocations")]
            return calls, [DeliveryRow(*row) for row in opened.execute("SELECT * FROM deliveries")]

    def check(self) -> Counter[str]:
        """Compare what the clients saw with the ledger. Returns how often there was each outcome."""
        calls, deliveries = self.rows()
        by_id = {row.id: row for row in calls}
        assert [row for row in calls if row.ended is None or not row.code] == []
        assert self.accepted <= by_id.keys()
        self._check_keys(calls)
        assert {row.id for row in deliveries} == self.deliveries
        assert {row.state for row in deliveries} <= {"acked", "dead"}
        for row in deliveries:
            attempts = sorted(each.attempt or 0 for each in calls if each.delivery == row.id)
            assert attempts == list(range(1, row.attempt + 1)), row
        said = [line for text in self.said for line in text.splitlines() if not _TOLD.match(line)]
        assert said == [], said[:10]
        return Counter(row.code or "" for row in calls) + Counter(
            f"delivery {row.state}" for row in deliveries
        )

    def _check_keys(self, calls: list[InvocationRow]) -> None:
        by_key: dict[str, list[InvocationRow]] = {key: [] for key in self.seen}
        for row in calls:
            if row.delivery is None:
                assert row.key is not None
                by_key[row.key].append(row)
        for key, seen in self.seen.items():
            rows = by_key[key]
            last = [row for row in rows if row.repeated_by is None]
            assert len(last) <= 1, (key, rows)
            for row in rows:  # a call that was made again was harmless, or had not been made
                if row.repeated_by is not None:
                    harmless = row.code == UNKNOWN and row.effect in REPEATABLE
                    assert harmless if row.repeated_by else row.started is None, row
                assert row.code not in ("ok", UNKNOWN) or row.started is not None, row
            if seen.call is None:  # no answer, or not accepted
                assert seen.status == 0 or not last, (key, seen, rows)
                continue
            (answered,) = [row for row in rows if row.id == seen.call]
            assert answered.code == seen.code and last in ([], [answered]), (key, seen, rows)
            if seen.code == "ok":
                assert last and answered.output_digest == seen.digest


def _post(client: Client, plugin: Shelved, key: str, manner: str, wait: bool = True) -> Any:
    tool = "nothing" if manner == "wrong" else plugin.tool
    headers = {"Idempotency-Key": key}
    if manner == "stream":
        headers["Accept"] = "text/event-stream"
    send = client.request if wait else client.send
    return send("POST", f"/plugins/{plugin.name}/calls", {"tool": tool, "input": plugin.input}, headers)


def _raise(clients: list[Future[None]]) -> None:
    for each in clients:
        each.result()


def _below(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            words = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            for child in map(int, words):
                found += [child, *_below(child)]
    return found


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
