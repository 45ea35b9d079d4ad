"""What every part of the benchmark returns: tables of rows, with the samples and what they are compared with.

Nothing is rounded or printed here: scripts/benches/pages.py does that, for people and for programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.speed.value import NamedTuple
from scripts.benches.figures import median, percentile

PER_SECOND = "per second"
LEFT_OUT = "not measured"


class Against(NamedTuple):
    """What a row is compared with: one row of the same table, or the sum of several."""

    label: str
    rows: tuple[str, ...]


class Row(NamedTuple):
    name: str
    unit: str
    samples: Sequence[float]
    against: tuple[Against, ...] = ()
    headline: str = ""  # its name among the figures in short; empty: it is not one of them

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith(PER_SECOND)

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def best(self) -> float:
        """The best sample: the one least disturbed by other programs."""
        return max(self.samples) if self.more_is_better else min(self.samples)

    def worse_than(self, percent: float) -> float:
        """The sample that so many percent of them are not worse than. 99 of few samples: the worst one."""
        sign = -1 if self.more_is_better else 1
        return sign * percentile([sign * sample for sample in self.samples], percent)


class Ratio(NamedTuple):
    median: float
    best: float


class Table(NamedTuple):
    part: str
    title: str
    caller: str  # who ran it
    about: str  # what one sample is
    rows: Sequence[Row]
    notes: tuple[str, ...] = ()  # what was left out and why; what has to be known to read the figures

    def ratio(self, row: Row, against: Against) -> Ratio | None:
        """None: a row that it would be compared with was not measured, or took no time at all."""
        found = {each.name: each for each in self.rows}
        if not all(name in found for name in against.rows):
            return None
        medians = sum(found[name].median for name in against.rows)
        bests = sum(found[name].best for name in against.rows)
        return Ratio(row.median / medians, row.best / bests) if medians and bests else None


def left_out(part: str, caller: str, *reasons: str) -> Table:
    """A table for a part that could not be measured, with the reasons."""
    return Table(part, part, caller, LEFT_OUT, (), reasons)
