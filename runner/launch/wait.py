"""Wait for a cell to end, or for a reason to end it.

Reasons are orders (signals to the runner, or bytes from a session), clocks, limits that were exceeded, and
the end of the process that started the runner. There are no threads and no sleeps: one poll over all
descriptors, so that no event is missed.

A wait is a generator: it yields what it needs, and is sent what is ready. `drive` polls for one of them;
runner/launch/remote/shared_monitor.py polls for all sessions of a host at once.
"""

from __future__ import annotations

import math
import select
import time

from sandbox.cell.cell import KILL_SECONDS, Cell, Exit
from sandbox.limits.meter import KERNEL_MEMORY, LIFTED, VIOLATION, Meter
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Generator, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from typing import TypeVar

    from runner.launch.inspect.inspection import Breach
    from runner.launch.orders import Orders

    Result = TypeVar("Result")

# How long a plugin may take to end after it got a signal, before all its processes are killed. Its `teardown`
# limit may say otherwise.
GRACE_SECONDS = 2.0
# How long bwrap and all its children may take to die of SIGKILL, before the cell's init is killed too. Then
# nobody reports what was used.
BWRAP_KILL_SECONDS = 1.0

_BWRAP_EXIT_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 86400.0  # poll(2) counts milliseconds in an int: 24 days

Reason = Literal["deadline", "launch", "limit", "violation", "signal", "caller_died"]


class Need(NamedTuple):
    """What a wait needs to continue: one of these descriptors is ready, or the time has come."""

    fds: Mapping[int, int]  # with the events to poll for
    until: float = math.inf  # on the monotonic clock


Ready = Mapping[int, int]  # the descriptors that are ready, with their events
Steps = Generator[Need, Ready, "Result"]


def milliseconds_until(until: float) -> int | None:
    """How long poll(2) may wait; None: for ever."""
    if until == math.inf:
        return None
    return math.ceil(min(max(0.0, until - time.monotonic()), _LONGEST_POLL_SECONDS) * 1000)


def drive(steps: Steps[Result]) -> Result:
    """Run a generator to its end, and poll for it."""
    try:
        need = next(steps)
        while True:
            try:
                ready = _poll(need)
            except BaseException as error:  # noqa: BLE001 -- raised where it was waited
                need = steps.throw(error)
            else:
                need = steps.send(ready)
    except StopIteration as stop:
        result: Result = stop.value
        return result


def _poll(need: Need) -> Ready:
    poll = select.poll()
    for fd, events in need.fds.items():
        poll.register(fd, events)
    return dict(poll.poll(milliseconds_until(need.until)))


class End(NamedTuple):
    exit: Exit
    reason: Reason | None  # why the runner ended it; None: it ended by itself
    signal: int | None  # the signal that was the reason
    forced: bool  # it was killed
    limit: str | None = None  # the limit that was exceeded
    late: tuple[str, ...] = ()  # limits that were found exceeded after it had ended
    detail: str = ""  # more about the limit
    expired_clock: Literal["deadline", "teardown"] | None = None  # the clock that made the runner kill it
    breach: Breach | None = None  # of its contract, if the plugin was inspected

    @property
    def lifted(self) -> tuple[str, ...]:
        """The limits that somebody lifted: seen while it ran, or at its end."""
        return tuple(self.detail.split(", ")) if self.limit == LIFTED else self.exit.counters.lifted


class Clocks(NamedTuple):
    """Times on the monotonic clock. `teardown` is in seconds, from the moment the plugin is asked to end."""

    deadline: float | None = None
    launch: float | None = None
    teardown: float | None = None


def wait(cell: Cell, orders: Orders, caller: int | None, clocks: Clocks, meters: Sequence[Meter] = ()) -> End:
    """Wait until all processes of the cell have ended, or cannot be killed."""
    return drive(wait_steps(cell, orders, caller, clocks, meters))


def wait_steps(
    cell: Cell, orders: Orders, caller: int | None, clocks: Clocks, meters: Sequence[Meter]
) -> Steps[End]:
    """`wait`, step by step."""
    return _Watch(cell, orders, caller, clocks, meters).watch()


class _Watch:
    """The state of one wait. The first reason to end the plugin stays the reason."""

    def __init__(
        self, cell: Cell, orders: Orders, caller: int | None, clocks: Clocks, meters: Sequence[Meter]
    ) -> None:
        self.cell = cell
        self.orders: Orders | None = orders
        self.caller = caller
        self.meters = meters
        self.teardown = GRACE_SECONDS if clocks.teardown is None else clocks.teardown
        self.until = self.deadline = clocks.deadline
        self.launch = clocks.launch
        self.expired_clock: Literal["deadline", "teardown"] | None = None
        self.reason: Reason | None = None
        self.number: int | None = None
        self.limit: str | None = None
        self.detail = ""
        self.steps = 0  # escalation: 1 the program was ended, or ended by itself; 2 the cell was killed
        self.forced = False
        self.over = cell.over_fd

    def watch(self) -> Steps[End]:
        while True:
            ready = yield self._need()
            now = time.monotonic()
            if self.cell.pidfd in ready:
                ended = self.cell.wait()
                self.reason = self.reason or self._missed(ended, now)
                return self._end(ended)
            if self.over is not None and self.over in ready:
                self.over = None
                self._await_leftovers(now)
            if self.caller is not None and self.caller in ready:
                self.caller = None
                if not self.has_ended:
                    self._finish("caller_died")  # at once: nobody reads its output any more
            elif self.orders is not None and self.orders.fd in ready:
                self._take_orders(self.orders, now)
            for meter in self.meters:
                ran_out = meter.look(ready, now)
                if ran_out == VIOLATION:
                    self._finish("violation")
                    continue
                # Limits also hold during the grace after a signal.
                if ran_out is not None and self.limit is None:
                    self.limit, self.detail = ran_out, meter.why
                    self._finish("limit")
                    if ran_out == KERNEL_MEMORY and self.steps == 1:
                        self._escalate()  # at once: until its last process is gone, it may take more
            if self.launch is not None and now >= self.launch:
                self.launch = None
                if not self.cell.runs() and not self._is_over():
                    self._finish("launch")
            if self.until is not None and now >= self.until and self._escalate():
                return self._end(self.cell.give_up())

    def _take_orders(self, orders: Orders, now: float) -> None:
        signals = orders.read_orders()
        if orders.over:
            self.orders = None  # at the end of the file a descriptor is always readable
            if not self.has_ended:
                self._finish("caller_died")
        elif signals and not self.has_ended:
            self._take_signals(signals, now)

    def _is_over(self) -> bool:
        """Whether the program has already started and ended. Waits a moment for bwrap, which ends shortly
        after the program."""
        if self.over is None:
            return self.cell.over_fd is not None
        look = select.poll()
        look.register(self.over, 0)
        return bool(look.poll(_BWRAP_EXIT_SECONDS * 1000))

    @property
    def has_ended(self) -> bool:
        """Whether the program ended by itself. Later events are then not the reason of its end."""
        return self.over is None and self.cell.over_fd is not None and self.reason is None

    def _need(self) -> Need:
        wanted = {self.cell.pidfd: select.POLLIN}
        if self.orders is not None:
            wanted[self.orders.fd] = select.POLLIN
        if self.caller is not None:
            wanted[self.caller] = select.POLLIN
        if self.over is not None:
            wanted[self.over] = 0  # poll reports a hang-up without being asked
        for meter in self.meters:
            wanted.update(meter.interest())
        next_look = min((meter.due for meter in self.meters), default=math.inf)
        return Need(wanted, min(self.until or math.inf, self.launch or math.inf, next_look))

    def _take_signals(self, signals: Sequence[int], now: float) -> None:
        """Pass a signal on to the program. On a second signal, on SIGKILL, or if the program does not run
        yet, end the plugin at once."""
        at_once = self.reason is not None or len(signals) > 1 or signal.SIGKILL in signals
        self.number = self.number or signals[0]
        if at_once or not self.cell.signal_program(signals[0]):
            self._finish("signal")
            return
        self.reason = "signal"
        # A deadline that comes sooner still holds.
        self.until = min(self.until or math.inf, now + self.teardown)

    def _finish(self, reason: Reason) -> None:
        self.reason = self.reason or reason
        self.forced = True
        if self.steps == 0:
            self.cell.end()
            self.steps, self.until = 1, time.monotonic() + BWRAP_KILL_SECONDS

    def _await_leftovers(self, now: float) -> None:
        """The program has ended, and bwrap's init kills the processes it left. Wait half as long as a kill
        may take, then kill the cell."""
        if self.steps == 0:
            self.steps, self.launch = 1, None
            self.until = min(self.until or math.inf, now + KILL_SECONDS / 2)

    def _escalate(self) -> bool:
        """A clock ran out: take the next step of the escalation. True if there is none left."""
        if self.steps == 0:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            self.expired_clock = "deadline" if late else "teardown"
            self._finish("deadline")
        elif self.steps == 1:
            self.forced = True
            self.cell.kill()
            self.steps, self.until = 2, time.monotonic() + KILL_SECONDS
        else:
            return True
        return False

    def _missed(self, ended: Exit, now: float) -> Reason | None:
        """The clock that had run out when a cell ended in which nothing ran. `spawn` waits no longer than
        that for the cell's init, which ends when nobody waits for it."""
        if ended.reached_exec or ended.unexecuted is not None or ended.complaint:
            return None
        if ended.code is not None or ended.signal is not None:
            return None
        if self.launch is not None and now >= self.launch:
            return "launch"
        return "deadline" if self.deadline is not None and now >= self.deadline else None

    def _end(self, ended: Exit) -> End:
        reason: Reason | None = self.reason or ("deadline" if ended.expired else None)
        forced = self.forced or ended.expired
        return End(
            ended,
            reason,
            self.number,
            forced,
            self.limit,
            detail=self.detail,
            expired_clock=self.expired_clock,
        )
