"""A launch up to its plan, for verbs that only look: nothing on the machine is changed."""

from __future__ import annotations

from runner.launch.acquire import open_disk_meter
from runner.launch.failures import as_failure
from runner.launch.plan import plan
from runner.launch.prepare import decide
from runner.launch.read import load
from runner.launch.sources import Sources
from runner.launch.stages import Invocation, Planned, Stopwatch
from sandbox.speed.typed import Mapping


def rehearse(invocation: Invocation, environ: Mapping[str, str]) -> Planned:
    """Make the plan of a launch without launching. Raises Failure."""
    watch = Stopwatch()
    with Sources() as sources:
        decided = decide(load(invocation, watch), environ, watch)
        if decided.policy.packages.signature == "required":
            from runner.launch.signed import rehearse_check

            decided = rehearse_check(decided, environ)
        planned = plan(decided, environ, watch, sources)
        disk = planned.plan.limits.disk
        if disk is not None and not planned.grant.unsandboxed:
            opened = sources.held_for(planned, environ).opened
            with as_failure(planned), open_disk_meter(opened.writable, disk):
                pass
        return planned
