"""What an ending means: one table."""

from __future__ import annotations

import signal

import pytest

from runner.invoke import judge
from runner.watch import End, Reason
from sandbox.cell import Exit, Usage
from sandbox.spec import Limits

USAGE = Usage(1.0, 0.5, 0.5, 1 << 20)


def ended(
    code: int | None,
    *,
    killed: int | None = None,
    reason: Reason | None = None,
    number: int | None = None,
    forced: bool = False,
) -> End:
    return End(Exit(code, code is not None, killed, USAGE), reason, number, forced)


def by_signal(code: int | None, number: int, *, forced: bool = False) -> End:
    return ended(code, killed=9 if code is None else None, reason="signal", number=number, forced=forced)


def by_deadline(code: int | None) -> End:
    return ended(code, killed=9 if code is None else None, reason="deadline", forced=True)


def by_caller(code: int | None) -> End:
    return ended(code, killed=9 if code is None else None, reason="caller_died", forced=True)


@pytest.mark.parametrize(
    ("end", "code", "cause", "status"),
    [
        # By itself: the plugin's own code.
        (ended(0), "ok", "", 0),
        (ended(1), "crashed", "exit:1", 1),
        (ended(7), "crashed", "exit:7", 7),
        # Codes that exec uses itself are the plugin's too if the plugin returns them.
        (ended(124), "crashed", "exit:124", 124),
        (ended(125), "crashed", "exit:125", 125),
        (ended(126), "crashed", "exit:126", 126),
        (ended(127), "crashed", "exit:127", 127),
        (ended(128), "crashed", "exit:128", 128),
        (ended(255), "crashed", "exit:255", 255),
        # By a signal from inside, or so it looks.
        (ended(129), "crashed", "signal:1", 129),
        (ended(128 + signal.SIGSEGV), "crashed", "signal:11", 139),
        (ended(137), "crashed", "signal:9", 137),
        (ended(192), "crashed", "signal:64", 192),
        (ended(193), "crashed", "exit:193", 193),
        (ended(128 + signal.SIGSYS), "crashed", "seccomp", 159),
        # The cage itself was killed by somebody who is not us.
        (ended(None, killed=9), "crashed", "signal:9", 137),
        (ended(None, killed=15), "crashed", "signal:15", 143),
        # It never ran.
        (ended(None), "launch_failed", "bubblewrap", 125),
        # The deadline, whatever it looked like in the end.
        (by_deadline(None), "timeout", "deadline", 124),
        (by_deadline(0), "timeout", "deadline", 124),
        (by_deadline(137), "timeout", "deadline", 124),
        # Nobody is left to hear it.
        (by_caller(None), "cancelled", "caller_died", 137),
        (by_caller(0), "cancelled", "caller_died", 137),
        # We were told to end it, and had to kill it.
        (by_signal(None, 15, forced=True), "cancelled", "signal:15", 143),
        (by_signal(None, 2, forced=True), "cancelled", "signal:2", 130),
        (by_signal(0, 1, forced=True), "cancelled", "signal:1", 129),
        # … it died of what we passed on …
        (by_signal(143, 15), "cancelled", "signal:15", 143),
        (by_signal(131, 3), "cancelled", "signal:3", 131),
        # … before it was there …
        (by_signal(None, 15), "cancelled", "signal:15", 143),
        # … or it ended on its own terms, and those are passed on.
        (by_signal(0, 15), "ok", "", 0),
        (by_signal(3, 15), "crashed", "exit:3", 3),
        (by_signal(139, 15), "crashed", "signal:11", 139),
    ],
)
def test_what_an_ending_means(end: End, code: str, cause: str, status: int) -> None:
    outcome, exit_status = judge(end, Limits())
    assert (outcome.code, outcome.cause, exit_status) == (code, cause, status)
    assert outcome.message
    phases = {"timeout": "invocation", "launch_failed": "launch"}
    if code == "cancelled" and end.reason == "signal" and end.forced:
        phases = {"cancelled": "teardown"}
    assert outcome.phase == phases.get(code, "run")
    assert outcome.denials == () and outcome.diagnostics == ()
