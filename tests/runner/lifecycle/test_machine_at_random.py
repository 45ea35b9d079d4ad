"""The lifecycle machine under random events: never too many cells, never a call without an answer, never a
busy loop."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runner.lifecycle.machine import (
    STATE_NAMES,
    Called,
    CellEnded,
    CellOpened,
    CellOver,
    CheckHealth,
    CloseCell,
    Finished,
    HealthAnswered,
    HealthMissed,
    LifecycleEvent,
    OpenCell,
    RefuseCalls,
    ReloadAsked,
    ResetAsked,
    ServeCall,
    StartAsked,
    StopAsked,
    Tell,
    Withdrawn,
    Woke,
    new_state,
    step,
    wake_at,
)
from runner.supervision import Supervision, fault_of

SECONDS = st.sampled_from((0.1, 1.0, 7.0, 60.0))
NUMBERS = st.builds(
    Supervision()._replace,
    eager=st.booleans(),
    respawn=st.booleans(),
    retry_first=st.booleans(),
    backoff=st.sampled_from((0.1, 1.0)),
    factor=st.sampled_from((1.0, 2.0)),
    backoff_most=SECONDS.filter(lambda most: most >= 1.0),
    jitter=st.sampled_from((0.0, 0.5, 1.0)),
    attempts=st.integers(0, 2),
    failures=st.integers(0, 3),
    within=SECONDS,
    healthy=st.sampled_from((0.0, 1.0, 60.0)),
    idle=st.sampled_from((0.0, 0.1, 7.0)),
    health_call=st.sampled_from(("", "ping")),
    health_interval=SECONDS,
    health_misses=st.integers(1, 2),
    drain=st.sampled_from((0.0, 1.0)),
    sessions=st.integers(1, 3),
    calls=st.integers(0, 2),
)


class World(RuleBasedStateMachine):
    """What a supervisor would have: cells with their calls, a queue, and a clock."""

    accepted = answered = queue = 0

    @initialize(numbers=NUMBERS, pending=st.sampled_from(("", "not approved")))
    def begin(self, numbers: Supervision, pending: str) -> None:
        self.now = 1000.0
        self.state = new_state(numbers, self.now, pending)
        self.cells: dict[int, int] = {}  # from OpenCell to CellEnded: calls in flight
        self.opened: set[int] = set()
        self.closing: set[int] = set()
        self.asked: set[int] = set()  # cells with a health check under way
        assert fault_of(numbers) == ""
        self.take(Woke())

    def take(self, event: LifecycleEvent) -> None:
        self.state, commands = step(self.state, event, self.now)
        for command in commands:
            match command:
                case OpenCell(number):
                    assert number not in self.cells and not self.closing
                    self.cells[number] = 0
                    assert len(self.cells) <= self.state.numbers.sessions
                case CloseCell(number):
                    assert number in self.cells and number not in self.closing
                    self.closing.add(number)
                case ServeCall(number):
                    assert self.queue and number in self.opened - self.closing
                    self.queue -= 1
                    self.cells[number] += 1
                    assert not self.state.numbers.calls or self.cells[number] <= self.state.numbers.calls
                case RefuseCalls(calls, hold, reason):
                    assert calls == self.queue and (hold or reason)
                    self.queue, self.answered = 0, self.answered + calls
                case CheckHealth(number):
                    assert number in self.opened - self.closing and number not in self.asked
                    self.asked.add(number)
                case Tell(_, number):
                    assert number

    def end(self, number: int, reason: str, chance: float = 0.0) -> None:
        self.answered += self.cells.pop(number)
        for each in (self.opened, self.closing, self.asked):
            each.discard(number)
        self.take(CellEnded(number, reason, chance))

    def finish(self, number: int) -> None:
        self.cells[number] -= 1
        self.answered += 1
        self.take(Finished(number))

    def wake(self) -> None:
        self.now = max(self.now, wake_at(self.state))
        self.take(Woke())
        assert wake_at(self.state) > self.now, "it asks for a time that has passed already"

    # --- what may happen ------------------------------------------------------------------------------------

    @rule(many=st.integers(1, 3))
    def call(self, many: int) -> None:
        for _ in range(many):
            self.queue, self.accepted = self.queue + 1, self.accepted + 1
            self.take(Called())

    @precondition(lambda self: self.queue)
    @rule()
    def give_up(self) -> None:
        self.queue, self.answered = self.queue - 1, self.answered + 1
        self.take(Withdrawn())

    @precondition(lambda self: set(self.cells) - self.opened)
    @rule(data=st.data())
    def open_cell(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.cells) - self.opened)))
        self.opened.add(number)
        self.take(CellOpened(number))

    @precondition(lambda self: self.cells)
    @rule(data=st.data(), chance=st.floats(0, 1))
    def end_cell(self, data: st.DataObject, chance: float) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.cells))), "exit:1", chance)

    @precondition(lambda self: self.opened - self.closing)
    @rule(data=st.data())
    def be_over(self, data: st.DataObject) -> None:
        """Its plugin has ended by itself, and the cell is being cleaned up."""
        number = data.draw(st.sampled_from(sorted(self.opened - self.closing)))
        self.closing.add(number)
        self.take(CellOver(number))

    @precondition(lambda self: any(self.cells.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(sorted(n for n, calls in self.cells.items() if calls))))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), lives=st.booleans())
    def health(self, data: st.DataObject, lives: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(number)
        self.take(HealthAnswered(number) if lives else HealthMissed(number, "no answer"))

    @precondition(lambda self: wake_at(self.state) < math.inf)
    @rule(times=st.integers(1, 3))
    def pass_time(self, times: int) -> None:
        for _ in range(times):
            if wake_at(self.state) < math.inf:
                self.wake()

    @rule(seconds=SECONDS)
    def pass_some_time(self, seconds: float) -> None:
        """Timers may come late, and other events before them."""
        self.now += seconds

    @rule(
        event=st.one_of(
            st.builds(StartAsked),
            st.builds(StopAsked, st.just("enough"), st.sampled_from((None, 0.0, 5.0))),
            st.builds(ResetAsked),
            st.builds(ReloadAsked, NUMBERS, st.sampled_from(("", "not approved"))),
        )
    )
    def ask(self, event: LifecycleEvent) -> None:
        self.take(event)

    # --- what is always true --------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert state.name in STATE_NAMES
        assert {cell.number: cell.calls for cell in state.cells} == self.cells
        assert state.waiting == self.queue and not (state.hold and self.queue)
        assert self.accepted == self.answered + self.queue + sum(self.cells.values())
        assert {cell.number for cell in state.cells if cell.stage == "ending"} == self.closing
        # A call never waits without something that will end the wait.
        moving = state.cells or wake_at(state) < math.inf
        assert not self.queue or moving

    def teardown(self) -> None:
        """Every call gets its answer if cells open, calls end and time passes."""
        for _ in range(200):
            if self.accepted == self.answered and not self.queue:
                break
            for number in sorted(set(self.cells) - self.opened):
                if number not in self.closing:
                    self.opened.add(number)
                    self.take(CellOpened(number))
            for number in sorted(self.cells):
                while self.cells.get(number):
                    self.finish(number)
                if number in self.closing:
                    self.end(number, "")
            if wake_at(self.state) < math.inf and self.queue:
                self.wake()
        assert self.accepted == self.answered


World.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
