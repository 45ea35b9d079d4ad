"""One launch from the manifest to the end of the plugin's last process, for `runner exec` and the monitor.

`run` starts from a manifest: it makes a plan and carries it out (runner/launch/carry_out.py). Who only looks
makes the plan by runner/launch/rehearse.py.

`run_steps` is `run` as a generator (runner/launch/wait.py), for a process that waits for several plugins.
"""

from __future__ import annotations

from runner.launch.carry_out import CalledOff, LaunchHost, plan_steps
from runner.launch.failures import failure_of
from runner.launch.plan import plan
from runner.launch.prepare import decide
from runner.launch.read import load
from runner.launch.sources import Sources
from runner.launch.stages import Ended, Invocation, Planned, Stage, Stopwatch
from runner.launch.wait import Steps, drive
from runner.outcome import Failure
from sandbox import look
from sandbox.speed.scopes import ExitStack
from sandbox.speed.typed import TYPE_CHECKING, Callable, Mapping

if TYPE_CHECKING:
    from runner.launch.parked import Releases
    from runner.launch.stored.store import PlanWriter
    from sandbox.cell.contents import Contents


# Called with a plan that was just made, with its sources held open and the questions it rests on, before
# anything on the machine is changed.
SeePlanned = Callable[[Planned, Sources, look.AskedFacts | None], None]


def run(
    invocation: Invocation,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    contents: Contents | None = None,
    writer: PlanWriter | None = None,
) -> Ended:
    """Launch the plugin and wait for its end. All errors before that raise Failure.

    `began`: time of the request, on the monotonic clock. The deadline runs from then. `contents`: of the
    cage's memory files. `writer`: stores the plan for the next launch, once it runs.
    """
    return drive(run_steps(invocation, environ, began, host, contents, writer))


def run_steps(
    invocation: Invocation,
    environ: Mapping[str, str],
    began: float,
    host: LaunchHost,
    contents: Contents | None,
    writer: PlanWriter | None = None,
    see_planned: SeePlanned | None = None,
    releases: Releases | None = None,
) -> Steps[Ended]:
    """`run`, step by step. `releases`: the cell is parked until they let the plugin start."""
    watch = Stopwatch()
    asked: look.AskedFacts | None = None
    stage: Stage | None = None
    with ExitStack() as stack:
        sources = Sources()
        try:
            with ExitStack() as noting:
                if writer is not None or releases is not None:
                    known = None if writer is None else writer.asked
                    asked = noting.enter_context(look.recording(known))
                noted = look.environment(environ)
                stage = loaded = load(invocation, watch)
                stage = decided = decide(loaded, noted, watch)
                if decided.policy.packages.signature == "required":
                    from runner.launch.signed import check_package

                    decided = stack.enter_context(check_package(decided, noted, began))
                    stage = decided = decided._replace(timings=watch.lap("policy"))
                stack.enter_context(sources)
                stage = planned = plan(decided, noted, watch, sources)
            if writer is not None:
                writer.planned = planned
            if see_planned is not None:
                see_planned(planned, sources, asked)
        except CalledOff as called:
            called.stage = stage
            raise
        except Failure:
            raise
        except Exception as error:
            raise failure_of(error, stage) from error
        steps = plan_steps(planned, environ, began, host, sources, watch, contents, writer, releases)
        return (yield from steps)
