"""How a supervisor treats a plugin, as numbers. A contract gives them; runner/lifecycle/ acts on them."""

from __future__ import annotations

from sandbox.speed.value import NamedTuple

_MOST_EXPONENT = 64  # the pause after more failures than that is the longest one, whatever the factor
_MOST_FACTOR = 1000.0  # so that the product stays a number
_LEAST_BACKOFF = 0.05  # a shorter pause would keep a processor busy with a plugin that cannot start


class Supervision(NamedTuple):
    """The defaults suit a program that may be started at any time. Times are in seconds."""

    eager: bool = False  # it is started without a call, and again after a failure
    respawn: bool = True  # False: the first failure is the last, until `reset`
    retry_first: bool = True  # False: a plugin that never came up is not started again
    backoff: float = 1.0  # the pause after the first failure
    factor: float = 2.0  # by which each further pause grows
    backoff_most: float = 60.0
    jitter: float = 0.1  # the share of a pause that chance may take away, so that not all start at once
    attempts: int = 0  # restarts in a row before it is quarantined; 0: any number
    failures: int = 5  # so many failures `within` some time, and it is quarantined; 0: any number
    within: float = 600.0
    healthy: float = 60.0  # a plugin that was ready for so long starts again with the first pause
    idle: float = 0.0  # without a call for so long, and it is ended until the next call; 0: never
    health_call: str = ""  # the method whose answer shows that it lives; empty: the session sees to that
    health_interval: float = 60.0  # between two such calls
    health_answer: float = 10.0  # for the answer
    health_misses: int = 2  # so many in a row, and it is ended and started again
    drain: float = 10.0  # for calls in flight, before the plugin is ended on purpose
    sessions: int = 1  # cells at once
    calls: int = 64  # at once in one cell; 0: any number
    queued: int = 1000  # calls that may wait
    queued_bytes: int = 64 << 20  # of their inputs, about

    def pause(self, failures: int, chance: float) -> float:
        """The pause after so many failures in a row. `chance`: from 0, which is no jitter, to 1."""
        grown = self.backoff * min(self.factor, _MOST_FACTOR) ** min(failures - 1, _MOST_EXPONENT)
        return min(grown, self.backoff_most) * (1 - self.jitter * chance)


def fault_of(given: Supervision) -> str:
    """Returns what is wrong with numbers that an operator gave, or ''."""
    for name, value in zip(given._fields, given, strict=True):
        default = Supervision._field_defaults[name]
        if isinstance(default, bool | str):
            if type(value) is not type(default):
                return (
                    f"{name}: {value!r} is not {'a yes or a no' if isinstance(default, bool) else 'a text'}"
                )
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            return f"{name}: {value!r} is not a number, 0 or more"
        if isinstance(default, int) and not isinstance(value, int):
            return f"{name}: {value!r} is not a whole number"
    if given.backoff < _LEAST_BACKOFF or given.backoff_most < given.backoff:
        return f"backoff: it has to be {_LEAST_BACKOFF} or more, and backoff_most at least as much"
    if given.sessions < 1 or given.queued < 1:
        return f"{'sessions' if given.sessions < 1 else 'queued'}: there has to be one at least"
    if given.factor < 1 or given.jitter > 1:
        return "factor: it has to be 1 or more" if given.factor < 1 else "jitter: it has to be 1 at most"
    if given.health_call and not (given.health_interval and given.health_misses):
        return "health_interval, health_misses: both have to be more than 0"
    return ""
