"""Percentiles of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank, so the result is always one of the samples."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 50)
