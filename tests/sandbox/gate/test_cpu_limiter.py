"""The gate's own processor time, by clocks of the test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from sandbox.gate.cpu_limiter import CpuLimiter, CpuTimeSpent


class Clocks:
    """Time passes while the gate rests, and while it works."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.used = 5.0
        self.rests: list[float] = []

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


@pytest.fixture
def alive() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def make_limiter(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, alive: int, cores: float | None, seconds: float | None
) -> CpuLimiter:
    monkeypatch.setattr(CpuLimiter, "_sleep", lambda _, seconds: clocks.rest(seconds))
    return CpuLimiter(cores, seconds, alive, lambda: clocks.now, lambda: clocks.used)


@pytest.mark.parametrize("cores", [0.05, 0.5])
def test_work_without_end_is_held_to_the_cpu_limit(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, alive: tuple[int, int], cores: float
) -> None:
    limiter, began = make_limiter(monkeypatch, clocks, alive[0], cores, None), clocks.now
    for _ in range(5000):
        clocks.work(0.004)
        limiter.throttle()
    used, passed = 5000 * 0.004, clocks.now - began
    assert used == pytest.approx(cores * passed, rel=0.02)


@pytest.mark.parametrize("cores", [None, 2.0])
def test_without_a_limit_that_it_can_meet_it_never_rests(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, alive: tuple[int, int], cores: float | None
) -> None:
    limiter = make_limiter(monkeypatch, clocks, alive[0], cores, None)
    for _ in range(1000):
        clocks.work(0.004)
        limiter.throttle()
    assert clocks.rests == []


def test_a_pause_earns_no_more_than_the_burst(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, alive: tuple[int, int]
) -> None:
    limiter = make_limiter(monkeypatch, clocks, alive[0], 0.1, None)
    clocks.now += 3600
    limiter.throttle()
    clocks.work(0.09)
    limiter.throttle()
    assert clocks.rests == []
    clocks.work(0.09)
    limiter.throttle()
    assert len(clocks.rests) == 1


def test_the_cpu_time_limit_ends_it(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, alive: tuple[int, int]
) -> None:
    limiter = make_limiter(monkeypatch, clocks, alive[0], None, 2.0)
    for _ in range(2):
        clocks.work(0.99)
        limiter.throttle()
    clocks.work(0.99)
    with pytest.raises(CpuTimeSpent):
        limiter.throttle()


def test_a_rest_ends_with_the_plugin(alive: tuple[int, int]) -> None:
    """Without the descriptor this takes an hour, and the suite's bound ends the test."""
    used = iter((0.0, 36.0))
    limiter = CpuLimiter(0.01, None, alive[0], time.monotonic, lambda: next(used))
    os.close(alive[1])
    limiter.throttle()
