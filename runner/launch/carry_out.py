"""Carry out a plan: from Planned to the end of the plugin's last process.

A launch from a stored plan starts here, so only what most launches need is imported at the top. Messages for
failures, and what few plugins have (guards, memory files, an io limit), are imported where they are used.
"""

from __future__ import annotations

import time

from runner.launch.acquire import acquire, require_contents, searched_afterwards
from runner.launch.finish import finish
from runner.launch.sources import Sources
from runner.launch.stages import Ended, Stopwatch
from runner.launch.start import start
from runner.launch.wait import wait_steps
from runner.outcome import EXEC_DEADLINE, GOOD, Failure, Outcome
from sandbox.speed.typed import TYPE_CHECKING, Mapping, Protocol

if TYPE_CHECKING:
    from runner.launch.acquire import Acquired
    from runner.launch.orders import Orders
    from runner.launch.parked import Releases
    from runner.launch.stages import Planned, Stage, Started
    from runner.launch.stdio import Plumbing
    from runner.launch.stored.store import PlanWriter
    from runner.launch.wait import End, Steps
    from sandbox.cell.contents import Contents
    from sandbox.spec import Limits
    from sandbox.speed.scopes import AbstractContextManager


class LaunchHost(Protocol):
    """The code that asked for the launch: `runner exec`, or a monitor."""

    @property
    def caller(self) -> int | None:
        """A descriptor that becomes readable when the process that asked for the launch has ended."""
        ...

    def see_ready(self, planned: Planned) -> None:
        """Called when everything is decided and acquired, and nothing runs yet."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether `see_ready` was called."""
        ...

    def watch_orders(self) -> AbstractContextManager[Orders]:
        """Orders to end the plugin, from just before its start."""
        ...

    def connect(self, acquired: Acquired) -> AbstractContextManager[Plumbing]:
        """The plugin's standard streams."""
        ...

    def see_started(self, started: Started) -> Started:
        """Called when the plugin runs. Returns `started`, possibly with other clocks."""
        ...


class CalledOff(BaseException):
    """Raised by a host that cancels the launch before the start."""

    stage: Stage | None = None  # the last that was reached


def plan_steps(
    planned: Planned,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    sources: Sources,
    watch: Stopwatch | None = None,
    contents: Contents | None = None,
    writer: PlanWriter | None = None,
    releases: Releases | None = None,
) -> Steps[Ended]:
    """Carry out a plan. A generator: `drive` runs it to its end (runner/launch/wait.py). Raises Failure.

    `sources`: those of the plan, held open until the end. `writer`: stores the plan once it runs.
    `releases`: the cell is parked until they let the plugin start.
    """
    watch = watch or Stopwatch()
    stage: Stage = planned
    released: Started | None = None
    try:
        egress = planned.plan.egress
        if egress is not None and egress.broker is not None and (contents is None or not contents.hidden):
            from runner.launch.command import environ_of_host
            from runner.launch.hidden import literal_values, with_hidden

            given = environ_of_host(planned.invocation.command, environ)
            contents = with_hidden(contents, egress.broker, given, literal_values(planned), environ)
        if contents or planned.plan.memory_files:
            require_contents(planned, contents)
        with sources, acquire(planned, environ, sources) as acquired:
            stage = planned = acquired.planned._replace(timings=watch.lap("plan"))
            acquired = acquired._replace(planned=planned)
            host.see_ready(planned)
            deadline = planned.plan.limits.deadline
            if deadline is not None and releases is None and time.monotonic() >= began + deadline:
                from runner.launch.verdict import TIMEOUT

                raise Failure(TIMEOUT, EXEC_DEADLINE)  # planning alone took too long
            if writer is not None:
                writer.prepare()
            with (
                host.watch_orders() as orders,
                searched_afterwards(acquired),  # within the orders: no signal ends the runner half-way
                start(acquired, began, host.connect, contents, parks=releases is not None) as started,
            ):
                stage = started = started._replace(timings=watch.lap("launch"))
                released = started
                if releases is not None:
                    from runner.launch.parked import parked_steps

                    released = yield from parked_steps(started, releases, host.caller, watch)
                if released is not None:
                    stage = started = host.see_started(released)
                if writer is not None:
                    writer.store()
                end = yield from wait_steps(started.cell, orders, host.caller, started.clocks, started.meters)
                stop = [fd for fd in (orders.fd, host.caller) if fd is not None]
                end, writable = finish(started, end, stop)
                watch.lap("run")
        return Ended(started, end, writable, watch.lap("teardown"))
    except CalledOff as called:
        called.stage = stage
        raise
    except Failure as failure:
        failure.stage = failure.stage or stage
        raise
    except Exception as error:
        from runner.launch.failures import failure_of  # here: only launches that fail need it

        raise failure_of(error, stage, ran=released is not None) from error


def judge_end(end: End, limits: Limits, planned: Planned | None = None) -> tuple[Outcome, int]:
    """What an ending means, and the exit status `runner exec` passes on."""
    if end.exit.code == 0 and _is_unremarkable(end):
        return GOOD, 0
    from runner.launch.command import wrapped_entry
    from runner.launch.verdict import judge

    # Asked only now: to read the decision of a stored plan takes as long as half a launch.
    if planned is None:
        return judge(end, limits)
    return judge(end, limits, planned.grant.decided_by, wrapped_entry(planned.invocation.command))


def _is_unremarkable(end: End) -> bool:
    """Whether the program ended by itself, without exceeding a limit or breaking its contract."""
    nothing = end.reason is None and end.breach is None and end.limit is None and not end.late
    return nothing and not end.exit.counters.oom_kills and not end.lifted and end.exit.unexecuted is None
