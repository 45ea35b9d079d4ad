"""One live plugin: a Cage, a Dialect, and the tasks that read, write and watch.

The dialect says what bytes mean, the cage says how the process fares; here is time. Every wait is bounded,
the first cause of a failure stays the cause (launch/verdict.py words it), and a caller that gives up a call
loses that call and not the session.
"""

from __future__ import annotations

import math
import select
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import trio

from runner.exceptions import InvalidCall, PluginError, PluginFailure
from runner.launch import verdict
from runner.launch.monitor import MonitorEnd, Terms
from runner.launch.remote_cell import RemoteCell
from runner.outcome import Failure, Outcome, Phase, outcome_document, with_outcome
from runner.protocol import wire
from runner.protocol.dialect import (
    Answer,
    Call,
    CallRefused,
    Dialect,
    Event,
    Events,
    Farewell,
    Farewelled,
    HostCall,
    HostCallCancelled,
    Identity,
    Message,
    Notice,
    Progress,
    Ready,
    Refusal,
    Reply,
    Send,
    Violation,
)
from runner.protocol.host_services import Gate
from runner.protocol.memory import QUESTION, QUESTIONS, Charge, Share
from runner.session import settlement
from runner.session.events import Backlog
from runner.session.outbox import Letter, Outbox
from runner.session.record import SessionRecord
from runner.session.waiting import OnProgress, Waiter, first_of
from sandbox.cell.cell import KILL_SECONDS

_PIECE = 64 << 10  # of a stream, for one read
_IN_A_THREAD = 256 << 10  # longer frames would hold up everybody else while they are read
_TURN = 0.005  # seconds that one plugin's frames are read before others have their turn
# How long a process may take to end that has closed its stdout, and stdout to end when the process has.
_LINGER = 2.0
# For what is still to be written when a session is closed.
_FLUSH = 1.0
# For each step of the farewell of a plugin that owes us an answer: it did not answer in time, and who waited
# for that should not wait as long again.
_SHORT = 0.5
# How long we wait to hear that all of it is gone. A monitor takes less, unless somebody stopped it.
_END = KILL_SECONDS + 5.0

# For who calls after the end, or whose call the plugin did not answer before it.
_CLOSED = Outcome("cancelled", "call", "the session is closed", "closed")

# ^C is for who waits for the plugin, not for a task of ours that happens to run: it would take the session's
# ears and clocks away before the farewell.
_UNINTERRUPTED = trio.lowlevel.enable_ki_protection


class Session:
    """Made by `open_session` (runner/session/open.py)."""

    def __init__(
        self, cage: RemoteCell, prepared: Terms, dialect: Dialect, gate: Gate, seconds: float | None
    ) -> None:
        self.prepared = prepared
        self.identity: Identity | None = None
        self.report: dict[str, Any] | None = None  # when it is over
        self.stood_in = ""  # why the last answer was not the plugin's own, but what the policy says then
        self._cage = cage
        self._dialect = dialect
        self._gate = gate
        self._seconds = seconds  # of a one-shot plugin, for everything
        self._outbox = Outbox()
        self._tokens = 0
        self._waiters: dict[int, Waiter] = {}
        self._serving: dict[int, tuple[HostCall, trio.CancelScope]] = {}  # by ticket
        self._asked = Share(QUESTIONS)
        self._backlog = Backlog()
        self._told: Charge | None = None  # of the backlog, by the frame that is being taken
        self._phase: Phase = "launch"
        self._ready = trio.Event()
        self._over = trio.Event()  # there is a verdict
        self._eof = trio.Event()
        self._stderr_eof = trio.Event()
        self._heard = trio.Event()  # replaced with each frame
        self._farewelled = trio.Event()
        self._life = trio.CancelScope(shield=True)
        self._living = trio.Event()
        self._tasks: trio.Nursery | None = None
        self._closing = self._given_up = False
        self._closed = trio.Event()
        self._verdict: Outcome | None = None
        self._left: Outcome | None = None  # how a one-shot plugin ended by itself
        self._owes = False  # the answer to the last call, whose time is up
        self._flushed = trio.Event()  # nothing more is written
        self._record = SessionRecord()
        self._last = self._turn = trio.current_time()  # that anything was said; that others had their turn

    # --- for callers ------------------------------------------------------------------------------------

    async def call(
        self, call: Call, *, seconds: float | None = None, on_progress: OnProgress | None = None
    ) -> Any:
        """The plugin's answer. Raises PluginError if that is "no", PluginFailure if there is none."""
        self._tokens += 1
        token = self._tokens
        if self.is_over:
            await trio.lowlevel.checkpoint()
            return self._without_plugin(token, call)
        try:
            events = self._dialect.call(token, call)
        except CallRefused as refused:
            await trio.lowlevel.checkpoint()
            raise self._raised(refused.event, asked=False) from None
        waiter = self._waiters[token] = Waiter(on_progress)
        self._phase = "call"
        most = self._call_seconds(call, seconds)
        letters: list[Letter] = []
        began = trio.current_time()
        try:
            with trio.move_on_after(most):
                letters = self._act_all(events)
                await waiter.woken.wait()
            if waiter.fault is not None:
                raise waiter.fault
            if waiter.answer is None:
                self._expire(token, waiter, letters, most)
            return self._resolved(waiter)
        finally:
            self._record.took("call", trio.current_time() - began)
            del self._waiters[token]
            self._last = trio.current_time()
            if not self._waiters and self._phase == "call":
                self._phase = "run"
            if waiter.answer is None and not self._over.is_set():
                # Also if it is our caller that was cancelled: the plugin is told, and nothing else changes.
                withdrawn = [self._outbox.withdraw(letter) for letter in letters]
                events = self._dialect.cancel(token, "cancelled by the host")
                # What it was not asked yet need not be taken back: who gives up leaves nothing to be written.
                self._act_all([event for event in events if not (any(withdrawn) and isinstance(event, Send))])

    def notify(self, method: str, params: Any) -> list[Letter]:
        """Tell the plugin something it does not answer: the frames, on their way. Raises InvalidCall if the
        contract knows no such thing."""
        self._require_open()
        try:
            return self._act_all(self._dialect.notify(method, params))
        except CallRefused as refused:
            raise self._raised(refused.event, asked=False) from None

    def events(self) -> AsyncIterator[Notice | Progress]:
        """What the plugin tells unasked, until it ends. For one reader; what nobody reads is dropped."""
        return self._backlog

    async def ended(self) -> None:
        """Until nothing more can be asked of it. Raises PluginFailure, unless it was closed by us."""
        await self._over.wait()
        if self._verdict is not None:
            raise PluginFailure(self._verdict)

    async def conclude(self) -> None:
        """End it, and say if the way it ended takes its answer back. Raises PluginFailure."""
        farewell = self._dialect.farewell()  # before it knows that it is over
        await self.close()
        ended = self._cage.has_ended
        if self._verdict is None and farewell.counts and ended is not None:
            outcome = verdict.after_answer(ended.outcome, self._record.forced, self._exit_seconds(farewell))
            self._verdict = outcome if outcome.code != "ok" else None
        if self._verdict is not None:
            raise PluginFailure(self._verdict)

    @property
    def is_one_shot(self) -> bool:
        """Whether the process is for one call, and how it ends is part of the answer."""
        return self._dialect.one_shot

    def kill(self) -> None:
        """Without a farewell, for who has no time for one. It is over when the context is."""
        self._given_up = True
        self._cage.kill()

    @property
    def phase(self) -> Phase:
        """How far it has come."""
        return self._phase

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be asked of it."""
        return self._closing or self._over.is_set()

    @property
    def stderr(self) -> str:
        """The end of what the plugin wrote there."""
        return self._record.stderr

    def _require_open(self) -> None:
        if self.is_over:
            raise PluginFailure(self._over_because)

    @property
    def _over_because(self) -> Outcome:
        ended = self._verdict or self._left or _CLOSED
        return verdict.ended_early(ended, "call", self._record.stderr)

    def _without_plugin(self, token: int, call: Call) -> Any:
        """Some contracts have an answer for a plugin that is gone: of a nexo hook the policy says which."""
        outcome = self._over_because
        self._record.calls["failed"] += 1
        if not self._closing:
            self._verdict = self._verdict or outcome
        try:
            self._dialect.call(token, call)
        except CallRefused:
            raise PluginFailure(outcome) from None
        for event in self._dialect.expired(token, outcome.message):
            if isinstance(event, Reply) and event.call == token:
                self.stood_in = event.failure
                return event.value
        raise PluginFailure(outcome)

    def _call_seconds(self, call: Call, asked: float | None) -> float:
        if self._dialect.one_shot:
            return math.inf  # one clock for all of it
        seconds = self._dialect.seconds(call) if asked is None else asked
        granted = self.prepared.limits.call
        return seconds if granted is None else min(seconds, granted)

    def _expire(self, token: int, waiter: Waiter, letters: list[Letter], seconds: float) -> None:
        """Its time is up."""
        self._owes = True
        limited = self.prepared.limits.call is not None and seconds >= self.prepared.limits.call
        if limited:
            self._record.limits_hit.append("call")
        # What has only waited for its turn is nobody's stall: other calls may have more time.
        unsent = [self._outbox.withdraw(letter) for letter in letters if not letter.written]
        if not all(unsent):
            outcome = verdict.stalled(seconds)
        else:
            outcome = verdict.expired("call", seconds, hint=self._record.noise, limited=limited)
        self._give_up(token, waiter, outcome)
        if outcome.cause == "write_stalled":
            self._fail(outcome)  # half a frame is in the pipe: nothing can be said any more
        if self._verdict is None:
            events = self._dialect.cancel(token, "no answer in time")
            self._act_all([event for event in events if not (unsent and isinstance(event, Send))])

    def _give_up(self, token: int, waiter: Waiter, outcome: Outcome) -> None:
        """It has failed, unless its contract has an answer for that."""
        for event in self._dialect.expired(token, outcome.message):
            self._act(event)
        if waiter.answer is None:
            waiter.answer = Violation(outcome.code, outcome.message, outcome.cause, outcome.hint, token)

    def _resolved(self, waiter: Waiter) -> Any:
        answer = waiter.answer
        assert answer is not None
        if isinstance(answer, Reply):
            self.stood_in = answer.failure
            self._owes = self._owes and bool(answer.failure)
            self._record.calls["failed" if answer.failure else "ok"] += 1
            return answer.value
        raise self._raised(answer)

    def _raised(self, event: Refusal | Violation, *, asked: bool = True) -> PluginError | PluginFailure:
        if isinstance(event, Refusal):
            self._record.calls["refused"] += 1
            return PluginError(event) if asked else InvalidCall(event)
        self._record.calls["failed"] += 1
        if self._verdict is not None and self._verdict.message == event.message:
            return PluginFailure(self._verdict)
        return PluginFailure(Outcome(event.code, "call", event.message, event.cause, event.hint))

    # --- events -----------------------------------------------------------------------------------------

    def _act_all(self, events: Events) -> list[Letter]:
        """The frames among them, on their way."""
        letters: list[Letter] = []
        for event in events:
            if not isinstance(event, Send):
                self._act(event)
            elif (letter := self._post(event)) is not None:
                letters.append(letter)
        return letters

    def _post(self, send: Send) -> Letter | None:
        self._last = trio.current_time()
        return self._outbox.post(send)

    def _act(self, event: Event) -> None:
        match event:
            case Send():
                self._post(event)
            case Ready(identity):
                self.identity = identity
                self._ready.set()
            case Reply() | Refusal():
                self._wake(event.call, event)
            case Violation(call=None):
                if self._verdict is None:
                    self._record.claimed_id = event.plugin_id
                self._fail(Outcome(event.code, self._phase, event.message, event.cause, event.hint))
            case Violation(call=int(call)):
                self._wake(call, event)
            case Progress():
                waiter = self._waiters.get(event.call) if event.call is not None else None
                if waiter is not None:
                    waiter.progress(event.value)
                self._backlog.tell(event, self._told)
            case HostCallCancelled(ticket):
                if ticket in self._serving:
                    self._serving[ticket][1].cancel()
            case Notice():
                if event.kind == "stdout":
                    self._record.strayed(event.value)
                self._backlog.tell(event, self._told)
            case Farewelled(error):
                self._record.farewell_error = error
                self._farewelled.set()
            case HostCall():
                raise AssertionError("only what was read asks something of the host")

    def _wake(self, token: int, answer: Reply | Refusal | Violation) -> None:
        waiter = self._waiters.get(token)
        if waiter is not None and waiter.answer is None:
            waiter.answer = answer
            waiter.woken.set()

    def _fail(self, outcome: Outcome) -> None:
        """The session is over. The first cause is the cause."""
        if self._verdict is None:
            self._verdict = outcome
            self._cage.kill()
            self._end_waiting()
            # No more work for it: its answers would go nowhere. What it had published is published.
            for call, scope in self._serving.values():
                if call.expects_answer:
                    scope.cancel()

    def _end_waiting(self) -> None:
        self._over.set()
        self._outbox.close()
        for token, waiter in self._waiters.items():
            # Before the last event can be read: what becomes of a call may be one.
            if waiter.answer is None:
                self._give_up(token, waiter, self._verdict or _CLOSED)
            waiter.woken.set()
        ended = None if self._verdict is None else Notice("ended", outcome_document(self._verdict))
        self._backlog.close(ended)

    # --- tasks ------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """All tasks of the session. Out of reach of who gives up: a farewell has to be said, and heard."""
        with self._life:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                self._living.set()
                await trio.sleep_forever()

    def leave(self) -> None:
        """Let go of all tasks."""
        self._life.cancel()

    async def open(self) -> None:
        """Until it is ready. Raises PluginFailure."""
        await self._living.wait()
        nursery = self._tasks
        assert nursery is not None
        nursery.start_soon(self._read, nursery)
        nursery.start_soon(self._read_stderr)
        nursery.start_soon(self._write)
        nursery.start_soon(self._watch_process)
        nursery.start_soon(self._watch_stdout)
        if not self._dialect.one_shot:  # of which one question is all that it has to read
            nursery.start_soon(self._watch_stdin)
        timeouts = dict(self.prepared.plugin.timeouts)
        if self._dialect.one_shot and self._seconds is not None:
            nursery.start_soon(self._watch_clock, self._seconds)
        await self._launch(timeouts.get("launch", math.inf))
        await self._shake_hands(nursery)
        if self.prepared.limits.idle is not None:
            nursery.start_soon(self._watch_idleness, self.prepared.limits.idle)

    async def _launch(self, seconds: float) -> None:
        try:
            with trio.move_on_after(seconds) as clock:
                self._record.timings.update(await self._cage.launched())
            if clock.cancelled_caught:
                self._fail(verdict.expired("launch", seconds))
        except Failure as failure:
            self._fail(failure.outcome)
        self._require_no_verdict()

    async def _shake_hands(self, nursery: trio.Nursery) -> None:
        began = trio.current_time()
        self._phase = "handshake"
        granted = self.prepared.limits.handshake
        contract = self._dialect.handshake_seconds
        seconds = contract if granted is None else min(granted, contract)
        nursery.start_soon(self._watch_silence)
        with trio.move_on_after(seconds) as clock:
            self._act_all(self._dialect.opening())
            await first_of(self._ready, self._over)
        self._record.took("handshake", trio.current_time() - began)
        if clock.cancelled_caught and not self._ready.is_set():
            limited = granted is not None and granted <= contract
            if limited:
                self._record.limits_hit.append("handshake")
            self._fail(verdict.expired("handshake", seconds, hint=self._record.noise, limited=limited))
        if not self._ready.is_set():
            self._require_no_verdict()
        self._phase = "run"

    def _require_no_verdict(self) -> None:
        if self._verdict is not None:
            ended = self._cage.has_ended
            raise PluginFailure(self._verdict, ended.explanation if ended is not None else ())

    @_UNINTERRUPTED
    async def _read(self, nursery: trio.Nursery) -> None:
        framer = self._dialect.framer()
        try:
            while data := await self._cage.stdout.receive_some(_PIECE):
                self._turn = trio.current_time()
                self._wrote("stdout", data)
                for frame in framer.feed(bytes(data)):
                    await self._take(frame, nursery)
                if framer.fault is not None:
                    break
            for frame in framer.finish():
                await self._take(frame, nursery)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if framer.fault is not None and framer.fault.cause != "truncated" and not self._closing:
            # A frame that was cut short by the end is the end's business.
            self._fail(Outcome("malformed_response", self._phase, framer.fault.message, framer.fault.cause))
        self._eof.set()
        # It may write on. To nobody's use, but it must not hang on a full pipe while it is bid farewell.
        try:
            while data := await self._cage.stdout.receive_some(_PIECE):
                self._wrote("stdout", data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _take(self, frame: bytes, nursery: trio.Nursery) -> None:
        if self._verdict is not None:
            return  # it may have come in one breath with what ended the session, and is too late even so
        self._record.frames += 1
        if len(frame) > _IN_A_THREAD:
            message = await trio.to_thread.run_sync(self._dialect.read, frame)
        else:
            message = self._dialect.read(frame)
        self._last = trio.current_time()
        self._heard.set()
        asked = self._heed(message, nursery)
        del message  # it would stay as long as the plugin does not read its answers
        # Who has waited for a long answer takes it before the next is read.
        if asked or len(frame) > _PIECE or self._last - self._turn > _TURN:
            # Taken up before more is read, if only to be told that we are busy: else who asks much in one
            # breath would look like one that never waits for an answer. And one read can be 64 thousand
            # empty lines, for which no other session has to wait.
            await trio.lowlevel.checkpoint()
            self._turn = trio.current_time()
        await self._outbox.room()

    def _heed(self, message: Message, nursery: trio.Nursery) -> bool:
        """Do what it says. Whether something was asked of us."""
        asked = False
        questions = Charge(self._asked, message.weight, QUESTION)
        self._told = self._backlog.charge(message.weight)
        for event in self._dialect.feed(message):
            if isinstance(event, HostCall):
                self._begin_serving(event, questions, nursery)
                asked = True
            else:
                self._act(event)
        self._told = None
        return asked

    def _begin_serving(self, call: HostCall, frame: Charge, nursery: trio.Nursery) -> None:
        if not frame.hold():
            self._act_all(self._dialect.answer(call.ticket, self._gate.turn_away(call)))
            return
        # It may be taken back before its task has run for the first time.
        scope = trio.CancelScope()
        self._serving[call.ticket] = call, scope
        nursery.start_soon(self._serve, call, scope, frame)

    async def _serve(self, call: HostCall, scope: trio.CancelScope, frame: Charge) -> None:
        # Each frame to the plugin repeats its own id, which can be long: none is made before there is room.
        async def emit(value: Any) -> None:
            for event in self._dialect.emit(call.ticket, value):
                await self._outbox.room()
                self._act(event)
            await self._outbox.room()

        try:
            with scope:
                answer = _sendable(await self._gate.answer(call, emit))
                await self._outbox.room()
                self._told = self._backlog.charge(frame.weight)
                try:
                    self._act_all(self._dialect.answer(call.ticket, answer))
                finally:
                    self._told = None
        finally:
            self._serving.pop(call.ticket, None)
            frame.release()

    @_UNINTERRUPTED
    async def _read_stderr(self) -> None:
        try:
            while data := await self._cage.stderr.receive_some(_PIECE):
                self._wrote("stderr", data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._stderr_eof.set()

    def _wrote(self, stream: Literal["stdout", "stderr"], data: bytes | bytearray) -> None:
        self._record.wrote(stream, data)
        overdrawn = self._record.overdrawn(self.prepared.limits)
        if overdrawn is not None:
            self._fail(verdict.output_exceeded(overdrawn, self.prepared.limits, self._phase))

    @_UNINTERRUPTED
    async def _write(self) -> None:
        try:
            await self._outbox.write_to(self._cage.stdin)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # It closed its stdin. It may have answered before, or be ending: that is seen elsewhere.
            self._flushed.set()
            if not self._closing:
                await trio.sleep(_LINGER)
                if self._is_awaited:
                    self._fail(verdict.stream_closed(self._phase, "stdin", self._record.stderr))
        finally:
            self._flushed.set()

    @property
    def _is_awaited(self) -> bool:
        """Whether something is expected of the plugin. Not by who has his answer, and only did not have his
        turn yet to take it."""
        return not self._ready.is_set() or any(each.answer is None for each in self._waiters.values())

    @_UNINTERRUPTED
    async def _watch_process(self) -> None:
        """What was written before the end is read before the end is judged."""
        ended = await self._cage.ended()
        with trio.move_on_after(_LINGER):
            await self._eof.wait()
            await self._stderr_eof.wait()
        if self._verdict is not None or self._closing:
            return
        if self._is_awaited:
            self._verdict = verdict.ended_early(ended.outcome, self._phase, self._record.stderr)
        elif self._dialect.one_shot:
            self._left = ended.outcome  # which is expected, after its answer
        else:
            self._verdict = verdict.ended_unasked(ended.outcome, self._record.stderr)
        self._end_waiting()

    @_UNINTERRUPTED
    async def _watch_stdout(self) -> None:
        await self._eof.wait()
        await trio.sleep(_LINGER)
        if not self._closing and self._cage.has_ended is None:
            self._fail(verdict.stream_closed(self._phase, "stdout", self._record.stderr))

    @_UNINTERRUPTED
    async def _watch_stdin(self) -> None:
        """Also where there is nothing to write: an answer may be awaited of who cannot be asked any more."""
        with select.epoll() as errors:
            errors.register(self._cage.stdin.fileno(), 0)  # errors are told unasked
            await trio.lowlevel.wait_readable(errors.fileno())
        await trio.sleep(_LINGER)
        if not self._closing and self._is_awaited and self._cage.has_ended is None:
            self._fail(verdict.stream_closed(self._phase, "stdin", self._record.stderr))

    @_UNINTERRUPTED
    async def _watch_clock(self, seconds: float) -> None:
        await trio.sleep(seconds)
        granted = self.prepared.limits.call
        limited = granted is not None and seconds >= granted
        if self._verdict is None and limited:
            self._record.limits_hit.append("call")
        self._fail(verdict.expired("invocation", seconds, limited=limited))

    @_UNINTERRUPTED
    async def _watch_silence(self) -> None:
        """Noise on its stdout is silence too: only what changes the dialect's mind starts its clock anew."""
        patience, until = None, math.inf
        while not self._ready.is_set() and not self._over.is_set():
            if self._dialect.patience != patience:
                patience = self._dialect.patience
                until = math.inf if patience is None else trio.current_time() + patience
            self._heard = trio.Event()
            with trio.CancelScope(deadline=until) as silence:
                await self._heard.wait()
            if silence.cancelled_caught:
                self._act_all(self._dialect.silence())
                # A deadline that stayed in the past would ring at once, again and again.
                patience, until = None, math.inf

    @_UNINTERRUPTED
    async def _watch_idleness(self, seconds: float) -> None:
        while True:
            left = self._last + seconds - trio.current_time()
            if self._waiters or self._serving:
                left = seconds
            if self._closing:
                return  # the farewell has clocks of its own
            if left <= 0:
                self._record.limits_hit.append("idle")
                self._phase = "idle"
                self._fail(verdict.expired("idle", seconds, limited=True))
                return
            await trio.sleep(left)

    # --- the end ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Bid it farewell, and end it. Bounded, and the same for whoever asks second."""
        if self._closing:
            await self._closed.wait()
            return
        began = trio.current_time()
        try:
            self._closing = True
            with trio.CancelScope(shield=True):
                if self._ready.is_set() and not self._over.is_set() and self._cage.has_ended is None:
                    self._phase = "teardown"
                    await self._bid(self._dialect.farewell())
                else:
                    self._given_up = not self._over.is_set()
                    self._cage.kill()
                with trio.move_on_after(_END):
                    await self._cage.ended()
                    with trio.move_on_after(_LINGER):
                        await self._eof.wait()
        finally:  # also after ^C, or whoever asks second would wait for ever; the cage ends what is left
            self._record.took("teardown", trio.current_time() - began)
            self._end_waiting()
            self._closed.set()

    async def _bid(self, farewell: Farewell) -> None:
        if self._owes:
            farewell = farewell._replace(
                answer=min(farewell.answer, _SHORT),
                exit=min(farewell.exit, _SHORT),
                terminate=min(farewell.terminate, _SHORT),
            )
        granted = self.prepared.limits.teardown  # for all of it together
        with trio.move_on_after(math.inf if granted is None else granted) as clock:
            if farewell.frames and not self._outbox.closed:
                with trio.move_on_after(farewell.answer):
                    self._act_all(farewell.frames)
                    await first_of(self._farewelled, self._over, self._eof)
            self._outbox.close()
            with trio.move_on_after(_SHORT if self._owes else _FLUSH):
                await self._flushed.wait()
            await self._close_stdin()
            if await self._has_ended_within(farewell.exit):
                return
            if farewell.terminate and not self._over.is_set():
                self._cage.signal(15)
                if await self._has_ended_within(farewell.terminate):
                    return
        if self._over.is_set() or self._cage.has_ended is not None:
            return
        if clock.cancelled_caught:
            self._record.limits_hit.append("teardown")
        self._record.forced = True
        self._cage.kill()

    async def _close_stdin(self) -> None:
        # Closed under the writer's hands, should it still have something to write that nobody reads.
        await self._cage.stdin.aclose()

    def _exit_seconds(self, farewell: Farewell) -> float:
        granted = self.prepared.limits.teardown
        return farewell.exit if granted is None else min(granted, farewell.exit)

    async def _has_ended_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self._cage.ended()
        return self._cage.has_ended is not None

    # --- the report -------------------------------------------------------------------------------------

    def settle(self, ended: MonitorEnd | None, bare: Callable[[Outcome], dict[str, Any]]) -> None:
        """When all is over: what the monitor reports, with what the session knows better. `bare`: where the
        monitor was not left to report anything."""
        if ended is None and self._verdict is None:
            message = "the process that watches over the plugin does not answer"
            self._verdict = Outcome("internal", "teardown", message, "monitor", "look for what stopped it")
        outcome = self._verdict or settlement.without_verdict(self._left, self._ready.is_set(), self._phase)
        report = ended.report if ended is not None else None
        self.report = with_outcome(report or bare(outcome), outcome)
        self.report["exit"] = settlement.told_exit(self.report["exit"], self._verdict, self._given_up)
        self._record.complete(
            self.report,
            self.identity,
            dropped={"events": self._outbox.dropped, "notices": self._backlog.dropped},
            counters=dict(self._dialect.counters),
            host_calls={
                "served": dict(self._gate.served),
                "refused": dict(self._gate.refused),
                "busy": dict(self._gate.busy),
            },
        )


def _sendable(answer: Answer) -> Answer:
    """A service is somebody else's: what it returns may be no JSON."""
    try:
        wire.encode(answer.result)
        wire.encode(answer.error)
    except ValueError:
        return Answer(error=(-32603, "internal error: the host's answer cannot be sent", None))
    return answer
