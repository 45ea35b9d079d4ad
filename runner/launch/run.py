"""One launch from the manifest to the end of the plugin's last process, for `runner exec` and the monitor.

    run         from a manifest
    run_plan    from a plan, which may have been stored: everything it names is opened anew
    rehearse    up to the plan, for `runner explain`: nothing on the machine is changed

`run_steps` and `plan_steps` are the same as generators (runner/launch/wait.py), for a process that waits for
several plugins at once.

What `runner exec` and the monitor do differently is in their LaunchHost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from runner.launch.acquire import Acquired, acquire
from runner.launch.plan import Sources, plan, require_contents, require_room
from runner.launch.prepare import decide, load
from runner.launch.stages import Decided, Ended, Invocation, Planned, Stage, Started, Stopwatch
from runner.launch.start import settle, start
from runner.launch.stdio import Plumbing
from runner.launch.verdict import TIMEOUT, failing, judge_error
from runner.launch.wait import Orders, Steps, drive, wait_steps
from runner.outcome import EXEC_DEADLINE, Failure
from sandbox.scopes import AbstractContextManager, ExitStack
from sandbox.typed import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sandbox.cell.contents import Contents


class LaunchHost(Protocol):
    """The side that asked for the launch: `runner exec`, or a monitor."""

    @property
    def caller(self) -> int | None:
        """A descriptor that becomes readable when the asking process has ended."""
        ...

    def see_ready(self, planned: Planned) -> None:
        """Everything is decided and acquired; nothing runs yet."""
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


# Told of a plan that was just made, with its sources held open, before anything on the machine is changed.
SeePlanned = Callable[[Planned, Sources], None]


class CalledOff(BaseException):
    """Raised by a host that wants no launch any more, at any moment before the start."""

    stage: Stage | None = None  # the last that was reached


def run(
    invocation: Invocation,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    contents: Contents | None = None,
) -> Ended:
    """Raises Failure, whatever goes wrong before there is an ending.

    `began`: on the monotonic clock, when the operator asked. The deadline runs from then. `contents`: of the
    cage's memory files.
    """
    return drive(run_steps(invocation, environ, began, host, contents))


def run_steps(
    invocation: Invocation,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    contents: Contents | None = None,
    see_planned: SeePlanned | None = None,
) -> Steps[Ended]:
    """`run`, step by step."""
    watch = Stopwatch()
    stage: Stage | None = None
    with ExitStack() as stack:
        sources = Sources()
        try:
            stage = loaded = load(invocation, watch)
            stage = decided = decide(loaded, environ, watch)
            if _must_be_signed(decided):
                from runner.launch.signed import check_package

                decided = stack.enter_context(check_package(decided, environ, began))
                stage = decided = decided._replace(timings=watch.lap("policy"))
            stack.enter_context(sources)
            stage = planned = plan(decided, environ, watch, sources)
            if see_planned is not None:
                see_planned(planned, sources)
        except CalledOff as called:
            called.stage = stage
            raise
        except Failure:
            raise
        except Exception as error:
            raise Failure(*judge_error(error), stage) from error
        return (yield from plan_steps(planned, environ, began, host, sources, watch, contents))


def _must_be_signed(decided: Decided) -> bool:
    return decided.policy.packages.signature == "required"


def run_plan(
    planned: Planned,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    sources: Sources | None = None,
    watch: Stopwatch | None = None,
    contents: Contents | None = None,
) -> Ended:
    """Carry out a plan. Raises Failure. `sources`: those of a plan that was made in this process just now."""
    return drive(plan_steps(planned, environ, began, host, sources, watch, contents))


def plan_steps(
    planned: Planned,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    sources: Sources | None = None,
    watch: Stopwatch | None = None,
    contents: Contents | None = None,
) -> Steps[Ended]:
    """`run_plan`, step by step."""
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
                raise Failure(TIMEOUT, EXEC_DEADLINE)  # planning alone took that long
            with host.watch_orders() as orders, start(acquired, began, host.connect, contents) as started:
                stage = started = host.see_started(started._replace(timings=watch.lap("launch")))
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
        raise Failure(*judge_error(error), stage) from error


def rehearse(invocation: Invocation, environ: Mapping[str, str]) -> Planned:
    """The plan of a launch that does not take place. Raises Failure."""
    watch = Stopwatch()
    with Sources() as sources:
        decided = decide(load(invocation, watch), environ, watch)
        if _must_be_signed(decided):
            from runner.launch.signed import rehearse_check

            decided = rehearse_check(decided)
        planned = plan(decided, environ, watch, sources)
        if sources.held is not None and not planned.grant.unsandboxed:
            with failing(planned):
                require_room(sources.held.opened, planned.grant.limits.disk)
        return planned
