"""When a delivery that failed is tried again: a pure function of attempt, time and a random number."""

from __future__ import annotations

from typing import NamedTuple


class Schedule(NamedTuple):
    """A capped exponential backoff. Its defaults are those of the contract that has deliveries."""

    attempts: int = 5  # of one round; a person who repeats a dead delivery begins another round
    first_seconds: float = 10.0
    factor: float = 2.0
    most_seconds: float = 3600.0
    jitter: float = 0.25  # the largest share of the delay that is added to it


def longest_pause(schedule: Schedule) -> float:
    """No attempt is later than so many seconds after the one before."""
    return max(schedule.first_seconds, schedule.most_seconds) * (1 + schedule.jitter)


def next_try(schedule: Schedule, made: int, now: float, random: float) -> float | None:
    """The time of the next attempt after `made` attempts of this round, or None if that was the last one.

    `random` is at least 0 and below 1. Jitter only adds to the delay, so that no attempt is earlier than the
    contract says."""
    if made >= schedule.attempts:
        return None
    # An exponent without a bound would overflow where an operator allows very many attempts.
    delay = schedule.first_seconds * schedule.factor ** min(max(0, made - 1), 64)
    return now + min(delay, schedule.most_seconds) * (1 + schedule.jitter * random)
