"""The summary of a run: how many tests ran for each need of the machine, and which took longest.

scripts/test runs the suite in two parts: tests side by side, then tests that need the machine for themselves.
Each part writes its tally to a file (`--tally FILE`), and scripts/test prints one summary of both.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLOWEST = 10
SLOWEST_FILES = 25
_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
_FAILURES = ("failed", "error")


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)  # by need
    skipped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # need, reason
    seconds: Counter[str] = field(default_factory=Counter)  # by test, with setup and teardown
    failures: list[str] = field(default_factory=list)  # tests that failed or could not be set up

    @classmethod
    def of(cls, stats: Mapping[str, Iterable[Any]]) -> Tally:
        """From the reports of a run, with or without xdist."""
        tally = cls()
        for outcome, reports in stats.items():
            for report in reports:
                if not hasattr(report, "when"):  # not a test: an import error or a warning
                    tally.counts[outcome] += outcome in _OUTCOMES
                    continue
                # A file that could not be imported has no duration.
                tally.seconds[report.nodeid] += getattr(report, "duration", 0)
                if outcome not in _OUTCOMES:  # setups and teardowns that pass have the outcome ""
                    continue
                tally.counts[outcome] += 1
                if outcome in _FAILURES and report.nodeid not in tally.failures:
                    tally.failures.append(report.nodeid)
                for key, name in getattr(report, "user_properties", ()):  # a file that fails has none
                    if key == "needs" and outcome == "skipped":
                        tally.skipped[name][_reason(report)] += 1
                    elif key == "needs" and report.when == "call":
                        tally.ran[name] += 1
        return tally

    @classmethod
    def read(cls, path: Path) -> Tally:
        document = json.loads(path.read_text())
        skipped = defaultdict(Counter, {name: Counter(found) for name, found in document["skipped"].items()})
        counts, ran, seconds = (Counter(document[name]) for name in ("counts", "ran", "seconds"))
        return cls(counts, ran, skipped, seconds, document["failures"])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)))

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.ran += other.ran
        self.seconds += other.seconds
        self.failures += other.failures
        for name, reasons in other.skipped.items():
            self.skipped[name] += reasons

    def needs(self) -> list[str]:
        """For each need: how many tests ran, how many were skipped, and why."""
        lines = []
        for name in sorted({*self.ran, *self.skipped}):
            lines.append(f"{name:8} {self.ran[name]:5} ran")
            for reason, count in self.skipped.get(name, Counter()).most_common():
                lines.append(f"{'':8} {count:5} skipped: {reason}")
        return lines

    def slowest(self) -> list[str]:
        return [f"{seconds:8.2f} s  {test}" for test, seconds in self.seconds.most_common(SLOWEST)]

    def slowest_files(self) -> list[str]:
        files: Counter[str] = Counter()
        tests: Counter[str] = Counter()
        for test, seconds in self.seconds.items():
            file = test.partition("::")[0]
            files[file] += seconds
            tests[file] += 1
        slowest = files.most_common(SLOWEST_FILES)
        return [f"{seconds:8.2f} s  {file} ({tests[file]} tests)" for file, seconds in slowest]

    def total(self) -> str:
        return (
            ", ".join(f"{self.counts[name]} {name}" for name in _OUTCOMES if self.counts[name]) or "no tests"
        )


def _reason(report: Any) -> str:
    longrepr = report.longrepr
    text = str(longrepr[2] if isinstance(longrepr, (tuple, list)) else longrepr)
    return text.removeprefix("Skipped: ")
