"""What the daemon counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from runner.ledger.rows import BINDING, DeliveryState
from runner.lifecycle.machine import STATE_NAMES
from runner.lifecycle.spec import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_OTHER = "other"
BINDINGS = "bindings"  # of all orgs: they make many, and each has records of its calls
_MOST_NAMES = 1000  # names of plugins; beyond them, all count under one


class LedgerGauges(NamedTuple):
    """What the ledger has now."""

    owed: int = 0  # outcomes that are not written yet
    fault: bool = False
    deliveries: Mapping[DeliveryState, int] = {}  # by state; empty: the ledger cannot be read


class _Gauges:
    """Values of the moment in which somebody reads the metrics."""

    def __init__(self, statuses: Iterable[Status], ledger: LedgerGauges) -> None:
        self._statuses, self._ledger = list(statuses), ledger

    def collect(self) -> Iterable[Metric]:
        for name, text, values in self._values():
            family = GaugeMetricFamily(name, text, labels=["plugin"])
            for plugin, value in values.items():
                family.add_metric([plugin], value)
            yield family
        yield self._states()
        ledger = self._ledger
        yield GaugeMetricFamily("runner_ledger_owed", "outcomes that are not written yet", ledger.owed)
        yield GaugeMetricFamily("runner_ledger_fault", "1 if the ledger cannot be written", ledger.fault)
        if counts := ledger.deliveries:
            waiting = counts.get("queued", 0) + counts.get("running", 0)
            yield GaugeMetricFamily("runner_deliveries_waiting", "deliveries that have not ended", waiting)
            yield GaugeMetricFamily("runner_deliveries_dead", "dead deliveries", counts.get("dead", 0))

    def _states(self) -> Metric:
        text = "1 for the state that the plugin is in"
        family = GaugeMetricFamily("runner_plugin_state", text, labels=["plugin", "state"])
        for each in self._statuses:
            for state in STATE_NAMES:
                family.add_metric([each.name, state], each.state == state)
        return family

    def _values(self) -> Iterable[tuple[str, str, dict[str, float]]]:
        found = self._statuses
        yield "runner_restarts", "restarts since the plugin was added", {e.name: e.restarts for e in found}
        yield "runner_sessions", "cells that live", {each.name: each.sessions for each in found}
        yield "runner_calls_in_flight", "calls in flight", {each.name: each.in_flight for each in found}
        yield "runner_calls_queued", "calls that wait", {each.name: each.queued for each in found}
        # Where each call has a process of its own, nothing is known: 0 would be a lie.
        known = [each for each in found if each.pids or not each.sessions]
        used = usage_below({each.name: each.pids for each in known})
        memory = {name: float(usage.memory) for name, usage in used.items()}
        yield "runner_memory_bytes", "resident memory of the plugin's processes", memory


class Metrics:
    """The counters of one daemon. A plugin's name is the operator's word, so that labels are bounded."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._names: set[str] = set()
        self.ended: dict[str, int] = {}  # calls, by the plugin's name
        self.failed: dict[str, int] = {}  # not those that their callers gave up
        make: Any = {"registry": self._registry}
        self._calls = Counter("runner_calls", "calls that have ended, by outcome", ["plugin", "code"], **make)
        self._seconds = Histogram(
            "runner_call_seconds",
            "time from the acceptance of a call to its outcome",
            ["plugin"],
            buckets=_LATENCIES,
            **make,
        )
        self._limits = Counter(
            "runner_limits_hit", "calls that ended by a limit", ["plugin", "limit"], **make
        )
        self._refusals = Counter("runner_refusals", "requests that the door refused", ["reason"], **make)
        self._deliveries = Counter(
            "runner_deliveries", "attempts of deliveries, by verdict", ["verdict"], **make
        )

    def call(self, plugin: str, code: str, cause: str, seconds: float) -> None:
        name = self._known(plugin)
        self.ended[name] = self.ended.get(name, 0) + 1
        self.failed[name] = self.failed.get(name, 0) + (code not in ("ok", "cancelled"))
        self._calls.labels(name, code).inc()
        self._seconds.labels(name).observe(seconds)
        if code == "crashed" and cause and not cause.startswith(("exit", "signal")):
            self._limits.labels(name, cause).inc()

    def refusal(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def delivery(self, verdict: str) -> None:
        self._deliveries.labels(verdict).inc()

    def text(self, statuses: Iterable[Status], ledger: LedgerGauges) -> bytes:
        """All metrics. Reads /proc, so it must not run in an event loop."""
        now = CollectorRegistry()
        now.register(_Gauges(statuses, ledger))
        return generate_latest(self._registry) + generate_latest(now)

    def _known(self, plugin: str) -> str:
        if plugin.startswith(BINDING):
            return BINDINGS
        if len(self._names) < _MOST_NAMES:
            self._names.add(plugin)
        return plugin if plugin in self._names else _OTHER


class LiveUsage(NamedTuple):
    """What the processes of a plugin use now."""

    memory: int = 0  # bytes, resident
    threads: int = 0


def usage_below(roots: Mapping[str, Iterable[int]]) -> dict[str, LiveUsage]:
    """The usage of these processes and all below them, by name. Reads /proc once."""
    found = {name: list(pids) for name, pids in roots.items()}
    if not any(found.values()):
        return dict.fromkeys(found, LiveUsage())
    children: dict[int, list[psutil.Process]] = {}
    known: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid"]):
        known[process.pid] = process
        children.setdefault(process.info["ppid"], []).append(process)
    total = {}
    for name, pids in found.items():
        left, memory, threads = [known[pid] for pid in pids if pid in known], 0, 0
        while left:
            process = left.pop()
            try:
                memory += process.memory_info().rss
                threads += process.num_threads()
            except psutil.Error:
                pass  # it has ended
            left += children.pop(process.pid, [])
        total[name] = LiveUsage(memory, threads)
    return total
