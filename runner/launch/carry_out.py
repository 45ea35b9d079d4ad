"""Carry out a plan: from Planned to the end of the plugin's last process.

Only what most launches need is imported here, because a launch from a stored plan begins here. The words for
failures, and what few plugins have (guards, memory files, an io limit), are imported where they occur.
"""

from __future__ import annotations

import time

from runner.launch.acquire import acquire, require_contents
from runner.launch.sources import Sources
from runner.launch.stages import Ended, Stopwatch
from runner.launch.start import settle, start
from runner.launch.wait import wait_steps
from runner.outcome import EXEC_DEADLINE, GOOD, Failure, Outcome
from sandbox.speed.typed import TYPE_CHECKING, Mapping, Protocol

if TYPE_CHECKING:
    from runner.launch.acquire import Acquired
    from runner.launch.orders import Orders
    from runner.launch.stages import Planned, Stage, Started
    from runner.launch.stdio import Plumbing
    from runner.launch.stored.store import PlanWriter
    from runner.launch.wait import End, Steps
    from sandbox.cell.contents import Contents
    from sandbox.spec import Limits
    from sandbox.speed.scopes import AbstractContextManager


class LaunchHost(Protocol):
    """The side that asked for the launch: `runner exec`, or a monitor."""

    @property
    def caller(self) -> int | None:
        """A descriptor that becomes readable when the asking process has ended."""
        ...

    def see_ready(self, planned: Planned) -> None:
        """Everything is decided and acquired; nothing runs yet."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it has seen that."""
        ...

    def watch_orders(self) -> AbstractContextManager[Orders]:
        """From just before the start: orders to end the plugin."""
        ...

    def connect(self, acquired: Acquired) -> AbstractContextManager[Plumbing]:
        """The plugin's standard streams."""
        ...

    def see_started(self, started: Started) -> Started:
        """The plugin runs. The answer is what is waited for: its clocks may be changed."""
        ...


class CalledOff(BaseException):
    """Raised by a host that wants no launch any more, at any moment before the start."""

    stage: Stage | None = None  # the last that was reached


def plan_steps(
    planned: Planned,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    sources: Sources | None = None,
    watch: Stopwatch | None = None,
    contents: Contents | None = None,
    writer: PlanWriter | None = None,
) -> Steps[Ended]:
    """Carry out a plan. A generator: `drive` runs it to its end (runner/launch/wait.py). Raises Failure.

    `sources`: those of a plan that was made in this process just now. `writer`: stores the plan once it runs.
    """
    watch = watch or Stopwatch()
    stage: Stage = planned
    try:
        if contents or planned.plan.memory_files:
            require_contents(planned, contents)
        with sources or Sources() as held, acquire(planned, environ, held) as acquired:
            stage = planned = acquired.planned._replace(timings=watch.lap("plan"))
            acquired = acquired._replace(planned=planned)
            host.see_ready(planned)
            deadline = planned.plan.limits.deadline
            if deadline is not None and time.monotonic() >= began + deadline:
                from runner.launch.verdict import TIMEOUT

                raise Failure(TIMEOUT, EXEC_DEADLINE)  # planning alone took that long
            if writer is not None:
                writer.prepare()
            with host.watch_orders() as orders, start(acquired, began, host.connect, contents) as started:
                stage = started = host.see_started(started._replace(timings=watch.lap("launch")))
                if writer is not None:
                    writer.store()
                end = yield from wait_steps(started.cell, orders, host.caller, started.clocks, started.meters)
                stop = [fd for fd in (orders.fd, host.caller) if fd is not None]
                end, writable = settle(started, end, stop)
                watch.lap("run")
        return Ended(started, end, writable, watch.lap("teardown"))
    except CalledOff as called:
        called.stage = stage
        raise
    except Failure as failure:
        failure.stage = failure.stage or stage
        raise
    except Exception as error:
        from runner.launch.failures import failure_of  # most launches need no words for what went wrong

        raise failure_of(error, stage) from error


def judge_end(end: End, limits: Limits) -> tuple[Outcome, int]:
    """What an ending means, and the exit status `runner exec` passes on."""
    if end.exit.code == 0 and _is_unremarkable(end):
        return GOOD, 0
    from runner.launch.verdict import judge

    return judge(end, limits)


def _is_unremarkable(end: End) -> bool:
    """Whether the program ended by itself, and nothing was found out about it meanwhile."""
    nothing = end.reason is None and end.breach is None and end.limit is None and not end.late
    return nothing and not end.exit.counters.oom_kills and not end.lifted and end.exit.unexecuted is None
