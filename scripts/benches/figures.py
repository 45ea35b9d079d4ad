"""Percentiles of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

_P99_SAMPLES = 100  # with fewer samples the 99th percentile is the largest


def percentile(samples: Sequence[float], percent: float) -> float:
    """By nearest rank, so the result is always one of the samples."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 50)


def tail(samples: Sequence[float]) -> str:
    """The 99th percentile, or the maximum if there are too few samples."""
    name = "p99" if len(samples) >= _P99_SAMPLES else "max"
    return f"{name} {percentile(samples, 99):8.1f}"
