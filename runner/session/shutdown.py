"""The end of a session: a graceful shutdown, step by step, then SIGKILL. Every wait is bounded."""

from __future__ import annotations

import math

import trio

from runner.protocol.dialect import Farewell
from runner.session.cancellation import SHUTDOWN, tell_and_wait
from runner.session.pending import first_of
from runner.session.state import CLOSED, SessionState
from runner.session.tasks import LINGER_SECONDS
from sandbox.cell import KILL_SECONDS

_SIGTERM = 15
# For what is still to be written when a session is closed.
_FLUSH_SECONDS = 1.0
# For each step with a plugin that owes an answer: its caller has already waited for the whole timeout.
_SHORT_SECONDS = 0.5
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
                        await self._end_gracefully(state.dialect.farewell())
                    elif state.cell.has_ended is None:
                        state.record.forced = True
                        state.cell.kill()
                else:
                    state.given_up = not state.over.is_set()
                    state.cell.kill()
                with trio.move_on_after(_END_SECONDS):
                    await state.cell.ended()
                    with trio.move_on_after(LINGER_SECONDS):
                        await state.stdout_eof.wait()
        finally:  # also after KeyboardInterrupt: other callers of close() must not wait for ever
            state.record.took("teardown", trio.current_time() - began)
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
            state.doom = state.doom or CLOSED
            await tell_and_wait(state, waiting, SHUTDOWN)  # no second time, if its caller has given it up
        return all(waiter.answer is not None for waiter in waiting.values())

    async def _end_gracefully(self, farewell: Farewell) -> None:
        """The contract's own goodbye, then stdin is closed, then SIGTERM, then SIGKILL."""
        state = self._state
        if state.owes_answer:
            farewell = farewell._replace(
                answer=min(farewell.answer, _SHORT_SECONDS),
                exit=min(farewell.exit, _SHORT_SECONDS),
                terminate=min(farewell.terminate, _SHORT_SECONDS),
                whole=0.0,
            )
        began = trio.current_time()
        granted = state.terms.limits.teardown  # for all steps together
        with trio.move_on_after(math.inf if granted is None else granted) as clock:
            if farewell.frames and not state.outbox.closed:
                with trio.move_on_after(farewell.answer):
                    state.act_all(farewell.frames)
                    await first_of(state.farewelled, state.over, state.stdout_eof)
            state.outbox.close()
            with trio.move_on_after(_SHORT_SECONDS if state.owes_answer else _FLUSH_SECONDS):
                await state.flushed.wait()
            # If the writer still has something that the plugin does not read, this interrupts it.
            await state.cell.stdin.aclose()
            left = farewell.whole - (trio.current_time() - began)
            if await self._has_ended_within(max(farewell.exit, left)):
                return
            if farewell.terminate and not state.over.is_set():
                state.cell.signal(_SIGTERM)
                if await self._has_ended_within(farewell.terminate):
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
