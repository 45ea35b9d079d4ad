"""The shared state of one session: the cell, the dialect, open calls, and what events change.

session.py is what callers use, tasks.py reads, writes and watches, shutdown.py ends it. All of them act
through this state, so that the first cause of a failure stays the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from runner.launch.remote.messages import Terms
from runner.launch.remote.remote_cell import RemoteCell
from runner.outcome import Outcome, Phase, outcome_document
from runner.protocol.dialect import (
    Alive,
    Dialect,
    Event,
    Events,
    HostCall,
    HostCallCancelled,
    Identity,
    LateAnswer,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    ShutdownAnswered,
    Violation,
)
from runner.protocol.memory import DELIVERIES, QUESTIONS, Charge, Share
from runner.protocol.secrets import Secrets
from runner.protocol.service_guard import ServiceGuard
from runner.session.backlog import Backlog
from runner.session.outbox import MOST_EVENTS, Outbox, QueuedFrame
from runner.session.pending import CallClock, Waiter
from runner.session.record import SessionRecord
from runner.session.subscriber_lag import STEP_SECONDS, SubscriberLag
from runner.session.verdict import MORE_SECONDS, TimeRemedies, fell_behind

# The outcome of a call that was made after the end, or that the plugin did not answer before it.
CLOSED = Outcome("cancelled", "call", "the session is closed", "closed")


def without_secrets(event: Event, secrets: Secrets) -> Event:
    """The event without secrets. The answer to a call stays unchanged: it is for its caller."""
    hide, hide_in = secrets.hide, secrets.hide_in
    match event:
        case Refusal():
            return event._replace(
                code=hide(event.code), message=hide(event.message), data=hide_in(event.data)
            )
        case Violation():
            claimed = None if event.plugin_id is None else hide(event.plugin_id)
            return event._replace(message=hide(event.message), hint=hide(event.hint), plugin_id=claimed)
        case Progress() | Notice():
            return event._replace(value=hide_in(event.value))
        case Reply(failure=str(failure)) if failure:
            return event._replace(failure=hide(failure))
        case ShutdownAnswered(error):
            return event._replace(error=hide(error))
        case Ready(identity):
            shown = identity._replace(version=hide(identity.version), details=hide_in(identity.details))
            return event._replace(identity=shown)
    return event


class SessionState:
    def __init__(self, cell: RemoteCell, terms: Terms, dialect: Dialect, guard: ServiceGuard) -> None:
        self.cell = cell
        self.terms = terms
        self.dialect = dialect
        self.guard = guard
        self.identity: Identity | None = None
        self.outbox = Outbox()
        self.lag = SubscriberLag()
        self.backlog = Backlog()
        self.record = SessionRecord()
        self.waiters: dict[int, Waiter] = {}  # by the token of their call
        self.clock = CallClock(self.waiters)
        self.serving: dict[int, tuple[HostCall, trio.CancelScope]] = {}  # by ticket
        self.questions = Share(QUESTIONS)
        self._frame: Charge | None = None  # the backlog's charge for the frame that is being handled
        self._weight: int | None = None  # the weight of that frame. None: no frame is being handled
        self.phase: Phase = "launch"
        # Why the session is over: the first cause. None: it is not, or it was closed.
        self.verdict: Outcome | None = None
        # Becomes the verdict when the grace period of a cancelled call has passed.
        self.pending_verdict: Outcome | None = None
        self.exit_outcome: Outcome | None = None  # how a one-shot plugin ended by itself
        self.owes_answer = False  # the last call timed out, or the plugin is ended with its caller
        self.is_unanswered = False  # the caller of the last call gave it up
        self.more_time = MORE_SECONDS  # the hint of a call that timed out
        self.closing = False  # a shutdown has begun
        self._told_of_drops = False
        self.refuses_calls = False  # a call was cancelled and answered: a shutdown comes next
        self.caller_left = False  # the caller that opened it was cancelled
        self.ends_if_talkative = False  # the plugin is ended if it sends much while no call is open
        self.ready = trio.Event()
        self.over = trio.Event()  # nothing more can be asked
        self.stdout_eof = trio.Event()
        self.stderr_eof = trio.Event()
        self.frame_read = trio.Event()  # replaced with each frame
        self.shutdown_answered = trio.Event()
        self.flushed = trio.Event()  # nothing more is written
        # Until when nothing was read from the plugin, because subscribers had no room for its publications.
        self.unread_until = -math.inf
        self.alive = trio.Event()  # replaced with each health check
        self.went_quiet = trio.Event()  # replaced by the task that waits until nothing is in flight
        # Calls that were given up: token -> until when the plugin may still work on it.
        self._owed: dict[int, float] = {}
        # trio.current_time, in a third of the time.
        self.now: Callable[[], float] = trio.lowlevel.current_clock().current_time
        # When either side last sent a message. Health checks do not count.
        self.last_active = self.now()

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be asked of the plugin."""
        return self.closing or self.refuses_calls or self.over.is_set()

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the plugin. A caller that already has its answer does not count, even
        if its task has not run yet."""
        return not self.ready.is_set() or any(each.answer is None for each in self.waiters.values())

    @property
    def is_quiet(self) -> bool:
        """Whether neither side waits for an answer of the other."""
        return not self.waiters and not self.serving

    @property
    def time_remedies(self) -> TimeRemedies:
        """How a call or a phase that timed out gets more time, for `verdict.expired`."""
        return {"remedy": self.more_time, "decided_by": self.terms.decided_by}

    @property
    def noise(self) -> str:
        """Shown when a call times out."""
        return self.record.secrets.hide(self.dialect.noise or self.record.noise)

    @property
    def busy_until(self) -> float:
        """Until when the plugin may be working on a call that was given up; infinite while something is
        open."""
        return max(self._owed.values(), default=-math.inf) if self.is_quiet else math.inf

    def note_given_up(self, token: int, began: float) -> None:
        """The caller stopped waiting for a call that the plugin has received."""
        health_check, now = self.dialect.health_check, trio.current_time()
        if health_check is not None:
            self._owed = {call: until for call, until in self._owed.items() if until > now}
            self._owed[token] = began + health_check.busy

    def note_quiet(self) -> None:
        """Called when a call or a request of the plugin has ended."""
        if not self.waiters and not self.serving:
            self.went_quiet.set()

    # --- notifications that wait ------------------------------------------------------------------------

    @property
    def deliveries(self) -> int:
        """Bytes of the deliveries that wait: until the plugin may be told, and until it reads them."""
        return self.outbox.bytes["delivery"] + self.dialect.held_bytes

    async def room(self) -> None:
        """Wait until half of DELIVERIES is free, or the session is over. Publishers wait here, so a plugin
        that keeps them for too long is ended (subscriber_lag.py)."""
        lag, dialect = self.lag, self.dialect
        if self.deliveries < DELIVERIES // 4:
            lag.clear()
        if self.deliveries < DELIVERIES // 2 or self.outbox.closed:
            return
        with lag.counting(self.now(), self.outbox.sent):
            while self.deliveries >= DELIVERIES // 2 and not self.outbox.closed:
                in_call = dialect.held_bytes > 0
                with trio.move_on_after(STEP_SECONDS):
                    await self.outbox.delivered()
                lag.add(self.now(), self.outbox.sent, in_call)
                if not dialect.held_bytes:
                    lag.end_call()
                if fault := lag.fault:
                    self.fail(fell_behind(self.phase, fault))

    # --- events -----------------------------------------------------------------------------------------

    def act_all(self, events: Events) -> list[QueuedFrame]:
        """Carry out the events. Returns the queued frames."""
        queued: list[QueuedFrame] = []
        for event in events:
            if not isinstance(event, Send):
                self.act(event)
                continue
            self.last_active = self.now()
            queued_frame = self.outbox.post(event)
            if queued_frame is not None:
                queued.append(queued_frame)
            elif event.lane == "event" and not self.outbox.closed and not self._told_of_drops:
                self._told_of_drops = True  # the report counts them
                why = f"{MOST_EVENTS} events wait for the plugin, which is slow: further ones are dropped"
                self._tell(Notice("dropped", {"reason": "slow", "why": why}))
        return queued

    def begin_frame(self, weight: int) -> None:
        """The events that follow are those of one frame. `weight`: bytes that it takes in memory."""
        self._weight, self._frame = weight, None

    def end_frame(self) -> None:
        self._weight = self._frame = None

    def _tell(self, event: Notice | Progress) -> None:
        if self._frame is None and self._weight is not None:
            self._frame = self.backlog.charge(self._weight)  # one for all events of the frame
        self.backlog.tell(event, self._frame)

    def hidden(self, events: Events) -> Events:
        """The events without secrets. Uses no other state: for a long frame it runs in a thread."""
        secrets = self.record.secrets
        return [without_secrets(event, secrets) for event in events] if secrets else events

    def act(self, event: Event) -> None:
        for each in self.hidden((event,)):
            self.act_hidden(each)

    def act_hidden(self, event: Event) -> None:
        """Carry out an event that `hidden` returned."""
        match event:
            case Reply() | Refusal():
                self.wake(event.call, event)
            case Send():
                self.act_all((event,))
            case Ready(identity):
                self.identity = identity
                self.ready.set()
            case Violation(call=None):
                if self.verdict is None:
                    self.record.claimed_id = event.plugin_id
                self.fail(Outcome(event.code, self.phase, event.message, event.cause, event.hint))
            case Violation(call=int(call)):
                self.wake(call, event)
            case Progress():
                waiter = self.waiters.get(event.call) if event.call is not None else None
                if waiter is not None:
                    waiter.progress(event.value)
                self._tell(event)
            case HostCallCancelled(ticket):
                if ticket in self.serving:
                    self.serving[ticket][1].cancel()
            case Notice():
                if event.kind == "stdout":
                    self.record.note_stray(event.value)
                self._tell(event)
            case Alive():
                self.alive.set()
            case LateAnswer(call):
                self.is_unanswered = False
                self._owed.pop(call, None)
                self.note_quiet()
            case ShutdownAnswered(error):
                self.record.farewell_error = error
                self.shutdown_answered.set()
            case HostCall():
                raise AssertionError("a HostCall comes only from a frame that was read (tasks.py)")

    def wake(self, token: int, answer: Reply | Refusal | Violation) -> None:
        waiter = self.waiters.get(token)
        if waiter is not None and waiter.answer is None:
            waiter.answer = answer
            waiter.wake()

    def has_sent(self, waiter: Waiter) -> bool:
        """Whether a byte of its request may have reached the plugin. Otherwise the request is withdrawn."""
        waiter.queued = [frame for frame in waiter.queued if not self.outbox.withdraw(frame)]
        return bool(waiter.queued)

    # --- the end ----------------------------------------------------------------------------------------

    def fail(self, outcome: Outcome) -> None:
        """The session is over. Only the first cause counts."""
        if self.verdict is None:
            hide = self.record.secrets.hide
            outcome = outcome._replace(message=hide(outcome.message), hint=hide(outcome.hint))
            self.verdict = self.pending_verdict or outcome
            self.cell.kill()
            self.end_waiting()
            # The plugin gets no more answers, so the services that make them stop. Publications are
            # completed.
            for call, scope in self.serving.values():
                if call.expects_answer:
                    scope.cancel()

    def end_waiting(self) -> None:
        self.over.set()
        self.guard.detach()
        self.outbox.close()
        for token, waiter in self.waiters.items():
            # Before the backlog is closed: the end of a call may itself be an event.
            if waiter.answer is None:
                self.give_up_call(token, waiter, self.verdict or CLOSED)
            waiter.wake()
        ended = None if self.verdict is None else Notice("ended", outcome_document(self.verdict))
        self.backlog.close(ended)

    def give_up_call(self, token: int, waiter: Waiter, outcome: Outcome) -> None:
        """Fail a call, unless its contract has a substitute answer."""
        for event in self.dialect.expired(token, outcome.message):
            self.act(event)
        if waiter.answer is None:
            waiter.answer = Violation(outcome.code, outcome.message, outcome.cause, outcome.hint, token)
