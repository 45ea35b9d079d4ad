"""The lifecycle of one plugin as a pure machine: `step(state, event, now) -> (state, commands)`.

    idle ──call or eager──► starting ──opened──► ready ──idle, stop or reload──► draining ──► idle or stopped
                               ▲  │                │
                   pause is over  └──── failed ────┴──► backoff, or quarantined until `reset`

It has no clock, no chance and no I/O: `now` and chance come with the event. The supervisor carries out the
commands, and calls `step` with Woke when `wake_at` has come. Calls are only counted here: which one is next
is the business of the queue (queue.py). Each Called is followed by one ServeCall, one place in a RefuseCalls,
or the Withdrawn of its caller.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from runner.supervision import Supervision

# Why nothing is opened: no approval covers the plugin; it failed too often; somebody stopped it.
Hold = Literal["", "pending", "quarantined", "stopped"]
StateName = Literal["idle", "starting", "ready", "backoff", "quarantined", "pending", "draining", "stopped"]
STATE_NAMES: tuple[StateName, ...] = get_args(StateName)
# "leaving": it finishes its calls and gets no further one. "ending": CloseCell was commanded, or it is over.
Stage = Literal["starting", "ready", "leaving", "ending"]


class LiveCell(NamedTuple):
    """A cell from OpenCell to CellEnded."""

    number: int
    stage: Stage = "starting"
    calls: int = 0  # in flight
    ready_at: float = math.nan  # when it was opened
    used_at: float = math.nan  # when a call last began or ended
    seen_at: float = math.nan  # when it last showed that it lives
    checking: bool = False  # a health check is under way
    misses: int = 0  # health checks in a row without an answer
    fault: str = ""  # why it is ended, if that counts as a failure
    failed: bool = False  # it ended by itself


class LifecycleState(NamedTuple):
    numbers: Supervision
    since: float  # when it got the name it has
    cells: tuple[LiveCell, ...] = ()
    waiting: int = 0  # calls in the queue
    hold: Hold = ""
    reason: str = ""  # of the hold, or of the last failure
    pending: str = ""  # why it may not start, also after somebody has stopped it
    wanted: bool = False  # a cell is to be opened although no call waits
    backoff_until: float | None = None
    drain_until: float | None = None  # cells that leave are ended then
    attempts: int = 0  # failures in a row
    failures: tuple[float, ...] = ()  # when, as far back as the numbers ask
    restarts: int = 0  # cells that were opened after a failure
    was_ready: bool = False  # it has come up at least once
    last_cell: int = 0

    @property
    def name(self) -> StateName:
        stages = [cell.stage for cell in self.cells]
        if "ready" in stages:
            return "ready"
        if "starting" in stages:
            return "starting"
        if stages:
            return "draining"
        return self.hold or ("idle" if self.backoff_until is None else "backoff")

    @property
    def in_flight(self) -> int:
        return sum(cell.calls for cell in self.cells)


def new_state(numbers: Supervision, now: float, pending: str = "") -> LifecycleState:
    """A plugin that was just added. `step` with Woke starts an eager one. `pending`: why it may not start."""
    hold: Hold = "pending" if pending else ""
    return LifecycleState(numbers, now, hold=hold, reason=pending, pending=pending, wanted=numbers.eager)


# --- events -------------------------------------------------------------------------------------------------


class Called(NamedTuple):
    """A call was put into the queue."""


class Withdrawn(NamedTuple):
    """A call left the queue before it was served: its caller gave it up."""


class Finished(NamedTuple):
    """A call that was served has ended, in whatever way."""

    cell: int


class CellOpened(NamedTuple):
    cell: int


class CellEnded(NamedTuple):
    """A cell has ended, or could not be opened."""

    cell: int
    reason: str
    chance: float = 0.0  # from 0 to 1, for the jitter


class CellOver(NamedTuple):
    """A plugin has ended, or can be called no more. Its cell ends soon, and CellEnded says why."""

    cell: int


class Woke(NamedTuple):
    """The time of `wake_at` has come."""


class HealthAnswered(NamedTuple):
    cell: int


class HealthMissed(NamedTuple):
    cell: int
    reason: str


class StartAsked(NamedTuple):
    """Start it now. A plugin that is pending or quarantined stays so."""


class StopAsked(NamedTuple):
    """End it, and start it no more."""

    reason: str
    seconds: float | None = None  # for calls in flight; None: the plugin's own number


class ResetAsked(NamedTuple):
    """Forget the failures, and end a quarantine."""


class ReloadAsked(NamedTuple):
    """End its cells and start it again, with these numbers. One that was stopped stays so."""

    numbers: Supervision
    pending: str = ""  # why it may not start
    # Of a plugin that was just added: "stopped" or "quarantined", as it was in an earlier life of its
    # supervisor, and why.
    hold: Hold = ""
    reason: str = ""


LifecycleEvent = (
    Called
    | Withdrawn
    | Finished
    | CellOpened
    | CellEnded
    | CellOver
    | Woke
    | HealthAnswered
    | HealthMissed
    | StartAsked
    | StopAsked
    | ResetAsked
    | ReloadAsked
)

# --- commands -----------------------------------------------------------------------------------------------


class OpenCell(NamedTuple):
    cell: int


class CloseCell(NamedTuple):
    """Shut it down. Calls that are still in flight end with a failure."""

    cell: int


class ServeCall(NamedTuple):
    """Take the next call from the queue and make it in this cell."""

    cell: int


class RefuseCalls(NamedTuple):
    """Answer all calls in the queue. `failed`: the cell that was to serve them could not be opened; None: the
    plugin is held, and `hold` and `reason` say why."""

    calls: int  # how many
    hold: Hold
    reason: str
    failed: int | None = None


class CheckHealth(NamedTuple):
    cell: int


class Tell(NamedTuple):
    """Something that programs which watch the plugin may want to know, beside its state."""

    what: Literal["crashed", "respawning", "respawned", "gave_up"]
    cell: int
    attempt: int = 0
    seconds: float = 0.0  # the pause before a respawn


Command = OpenCell | CloseCell | ServeCall | RefuseCalls | CheckHealth | Tell
Commands = tuple[Command, ...]


# --- the machine --------------------------------------------------------------------------------------------


def step(state: LifecycleState, event: LifecycleEvent, now: float) -> tuple[LifecycleState, Commands]:
    """The state after an event, and what has to be done, in this order."""
    before = state.name
    state, commands = _take(state, event, now)
    state, more = _settle(state, now)
    if state.name != before:
        state = state._replace(since=now)
    return state, (*commands, *more)


def wake_at(state: LifecycleState) -> float:
    """When `step` has to be called with Woke at the latest; infinite: an event comes first."""
    times = [math.inf if state.backoff_until is None else state.backoff_until]
    numbers = state.numbers
    for cell in state.cells:
        if cell.stage == "leaving" and state.drain_until is not None:
            times.append(state.drain_until)
        if cell.stage == "ready":
            times += [_reap_at(cell, numbers), _check_at(cell, numbers)]
            if state.attempts:
                times.append(cell.ready_at + numbers.healthy)
    return min(times)


def _reap_at(cell: LiveCell, numbers: Supervision) -> float:
    return cell.used_at + numbers.idle if numbers.idle and not cell.calls else math.inf


def _check_at(cell: LiveCell, numbers: Supervision) -> float:
    """A plugin that works on a call may be unable to answer, and will show by the call that it lives."""
    if not numbers.health_call or cell.checking or cell.calls:
        return math.inf
    return cell.seen_at + numbers.health_interval


def can_serve(state: LifecycleState) -> bool:
    """Whether the next call would begin at once."""
    return not state.hold and not state.waiting and _free_cell(state) is not None


def _take(state: LifecycleState, event: LifecycleEvent, now: float) -> tuple[LifecycleState, Commands]:
    match event:
        case Called():
            return state._replace(waiting=state.waiting + 1), ()
        case Withdrawn():
            return state._replace(waiting=max(0, state.waiting - 1)), ()
        case Woke():
            return _woke(state, now)
        case StartAsked():
            if state.hold in ("pending", "quarantined"):
                return state, ()
            if state.pending:  # it was stopped since
                return state._replace(hold="pending", reason=state.pending), ()
            reason = "" if state.hold else state.reason
            wanted = not _is_serving(state)
            return state._replace(hold="", reason=reason, backoff_until=None, wanted=wanted), ()
        case StopAsked(reason, seconds):
            held = state._replace(hold="stopped", reason=reason, backoff_until=None)
            return _leave(held, now + (state.numbers.drain if seconds is None else seconds)), ()
        case ResetAsked():
            cleared = state._replace(attempts=0, failures=(), backoff_until=None)
            if state.hold == "quarantined" or state.name == "backoff":
                # It may be pending since its quarantine was taken over from before.
                hold: Hold = "pending" if state.pending else ""
                cleared = cleared._replace(hold=hold, reason=state.pending, wanted=state.numbers.eager)
            return cleared, ()
        case ReloadAsked():
            return _reloaded(state, event, now), ()
    cell = next((cell for cell in state.cells if cell.number == event.cell), None)
    if cell is None:
        return state, ()  # it has ended, and so has all that there was to say about it
    match event:
        case Finished():
            freed = cell._replace(calls=cell.calls - 1, used_at=now, seen_at=now)
            return _with(state, freed), ()
        case CellOpened():
            return _opened(state, cell, now)
        case CellOver():
            failed = cell.failed or cell.stage in ("starting", "ready")  # several may have seen it
            return _with(state, cell._replace(stage="ending", failed=failed)), ()
        case CellEnded(_, reason, chance):
            return _ended(state, cell, reason, chance, now)
        case HealthAnswered():
            return _with(state, cell._replace(checking=False, misses=0, seen_at=now)), ()
        case HealthMissed(_, reason):
            misses = cell.misses + 1
            fault = reason if misses >= state.numbers.health_misses and cell.stage == "ready" else cell.fault
            missed = cell._replace(checking=False, misses=misses, seen_at=now, fault=fault)
            return _with(state, missed), ()


def _settle(state: LifecycleState, now: float) -> tuple[LifecycleState, Commands]:
    """What follows from a state, whichever event led to it."""
    commands: list[Command] = []
    for cell in state.cells:
        if (cell.stage == "leaving" and not cell.calls) or (cell.fault and cell.stage != "ending"):
            commands.append(CloseCell(cell.number))
            state = _with(state, cell._replace(stage="ending"))
    if state.hold:
        if state.waiting:
            commands.append(RefuseCalls(state.waiting, state.hold, state.reason))
        return state._replace(waiting=0, wanted=False), tuple(commands)
    while state.waiting and (free := _free_cell(state)) is not None:
        commands.append(ServeCall(free.number))
        state = _with(state, free._replace(calls=free.calls + 1, used_at=now))
        state = state._replace(waiting=state.waiting - 1)
    while _needs_cell(state):
        number = state.last_cell + 1
        commands.append(OpenCell(number))
        state = state._replace(
            cells=(*state.cells, LiveCell(number)),
            last_cell=number,
            wanted=False,
            restarts=state.restarts + (state.attempts > 0),
        )
    return state, tuple(commands)


def _needs_cell(state: LifecycleState) -> bool:
    stages = [cell.stage for cell in state.cells]
    if state.backoff_until is not None or "leaving" in stages or "ending" in stages:
        return False  # a cell that ends may hold what the next one needs: a lock on its files
    if len(stages) >= state.numbers.sessions:
        return False
    room = stages.count("starting") * state.numbers.calls if state.numbers.calls else math.inf
    return state.waiting > (room if "starting" in stages else 0) or (state.wanted and not stages)


def _free_cell(state: LifecycleState) -> LiveCell | None:
    """The ready cell with the fewest calls, if it may have another."""
    most = state.numbers.calls or math.inf
    able = [cell for cell in state.cells if cell.stage == "ready" and cell.calls < most]
    return min(able, key=lambda cell: cell.calls, default=None)


def _is_serving(state: LifecycleState) -> bool:
    return any(cell.stage in ("starting", "ready") for cell in state.cells)


def _with(state: LifecycleState, changed: LiveCell) -> LifecycleState:
    cells = (changed if cell.number == changed.number else cell for cell in state.cells)
    return state._replace(cells=tuple(cells))


def _leave(state: LifecycleState, until: float) -> LifecycleState:
    """All cells finish their calls and end, `until` then at the latest. One that still starts has none."""
    cells = (cell if cell.stage == "ending" else cell._replace(stage="leaving") for cell in state.cells)
    return state._replace(cells=tuple(cells), drain_until=until)


def _reloaded(state: LifecycleState, event: ReloadAsked, now: float) -> LifecycleState:
    again = event.numbers.eager or _is_serving(state)
    fresh = state._replace(numbers=event.numbers, attempts=0, failures=(), backoff_until=None)
    fresh = fresh._replace(was_ready=False, wanted=again, pending=event.pending)
    if event.hold:
        fresh = fresh._replace(hold=event.hold, reason=event.reason)
    elif state.hold != "stopped":
        fresh = fresh._replace(hold="pending" if event.pending else "", reason=event.pending)
    return _leave(fresh, now + state.numbers.drain)


def _opened(state: LifecycleState, cell: LiveCell, now: float) -> tuple[LifecycleState, Commands]:
    if cell.stage != "starting":
        return state, ()  # it was told to end meanwhile
    opened = cell._replace(stage="ready", ready_at=now, used_at=now, seen_at=now)
    told = (Tell("respawned", cell.number, state.attempts),) if state.attempts else ()
    return _with(state._replace(was_ready=True), opened), told


def _ended(
    state: LifecycleState, cell: LiveCell, reason: str, chance: float, now: float
) -> tuple[LifecycleState, Commands]:
    state = state._replace(cells=tuple(each for each in state.cells if each.number != cell.number))
    if cell.stage == "leaving" or (cell.stage == "ending" and not (cell.fault or cell.failed)):
        return state, ()
    numbers, reason = state.numbers, cell.fault or reason
    before = 0 if cell.ready_at + numbers.healthy <= now else state.attempts
    attempts = before + 1
    failures = (*(at for at in state.failures if at + numbers.within > now), now)
    failures = failures[-numbers.failures :] if numbers.failures else ()
    state = state._replace(attempts=attempts, failures=failures, reason=reason)
    told: list[Command] = [Tell("crashed", cell.number, attempts)]
    if why := _why_given_up(state):
        state = _leave(state._replace(hold="quarantined", reason=f"{reason} ({why})"), now + numbers.drain)
        return state, (*told, Tell("gave_up", cell.number, attempts))
    if cell.stage == "starting" and state.waiting and not _is_serving(state):
        # Each call waits for one attempt at most. Its caller knows best whether to come again.
        told.append(RefuseCalls(state.waiting, "", reason, cell.number))
        state = state._replace(waiting=0)
    pause = numbers.pause(attempts, chance)
    wanted = numbers.eager and not _is_serving(state)
    told.append(Tell("respawning", cell.number, attempts, pause))
    return state._replace(backoff_until=now + pause, wanted=wanted), tuple(told)


def _why_given_up(state: LifecycleState) -> str:
    """Returns why a plugin that has just failed is not started again, or ''."""
    numbers = state.numbers
    if not numbers.respawn:
        return "it is not to be started again after a failure"
    if not state.was_ready and not numbers.retry_first:
        return "it never came up, and is not started again after that"
    if numbers.attempts and state.attempts > numbers.attempts:
        return f"it was started again {numbers.attempts} times in a row"
    if numbers.failures and len(state.failures) >= numbers.failures:
        return f"it failed {numbers.failures} times within {numbers.within:g} seconds"
    return ""


def _woke(state: LifecycleState, now: float) -> tuple[LifecycleState, Commands]:
    commands: list[Command] = []
    numbers = state.numbers
    if state.backoff_until is not None and state.backoff_until <= now:
        state = state._replace(backoff_until=None)
    for cell in state.cells:
        if cell.stage == "leaving" and state.drain_until is not None and state.drain_until <= now:
            commands.append(CloseCell(cell.number))
            state = _with(state, cell._replace(stage="ending"))
        if cell.stage != "ready":
            continue
        if state.attempts and cell.ready_at + numbers.healthy <= now:
            state = state._replace(attempts=0)
        if _reap_at(cell, numbers) <= now:
            state = _with(state, cell._replace(stage="leaving"))
        elif _check_at(cell, numbers) <= now:
            commands.append(CheckHealth(cell.number))
            state = _with(state, cell._replace(checking=True))
    return state, tuple(commands)
