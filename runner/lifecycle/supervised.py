"""One plugin under supervision: carries out the commands of its machine (machine.py).

Each cell has a task of its own, which opens the plugin and closes it. A call runs in the task of its caller.
A call that has begun is never repeated: it ends with its answer, or with the failure of its cell.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from runner.contracts.registry import find_contract
from runner.exceptions import PluginError, PluginFailure
from runner.launch.report import staged_note
from runner.launch.stages import HeldManifest
from runner.library import OpenPlugin, open_plugin
from runner.lifecycle import machine
from runner.lifecycle.exceptions import Overloaded, Unavailable
from runner.lifecycle.feed import StderrLog
from runner.lifecycle.machine import (
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
    ServeCall,
    Tell,
    Withdrawn,
    Woke,
)
from runner.lifecycle.queue import CallerQueue, QueueFull
from runner.lifecycle.spec import LifecycleNews, Spec, Status
from runner.manifest.load import load
from runner.outcome import Outcome
from runner.plugin import Plugin
from runner.protocol.calls import CallRequest, CallResult
from runner.protocol.dialect import Identity, Notice, Progress
from runner.protocol.memory import size_of
from runner.session.pending import Deadline, first_of
from runner.supervision import Supervision
from sandbox.paths.end_search import read_findings

_STDERR_CHARACTERS = 8 << 10  # of the end that lifecycle news have
_RETRY_LEAST, _RETRY_MOST = 1.0, 60.0  # seconds, of an answer that says when to come again
_LARGE_INPUT = 1 << 20  # taken for one that has too many parts to be measured

# Gets what a plugin says beside its answers: its name, and a notification or progress. A coroutine is awaited
# before the next event of the same plugin; of those that wait, some are dropped (OpenPlugin.events).
OnEvent = Callable[[str, Notice | Progress], Awaitable[None] | None]


# Opens a plugin, with so many parked cells, and ends it with the context.
Opener = Callable[[Spec, int], AbstractAsyncContextManager[OpenPlugin]]


def open_spec(spec: Spec, parked: int) -> AbstractAsyncContextManager[OpenPlugin]:
    return open_plugin(spec.path, **spec.opening(), parked=parked)


class QueuedCall:
    """A call from when it is accepted until it begins."""

    def __init__(self) -> None:
        self.decided = trio.Event()
        self.cell: SupervisedCell | None = None  # that serves it
        self.failure: PluginFailure | None = None


class SupervisedCell:
    def __init__(self, number: int, spec: Spec, log_start: int) -> None:
        self.number = number
        self.spec = spec
        self.log_start = log_start  # where its stderr begins in the log
        self.scope = trio.CancelScope()  # of its opening
        self.leave = trio.Event()
        self.opened: OpenPlugin | None = None
        self.ready_at = math.nan
        self.failure: PluginFailure | None = None  # of its opening
        self.outcome: Outcome | None = None  # how it ended


class SupervisedPlugin:
    def __init__(
        self,
        spec: Spec,
        nursery: trio.Nursery,
        *,
        jitter: Callable[[], float],
        clock: Callable[[], float],
        tell: Callable[[SupervisedPlugin, LifecycleNews], None],
        on_hold: Callable[[SupervisedPlugin], None],
        on_report: Callable[[Mapping[str, Any]], None],
        on_event: OnEvent | None,
        opener: Opener,
    ) -> None:
        self.spec = spec
        self.plugin: Plugin | None = None  # None: its manifest could not be read
        self.state = machine.new_state(spec.adjust(Supervision()), trio.current_time(), spec.pending)
        self.fault = ""  # why its numbers cannot be used
        self.removed = False  # its supervisor ends it and forgets it
        self.last_failure: PluginFailure | None = None  # of a start
        self.log = StderrLog()
        self.loaded = trio.Event()  # its manifest was read, and the numbers are the contract's
        self._nursery = nursery
        self._jitter, self._clock, self._tell, self._on_hold = jitter, clock, tell, on_hold
        self._on_event, self._on_report, self._open = on_event, on_report, opener
        self._queue: CallerQueue[QueuedCall] = CallerQueue()
        self._cells: dict[int, SupervisedCell] = {}
        self._changed = trio.Event()  # replaced with each change of state
        self._timer = trio.CancelScope()
        self._identity: Identity | None = None
        self._call_seconds = 0.0  # of a call, on average
        self._uptime = 0.0  # of the cells that have ended, together

    # --- the machine ----------------------------------------------------------------------------------------

    def step(self, event: LifecycleEvent) -> None:
        before = self.state
        self.state, commands = machine.step(before, event, trio.current_time())
        for command in commands:
            match command:
                case ServeCall(number):
                    call = self._queue.take()
                    call.cell = self._cells[number]
                    call.decided.set()
                case RefuseCalls():
                    for call in self._queue.clear():
                        call.failure = self._refusal(command)
                        call.decided.set()
                case OpenCell(number):
                    self.last_failure = None
                    cell = self._cells[number] = SupervisedCell(number, self.spec, self.log.written)
                    self._nursery.start_soon(self._run_cell, cell)
                case CloseCell(number):
                    cell = self._cells[number]
                    cell.leave.set()
                    if cell.opened is None:
                        cell.scope.cancel()
                case CheckHealth(number):
                    self._nursery.start_soon(self._check_health, self._cells[number])
                case Tell():
                    self._tell_of(command)
        if self.state.hold != before.hold:
            self._on_hold(self)
        if (self.state.name, self.state.reason) != (before.name, before.reason):
            self._tell(self, self._news("state", {}))
        if self.state is not before:
            self._changed.set()
            self._changed = trio.Event()
            # A timer that comes too early only looks again. So not every call has to move it.
            self._timer.deadline = min(self._timer.deadline, machine.wake_at(self.state))

    async def run_timer(self) -> None:
        while True:
            with trio.CancelScope(deadline=machine.wake_at(self.state)) as self._timer:
                await trio.sleep_forever()
            self.step_if_due()

    def step_if_due(self) -> None:
        if machine.wake_at(self.state) <= trio.current_time():
            self.step(Woke())

    async def until(self, condition: Callable[[machine.LifecycleState], bool]) -> None:
        while not condition(self.state):
            await self._changed.wait()

    async def read_manifest(self) -> Supervision:
        """The numbers for it, and `self.plugin`. A manifest with errors has default ones: its start fails."""
        spec = self.spec

        def read() -> Plugin | None:
            text = spec.path.text if isinstance(spec.path, HeldManifest) else None
            return load(os.fspath(spec.path), contract=spec.contract, server=spec.server, text=text).plugin

        self.plugin, self.fault = None, ""
        try:
            self.plugin = await trio.to_thread.run_sync(read)
            if self.plugin is not None:
                return spec.adjust(find_contract(self.plugin.contract).supervision(self.plugin))
        except ValueError as error:
            self.fault = str(error)
        except OSError:
            pass  # its start fails too, and says why
        return spec.adjust(Supervision())

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(self, request: CallRequest) -> CallResult:
        if not self.loaded.is_set():
            await self.loaded.wait()
        deadline = Deadline()
        if request.seconds is not None:
            deadline = Deadline(trio.current_time() + request.seconds, request.seconds)
        cell = await self._cell_for(request, deadline)
        began = trio.current_time()
        try:
            assert cell.opened is not None
            return await self._call_in(cell.opened, request, deadline)
        except PluginFailure as failure:
            if failure.outcome.code == "overloaded" and not isinstance(failure, Overloaded):
                overloaded = self._overloaded(failure.outcome)  # by the plugin's own limit
                overloaded.report, overloaded.invocation = failure.report, failure.invocation
                raise overloaded from None
            raise
        finally:
            took = trio.current_time() - began
            self._call_seconds += (took - self._call_seconds) / 8
            if cell.opened is not None and cell.opened.over.is_set():
                self.step(CellOver(cell.number))  # now: the caller's next call is not for this process
            self.step(Finished(cell.number))

    async def _call_in(self, opened: OpenPlugin, request: CallRequest, deadline: Deadline) -> CallResult:
        if request.kind == "list":
            return CallResult(await opened.list(request.tool), opened.identity, {}, "")
        if request.seconds is not None:
            request = request._replace(seconds=max(0.0, deadline.at - trio.current_time()))
        try:
            result = await opened.make(request)
        except (PluginError, PluginFailure) as error:
            if opened.pid is None:
                self.log.add(error.stderr.encode())
                if isinstance(error, PluginFailure) and error.report is not None:
                    self._on_report(error.report)
            raise
        if opened.pid is None:  # its process has ended with the call
            self._identity = result.identity
            self.log.add(result.stderr.encode())
        return result

    async def _cell_for(self, request: CallRequest, deadline: Deadline) -> SupervisedCell:
        """Wait for the call's turn. Raises Overloaded, Unavailable, or the failure of the plugin's start."""
        call, numbers = QueuedCall(), self.state.numbers
        waits = not machine.can_serve(self.state)
        size = (size_of(request.input) or _LARGE_INPUT) if waits and request.input is not None else 0
        most = numbers.queued if waits and not self.state.hold else len(self._queue) + 1
        try:
            left = self._queue.put(request.caller, call, size, most, numbers.queued_bytes)
        except QueueFull:
            await trio.lowlevel.checkpoint()
            raise self._overloaded(self._full()) from None
        if left is not None:
            left.failure = self._overloaded(self._full())
            left.decided.set()
            self.step(Withdrawn())
        self.step(Called())
        if call.failure is not None or not call.decided.is_set():
            try:
                with trio.move_on_at(deadline.at):
                    await call.decided.wait()
            except BaseException:
                self._give_up(request.caller, call)
                raise
        if call.failure is not None:
            raise call.failure
        if call.cell is None:
            self._give_up(request.caller, call)
            raise PluginFailure(deadline.passed("call", "the call did not begin"))
        return call.cell

    def _give_up(self, caller: str, call: QueuedCall) -> None:
        if call.cell is not None:
            self.step(Finished(call.cell.number))
        elif self._queue.remove(caller, call):
            self.step(Withdrawn())

    def _refusal(self, refused: RefuseCalls) -> PluginFailure:
        if refused.failed is not None:
            failure = self._cells[refused.failed].failure
            if failure is not None:
                return copy.copy(failure)  # each caller gets one of its own: it is raised, and grows
        return self.unavailable(refused.reason)

    def unavailable(self, reason: str) -> Unavailable:
        state = self.state
        drains = state.name == "draining" and state.hold in ("", "stopped")
        return Unavailable(self.spec.name, "draining" if drains else state.hold or state.name, reason)

    def _full(self) -> Outcome:
        message = f"{len(self._queue)} calls of the plugin {self.spec.name} wait already"
        return Outcome("overloaded", "call", message, "queue", "call again later")

    def _overloaded(self, outcome: Outcome) -> Overloaded:
        """With an estimate of when the calls that wait will have been served."""
        numbers = self.state.numbers
        at_once = numbers.sessions * (numbers.calls or numbers.queued or 1)
        estimate = self._call_seconds * (len(self._queue) + 1) / at_once
        if self.state.backoff_until is not None:
            estimate += max(0.0, self.state.backoff_until - trio.current_time())
        return Overloaded(outcome, min(max(estimate, _RETRY_LEAST), _RETRY_MOST))

    # --- cells ----------------------------------------------------------------------------------------------

    async def _run_cell(self, cell: SupervisedCell) -> None:
        opened: OpenPlugin | None = None
        hearing = trio.CancelScope()
        try:
            with cell.scope:
                spec = cell.spec
                parked = int(self.state.numbers.eager) if spec.parked is None else spec.parked
                async with self._open(spec, parked) as opened:
                    cell.opened, cell.ready_at = opened, trio.current_time()
                    self._identity = opened.identity
                    opened.on_stderr(self.log.add)
                    if self._on_event is not None:
                        self._nursery.start_soon(self._hear, opened, self._on_event, hearing)
                    self.step(CellOpened(cell.number))
                    await first_of(cell.leave, opened.over)
                    if opened.over.is_set():
                        self.step(CellOver(cell.number))
        except PluginFailure as failure:
            self.last_failure = cell.failure = failure
            cell.outcome = failure.outcome
            self.log.add(failure.stderr.encode())
            self._log_left(failure.report)
        except Exception as error:  # noqa: BLE001 -- of one plugin; the others go on
            what = "arguments" if isinstance(error, ValueError) else "internal"
            message = f"{type(error).__name__}: {error}"
            cell.outcome = Outcome(
                "launch_failed", "launch", message, what, "correct what the plugin is opened with"
            )
            self.last_failure = cell.failure = PluginFailure(cell.outcome)
        finally:
            hearing.cancel()
            if opened is not None:
                self._uptime += trio.current_time() - cell.ready_at
                cell.outcome = cell.outcome or _outcome_of(opened.report)
                self._log_left(opened.report)
                if cell.spec.secrets:
                    self.log.add(opened.stderr.encode())
            report = None if cell.failure is None else cell.failure.report
            report = report if opened is None else opened.report
            if report is not None:
                self._on_report(report)
            reason = "" if cell.outcome is None else f"{cell.outcome.code}: {cell.outcome.message}"
            self.step(CellEnded(cell.number, reason or "it ended", self._jitter()))
            del self._cells[cell.number]

    def _log_left(self, report: dict[str, Any] | None) -> None:
        """What it left for somebody to look at goes to its log: its folders may be somebody's projects."""
        if report is not None and report.get("obeyed") is not None:
            for line in read_findings(report["obeyed"]).lines():
                self.log.add(f"runner: {line}\n".encode())
        if report is not None and report.get("staged") is not None:
            waiting = staged_note(report["staged"])
            self.log.add(f"runner: {waiting.message}; {waiting.hint}\n".encode())

    async def _hear(self, opened: OpenPlugin, on_event: OnEvent, scope: trio.CancelScope) -> None:
        with scope:
            async for event in opened.events():
                told = on_event(self.spec.name, event)
                if told is not None:
                    await told

    async def _check_health(self, cell: SupervisedCell) -> None:
        numbers, opened = self.state.numbers, cell.opened
        assert opened is not None
        event: LifecycleEvent = HealthAnswered(cell.number)
        try:
            await opened.call(numbers.health_call, kind="method", seconds=numbers.health_answer)
        except PluginError:
            pass  # an error is an answer
        except PluginFailure as failure:
            event = HealthMissed(cell.number, f"{failure.outcome.code}: {failure.outcome.message}")
        self.step(event)

    # --- what others see ------------------------------------------------------------------------------------

    def status(self) -> Status:
        state = self.state
        return Status(
            name=self.spec.name,
            contract="" if self.plugin is None else self.plugin.contract,
            state=state.name,
            reason=state.reason,
            since=self._clock() - (trio.current_time() - state.since),
            attempts=state.attempts,
            restarts=state.restarts,
            sessions=len(state.cells),
            parked=sum(each.parked for each in self.sessions),
            in_flight=state.in_flight,
            queued=state.waiting,
            pids=self.pids,
            identity=self._identity,
            most_in_flight=state.numbers.calls * state.numbers.sessions,
            most_queued=state.numbers.queued,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        opened = [cell.opened for cell in self._cells.values() if cell.opened is not None]
        return tuple(each.pid for each in opened if each.pid is not None)

    @property
    def sessions(self) -> list[OpenPlugin]:
        """Those that can be called."""
        opened = [cell.opened for cell in self._cells.values() if cell.opened is not None]
        return [each for each in opened if not each.over.is_set()]

    def tell_restarted(self, uptime: float) -> None:
        """Somebody has restarted it, and it is ready again."""
        self._tell(self, self._news("restarted", self._facts(None, uptime=uptime)))

    @property
    def uptime(self) -> float:
        """Seconds since the oldest of its cells is ready."""
        ready = [cell.ready_at for cell in self._cells.values() if cell.opened is not None]
        return trio.current_time() - min(ready) if ready else 0.0

    def _tell_of(self, told: Tell) -> None:
        facts = self._facts(self._cells.get(told.cell), attempt=told.attempt, seconds=told.seconds)
        self._tell(self, self._news(told.what, facts))

    def _facts(self, cell: SupervisedCell | None, **more: float) -> dict[str, Any]:
        now = trio.current_time()
        living = sum(
            now - each.ready_at
            for each in self._cells.values()
            if each.opened is not None and each is not cell
        )
        return {
            "exit_code": _exit_code(None if cell is None else cell.outcome),
            "stderr": self.log.since(0 if cell is None else cell.log_start)[-_STDERR_CHARACTERS:],
            "total_uptime": self._uptime + living,
            "pid": next(iter(self.pids), None),
            "time": self._clock(),
            **more,
        }

    def _news(self, what: str, facts: Mapping[str, Any]) -> LifecycleNews:
        return LifecycleNews(self.spec.name, self.state.name, self.state.reason, self._clock(), what, facts)


def _outcome_of(report: dict[str, Any] | None) -> Outcome | None:
    outcome = (report or {}).get("outcome")
    if not isinstance(outcome, dict):
        return None
    return Outcome(outcome["code"], outcome["phase"], outcome["message"], outcome["cause"])


def _exit_code(outcome: Outcome | None) -> int:
    found = re.fullmatch(r"exit:([0-9]+)", "" if outcome is None else outcome.cause)
    return int(found[1]) if found else -1
