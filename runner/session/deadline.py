"""The deadline of one call that counts from when the call was accepted: its launch is included."""

from __future__ import annotations

import math

from runner.outcome import Outcome, Phase
from sandbox.value import NamedTuple

# The cause of a timeout by this clock. Other clocks of a launch have other causes.
CAUSE = "deadline_exceeded"

_WHAT = {
    "launch": "the program did not run",
    "handshake": "the plugin was not ready",
    "call": "there was no answer",
}


class Deadline(NamedTuple):
    at: float = math.inf  # on trio's clock
    seconds: float = math.inf  # from the acceptance of the call to `at`, for messages

    def passed(self, phase: Phase, what: str = "") -> Outcome:
        """`what`: what did not happen in time, if the phase does not say it."""
        from sandbox.units import format_limit

        amount = format_limit("deadline", self.seconds)
        if amount == "0s":
            amount = f"{1000 * self.seconds:g}ms"
        what = what or _WHAT.get(phase, "the call was not over")
        hint = "the time counts from when the call was accepted: its launch and its handshake are included"
        return Outcome("timeout", phase, f"{what} within the {amount} that the call has", CAUSE, hint)
