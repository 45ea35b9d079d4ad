"""Many calls of a fleet while its workers, servers and submitters are killed. At the end all is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nats.errors

from runner.fleet import names
from runner.fleet.client import FleetClient
from runner.fleet.entries import decode_entry
from runner.fleet.streams import FleetSizes, stream_configs
from tests.conftest import ROOT, Caller
from tests.runner.fleet.bus import Bus, ask, bus_in, working
from tests.runner.serve.served import put_plugins
from tests.tables import wait_for

HOOK = {"type": "run.completed", "subject": {"kind": "run", "id": "run_1"}, "summary": {}}
# What is called, how often, and whether by the stream. `counter` has no effect class, so it may run once.
MIX: tuple[tuple[dict[str, Any], int], ...] = (
    ({"plugin": "counter", "tool": "note", "durable": True}, 60),
    ({"plugin": "greeter", "tool": "greet", "durable": True}, 15),
    ({"plugin": "greeter", "tool": "greet", "durable": False}, 20),
    ({"plugin": "acme.devkit", "tool": "peek", "durable": True}, 4),
    ({"plugin": "acme.devkit", "tool": "notify", "kind": "hook", "durable": True}, 1),
)


class StormPlan(NamedTuple):
    calls: int
    servers: int = 3
    workers: int = 4
    submitters: int = 2
    worker_kills: int = 0
    server_kills: int = 0
    submitter_kills: int = 0
    slots: int = 4
    at_once: int = 16  # calls of each submitter
    seed: int = 32


class Storm:
    def __init__(self, caller: Caller, folder: Path, plan: StormPlan) -> None:
        self._caller, self._folder, self._plan = caller, folder, plan
        self._random = random.Random(plan.seed)
        (folder / "plugins").mkdir()
        put_plugins(folder / "plugins")
        shutil.copytree(ROOT / "tests/plugins/mcp_counter", folder / "plugins/counter")
        for path in (folder / "plugins/counter").rglob("*"):
            path.chmod(0o755)
        self.calls = [self._call(number) for number in range(plan.calls)]
        self.kills: Counter[str] = Counter()
        self.seconds = 0.0

    def _call(self, number: int) -> dict[str, Any]:
        [chosen] = self._random.choices([row for row, _ in MIX], [weight for _, weight in MIX])
        call = f"s{number:05}"
        given: Any = {"counter": {"call": call}, "greeter": {"name": call}}.get(
            chosen["plugin"], {"text": call}
        )
        return {"id": call, "input": HOOK if chosen.get("kind") else given, **chosen}

    # --- processes ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _worker(self, bus: Bus, number: int) -> Iterator[Any]:
        state = self._folder / f"state{number}"
        if not state.exists():  # later it belongs to the plugin
            state.mkdir(mode=0o700)
            self._caller.give(state)
        settings = self._folder / f"settings{number}.toml"
        settings.write_text(f'[counter]\nfolder = "plugins/counter"\nstate_dir = "{state}"\n')
        settings.chmod(0o644)
        more = ("--settings", str(settings))
        name, slots = f"w{number}", self._plan.slots
        with working(self._caller, self._folder, bus.url, *more, name=name, slots=slots) as worker:
            yield worker

    def _results(self, number: int) -> dict[str, dict[str, Any]]:
        path = self._folder / f"results{number}"
        lines = path.read_text().splitlines() if path.exists() else []
        return {row["id"]: row for row in map(json.loads, lines)}

    def _submitter(self, bus: Bus, number: int) -> subprocess.Popen[bytes] | None:
        known = self._results(number)
        own = [each for each in self.calls[number :: self._plan.submitters] if each["id"] not in known]
        if not own:
            return None
        words = (bus.url, str(self._folder / f"results{number}"), str(self._plan.at_once))
        argv = [sys.executable, "-m", "tests.runner.fleet.submitter", *words]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=ROOT)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("".join(f"{json.dumps(each)}\n" for each in own).encode())
            process.stdin.close()
        return process

    def _reached(self, calls: int) -> bool:
        return self._done() >= calls

    def _done(self) -> int:
        return sum(len(self._results(number)) for number in range(self._plan.submitters))

    # --- the storm ------------------------------------------------------------------------------------------

    def run(self) -> None:
        plan = self._plan
        with contextlib.ExitStack() as stack:
            bus = stack.enter_context(bus_in(self._folder / "bus", plan.servers))
            workers = [stack.enter_context(contextlib.ExitStack()) for _ in range(plan.workers)]
            live = [each.enter_context(self._worker(bus, number)) for number, each in enumerate(workers)]
            began = time.monotonic()
            submitters = [self._submitter(bus, number) for number in range(plan.submitters)]
            stack.callback(_kill, submitters)
            kills = ["worker"] * plan.worker_kills + ["server"] * plan.server_kills
            kills += ["submitter"] * plan.submitter_kills
            self._random.shuffle(kills)
            for number, what in enumerate(kills, 1):
                until = plan.calls * 9 // 10 * number // len(kills)
                assert wait_for(partial(self._reached, until), 1800), self._done()
                self.kills[what] += 1
                if what == "worker":
                    chosen = self._random.randrange(plan.workers)
                    live[chosen].process.kill()
                    live[chosen].process.wait()
                    workers[chosen].close()
                    live[chosen] = workers[chosen].enter_context(self._worker(bus, chosen))
                elif what == "server":
                    chosen = self._random.randrange(plan.servers)
                    # Three replicas survive the loss of one, so that the others have to have all of it.
                    ask(bus.url, _settled)
                    bus.kill(chosen)
                    bus.start(chosen)
                    assert wait_for(partial(bus.is_ready, chosen))
                else:
                    chosen = self._random.randrange(plan.submitters)
                    if (process := submitters[chosen]) is not None:
                        process.send_signal(signal.SIGKILL)
                        process.wait()
                    submitters[chosen] = self._submitter(bus, chosen)
            for each in submitters:
                assert each is None or each.wait(1800) == 0
            self.seconds = time.monotonic() - began
            self.found = ask(bus.url, self._collect)
            for worker in workers:
                worker.close()

    async def _collect(self, client: FleetClient) -> tuple[Counter[str], dict[str, Any], dict[str, Any]]:
        """How many records each call has, the records, and the entries of the ledger."""
        durable = {each["id"] for each in self.calls if each["durable"]}
        async with asyncio.timeout(120):
            # A submitter sees the end of a call in the ledger, a moment before its record is there.
            for _ in range(20):
                if durable <= {json.loads(each)["id"] for each in await _all(client, names.RECORDS)}:
                    break
                await asyncio.sleep(0.5)
        counts: Counter[str] = Counter()
        records: dict[str, Any] = {}
        for message in await _all(client, names.RECORDS):
            row = json.loads(message)
            counts[row["id"]] += 1
            records[row["id"]] = row
        entries = [decode_entry(message) for message in await _all(client, f"KV_{names.LEDGER}")]
        return counts, records, {each.record["id"]: each for each in entries if each.record}

    def check(self) -> dict[str, Any]:
        """Every durable call ended once, none is lost, none that may run once ran twice. Returns counts."""
        counts, records, entries = self.found
        results: dict[str, Any] = {}
        for number in range(self._plan.submitters):
            results |= self._results(number)
        durable = {each["id"]: each for each in self.calls if each["durable"]}
        assert set(results) == {each["id"] for each in self.calls}
        wrong = {call: counts[call] for call in durable if counts[call] != 1}
        assert wrong == {}, wrong
        assert durable.keys() <= entries.keys()
        # The stream keeps one record for each subject, so that a second end would replace the first.
        assert {call: entries[call].record for call in durable} == {call: records[call] for call in durable}
        ran: Counter[str] = Counter()
        for path in self._folder.glob("state*/notes"):
            ran.update(path.read_text().split())
        twice = {call: times for call, times in ran.items() if times > 1}
        assert twice == {}
        unknown = 0
        for call, each in durable.items():
            record, result = records[call], results[call]
            assert result["code"] == record["code"], (result, record)
            assert result.get("execution_outcome") == record.get("execution_outcome")
            if each["plugin"] == "counter":
                lost = record.get("execution_outcome") == "unknown"
                unknown += lost
                assert lost or ran[call] == (record["code"] == "ok"), (record, ran[call])
                assert record["attempt"] == 1 or not lost
        codes = Counter((records[call]["code"]) for call in durable)
        return {
            "calls": len(self.calls),
            "durable": len(durable),
            "codes": dict(codes),
            "unknown": unknown,
            "again": sum(records[call]["attempt"] > 1 for call in durable),
            "waited": dict(
                Counter(results[each["id"]]["code"] for each in self.calls if not each["durable"])
            ),
            "kills": dict(self.kills),
            "seconds": round(self.seconds, 1),
        }


def _kill(processes: Sequence[subprocess.Popen[bytes] | None]) -> None:
    for each in processes:
        if each is not None:
            each.kill()


async def _settled(client: FleetClient) -> None:
    """Return when each server has been seen to have all of each stream. Calls go on meanwhile, so that this
    is never true of all at one moment."""
    left = {config.name or "" for config in stream_configs(FleetSizes())}
    seen: set[tuple[str, str]] = set()
    while left:
        for name in sorted(left):
            try:
                cluster = (await client.js.stream_info(name)).cluster
            except (nats.errors.Error, TimeoutError):
                continue
            if cluster is None or not cluster.leader:
                continue
            replicas = cluster.replicas or []
            seen |= {(name, str(each.name)) for each in replicas if not each.lag and not each.offline}
            if all((name, str(each.name)) in seen for each in replicas):
                left.discard(name)
        await asyncio.sleep(0.05)


async def _all(client: FleetClient, stream: str) -> list[bytes]:
    info = await client.js.stream_info(stream)
    found: list[bytes] = []
    consumer = await client.js.add_consumer(stream, ack_policy="none", inactive_threshold=60.0)
    pulling = await client.js.pull_subscribe_bind(consumer.name, stream)
    while len(found) < info.state.messages:
        found += [bytes(message.data) for message in await pulling.fetch(500, timeout=10)]
    return found
