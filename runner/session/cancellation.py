"""How a call ends whose plugin has a grace: it is told, may still answer, and its process ends.

For dialects with `grace`. Other dialects give a call up at once, and the plugin lives on (session.py).
"""

from __future__ import annotations

import trio

from runner.outcome import Outcome
from runner.protocol.dialect import Events, Refusal, Reply, Violation
from runner.session.pending import Deadline, Waiter
from runner.session.prepared import GIVEN_UP
from runner.session.state import SessionState

# The reasons that a plugin is told.
DEADLINE_EXCEEDED = "deadline_exceeded"
USER_CANCELLED = "user_cancelled"
SHUTDOWN = "shutdown"


async def await_answer(
    state: SessionState, token: int, waiter: Waiter, events: Events, deadline: Deadline, passed: Outcome
) -> None:
    """Send a request, and wait until its waiter has an answer. What is answered after the deadline is kept as
    `waiter.late` only. So is a success that comes when the caller has given up: nobody gets it, and the
    outcome is that of the caller. `passed`: the outcome if the deadline passes."""
    try:
        with trio.move_on_at(deadline.at):
            waiter.letters = state.act_all(events)
            await waiter.woken.wait()
        if waiter.fault is not None:
            raise waiter.fault
    except BaseException:
        # Our caller was cancelled, or its callback failed, or it is ^C.
        if waiter.answer is None:
            await _cancel(state, token, waiter, USER_CANCELLED, GIVEN_UP)
        if isinstance(waiter.answer, Reply) or trio.current_time() >= deadline.at:
            keep_late(waiter)
        raise
    if waiter.answer is None:
        await _cancel(state, token, waiter, DEADLINE_EXCEEDED, passed)
        keep_late(waiter)
        waiter.answer = Violation(passed.code, passed.message, passed.cause, passed.hint, token)


async def _cancel(state: SessionState, token: int, waiter: Waiter, reason: str, outcome: Outcome) -> None:
    """Tell the plugin, wait for its grace, and end it. Shielded: at most the grace is waited."""
    if state.over.is_set():
        return
    state.doom = state.doom or outcome
    try:
        if state.has_sent(waiter):
            with trio.CancelScope(shield=True):
                await tell_and_wait(state, {token: waiter}, reason)
    finally:
        state.fail(outcome)


async def tell_and_wait(state: SessionState, waiters: dict[int, Waiter], reason: str) -> None:
    """Tell the plugin that nobody waits for these calls, and wait until all are answered or the grace is
    over."""
    grace = max(waiter.grace for waiter in waiters.values())
    for token, waiter in waiters.items():
        if waiter.fault is not None:
            waiter.woken = trio.Event()  # the callback's fault has set it; the answer sets it again
        if not waiter.told:
            waiter.told = True
            state.act_all(state.dialect.cancel(token, reason))
    with trio.move_on_after(grace):
        for waiter in waiters.values():
            await waiter.woken.wait()


def keep_late(waiter: Waiter) -> None:
    """What was answered is no answer any more."""
    answer, waiter.answer = waiter.answer, None
    if isinstance(answer, Reply):
        waiter.late = answer.value
    elif isinstance(answer, Refusal):
        waiter.late = answer.data
