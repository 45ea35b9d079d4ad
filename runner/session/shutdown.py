"""Cancels calls and shuts sessions down.

In contracts with a grace period, a cancelled plugin is told, may still answer, and its process ends: by a
shutdown if it has answered, else by SIGKILL. In other contracts the call is dropped at once, and the plugin
keeps running (session.py). A session ends by a graceful shutdown, step by step, then SIGKILL. Every wait is
bounded. If a caller waits that got no answer, all of them together take less than a second.
"""

from __future__ import annotations

import math

import trio

from runner.launch.verdict import is_killed_after_signal
from runner.outcome import Outcome
from runner.protocol.dialect import Events, Refusal, Reply, ShutdownSteps, Violation
from runner.session import account
from runner.session.pending import Deadline, Waiter, first_of
from runner.session.prepared import GIVEN_UP
from runner.session.state import CLOSED, SessionState
from runner.session.tasks import LINGER_SECONDS
from sandbox.cell import KILL_SECONDS

# The reasons that a plugin is told. A caller that gives up has its own (account.py).
DEADLINE_EXCEEDED = "deadline_exceeded"
SHUTDOWN = "shutdown"


async def await_answer(
    state: SessionState, token: int, waiter: Waiter, events: Events, deadline: Deadline, passed: Outcome
) -> None:
    """Send a request and wait for its answer. `passed`: the outcome if the deadline passes.

    An answer after the deadline is stored in `waiter.late` only. So is a success that comes after the caller
    has given up: the outcome stays "cancelled"."""
    try:
        with trio.move_on_at(deadline.at):
            waiter.queued = state.act_all(events)
            await waiter.woken.wait()
        if waiter.fault is not None:
            raise waiter.fault
    except BaseException:
        # Our caller was cancelled, or its callback failed, or it is ^C.
        if waiter.answer is None:
            if (reason := account.reason()) == account.USER_CANCELLED:
                state.owes_answer, waiter.grace = True, waiter.given_up_grace
            await _cancel(state, token, waiter, reason, GIVEN_UP)
        if isinstance(waiter.answer, Reply) or trio.current_time() >= deadline.at:
            move_to_late(waiter)
        raise
    if waiter.answer is None:
        await _cancel(state, token, waiter, DEADLINE_EXCEEDED, passed)
        move_to_late(waiter)
        waiter.answer = Violation(passed.code, passed.message, passed.cause, passed.hint, token)


async def _cancel(state: SessionState, token: int, waiter: Waiter, reason: str, outcome: Outcome) -> None:
    """Tell the plugin that the call is cancelled, and wait for its grace period. Without an answer it is
    ended. Shielded: the wait is bounded by the grace period."""
    if state.over.is_set():
        return
    state.pending_verdict = state.pending_verdict or outcome
    try:
        if state.has_sent(waiter):
            with trio.CancelScope(shield=True):
                await tell_and_wait(state, {token: waiter}, reason)
    finally:
        if waiter.answer is not None and not state.over.is_set():
            # The code that opened the session shuts the plugin down, as after any call.
            state.refuses_calls = True
        else:
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


def move_to_late(waiter: Waiter) -> None:
    """Move an answer that came too late from `answer` to `late`."""
    answer, waiter.answer = waiter.answer, None
    if isinstance(answer, Reply):
        waiter.late = answer.value
    elif isinstance(answer, Refusal):
        waiter.late = answer.data


_SIGTERM = 15
# For what is still to be written when a session is closed.
_FLUSH_SECONDS = 1.0
# For all steps with a plugin that owes the answer to its last call, whose caller waits for its end. It still
# gets each of them: a third for its answer, a third for what is to be written, the rest for its exit.
_HURRIED_SECONDS = 0.6
# Until the monitor reports the end. It takes less, unless somebody has stopped the monitor itself.
_END_SECONDS = KILL_SECONDS + 5.0


class Shutdown:
    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._done = trio.Event()

    async def close(self) -> None:
        """Shut down gracefully, then kill. Concurrent callers wait for the first."""
        state = self._state
        if state.closing:
            await self._done.wait()
            return
        began = trio.current_time()
        try:
            state.closing = True
            with trio.CancelScope(shield=True):
                if state.ready.is_set() and not state.over.is_set() and state.cell.has_ended is None:
                    if await self._ends_open_calls():
                        state.phase = "teardown"
                        await self._end_gracefully(state.dialect.shutdown_steps())
                    elif state.cell.has_ended is None:
                        state.record.forced = True
                        state.cell.kill()
                else:
                    state.caller_left = not state.over.is_set()
                    state.cell.kill()
                with trio.move_on_after(_END_SECONDS):
                    await state.cell.ended()
                    with trio.move_on_after(LINGER_SECONDS):
                        await state.stdout_eof.wait()
        finally:  # also after KeyboardInterrupt: other callers of close() must not wait for ever
            if state.refuses_calls:
                state.verdict = state.verdict or state.pending_verdict
            state.record.note_seconds("teardown", trio.current_time() - began)
            state.end_waiting()
            self._done.set()

    async def _ends_open_calls(self) -> bool:
        """Cancel the calls whose plugin has a grace. Returns whether all were answered."""
        state = self._state
        waiting = {
            token: waiter
            for token, waiter in state.waiters.items()
            if waiter.grace > 0 and waiter.answer is None and state.has_sent(waiter)
        }
        if waiting:
            state.pending_verdict = state.pending_verdict or CLOSED
            await tell_and_wait(state, waiting, SHUTDOWN)  # no second time, if its caller has given it up
        return all(waiter.answer is not None for waiter in waiting.values())

    async def _end_gracefully(self, steps: ShutdownSteps) -> None:
        """Send the contract's shutdown request, close stdin, send SIGTERM, then SIGKILL."""
        state = self._state
        began = trio.current_time()
        granted = state.terms.limits.teardown  # for all steps together
        flush, hurried = _FLUSH_SECONDS, math.inf
        if state.owes_answer:
            hurried = _HURRIED_SECONDS
            flush = third = hurried / 3
            steps = steps._replace(answer=min(steps.answer, third), exit=min(steps.exit, third), whole=0.0)
        with (
            trio.move_on_after(hurried),
            trio.move_on_after(math.inf if granted is None else granted) as clock,
        ):
            if steps.frames and not state.outbox.closed:
                with trio.move_on_after(steps.answer):
                    state.act_all(steps.frames)
                    await first_of(state.shutdown_answered, state.over, state.stdout_eof)
            state.outbox.close()
            with trio.move_on_after(flush):
                await state.flushed.wait()
            # Interrupts the writer if the plugin does not read.
            await state.cell.stdin.aclose()
            left = steps.whole - (trio.current_time() - began)
            if await self._has_ended_within(max(steps.exit, left)):
                return
            if steps.terminate and not state.over.is_set():
                image = state.terms.plugin.spec.image
                state.cell.signal(_SIGTERM if image is None else image.stop_signal)
                if await self._has_ended_within(steps.terminate):
                    ended = state.cell.has_ended  # the monitor's clock may have run out a moment before ours
                    state.record.forced = ended is not None and is_killed_after_signal(ended.outcome)
                    return
        if state.over.is_set() or state.cell.has_ended is not None:
            return
        if clock.cancelled_caught:
            state.record.limits_hit.append("teardown")
        state.record.forced = True
        state.cell.kill()

    async def _has_ended_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self._state.cell.ended()
        return self._state.cell.has_ended is not None
