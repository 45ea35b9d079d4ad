"""How a session's report tells its end: the monitor's report, with what only the session knows.

The monitor sees a signal from the session and a process that ended. Why the session sent it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from runner.launch.wait import Reason
from runner.outcome import Outcome, Phase

# "cancelled": whoever had opened the session gave it up.
SessionReason = Reason | Literal["cancelled"]


def without_verdict(left: Outcome | None, ready: bool, phase: Phase) -> Outcome:
    """Of a session that did not fail. `left`: how a one-shot plugin ended, of which that is expected."""
    if left is not None:
        return left
    if ready:
        return Outcome("ok", "run", "the plugin was used and ended")
    message = "the session was given up before the plugin was ready"
    return Outcome("cancelled", phase, message, "given_up")


def told_exit(exit: Mapping[str, Any], verdict: Outcome | None, given_up: bool) -> dict[str, Any]:  # noqa: A002
    """The `exit` of a report: who was ended by the session was ended for the session's reason, and not by a
    signal that somebody had sent to the runner. `given_up`: by whoever had opened it."""
    if exit.get("ended_by") != "signal":
        return dict(exit)  # by itself, or by the monitor's own clocks and limits
    # The end by our own signal is not what the program returned.
    code = None if exit.get("code") == 128 + (exit.get("signal") or 0) else exit.get("code")
    return {**exit, "code": code, "ended_by": _reason(verdict, given_up), "signal": None}


def _reason(verdict: Outcome | None, given_up: bool) -> SessionReason:
    if verdict is None:
        return "cancelled" if given_up else "deadline"  # it did not leave in time when it was bid to
    if verdict.code == "launch_failed":
        return "launch"
    if verdict.code == "timeout":
        return "deadline"
    if verdict.code in ("cancelled", "internal"):
        return "cancelled"
    return "limit" if verdict.cause == "output" else "violation"


def interrupted(report: dict[str, Any], number: int) -> dict[str, Any]:
    """Of a session that was given up because the runner was sent a signal."""
    exit = report.get("exit")  # noqa: A001
    if not isinstance(exit, dict) or exit.get("ended_by") != "cancelled":
        return report
    return {**report, "exit": {**exit, "ended_by": "signal", "signal": number}}
