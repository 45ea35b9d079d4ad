"""A parked cell: all of a launch but its last step. The plugin's program starts when the cell is released.

The cell has its cgroups, mounts, namespaces and uid. Its launcher waits for one byte on a pipe whose other
end only this process has, and exits at the end of the file (sandbox/spawn/launcher.py). So a program that was
never released never starts: not if this process is killed, and not if the host is.

The plugin's clocks run from the release. Nothing but the release, an order to end, the caller's end and the
cell's own end is watched before: a parked cell costs as little as a process that sleeps.
"""

from __future__ import annotations

import math
import select
import time
from typing import Protocol

from runner.launch.stages import Started, Stopwatch
from runner.launch.start import clocks_of
from runner.launch.wait import Need, Steps


class Releases(Protocol):
    """The part of a host that releases the plugin."""

    @property
    def fd(self) -> int: ...

    def see_parked(self) -> None:
        """Called when the cell waits. Its release may come from now on."""
        ...

    def is_released(self) -> bool:
        """Whether the release has come. Takes it, and nothing else. Does not block."""
        ...


def parked_steps(
    started: Started, releases: Releases, caller: int | None, watch: Stopwatch
) -> Steps[Started | None]:
    """Wait for the release. Returns the plugin with clocks that run from its release.

    None: it was not started and never will be, because the cell has ended, or must end. Whatever says so is
    left for the wait that follows.
    """
    releases.see_parked()
    watched = {started.cell.pidfd: select.POLLIN, releases.fd: select.POLLIN}
    if caller is not None:
        watched[caller] = select.POLLIN
    began = time.monotonic()
    ready = yield Need(watched)
    if set(ready) != {releases.fd} or not releases.is_released():
        return None
    timings = watch.lap("parked")
    now = time.monotonic()
    clocks = clocks_of(started.planned.plan.limits, now)
    for meter in started.meters:
        meter.due += now - began  # else all would look at once, while the program starts
    if not started.cell.release():
        return None
    # The launcher may have been killed with the byte unread. It reports just before it executes the program.
    until = min(clocks.deadline or math.inf, clocks.launch or math.inf)
    yield Need({**watched, started.cell.report_fd: select.POLLIN}, until)
    if started.cell.has_ended_unexecuted():
        return None
    if started.oom_around is not None:
        started.oom_around.restart()
    return started._replace(clocks=clocks, timings=timings)
