"""What the page shows: sections of JSON, which are made again while somebody looks.

Each section is sent whole when it has changed. A reader that is slow misses versions, not sections, so that
nothing waits for it. Samples of memory and calls are taken whether somebody looks or not, so that the plots
have a past.

Nothing of orgs is shown: not their bindings, which are plugins of the supervisor, nor their callers. A
session is a caller on the network.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import trio

from runner import __version__
from runner.ledger.file import MOST_DEAD, DeadHook, LedgerFile, LedgerUnusable
from runner.ledger.ledger import Ledger
from runner.ledger.rows import BINDING, AuditRow, InvocationRow
from runner.lifecycle.spec import Status
from runner.protocol.dialect import Notice, Progress
from runner.serve.desk import Desk
from runner.serve.metrics import BINDINGS, LiveUsage, Metrics, usage_below
from runner.serve.peer import VISITOR
from runner.serve.plugins import DoorPlugins
from runner.serve.roster import Roster

SAMPLE_SECONDS = 5.0
MOST_SAMPLES = 360
_LOOK_SECONDS = 1.0
_BEAT_SECONDS = 10.0  # a page that hears nothing for longer takes the connection for lost
_SETTLE_SECONDS = 0.1  # several things change at once
_MOST_ROWS = 50
_MOST_AUDITED = 200  # of which the same are one row
_MOST_PLUGINS = 500
_MOST_TEXT = 2000  # characters of a text that a plugin or a client may have written
_MOST_HEARD = 100  # network connections and pieces of advice
_MOST_NAMED = 10  # workers of a card
# Outcomes of calls that took a plugin's time. All others are refusals: their time says nothing about it.
_RAN = ("ok", "plugin_error", "timeout", "crashed", "malformed_response")
_HELD = ("quarantined", "pending")


class Sample(NamedTuple):
    number: int
    time: float
    memory: dict[str, int]  # bytes, by plugin
    calls: dict[str, int]  # that ended since the last sample
    failed: dict[str, int]  # of them


class Board:
    def __init__(
        self, supervisor: DoorPlugins, ledger: Ledger, desk: Desk, roster: Roster, metrics: Metrics
    ) -> None:
        self._supervisor, self._ledger, self._desk = supervisor, ledger, desk
        self._roster, self._metrics = roster, metrics
        self._began = time.time()
        self._sections: dict[str, tuple[int, str, Any]] = {}  # the version, the text and the value
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._usage: dict[str, LiveUsage] = {}
        self._counted: tuple[dict[str, int], ...] = ({}, {})  # calls that ended, and that failed
        self._dead: dict[str, Any] | None = None  # as of a moment ago; None: the ledger was never read
        self._dead_due = 0.0
        self._version = 0
        self._readers = 0
        self._over = False
        self._asked = trio.Event()  # somebody looks
        self._changed = trio.Event()  # replaced with each change
        self._advice: deque[dict[str, Any]] = deque(maxlen=_MOST_HEARD)
        self._network: deque[dict[str, Any]] = deque(maxlen=_MOST_HEARD)
        # Tools that were withheld because they changed: rows of plugin, tool, change and command.
        self.questions: Callable[[], Iterable[dict[str, Any]]] = lambda: ()

    def hear(self, plugin: str, event: Notice | Progress) -> None:
        """A plugin's network connection has ended, or there is advice about one that was refused."""
        if isinstance(event, Notice) and event.kind in ("network", "advice") and not _is_of_org(plugin):
            heard = {"at": time.time(), "plugin": plugin, **event.value}
            (self._network if event.kind == "network" else self._advice).append(heard)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample)
            nursery.start_soon(self._look)

    async def show(self, emit: Callable[[str, Any], Awaitable[None]]) -> None:
        """Emit sections by their names, as they change, until the daemon ends."""
        self._readers += 1
        self._asked.set()
        seen, sampled = 0, -1
        try:
            while not self._over:
                changed, newest = self._changed, self._version
                for name, (version, _, value) in list(self._sections.items()):
                    if version > seen:
                        await emit(name, value)
                seen = newest
                if fresh := [each._asdict() for each in self._samples if each.number > sampled]:
                    sampled = fresh[-1]["number"]
                    await emit("samples", fresh)
                with trio.move_on_after(_BEAT_SECONDS) as waited:
                    await changed.wait()
                if waited.cancelled_caught:
                    await emit("beat", None)
        finally:
            self._readers -= 1

    # --- tasks ----------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        number = 0
        while True:
            roots = {each.name: each.pids for each in self._plugins()}
            self._usage = await trio.to_thread.run_sync(usage_below, roots)
            memory = {name: usage.memory for name, usage in self._usage.items() if usage.memory}
            counted = dict(self._metrics.ended), dict(self._metrics.failed)
            more = (_grown(before, now) for before, now in zip(self._counted, counted, strict=True))
            self._counted = counted
            self._samples.append(Sample(number, time.time(), memory, *more))
            number += 1
            self._tell()
            await trio.sleep(SAMPLE_SECONDS)

    async def _look(self) -> None:
        news = self._supervisor.subscribe()
        while True:
            if not self._readers:
                self._asked = trio.Event()
                await self._asked.wait()
            await self._make_sections()
            try:
                with trio.move_on_after(_LOOK_SECONDS):
                    await news.__anext__()
                    await trio.sleep(_SETTLE_SECONDS)
            except StopAsyncIteration:  # the daemon ends, and its streams with it
                self._over = True
                self._tell()
                return

    async def _make_sections(self) -> None:
        made: dict[str, Any] = {
            "daemon": self._daemon(),
            "plugins": [self._plugin(each) for each in self._shown_plugins()],
            "fleet": self._fleet(),
            "dead": self._dead,
            "questions": [_cut(dict(each)) for each in islice(self.questions(), _MOST_ROWS)],
        }
        with suppress(LedgerUnusable):  # the daemon's section says so
            rows = await self._ledger.do(LedgerFile.invocations_of_no_org, _MOST_ROWS)
            made["calls"] = [_call(row) for row in rows]
            if trio.current_time() >= self._dead_due:
                self._dead_due = trio.current_time() + SAMPLE_SECONDS
                made["dead"] = self._dead = _dead(await self._ledger.do(LedgerFile.dead_hooks))
            refusals = await self._ledger.do(LedgerFile.audit_of_no_org, "refusal", _MOST_AUDITED)
            arrivals = await self._ledger.do(LedgerFile.audit_of_no_org, "connection", _MOST_AUDITED)
            made["refusals"] = [*self._denials(), *_audited(row for row in refusals if not row.plugin)]
            made["connections"] = [*self._heard(self._network), *_audited(arrivals)]
        told = False
        for name, value in made.items():
            text = json.dumps(value)
            if self._sections.get(name, (0, "", None))[1] != text:
                self._sections[name] = (self._version + 1, text, value)
                told = True
        if told:
            self._version += 1
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- sections -------------------------------------------------------------------------------------------

    def _plugins(self) -> list[Status]:
        return [each for each in self._supervisor.plugins() if not _is_of_org(each.name)]

    def _shown_plugins(self) -> list[Status]:
        """If they are too many, not those that need somebody are left out."""
        found = self._plugins()
        if len(found) > _MOST_PLUGINS:
            found.sort(key=lambda each: each.state not in _HELD)
        return found[:_MOST_PLUGINS]

    def _daemon(self) -> dict[str, Any]:
        status = "draining" if self._desk.draining else "degraded" if self._ledger.fault else "ok"
        faults = [_cut({"path": each.path, "message": each.message}) for each in self._roster.faults]
        return {
            "version": __version__,
            "status": status,
            "fault": self._ledger.fault,
            "pid": os.getpid(),
            "began": self._began,
            "uid": os.geteuid(),
            "configuration": faults[:_MOST_ROWS],
            "can": list(self._roster.actions),
        }

    def _fleet(self) -> dict[str, Any] | None:
        """Workers and queues, if the plugins run elsewhere."""
        found = self._roster.fleet()
        if found is None:
            return None
        kept = ("worker", "state", "reason", "running", "slots", "done")
        all_workers = found.get("workers", [])
        told = [each["dead"] for each in all_workers if each["dead"] is not None]
        workers = [
            _cut({**{key: each[key] for key in kept}, "plugins": len(each["plugins"])})
            for each in all_workers[:_MOST_PLUGINS]
        ]
        return {
            "known": bool(found),
            "workers": workers,
            "queues": [_cut(each) for each in found.get("queues", [])[:_MOST_PLUGINS]],
            "held": _held(all_workers),
            "dead": max(told, default=None),
        }

    def _plugin(self, status: Status) -> dict[str, Any]:
        known = self._roster.describe(status)
        usage = self._usage.get(status.name, LiveUsage())
        limits = self._roster.judgement(status.name).limits._asdict()
        cells = max(1, len(status.pids))
        used = [
            ("memory", usage.memory, (limits["memory"] or 0) * cells),
            ("pids", usage.threads, (limits["pids"] or 0) * cells),
            ("calls", status.in_flight, status.most_in_flight),
            ("queue", status.queued, status.most_queued),
        ]
        return _cut(
            {
                **{key: known.get(key) or "" for key in ("name", "id", "contract", "manifest")},
                **{key: known[key] for key in ("state", "reason", "attempts", "restarts")},
                "stderr": self._stderr(status),
                "version": (status.identity and status.identity.version) or known.get("version") or "",
                "since": round(status.since),
                "workers": len(known["workers"]) if "workers" in known else None,
                "calls": self._metrics.ended.get(status.name, 0),
                "failed": self._metrics.failed.get(status.name, 0),
                "allow": self._roster.allow(status.name),
                "used": [{"name": name, "used": now, "most": most} for name, now, most in used if most],
                "limits": {name: value for name, value in limits.items() if value is not None},
            }
        )

    def _stderr(self, status: Status) -> str:
        """The last that a plugin in quarantine has said."""
        if status.state != "quarantined" or "logs" not in self._roster.actions:
            return ""
        return _end(self._roster.supervisor_of(status.name).logs(status.name))

    def _denials(self) -> list[dict[str, Any]]:
        """What plugins asked for and do not get, with the command that allows it."""
        found = []
        for status in self._plugins()[:_MOST_PLUGINS]:
            for each in self._roster.judgement(status.name).denials[:_MOST_ROWS]:
                found.append(
                    {
                        "at": None,
                        "plugin": status.name,
                        "rule": each.rule,
                        "what": each.asked,
                        "why": each.reason,
                        "hint": each.hint,
                        "required": each.required,
                        "command": self._roster.allow(status.name),
                    }
                )
        for heard in self._heard(self._advice):
            command = heard["command"] if heard["command"].isprintable() else ""
            found.append(
                {
                    "at": heard["at"],
                    "plugin": heard["plugin"],
                    "rule": heard["kind"],
                    "what": heard["what"],
                    "why": "",
                    "hint": "",
                    "required": False,
                    "command": command,
                }
            )
        return [_cut(each) for each in found]

    def _heard(self, rows: deque[dict[str, Any]]) -> list[dict[str, Any]]:
        """The newest first."""
        return [_cut(row) for row in reversed(rows)]


def _is_of_org(plugin: str) -> bool:
    return plugin.startswith(BINDING)


def _call(row: InvocationRow) -> dict[str, Any]:
    outcome = (json.loads(row.record or "null") or {}).get("outcome") or {}
    began = row.started or row.accepted
    return _cut(
        {
            "id": row.id,
            "plugin": row.plugin,
            "tool": row.tool,
            "caller": row.caller,
            "at": row.accepted,
            "code": row.code,
            "bytes": row.output_bytes or 0,
            "seconds": None if row.ended is None else max(0.0, row.ended - began),
            "ran": row.started is not None and row.code in _RAN,
            "message": outcome.get("message", ""),
            "hint": outcome.get("hint", ""),
            "cause": outcome.get("cause", ""),
        }
    )


def _grown(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """By how much each has grown."""
    more = {name: all_ - before.get(name, 0) for name, all_ in now.items() if name != BINDINGS}
    return {name: count for name, count in more.items() if count}


def _held(workers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plugins that workers have and do not run, with the reason. The same of several workers is one row."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for worker in workers:
        for each in worker["plugins"]:
            if not each["held"]:
                continue
            hold = each.get("hold", "")
            first = {"plugin": each["name"], "hold": hold, "reason": each["held"], "workers": [], "count": 0}
            row = found.setdefault((each["name"], each["digest"], hold + each["held"]), first)
            row["count"] += 1
            row["workers"] = [*row["workers"], worker["worker"]][:_MOST_NAMED]
            row["stderr"] = row.get("stderr") or _end(each.get("stderr", ""))
    return [_cut(row) for row in islice(found.values(), _MOST_ROWS)]


def _dead(rows: list[DeadHook]) -> dict[str, Any]:
    """`all`: False if there may be more."""
    all_ = sum(row.letters for row in rows) < MOST_DEAD
    return {"hooks": [_cut(row._asdict()) for row in rows if row.plugin], "all": all_}


def _end(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else "…" + text[-(_MOST_TEXT - 1) :]


def _audited(rows: Iterable[AuditRow]) -> list[dict[str, Any]]:
    """Rows about the door, the newest first. The same thing of the same caller is one row."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        detail = {key: value for key, value in json.loads(row.detail).items() if key != "pid"}
        if row.caller == VISITOR:
            continue  # it has got a file
        first = {"at": row.at, "caller": row.caller, "detail": detail, "times": 0}
        known = found.setdefault((row.caller, json.dumps(detail)), first)
        known["times"] += 1
    return list(found.values())[:_MOST_ROWS]


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    """With texts of a bounded length. A command is whole or missing."""
    return {
        key: value
        if not isinstance(value, str) or len(value) <= _MOST_TEXT
        else ""
        if key in ("allow", "command")
        else value[:_MOST_TEXT] + "…"
        for key, value in row.items()
    }
