"""Why a supervisor does not make a call. In each case the plugin was not asked.

PluginFailure (runner/exceptions.py)
├── Overloaded      too many calls wait, or the plugin's own limit is reached: come again
└── Unavailable     the plugin is quarantined, pending, stopped or draining
LookupError
└── UnknownPlugin   the supervisor has no plugin of this name
"""

from __future__ import annotations

from runner.exceptions import PluginFailure
from runner.lifecycle.machine import StateName
from runner.outcome import Code, Outcome

_CODES: dict[StateName, Code] = {"quarantined": "quarantined", "pending": "policy_denied"}
_HINTS: dict[StateName, str] = {
    "quarantined": "find out why it fails, then reset it",
    "pending": "mend that, or allow what it asks for with `runner allow`; then reload it",
    "stopped": "start it",
    "draining": "call again when it is back",
}


class Overloaded(PluginFailure):
    """Nothing was begun. `retry_after`: seconds after which another attempt may succeed."""

    def __init__(self, outcome: Outcome, retry_after: float) -> None:
        super().__init__(outcome)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.outcome, self.retry_after), self.__dict__


class Unavailable(PluginFailure):
    """`state` and `reason`: why the plugin is not started."""

    def __init__(self, name: str, state: StateName, reason: str) -> None:
        message = f"the plugin {name} is {state}" + (f": {reason}" if reason else "")
        super().__init__(
            Outcome(_CODES.get(state, "cancelled"), "call", message, state, _HINTS.get(state, ""))
        )
        self.name, self.state, self.reason = name, state, reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.state, self.reason), self.__dict__


class UnknownPlugin(LookupError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no plugin {name!r} here")
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name,)
