"""The schedule of retries, on times that the test gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runner.contracts.vai import outcome
from runner.ledger.retry import Schedule, next_try


def test_the_schedule_is_that_of_the_contract_with_deliveries() -> None:
    schedule = Schedule()
    assert (schedule.attempts, schedule.first_seconds, schedule.factor) == (
        *(outcome.ATTEMPTS, outcome.BACKOFF_SECONDS, outcome.BACKOFF_FACTOR),
    )


def test_each_attempt_waits_twice_as_long_and_the_fifth_is_the_last() -> None:
    times = [next_try(Schedule(), made, 1000.0, 0.0) for made in range(1, 6)]
    assert times == [1010.0, 1020.0, 1040.0, 1080.0, None]
    assert next_try(Schedule(), 1, 1000.0, 0.5) == 1000.0 + 10.0 * 1.125


@given(
    made=st.integers(0, 10_000),
    random=st.floats(0, 1, exclude_max=True),
    attempts=st.integers(1, 100_000),
    now=st.floats(0, 4e9),
)
def test_a_retry_is_never_early_and_never_further_away_than_the_cap(
    made: int, random: float, attempts: int, now: float
) -> None:
    schedule = Schedule(attempts=attempts)
    due = next_try(schedule, made, now, random)
    if made >= attempts:
        assert due is None
        return
    assert due is not None
    least = next_try(schedule, made, now, 0.0)
    assert least is not None and now + 10.0 <= least <= due
    assert due <= now + schedule.most_seconds * (1 + schedule.jitter) + 1e-6
