"""One live plugin, as callers use it: calls, notifications, events, and the end.

A caller that gives up a call loses that call and not the session. The first cause of a failure stays the
cause (verdict.py has the sentences).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

import trio

from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.launch.remote.messages import Audited, MonitorEnd, Terms
from runner.launch.remote.remote_cell import RemoteCell
from runner.launch.verdict import is_lifted
from runner.outcome import Advice, Outcome, Phase, advice_of_calls, has_failed, with_outcome
from runner.protocol.calls import OnProgress
from runner.protocol.dialect import (
    AHEAD_OF_REQUESTS,
    NEVER_SENT,
    Call,
    CallEnd,
    CallRefused,
    Dialect,
    Events,
    Identity,
    Notice,
    Progress,
    Refusal,
    Reply,
    Send,
    ShutdownSteps,
    Violation,
)
from runner.protocol.host_services import HostError
from runner.protocol.jsonrpc import INTERNAL_ERROR
from runner.protocol.memory import DELIVERIES
from runner.protocol.service_guard import ServiceGuard
from runner.session import account, verdict
from runner.session.backlog import Backlog
from runner.session.outbox import QueuedFrame
from runner.session.pending import Deadline, Waiter, at_checkpoints
from runner.session.prepared import GIVEN_UP
from runner.session.record import exit_section, without_verdict
from runner.session.shutdown import Shutdown, await_answer
from runner.session.state import CLOSED, SessionState
from runner.session.tasks import SessionTasks

# The counter of a dialect for events about a call that it did not pass on.
DROPPED_EVENTS = "dropped_events"
_MOST_UNREACHED = 5  # hosts that the failure of a call names


def told_to_others(error: PluginError | PluginFailure) -> HostError:
    """What another plugin may know about a call that failed."""
    if isinstance(error, PluginFailure):
        return HostError(INTERNAL_ERROR, f"the plugin failed: {error.outcome.code}")
    code = int(error.code) if re.fullmatch(r"-?[0-9]{1,9}", error.code) else INTERNAL_ERROR
    return HostError(code, error.message, error.data)


class OpenCall(NamedTuple):
    token: int
    waiter: Waiter
    events: Events  # that send its request
    seconds: float  # its time limit
    began: float


class Session:
    """Made by `open_session` (open.py)."""

    def __init__(
        self, cell: RemoteCell, terms: Terms, dialect: Dialect, guard: ServiceGuard, seconds: float | None
    ) -> None:
        """`seconds`: for everything a one-shot plugin does."""
        self.report: dict[str, Any] | None = None  # when it is over
        # Why the last answer was not the plugin's own but the policy's substitute. Empty: it was its own.
        self.substituted = ""
        self.deadline: Deadline | None = None  # of the call that it was opened for
        self.end: CallEnd | None = None  # how the last call ended, if the plugin was asked
        self.state = SessionState(cell, terms, dialect, guard)
        self.tasks = SessionTasks(self.state, seconds)
        self.shutdown = Shutdown(self.state)
        self._tokens = 0
        self._unreached: list[Advice] = []  # of hosts that the plugin could not reach
        # Its stderr and the advice, once it has ended and a call has failed with it.
        self._last_words: tuple[str, tuple[Advice, ...]] | None = None

    @property
    def terms(self) -> Terms:
        """The limits of the plugin, and what the policy lets it declare and ask."""
        return self.state.terms

    @property
    def identity(self) -> Identity | None:
        """The plugin's identity from the handshake; None before it is ready."""
        return self.state.identity

    @property
    def is_one_shot(self) -> bool:
        """Whether the process serves one call, whose success depends on how the process ends."""
        return self.state.dialect.one_shot

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.state.phase

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be asked of it."""
        return self.state.is_over

    @property
    def is_polite(self) -> bool:
        """Whether its shutdown waits for the plugin."""
        return self.state.ready.is_set() and not self.state.over.is_set() and not self.is_one_shot

    @property
    def stderr(self) -> str:
        """The end of the plugin's stderr."""
        return self.state.record.stderr

    # --- calls ------------------------------------------------------------------------------------------

    @at_checkpoints
    async def call(
        self,
        call: Call,
        *,
        seconds: float | None = None,
        deadline: Deadline | None = None,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Call the plugin and return its answer. Raises PluginError if it returns an error, PluginFailure if
        there is no answer.

        `deadline`: of a call that was accepted before its session was opened, instead of `seconds`.
        """
        state = self.state
        if not state.is_over:
            await account.ask()
        if state.is_over:
            account.withdraw()
            await trio.lowlevel.checkpoint()
            self.end = None
            self._tokens += 1
            return self._substitute(self._tokens, call)
        grace = state.dialect.grace(call)
        given_up_grace = state.dialect.given_up_grace(call) if grace else 0.0
        try:
            opened = self._accept(call, seconds, Waiter(on_progress, grace, None, given_up_grace))
        except (PluginError, PluginFailure):
            account.withdraw()
            await trio.lowlevel.checkpoint()
            raise
        token, waiter, events, most, _ = opened
        try:
            if waiter.grace > 0:
                dropped = state.dialect.counters.get(DROPPED_EVENTS, 0)
                clock, passed, limited = self._clock(deadline, most)
                try:
                    await await_answer(state, token, waiter, events, clock, passed)
                    return self._result(waiter)
                finally:
                    if limited and state.pending_verdict is passed:
                        state.record.limits_hit.append("call")
                    dropped = state.dialect.counters.get(DROPPED_EVENTS, 0) - dropped
                    self.end = self._end_of(waiter, dropped)
            self._send(opened)
            await waiter.woken.wait()
            return self._answer(opened)
        finally:
            self._leave(opened)

    def begin(self, call: Call, seconds: float | None, on_woken: Callable[[], None]) -> OpenCall | None:
        """Begin a call that no task waits for. `finish` has to be called after `on_woken` was called, or
        before to give the call up. None: `call` has to make it. Raises InvalidCall."""
        waiter = Waiter(None, self.state.dialect.grace(call), on_woken)
        if self.state.is_over or waiter.grace > 0:
            return None
        opened = self._accept(call, seconds, waiter)
        try:
            self._send(opened)
        except BaseException:
            self._leave(opened)
            raise
        return opened

    def finish(self, opened: OpenCall) -> Any:
        """The answer of a call, as `call` returns or raises it. None if the call was given up."""
        try:
            return self._answer(opened) if opened.waiter.woken.is_set() else None
        finally:
            self._leave(opened)

    def _accept(self, call: Call, seconds: float | None, waiter: Waiter) -> OpenCall:
        """Raises InvalidCall, or PluginFailure."""
        state = self.state
        token = self._tokens = self._tokens + 1
        self.end = None
        most = self._call_seconds(call, seconds)
        try:
            events = state.dialect.call(token, call)
        except CallRefused as refused:
            raise self._error(refused.event, asked=False) from None
        state.waiters[token] = waiter
        state.phase = "call"
        return OpenCall._make((token, waiter, events, most, state.now()))

    def _send(self, opened: OpenCall) -> None:
        if opened.seconds < math.inf:
            self.state.clock.set(opened.token, opened.began + opened.seconds)
        opened.waiter.queued = self.state.act_all(opened.events)

    def _answer(self, opened: OpenCall) -> Any:
        waiter = opened.waiter
        if waiter.fault is not None:
            raise waiter.fault
        if waiter.answer is None:
            self._expire(opened.token, waiter, waiter.queued, opened.seconds)
        return self._result(waiter)

    def _leave(self, opened: OpenCall) -> None:
        """The call has ended, or its caller has given it up."""
        state, token, waiter = self.state, opened.token, opened.waiter
        state.last_active = state.now()
        state.record.note_seconds("call", state.last_active - opened.began)
        del state.waiters[token]
        state.note_quiet()
        if not state.waiters and state.phase == "call":
            state.phase = "run"
        if waiter.answer is None and not state.over.is_set():
            # Our caller was cancelled. The plugin is told, and nothing else changes.
            withdrawn = [state.outbox.withdraw(frame) for frame in waiter.queued]
            if withdrawn and all(withdrawn):
                account.withdraw()
            else:
                state.is_unanswered = True
            if not any(withdrawn):
                state.note_given_up(token, opened.began)
            reason = NEVER_SENT if any(withdrawn) else "cancelled by the host"
            events = state.dialect.cancel(token, reason)
            state.act_all(_uncancelled(events) if any(withdrawn) else events)

    @at_checkpoints
    async def ask(self, call: Call) -> Any:
        """`call` for the host's own services. Raises HostError, which another plugin may get to see."""
        try:
            return await self.call(call)
        except (PluginError, PluginFailure) as error:
            raise told_to_others(error) from None

    def _substitute(self, token: int, call: Call) -> Any:
        """The contract's substitute for the answer of a plugin that has ended, if it has one (hooks)."""
        state = self.state
        outcome = self._ended_outcome
        state.record.calls["failed"] += 1
        if not state.closing:
            state.verdict = state.verdict or outcome
        try:
            state.dialect.call(token, call)
        except CallRefused:
            raise self._failure(outcome) from None
        for event in state.dialect.expired(token, outcome.message):
            if isinstance(event, Reply) and event.call == token:
                self.substituted = event.failure
                return event.value
        raise self._failure(outcome)

    def _call_seconds(self, call: Call, asked: float | None) -> float:
        dialect = self.state.dialect
        if dialect.one_shot:
            return math.inf  # one clock counts for everything (tasks.py)
        seconds = dialect.seconds(call) if asked is None else asked
        granted = self.state.terms.limits.call
        return seconds if granted is None or granted > seconds else granted

    def _clock(self, deadline: Deadline | None, seconds: float) -> tuple[Deadline, Outcome, bool]:
        """The clock of a call whose plugin has a grace, the outcome if it passes, and whether it is the
        `call` limit."""
        now, limit = trio.current_time(), self.terms.limits.call
        if deadline is not None and (limit is None or deadline.at <= now + limit):
            return deadline, deadline.passed("call"), False
        limited = limit is not None and (deadline is not None or seconds >= limit)
        most = limit if limited and limit is not None else seconds
        outcome = verdict.expired(
            "call", most, hint=self.state.noise, limited=limited, **self.state.time_remedies
        )
        return Deadline(now + most, most), outcome, limited

    def _end_of(self, waiter: Waiter, dropped: int) -> CallEnd:
        """How a call ended, for the contract's own record of it."""
        end = CallEnd(
            self.state.verdict or self.state.pending_verdict or GIVEN_UP,
            written=self.state.has_sent(waiter),
            late=waiter.late,
            ended=time.time(),
            events=waiter.events,
            dropped_events=dropped,
        )
        match waiter.answer:
            case Reply():
                return end._replace(
                    outcome=Outcome("ok", "call", "the plugin answered"), value=waiter.answer.value
                )
            case Refusal():
                return end._replace(outcome=PluginError(waiter.answer).outcome, refusal=waiter.answer)
            case Violation():
                return end._replace(outcome=self._outcome_of(waiter.answer))
        return end

    def _expire(self, token: int, waiter: Waiter, queued: list[QueuedFrame], seconds: float) -> None:
        """The call's time is up."""
        state = self.state
        state.owes_answer = True
        limited = self.terms.limits.call is not None and seconds >= self.terms.limits.call
        if limited:
            state.record.limits_hit.append("call")
        # A request that only waited in the queue did not stall: other calls may have more time.
        unsent = [state.outbox.withdraw(frame) for frame in queued if not frame.written]
        if not unsent:
            state.note_given_up(token, trio.current_time() - seconds)
        elif len(unsent) == len(queued) and all(unsent):
            account.withdraw()
        if not all(unsent):
            outcome = verdict.stalled("call", seconds)
        elif state.outbox.is_full:
            outcome = verdict.deaf(seconds)
        else:
            outcome = verdict.expired(
                "call", seconds, hint=state.noise, limited=limited, **state.time_remedies
            )
        state.give_up_call(token, waiter, outcome)
        if outcome.cause == "write_stalled":
            state.fail(outcome)  # half a frame is in the pipe: nothing more can be sent
        if state.verdict is None:
            events = state.dialect.cancel(token, "no answer in time")
            state.act_all(_uncancelled(events) if unsent else events)

    def _result(self, waiter: Waiter) -> Any:
        answer, state = waiter.answer, self.state
        assert answer is not None
        state.is_unanswered = False
        if isinstance(answer, Reply):
            self.substituted = answer.failure
            state.owes_answer = state.owes_answer and bool(answer.failure)
            state.record.calls["failed" if answer.failure else "ok"] += 1
            return answer.value
        raise self._error(answer)

    def _error(self, event: Refusal | Violation, *, asked: bool = True) -> PluginError | PluginFailure:
        state = self.state
        if isinstance(event, Refusal):
            state.record.calls["refused"] += 1
            state.record.note_refusal(event.message)
            return PluginError(event) if asked else InvalidCall(event)
        state.record.calls["failed"] += 1
        return self._failure(self._outcome_of(event))

    def _outcome_of(self, event: Violation) -> Outcome:
        known = self.state.verdict
        if known is not None and known.message == event.message:
            return known
        return Outcome(event.code, "call", event.message, event.cause, event.hint)

    # --- without an answer ------------------------------------------------------------------------------

    def notify(self, method: str, params: Any) -> list[QueuedFrame]:
        """Send a notification. Returns its queued frames. Raises InvalidCall if the contract has no such
        notification."""
        if self.is_over:
            raise self._failure(self._ended_outcome)
        try:
            return self._notify(method, params)
        except CallRefused as refused:
            raise self._error(refused.event, asked=False) from None

    def tell(self, method: str, params: Any) -> None:
        """`notify` for services of the host. It never raises: what cannot be sent is dropped and counted."""
        try:
            if not self.is_over:
                self._notify(method, params)
        except CallRefused:
            self.state.outbox.dropped += 1

    def _notify(self, method: str, params: Any) -> list[QueuedFrame]:
        """Returns the queued frames. Ends a plugin for which too much waits: with a part left out, a
        publication in chunks would be wrong, and not only incomplete."""
        state = self.state
        queued = state.act_all(state.dialect.notify(method, params))
        if state.deliveries > DELIVERIES:
            message = f"more than {DELIVERIES >> 20} MiB of events wait for the plugin"
            state.fail(verdict.fell_behind(state.phase, message))
        return queued

    def events(self) -> AsyncIterator[Notice | Progress]:
        """Notifications and progress of the plugin, until it ends. For one reader; the backlog is bounded."""
        return self.state.backlog

    def forward_events_to(self, whole: Backlog) -> None:
        """Send its events to a backlog that several processes share. Called before the first event."""
        self.state.backlog.close()
        self.state.backlog = Backlog(whole)

    def see_audit(self, audited: Audited) -> None:
        """Called when a connection or a DNS question of the plugin has ended."""
        self.state.act(Notice("network", audited.line._asdict()))
        if audited.advice is not None:
            self.state.act(Notice("advice", audited.advice._asdict()))
            if len(self._unreached) < _MOST_UNREACHED:
                self._unreached.append(audited.advice)

    # --- the end ----------------------------------------------------------------------------------------

    @at_checkpoints
    async def ended(self) -> None:
        """Wait until nothing more can be asked. Raises PluginFailure, unless it was closed by us."""
        await self.state.over.wait()
        if self.state.verdict is not None:
            raise self._failure(self.state.verdict)

    @at_checkpoints
    async def close(self, *, cancelled: bool = False) -> None:
        """Shut down gracefully, then kill. Concurrent callers wait for the first. `cancelled`: its user was,
        perhaps together with a call."""
        if cancelled and self.state.is_unanswered:
            self.state.owes_answer = True
        await self.shutdown.close()

    @at_checkpoints
    async def conclude(self) -> None:
        """Close it. Raises PluginFailure if the way it ended invalidates its answer."""
        state = self.state
        steps = state.dialect.shutdown_steps()  # before the dialect knows that it is over
        await self.close()
        ended = state.cell.has_ended
        if state.verdict is None and ended is not None and is_lifted(ended.outcome):
            state.verdict = ended.outcome
        elif state.verdict is None and steps.counts and ended is not None:
            outcome = verdict.after_answer(ended.outcome, state.record.forced, self._exit_seconds(steps))
            state.verdict = outcome if outcome.code != "ok" else None
        if state.verdict is not None:
            raise self._failure(state.verdict)

    def _exit_seconds(self, steps: ShutdownSteps) -> float:
        granted = self.terms.limits.teardown
        return steps.exit if granted is None else min(granted, steps.exit)

    def kill(self) -> None:
        """Kill it at once, without a shutdown. The session is over when its context ends."""
        self.state.caller_left = True
        self.state.cell.kill()

    @property
    def _ended_outcome(self) -> Outcome:
        state = self.state
        pending = state.pending_verdict if state.refuses_calls else None
        return verdict.ended_early(
            state.verdict or pending or state.exit_outcome or CLOSED, "call", state.record.stderr
        )

    def settle(self, ended: MonitorEnd | None, bare: Callable[[Outcome], dict[str, Any]]) -> None:
        """Make the report when everything has ended: the monitor's report, completed by what the session
        knows. `bare` makes one if the monitor wrote none."""
        state = self.state
        if ended is None and state.verdict is None:
            message = "the plugin's monitor did not report the end"
            state.verdict = Outcome(
                "internal", "teardown", message, "monitor", "look for a stopped process: ps -o pid,stat,args"
            )
        elif ended is not None and is_lifted(ended.outcome):
            state.verdict = state.verdict or ended.outcome
        outcome = state.verdict or without_verdict(state.exit_outcome, state.ready.is_set(), state.phase)
        report = ended.report if ended is not None else None
        self.report = with_outcome(report or bare(outcome), outcome)
        self.report["exit"] = exit_section(self.report["exit"], state.verdict, state.caller_left)
        self.report["advice"] = [each._asdict() for each in self._advice(ended, outcome)]
        if state.record.secrets:
            # The monitor knows no secrets, and a plugin can ask for a host of any name.
            for key in ("network", "notes", "advice", "obeyed"):
                self.report[key] = state.record.secrets.hide_in(self.report[key])
        state.record.complete(
            self.report,
            state.identity,
            dropped={"events": state.outbox.dropped, "notices": state.backlog.dropped},
            counters=dict(state.dialect.counters),
            host_calls={
                "served": dict(state.guard.served),
                "refused": dict(state.guard.refused),
                "busy": dict(state.guard.busy),
            },
        )

    def _failure(self, outcome: Outcome) -> PluginFailure:
        """With what is known now. Who catches it before the plugin is closed gets no report."""
        failure = PluginFailure(outcome)
        ended = self.state.cell.has_ended
        if ended is not None and has_failed(outcome):
            if self._last_words is None:  # many calls may fail with one plugin
                self._last_words = self.stderr, self._without_secrets(self._advice(ended, outcome))
            failure.stderr, failure.early_advice = self._last_words
        else:
            failure.stderr = self.stderr
            failure.early_advice = self._without_secrets(self._unreached if has_failed(outcome) else ())
        return failure

    def _without_secrets(self, advice: Iterable[Advice]) -> tuple[Advice, ...]:
        """The monitor knows no secrets, and a plugin can ask for a host of any name."""
        hide_in = self.state.record.secrets.hide_in
        return tuple(Advice(**hide_in(each._asdict())) for each in advice)

    def _advice(self, ended: MonitorEnd | None, outcome: Outcome) -> tuple[Advice, ...]:
        """Advice about what the plugin lacked in its cage. `with_outcome` chooses what applies to each
        failure."""
        record = self.state.record
        failed = has_failed(outcome) or bool(record.calls["failed"])
        if not failed and not record.calls["refused"]:
            return ()
        scene = None if ended is None else ended.scene
        if scene is None:
            return ()
        from runner.launch.advice.advice import advise

        found = advise(scene, record.stderr, answers=record.refusals)
        return found if failed else advice_of_calls(found)


def _uncancelled(events: Events) -> Events:
    """The events without frames that cancel a request. Used if the request itself was never sent.
    Notifications that waited for its end stay."""
    return [event for event in events if not isinstance(event, Send) or event.lane in AHEAD_OF_REQUESTS]
