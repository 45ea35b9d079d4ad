"""The end of a session, as its report says it: the monitor's report, corrected by what the session knows.

The monitor sees that the session sent a signal and that the process ended. Only the session knows why it sent
the signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from runner.outcome import Outcome, Phase

if TYPE_CHECKING:
    from runner.launch.wait import Reason

    # "cancelled": the caller that opened the session gave it up.
    SessionReason = Reason | Literal["cancelled"]


def without_verdict(left: Outcome | None, ready: bool, phase: Phase) -> Outcome:
    """The outcome of a session that did not fail. `left`: how a one-shot plugin ended by itself."""
    if left is not None:
        return left
    if ready:
        return Outcome("ok", "run", "the plugin was used and ended")
    message = "the caller gave the session up before the plugin was ready"
    return Outcome("cancelled", phase, message, "given_up")


def told_exit(exit: Mapping[str, Any], verdict: Outcome | None, given_up: bool) -> dict[str, Any]:  # noqa: A002
    """The `exit` of a report. A plugin that the session ended has the session's reason, not "signal".
    `given_up`: by the caller that opened the session."""
    if exit.get("ended_by") != "signal":
        return dict(exit)  # it ended by itself, or by the monitor's own clocks and limits
    # The exit code of a kill by us is not the program's own.
    code = None if exit.get("code") == 128 + (exit.get("signal") or 0) else exit.get("code")
    return {**exit, "code": code, "ended_by": _reason(verdict, given_up), "signal": None}


def _reason(verdict: Outcome | None, given_up: bool) -> SessionReason:
    if verdict is None:
        return "cancelled" if given_up else "deadline"  # it did not end in time when it was asked to
    if verdict.code == "launch_failed":
        return "launch"
    if verdict.code == "timeout":
        return "deadline"
    if verdict.code in ("cancelled", "internal"):
        return "cancelled"
    return "limit" if verdict.cause == "output" else "violation"


def interrupted(report: dict[str, Any], number: int) -> dict[str, Any]:
    """The report of a session that was given up because the runner received a signal."""
    exit = report.get("exit")  # noqa: A001
    if not isinstance(exit, dict) or exit.get("ended_by") != "cancelled":
        return report
    return {**report, "exit": {**exit, "ended_by": "signal", "signal": number}}
